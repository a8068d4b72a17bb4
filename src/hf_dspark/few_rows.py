"""Products of few rows with large matrices on a CPU, in the time that reading the matrix once takes.

A verification pass shows all weights of the target to as many tokens as are verified, and a draft its own to a block.
MKL, which multiplies float32 for PyTorch on x86, has no fast way for so few rows, least of all on CPUs that are not
Intel's; oneDNN, which comes with PyTorch as well, has one. It is faster still on weights in a layout of its own, into
which it brings those of bfloat16 anew with each product: packed copies are kept ([`PackedWeights`]).
`benchmarks/few_rows.py` measures all of it on this machine. Other devices and dtypes are left alone. Knows nothing of
generation, caches or attention.
"""

import functools
import platform
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

MAX_ROWS = 128  # with more, all ways take the same time
PACKED_FOR = 8  # rows that oneDNN chooses the layout for; it serves 1 to `MAX_ROWS` well
MEMORY_SHARE = 2  # packed copies take one part in so many of the free memory at most


class Gain(NamedTuple):
    """From which size on oneDNN is the faster one.

    Args:
        least_rows (`int`): With fewer, MKL is as fast.
        least_weights (`int`): Entries of the matrix. Below, the call itself takes as long as the product.
    """

    least_rows: int
    least_weights: int


AMD, INTEL = "AuthenticAMD", "GenuineIntel"  # as CPUs name their makers
# By maker, vector units that PyTorch uses, and dtype; others were not measured.
GAINS = {
    (AMD, "AVX2", torch.float32): Gain(1, 2**20),
    (AMD, "AVX512", torch.float32): Gain(1, 2**17),
    (INTEL, "AVX512", torch.float32): Gain(4, 2**21),
}
# From how many entries on a packed copy is the faster one, with any number of rows.
PACKED_GAINS = {
    (AMD, "AVX512", torch.float32): 2**16,
    (AMD, "AVX512", torch.bfloat16): 2**16,
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
    copies = _copies.get(None)
    packed = None if copies is None else copies.of(weight)
    if packed is not None:
        return onednn_linear(input, packed, bias)
    gain = _gain(weight.dtype)
    if gain is None or input.shape[:-1].numel() < gain.least_rows or not _is_large(weight, gain.least_weights):
        return F.linear(input, weight, bias)
    return onednn_linear(input, weight, bias)


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by oneDNN, without asking whether that is faster, or possible.

    Args:
        input, weight, bias: As in [`few_rows_linear`]; the weight may be a packed copy.

    Returns:
        `torch.Tensor` of shape `[..., out]`.
    """
    # `.default`: choosing among the overloads would take as long as a small product.
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a matrix in oneDNN's own layout: nobody else can read it."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_FOR)


class FewRowsLinear(nn.Linear):
    """A linear layer that is mostly shown a few rows, as the layers of a draft are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(input, self.weight, self.bias)


@dataclass(frozen=True)
class _Copy:
    """A packed copy, of which matrix, and what that held then. Without a copy, it is known that there is none."""

    weight: "weakref.ref[torch.Tensor]"
    packed: torch.Tensor | None = None
    row_sums: torch.Tensor | None = None
    num_bytes: int = 0


class PackedWeights:
    """Packed copies of matrices, made when they are first multiplied with few rows, and dropped with them.

    Weights may change between two calls, also in ways that leave no trace (`weight.data += ...`, as adapters are
    merged): [`~PackedWeights.refresh`] looks at all that they hold.

    Args:
        max_bytes (`int`, *optional*): What the copies may take together; a matrix that does not fit is multiplied as
            it is. Unless given, half of the memory that would be free without them, as it is at each refresh.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._copies: dict[int, _Copy] = {}  # by the weight's id
        self._max_bytes = max_bytes
        self._packed_bytes = 0
        self._limit = self._memory_limit()

    def _memory_limit(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        return (free_memory() + self._packed_bytes) // MEMORY_SHARE

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a matrix; `None` if there is nothing to gain by it, or no room for it."""
        copy = self._copies.get(id(weight))
        if copy is None or copy.weight() is not weight:
            copy = self._copies[id(weight)] = self._copy(weight)
        return copy.packed

    def _copy(self, weight: torch.Tensor) -> _Copy:
        key = id(weight)
        reference = weakref.ref(weight, lambda _: self._forget(key))
        least = _packed_gain(weight.dtype)
        # What is computed for each call, by a parametrization for example, would be packed in each call.
        lasts = isinstance(weight, nn.Parameter) and least is not None and _is_large(weight, least)
        if not lasts or not _has_words(weight) or self._packed_bytes + weight.nbytes > self._limit:
            return _Copy(reference)
        self._packed_bytes += weight.nbytes
        return _Copy(reference, packed_weight(weight), row_sums(weight), weight.nbytes)

    def refresh(self, weights: Iterable[torch.Tensor]) -> None:
        """Forget the copies of those matrices that have changed since. Takes as long as reading them once.

        Args:
            weights (`Iterable[torch.Tensor]`): Those that will be asked for.
        """
        for weight in weights:
            copy = self._copies.get(id(weight))
            if copy is not None and (copy.packed is None or not _is_same(weight, copy.row_sums)):
                self._forget(id(weight))
        self._limit = self._memory_limit()

    def _forget(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        self._packed_bytes -= 0 if copy is None else copy.num_bytes


@functools.cache
def _all_packed_weights() -> PackedWeights:
    return PackedWeights()


def packed_weights_of(*models: nn.Module) -> PackedWeights:
    """Return the packed copies of this process; those of some models are of their weights as they are now.

    Args:
        models (`nn.Module`): Whose layers will multiply.
    """
    packed = _all_packed_weights()
    packed.refresh(parameter for model in models for parameter in model.parameters())
    return packed


def _has_words(weight: torch.Tensor) -> bool:
    """Tell whether the rows of a matrix can be read as 64-bit words."""
    return weight.shape[1] * weight.itemsize % 8 == 0 and weight.storage_offset() * weight.itemsize % 8 == 0


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's bits as 64-bit words, `[out]`: a row that changes has another one."""
    return weight.detach().view(torch.int64).sum(dim=1)


def _is_same(weight: torch.Tensor, before: torch.Tensor) -> bool:
    same_kind = weight.device.type == "cpu" and len(weight) == len(before) and _has_words(weight)
    return same_kind and torch.equal(row_sums(weight), before)


_copies: ContextVar[PackedWeights | None] = ContextVar("hf_dspark_packed_weights")


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
def multiplying_few_rows(linears: Sequence[nn.Linear], packed: PackedWeights | None = None) -> Iterator[None]:
    """While entered, layers multiply as [`few_rows_linear`] does. What others put in place of their `forward` stays.

    Args:
        linears (`Sequence[nn.Linear]`): From [`large_linears`].
        packed ([`PackedWeights`], *optional*): Copies for these layers, and for every [`FewRowsLinear`] that is called
            meanwhile. Those of an outer context go on to serve unless given.
    """
    changed = [linear for linear in linears if "forward" not in vars(linear)]
    token = None if packed is None else _copies.set(packed)
    try:
        for linear in changed:
            # A bound method, as compiled graphs take it for the same one in every round.
            vars(linear)["forward"] = types.MethodType(FewRowsLinear.forward, linear)
        yield
    finally:
        for linear in changed:
            vars(linear).pop("forward", None)
        if token is not None:
            _copies.reset(token)


MEMORY_FILE = "/proc/meminfo"
# Of a control group: what it may take, what it takes, and how much of that is files read once, which can be dropped.
MEMORY_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file",
    ),
)  # fmt: skip


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of its container if that has a limit.

    0 where the system does not say so as Linux does. (psutil knows others, too; this module is part of the code that a
    draft's repository carries, which asks for nothing that transformers does not need.)
    """
    try:
        available = next(line for line in _lines(MEMORY_FILE) if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
    free = [int(available.split()[1]) * 1024]
    for limit, used, statistics, droppable in MEMORY_LIMITS:
        try:
            counts = dict(line.split() for line in _lines(statistics))
            taken = int(_lines(used)[0]) - int(counts.get(droppable, 0))
            free.append(int(_lines(limit)[0]) - taken)
        except (OSError, ValueError):  # not this kind of container, or "max": no limit
            continue
    return max(0, min(free))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@functools.cache
def _gain(dtype: torch.dtype) -> Gain | None:
    """Return when oneDNN is the faster one on this machine; `None` where it never is, or nobody knows."""
    return GAINS.get((*_cpu(), dtype)) if _has_both() else None


@functools.cache
def _packed_gain(dtype: torch.dtype) -> int | None:
    """Return the entries from which on a packed copy is the faster one; `None` where it never is, or nobody knows."""
    has_packing = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return PACKED_GAINS.get((*_cpu(), dtype)) if _has_both() and has_packing else None


def _has_both() -> bool:
    # Where PyTorch has no MKL, it multiplies in other ways, which nobody measured. The operator is the one that
    # torch.compile asks for; it has no public name.
    with_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return with_onednn and torch.backends.mkl.is_available()


def _cpu() -> tuple[str | None, str]:
    """Return who made the CPU, `AMD`, `INTEL` or `None` for others, and the vector units that PyTorch uses."""
    try:
        description = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        description = platform.processor()
    maker = next((maker for maker in (AMD, INTEL) if maker in description), None)
    return maker, torch.backends.cpu.get_cpu_capability()


def _may_gain(weight: torch.Tensor | None) -> bool:
    if weight is None:  # of compressed layers, before they are first called
        return False
    gain, packed_gain = _gain(weight.dtype), _packed_gain(weight.dtype)
    least = [packed_gain] if gain is None else [packed_gain, gain.least_weights]
    return any(_is_large(weight, entries) for entries in least if entries is not None)


def _is_large(weight: torch.Tensor, least_weights: int) -> bool:
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
