"""Prompt lookup: the longest match is continued, and what was right before is expected to be right again."""

import copy
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from hf_dspark import (
    DecodingOptions,
    PromptLookup,
    Scheduler,
    ThroughputTable,
    generate_many,
)
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.sampling.drafts import DraftTrees
from hf_dspark.scheduling import prompt_lookup
from hf_dspark.scheduling.costs import Load
from hf_dspark.scheduling.learning import LEAST_PAID, Experience, LearnedCosts
from hf_dspark.scheduling.prompt_lookup import USUAL, MatchAcceptance, NgramMatcher
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.tree_plans import SiblingAcceptance
from tests.decoding.test_lossless_batches import enumerate_rounds
from tests.distributions import make_pair
from tests.hybrids import make_own_draft

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


def test_requests_begin_with_what_others_have_shown_and_go_on_by_themselves():
    of_all = MatchAcceptance()
    before, neighbour = of_all.of(5), MatchAcceptance(of_all)
    for _ in range(20):
        neighbour.add(5, True)
    assert before < of_all.of(5) and MatchAcceptance(of_all).of(5) == pytest.approx(of_all.of(5))
    own = MatchAcceptance(of_all)
    for _ in range(8):
        own.add(5, False)
    assert own.of(5) < 0.4 < of_all.of(5) < neighbour.of(5)


DEAR = ThroughputTable((1, 8, 64), (99, 95, 90), drafting=5e-3)


def observed(policy, load, length=0, accepted=0):
    past = (0,), None, torch.tensor([length]), torch.tensor([accepted])
    policy.observe(RoundOutcome(*past, 0.01, False, drafts=DraftTrees([])))


def test_rounds_that_do_not_draft_look_up_and_keep_calls_from_plain_decoding():
    experience, load = Experience(LearnedCosts(DEAR, 7)), Load()
    policy = Scheduler(experience)
    siblings = SiblingAcceptance(False, ((1.0, 0.0),), ((0.6, 0.1),) * 7)
    policy._drafts = False
    assert policy.plan_tree(siblings, load) is None and policy.plan_tree(siblings, load, [[0.02] * 9]) is None
    assert not policy.plan_tree(siblings, load, [[0.8] * 9]).drafts
    experience.skipped._wait = experience.skipped.most  # drafting was tried in vain
    policy._load, experience.skipped.paid = load, 0.9
    assert experience.skipped.rests()
    for _ in range(40):
        observed(policy, load, 8, 6)
    assert experience.skipped.gain > LEAST_PAID and not any(experience.skipped.rests() for _ in range(16))
    for _ in range(200):
        observed(policy, load, 8, 0)
    assert experience.skipped.gain < 1.0 and sum(experience.skipped.rests() for _ in range(16)) == 14


@pytest.mark.parametrize(("accepted", "resting"), [(3, 0), (0, 14)])
def test_calls_rest_where_all_rounds_together_hardly_pay(accepted, resting):
    experience, load = Experience(LearnedCosts(DEAR, 7)), Load()
    policy = Scheduler(experience)
    plain = LearnedCosts(DEAR, 7).at(load).plain_seconds(load)
    for _ in range(300):
        policy.plan_draft(load)
        past = (0,), torch.full((1, 7), 0.4), torch.tensor([7]), torch.tensor([accepted])
        policy.observe(RoundOutcome(*past, 2.5 * plain, True, draft_seconds=plain))
    assert experience.skipped.paid == pytest.approx((1 + accepted) / 2.5, rel=0.2)
    assert sum(experience.skipped.rests() for _ in range(16)) == resting


REPEATED = torch.tensor([[5, 9, 30, 5, 9, 30, 5, 9]])


@pytest.fixture
def pair(make_target):
    """A target and an untrained draft."""
    return (target := make_target()), make_own_draft(target)


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
    for looks_up in (True, False):
        draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=12), prompt_lookup=looks_up)
        output = target.generate(REPEATED, assistant_model=draft, do_sample=False, max_new_tokens=40, pad_token_id=0)
        assert output[0, 8:].tolist() == ([30, 5, 9] * 14)[:40]
        rounds[looks_up] = draft.last_stats.rounds
    assert rounds[True] < 0.6 * rounds[False]


def test_sure_matches_save_the_drafts_pass_and_the_draft_reads_them_later(pair, monkeypatch):
    target, draft = pair
    repeat(target)
    draft.decoding = DecodingOptions(policy=Scheduler(DEAR, trees=True, skip=False))
    read, honest = [], draft.read_block
    monkeypatch.setattr(draft, "read_block", lambda new: read.append(len(new.features)) or honest(new))
    output = target.generate(REPEATED, assistant_model=draft, do_sample=False, max_new_tokens=400, pad_token_id=0)
    assert output[0, 8:].tolist() == ([30, 5, 9] * 134)[:400]
    assert 1 < len(read) < 0.5 * draft.last_stats.rounds and max(read) >= 128


@pytest.mark.one_in(3)
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


class Anew(Scheduler):
    """Begins each path of an enumeration with nothing learnt, and counts what its rounds send."""

    sent = Counter()

    def fresh(self):
        return replace(self, cost=copy.deepcopy(self.cost))

    def observe(self, outcome):
        super().observe(outcome)
        self.sent[outcome.drafted, int(outcome.lengths)] += 1


@pytest.mark.parametrize("is_honest", [True, False])
def test_matches_are_sent_alone_by_what_earlier_rounds_have_shown(make_target, monkeypatch, is_honest):
    """Control: some drafts are dropped by what was drawn."""
    target, draft = make_pair(make_target, seed=5, depth=4)
    honest, sent = Drafter._draft_chains, Counter()

    def some(*args):
        block = honest(*args)
        return replace(block, lengths=block.lengths * (block.token_ids[:, 0] == 0))

    if not is_honest:
        monkeypatch.setattr(Drafter, "_draft_chains", some)
    monkeypatch.setattr(Anew, "sent", sent)
    monkeypatch.setattr(prompt_lookup, "PRIOR_TESTS", 1)  # let one round decide
    monkeypatch.setattr(prompt_lookup, "USUAL", [(least, 0.5) for least in RATES])
    policy = Anew(Experience(LearnedCosts(replace(DEAR, drafting=3e-3), 2)), 2, trees=True)
    options = {"prompts": [[0, 1, 2, 1, 0, 1, 2]], "rounds": 2, "prompt_lookup": True}
    found, _ = enumerate_rounds(monkeypatch, target, draft, policy, **options)
    assert found < 5e-6 if is_honest else found > 0.005
    assert len(sent) >= 2, "the second round must depend on the first"
