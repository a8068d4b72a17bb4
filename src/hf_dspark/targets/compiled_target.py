"""Runs verification passes of a target as compiled graphs: all its layers are one graph, for all rounds.

The first passes of a target wait for the compiler. What cannot be compiled is run as without it.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cpu import in_graphs
from ..files import one_line
from ..models.fixed_cache import WIDTHS, FixedCache, compiled, mark_dynamic
from ..models.slot_cache import SlotLayout
from .feature_capture import TRACED, FeatureCapture
from .support import LENGTH_DEPENDENT_ROPE, TargetSupport

BY_TOKEN = {"input_ids", "token_type_ids"}

_known: "weakref.WeakKeyDictionary[TargetSupport, CompiledTarget]" = weakref.WeakKeyDictionary()


# Graphs share memory, and cannot read a context variable: passes of several threads wait for each other.
one_at_a_time = threading.RLock()
MOST_GRAPHS = 64  # of one model; PyTorch's own limit is 8


class CompiledPasses:
    """A function that is compiled as a whole for one model, whose graphs go with it, and why it is not."""

    def __init__(self, name: str, function: Callable, device: torch.device, obstacle: str | None) -> None:
        self.obstacle = obstacle  # why passes are not compiled
        self.device, self._name, self._has_warned = device, name, False
        self._compiled = compiled(function, device)
        # Sizes that happen to be equal in the first pass need not be so in others.
        self._equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
        self._more_graphs = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)

    def _run(self, *args: Any) -> Any:
        in_graphs.wanted = True
        try:
            if self.device.type != "cpu":
                torch.compiler.cudagraph_mark_step_begin()
            with self._equal_sizes, self._more_graphs:
                return self._compiled(*args)
        finally:
            in_graphs.wanted = False

    def give_up(self, error: Exception) -> None:
        """Say why a pass failed, and compile no other, unless memory was short: it is repeated without."""
        reason = f"it could not be compiled ({type(error).__name__}: {one_line(error, size=300)})"
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            self.obstacle = reason
        self.warn(reason)

    def warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"DecodingOptions(compile=...): {self._name} is decoded without compiled graphs, because {reason}. "
                "The tokens are the same",
                stacklevel=4,
            )


class CompiledTarget(CompiledPasses):
    """The compiled passes of one target. Get it by [`CompiledTarget.of`]."""

    def __init__(self, support: TargetSupport) -> None:
        super().__init__(support.name, _run, support.input_device, obstacle_of(support))
        self._cache_argument = support.cache_argument
        self.cache = FixedCache(self.device)

    @classmethod
    def of(cls, support: TargetSupport, wanted: bool | str) -> "CompiledTarget | None":
        """Return those of a target, made once on its device, if a call wants them: `True`, or `"auto"` on a GPU."""
        if not wanted or (wanted == "auto" and support.input_device.type != "cuda"):
            return None
        if support not in _known or _known[support].device != support.input_device:
            _known[support] = cls(support)
        found, reason = _known[support], "hooks are around its modules" if support.is_hooked else None
        reason = found.obstacle or reason
        if reason is not None and wanted != "auto":
            found.warn(reason)
        return found if reason is None else None

    def takes(self, layout: SlotLayout, inputs: dict[str, Any]) -> bool:
        """Tell whether a pass can be compiled: drafts, of which nothing but logits and features is wanted."""
        return (
            self.obstacle is None
            and not (layout.is_prefill or layout.singly or layout.first_row)
            and layout.width <= WIDTHS[-1]
            and "input_ids" in inputs
            and not inputs.get("output_hidden_states")
            and not torch.is_autocast_enabled(self.device.type)
        )

    def run(
        self, target: PreTrainedModel, capture: FeatureCapture | None, num_tokens: int, inputs: dict[str, Any]
    ) -> SimpleNamespace:
        """Run the pass over packed tokens, and return its logits as the target does; the capture gets the features."""
        fixed, layer_ids = self.cache, () if capture is None else capture.target_layer_ids
        padding = (0, len(fixed.rows) - num_tokens)
        by_token = {name: nn.functional.pad(inputs[name], padding) for name in inputs.keys() & BY_TOKEN}
        by_token["position_ids"] = fixed.positions[None]
        inputs = inputs | {name: mark_dynamic(part, 1) for name, part in by_token.items()}
        try:
            logits, states = self._run(target, fixed, self._cache_argument, layer_ids, inputs)
        finally:
            fixed.stores = {}
            TRACED.clear()
        if self.device.type != "cpu":  # the next pass writes where this one did
            logits, states = logits.clone(), [part.clone() for part in states]
        if capture is not None:
            capture.keep(states, len(fixed.rows))
        return SimpleNamespace(logits=logits[:, :num_tokens], hidden_states=None)


def _run(
    target: PreTrainedModel, cache: FixedCache, cache_argument: str, layer_ids: tuple[int, ...], inputs: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = target(**inputs, **{cache_argument: cache}, use_cache=True, return_dict=True).logits
    return logits, [TRACED.pop(layer_id) for layer_id in layer_ids]


def obstacle_of(support: TargetSupport) -> str | None:
    """Return why passes of a target cannot be compiled, as far as that is known before it is tried."""
    target, modules = support.target, (support.target, *support.modules)
    if any(hasattr(module, "_hf_hook") for module in modules):
        return "accelerate moves weights or inputs between devices"
    if getattr(target, "hf_quantizer", None) is not None or support.has_outliers:
        return "its weights are quantised"
    forwards = (getattr(module.forward, "__func__", module.forward) for module in modules)
    if target._compiled_call_impl or any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards):
        return "it is compiled already"
    if support.by_rows:
        return "it keeps recurrent states, or attends row by row"
    if any(part.get("rope_type") in LENGTH_DEPENDENT_ROPE for part in support.rope_parameters):
        return "its rotary frequencies depend on the longest row"
    return None
