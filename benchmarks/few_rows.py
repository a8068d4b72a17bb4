"""What a float32 product of few rows costs on this CPU: PyTorch's own, and as hf_dspark asks for it. Interleaved.

python benchmarks/few_rows.py --output benchmarks/results/few_rows.json

One matrix for each shape that a Qwen3-0.6B and a 1.7B have, and their LM head. Half a minute.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hf_dspark.few_rows import MAX_ROWS, few_rows_linear
from hf_dspark.provenance import provenance

SHAPES = [(1024, 1024), (3072, 1024), (1024, 3072), (6144, 2048), (2048, 6144), (151936, 1024)]
NUM_ROWS = [1, 2, 4, 8, 16, 32, MAX_ROWS]
WAYS = {"torch": F.linear, "few_rows": few_rows_linear}
WARM_UP = 2


@torch.no_grad()
def measure(shape: tuple[int, int], num_rows: int, repetitions: int) -> dict[str, float]:
    """Return the median milliseconds of each way, and their ratio.

    Args:
        shape (`tuple[int, int]`): Of the matrix: outputs, inputs.
        num_rows (`int`): Multiplied with it.
        repetitions (`int`): Of each way, after those that warm up.
    """
    rows, weight = torch.randn(num_rows, shape[1]), torch.randn(shape)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(WARM_UP + repetitions):
        for way, multiply in WAYS.items():
            started = time.perf_counter()
            multiply(rows, weight)
            seconds[way].append(time.perf_counter() - started)
    medians = {way: 1e3 * statistics.median(values[WARM_UP:]) for way, values in seconds.items()}
    return {f"{way}_ms": value for way, value in medians.items()} | {"ratio": medians["few_rows"] / medians["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, Any]] = []
    for shape in tqdm(SHAPES):
        for num_rows in NUM_ROWS:
            cells.append({"outputs": shape[0], "inputs": shape[1], "rows": num_rows})
            cells[-1] |= measure(shape, num_rows, options.repetitions)
    if options.output:
        Path(options.output).write_text(json.dumps({"provenance": provenance(), "cells": cells}, indent=1) + "\n")
    print("outputs x inputs   rows   torch, ms   few rows, ms   ratio")
    for cell in cells:
        print(
            f"{cell['outputs']:>7} x {cell['inputs']:<6} {cell['rows']:>5} {cell['torch_ms']:>11.2f} "
            f"{cell['few_rows_ms']:>14.2f} {cell['ratio']:>7.2f}"
        )


if __name__ == "__main__":
    main()
