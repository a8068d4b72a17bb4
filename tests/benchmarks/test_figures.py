"""Figures and the report show what result files hold, and say what is missing."""

import copy
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from hf_dspark import ConfidenceThreshold
from hf_dspark.evaluation.evaluate import evaluate
from hf_dspark.evaluation.measurements import (
    DraftFacts,
    MissingResults,
    comparable,
    load_curves,
    measurements,
    read_result_files,
    reliabilities,
    short_policy,
    threshold_sweeps,
)
from hf_dspark.evaluation.plot_panels import distinct_labels, wilson_interval
from hf_dspark.evaluation.plots import (
    BLOCK_SIZE,
    FIGURES,
    figure_2_position_wise,
    figure_3_depth,
    figure_4_block_size,
    figure_5_threshold,
    figure_6_reliability,
    figure_8_load,
    save_figure,
)
from hf_dspark.evaluation.report import report
from hf_dspark.maths.costs import Load
from hf_dspark_cli import main

ROOT = Path(__file__).parents[2]
ROUNDS = [(3, 3, [0.9, 0.8, 0.7]), (3, 1, [0.9, 0.4, 0.9]), (2, 0, [0.3, 0.6, 0.9]), (3, 2, [0.8, 0.7, 0.2])]


def evaluation(
    layers=2, block_size=3, batch_size=1, policy="FullBlock()", speed=50.0, kind="dspark", **changes
) -> dict:
    """Return a result of the kind evaluation, of two tasks with the same rounds."""
    markov_rank = 8 if kind == "dspark" else 0
    metrics = {
        "prompts": 1, "turns": 1, "rounds": 4, "tokens": 11, "tau": 2.5, "acceptance": [0.75, 2 / 3, 0.5],
        "survival": [0.75, 0.5, 1 / 3], "reached": [4, 3, 2], "acceptance_rate": 6 / 11, "proposed_per_round": 2.75,
        "ece": [0.1, 0.2, 0.3], "ece_mean": 0.2, "brier": 0.2, "auc": 0.7,
        "calibration": [
            {"position": k, "num_rounds": 4, "ece": 0.1 * k, "brier": 0.2, "auc": None,
             "bins": [[0.25, 0.5, 1], [0.75, 0.5, 3]]}
            for k in (1, 2, 3)
        ],
        "tokens_per_second": speed, "time_to_first_token": 0.01, "peak_memory_mib": 90.0, "speedup": None,
        "seconds_per_round": {"draft": 0.002, "verify": 0.006, "rest": 0.002, "total": 0.01 + 0.001 * block_size},
    }  # fmt: skip
    proposed, accepted, confidence = (list(column) for column in zip(*ROUNDS, strict=True))
    rounds = {
        "proposed": proposed, "accepted": accepted, "confidence": confidence, "draft_seconds": [0.002] * 4,
        "verify_seconds": [0.006] * 4, "total_seconds": [0.01] * 4, "num_requests": [batch_size] * 4,
    }  # fmt: skip
    record = {"task": "math", "prompt": 0, "turn": 0, "num_prompt_tokens": 5, "num_tokens": 11,
              "rows_together": batch_size, "rounds": rounds}  # fmt: skip
    return {
        "kind": "evaluation",
        "provenance": {"command": "hf-dspark eval <tiny>", "revision": "abc", "torch": "2", "device": "a machine"},
        "target": {"name": "tiny"},
        "draft": {
            "name": f"draft-{layers}-{block_size}", "model_type": "dspark", "num_hidden_layers": layers,
            "block_size": block_size, "markov_head": "vanilla", "markov_rank": markov_rank,
        },
        "sampling": {"do_sample": False}, "policy": policy, "max_new_tokens": 8, "batch_size": batch_size,
        "tasks": {name: copy.deepcopy(metrics) for name in ("math", "code", "all")},
        "failed": [], "records": [record, record | {"task": "code"}],
    } | changes  # fmt: skip


def lines(axis) -> dict[str, list[float]]:
    """Return the heights of each named line of a panel."""
    return {line.get_label(): list(line.get_ydata()) for line in axis.get_lines() if line.get_label()[0] != "_"}


def texts(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text")))


# ---- what results hold


def test_measurements_of_every_kind_of_file_have_one_form():
    acceptance = evaluation(kind="dflash", layers=5) | {
        "kind": "acceptance",
        "domains": {"math": {"tau": 1.8, "acceptance": [0.5, 0.2, None], "rounds": 100}},
    }
    domains = {"steps": 5, "drafts": {"eagle3": {"layers": 1, "measured": {"math": {"greedy": {
        "tau": 2.0, "acceptance": [0.5, 0.5], "rounds": 8}}}}}}  # fmt: skip
    sizes = {"target": None, "regime": "greedy", "block_sizes": [
        {"kind": "dspark", "layers": 2, "block_size": 16, "draft_ms": 1, "verify_ms": 2, "total_ms": 4}]}  # fmt: skip
    found = measurements([evaluation(), acceptance, domains, sizes, {"tau": 3}])
    assert [each.draft.kind for each in found] == ["DSpark", "DSpark", "DFlash", "Eagle3", "DSpark"]
    assert found[0].draft == DraftFacts("DSpark", 2, 3, "vanilla", "draft-2-3") and found[0].reached == (4, 3, 2)
    assert found[2].reached == (100, 50, 10) and found[3].reached == (8, 4)
    assert found[4].tau is None and found[4].time.total == 0.004


def test_comparable_measurements_are_of_whole_blocks_at_the_smallest_batch():
    results = [evaluation(batch_size=4), evaluation(), evaluation(policy="PrefixScheduler"), evaluation(layers=1)]
    found = comparable(measurements(results))
    assert {(each.draft.num_layers, each.setting.policy, each.setting.batch_size) for each in found} == {
        (2, "FullBlock()", 1), (1, "FullBlock()", 1)
    }  # fmt: skip
    (only,) = {each.setting.policy for each in comparable(measurements([evaluation(policy="PrefixScheduler")]))}
    assert only == "PrefixScheduler"


def test_rounds_cut_afterwards_are_what_the_policy_would_have_verified():
    math, code = threshold_sweeps([evaluation()])
    assert (math.title.split("\n")[0], code.rows) == ("math", math.rows)
    proposed, accepted, confidence = (torch.tensor(column) for column in zip(*ROUNDS, strict=True))
    for row in math.rows:
        lengths = ConfidenceThreshold(row.threshold).plan_verify(confidence, proposed, Load([0] * len(ROUNDS)))
        kept = torch.minimum(lengths, accepted).sum().item()
        assert row.tokens_per_round == pytest.approx(1 + kept / 4)
        assert row.rejected_per_round == pytest.approx((lengths.sum().item() - kept) / 4)
    assert math.rows[0].tokens_per_round == 2.5 and math.rows[-1].acceptance_rate == 1.0


def test_policies_are_named_without_their_tables():
    assert short_policy("FullBlock()") == short_policy(None) == "whole block"
    assert short_policy("ConfidenceThreshold(threshold=0.5, cumulative=True)") == "survival threshold 0.5"
    assert (
        short_policy("SLOLimit(policy=PrefixScheduler(cost=LinearCost(1)), cost=2)") == "SLOLimit of PrefixScheduler"
    )


def test_labels_hold_no_more_than_what_tells_lines_apart():
    assert distinct_labels([("A", "x", "1"), ("A", "y", "1"), ("B", "z", "2")]) == ["A, x", "A, y", "B"]


def test_labels_name_all_machines_if_one():
    lines = [("A", "x", "here"), ("A", "x", "there"), ("B", "z", "there")]
    assert distinct_labels(lines) == ["A, here", "A, there", "B, there"]
    assert distinct_labels([]) == []


def test_intervals_stay_within_0_and_1_and_shrink_with_the_rounds():
    assert wilson_interval(1.0, 2)[1] == 1.0 and wilson_interval(0.5, 0) == (0.0, 1.0)
    low, high = wilson_interval(0.5, 10_000)
    assert 0.48 < low < 0.5 < high < 0.52


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "no result file"), ("[]", "holds a list"), ('{"kind": "wishes"}', "got 'wishes'"),
     (json.dumps(evaluation(tasks={"math": {}, "all": {}})), "no sound"),
     ('{"budget": {"knee": [{}]}}', "no sound")],
)  # fmt: skip
def test_unsound_files_are_named(tmp_path, text, complaint):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.json.*({complaint})"):
        read_result_files([tmp_path])


def test_absent_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        read_result_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"no \*\.json file"):
        read_result_files([tmp_path])


# ---- figures


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.name)
def test_a_figure_without_results_says_which_command_measures_them(kind):
    with pytest.raises(MissingResults, match=re.escape(kind.command)):
        kind.draw([])


def test_position_wise_figure_shows_each_draft_and_leaves_out_positions_never_reached():
    short = evaluation(kind="dflash")
    short["tasks"]["math"]["acceptance"] = [0.5, 0.25, None]
    figure = figure_2_position_wise([evaluation(), short])
    assert lines(figure.axes[0]) == {
        "DSpark, 2 layers": [0.75, 2 / 3, 0.5], "DFlash, 2 layers": [0.5, 0.25],
    }  # fmt: skip
    assert [axis.get_title() for axis in figure.axes] == ["math, greedy", "code, greedy"]
    assert "hf-dspark eval <tiny>" in texts(figure) and "a machine" in texts(figure)


def test_position_wise_figure_has_no_empty_panels_where_a_target_has_fewer_tasks():
    rows = [
        {"kind": "dspark", "layers": 2, "block_size": size, "regime": "greedy", "tau": {"math": 2.0},
         "acceptance": {"math": size * [0.5]}, "rounds": {"math": 90}}
        for size in (4, 7)
    ]  # fmt: skip
    figure = figure_2_position_wise([evaluation(), {"target": "other", "block_sizes": rows}])
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert all(axis.has_data() for axis in shown) and len(shown) == 4
    titles = {axis.get_title().replace("\N{NO-BREAK SPACE}", " "): axis for axis in shown}
    assert titles.keys() == {
        "tiny: math, greedy, γ = 3", "tiny: code, greedy, γ = 3", "other: math, greedy, γ = 4",
        "other: math, greedy, γ = 7",
    }  # fmt: skip
    assert list(lines(titles["other: math, greedy, γ = 4"]).values()) == [4 * [0.5]]


def test_position_wise_figure_names_only_the_results_that_it_shows():
    other = evaluation(policy="PrefixScheduler", provenance={"command": "another run", "device": "elsewhere"})
    assert "another run" not in texts(figure_2_position_wise([evaluation(), other]))


def test_depth_figure_joins_depths_and_refuses_a_single_one():
    deep = evaluation(layers=5)
    deep["tasks"]["math"]["tau"] = 3.0
    figure = figure_3_depth([deep, evaluation(), evaluation(kind="dflash", layers=5)])
    assert lines(figure.axes[0]) == {"DSpark": [2.5, 3.0], "DFlash": [2.5]}
    assert "3.00" in texts(figure)
    with pytest.raises(MissingResults, match="num_hidden_layers"):
        figure_3_depth([evaluation(), evaluation(kind="dflash", layers=5)])


def test_block_size_figure_shows_tau_and_how_much_longer_rounds_get():
    figure = figure_4_block_size([evaluation(), evaluation(block_size=10)])
    *tasks, times = figure.axes
    assert len(tasks) == 2 and lines(tasks[0]) == {"DSpark, 2 layers": [2.5, 2.5]}
    assert lines(times)["DSpark, 2 layers"] == pytest.approx([13.0, 20.0])
    assert "+54%" in texts(figure)


def test_block_size_figure_of_times_alone_has_one_panel():
    rows = [
        {"kind": "dspark", "layers": 5, "block_size": size, "draft_ms": 1, "verify_ms": 6, "total_ms": 8 + size / 4}
        for size in (4, 16)
    ]
    figure = figure_4_block_size([{"target": None, "regime": "greedy", "block_sizes": rows}])
    assert len(figure.axes) == 1 and lines(figure.axes[0])["DSpark, 5 layers"] == [9.0, 12.0]
    assert BLOCK_SIZE.title in texts(figure).replace("\n", " ")


def test_block_size_figure_shows_times_of_another_target_beside_tau():
    rows = [
        {"kind": kind, "layers": 2, "block_size": size, "regime": regime, "tau": {"math": 1 + size / 4}}
        for kind in ("dspark", "dflash") for size in (4, 7) for regime in ("greedy", "temperature 1")
    ]  # fmt: skip
    timed = [
        {"kind": "dspark", "layers": 5, "block_size": size, "draft_ms": 1, "verify_ms": 6, "total_ms": 8 + size / 4}
        for size in (4, 16)
    ]
    figure = figure_4_block_size(
        [{"target": "small", "block_sizes": rows}, {"target": "large", "regime": "greedy", "block_sizes": timed}]
    )
    greedy, times, sampled = (axis for axis in figure.axes if axis.get_visible())
    assert [axis.get_title() for axis in (greedy, sampled)] == ["math, greedy", "math, temperature 1"]
    assert lines(greedy) == dict.fromkeys(("DSpark, 2 layers", "DFlash, 2 layers"), [2.0, 2.75])
    assert lines(times)["DSpark, 5 layers"] == [9.0, 12.0] and "large" in times.get_title()
    assert (list(greedy.get_xticks()), list(times.get_xticks())) == ([4, 7], [4, 16])


def test_threshold_figure_stacks_rejected_drafts_on_tokens():
    figure = figure_5_threshold([evaluation()])
    kept, rejected = figure.axes[0].containers[0], figure.axes[0].containers[1]
    assert [bar.get_height() for bar in kept][0] == 2.5
    assert [bar.get_y() for bar in rejected] == [bar.get_height() for bar in kept]
    assert next(iter(lines(figure.axes[2]).values()))[0] == pytest.approx(100 * 6 / 11)


def test_reliability_figure_shows_stored_bins_of_every_position():
    calibration = evaluation() | {"kind": "calibration", "domain": "poems"}
    bins = evaluation()["tasks"]["all"]["calibration"]
    figure = figure_6_reliability([calibration | {"raw": bins, "calibrated": bins}])
    assert len(figure.axes) == 3 and "poems" in figure.axes[0].get_ylabel()
    assert lines(figure.axes[0]) == {"raw": [0.5, 0.5], "calibrated": [0.5, 0.5]}
    assert "ECE 30.0 → 30.0 %" in figure.axes[2].get_title()


def test_load_figure_relates_drafting_to_plain_decoding_at_the_same_batch():
    plain = [evaluation(batch_size=size, speed=25.0 * size, draft={}, policy=None) for size in (1, 4)]
    for result in plain:
        for metrics in result["tasks"].values():
            metrics |= {"rounds": 0, "tau": None, "proposed_per_round": None, "seconds_per_round": None}
        result["records"] = []
    drafted = [evaluation(batch_size=size, speed=50.0) for size in (4, 1)]
    (curves,) = load_curves([*plain, *drafted])
    assert [point.load for point in curves.policies["whole block"]] == [1, 4]
    figure = figure_8_load([*plain, *drafted])
    ratios = [list(line.get_ydata()) for line in figure.axes[1].get_lines()]
    assert [2.0, 0.5] in ratios
    with pytest.raises(MissingResults):
        figure_8_load(drafted[:1])


def test_evaluations_of_other_tasks_or_weights_are_not_dropped():
    math, code = (evaluation() for _ in range(2))
    for result, other in ((math, "code"), (code, "math")):
        del result["tasks"][other]
        result["records"] = [record for record in result["records"] if record["task"] != other]
    assert {sweep.title.split("\n")[0] for sweep in threshold_sweeps([math, code])} == {"math", "code"}
    assert [part.title.split(", ")[-1] for part in reliabilities([math, code])] == ["math", "code"]
    before, after = (evaluation(draft=evaluation()["draft"] | {"weights": hash_}) for hash_ in ("a" * 64, "b" * 64))
    assert len(comparable(measurements([before, after]))) == 4
    assert "weights aaaaaaaa" in texts(figure_2_position_wise([before, after]))


def test_load_is_how_many_rows_were_decoded_together_and_not_how_many_were_asked_for():
    drafted = [evaluation(batch_size=size) for size in (1, 4, 64)]
    plain = evaluation(batch_size=64, draft={}, policy=None)
    for result in (drafted[2], plain):
        for record in result["records"]:
            record["rows_together"] = 16
    (curves,) = load_curves([*drafted, plain])
    assert [point.load for point in curves.policies["whole block"]] == [1, 4, 16]
    assert [point.load for point in curves.policies["autoregressive"]] == [16]


def test_throughputs_of_other_work_are_no_curve():
    drafted = [evaluation(batch_size=1), evaluation(batch_size=4, target={"name": "tiny", "dtype": "torch.bfloat16"})]
    assert load_curves(drafted) == []


def test_saved_figures_have_the_same_bytes_every_time(tmp_path):
    first, second = (save_figure(figure_2_position_wise([evaluation()]), tmp_path / name) for name in ("a.b", "c"))
    assert [path.name for path in first] == ["a.b.png", "a.b.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG") and b"dc:date" not in first[1].read_bytes()


def test_every_figure_that_the_documents_show_regenerates_from_the_results_in_the_repository():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "model_cards").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\breport/(\w+)\.(?:png|svg)", page.read_text())}
    drawn = {kind.name: kind for kind in FIGURES}
    results = [file.content for file in read_result_files([ROOT / "benchmarks" / "results"])]
    assert len(shown) >= 5 and shown <= drawn.keys()
    for name in shown:
        assert drawn[name].draw(results).axes
        assert (ROOT / "benchmarks" / "report" / f"{name}.png").exists()


def test_report_in_the_repository_is_that_of_the_results_beside_it(tmp_path, monkeypatch):
    def unrendered(figure, path):
        path.with_suffix(".svg").write_text("<svg/>")
        return path.with_suffix(".png"), path.with_suffix(".svg")

    monkeypatch.setattr("hf_dspark.evaluation.report.save_figure", unrendered)
    report(ROOT / "benchmarks" / "results", tmp_path)
    kept = ROOT / "benchmarks" / "report" / "report.md"
    assert (tmp_path / "report.md").read_text() == kept.read_text(), "make figures has to run again"


def test_readme_compares_as_the_result_file_says():
    result = json.loads((ROOT / "benchmarks" / "results" / "compare_7350.json").read_text())
    cells = {(cell["batch_size"], cell["temperature"]): cell["methods"] for cell in result["cells"]}
    readme = (ROOT / "README.md").read_text()

    def pair(batch_size, name, form):
        both = [cells[batch_size, temperature][method].get(name) for temperature in (0.0, 1.0)]
        return "–" if None in both else " \\| ".join(form.format(value) for value in both)

    for method in result["methods"]:
        speedups = [pair(size, "speedup", "{:.2f}x") for size in (1, 4, 16)]
        row = " | ".join([method, pair(1, "tokens_per_pass", "{:.2f}"), *speedups])
        assert f"| {row} |" in readme.replace("**", "")


# ---- the report


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "eval.json").write_text(json.dumps(evaluation()))
    (tmp_path / "results" / "other.json").write_text('{"provenance": {"command": "python other.py"}, "cells": {}}')
    return tmp_path


def test_report_names_what_is_missing_and_where_numbers_come_from(folder):
    written = report(folder / "results", folder / "out")
    page = written.page.read_text()
    assert {path.stem for path in written.figures} == {
        "figure_2_position_wise", "figure_5_threshold", "figure_6_reliability",
    }  # fmt: skip
    assert all(path.exists() and path.with_suffix(".svg").exists() for path in written.figures)
    assert page.count("<img ") == 3 and set(re.findall(r'src="(.{19})', page)) == {"data:image/svg+xml;"}
    assert len(written.missing) == len(FIGURES) - 3 and "with different num_hidden_layers" in page
    assert "hf-dspark eval &lt;tiny&gt;" in page and "<tiny>" not in page
    assert "results/other.json" in page and "python other.py" in page
    beside = (folder / "out" / "report.md").read_text()
    assert "![" in beside and "| DSpark, 2 layers | tiny | greedy | math | 2.50 | .75 .67 .50 |" in beside


def test_report_without_any_known_result_is_refused_before_anything_is_written(folder):
    with pytest.raises(ValueError, match=r"none of results/other\.json"):
        report(folder / "results" / "other.json", folder / "out")
    assert not (folder / "out").exists()


def test_report_command_draws_refuses_to_replace_and_replaces_when_told(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = shlex.split("report results/eval.json --output_dir out --json")
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert Path(found["page"]).exists() and len(found["figures"]) == 3
    assert main(words) == 2 and "give --overwrite" in capsys.readouterr().out
    assert main(["report", "nowhere", "--output_dir", "other"]) == 2 and not Path("other").exists()


def test_chain_from_a_tiny_pair_to_every_figure_of_the_paper(tmp_path, make_target, make_draft, chat_tokenizer):
    target = make_target()
    tasks = {"questions": [{"turns": ["what is up", "not much"]}, "what is"], "answers": ["not much", "what"]}
    for name, layers, block_size, batch_size in (
        ("a", 2, 4, 1), ("b", 2, 4, 2), ("c", 1, 4, 1), ("d", 2, 6, 1),
    ):  # fmt: skip
        draft = make_draft(target, num_hidden_layers=layers, block_size=block_size)
        evaluate(
            target, draft, tasks, chat_tokenizer, tmp_path / "results" / f"{name}.json", batch_size=batch_size,
            progress=False, max_new_tokens=12, do_sample=False,
        )  # fmt: skip
    written = report(tmp_path / "results", tmp_path / "out")
    assert {path.stem for path in written.figures} == {kind.name for kind in FIGURES if kind.name.startswith("figure")}
    page = written.page.read_text()
    for file in sorted((tmp_path / "results").iterdir()):
        tau = json.loads(file.read_text())["tasks"]["questions"]["tau"]
        assert f"<td>questions</td><td>{tau:.2f}</td>" in page
    assert str(tmp_path) not in page
