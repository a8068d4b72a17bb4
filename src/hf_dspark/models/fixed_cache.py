"""Packed passes as compiled graphs read them: every number of a round is in a tensor, so that no graph depends on it.

A graph is compiled once for all numbers of rows, tokens and slots: on a CPU a pass has the size that it has. CUDA
graphs are recorded for each size, so on accelerators a pass is padded to one of a few.
"""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from ..sampling.transfers import to_device
from .slot_cache import SLOT_MULTIPLE, SlotCache, SlotLayout

# Of rows, on accelerators. A graph for single tokens would be one of its own.
WIDTHS = (2, 4, 8, 16, 32, 64)
BACKEND = "inductor"


class FixedCache(Cache):
    """What a compiled pass reads of a [`SlotCache`] and of its layout; the graph's inputs, replaced in each pass.

    Padding is written to a slot that no token sees, and what it computes is dropped. Columns of a row that hold no
    token repeat its last one.

    Attributes:
        rows, slots, positions (`torch.Tensor`): Where each token is written, and its position, `[T]`.
        token_of_place, place_of_token (`torch.Tensor`): Which token each column of a row holds, `[R, W]`, and the
            place of each token among them, `[T]`.
        starts, depths, sees (`torch.Tensor`): First slot of each row, `[R]`, how deep each column is, `[R, W]`, and
            which columns it sees, `[R, W, W]`.
        attended (`torch.Tensor`): The slots that are looked at, 0, 1, ..., `[S]`.
    """

    singly = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.stores: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self, cache: SlotCache, layout: SlotLayout, device: torch.device) -> None:
        """Take over the layout of a pass over the first rows of a cache, which gets room for the whole call."""
        num_tokens, width = fixed_size(layout, device)
        end, most = round_up(layout.end), round_up(max(layout.end, cache.limit or 0))
        cache.grow(end + 1, most + SLOT_MULTIPLE)
        rows = layout.num_rows
        self.stores = {name: store if len(store) == rows else store[:rows] for name, store in cache.stores.items()}
        parts = _numbers_of(layout, num_tokens, width, min(store.shape[2] for store in self.stores.values()) - 1)
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts.values()]))
        split = to_device(flat, device).split([part.size for part in parts.values()])
        for (name, part), numbers in zip(parts.items(), split, strict=True):
            setattr(self, name, mark_dynamic(numbers.view(part.shape), *range(part.ndim)))
        self.attended = mark_dynamic(torch.arange(end, device=device), 0)
        for store in self.stores.values():
            if not hasattr(store, "_dynamo_static_input_type"):
                torch._dynamo.mark_static_address(store)  # else CUDA graphs would copy it, and write into the copy
                mark_dynamic(store, 0, 2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write packed keys and values `[1, heads, T, size]`, and return those of all rows, `[R, heads, S, size]`."""
        written = []
        for name, states in (("keys", key_states), ("values", value_states)):
            store = self.stores[layer_idx, name]
            store[self.rows, :, self.slots] = states[0].transpose(0, 1).to(store.dtype)
            written.append(store[:, :, : self.attended.shape[0]])
        return tuple(written)

    def to_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Bring packed states `[1, heads, T, size]` into rows `[R, heads, W, size]`."""
        if self.depths.shape[0] == 1:
            return states
        return states[0][:, self.token_of_place].transpose(0, 1)

    def to_packed(self, states: torch.Tensor) -> torch.Tensor:
        """Bring states in rows, `[R, heads, W, size]`, back into the packed sequence `[1, T, heads, size]`."""
        by_token = states.transpose(1, 2)
        return by_token if self.depths.shape[0] == 1 else by_token.flatten(0, 1)[self.place_of_token][None]

    def mask(self, mask_function: Callable) -> torch.Tensor:
        """Return which slots each column sees if a function of positions lets it, `[R, 1, W, S]`."""
        starts, width = self.starts[:, None], self.depths.shape[1]
        columns = self.attended - starts
        is_node, columns = (columns >= 0) & (columns < width), columns.clamp(0, width - 1)
        positions = torch.where(is_node, starts + self.depths.gather(1, columns), self.attended)
        among_nodes = self.sees.gather(2, columns[:, None].expand(-1, width, -1)) > 0
        visible = torch.where(is_node[:, None], among_nodes, (self.attended < starts)[:, None])
        zero = torch.zeros_like(self.attended[0])  # only padding would tell rows apart, and there is none
        asked = mask_function(zero, zero, (starts + self.depths)[:, None, :, None], positions[:, None, None])
        return asked & visible[:, None]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.attended.shape[0], 0


def fixed_size(layout: SlotLayout, device: torch.device) -> tuple[int, int]:
    """Return how many tokens a compiled pass has, and how many columns its rows."""
    width, num_tokens = max(layout.width, WIDTHS[0]), layout.num_tokens
    if device.type != "cpu":
        width = next(each for each in WIDTHS if each >= width)
        num_tokens = min(layout.num_rows * width, 1 << (num_tokens - 1).bit_length())
    return width if layout.num_rows == 1 else num_tokens, width


def round_up(slots: int) -> int:
    """Return a number of slots out of few, at most a quarter larger."""
    multiple = max(SLOT_MULTIPLE, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // multiple) * multiple


def _numbers_of(layout: SlotLayout, num_tokens: int, width: int, unseen: int) -> dict[str, np.ndarray]:
    counts, starts, firsts = map(np.array, (layout.counts, layout.starts, layout.first_tokens))
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(layout.num_tokens) - firsts[rows]
    padding = (0, num_tokens - layout.num_tokens)
    every = np.minimum(np.arange(width), counts[:, None] - 1)
    depths, sees = every, np.broadcast_to(np.tri(width, dtype=np.int64), (len(counts), width, width))
    if layout.parents is not None:
        depths, sees = (part.numpy() for part in layout.tree)
        depths = np.take_along_axis(depths, every, axis=1)
        sees = np.take_along_axis(sees.astype(np.int64), every[..., None], axis=1)
        sees = np.pad(sees, ((0, 0), (0, 0), (0, width - sees.shape[2])))
    return {
        "rows": np.pad(rows, padding),
        "slots": np.pad(starts[rows] + columns, padding, constant_values=unseen),
        "positions": np.pad(starts[rows] + depths[rows, columns], padding),
        "token_of_place": firsts[:, None] + every,
        "place_of_token": np.pad(rows * width + columns, padding),
        "starts": starts,
        "depths": depths,
        "sees": sees,
    }


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))
    return tensor


def compiled(function: Callable, device: torch.device) -> Callable:
    """Compile a function as a whole; its graphs belong to what is returned, and go with it."""
    # Dynamo keeps graphs by code object, and a number of them at most.
    own = types.FunctionType(function.__code__.replace(), function.__globals__)
    options = {"triton.cudagraphs": True} if BACKEND == "inductor" and device.type == "cuda" else None
    return torch.compile(own, fullgraph=True, backend=BACKEND, options=options)
