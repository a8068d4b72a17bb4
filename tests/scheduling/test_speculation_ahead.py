"""What drafting ahead is worth: the theory against brute force, and the numbers that others checked."""

import itertools
import math
import random

import numpy as np
import pytest

from hf_dspark.scheduling.speculation_ahead import (
    best_fan_out,
    geometric_fan_out,
    hit_rate,
    largest_batch,
    outcome_chances,
    speedup,
    speedup_bounds,
)


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
    expected = hit_rate(after_hit, after_miss)
    assert hits / rounds / batch_size == pytest.approx(expected, abs=0.01)
    assert kept / seconds == pytest.approx(speedup(expected, tokens, draft_time, fallback_time, batch_size), rel=0.01)


def test_speedup_over_synchronous_drafting_is_within_its_bounds():
    for hits, fallback_tokens in itertools.product((0.1, 0.5, 0.9, 1.0), (1.0, 2.0, 4.0)):
        low, high = speedup_bounds(hits, 4.0, 4.0, 0.3)
        over_synchronous = speedup(hits, (4.0, fallback_tokens), 0.9, 0.0) / (4.0 / 1.3)
        assert low - 1e-12 <= over_synchronous <= high + 1e-12
    assert speedup_bounds(1.0, 4.0, 4.0, 0.3) == pytest.approx((1.3, 1.3))  # all of the drafting is hidden, no more


def missing(fan_out, exponent):
    return 1 - fan_out**-exponent


def test_geometric_fan_out_is_the_checked_example_and_no_other_allocation_beats_it():
    found, chances = geometric_fan_out(24, 0.8, 1.0, 5), outcome_chances(0.8, 5)
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
    found, rate = best_fan_out(budget, chances, hits)
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
    found, rate = best_fan_out(24, outcome_chances(0.8, 5), [curve] * 6)
    assert rate == pytest.approx(0.763, abs=0.005) and sum(found) == 24


def test_largest_batch_is_where_both_fallbacks_are_equally_fast():
    tokens, time = (5.0, 1.0), 0.3
    limit = largest_batch(0.8, 0.75, tokens, time)
    assert limit == pytest.approx(8.03, abs=0.005)
    slow = [speedup(0.8, (5.0, 5.0), time, time, batch) for batch in range(1, 20)]
    fast = speedup(0.75, tokens, time, 0.0)
    assert [each > fast for each in slow] == [batch < limit for batch in range(1, 20)]
    assert largest_batch(0.8, 0.75, tokens, 0.2) == math.inf
