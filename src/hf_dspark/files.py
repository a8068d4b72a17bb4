"""What is finished of a long run, line by line, so that the same run goes on after it was interrupted or killed.

JSON Lines; the first one holds the settings, which a run that goes on must share. Knows nothing of what is run.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGINNING = b'{"settings": '


class Journal:
    """A file of finished work that grows.

    Args:
        path (`str` or `Path`): The file; its folder is made, and it goes on from there if it exists. A last line cut
            short by an interruption is dropped from it.
        settings (`Mapping`): What decides about the work, as JSON can hold it.

    Attributes:
        path (`Path`): The file.
        entries (`list[dict]`): What earlier runs have finished.

    Raises:
        ValueError: If the file was made with other settings, naming them, or is no journal.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.entries: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole:
            first, *self.entries = self._read(whole)
            self._compare(first, settings)
        if len(whole) < len(content):
            if not whole and content[: len(BEGINNING)] != BEGINNING[: len(content)]:
                raise ValueError(f"{self.path} does not say what it was made with: delete it, or name another file")
            self.path.write_bytes(whole)
        # With the first entry: a run that failed before it finished anything leaves nothing to go on with.
        self._waiting = b"" if whole else _line({"settings": settings})

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line; one cut short by the end of the process counts as not written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(self._waiting + _line(entry))
        self._waiting = b""

    def remove(self) -> None:
        """Delete the file: the run is over."""
        self.path.unlink(missing_ok=True)

    def _read(self, content: bytes) -> list[dict[str, Any]]:
        entries = []
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path} line {number} is damaged: delete the file, or the line") from error
            entries.append(entry)
        return entries

    def _compare(self, first: Any, settings: dict[str, Any]) -> None:
        known = first.get("settings") if isinstance(first, dict) else None
        if not isinstance(known, dict):
            raise ValueError(f"{self.path} does not say what it was made with: delete it, or name another file")
        different = differences(known, settings)
        if different:
            raise ValueError(
                f"{self.path} holds what another run has finished, which differs in {different}: go on as before, "
                "delete it, or name another file"
            )


def differences(known: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return in words how the settings of a file differ from those of now; nothing if they do not."""
    names = sorted(name for name in known.keys() | settings if known.get(name) != settings.get(name))
    return ", ".join(f"{name} ({known.get(name)!r} there, {settings.get(name)!r} now)" for name in names)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def plain_json(value: Any) -> Any:
    """Return what JSON can hold of a value; of a configuration, what it sets, and of another object, its type."""
    return json.loads(json.dumps(value, default=_described))


def _described(value: Any) -> Any:
    return value.to_diff_dict() if hasattr(value, "to_diff_dict") else type(value).__qualname__


def digest(value: Any) -> str:
    """Return a hash of what JSON can hold of a value."""
    return hashlib.sha256(json.dumps(plain_json(value), sort_keys=True).encode()).hexdigest()[:16]


def replace_text(path: Path, text: str) -> None:
    """Write a file at once, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
