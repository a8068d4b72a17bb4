"""Attention with fewer key than query heads: folded into the query rows for fused kernels, or by explicit scores.

Shared by the training masks of drafts, by their decoding passes, and by targets that attend to a slot cache. Queries
are `[R, heads, width, size]`, keys and values `[R, key_heads, slots, size]`, outputs `[R, heads, width, value_size]`.
"""

import functools

import torch
import torch.nn.functional as F

FOLDED_WIDTH = 64  # wider masks are not repeated for the group
FOLDED_SLOTS = 1024  # a CPU's kernel for groups is the faster one for float32, one row or column, and fewer slots
MASK_MULTIPLE = 8  # CUDA's kernels copy a mask in every layer unless its rows begin at multiples of so many entries


def folded_group(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return how many query heads are folded into rows: those of a group, or 1 where its kernel is the faster one."""
    is_simple = query.dtype == torch.float32 and query.device.type == "cpu" and not torch.compiler.is_compiling()
    is_small = key.shape[2] < FOLDED_SLOTS and 1 in (query.shape[0], query.shape[2])
    return 1 if is_simple and is_small else query.shape[1] // key.shape[1]


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend with the group of a key head folded into the query rows instead of repeating keys.

    The mask is [`fold_mask`]'s, `[R, 1, group * width or width, slots]`; one that is not repeated is not folded. With
    `is_causal`, query i sees slots 0..i.
    """
    num_rows, heads, width, size = query.shape
    group = heads // key.shape[1]
    attend = F.scaled_dot_product_attention
    is_folded = folded_group(query, key) > 1 if mask is None else mask.shape[2] != width
    if is_causal or not is_folded:
        return attend(query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=group > 1)
    query = query.reshape(num_rows, key.shape[1], group * width, size)
    return attend(query, key, value, mask, dropout, scale=scaling).reshape(num_rows, heads, width, -1)


def fold_mask(mask: torch.Tensor | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn a boolean mask `[R, 1, width, slots]` into one that is repeated for the group and added to the scores."""
    if mask is None or mask.shape[2] > FOLDED_WIDTH:
        return mask  # a prompt's mask is large, and used once
    # The kernels take additive masks, and would convert a boolean one in every layer. The logarithm is 0 or -inf.
    return mask.to(dtype).log_().repeat(1, 1, group, 1)


def causal_mask(width: int, slots: int, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what [`fold_mask`] makes of a mask by which the last column sees all slots, and each one before it one
    slot less, `[1, 1, group * width, slots]`."""
    aligned = -(-slots // MASK_MULTIPLE) * MASK_MULTIPLE
    hidden = _infinity(dtype, device).expand(group, width, aligned).triu(slots - width + 1)
    return hidden.view(1, 1, group * width, aligned)[..., :slots]


@functools.lru_cache(maxsize=16)
def _infinity(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), -torch.inf, dtype=dtype, device=device)


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
    """Attend by explicit scores, squashed into ±`softcap` (Gemma 2).

    The mask is boolean. `sinks` are scores `[heads]` of one more key that takes weight and gives nothing (GPT-OSS).
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
