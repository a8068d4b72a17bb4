"""Everything that only a machine with a GPU can tell, most important first: `make accelerator`.

python benchmarks/accelerator.py --minutes 25 --output_dir benchmarks/results/accelerator

Each step runs in a process of its own and leaves a file as soon as it is done; a step whose file is there is skipped,
so that the same command goes on after an interruption or a time limit. A step that fails is recorded and tried again
by the next call. `--device cpu --rehearse` runs every step at its smallest size, to see that the script works.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GEOMETRIES = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
ROWS = (1, 8, 32)
LEAST_SECONDS = 20.0  # with less time left, nothing is begun


@dataclass(frozen=True)
class Step:
    """A command that writes one file.

    Attributes:
        name (`str`): Of the file.
        words (`tuple[str, ...]`): The command, run by this Python; `{output}` is the file, `{device}` the device.
        minutes (`float`): It is stopped after so many.
    """

    name: str
    words: tuple[str, ...]
    minutes: float


def steps(rehearse: bool) -> list[Step]:
    """Return what is run, in order of importance."""
    geometries = GEOMETRIES[:1] if rehearse else GEOMETRIES
    rows = ROWS[:2] if rehearse else ROWS
    table = (
        "benchmarks/profile_machine.py",
        "{model}",
        "--dtype",
        "bfloat16",
        "--device",
        "{device}",
        "--output",
        "{output}",
    )
    loop = ("benchmarks/loop.py", "replay", "--device", "{device}", "--output", "{output}")
    modes = ("default",) if rehearse else ("default", "reduce-overhead")
    drafting = ("benchmarks/drafting.py", "compiled", "--device", "{device}", "--modes", *modes)
    small = ("--rehearse",) if rehearse else ()
    return [
        Step("tests", ("-m", "pytest", "tests/gpu", "-m", "gpu", "--junitxml", "{output}"), 5),
        Step("table_pair", (*_with(table, model="pair"), *small), 2),
        *(
            Step(f"loop_{name}_{count}", (*loop, "--geometry", name, "--rows", str(count), *small), 4)
            for name in geometries
            for count in rows
        ),
        *(Step(f"table_{name}", (*_with(table, model=name), *small), 3) for name in geometries),
        Step("drafting_graphs", (*drafting, "--output", "{output}", *small), 5),
        Step(
            "training_step", ("benchmarks/training_step.py", "--device", "{device}", "--output", "{output}", *small), 3
        ),
    ]


def _with(words: tuple[str, ...], model: str) -> tuple[str, ...]:
    return tuple(model if word == "{model}" else word for word in words)


def run(step: Step, folder: Path, device: str, seconds: float) -> dict:
    """Run a step within a time limit; return what became of it."""
    output = folder / f"{step.name}{'.xml' if step.name == 'tests' else '.json'}"
    unfinished = output.with_name(f"unfinished_{output.name}")
    words = [word.format(output=unfinished, device=device) for word in step.words]
    started = time.monotonic()
    with (folder / f"{step.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    done = code == 0 and unfinished.exists()
    if unfinished.exists():
        unfinished.replace(output if done else output.with_name(f"failed_{output.name}"))
    outcome = "done" if done else f"stopped after {seconds:.0f} s" if code is None else f"failed with exit code {code}"
    return {"step": step.name, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks" / "results" / "accelerator")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="every step at its smallest size")
    options = parser.parse_args()
    if options.device == "cuda" and not _has_cuda():
        print("no CUDA device here: this is for a machine with a GPU (try --device cpu --rehearse)", file=sys.stderr)
        return 2
    folder = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    outcomes = []
    for step in steps(options.rehearse):
        left = ends - time.monotonic()
        if any(folder.glob(f"{step.name}.json")) or any(folder.glob(f"{step.name}.xml")):
            outcome = {"step": step.name, "outcome": "done before"}
        elif left < LEAST_SECONDS:
            outcome = {"step": step.name, "outcome": "no time left"}
        else:
            outcome = run(step, folder, options.device, min(left, 60 * step.minutes))
        outcomes.append(outcome)
        (folder / "outcomes.json").write_text(json.dumps(outcomes, indent=1) + "\n")
        print(f"{outcome['step']:24} {outcome['outcome']}", flush=True)
    return int(any("done" not in outcome["outcome"] for outcome in outcomes))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
