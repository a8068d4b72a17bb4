"""Draft trees on the shipped pair: what they commit against nodes verified, and what that is worth in time.

python benchmarks/trees.py speed --output benchmarks/results/trees_speed.json
python benchmarks/trees.py lookup --pair out/smollm2 --files examples/smollm2/copies.jsonl mt-bench.jsonl

`speed` decodes each prompt plainly, with chains, and with trees that are scheduled or of fixed sizes, in turns.
`lookup` compares branches by prompt lookup with none, on prompts that ask for a repetition and on others; each file is
a kind of prompts. `answers` decodes the same prompts again and again.
"""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench

from hf_dspark import FullBlock, PromptLookup, Scheduler
from hf_dspark.data.prompts import as_chat, read_prompt_file, token_ids
from hf_dspark.scheduling.prompt_lookup import AnswerMemory
from hf_dspark.scheduling.step_costs import estimated_cost, find_cost

SIZES = (7, 15, 31)
LOOKED_UP = 10  # tokens at a time, as transformers' documentation has it
Row = dict[str, Any]


def committed(calls: Sequence[bench.Call]) -> Row:
    """Return tau and the nodes of a round."""
    rounds = bench.joined(calls)
    return {"tau": rounds.tau, "nodes": sum(rounds.proposed) / rounds.rounds, "rounds": rounds.rounds}


def speed(num_prompts: int = 50, max_new_tokens: int = 128) -> dict[str, Any]:
    """Chains and trees, scheduled or fixed, over plain decoding with the same kernels."""
    target, draft, tokenizer = bench.load_pair()
    cost, rows = find_cost(target, draft) or estimated_cost(target, draft), []
    policies = {
        "whole blocks": FullBlock(),
        "scheduled chains": Scheduler(cost, trees=False),
        "scheduled chains and tails": Scheduler(cost, trees=False, tails=True),
        "chains, never skipped": Scheduler(cost, trees=False, skip=False),
        "scheduled trees": Scheduler(cost, trees=True),
        "trees, never skipped": Scheduler(cost, trees=True, skip=False),
        **{f"trees of {nodes}": Scheduler(num_nodes=nodes) for nodes in SIZES},
    }
    ways = {"plain": bench.Way(packed=True)}
    ways |= {name: bench.Way(draft, policy, packed=True) for name, policy in policies.items()}
    for regime, sampling in bench.REGIMES.items():
        options = {"label": regime, "max_new_tokens": max_new_tokens, **sampling}
        batches = [[ids] for ids in bench.held_out_ids(tokenizer, num_prompts)]
        runs = bench.decode_in_turns(target, ways, batches, **options)
        median = {name: bench.median_per_token(calls) for name, calls in runs.items()}
        in_all = {name: bench.per_token_of_all(calls) for name, calls in runs.items()}
        for name in policies:
            same = bench.identical(runs[name], runs["plain"])
            row: Row = {
                "regime": regime,
                "policy": name,
                "speedup_same_kernels": median["plain"] / median[name],
                # A few answers gain much, most gain little: the median of the answers does not show it.
                "over_scheduled_chains_in_all": in_all["scheduled chains"] / in_all[name],
                "identical": same if sampling == bench.GREEDY else None,
                **committed(runs[name]),
                **{f"{part}_ms": value for part, value in bench.round_parts(bench.joined(runs[name])).items()},
            }
            rows.append(row)
    return {"rows": rows}


def lookup(
    files: tuple[Path, ...],
    pair: Path = bench.PAIR,
    num_prompts: int | None = None,
    nodes: int = 31,
    dtype: bench.Dtype = "float32",
    max_new_tokens: int = 128,
) -> dict[str, Any]:
    """Branches by prompt lookup and none, beside transformers' prompt lookup."""
    target, draft, tokenizer = bench.load_pair(dtype, pair)
    trees = Scheduler(num_nodes=nodes)
    way = functools.partial(bench.Way, packed=True)
    ways = {
        "plain": way(),
        "prompt lookup": way(options={"prompt_lookup_num_tokens": LOOKED_UP}),
        "chain": way(draft, FullBlock()),
        "tree": way(draft, trees, {"prompt_lookup": False}),
        "tree, copies": way(draft, trees),
        "default": way(draft),
        "copies alone": way(PromptLookup(target)),
    }
    rows, options = [], {"max_new_tokens": max_new_tokens, **bench.GREEDY}
    for file in files:
        prompts = read_prompt_file(file, num_prompts).prompts
        batches = [[token_ids(as_chat(prompt, tokenizer), tokenizer)] for prompt in prompts]
        runs = bench.decode_in_turns(target, ways, batches, label=file.stem, **options)
        for name, own in runs.items():
            pairs = zip(runs["plain"], own, strict=True)
            over = statistics.median(a.seconds_per_token / b.seconds_per_token for a, b in pairs)
            row: Row = {"prompts": file.stem, "way": name, "over_plain": over}
            rows.append(row | ({} if own[0].rounds is None else committed(own)))
    return {"rows": rows}


def answers(num_prompts: int = 20, epochs: int = 4, dtype: bench.Dtype = "float32") -> dict[str, Any]:
    """The same prompts again and again, as in evaluations and RL, with and without a memory of earlier answers."""
    target, draft, tokenizer = bench.load_pair(dtype)
    prompts, rows = bench.held_out_ids(tokenizer, num_prompts), []
    for regime, options in bench.REGIMES.items():
        known = {name: AnswerMemory() for name in ("lookup", "draft")}
        ways = {"plain": bench.Way()}
        for name, assistant in (("lookup", PromptLookup(target)), ("draft", draft)):
            ways[name] = bench.Way(assistant)
            ways[f"{name}, answers"] = bench.Way(assistant, decoding={"answers": known[name]})
        for epoch in range(epochs):
            common = {"seed": epoch, "max_new_tokens": 128, **options}
            batches = [[prompt] for prompt in prompts]
            runs = bench.decode_in_turns(target, ways, batches, label=f"{regime} {epoch}", **common)
            for way, calls in runs.items():
                row: Row = {"regime": regime, "epoch": 1 + epoch, "way": way}
                row["over_plain"] = bench.per_token_of_all(runs["plain"]) / bench.per_token_of_all(calls)
                rows.append(row | ({} if way == "plain" else committed(calls)))
    return {"rows": rows}


if __name__ == "__main__":
    bench.main(__doc__, speed, lookup, answers)
