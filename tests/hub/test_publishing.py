"""What a trainer reports of the draft that it publishes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_dspark import DSparkTrainer
from tests.training.tiny import tiny_arguments, tiny_pair, tiny_rows


class SpoilsTheThirdStep(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> DSparkTrainer:
    """A training of four steps that keeps the weights of the second one, the best."""
    folder, rows = tmp_path_factory.mktemp("trained"), tiny_rows(12)
    arguments = tiny_arguments(
        str(folder), max_steps=4, eval_strategy="steps", eval_steps=2, eval_on_start=True, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_code_loss", greater_is_better=False,
        num_anchors=20,
    )  # fmt: skip
    target, draft = tiny_pair()
    held_out = {"code": rows[4:8], "math": rows[8:]}
    trainer = DSparkTrainer(draft, target, arguments, rows[:4], held_out, callbacks=[SpoilsTheThirdStep()])
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    return trainer


def test_reports_are_those_of_the_best_weights_which_were_saved(trained):
    result = json.loads(Path(trained.args.output_dir, "results/training.json").read_text())
    taus = {entry["step"]: entry["eval_code_tau"] for entry in trained.state.log_history if "eval_code_tau" in entry}
    assert trained.state.best_model_checkpoint.endswith("checkpoint-2") and result["steps"] == 4
    assert result["metrics"]["step"] == 2 and result["metrics"]["eval_code_tau"] == taus[2] != taus[4]
    assert result["before"]["eval_code_tau"] == taus[0]


def test_nothing_is_uploaded_while_training_goes_on(trained, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda *args, **kwargs: pytest.fail("an upload"))
    trained._push_from_checkpoint(str(Path(trained.args.output_dir, "checkpoint-4")))


def test_every_set_of_held_out_rows_is_reported(trained):
    result = json.loads(Path(trained.args.output_dir, "results/training.json").read_text())
    card = Path(trained.args.output_dir, "README.md").read_text()
    for name in ("code", "math"):
        assert result["metrics"][f"eval_{name}_tau"] >= 1.0 and result["before"][f"eval_{name}_tau"] >= 1.0
        assert f"| tau, estimated on held-out rows of {name} |" in card


def test_settings_of_an_interrupted_evaluation_are_left_alone(trained):
    settings = Path(trained.args.output_dir, "results/eval.json.partial.jsonl.settings.json")
    settings.write_text("{}")
    trained.create_model_card()
    assert settings.read_text() == "{}"
