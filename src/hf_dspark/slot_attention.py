"""Makes a target attend to a [`SlotCache`]: its layers get packed tokens, its attention rows.

Registered as an attention implementation of transformers. The masks are the target's own mask functions (causal,
sliding, chunked), asked about slots and positions instead of columns. Knows nothing of drafts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from .slot_cache import SlotCache, SlotLayout, grouped_attention

NAME = "hf_dspark_slots"

_running: ContextVar[SlotLayout] = ContextVar("hf_dspark_layout")


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from packed tokens to their rows' slots; the signature is that of transformers' attention functions.

    Args:
        query (`torch.Tensor` of shape `[1, heads, T, size]`): Packed.
        key, value (`torch.Tensor` of shape `[R, key_heads, slots, size]`): As a [`SlotCache`] returns them.
        attention_mask (`torch.BoolTensor` of shape `[R or 1, 1, width, slots]`, *optional*): From [`slot_mask`];
            `None` means causal from the first slot on.
        softcap (`float`, *optional*): Scores are squashed into ±softcap (Gemma 2).
        s_aux (`torch.Tensor` of shape `[heads]`, *optional*): Attention sinks (GPT-OSS).

    Returns:
        `torch.Tensor` of shape `[1, T, heads, size]`, and no weights.
    """
    if position_bias is not None:
        raise ValueError("position biases are not supported by hf_dspark's decoding loop")
    layout = _running.get()
    rows = layout.to_rows(query)
    causal = attention_mask is None and layout.width > 1
    if softcap is None and s_aux is None:
        attended = grouped_attention(rows, key, value, attention_mask, scaling, is_causal=causal)
    else:
        if causal:
            attention_mask = torch.ones(layout.width, key.shape[2], dtype=torch.bool, device=key.device).tril()
            attention_mask = attention_mask[None, None]
        attended = _attention_with_extras(rows, key, value, attention_mask, scaling, softcap, s_aux)
    return layout.to_packed(attended), None


def _attention_with_extras(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What no fused kernel offers: scores squashed, or one more column that takes weight and gives nothing."""
    num_rows, heads, width, size = query.shape
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
    return (weights @ value[:, :, None]).flatten(1, 2)


def slot_mask(
    *args: Any, mask_function: Callable = causal_mask_function, device: torch.device | str = "cpu", **kwargs: Any
) -> torch.Tensor | None:
    """Return what the target's mask function says about positions and slots, `[R, 1, width, slots]`.

    `None` where plain causality from the first slot on says it all: then no mask has to be built or read.
    """
    layout = _running.get()
    if mask_function is causal_mask_function:
        starts_empty = not any(layout.starts) and layout.width > 1
        sees_all = layout.width == 1 and layout.num_rows == 1
        if starts_empty or sees_all:
            return None
    positions = layout.row_positions(torch.device(device))[:, None, :, None]
    slots = torch.arange(layout.end, device=device)[None, None, None]
    # Row 0: only padding would tell rows apart, and there is none.
    zero = torch.zeros((), dtype=torch.long, device=device)
    return mask_function(zero, zero, positions, slots).expand(layout.num_rows, 1, layout.width, layout.end)


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, slot_mask)


@contextmanager
def attending_by_slots(target: PreTrainedModel) -> Iterator[None]:
    """Switch a target's attention to slots while entered."""
    configs = {id(module.config): module.config for module in target.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextmanager
def packed_pass(cache: SlotCache, layout: SlotLayout) -> Iterator[None]:
    """Announce one packed forward pass to the cache and the attention."""
    cache.begin(layout)
    token = _running.set(layout)
    try:
        yield
    finally:
        _running.reset(token)
