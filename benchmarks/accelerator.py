"""Everything that only a machine with a GPU can tell, most important first: `make accelerator`.

python benchmarks/accelerator.py --minutes 25 --output_dir benchmarks/results/accelerator

Each step runs in a process of its own and leaves a file when it is done; the same command goes on with the others,
and tries again what failed. `--device cpu --rehearse` runs every step at its smallest size.
"""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench import RESULTS, ROOT, main

GEOMETRIES = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
ROWS = (1, 8, 32)


def steps(rehearse: bool) -> dict[str, tuple[str, float]]:
    """Return what is run, in order of importance: by name, words for this Python and how many minutes it may take."""
    geometries, rows = (GEOMETRIES[:1], ROWS[:2]) if rehearse else (GEOMETRIES, ROWS)
    common = " --device {device} --output {output}" + (" --rehearse" if rehearse else "")
    found = {
        "tests": ("-m pytest tests/gpu -m gpu --junitxml {output}", 5.0),
        "table_pair": (f"benchmarks/pair.py table --models pair --dtype bfloat16{common}", 2.0),
    }
    for name, count in itertools.product(geometries, rows):
        words = f"benchmarks/loop.py replay --geometry {name} --rows {count}{common}"
        found[f"loop_{name}_{count}"] = (words, 4.0)
    for name in geometries:
        found[f"table_{name}"] = (f"benchmarks/pair.py table --models {name} --dtype bfloat16{common}", 3.0)
    found["all_tokens"] = (f"benchmarks/loop.py replay --draft_top_k 0{common}", 4.0)
    found["training_step"] = (f"benchmarks/training_step.py{common}", 3.0)
    return found


def run(name: str, words: str, folder: Path, device: str, seconds: float) -> str:
    """Run a step within a time limit; return what became of it."""
    output = folder / f"{name}{'.xml' if name == 'tests' else '.json'}"
    unfinished = output.with_name(f"unfinished_{output.name}")
    command = [word.format(output=unfinished, device=device) for word in words.split()]
    with (folder / f"{name}.log").open("w") as log:
        try:
            options = {"cwd": ROOT, "stdout": log, "stderr": subprocess.STDOUT, "timeout": seconds}
            code = subprocess.run([sys.executable, *command], **options).returncode
        except subprocess.TimeoutExpired:
            code = None
    done = code == 0 and unfinished.exists()
    if unfinished.exists():
        unfinished.replace(output if done else output.with_name(f"failed_{output.name}"))
    return "done" if done else f"stopped after {seconds:.0f} s" if code is None else f"failed with exit code {code}"


def accelerator(
    minutes: float = 25.0, output_dir: Path = RESULTS / "accelerator", device: str = "cuda", rehearse: bool = False
) -> dict[str, str]:
    """Run every step that is not done within so many minutes; `rehearse` at its smallest size."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: this is for a machine with a GPU (try --device cpu --rehearse)")
    folder, ends, outcomes = output_dir.resolve(), time.monotonic() + 60 * minutes, {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (words, most) in steps(rehearse).items():
        left = ends - time.monotonic()
        if any((folder / f"{name}{ending}").exists() for ending in (".json", ".xml")):
            outcomes[name] = "done before"
        else:
            outcomes[name] = run(name, words, folder, device, min(left, 60 * most)) if left >= 20 else "no time left"
        print(f"{name:24} {outcomes[name]}", flush=True)
    if any("done" not in outcome for outcome in outcomes.values()):
        sys.exit(1)
    return outcomes


if __name__ == "__main__":
    main(__doc__, accelerator)
