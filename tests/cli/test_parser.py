"""`hf-dspark` before anything is loaded: help, wrong words, exit codes of errors."""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dspark_cli
from hf_dspark.formats.tables import FORMAT_NAMES
from hf_dspark_cli import main
from hf_dspark_cli.parser import COMMANDS, FORMATS, build_parsers, parse

PACKAGE = Path(hf_dspark_cli.__file__).parent
NAMES = [declare.__name__.strip("_") for part in COMMANDS.values() for declare in part]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What passes for models and prompts as long as nothing is loaded."""
    monkeypatch.chdir(tmp_path)
    for folder in ("target", "draft", "empty"):
        Path(folder).mkdir()
    for name in ("target/config.json", "draft/config.json", "prompts.jsonl", "there.json"):
        Path(name).touch()


def run(words: str) -> int:
    """Run a command line; return its exit code."""
    try:
        return main(shlex.split(words))
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("name", NAMES)
def test_help_of_every_command_describes_all_options_and_shows_an_example_that_parses(capsys, monkeypatch, name):
    monkeypatch.chdir(PACKAGE.parents[1])
    for kind in ("model", "file"):
        monkeypatch.setattr(f"hf_dspark_cli.parser.{kind}", str)
    assert run(f"{name} --help") == 0
    printed = capsys.readouterr().out
    assert f"usage: hf-dspark {name} " in printed and "--json" in printed and "--quiet" in printed
    text = printed.partition("example: hf-dspark ")[2].partition("\n\n")[0]
    options = parse(shlex.split(text.replace("\n", " ").replace("$'", "'")))
    assert options.command == name and options.module and options.kept
    assert all(action.help for action in build_parsers()[1][name]._actions)
    lines = printed.partition("\noptions:")[2].split("\n")
    listed = [line.split()[0].strip("-") for line in lines if line.startswith("  --")]
    assert len(listed) == len({word.replace("-", "_") for word in listed})  # each in one spelling


def test_help_and_wrong_words_are_answered_without_loading_anything():
    asked = ["--help", "--version", "generate --help", "train --help"]
    wrong = ["nonsense", "eval --speed 9", "profile", "convert --to foo"]
    program = """
import sys
from hf_dspark_cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit:
        heavy = {'torch', 'transformers', 'hf_dspark', 'numpy'} & sys.modules.keys()
        assert not heavy, (words, heavy)
    else:
        raise AssertionError(words)
"""
    subprocess.run([sys.executable, "-c", program, *asked, *wrong], check=True, capture_output=True)


def test_help_of_training_shows_the_drafts_options_first_and_says_where_all_are(capsys):
    assert run("train --help") == 0
    own = capsys.readouterr().out
    assert "--help_all" in own and "--num_anchors" in own and "--draft_kind" in own and len(own.splitlines()) < 80
    assert run("train --help_all") == 0
    everything = capsys.readouterr().out
    assert "--warmup_steps" in everything and "--num_anchors" in everything and "--draft_kind" in everything


def test_the_script_and_the_module_run_main(capsys, monkeypatch):
    assert 'hf-dspark = "hf_dspark_cli:main"' in (PACKAGE.parents[1] / "pyproject.toml").read_text()
    monkeypatch.setattr(sys, "argv", ["somewhere/hf_dspark/__main__.py", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("hf_dspark", run_name="__main__")
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("hf-dspark 0.")
    assert sys.argv[0] == "hf-dspark"  # what provenance notes


PAIR = "--target target --draft draft"
WRONG = {
    "no command": ("", "required: COMMAND"),
    "unknown option": (f"generate {PAIR} --sead 9 up", "unrecognized arguments: --sead; did you mean --seed?"),
    "misspelt option that is needed": ("generate --targt t --draft d up", "--targt; did you mean --target?"),
    "option like no other": (f"generate {PAIR} --zzz up", "unrecognized arguments: --zzz (see"),
    "unknown option of a training": (
        "train --target target --train_file prompts.jsonl --output_dir o --learning_rat 1 --no_bf16",
        "unrecognized arguments: --learning_rat; did you mean --learning_rate?",
    ),
    "long command": (f"evaluate {PAIR}", "there is no command evaluate; did you mean eval?"),
    "short command": (f"regen {PAIR}", "did you mean regenerate?"),
    "mistyped command": ("trian", "did you mean train?"),
    "longer command": ("convert_checkpoint a b", "did you mean convert?"),
    "unknown command": ("help", "invalid choice: 'help' (choose from"),
    "a file for a folder": ("inspect prompts.jsonl", "DRAFT: prompts.jsonl is a file, a folder is needed"),
    "a folder for a file": (f"generate {PAIR} --prompts_file empty", "--prompts_file: empty is a folder"),
    "a place in a file": ("convert draft prompts.jsonl/out --to deepspec", "prompts.jsonl cannot be written to"),
    "a folder that is not set": ("train --target t/t --train_file there.json --output_dir ''", "output_dir is empty"),
    "an address that is not set": ("serve target --host ''", "host is empty: is a variable of the shell not set?"),
    "no such file": (f"eval {PAIR} --prompts math=maths.jsonl", "--prompts: there is no file maths.jsonl"),
    "unknown folder": ("generate --target ./nowhere --draft draft up", "--target: there is no folder ./nowhere"),
    "unknown draft": ("generate --target target --draft no/such/draft up", "no folder no/such/draft"),
    "wrong policy": (f"generate {PAIR} --policy fastest up", "must be one of default, full, scheduled, threshold=T"),
    "policy without number": (f"generate {PAIR} --policy tree=x up", "tree=N with N nodes; got 'tree=x'"),
    "wrong threshold": (f"generate {PAIR} --policy threshold=1.5 up", "must be in [0, 1], got 1.5"),
    "unknown format": ("convert --to foo draft out", "--to: invalid choice: 'foo' (choose from "),
    "wrong temperature": (f"generate {PAIR} --temperature -1 up", "--temperature: must be at least 0, got -1.0"),
    "wrong top_p": (f"generate {PAIR} --top_p 1.5 up", "--top_p: must be in [0, 1], got 1.5"),
    "greedy with top_k": (f"generate {PAIR} --temperature 0 --top_k 5 up", "needs no --top_k"),
    "words and file": (f"generate {PAIR} --prompts_file prompts.jsonl up", "not allowed with argument"),
    "shape of a draft that is there": (
        "train --target target --draft draft --train_file prompts.jsonl --output_dir o --draft_kind dspark "
        "--block-size 7 --markov_rank=256 --target_layer_ids 0 2",
        "--draft has its shape already: leave --draft_kind, --block_size, --markov_rank, --target_layer_ids out",
    ),
    "result that is there": (f"eval {PAIR} --prompts prompts.jsonl --result_file there.json", "there.json exists"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_one_line_on_stderr_and_end_with_two(files, capsys, name):
    words, said = WRONG[name]
    assert run(words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.rstrip("\n").split("\n")
    assert printed.out == "" and line.startswith("hf-dspark") and said in line


READ_ONLY = {
    "regenerate": "regenerate --target target --prompts_file prompts.jsonl --output_file locked/answers.jsonl",
    "train": "train --target target --train_file prompts.jsonl --output_dir locked/draft",
    "calibrate": f"calibrate {PAIR} --prompts_file prompts.jsonl --output_dir locked/draft",
    "rounds": f"calibrate {PAIR} --prompts_file prompts.jsonl --rounds_file locked/rounds.jsonl",
    "profile": f"profile {PAIR} --output_file locked/sps.json",
    "eval": f"eval {PAIR} --prompts prompts.jsonl --result_file locked/deep/result.json",
    "convert": "convert --to deepspec draft locked/deepspec",
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_places_that_cannot_be_written_to_are_refused_before_work(files, capsys, monkeypatch, name):
    Path("locked").mkdir()
    Path("locked/config.json").touch()
    monkeypatch.setattr("os.access", lambda path, mode: "locked" not in str(path))  # the superuser may write anywhere
    assert run(READ_ONLY[name]) == 2
    assert "locked cannot be written to: name another place" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_a_command_quietly(files, capfd, monkeypatch):
    monkeypatch.setattr("hf_dspark_cli.share.run_convert", lambda *_: (_ for _ in ()).throw(BrokenPipeError(32, "")))
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    assert run("convert --to deepspec draft out") == 1
    assert capfd.readouterr() == ("", "")


def test_words_with_dashes_are_understood_and_the_trainers_are_left_to_it(files):
    options = parse(shlex.split(f"generate {PAIR} --max-new-tokens=8 --batch-size 2 a-prompt"))
    assert (options.max_new_tokens, options.batch_size, options.prompts) == (8, 2, ["a-prompt"])
    options = parse(shlex.split(f"generate {PAIR} --batch-size 2 -- --no-one -- a-prompt"))
    assert (options.batch_size, options.prompts) == (2, ["--no-one", "--", "a-prompt"])  # after the first --, as given
    words = "train --target target --train_file prompts.jsonl --output_dir o --block_size 3 --max_steps 9 --bf16"
    options = parse(shlex.split(words))
    assert options.output_dir == "o" and options.trainer_words == ["--max_steps", "9", "--bf16"]


def test_formats_are_those_that_the_package_converts_to():
    assert set(FORMATS) == set(FORMAT_NAMES)


@pytest.mark.parametrize(
    ("error", "code", "said", "traced"),
    [
        (ValueError("give\nanother"), 2, "error: give another", False),
        (ConnectionError("no answer"), 1, "error: no answer; nothing was written", False),
        (RuntimeError("a bug"), 1, "error: a bug; nothing was written", True),
        (AssertionError(), 1, "error: AssertionError; nothing was written", True),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written", False),
    ],
)
def test_exit_codes_tell_wrong_input_from_what_failed(files, capsys, monkeypatch, error, code, said, traced):
    def broken(*args):
        raise error

    monkeypatch.setattr("hf_dspark_cli.share.run_convert", broken)
    assert run("convert --to deepspec draft out") == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.rstrip("\n").split("\n")[-1] == f"hf-dspark convert: {said}"
    assert ("Traceback" in printed.err) == traced
    monkeypatch.setenv("HF_DSPARK_DEBUG", "1")
    assert run("convert --to deepspec draft out") == code
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)
