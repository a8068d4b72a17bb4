"""Drafting ahead on the shipped pair: blocks that are prepared while the target verifies, and tails of blocks.

python benchmarks/ahead.py record --output benchmarks/results/ahead_rounds.json
python benchmarks/ahead.py threads --output benchmarks/results/ahead_threads.json

`record` decodes the held-out prompts with new blocks; with blocks that lack the features of the last verification, as
those do that are drafted meanwhile; and with tails wherever a slot is left. `simulator.py ahead` goes by what they
commit. `threads` prepares blocks in a second thread, a core for each, greedily.
"""

import json
import os
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench
import torch
from saguaro import best_fan_out, overlapped, speedup
from tqdm import tqdm

from hf_dspark import FullBlock
from hf_dspark.decoding import loop as decoding_loop
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.decoding.tree_drafting import Chains
from hf_dspark.models.modeling_draft import NewContext
from hf_dspark.sampling.drafts import DraftBlock
from hf_dspark.sampling.transfers import joined

MOST_TOKENS = 16  # of which the rank is recorded
SAMPLERS = "hf_dspark.decoding.drafter.Chains"


class WithTails(FullBlock):
    draws_tails = True

    def plan_draft(self, load: Any) -> bool | str:
        return "tail" if load.tails else True


class Block(Chains):
    """Draws as ever, and keeps its logits."""

    def draw(self, logits: torch.Tensor, candidate_ids: torch.Tensor | None) -> Any:
        self.logits = [*getattr(self, "logits", ()), logits[0]]
        return super().draw(logits, candidate_ids)

    def others(self, slot: int) -> torch.Tensor:
        """Return what could replace the draft in a slot, the likeliest first."""
        return self.logits[slot].index_fill(0, self.token_ids[slot], -torch.inf).topk(MOST_TOKENS).indices


def after_gap(drafter: Drafter, features: Sequence[torch.Tensor], ends: int, anchor: torch.Tensor, place: int,
              sampler: Block) -> DraftBlock:  # fmt: skip
    """Read features that end before a position, and draft after an anchor at a later one: some between are missing."""
    draft, cache, count = drafter.draft, drafter.cache, sum(map(len, features))
    if features:
        cache.make_room(0, count, ends)
        draft.read_block(NewContext(anchor, joined(features), [count], cache))
    cache.make_room(0, 0, place)
    nothing = torch.empty(0, len(draft.config.target_layer_ids) * draft.config.feature_size)
    return draft.draft_block(NewContext(anchor, nothing, [0], cache), sampler)


@contextmanager
def lagging() -> Iterator[None]:
    """While entered, no block sees the features that the last verification gave."""
    honest = Drafter._read

    def read(self: Drafter, requests: Any, sampler: Any = None, num_tokens: int | None = None) -> Any:
        (request,) = requests
        if request.blocks == 1 or num_tokens != self.draft.config.block_size:  # the first block, or the end
            return honest(self, requests, sampler, num_tokens)
        *older, latest = request.features
        request.features[:] = [latest]
        place = request.anchor_position
        return after_gap(self, older, place - len(latest), request.anchor, place, sampler)

    with mock.patch.object(Drafter, "_read", read):
        yield


@contextmanager
def outcomes(found: list[tuple[int, int]], block_size: int) -> Iterator[None]:
    """Record of each whole block how many drafts were accepted, and the next token's rank among the others there."""
    samplers, honest = [], decoding_loop.verify

    def verify(drafts: Any, *args: Any) -> Any:
        verified = honest(drafts, *args)
        accepted = int(verified.num_accepted)
        if drafts.lengths.tolist() == [block_size]:
            others = samplers[-1].others(accepted).tolist() if accepted < block_size else []
            found.append((accepted, [*others, int(verified.next_token_ids)].index(int(verified.next_token_ids))))
        return verified

    kept = mock.patch(SAMPLERS, lambda *args: samplers.append(Block(*args)) or samplers[-1])
    with mock.patch.object(decoding_loop, "verify", verify), kept:
        yield


def summary(found: Sequence[tuple[int, int]], gamma: int) -> dict[str, Any]:
    """Return how often 0..γ drafts were accepted, and how often the token after them was among 0, 1, ... others."""
    ranks = [[rank for accepted, rank in found if accepted == count] for count in range(gamma + 1)]
    hits = [
        [sum(rank < most for rank in each) / max(1, len(each)) for most in range(MOST_TOKENS + 1)] for each in ranks
    ]
    hits[gamma] = [0.0] * (MOST_TOKENS + 1)  # no slot says what comes after a whole block
    return {"chances": [len(each) / len(found) for each in ranks], "hits": hits}


def record(num_prompts: int = 50, max_new_tokens: int = 128) -> dict[str, Any]:
    """Rounds of new blocks, of lagging ones, and of tails."""
    target, draft, tokenizer = bench.load_pair()
    gamma, rows = draft.config.block_size, []
    for regime, sampling in bench.REGIMES.items():
        calls: dict[str, list[bench.Call]] = {"new": [], "lagging": [], "tails": []}
        found: dict[str, list[tuple[int, int]]] = {"new": [], "lagging": []}
        rounds: list[Any] = []
        for seed, ids in enumerate(tqdm(bench.held_out_ids(tokenizer, num_prompts), desc=regime)):
            for name in bench.rotated(list(calls), seed):
                policy, observer = (WithTails(), rounds.append) if name == "tails" else (FullBlock(), None)
                seen = outcomes(found[name], gamma) if name in found else nullcontext()
                late = lagging() if name == "lagging" else nullcontext()
                with bench.decoding(draft, policy, observer=observer), late, seen:
                    call = bench.decode(target, [ids], seed, draft, max_new_tokens=max_new_tokens, **sampling)
                calls[name].append(call)
        tails = [each for each in rounds if each.is_tail]
        row = {
            "regime": regime,
            "tau": {name: bench.joined(each).tau for name, each in calls.items()},
            "tau_of_tails": 1 + statistics.fmean(int(each.num_accepted) for each in tails),
            "share_of_tails": len(tails) / len(rounds),
            "tails_over_new": bench.per_token_of_all(calls["new"]) / bench.per_token_of_all(calls["tails"]),
            "identical": bench.identical(calls["new"], calls["tails"]) if sampling == bench.GREEDY else None,
            "outcomes": {name: summary(each, gamma) for name, each in found.items()},
        }
        rows.append(row)
    return {"rows": rows, "load": os.getloadavg()[0]}


class Ahead:
    """Prepares blocks in a second thread while the target verifies, for the likeliest tokens after 0..γ-1 accepted
    drafts. With `checks`, each hit is drafted again without the thread. A thread that fails is the last one: a warning
    says so, and blocks are drafted in turns from then on."""

    def __init__(self, fan_outs: Sequence[int], checks: bool = False) -> None:
        self._fan_outs, self._checks, self.hits = fan_outs, checks, []
        self._prepared: dict[tuple[int, int], tuple[Block, DraftBlock]] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)  # that were taken by what, where that is measured
        self._request, self._work, self.fault = None, None, None
        self._read, self._verify = Drafter._read, decoding_loop.DecodingLoop._verify

    @contextmanager
    def working(self) -> Iterator[None]:
        read = mock.patch.object(Drafter, "_read", lambda *args: self.read(*args))
        verify = mock.patch.object(decoding_loop.DecodingLoop, "_verify", lambda *args: self.verify(*args))
        with ThreadPoolExecutor(1) as self._worker, read, verify, mock.patch(SAMPLERS, Block):
            yield

    def read(self, drafter: Drafter, requests: Any, sampler: Any = None, num_tokens: int | None = None) -> DraftBlock:
        (request,) = requests
        place, is_whole = request.anchor_position, num_tokens == drafter.draft.config.block_size
        is_same, self._request = request is self._request, request  # an interrupt leaves blocks of another call
        found = self._prepared.get((place, int(request.anchor))) if is_whole and is_same else None
        self.hits.append(found is not None)
        if found is not None and self._checks:
            again, (_, block) = after_gap(drafter, [], 0, request.anchor, place, sampler), found
            assert torch.equal(again.token_ids, block.token_ids) and torch.equal(again.marks, block.marks)
            assert torch.equal(again.confidence_logits, block.confidence_logits)
            assert again.distribution is None or torch.equal(again.distribution.probs, block.distribution.probs)
        sampler, block = found or (sampler, self._read(drafter, requests, sampler, num_tokens))
        self._prepared = {}
        if self.fault is None:
            features, request.features[:] = request.features[:], []
            self._work = self._worker.submit(self.prepare, drafter, request, features, sampler)
        return block

    def prepare(self, drafter: Drafter, request: Any, features: Sequence[torch.Tensor], sampler: Block) -> None:
        num_read = drafter.cache.lengths[0]
        try:
            self._fill(drafter, request, features, sampler)
        except BaseException:
            self._prepared = {}
            if drafter.cache.lengths[0] == num_read:
                request.features[:0] = features
            raise

    def _fill(self, drafter: Drafter, request: Any, features: Sequence[torch.Tensor], sampler: Block) -> None:
        place, noise = (
            request.anchor_position,
            drafter.noise([SimpleNamespace(id=request.id, blocks=request.blocks + 1)]),
        )
        uniforms = None if noise is None else noise.draft_uniforms
        for accepted, count in enumerate(self._fan_outs[: len(sampler.logits)]):
            for token in sampler.others(accepted)[:count]:
                own, later = Block([request], sampler.processor, uniforms), place + accepted + 1
                block = after_gap(drafter, features, place, token[None], later, own)
                self._prepared[later, int(token)], features = (own, block), []

    def verify(self, *args: Any) -> Any:
        try:
            return self._verify(*args)
        finally:
            if self._work is not None:
                self.fault, self._work = self._work.exception(), None  # it waits for the end
                if self.fault is not None:
                    said = f"blocks are drafted in turns: the second thread failed, {self.fault!r}"
                    warnings.warn(said, stacklevel=2)


class Calibration(Ahead):
    """Decodes in turns, and times in every eighth round what verifies and what would prepare blocks: each alone, and
    both at once, again and again. Which blocks would be used has no part in it."""

    def read(self, drafter: Drafter, requests: Any, sampler: Any = None, num_tokens: int | None = None) -> DraftBlock:
        self._last = drafter, requests[0], requests[0].features[:], sampler
        return self._read(drafter, requests, sampler, num_tokens)

    def verify(self, *args: Any) -> Any:
        drafter, request, features, sampler = self._last
        if request.blocks % 8 == 0 and len(sampler.logits) == drafter.draft.config.block_size:
            known = drafter.cache.lengths[0]

            def prepare(features: Sequence[torch.Tensor] = ()) -> None:
                self._fill(drafter, request, features, sampler)
                drafter.cache.truncate(0, known)

            for name, new in (("after a hit", features), ("after a miss", ())) * 4:
                self._time("verification", self._verify, *args)
                self._time(name, prepare, new)
            self._time("hand-over", self._worker.submit, prepare)
            works = [self._worker.submit(self._time, "preparing, contended", prepare) for _ in range(16)]
            while not works[-1].done():
                self._time("verification, contended", self._verify, *args)
            self.seconds["verification, contended"].pop()  # its end was alone
        return self._verify(*args)

    def _time(self, name: str, run: Callable[..., Any], *args: Any) -> None:
        self.seconds[name].append(bench.timed(partial(run, *args))[0])


def threads(num_runs: int = 3, num_prompts: int = 20, blocks: int = 2) -> Iterator[dict[str, Any]]:
    """What a second thread gains over drafting and verifying in turns, one core for each; measured and simulated."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # both threads run Python between short operations
    target, draft, tokenizer = bench.load_pair()
    known = json.loads((bench.RESULTS / "ahead_rounds.json").read_text())["rows"][0]["outcomes"]["new"]
    fan_outs, _ = best_fan_out(blocks, known["chances"], known["hits"])
    decode = partial(bench.decode, target, assistant=draft, max_new_tokens=128, **bench.GREEDY)
    prompts, runs = bench.held_out_ids(tokenizer), []
    with bench.decoding(draft, FullBlock()):
        for _ in range(num_runs):
            runs.append(one_run(decode, prompts, num_prompts, fan_outs))
            yield {"fan_outs": fan_outs, "runs": runs}


def one_run(decode: Any, prompts: Sequence[Any], num_prompts: int, fan_outs: Sequence[int]) -> dict[str, Any]:
    """Decode the first prompts in turns and ahead, and calibrate on others meanwhile."""
    ahead, calibration = Ahead(fan_outs), Calibration(fan_outs)
    calls: dict[str, list[bench.Call]] = {"in turns": [], "ahead": []}
    for turn, ids in enumerate(tqdm(prompts[:num_prompts])):
        if turn % 2 == 0:
            with calibration.working():
                decode([prompts[num_prompts + turn // 2]])
        for name in bench.rotated(list(calls), turn):
            with ahead.working() if name == "ahead" else nullcontext():
                calls[name].append(decode([ids]))
    assert bench.identical(*calls.values()) == num_prompts
    turns, own = map(bench.joined, calls.values())
    pairs, hits = list(zip(ahead.hits, own.committed, strict=True)), statistics.fmean(ahead.hits)
    tokens = [statistics.fmean(count for hit, count in pairs if hit == kind) for kind in (True, False)]
    # In units of a verification: in turns by those rounds, at the same time by the calibration.
    seconds = {name: statistics.fmean(each) for name, each in calibration.seconds.items()}
    whole, unit = sum(call.seconds for call in calls["in turns"]) / turns.verify_seconds, seconds["verification"]
    draft_time = turns.draft_seconds / turns.verify_seconds
    rest_time = whole - 1 - draft_time + seconds["hand-over"] / unit
    preparing = (hits * seconds["after a hit"] + (1 - hits) * seconds["after a miss"]) / unit
    slower = seconds["verification, contended"] / unit, seconds["preparing, contended"] / seconds["after a miss"]
    facts = {"hits": hits, "tau": {"in turns": turns.tau, "ahead": own.tau}, "load": os.getloadavg()[0]}
    facts |= {"milliseconds": {name: 1e3 * each for name, each in seconds.items()}, "draft_time": draft_time}
    facts |= {"preparing": preparing, "rest_time": rest_time, "contention": slower}
    for name, contention in (("without contention", (1.0, 1.0)), ("simulated", slower)):
        verified, prepared = overlapped(preparing, contention)
        fallback = draft_time + max(0.0, prepared - verified)  # the thread does not stop in the middle
        speed = speedup(hits, tokens, preparing, fallback, contention=contention, rest_time=rest_time)
        facts[name] = speed * whole / turns.tau
    in_turns, in_threads = map(bench.per_token_of_all, calls.values())
    return facts | {"measured": in_turns / in_threads}


if __name__ == "__main__":
    bench.main(__doc__, record, threads)
