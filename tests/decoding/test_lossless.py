"""The product: output distribution = target distribution. Exact enumeration of rounds, and chi-square tests of
`generate()` itself.

Each positive statement has a negative control: the same measurement on a rule that is known to be lossy.
"""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from benchmarks.policy_baselines import EarlyStopScheduler, GlobalScheduler
from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Scheduler,
)
from hf_dspark.models import modeling_dspark
from hf_dspark.sampling.distributions import TokenDistribution
from hf_dspark.scheduling.costs import ThroughputTable
from tests.distributions import (
    CLIFF,
    HEADS,
    ROUNDING,
    VOCAB,
    EnumeratingSampler,
    claim_flat_drafts,
    distance_from_target,
    distribution_of_drafts,
    each_block,
    make_pair,
    p_value_of_samples,
    planned_length,
)
from tests.samplers import ChainSampler

PROCESSORS = {
    "none": [],
    "temperature_top_p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
    "top_k": [TopKLogitsWarper(2)],
}


SLOW_DRAFT = ThroughputTable((1, 2, 3, 4, 5), (0.7, 0.7, 0.45, 0.42, 0.4), drafting=0.9)


@pytest.mark.one_in(15)
@pytest.mark.parametrize(
    "policy",
    [FullBlock(), ConfidenceThreshold(0.5), EarlyStopScheduler(CLIFF), Scheduler(CLIFF, trees=False, skip=False)],
    ids=["full", "threshold", "algorithm_one", "hull_and_fill"],
)
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_round_leaves_the_target_distribution_unchanged(make_target, head, processors, policy):
    assert distance_from_target(*make_pair(make_target, **head), policy, processors) < ROUNDING


def test_round_leaves_the_target_distribution_unchanged_at_gamma_three(make_target):
    assert distance_from_target(*make_pair(make_target, gamma=3, seed=3), ConfidenceThreshold(0.4)) < ROUNDING


@pytest.mark.parametrize(("head", "threshold"), [("vanilla", 0.5), ("headless", 0.4)])
def test_threshold_really_cuts_in_the_enumerated_rounds(make_target, head, threshold):
    blocks = each_block(*make_pair(make_target, **HEADS[head]), LogitsProcessorList())
    assert {planned_length(ConfidenceThreshold(threshold), block) for _, block in blocks} == {1, 2}


def test_confidences_of_the_drawn_tokens_are_caught(make_target, monkeypatch):
    """Without a head, confidences follow from distributions before the draw. What was drawn must not enter."""

    def of_drawn_tokens(self, confidence_logits=None):
        drawn = torch.stack(self.token_ids, dim=1)[:, :, None]
        return ChainSampler.finish(
            self, TokenDistribution.stack(self._distributions).probability(drawn)[..., 0].logit()
        )

    pair, policy = make_pair(make_target, **HEADS["headless"]), ConfidenceThreshold(0.4)
    assert distance_from_target(*pair, policy) < ROUNDING
    monkeypatch.setattr(EnumeratingSampler, "finish", of_drawn_tokens)
    assert distance_from_target(*pair, policy) > 0.01


@pytest.mark.parametrize("kept", [1, 0], ids=["after_eos", "before_eos"])
def test_cutting_after_a_drafted_eos_is_lossless_and_enumeration_catches_a_cut_before_it(make_target, kept):
    """A cut before it looks at the token that it cuts."""
    eos = 1

    def cut(path, length):
        return min([length] + [slot + kept for slot, token in enumerate(path) if token == eos])

    distance = distance_from_target(*make_pair(make_target), FullBlock(), cut=cut)
    assert distance < ROUNDING if kept else distance > 0.01


def test_enumeration_catches_a_scheduler_that_looks_ahead(make_target):
    """One token costs more than it brings, two bring more: x_1 is verified only if it promises a good x_2."""
    pair, cost = make_pair(make_target, seed=6), ThroughputTable((1, 2, 3), (1.0, 0.4, 0.4))
    assert distance_from_target(*pair, GlobalScheduler(cost, accept_bias=True)) > 0.05
    assert distance_from_target(*pair, Scheduler(cost, trees=False, skip=False)) < ROUNDING


def naming_the_worst(monkeypatch):
    """Let the worst of guesses name the candidates: the distribution that they are drawn from must be known all the
    same."""
    largest = modeling_dspark.largest
    monkeypatch.setattr(modeling_dspark, "largest", lambda base_logits, count: largest(-base_logits, count))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_round_leaves_the_target_distribution_unchanged_whoever_names_the_candidates(
    make_target, head, processors, monkeypatch
):
    target, draft = make_pair(make_target, draft_top_k=2, markov_head_type=head)
    of_the_best = distribution_of_drafts(target, draft)
    naming_the_worst(monkeypatch)
    assert ((distribution_of_drafts(target, draft) > 0) != (of_the_best > 0)).any()
    assert distance_from_target(target, draft, FullBlock(), processors) < ROUNDING


def test_enumeration_catches_the_distribution_of_other_candidates(make_target, monkeypatch):
    target, draft = make_pair(make_target, draft_top_k=2)
    of_the_best = distribution_of_drafts(target, draft)
    naming_the_worst(monkeypatch)
    assert distance_from_target(target, draft, FullBlock(), claimed_distribution=lambda block: of_the_best) > 0.01


def test_enumeration_catches_a_test_against_the_wrong_draft_distribution(make_target):
    flat = torch.full((2, VOCAB), 1.0 / VOCAB, dtype=torch.double)
    pair = make_pair(make_target, draft_top_k=2)
    assert distance_from_target(*pair, FullBlock(), claimed_distribution=lambda block: flat) > 0.01


SAMPLES = {"calls": 7, "rows": 100, "length": 4}


def sampled_pair(make_target):
    return make_pair(make_target, gamma=3, seed=5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"assistant_confidence_threshold": 0.5}, {"temperature": 0.7}, {"num_assistant_tokens": 2}],
    ids=["full", "threshold", "cool", "short"],
)
def test_generate_samples_from_the_target_distribution(make_target, options):
    pair, processors = sampled_pair(make_target), [TemperatureLogitsWarper(options.get("temperature", 1.0))]
    assert p_value_of_samples(*pair, **SAMPLES, processors=processors, **options) > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "policy",
    [
        Scheduler(CLIFF, trees=False, skip=False),
        Scheduler(CLIFF, lag=1, skip=False),
        Scheduler(SLOW_DRAFT, trees=False, tpot_seconds=1.3),
    ],
    ids=["hull_and_fill", "lagged", "adaptive_limited"],
)
def test_generate_samples_from_the_target_distribution_under_a_scheduler(make_target, policy):
    target, draft = sampled_pair(make_target)
    proposed = {}
    for name, choice in (("full", FullBlock()), ("tested", policy)):
        proposed[name] = lengths = []
        observer = lambda outcome, to=lengths: to.extend(outcome.lengths.tolist())  # noqa: E731
        draft.decoding = DecodingOptions(choice, observer=observer)
        p_value_of_samples(target, draft, calls=1, rows=100, length=4)
    assert sum(proposed["tested"]) < 0.9 * sum(proposed["full"])  # the policy really decides
    assert p_value_of_samples(target, draft, **SAMPLES) > 1e-3


def test_chi_square_catches_drafts_tested_against_a_wrong_distribution(make_target, monkeypatch):
    claim_flat_drafts(monkeypatch)
    assert p_value_of_samples(*sampled_pair(make_target), **SAMPLES) < 1e-6
