"""`hf-dspark`: what every command does with a tiny pair, and what it says about models and files that are wrong."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_dspark import DSparkDraftModel, Eagle3DraftModel
from hf_dspark.decoding import regenerate as regeneration
from hf_dspark.decoding import step_costs
from hf_dspark.evaluation import run as evaluation_run
from hf_dspark.evaluation.results import read_results
from hf_dspark_cli import main
from tests.evaluation.interruption import interrupt_third_call

PAIR = "--target target --draft draft --dtype float32"
TRAIN = (
    "train --target target --max_steps 2 --save_steps 1 --num_anchors 4 --per_device_train_batch_size 2 --use_cpu "
    "--num_hidden_layers 1 --target_layer_ids 0 2 --block_size 3 --markov_rank 4 --json"
)


@pytest.fixture(autouse=True)
def folders(tmp_path, make_target, make_draft, chat_tokenizer, monkeypatch):
    """A tiny pair on disk, in the working folder; its tokenizer has a chat template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    step_costs.known_profiles.cache_clear()
    target = make_target()
    target.save_pretrained("target")
    chat_tokenizer.save_pretrained("target")
    make_draft(target).save_pretrained("draft")
    Path("prompts.jsonl").write_text('{"prompt": "what is up"}\n"what is"\n{"turns": ["what is up"]}\n')
    yield tmp_path
    step_costs.known_profiles.cache_clear()


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


def test_generate_gives_the_tokens_of_plain_generate_and_says_so(answer):
    found = answer(f"generate {PAIR} --temperature 0 --max_new_tokens 12 --compare 'what is up' 'much'")
    assert found["plain"]["identical_answers"] == 2 and len(found["answers"]) == 2
    assert [len(part["token_ids"]) for part in found["answers"]] == [12, 12]
    assert found["tokens"] == 24 and found["rounds"] > 0 and found["tau"] >= 1 and found["seconds"] > 0
    assert found["sampling"] == {"do_sample": False, "max_new_tokens": 12}
    words = f"generate {PAIR} --policy threshold=0.5 --max_new_tokens 4 up"
    assert answer(words)["policy"].startswith("ConfidenceThreshold(threshold=0.5")


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
    assert found["kind"] == "training" and found["steps"] == 2 and found["num_rows"] == 2
    draft = DSparkDraftModel.from_pretrained("trained")
    assert (draft.config.block_size, draft.config.markov_rank, draft.config.num_hidden_layers) == (3, 4, 1)
    assert "--resume_from_checkpoint last" in refusal(f"{train} --output_dir trained")
    assert answer(f"{train} --output_dir trained --resume_from_checkpoint last")["steps"] == 2
    before = Path("draft/config.json").read_bytes()
    elsewhere = "--output_dir draft --resume_from_checkpoint trained/checkpoint-1"
    assert "draft holds a draft or checkpoints already" in refusal(f"{train} {elsewhere}")
    assert Path("draft/config.json").read_bytes() == before
    answer("generate --target target --draft trained --max_new_tokens 4 --temperature 0 up")


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_other_kinds_of_drafts_are_trained_with_their_own_objective(answer, kind):
    Path("rows.jsonl").write_text(3 * '{"prompt": "what is", "completion": " up not much up not much"}\n')
    arguments = answer(f"{TRAIN} --train_file rows.jsonl --draft_kind {kind} --output_dir out")["arguments"]
    hard, soft = (arguments[name] for name in ("cross_entropy_weight", "soft_cross_entropy_weight"))
    assert (hard, soft) == ((1.0, 0.0) if kind == "dflash" else (0.0, 1.0)) and arguments["l1_weight"] == 0
    model_class = DSparkDraftModel if kind == "dflash" else Eagle3DraftModel
    assert model_class.from_pretrained("out").config.markov_rank == 0


def test_fine_tuning_starts_from_the_draft_that_is_given(capsys):
    row = '{"prompt": "what is", "completion": " up not much up not much"}\n'
    Path("rows.jsonl").write_text(2 * row + "{oops\n[1]\n")
    words = f"{TRAIN} --draft draft --train_file rows.jsonl --learning_rate 1e-9 --output_dir out"
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["skipped_lines"]) == 2
    assert "rows.jsonl line 3 is not JSON" in printed.err and "line 4 is no JSON object" in printed.err
    before, after = (DSparkDraftModel.from_pretrained(name).state_dict() for name in ("draft", "out"))
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())


def test_an_interruption_keeps_answers_and_ends_with_130(answer, refusal, monkeypatch):
    interrupt_third_call(monkeypatch, regeneration._Session, "_answer_batch")
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
    assert result["tasks"].keys() == {"chat", "prompts", "all"} and result["policy"] == "FullBlock()"
    assert result["sampling"] == {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 8, "seed": 0}
    assert "first.json exists" in refusal(f"{words} --result_file first.json")
    words = "eval --target target --prompts prompts.jsonl --max_new_tokens 4 --batch_size 2 --result_file alone.json"
    assert main(shlex.split(words)) == 0 and read_results(["alone.json"])[0]["draft"] == {}


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


def test_eval_goes_on_where_it_was_interrupted(refusal, monkeypatch):
    words = f"eval {PAIR} --prompts prompts.jsonl --max_new_tokens 4 --temperature 1 --result_file out.json"
    calls = interrupt_third_call(monkeypatch, evaluation_run, "timed_call")
    assert "the same command goes on from there" in refusal(words, code=130) and not Path("out.json").exists()
    assert main(shlex.split(words)) == 0 and len(calls) == 3 + 1 + 2  # the warm-up, and the two that were missing
    assert len(read_results(["out.json"])[0]["records"]) == 3
    calls.clear()
    words = words.replace("out.json", "again.json")
    refusal(f"{words} --seed 1", code=130)
    assert "differs in seed (1 there, 0 now)" in refusal(words)


def test_calibrate_changes_the_config_alone_or_fills_another_folder(answer, refusal):
    Path("talk.jsonl").write_text('{"turns": ["what is", "not much"]}\n"up"\n')
    words = f"calibrate {PAIR} --prompts_file talk.jsonl --max_new_tokens 12 --domain math/greedy --temperature 0"
    assert answer(f"{words} --output_dir calibrated")["num_prompts"] == 2
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
    assert json.loads(Path("draft/config.json").read_text()) == config | {"sts_temperatures": temperatures}
    results = read_results(["draft/results"])
    assert [result["domain"] for result in results] == ["greedy", "sampled"]
    assert all(result["num_prompts"] == 3 and len(result["temperatures"]) == 4 for result in results)


def test_scheduling_works_as_soon_as_the_machine_is_profiled(answer, refusal):
    assert "hf-dspark profile" in refusal(f"generate {PAIR} --policy scheduled --max_new_tokens 4 up")
    words = f"profile {PAIR} --batch_sizes 1 2 --context_lengths 8 16 --repetitions 1"
    table = answer(f"{words} --output_file sps.json")["table"]
    assert json.loads(Path("sps.json").read_text()).items() >= table.items()
    policy = answer(f"generate {PAIR} --policy scheduled --max_new_tokens 4 up")["policy"]
    assert policy.startswith("AdaptiveDrafting(policy=PrefixScheduler(cost=ThroughputTable[")


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
        patch.setattr("hf_dspark.sharing.hub.push_draft", push_draft)
        assert answer("push draft me/mine --private")["url"] == "https://hub/me/mine"
    assert calls == [("draft", "me/mine", ["draft/results"], True)]
    assert "the draft could not be uploaded to me/mine" in refusal("push draft me/mine", code=1)  # there is no Hub


WRONG = {
    "a target as draft": ("generate --target target --draft target up", "holds a 'qwen3' model, which is no draft"),
    "swapped": ("generate --target draft --draft target up", "holds a 'qwen3' model, which is no draft"),
    "a draft as target": ("eval --target draft --prompts prompts.jsonl", "--target draft is a draft"),
    "draft of another target": ("generate --target other --draft draft up", "does not fit the target other"),
    "no prompts": (f"eval {PAIR} --prompts empty.jsonl", "empty.jsonl holds no prompt"),
    "key that is not set": (
        "regenerate --endpoint http://x --target m --api_key_env NO_SUCH_KEY --prompts_file prompts.jsonl "
        "--output_file o", "NO_SUCH_KEY is not set",
    ),
    "missing prompts": (f"generate {PAIR} --prompts_file nowhere.jsonl", "nowhere.jsonl: there is no such file"),
    "two tasks of one name": (f"eval {PAIR} --prompts a=prompts.jsonl a=empty.jsonl", "names a task twice"),
    "empty prompt": (f"generate {PAIR} ''", "a prompt is empty"),
    "full folder": ("convert --to deepspec draft target", "target holds something already"),
    "policy of no draft": (
        "eval --target target --prompts prompts.jsonl --policy scheduled", "--policy scheduled needs --draft",
    ),
    "draft of an endpoint": (
        "regenerate --endpoint http://x --target m --draft draft --prompts_file prompts.jsonl --output_file o",
        "not one on a server",
    ),
    "no checkpoint": (
        f"{TRAIN} --train_file prompts.jsonl --output_dir out --resume_from_checkpoint last", "there is no checkpoint",
    ),
    "argument of nothing": (f"{TRAIN} --train_file prompts.jsonl --output_dir o --speed 9", "['--speed', '9']"),
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
    for words, said in WRONG.values():
        assert said in refusal(words)
    foreign = next(path.parent for path in sorted((fixtures / "speculators").rglob("config.json")))
    line = refusal(f"eval --target target --draft {foreign} --prompts prompts.jsonl")  # of another target, but a draft
    assert f"the draft {foreign} does not fit the target target" in line
