"""What a published number carries: command, revision, versions, hardware."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from hf_dspark.profiling import device_name


def provenance() -> dict[str, str | int]:
    """Return where and how a measurement was made; paths outside the repository are cut to their last part."""
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root)]
    revision = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True).stdout.strip()
    arguments = [word if _inside(root, word) else Path(word).name for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(root)), *arguments]),
        "revision": (revision or "unknown") + ("+changes" if changed else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
    }


def _inside(root: Path, word: str) -> bool:
    """Tell whether a word is no path, or one within the repository."""
    return "/" not in word or Path(word).resolve().is_relative_to(root.resolve())
