"""Products of few rows with large matrices on a CPU, in the time that reading the matrix once takes.

A verification pass shows all weights of the target to as many tokens as are verified, and a draft its own to a block.
MKL, which multiplies float32 for PyTorch on x86, has no fast way for so few rows, least of all on CPUs that are not
Intel's; oneDNN, which comes with PyTorch as well, has one. It is faster still on weights in a layout of its own, into
which it brings those of bfloat16 anew with each product: `packed_weights` keeps copies in it, and int8 copies for
products that need not be right. AMX units need no copies in bfloat16: with the factors exchanged they read the weights
as they are. `benchmarks/few_rows.py` measures all of it on this machine. Other devices and dtypes are left alone.
Knows nothing of generation, caches or attention, or of who keeps copies.
"""

import functools
import platform
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from .int8_copy import Int8Copy, can_multiply

MAX_ROWS = 128  # with more, all ways take the same time
GATHERED_AT_A_TIME = 2**19  # entries of rows that are picked out, which stay in a cache: new memory would cost more


class Gain(NamedTuple):
    """Which products another way than PyTorch's own is faster for.

    Args:
        least_rows (`int`): With fewer, PyTorch's is as fast.
        least_weights (`int`): Entries of the matrix. Below, the call itself takes as long as the product.
        most_rows (`int`, *optional*): With more, PyTorch's is as fast again.
    """

    least_rows: int
    least_weights: int
    most_rows: int = MAX_ROWS

    def is_made(self, num_rows: int, weight: torch.Tensor) -> bool:
        """Tell whether some rows times a matrix are such a product."""
        return self.least_rows <= num_rows <= self.most_rows and is_large(weight, self.least_weights)


AMD, INTEL = "AuthenticAMD", "GenuineIntel"  # as CPUs name their makers
# By maker, vector units and dtype; others were not measured. AMX does nothing for float32: CPUs with it are listed
# again beside those with AVX-512 alone.
GAINS = {
    (AMD, "AVX2", torch.float32): Gain(1, 2**20),
    (AMD, "AVX512", torch.float32): Gain(1, 2**17),
    (INTEL, "AVX512", torch.float32): Gain(4, 2**21),
    (INTEL, "AMX", torch.float32): Gain(4, 2**21),
}
# With the factors exchanged.
TRANSPOSED_GAINS = {
    (INTEL, "AMX", torch.bfloat16): Gain(1, 2**20, most_rows=32),
}
# From how many entries on a packed copy is the faster one, with any number of rows. It is on CPUs with AMX, too, but
# whole calls of a hundred tokens gain nothing there: to see whether the weights have changed takes what it saves.
PACKED_GAINS = {
    (AMD, "AVX512", torch.float32): 2**16,
    (AMD, "AVX512", torch.bfloat16): 2**16,
}
# From how many entries on a rough product with an int8 copy saves more than picking out some rows afterwards costs.
# Without VNNI, sums of 16 bits would overflow.
INT8_GAINS = {
    (AMD, "AVX512", torch.float32): 2**25,
    (AMD, "AVX512", torch.bfloat16): 2**27,
    (INTEL, "AMX", torch.float32): 2**25,
    (INTEL, "AMX", torch.bfloat16): 2**27,
}


def few_rows_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as `torch.nn.functional.linear` does, but for rounding.

    Args:
        input (`torch.Tensor` of shape `[..., in]`).
        weight (`torch.Tensor` of shape `[out, in]`).
        bias (`torch.Tensor` of shape `[out]`, *optional*).

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    if torch.compiler.is_compiling() or not _is_served(input, weight, bias):
        return F.linear(input, weight, bias)
    num_rows, copies = input.shape[:-1].numel(), _copies_in_use.get(None)
    packed = None if copies is None else copies.of(weight)
    if packed is not None:
        return onednn_linear(input, packed, bias)
    for gain, way in ((_transposed_gain(weight.dtype), transposed_linear), (_gain(weight.dtype), onednn_linear)):
        if gain is not None and gain.is_made(num_rows, weight):
            return way(input, weight, bias)
    return F.linear(input, weight, bias)


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by oneDNN, without asking whether that is faster, or possible.

    Args:
        input, weight, bias: As in [`few_rows_linear`]; the weight may be a packed copy.

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    # `.default`: choosing among the overloads would take as long as a small product.
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


def transposed_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with the factors exchanged, without asking whether that is faster.

    AMX units read their left factor as it lies in memory, and their right one by pairs of rows: oneDNN reorders that
    with each product, and here it is the smaller one.

    Args:
        input, weight, bias: As in [`few_rows_linear`].

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    rows = input.reshape(-1, input.shape[-1])
    if len(rows) > 1:
        transposed = torch.mm(weight, rows.t()) if bias is None else torch.addmm(bias[:, None], weight, rows.t())
    elif bias is None:
        transposed = onednn_linear(weight, rows)  # of one column, PyTorch would make the slow product again
    else:  # a bias that is added behind the product would be rounded twice
        return F.linear(input, weight, bias)
    # Row by row: of columns that lie apart, `contiguous` takes twice as long.
    return transposed.t().index_select(0, _first_integers(len(rows))).view(*input.shape[:-1], len(weight))


@functools.cache  # making them takes as long as a small product
def _first_integers(count: int) -> torch.Tensor:
    return torch.arange(count, device="cpu")


def products_with_rows(weight: torch.Tensor, ids: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply vectors with some rows of a matrix, others for each of them.

    Args:
        weight (`torch.Tensor` of shape `[out, in]`): On any device.
        ids (`torch.LongTensor` of shape `[..., n]`): Rows.
        vectors (`torch.Tensor` of shape `[..., in]`).

    Returns:
        `torch.Tensor` of shape `[..., n]`.
    """
    size = max(1, GATHERED_AT_A_TIME // (ids.shape[-1] * weight.shape[1]))
    if weight.device.type == "cpu" and ids.shape[:-1].numel() > size:
        parts = zip(ids.flatten(0, -2).split(size), vectors.flatten(0, -2).split(size), strict=True)
        return torch.cat([products_with_rows(weight, *part) for part in parts]).view(ids.shape)
    # A matrix product of one column takes twice as long in bfloat16 on a CPU, most of it before it begins.
    return (F.embedding(ids, weight) * vectors[..., None, :]).sum(dim=-1)


class FewRowsLinear(nn.Linear):
    """A linear layer that is mostly shown a few rows, as the layers of a draft are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(input, self.weight, self.bias)


class Copies(Protocol):
    """Copies of matrices."""

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed copy of a matrix; `None` if there is none."""

    def int8_of(self, weight: torch.Tensor) -> Int8Copy | None:
        """Return the int8 copy of a matrix; `None` if there is none."""


_copies_in_use: ContextVar[Copies | None] = ContextVar("hf_dspark_copies_in_use")


def large_linears(model: nn.Module) -> list[nn.Linear]:
    """Find who gains by [`multiplying_few_rows`].

    Args:
        model (`nn.Module`): It may be such a layer itself.

    Returns:
        `list[nn.Linear]`: Plain layers alone: classes of others may hold something else than their weights.
    """
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    return [linear for linear in linears if _may_gain(getattr(linear, "weight", None))]


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


def rough_product(linear: nn.Module, input: torch.Tensor) -> torch.Tensor | None:
    """Multiply roughly by an int8 copy of a layer's matrix, if that is faster, and all that the layer does.

    Args:
        linear (`nn.Module`): Any layer.
        input (`torch.Tensor` of shape `[..., in]`).

    Returns:
        `torch.Tensor` of shape `[..., out]`, *optional*: As [`Int8Copy.rough_product`] does; `None` without a copy.
    """
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.enabled or input.device.type != "cpu":
        return None
    copies = _copies_in_use.get(None)
    if copies is None or not _only_multiplies(linear):
        return None
    copy = copies.int8_of(linear.weight)
    return None if copy is None else copy.rough_product(input)


def _only_multiplies(module: nn.Module) -> bool:
    """Tell whether a layer is a product with its weight and nothing else, whatever others have hung on it."""
    return (
        type(module) in (nn.Linear, FewRowsLinear)
        and getattr(module.forward, "__func__", None) in (nn.Linear.forward, FewRowsLinear.forward)
        and module.bias is None
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


@contextmanager
def using_copies(copies: Copies | None) -> Iterator[None]:
    """While entered, [`few_rows_linear`] multiplies by these copies where it can; by none of an outer call.

    Args:
        copies ([`Copies`], *optional*): Of the weights as they are now.
    """
    token = _copies_in_use.set(copies)
    try:
        yield
    finally:
        _copies_in_use.reset(token)


@functools.cache
def _gain(dtype: torch.dtype) -> Gain | None:
    """Return when oneDNN is the faster one on this machine; `None` where it never is, or nobody knows."""
    return GAINS.get((*_cpu(), dtype)) if _has_both() else None


@functools.cache
def _transposed_gain(dtype: torch.dtype) -> Gain | None:
    """Return when exchanged factors are faster on this machine; `None` where they never are, or nobody knows."""
    return TRANSPOSED_GAINS.get((*_cpu(), dtype)) if multiplies_bfloat16() else None


@functools.cache
def packed_gain(dtype: torch.dtype) -> int | None:
    """Return the entries from which on a packed copy is the faster one; `None` where it never is, or nobody knows."""
    has_packing = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return PACKED_GAINS.get((*_cpu(), dtype)) if _has_both() and has_packing else None


@functools.cache
def int8_gain(dtype: torch.dtype) -> int | None:
    """Return the entries from which on an int8 copy gains; `None` where it never does, or nobody knows."""
    return INT8_GAINS.get((*_cpu(), dtype)) if _has_both() and can_multiply() else None


def _has_both() -> bool:
    # Where PyTorch has no MKL, it multiplies in other ways, which nobody measured. The operator is the one that
    # torch.compile asks for; it has no public name.
    with_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return with_onednn and torch.backends.mkl.is_available()


def multiplies_bfloat16() -> bool:
    """Tell whether oneDNN multiplies bfloat16 here. It does not where the environment keeps it from newer units."""
    return _has_both() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _cpu() -> tuple[str | None, str]:
    """Return who made the CPU, `AMD`, `INTEL` or `None` for others, and the best units that PyTorch uses."""
    try:
        description = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        description = platform.processor()
    maker = next((maker for maker in (AMD, INTEL) if maker in description), None)
    units = torch.backends.cpu.get_cpu_capability()
    # oneDNN uses AMX unasked, where the system lets it: then the system lists it.
    return maker, "AMX" if units == "AVX512" and "amx_bf16" in description else units


def _may_gain(weight: torch.Tensor | None) -> bool:
    if weight is None:  # of compressed layers, before they are first called
        return False
    gains = (_gain(weight.dtype), _transposed_gain(weight.dtype))
    least = [packed_gain(weight.dtype), *(gain.least_weights for gain in gains if gain is not None)]
    return any(is_large(weight, entries) for entries in least if entries is not None)


def is_large(weight: torch.Tensor, least_weights: int) -> bool:
    """Tell whether a weight is a matrix in CPU memory, and large. Subclasses stand for something else than that.

    oneDNN reads matrices without strides.
    """
    return (
        type(weight) in (nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dim() == 2
        and weight.numel() >= least_weights
        and weight.is_contiguous()
    )


def _is_served(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Tell whether a product has few rows, and needs nothing that oneDNN does not know.

    It knows no backward pass and no autocast, reads a bias without strides, and cannot say which shapes are wrong.
    """
    return (
        0 < input.shape[:-1].numel() <= MAX_ROWS
        and input.dtype == weight.dtype
        and input.shape[-1] == weight.shape[-1]
        and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )
