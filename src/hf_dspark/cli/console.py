"""What every subcommand works with: where it shows what it found, what it returns, and files that it may write.

Knows nothing of models.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..data.prompts import PromptFile


@dataclass(frozen=True)
class Console:
    """Where a command shows what it found, while it works.

    Args:
        output (`TextIO`): For people and pipes.
        as_json (`bool`): Whether the JSON document is all that may be shown.
    """

    output: TextIO
    as_json: bool = False

    def show(self, text: str) -> None:
        """Print a text, unless only JSON is wanted."""
        if not self.as_json:
            print(text, file=self.output, flush=True)

    def note(self, text: str) -> None:
        """Print what does not belong to the answer."""
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Outcome:
    """What a command has done.

    Args:
        document (`dict`, *optional*): What `--json` prints; `None` where another process does.
        failed (`bool`): Whether a part of the work failed.
    """

    document: dict[str, Any] | None
    failed: bool = False


def require_new_file(path: str, overwrite: bool) -> Path:
    """Return a path that may be written to.

    Raises:
        ValueError: If a file is there already, and may not be replaced.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if Path(path).exists() and not overwrite:
        raise ValueError(f"{path} exists: name another file, or give --overwrite to replace it")
    return Path(path)


def require_new_folder(path: str) -> Path:
    """Return a folder that may be filled.

    Raises:
        ValueError: If something is there already.
    """
    folder = Path(path)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{path} exists and is not empty: name another folder, or empty it")
    return folder


def note_faults(console: Console, files: Iterable[PromptFile]) -> None:
    """Name the lines that were left out."""
    for fault in (fault for file in files for fault in file.faults):
        console.note(f"skipped {fault}")
