"""Sharing a draft: its repository, as a folder or on the Hub.

A repository holds the draft's weights and config, a model card with the result files that it is made of, and one file
of code, with which transformers alone decodes with the draft. There is no `generation_config.json`: how to sample
belongs to the target. The package's root hands this module to drafts and trainers as their publisher, and to `attach`,
which looks for drafts.
"""

import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, ModelCard
from transformers.utils import logging

from ..files import replace_text
from ..formats.checkpoint import CONFIG_FILE, read_json
from ..measuring.results import UNFINISHED, describe_draft, describe_target, read_results, result_files, write_result
from ..models.auto import DRAFTS, load_draft
from ..models.modeling_draft import DraftModel
from .card import has_one_file_decoder, model_card
from .search import CARD_FILE, RESULTS_FOLDER
from .search import find_drafts as find_drafts

if TYPE_CHECKING:
    from ..training.trainer import DSparkTrainer

logger = logging.get_logger(__name__)

CODE_FOLDER = "custom_generate"  # where transformers looks for generate.py
DECODER = Path(__file__).parent / CODE_FOLDER / "generate.py"
WEIGHT_FILES = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
CODE_FILES = (f"{CODE_FOLDER}/{DECODER.name}", f"{CODE_FOLDER}/LICENSE")
# All that is published; a training's folder has more in it, pickled arguments among others.
REPOSITORY_FILES = (CARD_FILE, CONFIG_FILE, *WEIGHT_FILES, *CODE_FILES, f"{RESULTS_FOLDER}/*.json")
# What an earlier upload may have left and this one would not replace: other shards, code, results, pickles.
STALE_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", f"{CODE_FOLDER}/*", f"{RESULTS_FOLDER}/*")
UPLOAD_OPTIONS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")
# What a published card should say, and how it learns that.
CURES = {
    "license": "a license (--license mit, or another id of the Hub; in Python license=...)",
    "base_model": "its target on the Hub (--target user/name; in Python target=...)",
}
# What a result file says about a training; no paths, no tokens.
REPORTED_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed",
    "num_anchors", "cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight",
    "position_decay", "max_length", "packing", "chat_template_kwargs",
)  # fmt: skip


def push_draft(
    draft: DraftModel | str | Path, repo_id: str, results: Iterable[str | Path] = (), **options: Any
) -> str:
    """Publish a draft, or what a folder or repository holds, with its result files; returns the URL of the commit.

    One commit replaces what the repository held before. `options` are those of [`upload_repository`]; all others are
    for [`save_repository`] and [`~card.model_card`].
    """
    upload = {name: options.pop(name) for name in UPLOAD_OPTIONS if name in options}
    with tempfile.TemporaryDirectory() as folder:
        save_repository(draft, folder, results, **{"repo_id": repo_id} | options)
        return upload_repository(folder, repo_id, **upload)


def save_repository(
    draft: DraftModel | str | Path,
    folder: str | Path,
    results: Iterable[str | Path] = (),
    *,
    max_shard_size: int | str = "5GB",
    complete: bool = False,
    **card: Any,
) -> Path:
    """Write everything that [`push_draft`] publishes into a folder; other files in it stay. Returns the folder.

    What the card lacks is warned about; `complete` raises a `ValueError` instead, before anything is written.
    """
    draft, folder, files = _loaded(draft), Path(folder), result_files(results)
    readme = _card(draft, files, folder, card)
    if missing := [cure for field, cure in CURES.items() if readme.data.get(field) is None]:
        lacking = f"the model card does not name {', and not '.join(missing)}"
        if complete:
            raise ValueError(f"{lacking}. Nobody can use a draft without: give that, or publish it with --private")
        warnings.warn(lacking, stacklevel=2)
    draft.save_pretrained(folder, max_shard_size=max_shard_size)
    write_remote_code(folder)
    contents: dict[str, bytes] = {}  # all are read before one is written: they may lie in this folder
    for file in files:
        name = f"{file.stem}.json"
        while name in contents:
            name = f"other_{name}"
        contents[name] = file.read_bytes()
    for name, content in contents.items():
        (folder / RESULTS_FOLDER).mkdir(exist_ok=True)
        (folder / RESULTS_FOLDER / name).write_bytes(content)
    replace_text(folder / CARD_FILE, str(readme))
    return folder


def write_card(
    draft: DraftModel | str | Path, folder: str | Path, results: Iterable[str | Path] = (), **card: Any
) -> Path:
    """Write the model card of a draft into its folder, under the folder's name; returns the path of the file."""
    folder = Path(folder).resolve()
    replace_text(folder / CARD_FILE, str(_card(_loaded(draft), result_files(results), folder, card)))
    return folder / CARD_FILE


def _loaded(draft: DraftModel | str | Path) -> DraftModel:
    return draft if isinstance(draft, DraftModel) else load_draft(draft, dtype="auto")


def _card(draft: DraftModel, results: list[Path], folder: Path, facts: Mapping[str, Any]) -> ModelCard:
    try:
        return model_card(draft, results, **dict(facts) | {"repo_id": facts.get("repo_id") or folder.name})
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # not every value in them is checked
        if not results:
            raise
        files = ", ".join(str(path) for path in results)  # whole: the user has to find them
        raise ValueError(f"a result file is damaged ({error}): measure again, or leave out one of {files}") from None


def write_remote_code(folder: str | Path) -> Path:
    """Copy the one-file decoder into a draft's folder, for decoding where this package is not installed.

    `config.json` then names the file's classes, so that `AutoModel` finds them with `trust_remote_code=True`. The file
    has none for Eagle3, DFlash 2 and Domino. Returns the path of the copy.
    """
    folder = Path(folder)
    config, code = read_json(folder / CONFIG_FILE), folder / CODE_FOLDER
    model = DRAFTS.get(config.get("model_type"))
    if model is None:
        held = f"a {config.get('model_type')!r} model, a draft is one of {sorted(DRAFTS)}"
        raise ValueError(f"{folder} holds {held}: convert it with hf_dspark.convert_checkpoint")
    for stale in code.glob("*.py"):
        stale.unlink()
    shutil.copytree(DECODER.parent, code, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    if has_one_file_decoder(config):
        classes = {"AutoConfig": model.config_class.__name__, "AutoModel": model.__name__}
        config["auto_map"] = {auto: f"{CODE_FOLDER}/{DECODER.stem}.{name}" for auto, name in classes.items()}
        replace_text(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return code / DECODER.name


def upload_repository(
    folder: str | Path, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **commit: Any
) -> str:
    """Upload what [`save_repository`] wrote, in one commit that also removes what it replaces; returns its URL.

    The repository is made if it does not exist, `private` or not. What shall be private is not uploaded to one that
    is public. A failed upload leaves it as it was, or new and empty, and raises an `OSError`. `commit` holds
    `revision`, `create_pr`, `commit_message`, `commit_description`.
    """
    api, branch = HfApi(token=token), None if commit.get("create_pr") else commit.get("revision")
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:  # one that exists stays what it is
            raise PermissionError("it is public: make it private in its settings, or choose another name")
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=list(REPOSITORY_FILES),
            ignore_patterns=f"{RESULTS_FOLDER}/{UNFINISHED}", delete_patterns=list(STALE_FILES),
            **{"commit_message": "Upload draft"} | commit,
        )  # fmt: skip
    except Exception as error:  # of the server, the network or the disk; their classes have no common base
        raise OSError(
            f"the draft could not be uploaded to {repo_id} on {api.endpoint}, whose files are as they were: {error}. "
            "Check the name, the network and the token (`hf auth login`), and push again."
        ) from error
    return done.pr_url or done.commit_url


# ---- what trainers publish


def write_training_card(
    trainer: "DSparkTrainer", model_name: str | None, dataset: str | list[str] | None, **card: Any
) -> None:
    """Write a run's result file, the model card and the one-file decoder; see `DSparkTrainer.create_model_card`."""
    folder = Path(trainer.args.output_dir)
    if hasattr(trainer.draft, "peft_config"):
        cure = (
            "save it whole, trainer.draft.merge_and_unload().save_pretrained(folder), and publish it by push_to_hub()"
        )
        raise ValueError(f"the draft has adapters, which {folder} holds alone and no card describes: {cure}")
    if not (folder / CONFIG_FILE).exists():
        raise FileNotFoundError(f"{folder} holds no draft yet: call save_model() first")
    # With FSDP, this process holds a shard of the weights; what was saved is whole.
    draft = load_draft(folder, dtype="auto") if trainer.is_fsdp_enabled else trainer.draft
    results, facts = folder / RESULTS_FOLDER, describe_draft(draft)
    target = {} if trainer.target is None else describe_target(trainer.target)
    write_result(results / "training.json", "training", target, facts, **_run_report(trainer))
    for path in result_files(results):
        weights = read_results([path])[0]["draft"].get("weights")
        if weights != facts["weights"]:  # no card shows it, and no push publishes it
            outdated = path.replace(path.with_suffix(f".json.of-{weights}"))
            moved = f"{path.name} was measured before this training, and is now {outdated.name}"
            warnings.warn(f"{moved}: measure again", stacklevel=3)
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
    sets = [f"eval_{name}_loss" for name in held_out] if isinstance(held_out, dict) else ["eval_loss"]
    metrics: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for entry in (entry for entry in state.log_history if entry["step"] <= kept and entry.keys() & {"loss", *sets}):
        # A norm of gradients may be anything, JSON cannot hold all of it.
        finite = {name: value if math.isfinite(value) else None for name, value in entry.items()}
        metrics |= finite
        before |= finite if entry["step"] == 0 else {}
    arguments = args.to_dict()
    return {
        "arguments": {name: arguments[name] for name in REPORTED_ARGUMENTS} | {"processes": args.world_size},
        "num_rows": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "steps": state.global_step,
        "before": before,
        "metrics": metrics,
    }


def push_checkpoint(checkpoint_folder: str, repo_id: str, **upload: Any) -> Future:
    """Upload the draft of a checkpoint in the background, with a card but no results; a failure is only logged."""
    # A copy: the checkpoint may be deleted before it is uploaded. Nothing was measured with these weights.
    copied = tempfile.TemporaryDirectory(prefix=".upload-", dir=Path(checkpoint_folder).parent)
    for pattern in (CONFIG_FILE, *WEIGHT_FILES):
        for file in Path(checkpoint_folder).glob(pattern):
            shutil.copyfile(file, Path(copied.name, file.name))
    write_remote_code(copied.name)
    write_card(copied.name, copied.name, repo_id=repo_id)

    def upload_copy() -> None:
        with copied:
            try:
                upload_repository(copied.name, repo_id, **upload)
            except OSError as error:
                logger.warning(f"{upload['commit_message']}: {error}")

    return HfApi().run_as_future(upload_copy)
