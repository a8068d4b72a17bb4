"""Policies: whether to draft and how much of the blocks is verified, decided by confidences and costs alone."""

import itertools
import json
import math
import operator
import warnings

import pytest
import torch

from benchmarks.policy_baselines import (
    EarlyStopScheduler,
    EliminationScheduler,
    GlobalScheduler,
    linear_cost,
)
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.learning import REPROBE_AFTER
from hf_dspark.scheduling.policies import (
    ConfidenceThreshold,
    FullBlock,
    Policy,
)
from hf_dspark.scheduling.ranking import Ranking, survival
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler

FREE = linear_cost(0.0, 1.0, 0.1)
LINEAR = linear_cost(0.01, 0.1, 0.02)  # a round of B tokens: .12 + .01 B
# 8 tokens a bucket: the curve jumps after B = 8, 16, ...
JAGGED = ThroughputTable(tuple(range(1, 129)), tuple(1 / (1.0 + 0.5 * ((b - 1) // 8)) for b in range(1, 129)))


def plan(policy, confidence, max_lengths=None, load=None):
    confidence = torch.tensor(confidence)
    limits = torch.full((len(confidence),), confidence.shape[1]) if max_lengths is None else torch.tensor(max_lengths)
    return policy.plan_verify(confidence, limits, load or Load(range(len(confidence)))).tolist()


def outcome(confidence, accepted=0, seconds=1.0, request_ids=(0,), sent=0):
    """A round; without confidence one that was skipped."""
    confidence = None if confidence is None else torch.tensor(confidence)
    lengths, accepted = (torch.full((len(request_ids),), each) for each in (sent, accepted))
    return RoundOutcome(request_ids, confidence, lengths, accepted, seconds, drafted=confidence is not None)


def literal_algorithm_one(confidence, seconds, base=0):
    """DSpark Algorithm 1, line by line."""
    requests = len(confidence)
    alive = [list(itertools.accumulate(row, operator.mul)) for row in confidence]
    pool = [(row, slot) for row in range(requests) for slot in range(len(alive[row])) if alive[row][slot] > 0]
    pool.sort(key=lambda item: (-alive[item[0]][item[1]], item[1], item[0]))
    lengths, tokens, kept = [0] * requests, base + requests, float(base + requests)
    best, chosen = kept / seconds(tokens), list(lengths)
    for row, slot in pool:
        lengths[row], tokens, kept = slot + 1, tokens + 1, kept + alive[row][slot]
        if kept / seconds(tokens) <= best:
            break
        best, chosen = kept / seconds(tokens), list(lengths)
    return chosen


# ---- full block and threshold


@pytest.mark.parametrize(
    ("policy", "confidence", "max_lengths", "lengths"),
    [
        (FullBlock(), [[0.0] * 5] * 2, [0, 3], [0, 3]),
        (ConfidenceThreshold(0.5), [[0.9, 0.6, 0.4, 0.99], [0.3, 0.9, 0.9, 0.9], [0.8] * 4], None, [2, 0, 4]),
        (ConfidenceThreshold(0.5), [[0.5, 0.5, 0.25]], None, [2]),  # reached exactly
        (ConfidenceThreshold(0.0), [[0.0, 0.1, 0.0]], None, [3]),
        (ConfidenceThreshold(1.0), [[1.0, 0.999]], None, [1]),
        (ConfidenceThreshold(0.5, cumulative=True), [[0.9, 0.6, 0.4, 0.99], [0.8] * 4], None, [2, 3]),
        (ConfidenceThreshold(0.1), [[0.9] * 4] * 3, [0, 1, 2], [0, 1, 2]),
    ],
)
def test_policies_of_fixed_rules_verify_up_to_the_first_doubtful_slot(policy, confidence, max_lengths, lengths):
    assert plan(policy, confidence, max_lengths) == lengths


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_rnn"])
def test_confidence_threshold_matches_deepspecs_proposal_lengths(golden, name):
    for expected in golden(name).info["inference"]["rounds"]:
        for threshold, length in expected["proposal_len_by_threshold"].items():
            assert plan(ConfidenceThreshold(float(threshold)), [expected["confidence_probs"]]) == [length]


# ---- schedulers


def chains(cost, **how):
    """Hull and fill in every round, whatever earlier ones brought."""
    return Scheduler(cost, trees=False, skip=False, **how)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *((ConfidenceThreshold, {"threshold": each}, r"must lie in \[0, 1\], got") for each in (-0.1, 1.1, math.nan)),
        *((Scheduler, {"cost": LINEAR, "tpot_seconds": each}, "tpot_seconds must be a positive number")
          for each in (0.0, -1.0, math.nan, math.inf)),
        *((Scheduler, {"num_nodes": each}, "num_nodes must be a whole number from 1 to 63")
          for each in (0, 64, 2.5, "7")),
        *((Scheduler, {"cost": LINEAR, **each}, "lag must be 0, or a number of rounds with trees=False")
          for each in ({"lag": -1}, {"lag": 1, "trees": True})),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_arguments_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    "how", [{}, {"cost": "sps.json"}, {"num_nodes": 7, "lag": 1}, {"num_nodes": 7, "tpot_seconds": 1.0}]
)
def test_the_scheduler_says_where_the_cost_of_a_step_comes_from(how):
    with pytest.raises(TypeError, match="Scheduler needs the cost .*, got (str|NoneType): .*Table.load"):
        Scheduler(**how)


def test_survival_is_the_product_of_the_confidences_and_never_rises():
    assert survival(torch.tensor([[0.5, 0.5, 0.0]])).tolist() == [[0.5, 0.25, 0.0]]
    alive = survival(torch.rand(500, 7) ** 0.01)
    assert (alive[:, 1:] <= alive[:, :-1]).all()
    assert survival(torch.ones(1, 7)).tolist() == [[1.0] * 7]


def test_ranking_breaks_ties_by_position_then_request_and_leaves_out_what_cannot_survive_or_does_not_exist():
    ranking = Ranking.of(torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.5]]), torch.tensor([2, 2, 2]))
    assert [ranking.lengths(count).tolist() for count in range(7)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip
    assert Ranking.of(torch.tensor([[0.9, 0.0, 0.9], [0.9] * 3]), torch.tensor([3, 1])).slots.tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("other_tokens", [0, 5])
def test_early_stop_is_algorithm_one_line_by_line(seed, other_tokens):
    torch.manual_seed(seed)
    for cost in (JAGGED, ThroughputTable(tuple(range(1, 80)), tuple(1 / (3 + 0.2 * b) for b in range(1, 80)))):
        confidence = (torch.rand(5, 4).double().float() ** 0.3).tolist()
        expected = literal_algorithm_one(confidence, cost.seconds_of, other_tokens)
        assert plan(EarlyStopScheduler(cost), confidence, load=Load(range(5), other_tokens=other_tokens)) == expected


@pytest.mark.parametrize("scheduler", [EarlyStopScheduler, chains, GlobalScheduler])
def test_all_schedulers_find_the_optimum_when_cost_is_convex(scheduler):
    cost = linear_cost(0.05, 1.0, 0.1)

    def expected_throughput(lengths):
        kept = 3 + sum(float(alive[row, :length].sum()) for row, length in enumerate(lengths))
        return kept / float(cost.round_seconds(Load(range(3)), sum(lengths))[-1])

    for _ in range(20):
        confidence = torch.rand(3, 4) ** 0.3
        alive = survival(confidence)
        best = max(map(expected_throughput, itertools.product(range(5), repeat=3)))
        assert expected_throughput(plan(scheduler(cost), confidence.tolist())) == pytest.approx(best)
    assert plan(scheduler(FREE), [[0.1, 0.1, 0.0, 0.9]]) == [2]  # whatever may survive


def test_prefix_scheduler_is_not_trapped_before_a_cliff_and_fills_the_bucket_it_pays_for():
    confidence = [[0.99] * 7]
    load = Load((0,), other_tokens=7)  # B = 8 fills the first bucket: the next token costs half a step
    lengths = [plan(rule(JAGGED), confidence, load=load) for rule in (EarlyStopScheduler, chains, GlobalScheduler)]
    assert lengths == [[0], [7], [7]]
    assert plan(chains(JAGGED), [[0.9, 0.3, 0.3, 0.3]] * 2) == [3, 3], "2 + 6 tokens are one bucket of 8"


def test_elimination_stops_at_the_first_removal_that_does_not_pay():
    # Removing one token keeps the bucket and loses its survival; removing more would pay: AdaSpec stalls.
    confidence = [[0.3] * 6] * 3
    assert plan(EliminationScheduler(JAGGED), confidence) != plan(GlobalScheduler(JAGGED), confidence)
    convex = linear_cost(0.05, 1.0, 0.1)
    assert plan(EliminationScheduler(convex), confidence) == plan(GlobalScheduler(convex), confidence)


def test_lagged_scheduler_takes_its_capacity_from_older_rounds():
    policy, confidence = chains(JAGGED, lag=2), [[0.9, 0.8, 0.7, 0.3]] * 3
    assert plan(policy, confidence) == plan(chains(JAGGED), confidence)  # there are none yet
    doubtful, sure = [[0.01] * 4] * 4, [[0.95, 0.95, 0.95, 0.95], [0.5] * 4, [0.5] * 4, [0.5] * 4]
    policy.observe(outcome(doubtful, request_ids=range(4)))
    policy.observe(outcome([[0.99] * 4] * 4, request_ids=range(4)))
    lengths = plan(policy, sure)
    assert sum(lengths) == sum(plan(GlobalScheduler(JAGGED), doubtful))
    assert lengths[0] == max(lengths)  # its places go to this round's best tokens
    policy = chains(FREE, lag=1)
    policy.observe(outcome([[0.9] * 4] * 4, request_ids=range(4)))
    assert plan(policy, [[0.9] * 4] * 2) == [4, 4]  # capacity follows the number of requests


def test_fresh_policies_forget():
    policy = Scheduler(JAGGED, lag=1)
    policy.observe(outcome([[0.01] * 4]))
    for each, kept in ((policy, 1), (policy.fresh(), 0)):
        assert [*map(len, (each._forecasts, each._latest, each._rankings))] == [kept] * 3


@pytest.mark.parametrize("scheduler", [GlobalScheduler, EliminationScheduler])
def test_look_ahead_policies_are_causal_for_heads_that_read_no_token_only(scheduler):
    policy = scheduler(JAGGED)
    assert policy.is_causal(confidence_reads_tokens=False) and not policy.is_causal(confidence_reads_tokens=True)
    assert scheduler(JAGGED, accept_bias=True).accept_bias and not policy.accept_bias
    assert Scheduler(JAGGED, lag=1, tpot_seconds=1.0).is_causal(True)


@pytest.mark.parametrize(
    "policy",
    [FullBlock(), ConfidenceThreshold(0.5, cumulative=True), Scheduler(num_nodes=7), Scheduler(JAGGED, lag=3)],
    ids=str,
)
def test_policies_are_data(policy):
    data = json.loads(json.dumps(policy.to_dict()))
    kind, cost = data.pop("name"), data.pop("cost", None)
    assert type(policy).__name__ == kind and cost in (None, JAGGED.name)
    assert type(policy)(**data, **({"cost": JAGGED} if cost else {})) == policy


def test_a_policy_needs_only_plan_verify():
    class Half(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            return max_lengths // 2

    policy = Half()
    assert policy.plan_draft(Load()) and policy.is_causal(True) and not policy.requires_confidence
    assert isinstance(policy.fresh(), Half) and not policy.accept_bias
    assert policy.observe(outcome(None)) is None


# ---- the limit of the time per token


def test_limit_caps_the_tokens_of_a_round_and_gives_them_to_the_likeliest():
    limited = chains(LINEAR, tpot_seconds=0.04)
    confidence = [[0.95] * 7]
    assert limited.plan_draft(Load()) and plan(limited, confidence) == [7]  # nothing known: the first round finds out
    limited.observe(outcome(confidence, accepted=3))  # four tokens: a round may take .16 s
    assert limited.plan_draft(Load()) and plan(limited, confidence) == [3]  # B = 4
    assert limited.limit_lengths(torch.tensor([7]), Load()).tolist() == [3]
    assert plan(limited, [[0.9] * 4, [0.95, 0.1, 0.1, 0.1]]) == [1, 1]  # the likeliest two
    assert plan(limited, [[0.9, 0.0]]) == [1]  # no more than without the limit
    limited.observe(outcome(None))  # a skipped round teaches nothing
    assert limited.allowed_seconds == pytest.approx(0.16)
    dip = ThroughputTable((1, 2, 3, 4), (10.0, 1.0, 10.0, 10.0))  # B = 2 takes a second, B = 3 a tenth again
    limited = chains(dip, tpot_seconds=0.5)
    limited.observe(outcome(confidence))
    assert not limited.plan_draft(Load()) and plan(limited, [[0.9] * 3]) == [0]


def test_limit_that_cannot_be_met_warns_and_decodes_without_drafting():
    limited = chains(LINEAR, tpot_seconds=0.01)
    limited.observe(outcome([[0.9] * 7]))
    with pytest.warns(UserWarning, match="limit of 0.01 s per token cannot be met"):
        assert not limited.plan_draft(Load())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only_plain = chains(LINEAR, tpot_seconds=0.115)
        only_plain.observe(outcome([[0.9] * 7]))
        assert not only_plain.plan_draft(Load())


# ---- draft or skip


def poor_history():
    policy = Scheduler(LINEAR, trees=False)
    for _ in range(30):
        policy.observe(outcome([[0.05] * 4]))
    return policy


def test_drafting_stops_when_history_says_it_does_not_pay():
    for confidence in (0.9, 0.05):  # an unlucky start does not end it
        policy = Scheduler(LINEAR, trees=False)
        assert policy.plan_draft(Load())  # nothing known yet
        policy.observe(outcome([[confidence] * 4]))
        assert policy.plan_draft(Load())
    assert not poor_history().plan_draft(Load())
    assert not poor_history().plan_draft(Load((0, 1, 2)))  # unknown requests are expected to be like the others


@pytest.mark.learns
@pytest.mark.parametrize(("accepted", "pays"), [(0, False), (2, True)])
def test_drafting_stops_when_promised_tokens_do_not_come(accepted, pays):
    policy, cautious = Scheduler(LINEAR, trees=False), Scheduler(LINEAR, trees=False)
    for _ in range(30):
        policy.observe(outcome([[0.9] * 4], accepted, sent=4))
        cautious.observe(outcome([[1.0] * 4], 1, sent=1))  # what was not verified was not promised
    assert policy.plan_draft(Load()) == pays
    assert sum(policy._forecasts[0].survival) < 2.5  # of four, 3.1 tokens were promised
    assert sum(cautious._forecasts[0].survival) > 3.5


def test_a_good_block_is_followed_by_another_whatever_came_before():
    policy = poor_history()
    policy.observe(outcome([[0.9] * 4]))
    assert policy.plan_draft(Load())
    policy.observe(outcome(None))
    assert not policy.plan_draft(Load())


def test_good_slots_that_come_together_are_worth_more_than_their_mean():
    """Half of the blocks are accepted whole: the mean confidence is the same as if each slot were so every time."""
    steep = ThroughputTable((1, 8), (10.0, 9.0), drafting=0.05)
    together, apart = (Scheduler(steep, trees=False) for _ in range(2))
    for number in range(40):
        together.observe(outcome([[0.95 * (number % 2)] * 4]))
        apart.observe(outcome([[0.475] * 4]))
    for policy in (together, apart):
        policy._latest.clear()
    assert together.plan_draft(Load()) and not apart.plan_draft(Load())


def test_skipping_looks_again_now_and_then():
    pattern = [False] * REPROBE_AFTER + [True]
    adaptive = poor_history()
    assert [adaptive.plan_draft(Load()) for _ in range(34)] == pattern * 2
    limited = chains(LINEAR, tpot_seconds=0.115)
    limited.observe(outcome([[0.05] * 4], accepted=0))
    assert [limited.plan_draft(Load()) for _ in range(34)] == pattern * 2
    assert plan(limited, [[0.9] * 4]) == [4]  # and looks at the whole block


@pytest.mark.filterwarnings("ignore:the limit of")
def test_an_unlucky_start_does_not_end_drafting_under_an_expected_limit():
    limited = chains(LINEAR, tpot_seconds=0.04)
    limited.observe(outcome([[0.9] * 7], accepted=0))
    drafted = []
    for _ in range(200):
        drafted.append(limited.plan_draft(Load()))
        if drafted[-1]:
            limited.observe(outcome([[0.9] * 7], accepted=min(6, plan(limited, [[0.9] * 7])[0])))
    assert not all(drafted[:20]) and all(drafted[-80:])


def test_requests_that_left_are_forgotten():
    policy = Scheduler(LINEAR)
    policy.observe(outcome([[0.9] * 4] * 3, request_ids=(1, 2, 3)))
    policy.plan_draft(Load((2, 4)))
    assert set(policy._forecasts) == set(policy._latest) == {2}


def test_drafting_depends_on_the_load():
    policy = Scheduler(ThroughputTable((1, 16, 32), (10.0, 10.0, 5.0), drafting=0.02), trees=False)
    policy.observe(outcome([[0.8] * 4]))
    assert policy.plan_draft(Load()) and not policy.plan_draft(Load(other_tokens=60))


def test_history_is_a_mean_that_starts_with_a_prior_and_forgets():
    policy = Scheduler(LINEAR)
    policy.observe(outcome([[0.5]]))
    assert policy._forecasts[0].survival == pytest.approx([(3 * 0.8 + 0.5) / 4])
    policy.observe(outcome([[1.0]]))
    policy.observe(outcome(None))  # a skipped round teaches nothing
    assert policy._forecasts[0].survival == pytest.approx([(3 * 0.8 + 0.5 + 1.0) / 5])
    for _ in range(60):
        policy.observe(outcome([[0.25]]))
    assert policy._forecasts[0].survival == pytest.approx([0.25], abs=0.01)


def test_forecasts_reach_as_far_as_the_longest_block():
    policy = Scheduler(JAGGED)
    for width in (2, 4, 1):
        policy.observe(outcome([[0.5] * width] * 2, width, request_ids=(0, 1), sent=width))
        assert isinstance(policy.plan_draft(Load((0, 1))), bool)
    assert {len(prospect.survival) for prospect in policy._forecasts.values()} == {4}
