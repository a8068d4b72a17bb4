"""Speed of the shipped pair against plain `generate()`: medians of calls in turns, one process.

python benchmarks/speed.py speed --output benchmarks/results/speed.json

On a CPU, both are timed with packed weights, too: `speedup` is over plain `generate()` as users run it,
`speedup_same_kernels` over plain `generate()` with packed weights, the stronger baseline. `learning` compares the
default with the shipped table and calibration, and a draft that never pays with plain decoding."""

import copy
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import bench
from tqdm import tqdm

from hf_dspark import DSparkConfig, DSparkDraftModel, FullBlock, Policy, Scheduler, ThroughputTable, attach
from hf_dspark.measuring.calibrate import CALIBRATED
from hf_dspark.scheduling import step_costs

TABLE = step_costs.SHIPPED_TABLES / "cpu_2_cores.pair.float32.json"


def measure(
    target, draft, prompts: list[list[int]], policies: dict[str, Policy | None], temperature: float, length: int
) -> list[dict[str, Any]]:
    """Decode each prompt plainly and under each policy, with both kinds of kernels, in turns."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else bench.GREEDY
    runs: dict[tuple[str, str | None], list[bench.Call]] = {}
    for index, ids in enumerate(tqdm(prompts, desc=f"temperature {temperature:g}")):
        for way in bench.ways_of():
            for name in policies if way.drafted else [None]:
                assistant = draft if way.drafted else None
                with bench.kernels(target, draft, way.packed), bench.decoding(draft, policies.get(name)):
                    call = bench.decode(target, [ids], index, assistant, max_new_tokens=length, **sampling)
                runs.setdefault((way.name, name), []).append(call)
    return [
        {"temperature": temperature, "policy": policy}
        | summary({way: calls for (way, name), calls in runs.items() if name in (None, policy)}, draft, temperature)
        for policy in policies
    ]


def summary(runs: dict[str, list[bench.Call]], draft, temperature: float) -> dict[str, Any]:
    """Return what one policy came to: the rounds of `own_packed` if it was measured, else of `own`."""
    ours = runs.get("own_packed", runs["own"])
    rounds, seconds = bench.joined(ours), {way: bench.median_per_token(calls) for way, calls in runs.items()}
    parts = {"draft": rounds.draft_seconds, "verify": rounds.verify_seconds, "rest": rounds.rest_seconds}
    identical = sum(a.token_ids == b.token_ids for a, b in zip(runs["plain"], ours, strict=True))
    shares = rounds.conditional_acceptance(draft.config.block_size)
    return {
        "tau": rounds.tau,
        "proposed_per_round": sum(rounds.proposed) / rounds.rounds,
        "conditional_acceptance": [None if math.isnan(share) else round(share, 4) for share in shares],
        "tokens_per_second": 1 / seconds.get("own_packed", seconds["own"]),
        **bench.speedups(seconds),
        "ms_per_token": {way: 1e3 * value for way, value in seconds.items()},
        "identical_outputs": None if temperature else identical,
        **{f"{name}_ms_per_round": 1e3 * value / rounds.rounds for name, value in parts.items()},
    }


def speed(
    dtype: bench.Dtype = "float32",
    max_new_tokens: int = 128,
    num_prompts: int = 50,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    draft_top_k: int | None = None,
) -> dict[str, Any]:
    """Whole blocks and the default policy on held-out prompts."""
    target, draft, tokenizer = bench.load_pair(dtype)
    draft.config.draft_top_k = draft_top_k
    policies, prompts = {"full block": FullBlock(), "scheduled": None}, bench.held_out_ids(tokenizer, num_prompts)
    measure(target, draft, prompts[:2], policies, 0.0, max_new_tokens)  # warm-up
    cells = [cell for each in temperatures for cell in measure(target, draft, prompts, policies, each, max_new_tokens)]
    return {"dtype": dtype, "num_prompts": len(prompts), "cells": cells}


def learning(num_prompts: int = 40, warm_up: int = 12, max_new_tokens: int = 96) -> Iterator[dict[str, Any]]:
    """The shipped pair without calibration and table after 200 rounds, and a random draft; ratios of medians."""
    target, draft, tokenizer = bench.load_pair()
    measured, bare = Scheduler(ThroughputTable.load(TABLE)), copy.deepcopy(draft)
    bare.config.update(dict.fromkeys(CALIBRATED))
    random = DSparkDraftModel(DSparkConfig.from_target(target, num_hidden_layers=2, mask_token_id=1)).eval()
    ways = {"plain": (None, nullcontext), "measured": (draft, lambda: bench.decoding(draft, measured)),
            "learnt": (bare, nullcontext), "random": (None, lambda: attach(target, random))}  # fmt: skip
    step_costs.SHIPPED_TABLES, os.environ["HF_DSPARK_CACHE"], cells = bench.PAIR, os.devnull, []  # nothing is known
    for regime, sampling in bench.REGIMES.items():
        calls, options = {name: [] for name in ways}, {"max_new_tokens": max_new_tokens, **sampling}
        for index, ids in enumerate(tqdm(bench.held_out_ids(tokenizer, warm_up + num_prompts), desc=regime)):
            for name, (assistant, how) in ways.items():
                with how():
                    calls[name].append(bench.decode(target, [ids], index, assistant, **options))
        later = {name: each[warm_up:] for name, each in calls.items()}
        seconds = {name: bench.median_per_token(each) for name, each in later.items()}
        total = {k: sum(each.seconds for each in v) / sum(each.num_tokens for each in v) for k, v in later.items()}
        cell = {f"{name}_over_plain": seconds["plain"] / seconds[name] for name in ways}
        cell |= {"random_over_plain_in_all": total["plain"] / total["random"]}
        cell |= {"learnt_over_measured": seconds["measured"] / seconds["learnt"]}
        cells.append({"regime": regime, "warm_up_rounds": bench.joined(calls["learnt"][:warm_up]).rounds, **cell})
        yield {"num_prompts": num_prompts, "load": os.getloadavg()[0], "cells": cells}


if __name__ == "__main__":
    bench.main(__doc__, speed, learning)
