"""Attention of training blocks over the context before their anchors and over themselves.

Who sees what is kept as token indices: of each block its anchor and the first token of its document. Rows may hold
several documents one behind the other; positions that start again at 0 tell them apart. No mask over the whole
sequence is ever made. Knows nothing of models or losses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .grouped_attention import grouped_attention

# Block rows attended to at a time. Each sees its own block only: a larger chunk wastes more work on the blocks beside
# it, a smaller one makes more calls.
CHUNK_ROWS = 128


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
        per_chunk = max(1, CHUNK_ROWS // self.num_slots)
        # One synchronisation on an accelerator, for all layers of a pass.
        bounds = torch.stack(
            [
                torch.where(self.anchor_mask, self.starts, self.position_ids.shape[1]).amin(dim=0),
                torch.where(self.anchor_mask, self.anchor_positions, 0).amax(dim=0),
            ]
        ).tolist()
        chunks = []
        for first in range(0, self.anchor_positions.shape[1], per_chunk):
            blocks = slice(first, first + per_chunk)
            end = max(bounds[1][blocks])
            chunks.append(Chunk(self, blocks, slice(min(*bounds[0][blocks], end), end)))
        return chunks


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
        """Return who sees whom, `[B, 1, group*c*slots, context + c*slots]`: made once, and used by all layers."""
        if (window, group) not in self._masks:
            self._masks[window, group] = self._visible(window).repeat(1, 1, group, 1)
        return self._masks[window, group]

    def _visible(self, window: SlidingWindow | None) -> torch.Tensor:
        layout, device = self.layout, self.layout.anchor_positions.device
        anchors = layout.anchor_positions[:, self.blocks, None, None]
        tokens = torch.arange(self.context.start, self.context.stop, device=device)
        slots = torch.arange(layout.num_slots, device=device)[:, None]
        context = (tokens < anchors) & (tokens >= layout.starts[:, self.blocks, None, None])
        context = context & layout.anchor_mask[:, self.blocks, None, None]
        context = context.expand(-1, -1, layout.num_slots, -1)
        if window is not None:
            context = context & window.sees_context(slots, anchors - tokens)
        batch, count = context.shape[:2]
        # A dummy sees itself as well: rows that see nothing would be NaN.
        own = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None]
        own = own.expand(-1, layout.num_slots, -1, layout.num_slots).clone()
        if window is not None:
            own &= window.sees_slot(slots, slots.T)[None, :, None, :]
        own = own.reshape(1, count, layout.num_slots, -1).expand(batch, -1, -1, -1)
        return torch.cat([context, own], dim=-1).flatten(1, 2)[:, None]


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    window: SlidingWindow | None,
    scaling: float,
    dropout: float = 0.0,
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
        mask = chunk.mask(window, group)
        outputs.append(grouped_attention(query[:, :, chunk.rows], keys, values, mask, scaling, dropout=dropout))
    return torch.cat(outputs, dim=2)


def visible_to_blocks(layout: BlockLayout, window: SlidingWindow | None) -> Callable[..., torch.Tensor]:
    """Return the same rule as a function of indices, as flex attention wants it: `(b, h, query row, key row) -> bool`.

    Args:
        layout ([`BlockLayout`]): Where the blocks stand.
        window ([`SlidingWindow`], *optional*): Of a sliding layer.
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
    """Do the same in one call of flex attention, which leaves out tiles that nobody sees; CUDA only when training.

    Args:
        query, key, value, layout, window, scaling: As in [`attend_blocks`].
    """
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
