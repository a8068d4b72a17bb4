"""Examples run: their code, at a small scale."""

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "NUM_PROMPTS": 6,
    "NUM_REPLAYED": 2,
    "NUM_STEPS": 2,
    "NUM_TEST_PROMPTS": 2,
    "MAX_NEW_TOKENS": 16,
}


@pytest.fixture
def in_examples(monkeypatch):
    """As started from the examples' folder."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("domains", "finetune", "muon"):
        sys.modules.pop(name, None)


def test_the_fine_tuning_notebook_runs(in_examples, tmp_path, capsys):
    cells = json.loads((EXAMPLES / "finetune.ipynb").read_text())["cells"]
    sources = [("".join(cell["source"]), cell["metadata"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict = {}
    for source, metadata in sources:
        exec(compile(source, "finetune.ipynb", "exec"), namespace)
        if "parameters" in metadata.get("tags", ()):
            assert SMALL.keys() | {"OUTPUT_DIR"} <= namespace.keys()
            namespace |= SMALL | {"OUTPUT_DIR": str(tmp_path)}
    assert "| code |" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").exists()


def test_the_fine_tuning_script_runs_and_resumes(in_examples, tmp_path, capsys, monkeypatch):
    import finetune

    words = "--num_prompts 6 --replayed 2 --steps 2 --num_test_prompts 2 --max_new_tokens 16 --output_dir".split()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words, str(tmp_path)])
    finetune.main()
    assert "| math |" in capsys.readouterr().out
    finetune.main()  # answers and training are there already
    assert "| math |" in capsys.readouterr().out


def test_code_rows_are_whole_functions_cut_behind_their_docstring(in_examples):
    from domains import code_rows

    rows = list(code_rows())
    assert len(rows) > 2000
    for row in rows[::200]:
        compile(row["prompt"] + row["completion"], "row", "exec")
        assert row["prompt"].lstrip().startswith("def ")


def test_prose_rows_keep_every_speech_in_order(in_examples, tmp_path):
    from domains import prose_rows

    speeches = [f"SPEAKER {number}:\n" + "word " * 60 for number in range(12)]
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(speeches))
    text = "".join(row["prompt"] + row["completion"] + "\n\n" for row in prose_rows(path))
    assert [f"SPEAKER {number}:" in text for number in range(9)] == [True] * 9
