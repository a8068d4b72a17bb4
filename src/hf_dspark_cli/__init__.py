"""`hf-dspark`: the command line. Words in, one command run, an exit code out.

A package beside hf_dspark and not a folder in it: whatever is imported from there first imports transformers'
generation stack, which takes seconds. Here nothing does before the words are understood.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO

from .words import PROGRAM, WRONG_WORDS, parse

DONE, FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Console:
    """Where a command shows what it found.

    Args:
        output (`TextIO`): For people and pipes.
        json (`bool`): Whether one JSON document is all that may be printed there.
        quiet (`bool`): Whether progress and notes are left out.
    """

    output: TextIO
    json: bool = False
    quiet: bool = False

    @property
    def progress(self) -> bool:
        """Whether progress bars are drawn."""
        return not self.quiet and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Print a part of the answer."""
        if not self.json:
            print(text, file=self.output, flush=True)

    def note(self, text: str) -> None:
        """Print what does not belong to the answer."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def document(self, content: dict[str, Any]) -> None:
        """Print the answer as JSON, if that was asked for."""
        if self.json:
            print(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), file=self.output, flush=True)


class _NoTerminal:
    """Standard error as if it went to a file."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): The words after the program's name; those of this process unless given.

    Returns:
        `int`: The exit code.

    Raises:
        SystemExit: If the words are wrong, or ask for help.
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    console = Console(sys.stdout, options.json, options.quiet)
    try:
        # What libraries print is no answer; and they draw their progress on terminals only.
        with redirect_stdout(sys.stderr), redirect_stderr(_NoTerminal() if options.quiet else sys.stderr):
            run = getattr(import_module(f".{options.module}", __name__), f"run_{options.command}")
            if not console.progress:
                import_module("transformers.utils.logging").disable_progress_bar()
            return DONE if run(options, console) else FAILED
    except KeyboardInterrupt:
        message, code = f"interrupted; {options.kept}", INTERRUPTED
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        # The package's own errors say what was given and what is needed; files and networks fail without a bug.
        code = WRONG_WORDS if isinstance(error, (ValueError, TypeError, ImportError)) else FAILED
        message = f"error: {said}" if code == WRONG_WORDS else f"error: {said}; {options.kept}"
        if not isinstance(error, (ValueError, TypeError, ImportError, OSError)) or os.environ.get("HF_DSPARK_DEBUG"):
            traceback.print_exc()
    print(f"{PROGRAM} {options.command}: {message}", file=sys.stderr, flush=True)
    return code
