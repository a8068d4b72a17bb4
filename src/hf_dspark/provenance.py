"""What a measured number carries with it: command, revision, versions, hardware.

Knows nothing of what was measured.
"""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .profiling import device_name


def provenance() -> dict[str, Any]:
    """Return where and how a measurement is made, for the file that holds its result.

    Paths outside the working folder are cut to their last part: a result is published, the layout of a disk is not.

    Returns:
        `dict`: `command`, `revision` (of the git checkout that the package runs from, `+changes` behind it if its
        sources differ from it; absent for an installed package), `hf_dspark`, `python`, `torch`, `transformers`,
        `device`, `threads`.
    """
    from . import __version__

    started = Path(sys.argv[0])
    program = ["python", _shown(str(started))] if started.suffix == ".py" else [started.name]
    revision = _revision()
    return {
        "command": " ".join([*program, *(_shown(word) for word in sys.argv[1:])]),
        **({"revision": revision} if revision else {}),
        "hf_dspark": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
    }


def _shown(word: str) -> str:
    """Return a word of a command line: relative to the working folder, and nothing of a path that leaves it."""
    if "/" not in word or "://" in word:
        return word
    here, path = Path.cwd(), Path(word).resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _revision() -> str | None:
    """Return the revision of the checkout that this file belongs to, or `None` for an installed package."""
    sources = Path(__file__).parent
    if sources.parent.name != "src" or not (sources.parent.parent / ".git").exists():
        return None
    git = ["git", "-C", str(sources)]
    try:
        revision = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.strip() + ("+changes" if changed.strip() else "")
