"""Capture the target features a draft reads, by forward hooks on the tapped decoder layers.

Hooks give the raw layer outputs on every transformers version, keep no other layer alive, and leave a user's own
`output_hidden_states` alone.
"""

from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, whatever the family calls them.

    Raises:
        ValueError: If no list of `num_hidden_layers` modules is found in `target.get_decoder()`.
    """
    decoder = target.get_decoder()
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (path.count("."), module)
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if lists:
        return min(lists, key=lambda found: found[0])[1]  # a vision tower of the same depth is further inside
    raise ValueError(
        f"no list of {depth} decoder layers found in {type(decoder).__name__}: DSpark taps decoder layers by forward "
        "hooks and does not know where this architecture keeps them"
    )


class FeatureCapture:
    """While entered, keeps the tapped hidden states of the target's latest forward pass.

    Args:
        target (`PreTrainedModel`): The causal LM.
        target_layer_ids (`list[int]`): -1 for the embedding output (the input of layer 0), i for the output of layer
            i.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int]) -> None:
        self._layers = decoder_layers(target)
        self._target_layer_ids = list(target_layer_ids)
        self._captured: dict[int, torch.Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "FeatureCapture":
        for layer_id in self._target_layer_ids:
            if layer_id == -1:
                handle = self._layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                handle = self._layers[layer_id].register_forward_hook(self._keeper(layer_id))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._captured.clear()

    def _keep_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._captured[-1] = args[0] if args else kwargs["hidden_states"]

    def _keeper(self, layer_id: int):
        def keep_output(module: nn.Module, args: tuple, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep_output

    def take(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the features of the latest forward pass and forget them.

        Args:
            device (`torch.device`): Where the draft lives; the tapped layers may live on several devices.
            dtype (`torch.dtype`): The draft's.

        Returns:
            `torch.Tensor` of shape `[B, S, m*d]`: the tapped layers, concatenated. DSpark Eq. 2, inside the brackets.
        """
        missing = [layer_id for layer_id in self._target_layer_ids if layer_id not in self._captured]
        if missing:
            raise RuntimeError(f"the target ran no forward pass through its layers {missing} since the last capture")
        parts = [self._captured[layer_id].to(device=device, dtype=dtype) for layer_id in self._target_layer_ids]
        self._captured.clear()
        return torch.cat(parts, dim=-1)
