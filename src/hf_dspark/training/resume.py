"""Which checkpoints of a run are whole, and whether a trainer may go on from one: with the same facts only."""

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ..files import differences, replace_text
from ..formats.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Checkpoint, read_json
from ..models.configuration_draft import CALIBRATED

RUN_FACTS_FILE = "dspark_run.json"  # written last: it lists the other files with their sizes
# What may differ in the config of a draft that is trained on; `Trainer` sets the ids of special tokens.
NO_FACTS = {
    *CALIBRATED, "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "torch_dtype", "transformers_version",
}  # fmt: skip
_ANEW = "start anew from its weights with DSparkDraftModel.from_pretrained"
ARGUMENTS = ("per_device_train_batch_size", "seed", "data_seed", "num_anchors", "max_length", "packing")


def run_facts(trainer: Trainer) -> dict[str, Any]:
    args, rows, first = trainer.args, trainer.train_dataset, None
    config = trainer.accelerator.unwrap_model(trainer.model).config.to_dict()
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):  # a stream is not read twice
        ids = [list(rows[place]["input_ids"]) for place in range(min(8, len(rows)))]
        first = hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()
    batches = args.world_size * args.gradient_accumulation_steps
    facts = {
        "batches per step (processes x gradient_accumulation_steps)": batches,
        **{name: getattr(args, name) for name in ARGUMENTS},
        **asdict(trainer.loss_weights),
        "rows": len(rows) if hasattr(rows, "__len__") else None,
        "first rows": first,
        **{f"draft, {name}": value for name, value in config.items() if name not in NO_FACTS},
    }
    return json.loads(json.dumps(facts, default=str))


def write_run_facts(checkpoint: Path, trainer: Trainer) -> None:
    files = {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    # A card and the decoder's name in the config may be added later.
    sizes = {name: None if name == CONFIG_FILE else path.stat().st_size for name, path in files.items()}
    sizes.pop("README.md", None)
    text = json.dumps({"files": sizes} | run_facts(trainer), indent=1)
    replace_text(checkpoint / RUN_FACTS_FILE, f"{text}\n")


def require_whole(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's facts; a `ValueError` names a file that is missing, or not as long as it was saved."""
    facts = read_json(checkpoint / RUN_FACTS_FILE)
    if not isinstance(facts.get("files"), dict):
        raise ValueError(f"{checkpoint / RUN_FACTS_FILE} does not list the files of the checkpoint")
    for name, size in facts["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if size not in (None, path.stat().st_size):
            raise ValueError(f"{path} has {path.stat().st_size} bytes, and {size} were saved")
        if name == CONFIG_FILE:
            read_json(path)
    return facts


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest whole checkpoint of a run; `None` if there is none. Warns of those that it passes over."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    for path in sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
        try:
            require_whole(path)
        except ValueError as error:
            warnings.warn(f"{error}; {path.name} is passed over", stacklevel=2)
        else:
            return str(path)
    return None


def require_continuable(checkpoint: Path, trainer: Trainer) -> None:
    """Raise a `ValueError` unless a checkpoint is whole, and of the same run and draft as a trainer's."""
    before, now = require_whole(checkpoint), run_facts(trainer)
    if different := differences(now | {name: before[name] for name in now if name in before}, now):
        raise ValueError(
            f"{checkpoint} belongs to a run that differs in {different}. Go on as before (half the processes need "
            f"twice the gradient_accumulation_steps), or {_ANEW}"
        )
    is_stream = not hasattr(trainer.train_dataset, "__len__")
    if is_stream and TrainerState.load_from_json(checkpoint / TRAINER_STATE_NAME).epoch > 1:
        warnings.warn(
            f"{checkpoint} was saved after the stream of rows had begun again, and where it was is not known: it "
            "begins again now, and the loss curve is not that of a run without interruption",
            stacklevel=4,
        )
    if not any((checkpoint / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return  # shards of FSDP or DeepSpeed
    if not any(checkpoint.glob("rng_state*.pth")):  # every launcher saves them beside the optimiser's states
        raise ValueError(f"{checkpoint} was saved with save_only_model, so its curve cannot be continued: {_ANEW}")
    draft = trainer.accelerator.unwrap_model(trainer.model)  # `Trainer` would keep its weights of missing tensors
    draft.read_tensors(draft.config, Checkpoint(checkpoint))
