"""Copies of weights in the layout in which oneDNN multiplies few rows fastest, and the memory that they may take.

A copy costs as much memory as its matrix, and packing it as much time as some ten products save. Copies in 8 bits, for
rough products, are kept beside them: a byte per entry, and the time that a hundred products save, or a few dozen in
float32. So copies are kept from call to call, as long as their model lives, and before each call all weights are read
to see whether they have changed. Knows nothing of generation.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .few_rows import int8_gain, is_large, packed_gain
from .int8_copy import Int8Copy

PACKED_FOR = 8  # rows that oneDNN chooses the layout for; it serves 1 to `few_rows.MAX_ROWS` well
CHUNK_WORDS = 2**18  # of 64 bits, at a time: 2 MiB, which stay in a cache
MEMORY_SHARE = 2  # all copies take one part in so many of the memory that would be free without them, at most
# They are dropped when less than one part in so many is left of it. What is free changes all the time: if copies that
# fill their share were dropped as soon as they exceed it, a large model would be packed anew in most calls.
LEAST_LEFT = 4


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a matrix in oneDNN's own layout: nobody else can read it."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_FOR)


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """Return a number for each row of a matrix, `[out]`, by which a change is noticed wherever it is.

    It is the sum modulo 2^64 of the row's bits as 64-bit words, each times a random odd factor of its own. Before, the
    upper half of a word is mixed into the lower one: signs that turn in two words would vanish without that, as times
    an odd factor the highest bit stays what it is, and twice 2^63 is nothing. A single word is taken for no other one
    but its complement, in which each bit is another; changes of several words make up for each other with a chance of
    2^-32 or less.
    """
    words = weight.detach().view(torch.int64)
    factors, sums = _odd_factors(words.shape[1]), words.new_empty(len(words))
    rows_at_a_time = max(1, CHUNK_WORDS // words.shape[1])
    mixed = words.new_empty(min(rows_at_a_time, len(words)), words.shape[1])  # once: new memory would cost more
    for part, part_sums in zip(words.split(rows_at_a_time), sums.split(rows_at_a_time), strict=True):
        terms = torch.bitwise_right_shift(part, 32, out=mixed[: len(part)]).bitwise_xor_(part).mul_(factors)
        torch.sum(terms, dim=1, out=part_sums)
    return sums


@cache
def _odd_factors(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu") * 2 + 1


@dataclass
class _Matrix:
    """A matrix, the copies of it, and what it was when they were made.

    Attributes:
        weight (`nn.Parameter`): The matrix.
        copies (`dict`): "packed" and "int8", as far as they were asked for; `None` where there was no memory.
        num_bytes (`int`): What they take.
        form, row_sums: Its dtype and shape, and what it held, when the first was made.
    """

    weight: nn.Parameter
    copies: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    form: tuple[torch.dtype, torch.Size] | None = None
    row_sums: torch.Tensor | None = None

    def packed(self) -> torch.Tensor | None:
        """Return its copy in oneDNN's layout, made now if there is none."""
        if "packed" not in self.copies:
            self._copy("packed", packed_weight, self.weight.nbytes, self.weight.nbytes)
        return self.copies.get("packed")

    def int8(self) -> Int8Copy | None:
        """Return its copy in 8 bits, made now if there is none."""
        if "int8" not in self.copies:
            self._copy("int8", Int8Copy, self.weight.numel(), 2 * self.weight.numel())
        return self.copies.get("int8")

    def _copy(self, name: str, make: Callable[[torch.Tensor], Any], num_bytes: int, num_bytes_at_work: int) -> None:
        with _packing:
            if name in self.copies:  # by another thread
                return
            made = None
            try:
                if num_bytes_at_work <= memory_left():
                    if self.num_bytes == 0:
                        self.form, self.row_sums = (self.weight.dtype, self.weight.shape), row_sums(self.weight)
                    made = make(self.weight)
                    self.num_bytes += num_bytes
            except RuntimeError:  # out of memory: it can be multiplied as it is
                pass
            self.copies[name] = made

    def try_again(self) -> None:
        """Forget what there was no memory for."""
        self.copies = {name: copy for name, copy in self.copies.items() if copy is not None}

    def is_current(self) -> bool:
        """Tell whether the matrix is what it was."""
        if self.num_bytes == 0:
            return True
        if not _may_have_copies(self.weight) or (self.weight.dtype, self.weight.shape) != self.form:
            return False
        return torch.equal(row_sums(self.weight), self.row_sums)


class PackedWeights:
    """Copies of a model's matrices, packed and in 8 bits, made when they are first asked for.

    Weights may change between two calls, also in ways that leave no trace (`weight.data += ...`, as adapters are
    merged): [`~PackedWeights.refresh`] looks at all that they hold.
    """

    def __init__(self) -> None:
        self._matrices: dict[int, _Matrix] = {}  # by the id of the weight, which is kept: nobody else gets the id

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
        return sum(matrix.num_bytes for matrix in list(self._matrices.values()))

    def refresh(self, model: nn.Module) -> None:
        """Drop all copies if any of the matrices has changed; know those that the model has now.

        Takes as long as reading the weights once.

        Args:
            model (`nn.Module`): Whose copies these are.
        """
        weights = {id(weight): weight for weight in model.parameters() if _may_have_copies(weight)}
        kept = {key: matrix for key, matrix in self._matrices.items() if weights.get(key) is matrix.weight}
        # One that has changed makes others suspicious: those that permute neurons, for example, permute several.
        if len(kept) < len(self._matrices) or not all(matrix.is_current() for matrix in kept.values()):
            kept = {}
        for matrix in kept.values():
            matrix.try_again()
        self._matrices = kept | {key: _Matrix(weight) for key, weight in weights.items() if key not in kept}

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed copy of a matrix; `None` if it is none of this model's, gains nothing, or has no room."""
        matrix = self._matrix(weight, packed_gain(weight.dtype))
        return None if matrix is None else matrix.packed()

    def int8_of(self, weight: torch.Tensor) -> Int8Copy | None:
        """Return the int8 copy of a matrix; `None` if it is none of this model's, gains nothing, or has no room."""
        matrix = self._matrix(weight, int8_gain(weight.dtype))
        return None if matrix is None else matrix.int8()

    def _matrix(self, weight: torch.Tensor, least: int | None) -> _Matrix | None:
        """Return a matrix of this model that has so many entries or more; `None` if no size gains."""
        return None if least is None or weight.numel() < least else self._matrices.get(id(weight))

    def clear(self) -> None:
        """Drop all copies."""
        self._matrices = {}


_packing = threading.RLock()
_kept: "weakref.WeakKeyDictionary[nn.Module, PackedWeights]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class JoinedCopies:
    """The copies of several models."""

    parts: tuple[PackedWeights, ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed copy of a matrix of any of them; `None` if there is none."""
        return next((packed for part in self.parts if (packed := part.of(weight)) is not None), None)

    def int8_of(self, weight: torch.Tensor) -> Int8Copy | None:
        """Return the int8 copy of a matrix of any of them; `None` if there is none."""
        return next((copy for part in self.parts if (copy := part.int8_of(weight)) is not None), None)


def packed_weights_of(*models: nn.Module) -> JoinedCopies:
    """Return the copies of some models' weights as they are now; they are kept as long as the models live.

    Args:
        models (`nn.Module`): Whose layers will multiply.
    """
    with _packing:
        with_copies = [part for part in list(_kept.values()) if part.num_bytes]
        if with_copies and (not torch.backends.mkldnn.enabled or memory_is_short()):
            for part in with_copies:
                part.clear()
        parts = tuple(_kept.setdefault(model, PackedWeights()) for model in models)
        for model, part in zip(models, parts, strict=True):
            part.refresh(model)
    return JoinedCopies(parts)


def _may_have_copies(weight: torch.Tensor) -> bool:
    """Tell whether a weight gains anything by a copy, and whether changes of it will be seen.

    What is computed for each call, by a parametrization for example, is no parameter.
    """
    least = [entries for entries in (packed_gain(weight.dtype), int8_gain(weight.dtype)) if entries is not None]
    return (
        type(weight) is nn.Parameter
        and bool(least)
        and is_large(weight, min(least))
        and weight.shape[1] * weight.itemsize % 8 == 0
        and weight.storage_offset() * weight.itemsize % 8 == 0
    )


def memory_left() -> int:
    """Return the bytes that more copies may take; negative if there are more than would be made now."""
    taken = _bytes_of_copies()
    return (free_memory() + taken) // MEMORY_SHARE - taken


def memory_is_short() -> bool:
    """Tell whether the copies leave so little memory that they should go."""
    free = free_memory()
    return free < (free + _bytes_of_copies()) // LEAST_LEFT


def _bytes_of_copies() -> int:
    return sum(part.num_bytes for part in list(_kept.values()))


MEMORY_FILE, PROCESS_FILE = "/proc/meminfo", "/proc/self/status"
GROUPS_FILE, GROUPS_FOLDER = "/proc/self/cgroup", "/sys/fs/cgroup"
# Of a control group: what it may take, what it takes, and which part of that are files read once, which can be
# dropped; of version 2, then of version 1.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of what its control groups are allowed.

    Files that this process has mapped do not count as free: weights may be read from there. 0 where the system does
    not say so as Linux does.
    """
    try:
        mapped = _kilobytes(PROCESS_FILE, "RssFile")
        free = [_kilobytes(MEMORY_FILE, "MemAvailable") - mapped]
    except (OSError, StopIteration):
        return 0
    for folder in _control_groups():
        for limit, used, droppable in GROUP_FILES:
            try:
                counts = dict(line.split() for line in _lines(folder / "memory.stat"))
                taken = int(_lines(folder / used)[0]) - max(0, int(counts.get(droppable, 0)) - mapped)
                free.append(int(_lines(folder / limit)[0]) - taken)
            except (OSError, ValueError):  # not this version, or "max": no limit
                continue
    return max(0, min(free))


def _kilobytes(path: str, name: str) -> int:
    """Return an entry of one of Linux's lists of sizes, in bytes."""
    return 1024 * int(next(line for line in _lines(path) if line.startswith(f"{name}:")).split()[1])


def _control_groups() -> Iterator[Path]:
    """Yield the folders of the memory groups that this process is in: its own, and those around it."""
    try:
        entries = [line.split(":", 2) for line in _lines(GROUPS_FILE)]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path(GROUPS_FOLDER, "memory" if controllers else "")
        yield from (root / part for part in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents))


def _lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines()
