"""Measure this machine's throughput tables for the package: the shipped pair, or a geometry with random weights.

python benchmarks/profile_machine.py pair
python benchmarks/profile_machine.py qwen3-0.6b --dtype bfloat16
python benchmarks/profile_machine.py qwen3-8b --dtype bfloat16 --device cuda --output out/h200.qwen3-8b.json

The table goes into the package's `tables` folder, or where --output says.
"""

import argparse
import time
from pathlib import Path

import torch
from pair import load_pair, random_pair

from hf_dspark import profile_throughput

TABLES = Path(__file__).parent.parent / "src" / "hf_dspark" / "tables"
SETTINGS = {
    "pair": {"batch_sizes": (1, 2, 4, 8, 16, 32), "context_lengths": (64, 256), "repetitions": 15},
    "qwen3-0.6b": {"batch_sizes": (1, 2, 4, 8), "context_lengths": (64, 512), "repetitions": 3},
    "qwen3-1.7b": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 256), "repetitions": 3},
    "qwen3-4b": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 128), "repetitions": 2},
    "qwen3-8b": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 128), "repetitions": 2},
}


ACCELERATOR = {"batch_sizes": (1, 2, 4, 8, 16, 32, 64), "context_lengths": (64, 512), "repetitions": 5}
REHEARSAL = {"batch_sizes": (1, 2), "context_lengths": (8, 16), "repetitions": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", choices=SETTINGS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="cpu_2_cores", help="of the machine, for the file")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, once: tries the script")
    parser.add_argument("--output", help="file; default: a table of the package, by name, models and dtype")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.models == "pair":
        target, draft = (model.to(options.device) for model in load_pair(dtype)[:2])
    else:
        target, draft = random_pair(options.models, dtype, options.device, options.rehearse)
    settings = SETTINGS[options.models] if options.device == "cpu" else ACCELERATOR
    started = time.perf_counter()
    profile = profile_throughput(target, draft, cache=False, **(REHEARSAL if options.rehearse else settings))
    path = Path(options.output or TABLES / f"{options.name}.{options.models}.{options.dtype}.json")
    profile.save(path)
    seconds = time.perf_counter() - started
    print(f"{path.name}: {seconds:.0f} s, drafting {1e3 * profile.table.drafting:.1f} ms")
    for tokens, rate in zip(profile.table.verify_tokens, profile.table.steps_per_second, strict=True):
        print(f"  B {tokens:4d}: {1e3 / rate:8.1f} ms a round")


if __name__ == "__main__":
    main()
