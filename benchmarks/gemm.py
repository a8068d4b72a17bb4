"""What products of few rows cost by each kind of kernel, in turns.

python benchmarks/gemm.py --output benchmarks/results/few_rows_amx.json

By PyTorch (MKL in float32, oneDNN in bfloat16) and in each way that `fast_linears` knows. The table in
`hf_dspark/cpu/small_batch_gemm.py` says from which sizes on each way is taken, by kind of CPU, and comes from here.
"""

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench import Dtype, main, timed
from tqdm import tqdm

from hf_dspark.cpu.small_batch_gemm import MAX_ROWS, onednn_linear, packed_weight, swapped_linear

# Shapes that the shipped pair, a Qwen3-0.6B and a 1.7B have, and LM heads.
SHAPES = [
    (256, 256), (832, 256), (256, 832), (1024, 1024), (3072, 1024), (1024, 3072), (6144, 2048), (2048, 6144),
    (32768, 1024), (151936, 1024),
]  # fmt: skip
NUM_ROWS = [1, 2, 3, 4, 8, 16, 32, MAX_ROWS, 2 * MAX_ROWS]
RATIOS = {"onednn": "ratio", "transposed": "transposed_ratio", "packed": "packed_ratio"}
CACHE_BYTES = 2**29  # more than any holds
IN_A_ROW = 3


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


@torch.no_grad()
def measured_product(matrices: Matrices, rows: torch.Tensor, repetitions: int) -> dict[str, float]:
    """Return what the product takes in each way, and as parts of what PyTorch takes: by turns, a few times in a row as
    in decoding, without the first in a row, which finds its code in no cache."""
    seconds: dict[str, list[float]] = {way: [] for way in ("torch", *RATIOS)}
    for repetition, way in itertools.product(range(1 + repetitions), seconds):
        took = [timed(matrices.product(way, rows))[0] for _ in range(1 + IN_A_ROW)][1:]
        seconds[way] += took if repetition else []
    times = {way: 1e3 * statistics.median(values) for way, values in seconds.items()}
    ratios = {key: times[way] / times["torch"] for way, key in RATIOS.items()}
    return {f"{way}_ms": value for way, value in times.items()} | ratios


def products(repetitions: int = 6, dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")) -> dict[str, Any]:
    """Products of few rows by each kind of kernel."""
    torch.manual_seed(0)
    cells: list[dict[str, Any]] = []
    for dtype, (outputs, inputs) in tqdm(list(itertools.product(dtypes, SHAPES))):
        matrices = Matrices((outputs, inputs), getattr(torch, dtype))
        for num_rows in NUM_ROWS:
            rows = torch.randn(num_rows, inputs).to(getattr(torch, dtype))
            of = {"dtype": dtype, "outputs": outputs, "inputs": inputs, "rows": num_rows}
            cells.append(of | measured_product(matrices, rows, repetitions))
    return {"cells": cells}


if __name__ == "__main__":
    main(__doc__, products)
