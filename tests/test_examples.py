"""Examples run: their code, at a small scale."""

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {"NUM_PROMPTS": 6, "NUM_REPLAYED": 2, "NUM_STEPS": 2, "NUM_TEST_PROMPTS": 2, "MAX_NEW_TOKENS": 16}


@pytest.fixture
def in_examples(monkeypatch):
    """As started from the examples' folder; the benchmarks have a `domains`, too."""
    names = ("domains", "finetune", "muon")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in names:
        sys.modules.pop(name, None)


def run_notebook(name: str, small: dict) -> dict:
    """Execute the code of a notebook with small settings; return what it left."""
    namespace: dict = {}
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        shown = json.dumps(cell["outputs"])  # no progress bars, warnings or paths of a machine
        assert cell["execution_count"] is None and len(shown) < 10_000
        assert not any(word in shown for word in ("stderr", "site-packages", "/tmp/", "/home/"))
        exec(compile("".join(cell["source"]), name, "exec"), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert small.keys() == {key for key in namespace if key.isupper()}
            namespace |= small
    return namespace


def test_the_fine_tuning_notebook_runs(in_examples, tmp_path, capsys):
    run_notebook("finetune.ipynb", SMALL | {"OUTPUT_DIR": str(tmp_path)})
    assert "| code |" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").exists()


def test_the_quickstart_notebook_gives_the_same_tokens(in_examples, capsys):
    left = run_notebook("quickstart.ipynb", {"NUM_PROMPTS": 4, "MAX_NEW_TOKENS": 24})
    assert left["assisted"] == left["plain"] and len(left["plain"]) == 24
    printed = capsys.readouterr().out
    assert "tau" in printed and "threshold" in printed


def test_the_scheduling_notebook_calibrates_profiles_and_schedules(in_examples, tmp_path, capsys, monkeypatch):
    import matplotlib

    from hf_dspark.decoding.step_costs import known_profiles

    matplotlib.use("Agg")
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    small = {"NUM_PROMPTS": 4, "NUM_TEST_PROMPTS": 3, "MAX_NEW_TOKENS": 32, "BATCH_SIZES": (1, 2), "REPETITIONS": 1}
    try:
        left = run_notebook("calibrate_and_schedule.ipynb", small | {"OUTPUT_DIR": str(tmp_path / "out")})
    finally:
        known_profiles.cache_clear()
        matplotlib.pyplot.close("all")
    assert left["report"].scaling.temperatures == left["draft"].config.sts_temperatures["sampled"]
    assert left["draft"].config.sts_temperatures.keys() == {"default", "greedy", "sampled"}
    assert (tmp_path / "out" / "config.json").exists() and list((tmp_path / "cache").glob("*.json"))
    assert (tmp_path / "out" / "reliability.png").stat().st_size > 10_000
    assert "scheduled" in capsys.readouterr().out


def test_the_sharing_notebook_writes_a_card_from_results_and_loads_it_back(in_examples, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    small = {"NUM_PROMPTS": 3, "NUM_CALIBRATION_PROMPTS": 4, "MAX_NEW_TOKENS": 24, "HUB_REPOSITORY": None}
    left = run_notebook("share.ipynb", small | {"FOLDER": str(tmp_path / "shared")})
    printed = capsys.readouterr().out
    assert "the same tokens: True" in printed and type(left["loaded"]).__module__.startswith("hf_dspark.")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert f"| {left['found'].metrics['math'].tau:.2f} |" in card and card in printed


def test_the_fine_tuning_script_runs_and_resumes(in_examples, tmp_path, capsys, monkeypatch):
    import finetune

    words = "--num_prompts 6 --replayed 2 --steps 2 --num_test_prompts 2 --max_new_tokens 16 --output_dir".split()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words, str(tmp_path)])
    finetune.main()
    assert "| math |" in capsys.readouterr().out
    finetune.main()  # answers and training are there already
    assert "| math |" in capsys.readouterr().out


def test_code_rows_are_whole_functions_cut_after_their_docstring(in_examples):
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
