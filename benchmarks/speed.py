"""Speed of the shipped pair against plain `generate()`: medians of calls in turns, one process.

python benchmarks/speed.py --output benchmarks/results/speed.json

On a CPU, `--baseline both` (the default) also times both with packed copies of the weights: `speedup` is over plain
`generate()` as users run it, `speedup_same_kernels` over plain `generate()` with packed copies, the stronger baseline.
"""

import argparse
import math
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from pair import (
    BASELINES,
    GREEDY,
    decoding,
    default_policy,
    held_out_prompts,
    kernels,
    load_pair,
    provenance_of,
    speedups,
    ways_of,
    write_result,
)
from tqdm import tqdm

from hf_dspark import FullBlock, Policy, Rounds


@dataclass
class Cell:
    """One policy at one temperature over all prompts. `speedup_same_kernels` is `None` with one baseline."""

    temperature: float
    policy: str
    tau: float
    acceptance_rate: float | None
    proposed_per_round: float
    conditional_acceptance: list[float | None]
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    speedup_same_kernels: float | None
    ms_per_token: dict[str, float]
    identical_outputs: int | None
    draft_ms_per_round: float
    verify_ms_per_round: float
    rest_ms_per_round: float
    plain_ms_per_token: float


@dataclass
class Run:
    """One decoded prompt."""

    tokens: list[int]
    seconds_per_token: float
    stats: Rounds | None


def timed(target, ids: torch.Tensor, seed: int, **options) -> Run:
    torch.manual_seed(seed)
    started = time.perf_counter()
    output = target.generate(ids, **options)
    seconds = time.perf_counter() - started
    draft = options.get("assistant_model")
    tokens = output[0, ids.shape[1] :].tolist()
    return Run(tokens, seconds / len(tokens), None if draft is None else draft.last_stats)


def measure(
    target,
    draft,
    tokenizer,
    prompts: list[str],
    policies: dict[str, Policy],
    temperature: float,
    max_new_tokens: int,
    baseline: str = "both",
) -> list[Cell]:
    """Decode each prompt plainly and under each policy, with the kernels that the baselines ask for, in turns."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else GREEDY
    options, ways = {"max_new_tokens": max_new_tokens, **sampling}, ways_of(baseline)
    runs: dict[tuple[str, str | None], list[Run]] = {}
    for index, prompt in enumerate(tqdm(prompts, desc=f"temperature {temperature:g}")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for way in ways:
            for name in policies if way.drafted else [None]:
                assistant = {} if name is None else {"assistant_model": draft}
                with kernels(target, draft, way.packed), decoding(draft, policies.get(name)):
                    run = timed(target, ids, index, **options, **assistant)
                runs.setdefault((way.name, name), []).append(run)
    plain = {way: calls for (way, policy), calls in runs.items() if policy is None}
    return [
        summary(
            name,
            temperature,
            plain | {way: calls for (way, policy), calls in runs.items() if policy == name},
            draft.config.block_size,
        )
        for name in policies
    ]


def summary(policy: str, temperature: float, runs: dict[str, list[Run]], block_size: int) -> Cell:
    """Return what one policy came to: the rounds of `own_packed` if it was measured, else of `own`."""
    ours = runs.get("own_packed", runs["own"])
    stats = Rounds.joined(run.stats for run in ours)
    seconds = {way: statistics.median(run.seconds_per_token for run in calls) for way, calls in runs.items()}
    found = speedups(seconds)
    identical = sum(a.tokens == b.tokens for a, b in zip(runs["plain"], ours, strict=True))
    return Cell(
        temperature=temperature,
        policy=policy,
        tau=stats.tau,
        acceptance_rate=None if math.isnan(stats.acceptance_rate) else stats.acceptance_rate,
        proposed_per_round=sum(stats.proposed) / stats.rounds,
        conditional_acceptance=[
            None if math.isnan(share) else round(share, 4) for share in stats.conditional_acceptance(block_size)
        ],
        plain_tokens_per_second=1 / seconds["plain"],
        tokens_per_second=1 / seconds.get("own_packed", seconds["own"]),
        speedup=found["speedup"],
        speedup_same_kernels=found.get("speedup_same_kernels"),
        ms_per_token={way: 1e3 * value for way, value in seconds.items()},
        identical_outputs=None if temperature else identical,
        draft_ms_per_round=1e3 * stats.draft_seconds / stats.rounds,
        verify_ms_per_round=1e3 * stats.verify_seconds / stats.rounds,
        rest_ms_per_round=1e3 * stats.rest_seconds / stats.rounds,
        plain_ms_per_token=1e3 * seconds["plain"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_prompts", type=int, default=50)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft_top_k", type=int, default=None)
    parser.add_argument("--baseline", choices=BASELINES, default="both")
    parser.add_argument("--output", help="JSON file to write instead of printing")
    options = parser.parse_args()
    origin = provenance_of(parser, options)

    target, draft, tokenizer = load_pair(getattr(torch, options.dtype))
    draft.config.draft_top_k = options.draft_top_k
    policies: dict[str, Policy] = {"full block": FullBlock()}
    scheduled = default_policy(draft, target)
    if scheduled != FullBlock():
        policies["scheduled"] = scheduled
    prompts = held_out_prompts()[: options.num_prompts]
    common = target, draft, tokenizer
    length = options.max_new_tokens
    measure(*common, prompts[:2], policies, 0.0, length, options.baseline)  # warm-up
    cells = [
        asdict(cell)
        for temperature in options.temperatures
        for cell in measure(*common, prompts, policies, temperature, length, options.baseline)
    ]
    result = {
        "provenance": origin,
        "dtype": options.dtype,
        "num_prompts": len(prompts),
        "ways": {way.name: way.meaning for way in ways_of(options.baseline)},
        "cells": cells,
    }
    write_result(options.output, result)


if __name__ == "__main__":
    main()
