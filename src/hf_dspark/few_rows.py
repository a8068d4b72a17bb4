"""Products of few rows with large float32 matrices on a CPU, in the time that reading the matrix once takes.

A verification pass shows all weights of the target to 2 to 64 tokens, and so does a draft. MKL, which multiplies
float32 for PyTorch on x86, has no fast way for so few rows: with eight it takes three to five times as long as with
one. oneDNN, which comes with PyTorch as well, reads the matrix once (`benchmarks/few_rows.py` measures both on this
machine). Other devices and dtypes have such ways of their own, and are left alone. Knows nothing of drafts, caches or
attention.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

MAX_ROWS = 64  # from here on a product takes its time for arithmetic
MIN_WEIGHTS = 2**20  # below, the call itself takes as long as the product


def few_rows_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what `torch.nn.functional.linear` returns, but for rounding.

    Args:
        rows (`torch.Tensor` of shape `[..., in]`).
        weight (`torch.Tensor` of shape `[out, in]`).
        bias (`torch.Tensor` of shape `[out]`, *optional*).
    """
    if not _is_slow(rows, weight):
        return F.linear(rows, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class FewRowsLinear(nn.Linear):
    """A linear layer of a draft, which works on one block at a time."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(rows, self.weight, self.bias)


def large_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the plain linear layers within a model, itself included, that gain by [`multiplying_few_rows`]."""
    if not _has_both_ways():
        return []
    return [module for module in model.modules() if type(module) is nn.Linear and _is_large(module.weight)]


def apply_to_few_rows(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return `module(rows)`, multiplied as [`few_rows_linear`] does where the module is a plain linear layer."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return module(rows)
    with multiplying_few_rows(large_linears(module)):
        return module(rows)


@contextmanager
def multiplying_few_rows(linears: Sequence[nn.Linear]) -> Iterator[None]:
    """While entered, these layers multiply as [`few_rows_linear`] does. What others hooked into a layer stays."""
    changed = [linear for linear in linears if "forward" not in vars(linear)]
    for linear in changed:
        vars(linear)["forward"] = functools.partial(FewRowsLinear.forward, linear)
    try:
        yield
    finally:
        for linear in changed:
            vars(linear).pop("forward", None)


@functools.cache
def _has_both_ways() -> bool:
    # Where PyTorch has no MKL, it multiplies in other ways, which nobody measured. The operator is the one that
    # torch.compile asks for; it has no public name.
    with_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return with_onednn and torch.backends.mkl.is_available()


def _is_large(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_WEIGHTS


def _is_slow(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether a product would be slow, and needs none of what oneDNN's does not have: gradients and autocast."""
    return (
        _is_large(weight)
        and 0 < rows.shape[:-1].numel() <= MAX_ROWS
        and rows.dtype == torch.float32
        and rows.shape[-1] == weight.shape[1]  # else torch says what is wrong, and oneDNN does not
        and weight.is_contiguous()
        and type(weight) in (torch.Tensor, nn.Parameter)  # others may stand for something else than their numbers
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.enabled
        and _has_both_ways()
    )
