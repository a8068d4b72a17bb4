"""Speed of the shipped pair against plain `generate()`: medians of calls in turns, one process.

python benchmarks/speed.py speed --output benchmarks/results/speed.json

On a CPU, both are timed with packed weights, too: `speedup` is over plain `generate()` as users run it,
`speedup_same_kernels` over plain `generate()` with packed weights, the stronger baseline. `learning` compares the
default with the shipped table and calibration, and a draft that never pays with plain decoding. `tasks` attaches the
draft in ten tasks, whose prompts `--data_dir` holds: `spec_bench/qa.jsonl` and others, `{"turns": [...]}` a line;
where the package economize is installed (`pip install --no-deps economize==0.3.2`), its prompt lookup runs, too."""

import copy
import importlib.util
import itertools
import json
import math
import os
from collections.abc import Iterator
from operator import truediv
from pathlib import Path
from typing import Any

import bench

from hf_dspark import DSparkConfig, DSparkDraftModel, FullBlock, Policy, Scheduler, ThroughputTable
from hf_dspark.data.prompts import Prompt, as_chat, token_ids
from hf_dspark.measuring.calibrate import CALIBRATED
from hf_dspark.scheduling import step_costs

TASKS = (
    "spec_bench/mt_bench", "spec_bench/translation", "spec_bench/summarization", "spec_bench/qa", "spec_bench/rag",
    "spec_bench/math_reasoning", "prompts/math500", "prompts/humaneval", "prompts/mbpp", "prompts/arena-hard-v2",
)  # fmt: skip
MOST_CHARACTERS = 800  # of a prompt
NUM_MATCHED = 10  # tokens after a match that others propose
LEAST_CALLS = 4  # of a cell: single calls differ by a factor of two
TABLE = step_costs.SHIPPED_TABLES / "cpu_2_cores.pair.float32.json"


def measure(
    target, draft, prompts: list[list[int]], policies: dict[str, Policy | None], temperature: float, length: int
) -> list[dict[str, Any]]:
    """Decode each prompt plainly and under each policy, with both kinds of kernels, in turns."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else bench.GREEDY
    ways, batches = bench.ways_of(draft, policies), [[ids] for ids in prompts]
    label, options = f"temperature {temperature:g}", {"max_new_tokens": length, **sampling}
    runs = bench.decode_in_turns(target, ways, batches, label=label, **options)
    return [
        {"temperature": temperature, "policy": policy} | summary(bench.by_way(runs, policy), draft, temperature)
        for policy in policies
    ]


def summary(runs: dict[str, list[bench.Call]], draft, temperature: float) -> dict[str, Any]:
    """Return what one policy came to: the rounds of `own_packed` if it was measured, else of `own`."""
    ours = runs.get("own_packed", runs["own"])
    rounds, seconds = bench.joined(ours), {way: bench.median_per_token(calls) for way, calls in runs.items()}
    shares = rounds.conditional_acceptance(draft.config.block_size)
    return {
        "tau": rounds.tau,
        "proposed_per_round": sum(rounds.proposed) / rounds.rounds,
        "conditional_acceptance": [None if math.isnan(share) else round(share, 4) for share in shares],
        "tokens_per_second": 1 / seconds.get("own_packed", seconds["own"]),
        **bench.speedups(seconds),
        "ms_per_token": {way: 1e3 * value for way, value in seconds.items()},
        "identical_outputs": None if temperature else bench.identical(runs["plain"], ours),
        **{f"{name}_ms_per_round": value for name, value in bench.round_parts(rounds).items()},
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


def learning(warm_up: int = 12, num_calls: int = 100, max_new_tokens: int = 96) -> Iterator[dict[str, Any]]:
    """The shipped pair without calibration and table after 200 rounds, and a random draft; ratios of medians."""
    target, draft, tokenizer = bench.load_pair()
    measured, bare = Scheduler(ThroughputTable.load(TABLE)), unmeasured(draft)
    random = DSparkDraftModel(DSparkConfig.from_target(target, num_hidden_layers=2, mask_token_id=1)).eval()
    ways = {"plain": bench.Way(), "measured": bench.Way(draft, measured), "learnt": bench.Way(bare),
            "random": bench.Way(random, attached=True)}  # fmt: skip
    prompts, cells = bench.held_out_ids(tokenizer), []
    for regime, sampling in bench.REGIMES.items():
        options = {"label": regime, "max_new_tokens": max_new_tokens, **sampling}
        batches = [[prompts[index % len(prompts)]] for index in range(warm_up + num_calls)]
        calls = bench.decode_in_turns(target, ways, batches, **options)
        found = {name: of_calls(each[warm_up:]) for name, each in calls.items()}
        cell = {"regime": regime, "warm_up_rounds": bench.joined(calls["learnt"][:warm_up]).rounds}
        for name, over in (("learnt", "measured"), ("learnt", "plain"), ("random", "plain")):
            cell[f"{name}_over_{over}"], cell[f"{name}_over_{over}_in_all"] = map(truediv, found[over], found[name])
        cells.append(cell)
        yield {"load": os.getloadavg()[0], "cells": cells}


def tasks(
    data_dir: str,
    folder: str = str(bench.PAIR),
    dtype: bench.Dtype = "float32",
    rows: tuple[int, ...] = (1, 4, 16),
    num_prompts: int = 20,
    max_new_tokens: int = 64,
) -> Iterator[dict[str, Any]]:
    """An attached draft without calibration and table, in each of ten tasks; over plain decoding, over transformers'
    prompt lookup, which takes one row, and over that of economize. Batches are decoded in turns, four at least.
    No token ends a sampled answer: ways draw other answers, and their lengths would say more than their speed."""
    target, draft, tokenizer = bench.load_pair(dtype, Path(folder))

    def ids_of(texts: list[str]) -> list[list[int]]:
        return [token_ids(as_chat(Prompt(text[:MOST_CHARACTERS]), tokenizer), tokenizer) for text in texts]

    bare, cells = unmeasured(draft), []
    for (regime, sampling), size in itertools.product(bench.REGIMES.items(), rows):
        endless = {"eos_token_id": target.config.vocab_size} if regime == "sampled" else {}
        options = {"max_new_tokens": max_new_tokens, **sampling, **endless}
        ways = {"plain": bench.Way(), "attached": bench.Way(bare, attached=True)} | others(target, regime, size)
        for index, ids in enumerate(ids_of(bench.held_out_prompts(12))):  # some 200 rounds, of another task
            bench.decode(target, [ids] * size, index, bare, **options)
        for task in TASKS:
            lines = (Path(data_dir) / f"{task}.jsonl").read_text().splitlines()[:num_prompts]
            ids = ids_of([json.loads(line)["turns"][0] for line in lines])
            batches = [ids[index : index + size] for index in range(0, len(ids), size)]
            batches *= -(-LEAST_CALLS // len(batches))
            calls = bench.decode_in_turns(target, ways, batches, label=task, **options)
            found = {name: of_calls(each) for name, each in calls.items()}
            cell = {"task": Path(task).name, "rows": size, "regime": regime}
            for over in found.keys() - {"attached"}:
                cell[f"over_{over}"], cell[f"over_{over}_in_all"] = map(truediv, found[over], found["attached"])
            cells.append(cell)
            yield {"num_prompts": num_prompts, "load": os.getloadavg()[0], "cells": cells}


def others(target, regime: str, rows: int) -> dict[str, bench.Way]:
    """Return the prompt lookup of others, with 10 tokens of a match at most: of whom takes so many rows."""
    found = {"lookup": bench.Way(options={"prompt_lookup_num_tokens": NUM_MATCHED})} if rows == 1 else {}
    if importlib.util.find_spec("economize") is not None:
        from economize import DecodeConfig, apply
        from economize.integrations.generate import EconomizeGenerate
        from economize.techniques.lookup import LookupConfig

        verifier = {"greedy": "greedy", "sampled": "rejection"}[regime]
        decoding = DecodeConfig(cycle_length=1 + NUM_MATCHED, verifier=verifier)
        call = EconomizeGenerate(apply(target, LookupConfig()), decoding)
        found["economize"] = bench.Way(options={"custom_generate": call})
    return found


def unmeasured(draft: DSparkDraftModel) -> DSparkDraftModel:
    """Return a draft without calibration. No table of this machine is known from now on."""
    step_costs.SHIPPED_TABLES, os.environ["HF_DSPARK_CACHE"] = bench.PAIR, os.devnull
    bare = copy.deepcopy(draft)
    bare.config.update(dict.fromkeys(CALIBRATED))
    return bare


def of_calls(calls: list[bench.Call]) -> tuple[float, float]:
    """Return the seconds per token: the median of the calls, and that of all together."""
    return bench.median_per_token(calls), bench.per_token_of_all(calls)


if __name__ == "__main__":
    bench.main(__doc__, speed, learning, tasks)
