"""Trees of drafts on the shipped pair: what they commit against nodes verified, and what that is worth in time.

python benchmarks/trees.py fit --test_file test.jsonl
python benchmarks/trees.py tau
python benchmarks/trees.py blocks
python benchmarks/trees.py speed
python benchmarks/trees.py copies --pair out/smollm2 --prompts copying=examples/smollm2/copies.jsonl \\
    chat=mt-bench.jsonl
python benchmarks/trees.py example
python benchmarks/trees.py machines --curves vidur_linear_layer_ms_vs_tokens.csv
python benchmarks/trees.py replay --geometry qwen3-0.6b
python benchmarks/trees.py decisions

`fit` writes what is expected of nodes into the shipped draft's config, from questions that nothing else is measured
on. `tau` compares trees of fixed budgets with the chain. `blocks` says what verifying a chain as a whole gains over
one token at a time, in the same rounds. `speed` decodes each prompt plainly, with the best chains and with scheduled
trees, in turns. `copies` compares trees with copied branches and without, on prompts that ask for a copy and on
others. `example` keeps one real tree in which a sibling saved a round. `machines` computes the best chain and the
best tree, for the acceptances of the shipped pair, from the shipped tables of this kind of CPU and from the step
times of GPUs. `replay` times chains and trees with random weights of larger models; rounds accept as many drafts as
those of the shipped pair did. `decisions` times what it takes to decide about trees of 64 sequences. Results are in
results/trees_*.json.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import CANDIDATES, DRAFTED_TOKENS, PLAIN_TOKENS, decode
from pair import (
    GEOMETRIES,
    GREEDY,
    PAIR,
    REGIMES,
    RESULTS,
    Way,
    calibration_prompts,
    decoding,
    held_out_prompts,
    kernels,
    load_pair,
    num_rounds_for,
    provenance_of,
    random_pair,
    replaying,
    representative,
    write_result,
)
from simulator import DRAFT_SHARE, load_curves
from speed import Run, timed
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_dspark import (
    DecodingOptions,
    DSparkConfig,
    FullBlock,
    PromptLookup,
    Rounds,
    Scheduler,
)
from hf_dspark.data.prompts import as_chat, read_prompt_file, token_ids
from hf_dspark.measuring.calibrate import collect_rounds, collect_siblings
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.sampling.distributions import TokenDistribution
from hf_dspark.sampling.drafts import DraftBlock, DraftTree
from hf_dspark.sampling.verification import drafted_probabilities, prefix_weights
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.policies import Policy
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.step_costs import SHIPPED_TABLES, find_cost
from hf_dspark.scheduling.tree_fit import fit_siblings
from hf_dspark.scheduling.tree_plans import (
    MOST_SIBLINGS,
    SiblingAcceptance,
    TreePlan,
    usual_acceptance,
)

BUDGETS = (7, 15, 31)
LOOKED_UP = 10  # tokens at a time, as transformers' documentation has it
GPUS = ("A100 Llama-2-7B", "H100 Llama-2-7B")


def fit(options: argparse.Namespace, _: dict[str, Any]) -> None:
    target, draft, tokenizer = load_pair()
    prompts = calibration_prompts(options.test_file, options.num_prompts)
    found = {}
    for regime, sampling in REGIMES.items():
        tests = collect_siblings(
            target, draft, prompts, tokenizer, f"{options.rounds_folder}/{regime}.jsonl", **sampling
        )
        chains = collect_rounds(
            target, draft, prompts, tokenizer, f"{options.rounds_folder}/chains-{regime}.jsonl", **sampling
        )
        fitted = fit_siblings(tests, regime == "sampled", draft.config.block_size, chains.survivals())
        found[regime] = fitted.to_dict()
        print(regime, len(tests), "tests", found[regime]["fits"])
    config = DSparkConfig.from_pretrained(PAIR / "draft")
    config.sibling_acceptance = found
    config.save_pretrained(PAIR / "draft")


def tau(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    target, draft, tokenizer = load_pair()
    policies = {"chain": FullBlock()} | {str(nodes): Scheduler(num_nodes=nodes) for nodes in BUDGETS}
    prompts, rows = held_out_prompts(), []
    for regime, sampling in REGIMES.items():
        seeds = range(options.num_seeds) if regime == "sampled" else range(1)
        for name, policy in policies.items():
            runs = []
            for seed, (index, prompt) in itertools.product(seeds, enumerate(prompts)):
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
                with decoding(draft, policy):
                    runs.append(
                        timed(
                            target, ids, 1000 * seed + index, assistant_model=draft, **sampling,
                            max_new_tokens=options.max_new_tokens,
                        )
                    )  # fmt: skip
            rows.append({"regime": regime, "tree": name} | committed(runs))
            print(rows[-1], flush=True)
    write_result(RESULTS / "trees_tau.json", origin | {"rows": rows})


def committed(runs: list[Run]) -> dict[str, float]:
    """Return tau, its standard error over rounds, and the nodes of a round."""
    stats = Rounds.joined(run.stats for run in runs)
    error = statistics.stdev(stats.committed) / math.sqrt(stats.rounds)
    return {
        "tau": round(stats.tau, 3),
        "standard_error": round(error, 3),
        "nodes": round(sum(stats.proposed) / stats.rounds, 2),
        "rounds": stats.rounds,
    }


def blocks(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Compare both expectations given each drafted block: the sum of p_k, and of the products of the single tests."""
    target, draft, tokenizer = load_pair()
    rows = []
    for name, sampling in {"1": REGIMES["sampled"], "0.7": REGIMES["sampled"] | {"temperature": 0.7}}.items():
        jointly, singly = [], []

        def observe(outcome: RoundOutcome, jointly: list[float] = jointly, singly: list[float] = singly) -> None:
            length = int(outcome.lengths[0])
            if length == 0:  # the answer ends here
                jointly.append(1.0), singly.append(1.0)
                return
            distribution = TokenDistribution(outcome.target_logits[0].float().softmax(-1))
            block = DraftBlock(outcome.block.token_ids[:, :length], outcome.block.distribution[:, :length], None)
            first = torch.zeros(1, dtype=torch.long)
            target_probs, draft_probs = drafted_probabilities(block, distribution, first)
            jointly.append(float(prefix_weights(block, distribution, first).sum()))
            singly.append(1.0 + float((target_probs / draft_probs).clamp_max(1.0).cumprod(dim=1).sum()))

        runs = []
        draft.decoding = DecodingOptions(policy=FullBlock(), observer=observe)
        for index, prompt in enumerate(held_out_prompts()[: options.num_prompts]):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            limit = {"max_new_tokens": options.max_new_tokens}
            runs.append(timed(target, ids, index, assistant_model=draft, **sampling, **limit))
        means = {"as_a_whole": statistics.mean(jointly), "token_by_token": statistics.mean(singly)}
        rows.append({"temperature": name} | {rule: round(mean, 3) for rule, mean in means.items()} | committed(runs))
        print(rows[-1], flush=True)
    write_result(RESULTS / "trees_blocks.json", origin | {"rows": rows})


def speed(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    target, draft, tokenizer = load_pair()
    cost = find_cost(target, draft)
    if cost is None:
        raise SystemExit("measure this machine first: hf-dspark profile")
    policies = {
        "whole blocks": FullBlock(),
        "scheduled chains": Scheduler(cost, trees=False),
        "chains, never skipped": Scheduler(cost, trees=False, skip=False),
        "scheduled trees": Scheduler(cost, trees=True),
        "trees, never skipped": Scheduler(cost, trees=True, skip=False),
    } | {f"trees of {nodes}": Scheduler(num_nodes=nodes) for nodes in BUDGETS}
    rows = []
    for regime, sampling in REGIMES.items():
        runs: dict[str, list[Run]] = {name: [] for name in ("plain", *policies)}
        for index, prompt in enumerate(tqdm(held_out_prompts()[: options.num_prompts], desc=regime)):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            common = {"max_new_tokens": options.max_new_tokens, **sampling}
            with kernels(target, draft, packed=True):
                runs["plain"].append(timed(target, ids, index, **common))
                for name, policy in policies.items():
                    with decoding(draft, policy):
                        runs[name].append(timed(target, ids, index, assistant_model=draft, **common))
        plain = statistics.median(run.seconds_per_token for run in runs["plain"])
        for name in policies:
            stats = Rounds.joined(run.stats for run in runs[name])
            per_token = statistics.median(run.seconds_per_token for run in runs[name])
            chains = zip(runs[name], runs["scheduled chains"], strict=True)
            row = {"regime": regime, "policy": name, "speedup_same_kernels": round(plain / per_token, 3)}
            row |= {"over_scheduled_chains": round(statistics.median(
                chain.seconds_per_token / own.seconds_per_token for own, chain in chains), 3)}  # fmt: skip
            # A few answers gain much, most gain little: the median of the answers does not show it.
            row["over_scheduled_chains_in_all"] = round(
                seconds_per_token_of_all(runs["scheduled chains"]) / seconds_per_token_of_all(runs[name]), 3
            )
            row |= committed(runs[name]) | {
                "draft_ms": round(1e3 * stats.draft_seconds / stats.rounds, 3),
                "verify_ms": round(1e3 * stats.verify_seconds / stats.rounds, 3),
                "rest_ms": round(1e3 * stats.rest_seconds / stats.rounds, 3),
            }
            if sampling == GREEDY:
                same = zip(runs[name], runs["plain"], strict=True)
                row["identical"] = sum(own.tokens == plainly.tokens for own, plainly in same)
            rows.append(row)
            print(row, flush=True)
    write_result(RESULTS / "trees_speed.json", origin | {"rows": rows})


def seconds_per_token_of_all(runs: Sequence[Run]) -> float:
    counts = [len(run.tokens) for run in runs]
    return sum(run.seconds_per_token * count for run, count in zip(runs, counts, strict=True)) / sum(counts)


def copies(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Compare copied branches with none, on prompts that ask for a copy and on others, beside plain prompt lookup."""
    target, draft, tokenizer = load_pair(getattr(torch, options.dtype), Path(options.pair))
    lookup = PromptLookup(target)
    drafted: dict[str, tuple[DraftModel, DecodingOptions]] = {
        "chain": (draft, DecodingOptions(policy=FullBlock())),
        "tree": (draft, DecodingOptions(policy=Scheduler(num_nodes=options.nodes), prompt_lookup=False)),
        "tree, copies": (draft, DecodingOptions(policy=Scheduler(num_nodes=options.nodes))),
        "default": (draft, DecodingOptions()),
        "copies alone": (lookup, DecodingOptions()),
    }
    rows = []
    for kind, file in (word.split("=", 1) for word in options.prompts):
        runs: dict[str, list[Run]] = {name: [] for name in ("plain", *drafted)}
        prompts = read_prompt_file(file, options.num_prompts).prompts
        for start in tqdm(range(0, len(prompts), options.rows), desc=kind):
            chats = [{"input_ids": token_ids(as_chat(prompt, tokenizer), tokenizer)}
                     for prompt in prompts[start : start + options.rows]]  # fmt: skip
            batch = tokenizer.pad(chats, padding_side="left", return_tensors="pt")
            common = {**batch, "max_new_tokens": options.max_new_tokens, **GREEDY}
            if options.rows > 1:  # rows that ended would count as decoded
                common["min_new_tokens"] = options.max_new_tokens
            with kernels(target, draft, packed=True):
                runs["plain"].append(timed_rows(target, **common))
                if options.rows == 1:  # transformers takes no more
                    looked_up = timed_rows(target, prompt_lookup_num_tokens=LOOKED_UP, **common)
                    runs.setdefault("prompt lookup", []).append(looked_up)
                for name, (assistant, how) in drafted.items():
                    assistant.decoding = how
                    runs[name].append(timed_rows(target, assistant_model=assistant, **common))
        for name, own in runs.items():
            row = {"prompts": kind, "rows": options.rows, "way": name}
            for baseline in ("plain", "chain"):
                pairs = zip(runs[baseline], own, strict=True)
                ratios = [base.seconds_per_token / run.seconds_per_token for base, run in pairs]
                row[f"over_{baseline}"] = round(statistics.median(ratios), 3)
            row["identical"] = sum(run.tokens == plain.tokens for run, plain in zip(own, runs["plain"], strict=True))
            rows.append(row | (committed(own) if name in drafted else {}))
            print(rows[-1], flush=True)
    write_result(RESULTS / options.output, origin | {"rows": rows})


def timed_rows(target: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Run:
    started = time.perf_counter()
    output = target.generate(input_ids, **options)
    seconds = time.perf_counter() - started
    tokens = output[:, input_ids.shape[1] :].flatten().tolist()
    draft = options.get("assistant_model")
    return Run(tokens, seconds / len(tokens), None if draft is None else draft.last_stats)


def example(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Keep the round of the first prompts in which the accepted path left the chain and went furthest."""
    target, draft, tokenizer = load_pair()
    found: list[RoundOutcome] = []
    for prompt in held_out_prompts()[: options.num_prompts]:
        draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=15), prompt_lookup=False, observer=found.append)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        target.generate(ids, assistant_model=draft, max_new_tokens=64, **GREEDY)
    best = max((each for each in found if each.trees), key=saved_depth)
    (tree,), (path,) = best.trees, best.paths
    facts = zip(tree.parents, map(tokenizer.decode, tree.token_ids), tree.survivals, strict=True)
    nodes = [
        {"parent": parent, "text": text, "survival": round(survival, 3), "accepted": place in path}
        for place, (parent, text, survival) in enumerate(facts, start=1)
    ]
    write_result(RESULTS / "trees_example.json", origin | {"nodes": nodes})


def saved_depth(outcome: RoundOutcome) -> int:
    """Return how many accepted tokens stand after the first place where a later sibling was right."""
    (tree,), (path,) = outcome.trees, outcome.paths
    for number, (parent, node) in enumerate(zip([0, *path], path, strict=False)):
        if tree.children(parent)[0] != node:
            return len(path) - number
    return 0


def replay(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Time chains and trees with random weights of published sizes; rounds accept as much as those of the pair."""
    policies = {"chain": FullBlock()} | {f"tree of {nodes}": Scheduler(num_nodes=nodes) for nodes in BUDGETS}
    accepted = {regime: accepted_by(policies, sampling, options.num_prompts) for regime, sampling in REGIMES.items()}
    siblings, rows = DSparkConfig.from_pretrained(PAIR / "draft").sibling_acceptance, []
    for geometry in options.geometry:
        target, draft = random_pair(geometry, torch.bfloat16, "cpu", options.rehearse)
        draft.config.draft_top_k, draft.config.sibling_acceptance = CANDIDATES, siblings
        target.generation_config.eos_token_id = None
        for regime in REGIMES:
            row = {"geometry": geometry, "regime": regime}
            rows.append(row | replayed(target, draft, policies, accepted[regime], regime, options))
            print(rows[-1], flush=True)
        del target, draft
    write_result(RESULTS / options.output, origin | {"rows": rows})


def replayed(
    target: PreTrainedModel,
    draft: DraftModel,
    policies: dict[str, Policy],
    accepted: dict[str, list[int]],
    regime: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return tau and speed of each policy over that of chains, in turns."""
    ids = torch.arange(options.context)[None] % 1000 + 5
    packed = not options.unpacked
    times: dict[str, list[float]] = {"plain": [], **{name: [] for name in policies}}
    for index in tqdm(range(-1, options.repetitions), desc=regime):
        for name in times:
            way = Way(name, name in policies, packed, "")
            count = options.new_tokens if way.drafted else PLAIN_TOKENS
            rounds = [0]
            if way.drafted:
                rounds = representative(accepted[name], num_rounds_for(count, accepted[name]), max(index, 0))
            with decoding(draft, policies.get(name)), replaying(rounds), of_mean_shape():
                limits = {"max_new_tokens": 1 + count, "pad_token_id": 0, **REGIMES[regime]}
                seconds, tokens = decode(target, draft, way, ids, max(index, 0), **limits)
            if index >= 0:  # the first round warms up
                times[name].append(seconds / tokens)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "tau": {name: round(1 + statistics.mean(accepted[name]), 3) for name in policies},
        "over_plain": {name: round(medians["plain"] / medians[name], 3) for name in policies},
        "over_chain": {name: round(medians["chain"] / medians[name], 3) for name in policies},
    }


@contextmanager
def of_mean_shape() -> Iterator[None]:
    """While entered, trees have the shape that the mean acceptances give: drafts of random weights know nothing."""
    honest = SiblingAcceptance.shares

    def shares(self: SiblingAcceptance, known: np.ndarray) -> np.ndarray:
        ranks = self.means[0] if self.is_drawn else [*self.means[0], *[0.0] * MOST_SIBLINGS][: known.shape[1]]
        return np.tile(ranks, (len(known), 1))

    SiblingAcceptance.shares = shares
    try:
        yield
    finally:
        SiblingAcceptance.shares = honest


def accepted_by(policies: dict[str, Any], sampling: dict[str, Any], num_prompts: int) -> dict[str, list[int]]:
    """Return how many drafts each round of the shipped pair accepted."""
    target, draft, tokenizer = load_pair()
    found: dict[str, list[int]] = {name: [] for name in policies}
    for (name, policy), prompt in itertools.product(policies.items(), held_out_prompts()[:num_prompts]):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with decoding(draft, policy):
            found[name] += timed(target, ids, 0, assistant_model=draft, max_new_tokens=128, **sampling).stats.accepted
    return found


def machines(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Compute tokens per second of the best chain and the best tree by several tables; trees pay for their growth."""
    draft_config = DSparkConfig.from_pretrained(PAIR / "draft")
    tables = {path.stem: ThroughputTable.load(path) for path in sorted(SHIPPED_TABLES.glob("*.json"))}
    tables |= {name: table for name, table in load_curves(options.curves, DRAFT_SHARE).items() if name in GPUS}
    rows = []
    for (name, table), regime in itertools.product(tables.items(), REGIMES):
        siblings = draft_config.siblings_for(regime == "sampled")
        expected, chain = siblings.best_nodes(BUDGETS[-1]), siblings.of_chain()
        for requests in (1, 4, 16, 64):
            load = Load(tuple(range(requests)))
            tokens = [1 + np.concatenate([[0.0], each.cumsum()]) for each in (chain, expected)]
            grown = table.tree_seconds(load, 31, siblings.is_drawn)
            seconds = [table.round_seconds(load, requests * len(chain))[::requests], grown]
            of_chains = np.append(1 / table.plain_seconds(load), tokens[0][1:] / seconds[0][1:])
            of_trees = tokens[1] / seconds[1]
            rows.append({
                "table": name, "regime": regime, "requests": requests, "best_chain": int(of_chains.argmax()),
                "best_tree": int(of_trees.argmax()),
                "tree_over_chain": round(float(of_trees.max() / of_chains.max()), 3),
                "tree_of_15_over_chain": round(float(of_trees[15] / of_chains.max()), 3),
                "chosen": Scheduler(table, trees=True).plan_tree(siblings, load) is not None,
            })  # fmt: skip
            print(rows[-1])
    write_result(RESULTS / "trees_machines.json", origin | {"rows": rows})


def decisions(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Time the plan of a round for 64 sequences with copies, and all questions about their trees of 31 nodes."""
    rows, load = [], Load(tuple(range(64)))
    scheduler = Scheduler(
        ThroughputTable((1, 64, 2048), (100, 99, 90), 1e-3), trees=True
    )  # a machine that verifies all
    for is_drawn in (True, False):
        siblings = usual_acceptance(is_drawn, 7)
        matches = [(0.3, 0.3, 0.2)] * load.num_requests
        plans = [_timed(scheduler.plan_tree, siblings, load, matches) for _ in range(options.repetitions)]
        seconds, nodes = zip(*(_decided(plan, siblings, load) for _, plan in plans), strict=True)
        rows.append({
            "regime": "sampled" if is_drawn else "greedy", "requests": load.num_requests,
            "nodes": statistics.mean(nodes), "plan_ms": round(1e3 * statistics.median(took for took, _ in plans), 3),
            "trees_ms": round(1e3 * statistics.median(seconds), 3),
        })  # fmt: skip
        print(rows[-1])
    write_result(RESULTS / "trees_decisions.json", origin | {"rows": rows})


def _decided(plan: TreePlan, siblings: SiblingAcceptance, load: Load) -> tuple[float, float]:
    """Return the seconds that a plan takes to shape the trees of all requests, level by level, and their mean size."""
    trees, random = [DraftTree() for _ in load.request_ids], np.random.default_rng(0)
    level, seconds = [(row, 0) for row in load.request_ids], 0.0
    for depth in range(len(siblings.means)):
        known = random.beta(6, 2, (len(level), 1))
        known = known if siblings.is_drawn else known * 0.25 ** np.arange(MOST_SIBLINGS)
        above = [trees[row].survivals[place - 1] if place else 1.0 for row, place in level]
        survivals = siblings.shares(known) * np.array(above)[:, None]
        took, counts = _timed(plan.admit, depth, [row for row, _ in level], survivals, trees)
        seconds += took
        children = [(row, place, survivals[number, rank]) for number, (row, place) in enumerate(level)
                    for rank in range(counts[number])]  # fmt: skip
        level = [(row, trees[row].add(place, 0, float(survival))) for row, place, survival in children]
    took, kept = _timed(plan.kept, trees)
    return seconds + took * (not siblings.is_drawn), statistics.mean(map(len, kept))


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = function(*arguments)
    return time.perf_counter() - started, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    parts = {
        "fit": fit,
        "tau": tau,
        "blocks": blocks,
        "speed": speed,
        "copies": copies,
        "example": example,
        "machines": machines,
        "replay": replay,
        "decisions": decisions,
    }
    for name in parts:
        command = commands.add_parser(name)
        command.add_argument("--max_new_tokens", type=int, default=128)
        if name == "fit":
            command.add_argument("--test_file", required=True, help="GSM8K test.jsonl")
            command.add_argument("--num_prompts", type=int, default=150)
            command.add_argument("--rounds_folder", default="out/trees", help="recorded rounds, to resume")
        elif name == "copies":
            command.add_argument("--pair", default=PAIR, help="a folder with target and draft")
            command.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
            command.add_argument("--num_prompts", type=int, help="of each file")
            command.add_argument("--nodes", type=int, default=31)
            command.add_argument("--rows", type=int, default=1, help="prompts decoded together")
            command.add_argument("--output", default="trees_copies.json")
            command.add_argument("--dtype", default="float32")
        elif name == "machines":
            command.add_argument("--curves", required=True, help="CSV of step times; see simulator.load_curves")
        elif name == "replay":
            command.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=["qwen3-0.6b"])
            command.add_argument("--num_prompts", type=int, default=10, help="of the shipped pair")
            command.add_argument("--repetitions", type=int, default=5)
            command.add_argument("--new_tokens", type=int, default=DRAFTED_TOKENS)
            command.add_argument("--context", type=int, default=256, help="tokens of the prompt")
            command.add_argument("--output", default="trees_replay.json")
            command.add_argument("--unpacked", action="store_true", help="without packed copies of the weights")
            command.add_argument("--rehearse", action="store_true", help="tiny models: tries the script")
        elif name == "decisions":
            command.add_argument("--repetitions", type=int, default=100)
        elif name == "tau":
            command.add_argument("--num_seeds", type=int, default=4, help="of sampled answers")
        else:
            command.add_argument("--num_prompts", type=int, default=50)
    torch.manual_seed(0)
    options = parser.parse_args()
    parts[options.part](options, provenance_of(parser, options))


if __name__ == "__main__":
    main()
