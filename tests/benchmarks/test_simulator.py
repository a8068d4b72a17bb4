"""The simulator and the scheduler comparison: conservation, times by hand, reference outcomes."""

import importlib
import sys
from pathlib import Path

import numpy
import pytest
import torch

from hf_dspark import FullBlock, ThroughputTable

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
simulator, scheduler = (importlib.import_module(name) for name in ("simulator", "scheduler"))

# A plain step of one request takes 11 ms, one of R requests 10 + R ms; drafting adds 2 ms.
COST = ThroughputTable((1, 10**6), (1 / 0.013, 1 / (0.012 + 1e3)), 2e-3)
PLAIN = simulator.NeverDraft()


def recording(accepted, block_size=7):
    """One request per list of accepted counts; all confidences are .8."""
    return simulator.Recording.of(
        [(torch.full((len(counts), block_size), 0.8), torch.tensor(counts)) for counts in accepted]
    )


def simulated(wanted, accepted, policy, cap=8, max_drafts=7):
    """Serve requests, given as time and number of tokens, from recorded rounds of one request."""
    arrivals = [simulator.Arrival(seconds, 0, tokens) for seconds, tokens in wanted]
    return simulator.simulate(arrivals, recording([accepted]), (policy, max_drafts), COST, max_requests=cap)


def synthetic():
    """Calibrated rounds of ten requests: c_k from a Beta distribution, token k accepted with probability c_k."""
    rng, requests = numpy.random.default_rng(0), []
    for mean in rng.uniform(0.5, 0.95, 10):
        confidence = rng.beta(12 * mean, 12 * (1 - mean), (30, 7))
        accepted = numpy.cumprod(rng.random((30, 7)) < confidence, axis=1).sum(axis=1)
        requests.append((torch.from_numpy(confidence), torch.from_numpy(accepted)))
    return simulator.Recording.of(requests)


@pytest.mark.parametrize("name", simulator.contenders(COST, 7, 0.05))
def test_every_request_gets_exactly_its_tokens_under_every_policy(name):
    rng = numpy.random.default_rng(len(name))
    wanted = [simulator.Arrival(0.05 * place, 0, int(rng.integers(1, 30))) for place in range(25)]
    run = simulator.simulate(wanted, synthetic(), simulator.contenders(COST, 7, 0.05)[name], COST, max_requests=6)
    assert sorted((each.request, each.tokens) for each in run.finished) == [
        (place, arrival.output_tokens) for place, arrival in enumerate(wanted)
    ]
    assert sum(each.new_tokens for each in run.rounds) == sum(each.output_tokens for each in wanted)
    assert max(each.requests for each in run.rounds) <= 6
    assert all(each.requests <= each.new_tokens <= each.verify_tokens for each in run.rounds)
    assert all(each.arrived <= each.admitted < each.ended for each in run.finished)


def test_autoregressive_throughput_by_hand():
    summary = simulated([(0.0, 10), (0.0, 10)], [3], PLAIN).summary(0.05)
    assert summary["tokens_per_second"] == pytest.approx(20 / (10 * 0.012), rel=1e-3)


def test_rounds_are_replayed_in_order_and_start_over():
    run = simulated([(0.0, 15)], [2, 0, 4], FullBlock(), cap=1)
    assert [each.new_tokens for each in run.rounds] == [3, 1, 5, 3, 1, 2]  # the last one is cut to what is left
    # 10 ms + 1 ms for each of the 8 tokens + 2 ms of drafting; at most the tokens still wanted are verified.
    assert [round(1e3 * each.seconds) for each in run.rounds] == [20, 20, 20, 18, 15, 14]


def test_slo_attainment_by_hand():
    # Alone at 11 ms for 4 tokens; then two requests share steps of 12 ms.
    run = simulated([(0.0, 4), (1.0, 4), (1.0, 4)], [0], PLAIN, cap=4)
    assert [round(1e3 * each.tpot_seconds, 3) for each in run.finished] == pytest.approx([11.0, 12.0, 12.0])
    for limit, attained in ((0.0115, 1 / 3), (0.0125, 1.0), (0.0105, 0.0)):
        assert run.summary(limit)["slo_attainment"] == pytest.approx(attained)


def test_frontier_by_hand():
    found = simulator.points_of(recording([[3]]), COST, [1, 10], rounds=7)
    rates = [point["tokens_per_second"] for point in found["autoregressive"]]
    assert rates == pytest.approx([1 / 0.011, 10 / 0.02], rel=1e-3)
    rates = [point["tokens_per_second"] for point in found["full block"]]
    assert rates == pytest.approx([4 / (0.01 + 8e-3 + 2e-3), 40 / (0.01 + 80e-3 + 2e-3)], rel=1e-3)


@pytest.mark.parametrize(("name", "requests"), [("knee", 100), ("knee", 256), ("line", 64), ("line", 256)])
def test_budget_against_concurrency(name, requests):
    row = scheduler.reference_budget(name, requests, 2048, numpy.random.default_rng(0))
    rates = row["tokens_per_second"]
    assert abs(row["relative_deviation"]) <= 0.03
    assert rates["Algorithm 1"] > rates["autoregressive"] and rates["Algorithm 1"] == pytest.approx(rates["oracle"])


def test_schedulers_on_jagged_curves():
    draws = scheduler.recorded_draws(synthetic(), [8, 40, 100] * 10, numpy.random.default_rng(0))
    jagged = scheduler.table_of(lambda b: 0.005 + 0.002 * ((b - 1) // 32), 1024)  # each started bucket costs the same
    relative = scheduler.relative_throughput(draws, jagged)
    assert relative["hull + fill"] >= 0.92 and relative["lagged budget + top-K"] >= 0.99
    assert relative["Algorithm 1"] < relative["hull + fill"]


def test_drafting_ahead_hides_all_of_the_drafting_if_every_block_was_prepared():
    row = {"tau": {"new": 4.0, "lagging": 4.0, "tails": 4.0}, "tau_of_tails": 2.0, "share_of_tails": 0.0}
    assert simulator.gains(row, 0.25, 1.0) == pytest.approx({"tails": 1, "ahead": 1.25, "ahead_with_features": 1.25})
    # Blocks without the last features commit three tokens; where they never come in time, one drafts as before.
    row["tau"] |= {"lagging": 3.0}
    assert simulator.gains(row, 0.25, 1.0)["ahead"] == pytest.approx(1.25 * 3 / 4)
    assert simulator.gains(row, 0.25, 0.0)["ahead"] == pytest.approx(1.0)
    # Drafting of four verifications is slower than none. Three of four rounds with tails save three quarters of it.
    assert simulator.gains(row, 4.0, 0.0, batch_size=4)["ahead"] == pytest.approx(1.0)
    row["share_of_tails"], row["tau"]["tails"] = 0.75, 3.0
    assert simulator.gains(row, 1.0, 0.0)["tails"] == pytest.approx(3 / (1 + 7 / 16) / 2)
    # Threads that take turns hide nothing: each prepared block costs its time, used or not.
    row |= {"tau": dict.fromkeys(row["tau"], 4.0)}
    assert simulator.gains(row, 0.5, 1.0, contention=(2.0, 2.0))["ahead"] == pytest.approx(1.5 / 2)
