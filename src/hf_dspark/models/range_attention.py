"""Attention of single rows, each to a range of a sequence's keys and to a few keys of its own.

The ranges are kept as token indices; no mask over the whole sequence is ever made. Knows nothing of models or
losses.
"""

import functools
from dataclasses import dataclass

import torch

from .grouped_attention import grouped_attention

# Rows attended to at a time: those of a chunk share the stretch of keys that any of them sees.
CHUNK_ROWS = 128


@dataclass(frozen=True)
class RangeChunk:
    """Some neighbouring rows, and the stretch of keys they may see.

    Args:
        rows (`slice`): Which rows.
        keys (`slice`): Keys outside of it are seen by none of them.
        visible (`torch.BoolTensor` of shape `[B, 1, rows, keys]`): Who sees what within it.
    """

    rows: slice
    keys: slice
    visible: torch.Tensor

    def mask(self, num_own: int, group: int) -> torch.Tensor:
        """Return the mask of the stretch and of `num_own` keys of each row, `[B, 1, group*rows, keys + rows*own]`."""
        visible = self.visible
        if num_own > 0:
            count = visible.shape[2]
            own = torch.eye(count, dtype=torch.bool, device=visible.device).repeat_interleave(num_own, dim=1)
            visible = torch.cat([visible, own.expand(len(visible), 1, -1, -1)], dim=-1)
        return visible.repeat(1, 1, group, 1)


@dataclass(frozen=True)
class KeyRanges:
    """Which keys each of R rows sees.

    Args:
        starts, ends (`torch.LongTensor` of shape `[B, R]`): First key, and the one behind the last; never empty.
    """

    starts: torch.Tensor
    ends: torch.Tensor

    @functools.cached_property
    def chunks(self) -> list[RangeChunk]:
        """The rows in groups of neighbours: made once, and used by all layers and steps."""
        # One synchronisation on an accelerator.
        bounds = torch.stack([self.starts.amin(dim=0), self.ends.amax(dim=0)]).tolist()
        chunks = []
        for first in range(0, self.starts.shape[1], CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            keys = slice(min(bounds[0][rows]), max(bounds[1][rows]))
            index = torch.arange(keys.start, keys.stop, device=self.starts.device)
            visible = (index >= self.starts[:, None, rows, None]) & (index < self.ends[:, None, rows, None])
            chunks.append(RangeChunk(rows, keys, visible))
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
        seen_key, seen_value = context[:2] if context else (key, value)
        group = query.shape[1] // key.shape[1]
        own_key, own_value = append_own(context[2:], key, value) if context else (None, None)
        num_own = own_key.shape[3] if context else 0
        outputs = []
        for chunk in self.chunks:
            keys, values = seen_key[:, :, chunk.keys], seen_value[:, :, chunk.keys]
            if num_own > 0:
                keys = torch.cat([keys, own_key[:, :, chunk.rows].flatten(2, 3)], dim=2)
                values = torch.cat([values, own_value[:, :, chunk.rows].flatten(2, 3)], dim=2)
            mask = chunk.mask(num_own, group)
            outputs.append(grouped_attention(query[:, :, chunk.rows], keys, values, mask, scaling, dropout=dropout))
        return torch.cat(outputs, dim=2)


def append_own(own: tuple[torch.Tensor, ...], key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the keys and values `[B, kv_heads, R, s+1, size]` that rows have of their own after one more step.

    Args:
        own (`tuple`): Those before it, `[B, kv_heads, R, s, size]` each; empty before the first.
        key, value (`torch.Tensor` of shape `[B, kv_heads, R, size]`): Of the step.
    """
    new = (key[:, :, :, None], value[:, :, :, None])
    return tuple(torch.cat(pair, dim=3) for pair in zip(own, new, strict=True)) if own else new
