"""Files of rows: JSON Lines, JSON documents, CSV, and Parquet by `datasets`; one reader for all."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .spellings import COLUMNS

STDIN = "-"
_PACKED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress,
}  # fmt: skip
_UNREAD = {b"(\xb5/\xfd": "is packed by zstd", b"PK\x03\x04": "is a zip archive", b"ARROW1": "is an Arrow file"}
_ROWS = ("data", "rows", "train", "examples", "instances")
_COLUMNS = {*COLUMNS, *itertools.chain(*COLUMNS.values()), "prompt", "text", "input_ids", "prompt_ids"}


@dataclass(frozen=True)
class Fault:
    """What is wrong with one line of a file, as the rest of a sentence about the line."""

    file: str
    line: int
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file} {self.unit} {self.line} {self.reason}"


@dataclass(frozen=True)
class RowFile:
    """The numbered values of a file, what is wrong with the others, and what the numbers count."""

    rows: Iterable[tuple[int, Any]]
    faults: list[Fault]
    unit: str = "line"


def open_table(path: str) -> Any | None:
    """Return a Parquet file as a `datasets.Dataset`, which stays on disk; `None` for other files."""
    file = Path(path)
    if path == STDIN or not file.is_file():
        return None
    with file.open("rb") as opened:
        if opened.read(4) != b"PAR1":
            return None
    try:
        from datasets import Dataset

        return Dataset.from_parquet(path)
    except ImportError as error:
        raise ValueError(f"{path} is a Parquet file: pip install datasets, or write JSON Lines") from error
    except Exception as error:  # of pyarrow, wrapped
        raise ValueError(f"{path} is no whole Parquet file: {error.__cause__ or error}") from error


def read_rows(path: str) -> RowFile:
    """Read a file or a pipe: JSON Lines, a JSON array, `{"data": [...]}` or columns, CSV, TSV, or Parquet.

    `-` is stdin. Text may be UTF-8, 16 or 32, with or without a byte-order mark, and packed by gzip, bzip2 or xz.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if path != STDIN and not (Path(path).is_file() or Path(path).is_fifo()):
        raise ValueError(f"{path}: there is no such file. Name a JSON Lines file, or pass a list of prompts")
    if (table := open_table(path)) is not None:
        return RowFile(list(enumerate(table, start=1)), [], "row")
    content = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    try:
        unpack = next((unpack for mark, unpack in _PACKED.items() if content.startswith(mark)), bytes)
        content = unpack(content)
        if (encoding := json.detect_encoding(content)) != "utf-8":
            content = content.decode(encoding).encode("utf-8", "surrogatepass")
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be unpacked or decoded: {error}") from error
    if found := next((what for mark, what in _UNREAD.items() if content.startswith(mark)), None):
        raise ValueError(f"{path} {found}: write JSON Lines or Parquet, or pack it by gzip")
    kinds = {suffix.lower() for suffix in Path(path).suffixes}
    if kinds & {".csv", ".tsv"}:
        return _read_csv(path, content, "\t" if ".tsv" in kinds else ",")
    return _read_document(path, content) or _read_lines(path, content)


def _read_csv(path: str, content: bytes, delimiter: str) -> RowFile:
    rows, faults = [], []
    try:
        reader = csv.DictReader(io.StringIO(content.decode(), newline=""), delimiter=delimiter, strict=True)
        if twice := _given_twice(reader.fieldnames or ()):
            raise ValueError(f"{path}: its first line names {twice!r} twice. Name each column once")
        for row in reader:
            if None in row or None in row.values():
                faults.append(Fault(path, reader.line_num, "has not as many fields as the first line names"))
            else:
                rows.append((reader.line_num, {name: value or None for name, value in row.items()}))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    return RowFile(rows, faults)


def _read_document(path: str, content: bytes) -> RowFile | None:
    """Read one JSON array or object with all rows; `None` if each line is a value of its own."""
    first, _, rest = content.strip().partition(b"\n")
    if first[:1] not in (b"[", b"{") or (rest and _parse(first)[1] is None):
        return None
    value, error = _parse(content)
    if error is not None:
        is_array = first.rstrip().endswith((b"[", b"{", b",")) and first[:1] == b"["
        return RowFile([], [Fault(path, getattr(error, "lineno", 1), f"is not JSON: {error}")]) if is_array else None
    rows = _rows_of(value)
    return None if rows is None and not rest else RowFile(list(enumerate(rows or [value], start=1)), [], "entry")


def _rows_of(value: Any) -> list[Any] | None:
    """Return the rows that a document holds; `None` if it is one itself."""
    if isinstance(value, list):
        is_row = all(isinstance(each, int) for each in value) or all(
            isinstance(each, dict) and each.keys() & {"role", "from"} for each in value
        )
        return None if is_row else value
    columns = [value[name] for name in value.keys() & _COLUMNS]
    if not columns and (name := next((name for name in _ROWS if isinstance(value.get(name), list)), None)):
        return value[name]
    cells = [cell for column in columns for cell in (column[:1] if isinstance(column, list) else [{}])]
    if cells and all(isinstance(cell, str | list) for cell in cells):
        if all(isinstance(each, list) and len(each) == len(columns[0]) for each in value.values()):
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return None


def _read_lines(path: str, content: bytes) -> RowFile:
    rows, faults = [], []
    # Bytes: a JSON string may hold other marks that Unicode takes for the end of a line.
    for number, line in enumerate(content.split(b"\n" if b"\n" in content else b"\r"), start=1):
        if not line.strip():
            continue
        value, error = _parse(line)
        if error is None:
            rows.append((number, value))
        else:
            faults.append(Fault(path, number, f"is not JSON: {error}"))
    return RowFile(rows, faults)


def _parse(text: bytes) -> tuple[Any, Exception | None]:
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object), None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too; brackets without end
        return None, error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError(f"{_given_twice([name for name, _ in pairs])!r} is given twice")
    return read


def _given_twice(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)
