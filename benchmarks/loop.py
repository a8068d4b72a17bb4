"""What the decoding loop brings beyond the shipped pair: larger models, batches, and its memory.

python benchmarks/loop.py replay --geometry qwen3-0.6b --output benchmarks/results/loop_0.6b.json
python benchmarks/loop.py replay --device cuda --geometry qwen3-0.6b qwen3-4b qwen3-8b --rows 1 8 32
python benchmarks/loop.py batch --output benchmarks/results/loop_batch.json
python benchmarks/loop.py batch --rows 1 8 --assistant out/assistant --output benchmarks/results/assistants.json
python benchmarks/loop.py memory --output benchmarks/results/memory.json
python benchmarks/loop.py operations --output benchmarks/results/operations.json
python benchmarks/loop.py operations --pair out/smollm2 --output benchmarks/results/operations_smollm2.json

`replay` has random weights of a larger model: each round accepts as many drafts as a recorded round of the shipped
pair. Its times are without the prefill.
`batch` decodes batches of held-out prompts. `memory` is the peak of a batch, of plain `generate()` and of the loop.
`operations` are what a round asks of a pretended accelerator (`tests/gpu`), by phase, beside a plain step.
"""

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import bench
import torch
from tqdm import tqdm

from hf_dspark import AssistantDraft, FullBlock, Policy, Scheduler
from hf_dspark.decoding import loop as decoding_loop
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.targets.slot_attention import PackedTarget

sys.path.insert(0, str(bench.ROOT))
from tests.gpu.pretended import DEVICE, Counts, Pretended, moved  # noqa: E402

SAMPLINGS = {
    "greedy": {"do_sample": False},
    "truncated": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
PARTS = ("draft", "verify", "rest", "total")
PLAIN_TOKENS = 16  # of a plain call with random weights, for each row
Cell = dict[str, Any]


def cell_of(runs: dict[str, list[bench.Call]]) -> Cell:
    """Return what the calls of some ways came to."""
    medians, tau = {way: bench.median_per_token(calls) for way, calls in runs.items()}, bench.joined(runs["own"]).tau
    seconds = {way: bench.joined(calls).seconds for way, calls in runs.items() if calls[0].rounds is not None}
    rounds = {  # on a GPU a part waits for what was queued before it
        way: {part: 1e3 * statistics.median(getattr(each, part) for each in found) for part in PARTS}
        for way, found in seconds.items()
    }
    per_token = {way: 1e3 * seconds for way, seconds in medians.items()}
    return {"tau": tau, **bench.speedups(medians), "ms_per_token": per_token, "rounds_ms": rounds}


def replay(
    geometry: tuple[Literal[tuple(bench.GEOMETRIES)], ...] = ("qwen3-0.6b",),
    rows: tuple[int, ...] = (1,),
    repetitions: int = 5,
    context: int = 256,
    new_tokens: int = 96,
    dtype: bench.Dtype = "bfloat16",
    device: str = "cpu",
    draft_top_k: int = 256,
    compiled: bool = False,
    rehearse: bool = False,
) -> Iterator[Cell]:
    """Random weights of published sizes; how much is accepted comes from recorded rounds. `draft_top_k` of 0 drafts
    among all tokens. `compiled` adds compiled rounds, and plain decoding as transformers compiles it."""
    if rehearse:
        repetitions, new_tokens, context = 1, 12, 32
    cells = []
    for name in geometry:
        target, draft = bench.random_pair(name, dtype, device, rehearse)
        draft.config.draft_top_k = draft_top_k or None
        for count, regime in itertools.product(rows, SAMPLINGS):
            cell = replayed_cell(target, draft, count, regime, repetitions, context, new_tokens, compiled)
            cells.append({"geometry": name, "rows": count, "regime": regime} | cell)
            yield {"dtype": dtype, "context": context, "draft_top_k": draft_top_k, "cells": cells}
        del target, draft


def replayed_cell(
    target, draft, rows: int, regime: str, repetitions: int, context: int, new_tokens: int, compiled: bool
) -> Cell:
    """Time one number of rows in one regime."""
    ways = bench.ways_of(draft, {"full block": FullBlock()}, target.device, compiled)
    accepted = bench.recorded_acceptance()
    prompts = (torch.arange(rows * context).view(rows, -1) % 1000 + 5).tolist()
    runs: dict[str, list[bench.Call]] = {name: [] for name, _ in ways}
    for index in tqdm(range(-1, repetitions), desc=f"{rows} rows, {regime}"):
        rounds = bench.representative(accepted, new_tokens, rows, max(index, 0))
        for (name, _), way in ways.items():
            limits = {"max_new_tokens": 1 + (new_tokens if way.assistant else PLAIN_TOKENS), **SAMPLINGS[regime]}
            with way.entered(target), bench.replaying(rounds):
                call = bench.decode(target, prompts, max(index, 0), without_prefill=True, **limits, **way.given)
            if index >= 0:  # the first round warms up
                runs[name].append(call)
    return cell_of(runs)


def batch(
    rows: tuple[int, ...] = (8, 32, 64), repetitions: int = 5, compiled: bool = False, assistant: str | None = None
) -> Iterator[Cell]:
    """The shipped pair on batches of held-out prompts: tokens per second of whole calls. `compiled` as in `replay`.
    `assistant` is the folder of an ordinary model that drafts instead."""
    target, draft, tokenizer = bench.load_pair()
    if assistant is not None:
        draft = AssistantDraft(bench.load_target(Path(assistant))[0])
    ids, cells, policies = bench.held_out_ids(tokenizer), [], {"full block": FullBlock(), "scheduled": None}
    if compiled:  # a longer prompt than before makes transformers compile again
        ids.sort(key=len, reverse=True)
    for size, (regime, sampling) in itertools.product(rows, SAMPLINGS.items()):
        batches = [[ids[(index * size + row) % len(ids)] for row in range(size)] for index in range(repetitions)]
        ways, options = bench.ways_of(draft, policies, compiled=compiled), {"max_new_tokens": 128, **sampling}
        runs = bench.decode_in_turns(target, ways, batches, label=f"{size} {regime}", **options)
        cells.append({"rows": size, "regime": regime} | batch_cell(runs, policies, regime == "greedy"))
        yield {"cells": cells}


def batch_cell(runs: dict[tuple[str, str | None], list[bench.Call]], policies: dict[str, Any], greedy: bool) -> Cell:
    """Return what one batch came to, by policy."""
    cell: Cell = {}
    for policy in policies:
        calls = bench.by_way(runs, policy)
        facts = bench.speedups({way: bench.median_per_token(found) for way, found in calls.items()})
        same = bench.identical(calls["own"][-1:], calls["plain"][-1:])
        facts |= {"identical_rows": same if greedy else None, "tau": calls["own"][-1].rounds.tau}
        for name, value in facts.items():
            cell.setdefault(name, {})[policy] = value
    return cell


PHASES = {
    "draft": (Drafter, "propose"),
    "target": (PackedTarget, "__call__"),
    "verification": (decoding_loop.DecodingLoop, "_verify"),  # and processors; without the target
    "commit": (decoding_loop.DecodingLoop, "_commit"),
}


def operations(pair: str = str(bench.PAIR)) -> Cell:
    """What one row of the shipped pair, or of one in another folder's `target` and `draft`, asks of a device."""
    (target, draft), cells = map(moved, bench.load_pair(folder=Path(pair))[:2]), {}
    regimes = SAMPLINGS | {"sampled": bench.SAMPLING}
    for shape, (name, sampling) in itertools.product((FullBlock(), Scheduler(num_nodes=15)), regimes.items()):
        step, found = asked(target, draft, None, sampling)["round"], asked(target, draft, shape, sampling)
        cells[f"{type(shape).__name__}, {name}"] = {"plain step": step, **found}
    return {"cells": cells}


def asked(target, draft, policy: Policy | None, sampling: dict[str, Any]) -> Cell:
    """Return operations, views, copies to the device and waits of a round, by phase; of a step without a policy."""
    counts, phases, before = Counts(), {name: Counter() for name in PHASES}, []
    owner, method = (type(target), "forward") if policy is None else (decoding_loop.DecodingLoop, "run_round")
    run_one = getattr(owner, method)

    def begin(*args: Any, **kwargs: Any) -> Any:
        before.append({name: own.copy() for name, own in phases.items()} | {"round": Counter(counts.numbers())})
        return run_one(*args, **kwargs)

    with Pretended(counts), ExitStack() as stack, bench.decoding(draft, policy):
        for name, (part, each) in PHASES.items():
            run = counts.noting(phases[name], getattr(part, each))
            stack.enter_context(mock.patch.object(part, each, run))
        stack.enter_context(mock.patch.object(owner, method, begin))
        torch.manual_seed(0)
        prompt, assistant = torch.arange(5, 45, device=DEVICE)[None], None if policy is None else draft
        options = {"max_new_tokens": 64, "eos_token_id": None, "pad_token_id": 0, **sampling}
        target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=assistant, **options)
    first, *_, last = whole = before[2:-2]  # without those that begin, and the last ones, which have less room
    for each in (first, last):
        each["verification"].subtract(each["target"])
    return {
        phase: {name: (own[name] - first[phase][name]) / (len(whole) - 1) for name in last["round"]}
        for phase, own in last.items()
    }


def memory(rows: int = 16, new_tokens: int = 512, only: Literal["plain", "assisted"] | None = None) -> Cell:
    """Peak memory of a batch beyond what a process held once the models were loaded and run once."""
    if only is not None:
        return peak(only == "assisted", rows, new_tokens)
    cells: Cell = {}
    for name in ("plain", "assisted"):
        words = "memory", "--only", name, "--rows", rows, "--new_tokens", new_tokens
        cells[name] = bench.in_process(__file__, *words)
    plain, assisted = cells["plain"]["peak_bytes"], cells["assisted"]["peak_bytes"]
    cells["over_plain"] = assisted / plain
    cells["over_plain_without_draft_cache"] = (assisted - cells["assisted"]["draft_cache_bytes"]) / plain
    return {"rows": rows, "new_tokens": new_tokens, "cells": cells}


def peak(assisted: bool, rows: int, new_tokens: int) -> Cell:
    """Decode one batch in this process; return how much the peak exceeds what was held before, in bytes."""
    target, draft, tokenizer = bench.load_pair()
    tokenizer.padding_side = "left"
    inputs = tokenizer(bench.held_out_prompts(rows), return_tensors="pt", padding=True)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "return_dict_in_generate": True}
    options = {"do_sample": False, **({"assistant_model": draft} if assisted else {})}
    with bench.decoding(draft, FullBlock()):
        target.generate(**{name: value[:1] for name, value in inputs.items()}, max_new_tokens=8, **options)
        grown, output = bench.growth_of_peak(lambda: target.generate(**inputs, **lengths, **options))
    stores = output.past_key_values.conversation.draft_cache.stores.values() if assisted else ()
    return {"peak_bytes": grown, "draft_cache_bytes": sum(store.nbytes for store in stores)}


if __name__ == "__main__":
    bench.main(__doc__, replay, batch, memory, operations)
