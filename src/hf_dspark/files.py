"""Files that survive interruptions: finished work that grows, and a file that is written at once or not at all."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# `str.splitlines()` takes these for the end of a line, JSON does not: escaped, lines survive such readers.
_LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})


class Journal:
    """Finished work, one JSON line each; a run that was interrupted goes on after the last one.

    `<path>.settings.json` says what the lines were made with; a journal goes on under the same settings only. It is
    written with the first line, so a run that failed before it finished anything leaves nothing. A last line cut short
    by an interruption is dropped. `remember` returns what `entries` keep of a line; `None` drops the line.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], remember: Callable[[Any], Any] = lambda entry: entry
    ) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder: name a file in it")
        require_writable(self.path)
        self.entries: list[Any] = []
        self._settings_path = self.path.with_name(f"{self.path.name}.settings.json")
        self._settings = json.loads(json.dumps(settings))
        self._has_settings = self.path.exists() and self.path.stat().st_size > 0
        if self._has_settings:
            self._resume(remember)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line; one cut short by the end of the process counts as not written."""
        text = json.dumps(entry, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path):
            if not self._has_settings:
                replace_text(self._settings_path, json.dumps(self._settings, indent=1, sort_keys=True) + "\n")
                self._has_settings = True
            with self.path.open("ab") as file:
                file.write(text.encode(errors="backslashreplace") + b"\n")  # half a surrogate pair is JSON, too

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._settings_path.unlink(missing_ok=True)

    def _resume(self, remember: Callable[[Any], Any]) -> None:
        way_out = "delete it, or name another file"
        try:
            known = json.loads(self._settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = f"{self._settings_path.name} is missing or damaged"
            raise ValueError(f"{self.path} does not say what it was made with ({what}): {way_out}") from error
        if different := differences(known, self._settings):
            before = f"{self.path} holds what another run has finished, which differs in {different}"
            raise ValueError(f"{before}: go on as before, {way_out}")
        dropped = set()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    kept = remember(json.loads(line)) if line.endswith(b"\n") else None
                except (ValueError, LookupError, TypeError) as error:
                    raise ValueError(f"{self.path} line {number} is damaged: delete the file, or the line") from error
                if kept is None:
                    dropped.add(number)
                else:
                    self.entries.append(kept)
        if dropped:
            with replacing(self.path) as rewritten, self.path.open("rb") as lines, rewritten.open("wb") as copy:
                copy.writelines(line for number, line in enumerate(lines, 1) if number not in dropped)


def require_writable(path: Path) -> None:
    """Raise a `ValueError` if a file cannot be written there: before the work that it is to hold."""
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK) or (place != path and not place.is_dir()):
        raise ValueError(f"{path} cannot be written ({place} is read-only, or no folder): name another place")


def differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return in words how the settings of a file differ from those of now; an empty text if they do not."""
    names = sorted(name for name in known.keys() | settings if known.get(name) != settings.get(name))
    return ", ".join(f"{name} ({known.get(name)!r} there, {settings.get(name)!r} now)" for name in names)


def plain_json(value: Any) -> Any:
    """Return what JSON can hold of a value; of a configuration, what it sets, and of another object, its type."""

    def described(other: Any) -> Any:
        return other.to_diff_dict() if hasattr(other, "to_diff_dict") else type(other).__qualname__

    return json.loads(json.dumps(value, default=described))


def digest(value: Any) -> str:
    """Return a hash of what JSON can hold of a value."""
    return hashlib.sha256(json.dumps(plain_json(value), sort_keys=True).encode()).hexdigest()[:16]


def replace_text(path: Path, text: str) -> None:
    """Write a file at once, or not at all. A device or a pipe stays what it is."""
    with naming(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that takes this place once it is whole; several processes may do so."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the disk name the file that the user knows: a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def shortened(value: Any, quote: bool = True, size: int = 120) -> str:
    """Return a value for a message, cut after `size` characters."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= size else f"{text[:size]}..."


def one_line(error: BaseException, size: int = 400) -> str:
    """Return what an error says, in one line of limited size."""
    return shortened(" ".join(str(error).split()) or type(error).__name__, quote=False, size=size)


def listed(names: list[str], count: int = 10) -> str:
    """Return the first names of a list for a message, each cut after 80 characters."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(name[:80] for name in names[:count]) + more
