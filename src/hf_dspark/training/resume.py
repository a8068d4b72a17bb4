"""Going on with a run that was interrupted: from its last complete checkpoint, and only with the same facts."""

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ..files import differences
from ..formats.files import read_json

RUN_FACTS_FILE = "dspark_run.json"
# What may differ in the config of a draft that is trained on; `Trainer` sets the ids of special tokens.
NO_FACTS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "sts_temperatures", "torch_dtype", "transformers_version",
}  # fmt: skip
ARGUMENTS = ("per_device_train_batch_size", "seed", "data_seed", "num_anchors", "max_length", "packing")


def run_facts(trainer: Trainer) -> dict[str, Any]:
    args, rows = trainer.args, trainer.train_dataset
    config = trainer.accelerator.unwrap_model(trainer.model).config.to_dict()
    batches = args.world_size * args.gradient_accumulation_steps
    facts = {
        "batches per step (processes x gradient_accumulation_steps)": batches,
        **{name: getattr(args, name) for name in ARGUMENTS},
        **asdict(trainer.loss_weights),
        "rows": len(rows) if hasattr(rows, "__len__") else None,
        "first rows": _hash_of_first_rows(rows),
        **{f"draft, {name}": value for name, value in config.items() if name not in NO_FACTS},
    }
    return json.loads(json.dumps(facts, default=str))


def _hash_of_first_rows(rows: Any) -> str | None:
    """Return a hash of the first rows; `None` of a stream, which is not read twice."""
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        return None
    first = [list(rows[place]["input_ids"]) for place in range(min(8, len(rows)))]
    return hashlib.blake2b(repr(first).encode(), digest_size=8).hexdigest()


def require_same_run(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Raise a `ValueError` that names every fact in which the run of a checkpoint differs."""
    path = checkpoint / RUN_FACTS_FILE
    if not path.exists():  # a checkpoint of another trainer
        return
    before = read_json(path)
    different = differences(facts | {name: before[name] for name in facts if name in before}, facts)
    if different:
        raise ValueError(
            f"{checkpoint} belongs to a run that differs in {different}: its loss curve cannot be continued. Go on as "
            "before (half the processes need twice the gradient_accumulation_steps), or start anew from its weights "
            "with DSparkDraftModel.from_pretrained."
        )


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest complete checkpoint of a run; `None` if there is none.

    `Trainer` writes `trainer_state.json` last: a checkpoint without it was interrupted, and is passed over.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    for path in sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
        if (path / "trainer_state.json").exists():
            return str(path)
        warnings.warn(f"{path} was not saved to its end, and is passed over", stacklevel=2)
    return None


class RunFacts(TrainerCallback):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / RUN_FACTS_FILE
            path.write_text(json.dumps(run_facts(self._trainer), indent=1) + "\n")
