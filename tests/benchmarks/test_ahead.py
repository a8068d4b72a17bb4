"""Blocks that a second thread drafts ahead: the same answers, also when it fails or is interrupted."""

import importlib
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock
from hf_dspark.decoding.loop import DecodingLoop
from tests.rows import GREEDY, alone

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
bench, ahead_drafting = map(importlib.import_module, ("bench", "ahead"))
PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5, 11], [11, 4, 8, 8, 25, 13, 17, 31]]


def answer(pair, ids, **options):
    target, draft = pair
    output = target.generate(torch.tensor([ids]), assistant_model=draft, **GREEDY | options)
    return output[0, len(ids) :].tolist()


@pytest.fixture
def ahead(pair, monkeypatch):
    monkeypatch.setattr(pair[1], "decoding", DecodingOptions(policy=FullBlock()))
    return ahead_drafting.Ahead([3, 2, 2, 1, 1], checks=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("error", [RuntimeError("died"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("fatal", "has_read"), [(1, False), (1, True), (9, False), (9, True)])
def test_a_call_goes_on_without_the_thread_and_warns_once(pair, ahead, monkeypatch, error, fatal, has_read):
    honest, drafted = ahead_drafting.after_gap, []

    def failing(*args):
        drafted.append(threading.current_thread())
        if len([each for each in drafted if each is not threading.main_thread()]) == fatal:
            _ = honest(*args) if has_read else None
            raise error
        return honest(*args)

    monkeypatch.setattr(ahead_drafting, "after_gap", failing)
    with ahead.working(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answers = [answer(pair, ids) for ids in PROMPTS]
    assert answers == [alone(pair[0], ids) for ids in PROMPTS]
    assert [str(each.message) for each in said if "second thread" in str(each.message)] == [
        f"blocks are drafted in turns: the second thread failed, {error!r}"
    ]


@pytest.mark.slow
def test_a_sampled_hit_is_drawn_by_the_noise_of_its_own_round(pair, ahead, monkeypatch):
    def sampled(seed):
        torch.manual_seed(seed)
        return answer(pair, PROMPTS[seed % 3], do_sample=True, temperature=1.5, top_k=0)

    with ahead.working():
        answers = [sampled(seed) for seed in range(6)]
        assert sum(ahead.hits) > 5 and answers == [sampled(seed) for seed in range(6)]
        of_its_round = ahead_drafting.SimpleNamespace
        monkeypatch.setattr(
            ahead_drafting, "SimpleNamespace", lambda id, blocks: of_its_round(id=id, blocks=blocks - 1)
        )
        with pytest.raises(AssertionError):
            _ = [sampled(seed) for seed in range(6)]


def test_an_interrupt_leaves_no_thread_and_nothing_of_its_call(pair, ahead, monkeypatch):
    honest, rounds = DecodingLoop._verify, []

    def interrupted(*args):
        rounds.append(1)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(ahead, "_verify", interrupted)
    with ahead.working():
        with pytest.raises(KeyboardInterrupt):
            answer(pair, PROMPTS[0])
        assert ahead._work is None and ahead.fault is None
        assert [answer(pair, ids) for ids in PROMPTS] == [alone(pair[0], ids) for ids in PROMPTS]
    assert sum(ahead.hits) > 0


@pytest.mark.slow
def test_all_shipped_prompts_are_answered_as_by_the_target_alone():
    target, draft, tokenizer = bench.load_pair()
    ahead, draft.decoding = ahead_drafting.Ahead([2, 1], checks=True), DecodingOptions(policy=FullBlock())
    prompts = bench.held_out_ids(tokenizer)
    expected = [alone(target, ids, max_new_tokens=64) for ids in prompts]
    with ahead.working():
        answers = [answer((target, draft), ids, max_new_tokens=64) for ids in prompts]
    assert answers == expected and len(prompts) == 50
    assert sum(ahead.hits) > 50
