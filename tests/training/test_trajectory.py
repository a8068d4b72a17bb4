"""Trajectories: seeded runs of every kind of draft have the losses that were recorded. No change moves them unseen.

Record anew, after a change that is meant to: PYTHONPATH=src python -m tests.training.test_trajectory
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from hf_dspark import DSparkTrainer
from tests.training.tiny import KINDS, tiny_arguments, tiny_pair, tiny_rows

RECORDED = Path(__file__).parent.parent / "fixtures" / "training" / "trajectories.json"
NAMES = ("loss", "grad_norm", "tau", "confidence_ece", "eval_loss", "eval_tau")


def trajectory(kind: str, folder: str) -> dict[str, list[float]]:
    target, draft = tiny_pair(kind)
    arguments = tiny_arguments(folder, kind, eval_strategy="steps", eval_steps=3)
    rows = tiny_rows(24)
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=rows[:5])
    trainer.train()
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in NAMES}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", KINDS)
def test_training_follows_its_recorded_trajectory(kind, tmp_path):
    recorded = json.loads(RECORDED.read_text())[kind]
    assert len(recorded["loss"]) == 6 and len(recorded["eval_tau"]) == 2
    for name, values in trajectory(kind, str(tmp_path)).items():
        assert values == pytest.approx(recorded[name], rel=2e-4, abs=1e-6), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(json.dumps({kind: trajectory(kind, place) for kind in KINDS}, indent=1) + "\n")
