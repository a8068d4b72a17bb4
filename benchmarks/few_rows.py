"""What a float32 product of few rows costs on this CPU: by MKL, as PyTorch has it, and by oneDNN. Interleaved.

python benchmarks/few_rows.py --output benchmarks/results/few_rows.json

Shapes that the shipped pair, a Qwen3-0.6B and a 1.7B have, and an LM head. hf_dspark asks oneDNN for
`few_rows.MAX_ROWS` rows at most, and by kind of CPU from the sizes on that `few_rows.GAINS` says. Three minutes.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hf_dspark.few_rows import MAX_ROWS, onednn_linear
from hf_dspark.provenance import provenance

SHAPES = [
    (256, 256), (832, 256), (256, 832), (1024, 1024), (3072, 1024), (1024, 3072), (6144, 2048), (2048, 6144),
    (151936, 1024),
]  # fmt: skip
NUM_ROWS = [1, 2, 3, 4, 8, 16, 32, 64, MAX_ROWS, 2 * MAX_ROWS]
CACHE_BYTES = 2**29  # more than any holds
WAYS = {"torch": F.linear, "onednn": onednn_linear}
WARM_UP = 2


def matrices(shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield so many by turns that each comes from memory, as in decoding, and not from a cache."""
    count = max(1, CACHE_BYTES // (4 * shape[0] * shape[1]))
    return itertools.cycle([torch.randn(shape) for _ in range(count)])


@torch.no_grad()
def measure(weights: Iterator[torch.Tensor], rows: torch.Tensor, repetitions: int) -> dict[str, float]:
    """Return the median milliseconds of each way, and their ratio.

    Args:
        weights (`Iterator[torch.Tensor]`): Matrices of one shape, without end.
        rows (`torch.Tensor`): What each is multiplied with.
        repetitions (`int`): Of each way, after those that warm up.
    """
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(WARM_UP + repetitions):
        for way, multiply in WAYS.items():
            weight = next(weights)
            started = time.perf_counter()
            multiply(rows, weight)
            seconds[way].append(time.perf_counter() - started)
    medians = {way: 1e3 * statistics.median(values[WARM_UP:]) for way, values in seconds.items()}
    return {f"{way}_ms": value for way, value in medians.items()} | {"ratio": medians["onednn"] / medians["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, Any]] = []
    for outputs, inputs in tqdm(SHAPES):
        weights = matrices((outputs, inputs))
        for num_rows in NUM_ROWS:
            times = measure(weights, torch.randn(num_rows, inputs), options.repetitions)
            cells.append({"outputs": outputs, "inputs": inputs, "rows": num_rows} | times)
    if options.output:
        Path(options.output).write_text(json.dumps({"provenance": provenance(), "cells": cells}, indent=1) + "\n")
    print("outputs x inputs   rows   torch, ms   oneDNN, ms   ratio")
    for cell in cells:
        print(
            f"{cell['outputs']:>7} x {cell['inputs']:<6} {cell['rows']:>5} {cell['torch_ms']:>11.2f} "
            f"{cell['onednn_ms']:>12.2f} {cell['ratio']:>7.2f}"
        )


if __name__ == "__main__":
    main()
