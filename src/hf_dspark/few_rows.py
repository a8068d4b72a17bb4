"""Products of few rows with large float32 matrices on a CPU, in the time that reading the matrix once takes.

A verification pass shows all weights of the target to as many tokens as are verified, and a draft its own to a block.
MKL, which multiplies float32 for PyTorch on x86, has no fast way for so few rows, least of all on CPUs that are not
Intel's; oneDNN, which comes with PyTorch as well, has one (`benchmarks/few_rows.py` measures both on this machine).
Other devices and dtypes are left alone. Knows nothing of generation, caches or attention.
"""

import functools
import platform
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

MAX_ROWS = 128  # with more, both ways take the same time


class Gain(NamedTuple):
    """From which size on oneDNN is the faster one.

    Args:
        least_rows (`int`): With fewer, MKL is as fast.
        least_weights (`int`): Entries of the matrix. Below, the call itself takes as long as the product.
    """

    least_rows: int
    least_weights: int


AMD, INTEL = "AuthenticAMD", "GenuineIntel"  # as CPUs name their makers
# By maker, and by the vector units that PyTorch uses; others were not measured.
GAINS = {(AMD, "AVX2"): Gain(1, 2**20), (AMD, "AVX512"): Gain(1, 2**17), (INTEL, "AVX512"): Gain(4, 2**21)}


def few_rows_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as `torch.nn.functional.linear` does, but for rounding.

    Args:
        input (`torch.Tensor` of shape `[..., in]`).
        weight (`torch.Tensor` of shape `[out, in]`).
        bias (`torch.Tensor` of shape `[out]`, *optional*).

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    return onednn_linear(input, weight, bias) if _is_slow(input, weight, bias) else F.linear(input, weight, bias)


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by oneDNN, without asking whether that is faster, or possible.

    Args:
        input, weight, bias: As in [`few_rows_linear`].

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    # `.default`: choosing among the overloads would take as long as a small product.
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


class FewRowsLinear(nn.Linear):
    """A linear layer that is mostly shown a few rows, as the layers of a draft are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(input, self.weight, self.bias)


def large_linears(model: nn.Module) -> list[nn.Linear]:
    """Find who gains by [`multiplying_few_rows`].

    Args:
        model (`nn.Module`): It may be such a layer itself.

    Returns:
        `list[nn.Linear]`: Plain layers alone: classes of others may hold something else than their weights.
    """
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    # Compressed layers have no weight before they are first called.
    return [linear for linear in linears if _is_large(getattr(linear, "weight", None))]


def apply_to_few_rows(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Call a module whose plain linear layers, itself included, multiply as [`few_rows_linear`] does.

    Args:
        module (`nn.Module`): Small: its layers are looked for in each call.
        input (`torch.Tensor`): Its argument.

    Returns:
        `torch.Tensor`: What `module(input)` returns; with gradients or in a compiled graph it is exactly that.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return module(input)
    with multiplying_few_rows(large_linears(module)):
        return module(input)


@contextmanager
def multiplying_few_rows(linears: Sequence[nn.Linear]) -> Iterator[None]:
    """While entered, layers multiply as [`few_rows_linear`] does. What others put in place of their `forward` stays.

    Args:
        linears (`Sequence[nn.Linear]`): From [`large_linears`].
    """
    changed = [linear for linear in linears if "forward" not in vars(linear)]
    try:
        for linear in changed:
            # A bound method, as compiled graphs take it for the same one in every round.
            vars(linear)["forward"] = types.MethodType(FewRowsLinear.forward, linear)
        yield
    finally:
        for linear in changed:
            vars(linear).pop("forward", None)


@functools.cache
def _gain() -> Gain | None:
    """Return when oneDNN is the faster one on this machine; `None` where it never is, or nobody knows."""
    # Where PyTorch has no MKL, it multiplies in other ways, which nobody measured. The operator is the one that
    # torch.compile asks for; it has no public name.
    with_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    has_both = with_onednn and torch.backends.mkl.is_available()
    return GAINS.get((_maker(), torch.backends.cpu.get_cpu_capability())) if has_both else None


def _maker() -> str | None:
    """Return who made the CPU: `AMD`, `INTEL`, or `None` for others."""
    try:
        description = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        description = platform.processor()
    return next((maker for maker in (AMD, INTEL) if maker in description), None)


def _is_large(weight: torch.Tensor | None) -> bool:
    """Tell whether a weight is a large float32 matrix in CPU memory. Subclasses stand for something else than that."""
    gain = _gain()
    return (
        gain is not None
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.layout == torch.strided
        and weight.numel() >= gain.least_weights
    )


def _is_slow(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Tell whether a product would be slow, and needs nothing that oneDNN does not know.

    It knows no backward pass and no autocast, reads matrix and bias without strides, and cannot say which shapes are
    wrong.
    """
    return (
        not torch.compiler.is_compiling()
        and _is_large(weight)
        and _gain().least_rows <= input.shape[:-1].numel() <= MAX_ROWS
        and input.dtype == torch.float32
        and input.shape[-1] == weight.shape[1]
        and weight.is_contiguous()
        and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1]))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )
