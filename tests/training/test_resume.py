"""Resuming: at every step as if never interrupted, and never as another run."""

from pathlib import Path

import pytest
import torch

from hf_dspark.training.resume import last_checkpoint


def test_resumed_run_continues_as_if_never_interrupted(make_trainer, make_draft, target, logged, tmp_path):
    whole = make_trainer(save_strategy="steps", save_steps=1)
    whole.train()
    for step in (1, 2, 3):
        resumed = make_trainer(make_draft(target, seed=99))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert resumed.state.global_step == whole.state.global_step == 4
        assert logged(resumed, "loss") == logged(whole, "loss")
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value), (step, name)


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


def test_checkpoint_that_was_not_saved_to_its_end_is_passed_over(make_trainer, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="there is no checkpoint to resume from"):
        make_trainer().train(resume_from_checkpoint=True)
    make_trainer(save_strategy="steps", save_steps=2).train()
    assert last_checkpoint(folder) == str(folder / "checkpoint-4")
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    (folder / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    (folder / "checkpoint-best").mkdir()
    with pytest.warns(UserWarning, match="checkpoint-4 was not saved to its end, and is passed over"):
        assert last_checkpoint(folder) == str(folder / "checkpoint-2")
    with pytest.warns(UserWarning, match="checkpoint-4 was not saved to its end"):
        make_trainer().train(resume_from_checkpoint=True)
