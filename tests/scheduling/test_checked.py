"""A cost that the clock contradicts is given up; one that is only off by a factor, or noisy, is kept."""

import random
import warnings

import pytest
import torch

from hf_dspark.scheduling.checked import CheckedPolicy, Evidence
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.policies import AdaptiveDrafting, FullBlock, PrefixScheduler, RoundOutcome

GAMMA = 7
TRUE = ThroughputTable(tuple(range(1, 65)), tuple(1 / (1.0 + 0.02 * b) for b in range(1, 65)), drafting=0.3)
STEEP = ThroughputTable(tuple(range(1, 65)), tuple(1 / (1.0 * b) for b in range(1, 65)), drafting=0.3)
REVERSED = ThroughputTable(tuple(range(1, 65)), tuple(reversed(STEEP.steps_per_second)), drafting=0.01)


def play(policy, rounds, num_requests=1, true=TRUE, noise=0.0, slower=1.0, seed=0):
    """Play rounds whose seconds follow a true cost; return the tokens that each verified, and all seconds."""
    generator, verified, seconds = random.Random(seed), [], 0.0
    load = Load(range(num_requests))
    limits = torch.full((num_requests,), GAMMA)
    for _ in range(rounds):
        drafts = policy.plan_draft(load)
        confidence = torch.full((num_requests, GAMMA), generator.uniform(0.6, 0.95)) if drafts else None
        lengths = policy.plan_verify(confidence, limits, load) if drafts else torch.zeros_like(limits)
        count = int(lengths.sum())
        took = float(true.round_seconds(load, count)[-1]) if drafts else true.plain_seconds(load)
        took *= slower * generator.lognormvariate(0, noise)
        seconds += took
        verified.append(count)
        accepted = lengths // 2
        policy.observe(RoundOutcome(load.request_ids, confidence, lengths, accepted, took, drafted=drafts))
    return verified, seconds


def checked(cost, evidence=None):
    return CheckedPolicy(AdaptiveDrafting(PrefixScheduler(cost)), evidence or Evidence("table.json"))


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_wrong_cost_is_given_up_with_one_message(num_requests):
    evidence = Evidence("table.json")
    whole = num_requests * GAMMA
    with pytest.warns(UserWarning, match="table.json does not hold: .* Whole blocks are verified") as told:
        verified, _ = play(checked(STEEP, evidence), 60, num_requests, noise=0.1)
    assert min(verified[:4]) < whole and verified[40:] == [whole] * 20 and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = play(checked(STEEP, evidence).fresh(), 60, num_requests)
    assert evidence.contradicted and again == [whole] * 60  # calls to come do not try it again


@pytest.mark.parametrize("wrong", [STEEP, REVERSED], ids=["steep", "reversed"])
@pytest.mark.filterwarnings("ignore:table.json")
def test_a_wrong_cost_costs_little(wrong):
    def tokens_per_second(policy):
        verified, seconds = play(policy, 400, noise=0.1)
        return sum(1 + count // 2 for count in verified) / seconds

    whole = tokens_per_second(FullBlock())
    assert tokens_per_second(checked(wrong)) > 0.9 * whole
    assert wrong is REVERSED or tokens_per_second(AdaptiveDrafting(PrefixScheduler(wrong))) < 0.7 * whole  # unchecked


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("slower", [1.0, 20.0])
def test_a_right_cost_is_kept_on_noisy_and_on_slow_machines(num_requests, slower):
    for cost in (TRUE, STEEP):
        for seed in range(3):
            evidence = Evidence()
            play(checked(cost, evidence), 200, num_requests, cost, noise=0.2, slower=slower, seed=seed)
            assert not evidence.contradicted


def test_a_machine_that_slows_down_for_a_while_proves_nothing():
    evidence, policy = Evidence(), checked(TRUE)
    for part in range(12):
        play(policy, 20, slower=1.0 if part % 3 else 4.0, noise=0.1)
    assert not evidence.contradicted


def test_batches_of_other_sizes_are_compared_among_themselves():
    evidence = Evidence()
    table = ThroughputTable((1, 8, 16, 64), (1 / 1.02, 1 / 1.16, 1 / 30.0, 1 / 120.0), drafting=0.3)
    play(checked(table, evidence), 60)
    assert not evidence.contradicted  # right for one request, which is all that was seen
    with pytest.warns(UserWarning, match="does not hold"):
        play(checked(table, evidence), 60, num_requests=8)


def test_equal_calls_compare_in_the_same_rounds_and_verify_the_same():
    shared = Evidence()
    calls = [play(checked(TRUE, shared).fresh(), 50, seed=3)[0] for _ in range(4)]
    assert calls[0] == calls[1] == calls[2] == calls[3]


def test_rounds_that_could_not_draft_are_not_counted():
    policy = checked(TRUE)
    none = torch.zeros(1, dtype=torch.long)
    policy.observe(RoundOutcome((0,), None, none, none, 1.0, drafted=False))  # it was not asked
    assert policy._rounds == 0 and not policy._chosen
