"""What a product of few rows costs on this CPU: by PyTorch, and in each way that `fast_linears` knows.

python benchmarks/few_rows.py --output few_rows.json

PyTorch multiplies float32 by MKL, and bfloat16 by oneDNN with weights as they are. Interleaved; shapes that the
shipped pair, a Qwen3-0.6B and a 1.7B have, and LM heads. The table in `hf_dspark/cpu/small_batch_gemm.py`
(`GAINS`) says from which sizes on each way is taken, by kind of CPU, and
comes from here. How long packing takes is measured as well. Three to six minutes; leave bfloat16 out where the CPU has
no units for it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hf_dspark.cpu.small_batch_gemm import MAX_ROWS, onednn_linear, packed_weight, swapped_linear
from hf_dspark.provenance import provenance

SHAPES = [
    (256, 256), (832, 256), (256, 832), (1024, 1024), (3072, 1024), (1024, 3072), (6144, 2048), (2048, 6144),
    (32768, 1024), (151936, 1024),
]  # fmt: skip
NUM_ROWS = [1, 2, 3, 4, 8, 16, 32, MAX_ROWS, 2 * MAX_ROWS]
DTYPES = ["float32", "bfloat16"]
WAYS = ["torch", "onednn", "transposed", "packed"]
RATIOS = {"onednn": "ratio", "transposed": "transposed_ratio", "packed": "packed_ratio"}
CACHE_BYTES = 2**29  # more than any holds
WARM_UP, IN_A_ROW = 1, 3


class Matrices:
    """Matrices of one shape by turns, so many that each comes from memory, as in decoding, and not from a cache."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        count = max(1, CACHE_BYTES // (dtype.itemsize * shape[0] * shape[1]))
        self.plain = [torch.randn(shape).to(dtype) for _ in range(count)]
        self.packed = [packed_weight(weight) for weight in self.plain]
        self._turns = itertools.cycle(range(count))

    def product(self, way: str, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what multiplies rows with the next matrix."""
        turn = next(self._turns)
        if way == "torch":
            return partial(F.linear, rows, self.plain[turn])
        if way == "transposed":
            return partial(swapped_linear, rows, self.plain[turn])
        return partial(onednn_linear, rows, (self.packed if way == "packed" else self.plain)[turn])

    def packing(self) -> Callable[[], torch.Tensor]:
        """Return what packs the next matrix."""
        return partial(packed_weight, self.plain[next(self._turns)])


@torch.no_grad()
def medians(measured: dict[str, Callable[[], Callable[[], Any]]], repetitions: int) -> dict[str, float]:
    """Return the median milliseconds of each entry, all by turns, a few times in a row as in decoding.

    The first call in a row is not counted: it finds its code in no cache.

    Args:
        measured (`dict`): Returns what is to be called, made ready.
        repetitions (`int`): Turns of each, after those that warm up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(WARM_UP + repetitions):
        for name, ready in measured.items():
            for index in range(1 + IN_A_ROW):
                call = ready()
                started = time.perf_counter()
                call()
                if index:
                    seconds[name].append(time.perf_counter() - started)
    return {f"{name}_ms": 1e3 * statistics.median(values[WARM_UP * IN_A_ROW :]) for name, values in seconds.items()}


def measure(matrices: Matrices, rows: torch.Tensor, repetitions: int) -> dict[str, float]:
    """Return what the product takes in each way, and as parts of what PyTorch takes."""
    times = medians({way: partial(matrices.product, way, rows) for way in WAYS}, repetitions)
    return times | {key: times[f"{way}_ms"] / times["torch_ms"] for way, key in RATIOS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    origin = provenance(options=vars(options))  # of what runs from here on
    torch.manual_seed(0)
    cells: list[dict[str, Any]] = []
    packing: list[dict[str, Any]] = []
    for dtype, (outputs, inputs) in tqdm(list(itertools.product(options.dtypes, SHAPES))):
        matrices = Matrices((outputs, inputs), getattr(torch, dtype))
        of = {"dtype": dtype, "outputs": outputs, "inputs": inputs}
        for num_rows in NUM_ROWS:
            times = measure(matrices, torch.randn(num_rows, inputs).to(getattr(torch, dtype)), options.repetitions)
            cells.append(of | {"rows": num_rows} | times)
        packing.append(of | medians({"pack": matrices.packing}, 1))
    if options.output:
        result = {"provenance": origin, "cells": cells, "packing": packing}
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print("milliseconds, and parts of torch's")
    print(f"dtype    outputs x inputs  rows {''.join(f'{way:>11}' for way in WAYS)}   ", *RATIOS, sep="  ")
    for cell in cells:
        name = f"{cell['dtype']:<8} {cell['outputs']:>7} x {cell['inputs']:<6} {cell['rows']:>5}"
        milliseconds = "".join(f"{cell[f'{way}_ms']:>11.2f}" for way in WAYS)
        ratios = "".join(f"{cell[key]:>{len(way) + 2}.2f}" for way, key in RATIOS.items())
        print(f"{name} {milliseconds}    {ratios}")
    for cell in packing:
        name = f"{cell['dtype']:<8} {cell['outputs']:>7} x {cell['inputs']:<6}"
        print(f"{name} packed in {cell['pack_ms']:.2f} ms")


if __name__ == "__main__":
    main()
