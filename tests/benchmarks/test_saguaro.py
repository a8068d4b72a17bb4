"""What drafting ahead is worth: the theory against brute force, and the numbers that others checked."""

import importlib
import itertools
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dspark import FullBlock
from hf_dspark.decoding.tree_drafting import Chains
from hf_dspark.sampling.distributions import TokenDistribution, residual_distribution
from tests.decoding.test_lossless import HEADS, ROUNDING, VOCAB, distance_from_target, make_pair

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
saguaro = importlib.import_module("saguaro")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("after_hit", "after_miss", "tokens", "draft_time", "fallback_time"),
    [(0.9, 0.6, (4.0, 1.0), 0.3, 0.1), (0.5, 0.7, (3.0, 2.0), 1.4, 0.3), (0.2, 0.2, (5.0, 1.5), 0.9, 0.0)],
)
def test_speedup_is_that_of_simulated_rounds(batch_size, after_hit, after_miss, tokens, draft_time, fallback_time):
    rng, rounds = random.Random(0), 40_000
    was_hit, kept, seconds, hits = [True] * batch_size, 0.0, 0.0, 0
    for _ in range(rounds):
        was_hit = [rng.random() < (after_hit if each else after_miss) for each in was_hit]
        hits += sum(was_hit)
        kept += sum(tokens[0] if each else tokens[1] for each in was_hit) / batch_size
        seconds += max(1.0, draft_time) if all(was_hit) else 1 + fallback_time
    expected = saguaro.hit_rate(after_hit, after_miss)
    assert hits / rounds / batch_size == pytest.approx(expected, abs=0.01)
    assert kept / seconds == pytest.approx(
        saguaro.speedup(expected, tokens, draft_time, fallback_time, batch_size), rel=0.01
    )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("contention", [(1.0, 1.0), (1.6, 1.0), (1.3, 2.1), (2.0, 2.0)])
@pytest.mark.parametrize("draft_time", [0.0, 0.4, 0.8, 1.7])
def test_passes_that_slow_each_other_down_end_when_their_work_is_done(contention, draft_time):
    left, ends, clock, step = [1.0, draft_time], [0.0, 0.0], 0.0, 1e-4
    while max(left) > step / 2:
        going, clock = [each > step / 2 for each in left], clock + step
        slower = contention if all(going) else (1.0, 1.0)
        left = [each - step / slow * runs for each, slow, runs in zip(left, slower, going, strict=True)]
        ends = [clock if runs else end for runs, end in zip(going, ends, strict=True)]
    assert saguaro.overlapped(draft_time, contention) == pytest.approx(ends, abs=1e-3)


def test_contention_of_one_changes_nothing_and_more_of_it_never_helps():
    grid = list(itertools.product((0.2, 0.7, 1.0), (0.3, 0.8, 1.5), (0.0, 0.4)))
    for hits, draft_time, fallback_time in grid:
        common = hits, (4.0, 3.0), draft_time, fallback_time
        by_contention = [
            [saguaro.speedup(*common, contention=(verify, draft)) for draft in (1.0, 1.2, 1.6, 2.0)]
            for verify in (1.0, 1.3, 1.7, 2.0)
        ]
        free = (4.0 * hits + 3.0 * (1 - hits)) / (hits * max(1, draft_time) + (1 - hits) * (1 + fallback_time))
        assert by_contention[0][0] == pytest.approx(saguaro.speedup(*common)) == pytest.approx(free)
        for row in (*by_contention, *zip(*by_contention, strict=True)):
            assert all(after <= before + 1e-12 for before, after in itertools.pairwise(row))
        assert by_contention[-1][-1] < free
    # Two threads that take turns at all they do gain nothing: a verification and all of the drafting.
    assert saguaro.speedup(1.0, (4.0, 4.0), 0.3, 0.0, contention=(2.0, 2.0)) == pytest.approx(4 / 1.3)
    assert saguaro.speedup(0.4, (4.0, 4.0), 0.3, 0.1, rest_time=0.2) == pytest.approx(4 / (0.2 + 0.4 + 0.6 * 1.1))


def missing(fan_out, exponent):
    return 1 - fan_out**-exponent


def test_geometric_fan_out_is_the_checked_example_and_no_other_allocation_beats_it():
    found, chances = saguaro.geometric_fan_out(24, 0.8, 1.0, 5), saguaro.outcome_chances(0.8, 5)
    assert found.tolist() == pytest.approx([4.50, 4.03, 3.60, 3.22, 2.88, 5.76], abs=0.01)
    assert chances.sum() == pytest.approx(1) and found.sum() == pytest.approx(24)
    best = float((chances * missing(found, 1.0)).sum())
    assert best == pytest.approx(0.763, abs=1e-3)
    assert float((chances * missing(np.full(6, 4.0), 1.0)).sum()) == pytest.approx(0.750, abs=1e-3)
    rng = np.random.default_rng(0)
    for _ in range(500):
        other = 24 * rng.dirichlet(np.full(6, 3.0))
        assert float((chances * missing(other, 1.0)).sum()) <= best


@pytest.mark.parametrize("seed", range(8))
def test_whole_fan_outs_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    chances, budget = rng.dirichlet(np.ones(4)), int(rng.integers(0, 9))
    hits = [np.concatenate([[0.0], np.sort(rng.random(int(rng.integers(1, 7))))]) for _ in range(4)]  # not concave
    found, rate = saguaro.best_fan_out(budget, chances, hits)
    rates = [
        sum(chance * curve[count] for chance, curve, count in zip(chances, hits, counts, strict=True))
        for counts in itertools.product(*(range(len(curve)) for curve in hits))
        if sum(counts) <= budget
    ]
    assert sum(found) <= budget and rate == pytest.approx(max(rates))
    assert rate == pytest.approx(sum(c * curve[n] for c, curve, n in zip(chances, hits, found, strict=True)))


def test_a_first_block_that_never_hits_stops_no_whole_fan_out():
    """Under F^-r a single prepared block misses always: who adds one after the other never begins."""
    curve = [0.0, *(missing(count, 1.0) for count in range(1, 25))]
    found, rate = saguaro.best_fan_out(24, saguaro.outcome_chances(0.8, 5), [curve] * 6)
    assert rate == pytest.approx(0.763, abs=0.005) and sum(found) == 24


def test_largest_batch_is_where_both_fallbacks_are_equally_fast():
    tokens, time = (5.0, 1.0), 0.3
    limit = saguaro.largest_batch(0.8, 0.75, tokens, time)
    assert limit == pytest.approx(8.03, abs=0.005)
    slow = [saguaro.speedup(0.8, (5.0, 5.0), time, time, batch) for batch in range(1, 20)]
    fast = saguaro.speedup(0.75, tokens, time, 0.0)
    assert [each > fast for each in slow] == [batch < limit for batch in range(1, 20)]
    assert saguaro.largest_batch(0.8, 0.75, tokens, 0.2) == math.inf


def test_saguaro_sampling_is_the_checked_example():
    """Theorem 19: as much is accepted, and what replaces a rejected token is always one of the two best others."""
    target, drafts = torch.full((4,), 0.25), TokenDistribution(torch.tensor([0.26, 0.26, 0.24, 0.24]))
    found = saguaro.with_likely_residual(drafts, 2, (12 / 13) ** 2)
    torch.testing.assert_close(found.probs, torch.tensor([0.24, 0.24, 0.26, 0.26]))
    for probs in (drafts.probs, found.probs):
        assert float(torch.minimum(target, probs).sum()) == pytest.approx(0.98)
    assert residual_distribution(target, drafts.probs)[:2].sum() == 0.0
    assert residual_distribution(target, found.probs)[:2].sum() == pytest.approx(1.0)
    on_candidates = TokenDistribution(drafts.probs[None], torch.tensor([[9, 3, 5, 7]]))
    assert torch.equal(saguaro.with_likely_residual(on_candidates, 2, (12 / 13) ** 2).probs[0], found.probs)


@pytest.mark.parametrize("head", ["vanilla", "draft_top_k"])
def test_saguaro_sampling_keeps_the_target_distribution_if_it_is_what_drafts_are_tested_against(
    make_target, head, monkeypatch
):
    honest, before = Chains.draw, []

    def damped(self, *arguments):
        token_ids, distribution = honest(self, *arguments)
        before.append(distribution.dense(VOCAB).probs[0].double())
        return token_ids, saguaro.with_likely_residual(distribution, 1, 0.4)

    monkeypatch.setattr(Chains, "draw", damped)
    pair = make_pair(make_target, **HEADS[head])
    assert distance_from_target(*pair, FullBlock()) < ROUNDING
    undamped = lambda block: torch.stack(before[-2:])  # noqa: E731
    assert distance_from_target(*pair, FullBlock(), claimed_distribution=undamped) > 0.01
