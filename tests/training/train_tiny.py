"""Train a tiny draft in a process of its own, as the trainer's tests of killed and of several processes need it.

python tests/training/train_tiny.py OUTPUT_DIR LOG_FILE KILL_AT_STEP [dspark|eagle3|stream] [ACCUMULATION]
"""

import json
import os
import signal
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
)

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


def tiny_target() -> Qwen3ForCausalLM:
    """A target of the size of the tests' own, with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            initializer_range=0.2,
        )  # fmt: skip
    )


def leave() -> None:
    """End the process as it is, successful, without Python's own teardown.

    gloo's threads outlive the group where a sharded module, a mesh or DDP still holds it, and one that asks for the
    GIL of an interpreter in teardown aborts the whole process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(output_dir: str, log_file: str, kill_at: int, kind: str = "dspark", accumulation: int = 1) -> None:
    torch.manual_seed(0)
    target = tiny_target()
    facts = {"block_size": 4, "target_layer_ids": [0, 2]}
    if kind == "eagle3":
        draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
        weights = {"cross_entropy_weight": 0.0, "l1_weight": 0.0, "soft_cross_entropy_weight": 1.0}
    else:
        draft = DSparkDraftModel(DSparkConfig.from_target(target.config, **facts, num_hidden_layers=1, markov_rank=6))
        weights = {}
    # Whole steps: accelerate fills the last batches of several processes up with rows from the beginning.
    lengths = torch.randint(12, 30, (36,)).tolist()
    rows = [
        {"input_ids": torch.randint(0, 48, (length,)).tolist(), "loss_mask": [0] * 3 + [1] * (length - 3)}
        for length in lengths
    ]
    arguments = DSparkTrainingArguments(
        output_dir=output_dir, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=3,
        per_device_eval_batch_size=2, gradient_accumulation_steps=accumulation, learning_rate=3e-3, max_steps=10,
        logging_steps=1, save_strategy="steps", save_steps=2, num_anchors=6, seed=7, eval_strategy="steps",
        eval_steps=5, **weights,
    )  # fmt: skip
    trainer = DSparkTrainer(
        draft,
        target,
        arguments,
        train_dataset=Stream(rows) if kind == "stream" else rows,
        eval_dataset=rows[:8],
        callbacks=[KillAt(kill_at)],
    )
    checkpoint = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        with open(log_file, "w") as file:
            json.dump(
                {
                    "processes": arguments.world_size,
                    "losses": [entry["loss"] for entry in history if "loss" in entry],
                    "taus": [entry["tau"] for entry in history if "tau" in entry],
                    "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
                },
                file,
            )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
    leave()
