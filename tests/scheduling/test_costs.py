"""What a step costs: tables, hulls, context, and SGLang's file."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy_baselines import linear_cost
from hf_dspark.scheduling.costs import Load, ThroughputTable

JAGGED = ThroughputTable((1, 8, 16, 24, 32), (100.0, 90.0, 95.0, 40.0, 42.0), 0.002, 1e-6, {"device": "a"})
SGLANG_1D = {"sample_batch_tokens": [1, 8, 64], "sample_steps_per_sec": [95.1, 94.0, 80.2], "max_batch_tokens": 64}


def seconds(cost, *tokens):
    return cost.seconds_of(np.array(tokens)).tolist()


# ---- tables


def test_table_keeps_measured_times_and_is_linear_between_them_flat_below_and_proportional_beyond():
    assert seconds(JAGGED, 1, 8, 16, 24, 32) == pytest.approx([1 / 100, 1 / 90, 1 / 95, 1 / 40, 1 / 42])
    assert seconds(JAGGED, 20, 64) == pytest.approx([(1 / 95 + 1 / 40) / 2, 2 / 42])
    assert seconds(ThroughputTable((8, 16), (10.0, 5.0)), 1, 8) == pytest.approx([0.1, 0.1])


def test_plain_step_saves_the_drafting():
    load = Load((0, 1), other_tokens=6)
    assert (load.num_requests, load.base_tokens) == (2, 8)
    assert [JAGGED.plain_seconds(each) for each in (Load(), load)] == pytest.approx([0.01 - 0.002, 1 / 90 - 0.002])
    with pytest.raises(ValueError, match="must be a part of the shortest round"):
        ThroughputTable((1, 2), (10.0, 5.0), drafting=0.1)


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [
        ((), (), "at least one"),
        ((1, 2), (1.0,), "2 token counts and 1 rates"),
        ((1, 1), (1.0, 1.0), "strictly increasing"),
        ((2, 1), (1.0, 1.0), "strictly increasing"),
        ((0, 1), (1.0, 1.0), "from 1 up"),
        ((1.5, 2), (1.0, 1.0), "whole numbers"),
        ((1, 2), (1.0, 0.0), "positive numbers, got 0.0"),
        ((1, 2), (1.0, -3.0), "positive numbers, got -3.0"),
        ((1, 2), (1.0, float("nan")), "positive numbers, got nan"),
        ((1, 2), (1.0, "2"), "positive numbers, got '2'"),
    ],
)
def test_table_refuses_what_is_no_curve(tokens, rates, message):
    with pytest.raises(ValueError, match=message):
        ThroughputTable(tokens, rates)


# ---- hulls


def brute_force_hull(cost, first, last, horizon=2000):
    """The largest convex function below the monotone curve from `first` on: the lowest of all chords over a point."""
    times = [float(value) for value in cost.seconds_of(np.arange(horizon))]
    times = [min(times[b:]) for b in range(first, horizon)]
    ends = [*range(60), horizon - first - 1]
    return [
        min(
            times[i] if i == j else times[i] + (times[j] - times[i]) * (b - i) / (j - i)
            for i in range(b + 1)
            for j in ends
            if j >= b
        )
        for b in range(last - first + 1)
    ]


@pytest.mark.parametrize("first", [1, 5, 12, 16, 20])
def test_hull_is_the_largest_convex_curve_below_the_measured_one(first):
    hull, _ = JAGGED.hull(first, 39)
    expected = brute_force_hull(JAGGED, first, 39)
    np.testing.assert_allclose(hull, expected, atol=2e-5, rtol=1e-3)  # the horizon is finite here


def test_hull_at_a_token_does_not_depend_on_where_the_window_ends():
    assert JAGGED.hull(1, 60)[1][0] == 15
    for first in (1, 7, 16, 30, 31, 32, 33, 500):
        hull, vertices = JAGGED.hull(first, first + 300)
        for length in (0, 1, 2, 5, 40):
            short, own = JAGGED.hull(first, first + length)
            np.testing.assert_allclose(short, hull[: length + 1], atol=1e-12, rtol=0)
            assert own == vertices[: len(own)] and all(vertex > length for vertex in vertices[len(own) :])


def test_hull_of_a_straight_line_is_the_line():
    line = linear_cost(0.25, 1.0, 0.0)
    np.testing.assert_allclose(line.hull(3, 50)[0], 1.0 + 0.25 * np.arange(3, 51))
    for cost, first, last in ((line, 3, 50), (JAGGED, 10**9, 10**9 + 7)):  # costs no more time or memory
        np.testing.assert_allclose(cost.hull(first, last)[0], seconds(cost, *range(first, last + 1)))
    assert pickle.loads(pickle.dumps(JAGGED)) == JAGGED


# ---- context


def test_cached_tokens_cost_what_they_add_to_each_round():
    table = ThroughputTable((1, 2), (10.0, 5.0), context_seconds=0.001)
    assert table.round_seconds(Load(context_tokens=100), 1).tolist() == pytest.approx([0.2, 0.3])


# ---- files


def test_tables_follow_sglangs_rules_and_are_read_again(tmp_path):
    path = tmp_path / "folder" / "sps.json"
    for table in (ThroughputTable(np.arange(1, 4), np.array([3.0, 2.0, 1.0])), JAGGED):
        table.save(path)
        written = json.loads(path.read_text())
        tokens, rates = written["sample_batch_tokens"], written["sample_steps_per_sec"]
        assert all(isinstance(token, int) for token in tokens) and tokens == sorted(set(tokens))
        assert len(tokens) == len(rates) and all(rate > 0 for rate in rates)
        assert written["max_batch_tokens"] >= tokens[-1] and "bias_seconds" not in written
        assert ThroughputTable.load(path).verify_tokens == tuple(table.verify_tokens)
    assert ThroughputTable.load(path) == JAGGED
    path.write_text(json.dumps(SGLANG_1D))
    ThroughputTable.load(path).save(path)
    assert list(path.parent.iterdir()) == [path]
    assert SGLANG_1D.items() <= json.loads(path.read_text()).items()


def test_a_table_is_written_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "sps.json"
    JAGGED.save(path)

    def half(file, text, encoding):
        with file.open("w") as stream:
            stream.write(text[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        ThroughputTable((1, 2), (9.0, 8.0)).save(path)
    assert ThroughputTable.load(path) == JAGGED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON object, got list"),
        ("{}", "lacks sample_batch_tokens, sample_steps_per_sec"),
        ('{"bias_seconds": 0.01}', "SGLang's additive form is not read: measure its 1-D one"),
        (json.dumps(SGLANG_1D | {"sample_batch_tokens": []}), "0 token counts and 3 rates"),
        (json.dumps(SGLANG_1D | {"sample_batch_tokens": [8, 8, 64]}), "strictly increasing"),
        (json.dumps(SGLANG_1D | {"context_seconds": -1}), "not negative, got -1"),
    ],
)
def test_broken_cost_files_are_named(content, message, tmp_path):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ThroughputTable.load(tmp_path / "cost.json")


def test_tables_are_named_by_their_origin_and_their_numbers():
    names = {
        ThroughputTable((1, 8), rates, provenance=origin).name
        for rates in ((9, 8), (9, 7))
        for origin in ({}, {"table": "a.json"})
    }
    assert len(names) == 4 and sum(name.startswith("a.json [") for name in names) == 2
    assert ThroughputTable((1, 8), (9, 8), provenance={"measured": "now"}).name in names
