"""Makes a target attend to a [`SlotCache`], as an attention implementation of transformers.

Its layers get packed tokens, its attention rows. Its own mask functions (causal, sliding, chunked) are asked about
slots and positions instead of columns.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..models import attention
from ..models.fixed_cache import FixedCache
from ..models.slot_cache import SlotCache, SlotLayout
from .compiled_target import CompiledTarget, one_at_a_time
from .feature_capture import FeatureCapture
from .patched_forward import ELSEWHERE
from .support import TargetSupport
from .transformers_api import ATTENDS

NAME = "hf_dspark_slots"


@dataclass(frozen=True)
class _Pass:
    """The forward pass that is running, and the masks its layers share."""

    layout: SlotLayout | FixedCache
    ignores_caps: bool = False  # as the target's own attention does
    # Each mask is folded once, and kept so that its id is not used again.
    folded: dict[tuple[int, int], tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    usual: dict[torch.device, torch.Tensor | None] = field(default_factory=dict)

    def usual_mask(self, device: torch.device) -> torch.Tensor | None:
        """Return the mask of a layer that is given none."""
        if device not in self.usual:
            self.usual[device] = slot_mask(device=device)
        return self.usual[device]

    def fold(self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        width, group = self.layout.width, attention.folded_group(query, key)
        if (id(mask), group) not in self.folded:
            if mask is None and width > 1:
                folded = attention.causal_mask(width, key.shape[2], group, query.dtype, query.device)
            else:
                folded = attention.fold_mask(mask, group, query.dtype)
            self.folded[id(mask), group] = (mask, folded)
        return self.folded[id(mask), group][1]


class _CompiledPass(_Pass):
    def usual_mask(self, device: torch.device) -> torch.Tensor:
        return slot_mask(device=device)

    def fold(self, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attention.fold_mask(mask, attention.folded_group(query, key), query.dtype)


_running: ContextVar[_Pass | None] = ContextVar("hf_dspark_pass", default=None)
_traced = SimpleNamespace(running=None)  # what is traced cannot read a context variable


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from packed tokens `[1, heads, T, size]` to their rows' slots `[R, key_heads, slots, size]`.

    The signature is that of transformers' attention functions; `softcap` is Gemma 2's, `s_aux` are the sinks of
    GPT-OSS. Without a mask `[R or 1, 1, width, slots]` from [`slot_mask`], it is causal: the last token sees all
    slots. Returns `[1, T, heads, size]`.
    """
    if position_bias is not None:
        raise ValueError("position biases are not supported by hf_dspark's decoding loop")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"{type(module).__name__} gets attention masks that the target makes itself, which a slot cache does not "
            "know: set draft.decoding = DecodingOptions(use_transformers_loop=True)"
        )
    running = _running_pass()
    layout, rows = running.layout, running.layout.to_rows(query)
    if attention_mask is None:
        attention_mask = running.usual_mask(key.device)
    if running.ignores_caps:
        softcap = None
    if softcap is None and s_aux is None and not layout.singly:
        starts_empty = attention_mask is None and key.shape[2] == layout.width > 1
        mask = None if starts_empty else running.fold(attention_mask, query, key)
        attended = attention.grouped_attention(rows, key, value, mask, scaling, is_causal=starts_empty)
    else:
        if attention_mask is None and (layout.singly or layout.width > 1):
            shape = (1, 1, layout.width, key.shape[2])
            attention_mask = torch.ones(shape, dtype=torch.bool, device=key.device).tril(key.shape[2] - layout.width)
        attend = _attend_singly if layout.singly else attention.attend_with_extras
        attended = attend(rows, key, value, attention_mask, scaling, softcap, s_aux)
    return layout.to_packed(attended).contiguous(), None  # some models view it


def _attend_singly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *extras: Any
) -> torch.Tensor:
    """Attend from one column after the other, to keys and values that are zero where it sees nothing."""
    columns = []
    for column in range(query.shape[2]):
        visible = mask[:, :, column : column + 1]
        seen = [states.masked_fill(~visible.transpose(2, 3), 0.0) for states in (key, value)]
        columns.append(attention.attend_with_extras(query[:, :, column : column + 1], *seen, visible, *extras))
    return torch.cat(columns, dim=2)


def slot_mask(
    *args: Any, mask_function: Callable = causal_mask_function, device: torch.device | str = "cpu", **kwargs: Any
) -> torch.Tensor | None:
    """Return what the target's mask function says of positions and slots, `[R, 1, width, slots]`; `None`: causal."""
    layout = _running_pass().layout
    if isinstance(layout, FixedCache):
        return layout.mask(mask_function)
    if mask_function is causal_mask_function and layout.parents is None:
        starts_empty = not any(layout.starts) and layout.width > 1
        if starts_empty or (layout.num_rows == 1 and layout.width <= attention.FOLDED_WIDTH):
            return None
    zero = torch.zeros((), dtype=torch.long, device=device)  # only padding would tell rows apart, and there is none
    positions = layout.row_positions(torch.device(device))[:, None, :, None]
    if layout.parents is not None:
        key_positions, visible = layout.slots_of_trees(torch.device(device))
        return mask_function(zero, zero, positions, key_positions[:, None, None]) & visible[:, None]
    positions = positions.clamp(max=layout.end - 1)  # columns without a token: some masks look their positions up
    slots = torch.arange(layout.end, device=device)[None, None, None]
    return mask_function(zero, zero, positions, slots).expand(layout.num_rows, 1, layout.width, layout.end)


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, slot_mask)


class PackedTarget:
    """A target that runs packed passes. Each pass switches it to slots and restores it: between two passes, and after
    an exception or interrupt in one, it is as it was. Other threads that decode with it wait. A capture is attached
    during each pass."""

    def __init__(
        self,
        support: TargetSupport,
        capture: FeatureCapture | None = None,
        compiled: CompiledTarget | None = None,
    ) -> None:
        self._target, self._support, self._capture, self._compiled = support.target, support, capture, compiled
        self.lock = support.switch.lock

    def __call__(self, cache: SlotCache, layout: SlotLayout, **inputs: Any) -> Any:
        """Run one pass over packed tokens, `input_ids [1, T]` or `inputs_embeds [1, T, d]`; returns its output."""
        with self.lock:  # built-in locks are released whenever an interrupt comes; context managers in Python are not
            try:
                try:
                    if self._compiled is not None and self._compiled.takes(layout, inputs):
                        try:
                            return self._run_compiled(cache, layout, inputs)
                        except Exception as error:  # of the compiler, or memory: nothing is committed yet
                            self._compiled.give_up(error)
                    self._enter(cache, layout)
                    with cache.writing(layout):
                        inputs[self._support.cache_argument] = cache
                        return self._target(**inputs, use_cache=True, return_dict=True)
                finally:
                    self.restore()
            finally:
                self.restore()  # again, for an interrupt while it leaves

    def _run_compiled(self, cache: SlotCache, layout: SlotLayout, inputs: dict[str, Any]) -> Any:
        with one_at_a_time:
            self._compiled.cache.begin(cache, layout)
            _traced.running = self._enter(cache, layout, self._compiled.cache)
            try:
                return self._compiled.run(self._target, self._capture, layout.num_tokens, inputs)
            finally:
                _traced.running = None

    def _enter(self, cache: SlotCache, layout: SlotLayout, fixed: FixedCache | None = None) -> _Pass:
        self.restore()  # what a pass left that could not restore it
        support, originals = self._support, self._support.switch.originals
        originals[:] = [(each, each[ATTENDS]) for each in map(vars, support.attention_configs)]
        for layer in support.by_rows:  # they note the implementation that is the target's own
            layer.attach(cache, layout)
        for attributes, _ in originals:
            attributes[ATTENDS] = NAME
        if self._capture is not None:
            self._capture.attach(is_compiled=fixed is not None)
        ignores_caps = support.switch.ignores_caps
        running = _Pass(layout, ignores_caps) if fixed is None else _CompiledPass(fixed, ignores_caps)
        _running.set(running)
        return running

    def restore(self) -> None:
        if not self._support.switch.originals:  # filled before anything else is switched, and emptied last
            return
        _running.set(None)
        if self._capture is not None:
            self._capture.restore()
        for layer in self._support.by_rows:
            layer.restore()
        self._support.switch.restore()


def _running_pass() -> _Pass:
    running = _traced.running if torch.compiler.is_compiling() else None
    running = _running.get() if running is None else running
    if running is None:
        raise RuntimeError(ELSEWHERE)
    return running
