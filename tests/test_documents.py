"""The documents do what they say: what they print runs, in order."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dspark
from tests.hub.loopback_hub import TOKEN, LoopbackHub
from tests.printed import LEFT_OUT, PAGES, ROOT, SMALL, SUBSTITUTES, blocks, make_checkout, substituted

# Pages whose blocks need neither minutes nor a Hub; the test of all that is printed runs the others, too.
QUICK = [page for page in PAGES[1] if not page.endswith(("training.md", "sharing.md"))]


@pytest.fixture
def checkout(own_cache, tmp_path, monkeypatch) -> list[str]:
    """A folder that looks like a checkout and may be written to; nothing is remembered in the user's cache. Returns
    prompts."""
    prompts = make_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    return prompts


def python_of(path: Path) -> list[str]:
    return [code for _, code in blocks(path.read_text(), "python")]


@pytest.mark.usefixtures("checkout")
def test_readme_runs_as_printed(capsys):
    shipped, chat = python_of(ROOT / "README.md")
    names: dict[str, object] = {}
    for block in (shipped, substituted(chat)):
        exec(block, names)
        answer, _, tau = capsys.readouterr().out.rstrip().rpartition(" ")
        assert "A pen costs 3 dollars" in answer and float(tau) > 2


@pytest.mark.slow
@pytest.mark.usefixtures("checkout")
def test_the_first_example_prints_its_answer_and_nothing_else(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(hf_dspark.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    printed = python_of(ROOT / "README.md")[0]  # as it stands: no target to download
    done = subprocess.run([sys.executable, "-c", printed], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Question: A pen costs 3 dollars.")
    own_bars = "Loading weights"  # of transformers
    assert [line for line in done.stderr.splitlines() if line and own_bars not in line] == []


@pytest.mark.slow
@pytest.mark.usefixtures("checkout")
def test_pages_of_the_manual_run_as_printed():
    names: dict[str, object] = {}
    for page in QUICK:
        for block in python_of(ROOT / page):
            exec(substituted(block), names)


def recipes() -> list:
    """The blocks of the recipes by their headings, with what each needs beside this package."""
    found = []
    for part in (ROOT / "docs" / "recipes.md").read_text().split("\n## ")[1:]:
        for _, code in blocks(part, "python"):
            packages = re.findall(r"^from (\w+)", code, re.MULTILINE) + re.findall("bitsandbytes", part)
            needed = sorted(set(packages) - set(sys.stdlib_module_names))
            found.append(pytest.param(code, needed, id=part.partition("\n")[0]))
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("code", "needed"), recipes())
def test_recipe_runs_where_its_packages_are_installed(code, needed, checkout, monkeypatch):
    for package in needed:
        pytest.importorskip(package)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, object] = {"prompts": checkout}
    exec(python_of(ROOT / "docs" / "quickstart.md")[0], names)
    exec(code, names)
    assert names["draft"].last_stats.rounds > 0


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The names that the examples of docstrings use: those of the quickstart, and prompts."""
    names = {name: getattr(hf_dspark, name) for name in hf_dspark.__all__} | {"json": json}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("checkout")
        prompts = make_checkout(folder, num_prompts=2)
        patch.chdir(folder)
        exec(python_of(ROOT / "docs" / "quickstart.md")[0], names)
    return names | {"prompts": prompts}


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("checkout")
@pytest.mark.filterwarnings("ignore:a calibration on")
@pytest.mark.parametrize("name", hf_dspark.__all__)
def test_docstring_has_an_example_that_runs(name, quickstart):
    examples = [code for _, code in blocks(inspect.getdoc(getattr(hf_dspark, name)), "python")]
    assert examples, f"{name} has no example"
    names = dict(quickstart)
    names["draft"].save_pretrained("my-draft")
    # What an example continues, and what makes it short.
    names["cost"] = hf_dspark.ThroughputTable((1, 8, 64), (95, 94, 80))
    names["draft"].decoding = hf_dspark.DecodingOptions()
    shorter = {"max_new_tokens=64": "max_new_tokens=16"}
    for code in examples:
        exec(substituted(code, SUBSTITUTES | shorter), names)
    quickstart["draft"].decoding = hf_dspark.DecodingOptions()


@pytest.mark.release
def test_all_that_is_printed_runs_in_order(tmp_path):
    """README, manual, examples of `--help` and notebooks, in one process, with a stand-in for the Hub."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    with LoopbackHub() as hub:
        environment |= {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1",
            "HF_DSPARK_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.printed", str(tmp_path / "out")],
            env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=3000,
        )  # fmt: skip
        published = set(hub.repositories)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == [], "\n".join(found["failed"])
    assert len(found["left out"]) <= 12 and set(SMALL) <= set(found["ran"])
    assert published == {"me/my-draft", "me/private-draft"}


def test_substitutes_and_what_is_left_out_are_still_printed():
    printed = "\n".join((ROOT / page).read_text() for part in PAGES for page in part)
    printed += (ROOT / "src" / "hf_dspark_cli" / "parser.py").read_text()
    printed += "".join(inspect.getdoc(getattr(hf_dspark, name)) for name in hf_dspark.__all__)
    assert [text for text in (*SUBSTITUTES, *LEFT_OUT) if text not in printed] == []


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    quickstart = python_of(ROOT / "README.md")[0].splitlines()
    assert len([line for line in quickstart if line]) <= 9


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_page_is_in_the_navigation(page):
    assert page in (ROOT / "mkdocs.yml").read_text()
