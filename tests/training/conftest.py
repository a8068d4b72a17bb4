"""A trainer of a tiny pair, with its rows."""

import pytest
import torch

from hf_dspark import DSparkTrainer
from tests.training.tiny import tiny_arguments


@pytest.fixture
def rows(target) -> list[dict]:
    """Sequences the target wrote greedily: something a draft can learn."""
    prompts = torch.randint(1, 47, (8, 3), generator=torch.Generator().manual_seed(3))
    written = target.generate(prompts, do_sample=False, max_new_tokens=17, pad_token_id=0)
    lengths = [20, 14, 20, 18, 20, 16, 20, 20]
    return [
        {"input_ids": row[:length].tolist(), "loss_mask": [0] * 3 + [1] * (length - 3)}
        for row, length in zip(written, lengths, strict=True)
    ]


@pytest.fixture
def make_trainer(target, make_draft, rows, tmp_path):
    """Build a trainer of four steps."""

    def build(
        model=None, target=target, data=rows, eval_data=rows, processing_class=None, callbacks=None, **options
    ) -> DSparkTrainer:
        facts = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4, "num_anchors": 6}
        arguments = tiny_arguments(str(tmp_path / "run"), **facts | options)
        model = make_draft(target) if model is None else model
        return DSparkTrainer(model, target, arguments, data, eval_data, processing_class, callbacks=callbacks)

    return build


@pytest.fixture
def logged():
    """Return what a trainer has logged under a name."""
    return lambda trainer, name: [entry[name] for entry in trainer.state.log_history if name in entry]
