"""`hf-dspark train`: a draft for any causal LM, from a file of examples to weights and a result file."""

import io
import random
from argparse import SUPPRESS, Namespace
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import HfArgumentParser, PreTrainedModel

from hf_dspark.data.row_files import open_table, read_rows
from hf_dspark.hub.repository import RESULTS_FOLDER
from hf_dspark.measuring.results import read_results
from hf_dspark.measuring.tables import markdown_table, number
from hf_dspark.models.auto import load_draft
from hf_dspark.models.configuration_dspark import WITHOUT_HEADS, DSparkConfig
from hf_dspark.models.configuration_eagle3 import Eagle3Config
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.models.modeling_dspark import DSparkDraftModel
from hf_dspark.models.modeling_eagle3 import Eagle3DraftModel
from hf_dspark.training.arguments import DSparkTrainingArguments
from hf_dspark.training.resume import last_checkpoint
from hf_dspark.training.trainer import DSparkTrainer

from . import Console
from .models import load_target, require_roles, values_of
from .parser import PROGRAM, Parser

LOSS_WEIGHTS = ("cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight")
# What a new draft of another kind is trained with, in the order above, unless a weight is given.
OBJECTIVES = {"dflash": (1.0, 0.0, 0.0, 0.0), "eagle3": (0.0, 0.0, 0.0, 1.0), "mtp": (0.0, 0.0, 0.0, 1.0)}
LAST = "last"


class TrainerParser(Parser, HfArgumentParser):
    """Reads the arguments of the training as transformers' own scripts do."""

    def __init__(self) -> None:
        super().__init__(DSparkTrainingArguments, prog=f"{PROGRAM} train", usage=SUPPRESS, allow_abbrev=False)


def run_train(options: Namespace, console: Console) -> bool:
    arguments = _training_arguments(options, console)
    checkpoint = _checkpoint_to_resume(arguments)
    rows, held_out, faults = _read_rows(options, arguments.seed)
    console.skip(faults)
    arguments.eval_on_start = held_out is not None
    require_roles(options)
    # In float32; small, so that mistakes show soon.
    draft = None if options.draft is None else load_draft(options.draft, dtype=torch.float32)
    target, tokenizer = load_target(options)
    data = {"train_dataset": rows, "eval_dataset": held_out, "processing_class": tokenizer}
    trainer = DSparkTrainer(draft or _new_draft(options, target, arguments.seed), target, arguments, **data)
    with redirect_stdout(io.StringIO()) if console.quiet else nullcontext():  # reports of losses
        trainer.train(checkpoint)
        if held_out is not None:
            trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()  # and the result file that it is made from
    trainer.accelerator.end_training()  # NCCL warns of processes that end with their group open
    if trainer.is_world_process_zero():
        result_file = Path(arguments.output_dir) / RESULTS_FOLDER / "training.json"
        (result,) = read_results([result_file])
        if gain := _gain(result, 0 if held_out is None else len(held_out)):
            console.show(gain)
        console.show(f"the draft is in {arguments.output_dir}, the result in {result_file}")
        console.note(_next_commands(options, trainer.draft.config.enable_confidence_head))
        console.document(result | {"output_dir": arguments.output_dir})
    return True


def _gain(result: dict[str, Any], held_out: int) -> str | None:
    """Return a table of tau and acceptance by position, before training and after it; `None` if none was logged."""
    prefix, title = ("eval_", f"{held_out} held-out examples") if held_out else ("", "last batches")
    rows = []
    for name, report in (("before", result["before"]), ("after", result["metrics"])):
        rates = [value for key, value in report.items() if key.startswith(f"{prefix}acceptance_")]
        rows += [[name, number(report[f"{prefix}tau"]), *map(number, rates)]] if rates else []
    if not rows:
        return None
    head = [f"{title}, estimated", "tau", "acceptance at 1", *range(2, len(rows[-1]) - 1)]
    return markdown_table(list(map(str, head)), rows if held_out else rows[-1:])


def _next_commands(options: Namespace, calibrated: bool) -> str:
    folder = quote(options.output_dir)
    pair = f"--target {quote(options.target)} --draft {folder}"
    commands = [
        f"calibrate {pair} --prompts_file held_out.jsonl --temperature 0",
        f"eval {pair} --prompts held_out.jsonl --compare --result_file {folder}/{RESULTS_FOLDER}/eval.json",
        f"push {folder} user/name --license mit{' --target user/target' * Path(options.target).is_dir()}",
    ]
    hint = "" if options.eval_rows else "--eval_rows N shows tau before and after, on examples that are held out\n"
    return "\n  ".join([f"{hint}next:", *(f"{PROGRAM} {each}" for each in commands[not calibrated :])])


def _training_arguments(options: Namespace, console: Console) -> DSparkTrainingArguments:
    heads = values_of(options, "markov_rank", "markov_head_type")
    if options.draft_kind not in (None, "dspark") and heads:
        names = " and --".join(heads)
        raise ValueError(f"a draft of the kind {options.draft_kind} has no Markov head: leave --{names} out")
    words = ["--output_dir", options.output_dir, *options.trainer_words]
    (arguments,) = TrainerParser().parse_args_into_dataclasses(words)
    arguments.disable_tqdm = arguments.disable_tqdm or not console.progress
    given = {word.partition("=")[0] for word in options.trainer_words} & {f"--{name}" for name in LOSS_WEIGHTS}
    if options.draft_kind in OBJECTIVES and not given:
        for name, weight in zip(LOSS_WEIGHTS, OBJECTIVES[options.draft_kind], strict=True):
            setattr(arguments, name, weight)
    return arguments


def _checkpoint_to_resume(arguments: DSparkTrainingArguments) -> str | None:
    """Return the checkpoint to go on from; refuse to write over what another run has left."""
    folder, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    if wanted == LAST:
        newest = last_checkpoint(folder)
        if newest is None:
            raise ValueError(f"--resume_from_checkpoint {LAST}: there is no whole checkpoint in {folder}")
        return newest
    if wanted is not None and Path(wanted).resolve().parent == folder.resolve():
        return wanted
    if last_checkpoint(folder) or any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise ValueError(
            f"{folder} holds a draft or checkpoints already: go on from there with --resume_from_checkpoint {LAST}, "
            "or name another --output_dir"
        )
    return wanted


def _read_rows(options: Namespace, seed: int) -> tuple[Any, Any, list[str]]:
    """Return the examples to train on, those that are held out if there are any, and what is wrong with other lines.

    All answers to a prompt stand on one side. Parquet, for data larger than memory, stays a table on disk.
    """
    path, number, faults = options.train_file, options.eval_rows, []
    rows = open_table(path)
    if rows is None:
        file = read_rows(path)
        rows = [row for _, row in file.rows if isinstance(row, dict)]
        faults += map(str, file.faults)
        faults += [f"{path} {file.unit} {at} is no JSON object" for at, row in file.rows if not isinstance(row, dict)]
    if len(rows) == 0:
        raise ValueError(f"{path} holds no example{f' ({faults[0]})' if faults else ''}")
    if number == 0:
        return rows, None, faults
    prompts = list(map(_prompt_of, rows))
    answers: dict[int, list[int]] = {}  # the places of each prompt's examples
    for place in random.Random(seed).sample(range(len(rows)), len(rows)):
        answers.setdefault(prompts[place], []).append(place)
    parts: tuple[list[int], list[int]] = ([], [])
    for places in answers.values():
        parts[len(parts[0]) >= number].extend(places)
    if not parts[1]:
        counted = f"the file has {len(rows)} examples, of {len(answers)} prompts"
        raise ValueError(f"--eval_rows {number} would leave nothing to train on: {counted}")
    held_out, rest = (
        [rows[place] for place in part] if isinstance(rows, list) else rows.select(part) for part in parts
    )
    return rest, held_out, faults


def _prompt_of(row: dict[str, Any]) -> int:
    """Return a hash of a row's prompt, or of the row where it names none; a hash, as data may be large."""
    known = (
        row[name]
        for name in ("prompt_ids", "index", "prompt", "question", "instruction")
        if row.get(name) not in (None, "")
    )
    return hash(repr(next(known, row)))


def _new_draft(options: Namespace, target: PreTrainedModel, seed: int) -> DraftModel:
    """Return an untrained draft in float32, with the same weights in every process."""
    facts = values_of(options, "block_size", "num_hidden_layers", "target_layer_ids")
    torch.manual_seed(seed)
    if options.draft_kind in ("eagle3", "mtp"):
        facts |= {"mtp": True} if options.draft_kind == "mtp" else {}
        return Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    heads = values_of(options, "markov_rank", "markov_head_type")
    facts |= WITHOUT_HEADS if options.draft_kind == "dflash" else heads
    return DSparkDraftModel(DSparkConfig.from_target(target.config, **facts))
