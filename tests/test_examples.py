"""Examples run: their code, at a small scale."""

import json
import sys
from itertools import islice

import pytest
import torch

from tests.printed import EXAMPLES, SMALL, make_chat_target, run_notebook


@pytest.fixture
def in_examples(monkeypatch):
    """As started from the examples' folder; the benchmarks have a `domains`, too."""
    names = ("demo", "domains", "finetune", "muon")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", [*SMALL, "chat.ipynb"])
def test_notebooks_ship_with_outputs_that_hold_nothing_of_the_machine_that_made_them(name):
    path = EXAMPLES / name
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))  # run once, in order
    shown = [output for cell in cells for output in cell["outputs"]]
    assert len(shown) >= 3 and path.stat().st_size < 400_000
    assert {output["output_type"] for output in shown} <= {"stream", "execute_result", "display_data"}
    for output in shown:
        output.get("data", {}).pop("image/png", None)
    noise = ("stderr", "site-packages", "/tmp/", "/home/", "/root/", "/work/", "ipykernel", "it/s", "widget")
    assert [word for word in noise if word in json.dumps(shown)] == []


@pytest.mark.slow
def test_the_fine_tuning_notebook_runs(in_examples, tmp_path, capsys):
    run_notebook("finetune.ipynb", SMALL["finetune.ipynb"] | {"OUTPUT_DIR": str(tmp_path)})
    assert "| code |" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_the_quickstart_notebook_gives_the_same_tokens(in_examples, capsys):
    left = run_notebook("quickstart.ipynb", SMALL["quickstart.ipynb"])
    assert left["assisted"] == left["plain"] and len(left["plain"]) == 24
    printed = capsys.readouterr().out
    assert "tau" in printed and "threshold" in printed


@pytest.mark.slow
def test_the_chat_notebook_answers_as_without_the_draft(in_examples, tmp_path, capsys):
    target = tmp_path / "target"
    make_chat_target(target)
    left = run_notebook("chat.ipynb", {"TARGET": str(target), "DRAFT": "gsm8k_pair/draft", "MAX_NEW_TOKENS": 24})
    assert len(left["tokens"]) > 0 and len(left["conversation"]) == 3
    assert capsys.readouterr().out.count("with the draft") == 3


@pytest.mark.slow
def test_the_scheduling_notebook_calibrates_profiles_and_schedules(in_examples, own_cache, tmp_path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    name = "calibrate_and_schedule.ipynb"
    try:
        left = run_notebook(name, SMALL[name] | {"OUTPUT_DIR": str(tmp_path / "out")})
    finally:
        matplotlib.pyplot.close("all")
    assert left["report"].temperatures == left["draft"].config.sts_temperatures["sampled"]
    assert left["draft"].config.sts_temperatures.keys() == {"default", "greedy", "sampled"}
    assert (tmp_path / "out" / "config.json").exists() and list(own_cache.glob("*.json"))
    assert (tmp_path / "out" / "reliability.png").stat().st_size > 10_000
    assert "scheduled" in capsys.readouterr().out


@pytest.mark.slow
def test_the_sharing_notebook_writes_a_card_from_results_and_loads_it_back(in_examples, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    left = run_notebook("share.ipynb", SMALL["share.ipynb"] | {"FOLDER": str(tmp_path / "shared")})
    printed = capsys.readouterr().out
    assert "the same tokens: True" in printed and type(left["loaded"]).__module__.startswith("hf_dspark.")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert f"| {left['found'].metrics['math'].tau:.2f} |" in card and card in printed


@pytest.mark.slow
def test_the_fine_tuning_script_runs_and_resumes(in_examples, tmp_path, capsys, monkeypatch):
    import finetune

    words = "--num_prompts 6 --replayed 2 --steps 2 --num_test_prompts 2 --max_new_tokens 16 --output_dir".split()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words, str(tmp_path)])
    finetune.main()
    assert "| math |" in capsys.readouterr().out
    finetune.main()  # answers and training are there already
    assert "| math |" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_demo_counts_identical_answers_and_best_tokens_and_fails_if_one_is_wrong(
    in_examples, capsys, monkeypatch, dtype
):
    import demo

    words = ["--num_prompts", "2", "--max_new_tokens", "16", "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    demo.main()
    printed = capsys.readouterr()
    assert "of 2 (greedy, " in printed.out
    assert f"32 of 32 tokens ({demo.tolerance_of(getattr(torch, dtype))})" in printed.out
    assert "question/s" not in printed.err and "Loading weights" not in printed.err

    def one_wrong(target, prompt_ids, answer_ids, *others, **options):
        return count_best(target, prompt_ids, [*answer_ids[:-1], 9], *others, **options)

    count_best = demo.count_best
    monkeypatch.setattr(demo, "count_best", one_wrong)
    with pytest.raises(SystemExit, match="please report this"):
        demo.main()
    assert "30 of 32 tokens" in capsys.readouterr().out


def test_code_rows_are_whole_functions_cut_after_their_docstring(in_examples):
    from domains import code_rows

    rows = list(islice(code_rows(), 40))
    assert len(rows) == 40
    for row in rows[::4]:
        compile(row["prompt"] + row["completion"], "row", "exec")
        assert row["prompt"].lstrip().startswith("def ")


def test_prose_rows_keep_every_speech_in_order(in_examples, tmp_path):
    from domains import prose_rows

    speeches = [f"SPEAKER {number}:\n" + "word " * 60 for number in range(12)]
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(speeches))
    text = "".join(row["prompt"] + row["completion"] + "\n\n" for row in prose_rows(path))
    assert [f"SPEAKER {number}:" in text for number in range(9)] == [True] * 9
