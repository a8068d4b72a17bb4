"""Attention with what no fused kernel offers: soft-capped scores, and sinks."""

import torch
import torch.nn.functional as F


def attend_with_extras(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend with fewer key than query heads, by explicit scores.

    Args:
        query (`torch.Tensor` of shape `[R, heads, width, size]`): Queries.
        key, value (`torch.Tensor` of shape `[R, key_heads, slots, size]`): What they attend to.
        mask (`torch.BoolTensor` of shape `[R or 1, 1, width, slots]`, *optional*): True where a query may attend.
        scaling (`float`, *optional*): Of the scores; size^-0.5 unless given.
        softcap (`float`, *optional*): Scores are squashed into ±softcap (Gemma 2).
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): The score of one more key, whose value is zero: it takes
            weight and gives nothing (GPT-OSS).
        dropout (`float`): Of the attention weights, in training.

    Returns:
        `torch.Tensor` of shape `[R, heads, width, size]`.
    """
    num_rows, _, width, size = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1))  # [R, key_heads, group, width, size]
    scores = grouped @ key[:, :, None].transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.view(1, key.shape[1], -1, 1, 1).expand(num_rows, -1, -1, width, 1)
        scores = torch.cat([scores, column.to(scores)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return (F.dropout(weights, dropout) @ value[:, :, None]).flatten(1, 2)
