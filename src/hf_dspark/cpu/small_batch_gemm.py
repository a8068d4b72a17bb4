"""Small-batch GEMM on a CPU: products of a few rows with a large matrix, in about the time of reading the matrix.

PyTorch multiplies float32 on x86 by MKL, which has no fast small-batch GEMM. oneDNN, which comes with it, has one. It
is faster still on weights prepacked in its own layout; those of bfloat16 it reorders with each product. Two need no
other layout if the operands are swapped: AMX units in bfloat16, and MKL with AVX2 for two to four rows.
"""

import functools
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

MAX_ROWS = 128  # with more, all ways take the same time
PACKED_FOR = 8  # rows that oneDNN chooses the layout for; it serves 1 to MAX_ROWS well
WAYS = ("packed", "swapped", "onednn")  # the fastest first
AMD, INTEL = "AuthenticAMD", "GenuineIntel"  # as CPUs name their makers


class Gain(NamedTuple):
    """Which products another way is faster for."""

    least_rows: int
    least_weights: int  # entries of the matrix; below, the call itself takes as long as the product
    most_rows: int = MAX_ROWS


# By way, maker, vector units and dtype, from `benchmarks/gemm.py`. Other CPUs were not measured and keep PyTorch's
# way. AMX does nothing for float32: CPUs with it are listed again beside those with AVX-512 alone.
GAINS = {
    ("onednn", AMD, "AVX2", torch.float32): Gain(1, 2**20),
    ("onednn", AMD, "AVX512", torch.float32): Gain(1, 2**17),
    ("onednn", INTEL, "AVX512", torch.float32): Gain(4, 2**21),
    ("onednn", INTEL, "AMX", torch.float32): Gain(4, 2**21),
    ("swapped", AMD, "AVX2", torch.float32): Gain(2, 2**16, most_rows=4),
    ("swapped", INTEL, "AMX", torch.bfloat16): Gain(1, 2**20, most_rows=32),
    # In float32, single rows gain nothing by another layout.
    ("packed", AMD, "AVX2", torch.float32): Gain(2, 2**17),
    ("packed", AMD, "AVX512", torch.float32): Gain(2, 2**16),
    ("packed", AMD, "AVX512", torch.bfloat16): Gain(1, 2**16),
    ("packed", INTEL, "AMX", torch.float32): Gain(4, 2**20),
    ("packed", INTEL, "AMX", torch.bfloat16): Gain(1, 2**16),
}


class PackedWeight:
    """A weight prepacked in oneDNN's own layout, which no other operator can read."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._state = _state(weight)
        self._packed = packed_weight(weight)

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed weight; `None` if the weight has changed since in a way that PyTorch notices."""
        return self._packed if _state(weight) == self._state else None


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_FOR)


def _state(weight: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, int]:
    return weight.data_ptr(), weight.dtype, weight.shape, 0 if weight.is_inference() else weight._version


def small_batch_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, packed: PackedWeight | None = None
) -> torch.Tensor:
    """Multiply as `torch.nn.functional.linear` does, but for rounding; `packed` is the weight's."""
    if torch.compiler.is_compiling():
        return (torch.ops.hf_dspark.linear.default if in_graphs.wanted else F.linear)(input, weight, bias)
    num_rows = input.shape[:-1].numel()
    for way in WAYS if packed is not None else WAYS[1:]:
        if may_gain(way, weight, num_rows) and _is_served(input, weight, bias):
            if way == "swapped":
                return swapped_linear(input, weight, bias)
            operand = weight if way == "onednn" else packed.of(weight)
            if operand is not None:
                return onednn_linear(input, operand, bias)
    return F.linear(input, weight, bias)


# Graphs of others keep PyTorch's products. In those that are traced meanwhile, the product is one operator, which
# chooses by the rows that come.
in_graphs = SimpleNamespace(wanted=False)


_library = torch.library.Library("hf_dspark", "DEF")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", small_batch_linear, "CPU")
_library.impl("linear", lambda input, weight, bias: input.new_empty(*input.shape[:-1], len(weight)), "Meta")


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by oneDNN, even where that is slower; the weight may be packed."""
    # `.default`: choosing among the overloads would take as long as a small product.
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


def swapped_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with the operands swapped, even where that is slower."""
    # AMX units read their left operand as it lies in memory, and their right one by pairs of rows: oneDNN reorders
    # that with each product, and here it is the smaller one.
    rows = input.reshape(-1, input.shape[-1])
    if len(rows) > 1:
        transposed = torch.mm(weight, rows.t()) if bias is None else torch.addmm(bias[:, None], weight, rows.t())
    elif bias is None:
        transposed = onednn_linear(weight, rows)  # of one column, PyTorch would make the slow product again
    else:  # a bias that is added after the product would be rounded twice
        return F.linear(input, weight, bias)
    # Row by row: of columns that lie apart, `contiguous` takes twice as long.
    return transposed.t().index_select(0, _first_integers(len(rows))).view(*input.shape[:-1], len(weight))


@functools.cache  # making them takes as long as a small product
def _first_integers(count: int) -> torch.Tensor:
    return torch.arange(count, device="cpu")


def may_gain(way: str, weight: torch.Tensor | None, num_rows: int | None = None) -> bool:
    """Tell whether a way is faster for products of a large matrix in CPU memory with that many rows, or with any.

    Compressed layers have no weight at first.
    """
    if weight is None:
        return False
    gain = gain_of(way, weight.dtype)
    return (  # what most layers fail first: each of them asks in every pass
        gain is not None
        and (num_rows is None or gain.least_rows <= num_rows <= gain.most_rows)
        and weight.numel() >= gain.least_weights
        and type(weight) in (nn.Parameter, torch.Tensor)  # subclasses stand for something else
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dim() == 2
        and weight.is_contiguous()
    )


def _is_served(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    # oneDNN knows no backward pass and no autocast, reads a bias without strides, and cannot say which shapes are
    # wrong.
    return (
        0 < input.shape[:-1].numel() <= MAX_ROWS
        and input.dtype == weight.dtype
        and input.shape[-1] == weight.shape[-1]
        and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )


@functools.cache
def gain_of(way: str, dtype: torch.dtype) -> Gain | None:
    """Return when a way, `onednn`, `swapped` or `packed`, is faster on this CPU; `None` if never, or not measured."""
    is_known = has_both() and (dtype != torch.bfloat16 or multiplies_bfloat16())
    can_pack = way != "packed" or hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return GAINS.get((way, *cpu_kind(), dtype)) if is_known and can_pack else None


def has_both() -> bool:
    """Tell whether PyTorch has MKL and oneDNN's operator; without MKL it multiplies in ways that were not measured."""
    # The operator is the one that torch.compile asks for; it has no public name.
    with_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return with_onednn and torch.backends.mkl.is_available()


def multiplies_bfloat16() -> bool:
    """Tell whether oneDNN multiplies bfloat16 here; the environment may keep it from newer units."""
    return has_both() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def lacks_bfloat16() -> bool:
    """Tell whether this is a processor on which bfloat16 was measured to be far slower than float32."""
    return has_both() and cpu_kind()[0] is not None and not multiplies_bfloat16()


def cpu_kind() -> tuple[str | None, str]:
    """Return the CPU's maker, `AMD`, `INTEL` or `None` for others, and the best vector units that PyTorch uses."""
    try:
        description = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        description = platform.processor()
    maker = next((maker for maker in (AMD, INTEL) if maker in description), None)
    units = torch.backends.cpu.get_cpu_capability()
    # oneDNN uses AMX unasked where the system lets it; then the system lists it.
    return maker, "AMX" if units == "AVX512" and "amx_bf16" in description else units
