"""Train a tiny draft in a process of its own: one that is killed, or several that train together.

python tests/training/train_tiny.py OUTPUT_DIR LOG_FILE KILL_AT_STEP [dspark|eagle3|stream] [ACCUMULATION]
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from hf_dspark import DSparkTrainer
from hf_dspark.training.resume import last_checkpoint
from tests.training.tiny import tiny_arguments, tiny_pair, tiny_rows

torch.set_num_threads(1)


class KillAt(TrainerCallback):
    """Ends the process at once, in the middle of a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Stream(torch.utils.data.IterableDataset):
    """Rows that come one by one."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def leave() -> None:
    """End the process as it is, successful, without Python's own teardown.

    gloo's threads outlive the group where a sharded module, a mesh or DDP still holds it, and one that asks for the
    GIL of an interpreter in teardown aborts the whole process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(output_dir: str, log_file: str, kill_at: int, kind: str = "dspark", accumulation: int = 1) -> None:
    target, draft = tiny_pair("dspark" if kind == "stream" else kind)
    rows = tiny_rows(36)  # whole steps: accelerate fills the last batches of several processes up with the first rows
    arguments = tiny_arguments(
        output_dir, "dspark" if kind == "stream" else kind, per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation, max_steps=10, save_strategy="steps", save_steps=2,
        eval_strategy="steps", eval_steps=5,
    )  # fmt: skip
    trainer = DSparkTrainer(
        draft, target, arguments, train_dataset=Stream(rows) if kind == "stream" else rows, eval_dataset=rows[:8],
        callbacks=[KillAt(kill_at)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        names = ("loss", "grad_norm", "tau", "eval_loss")
        values = {name: [entry[name] for entry in history if name in entry] for name in names}
        Path(log_file).write_text(json.dumps(values | {"processes": arguments.world_size}))
    trainer.accelerator.end_training()
    leave()  # while the trainer lives: its last reference would wait for a thread of gloo, which waits for the GIL


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
