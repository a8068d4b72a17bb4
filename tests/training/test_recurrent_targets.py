"""Drafts of recurrent and hybrid targets: trained, and packed only where the target keeps documents apart."""

import pytest
import torch

from hf_dspark import DSparkTrainer
from tests.hybrids import HAVE_PROTOCOL, build
from tests.training.tiny import tiny_arguments, tiny_draft

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data"),
    pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers"),
]


def trainer_of(family, folder, **options):
    target = build(family, vocab_size=48)
    torch.manual_seed(0)
    written = target.generate(torch.randint(3, 47, (8, 3)), do_sample=False, max_new_tokens=17)
    rows = [{"input_ids": row.tolist(), "loss_mask": [0] * 3 + [1] * 17} for row in written]
    facts = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 25, "num_anchors": 6}
    arguments = tiny_arguments(str(folder / "run"), **facts | options)
    return DSparkTrainer(tiny_draft(target.config, "dspark"), target, arguments, rows, rows)


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lfm2", "mamba", "nemotron_h"))],
)
def test_a_draft_learns(family, tmp_path):
    trainer = trainer_of(family, tmp_path)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.9 * before["eval_loss"] and after["eval_tau"] > before["eval_tau"] + 0.1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "mamba", "nemotron_h"])
def test_packed_documents_are_refused_where_a_state_runs_from_one_into_the_next(family, tmp_path):
    with pytest.raises(ValueError, match="does not keep the documents of a packed row apart .* use packing=False"):
        trainer_of(family, tmp_path, packing=True, max_length=64).train()
