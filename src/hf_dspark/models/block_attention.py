"""Who sees what: slots of blocks and their context, in training by ranges of keys, in decoding by slots of the cache.

In training no mask over the whole sequence is ever made. Rows may hold several documents one after the other;
positions that start again at 0 tell them apart.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..sampling.transfers import joined, to_device
from .attention import attend_with_extras, fold_mask, folded_group, grouped_attention
from .slot_cache import SlotCache, SlotLayout

# Rows attended to at a time, which share the stretch of keys that any of them sees. A larger chunk wastes more work on
# keys that are hidden from most of its rows, a smaller one makes more calls.
CHUNK_ROWS = 128


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
        near = (slot - other < self.size) | self.from_anchor
        return near & (other <= slot) if self.causal else near


@dataclass(frozen=True)
class BlockLayout:
    """Where the N blocks of each row stand."""

    anchor_positions: torch.Tensor  # [B, N], index of each anchor in its row, ascending among the real ones
    anchor_mask: torch.Tensor  # [B, N], False for dummies, which fill rows with too few anchors
    position_ids: torch.Tensor  # [B, S], of each token in its document
    block_size: int  # γ

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Index of the first token of each block's document, `[B, N]`."""
        return self.anchor_positions - self.position_ids.gather(1, self.anchor_positions)


@dataclass(frozen=True)
class KeyRanges:
    """Which keys of a sequence each of N blocks sees; its rows also see keys of their own block. For one pass."""

    starts: torch.Tensor  # [B, N], the first key
    ends: torch.Tensor  # [B, N], the one after the last
    length: int  # S, keys of the sequence
    num_rows: int = 1  # rows of a block
    queries: torch.Tensor | None = None  # places in the sequence of the rows that attend, [B, N]; `None`: all
    masks: dict[tuple, torch.Tensor] = field(default_factory=dict)  # made once for all layers

    @functools.cached_property
    def chunks(self) -> list[tuple[slice, slice]]:
        """Neighbouring blocks, and the stretch of keys that any of them sees."""
        first, last = torch.stack([self.starts.amin(dim=0), self.ends.amax(dim=0)]).tolist()  # one synchronisation
        chunks, size = [], max(1, CHUNK_ROWS // self.num_rows)
        for start in range(0, len(first), size):
            blocks = slice(start, min(start + size, len(first)))
            end = max(last[blocks])
            chunks.append((blocks, slice(min(*first[blocks], end), end)))
        return chunks

    def mask(self, blocks: slice, keys: slice, num_own: int, window: SlidingWindow | None) -> torch.Tensor:
        """Return which keys of a stretch and of their own blocks the rows of a chunk see, `[B, 1, rows, keys]`."""
        name = (blocks.start, num_own, window)
        if name not in self.masks:
            index = torch.arange(max(keys.stop, self.num_rows, num_own), device=self.starts.device)
            starts, ends = (
                part[:, blocks].repeat_interleave(self.num_rows, dim=1)[..., None] for part in (self.starts, self.ends)
            )
            seen = (index[keys] >= starts) & (index[keys] < ends)
            count = blocks.stop - blocks.start
            own = torch.eye(count, dtype=torch.bool, device=index.device)
            own = own.repeat_interleave(self.num_rows, dim=0).repeat_interleave(num_own, dim=1)
            if window is not None:
                slots, others = index[: self.num_rows].repeat(count)[:, None], index[:num_own].repeat(count)
                seen = seen & window.sees_context(slots, ends - index[keys])
                own = own & window.sees_slot(slots, others)
            self.masks[name] = torch.cat([seen, own.expand(len(seen), -1, -1)], dim=-1)[:, None]
        return self.masks[name]

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *earlier: torch.Tensor
    ) -> torch.Tensor:
        """Attend from the rows of blocks, `[B, heads, N*rows, size]`, chunk by chunk: `[B, N*rows, heads, size]`.

        Keys and values `[B, kv_heads, S + N*own, size]` are those of the sequence, then those of the blocks. With
        `earlier` ones, of the sequence and then of each step, they are those of one more step, a row for each block.
        DSpark Eq. 3, Section 5.1.
        """
        sequences, own = earlier[:2], [(*earlier[2::2], key), (*earlier[3::2], value)]
        if earlier:
            own = [torch.stack(steps, dim=3) for steps in own]
        else:
            sequences, num_blocks = (key, value), self.starts.shape[1]
            shape = (num_blocks, (key.shape[2] - self.length) // num_blocks)
            own = [part[:, :, self.length :].unflatten(2, shape) for part in sequences]
        outputs, dropout = [], layer.config.attention_dropout if layer.training else 0.0
        for blocks, stretch in self.chunks:
            keys, values = (
                torch.cat([seen[:, :, stretch], part[:, :, blocks].flatten(2, 3)], dim=2)
                for seen, part in zip(sequences, own, strict=True)
            )
            rows = query[:, :, blocks.start * self.num_rows : blocks.stop * self.num_rows]
            mask = self.mask(blocks, stretch, own[0].shape[3], layer.window)
            if layer.attention_sink_bias is None:
                mask = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
            outputs.append(attend_as(layer, rows, keys, values, mask, dropout))
        return torch.cat(outputs, dim=2).transpose(1, 2)


@dataclass(frozen=True)
class CachedPass:
    """One cached pass of a draft: rows of each request are written to the cache, and the last of them attend."""

    cache: SlotCache
    written: tuple[SlotLayout, ...]  # what layers give keys and values of, one after the other
    rows: SlotLayout  # which of them attend
    is_causal: bool = False
    firsts: tuple[int, ...] = (0,)  # the first slot that each row sees, or all rows
    # Of nodes of trees: which slots each row sees, [R, width, keys]; there are no sliding layers then.
    sees: torch.Tensor | None = None
    queries: torch.Tensor | None = None  # places of `rows` in what is written, [1, Q], for layers that get all of it
    # For all layers, folded without sinks.
    masks: dict[SlidingWindow | None, torch.Tensor | None] = field(default_factory=dict)

    def position_ids(self, device: torch.device) -> torch.Tensor:
        return joined([self.cache.at_positions(layout).position_ids(device) for layout in self.written], dim=1)

    def keys_from(self, window: SlidingWindow | None) -> int:
        """Return the first slot that some row sees."""
        first = min(self.firsts)
        return first if window is None else max(first, min(self.rows.starts) - window.size + (not window.from_anchor))

    def visible(self, window: SlidingWindow | None, device: torch.device) -> torch.Tensor | None:
        """Return which slots from `keys_from(window)` on each row sees, `[R, 1, width, keys]`; `None`: all."""
        start = self.keys_from(window)
        if self.sees is not None:
            return self.sees[:, None, :, start:]
        starts, width = self.rows.starts, self.rows.width
        all_seen = len(set(starts)) == 1 and (width == 1 or not self.is_causal)
        all_near = window is None or not (window.causal or self.rows.end > window.size)
        firsts = None if max(self.firsts) <= start else to_device(self.firsts, device)
        if all_seen and all_near and firsts is None:
            return None
        keys = torch.arange(start, self.rows.end, device=device)
        near = None if all_near else window
        return seen_slots(to_device(starts, device), keys, width, near, self.is_causal, firsts)

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *earlier: torch.Tensor
    ) -> torch.Tensor:
        """Write packed keys and values `[1, kv_heads, T, size]`, and attend from packed rows `[1, heads, Q, size]`.

        Returns `[1, Q, heads, size]`.
        """
        window, counts = layer.window, [layout.num_tokens for layout in self.written]
        for layout, *new in zip(self.written, key.split(counts, dim=2), value.split(counts, dim=2), strict=True):
            if layout.num_tokens:
                key, value = self.cache.write(layout, *new, layer.layer_idx)
        start, rows = self.keys_from(window), self.rows.to_rows(query)
        key, value = key[:, :, start:], value[:, :, start:]
        if window not in self.masks:
            self.masks[window] = folded_for(layer, self.visible(window, query.device), query, key)
        return self.rows.to_packed(attend_as(layer, rows, key, value, self.masks[window]))


def seen_slots(
    starts: torch.Tensor,
    keys: torch.Tensor,
    width: int,
    window: SlidingWindow | None,
    is_causal: bool = False,
    firsts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which slots of the cache `[keys]` the rows of blocks see that begin at `starts` `[R]`,
    `[R, 1, width, keys]`: the context before them, from `firsts` `[R]` on, and their block."""
    own = keys - starts[:, None, None, None]  # negative: context
    slots = torch.arange(width, device=keys.device)[:, None]
    visible = own <= (slots if is_causal else width - 1)
    if firsts is not None:
        visible = visible & (keys >= firsts[:, None, None, None])
    if window is not None:
        visible = visible & torch.where(own < 0, window.sees_context(slots, -own), window.sees_slot(slots, own))
    return visible.expand(-1, -1, width, -1)


def folded_for(
    layer: nn.Module, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return a boolean mask as a layer's kernel takes it; all layers of a draft have sinks, or none."""
    if layer.attention_sink_bias is not None:
        return mask
    return fold_mask(mask, folded_group(query, key), query.dtype)


def attend_as(
    layer: nn.Module,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend as a layer does, from rows `[R, heads, width, size]`; with sinks the mask is boolean and not folded."""
    sinks = layer.attention_sink_bias
    if sinks is None:
        return grouped_attention(rows, key, value, mask, layer.scaling, dropout=dropout)
    return attend_with_extras(rows, key, value, mask, layer.scaling, sinks=sinks, dropout=dropout)
