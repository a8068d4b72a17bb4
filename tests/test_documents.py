"""The documents do what they say: their Python runs as printed, in order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages whose blocks continue each other. Those of training and sharing need data, hours or the Hub.
RUN_IN_ORDER = ("quickstart", "batches", "scheduling", "measuring", "cpu")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a checkout and may be written to; nothing is remembered in the user's cache."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.usefixtures("checkout")
def test_readme_runs_as_printed(capsys):
    exec(blocks(ROOT / "README.md")[0], {})
    answer, _, tau = capsys.readouterr().out.rstrip().rpartition(" ")
    assert "A pen costs 3 dollars" in answer and float(tau) > 2


@pytest.mark.usefixtures("checkout")
def test_pages_of_the_manual_run_as_printed():
    names: dict[str, object] = {}
    for page in RUN_IN_ORDER:
        for block in blocks(ROOT / "docs" / f"{page}.md"):
            exec(block, names)


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    quickstart = blocks(ROOT / "README.md")[0].splitlines()
    assert len([line for line in quickstart if line]) <= 9


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_page_is_in_the_navigation(page):
    assert page in (ROOT / "mkdocs.yml").read_text()
