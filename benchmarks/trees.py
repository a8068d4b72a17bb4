"""Draft trees on the shipped pair: what they commit against nodes verified, and what that is worth in time.

python benchmarks/trees.py speed --output benchmarks/results/trees_speed.json
python benchmarks/trees.py lookup --pair out/smollm2 --files examples/smollm2/copies.jsonl mt-bench.jsonl

`tau` compares trees of fixed sizes with the chain. `speed` decodes each prompt plainly, with the best chains and with
scheduled trees, in turns. `lookup` compares branches by prompt lookup with none, on prompts that ask for a repetition
and on others; each file is a kind of prompts.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
from tqdm import tqdm

from hf_dspark import FullBlock, Policy, PromptLookup, Scheduler
from hf_dspark.data.prompts import as_chat, read_prompt_file, token_ids
from hf_dspark.scheduling.prompt_lookup import AnswerMemory
from hf_dspark.scheduling.step_costs import estimated_cost, find_cost

SIZES = (7, 15, 31)
LOOKED_UP = 10  # tokens at a time, as transformers' documentation has it
Row = dict[str, Any]


def fixed_trees() -> dict[str, Policy]:
    return {f"trees of {nodes}": Scheduler(num_nodes=nodes) for nodes in SIZES}


def committed(calls: Sequence[bench.Call]) -> Row:
    """Return tau and the nodes of a round."""
    rounds = bench.joined(calls)
    return {"tau": rounds.tau, "nodes": sum(rounds.proposed) / rounds.rounds, "rounds": rounds.rounds}


def tau(num_seeds: int = 4, max_new_tokens: int = 128) -> Iterator[dict[str, Any]]:
    """Tokens per round of chains and of trees."""
    target, draft, tokenizer = bench.load_pair()
    prompts, rows = bench.held_out_ids(tokenizer), []
    for regime, (name, policy) in itertools.product(bench.REGIMES, ({"chain": FullBlock()} | fixed_trees()).items()):
        options = {"max_new_tokens": max_new_tokens, **bench.REGIMES[regime]}
        asked = enumerate(prompts * (num_seeds if regime == "sampled" else 1))
        with bench.decoding(draft, policy):
            calls = [bench.decode(target, [ids], seed, draft, **options) for seed, ids in tqdm(asked, desc=name)]
        rows.append({"regime": regime, "tree": name.removeprefix("trees of ")} | committed(calls))
        yield {"rows": rows}


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
    } | fixed_trees()
    for regime, sampling in bench.REGIMES.items():
        runs: dict[str, list[bench.Call]] = {name: [] for name in ("plain", *policies)}
        options = {"max_new_tokens": max_new_tokens, **sampling}
        for index, ids in enumerate(tqdm(bench.held_out_ids(tokenizer, num_prompts), desc=regime)):
            with bench.kernels(target, draft, packed=True):
                for name in runs:
                    with bench.decoding(draft, policies.get(name)):
                        assistant = draft if name in policies else None
                        runs[name].append(bench.decode(target, [ids], index, assistant, **options))
        chains = runs["scheduled chains"]
        for name in policies:
            rounds = bench.joined(runs[name])
            parts = {"draft": rounds.draft_seconds, "verify": rounds.verify_seconds, "rest": rounds.rest_seconds}
            same = sum(a.token_ids == b.token_ids for a, b in zip(runs[name], runs["plain"], strict=True))
            rows.append(
                {
                    "regime": regime,
                    "policy": name,
                    "speedup_same_kernels": bench.median_per_token(runs["plain"]) / bench.median_per_token(runs[name]),
                    # A few answers gain much, most gain little: the median of the answers does not show it.
                    "over_scheduled_chains_in_all": per_token_of_all(chains) / per_token_of_all(runs[name]),
                    "identical": same if sampling == bench.GREEDY else None,
                    **committed(runs[name]),
                    **{f"{part}_ms": 1e3 * seconds / rounds.rounds for part, seconds in parts.items()},
                }
            )
    return {"rows": rows}


def per_token_of_all(calls: Sequence[bench.Call]) -> float:
    return sum(call.seconds for call in calls) / sum(call.num_tokens for call in calls)


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
    drafted = {
        "chain": (draft, {"policy": FullBlock()}),
        "tree": (draft, {"policy": trees, "prompt_lookup": False}),
        "tree, copies": (draft, {"policy": trees}),
        "default": (draft, {}),
        "copies alone": (PromptLookup(target), {}),
    }
    rows, options = [], {"max_new_tokens": max_new_tokens, **bench.GREEDY}
    for file in files:
        runs: dict[str, list[bench.Call]] = {name: [] for name in ("plain", "prompt lookup", *drafted)}
        for prompt in tqdm(read_prompt_file(file, num_prompts).prompts, desc=file.stem):
            ids = [token_ids(as_chat(prompt, tokenizer), tokenizer)]
            with bench.kernels(target, draft, packed=True):
                runs["plain"].append(bench.decode(target, ids, **options))
                runs["prompt lookup"].append(bench.decode(target, ids, prompt_lookup_num_tokens=LOOKED_UP, **options))
                for name, (assistant, how) in drafted.items():
                    with bench.decoding(assistant, **how):
                        runs[name].append(bench.decode(target, ids, assistant=assistant, **options))
        for name, own in runs.items():
            pairs = zip(runs["plain"], own, strict=True)
            over = statistics.median(a.seconds_per_token / b.seconds_per_token for a, b in pairs)
            row: Row = {"prompts": file.stem, "way": name, "over_plain": over}
            rows.append(row | (committed(own) if name in drafted else {}))
    return {"rows": rows}


def answers(num_prompts: int = 20, epochs: int = 4, dtype: bench.Dtype = "float32") -> dict[str, Any]:
    """The same prompts again and again, as in evaluations and RL, with and without a memory of earlier answers."""
    target, draft, tokenizer = bench.load_pair(dtype)
    prompts, rows = bench.held_out_ids(tokenizer, num_prompts), []
    for regime, options in bench.REGIMES.items():
        known = {name: AnswerMemory() for name in ("lookup", "draft")}
        assistants = {"lookup": PromptLookup(target), "draft": draft}
        for epoch in range(epochs):
            names = ("plain", *known, *(f"{name}, answers" for name in known))
            runs: dict[str, list[bench.Call]] = {name: [] for name in names}
            for prompt in tqdm(prompts, desc=f"{regime} {epoch}"):
                common = {"seed": epoch, "max_new_tokens": 128, **options}
                runs["plain"].append(bench.decode(target, [prompt], **common))
                for name, assistant in assistants.items():
                    for way, answers in ((name, None), (f"{name}, answers", known[name])):
                        with bench.decoding(assistant, answers=answers):
                            runs[way].append(bench.decode(target, [prompt], assistant=assistant, **common))
            for way, calls in runs.items():
                row: Row = {"regime": regime, "epoch": 1 + epoch, "way": way}
                row["over_plain"] = per_token_of_all(runs["plain"]) / per_token_of_all(calls)
                rows.append(row | ({} if way == "plain" else committed(calls)))
    return {"rows": rows}


if __name__ == "__main__":
    bench.main(__doc__, tau, speed, lookup, answers)
