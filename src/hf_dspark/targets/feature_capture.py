"""Captures the target features that a draft reads, by forward hooks on the tapped decoder layers.

Hooks give the raw outputs of these layers alone, and leave a user's own `output_hidden_states` as it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from .support import TargetSupport

Hook = tuple[nn.Module, Callable, bool]  # of which module, and whether it runs before it, with keyword arguments


class FeatureCapture:
    """While entered or attached, keeps the tapped hidden states of the latest pass through a target's layers.

    Tapped are `target_layer_ids`: -1 for the embedding output (the input of layer 0), i for the output of layer i; of
    the last layer, what transformers reports, after the final norm, but for DeepSeek-V4.
    """

    def __init__(self, support: TargetSupport, target_layer_ids: Sequence[int]) -> None:
        layers, self._support, self._size = support.layers, support, support.text.hidden_size
        self._shape: tuple[int, int] | None = None  # rows and tokens of the latest pass
        self.target_layer_ids = tuple(target_layer_ids)
        self._captured: dict[int, torch.Tensor] = {}
        self._thread = 0  # that runs the passes: others may run their own at the same time
        # DeepSeek-V4's draft reads the mean of the last streams.
        whole = len(layers) - 1 in self.target_layer_ids and support.text.model_type != "deepseek_v4"
        places = [*layers[:-1], support.decoder] if whole else layers
        tapped = [(layer_id, places[max(0, layer_id)]) for layer_id in self.target_layer_ids]
        taps = [(layer, partial(self._keep, layer_id), layer_id == -1) for layer_id, layer in tapped]
        self._hooks: Sequence[Hook] = [(support.decoder, self._keep_shape, True), *taps]
        self._traced = [(layer, partial(_keep_traced, layer_id), layer_id == -1) for layer_id, layer in tapped]
        self._attached: Sequence[Hook] = ()

    def attach(self, is_compiled: bool = False) -> None:
        """Put the hooks on; those of a compiled pass are traced into its graph, which gives back what they keep."""
        self._thread, self._attached = get_ident(), self._traced if is_compiled else self._hooks
        for hook in self._attached:
            add_hook(*hook)

    def restore(self) -> None:
        """Take all hooks off; what was captured stays."""
        for hook in self._attached:
            remove_hook(*hook)
        self._attached = ()

    def __enter__(self) -> "FeatureCapture":
        try:
            self.attach()
        except BaseException:  # an interrupt: then __exit__ is not called
            self.restore()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.restore()
        self._captured.clear()

    def keep(self, states: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Take the states that a compiled pass over packed tokens gave back."""
        self._shape, self._captured = (1, num_tokens), dict(zip(self.target_layer_ids, states, strict=True))

    def _keep_shape(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        if get_ident() == self._thread:
            self._shape = next((tuple(each.shape[:2]) for each in given if each is not None), None)

    def _keep(self, layer_id: int, module: nn.Module, args: tuple, found: Any) -> None:
        """Keep a layer's output; before layer 0, what it is given: then `found` are its keyword arguments."""
        if get_ident() == self._thread:
            self._captured[layer_id] = _states(layer_id, args, found)

    def _features_of(self, layer_id: int) -> torch.Tensor:
        """Return one vector for each position, `[B, S, d]`; streams are averaged."""
        states = self._captured[layer_id]
        if states.dim() == 4:
            # Gemma 3n stacks streams first, [streams, B, S, d]; hyper-connections have [B, S, streams, d].
            are_first = self._shape == states.shape[1:3] and self._shape != states.shape[:2]
            states = states.mean(dim=0 if are_first else 2)
        shape = (*(self._shape or states.shape[:2]), self._size)
        if states.shape != shape:
            raise ValueError(
                f"layer {layer_id} of {self._support.name} gave features of shape {list(states.shape)}, a draft reads "
                f"one vector for each position, {list(shape)}: make a draft that taps other layers (target_layer_ids)"
            )
        return states

    def take(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the features `[B, S, m*d]` of the latest forward pass, and forget them.

        The tapped layers may be on several devices. DSpark Eq. 2, inside the brackets.
        """
        missing = [layer_id for layer_id in self.target_layer_ids if layer_id not in self._captured]
        if missing:
            raise RuntimeError(f"the target ran no forward pass through its layers {missing} since the last capture")
        if not self.target_layer_ids:  # the draft reads tokens alone
            return torch.empty(*self._shape, 0, device=device, dtype=dtype)
        parts = [self._features_of(layer_id).to(device) for layer_id in self.target_layer_ids]
        self._captured.clear()
        return torch.cat(parts, dim=-1).to(dtype)


TRACED: dict[int, torch.Tensor] = {}  # empty but while a graph is traced


def _keep_traced(layer_id: int, module: nn.Module, args: tuple, found: Any) -> None:
    TRACED[layer_id] = _states(layer_id, args, found)


def _states(layer_id: int, args: tuple, found: Any) -> torch.Tensor:
    if layer_id == -1:
        found = args[0] if args else found["hidden_states"]
    return found[0] if isinstance(found, (tuple, list, ModelOutput)) else found


def add_hook(module: nn.Module, hook: Callable, before: bool) -> None:
    """Add a forward hook. PyTorch would make a handle, which takes time, and which an interrupt may lose."""
    if before:
        module._forward_pre_hooks_with_kwargs[id(hook)] = True
    (module._forward_pre_hooks if before else module._forward_hooks)[id(hook)] = hook


def remove_hook(module: nn.Module, hook: Callable, before: bool) -> None:
    """Remove a hook of [`add_hook`], if it is there."""
    (module._forward_pre_hooks if before else module._forward_hooks).pop(id(hook), None)
    if before:
        module._forward_pre_hooks_with_kwargs.pop(id(hook), None)
