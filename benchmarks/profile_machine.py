"""Measure this machine's throughput tables for the package: the shipped pair, or a geometry with random weights.

python benchmarks/profile_machine.py pair
python benchmarks/profile_machine.py qwen3-0.6b --dtype bfloat16
python benchmarks/profile_machine.py qwen3-8b --dtype bfloat16 --device cuda --name h200 --batch_sizes 1 2 4 8 16 32 64

The table goes into the package's `tables` folder, or into --output_dir.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", choices=SETTINGS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="cpu_2_cores", help="of the machine, for the file")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="default: by size of the models")
    parser.add_argument("--context_lengths", type=int, nargs="+", help="default: by size of the models")
    parser.add_argument("--repetitions", type=int, help="default: by size of the models")
    parser.add_argument("--output_dir", default=TABLES)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.models == "pair":
        target, draft = (model.to(options.device) for model in load_pair(dtype)[:2])
    else:
        target, draft = random_pair(options.models, dtype, options.device)
    started = time.perf_counter()
    given = {name: getattr(options, name) for name in SETTINGS[options.models]}
    settings = SETTINGS[options.models] | {name: value for name, value in given.items() if value is not None}
    profile = profile_throughput(target, draft, cache=False, **settings)
    path = Path(options.output_dir) / f"{options.name}.{options.models}.{options.dtype}.json"
    profile.save(path)
    seconds = time.perf_counter() - started
    print(f"{path.name}: {seconds:.0f} s, R squared {profile.fit}, drafting {1e3 * profile.table.drafting:.1f} ms")
    for tokens, rate in zip(profile.table.verify_tokens, profile.table.steps_per_second, strict=True):
        print(f"  B {tokens:4d}: {1e3 / rate:8.1f} ms a round")


if __name__ == "__main__":
    main()
