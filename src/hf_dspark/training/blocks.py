"""From rows of tokens to anchored blocks: which tokens become anchors, and what is predicted after them."""

import torch

from ..models.block_attention import BlockLayout
from ..models.losses import position_weights
from ..models.modeling_draft import AnchoredBlocks


def anchor_candidates(loss_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return which positions of `[B, S]` may be anchors, `[B, S-1]`: supervised, and followed by a supervised token.

    The first token of a document is none: nothing was decoded before it.
    """
    same_document = position_ids[:, 1:] == position_ids[:, :-1] + 1
    return loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool() & same_document & (position_ids[:, :-1] > 0)


def sample_anchors(
    loss_mask: torch.Tensor, position_ids: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `num_anchors` positions from each document of rows `[B, S]`, all of its candidates if there are fewer.

    Returns positions `[B, N]`, ascending, 0 for dummies, and the mask of real anchors `[B, N]`. DSpark Section 3.3.
    """
    candidates = anchor_candidates(loss_mask, position_ids)
    priority = torch.rand(candidates.shape, generator=generator).to(candidates.device).masked_fill(~candidates, -1.0)
    documents = (position_ids[:, :-1] == 0).cumsum(dim=1)
    order = priority.argsort(dim=1, descending=True)
    order = order.gather(1, documents.gather(1, order).argsort(dim=1, stable=True))  # by document, then by priority
    sorted_documents = documents.gather(1, order)
    starts = torch.searchsorted(sorted_documents, sorted_documents)
    rank = torch.arange(candidates.shape[1], device=candidates.device) - starts
    chosen = candidates & torch.zeros_like(candidates).scatter(1, order, rank < num_anchors)
    length, most = loss_mask.shape[1], max(1, int(chosen.sum(dim=1).max()))
    positions = torch.arange(length - 1, device=chosen.device).expand_as(chosen).masked_fill(~chosen, length)
    positions = positions.sort(dim=1).values[:, :most]
    real = positions < length
    return positions.masked_fill(~real, 0), real


def cut_blocks(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, layout: BlockLayout, position_decay: float | None = None
) -> AnchoredBlocks:
    """Return the blocks of a layout in rows `[B, S]`, weighted as in [`~losses.position_weights`].

    A block ends before a token that is not supervised.
    """
    length = input_ids.shape[1]
    positions = label_positions(layout)
    inside = positions.clamp_max(length - 1).masked_fill(~layout.anchor_mask[:, :, None], 0)

    def at_labels(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, inside.flatten(1)).view_as(inside)

    same_document = inside - at_labels(layout.position_ids) == layout.starts[:, :, None]
    allowed = at_labels(loss_mask.bool()) & (positions < length) & same_document & layout.anchor_mask[:, :, None]
    labels = at_labels(input_ids)
    # Contiguous prefix: a slot after an unsupervised one would be trained on a prefix that is never verified.
    supervised = allowed.long().cumprod(dim=-1).bool()
    return AnchoredBlocks(layout, labels, position_weights(supervised, position_decay))


def label_positions(layout: BlockLayout) -> torch.Tensor:
    """Return where the labels stand in their rows, `[B, N, γ]`; those of the last blocks may stand beyond the end."""
    slots = torch.arange(1, layout.block_size + 1, device=layout.anchor_positions.device)
    return layout.anchor_positions[:, :, None] + slots


def label_hidden(last_hidden: torch.Tensor, blocks: AnchoredBlocks) -> torch.Tensor:
    """Return the rows of `last_hidden [B, S, d]` that predict each label, `[B, N, γ, d]`: from the position before."""
    positions = (label_positions(blocks.layout) - 1).clamp_max(last_hidden.shape[1] - 1)
    rows = last_hidden.gather(1, positions.flatten(1)[:, :, None].expand(-1, -1, last_hidden.shape[-1]))
    return rows.unflatten(1, positions.shape[1:])
