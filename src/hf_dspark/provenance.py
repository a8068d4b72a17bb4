"""What a measured number carries with it: command, revision, versions, hardware.

Knows nothing of what was measured.
"""

import functools
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HIDDEN = "***"
# Options whose last word names a secret; `--tokenizer`, `--max_new_tokens` and `--api_key_env` do not.
_SECRET_OPTION = re.compile(r"--?([\w-]*[_-])?(token|key|secret|password)", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")
_USER_OF_URL = re.compile(r"(?<=://)[^/@]*@")


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return where and how a measurement is made, for the file that holds its result.

    A result is published: of paths outside the working folder, the command keeps the last part; of tokens, and of the
    values of options that sound like secrets, nothing.

    Args:
        device (`torch.device` or `str`): Where the models were.

    Returns:
        `dict`: `command`, `revision` (of the git checkout that the package runs from, `+changes` behind it if its
        sources differ from it; absent for an installed package), `hf_dspark`, `python`, `torch`, `transformers`,
        `device`, `threads`.
    """
    started = Path(sys.argv[0])
    program = ["python", _shown_path(str(started))] if started.suffix == ".py" else [started.name]
    revision = _revision()
    return {
        "command": " ".join([*program, *_shown_words(sys.argv[1:])]),
        **({"revision": revision} if revision else {}),
        "hf_dspark": version("hf_dspark"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
    }


def _shown_words(words: list[str]) -> list[str]:
    """Return the words of a command line without what is nobody's business."""
    shown = []
    for previous, word in zip(["", *words], words, strict=False):
        name, sign, value = word.rpartition("=")  # --option=value, or domain=file
        if _SECRET_OPTION.fullmatch(name if sign else previous):
            value = HIDDEN
        shown.append(name + sign + _HUB_TOKEN.sub(HIDDEN, _USER_OF_URL.sub("", _shown_path(value))))
    return shown


def _shown_path(word: str) -> str:
    """Return a path relative to the working folder, and nothing of one that leaves it but its name."""
    if "/" not in word or "://" in word:
        return word
    here, path = Path.cwd(), Path(word).resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


@functools.cache  # a commit that is made during a long run is not what runs
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


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, or of the CPU with the instruction sets that matter here."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if unit in flags]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {' '.join(units)}".removesuffix(", ")
