"""What small products and drafting cost: by each kind of kernel, and among candidates. In turns.

python benchmarks/gemm.py products --output benchmarks/results/few_rows_amx.json
python benchmarks/gemm.py top_k --output benchmarks/results/top_k_amx.json

`products` times products of few rows by PyTorch (MKL in float32, oneDNN in bfloat16) and in each way that
`fast_linears` knows. The table in `hf_dspark/cpu/small_batch_gemm.py` says from which sizes on each way is taken, by
kind of CPU, and comes from here. `top_k` times the drafting of a block at Qwen3-0.6B's size, random weights and a
vocabulary of 152 thousand, with `draft_top_k` and without, after tokens whose likely successors are known (here: any).
Aim: at most half the time.
"""

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench import Dtype, in_turns, main, random_pair, timed
from tqdm import tqdm

from hf_dspark import DSparkDraftModel, fast_linears
from hf_dspark.cpu.small_batch_gemm import MAX_ROWS, onednn_linear, packed_weight, swapped_linear
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling.distributions import TokenDistribution, draw
from hf_dspark.sampling.drafts import ChainSampler

# Shapes that the shipped pair, a Qwen3-0.6B and a 1.7B have, and LM heads.
SHAPES = [
    (256, 256), (832, 256), (256, 832), (1024, 1024), (3072, 1024), (1024, 3072), (6144, 2048), (2048, 6144),
    (32768, 1024), (151936, 1024),
]  # fmt: skip
NUM_ROWS = [1, 2, 3, 4, 8, 16, 32, MAX_ROWS, 2 * MAX_ROWS]
RATIOS = {"onednn": "ratio", "transposed": "transposed_ratio", "packed": "packed_ratio"}
CACHE_BYTES = 2**29  # more than any holds
IN_A_ROW = 3
GEOMETRY = "qwen3-0.6b"
CONTEXT, NEW_CONTEXT = 256, 3  # tokens of the prompt, and committed since the last block


class DrawnChains(ChainSampler):
    def draw(self, logits, candidate_ids):
        distribution = TokenDistribution(logits.softmax(dim=-1), candidate_ids)
        return draw(distribution, torch.rand(len(logits), device=logits.device)), distribution


SAMPLERS = {"greedy": ChainSampler, "temperature 1": DrawnChains}


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


# ---- candidates


class Drafting:
    """One draft that draws block after block after the same context."""

    def __init__(self, draft: DSparkDraftModel, context_length: int = CONTEXT) -> None:
        self.draft, self.context_length, self.cache = draft, context_length, SlotCache()
        self.anchor = torch.zeros(1, dtype=torch.long, device=draft.device)
        self.block("greedy", num_new=context_length)

    @torch.inference_mode()
    def block(self, regime: str, candidates: int | None = None, num_new: int = NEW_CONTEXT) -> None:
        """Draft one block after `num_new` new tokens."""
        config = self.draft.config
        config.draft_top_k, width = candidates, len(config.target_layer_ids) * config.hidden_size
        features = torch.ones(1, num_new, width, dtype=self.draft.dtype, device=self.draft.device)
        self.draft.draft_block(self.anchor, features, self.cache, SAMPLERS[regime]())
        self.cache.truncate(0, self.context_length)


def drafting_costs(draft: DSparkDraftModel, candidates: tuple[int, ...], repetitions: int) -> dict[str, Any]:
    """Return, by way of drawing, the median `full_ms` and, by number of candidates, `ms` and `ratio`."""
    before, drawing = draft.config.draft_top_k, Drafting(draft)
    for k in candidates:  # every token has some successors, as after long use
        draft.config.draft_top_k = k
        if (successors := draft._successors()) is not None:
            successors._table.random_(0, draft.config.vocab_size)
            successors._is_complete = True  # as on an accelerator
    keys = list(itertools.product(SAMPLERS, (None, *candidates)))
    seconds = in_turns({key: partial(drawing.block, *key) for key in keys}, repetitions, 2, draft.device)
    draft.config.draft_top_k = before
    medians = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
    return {
        name: {
            "full_ms": medians[name, None],
            "candidates": {
                str(k): {"ms": medians[name, k], "ratio": medians[name, k] / medians[name, None]} for k in candidates
            },
        }
        for name in SAMPLERS
    }


def top_k(
    dtype: Dtype = "bfloat16",
    candidates: tuple[int, ...] = (64, 128, 256),
    repetitions: int = 10,
    device: str = "cpu",
    rehearse: bool = False,
) -> dict[str, Any]:
    """What candidates save at a large vocabulary."""
    target, draft = random_pair(GEOMETRY, dtype, device, rehearse)
    with fast_linears(target, draft, packed=True):
        costs = drafting_costs(draft.bind(target), candidates, 1 if rehearse else repetitions)
    return {"geometry": GEOMETRY, "dtype": dtype, "vocab_size": draft.config.vocab_size, "drafting": costs}


if __name__ == "__main__":
    main(__doc__, products, top_k)
