"""Packed passes of targets and drafts as compiled graphs read them: every number of a round is in a tensor, so that no
graph depends on it.

A graph is compiled once for all numbers of rows, tokens and slots: on a CPU a pass has the size that it has. CUDA
graphs are recorded for each size, so on accelerators a pass is padded to one of a few.
"""

import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from ..sampling.transfers import to_device
from .block_attention import attend_as, folded_for, seen_slots
from .slot_cache import SLOT_MULTIPLE, SlotCache, SlotLayout

# Of rows, on accelerators. A graph for single tokens would be one of its own.
WIDTHS = (2, 4, 8, 16, 32, 64)
BACKEND = "inductor"


class FixedSlots(Cache):
    """What a compiled pass reads of a [`SlotCache`], the graph's inputs, replaced in each pass.

    Padding is written to a slot that no token sees, and what it computes is dropped.

    Attributes:
        rows, slots, positions (`torch.Tensor`): Where each packed token is written, and its position, `[T]`.
        starts (`torch.Tensor`): The first slot of each row's own tokens, `[R]`.
        attended (`torch.Tensor`): The slots that are looked at, 0, 1, ..., `[S]`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self.device, self.keeps_memory = device, device.type != "cpu"
        self.stores: dict[tuple[int, str], torch.Tensor] = {}
        self._kept: dict[tuple[int, str], torch.Tensor] = {}  # of the latest cache on an accelerator
        self._latest: Callable[[], SlotCache | None] = lambda: None

    def _keep(self, cache: SlotCache) -> None:
        """CUDA graphs are recorded for addresses: a cache gets the memory of an earlier one that is gone, if it has
        room."""
        for name, store in cache.stores.items() if self._latest() is None else ():
            kept = self._kept.get(name, store)
            same_kind = kept.dtype == store.dtype and kept.shape[:2] == store.shape[:2]
            if kept is not store and same_kind and kept.shape[2] >= store.shape[2]:
                kept.zero_()  # see `SlotCache.clear`
                kept[:, :, : store.shape[2]] = store
                cache.stores[name] = kept
        self._kept, self._latest = dict(cache.stores), weakref.ref(cache)

    def take(self, cache: SlotCache, num_rows: int, end: int, numbers: Callable[[int], dict[str, np.ndarray]]) -> None:
        """Take over the first rows of a cache, which gets room for the whole call, and the numbers of a pass up to
        some slot, which are made of the slot that no token sees."""
        longest, end = end, round_up(end)
        cache.grow(end + 1, round_up(max(longest, cache.limit or 0)) + SLOT_MULTIPLE)
        if self.keeps_memory:
            self._keep(cache)
        self.stores = {name: each if len(each) == num_rows else each[:num_rows] for name, each in cache.stores.items()}
        parts = numbers(min(store.shape[2] for store in self.stores.values()) - 1)
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts.values()]))
        split = to_device(flat, self.device).split([part.size for part in parts.values()])
        for (name, part), found in zip(parts.items(), split, strict=True):
            setattr(self, name, mark_dynamic(found.view(part.shape), *range(part.ndim)))
        self.attended = mark_dynamic(torch.arange(end, device=self.device), 0)
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
            # They differ in a conversation that began under autocast.
            written.append(store[:, :, : self.attended.shape[0]].to(states.dtype))
        return tuple(written)


class FixedBlocks(FixedSlots):
    """A cached pass of a draft, see `CachedPass`: new context of all rows, then the slots of their blocks.

    Attributes:
        firsts (`torch.Tensor`): The first slot that each row sees, `[R]`.
    """

    queries = None  # see `CachedPass`

    def __init__(self, device: torch.device, num_slots: int) -> None:
        super().__init__(device)
        self.num_slots = num_slots

    def begin(self, cache: SlotCache, counts: Sequence[int], num_features: int) -> None:
        """Take over a pass that reads so many features of each row, padded to `num_features` in all."""
        size, counts = self.num_slots, np.array(counts)
        starts, offsets = (np.array(part[: len(counts)]) for part in (cache.lengths, cache.offsets))
        context = _packed(starts, counts, num_features)
        blocks = _packed(starts + counts, np.full_like(counts, size), size * len(counts))

        def numbers(unseen: int) -> dict[str, np.ndarray]:
            rows, slots = (np.concatenate(parts) for parts in zip(context, blocks, strict=True))
            return {
                "rows": rows,
                "slots": np.where(slots < 0, unseen, slots),
                "positions": slots.clip(0) + offsets[rows],
                "starts": starts + counts,
                "firsts": np.array(cache.first_seen(starts + counts)),
            }

        self.take(cache, len(counts), int((starts + counts).max()) + size, numbers)

    def position_ids(self, device: torch.device) -> torch.Tensor:
        return self.positions[None]

    def attend(self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write keys and values of the packed rows, and attend from those of the blocks: `[1, Q, heads, size]`."""
        key, value = self.update(key, value, layer.layer_idx)
        visible = seen_slots(self.starts, self.attended, self.num_slots, layer.window, firsts=self.firsts)
        rows = query[0].unflatten(1, (-1, self.num_slots)).transpose(0, 1)
        attended = attend_as(layer, rows, key, value, folded_for(layer, visible, query, key))
        return attended.transpose(1, 2).flatten(0, 1)[None]


class FixedCache(FixedSlots):
    """The cache and the layout of a compiled pass of a target. Columns of a row that hold no token repeat its last
    one.

    Attributes:
        token_of_place, place_of_token (`torch.Tensor`): Which token each column of a row holds, `[R, W]`, and the
            place of each token among them, `[T]`.
        depths, sees (`torch.Tensor`): How deep each column is, `[R, W]`, and which columns it sees, `[R, W, W]`.
    """

    singly = False

    def begin(self, cache: SlotCache, layout: SlotLayout) -> None:
        """Take over the layout of a pass over the first rows of a cache."""
        num_tokens, width = fixed_size(layout, self.device)
        self.take(cache, layout.num_rows, layout.end, partial(_numbers_of, layout, num_tokens, width))

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


def _packed(starts: np.ndarray, counts: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and slot of so many tokens, of each row in turn; -1 is the slot of padding."""
    rows, slots = np.zeros(num_tokens, dtype=np.int64), np.full(num_tokens, -1)
    own = np.repeat(np.arange(len(counts)), counts)
    rows[: len(own)] = own
    slots[: len(own)] = np.arange(len(own)) + (starts + counts - counts.cumsum())[own]
    return rows, slots


def _numbers_of(layout: SlotLayout, num_tokens: int, width: int, unseen: int) -> dict[str, np.ndarray]:
    counts, starts, firsts = map(np.array, (layout.counts, layout.starts, layout.first_tokens))
    rows, slots = _packed(starts, counts, num_tokens)
    is_token = slots >= 0
    columns = np.where(is_token, slots - starts[rows], 0)
    every = np.minimum(np.arange(width), counts[:, None] - 1)
    depths, sees = every, np.broadcast_to(np.tri(width, dtype=np.int64), (len(counts), width, width))
    if layout.parents is not None:
        depths, sees = (part.numpy() for part in layout.tree)
        depths = np.take_along_axis(depths, every, axis=1)
        sees = np.take_along_axis(sees.astype(np.int64), every[..., None], axis=1)
        sees = np.pad(sees, ((0, 0), (0, 0), (0, width - sees.shape[2])))
    return {
        "rows": rows,
        "slots": np.where(is_token, slots, unseen),
        "positions": np.where(is_token, starts[rows] + depths[rows, columns], 0),
        "token_of_place": firsts[:, None] + every,
        "place_of_token": rows * width + columns,
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
