"""`hf-dspark`: the command line. Arguments in, one command run, an exit code out.

A package beside hf_dspark and not a folder in it: whatever is imported from there first imports transformers'
generation stack, which takes seconds. Here nothing does before the arguments are understood.
"""

import errno
import json
import logging
import os
import shutil
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from glob import escape, glob
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TextIO

from .parser import PROGRAM, WRONG_WORDS, parse

DONE, FAILED, INTERRUPTED = 0, 1, 130
MEASURING = ("race", "train", "calibrate", "profile", "eval")  # commands that need cores of their own


@dataclass(frozen=True)
class Console:
    """Where a command shows what it found."""

    output: TextIO
    json: bool  # one JSON document is all that is printed on `output`
    quiet: bool  # no progress, no notes
    more: dict[str, Any] = field(default_factory=dict)  # that the document also says

    @property
    def progress(self) -> bool:
        return not self.quiet and sys.stderr.isatty()

    def show(self, text: str) -> None:
        if not self.json:
            print(text, file=self.output, flush=True)

    def note(self, text: str) -> None:
        """Print what does not belong to the answer."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def skip(self, faults: Iterable[Any]) -> None:
        """Name the lines that are left out."""
        self.more["skipped_lines"] = list(map(str, faults))
        for line in self.more["skipped_lines"]:
            self.note(f"skipped {line}")

    def document(self, content: dict[str, Any]) -> None:
        """Print the answer as JSON, if that was asked for."""
        if self.json:
            text = json.dumps(content | self.more, indent=1, ensure_ascii=False, allow_nan=False)
            print(text, file=self.output, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. Raises `SystemExit` if the arguments are wrong, or ask for help."""
    options = parse(sys.argv[1:] if argv is None else argv)
    console = Console(sys.stdout, options.json, options.quiet)
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # transformers imports it to train
        with redirect_stdout(sys.stderr):  # what libraries print is no answer
            run = getattr(import_module(f".{options.module}", __name__), f"run_{options.command}")
            if not console.progress:
                import_module("transformers.utils.logging").disable_progress_bar()
            measures = options.command in MEASURING and not getattr(options, "show", False)
            if measures and (hint := import_module("hf_dspark.provenance").load_hint()):
                console.note(hint)
            with warnings.catch_warnings():
                warnings.showwarning = lambda warning, *_: print(f"warning: {said(warning)}", file=sys.stderr)
                return DONE if run(options, console) else FAILED
    except BrokenPipeError:  # `| head` has read enough
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        message, code = f"interrupted; {_kept(options)}", INTERRUPTED
    except Exception as error:
        # The package's own errors say what was given and what is needed; files and networks fail without a bug.
        is_input = isinstance(error, (ValueError, TypeError, ImportError))
        full = None if is_input else _full_disk(error, options)
        message, code = f"error: {full or said(error)}", WRONG_WORDS if is_input else FAILED
        message += "" if is_input else f"; {_kept(options)}"
        if not (is_input or full or isinstance(error, OSError)) or os.environ.get("HF_DSPARK_DEBUG"):
            traceback.print_exc()
    print(f"{PROGRAM} {options.command}: {message}", file=sys.stderr, flush=True)
    return code


def _kept(options: Namespace) -> str:
    """Return what a command that did not end has left."""
    place = options.kept_in.format(**{name: escape(str(value)) for name, value in vars(options).items()})
    return options.kept if not place or glob(place) else "nothing is kept"


def _full_disk(error: Exception, options: Namespace) -> str | None:
    """Return which disk is full, if that is what stopped a command: libraries say it in many ways, or not at all."""
    given = (getattr(options, name, None) for name in ("output_dir", "output_file", "result_file", "destination"))
    place = next((Path(path) for path in given if path), Path(gettempdir()))
    total, _, free = shutil.disk_usage(next(path for path in (place, *place.absolute().parents) if path.exists()))
    is_other = getattr(error, "errno", None) not in (None, errno.ENOSPC)
    if "No space left on device" not in str(error) and (is_other or free >= 2**16 or not total):  # /proc has no size
        return None
    return f"the disk of {place} is full ({free / 2**20:.1f} MiB free). Make room there, or name another place"


def said(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
