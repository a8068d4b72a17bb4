"""Prompt lookup: the longest match is continued, and what was right before is expected to be right again."""

import weakref

import pytest
import torch

from hf_dspark import (
    DecodingOptions,
    DSparkConfig,
    DSparkDraftModel,
    PromptLookup,
    Scheduler,
    ThroughputTable,
    generate_many,
)
from hf_dspark.scheduling.prompt_lookup import USUAL, NgramMatcher

RATES = dict(USUAL)


def test_the_longest_match_is_continued():
    finder = NgramMatcher()
    copy = finder.find(torch.tensor([1, 2, 3, 9, 8, 2, 3, 7, 5, 1, 2, 3]), 4)
    assert copy.token_ids == [9, 8, 2, 3]  # 2, 3 was followed by 7 later on
    assert list(copy.chances) == [RATES[3], RATES[4], RATES[4], RATES[6]]
    assert NgramMatcher().find(torch.tensor([1, 2, 3, 4]), 4).token_ids == ()
    assert NgramMatcher().find(torch.tensor([1, 2, 5, 1, 2]), 0).token_ids == ()


def test_a_match_within_the_continuation_itself_goes_on():
    assert NgramMatcher().find(torch.tensor([4, 5, 4, 5, 4, 5]), 5).token_ids == [4, 5, 4, 5, 4]


def test_rates_follow_what_was_right_whether_it_was_sent_or_not():
    finder, tokens = NgramMatcher(), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    rates = finder._acceptance
    before = [rates.of(length) for length in (3, 4)]
    finder.find(torch.tensor(tokens), 5)
    finder.find(torch.tensor([*tokens, 4, 9]), 5)  # 4 is right, 5 would have been wrong
    assert rates.of(3) > before[0] and rates.of(4) < before[1]
    assert rates.of(2) == RATES[2]


REPEATED = torch.tensor([[5, 9, 30, 5, 9, 30, 5, 9]])


@pytest.fixture
def pair(make_target):
    """A target and an untrained draft."""
    target = make_target()
    torch.manual_seed(1)
    return target, DSparkDraftModel(DSparkConfig.from_target(target.config, markov_rank=8, block_size=4)).eval()


def repeat(target):
    """Let a target say 5, 9, 30 for ever."""
    honest = target.forward

    def forward(input_ids=None, **kwargs):
        output = honest(input_ids=input_ids, **kwargs)
        following = {5: 9, 9: 30, 30: 5}
        for place, token in enumerate(input_ids[0, -output.logits.shape[1] :].tolist()):
            output.logits[0, place, following.get(token, 5)] += 1e3
        return output

    target.forward = forward


def test_text_that_repeats_itself_takes_fewer_rounds_with_prompt_lookup(pair):
    target, draft = pair
    repeat(target)
    rounds = {}
    for prompt_lookup in (True, False):
        draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=12), prompt_lookup=prompt_lookup)
        output = target.generate(REPEATED, assistant_model=draft, do_sample=False, max_new_tokens=40, pad_token_id=0)
        assert output[0, 8:].tolist() == ([30, 5, 9] * 14)[:40]
        rounds[prompt_lookup] = draft.last_stats.rounds
    assert rounds[True] < 0.6 * rounds[False]


def test_sure_matches_save_the_drafts_pass_and_the_draft_reads_them_later(pair, monkeypatch):
    target, draft = pair
    repeat(target)
    dear = ThroughputTable((1, 8, 64), (99, 95, 90), drafting=5e-3)
    draft.decoding = DecodingOptions(policy=Scheduler(dear, trees=True, skip=False))
    read, honest = [], draft.read_block
    monkeypatch.setattr(draft, "read_block", lambda a, features, *more: read.append(len(features)) or
                        honest(a, features, *more))  # fmt: skip
    output = target.generate(REPEATED, assistant_model=draft, do_sample=False, max_new_tokens=400, pad_token_id=0)
    assert output[0, 8:].tolist() == ([30, 5, 9] * 134)[:400]
    assert 1 < len(read) < 0.5 * draft.last_stats.rounds and max(read) >= 128


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lookup_alone", [False, True])
def test_a_constraint_is_not_asked_about_matches_that_it_forbids(pair, do_sample, lookup_alone):
    """A trie of allowed answers knows no prefix that plain decoding cannot come to."""
    (target, draft), prompt = pair, [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    answer, asked = [5, 6, 20, 21, 5, 6, 22, 23], []

    def allowed(_, token_ids):
        new = token_ids[len(prompt) :].tolist()
        asked.append(new)
        return [answer[len(new)]] if new == answer[: len(new)] else []

    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=15))
    draft = PromptLookup(target) if lookup_alone else draft
    output = target.generate(
        torch.tensor([prompt]), assistant_model=draft, do_sample=do_sample, max_new_tokens=len(answer), pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )  # fmt: skip
    assert output[0, len(prompt) :].tolist() == answer
    assert all(new == answer[: len(new)] for new in asked)


def test_what_was_read_of_a_prompt_is_forgotten_when_its_answer_ends(pair, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Watched(NgramMatcher):
        def find(self, *args):
            alive.add(self)
            most.append(len(alive))
            return super().find(*args)

    monkeypatch.setattr("hf_dspark.decoding.drafter.NgramMatcher", Watched)
    decoding = DecodingOptions(policy=Scheduler(num_nodes=12))
    prompts = [[5, 9, 30, 5, 9, number] for number in range(1, 9)]
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    many = generate_many(*pair, prompts, batch_size=2, decoding=decoding, **options)
    assert len(list(many)) == 8 and max(most) == 2


@pytest.mark.parametrize("length", [1, 7, 40])
def test_matches_end_where_the_sequence_must(pair, length):
    target, draft = pair
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=30))
    options = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0, "eos_token_id": 7}
    drafted = target.generate(REPEATED, assistant_model=draft, **options)
    assert torch.equal(drafted, target.generate(REPEATED, **options))
