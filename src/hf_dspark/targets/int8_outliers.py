"""Lets the 8-bit layers of bitsandbytes treat each token of a verification pass as if it were alone.

LLM.int8 keeps columns of large activations in full precision, and looks for them in all tokens of a pass together. So
a token's result depends on the tokens beside it, far beyond rounding, while plain decoding passes one token at a time.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_counts: ContextVar[tuple[int, ...] | None] = ContextVar("hf_dspark_int8_counts", default=None)


def mixes_tokens(layer: nn.Module) -> bool:
    """Tell whether a layer mixes the tokens of a pass: LLM.int8 with a threshold."""
    return getattr(getattr(layer, "state", None), "threshold", 0.0) > 0.0


@contextmanager
def outliers_of_each(counts: Sequence[int]) -> Iterator[None]:
    """While entered, 8-bit layers look for outliers in each group of tokens alone. Gradients are not supported.

    A group has as many consecutive tokens as `counts` says. In a pass of another number of tokens, each token is a
    group of its own; so with `()` all are.
    """
    import bitsandbytes

    # Wrapped once, the product of 8-bit layers stays what it was outside of this context.
    if not hasattr(bitsandbytes.matmul, "_hf_dspark_wrapped"):
        bitsandbytes.matmul = _grouped(bitsandbytes.matmul)
    token = _counts.set(tuple(counts))
    try:
        yield
    finally:
        _counts.reset(token)


def restore() -> None:
    """Let 8-bit layers look at whole passes again, if an interrupt has kept `outliers_of_each` from it."""
    _counts.set(None)


def _grouped(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def matmul(A: torch.Tensor, B: torch.Tensor, *args: Any, state: Any = None, **kwargs: Any) -> torch.Tensor:
        groups = _groups(A.shape[:-1].numel())
        if groups is None or state is None or state.CB is None or state.threshold <= 0.0:
            return original(A, B, *args, state=state, **kwargs)
        product = _product(A.reshape(-1, A.shape[-1]), state, kwargs.get("bias"), groups)
        return product.reshape(*A.shape[:-1], -1)

    matmul._hf_dspark_wrapped = True
    return matmul


def _groups(num_tokens: int) -> Sequence[int] | None:
    """Return the tokens of each group of a pass; `None` for a single group, which needs no help."""
    counts = _counts.get()
    if counts is None or num_tokens <= 1:
        return None
    counts = counts if sum(counts) == num_tokens else (1,) * num_tokens
    return counts if len(counts) > 1 else None


def _product(activations: torch.Tensor, state: Any, bias: torch.Tensor | None, groups: Sequence[int]) -> torch.Tensor:
    """Return the layer's output `[T, out]` for `[T, in]`, with the outlier columns of each group of tokens."""
    from bitsandbytes import functional

    ops = torch.ops.bitsandbytes
    half = activations.to(torch.float16)
    outliers = half.abs() >= state.threshold
    exact = _in_same_column(outliers, groups)
    # A token's scale comes from all that is no outlier itself, its group's columns included.
    quantised, scales, _ = functional.int8_vectorwise_quant(half.masked_fill(outliers, 0.0))
    quantised = quantised.masked_fill(exact, 0)
    product = ops.int8_scaled_mm.default(quantised, state.CB, scales, state.SCB, bias=bias, dtype=activations.dtype)
    columns = exact.any(dim=0).nonzero()[:, 0]
    if not len(columns):
        return product
    weights = ops.int8_vectorwise_dequant.default(state.CB[:, columns].contiguous(), state.SCB)
    kept = activations[:, columns].masked_fill(~exact[:, columns], 0.0)
    return product.addmm(kept, weights.to(activations.dtype).t())


def _in_same_column(outliers: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """Return which values `[T, in]` are in a column that has an outlier in their own group of tokens."""
    if len(groups) == len(outliers):
        return outliers
    parts = outliers.split(list(groups))
    return torch.cat([part.any(dim=0, keepdim=True).expand_as(part) for part in parts])
