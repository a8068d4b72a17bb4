"""The simulator and the scheduler comparison: conservation, times by hand, files, reference outcomes."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from benchmarks.policy_baselines import linear_cost
from hf_dspark.scheduling.policies import ConfidenceThreshold, FullBlock

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
simulator, scheduler = (importlib.import_module(name) for name in ("simulator", "scheduler"))

# A plain step of one request takes 11 ms, one of R requests 10 + R ms; drafting adds 2 ms.
COST = linear_cost(1e-3, 0.01, 2e-3)
PLAIN = simulator.NeverDraft()


def recording(accepted, block_size=7):
    """One request per list of accepted counts; all confidences are .8."""
    return simulator.Recording.of(
        [(torch.full((len(counts), block_size), 0.8), torch.tensor(counts)) for counts in accepted]
    )


def simulated(wanted, accepted, policy, cap=8, max_drafts=7):
    """Serve requests, given as time and number of tokens, from recorded rounds of one request."""
    arrivals = [simulator.Arrival(seconds, 0, tokens) for seconds, tokens in wanted]
    contender = simulator.Contender("one", policy, max_drafts)
    return simulator.simulate(arrivals, recording([accepted]), contender, COST, max_requests=cap)


def synthetic(seed=0):
    rng = numpy.random.default_rng(seed)
    return simulator.synthetic_recording(rng.uniform(0.5, 0.95, 10), 12.0, 7, 30, rng)


@pytest.mark.parametrize("contender", simulator.contenders(COST, 7, 0.05), ids=lambda contender: contender.name)
def test_every_request_gets_exactly_its_tokens_under_every_policy(contender):
    rng = numpy.random.default_rng(len(contender.name))
    wanted = [simulator.Arrival(0.05 * place, 0, int(rng.integers(1, 30))) for place in range(25)]
    run = simulator.simulate(wanted, synthetic(), contender, COST, max_requests=6)
    assert sorted((each.request, each.tokens) for each in run.finished) == [
        (place, arrival.output_tokens) for place, arrival in enumerate(wanted)
    ]
    assert sum(each.new_tokens for each in run.rounds) == sum(each.output_tokens for each in wanted)
    assert max(each.requests for each in run.rounds) <= 6
    assert all(each.requests <= each.new_tokens <= each.verify_tokens for each in run.rounds)
    assert all(each.arrived <= each.admitted < each.ended for each in run.finished)


def test_autoregressive_throughput_by_hand():
    summary = simulator.summarize(simulated([(0.0, 10), (0.0, 10)], [3], PLAIN), 0.05)
    assert summary.tokens_per_second == pytest.approx(20 / (10 * 0.012))
    assert (summary.drafted_share, summary.tau, summary.mean_verified) == (0.0, 1.0, 1.0)
    assert summary.mean_tpot_ms == pytest.approx(12.0)


def test_rounds_are_replayed_in_order_and_start_over():
    run = simulated([(0.0, 15)], [2, 0, 4], FullBlock(), cap=1)
    assert [each.new_tokens for each in run.rounds] == [3, 1, 5, 3, 1, 2]  # the last one is cut to what is left
    # 10 ms + 1 ms for each of the 8 tokens + 2 ms of drafting; at most the tokens still wanted are verified.
    assert [round(1e3 * each.seconds) for each in run.rounds] == [20, 20, 20, 18, 15, 14]


def test_skipped_rounds_use_no_recorded_round():
    class Alternate(FullBlock):
        def plan_draft(self, load):
            self.__dict__["turn"] = not self.__dict__.get("turn", False)
            return self.__dict__["turn"]

    run = simulated([(0.0, 10)], [2, 3], Alternate(), cap=1)
    assert [each.new_tokens for each in run.rounds] == [3, 1, 4, 1, 1]


def test_verified_lengths_cut_what_is_accepted():
    run = simulated([(0.0, 6)], [5], FullBlock(), cap=1, max_drafts=1)
    assert [(each.verify_tokens, each.new_tokens) for each in run.rounds] == [(2, 2)] * 3
    run = simulated([(0.0, 2)], [5], ConfidenceThreshold(0.9), cap=1)
    assert [(each.verify_tokens, each.new_tokens, each.drafted) for each in run.rounds] == [(1, 1, True)] * 2


def test_slo_attainment_by_hand():
    # Alone at 11 ms for 4 tokens; then two requests share steps of 12 ms.
    run = simulated([(0.0, 4), (1.0, 4), (1.0, 4)], [0], PLAIN, cap=4)
    assert [round(1e3 * each.tpot_seconds, 6) for each in run.finished] == [11.0, 12.0, 12.0]
    for limit, attained in ((0.0115, 1 / 3), (0.0125, 1.0), (0.0105, 0.0)):
        assert simulator.summarize(run, limit).slo_attainment == pytest.approx(attained)
    assert [(each.least, each.most) for each in simulator.summarize(run, 0.01).by_concurrency] == [(1, 1), (2, 2)]


def test_frontier_by_hand():
    found = simulator.frontier(recording([[3]]), COST, [1, 10], rounds=7)
    assert [point["tokens_per_second"] for point in found["autoregressive"]] == pytest.approx([1 / 0.011, 10 / 0.02])
    assert [point["per_user"] for point in found["autoregressive"]] == pytest.approx([1 / 0.011, 1 / 0.02])
    rates = [point["tokens_per_second"] for point in found["full block"]]
    assert rates == pytest.approx([4 / (0.01 + 8e-3 + 2e-3), 40 / (0.01 + 80e-3 + 2e-3)])


def test_time_limit_is_that_of_plain_decoding_at_the_first_rate(tmp_path):
    (tmp_path / "a.csv").write_text("Timestamp\n" + "\n".join(str(5 * place) for place in range(6)) + "\n")
    rounds = [{"confidence": [[0.9, 0.5]], "accepted": [1]}]
    (tmp_path / "rounds.json").write_text(json.dumps({"block_size": 2, "requests": rounds}))
    options = argparse.Namespace(
        trace=tmp_path / "a.csv", rounds=tmp_path / "rounds.json", table=None, curves=None, curve=["x"], rates=[1.0],
        num_requests=6, max_requests=4, slo_scale=1.0, mean_context=1.0, mean_output=1.0,
    )  # fmt: skip
    found = simulator.trace(options)
    assert found["tpot_ms"] == pytest.approx(20.03) and found["cost"] == "line"
    assert found["results"][0]["policies"]["autoregressive"]["slo_attainment"] == 1.0


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


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "timestamp_ms,input_length,output_length\n0,1,2\n5,x,3\n", "a.csv, line 3: "),
        ("a.csv", "timestamp_ms,input_length,output_length\n0,1,0\n", "a.csv, line 2: "),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "a.csv, line 2: "),
        ("a.csv", "when\n3\n", "a.csv, line 2: "),
        ("a.csv", "Timestamp\n1\nnan\n", "a.csv, line 3: "),
        ("a.csv", "Timestamp\n", "no arrivals"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\nnothing\n', "a.jsonl, line 2: "),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1}\n', "a.jsonl, line 1: "),
    ],
)
def test_bad_trace_is_named_with_its_line(name, content, complaint, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path / name)
    with pytest.raises(ValueError, match="rate must be a positive number"):
        load(tmp_path / name, rate=0.0)


@pytest.mark.parametrize(
    ("block_size", "request_", "message"),
    [
        (3, {"confidence": [[0.9, 0.5]], "accepted": [1]}, "request 0: expected"),
        (2, {"confidence": [[0.9, 1.5]], "accepted": [1]}, r"\[0, 1\]"),
        (2, {"confidence": [[0.9, 0.5]], "accepted": [3]}, r"0\.\.2"),
        (2, None, "at least one"),
    ],
)
def test_bad_recording_is_refused(block_size, request_, message, tmp_path):
    content = {"block_size": block_size, "requests": [request_] if request_ else []}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        simulator.load_rounds(tmp_path / "a.json")


def test_curves_are_linear_or_padded_and_drafting_is_a_share_of_the_shortest_step(tmp_path):
    (tmp_path / "a.csv").write_text("gpu_model,num_tokens,gemm_ms_all_layers_tp1\nA,1,2\nA,4,4\nA,8,5\n")
    linear, padded = scheduler.jagged_curves(tmp_path / "a.csv").values()
    tokens = torch.arange(1, 9)
    assert (1e3 * linear.curve.at(tokens))[:4].tolist() == pytest.approx([2, 2 + 2 / 3, 2 + 4 / 3, 4])
    assert (1e3 * padded.curve.at(tokens)).tolist() == pytest.approx([2, 4, 4, 4, 5, 5, 5, 5])
    (drafted,) = simulator.load_curves(tmp_path / "a.csv", draft_share=0.5).values()
    assert drafted.drafting == 0.001 and 1 / drafted.steps_per_second[0] == pytest.approx(0.003)
    (tmp_path / "b.csv").write_text("gpu_model,num_tokens,gemm_ms_all_layers_tp1\nA,1,2\nA,x,4\n")
    with pytest.raises(ValueError, match="line 3"):
        simulator.load_curves(tmp_path / "b.csv")


@pytest.mark.parametrize(("name", "requests"), [("knee", 100), ("knee", 256), ("line", 64), ("line", 256)])
def test_budget_against_concurrency(name, requests):
    row = scheduler.reference_budget(name, requests, 2048, numpy.random.default_rng(0))
    assert abs(row.relative_deviation) <= 0.03
    assert row.tokens_per_second["Algorithm 1"] > row.tokens_per_second["autoregressive"]
    assert row.tokens_per_second["Algorithm 1"] == pytest.approx(row.tokens_per_second["oracle"])


def test_schedulers_on_jagged_curves():
    rng = numpy.random.default_rng(0)
    drawn = scheduler.jagged_draws(60, rng), scheduler.sawtooth()
    recorded = scheduler.recorded_draws(synthetic(), [8, 40, 100] * 10, rng), scheduler.sawtooth(bucket=32)
    for draws, cost in (drawn, recorded):
        relative = scheduler.relative_throughput(draws, cost)
        assert relative["hull + fill"] >= 0.92 and relative["lagged budget + top-K"] >= 0.99
        assert relative["Algorithm 1"] < relative["hull + fill"]


def test_recorded_draws_hold_the_rounds_before_them():
    confidence = torch.arange(5.0).div(10)[:, None].expand(5, 2)
    short = simulator.Recording.of([(confidence[:2], torch.zeros(2).long()), (confidence, torch.zeros(5).long())])
    for draw in scheduler.recorded_draws(short, [20], numpy.random.default_rng(0)):
        assert torch.allclose(draw.older[0], draw.confidence - 0.2)
        assert torch.allclose(draw.older[1], draw.confidence - 0.1)
    with pytest.raises(ValueError, match="more than 2 rounds"):
        scheduler.recorded_draws(recording([[1, 1]]), [3], numpy.random.default_rng(0))
