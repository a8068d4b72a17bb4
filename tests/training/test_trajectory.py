"""Trajectories: seeded runs of every kind of draft have the losses that were recorded, so that no change moves training.

Record anew, after a change that is meant to: PYTHONPATH=src python -m tests.training.test_trajectory
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
)

RECORDED = Path(__file__).parent.parent / "fixtures" / "training" / "trajectories.json"
NAMES = ("loss", "grad_norm", "tau", "confidence_ece", "eval_loss", "eval_tau")
# Options of the draft's config, and of the training.
RUNS = {
    "dspark": ({}, {}),
    "gated": ({"markov_head_type": "gated"}, {"position_decay": None, "gradient_accumulation_steps": 2}),
    "fill-in": ({"markov_head_type": "rnn", "sample_from_anchor": False}, {}),
    "pruned": ({"draft_vocab_size": 24}, {}),
    "dflash": (
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0},
    ),
    "eagle3": ({}, {"cross_entropy_weight": 0.0, "l1_weight": 0.0, "soft_cross_entropy_weight": 1.0}),
    "packed": ({}, {"packing": True, "max_length": 64, "num_anchors": 1000}),
}  # fmt: skip


def set_weights(model: PreTrainedModel, seed: int, std: float) -> None:
    """Draw every weight by name, so that no version's own initialisation counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + ("norm" in name))


def trajectory(run: str, folder: str) -> dict[str, list[float]]:
    facts, options = RUNS[run]
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    set_weights(target, 0, 0.2)
    facts = {"block_size": 4, "target_layer_ids": [0, 2]} | facts
    if run == "eagle3":
        draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    else:
        config = DSparkConfig.from_target(target.config, **{"num_hidden_layers": 2, "markov_rank": 6} | facts)
        draft = DSparkDraftModel(config)
        if config.draft_vocab_size is not None:
            draft.d2t.copy_(torch.arange(config.draft_vocab_size))  # every second token
    set_weights(draft, 1, 0.25)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(12, 30, (24,), generator=generator).tolist()
    rows = [
        {"input_ids": torch.randint(0, 48, (size,), generator=generator).tolist(), "loss_mask": [0] * 3 + [1] * (size - 3)}
        for size in lengths
    ]  # fmt: skip
    arguments = DSparkTrainingArguments(
        **{
            "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 3e-3,
            "per_device_train_batch_size": 3, "max_steps": 6, "logging_steps": 1, "save_strategy": "no",
            "num_anchors": 5, "seed": 7, "eval_strategy": "steps", "eval_steps": 3,
        } | options
    )  # fmt: skip
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=rows[:5])
    trainer.train()
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in NAMES}


@pytest.mark.parametrize("run", RUNS)
def test_training_follows_its_recorded_trajectory(run, tmp_path):
    recorded = json.loads(RECORDED.read_text())[run]
    assert len(recorded["loss"]) == 6 and len(recorded["eval_tau"]) == 2
    for name, values in trajectory(run, str(tmp_path)).items():
        assert values == pytest.approx(recorded[name], rel=2e-4, abs=1e-6), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(json.dumps({run: trajectory(run, place) for run in RUNS}, indent=1) + "\n")
