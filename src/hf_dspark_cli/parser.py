"""The arguments that `hf-dspark` understands: a function per command adds its options, and its docstring is the help.

Imports the standard library alone, so that help and mistakes are answered at once.
"""

import os
import re
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

PROGRAM = "hf-dspark"
WRONG_WORDS = 2
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("hf_dspark", "deepspec", "speculators", "sglang", "transformers")  # `formats.tables` needs torch
SHAPE = ("draft_kind", "num_hidden_layers", "block_size", "markov_rank", "markov_head_type", "target_layer_ids")
EPILOG = """hf-dspark COMMAND --help shows what a command does, with an example.

exit codes: 0 done, 1 failed, 2 wrong arguments or input, 130 interrupted.
HF_DSPARK_DEBUG=1 shows where an error came from."""
POLICIES = "default, full, scheduled, threshold=T with T in [0, 1], tree=N with N nodes"
GOES_ON = "the same command goes on from there"
PROMPTS = "JSON Lines (or a JSON array, CSV, Parquet) of strings, or objects with 'prompt' or 'messages'; - is stdin"
TRAINING = """arguments of the training: all of transformers' Trainer, which --help_all shows, such as
--num_train_epochs, --learning_rate, --per_device_train_batch_size, --bf16 and --seed; and --max_length, at which
examples are cut (2048), --packing, which joins short documents, --num_anchors, blocks per document (64),
--feature_cache_dir, where the target's states are kept, and --resume_from_checkpoint FOLDER, of which last is the last
whole one"""


class Parser(ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_WORDS, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(words: Sequence[str]) -> Namespace:
    """Return what a command line says: the values of the command's options, and what the command was declared with."""
    parser, parsers = build_parsers()
    if words and words[0] not in parsers and (near := get_close_matches(words[0], parsers, 1, 0.55)):
        parser.error(f"there is no command {words[0]}; did you mean {near[0]}?")
    end = words.index("--") if "--" in words else len(words)  # after it, prompts may begin with dashes
    words = [*map(_with_underscores, words[:end]), *words[end:]]
    if words and words[0] in parsers:
        _require_known(parsers[words[0]], words[1:end], takes_more=words[0] == "train")
    options, unknown = parser.parse_known_args(words)
    if options.command == "race" and options.prompts_file is None:  # prompts after an option
        options.prompts, unknown = [*options.prompts, *unknown], []
    if options.command in ("generate", "race"):
        for word in filter(os.path.isfile, options.prompts):
            parsers[options.command].error(f"the prompt {word!r} is a file: pass it as --prompts_file {word}")
    options.trainer_words = unknown
    if unknown and options.command != "train":
        parsers[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("top_k", "top_p", "min_p"):
        if getattr(options, name, None) is not None and options.temperature == 0:
            parsers[options.command].error(f"--temperature 0 decodes greedily, which needs no --{name}: drop one")
    if empty := [name for name, value in vars(options).items() if value == "" and name != "kept_in"]:
        parsers[options.command].error(f"{', '.join(empty)} is empty: is a variable of the shell not set?")
    shaped = [f"--{name}" for name in SHAPE if getattr(options, name, None) is not None]
    if shaped and options.draft is not None:
        parsers[options.command].error(f"--draft has its shape already: leave {', '.join(shaped)} out")
    return options


def _require_known(parser: ArgumentParser, words: Sequence[str], takes_more: bool) -> None:
    """Exit at options that there are not, before those are missed that there should be."""
    known = set(parser._option_string_actions)
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = [name for name in names if not any(each.startswith(name) for each in known)]  # or shortened
    if takes_more and unknown:
        known |= _trainer_options()
        unknown = [name for name in unknown if name.replace("--no_", "--") not in known]
    if unknown:
        near = [match for name in sorted(unknown) for match in get_close_matches(name, known, 1, 0.75)]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(sorted(unknown))}{hint}")


def _trainer_options() -> set[str]:
    """Return the names of the training's arguments, and some more, from sources: importing them takes seconds."""
    files = ("transformers", "training_args"), ("hf_dspark", "training/arguments"), ("hf_dspark", "models/losses")
    sources = (Path(find_spec(package).origin).parent.joinpath(f"{name}.py").read_text() for package, name in files)
    return {f"--{name}" for source in sources for name in re.findall(r"^    (\w+): ", source, re.MULTILINE)}


def build_parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of all arguments, and that of each command."""
    shown: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    about = "DSpark speculative decoding for transformers: generate() faster, with the same output."
    parser = Parser(PROGRAM, description=about, epilog=EPILOG, **shown)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version('hf_dspark')}")
    commands = parser.add_subparsers(prog=PROGRAM, metavar="COMMAND", dest="command", required=True)
    for module, declare in [(module, each) for module, part in COMMANDS.items() for each in part]:
        parts = cleandoc(declare.__doc__).split("\n\n")
        command = commands.add_parser(
            declare.__name__.strip("_"),
            help=parts[0].rstrip("."),
            description="\n\n".join([*(fill(part, 79) for part in parts[:-1]), parts[-1]]),
            **shown,
        )
        command.set_defaults(module=module, kept="nothing was written", kept_in="")
        declare(command)
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        command.add_argument("--quiet", action="store_true", help="show neither progress nor notes")
    return parser, commands.choices


def _with_underscores(word: str) -> str:
    """Spell `--max-new-tokens` as `--max_new_tokens`: both are understood, one is shown."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


# ---- commands, in the order in which help lists them


def generate(parser: ArgumentParser) -> None:
    """Answer prompts with a draft, faster and with the same tokens.

    Prompts are arguments, lines of a file, or stdin. Answers go to stdout, a single one while it grows;
    times and tokens per round go to stderr.

    example: hf-dspark generate --target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft
      --dtype float32 --temperature 0 $'Question: How much are 4 pens at 3 dollars?\\nAnswer:'
    """
    add = parser.add_argument
    _add_prompts(parser)
    add("--batch_size", type=count, default=8, metavar="N", help="prompts decoded together at most (%(default)s)")
    add("--policy", type=policy, default=("default", None), help=f"how much of a block is verified: {POLICIES}")
    _add_models(parser)


def race(parser: ArgumentParser) -> None:
    """Tell which way of decoding is fastest for a target, its prompts and this machine.

    Decodes each prompt in all ways, one after the other: plain, by prompt lookup of transformers and of this package,
    with whole blocks of the draft, and as its default policy decides. Tells the speeds, and what that policy chose.

    example: hf-dspark race examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft --dtype float32
      --temperature 0 --max_new_tokens 32 --prompts_file examples/gsm8k_pair/prompts.jsonl --num_prompts 2
    """
    _add_models(parser, "; one that is found on the Hub, or lies in the cache, unless given", target="target")
    _add_prompts(parser, "some of several kinds")


def serve(parser: ArgumentParser) -> None:
    """Answer requests over HTTP: transformers' own server, whose model decodes with a draft.

    Has the routes of `transformers serve`, OpenAI's among them. Several clients take turns. Needs the extra serving of
    transformers. Ctrl-C ends it.

    example: hf-dspark serve examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft --port 8000
    """
    _add_target(parser, served=True)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="localhost", metavar="ADDRESS", help="to listen at; only this machine unless given")
    add("--port", type=within(int, 0, 65535), default=8000, metavar="N", help="to listen at; 0 is any (%(default)s)")
    add("--enable_cors", action="store_true", help="let web pages from anywhere send requests")


def chat(parser: ArgumentParser) -> None:
    """Chat on this terminal: transformers' own chat, with a server like that of `serve` for itself.

    Needs the extra serving of transformers.

    example: hf-dspark chat HuggingFaceTB/SmolLM2-135M-Instruct do_sample=False max_new_tokens=100 --draft auto
    """
    _add_target(parser, served=True)
    parser.add_argument("generate_flags", nargs="*", type=setting, metavar="NAME=VALUE", help="options of generate()")
    parser.add_argument("--system_prompt", metavar="TEXT", help="told to the model first")


def regenerate(parser: ArgumentParser) -> None:
    """Let a target answer prompts itself, to train a draft on.

    Writes one JSON line per answer to --output_file, and what it was made with to FILE.settings.json. The same
    command goes on where it was interrupted, and tries failed prompts again.

    example: hf-dspark regenerate --target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft
      --prompts_file examples/gsm8k_pair/prompts.jsonl --output_file out/answers.jsonl --temperature 1
    """
    add = parser.add_argument
    add("--prompts_file", type=file, required=True, metavar="FILE", help=PROMPTS)
    add("--output_file", type=writable, required=True, metavar="FILE", help="JSON Lines of answers")
    add("--num_prompts", type=count, metavar="N", help="of the file; all unless given")
    add("--num_samples", type=count, default=1, metavar="N", help="answers per prompt (%(default)s)")
    add("--batch_size", type=count, default=8, metavar="N", help="prompts answered at a time (%(default)s)")
    _add_models(parser, "; slower without one")
    parser.set_defaults(kept=f"finished answers are kept: {GOES_ON}", kept_in="{output_file}")


def train(parser: ArgumentParser) -> None:
    """Train a draft for a target, or fine-tune one.

    Trains on what the target writes (see regenerate). Writes the draft, its card, checkpoints and results into
    --output_dir. On several GPUs: torchrun --nproc_per_node 8 -m hf_dspark train ...

    example: hf-dspark train --target examples/gsm8k_pair/target --train_file out/answers.jsonl --eval_rows 5
      --output_dir out/my-draft --packing --max_length 1024 --num_anchors 64 --num_train_epochs 6
    """
    parser.epilog = TRAINING
    parser.add_argument("--help_all", action=_HelpAll, nargs=0, help="also show all arguments of the training")
    add = parser.add_argument_group("data and draft").add_argument
    held_out = "examples to hold out of the file, and with each all answers to its prompt (%(default)s)"
    add("--train_file", type=file, required=True, metavar="FILE", help="examples, as JSON Lines, JSON, CSV or Parquet")
    add("--eval_rows", type=within(int, 0), default=0, metavar="N", help=held_out)
    add("--output_dir", type=writable, required=True, metavar="FOLDER", help="of draft, card, checkpoints and results")
    add("--draft", type=model, metavar="MODEL", help="a draft to fine-tune; a new one is made unless given")
    add("--draft_kind", choices=("dspark", "dflash", "eagle3", "mtp"), help="of a new draft (dspark)")
    add("--num_hidden_layers", type=count, metavar="N", help="of a new draft; by the target's depth unless given")
    add("--block_size", type=count, metavar="N", help="tokens per block of a new draft (7)")
    add("--markov_rank", type=count, metavar="N", help="of a new dspark draft's Markov head (256); dflash has none")
    add("--markov_head_type", metavar="TYPE", help="of a new dspark draft: vanilla (default), gated or rnn")
    add("--target_layer_ids", type=int, nargs="+", metavar="LAYER", help="of the target, that a new draft reads")
    _add_target(parser)
    kept = "checkpoints are kept: --resume_from_checkpoint last goes on from the newest"
    parser.set_defaults(kept=kept, kept_in="{output_dir}/checkpoint-*/dspark_run.json")


def calibrate(parser: ArgumentParser) -> None:
    """Fit a draft's confidences, which schedulers rely on.

    Decodes prompts, and fits a slope and an offset per draft position, so that predicted acceptance is true. Do it
    once with --temperature 0 and once without. Writes them into the draft's config.json, and
    results/calibration-DOMAIN.json.

    example: hf-dspark calibrate --target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft
      --prompts_file examples/gsm8k_pair/prompts.jsonl --temperature 0 --output_dir out/calibrated
    """
    add = parser.add_argument
    add("--prompts_file", type=file, required=True, metavar="FILE", help=f"some hundred held-out ones. {PROMPTS}")
    add("--num_prompts", type=count, metavar="N", help="of the file; all unless given")
    add("--domain", metavar="NAME", help="to keep the calibration under; greedy or sampled unless given")
    add("--output_dir", type=new, metavar="FOLDER", help="of the calibrated draft; its own folder unless given")
    add("--rounds_file", type=writable, metavar="FILE", help=f"where rounds are recorded; {GOES_ON}")
    _add_models(parser)
    parser.set_defaults(kept=f"rounds in --rounds_file are kept: {GOES_ON}", kept_in="{rounds_file}")


def profile(parser: ArgumentParser) -> None:
    """Measure what a step costs on this machine. generate() learns it from its own rounds, and begins with this.

    Times drafting and verifying. Writes the table where generate() finds it by itself, and to --output_file. Nothing
    else should run meanwhile. --show measures nothing, and shows the table that generate() begins with, and its age.

    example: hf-dspark profile --target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft
      --batch_sizes 1 4 16 --output_file out/sps.json
    """
    add = parser.add_argument
    add("--batch_sizes", type=count, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="requests per pass")
    add("--context_lengths", type=count, nargs="+", default=[64, 512], metavar="N", help="cached tokens per request")
    add("--repetitions", type=count, default=9, metavar="N", help="timed passes of each kind (%(default)s)")
    add("--output_file", type=new, metavar="FILE", help="also write the table to this file; SGLang reads it, too")
    add("--packed", action="store_true", help="on a CPU, with packed weights, for decoding with them")
    add("--show", action="store_true", help="show the table that generate() uses, and measure nothing")
    _add_models(parser, decodes=False)


def eval_(parser: ArgumentParser) -> None:
    """Measure how much of its drafts a target accepts, and how fast it decodes.

    Decodes the prompts of one or more tasks, turn by turn. Prints tokens per round (tau), acceptance by position,
    calibration and speed, and writes them with every round to --result_file.

    example: hf-dspark eval --target examples/gsm8k_pair/target --draft examples/gsm8k_pair/draft --temperature 0
      --prompts math=examples/gsm8k_pair/prompts.jsonl --num_prompts 20 --compare --result_file out/math.json
    """
    add = parser.add_argument
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompts", type=task, nargs="+", metavar="[NAME=]FILE", help=f"tasks to measure. {PROMPTS}")
    suites = "a benchmark, paper or spec_bench, and the folder of its prompt files"
    asked.add_argument("--suite", nargs=2, metavar=("SUITE", "FOLDER"), help=suites)
    add("--num_prompts", type=count, metavar="N", help="of each file; all unless given")
    add("--batch_size", type=count, default=1, metavar="N", help="prompts decoded together at most (%(default)s)")
    add("--policy", type=policy, help=f"how much of a block is verified: {POLICIES}; full unless given")
    add("--compare", action="store_true", help="also without the draft: speed-up, equal answers and best tokens")
    add("--packed", action="store_true", help="on a CPU, packed weights, without the draft, too")
    add("--result_file", type=new, default="evaluation.json", metavar="FILE", help="of the result (%(default)s)")
    _add_models(parser, "; without one, plain decoding is measured")
    parser.set_defaults(kept=f"finished turns are kept: {GOES_ON}", kept_in="{result_file}.partial.jsonl")


def inspect(parser: ArgumentParser) -> None:
    """Tell what a draft is, whether it works here, and with a target.

    Reads its config and the headers of its weights, whatever project made it. Shows the format, the kind, the layers,
    what is read from where and what is ignored, which engines run it and which formats it converts to. A draft that
    cannot be used is refused with the reason.

    example: hf-dspark inspect examples/gsm8k_pair/draft --target examples/gsm8k_pair/target
    """
    add = parser.add_argument
    add("draft", type=model, metavar="DRAFT", help="Hub id or folder of the draft")
    add("--target", type=model, metavar="MODEL", help="a target to hold it against")
    add("--draft_revision", default="main", metavar="REVISION", help="branch, tag or commit on the Hub")
    _add_layout(parser)


def convert(parser: ArgumentParser) -> None:
    """Write a draft in another project's format, or read one.

    DeepSpec's format is also read by vLLM, SGLang and llama.cpp's converter, speculators' by vLLM; transformers'
    is its own DFlash. What a format cannot hold is refused with the reason.

    example: hf-dspark convert --to deepspec examples/gsm8k_pair/draft out/deepspec --target examples/gsm8k_pair/target
    """
    add = parser.add_argument
    add("source", type=model, metavar="SOURCE", help="Hub id or folder of the draft")
    add("destination", type=writable, metavar="DESTINATION", help="folder to write")
    add("--to", choices=FORMATS, metavar="FORMAT", help=f"{', '.join(FORMATS[1:])} or {FORMATS[0]}")
    add("--target", type=model, metavar="MODEL", help="its target, which some formats describe or copy from")
    add("--engine", metavar="NAME", help="an engine to write for, vllm or sglang: decides the format, shows a command")
    _add_layout(parser)


def push(parser: ArgumentParser) -> None:
    """Publish a draft on the Hub, with a card made from results.

    Publishes weights, config, results, card, and the code that lets the draft decode where only transformers is
    installed. A public repository needs a license and a target on the Hub. Log in first: hf auth login.

    example: hf-dspark push out/my-draft me/my-draft --private --results out/my-draft/results
    """
    add = parser.add_argument
    add("folder", type=model, metavar="FOLDER", help="folder of the draft")
    add("repository", metavar="REPOSITORY", help="such as me/my-draft")
    add("--results", nargs="+", metavar="FILE", help="or folders of them; FOLDER/results unless given")
    add("--target", metavar="MODEL", help="Hub id of the target; as the results say unless given")
    add("--license", metavar="ID", help="of the draft, as the Hub abbreviates it, such as mit")
    add("--private", action="store_true", help="make a new repository private")
    parser.set_defaults(kept="the repository is as it was, or new and empty")


# The commands by the module that runs them, in functions run_<command>.
COMMANDS: dict[str, tuple[Callable[[ArgumentParser], None], ...]] = {
    "generate": (generate, race, regenerate),
    "serve": (serve, chat),
    "train": (train,),
    "measure": (calibrate, profile, eval_),
    "share": (inspect, convert, push),
}


# ---- options that several commands have


def _add_prompts(parser: ArgumentParser, usual: str = "one on stdin") -> None:
    given = parser.add_mutually_exclusive_group().add_argument
    given("prompts", nargs="*", default=[], metavar="PROMPT", help=f"{usual} unless given")
    given("--prompts_file", type=file, metavar="FILE", help=PROMPTS)
    parser.add_argument("--num_prompts", type=count, metavar="N", help="of the file; all unless given")


def _add_models(
    parser: ArgumentParser, without_draft: str = "", decodes: bool = True, target: str = "--target"
) -> None:
    """Add the options of a target and its draft, and of how they decode."""
    _add_target(parser, name=target)
    add = parser.add_argument_group("draft").add_argument
    what = f"Hub id or folder of the draft{without_draft}"
    add("--draft", type=model, required=not without_draft, metavar="MODEL", help=what)
    add("--draft_revision", default="main", metavar="REVISION", help="branch, tag or commit on the Hub")
    if not decodes:
        return
    add = parser.add_argument_group("chat template").add_mutually_exclusive_group().add_argument
    add("--no_chat_template", action="store_true", help="continue texts as they are")
    add("--enable_thinking", action="store_true", default=None, help="tell it that the target may think first")
    add("--no_thinking", action="store_false", dest="enable_thinking", help="tell it that the target may not think")
    add = parser.add_argument_group("decoding, as the target's generation config recommends unless given").add_argument
    add("--max_new_tokens", type=count, default=256, metavar="N", help="longest answer, in tokens (%(default)s)")
    add("--temperature", type=positive, metavar="T", help="0 decodes greedily, 1 samples the target's distribution")
    add("--top_k", type=int, metavar="N", help="sample among the N most likely tokens; 0 is all")
    add("--top_p", type=share, metavar="P", help="sample among the likeliest tokens that together have probability P")
    add("--min_p", type=share, metavar="P", help="sample among tokens with P times the best one's probability or more")
    add("--seed", type=int, default=0, metavar="N", help="of all draws (%(default)s)")


def _add_layout(parser: ArgumentParser) -> None:
    layout = "if the draft's files do not say: whether the anchor's slot predicts the first token (anchor)"
    parser.add_argument("--block_layout", choices=("anchor", "fill_in"), help=layout)


def _add_target(parser: ArgumentParser, served: bool = False, name: str = "--target") -> None:
    group = parser.add_argument_group("target")
    add = group.add_argument
    if served:
        parser.add_argument("model", type=model, metavar="MODEL", help="folder, or Hub id with or without @REVISION")
        what = "Hub id or folder of its draft, or mtp, its own module; auto looks for one, ngram copies (%(default)s)"
        parser.add_argument("--draft", type=model, default="auto", metavar="MODEL", help=what)
        what = "for beginnings of prompts, which are computed once; 0 is none (%(default)s)"
        parser.add_argument("--prefix_memory", type=within(int, 0), default=1024, metavar="MIB", help=what)
    else:
        required = {"required": True} if name == "--target" else {}
        add(name, type=model, metavar="MODEL", help="Hub id or folder of the target", **required)
        add("--target_revision", default="main", metavar="REVISION", help="branch, tag or commit on the Hub")
    add("--dtype", choices=DTYPES, default="auto", help="of all weights; only float32 keeps every greedy token")
    add("--device_map", metavar="WHERE", help="auto, cpu, cuda:0, ...; the accelerator, if there is one, unless given")
    add("--trust_remote_code", action="store_true", help="run the code of the target's repository; read it first")
    add = group.add_mutually_exclusive_group().add_argument
    add("--load_in_8bit", action="store_true", help="quantise the target (needs bitsandbytes)")
    add("--load_in_4bit", action="store_true", help="quantise the target (needs bitsandbytes)")


class _HelpAll(Action):
    """Shows the help of a command and that of transformers' Trainer, which takes seconds to import."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        parser.print_help()
        import_module(".train", __package__).TrainerParser().print_help()
        parser.exit()


# ---- values


def within(kind: type, least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """Return a reader of numbers in `[least, most]`."""

    def read(text: str) -> float:
        number = kind(text)
        if not least <= number <= most:  # NaN, too
            limits = f"at least {least}" if most == sys.float_info.max else f"in [{least}, {most}]"
            raise ArgumentTypeError(f"must be {limits}, got {number}")
        return number

    read.__name__ = kind.__name__
    return read


count, positive, share = within(int, 1), within(float, 0), within(float, 0, 1)


def model(name: str) -> str:
    """Accept a folder that holds a model, or what can be a Hub id."""
    path = Path(name)
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise ArgumentTypeError(f"the folder {name} holds no model, which needs a config.json")
    elif path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        fault = f"{name} is a file, a folder is needed" if path.is_file() else f"there is no folder {name}"
        raise ArgumentTypeError(fault)
    return name


def file(path: str) -> str:
    """Accept a file that is there, a pipe, and stdin."""
    if path != "-" and not (Path(path).is_file() or Path(path).is_fifo()):
        raise ArgumentTypeError(f"{path} is a folder" if Path(path).is_dir() else f"there is no file {path}")
    return path


def writable(path: str) -> str:
    """Accept a place that can be written to."""
    place = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
    if not os.access(place, os.W_OK) or not (place.is_dir() or place == Path(path)):
        raise ArgumentTypeError(f"{place} cannot be written to: name another place")
    return path


def new(path: str) -> str:
    if Path(path).exists():
        raise ArgumentTypeError(f"{path} exists: name another, or delete it")
    return writable(path)


def setting(word: str) -> str:
    if "=" not in word:
        raise ArgumentTypeError(f"must be NAME=VALUE, got {word!r}")
    return word


def task(word: str) -> tuple[str, str]:
    """Read NAME=FILE, or FILE, whose name is then the task's."""
    name, _, path = word.rpartition("=") if not Path(word).is_file() else ("", "", word)
    return name or Path(path).stem, file(path)


def policy(text: str) -> tuple[str, float | None]:
    """Read the name of a policy, and its number if it has one."""
    name, equals, number = text.partition("=")
    readers = {"threshold": share, "tree": within(int, 1, 63)}
    if equals and name in readers:
        with suppress(ValueError):  # no number
            return name, readers[name](number)
    if text not in ("default", "full", "scheduled"):
        raise ArgumentTypeError(f"must be one of {POLICIES}; got {text!r}")
    return text, None
