"""`hf-dspark`: every command on a tiny pair, and what it says when something is wrong."""

import ast
import io
import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import hf_dspark
from hf_dspark import DSparkDraftModel, Eagle3DraftModel
from hf_dspark.cli.main import COMMANDS, exit_code, main
from hf_dspark.cli.models import load_draft
from hf_dspark.cli.options import ConvertOptions, PolicyChoice, SamplingOptions
from hf_dspark.evaluation.results import read_results
from hf_dspark.formats.tables import FORMAT_NAMES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folders(tmp_path, make_target, make_draft, chat_tokenizer, monkeypatch):
    """A tiny pair on disk, in the working folder; its tokenizer has a chat template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    hf_dspark.decoding.step_costs.known_profiles.cache_clear()
    target = make_target()
    target.save_pretrained("target")
    chat_tokenizer.save_pretrained("target")
    make_draft(target).save_pretrained("draft")
    Path("prompts.jsonl").write_text('{"prompt": "what is up"}\n"what is"\n{"turns": ["what is up"]}\n')
    yield tmp_path
    hf_dspark.decoding.step_costs.known_profiles.cache_clear()


PAIR = "--target target --draft draft --dtype float32"


def run(words: str) -> int:
    """Run a command line; return its exit code."""
    try:
        return main(shlex.split(words))
    except SystemExit as stop:
        return stop.code


def document(capsys) -> dict:
    """Return the JSON document that is all of stdout."""
    return json.loads(capsys.readouterr().out)


# ---- generate


def test_generate_gives_the_tokens_of_plain_generate_and_says_so(folders, capsys):
    assert run(f"generate {PAIR} --temperature 0 --max_new_tokens 12 --compare --json 'what is up' 'much'") == 0
    found = document(capsys)
    assert found["plain"]["identical_answers"] == 2 and len(found["answers"]) == 2
    assert [len(answer["token_ids"]) for answer in found["answers"]] == [12, 12]
    assert found["tokens"] == 24 and found["rounds"] > 0 and found["tau"] >= 1
    assert found["sampling"] == {"do_sample": False, "max_new_tokens": 12}


def test_generate_answers_files_in_batches_as_it_answers_words(folders, capsys):
    assert run(f"generate {PAIR} --temperature 0 --max_new_tokens 8 --json 'what is up'") == 0
    (alone,) = document(capsys)["answers"]
    words = f"generate {PAIR} --temperature 0 --max_new_tokens 8 --json --prompts_file prompts.jsonl --batch_size 3"
    assert run(words) == 0
    together = document(capsys)["answers"]
    assert [answer["index"] for answer in together] == [0, 1, 2]
    assert together[0]["token_ids"] == together[2]["token_ids"] == alone["token_ids"]


def test_generate_uses_the_chat_template_unless_told_otherwise(folders, capsys, monkeypatch):
    seen = []
    alone = hf_dspark.cli_decoding._decode_alone
    monkeypatch.setattr(
        "hf_dspark.cli.decoding._decode_alone",
        lambda target, ids, kwargs: seen.append(ids) or alone(target, ids, kwargs),
    )
    run(f"generate {PAIR} --max_new_tokens 2 'what is up'")
    run(f"generate {PAIR} --max_new_tokens 2 --no_chat_template 'what is up'")
    tokenizer = AutoTokenizer.from_pretrained("target")
    assert tokenizer.decode(seen[0]) == "user what is up <eos> assistant"
    assert tokenizer.decode(seen[1]) == "what is up"


def test_generate_tells_the_chat_template_about_thinking(folders, capsys):
    template = Path("target/chat_template.jinja")
    template.write_text("{{ 'much ' if enable_thinking is defined and not enable_thinking else 'not ' }}")
    answers = {}
    for option in ("--no_thinking", "--enable_thinking", ""):
        assert run(f"generate {PAIR} --temperature 0 --max_new_tokens 12 --json {option} up") == 0
        answers[option] = document(capsys)["answers"][0]["token_ids"]
    assert answers["--enable_thinking"] == answers[""] != answers["--no_thinking"]


def test_generate_streams_a_single_answer_to_stdout_and_statistics_to_stderr(folders, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is up\n"))
    assert run(f"generate {PAIR} --temperature 0 --max_new_tokens 6") == 0
    printed = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is up\n"))
    assert run(f"generate {PAIR} --temperature 0 --max_new_tokens 6 --json") == 0
    assert printed.out.strip() == document(capsys)["answers"][0]["text"].strip()
    assert "6 tokens in" in printed.err and "tokens/s" in printed.err


def test_generate_reports_a_prompt_that_fails_and_answers_the_others(folders, capsys):
    Path("mixed.jsonl").write_text('"what is up"\n' + json.dumps("what " * 300) + "\n")
    words = f"generate {PAIR} --temperature 0 --max_new_tokens 4 --json --no_chat_template --prompts_file mixed.jsonl"
    assert run(words) == 1
    good, bad = document(capsys)["answers"]
    assert len(good["token_ids"]) == 4 and "error" not in good
    assert "256" in bad["error"]


@pytest.mark.parametrize("policy, name", [("full", "FullBlock()"), ("threshold=0.5", "ConfidenceThreshold")])
def test_generate_verifies_as_the_policy_says(folders, capsys, policy, name):
    assert run(f"generate {PAIR} --policy {policy} --max_new_tokens 4 --json up") == 0
    assert document(capsys)["policy"].startswith(name)


@pytest.mark.parametrize("text", ["greedy", "threshold", "threshold=", "threshold=1.5", "threshold=nan", "0.6"])
def test_policies_that_do_not_exist_are_refused(text):
    with pytest.raises(ValueError, match="--policy must be one of default, full, scheduled, threshold=T"):
        PolicyChoice.parse(text)


# ---- regenerate, train


def test_answers_are_written_trained_on_and_kept_when_run_again(folders, capsys):
    words = f"regenerate {PAIR} --prompts_file prompts.jsonl --output_file answers.jsonl --max_new_tokens 12"
    assert run(f"{words} --json") == 0
    assert document(capsys)["num_answers"] == 3
    before = Path("answers.jsonl").read_bytes()
    assert run(f"{words} --json") == 0
    assert document(capsys)["num_answers"] == 3 and Path("answers.jsonl").read_bytes() == before

    train = (
        "train --target target --train_file answers.jsonl --max_steps 2 --save_steps 1 --num_anchors 4 "
        "--per_device_train_batch_size 2 --num_hidden_layers 1 --target_layer_ids 0 2 --block_size 3 --use_cpu"
    )
    assert run(f"{train} --markov_rank 4 --eval_rows 1 --output_dir trained --json") == 0
    found = document(capsys)
    assert found["kind"] == "training" and found["steps"] == 2 and found["num_rows"] == 2
    draft = DSparkDraftModel.from_pretrained("trained")
    assert (draft.config.block_size, draft.config.markov_rank, draft.config.num_hidden_layers) == (3, 4, 1)
    assert run(f"{train} --markov_rank 4 --eval_rows 1 --output_dir trained") == 2
    assert "--resume_from_checkpoint last" in capsys.readouterr().err
    assert run(f"{train} --markov_rank 4 --eval_rows 1 --output_dir trained --resume_from_checkpoint last --json") == 0
    assert document(capsys)["steps"] == 2
    elsewhere = "--output_dir draft --resume_from_checkpoint trained/checkpoint-1"
    before = Path("draft/config.json").read_bytes()
    assert run(f"{train} --markov_rank 4 --eval_rows 1 {elsewhere}") == 2
    assert "draft holds a model already" in capsys.readouterr().err
    assert Path("draft/config.json").read_bytes() == before
    assert run(f"generate {PAIR.replace('draft', 'trained', 1)} --max_new_tokens 4 up") == 2  # no such option
    assert run("generate --target target --draft trained --max_new_tokens 4 --temperature 0 up") == 0


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_other_kinds_of_drafts_are_trained_with_their_own_objective(folders, capsys, kind):
    Path("rows.jsonl").write_text(3 * '{"prompt": "what is", "completion": " up not much up not much"}\n')
    words = (
        f"train --target target --train_file rows.jsonl --draft_kind {kind} --max_steps 1 --num_anchors 2 --use_cpu"
    )
    assert run(f"{words} --num_hidden_layers 1 --target_layer_ids 0 2 --block_size 3 --output_dir out --json") == 0
    arguments = document(capsys)["arguments"]
    hard, soft = (arguments[name] for name in ("cross_entropy_weight", "soft_cross_entropy_weight"))
    assert (hard, soft) == ((1.0, 0.0) if kind == "dflash" else (0.0, 1.0)) and arguments["l1_weight"] == 0
    model_class = DSparkDraftModel if kind == "dflash" else Eagle3DraftModel
    assert model_class.from_pretrained("out").config.markov_rank == 0


def test_fine_tuning_starts_from_the_draft_that_is_given(folders, capsys):
    Path("rows.jsonl").write_text(
        2 * '{"prompt": "what is", "completion": " up not much up not much"}\n' + "{oops\n[1]\n"
    )
    words = "train --target target --draft draft --train_file rows.jsonl --max_steps 1 --num_anchors 2 --use_cpu"
    assert run(f"{words} --learning_rate 1e-9 --output_dir out --json") == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["skipped_lines"]) == 2
    assert "rows.jsonl line 3 is not JSON" in printed.err and "line 4 is no JSON object" in printed.err
    before, after = (DSparkDraftModel.from_pretrained(name).state_dict() for name in ("draft", "out"))
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())


# ---- eval, calibrate, profile


def test_eval_writes_a_result_that_a_later_one_is_compared_with(folders, capsys):
    Path("talk.jsonl").write_text(
        '{"turns": ["what is", "not much"]}\n{"messages": [{"role": "user", "content": "up"}]}\n'
    )
    words = f"eval {PAIR} --temperature 1 --max_new_tokens 8 --prompts chat=talk.jsonl prompts.jsonl"
    assert run(f"{words} --result_file first.json") == 0
    assert "| chat | 2 | 3 |" in capsys.readouterr().out
    (result,) = read_results(["first.json"])
    assert result["tasks"].keys() == {"chat", "prompts", "all"} and result["policy"] == "FullBlock()"
    assert result["sampling"] == {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 8, "seed": 0}
    assert run(f"{words} --result_file first.json") == 2
    assert "first.json exists" in capsys.readouterr().err
    otherwise = words.replace("--temperature 1", "--temperature 0")
    assert run(f"{otherwise} --result_file second.json --baseline first.json") == 2
    assert "temperature 1; this run is of target, greedy: decode the same way" in capsys.readouterr().err
    for changed, told in (
        (f"{words} --policy threshold=0.5", "another policy, FullBlock(), than this run, ConfidenceThreshold("),
        (words.replace("_tokens 8", "_tokens 9"), "another max_new_tokens, 8, than this run, 9"),
        (f"{words} --dtype bfloat16", "another dtype of the target, torch.float32, than this run, torch.bfloat16"),
        (f"{words} --num_prompts 1", "another number of prompts of chat, 2, than this run, 1"),
    ):
        assert run(f"{changed} --result_file second.json --baseline first.json") == 2
        assert told in capsys.readouterr().err
    assert run(f"{words} --result_file second.json --baseline first.json") == 0
    assert "+0%" in capsys.readouterr().out  # the same seed, the same tokens


def test_eval_compares_with_plain_decoding_and_lists_what_failed(folders, capsys):
    Path("mixed.jsonl").write_text('"what is up"\n' + json.dumps("what " * 300) + '\n{"turns": ["up", "much"]}\n')
    words = f"eval {PAIR} --tasks talk=mixed.jsonl --temperature 0 --max_new_tokens 6 --compare --output out.json"
    assert run(f"{words} --no_chat_template") == 1  # a part failed
    printed = capsys.readouterr()
    assert "| talk | 2 | 3 |" in printed.out and "3 of 3" in printed.out
    assert "talk line 2 failed: a prompt of 300 tokens" in printed.err
    (result,) = read_results(["out.json"])
    assert [(part["task"], part["line"]) for part in result["failed"]] == [("talk", 2)]
    assert result["tasks"]["talk"]["speedup"]["identical"] == 3


def test_eval_measures_a_target_alone(folders, capsys):
    words = "eval --target target --dtype float32 --prompts prompts.jsonl --max_new_tokens 4 --temperature 0"
    assert run(f"{words} --batch_size 2 --json") == 0
    found = document(capsys)
    assert found["draft"] == {} and found["tasks"]["prompts"]["tokens_per_second"] > 0
    assert run(f"{words} --policy full --result_file other.json") == 2
    assert "--policy needs --draft" in one_line(capsys)


def test_eval_goes_on_where_it_was_interrupted(folders, capsys, monkeypatch):
    words = f"eval {PAIR} --prompts prompts.jsonl --max_new_tokens 4 --temperature 1 --result_file out.json"
    real, calls = hf_dspark.evaluation_run.timed_call, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr("hf_dspark.evaluation.run.timed_call", interrupted)
    assert run(words) == 130
    assert "the same command goes on from there" in capsys.readouterr().err and not Path("out.json").exists()
    assert run(words) == 0 and len(calls) == 3 + 1 + 2  # the warm-up, and the two that were not finished
    assert len(read_results(["out.json"])[0]["records"]) == 3
    calls.clear()
    assert run(f"{words} --seed 1 --overwrite") == 130
    assert run(f"{words} --overwrite") == 2
    assert "differs in seed (1 there, 0 now)" in one_line(capsys)


def test_calibrate_changes_the_config_alone_and_keeps_each_regime(folders, capsys):
    weights, config = Path("draft/model.safetensors").read_bytes(), json.loads(Path("draft/config.json").read_text())
    words = f"calibrate {PAIR} --draft_dtype bfloat16 --prompts_file prompts.jsonl --max_new_tokens 12"
    assert run(f"{words} --temperature 0 --json") == 0
    assert document(capsys)["domain"] == "greedy"
    assert run(f"{words} --temperature 1") == 0
    temperatures = DSparkDraftModel.from_pretrained("draft").config.sts_temperatures
    assert temperatures.keys() == {"default", "greedy", "sampled"} and len(temperatures["greedy"]) == 4
    assert Path("draft/model.safetensors").read_bytes() == weights
    assert json.loads(Path("draft/config.json").read_text()) == config | {"sts_temperatures": temperatures}
    results = read_results(["draft/results"])
    assert [result["domain"] for result in results] == ["greedy", "sampled"]
    assert all(result["num_prompts"] == 3 and len(result["temperatures"]) == 4 for result in results)


def test_calibrate_leaves_the_draft_alone_when_another_folder_is_named(folders, capsys):
    words = f"calibrate {PAIR} --prompts_file prompts.jsonl --max_new_tokens 12 --domain math/greedy --temperature 0"
    assert run(f"{words} --output_dir calibrated") == 0
    assert DSparkDraftModel.from_pretrained("draft").config.sts_temperatures is None
    assert "math/greedy" in DSparkDraftModel.from_pretrained("calibrated").config.sts_temperatures
    assert Path("calibrated/results/calibration-math-greedy.json").exists()
    assert run(f"{words} --output_dir calibrated") == 2
    assert "not empty" in capsys.readouterr().err


def test_scheduling_works_as_soon_as_the_machine_is_profiled(folders, capsys):
    assert run(f"generate {PAIR} --policy scheduled --max_new_tokens 4 up") == 2
    assert "hf-dspark profile" in capsys.readouterr().err
    words = f"profile {PAIR} --batch_sizes 1 2 --context_lengths 8 16 --repetitions 1"
    assert run(f"{words} --output_file sps.json --format sglang --json") == 0
    table = document(capsys)["table"]
    assert json.loads(Path("sps.json").read_text()) == table
    assert run(f"generate {PAIR} --policy scheduled --max_new_tokens 4 --json up") == 0
    assert document(capsys)["policy"].startswith("AdaptiveDrafting(policy=PrefixScheduler(cost=ThroughputTable[")


# ---- convert, push, card


def test_formats_on_the_command_line_are_those_of_the_library():
    assert set(ConvertOptions.__annotations__["to"].__args__) == set(FORMAT_NAMES)


def test_convert_there_and_back_keeps_the_tokens(folders, capsys):
    assert run("convert --to deepspec --target target draft there --json") == 0
    assert document(capsys)["format"] == "deepspec"
    assert run("convert --to hf_dspark there back") == 0
    answers = {}
    for name in ("draft", "back"):
        capsys.readouterr()
        assert run(f"generate --target target --draft {name} --max_new_tokens 8 --temperature 1 --json up") == 0
        answers[name] = document(capsys)["answers"][0]["token_ids"]
    assert answers["draft"] == answers["back"]
    assert run("convert --to deepspec --target target draft there") == 2
    assert "there exists and is not empty" in capsys.readouterr().err


def test_card_is_made_of_results_and_replaces_none_silently(folders, capsys):
    assert (
        run(f"eval {PAIR} --temperature 0 --max_new_tokens 8 --prompts math=prompts.jsonl --result_file math.json")
        == 0
    )
    (result,) = read_results(["math.json"])
    assert run("card draft --results math.json --license mit") == 0
    text = Path("draft/README.md").read_text()
    assert f"{result['tasks']['math']['tau']:.2f}" in text and "license: mit" in text
    assert run("card draft --results math.json") == 2
    assert "README.md exists" in capsys.readouterr().err
    assert run("card draft --overwrite --json") == 0
    assert document(capsys)["results"] == []


def test_push_hands_folder_and_results_to_the_hub(folders, capsys, monkeypatch):
    run(f"eval {PAIR} --temperature 0 --max_new_tokens 4 --prompts prompts.jsonl --result_file draft/results/a.json")
    capsys.readouterr()
    calls = []

    def push_draft(draft, repo_id, results=(), **kwargs):
        calls.append((draft, repo_id, list(results), kwargs["private"]))
        return "https://hub/me/mine"

    monkeypatch.setattr("hf_dspark.sharing.hub.push_draft", push_draft)
    assert run("push draft me/mine --private --json") == 0
    assert calls == [("draft", "me/mine", [Path("draft/results")], True)]
    assert document(capsys)["url"] == "https://hub/me/mine"


def test_push_that_fails_while_uploading_ends_with_one(folders, capsys):
    assert run("push draft me/mine") == 1  # no Hub is reachable in the tests
    assert one_line(capsys).startswith("hf-dspark push: error: the draft could not be uploaded to me/mine")


# ---- what users get wrong


def one_line(capsys) -> str:
    """Return what was said about an error: a single line behind everything else, no traceback."""
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err.rstrip("\n").split("\n")[-1]


WRONG = {
    "unknown folder": ("generate --target ./nowhere --draft draft up", "--target: there is no folder ./nowhere"),
    "unknown draft": ("generate --target target --draft no/such/draft up", "no folder no/such/draft"),
    "folder without a model": ("generate --target empty --draft draft up", "the folder empty holds no model"),
    "a target as draft": ("generate --target target --draft target up", "is no draft"),
    "draft of another target": ("generate --target other --draft draft up", "does not fit the target other"),
    "missing file": (f"eval {PAIR} --prompts nowhere.jsonl", "nowhere.jsonl: there is no such file"),
    "no prompts": (f"eval {PAIR} --prompts empty.jsonl", "empty.jsonl holds no prompt"),
    "two domains of one name": (f"eval {PAIR} --prompts a=prompts.jsonl a=prompts.jsonl", "'a' twice"),
    "wrong policy": (f"generate {PAIR} --policy fastest up", "--policy must be one of default, full, scheduled"),
    "wrong temperature": (f"generate {PAIR} --temperature -1 up", "--temperature must be 0 or positive"),
    "greedy with top_k": (f"generate {PAIR} --temperature 0 --top_k 5 up", "needs no --top_k"),
    "two quantisations": (f"generate {PAIR} --load_in_8bit --load_in_4bit up", "exclude each other"),
    "words and file": (f"generate {PAIR} --prompts_file prompts.jsonl up", "give one of them"),
    "both thinkings": (f"generate {PAIR} --enable_thinking --no_thinking up", "exclude each other"),
    "endpoint without model": (
        "regenerate --endpoint http://x --prompts_file p --output_file o", "--endpoint and --model belong together",
    ),
    "nobody to answer": ("regenerate --prompts_file prompts.jsonl --output_file o", "who answers?"),
    "key that is not set": (
        "regenerate --endpoint http://x --model m --api_key_env NO_SUCH_KEY --prompts_file prompts.jsonl "
        "--output_file o", "NO_SUCH_KEY is not set",
    ),
    "result that is none": (f"eval {PAIR} --prompts prompts.jsonl --baseline empty.jsonl", "empty.jsonl"),
    "too few rows": (
        "train --target target --train_file prompts.jsonl --eval_rows 9 --output_dir o", "nothing to train on",
    ),
    "training without a folder": ("train --target target --train_file prompts.jsonl", "--output_dir is needed"),
    "broken result": ("card draft --results empty.jsonl", "empty.jsonl cannot be used"),
    "measuring for nobody": (f"profile {PAIR} --no_cache", "--no_cache without --output_file"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_on_stderr_and_ends_with_two(folders, capsys, make_target, name):
    make_target(vocab_size=40, hidden_size=16).save_pretrained("other")
    AutoTokenizer.from_pretrained("target").save_pretrained("other")
    Path("empty").mkdir()
    Path("empty.jsonl").write_text("\n")
    words, said = WRONG[name]
    assert run(words) == 2
    line = one_line(capsys)
    assert line.startswith(f"hf-dspark {words.split()[0]}: error: ") and said in line


@pytest.mark.parametrize("words", ["", "nonsense", "generate", "eval --target t --draft d --prompts p --speed 9"])
def test_words_that_are_not_understood_end_with_two(capsys, words):
    assert run(words) == 2
    printed = capsys.readouterr()
    assert "usage: hf-dspark" in printed.err and "error:" in printed.err and printed.out == ""


def test_malformed_lines_are_named_and_the_others_are_answered(folders, capsys):
    Path("mixed.jsonl").write_bytes(b'"up"\n{"prompt": \n\n{"turns": []}\n{"text": "up"}\n"\xff"\n"what"\n')
    assert run(f"eval {PAIR} --prompts mixed.jsonl --max_new_tokens 4 --json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["tasks"]["mixed"]["prompts"] == 2
    assert [part["line"] for part in found["failed"]] == [2, 4, 5, 6]
    assert [fault.split(":")[0].split(" is ")[0] for fault in found["skipped_lines"]] == [
        f"mixed.jsonl line {number}" for number in (2, 6, 4, 5)
    ]
    assert all(fault in printed.err for fault in found["skipped_lines"])


def test_quantising_without_bitsandbytes_says_what_to_install(folders, capsys, monkeypatch):
    monkeypatch.setattr("hf_dspark.cli.options.importlib.util.find_spec", lambda name: None)
    assert run(f"generate {PAIR} --load_in_8bit up") == 2
    assert "pip install 'hf_dspark[quantization]'" in one_line(capsys)


def test_a_draft_in_a_foreign_format_is_loaded_as_it_is(fixtures):
    draft = load_draft(str(fixtures / "speculators" / "full_vocab_vanilla"))
    assert (draft.config.block_size, draft.config.target_model_type) == (5, None)


def test_a_damaged_checkpoint_is_one_line(folders, capsys):
    path = Path("draft/model.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert run(f"generate {PAIR} up") == 2
    assert one_line(capsys).startswith("hf-dspark generate: error: ")


def test_an_interruption_keeps_answers_and_ends_with_130(folders, capsys, monkeypatch):
    from hf_dspark.decoding.regenerate import _Session

    real, calls = _Session._answer_batch, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(_Session, "_answer_batch", interrupted)
    words = (
        "regenerate --target target --prompts_file prompts.jsonl --output_file answers.jsonl --batch_size 1 "
        "--max_new_tokens 4 --temperature 1"
    )
    assert run(words) == 130
    assert "interrupted; answers are kept" in one_line(capsys)
    assert len(Path("answers.jsonl").read_text().strip().split("\n")) == 1
    monkeypatch.setattr(_Session, "_answer_batch", real)
    assert run(f"{words} --json") == 0
    assert document(capsys)["num_answers"] == 3


def test_errors_are_json_on_request(folders, capsys):
    assert run("--json generate --target ./nowhere --draft draft up") == 2
    assert document(capsys) == {"error": "--target: there is no folder ./nowhere", "exit_code": 2}


@pytest.mark.parametrize("how", ["--debug", "HF_DSPARK_DEBUG"])
def test_tracebacks_are_shown_on_request(folders, capsys, monkeypatch, how):
    if how == "HF_DSPARK_DEBUG":
        monkeypatch.setenv(how, "1")
    assert run(f"generate --target ./nowhere --draft draft {how if how.startswith('-') else ''} up") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("bug", [KeyError("x"), AttributeError("x"), AssertionError(), RuntimeError("x")])
def test_a_bug_shows_its_traceback_and_ends_with_one(folders, capsys, monkeypatch, bug):
    def broken(*args, **kwargs):
        raise bug

    monkeypatch.setattr("hf_dspark.cli.decoding.load_pair", broken)
    assert run(f"generate {PAIR} up") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("give another"), 2),
        (TypeError("give another"), 2),
        (FileNotFoundError(2, "No such file or directory"), 2),
        (OSError(28, "No space left on device"), 1),
        (torch.OutOfMemoryError("full"), 1),
        (ConnectionError("no answer"), 1),
        (KeyError("a bug"), None),
    ],
)
def test_exit_codes_tell_wrong_input_from_what_failed_while_working(error, code):
    assert exit_code(error) == code


# ---- help, entry points


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_shows_an_example_that_parses(capsys, name):
    assert run(f"{name} --help") == 0
    printed = capsys.readouterr().out
    assert f"usage: hf-dspark {name} " in printed and "--json" in printed
    options, _ = COMMANDS[name].load()
    for example in COMMANDS[name].examples:
        assert f"hf-dspark {example}" in printed
        parser, _ = hf_dspark.cli.main.build_parser(name, options)
        namespace = parser.parse_args(shlex.split(example))
        for kind in options:
            if kind.__module__ == "hf_dspark.cli.options":  # the training arguments look for a GPU
                hf_dspark.cli.main._of_type(kind, namespace)


def test_help_lists_the_commands_and_exit_codes(capsys):
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(f"    {name}" in printed for name in COMMANDS) and "130" in printed
    assert run("--version") == 0
    assert hf_dspark.__version__ in capsys.readouterr().out


def test_every_option_says_what_it_does(capsys):
    for name, command in COMMANDS.items():
        options, _ = command.load()
        _, parser = hf_dspark.cli.main.build_parser(name, options)
        assert all(action.help for action in parser._actions if name != "train"), name


def test_the_script_and_the_module_run_main(capsys, monkeypatch):
    assert 'hf-dspark = "hf_dspark.cli:main"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(sys, "argv", ["somewhere/hf_dspark/__main__.py", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("hf_dspark", run_name="__main__")
    assert stop.value.code == 0 and capsys.readouterr().out == f"hf-dspark {hf_dspark.__version__}\n"
    assert sys.argv[0] == "hf-dspark"  # what provenance notes


def test_nothing_imports_the_command_line():
    package = Path(hf_dspark.__file__).parent
    for path in package.glob("*.py"):
        if path.stem.startswith("cli") or path.stem == "__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("cli"), path.name


def test_sampling_options_leave_unsaid_what_is_not_given():
    assert SamplingOptions().temperature is None
    with pytest.raises(ValueError, match="--max_new_tokens must be at least 1"):
        SamplingOptions(max_new_tokens=0)
