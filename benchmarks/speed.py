"""Speed of the shipped pair against plain `generate()`: paired, interleaved, medians, one process; prints one JSON
line.

python benchmarks/speed.py --output benchmarks/results/speed.json
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pair import GREEDY, held_out_prompts, load_pair
from tqdm import tqdm

from hf_dspark import DecodingOptions, FullBlock, Policy, RoundStatistics
from hf_dspark.decoding.hook import default_policy
from hf_dspark.provenance import provenance


@dataclass
class Cell:
    """One policy at one temperature over all prompts. Times in seconds, speeds in tokens per second."""

    temperature: float
    policy: str
    tau: float
    acceptance_rate: float | None
    proposed_per_round: float
    conditional_acceptance: list[float | None]
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
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
    stats: RoundStatistics | None


def timed(target, ids: torch.Tensor, seed: int, **options) -> Run:
    torch.manual_seed(seed)
    started = time.perf_counter()
    output = target.generate(ids, **options)
    seconds = time.perf_counter() - started
    draft = options.get("assistant_model")
    tokens = output[0, ids.shape[1] :].tolist()
    return Run(tokens, seconds / len(tokens), None if draft is None else draft.last_stats)


def measure(
    target, draft, tokenizer, prompts: list[str], policies: dict[str, Policy], temperature: float, max_new_tokens: int
) -> list[Cell]:
    """Decode each prompt plainly and under each policy, one behind the other."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else GREEDY
    options = {"max_new_tokens": max_new_tokens, **sampling}
    plain: list[Run] = []
    assisted: dict[str, list[Run]] = {name: [] for name in policies}
    for index, prompt in enumerate(tqdm(prompts, desc=f"temperature {temperature:g}")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        plain.append(timed(target, ids, index, **options))
        for name, policy in policies.items():
            draft.decoding = DecodingOptions(policy)
            assisted[name].append(timed(target, ids, index, assistant_model=draft, **options))
    return [summary(name, temperature, plain, runs, draft.config.block_size) for name, runs in assisted.items()]


def summary(policy: str, temperature: float, plain: list[Run], runs: list[Run], block_size: int) -> Cell:
    stats = RoundStatistics.joined(run.stats for run in runs)
    plain_seconds, seconds = (statistics.median(run.seconds_per_token for run in part) for part in (plain, runs))
    identical = sum(a.tokens == b.tokens for a, b in zip(plain, runs, strict=True))
    return Cell(
        temperature=temperature,
        policy=policy,
        tau=stats.tau,
        acceptance_rate=None if math.isnan(stats.acceptance_rate) else stats.acceptance_rate,
        proposed_per_round=sum(stats.proposed) / stats.rounds,
        conditional_acceptance=[
            None if math.isnan(share) else round(share, 4) for share in stats.conditional_acceptance(block_size)
        ],
        plain_tokens_per_second=1 / plain_seconds,
        tokens_per_second=1 / seconds,
        speedup=plain_seconds / seconds,
        identical_outputs=None if temperature else identical,
        draft_ms_per_round=1e3 * stats.draft_seconds / stats.rounds,
        verify_ms_per_round=1e3 * stats.verify_seconds / stats.rounds,
        rest_ms_per_round=1e3 * stats.rest_seconds / stats.rounds,
        plain_ms_per_token=1e3 * plain_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_prompts", type=int, default=50)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft_top_k", type=int, default=None)
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    origin = provenance()  # of what runs from here on

    target, draft, tokenizer = load_pair(getattr(torch, options.dtype))
    draft.config.draft_top_k = options.draft_top_k
    policies: dict[str, Policy] = {"full block": FullBlock()}
    scheduled = default_policy(draft, target)
    if scheduled != FullBlock():
        policies["scheduled"] = scheduled
    prompts = held_out_prompts()[: options.num_prompts]
    measure(target, draft, tokenizer, prompts[:2], policies, 0.0, options.max_new_tokens)  # warm-up
    cells = [
        asdict(cell)
        for temperature in options.temperatures
        for cell in measure(target, draft, tokenizer, prompts, policies, temperature, options.max_new_tokens)
    ]
    result = {"provenance": origin, "dtype": options.dtype, "num_prompts": len(prompts), "cells": cells}
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
