"""Attention in training: of block rows to the context before their anchors, and of single rows to ranges of keys.

Who sees what is kept as token indices, and no mask over the whole sequence is ever made. Rows may hold several
documents one after the other; positions that start again at 0 tell them apart.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from .attention import attend_with_extras, grouped_attention

# Rows attended to at a time, which share the stretch of keys that any of them sees. A larger chunk wastes more work on
# keys that are hidden from most of its rows, a smaller one makes more calls.
CHUNK_ROWS = 128
KeysValues = tuple[torch.Tensor, ...]


def key_stretches(starts: torch.Tensor, ends: torch.Tensor, size: int) -> list[tuple[slice, slice]]:
    """Cut rows or blocks, which see the keys `starts` to `ends`, `[B, R]` each, into groups of `size` neighbours.

    Returns the members of each group, and the keys that any of them sees.
    """
    bounds = torch.stack([starts.amin(dim=0), ends.amax(dim=0)]).tolist()  # one synchronisation on an accelerator
    groups = []
    for first in range(0, starts.shape[1], size):
        members = slice(first, first + size)
        end = max(bounds[1][members])
        groups.append((members, slice(min(*bounds[0][members], end), end)))
    return groups


@dataclass(frozen=True)
class SlidingWindow:
    """What the slots of a block see in a sliding layer. Works on numbers and tensors of them."""

    size: int  # tokens
    # All slots see the same context, the last `size` tokens before the anchor, and the window does not reach into the
    # block (speculators). Else each slot counts from itself: 0 <= query - key < size.
    from_anchor: bool = False
    causal: bool = False  # a slot sees no later slot of its block

    def sees_context(self, slot: Any, distance: Any) -> Any:
        """Tell whether a slot sees a context token, the anchor's position less the token's being `distance`."""
        return distance <= self.size if self.from_anchor else distance + slot < self.size

    def sees_slot(self, slot: Any, other: Any) -> Any:
        """Tell whether a slot sees another one of its block."""
        near = (slot - other < self.size) | self.from_anchor
        return near & (other <= slot) if self.causal else near


@dataclass(frozen=True)
class BlockLayout:
    """Where the N blocks of each row stand."""

    anchor_positions: torch.Tensor  # [B, N], index of each anchor in its row, ascending among the real ones
    anchor_mask: torch.Tensor  # [B, N], False for dummies, which fill rows with too few anchors
    position_ids: torch.Tensor  # [B, S], of each token in its document
    block_size: int  # γ
    sample_from_anchor: bool = True  # the anchor's slot predicts; if not, a block has γ+1 slots
    masks: dict[tuple, torch.Tensor] = field(default_factory=dict)  # made once, and used by all layers

    @property
    def num_slots(self) -> int:
        return self.block_size + (not self.sample_from_anchor)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Index of the first token of each block's document, `[B, N]`."""
        return self.anchor_positions - self.position_ids.gather(1, self.anchor_positions)

    @functools.cached_property
    def block_position_ids(self) -> torch.Tensor:
        """Positions of the block rows in their documents, `[B, N*slots]`."""
        anchors = self.position_ids.gather(1, self.anchor_positions)
        slots = torch.arange(self.num_slots, device=anchors.device)
        return (anchors[:, :, None] + slots).flatten(1)

    @functools.cached_property
    def chunks(self) -> list[tuple[slice, slice]]:
        """Rows of neighbouring blocks, and the stretch of context that any of them sees."""
        starts = torch.where(self.anchor_mask, self.starts, self.position_ids.shape[1])
        ends = torch.where(self.anchor_mask, self.anchor_positions, 0)
        size, num_blocks = self.num_slots, starts.shape[1]
        stretches = key_stretches(starts, ends, max(1, CHUNK_ROWS // size))
        return [(slice(own.start * size, min(own.stop, num_blocks) * size), context) for own, context in stretches]

    def mask(self, rows: slice, context: slice, window: SlidingWindow | None, group: int) -> torch.Tensor:
        """Return which keys the rows of a chunk see, `[B, 1, group*rows, context + rows]`."""
        name = (rows.start, window, group)
        if name not in self.masks:
            device = self.anchor_positions.device
            queries, keys = (torch.arange(part.start, part.stop, device=device) for part in (rows, context))
            block, slot = queries // self.num_slots, queries % self.num_slots
            anchors, starts = self.anchor_positions[:, block, None], self.starts[:, block, None]
            seen = (keys < anchors) & (keys >= starts) & self.anchor_mask[:, block, None]
            # A dummy sees its own block as well: rows that see nothing would be NaN.
            own = block[:, None] == block
            if window is not None:
                seen = seen & window.sees_context(slot[:, None], anchors - keys)
                own = own & window.sees_slot(slot[:, None], slot)
            visible = torch.cat([seen, own.expand(len(seen), -1, -1)], dim=-1)[:, None]
            self.masks[name] = visible.repeat(1, 1, group, 1)
        return self.masks[name]


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    window: SlidingWindow | None,
    scaling: float,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from block rows `[B, heads, N*slots, size]` to context and own block, chunk by chunk.

    Keys and values `[B, kv_heads, S + N*slots, size]` are those of the context rows, then of the block rows.
    DSpark Eq. 3, Section 5.1.
    """
    length = layout.position_ids.shape[1]
    group = query.shape[1] // key.shape[1]
    outputs = []
    for rows, context in layout.chunks:
        own = slice(length + rows.start, length + rows.stop)
        keys, values = (torch.cat([part[:, :, context], part[:, :, own]], dim=2) for part in (key, value))
        queries, mask = query[:, :, rows], layout.mask(rows, context, window, group if sinks is None else 1)
        if sinks is None:
            outputs.append(grouped_attention(queries, keys, values, mask, scaling, dropout=dropout))
        else:
            outputs.append(attend_with_extras(queries, keys, values, mask, scaling, sinks=sinks, dropout=dropout))
    return torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class KeyRanges:
    """Which keys each of R rows sees; rows may have a few keys of their own besides."""

    starts: torch.Tensor  # [B, R], the first key
    ends: torch.Tensor  # [B, R], the one after the last; no range is empty

    @functools.cached_property
    def _chunks(self) -> list[tuple[slice, slice, torch.Tensor]]:
        """Rows, keys that any of them sees, and who sees what of them, of each group; for all layers and steps."""
        chunks = []
        for rows, keys in key_stretches(self.starts, self.ends, CHUNK_ROWS):
            index = torch.arange(keys.start, keys.stop, device=self.starts.device)
            visible = (index >= self.starts[:, None, rows, None]) & (index < self.ends[:, None, rows, None])
            chunks.append((rows, keys, visible))
        return chunks

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: KeysValues, dropout: float
    ) -> torch.Tensor:
        """Attend from each row of `[B, heads, R, size]` to its range and its own keys, chunk by chunk.

        Keys and values are those of the sequence, `[B, kv_heads, S, size]`. With a `context`, they are those of the
        rows, `[B, kv_heads, R, size]`; the context has those of the sequence, then those that [`append_own`] gathered.
        """
        group = query.shape[1] // key.shape[1]
        own = append_own(context[2:], key, value) if context else ()
        outputs = []
        for rows, stretch, visible in self._chunks:
            keys, values = (part[:, :, stretch] for part in context[:2] or (key, value))
            if own:
                keys, values = (
                    torch.cat([seen, part[:, :, rows].flatten(2, 3)], dim=2)
                    for seen, part in zip((keys, values), own, strict=True)
                )
                count, num_own = visible.shape[2], own[0].shape[3]
                mine = torch.eye(count, dtype=torch.bool, device=visible.device).repeat_interleave(num_own, dim=1)
                visible = torch.cat([visible, mine.expand(len(visible), 1, -1, -1)], dim=-1)
            mask = visible.repeat(1, 1, group, 1)
            outputs.append(grouped_attention(query[:, :, rows], keys, values, mask, None, dropout=dropout))
        return torch.cat(outputs, dim=2)


def append_own(own: KeysValues, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
    """Add a step's keys and values `[B, kv_heads, R, size]` to the rows' own, `[B, kv_heads, R, s, size]`."""
    new = (key[:, :, :, None], value[:, :, :, None])
    return tuple(torch.cat(pair, dim=3) for pair in zip(own, new, strict=True)) if own else new
