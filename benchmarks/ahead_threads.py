"""Blocks of the shipped pair prepared by a second thread while the target verifies, measured and simulated.

python benchmarks/ahead_threads.py --output benchmarks/results/ahead_threads.json

Greedily, a core for each thread. Every prepared block that is used is drafted once more without the thread: the two
must be the same, bit by bit.
"""

import json
import os
import statistics
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import bench
import torch
from ahead import SAMPLERS, Block, after_gap
from saguaro import best_fan_out, speedup
from tqdm import tqdm

from hf_dspark import FullBlock
from hf_dspark.decoding import loop as decoding_loop
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.sampling.drafts import DraftBlock


class Ahead:
    """Prepares blocks in a second thread while the target verifies, for the likeliest tokens after 0..γ-1 accepted
    drafts. With `checks`, each hit is drafted again without the thread. A thread that fails is the last one: a warning
    says so, and blocks are drafted in turns from then on."""

    def __init__(self, fan_outs: Sequence[int], checks: bool = False) -> None:
        self._fan_outs, self._checks, self.hits = fan_outs, checks, []
        self._prepared: dict[tuple[int, int], tuple[Block, DraftBlock]] = {}
        self._request, self._thread, self.fault = None, None, None
        self._read, self._verify = Drafter._read, decoding_loop.DecodingLoop._verify

    @contextmanager
    def working(self) -> Iterator[None]:
        read = mock.patch.object(Drafter, "_read", lambda *args: self.read(*args))
        verify = mock.patch.object(decoding_loop.DecodingLoop, "_verify", lambda *args: self.verify(*args))
        with read, verify, mock.patch(SAMPLERS, Block):
            yield

    def read(self, drafter: Drafter, requests: Any, sampler: Any = None, num_tokens: int | None = None) -> DraftBlock:
        (request,) = requests
        place, is_whole = request.anchor_position, num_tokens == drafter.draft.config.block_size
        is_same, self._request = request is self._request, request  # an interrupt leaves blocks of another call
        found = self._prepared.get((place, int(request.anchor))) if is_whole and is_same else None
        self.hits.append(found is not None)
        sampler, block = found or (sampler, self._read(drafter, requests, sampler, num_tokens))
        if found is not None and self._checks:
            again = after_gap(drafter, [], 0, request.anchor, place, Block(requests, sampler.processor, None))
            assert torch.equal(again.token_ids, block.token_ids)
            assert all(map(torch.equal, again.confidence_logits, block.confidence_logits))
        self._prepared = {}
        if self.fault is None:
            features, request.features[:] = request.features[:], []
            self._thread = threading.Thread(target=self.prepare, args=(drafter, request, features, sampler))
            self._thread.start()
        return block

    def prepare(self, drafter: Drafter, request: Any, features: Sequence[torch.Tensor], sampler: Block) -> None:
        num_read = drafter.cache.lengths[0]
        try:
            self._fill(drafter, request, features, sampler)
        except BaseException as error:  # which the thread that decodes would never see
            self.fault, self._prepared = error, {}
            if drafter.cache.lengths[0] == num_read:
                request.features[:0] = features

    def _fill(self, drafter: Drafter, request: Any, features: Sequence[torch.Tensor], sampler: Block) -> None:
        place = request.anchor_position
        for accepted, count in enumerate(self._fan_outs[: len(sampler.logits)]):
            for token in sampler.others(accepted)[:count]:
                own, later = Block([request], sampler.processor, None), place + accepted + 1
                block = after_gap(drafter, features, place, token[None], later, own)
                self._prepared[later, int(token)], features = (own, block), []

    def verify(self, *args: Any) -> Any:
        try:
            return self._verify(*args)
        finally:
            if self._thread is not None:
                self._thread.join()
                if self.fault is not None:
                    warnings.warn(
                        f"blocks are drafted in turns: the second thread failed, {self.fault!r}", stacklevel=2
                    )
                    self._thread = None


def threads(num_prompts: int = 20, blocks: int = 2, max_new_tokens: int = 128) -> dict[str, Any]:
    """What a second thread gains over drafting and verifying in turns, one core for each; measured and simulated."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # both threads run Python between short operations
    target, draft, tokenizer = bench.load_pair()
    known = json.loads((bench.RESULTS / "ahead_rounds.json").read_text())["rows"][0]["outcomes"]["new"]
    fan_outs, _ = best_fan_out(blocks, known["chances"], known["hits"])
    ahead, checked = Ahead(fan_outs), Ahead(fan_outs, checks=True)
    calls: dict[str, list[bench.Call]] = {"in turns": [], "ahead": []}
    options = {"max_new_tokens": max_new_tokens, **bench.GREEDY}
    with bench.decoding(draft, FullBlock()):
        for turn, ids in enumerate(tqdm(bench.held_out_ids(tokenizer, num_prompts))):
            with checked.working():
                same = bench.decode(target, [ids], 0, draft, **options).token_ids
            for name in bench.rotated(list(calls), turn):
                with ahead.working() if name == "ahead" else nullcontext():
                    calls[name].append(bench.decode(target, [ids], 0, draft, **options))
                assert calls[name][-1].token_ids == same
    turns, own = bench.joined(calls["in turns"]), bench.joined(calls["ahead"])
    draft_time = turns.draft_seconds / (turns.total_seconds - turns.draft_seconds)
    pairs, hits = list(zip(ahead.hits, own.committed, strict=True)), statistics.fmean(ahead.hits)
    tokens = [statistics.fmean(count for hit, count in pairs if hit == kind) for kind in (True, False)]
    simulated = speedup(hits, tokens, blocks * draft_time, draft_time) * (1 + draft_time) / turns.tau
    measured = bench.per_token_of_all(calls["in turns"]) / bench.per_token_of_all(calls["ahead"])
    facts = {"fan_outs": fan_outs, "hits": hits, "tau": {"in turns": turns.tau, "ahead": own.tau}}
    facts |= {"draft_time": draft_time, "simulated": simulated, "measured": measured}
    return facts | {"checked": sum(checked.hits), "load": os.getloadavg()[0]}


if __name__ == "__main__":
    bench.main(__doc__, threads)
