"""Everything that only a machine with a GPU can tell, most important first: `make accelerator`.

python benchmarks/accelerator.py --minutes 25 --output_dir benchmarks/results/accelerator

Each step runs in a process of its own and leaves a file when it is done; the same command goes on with the others,
and tries again what failed. `--device cpu --rehearse` runs every step at its smallest size.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
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
    found["drafting"] = (f"benchmarks/gemm.py top_k{common}", 3.0)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks" / "results" / "accelerator")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="every step at its smallest size")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: this is for a machine with a GPU (try --device cpu --rehearse)", file=sys.stderr)
        return 2
    folder, ends = options.output_dir.resolve(), time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, str] = {}
    for name, (words, minutes) in steps(options.rehearse).items():
        left = ends - time.monotonic()
        if any(folder.glob(f"{name}.json")) or any(folder.glob(f"{name}.xml")):
            outcomes[name] = "done before"
        elif left < 20:
            outcomes[name] = "no time left"
        else:
            outcomes[name] = run(name, words, folder, options.device, min(left, 60 * minutes))
        (folder / "outcomes.json").write_text(json.dumps(outcomes, indent=1) + "\n")
        print(f"{name:24} {outcomes[name]}", flush=True)
    return int(any("done" not in outcome for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
