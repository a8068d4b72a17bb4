"""`hf-dspark`: the command line. Words in, one command run, an exit code out.

Knows nothing of what the commands do. Exit codes: 0 done, 1 something failed while working, 2 wrong words or input,
130 interrupted.
"""

import argparse
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from textwrap import fill
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import HfArgumentParser

from .. import __version__
from .console import Console, Outcome
from .decoding import run_generate, run_regenerate
from .measuring import run_calibrate, run_eval, run_profile
from .options import (
    AnsweringTargetOptions,
    CalibrateOptions,
    CardOptions,
    ChatOptions,
    ConvertOptions,
    DraftOptions,
    EvalOptions,
    EvaluatedDraftOptions,
    GenerateOptions,
    HelpingDraftOptions,
    ProfileOptions,
    PushOptions,
    RegenerateOptions,
    SamplingOptions,
    TargetOptions,
    TrainOptions,
)
from .sharing import run_card, run_convert, run_push

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
DEBUG_VARIABLE = "HF_DSPARK_DEBUG"
PROGRAM = "hf-dspark"
PAIR = "--target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft"
PROMPTS = "examples/gsm8k_pair/prompts.jsonl"
# Of the ways in which opening a file can fail, those that another word on the command line cures.
CURABLE = (errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EACCES)
PASSING = (ConnectionError, TimeoutError, HfHubHTTPError, MemoryError, torch.OutOfMemoryError, FloatingPointError)


@dataclass(frozen=True)
class Word:
    """An argument by its place.

    Args:
        name, help (`str`): For the usage and the help.
        nargs (`str`, *optional*): As for `argparse`; one unless given.
    """

    name: str
    help: str
    nargs: str | None = None


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        summary (`str`): One line for the list.
        usage (`str`): What must be given.
        description (`str`): What it does, and what it writes.
        examples (`tuple[str, ...]`): Commands that work in a checkout, without the program's name.
        load (`Callable`): Returns the classes of its options, and the function that runs it.
        words (`tuple[Word, ...]`): Arguments by their place.
        after_interruption (`str`): What is left when it was interrupted.
    """

    summary: str
    usage: str
    description: str
    examples: tuple[str, ...]
    load: Callable[[], tuple[tuple[type, ...], Callable[..., Outcome]]]
    words: tuple[Word, ...] = ()
    after_interruption: str = "nothing was written"


def _load_train() -> tuple[tuple[type, ...], Callable[..., Outcome]]:
    from .training import TrainingArguments, run_train  # slow to import: only who trains waits for it

    return (TrainOptions, TargetOptions, TrainingArguments), run_train


DECODING = (TargetOptions, DraftOptions, ChatOptions, SamplingOptions)
COMMANDS = {
    "generate": Command(
        "answer prompts with a draft, faster and with the same tokens",
        "--target MODEL --draft MODEL [options] [PROMPT ...]",
        "Answer prompts with a draft. Prompts are words, lines of a file, or stdin as a whole. Answers go to stdout: "
        "a single one while it grows, several as they finish; times and tokens per round go to stderr.",
        (
            f"generate {PAIR} --dtype float32 --temperature 0 --compare "
            "$'Question: Tom has 3 boxes of 12 pens. How many pens has he?\\nAnswer:'",
            f"generate {PAIR} --prompts_file {PROMPTS} --batch_size 16 --json",
        ),
        lambda: ((GenerateOptions, *DECODING), run_generate),
        (Word("prompt", "A prompt; quote it. Without any, and without --prompts_file, stdin is one.", "*"),),
        "answers that were finished stand above",
    ),
    "train": Command(
        "train a draft for a target, or fine-tune one",
        "--target MODEL --train_file FILE --output_dir FOLDER [options]",
        "Train a draft on what its target writes (see regenerate), or fine-tune one with --draft. All arguments of "
        "transformers' Trainer can be given. Writes the draft, its card, checkpoints and results/training.json "
        "into --output_dir. On several GPUs: accelerate launch -m hf_dspark train ...",
        (
            "train --target Qwen/Qwen3-4B --train_file answers.jsonl --eval_rows 200 --output_dir my-draft --bf16 "
            "--packing --max_length 4096 --num_anchors 512 --learning_rate 6e-4 --num_train_epochs 6",
            "train --target Qwen/Qwen3-4B --draft my-draft --train_file poems.jsonl --output_dir my-draft-poems",
        ),
        _load_train,
        (),
        "checkpoints are kept: --resume_from_checkpoint last goes on from the newest",
    ),
    "regenerate": Command(
        "let a target answer prompts itself, to train a draft on",
        "(--target MODEL | --endpoint URL --model NAME) --prompts_file FILE --output_file FILE [options]",
        "Let the target, in process or behind an OpenAI-compatible server, answer prompts in its own words. Writes "
        "one JSON line per answer to --output_file, and beside it FILE.settings.json with what it was made with.",
        (
            f"regenerate {PAIR} --prompts_file {PROMPTS} --output_file out/answers.jsonl --temperature 1",
            "regenerate --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-32B --prompts_file prompts.jsonl "
            "--output_file answers.jsonl",
        ),
        lambda: (
            (RegenerateOptions, AnsweringTargetOptions, HelpingDraftOptions, ChatOptions, SamplingOptions),
            run_regenerate,
        ),
        (),
        "answers are kept: the same command goes on from there",
    ),
    "calibrate": Command(
        "fit a draft's confidences, which schedulers rely on",
        "--target MODEL --draft MODEL --prompts_file FILE [options]",
        "Decode prompts, and fit one temperature per draft position, so that predicted acceptance is true. Do it once "
        "with --temperature 0 and once without. Writes the temperatures into the draft's config.json and a result of "
        "the kind calibration.",
        (f"calibrate {PAIR} --prompts_file {PROMPTS} --temperature 0 --output_dir out/calibrated",),
        lambda: ((CalibrateOptions, *DECODING), run_calibrate),
        (),
        "rounds in --rounds_file are kept: the same command goes on from there",
    ),
    "profile": Command(
        "measure what a step costs on this machine, which schedulers rely on",
        "--target MODEL --draft MODEL [options]",
        "Time drafting and verifying on this machine. Writes the table where generate() finds it by itself, and to "
        "--output_file.",
        (f"profile {PAIR} --batch_sizes 1 4 16 --output_file out/sps.json",),
        lambda: ((ProfileOptions, TargetOptions, DraftOptions), run_profile),
    ),
    "eval": Command(
        "measure how much of its drafts a target accepts, and how fast it decodes",
        "--target MODEL [--draft MODEL] --prompts NAME=FILE [NAME=FILE ...] [options]",
        "Decode prompts of one or more tasks, turn by turn, and report tokens per round (tau), acceptance by "
        "position, calibration and speed. Writes a result of the kind evaluation, with every round, to --result_file "
        "and prints a table.",
        (
            f"eval {PAIR} --prompts math={PROMPTS} --temperature 0 --num_prompts 20 --compare --result_file "
            "out/math.json",
        ),
        lambda: ((EvalOptions, TargetOptions, EvaluatedDraftOptions, ChatOptions, SamplingOptions), run_eval),
        (),
        "finished turns are kept: the same command goes on from there",
    ),
    "convert": Command(
        "write a draft in another project's format, or read one",
        "--to FORMAT [--target MODEL] SOURCE DESTINATION",
        "Write a draft in another format: for DeepSpec (also read by vLLM, SGLang and llama.cpp's converter), "
        "speculators (vLLM), SGLang, transformers' own DFlash, or ours. Whatever the target format cannot hold is "
        "refused with the reason. Writes a new folder.",
        ("convert --to deepspec examples/gsm8k_pair/draft out/deepspec --target examples/gsm8k_pair/target",),
        lambda: ((ConvertOptions,), run_convert),
        (Word("source", "Hub id or folder of the draft."), Word("destination", "Folder to write.")),
    ),
    "push": Command(
        "publish a draft on the Hub, with a card made from results",
        "[--results FILE ...] [--private] FOLDER REPOSITORY",
        "Publish a draft: weights, config with temperatures, results, a model card made from them, and the code that "
        "lets it decode where only transformers is installed. Log in first: hf auth login.",
        ("push my-draft me/my-draft --private --results my-draft/results acceptance.json",),
        lambda: ((PushOptions,), run_push),
        (Word("folder", "Folder of the draft."), Word("repository", "Repository, such as me/my-draft.")),
        "the repository is as it was, or new and empty",
    ),
    "card": Command(
        "write a draft's model card from results",
        "[--results FILE ...] [--output FILE] FOLDER",
        "Write the model card of a draft. Its numbers come from result files of train, calibrate and eval; without "
        "any, it says that nothing was measured.",
        ("card examples/gsm8k_pair/draft --results out/math.json --output out/README.md",),
        lambda: ((CardOptions,), run_card),
        (Word("folder", "Folder of the draft."),),
    ),
}


class _HelpFormatter(
    argparse.MetavarTypeHelpFormatter, argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """Shows types, and defaults where there are any; leaves examples as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.nargs == 0 or action.default in (None, [])
        return action.help if without else super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        name = super()._get_default_metavar_for_optional(action)
        return {"string_to_bool": "bool"}.get(name, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): The words behind the program's name; those of this process unless given.

    Returns:
        `int`: The exit code.

    Raises:
        SystemExit: If the words are wrong, or ask for help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    command = COMMANDS.get(name)
    option_types, run = ((), None) if command is None else command.load()
    parser, chosen = build_parser(name, option_types)
    namespace = parser.parse_args(words)
    console = Console(sys.stdout, namespace.json)
    debug = namespace.traceback or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    try:
        with redirect_stdout(sys.stderr):  # what libraries print is no answer
            options = [_of_type(kind, namespace) for kind in option_types]
            outcome = run(console, _words_of(command, namespace), *options)
    except KeyboardInterrupt:
        return _report(console, chosen.prog, f"interrupted; {command.after_interruption}", INTERRUPTED)
    except Exception as error:
        code = exit_code(error)
        if debug or code is None:
            traceback.print_exc()
        return _report(console, chosen.prog, f"error: {_one_line(error)}", FAILED if code is None else code)
    if console.as_json and outcome.document is not None:
        print(json.dumps(outcome.document, indent=1, ensure_ascii=False, allow_nan=False), flush=True)
    return FAILED if outcome.failed else DONE


def build_parser(
    chosen: str | None = None, option_types: Sequence[type] = ()
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser, and that of the chosen command, which alone has its options: some are slow to make.

    Args:
        chosen (`str`, *optional*): The command.
        option_types (`Sequence[type]`): Dataclasses of its options.
    """
    parser = argparse.ArgumentParser(
        PROGRAM, f"{PROGRAM} COMMAND [options]", "DSpark speculative decoding for transformers: faster generate(), "
        "the same tokens.", f"{PROGRAM} COMMAND --help tells what a command does, with examples.\n\nexit codes: 0 "
        "done, 1 something failed while working, 2 wrong words or input, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    _add_common_options(parser, name_of_debug="--debug", default=False)
    commands = parser.add_subparsers(prog=PROGRAM, metavar="COMMAND", required=True, parser_class=HfArgumentParser)
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=command.summary, usage=f"{PROGRAM} {name} {command.usage}",
            description=fill(command.description, 79),
            dataclass_types=option_types if name == chosen else (), allow_abbrev=False, formatter_class=_HelpFormatter,
            epilog="\n  ".join(["examples:", *(f"{PROGRAM} {example}" for example in command.examples)]),
        )  # fmt: skip
    if chosen in parsers:
        for word in COMMANDS[chosen].words:
            parsers[chosen].add_argument(f"word_{word.name}", metavar=word.name.upper(), help=word.help, type=str,
                                         nargs=word.nargs)  # fmt: skip
        # Trainer has a --debug of its own.
        name_of_debug = None if chosen == "train" else "--debug"
        _add_common_options(parsers[chosen], name_of_debug, default=argparse.SUPPRESS)
    return parser, parsers.get(chosen, parser)


def _add_common_options(parser: argparse.ArgumentParser, name_of_debug: str | None, default: Any) -> None:
    parser.add_argument(
        "--json", action="store_true", default=default, help="Print one JSON document to stdout, and nothing else."
    )
    if name_of_debug is not None:
        parser.add_argument(
            name_of_debug, action="store_true", default=default, dest="traceback",
            help=f"Show where an error came from; the same as {DEBUG_VARIABLE}=1.",
        )  # fmt: skip


def _of_type(kind: type, namespace: argparse.Namespace) -> Any:
    return kind(**{part.name: getattr(namespace, part.name) for part in fields(kind) if part.init})


def _words_of(command: Command, namespace: argparse.Namespace) -> list[str]:
    words: list[str] = []
    for word in command.words:
        value = getattr(namespace, f"word_{word.name}")
        words += value if isinstance(value, list) else [value]
    return words


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is meant for the user; `None` of one that only a bug explains.

    A bug may raise a `ValueError` or `TypeError`, too: `--debug` shows where any error came from.
    """
    if isinstance(error, PASSING):
        return FAILED
    if isinstance(error, OSError):
        return WRONG_INPUT if error.errno is None or error.errno in CURABLE else FAILED
    return WRONG_INPUT if isinstance(error, (ValueError, TypeError, SafetensorError, ImportError)) else None


def _report(console: Console, program: str, message: str, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr, flush=True)
    if console.as_json:
        print(json.dumps({"error": message.removeprefix("error: "), "exit_code": code}), flush=True)
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
