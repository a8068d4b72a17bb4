"""A preallocated key-value cache for rows of different lengths: slot = logical position, but for a draft's context,
of which what its window has left is dropped.

A rejected token needs no rollback: its slot lies after the committed length and is written again before it is read.
Serves the target and the draft.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, DynamicCache

from ..sampling.transfers import first_integers, to_device

GROWTH = 1.25
SLOT_MULTIPLE = 64


@dataclass(frozen=True)
class SlotLayout:
    """Where the tokens of one packed forward pass belong: row by row, each row's tokens in successive slots.

    Packed means that the tokens of all rows stand in one sequence `[1, T, ...]` without padding, so that the layers
    pay for no token that is not there. Only attention needs rows, `[R, ...]`, padded on the right.
    """

    starts: tuple[int, ...]  # first slot of each row
    counts: tuple[int, ...]  # tokens of each row in this pass; 0 where a row has come to its end
    first_row: int = 0  # cache row of the first row; the others follow it
    is_prefill: bool = False  # whether all tokens of this pass will be committed, as a prompt's are
    # Of trees: the column of each token's parent in its row, 0 for the first one. `None`: each follows the one before.
    parents: tuple[tuple[int, ...], ...] | None = None
    # Whether each token is computed by itself: a masked NaN spreads to the other tokens of its pass.
    singly: bool = False
    # Of this pass: its rows and tokens, the tokens of its longest row, and where each row starts among them. All of it
    # is asked for in each layer.
    num_rows: int = field(init=False, compare=False)
    num_tokens: int = field(init=False, compare=False)
    width: int = field(init=False, compare=False)
    first_tokens: tuple[int, ...] = field(init=False, compare=False)
    end: int = field(init=False, compare=False)  # slots that hold something after it, in the longest row
    _by_device: dict[Any, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        first_tokens = (0, *accumulate(self.counts))
        vars(self).update(
            num_rows=len(self.counts),
            num_tokens=first_tokens[-1],
            width=max(self.counts),
            first_tokens=first_tokens[:-1],
            end=max(map(add, self.starts, self.counts)),
        )

    def _index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return row in this pass, column and slot of each token, `[T]` each; made once per device."""
        if device not in self._by_device:
            per_row = (self.counts, self.starts, self.first_tokens)
            counts, starts, firsts = (torch.tensor(each, device="cpu") for each in per_row)
            rows = torch.arange(self.num_rows, device="cpu").repeat_interleave(counts, output_size=self.num_tokens)
            columns = torch.arange(self.num_tokens, device="cpu") - firsts[rows]
            index = (rows, columns, columns + starts[rows])
            self._by_device[device] = tuple(to_device(part, device) for part in index)
        return self._by_device[device]

    @functools.cached_property
    def tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how deep each column is, and which columns it sees: its ancestors and itself; `[R, width]` and
        `[R, width, width]`, on the CPU."""
        depths = np.zeros((self.num_rows, self.width), dtype=np.int64)
        sees = np.tile(np.eye(self.width, dtype=bool), (self.num_rows, 1, 1))
        for parents, of_row, seen in zip(self.parents, depths, sees, strict=True):
            for column, parent in enumerate(parents[1:], start=1):
                of_row[column] = of_row[parent] + 1
                seen[column] |= seen[parent]
        return torch.from_numpy(depths), torch.from_numpy(sees)

    def slots_of_trees(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position of each slot, `[R, slots]`, and whether each column of a tree sees it,
        `[R, width, slots]`. Nodes of equal depth have equal positions, in slots of their own."""
        if (device, "trees") not in self._by_device:
            (depths, sees), slots = self.tree, torch.arange(self.end, device="cpu")
            starts = torch.tensor(self.starts, device="cpu")[:, None]
            is_node = (slots >= starts) & (slots < starts + self.width)
            columns = (slots - starts).clamp(0, self.width - 1)
            positions = torch.where(is_node, starts + depths.gather(1, columns), slots)
            among_nodes = sees.gather(2, columns[:, None].expand(-1, self.width, -1))
            visible = torch.where(is_node[:, None], among_nodes, (slots < starts)[:, None])
            self._by_device[device, "trees"] = to_device(positions, device), to_device(visible, device)
        return self._by_device[device, "trees"]

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """Return the positions of the packed tokens, `[1, T]`."""
        if self.parents is not None:
            rows, columns, _ = self._index(torch.device("cpu"))
            return to_device(self.row_positions(torch.device("cpu"))[rows, columns][None], device)
        if self.num_rows == 1 and self.starts[0] >= 0:  # negative before a prompt whose ids are not known
            return first_integers(self.end, device)[self.starts[0] :][None]
        return self._index(device)[2][None]

    def row_positions(self, device: torch.device) -> torch.Tensor:
        """Return positions `[R, width]`; columns that hold no token continue the count."""
        starts = to_device(self.starts, device)[:, None]
        if self.parents is not None:
            return starts + to_device(self.tree[0], device)
        return starts + first_integers(self.width, device)

    def to_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Bring packed states `[1, heads, T, size]` into rows `[R, heads, width, size]`, zero where no token is."""
        if self.num_rows == 1:
            return states
        if min(self.counts) == self.width:  # packing is a reshape
            return states.reshape(-1, self.num_rows, self.width, states.shape[3]).transpose(0, 1)
        rows, columns, _ = self._index(states.device)
        padded = states.new_zeros(self.num_rows, states.shape[1], self.width, states.shape[3])
        padded[rows, :, columns] = states[0].transpose(0, 1)
        return padded

    def to_packed(self, states: torch.Tensor) -> torch.Tensor:
        """Bring states in rows, `[R, heads, width, size]`, back into the packed sequence `[1, T, heads, size]`."""
        by_token = states.transpose(1, 2)
        if self.num_rows == 1:
            return by_token
        if min(self.counts) == self.width:
            return by_token.reshape(1, self.num_tokens, *states.shape[1::2])
        rows, columns, _ = self._index(states.device)
        return by_token[rows, columns][None]


@dataclass
class RowState:
    """What a recurrent layer has read of one row, and what it was given since that may have been rejected."""

    position: int = 0  # tokens that `states` has read, from the first one on
    states: dict[Any, torch.Tensor] = field(default_factory=dict)  # by kind and number, [1, ...] each
    num_waiting: int = 0  # tokens after `position` that it was given
    waiting: Any = None  # their inputs, in the layer's own form
    after_all: dict[Any, torch.Tensor] = field(default_factory=dict)  # the states if all of them are accepted


class SlotCache(Cache):
    """Keys and values of at most `num_rows` rows, written at per-row slots.

    A forward pass that uses it runs within `writing(layout)`. Memory is rows x capacity, the capacity growing
    geometrically with the longest row up to `limit`, the slots that no row will exceed.
    """

    def __init__(self, num_rows: int = 1, limit: int | None = None) -> None:
        super().__init__(layers=[])
        self.num_rows, self.limit = num_rows, limit
        self.conversation: Any = None  # what a decoding loop keeps with a cache that it returns
        # Where the latest call had each row's tokens in its padded batch, if it has ended.
        self.columns: Sequence[torch.Tensor] | None = None
        self._lengths = [0] * num_rows
        # Of a draft's context: how many slots before a block it sees, and the position of each row's first slot.
        self.window: int | None = None
        self.offsets = [0] * num_rows
        self._layout: SlotLayout | None = None
        # Keys and values, [rows, heads, capacity, size], by layer and "keys" or "values".
        self.stores: dict[tuple[int, str], torch.Tensor] = {}
        self.row_states: list[dict[str, RowState]] = [{} for _ in range(num_rows)]  # by recurrent layer

    def __copy__(self) -> "SlotCache":
        return copy.deepcopy(self)  # the memory of a cache that is gone may be used again

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed slots of each row; what lies after them is stale."""
        return tuple(self._lengths)

    def grow(self, needed: int, wanted: int) -> None:
        """Give layers that have room for fewer slots than are needed room for as many as are wanted."""
        for name, store in list(self.stores.items()):
            if store.shape[2] < needed:
                self._store(name, store, wanted)

    def first_seen(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Return the first slot that a block of each row sees whose context ends at a slot."""
        return tuple(0 if self.window is None else max(0, end - self.window) for end in ends)

    def at_positions(self, layout: SlotLayout) -> SlotLayout:
        """Return a layout whose slots are the positions of another one's."""
        positions = tuple(start + offset for start, offset in zip(layout.starts, self.offsets, strict=False))
        return layout if positions == layout.starts else replace(layout, starts=positions)

    def make_room(self, row: int, count: int, end: int) -> None:
        """Prepare a row for the next slots, the last of them before the position `end`. What blocks after them do not
        see is dropped once it fills as much as they see."""
        length, window = self._lengths[row], self.window
        if window is not None and (count >= window or length + count > 2 * window):
            self._lengths[row] = kept = max(0, window - count)
            for store in self.stores.values():
                store[row, :, :kept] = store[row, :, length - kept : length]
        self.offsets[row] = end - count - self._lengths[row]

    def commit(self, row: int, count: int) -> None:
        """Count the next slots of a row, which hold its latest tokens, as committed."""
        self._lengths[row] += count

    def gather(self, row: int, columns: Sequence[int]) -> None:
        """Bring some of the latest tokens of a row together, in ascending order, so that they can be committed."""
        moved = [(place, column) for place, column in enumerate(columns) if place != column]
        if moved:
            places = torch.tensor(moved, device="cpu").T + self._lengths[row]
            index = functools.cache(lambda device: to_device(places, device))
            for store in self.stores.values():
                new, old = index(store.device)
                store[row].index_copy_(1, new, store[row][:, old])

    def clear(self, row: int) -> None:
        """Make a row as new. Stale slots are masked, but a masked NaN, of a sequence that overflowed, would spread."""
        for store in self.stores.values():
            store[row].zero_()
        self.truncate(row, 0)

    def clear_stale(self) -> None:
        """Make what lies after the committed slots of all rows as new; see `clear`."""
        for store in self.stores.values():
            for row, length in enumerate(self._lengths):
                store[row, :, length:].zero_()

    def truncate(self, row: int, length: int) -> None:
        assert length <= self._lengths[row], "only commit() lengthens a row"
        self._lengths[row] = length
        if length == 0:
            self.row_states[row] = {}

    def reachable(self, row: int, length: int) -> int:
        """Return how many of a row's first slots can be kept, at most `length`: a recurrent layer cannot go back."""
        states = self.row_states[row].values()
        return length if all(0 <= length - each.position <= each.num_waiting for each in states) else 0

    @property
    def layout(self) -> SlotLayout:
        if self._layout is None:
            raise ValueError(
                "a SlotCache is written by hf_dspark's decoding loop alone: elsewhere, pass cache.to_dynamic_cache()"
            )
        return self._layout

    @contextmanager
    def writing(self, layout: SlotLayout) -> Iterator[None]:
        self._layout = layout
        try:
            yield
        finally:
            self._layout = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write packed keys and values `[1, heads, T, size]` of a layer, and return those of the rows of this pass.

        They are views `[R, heads, end, size]`, valid until the next write.
        """
        return self.write(self.layout, key_states, value_states, layer_idx)

    def write(
        self, layout: SlotLayout, keys: torch.Tensor, values: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write as `update` does, where a layout says."""
        count, written = layout.num_rows, []
        for name, states in (("keys", keys), ("values", values)):
            store = self._store((layer_idx, name), states, layout.end)
            # Each view takes microseconds, in each layer.
            held = store if count == self.num_rows else store.narrow(0, layout.first_row, count)
            if count == 1:
                held.narrow(2, layout.starts[0], layout.counts[0]).copy_(states)
            else:
                rows, _, slots = layout._index(states.device)
                held[rows, :, slots] = states[0].transpose(0, 1).to(store.dtype)
            written.append(held.narrow(2, 0, layout.end))
        return tuple(written)

    def _store(self, name: tuple[int, str], states: torch.Tensor, needed: int) -> torch.Tensor:
        """Return a layer's keys or values, with room for so many slots."""
        store = self.stores.get(name)
        # As concatenated: another turn may run under autocast, or no longer.
        is_same = store is None or store.dtype == states.dtype
        dtype = states.dtype if is_same else torch.promote_types(store.dtype, states.dtype)
        if store is not None and store.shape[2] >= needed and store.dtype == dtype:
            return store
        capacity = needed if store is None else max(needed, int(store.shape[2] * GROWTH))
        capacity = -(-capacity // SLOT_MULTIPLE) * SLOT_MULTIPLE
        if self.limit is not None:
            capacity = max(needed, min(capacity, self.limit))
        shape = (self.num_rows, states.shape[1], capacity, states.shape[3])
        try:
            with torch.inference_mode(False):  # a later call may write outside of it
                grown = states.new_zeros(shape, dtype=dtype)  # a masked, stale NaN would still be one
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            raise MemoryError(
                f"no memory for keys and values of {needed} tokens in {self.num_rows} sequences: use a smaller batch, "
                "shorten the prompts or lower max_new_tokens"
            ) from error
        if store is not None:
            grown[:, :, : store.shape[2]] = store[:, :, :capacity]
        self.stores[name] = grown
        return grown

    def move_row(self, source: int, destination: int) -> None:
        for store in self.stores.values():
            store[destination] = store[source]  # stale slots, too: see `clear`
        self._lengths[destination], self._lengths[source] = self._lengths[source], 0
        self.offsets[destination] = self.offsets[source]
        self.row_states[destination], self.row_states[source] = self.row_states[source], {}

    def copy_of_row(self, row: int) -> "SlotCache":
        """Return a cache of one row, with its committed slots alone."""
        one, length = SlotCache(), self._lengths[row]
        with torch.inference_mode(False):
            one.stores = {name: store[row : row + 1, :, :length].clone() for name, store in self.stores.items()}
        one._lengths, one.offsets = [length], [self.offsets[row]]
        one.row_states = [{name: replace(state) for name, state in self.row_states[row].items()}]
        return one

    def put_row(self, row: int, other: "SlotCache", length: int | None = None) -> None:
        """Fill a cleared row with what a cache of one row holds, up to a length."""
        length = other.lengths[0] if length is None else length
        for name, states in other.stores.items():
            store = self._store(name, states, length)
            store[row, :, :length] = states[0, :, :length]
        self._lengths[row], self.offsets[row] = length, other.offsets[0]
        self.row_states[row] = {name: replace(state) for name, state in other.row_states[0].items()}

    @property
    def num_bytes(self) -> int:
        """Memory of keys, values and recurrent states."""
        states = [tree_leaves([vars(each) for each in row.values()]) for row in self.row_states]
        return sum(each.nbytes for each in [*self.stores.values(), *sum(states, [])] if isinstance(each, torch.Tensor))

    def can_copy(self, row: int) -> bool:
        """Tell whether layers replace what they keep of a row, and write nothing into it."""
        return not any(isinstance(each.waiting, Cache) for each in self.row_states[row].values())

    def swap_rows(self, first: int, second: int) -> None:
        if first == second:
            return
        length = max(self._lengths[first], self._lengths[second])
        for store in self.stores.values():
            kept = store[first, :, :length].clone()
            store[first, :, :length] = store[second, :, :length]
            store[second, :, :length] = kept
        for parts in (self._lengths, self.offsets, self.row_states):
            parts[first], parts[second] = parts[second], parts[first]

    def resize(self, num_rows: int) -> None:
        """Keep the first rows, and add empty ones, so that there are so many."""
        more = max(0, num_rows - self.num_rows)
        with torch.inference_mode(False):
            for name, store in self.stores.items():
                new = store.new_zeros(more, *store.shape[1:])
                self.stores[name] = torch.cat([store[:num_rows], new])
        self._lengths, self.offsets = (each[:num_rows] + [0] * more for each in (self._lengths, self.offsets))
        self.row_states = self.row_states[:num_rows] + [{} for _ in range(more)]
        self.num_rows = num_rows

    def take_row(self, other: Cache, row: int, columns: torch.Tensor) -> None:
        """Copy a row of one of transformers' caches, whose tokens are in `columns`, into the same row, empty here."""
        # A sliding layer has forgotten its older columns: their slots stay empty, no window reaches them.
        for layer_idx, layer in layers_of(other).items():
            forgotten = layer.get_seq_length() - layer.keys.shape[2]
            kept = columns[columns >= forgotten] - forgotten
            first = len(columns) - len(kept)
            for name, states in (("keys", layer.keys), ("values", layer.values)):
                store = self._store((layer_idx, name), states, len(columns))
                store[row, :, first : len(columns)] = states[row][:, kept.to(states.device)]
        self.commit(row, len(columns))

    def to_dynamic_cache(self) -> DynamicCache:
        """Return a copy as transformers' `DynamicCache`, with tokens where plain `generate()` would have left them in
        the call that returned this cache. Of other caches, rows end together, as in a left-padded batch."""
        if any(self.row_states):
            raise ValueError(
                "the recurrent states of a SlotCache are not those of a DynamicCache: go on with the draft, or decode "
                "the whole conversation without a cache"
            )
        columns = self.columns
        if columns is None:
            longest = max(self._lengths)
            columns = [torch.arange(longest - length, longest, device="cpu") for length in self._lengths]
        width = 1 + max(int(own.max()) for own in columns if len(own))
        cache = DynamicCache()
        for layer_idx in sorted({layer_idx for layer_idx, _ in self.stores}):
            copies = []
            for name in ("keys", "values"):
                store = self.stores[layer_idx, name]
                copied = store.new_zeros(store.shape[0], store.shape[1], width, store.shape[3])
                for row, own in enumerate(columns):
                    copied[row, :, own.to(store.device)] = store[row, :, : self._lengths[row]]
                copies.append(copied)
            cache.update(*copies, layer_idx)
        return cache

    def reset(self) -> None:
        self._lengths, self._layout = [0] * self.num_rows, None
        self.conversation = self.columns = None
        self.row_states = [{} for _ in range(self.num_rows)]

    def crop(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            "a SlotCache is changed by no caller: pass a shorter conversation, or change cache.to_dynamic_cache()"
        )

    batch_repeat_interleave = batch_select_indices = reorder_cache = crop

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Mllama's layers for images ask whether they have seen any; a recurrent first layer is asked for all.
        keeps_nothing = layer_idx > 0 and (layer_idx, "keys") not in self.stores
        return 0 if keeps_nothing else max(self._lengths)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Tell whether anything is committed. Targets ask in order to drop a mask, which packed rows do not have."""
        return any(self._lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many slots a pass sees, and the first of them."""
        return self.layout.end, 0


def is_shortage(error: Exception) -> bool:
    """Tell whether memory ran out: the CPU's allocator raises a RuntimeError of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)


def layers_of(cache: Cache) -> dict[int, Any]:
    """Return the layers of one of transformers' caches that hold something, by number; layers that read the keys and
    values of others have empty ones."""
    filled = {number: layer for number, layer in enumerate(cache.layers) if layer.is_initialized}
    return {number: layer for number, layer in filled.items() if getattr(layer, "keys", None) is not None}
