"""`hf-dspark train`: a draft for any causal LM, from a file of rows to weights and a result file.

Knows nothing of how options are parsed or errors shown. Slow to import, like all that training needs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.prompts import read_json_lines
from ..evaluation.results import read_results
from ..models.configuration_dspark import WITHOUT_HEADS, DSparkConfig
from ..models.configuration_eagle3 import Eagle3Config
from ..models.modeling_draft import DraftModel
from ..models.modeling_dspark import DSparkDraftModel
from ..models.modeling_eagle3 import Eagle3DraftModel
from ..sharing.hub import RESULTS_FOLDER
from ..sharing.training import DSparkTrainer
from ..training.arguments import DSparkTrainingArguments
from ..training.resume import last_checkpoint
from .console import Console, Outcome
from .models import load_draft, load_target, require_model
from .options import TargetOptions, TrainOptions

LOSS_WEIGHTS = ("cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight")
# What each kind of draft is trained with, in the order above.
OBJECTIVES = {"dflash": (1.0, 0.0, 0.0, 0.0), "eagle3": (0.0, 0.0, 0.0, 1.0)}
LAST = "last"


@dataclass(kw_only=True)
class TrainingArguments(DSparkTrainingArguments):
    """The training arguments as the command line takes them: those of transformers' `Trainer`, and DSpark's."""

    _argument_group_name = "training"


@dataclass(frozen=True)
class Rows:
    """Training and held-out rows.

    Args:
        train: Rows as for [`DSparkTrainer`].
        held_out (*optional*): Likewise.
        faults (`list[str]`): What is wrong with lines that were left out.
    """

    train: Any
    held_out: Any
    faults: list[str]


def run_train(
    console: Console,
    words: Sequence[str],
    options: TrainOptions,
    target_options: TargetOptions,
    arguments: TrainingArguments,
) -> Outcome:
    """Train a new draft, or fine-tune one."""
    if arguments.output_dir is None or arguments.output_dir == "trainer_output":
        raise ValueError("--output_dir is needed: the folder that the draft goes into")
    checkpoint = _checkpoint_to_resume(arguments)
    if options.draft is not None:
        require_model(options.draft, "--draft")
    rows = read_rows(options, arguments.seed)
    for fault in rows.faults:
        console.note(f"skipped {fault}")
    target = load_target(target_options)
    draft = make_draft(options, target.model, arguments.seed)
    _set_objective(options, arguments)
    trainer = DSparkTrainer(
        draft, target.model, arguments, train_dataset=rows.train, eval_dataset=rows.held_out,
        processing_class=target.tokenizer,
    )  # fmt: skip
    trainer.train(checkpoint)
    if rows.held_out is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()  # and the result file it is made from
    # NCCL warns of processes that end with their group open.
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return Outcome(None)
    result_file = Path(arguments.output_dir) / RESULTS_FOLDER / "training.json"
    (result,) = read_results([result_file])
    console.show(f"the draft is in {arguments.output_dir}, the result in {result_file}")
    return Outcome(result | {"output_dir": arguments.output_dir, "skipped_lines": rows.faults})


def _checkpoint_to_resume(arguments: TrainingArguments) -> str | None:
    """Return the checkpoint to go on from; refuse to write over what another run has left."""
    folder, wanted = Path(arguments.output_dir), arguments.resume_from_checkpoint
    if wanted is not None and wanted != LAST:
        if not Path(wanted).is_dir():
            raise ValueError(f"--resume_from_checkpoint: there is no folder {wanted}; {LAST} is the newest one")
        if Path(wanted).resolve().parent == folder.resolve():
            return wanted
    newest = last_checkpoint(folder)
    if wanted == LAST:
        if newest is None:
            raise ValueError(f"--resume_from_checkpoint {LAST}: there is no checkpoint in {folder}")
        return newest
    if newest is not None:
        raise ValueError(
            f"{folder} holds checkpoints of an earlier run: go on from there with --resume_from_checkpoint {LAST}, or "
            "name another --output_dir"
        )
    if any((folder / name).exists() for name in ("config.json", "model.safetensors")):
        raise ValueError(f"{folder} holds a model already: name another --output_dir")
    return wanted


def read_rows(options: TrainOptions, seed: int) -> Rows:
    """Read the rows to train on, and those to hold out.

    Raises:
        ValueError: If a file is not there, or too few rows are left to train on.
    """
    rows, faults = _read_file(options.train_file)
    if options.eval_file is not None:
        held_out, more_faults = _read_file(options.eval_file)
        return Rows(rows, held_out, faults + more_faults)
    if not options.eval_rows:
        return Rows(rows, None, faults)
    if options.eval_rows >= len(rows):
        raise ValueError(
            f"--eval_rows {options.eval_rows} would leave nothing to train on: {options.train_file} has {len(rows)}"
        )
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return Rows(_chosen(rows, order[options.eval_rows :]), _chosen(rows, order[: options.eval_rows]), faults)


def _read_file(path: str) -> tuple[Any, list[str]]:
    """Read JSON Lines into a list, and Parquet, for data larger than memory, into a table on disk."""
    if not path.endswith(".parquet"):
        numbered, malformed = read_json_lines(path)
        faults = [str(fault) for fault in malformed]
        rows = [row for _, row in numbered if isinstance(row, dict)]
        faults += [f"{path} line {number} is no JSON object" for number, row in numbered if not isinstance(row, dict)]
    else:
        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            from datasets import Dataset
        except ImportError as error:
            raise ValueError(f"{path} needs datasets: pip install 'hf_dspark[train]', or give JSON Lines") from error
        rows, faults = Dataset.from_parquet(path), []
    if len(rows) == 0:
        raise ValueError(f"{path} holds no row{f' ({faults[0]})' if faults else ''}")
    return rows, faults


def _chosen(rows: Any, places: Sequence[int]) -> Any:
    return [rows[place] for place in places] if isinstance(rows, list) else rows.select(places)


def make_draft(options: TrainOptions, target: PreTrainedModel, seed: int) -> DraftModel:
    """Return the draft to train, in float32: a loaded one, or a new one for a target.

    Args:
        options ([`TrainOptions`]): Which.
        target (`PreTrainedModel`): The target.
        seed (`int`): Of new weights, which must be the same in every process.
    """
    if options.draft is not None:
        return load_draft(options.draft, torch.float32)
    facts: dict[str, Any] = {"block_size": options.block_size}
    if options.num_hidden_layers is not None:
        facts["num_hidden_layers"] = options.num_hidden_layers
    if options.target_layer_ids:
        facts["target_layer_ids"] = options.target_layer_ids
    torch.manual_seed(seed)
    if options.draft_kind == "eagle3":
        return Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    if options.draft_kind == "dflash":
        facts |= WITHOUT_HEADS
    else:
        facts |= {"markov_rank": options.markov_rank, "markov_head_type": options.markov_head_type}
    return DSparkDraftModel(DSparkConfig.from_target(target.config, **facts))


def _set_objective(options: TrainOptions, arguments: TrainingArguments) -> None:
    """Give a new draft of another kind the loss weights of its objective, unless some were given."""
    defaults = {part.name: part.default for part in fields(DSparkTrainingArguments)}
    given = any(getattr(arguments, name) != defaults[name] for name in LOSS_WEIGHTS)
    if options.draft is None and options.draft_kind in OBJECTIVES and not given:
        for name, weight in zip(LOSS_WEIGHTS, OBJECTIVES[options.draft_kind], strict=True):
            setattr(arguments, name, weight)
