"""What a trainer reports of the draft that it publishes."""

import json
import threading
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


def test_checkpoints_are_uploaded_from_copies_and_a_failure_stops_nothing(trained, monkeypatch):
    checkpoint, seen = Path(trained.args.output_dir, "checkpoint-4"), []
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.is_file()}
    may_upload = threading.Event()

    def upload(folder, repo_id, **options):
        may_upload.wait(timeout=60)
        seen.append((repo_id, {str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()}))
        seen.append(Path(folder, "README.md").read_text())
        raise OSError("the network is gone")

    monkeypatch.setattr("hf_dspark.hub.repository.upload_repository", upload)
    monkeypatch.setattr(trained, "hub_model_id", "me/my-draft", raising=False)
    monkeypatch.setattr(trained, "push_in_progress", None, raising=False)
    trained._push_from_checkpoint(str(checkpoint))
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.is_file()} == before
    moved = checkpoint.rename(checkpoint.with_name("gone"))
    may_upload.set()
    trained.push_in_progress.wait_until_done()
    moved.rename(checkpoint)
    (repo_id, files), card = seen
    assert repo_id == "me/my-draft" and "me/my-draft" in card and "checkpoint-4" not in card
    assert {"config.json", "model.safetensors", "README.md", "custom_generate/generate.py"} <= files
    assert not any(name.endswith((".pt", ".bin", ".pth")) for name in files)
    assert not list(Path(trained.args.output_dir).glob(".upload-*"))


def test_a_card_before_a_save_is_refused_and_nothing_is_written(tmp_path):
    target, draft = tiny_pair()
    trainer = DSparkTrainer(draft, target, tiny_arguments(str(tmp_path / "new")), tiny_rows(4))
    with pytest.raises(FileNotFoundError, match="new holds no draft yet: call save_model\\(\\) first"):
        trainer.create_model_card()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_every_set_of_held_out_rows_is_reported(trained):
    result = json.loads(Path(trained.args.output_dir, "results/training.json").read_text())
    card = Path(trained.args.output_dir, "README.md").read_text()
    for name in ("code", "math"):
        assert result["metrics"][f"eval_{name}_tau"] >= 1.0 and result["before"][f"eval_{name}_tau"] >= 1.0
        assert f"| tau, estimated on held-out examples of {name} |" in card


def test_settings_of_an_interrupted_evaluation_are_left_alone(trained):
    settings = Path(trained.args.output_dir, "results/eval.json.partial.jsonl.settings.json")
    settings.write_text("{}")
    trained.create_model_card()
    assert settings.read_text() == "{}"
