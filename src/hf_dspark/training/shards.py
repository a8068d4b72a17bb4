"""Tensors by key in checksummed safetensors shards, which several processes fill and an interruption does not hurt.

A folder holds shards `features-<rank>-<random>.safetensors` and per rank one `index-<rank>.jsonl`, with a line for
each finished shard. Files are written under another name and renamed; whatever no index lists is a leftover. Knows
nothing of what the tensors are.
"""

import errno
import hashlib
import json
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MAX_OPEN_SHARDS = 64
_SHARD_NAME = re.compile(r"features-\d{5}-[0-9a-f]{16}\.safetensors")


@dataclass(frozen=True)
class Shard:
    """One line of an index. Indices may come from elsewhere: a file outside of the folder is refused."""

    file: str
    bytes: int
    sha256: str
    rows: dict[str, int]  # key -> length

    def __post_init__(self) -> None:
        if not (type(self.file) is str and _SHARD_NAME.fullmatch(self.file)):
            raise ValueError(f"{self.file!r} is no name of a shard in this folder")
        if type(self.bytes) is not int or type(self.sha256) is not str or type(self.rows) is not dict:
            raise ValueError("bytes, sha256 or rows are of other types")
        if not all(type(length) is int and length > 0 for length in self.rows.values()):
            raise ValueError("rows have no lengths")


class ShardStore:
    """Bfloat16 tensors of shape `[length, width]` by key.

    Tensors are kept in memory, where they can be read, until they fill a shard. Opening writes nothing.

    Args:
        folder (`Path`): Where the shards are, or will be.
        rank (`int`): Number of this process among those that write.
        shard_bytes (`int`): Size of a full shard.
        verify (`bool`): Compare a shard's SHA-256 when it is first read; sizes are compared always.

    Raises:
        ValueError: If an index or a shard is damaged.
    """

    def __init__(self, folder: Path, rank: int = 0, shard_bytes: int = 256 * 2**20, verify: bool = True) -> None:
        if not 0 <= rank <= 99999 or shard_bytes < 1:
            raise ValueError(f"rank must lie in [0, 99999] and shard_bytes be positive, got {rank} and {shard_bytes}")
        self.folder = folder
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.verify = verify
        self._index = folder / f"index-{rank:05d}.jsonl"
        self._buffer: dict[str, torch.Tensor] = {}
        self._cleaned = False
        self._lock: TextIO | None = None
        self._handles: OrderedDict[str, Any] = OrderedDict()
        self._verified: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read all indices again: see what other processes have finished, forget shards that were deleted."""
        self._shards: dict[str, Shard] = {}
        self._found: dict[str, str] = {}  # key -> file
        for path in sorted(self.folder.glob("index-*.jsonl")):
            for shard in read_index(path):
                if (self.folder / shard.file).exists():
                    check_size(self.folder / shard.file, shard.bytes)
                    self._list(shard)
        for name in self._handles.keys() - self._shards.keys():
            del self._handles[name]

    def _list(self, shard: Shard) -> None:
        self._shards[shard.file] = shard
        for key in shard.rows:
            self._found.setdefault(key, shard.file)

    def __contains__(self, key: str) -> bool:
        return key in self._found or key in self._buffer

    def lengths(self) -> dict[str, int]:
        """Return the length of each tensor by key, those not yet written included."""
        written = {key: self._shards[file].rows[key] for key, file in self._found.items()}
        return {key: len(tensor) for key, tensor in self._buffer.items()} | written

    def get(self, key: str, shape: tuple[int, int]) -> torch.Tensor:
        """Return a tensor of a known shape.

        Raises:
            KeyError: If it is not there.
            ValueError: If its shard is damaged, or it has another shape or type.
        """
        if key in self._buffer:
            return self._buffer[key]
        path = self.folder / self._found[key]
        try:
            handle = self._open(path.name)
            part = handle.get_slice(key)  # looks at the header only
            if part.get_shape() != list(shape) or part.get_dtype() != "BF16":
                raise damaged(path, f"a row has shape {part.get_shape()} {part.get_dtype()}, not {list(shape)} BF16")
            return handle.get_tensor(key)
        except SafetensorError as error:
            raise damaged(path, str(error)) from error

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            path, shard = self.folder / name, self._shards[name]
            check_size(path, shard.bytes)
            if self.verify and name not in self._verified:
                check_digest(path, shard.sha256)
                self._verified.add(name)
            self._handles[name] = safe_open(path, framework="pt", device="cpu")
            if len(self._handles) > MAX_OPEN_SHARDS:
                self._handles.popitem(last=False)
        self._handles.move_to_end(name)
        return self._handles[name]

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a new tensor in memory, and write a shard when there are enough; see [`~ShardStore.flush`]."""
        self._buffer[key] = tensor
        if sum(part.nbytes for part in self._buffer.values()) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as one shard, then list it in the index.

        Raises:
            OSError: If the disk is full. What is in memory stays there.
        """
        if not self._buffer:
            return
        self.remove_leftovers()
        name = f"features-{self.rank:05d}-{secrets.token_hex(8)}.safetensors"
        size, digest = self.write(name, lambda path: save_file(self._buffer, path))
        shard = Shard(name, size, digest, {key: len(tensor) for key, tensor in self._buffer.items()})
        end = self._index.stat().st_size if self._index.exists() else 0

        def undo() -> None:
            (self.folder / name).unlink(missing_ok=True)
            if self._index.exists():
                os.truncate(self._index, end)

        with self._undone_on_failure(undo), open(self._index, "a") as file:
            file.write(json.dumps(vars(shard)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._list(shard)
        self._verified.add(name)
        self._buffer = {}

    def close(self) -> None:
        """Close all files, and give the rank back. Reading and writing open them again."""
        self._handles.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock, self._cleaned = None, False

    def _claim(self) -> None:
        """Create the folder, and make sure that no other process writes under this rank; that ends with the process.

        Raises:
            ValueError: If another one does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / f"writer-{self.rank:05d}.lock", "w")
        try:
            import fcntl
        except ImportError:  # not on this system
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"something else is writing to {self.folder} as rank {self.rank}: wait for it, use another folder, or "
                "another rank"
            ) from error

    def remove_leftovers(self) -> None:
        """Create the folder; once, remove what an interrupted process of this rank has left in it."""
        if self._cleaned:
            return
        self._claim()
        finished: set[str] = set()
        if self._index.exists():
            finished = {shard.file for shard in read_index(self._index)}
            os.truncate(self._index, self._index.read_bytes().rfind(b"\n") + 1)
        leftovers = {*self.folder.glob(f"features-{self.rank:05d}-*"), *self.folder.glob(f"*.{self.rank:05d}.tmp")}
        for path in leftovers:
            if path.name not in finished:
                path.unlink()
        self._cleaned = True

    def write(self, name: str, write: Callable[[Path], Any]) -> tuple[int, str]:
        """Write a file under another name, then rename it; return its bytes and SHA-256.

        Raises:
            OSError: If the disk is full. The partial file is removed.
        """
        temporary = self.folder / f"{name}.{self.rank:05d}.tmp"
        with self._undone_on_failure(lambda: temporary.unlink(missing_ok=True)):
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            size, digest = temporary.stat().st_size, _sha256(temporary)
            os.replace(temporary, self.folder / name)
        return size, digest

    @contextmanager
    def _undone_on_failure(self, undo: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            undo()
            if is_disk_full(error):
                raise OSError(
                    errno.ENOSPC,
                    f"the disk of {self.folder} is full. The {len(self._found):,} rows written before can be read, "
                    f"{len(self._buffer):,} more are in memory. Free some space and go on (what is written is not "
                    "computed again), or use fewer rows, a shorter max_length or fewer target_layer_ids",
                ) from error
            raise


def read_index(path: Path) -> list[Shard]:
    """Return the finished shards; a last line that is not complete is being written, or was interrupted.

    Raises:
        ValueError: If another line is damaged.
    """
    shards = []
    for number, line in enumerate(path.read_text().rpartition("\n")[0].splitlines(), start=1):
        try:
            shards.append(Shard(**json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}). Delete the line, and fill the cache with the target: "
                "its rows are computed again"
            ) from error
    return shards


def damaged(path: Path, found: str) -> ValueError:
    """Return the error that says what is wrong with a file, and what to do."""
    return ValueError(
        f"{path} is damaged: {found}. Delete it, and fill the cache with the target: what it held is computed again"
    )


def check_size(path: Path, size: int) -> None:
    """Raise a `ValueError` if a file has another size."""
    if path.stat().st_size != size:
        raise damaged(path, f"it has {path.stat().st_size:,} bytes, not {size:,}")


def check_digest(path: Path, digest: str) -> None:
    """Raise a `ValueError` if a file has another SHA-256."""
    if _sha256(path) != digest:
        raise damaged(path, "its SHA-256 is not the one it was written with")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that the disk, or the user's share of it, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota
    # safetensors has an error type of its own, which passes on the operating system's words.
    return isinstance(error, SafetensorError) and bool(re.search(r"os error (28|122)\b|No space left", str(error)))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
