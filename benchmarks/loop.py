"""What the decoding loop brings beyond the shipped pair: larger models, batches, and its memory.

python benchmarks/loop.py replay --geometry qwen3-0.6b --output benchmarks/results/loop_0.6b.json
python benchmarks/loop.py replay --device cuda --geometry qwen3-0.6b qwen3-4b qwen3-8b --rows 1 8 32
python benchmarks/loop.py batch --output benchmarks/results/loop_batch.json
python benchmarks/loop.py memory --output benchmarks/results/memory.json

`replay` has random weights of a larger model: each round accepts as many drafts as a recorded round of the shipped
pair. Its times are without the prefill. `limit` is the speed-up that the passes alone allow:
tau * T_target(1) / (T_draft + T_target(1 + l)). Recurrent layers read the tokens accepted in a round again in the next
pass: `reading_again` is what this adds to a verification pass of which half was accepted, as a part of a plain step.
`batch` decodes batches of held-out prompts. `memory` is the peak of a batch, of plain `generate()` and of the loop.
"""

import itertools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from bench import (
    GEOMETRIES,
    Call,
    Dtype,
    decode,
    decoding,
    held_out_ids,
    held_out_prompts,
    in_turns,
    joined,
    kernels,
    load_pair,
    main,
    median_per_token,
    random_pair,
    recorded_acceptance,
    replaying,
    representative,
    speedups,
    ways_of,
)
from tqdm import tqdm
from transformers import DynamicCache

from hf_dspark import FullBlock
from hf_dspark.measuring.profile import passes_by_slots
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling.drafts import ChainSampler
from hf_dspark.targets.support import TargetSupport

SAMPLINGS = {
    "greedy": {"do_sample": False},
    "truncated": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
CANDIDATES = 256  # `draft_top_k` of random models: what it costs in tau is below the noise
PLAIN_TOKENS = 16  # of a plain call with random weights, for each row
Cell = dict[str, Any]


class Passes:
    """The forward passes alone, after one context, for some rows."""

    def __init__(self, target, draft, context_length: int, rows: int = 1) -> None:
        self.target, self.draft, self.rows = target, draft.bind(target), rows
        self.prompt = torch.arange(context_length, device=target.device)[None] % 1000
        self.anchors = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.block = self.prompt[:, : 1 + draft.config.block_size].expand(rows, -1)
        self.cache, self.times = SlotCache(rows), {}
        self.draft_blocks(context_length)

    def draft_blocks(self, num_new: int = 4) -> None:
        """Draft one block for each row, after `num_new` new tokens."""
        width = len(self.draft.config.target_layer_ids) * self.draft.config.hidden_size
        features = torch.ones(self.rows, num_new, width, dtype=self.draft.dtype, device=self.prompt.device)
        ids = torch.zeros(self.rows * num_new, dtype=torch.long, device=self.prompt.device)
        self.draft.draft_block(self.anchors, features, self.cache, ChainSampler(), committed_ids=ids)
        for row in range(self.rows):
            self.cache.truncate(row, self.prompt.shape[1])

    @torch.no_grad()
    def measure(self, repetitions: int, packed: bool = False) -> None:
        """Time each pass many times in a row, as it runs in a loop of its own."""
        with kernels(self.target, self.draft, packed):
            by_slots = passes_by_slots(self.target, self.prompt, self.rows)
            self._time("verify", lambda: by_slots(self.block), repetitions)
            if TargetSupport.of(self.target).keeps_states:
                alone = passes_by_slots(self.target, self.prompt, self.rows)
                self._time("verify_alone", lambda: alone(self.block, accepted=0), repetitions)
            self._time("draft", self.draft_blocks, repetitions)
        cache = DynamicCache(config=self.target.config)
        self.target(self.prompt.expand(self.rows, -1), past_key_values=cache, logits_to_keep=1)
        # Each step grows the cache, as in plain decoding.
        self._time("plain_step", lambda: self.target(self.block[:, :1], past_key_values=cache), repetitions)

    def _time(self, name: str, run, repetitions: int) -> None:
        # The first passes after another model's are slower.
        seconds = in_turns({name: run}, repetitions, warm_up=5, device=self.prompt.device)[name]
        self.times.setdefault(name, []).extend(seconds)

    def summary(self, tau: float) -> Cell:
        """Return the medians of the passes, and what they allow."""
        alone = {name: statistics.median(times) for name, times in self.times.items()}
        found: Cell = {"limit": tau * alone["plain_step"] / (alone["draft"] + alone["verify"])}
        if "verify_alone" in alone:
            found["reading_again"] = (alone["verify"] - alone["verify_alone"]) / alone["plain_step"]
        return found | {"forwards_ms": {name: 1e3 * value for name, value in alone.items()}}


def cell_of(runs: dict[str, list[Call]], passes: Passes) -> Cell:
    """Return what the calls of some ways came to."""
    medians, tau = {way: median_per_token(calls) for way, calls in runs.items()}, joined(runs["own"]).tau
    milliseconds = {way: 1e3 * value for way, value in medians.items()}
    return {"tau": tau, **speedups(medians), "ms_per_token": milliseconds, **passes.summary(tau)}


def replay(
    geometry: tuple[Literal[tuple(GEOMETRIES)], ...] = ("qwen3-0.6b",),
    rows: tuple[int, ...] = (1,),
    repetitions: int = 5,
    context: int = 256,
    new_tokens: int = 96,
    dtype: Dtype = "bfloat16",
    device: str = "cpu",
    rehearse: bool = False,
) -> Iterator[Cell]:
    """Random weights of published sizes; how much is accepted comes from recorded rounds."""
    if rehearse:
        repetitions, new_tokens, context = 1, 12, 32
    cells = []
    for name in geometry:
        target, draft = random_pair(name, dtype, device, rehearse)
        draft.config.draft_top_k = CANDIDATES
        for count, regime in itertools.product(rows, SAMPLINGS):
            cell = replayed_cell(target, draft, count, regime, repetitions, context, new_tokens)
            cells.append({"geometry": name, "rows": count, "regime": regime} | cell)
            yield {"dtype": dtype, "context": context, "cells": cells}
        del target, draft


def replayed_cell(target, draft, rows: int, regime: str, repetitions: int, context: int, new_tokens: int) -> Cell:
    """Time one number of rows in one regime."""
    ways, accepted = ways_of(target.device), recorded_acceptance()
    prompts = (torch.arange(rows * context).view(rows, -1) % 1000 + 5).tolist()
    runs: dict[str, list[Call]] = {way.name: [] for way in ways}
    passes = Passes(target, draft, context + 16, rows)
    for index in tqdm(range(-1, repetitions), desc=f"{rows} rows, {regime}"):
        for way in ways:
            limits = {"max_new_tokens": 1 + (new_tokens if way.drafted else PLAIN_TOKENS), **SAMPLINGS[regime]}
            rounds = representative(accepted, new_tokens, rows, max(index, 0))
            with decoding(draft, FullBlock()), replaying(rounds), kernels(target, draft, way.packed):
                call = decode(target, prompts, max(index, 0), draft if way.drafted else None, True, **limits)
            if index >= 0:  # the first round warms up
                runs[way.name].append(call)
        if index >= 0:
            passes.measure(5, packed="own_packed" in runs)
    return cell_of(runs, passes)


def batch(rows: tuple[int, ...] = (8, 32, 64), repetitions: int = 5) -> Iterator[Cell]:
    """The shipped pair on batches of held-out prompts: tokens per second of whole calls."""
    target, draft, tokenizer = load_pair()
    ids, cells, policies = held_out_ids(tokenizer), [], {"full block": FullBlock(), "scheduled": None}
    for size, (regime, sampling) in itertools.product(rows, SAMPLINGS.items()):
        prompts = [ids[index % len(ids)] for index in range(size)]
        runs: dict[tuple[str, str], list[Call]] = {}
        for index in tqdm(range(repetitions), desc=f"{size} {regime}"):
            for way in ways_of():
                for name in policies if way.drafted else ["plain"]:
                    with kernels(target, draft, way.packed), decoding(draft, policies.get(name)):
                        assistant = draft if way.drafted else None
                        call = decode(target, prompts, index, assistant, max_new_tokens=128, **sampling)
                    runs.setdefault((way.name, name), []).append(call)
        cells.append({"rows": size, "regime": regime} | batch_cell(runs, policies, regime == "greedy"))
        yield {"cells": cells}


def batch_cell(runs: dict[tuple[str, str], list[Call]], policies: dict[str, Any], greedy: bool) -> Cell:
    """Return what one batch came to, by policy."""
    plain, cell = runs["plain", "plain"][-1].token_ids, {}
    for policy in policies:
        seconds = {way: median_per_token(calls) for (way, name), calls in runs.items() if name in ("plain", policy)}
        for name, ratio in speedups(seconds).items():
            cell.setdefault(name, {})[policy] = ratio
        last = runs["own", policy][-1]
        same = sum(own == other for own, other in zip(last.token_ids, plain, strict=True))
        cell.setdefault("identical_rows", {})[policy] = same if greedy else None
        cell.setdefault("tau", {})[policy] = last.rounds.tau
    return cell


def memory(rows: int = 16, new_tokens: int = 512, only: Literal["plain", "assisted"] | None = None) -> Cell:
    """Peak memory of a batch beyond what a process held once the models were loaded and run once."""
    if only is not None:
        return peak(only == "assisted", rows, new_tokens)
    cells: Cell = {}
    for name in ("plain", "assisted"):
        words = [sys.executable, __file__, "memory", "--only", name, "--rows", rows, "--new_tokens", new_tokens]
        done = subprocess.run(map(str, words), check=True, capture_output=True, text=True)
        cells[name] = json.loads(done.stdout.splitlines()[-1])
    plain, assisted = cells["plain"]["peak_bytes"], cells["assisted"]["peak_bytes"]
    cells["over_plain"] = assisted / plain
    cells["over_plain_without_draft_cache"] = (assisted - cells["assisted"]["draft_cache_bytes"]) / plain
    return {"rows": rows, "new_tokens": new_tokens, "cells": cells}


def peak(assisted: bool, rows: int, new_tokens: int) -> Cell:
    """Decode one batch in this process; return how much the peak exceeds what was held before, in bytes."""
    target, draft, tokenizer = load_pair()
    tokenizer.padding_side = "left"
    inputs = tokenizer(held_out_prompts(rows), return_tensors="pt", padding=True)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "return_dict_in_generate": True}
    options = {"do_sample": False, **({"assistant_model": draft} if assisted else {})}
    with decoding(draft, FullBlock()):
        target.generate(**{name: value[:1] for name, value in inputs.items()}, max_new_tokens=8, **options)
        held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        output = target.generate(**inputs, **lengths, **options)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
    stores = output.past_key_values.conversation.draft_cache._stores.values() if assisted else ()
    return {"peak_bytes": grown, "draft_cache_bytes": sum(store.nbytes for store in stores)}


if __name__ == "__main__":
    main(__doc__, replay, batch, memory)
