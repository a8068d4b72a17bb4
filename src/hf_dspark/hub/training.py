"""Publishing what was trained: the trainer with its model card, result file and repository on the Hub."""

import itertools
import math
import shutil
import tempfile
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress, logging

from ..formats.checkpoint import CONFIG_FILE
from ..measuring.results import describe_draft, describe_target, read_results, result_files, write_result
from ..training.trainer import DraftTrainer
from .repository import RESULTS_FOLDER, WEIGHT_FILES, upload_repository, write_card, write_remote_code

logger = logging.get_logger(__name__)

# What a result file says about a run; no paths, no tokens.
REPORTED_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed",
    "num_anchors", "cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight",
    "position_decay", "max_length", "packing", "chat_template_kwargs",
)  # fmt: skip


class DSparkTrainer(DraftTrainer):
    __doc__ = DraftTrainer.__doc__

    def create_model_card(
        self, model_name: str | None = None, dataset: str | list[str] | None = None, **card: Any
    ) -> None:
        """Write the result file of this run, the model card and the one-file decoder beside the saved draft.

        The card is made of all result files in `args.output_dir/results`, where this run's is `training.json`.

        Args:
            model_name (`str`, *optional*): Name of the repository, if `args.hub_model_id` is not set.
            dataset (`str` or `list[str]`, *optional*): Ids of the data sets on the Hub.
            card: For [`~card.model_card`]: `license`, `language`, `tags`, ...
        """
        if not self.is_world_process_zero():
            return
        # Of weights spread over processes, this one has a part: what was saved is whole.
        draft = type(self.draft).from_pretrained(self.args.output_dir) if self.is_fsdp_enabled else self.draft
        folder = Path(self.args.output_dir)
        results = folder / RESULTS_FOLDER
        target = {} if self.target is None else describe_target(self.target)
        facts = describe_draft(draft)
        write_result(results / "training.json", "training", target, facts, **self._run_report())
        _set_aside_outdated(results, facts["weights"])
        write_remote_code(folder)
        named = {"datasets": [dataset] if isinstance(dataset, str) else dataset} if dataset else {}
        write_card(draft, folder, [results], repo_id=self.hub_model_id or model_name, **named, **card)

    def _run_report(self) -> dict[str, Any]:
        """Return what a result file of this run holds: its arguments, rows, steps, and what it reported last of the
        weights that it keeps, for all sets; with `eval_on_start`, also what it reported before its first step."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        kept = self.state.global_step if best is None else int(best.rpartition("-")[2])
        history = [entry for entry in self.state.log_history if entry["step"] <= kept]
        sets = [f"{name}_" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else [""]
        arguments, metrics, before = self.args.to_dict(), {}, {}
        for name in ("loss", *(f"eval_{part}loss" for part in sets)):
            metrics |= next((entry for entry in reversed(history) if name in entry), {})
            before |= next((entry for entry in history if name in entry and entry["step"] == 0), {})
        return {
            "arguments": {name: arguments[name] for name in REPORTED_ARGUMENTS} | {"processes": self.args.world_size},
            "num_rows": len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None,
            "steps": self.state.global_step,
            "before": _finite(before),
            "metrics": _finite(metrics),
        }

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> str | Future | None:
        """Save the draft and publish it, with its card and code; nothing else of `args.output_dir` is uploaded.

        Args:
            commit_message (`str`, *optional*): Of the commit.
            blocking (`bool`): Whether to wait for the upload.
            token, revision, private (*optional*): In place of those in `args`.
            card: For [`~DSparkTrainer.create_model_card`].

        Returns:
            `str`: URL of the commit, or a future of it; `None` but in the main process.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**card)
        self._finish_current_push()
        upload = partial(
            upload_repository, self.args.output_dir, self.hub_model_id, token=token,
            private=self.args.hub_private_repo if private is None else private,
            revision=revision or self.args.hub_revision, commit_message=commit_message,
        )  # fmt: skip
        return upload() if blocking else HfApi().run_as_future(upload)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the draft of a checkpoint while training goes on.

        In place of Trainer's, which uploads all of `args.output_dir`: caches, and pickled arguments with the token.
        """
        jobs = [] if self.push_in_progress is None else self.push_in_progress.jobs
        pending = [job for job in jobs if not job.done()]
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if pending and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        # A copy: the checkpoint may be deleted before it is uploaded. Nothing was measured with these weights.
        copied = tempfile.TemporaryDirectory(prefix=".upload-", dir=self.args.output_dir)
        for pattern in (CONFIG_FILE, *WEIGHT_FILES):
            for file in Path(checkpoint_folder).glob(pattern):
                shutil.copyfile(file, Path(copied.name, file.name))
        write_remote_code(copied.name)
        write_card(copied.name, copied.name, repo_id=self.hub_model_id)
        message = f"Training in progress, step {self.state.global_step}"
        options = {"token": self.args.hub_token, "revision": self.args.hub_revision, "commit_message": message}
        job = HfApi().run_as_future(_upload_copy, copied, self.hub_model_id, **options)
        self.push_in_progress = PushInProgress([*pending, job])


def _upload_copy(folder: tempfile.TemporaryDirectory, repo_id: str, **options: Any) -> str | None:
    """Upload in the background; training goes on if that fails."""
    with folder:
        try:
            return upload_repository(folder.name, repo_id, **options)
        except OSError as error:
            logger.warning(f"{options['commit_message']}: {error}")
            return None


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Return values that JSON can hold; a norm of gradients may be anything."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _set_aside_outdated(results: Path, weights: str) -> None:
    """Rename result files that were measured with other weights, so that no card shows and no push publishes them."""
    for path in result_files(results):
        (result,) = read_results([path])
        if result["draft"].get("weights") != weights:
            endings = itertools.chain([""], itertools.count(2))
            names = (path.with_suffix(f".json.outdated{ending}") for ending in endings)
            outdated = path.replace(next(name for name in names if not name.exists()))
            warnings.warn(
                f"{path.name} was measured before this training, and is now {outdated.name}: measure again",
                stacklevel=3,
            )
