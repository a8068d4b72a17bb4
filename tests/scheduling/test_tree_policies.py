"""Trees are as large as pays: against exhaustive search over shapes, and on machines of different kinds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_dspark import Scheduler
from hf_dspark.sampling.drafts import DraftTree, DraftTrees
from hf_dspark.scheduling.calibration import SiblingTest, check_siblings, fit_siblings, recorded_tests
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.tree_plans import (
    BudgetPlan,
    SiblingAcceptance,
    TreePlan,
    usual_acceptance,
)

MEANS = ((0.7, 0.1, 0.05), (0.65, 0.12, 0.04), (0.6, 0.1, 0.05))
DRAWN = SiblingAcceptance(True, ((1.0, 0.0), (0.5, -1.0), (0.5, -1.5)), MEANS)
BEST = SiblingAcceptance(False, ((1.0, 0.0),), MEANS)


def machine(*milliseconds_of_nodes, drafting=0.1e-3):
    """A machine on which trees of 1, 2, ... nodes take so many milliseconds, and chains as many."""
    tokens = tuple(range(1, len(milliseconds_of_nodes) + 1))
    return ThroughputTable(tokens, tuple(1e3 / each for each in milliseconds_of_nodes), drafting)


def grown(plan, shares, ranks=3):
    """Grow one tree of certain shares, `[depth][rank]`, whatever the tokens are."""
    tree, level, depth = DraftTree(), [0], 0
    while level and depth < len(shares):
        above = np.array([tree.survivals[place - 1] if place else 1.0 for place in level])
        survivals = np.outer(above, shares[depth])
        counts = plan.admit(depth, [0] * len(level), survivals, [tree])
        level = [
            tree.add(place, rank, float(survivals[number, rank]))
            for number, place in enumerate(level)
            for rank in range(int(counts[number]))
        ]
        depth += 1
    return tree


def every_survival(shares):
    """The survivals of all nodes of the whole tree, the best first."""
    level, survivals = [1.0], []
    for row in shares:
        level = [above * share for above, share in itertools.product(level, row)]
        survivals += level
    return sorted(survivals, reverse=True)


def best_of_all_shapes(shares, seconds, most):
    """Return the best throughput of any tree: the best nodes of the whole tree, of every number."""
    kept = itertools.accumulate(every_survival(shares)[:most], initial=1.0)
    return max(tokens / time for tokens, time in zip(kept, seconds, strict=False))


JAGGED = {
    "flat": [1.0] * 40,
    "slope": [1.0 + 0.05 * n for n in range(40)],
    "steep": [1.0 + 0.4 * n for n in range(40)],
    "cliffs": [1.0 + 0.6 * (n // 8) for n in range(40)],
    "early_cliff": [1.0 if n < 3 else 2.0 + 0.01 * n for n in range(40)],
}


@pytest.mark.parametrize("curve", JAGGED.values(), ids=JAGGED)
@pytest.mark.parametrize("siblings", [DRAWN, BEST], ids=["drawn", "best"])
def test_the_scheduler_comes_near_an_exhaustive_search_over_shapes(curve, siblings, monkeypatch):
    cost = machine(*curve)
    seconds = cost.tree_seconds(Load(), 31, siblings.is_drawn)
    monkeypatch.setattr("hf_dspark.scheduling.scheduler.LEAST_GAIN", 0.0)
    plan = Scheduler(cost, trees=True).plan_tree(siblings, Load())
    tree = grown(plan, MEANS)
    if not siblings.is_drawn:
        tree = tree.only(plan.kept([tree])[0])
    found = (1 + sum(tree.survivals)) / seconds[tree.num_nodes]
    assert found >= 0.95 * best_of_all_shapes(MEANS, seconds, 31)


def test_a_loaded_machine_gets_smaller_trees_then_chains(monkeypatch):
    cost = ThroughputTable((1, 32, 64, 128), (100, 95, 60, 35), 1e-3)
    nodes = []
    for requests in (1, 4, 16):
        plan = Scheduler(cost, trees=True).plan_tree(BEST, Load(range(requests)))
        nodes.append(0 if plan is None else grown(plan, MEANS).num_nodes)
    assert nodes[0] > nodes[1] >= nodes[2] == 0


def test_chains_are_kept_where_a_tree_gains_too_little():
    assert Scheduler(machine(*JAGGED["steep"]), trees=True).plan_tree(DRAWN, Load()) is None
    assert Scheduler(machine(*JAGGED["flat"]), trees=True).plan_tree(DRAWN, Load()) is not None


@pytest.mark.parametrize("siblings", [DRAWN, BEST], ids=["drawn", "best"])
def test_sure_matches_make_a_tree_pay_where_drafts_alone_do_not(siblings):
    scheduler = Scheduler(machine(*(1.0 + 0.03 * n for n in range(40))), trees=True)
    assert scheduler.plan_tree(siblings, Load(), [[0.95] * 20]).cut > 0.0
    assert scheduler.plan_tree(siblings, Load(), [[0.2] * 20]) is None


def test_doubtful_matches_do_not_keep_from_growing_the_trees_that_pay_without_them():
    scheduler = Scheduler(machine(*JAGGED["flat"]), trees=True)
    for siblings in (DRAWN, BEST):
        usual = scheduler.plan_tree(siblings, Load()).gain
        for chance in (0.1, 0.2, 0.4):
            assert scheduler.plan_tree(siblings, Load(), [[chance, 0.1]]).gain >= usual


def test_the_drafts_pass_is_saved_where_matches_alone_promise_more():
    cost = ThroughputTable((1, 8, 32), (100, 96, 90), drafting=1e-3)
    for siblings in (DRAWN, BEST):
        assert not Scheduler(cost, trees=True).plan_tree(siblings, Load(), [[0.97] * 30]).drafts
        plan = Scheduler(cost, trees=True).plan_tree(siblings, Load(), [[0.3] * 30])
        assert plan is None or plan.drafts
    one_of_four = ([0.9] * 30, (), (), ())
    assert Scheduler(cost, trees=True).plan_tree(BEST, Load(range(4)), one_of_four).drafts


def test_drafting_goes_on_where_trees_pay_and_chains_do_not():
    cost = ThroughputTable((1, 32), (100, 98), drafting=3e-3)
    policy = Scheduler(cost, trees=True)
    for number in range(40):
        accepted = torch.tensor([int(number % 3 == 0)])  # as many as promised
        policy.observe(RoundOutcome((0,), torch.tensor([[0.25, 0.3, 0.3]]), torch.tensor([3]), accepted, 0.01))
    assert not policy.plan_draft(Load())
    siblings = SiblingAcceptance(True, DRAWN.fits, ((0.25, 0.15, 0.1),) * 3)
    assert policy.plan_tree(siblings, Load()) is None
    assert any(policy.plan_draft(Load()) for _ in range(17))  # it looks again
    assert policy.plan_tree(siblings, Load()).gain > 1.15
    assert policy.plan_draft(Load())


def test_a_tree_that_is_shallower_than_its_neighbour_teaches_nothing_of_deeper_slots():
    cost, known = ThroughputTable((1, 32), (100, 98)), torch.tensor([[0.9, torch.nan, torch.nan], [0.9, 0.8, 0.7]])
    together, alone = Scheduler(cost, trees=True), Scheduler(cost, trees=True)
    together.observe(RoundOutcome((0, 1), known, torch.tensor([1, 3]), torch.tensor([1, 3]), 0.01))
    alone.observe(RoundOutcome((1,), known[1:], torch.tensor([3]), torch.tensor([3]), 0.01))
    alone.observe(RoundOutcome((0,), known[:1, :1], torch.tensor([1]), torch.tensor([1]), 0.01))
    for request in (0, 1):
        assert together._forecasts[request].survival == pytest.approx(alone._forecasts[request].survival, abs=0.01)
    assert together._forecasts[0].survival[-1] > 0.5


def test_trees_are_drafted_where_they_were_asked_for_or_measured():
    cost, unmeasured = machine(*JAGGED["flat"]), replace(DRAWN, is_measured=False)
    plans = [
        [Scheduler(cost, trees=trees).plan_tree(siblings, Load()) is not None for siblings in (DRAWN, unmeasured)]
        for trees in (None, True, False)
    ]
    assert plans == [[True, False], [True, True], [False, False]]
    assert Scheduler(num_nodes=5).plan_tree(unmeasured, Load()).num_nodes == 5
    assert [Scheduler(cost, **how).most_nodes for how in ({}, {"trees": False}, {"lag": 1})] == [31, 0, 0]


def test_a_limit_learns_from_trees_what_a_round_brings_and_caps_them():
    cost = machine(*(1.0 + 0.005 * n for n in range(70)))
    limited, trees = Scheduler(cost, 6, trees=True, tpot_seconds=0.5125e-3), DraftTrees([DraftTree()])
    assert limited.plan_draft(Load()) and limited.plan_tree(DRAWN, Load()).in_all == 6
    limited.observe(RoundOutcome((0,), None, torch.tensor([6]), torch.tensor([1]), 1e-3, drafts=trees, paths=[[]]))
    assert limited.allowed_seconds == pytest.approx(1.025e-3)
    plan = limited.plan_tree(DRAWN, Load()) if limited.plan_draft(Load()) else None
    assert plan.in_all == grown(plan, MEANS).num_nodes == 5
    limited.observe(RoundOutcome((0,), None, torch.tensor([3]), torch.tensor([0]), 1e-3, drafts=trees, paths=[[]]))
    assert limited.allowed_seconds == pytest.approx(1.025e-3), "a tree that was cut short tells nothing"


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 11])
def test_a_budget_of_best_tokens_is_the_best_of_the_whole_tree(num_nodes):
    plan = BudgetPlan(num_nodes, BEST)
    tree = grown(plan, MEANS)
    kept = tree.only(plan.kept([tree])[0])
    assert kept.num_nodes == num_nodes
    assert sum(kept.survivals) == pytest.approx(sum(every_survival(MEANS)[:num_nodes]))


@pytest.mark.parametrize("num_nodes", [1, 4, 9])
def test_a_budget_of_drawn_nodes_is_never_exceeded_and_used_up(num_nodes):
    assert grown(BudgetPlan(num_nodes, DRAWN), MEANS).num_nodes == num_nodes


def test_a_cap_for_all_requests_goes_to_the_best_nodes():
    plan = TreePlan(0.1, 31, 3)
    counts = plan.admit(0, [0, 1], np.array([[0.5, 0.2], [0.9, 0.3]]), [DraftTree(), DraftTree()])
    assert counts.tolist() == [1, 2]


def test_fits_recover_what_acceptances_were_drawn_from():
    generator, truth, tests = np.random.default_rng(0), ((1.2, 0.3), (0.6, -1.0)), []
    for _ in range(4000):
        known = generator.uniform(0.05, 0.95)
        for rank, (slope, offset) in enumerate(truth):
            chance = 1 / (1 + np.exp(-(slope * np.log(known / (1 - known)) + offset)))
            accepted = generator.random() < chance
            tests.append(SiblingTest(0, rank, known, accepted, 2 - rank))
            if accepted:
                break
    fitted = fit_siblings(tests, True, 3, [0.51234, 0.3, 0.2])
    assert fitted.of_chain().tolist() == [0.5123, 0.3, 0.2]
    assert np.abs(np.array(fitted.fits) - np.array(truth)).max() < 0.15
    first = sum(test.was_accepted for test in tests if test.rank == 0) / 4000
    assert fitted.means[0][0] == pytest.approx(first, abs=1e-4) and len(fitted.means) == 3
    second = sum(test.was_accepted for test in tests if test.rank == 1) / 4000
    assert fitted.best == pytest.approx(sorted([first, second])[::-1], abs=1e-4)
    check_siblings({name: list(getattr(fitted, name)) for name in ("fits", "means", "best", "chain")}, 3)


def test_tests_in_a_round_end_with_the_accepted_sibling():
    tree = DraftTree()
    first, second = tree.add(0, 5, 0.7, known=0.7), tree.add(0, 6, 0.2, known=0.7)
    tree.add(first, 7, 0.3, known=0.2)
    below = tree.add(second, 7, 0.1, known=0.4)
    assert recorded_tests(tree, [second, below]) == [(0, 0, 0.7, False, 1), (0, 1, 0.7, True, 3), (1, 0, 0.4, True, 4)]


COUNTED = ThroughputTable((1, 8, 16), (100, 95, 90), 1e-3, growth=(1.1, 1.3))


def test_trees_and_chains_are_chosen_by_what_they_were_counted_to_bring():
    load, chances = Load((9,)), ((0.5, 0.01),) * 3
    mean_tree = SiblingAcceptance(False, ((1.0, 0.0),), chances)
    assert Scheduler(COUNTED, trees=True).plan_tree(mean_tree, load) is None
    trees = replace(mean_tree, best=(0.5,) * 4 + (0.1,) * 10)
    both = replace(trees, chain=(0.6, 0.45, 0.4))  # easy stretches come together
    tree_rate = (1 + 4 * 0.5 + 10 * 0.1) / COUNTED.tree_seconds(load, 14, False)[14]
    for siblings, chain in ((trees, (0.5, 0.25, 0.125)), (both, (0.6, 0.45, 0.4))):
        chain_rate = (np.cumsum((1.0, *chain)) / COUNTED.round_seconds(load, 3)).max()
        assert Scheduler(COUNTED, trees=True).plan_tree(siblings, load).gain == pytest.approx(tree_rate / chain_rate)


def test_trees_that_are_drawn_and_trees_of_best_tokens_cost_what_each_was_measured_to():
    chain = COUNTED.seconds_of([16])[0]
    grown = [COUNTED.tree_seconds(Load(), 15, is_drawn)[15] for is_drawn in (True, False)]
    assert grown == pytest.approx([chain + 0.3e-3, chain + 0.1e-3])
    gains = []
    for is_drawn in (True, False):
        siblings = SiblingAcceptance(is_drawn, ((1.0, 0.0),), ((0.5, 0.2),) * 7)
        gains.append(Scheduler(COUNTED, trees=True).plan_tree(siblings, Load()).gain)
    assert gains[1] > gains[0]


def test_shares_of_siblings_never_rise_with_the_rank():
    shares = usual_acceptance(True, 4).shares(np.array([[0.02], [0.5], [0.99]]))
    assert (np.diff(shares, axis=1) <= 0).all() and (shares.sum(axis=1) <= 1).all()


@pytest.mark.parametrize(
    "entry", [None, {"fits": [[1, 2]]}, {"fits": [], "means": [[0.5]] * 3}, {"fits": [[1, 0]], "means": [[0.5]]},
              {"fits": [[1, float("nan")]], "means": [[0.5]] * 3}, {"fits": [[1, 0]], "means": [[1.5]] * 3},
              {"fits": [[1, 0]], "means": [[0.5]] * 3, "best": [0.2, 0.4]},
              {"fits": [[1, 0]], "means": [[0.5]] * 3, "chain": [0.5, 0.4]},
              {"fits": [[1, 0]], "means": [[0.5]] * 3, "chain": [0.5, 0.6, 0.4]}]
)  # fmt: skip
def test_damaged_acceptances_are_refused(entry):
    with pytest.raises(ValueError, match="acceptances"):
        check_siblings(entry, 3)
