"""`hf-dspark`: what every command does with a tiny pair, and what it says about models and files that are wrong."""

import io
import json
import runpy
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_dspark import DSparkDraftModel, Eagle3DraftModel
from hf_dspark.data.prompts import SUITES
from hf_dspark.measuring import decode_prompts as driver
from hf_dspark.measuring.results import read_results
from hf_dspark.measuring.timed_decoding import Answer
from hf_dspark.scheduling.rounds import Rounds, RoundSeconds
from hf_dspark_cli import Console, _full_disk, main, train
from hf_dspark_cli.generate import SEVERAL_KINDS, _choice
from hf_dspark_cli.parser import parse
from tests.measuring.interruption import interrupt_third_call

PAIR = "--target target --draft draft --dtype float32"
TRAIN = (
    "train --target target --max_steps 2 --save_steps 1 --num_anchors 4 --per_device_train_batch_size 2 --use_cpu "
    "--num_hidden_layers 1 --target_layer_ids 0 2 --block_size 3 --markov_rank 4 --json"
)
TUNE = "train --target target --draft draft --max_steps 2 --num_anchors 4 --use_cpu --json"


@pytest.fixture(autouse=True)
def folders(own_cache, tmp_path, make_target, make_draft, chat_tokenizer, monkeypatch):
    """A tiny pair on disk, in the working folder; its tokenizer has a chat template."""
    monkeypatch.chdir(tmp_path)
    target = make_target()
    target.save_pretrained("target")
    chat_tokenizer.save_pretrained("target")
    make_draft(target).save_pretrained("draft")
    Path("prompts.jsonl").write_text('{"prompt": "what is up"}\n"what is"\n{"turns": ["what is up"]}\n')
    return tmp_path


@pytest.fixture
def answer(capsys):
    """Run a command that succeeds; return its JSON document, which is all of stdout."""

    def run_it(words: str) -> dict:
        capsys.readouterr()
        assert main(shlex.split(f"{words} --json")) == 0
        return json.loads(capsys.readouterr().out)

    return run_it


@pytest.fixture
def refusal(capsys):
    """Run a command that fails; return the one line that it says in the end."""

    def run_it(words: str, code: int = 2) -> str:
        capsys.readouterr()
        try:
            assert main(shlex.split(words)) == code
        except SystemExit as stop:
            assert stop.code == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        line = printed.err.rstrip("\n").split("\n")[-1]
        assert line.startswith(f"hf-dspark {words.split()[0]}: ")
        return line

    return run_it


def test_generate_answers_prompts_and_says_how(answer):
    found = answer(f"generate {PAIR} --temperature 0 --max_new_tokens 12 'what is up' 'much'")
    assert len(found["answers"]) == 2
    assert [len(part["token_ids"]) for part in found["answers"]] == [12, 12]
    assert found["tokens"] == 24 and found["rounds"] > 0 and found["tau"] >= 1 and found["seconds"] > 0
    assert found["sampling"] == {"do_sample": False, "max_new_tokens": 12}
    words = f"generate {PAIR} --policy threshold=0.5 --max_new_tokens 4 up"
    assert answer(words)["policy"]["threshold"] == 0.5


@pytest.mark.slow
def test_a_race_compares_all_ways_on_the_same_prompts(answer, capsys):
    raced = f"race {PAIR.removeprefix('--target ')} --max_new_tokens"
    found = answer(f"{raced} 12 --temperature 0 'what is up' 'much'")
    names = ["plain", "transformers' prompt lookup", "prompt lookup", "draft, whole blocks", "draft, by default"]
    assert list(found["ways"]) == names and found["fastest"] in names
    for name, way in found["ways"].items():
        assert way["turns"] == 2 and way["tokens"] == 24 and way["speedup"]["identical"] == 2
        assert (way["tau"] is not None) == (name in names[2:])
    assert list(found["chosen"]) == names[2::2] and "plain steps" in found["chosen"]["draft, by default"]
    assert found["ways"]["plain"]["speedup"]["ratio_of_medians"] == 1
    sampled = answer(f"{raced} 4 --temperature 1 --prompts_file prompts.jsonl --num_prompts 1")
    assert {way["speedup"]["identical"] for way in sampled["ways"].values()} == {None}
    assert main(shlex.split(f"{raced} 4 --temperature 0 much")) == 0
    table, _, verdict = capsys.readouterr().out.rstrip().rpartition("\n\n")
    assert table.count("\n") == 6 and "1 of 1" in table and all(len(line) < 120 for line in table.split("\n"))
    assert verdict.startswith("prompt lookup: ") and "\nfastest: " in verdict


def test_prompts_of_a_race_may_follow_options_but_not_a_file(refusal):
    options = parse(shlex.split("race target --seed 1 one two --quiet three"))
    assert (options.target, options.prompts) == ("target", ["one", "two", "three"])
    assert "unrecognized arguments: much" in refusal("race target --prompts_file prompts.jsonl --seed 1 much")
    for command in "race target", f"generate {PAIR}":
        assert "is a file: pass it as --prompts_file prompts.jsonl" in refusal(f"{command} prompts.jsonl")


@pytest.mark.parametrize(
    ("proposed", "said"),
    [
        ([0, 0, 0], "no drafts"),
        ([3, 0, 0], "In the others none was expected to pay"),
        ([3, 3, 4], "3.3 draft tokens in 100%"),
    ],
)
def test_a_race_says_what_the_scheduler_sent(proposed, said):
    rounds = Rounds(
        request_ids=[0] * 3, proposed=proposed, depths=[min(each, 3) for each in proposed], accepted=[0] * 3,
        committed=[2] * 3, confidence=[None] * 3, seconds=[RoundSeconds(1, 0.0, 0.1, 0.2)] * 3,
    )  # fmt: skip
    plain = Answer("", 0, 0, token_ids=[5] * 10, seconds=1.0)
    choice = _choice([Answer("", 0, 0, rounds=rounds, plain=plain)])
    assert said in choice and ("took 2.00 plain steps" in choice) == any(proposed)


def test_a_race_without_a_draft_looks_for_one_and_without_prompts_has_some(answer, monkeypatch):
    monkeypatch.setattr(
        "hf_dspark.hub.repository.find_drafts", lambda *_: ("here", [("draft", None, "it is the one")])
    )
    words = "race target --dtype float32 --temperature 0 --max_new_tokens 2"
    found = answer(words)["ways"]
    assert found["draft, whole blocks"]["prompts"] == len(SEVERAL_KINDS)
    monkeypatch.setattr("hf_dspark.hub.repository.find_drafts", lambda *_: ("nowhere", []))
    assert answer(f"{words} much")["ways"].keys() == {"plain", "transformers' prompt lookup", "prompt lookup"}


def test_generate_uses_the_chat_template_and_tells_it_about_thinking(answer):
    template = Path("target/chat_template.jinja")
    template.write_text("{{ 'much ' if enable_thinking is defined and not enable_thinking else 'not ' }}")
    tokens = {}
    for option in ("--no_thinking", "--enable_thinking", "", "--no_chat_template"):
        found = answer(f"generate {PAIR} --temperature 0 --max_new_tokens 12 {option} not")
        tokens[option] = found["answers"][0]["token_ids"]
    assert tokens["--enable_thinking"] == tokens[""] == tokens["--no_chat_template"] != tokens["--no_thinking"]


def test_generate_streams_a_single_answer_to_stdout_and_statistics_to_stderr(answer, capsys, monkeypatch):
    words = f"generate {PAIR} --temperature 0 --max_new_tokens 6"
    printed = {}
    for quiet in ("", "--quiet"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("what is up\n"))
        assert main(shlex.split(f"{words} {quiet}")) == 0
        printed[quiet] = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is up\n"))
    assert printed[""].out.strip() == printed["--quiet"].out.strip() == answer(words)["answers"][0]["text"].strip()
    assert "6 tokens in" in printed[""].err and "tokens/s" in printed[""].err
    assert "it/s" not in printed[""].err and printed["--quiet"].err == ""


def test_generate_answers_files_in_batches_and_reports_a_prompt_that_fails(answer, capsys):
    words = f"generate {PAIR} --temperature 0 --max_new_tokens 4 --no_chat_template"
    (alone,) = answer(f"{words} 'what is up'")["answers"]
    Path("mixed.jsonl").write_text(f'"what is up"\n"{"what " * 300}"\n"what is up"\n')
    assert main(shlex.split(f"{words} --json --prompts_file mixed.jsonl --batch_size 3")) == 1
    good, bad, same = json.loads(capsys.readouterr().out)["answers"]
    assert good["token_ids"] == same["token_ids"] == alone["token_ids"] and len(alone["token_ids"]) == 4
    assert "error" not in good and "256" in bad["error"] and bad["index"] == 1


def test_answers_are_written_trained_on_and_kept_when_run_again(answer, refusal):
    words = f"regenerate {PAIR} --prompts_file prompts.jsonl --output_file answers.jsonl --max_new_tokens 12"
    assert answer(words)["num_answers"] == 3
    before = Path("answers.jsonl").read_bytes()
    assert answer(words)["num_answers"] == 3 and Path("answers.jsonl").read_bytes() == before

    train = f"{TRAIN} --train_file answers.jsonl --eval_rows 1"
    found = answer(f"{train} --output_dir trained")
    assert found["kind"] == "training" and found["steps"] == 2 and found["num_rows"] == 1  # two have one prompt
    draft = DSparkDraftModel.from_pretrained("trained")
    assert (draft.config.block_size, draft.config.markov_rank, draft.config.num_hidden_layers) == (3, 4, 1)
    assert "--resume_from_checkpoint last" in refusal(f"{train} --output_dir trained")
    assert answer(f"{train} --output_dir trained --resume_from_checkpoint last")["steps"] == 2
    before = Path("draft/config.json").read_bytes()
    elsewhere = "--output_dir draft --resume_from_checkpoint trained/checkpoint-1"
    assert "draft holds a draft or checkpoints already" in refusal(f"{train} {elsewhere}")
    assert Path("draft/config.json").read_bytes() == before
    answer("generate --target target --draft trained --max_new_tokens 4 --temperature 0 up")


def test_training_ends_with_what_it_brought_and_the_commands_that_follow(answer, capsys):
    row = '{"input_ids": [5, 6, 7, 8, 7, 8, 7], "labels": [-100, 6, 7, 8, 7, 8, 7]}\n'
    others = (f'{{"input_ids": [{first}, 7, 8, 7, 8, 7]}}\n' for first in (6, 7, 8))
    Path("rows.jsonl").write_text(row + "".join(others))
    words = f"{TRAIN.removesuffix(' --json')} --train_file rows.jsonl --learning_rate 0.1"
    assert main(shlex.split(f"{words} --eval_rows 2 --output_dir out")) == 0
    printed = capsys.readouterr()
    result = json.loads(Path("out/results/training.json").read_text())
    head, _, before, after, last = printed.out.strip().split("\n")
    assert head == "| 2 held-out examples, estimated | tau | acceptance at 1 | 2 | 3 |"
    assert before.startswith(f"| before | {result['before']['eval_tau']:.2f} | ")
    assert after.startswith(f"| after | {result['metrics']['eval_tau']:.2f} | ")
    assert result["before"]["eval_tau"] != result["metrics"]["eval_tau"] and "the draft is in out" in last
    for command in ("calibrate --target target --draft out", "eval --target target --draft out", "push out user/name"):
        assert f"hf-dspark {command}" in printed.err
    words = words.replace("--markov_rank 4", "")
    assert main(shlex.split(f"{words} --draft_kind eagle3 --output_dir other --logging_steps 1")) == 0
    printed = capsys.readouterr()
    assert "| last batches, estimated | tau | acceptance at 1 |" in printed.out and "| before |" not in printed.out
    assert "hf-dspark calibrate" not in printed.err and "--eval_rows" in printed.err


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
def test_other_kinds_of_drafts_are_trained_with_their_own_objective(answer, kind):
    Path("rows.jsonl").write_text(3 * '{"prompt": "what is", "completion": " up not much up not much"}\n')
    command = TRAIN.replace("--markov_rank 4 ", "")
    command = command.replace("--target_layer_ids 0 2", "") if kind == "mtp" else command  # it reads the last one
    arguments = answer(f"{command} --train_file rows.jsonl --draft_kind {kind} --output_dir out")["arguments"]
    hard, soft = (arguments[name] for name in ("cross_entropy_weight", "soft_cross_entropy_weight"))
    assert (hard, soft) == ((1.0, 0.0) if kind == "dflash" else (0.0, 1.0)) and arguments["l1_weight"] == 0
    model_class = DSparkDraftModel if kind == "dflash" else Eagle3DraftModel
    config = model_class.from_pretrained("out").config
    assert config.markov_rank == 0 and config.mtp == (kind == "mtp")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"generate {PAIR} --target_revision v1 up", "--target_revision v1 is of a repository on the Hub"),
        ("race target --draft draft --draft_revision v1 up", "--draft_revision v1 is of a repository on the Hub"),
        ("inspect draft --draft_revision v1", "got draft=draft: drop it"),
        ("generate --target target --draft me/draft --target_revision v1 up", "got target=target"),
        ("regenerate --target target --prompts_file prompts.jsonl --output_file o --draft_revision v", "draft=None"),
        (f"{TRAIN} --train_file prompts.jsonl --output_dir o --draft_kind dflash", "no Markov head: leave --markov_r"),
        (f"{TRAIN} --train_file prompts.jsonl --output_dir o --draft_kind mtp --markov_head_type rnn",
         "a draft of the kind mtp has no Markov head: leave --markov_rank and --markov_head_type out"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(refusal, words, said):
    assert said in refusal(words)


def test_fine_tuning_starts_from_the_draft_that_is_given(capsys):
    row = '{"prompt": "what is", "completion": " up not much up not much"}\n'
    Path("rows.jsonl").write_text(2 * row + "{oops\n[1]\n")
    words = f"{TUNE} --train_file rows.jsonl --learning_rate 1e-9 --output_dir out"
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["skipped_lines"]) == 2
    assert "rows.jsonl line 3 is not JSON" in printed.err and "line 4 is no JSON object" in printed.err
    before, after = (DSparkDraftModel.from_pretrained(name).state_dict() for name in ("draft", "out"))
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())


def test_an_interruption_keeps_answers_and_ends_with_130(answer, refusal, monkeypatch):
    interrupt_third_call(monkeypatch, driver, "timed_call")
    words = "regenerate --target target --prompts_file prompts.jsonl --output_file answers.jsonl --batch_size 1"
    words += " --max_new_tokens 4 --temperature 1"
    assert "interrupted; finished answers are kept" in refusal(words, code=130)
    assert len(Path("answers.jsonl").read_text().strip().split("\n")) == 2
    assert answer(words)["num_answers"] == 3


def test_eval_writes_a_result_and_overwrites_none(capsys, refusal):
    talk = '{"turns": ["what is", "not much"]}\n{"messages": [{"role": "user", "content": "up"}]}\n'
    Path("talk.jsonl").write_text(talk)
    words = f"eval {PAIR} --temperature 1 --max_new_tokens 8 --prompts chat=talk.jsonl prompts.jsonl"
    assert main(shlex.split(f"{words} --result_file first.json")) == 0
    assert "| chat | 2 | 3 |" in capsys.readouterr().out
    (result,) = read_results(["first.json"])
    assert result["tasks"].keys() == {"chat", "prompts", "all"} and result["policy"] == {"name": "FullBlock"}
    assert result["sampling"] == {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 8, "seed": 0}
    assert "first.json exists" in refusal(f"{words} --result_file first.json")
    words = "eval --target target --prompts prompts.jsonl --max_new_tokens 4 --batch_size 2 --result_file alone.json"
    assert main(shlex.split(words)) == 0 and read_results(["alone.json"])[0]["draft"] == {}


def test_eval_measures_a_benchmark_by_its_name(capsys, refusal):
    words = f"eval {PAIR} --suite spec_bench bench --temperature 0 --max_new_tokens 3 --num_prompts 1"
    assert "bench lacks mt_bench.jsonl, translation.jsonl, " in refusal(words)
    Path("bench").mkdir()
    for task in SUITES["spec_bench"]:
        Path(f"bench/{task}.jsonl").write_text('{"turns": ["what is up"]}\n"up"\n')
    assert main(shlex.split(f"{words} --result_file out.json")) == 0
    assert read_results(["out.json"])[0]["tasks"].keys() == {*SUITES["spec_bench"], "all"}


def test_eval_compares_with_plain_decoding_and_lists_what_failed(capsys):
    long = f'"{"what " * 300}"'.encode()
    Path("mixed.jsonl").write_bytes(b'"what is up"\n%b\n{"turns": ["up", "much"]}\n{"prompt": \n"\xff"\n' % long)
    words = f"eval {PAIR} --prompts talk=mixed.jsonl --temperature 0 --max_new_tokens 6 --compare"
    assert main(shlex.split(f"{words} --result_file out.json --no_chat_template")) == 1  # a part failed
    printed = capsys.readouterr()
    assert "| talk | 2 | 3 |" in printed.out and "3 of 3" in printed.out
    assert "talk line 2 failed: a prompt of 300 tokens" in printed.err and "mixed.jsonl line 4" in printed.err
    (result,) = read_results(["out.json"])
    assert sorted((part["task"], part["line"]) for part in result["failed"]) == [("talk", 2), ("talk", 4), ("talk", 5)]
    assert result["tasks"]["talk"]["speedup"]["identical"] == 3
    assert "18 of 18 tokens" in printed.out and result["rounding"] in printed.out


def test_eval_goes_on_where_it_was_interrupted(refusal, monkeypatch):
    words = f"eval {PAIR} --prompts prompts.jsonl --max_new_tokens 4 --temperature 1 --result_file out.json"
    calls = interrupt_third_call(monkeypatch, driver, "timed_call")
    assert "the same command goes on from there" in refusal(words, code=130) and not Path("out.json").exists()
    assert main(shlex.split(words)) == 0 and len(calls) == 3 + 1  # the one that was missing
    assert read_results(["out.json"])[0]["tasks"]["all"]["turns"] == 3
    calls.clear()
    words = words.replace("out.json", "again.json")
    refusal(f"{words} --seed 1", code=130)
    assert "differs in seed (1 there, 0 now)" in refusal(words)


def test_a_calibration_whose_config_cannot_be_written_leaves_no_result(refusal, monkeypatch):
    def full(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_dspark.DSparkConfig.save_pretrained", full)
    words = f"calibrate {PAIR} --prompts_file prompts.jsonl --max_new_tokens 12 --temperature 0"
    assert main(shlex.split(words)) == 1
    assert not Path("draft/results").exists()
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "draft")
    assert "draft cannot be written (draft is read-only, or no folder): name another place" in refusal(words)


@pytest.mark.slow
def test_calibrate_changes_the_config_alone_or_fills_another_folder(answer, refusal):
    Path("talk.jsonl").write_text('{"turns": ["what is", "not much"]}\n"up"\n')
    words = f"calibrate {PAIR} --prompts_file talk.jsonl --max_new_tokens 12 --domain math/greedy --temperature 0"
    assert answer(f"{words} --output_dir calibrated --dtype bfloat16")["num_prompts"] == 2
    source, saved = (load_file(f"{folder}/model.safetensors") for folder in ("draft", "calibrated"))
    assert source.keys() == saved.keys() and all(torch.equal(source[name], saved[name]) for name in source)
    assert DSparkDraftModel.from_pretrained("draft").config.sts_temperatures is None
    assert "math/greedy" in DSparkDraftModel.from_pretrained("calibrated").config.sts_temperatures
    assert Path("calibrated/results/calibration-math-greedy.json").exists()
    assert "calibrated exists" in refusal(f"{words} --output_dir calibrated")
    weights, config = Path("draft/model.safetensors").read_bytes(), json.loads(Path("draft/config.json").read_text())
    words = f"calibrate {PAIR} --dtype bfloat16 --prompts_file prompts.jsonl --max_new_tokens 12"
    assert answer(f"{words} --temperature 0")["domain"] == "greedy"
    answer(f"{words} --temperature 1")
    temperatures = DSparkDraftModel.from_pretrained("draft").config.sts_temperatures
    assert temperatures.keys() == {"default", "greedy", "sampled"} and len(temperatures["greedy"]) == 4
    assert Path("draft/model.safetensors").read_bytes() == weights
    changed = json.loads(Path("draft/config.json").read_text())
    facts = {"sts_temperatures", "confidence_fits"}
    assert changed["sts_temperatures"] == temperatures and changed["confidence_fits"].keys() == temperatures.keys()
    assert {k: v for k, v in changed.items() if k not in facts} == {k: v for k, v in config.items() if k not in facts}
    results = read_results(["draft/results"])
    assert [result["domain"] for result in results] == ["greedy", "sampled"]
    assert all(result["num_prompts"] == 3 and len(result["temperatures"]) == 4 for result in results)


def test_a_profile_is_written_and_where_scheduling_begins(answer):
    words = f"profile {PAIR} --batch_sizes 1 2 --context_lengths 8 16 --repetitions 1"
    table = answer(f"{words} --output_file sps.json")["table"]
    assert json.loads(Path("sps.json").read_text()).items() >= table.items()
    assert answer(f"profile {PAIR} --show")["table"]["provenance"]["measured"].startswith("20")
    policy = answer(f"generate {PAIR} --policy scheduled --max_new_tokens 4 up")["policy"]
    assert policy["name"] == "Scheduler" and policy["cost"].startswith("learned from ")


def test_the_table_in_use_is_shown_with_its_age(capsys):
    assert main(shlex.split(f"profile {PAIR} --show")) == 0
    assert "no table fits these models" in capsys.readouterr().out
    assert main(shlex.split(f"profile {PAIR} --batch_sizes 1 2 --context_lengths 8 16 --repetitions 2")) == 0
    before = capsys.readouterr().out
    assert main(shlex.split(f"profile {PAIR} --show")) == 0
    shown = capsys.readouterr().out
    (table,) = Path("cache").glob("*.json")
    assert shown.startswith(before) and f"\n{table.name}\nmeasured on" in shown
    assert "0 days old" in shown


@pytest.mark.parametrize("load", [0.5, 99.0])
def test_commands_that_need_cores_say_when_others_hold_them(capsys, monkeypatch, load):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    rows = 2 * '{"prompt": "what is", "completion": " up not much up not much"}\n'
    Path("rows.jsonl").write_text(rows)
    for words in (
        f"eval {PAIR} --prompts prompts.jsonl --max_new_tokens 2 --temperature 0 --result_file out.json",
        f"{TRAIN} --train_file rows.jsonl --output_dir out",
        f"generate {PAIR} --max_new_tokens 2 up",
    ):
        assert main(shlex.split(words)) == 0
        said = capsys.readouterr().err
        told = "other processes hold the cores (load 99.0 on" in said
        assert told == ("Wait until they are done" in said)
        assert told == (load > 50 and not words.startswith("generate"))
        assert ("OMP_NUM_THREADS" in said) == (told and torch.get_num_threads() > 1)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("dtype", "lacks", "warns"), [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)]
)
def test_a_dtype_that_is_slow_on_this_processor_is_told(capsys, monkeypatch, dtype, lacks, warns):
    monkeypatch.setattr("hf_dspark_cli.models.lacks_bfloat16", lambda: lacks)
    assert main(shlex.split(f"generate {PAIR} --dtype {dtype} --max_new_tokens 2 up")) == 0
    assert ("Give --dtype float32" in capsys.readouterr().err) == warns


@pytest.mark.filterwarnings("always")
def test_warnings_are_one_line_without_the_place_in_the_code(capsys):
    assert main(shlex.split(f"calibrate {PAIR} --prompts_file prompts.jsonl --max_new_tokens 8")) == 0
    (told,) = [line for line in capsys.readouterr().err.split("\n") if "warning" in line.lower()]
    assert told.startswith("warning: a calibration on") and ".py" not in told


def test_inspect_tells_what_works_and_refuses_what_does_not(answer, refusal, capsys):
    told = answer("inspect draft --target target")
    assert told["refusal"] is None and told["found"]["fits"] == "target" and told["found"]["kind"][0] == "DSpark"
    assert main(["inspect", "draft"]) == 0
    assert capsys.readouterr().out.startswith("draft        draft\nformat       hf_dspark (DSparkDraftModel)\n")
    assert "is no draft in one of the formats" in refusal("inspect target")
    Path("target/config.json").write_text(Path("target/config.json").read_text().replace("vocab_size", "vocab"))
    assert "was not made for this target (vocab_size" in refusal("inspect draft --target target")


def test_convert_there_and_back_keeps_the_tokens(answer, refusal):
    assert answer("convert --to deepspec --target target draft there")["format"] == "deepspec"
    answer("convert --to hf_dspark there back")
    tokens = {}
    for name in ("draft", "there", "back"):
        found = answer(f"generate --target target --draft {name} --max_new_tokens 8 --temperature 1 up")
        tokens[name] = found["answers"][0]["token_ids"]
    assert tokens["draft"] == tokens["there"] == tokens["back"]
    words = f"calibrate {PAIR.replace('draft draft', 'draft there')} --prompts_file prompts.jsonl"
    assert "no place for temperatures" in refusal(words)


def test_push_hands_folder_and_results_to_the_hub(answer, refusal, monkeypatch):
    words = f"eval {PAIR} --temperature 0 --max_new_tokens 4 --prompts prompts.jsonl"
    answer(f"{words} --result_file draft/results/a.json")
    calls = []

    def push_draft(draft, repo_id, results=(), **kwargs):
        calls.append((draft, repo_id, list(results), kwargs["private"]))
        return "https://hub/me/mine"

    with monkeypatch.context() as patch:
        patch.setattr("hf_dspark.hub.repository.push_draft", push_draft)
        assert answer("push draft me/mine --private")["url"] == "https://hub/me/mine"
    assert calls == [("draft", "me/mine", ["draft/results"], True)]
    line = refusal("push draft me/mine")
    assert "a license (--license mit, or another id of the Hub; in Python license=...)" in line and "--private" in line
    assert "its target on the Hub (--target user/name; in Python target=...)" in line
    words = "push draft me/mine --license mit --target someone/target"
    assert "the draft could not be uploaded to me/mine on https://" in refusal(words, code=1)  # there is no Hub
    refusal("push draft me/mine --private", code=1)
    assert "there is no result file and no folder nowhere" in refusal(f"{words} --results nowhere")


WRONG = {
    "a target as draft": ("generate --target target --draft target up", "target holds a 'qwen3' model, which is no"),
    "swapped": ("generate --target draft --draft target up", "--draft is target: the wrong way round"),
    "swapped to calibrate": ("calibrate --target draft --draft target --prompts_file prompts.jsonl", "way round"),
    "swapped to train": (
        "train --target draft --draft target --train_file prompts.jsonl --output_dir o",
        "wrong way round",
    ),
    "a target as a draft to train": (
        f"{TUNE.replace('draft draft', 'draft target')} --train_file prompts.jsonl --output_dir o",
        "target holds a 'qwen3' model",
    ),
    "a target to convert": ("convert --to deepspec target out", "target/config.json (model_type 'qwen3'"),
    "a table that is not there": (
        f"{TRAIN} --train_file nowhere.parquet --output_dir o", "--train_file: there is no file nowhere.parquet",
    ),
    "a folder for a file": (
        "regenerate --target target --prompts_file prompts.jsonl --output_file target", "target is a folder",
    ),
    "a draft as target": ("eval --target draft --prompts prompts.jsonl", "--target draft is a draft"),
    "draft of another target": ("generate --target other --draft draft up", "does not fit the target other"),
    "no prompts": (f"eval {PAIR} --prompts empty.jsonl", "empty.jsonl holds no prompt"),
    "missing prompts": (f"generate {PAIR} --prompts_file nowhere.jsonl", "there is no file nowhere.jsonl"),
    "two tasks of one name": (f"eval {PAIR} --prompts a=prompts.jsonl a=empty.jsonl", "names a task twice"),
    "empty prompt": (f"generate {PAIR} ''", "prompt 0: the prompt is empty"),
    "a format of nobody": ("convert --to onnx draft out", "onnx"),
    "full folder": ("convert --to deepspec draft target", "target holds something already"),
    "policy of no draft": (
        "eval --target target --prompts prompts.jsonl --policy scheduled", "--policy scheduled needs --draft",
    ),
    "no checkpoint": (
        f"{TRAIN} --train_file prompts.jsonl --output_dir out --resume_from_checkpoint last", "no whole checkpoint",
    ),
    "no device": (f"{TRAIN} --train_file prompts.jsonl --output_dir o --device_map xpu:0", "finds no xpu device here"),
    "no tokenizer": ("generate --target bare --draft draft up", "bare cannot be used: it has no tokenizer files"),
    "damaged target": ("generate --target cut --draft draft up", "--target cut cannot be used: Error while"),
    "damaged tokenizer": ("eval --target no_tokens --prompts prompts.jsonl", "--target no_tokens cannot be used: "),
    "unknown target": ("train --target new --train_file prompts.jsonl --output_dir o", "--target new cannot be used:"),
    "no weights": ("eval --target target --prompts prompts.jsonl --device_map meta", "finds no meta device here"),
    "wrong argument": (f"{TRAIN} --train_file prompts.jsonl --output_dir o --num_anchors 0", "must be at least 1"),
    "rows held out": (f"{TRAIN} --train_file prompts.jsonl --output_dir o --eval_rows 9", "nothing to train on"),
    "damaged draft": ("generate --target target --draft damaged up", "damaged"),
}  # fmt: skip


def test_wrong_models_and_files_are_one_line_and_end_with_two(refusal, make_target, fixtures):
    make_target(vocab_size=40, hidden_size=16).save_pretrained("other")
    AutoTokenizer.from_pretrained("target").save_pretrained("other")
    DSparkDraftModel.from_pretrained("draft").save_pretrained("damaged")
    weights = Path("damaged/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    Path("empty.jsonl").write_text("\n")
    make_target().save_pretrained("bare")
    for name, file in (("cut", "model.safetensors"), ("no_tokens", "tokenizer.json"), ("new", "config.json")):
        shutil.copytree("target", name)
        Path(name, file).write_text("{}" if file == "tokenizer.json" else '{"model_type": "new"}')
    for words, said in WRONG.values():
        assert said in refusal(words)
    foreign = next(path.parent for path in sorted((fixtures / "speculators").rglob("config.json")))
    line = refusal(f"eval --target target --draft {foreign} --prompts prompts.jsonl")  # of another target, but a draft
    assert f"the draft {foreign} does not fit the target target" in line


def test_a_full_disk_is_named_with_what_is_kept(refusal, monkeypatch):
    Path("rows.jsonl").write_text(3 * '{"prompt": "what is", "completion": " up not much up not much"}\n')

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    line = refusal(f"{TRAIN} --train_file rows.jsonl --output_dir out", code=1)
    assert "error: the disk of out is full" in line and "free" in line and "Make room" in line
    assert line.endswith("nothing is kept")
    assert _full_disk(FileNotFoundError(2, "No such file"), Namespace(output_dir="/proc/none")) is None
    assert _full_disk(RuntimeError("not this"), Namespace(output_dir="/proc/none")) is None


@pytest.mark.parametrize("named", [("index", "prompt", "prompt_ids"), ("index",), ("prompt",)])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_prompt_that_is_held_out_is_not_trained_on(named, form):
    told = {"index": range(10), "prompt": [f"what {n}" for n in range(10)], "prompt_ids": [[n, 1] for n in range(10)]}
    rows = [{name: told[name][n] for name in named} | {"text": f"{n} {k}"} for k in range(4) for n in range(10)]
    if form == "parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet("rows.parquet")
    else:
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = f"train --target target --train_file rows.{form} --output_dir out --eval_rows"
    trained, held_out, _ = train._read_rows(parse(shlex.split(f"{words} 6")), 0)
    texts = [sorted(row["text"] for row in part) for part in (held_out, trained)]
    assert len(texts[0]) == 8 and sorted(sum(texts, [])) == sorted(row["text"] for row in rows)
    assert not {text[0] for text in texts[0]} & {text[0] for text in texts[1]}
    with pytest.raises(ValueError, match="nothing to train on: the file has 40 examples, of 10 prompts"):
        train._read_rows(parse(shlex.split(f"{words} 37")), 0)


def test_a_loss_weight_that_is_given_counts_even_if_it_is_the_usual_one():
    words = f"{TRAIN} --train_file prompts.jsonl --output_dir out --draft_kind dflash".replace("--markov_rank 4", "")
    for given, weights in (
        ("", (1.0, 0.0, 0.0)),
        ("--cross_entropy_weight 0.1", (0.1, 0.9, 1.0)),
        ("--l1-weight=0.9 --confidence_weight 0", (0.1, 0.9, 0.0)),
    ):
        options = parse(shlex.split(f"{words} {given}"))
        arguments = train._training_arguments(options, Console(sys.stdout, json=True, quiet=True))
        assert tuple(getattr(arguments, name) for name in train.LOSS_WEIGHTS[:3]) == weights


def test_the_script_that_resumes_by_itself_begins_anew_when_no_checkpoint_is_whole(capsys, monkeypatch):
    script = Path(__file__).parents[2] / "examples" / "train_any.py"
    Path("rows.jsonl").write_text(3 * '{"prompt": "what is", "completion": " up not much up not much"}\n')
    words = f"{TRAIN.removeprefix('train ')} --train_file rows.jsonl --output_dir out"
    monkeypatch.setattr(sys, "argv", ["train_any.py", *shlex.split(words)])

    begun, begin = [], train.DSparkTrainer.train
    monkeypatch.setattr(train.DSparkTrainer, "train", lambda self, where: begun.append(where) or begin(self, where))
    Path("out/checkpoint-1").mkdir(parents=True)
    Path("out/checkpoint-1/config.json").write_text("{")
    for warned in (True, False):
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(script), run_name="__main__")
        assert stop.value.code == 0
        assert ("checkpoint-1 is passed over" in capsys.readouterr().err) == warned
    assert begun == [None, "out/checkpoint-2"]
