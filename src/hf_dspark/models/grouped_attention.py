"""Attention with fewer key than query heads: the group is folded into the query rows, no key is repeated.

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
