"""What a measured number carries with it: program and options, revision, versions, hardware."""

import functools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device | str = "cpu", options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return where and how a measurement is made, for the file that holds its result.

    The command line is not read, as it may hold secrets. Of an absolute path, only its name shows.
    """
    return {
        "command": _command(options or {}),
        **({"revision": revision} if (revision := _revision()) else {}),
        "hf_dspark": version("hf_dspark"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
    }


def load_hint() -> str | None:
    """Return what to do about other processes that hold the cores; `None` if there are none, or nobody can tell."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # not on Windows
    cores = os.cpu_count() or 1
    if load <= cores:
        return None
    slows, cure = "", "Wait until they are done"
    if torch.get_num_threads() > 1:
        slows, cure = ", and PyTorch's threads can slow each other twenty-fold", f"{cure}, or set OMP_NUM_THREADS=1"
    return f"other processes hold the cores (load {load:.1f} on {cores}): times will be wrong{slows}. {cure}"


def _command(options: Mapping[str, Any]) -> str:
    started = Path(sys.argv[0])
    if started.stem == "ipykernel_launcher":
        return "a notebook"
    words = ["python", _shown(str(started))] if started.suffix == ".py" else [started.name]
    for name, value in options.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            words += [f"--{name}", *(_shown(str(each)) for each in values)]
    return shlex.join(words)


def _shown(word: str) -> str:
    return Path(word).name if Path(word).is_absolute() else word


@functools.cache  # a commit that is made during a long run is not what runs
def _revision() -> str | None:
    """Return the revision of the checkout that this file belongs to, with `+changes` if it differs; `None` without."""
    sources = Path(__file__).parent
    if sources.parent.name != "src" or not (sources.parent.parent / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=sources, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


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
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if unit in flags]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {' '.join(units)}".removesuffix(", ")
