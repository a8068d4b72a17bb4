"""Figures and tables show what the result files hold; the documents hold no number typed by hand."""

import importlib
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


def test_saved_figures_have_the_same_bytes_every_time(tmp_path):
    first, second = (style.save(draw.FIGURES["figure_7_frontier"](), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes() and first.read_bytes().startswith(b"\x89PNG")


def test_documents_show_figures_that_are_drawn_here():
    documents = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found = {name for page in documents for name in re.findall(r"\breport/(\w+)\.png", page.read_text("utf-8"))}
    drawn = {path.stem for path in (ROOT / "benchmarks" / "report").iterdir()}
    assert found == set(draw.FIGURES) == drawn
    assert {name.split("_")[1] for name in drawn if name.startswith("figure_")} == set("25678")


def test_pages_hold_the_tables_of_the_result_files():
    pages = list(tables.pages())
    assert ROOT / "benchmarks" / "README.md" in pages
    for page in pages:
        text = page.read_text("utf-8")
        assert tables.refreshed(text, page) == text, f"{page.name}: run make figures"


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_have_full_rows_one_number_in_a_cell_and_are_shown(name):
    head, *rows = tables.TABLES[name].make()
    assert rows and all(len(row) == len(head) for row in rows)
    assert not any("|" in str(cell) or " + " in str(cell) for row in rows for cell in row)
    assert any(f"<!-- table: {name} -->" in page.read_text("utf-8") for page in tables.pages())


def test_every_result_file_is_read_by_a_table_or_a_figure():
    code = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    read = {file for table in tables.TABLES.values() for file in table.files} | set(
        re.findall(r'"(\w+)(?:\.json)?"', code)
    )
    others = {"families"}  # the manual's table of families is made of it
    assert {path.stem for path in tables.RESULTS.glob("*.json")} - read <= others


def test_what_the_page_says_of_all_cells_holds_for_the_files():
    for name in ("compare_7350", "compare_native_amx", *tables.TABLES["long_prompts"].files):
        for cell in tables.load(name)["cells"]:
            assert cell["methods"]["DSpark, scheduled"]["speedup"] >= 1
            for part in cell["methods"].values():
                assert part.get("identical_rows") in (None, part.get("rows"))
