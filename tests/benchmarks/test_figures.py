"""Figures and tables show what the result files hold; the documents hold no number typed by hand."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "figures"))
draw, style, tables = (importlib.import_module(name) for name in ("draw", "style", "tables"))
MACHINE_WORDS = re.compile(r"avx|amx_|torch|revision|python ")


@pytest.fixture(scope="module")
def figures():
    drawn = {name: make() for name, make in draw.FIGURES.items()}
    yield drawn
    style.pyplot.close("all")


@pytest.mark.parametrize("name", draw.FIGURES)
def test_figures_have_a_message_a_footnote_and_no_empty_panel(name, figures):
    figure = figures[name]
    assert figure.axes and all(axis.has_data() for axis in figure.axes)
    assert figure.get_suptitle() and figure.get_supxlabel()
    texts = figure.findobj(lambda part: hasattr(part, "get_text"))
    assert not any(MACHINE_WORDS.search(text.get_text()) for text in texts)
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert all(len(text) < 35 for text in legends) and len(set(legends)) == len(legends)


def test_position_wise_figure_shows_what_was_measured_and_reached_often_enough(figures):
    (axis, *_) = figures["figure_2_position_wise"].axes
    measured = style.load("domains")["drafts"]["dflash_5"]["measured"]["math"]["temperature 1"]
    (shown,) = (list(line.get_ydata()) for line in axis.get_lines() if line.get_label() == "DFlash, 5 layers")
    assert shown == measured["acceptance"][: len(shown)] and len(shown) < len(measured["acceptance"])


def test_threshold_figure_stacks_rejected_drafts_on_tokens(figures):
    axis = figures["figure_5_threshold"].axes[0]
    row = style.load("threshold_sweep")["regimes"]["greedy"][0]
    kept, rejected = (container[0] for container in axis.containers[:2])
    assert kept.get_height() == row["tokens_per_round"] == rejected.get_y()
    assert rejected.get_height() == row["rejected_per_round"]


def test_frontier_scheduled_is_never_below_whole_blocks_in_throughput():
    for points in style.load("frontier")["machines"].values():
        for scheduled, whole in zip(points["scheduled"], points["full block"], strict=True):
            assert scheduled["tokens_per_second"] >= 0.999 * whole["tokens_per_second"]
            assert scheduled["per_user"] == pytest.approx(scheduled["tokens_per_second"] / scheduled["requests"])


def test_methods_have_one_colour_in_all_figures(figures):
    seen: dict[str, set[str]] = {}
    for figure in figures.values():
        for axis in figure.axes:
            for line in axis.get_lines():
                kind = line.get_label().split(",")[0]
                seen.setdefault(kind, set()).add(line.get_color())
    for kind in ("DSpark", "DFlash", "Eagle3"):
        assert seen[kind] == {style.METHODS[kind]}


def test_saved_figures_have_the_same_bytes_every_time(tmp_path):
    first, second = (style.save(draw.FIGURES["speedups"](), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes() and first.read_bytes().startswith(b"\x89PNG")


def test_documents_show_figures_that_are_drawn_here():
    documents = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "model_cards").glob("*.md")]
    documents += (ROOT / "docs").rglob("*.md")
    found = {name for page in documents for name in re.findall(r"\breport/(\w+)\.png", page.read_text("utf-8"))}
    drawn = {path.stem for path in (ROOT / "benchmarks" / "report").iterdir()}
    assert len(found) >= 5 and found <= set(draw.FIGURES) == drawn
    assert {name.split("_")[1] for name in drawn if name.startswith("figure_")} == set("2345678")


def test_pages_hold_the_tables_of_the_result_files():
    pages = tables.pages()
    assert ROOT / "benchmarks" / "README.md" in pages
    for page in pages:
        text = page.read_text("utf-8")
        assert tables.refreshed(text, page) == text, f"{page.name}: run make figures"


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_have_full_rows_one_number_in_a_cell_and_sources_that_are_there(name):
    table = tables.TABLES[name]()
    assert table.rows and all(len(row) == len(table.head) for row in table.rows)
    cells = [str(cell) for row in table.rows for cell in row]
    assert not any("|" in cell or " + " in cell for cell in cells)
    assert all(tables.path_of(file).exists() for file in table.files)


def test_what_the_page_says_of_all_cells_holds_for_the_files():
    for name in ("compare_7350", "compare_native_amx", *tables.long_prompts().files):
        for cell in tables.load(name)["cells"]:
            assert cell["methods"]["DSpark, scheduled"]["speedup"] >= 1
            for part in cell["methods"].values():
                assert part.get("identical_rows") in (None, part.get("rows"))


def test_page_asking_for_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="there is no table 'wishes'"):
        tables.refreshed("<!-- table: wishes -->\n<!-- end of table -->", ROOT / "README.md")
    assert "](../benchmarks/results/speed.json)" in tables.origin("speed", ROOT / "docs" / "cpu.md")


def test_readme_compares_the_default_policy_with_the_faster_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    cell = {"temperature": 0.0, "tau": 4.0, "tokens_per_second": 150.0, "speedup": 3.0, "identical_outputs": 50}
    cells = [cell | {"tau": 9.0}, cell | {"speedup_same_kernels": 2.0}]
    (tmp_path / "speed.json").write_text(json.dumps({"cells": cells, "num_prompts": 50}))
    assert tables.readme().rows == [["greedy", "4.00", "75", "150", "**2.00**", "50 of 50"]]


def test_stronger_baseline_comes_first_and_is_a_dash_where_it_was_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    cell = {"geometry": "qwen3-4b", "rows": 8, "regime": "greedy", "speedup": 3.0, "tau": 3.5}
    origin = {"provenance": {"device": "NVIDIA H200", "command": "python loop.py"}}
    content = origin | {"cells": [cell, cell | {"rows": 32, "speedup_same_kernels": 2.5}]}
    (tmp_path / "loop_4b_a.json").write_text(json.dumps(content))
    first, second = tables.larger_models().rows
    assert first == ["Qwen3-4B", "NVIDIA H200", 8, "–", "–", "3.00", "–", "3.50"]
    assert second[3:6] == ["2.50", "–", "3.00"]
