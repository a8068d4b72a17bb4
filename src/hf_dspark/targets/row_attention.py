"""Attention that chooses what it sees by an indexer of its own, row by row: it keeps more than keys and values.

Each row has a cache layer of transformers for it, which is cut back to the committed tokens before each pass.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from ..models.slot_cache import RowState, SlotCache, SlotLayout
from .patched_forward import Replacement, part_of, restore, successive


class RowAttention:
    """Runs one attention layer row by row in packed passes, while it is attached. The config, of its target's text
    model, says what kind of cache it needs."""

    def __init__(self, name: str, module: nn.Module, config: PreTrainedConfig) -> None:
        self._name, self.module, self._config = name, module, config

    def attach(self, cache: SlotCache, layout: SlotLayout) -> None:
        self._implementation = self.module.config._attn_implementation
        self._cache, self._layout = cache, layout
        Replacement(self.module, self._forward)

    def restore(self) -> None:
        restore(self.module)
        self._cache = self._layout = None

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout, during, outputs = self._layout, self.module.config._attn_implementation, []
        self.module.config._attn_implementation = self._implementation  # slots are for packed rows
        try:
            for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
                if count == 0:
                    continue
                cache = self._cache_of(layout.first_row + row, start, count)
                size, first = 1 if layout.singly else count, layout.first_tokens[row]
                for place in range(first, first + count, size):
                    inputs = part_of((args, kwargs), layout.num_tokens, place, size)
                    own_args, own_kwargs = tree_map(
                        lambda leaf, cache=cache: cache if leaf is self._cache else leaf, inputs
                    )
                    outputs.append(own(*own_args, **own_kwargs))
        finally:
            self.module.config._attn_implementation = during
        return successive(outputs)

    def _cache_of(self, row: int, start: int, count: int) -> DynamicCache:
        """Return the row's cache with its committed tokens alone, and note that `count` more come."""
        states = self._cache.row_states[row]
        if self._name not in states:
            states[self._name] = RowState(waiting=DynamicCache(config=self._config))
        state = states[self._name]
        layer = state.waiting.layers[self.module.layer_idx]
        surplus = layer.get_seq_length() - start
        if surplus > 0:
            layer.crop(-surplus)
        state.num_waiting = start + count
        return state.waiting
