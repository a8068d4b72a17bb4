"""Attention in training: of block rows to the context before their anchors, and of single rows to ranges of keys.

Who sees what is kept as token indices, and no mask over the whole sequence is ever made. Rows may hold several
documents one after the other; positions that start again at 0 tell them apart.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import attend_with_extras, grouped_attention

# Rows attended to at a time, which share the stretch of keys that any of them sees. A larger chunk wastes more work on
# keys that are hidden from most of its rows, a smaller one makes more calls.
CHUNK_ROWS = 128


def key_stretches(starts: torch.Tensor, ends: torch.Tensor, size: int) -> list[tuple[slice, slice]]:
    """Cut a sequence of rows or blocks into groups of neighbours.

    Args:
        starts, ends (`torch.LongTensor` of shape `[B, R]`): The first key that each sees, and the one after the last.
        size (`int`): Members of a group.

    Returns:
        The members and the keys that any of them sees, of each group.
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
    """What the slots of a block see in a sliding layer. Works on numbers and tensors of them.

    Args:
        size (`int`): Tokens.
        from_anchor (`bool`): All slots see the same context, the last `size` tokens before the anchor, and the window
            does not reach into the block (speculators). Else each slot counts from itself: 0 <= query - key < size.
        causal (`bool`): Whether a slot sees no later slot of its block.
    """

    size: int
    from_anchor: bool = False
    causal: bool = False

    def sees_context(self, slot: Any, distance: Any) -> Any:
        """Tell whether a slot sees a context token, the anchor's position less the token's being `distance`."""
        return distance <= self.size if self.from_anchor else distance + slot < self.size

    def sees_slot(self, slot: Any, other: Any) -> Any:
        """Tell whether a slot sees another one of its block."""
        near = (slot - other < self.size) | self.from_anchor
        return near & (other <= slot) if self.causal else near

    def first_seen(self, anchor: int) -> int:
        """Return the position of the first token that the block of an anchor sees."""
        return max(0, anchor - self.size + (not self.from_anchor))


@dataclass(frozen=True)
class BlockLayout:
    """Where the N blocks of each row stand.

    Args:
        anchor_positions (`torch.LongTensor` of shape `[B, N]`): Index of each anchor in its row, ascending among the
            real ones.
        anchor_mask (`torch.BoolTensor` of shape `[B, N]`): False for dummies, which fill rows with too few anchors.
        position_ids (`torch.LongTensor` of shape `[B, S]`): Position of each token in its document.
        block_size (`int`): γ.
        sample_from_anchor (`bool`): Whether the anchor's slot predicts; if not, a block has γ+1 slots.
    """

    anchor_positions: torch.Tensor
    anchor_mask: torch.Tensor
    position_ids: torch.Tensor
    block_size: int
    sample_from_anchor: bool = True

    @property
    def num_slots(self) -> int:
        """Rows of a block."""
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
    def flex_masks(self) -> dict[SlidingWindow | None, Any]:
        """Block masks of flex attention by window: made once, and used by all layers."""
        return {}

    @functools.cached_property
    def chunks(self) -> list["Chunk"]:
        """The blocks in groups of neighbours, each with the stretch of context that any of them sees."""
        starts = torch.where(self.anchor_mask, self.starts, self.position_ids.shape[1])
        ends = torch.where(self.anchor_mask, self.anchor_positions, 0)
        stretches = key_stretches(starts, ends, max(1, CHUNK_ROWS // self.num_slots))
        return [Chunk(self, blocks, context) for blocks, context in stretches]


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring blocks, and the stretch of context they may see.

    Args:
        layout ([`BlockLayout`]): Of all blocks.
        blocks (`slice`): Which ones.
        context (`slice`): Context tokens outside of it are seen by none of them.
    """

    layout: BlockLayout
    blocks: slice
    context: slice

    @property
    def rows(self) -> slice:
        """The block rows."""
        size = self.layout.num_slots
        return slice(self.blocks.start * size, self.blocks.stop * size)

    @functools.cached_property
    def _masks(self) -> dict[tuple[SlidingWindow | None, int], torch.Tensor]:
        return {}

    def mask(self, window: SlidingWindow | None, group: int) -> torch.Tensor:
        """Return which keys each row sees, `[B, 1, group*c*slots, context + c*slots]`: made once for all layers."""
        if (window, group) not in self._masks:
            self._masks[window, group] = self._visible(window).repeat(1, 1, group, 1)
        return self._masks[window, group]

    def _visible(self, window: SlidingWindow | None) -> torch.Tensor:
        layout, device = self.layout, self.layout.anchor_positions.device
        batch, length = layout.position_ids.shape
        stop = min(self.rows.stop, layout.anchor_positions.shape[1] * layout.num_slots)
        rows = torch.arange(self.rows.start, stop, device=device)
        keys = torch.cat([torch.arange(self.context.start, self.context.stop, device=device), length + rows])
        batches = torch.arange(batch, device=device)[:, None, None]
        return visible_to_blocks(layout, window)(batches, 0, rows[:, None], keys)[:, None]


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
    """Attend from block rows to context and own block, chunk by chunk.

    Args:
        query (`torch.Tensor` of shape `[B, heads, N*slots, size]`): Of the block rows.
        key, value (`torch.Tensor` of shape `[B, kv_heads, S + N*slots, size]`): Of the context rows, then of the block
            rows.
        layout ([`BlockLayout`]): Where the blocks stand.
        window ([`SlidingWindow`], *optional*): Of a sliding layer.
        scaling (`float`): Factor on the scores.
        dropout (`float`): Of the attention weights.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): Attention sinks.

    Returns:
        `torch.Tensor` of shape `[B, heads, N*slots, size]`.

    DSpark Eq. 3, Section 5.1.
    """
    length = layout.position_ids.shape[1]
    group = query.shape[1] // key.shape[1]
    outputs = []
    for chunk in layout.chunks:
        rows = slice(length + chunk.rows.start, length + chunk.rows.stop)
        keys, values = (torch.cat([part[:, :, chunk.context], part[:, :, rows]], dim=2) for part in (key, value))
        queries = query[:, :, chunk.rows]
        if sinks is None:
            mask = chunk.mask(window, group)
            outputs.append(grouped_attention(queries, keys, values, mask, scaling, dropout=dropout))
        else:
            mask = chunk.mask(window, 1)
            outputs.append(attend_with_extras(queries, keys, values, mask, scaling, sinks=sinks, dropout=dropout))
    return torch.cat(outputs, dim=2)


def visible_to_blocks(layout: BlockLayout, window: SlidingWindow | None) -> Callable[..., torch.Tensor]:
    """Return the rule by which block rows see keys, as flex attention wants it: `(b, h, query row, key row) -> bool`.

    A dummy sees its own block as well: rows that see nothing would be NaN.
    """
    anchors, starts, real = layout.anchor_positions, layout.starts, layout.anchor_mask
    length, size = layout.position_ids.shape[1], layout.num_slots

    def visible(batch, head, query_row, key_row):
        block, slot = query_row // size, query_row % size
        own_row = key_row - length
        context = (key_row < anchors[batch, block]) & (key_row >= starts[batch, block]) & real[batch, block]
        own = (own_row >= 0) & (own_row // size == block)
        if window is not None:
            context = context & window.sees_context(slot, anchors[batch, block] - key_row)
            own = own & window.sees_slot(slot, own_row % size)
        return context | own

    return visible


def flex_attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    window: SlidingWindow | None,
    scaling: float,
) -> torch.Tensor:
    """As [`attend_blocks`], in one call of flex attention, which skips hidden tiles; CUDA only when training."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_gpu = query.device.type == "cuda"
    run = _compiled_flex_attention() if on_gpu else flex_attention
    if window not in layout.flex_masks:
        rule, sizes = visible_to_blocks(layout, window), (query.shape[2], key.shape[2])
        layout.flex_masks[window] = create_block_mask(rule, len(query), None, *sizes, query.device, _compile=on_gpu)
    grouped = query.shape[1] != key.shape[1]
    return run(query, key, value, block_mask=layout.flex_masks[window], scale=scaling, enable_gqa=grouped)


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # lengths change from batch to batch


@dataclass(frozen=True)
class KeyRanges:
    """Which keys each of R rows sees; rows may have a few keys of their own besides.

    Args:
        starts, ends (`torch.LongTensor` of shape `[B, R]`): First key, and the one after the last; never empty.
    """

    starts: torch.Tensor
    ends: torch.Tensor

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
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: tuple[torch.Tensor, ...],
        scaling: float,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attend from each row to its range and its own keys, chunk by chunk.

        Args:
            query (`torch.Tensor` of shape `[B, heads, R, size]`): Of the rows.
            key, value (`torch.Tensor` of shape `[B, kv_heads, S, size]`): Of the sequence; of the rows if there is a
                `context`, `[B, kv_heads, R, size]`.
            context (`tuple`): Keys and values of the sequence, then those that rows have of their own already, as
                [`append_own`] makes them.
            scaling (`float`): Factor on the scores.
            dropout (`float`): Of the attention weights.

        Returns:
            `torch.Tensor` of shape `[B, heads, R, size]`.
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
            outputs.append(grouped_attention(query[:, :, rows], keys, values, mask, scaling, dropout=dropout))
        return torch.cat(outputs, dim=2)


def append_own(own: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the keys and values `[B, kv_heads, R, s+1, size]` that rows have of their own after one more step.

    Args:
        own (`tuple`): Those before it, `[B, kv_heads, R, s, size]` each; empty before the first.
        key, value (`torch.Tensor` of shape `[B, kv_heads, R, size]`): Of the step.
    """
    new = (key[:, :, :, None], value[:, :, :, None])
    return tuple(torch.cat(pair, dim=3) for pair in zip(own, new, strict=True)) if own else new
