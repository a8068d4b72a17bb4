"""What drafts and trainers publish, with model card and result file: the package's root hands this to `models`."""

import itertools
import math
import shutil
import tempfile
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from transformers.utils import logging

from ..formats.checkpoint import CONFIG_FILE
from ..measuring.results import describe_draft, describe_target, read_results, result_files, write_result
from .repository import RESULTS_FOLDER, WEIGHT_FILES, push_draft, upload_repository, write_card, write_remote_code

if TYPE_CHECKING:
    from ..training.trainer import DSparkTrainer

__all__ = ["push_checkpoint", "push_draft", "upload_repository", "write_training_card"]

logger = logging.get_logger(__name__)

# What a result file says about a run; no paths, no tokens.
REPORTED_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed",
    "num_anchors", "cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight",
    "position_decay", "max_length", "packing", "chat_template_kwargs",
)  # fmt: skip


def write_training_card(
    trainer: "DSparkTrainer", model_name: str | None, dataset: str | list[str] | None, **card: Any
) -> None:
    """Write a run's result file, the model card and the one-file decoder; see `DSparkTrainer.create_model_card`."""
    folder = Path(trainer.args.output_dir)
    # With FSDP, this process holds a shard of the weights; what was saved is whole.
    draft = type(trainer.draft).from_pretrained(folder) if trainer.is_fsdp_enabled else trainer.draft
    results, facts = folder / RESULTS_FOLDER, describe_draft(draft)
    target = {} if trainer.target is None else describe_target(trainer.target)
    write_result(results / "training.json", "training", target, facts, **_run_report(trainer))
    for path in result_files(results):
        (result,) = read_results([path])
        if result["draft"].get("weights") != facts["weights"]:  # no card shows it, and no push publishes it
            endings = itertools.chain([""], itertools.count(2))
            names = (path.with_suffix(f".json.outdated{ending}") for ending in endings)
            outdated = path.replace(next(name for name in names if not name.exists()))
            warnings.warn(
                f"{path.name} was measured before this training, and is now {outdated.name}: measure again",
                stacklevel=3,
            )
    write_remote_code(folder)
    named = {"datasets": [dataset] if isinstance(dataset, str) else dataset} if dataset else {}
    write_card(draft, folder, [results], repo_id=trainer.hub_model_id or model_name, **named, **card)


def _run_report(trainer: "DSparkTrainer") -> dict[str, Any]:
    """Return arguments, number of rows and steps, and the last metrics of the weights that are kept, for all sets.

    With `eval_on_start`, also the metrics before the first step.
    """
    args, state, held_out = trainer.args, trainer.state, trainer.eval_dataset
    best = state.best_model_checkpoint if args.load_best_model_at_end else None
    kept = state.global_step if best is None else int(best.rpartition("-")[2])
    history = [entry for entry in state.log_history if entry["step"] <= kept]
    sets = [f"eval_{name}_loss" for name in held_out] if isinstance(held_out, dict) else ["eval_loss"]
    arguments, metrics, before = args.to_dict(), {}, {}
    for name in ("loss", *sets):
        metrics |= next((entry for entry in reversed(history) if name in entry), {})
        before |= next((entry for entry in history if name in entry and entry["step"] == 0), {})
    return {
        "arguments": {name: arguments[name] for name in REPORTED_ARGUMENTS} | {"processes": args.world_size},
        "num_rows": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "steps": state.global_step,
        "before": _finite(before),
        "metrics": _finite(metrics),
    }


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Return values that JSON can hold; a norm of gradients may be anything."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def push_checkpoint(trainer: "DSparkTrainer", checkpoint_folder: str, repo_id: str, **upload: Any) -> Future:
    """Upload the draft of a checkpoint in the background, with a card but no results; a failure is only logged."""
    # A copy: the checkpoint may be deleted before it is uploaded. Nothing was measured with these weights.
    copied = tempfile.TemporaryDirectory(prefix=".upload-", dir=trainer.args.output_dir)
    for pattern in (CONFIG_FILE, *WEIGHT_FILES):
        for file in Path(checkpoint_folder).glob(pattern):
            shutil.copyfile(file, Path(copied.name, file.name))
    write_remote_code(copied.name)
    write_card(copied.name, copied.name, repo_id=repo_id)

    def upload_copy() -> str | None:
        with copied:
            try:
                return upload_repository(copied.name, repo_id, **upload)
            except OSError as error:
                logger.warning(f"{upload['commit_message']}: {error}")
                return None

    return HfApi().run_as_future(upload_copy)
