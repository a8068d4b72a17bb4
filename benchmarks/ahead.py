"""Drafting ahead on the shipped pair, recorded: blocks as they could be prepared in advance, and tails of blocks.

python benchmarks/ahead.py --output benchmarks/results/ahead_rounds.json

The held-out prompts are decoded with new blocks; with blocks that lack the features of the last verification, as those
do that are drafted meanwhile; and with tails wherever a slot is left. `simulator.py ahead` goes by what they commit.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import bench
import torch
from tqdm import tqdm

from hf_dspark import FullBlock
from hf_dspark.decoding import loop as decoding_loop
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.decoding.tree_drafting import Chains
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
        draft.read_block(anchor, joined(features), cache, [count])
    cache.make_room(0, 0, place)
    nothing = torch.empty(0, len(draft.config.target_layer_ids) * draft.config.feature_size)
    return draft.draft_block(anchor, nothing, cache, sampler, [0])


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
        same = bench.identical(calls["new"], calls["tails"])
        rows.append(
            {
                "regime": regime,
                "tau": {name: bench.joined(each).tau for name, each in calls.items()},
                "tau_of_tails": 1 + statistics.fmean(int(each.num_accepted) for each in tails),
                "share_of_tails": len(tails) / len(rounds),
                "tails_over_new": bench.per_token_of_all(calls["new"]) / bench.per_token_of_all(calls["tails"]),
                "identical": same if sampling == bench.GREEDY else None,
                "outcomes": {name: summary(each, gamma) for name, each in found.items()},
            }
        )
    return {"rows": rows, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    bench.main(__doc__, record)
