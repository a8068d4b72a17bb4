"""The benchmarks' simulator and scheduler comparison: conservation, times computed by hand, reference outcomes."""

import importlib
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from hf_dspark.maths.costs import ForwardCost, LinearCost
from hf_dspark.maths.policies import ConfidenceThreshold, FullBlock, LaggedScheduler, PrefixScheduler

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
simulator, scheduler = (importlib.import_module(name) for name in ("simulator", "scheduler"))

# A plain step of one request takes 11 ms, one of R requests 10 + R ms; drafting adds 2 ms.
COST = LinearCost(ForwardCost(0.0, 1e-3, 0.01), ForwardCost(0.0, 0.0, 2e-3))
AUTOREGRESSIVE = simulator.Contender("autoregressive", simulator.NeverDraft(), 7)
FULL_BLOCK = simulator.Contender("full block", FullBlock(), 7)


def recording(accepted, block_size=7):
    """One request per list of accepted counts."""
    return simulator.Recording.of(
        [(torch.full((len(counts), block_size), 0.8), torch.tensor(counts)) for counts in accepted]
    )


def arrivals(*each):
    return [simulator.Arrival(seconds, 0, tokens) for seconds, tokens in each]


def synthetic(seed=0):
    rng = numpy.random.default_rng(seed)
    return simulator.synthetic_recording(rng.uniform(0.5, 0.95, 10), 12.0, 7, 30, rng)


# Conservation


@pytest.mark.parametrize("index", range(15))
def test_every_request_gets_exactly_its_tokens_under_every_policy(index):
    rng = numpy.random.default_rng(index)
    wanted = arrivals(*((0.05 * place, int(rng.integers(1, 30))) for place in range(25)))
    contender = simulator.contenders(COST, 7, 0.05)[index]
    run = simulator.simulate(wanted, synthetic(), contender, COST, max_requests=6)
    assert sorted((each.request, each.tokens) for each in run.finished) == [
        (place, arrival.output_tokens) for place, arrival in enumerate(wanted)
    ]
    assert sum(each.new_tokens for each in run.rounds) == sum(each.output_tokens for each in wanted)
    assert max(each.requests for each in run.rounds) <= 6
    assert all(each.requests <= each.new_tokens <= each.verify_tokens for each in run.rounds)
    assert all(each.arrived <= each.admitted < each.ended for each in run.finished)


def test_all_policies_are_covered_by_the_conservation_test():
    assert len(simulator.contenders(COST, 7, 0.05)) == 15


# Times by hand


def test_autoregressive_throughput_by_hand():
    run = simulator.simulate(arrivals((0.0, 10), (0.0, 10)), recording([[3]]), AUTOREGRESSIVE, COST, max_requests=8)
    summary = simulator.summarize(run, 0.05)
    assert summary.tokens_per_second == pytest.approx(20 / (10 * 0.012))
    assert (summary.drafted_share, summary.tau, summary.mean_verified) == (0.0, 1.0, 1.0)
    assert summary.mean_tpot_ms == pytest.approx(12.0)


def test_rounds_are_replayed_in_order_and_start_over():
    run = simulator.simulate(arrivals((0.0, 15)), recording([[2, 0, 4]]), FULL_BLOCK, COST, max_requests=1)
    assert [each.new_tokens for each in run.rounds] == [3, 1, 5, 3, 1, 2]  # the last one is cut to what is left
    # 10 ms + 1 ms for each of the 8 tokens + 2 ms of drafting; at most the tokens still wanted are verified.
    assert [round(1e3 * each.seconds) for each in run.rounds] == [20, 20, 20, 18, 15, 14]


def test_skipped_rounds_use_no_recorded_round():
    class Alternate(FullBlock):
        def plan_draft(self, load):
            self.__dict__["turn"] = not self.__dict__.get("turn", False)
            return self.__dict__["turn"]

    contender = simulator.Contender("alternate", Alternate(), 7)
    run = simulator.simulate(arrivals((0.0, 10)), recording([[2, 3]]), contender, COST, max_requests=1)
    assert [each.new_tokens for each in run.rounds] == [3, 1, 4, 1, 1]


def test_verified_lengths_cut_what_is_accepted():
    contender = simulator.Contender("fixed length 1", FullBlock(), 1)
    run = simulator.simulate(arrivals((0.0, 6)), recording([[5]]), contender, COST, max_requests=1)
    assert [(each.verify_tokens, each.new_tokens) for each in run.rounds] == [(2, 2)] * 3
    contender = simulator.Contender("threshold", ConfidenceThreshold(0.9), 7)  # all confidences are .8
    run = simulator.simulate(arrivals((0.0, 2)), recording([[5]]), contender, COST, max_requests=1)
    assert [(each.verify_tokens, each.new_tokens, each.drafted) for each in run.rounds] == [(1, 1, True)] * 2


def test_slo_attainment_by_hand():
    # Alone at 11 ms for 4 tokens; then two requests share steps of 12 ms.
    wanted = arrivals((0.0, 4), (1.0, 4), (1.0, 4))
    run = simulator.simulate(wanted, recording([[0]]), AUTOREGRESSIVE, COST, max_requests=4)
    assert [round(1e3 * each.tpot_seconds, 6) for each in run.finished] == [11.0, 12.0, 12.0]
    assert simulator.summarize(run, 0.0115).slo_attainment == pytest.approx(1 / 3)
    assert simulator.summarize(run, 0.0125).slo_attainment == 1.0
    assert simulator.summarize(run, 0.0105).slo_attainment == 0.0
    assert [(each.least, each.most) for each in simulator.summarize(run, 0.01).by_concurrency] == [(1, 1), (2, 2)]


def test_requests_beyond_the_cap_wait():
    run = simulator.simulate(arrivals((0.0, 4), (0.0, 4)), recording([[0]]), AUTOREGRESSIVE, COST, max_requests=1)
    assert [each.admitted for each in run.finished] == pytest.approx([0.0, 0.044])
    assert simulator.summarize(run, 0.05).mean_waiting_seconds == pytest.approx(0.022)


# Files


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0,3180,8\n2023-11-16 18:17:05,7,9\n",
    "mooncake.csv": "timestamp_ms,input_length,output_length\n0,4808,10\n20.04,3180,8\n1020.04,7,9\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 4808, "output_length": 10}\n'
    '{"timestamp": 20.04, "input_length": 3180, "output_length": 8, "hash_ids": [0]}\n'
    '{"timestamp": 1020.04, "input_length": 7, "output_length": 9}\n',
}


def load(path, rate=1.0):
    return simulator.load_trace(path, rate, simulator.MeanLengths(), numpy.random.default_rng(0))


@pytest.mark.parametrize("name", TRACES)
def test_traces_with_lengths(name, tmp_path):
    path = tmp_path / name
    path.write_text(TRACES[name])
    loaded = load(path, rate=2.0)
    assert [(each.context_tokens, each.output_tokens) for each in loaded] == [(4808, 10), (3180, 8), (7, 9)]
    assert [each.seconds for each in loaded] == pytest.approx([0.0, 0.01002, 0.51002], abs=1e-6)


def test_trace_without_lengths_draws_them(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("Timestamp\n" + "\n".join(str(5 + 0.5 * place) for place in range(4000)) + "\n")
    loaded = load(path)
    assert (loaded[0].seconds, loaded[1].seconds) == (0.0, 0.5)
    assert numpy.mean([each.output_tokens for each in loaded]) == pytest.approx(128, rel=0.1)
    assert numpy.mean([each.context_tokens for each in loaded]) == pytest.approx(512, rel=0.1)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", "timestamp_ms,input_length,output_length\n0,1,2\n5,x,3\n", 3),
        ("a.csv", "timestamp_ms,input_length,output_length\n0,1,2\n5,1\n", 3),
        ("a.csv", "timestamp_ms,input_length,output_length\n0,1,0\n", 2),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", 2),
        ("a.csv", "when\n3\n", 2),
        ("a.csv", "Timestamp\n1\nnan\n", 3),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\nnothing\n', 2),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1}\n', 1),
        ("a.jsonl", "3\n", 1),
    ],
)
def test_bad_trace_is_named_with_its_line(name, content, line, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}, line {line}: "):
        load(tmp_path / name)


def test_empty_trace_and_bad_rate(tmp_path):
    (tmp_path / "a.csv").write_text("Timestamp\n")
    with pytest.raises(ValueError, match="no arrivals"):
        load(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="rate must be a positive number"):
        load(tmp_path / "a.csv", rate=0.0)


def test_recorded_rounds_are_read(tmp_path):
    requests = [
        {"confidence": [[0.9, 0.5], [0.25, 0.0]], "accepted": [2, 0]},
        {"confidence": [[1, 1]], "accepted": [1]},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"block_size": 2, "requests": requests}))
    loaded = simulator.load_rounds(tmp_path / "a.json")
    assert (loaded.block_size, loaded.num_requests, loaded.num_rounds(0)) == (2, 2, 2)
    assert [loaded.row(0, 3), loaded.row(1, 5)] == [1, 2]
    assert loaded.confidence[loaded.row(0, 1)].tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"block_size": 2, "requests": []}, "at least one"),
        ({"block_size": 3, "requests": [{"confidence": [[0.9, 0.5]], "accepted": [1]}]}, "request 0: expected"),
        ({"block_size": 2, "requests": [{"confidence": [[0.9, 0.5]]}]}, "request 0: expected"),
        ({"block_size": 2, "requests": [{"confidence": [[0.9, 1.5]], "accepted": [1]}]}, r"\[0, 1\]"),
        ({"block_size": 2, "requests": [{"confidence": [[0.9, 0.5]], "accepted": [3]}]}, r"0\.\.2"),
    ],
)
def test_bad_recording_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        simulator.load_rounds(tmp_path / "a.json")


# Reference outcomes


@pytest.mark.parametrize(("name", "requests"), [("knee", 100), ("knee", 256), ("line", 64), ("line", 256)])
def test_budget_against_concurrency(name, requests):
    row = scheduler.reference_budget(name, requests, 2048, numpy.random.default_rng(0))
    assert abs(row.relative_deviation) <= 0.03
    assert row.tokens_per_second["Algorithm 1"] > row.tokens_per_second["autoregressive"]
    assert row.tokens_per_second["Algorithm 1"] == pytest.approx(row.tokens_per_second["oracle"])


def test_schedulers_on_a_jagged_curve():
    draws = scheduler.jagged_draws(60, numpy.random.default_rng(0))
    relative = scheduler.relative_throughput(draws, scheduler.sawtooth())
    assert relative["hull + fill"] >= 0.92
    assert relative["lagged budget + top-K"] >= 0.99
    assert relative["Algorithm 1"] < relative["hull + fill"]


def test_schedulers_on_recorded_rounds():
    draws = scheduler.recorded_draws(synthetic(), [8, 40, 100] * 10, numpy.random.default_rng(0))
    relative = scheduler.relative_throughput(draws, scheduler.sawtooth(bucket=32))
    assert relative["hull + fill"] >= 0.92
    assert relative["lagged budget + top-K"] >= 0.99


def test_recorded_draws_hold_the_rounds_before_them():
    confidence = torch.arange(5.0).div(10)[:, None].expand(5, 2)
    short = simulator.Recording.of([(confidence[:2], torch.zeros(2).long()), (confidence, torch.zeros(5).long())])
    for draw in scheduler.recorded_draws(short, [20], numpy.random.default_rng(0)):
        assert torch.allclose(draw.older[0], draw.confidence - 0.2)
        assert torch.allclose(draw.older[1], draw.confidence - 0.1)
    with pytest.raises(ValueError, match="more than 2 rounds"):
        scheduler.recorded_draws(recording([[1, 1]]), [3], numpy.random.default_rng(0))


def test_older_rounds_reach_the_lagged_scheduler():
    draw = scheduler.jagged_draws(1, numpy.random.default_rng(0))[0]
    cost = scheduler.sawtooth()
    hopeless = scheduler.Draw(draw.confidence, tuple(torch.zeros_like(older) for older in draw.older))
    assert scheduler.lengths_of(LaggedScheduler(cost), hopeless).sum() == 0
    assert scheduler.lengths_of(PrefixScheduler(cost), hopeless).sum() > 0


def test_padded_curve_costs_the_next_probe(tmp_path):
    (tmp_path / "a.csv").write_text("gpu_model,num_tokens,gemm_ms_all_layers_tp1\nA,1,2\nA,4,4\nA,8,5\n")
    linear, padded = scheduler.load_curves(tmp_path / "a.csv").values()
    tokens = torch.arange(1, 9)
    assert (1e3 * linear.token_curve.at(tokens))[:4].tolist() == pytest.approx([2, 2 + 2 / 3, 2 + 4 / 3, 4])
    assert (1e3 * padded.token_curve.at(tokens)).tolist() == pytest.approx([2, 4, 4, 4, 5, 5, 5, 5])
    (tmp_path / "b.csv").write_text("gpu_model,num_tokens,gemm_ms_all_layers_tp1\nA,1,2\nA,x,4\n")
    with pytest.raises(ValueError, match="line 3"):
        scheduler.load_curves(tmp_path / "b.csv")


def test_decisions_are_timed_for_every_scheduler():
    times = scheduler.time_decisions(8, 30, numpy.random.default_rng(0))
    assert {"Algorithm 1", "hull + fill", "lagged budget + top-K"} <= times.keys()
    assert all(0 < each.median_us <= each.p95_us for each in times.values())
