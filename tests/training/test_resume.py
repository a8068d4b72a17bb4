"""Resuming: at every step as if never interrupted, and never as another run."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_dspark import DSparkTrainer
from hf_dspark.training import resume
from hf_dspark.training.resume import last_checkpoint, require_whole
from tests.training.tiny import KINDS, tiny_arguments, tiny_pair, tiny_rows
from tests.training.train_tiny import Stream


def test_resumed_run_continues_as_if_never_interrupted(make_trainer, make_draft, target, logged, tmp_path):
    whole = make_trainer(save_strategy="steps", save_steps=1)
    whole.train()
    resumed = make_trainer(make_draft(target, seed=99))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step == 4
    assert logged(resumed, "loss") == logged(whole, "loss")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "gated", "fill-in", "pruned", "eagle3", "packed", "stream", "dropout"])
def test_resumed_run_of_every_kind_ends_in_the_same_bits_from_each_of_its_steps(tmp_path, kind):
    """Accumulation, packing and streams pick up their place; dropout draws what it would have drawn."""
    known = kind if kind in KINDS else "dspark"

    def trainer() -> DSparkTrainer:
        target, draft = tiny_pair(known)
        if kind == "dropout":
            draft.config.attention_dropout = 0.3
        options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1}
        rows = Stream(tiny_rows(30)) if kind == "stream" else tiny_rows(23)
        return DSparkTrainer(draft, target, tiny_arguments(str(tmp_path), known, **options), rows)

    whole = trainer()
    whole.train()
    weights, history = whole.model.state_dict(), [entry for entry in whole.state.log_history if "loss" in entry]
    for step in range(1, 10):
        resumed = trainer()
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert [entry for entry in resumed.state.log_history if "loss" in entry] == history, step
        assert all(torch.equal(weights[name], value) for name, value in resumed.model.state_dict().items()), step


@pytest.mark.slow
def test_resuming_a_stream_that_had_begun_again_says_that_its_place_is_not_known(tmp_path):
    def trainer() -> DSparkTrainer:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        return DSparkTrainer(*tiny_pair()[::-1], tiny_arguments(str(tmp_path), **options), Stream(tiny_rows(6)))

    trainer().train()  # two steps go through the rows
    for step in (2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer().train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert any("where it was is not known" in str(each.message) for each in caught) == (step == 3)


def test_resuming_with_other_facts_is_refused(make_trainer, make_draft, target, rows, tmp_path):
    make_trainer(save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    for options, message in (
        ({"gradient_accumulation_steps": 2}, r"processes x gradient_accumulation_steps\) \(1 there, 2 now\)"),
        ({"num_anchors": 5}, r"num_anchors \(6 there, 5 now\)"),
        ({"l1_weight": 0.5, "cross_entropy_weight": 0.5}, r"cross_entropy_weight \(0.1 there, 0.5 now\), l1_weight"),
    ):
        for where in (checkpoint, Path(checkpoint), True):
            with pytest.raises(ValueError, match=message):
                make_trainer(**options).train(resume_from_checkpoint=where)
    other = make_draft(target, target_layer_ids=make_draft(target).config.target_layer_ids[::-1])
    with pytest.raises(ValueError, match="draft, target_layer_ids .* there"):
        make_trainer(other).train(resume_from_checkpoint=True)
    rows.reverse()
    with pytest.raises(ValueError, match="first rows .* there"):
        make_trainer().train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two whole checkpoints, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    target, draft = tiny_pair()
    arguments = tiny_arguments(str(folder), max_steps=2, save_strategy="steps", save_steps=1)
    DSparkTrainer(draft, target, arguments, tiny_rows(8)).train()
    return folder


DAMAGES = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "two bytes short": lambda content: content[:-2],
    "a long file": lambda content: content + b"x",
}
PARTS = (
    "model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "dspark_run.json",
)  # fmt: skip


@pytest.mark.one_in(19)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_with_a_damaged_file_is_passed_over_and_named(saved, tmp_path, part, damage):
    for step in (1, 2):
        shutil.copytree(saved / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    path = tmp_path / "checkpoint-2" / part
    content = DAMAGES[damage](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        require_whole(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match=f"{re.escape(str(path))}.*checkpoint-2 is passed over"):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.slow
def test_resuming_from_a_damaged_checkpoint_is_refused_or_goes_on_from_the_last_whole_one(make_trainer, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="there is no whole checkpoint to resume from"):
        make_trainer().train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="nowhere/dspark_run.json cannot be used: there is no such file"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    whole = make_trainer(save_strategy="steps", save_steps=2)
    whole.train()
    weights = folder / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"norm.weight"', b'"norm.weighs"'))
    with pytest.raises(ValueError, match="checkpoint-4 does not match its config.*missing: norm.weight"):
        make_trainer().train(resume_from_checkpoint=str(folder / "checkpoint-4"))  # Trainer would keep what it has
    weights.write_bytes(b"half")
    with pytest.raises(ValueError, match="checkpoint-4/model.safetensors has 4 bytes"):
        make_trainer().train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    with pytest.warns(UserWarning, match="checkpoint-4 is passed over"):
        resumed = make_trainer(save_strategy="steps", save_steps=2)
        resumed.train(resume_from_checkpoint=True)
    assert all(
        torch.equal(resumed.model.state_dict()[name], value) for name, value in whole.model.state_dict().items()
    )
    assert last_checkpoint(folder) == str(folder / "checkpoint-4")  # written anew


def test_resuming_from_a_checkpoint_without_the_optimisers_state_is_refused(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", save_steps=2, save_only_model=True).train()
    for where in (str(tmp_path / "run" / "checkpoint-2"), True):
        with pytest.raises(ValueError, match="saved with save_only_model.*start anew from its weights"):
            make_trainer().train(resume_from_checkpoint=where)


class InterruptedSave(TrainerCallback):
    """Interrupts a run after `Trainer` has saved the checkpoint of a step."""

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 4:
            interrupt()


@pytest.mark.slow
def test_older_checkpoints_are_deleted_once_the_new_one_is_whole(make_trainer, tmp_path, monkeypatch):
    """An interruption anywhere leaves one to go on from."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "callbacks": [InterruptedSave()]}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(**options).train()
    folder = tmp_path / "run"
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    assert last_checkpoint(folder) == str(folder / "checkpoint-4")

    shutil.rmtree(folder)
    write = resume.replace_text
    monkeypatch.setattr(
        resume, "replace_text", lambda path, text: interrupt() if "checkpoint-4" in str(path) else write(path, text)
    )
    with pytest.raises(KeyboardInterrupt):
        make_trainer(**options).train()
    with pytest.warns(UserWarning, match="checkpoint-4 is passed over"):
        assert last_checkpoint(folder) == str(folder / "checkpoint-2")


def test_checkpoint_that_is_being_written_over_is_not_whole(make_trainer, tmp_path, monkeypatch):
    make_trainer(save_strategy="steps", save_steps=4).train()
    monkeypatch.setattr(Trainer, "_save_rng_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(save_strategy="steps", save_steps=4).train()
    with pytest.warns(UserWarning, match="checkpoint-4 is passed over"):
        assert last_checkpoint(tmp_path / "run") is None


def interrupt(*args):
    raise KeyboardInterrupt
