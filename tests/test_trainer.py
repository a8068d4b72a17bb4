"""Training: the loss falls, only the draft moves, and a resumed run is the run that was interrupted."""

import json

import pytest
import torch

from hf_dspark import DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments
from hf_dspark.data import cut_blocks, label_hidden, sample_anchors, target_states
from hf_dspark.losses import block_losses, expected_tau

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data")


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
    def build(draft: DSparkDraftModel | None = None, target=target, **overrides) -> DSparkTrainer:
        arguments = DSparkTrainingArguments(
            **{
                "output_dir": str(tmp_path / "run"),
                "use_cpu": True,
                "report_to": [],
                "disable_tqdm": True,
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 4,
                "learning_rate": 3e-3,
                "max_steps": 4,
                "logging_steps": 1,
                "save_strategy": "no",
                "num_anchors": 6,
                "seed": 7,
            }
            | overrides
        )
        return DSparkTrainer(
            make_draft(target) if draft is None else draft, target, arguments, train_dataset=rows, eval_dataset=rows
        )

    return build


def logged(trainer: DSparkTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def one_batch(trainer: DSparkTrainer) -> dict[str, torch.Tensor]:
    return trainer.data_collator(trainer.train_dataset[:3])


def test_training_lowers_the_loss_and_raises_tau(make_trainer):
    trainer = make_trainer(max_steps=25)
    loss_before, tau_before = trainer.evaluate()["eval_loss"], logged(trainer, "eval_tau")[-1]
    trainer.train()
    assert len(logged(trainer, "loss")) == len(logged(trainer, "tau")) == 25
    assert trainer.evaluate()["eval_loss"] < 0.8 * loss_before
    assert logged(trainer, "eval_tau")[-1] > tau_before + 0.2


def test_training_moves_every_draft_parameter_and_none_of_the_target(make_trainer, target):
    trainer = make_trainer()
    draft = trainer.model
    target_before = {name: value.clone() for name, value in target.state_dict().items()}
    draft_before = {name: value.clone() for name, value in draft.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, target_before[name]) for name, value in target.state_dict().items())
    assert all(not torch.equal(value, draft_before[name]) for name, value in draft.state_dict().items())


def test_only_draft_parameters_get_gradients_and_reach_the_optimizer(make_trainer, target):
    trainer = make_trainer()
    trainer.compute_loss(trainer.model, one_batch(trainer)).backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())
    assert not target.training
    optimised = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert optimised == {id(parameter) for parameter in trainer.model.parameters()}


@pytest.mark.parametrize(
    "weights",
    [{}, {"cross_entropy_weight": 1.0, "l1_weight": 0.2, "confidence_weight": 0.3, "position_decay": None}],
    ids=["default", "other"],
)
def test_compute_loss_is_the_weighted_objective_on_sampled_anchors(make_trainer, target, weights):
    trainer = make_trainer(**weights)
    draft, batch = trainer.model, one_batch(trainer)
    torch.manual_seed(5)
    loss = trainer.compute_loss(draft, batch)
    torch.manual_seed(5)
    positions, mask = sample_anchors(batch["loss_mask"], 6)
    blocks = cut_blocks(batch["input_ids"], batch["loss_mask"], positions, mask, 4)
    states = target_states(target, [0, 2], batch["input_ids"], batch["attention_mask"], draft.device, draft.dtype)
    output = draft(batch["input_ids"], states.features, positions, mask, blocks.labels)
    target_logits = target.lm_head(label_hidden(states.last_hidden, blocks))
    expected = block_losses(
        output.draft_logits, target_logits, blocks.labels, blocks.supervised, output.confidence_logits, **weights
    )
    torch.testing.assert_close(loss, expected.total, atol=1e-6, rtol=1e-6)
    tau = trainer._metrics["eval"]["tau"] + trainer._metrics["train"]["tau"]
    assert tau == pytest.approx([expected_tau(expected.acceptance, blocks.supervised).item()])


def test_evaluation_reports_tau_and_acceptance_by_slot(make_trainer):
    trainer = make_trainer()
    returned = trainer.evaluate()
    for name in ("eval_tau", "eval_cross_entropy", "eval_l1", "eval_confidence_loss"):
        assert len(logged(trainer, name)) == 1, name
    acceptance = [logged(trainer, f"eval_acceptance_{slot}")[0] for slot in range(1, 5)]
    assert all(0 < value < 1 for value in acceptance)
    assert 1 + acceptance[0] <= logged(trainer, "eval_tau")[0] + 0.05
    assert not logged(trainer, "eval_acceptance_5")
    assert returned["eval_loss"] == logged(trainer, "eval_loss")[0]


def test_evaluate_returns_the_metrics_it_logs(make_trainer):
    trainer = make_trainer()
    returned = trainer.evaluate()
    assert returned["eval_tau"] == logged(trainer, "eval_tau")[0]
    assert returned["eval_acceptance_1"] == logged(trainer, "eval_acceptance_1")[0]


def test_best_model_can_be_chosen_by_tau(make_trainer):
    trainer = make_trainer(
        max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_tau", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == max(logged(trainer, "eval_tau"))


def test_evaluation_is_repeatable_and_leaves_the_random_state_alone(make_trainer):
    trainer = make_trainer()
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    losses = [trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]]
    assert losses[0] == losses[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_evaluation_does_not_enter_the_training_metrics(make_trainer):
    trainer = make_trainer(max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(logged(trainer, "eval_tau")) == len(logged(trainer, "tau")) == 2
    assert all("eval_tau" not in entry for entry in trainer.state.log_history if "tau" in entry)


def test_metrics_without_confidence_head_have_no_confidence_loss(make_trainer, make_draft, target):
    trainer = make_trainer(make_draft(target, markov_rank=0, enable_confidence_head=False), max_steps=1)
    trainer.train()
    assert logged(trainer, "tau") and not logged(trainer, "confidence_loss")


def test_gradient_accumulation_averages_over_its_steps(make_trainer, monkeypatch):
    norms = {}
    for steps in (1, 2):
        trainer = make_trainer(gradient_accumulation_steps=steps, max_steps=1, max_grad_norm=1e9)
        batch = one_batch(trainer)
        # The same batch, and the same anchors, in every micro-step: the mean gradient is that of one.
        monkeypatch.setattr(trainer, "data_collator", lambda rows, batch=batch: batch)
        original = trainer.compute_loss

        def seeded(*args, original=original, **kwargs):
            torch.manual_seed(9)
            return original(*args, **kwargs)

        monkeypatch.setattr(trainer, "compute_loss", seeded)
        trainer.train()
        norms[steps] = logged(trainer, "grad_norm")[0]
    assert norms[2] == pytest.approx(norms[1], rel=1e-4)


def test_resumed_run_continues_as_if_never_interrupted(make_trainer, make_draft, target, tmp_path):
    whole = make_trainer(save_strategy="steps", save_steps=2)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = make_trainer(make_draft(target, seed=99))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == whole.state.global_step == 4
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, atol=1e-6, rtol=0, msg=name)
    assert logged(resumed, "loss")[-2:] == pytest.approx(logged(whole, "loss")[-2:], abs=1e-6)


def test_same_seed_trains_the_same_draft(make_trainer):
    weights = []
    for seed in (7, 7, 8):
        trainer = make_trainer(seed=seed, max_steps=2)
        trainer.train()
        weights.append(trainer.model.fc.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_saved_model_is_a_loadable_draft(make_trainer, target, tmp_path):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "final").bind(target)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert json.loads((tmp_path / "final" / "config.json").read_text())["model_type"] == "dspark"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_anchors": 0}, "num_anchors must be at least 1, got 0"),
        ({"position_decay": 0.0}, "position_decay must be positive or None, got 0.0"),
        ({"position_decay": -4.0}, "position_decay must be positive or None, got -4.0"),
    ],
)
def test_arguments_refuse_wrong_values(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **overrides)


def test_arguments_keep_the_columns_of_the_rows(tmp_path):
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=True
    )
    assert arguments.remove_unused_columns is False


def test_trainer_refuses_a_target_that_does_not_fit(make_trainer, make_draft, make_target, target):
    with pytest.raises(ValueError, match="vocab_size: draft 48, target 50"):
        make_trainer(make_draft(target), target=make_target(vocab_size=50))
