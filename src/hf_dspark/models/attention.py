"""Attention with fewer key than query heads: folded into the query rows for fused kernels, or by explicit scores.

Shared by the training masks of drafts, by their decoding passes, and by targets that attend to a slot cache.
"""

from functools import partial

import torch
import torch.nn.functional as F

FOLDED_WIDTH = 64  # wider masks are not repeated for the group


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with fewer key than query heads, the group folded into the query rows instead of repeating keys.

    Args:
        query (`torch.Tensor` of shape `[R, heads, width, size]`): Queries.
        key, value (`torch.Tensor` of shape `[R, key_heads, slots, size]`): What they attend to.
        mask (`torch.Tensor` of shape `[R, 1, group * width or width, slots]`, *optional*): From [`fold_mask`].
        scaling (`float`, *optional*): Of the scores.
        is_causal (`bool`): Instead of a mask: query i sees slots 0..i.
        dropout (`float`): Of the attention weights, in training.

    Returns:
        `torch.Tensor` of shape `[R, heads, width, value_size]`.
    """
    group, width = query.shape[1] // key.shape[1], query.shape[2]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    if is_causal:
        return attend(query, key, value, is_causal=True, enable_gqa=group > 1)
    if mask is not None and mask.shape[2] == width and group > 1:  # too wide to be folded
        return attend(query, key, value, attn_mask=mask, enable_gqa=True)
    if group > 1:
        query = query.unflatten(1, (-1, group)).flatten(2, 3)
    output = attend(query, key, value, attn_mask=mask)
    return output.unflatten(2, (group, width)).flatten(1, 2) if group > 1 else output


def fold_mask(mask: torch.Tensor | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask for [`grouped_attention`]: repeated for the group, and added to the scores.

    Args:
        mask (`torch.BoolTensor` of shape `[R, 1, width, slots]`, *optional*): True where a query may attend.
        group (`int`): Query heads per key head.
        dtype (`torch.dtype`): Of the queries.
    """
    if mask is None or mask.shape[2] > FOLDED_WIDTH:
        return mask  # a prompt's mask is large, and used once
    # The kernels take additive masks, and would convert a boolean one in every layer.
    additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return additive.repeat(1, 1, group, 1)


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
