"""Training: the loss falls, only the draft moves, what is reported is so, and bad input is refused at once."""

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments
from hf_dspark.scheduling.calibration import expected_calibration_error
from hf_dspark.training.blocks import label_hidden
from hf_dspark.training.target_states import target_states
from tests.training.tiny import KINDS, tiny_arguments, tiny_draft
from tests.training.train_tiny import Stream

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["dspark", "gated", "fill-in", "pruned", "dflash", "eagle3", "mtp", "v4"])
def test_every_kind_of_draft_learns(make_trainer, logged, target, kind):
    draft = tiny_draft(target.config, kind)
    trainer = make_trainer(draft, **{"max_steps": 25} | KINDS[kind][1])
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert len(logged(trainer, "loss")) == len(logged(trainer, "tau")) == 25
    assert after["eval_loss"] < 0.9 * before["eval_loss"] and after["eval_tau"] > before["eval_tau"] + 0.1
    with_confidence = getattr(draft.config, "enable_confidence_head", False)
    for name in ("eval_confidence_loss", "eval_confidence_ece"):
        assert bool(logged(trainer, name)) == with_confidence, name
    assert draft.get_output_embeddings() is (target.lm_head if kind != "pruned" else draft.lm_head)


def test_a_data_set_that_cannot_be_used_is_named(make_trainer, rows):
    for options, message in (
        ({"data": rows[200:]}, r"train_dataset: the data set is empty \(as rows\[200:\] of 100 rows are\)"),
        ({"eval_data": [{"text": "x"}]}, "eval_dataset: the examples are not tokenised"),
        (
            {"eval_data": {"math": rows, "code": [{"input_ids": [99] * 9}]}},
            r"eval_dataset\['code'\]: example 0: token id 99",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(**options)


def test_training_moves_every_draft_parameter_and_none_of_the_target(make_trainer, target):
    trainer = make_trainer()
    batch, weight_sum = sampled(trainer)
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=weight_sum).backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())
    assert not target.training
    trainer.model.zero_grad()
    models = target.state_dict(), trainer.model.state_dict()
    before = [{name: value.clone() for name, value in state.items()} for state in models]
    trainer.train()
    assert all(torch.equal(value, before[0][name]) for name, value in models[0].items())
    assert not any(torch.equal(value, before[1][name]) for name, value in models[1].items())


def sampled(trainer: DSparkTrainer, rows: int = 3) -> tuple[dict, torch.Tensor]:
    """A batch with its anchors, and the sum of its slots' weights."""
    batch = trainer.data_collator(trainer.train_dataset[:rows])
    batches, weight_sum = trainer.get_batch_samples(iter([batch]), 1, "cpu")
    return batches[0], weight_sum


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"cross_entropy_weight": 1.0, "l1_weight": 0.2, "confidence_weight": 0.3, "position_decay": None},
        {"soft_cross_entropy_weight": 0.5, "l1_weight": 0.0},
    ],
    ids=["default", "flat", "soft"],
)
def test_compute_loss_is_the_weighted_objective_on_sampled_anchors(make_trainer, target, weights):
    trainer = make_trainer(**weights)
    draft, (batch, weight_sum) = trainer.model.train(), sampled(trainer)
    loss, losses = trainer.compute_loss(draft, batch, return_outputs=True, num_items_in_batch=weight_sum)

    args, blocks = trainer.args, batch["blocks"]
    states = target_states(target, [0, 2], batch["input_ids"], batch["attention_mask"], draft.device, draft.dtype)
    logits, confidence_logits = draft.teacher_forced(batch["input_ids"], states.features, blocks.layout, blocks.labels)
    draft_distribution = logits.compute(*logits.inputs).log_softmax(-1)
    target_distribution = target.lm_head(label_hidden(states.last_hidden, blocks)).softmax(-1)
    distance = (draft_distribution.exp() - target_distribution).abs().sum(-1)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(confidence_logits, 1 - distance / 2, reduction="none")
    terms = (
        args.cross_entropy_weight * -draft_distribution.gather(-1, blocks.labels[..., None])[..., 0]
        + args.l1_weight * distance + args.confidence_weight * bce
        + args.soft_cross_entropy_weight * -(target_distribution * draft_distribution).sum(-1)
    )  # fmt: skip
    decay = 1.0 if args.position_decay is None else torch.exp(-torch.arange(4) / args.position_decay)
    share = blocks.supervised * decay
    assert weight_sum.item() == pytest.approx(share.sum().item(), rel=1e-6)
    torch.testing.assert_close(loss, (terms * share).sum() / share.sum(), atol=1e-5, rtol=1e-5)
    acceptance = (1 - distance / 2) * blocks.supervised
    torch.testing.assert_close(losses.acceptance, acceptance, atol=1e-5, rtol=1e-5)
    logs = {"loss": 0.0}
    trainer.log(logs)
    tau = 1 + acceptance.cumprod(-1).sum(-1)[blocks.supervised.any(-1)].mean().item()
    assert logs["tau"] == pytest.approx(tau, abs=1e-5)


def test_two_accumulated_batches_make_the_gradient_of_all_their_blocks(make_trainer):
    """The mean is over the slots of the whole step: a batch with few blocks does not weigh more than its blocks do."""
    trainer = make_trainer(num_anchors=1000)  # all candidates: nothing is drawn
    rows = [trainer.data_collator(trainer.train_dataset[part]) for part in (slice(0, 1), slice(1, 8))]
    whole = [trainer.data_collator(trainer.train_dataset[:8])]
    gradients = []
    for batches in (rows, whole):
        samples, weight_sum = trainer.get_batch_samples(iter(batches), len(batches), "cpu")
        trainer.model.zero_grad()
        for batch in samples:
            trainer.training_step(trainer.model, batch, weight_sum)
        gradients.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4, msg=name)


def test_anchors_depend_on_seed_step_and_batch_alone(make_trainer):
    """So that a resumed run, or one on other processes, has them without replaying any."""
    trainer = make_trainer()
    batch = trainer.data_collator(trainer.train_dataset[:3])

    def anchors(*key, seed=7):
        trainer.args.seed = seed
        return trainer._sample_blocks(batch, key).layout.anchor_positions

    first = anchors(3, 1)
    torch.rand(5)
    assert torch.equal(anchors(3, 1), first)
    for other in (anchors(3, 2), anchors(4, 1), anchors(3, 1, seed=8)):
        assert not torch.equal(other, first)


def test_evaluation_reports_tau_and_acceptance_by_slot_and_the_best_model_is_chosen_by_them(make_trainer, logged):
    trainer = make_trainer(
        max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_tau", greater_is_better=True,
    )  # fmt: skip
    returned = trainer.evaluate()
    names = ("loss", "tau", "cross_entropy", "l1", "confidence_loss", "confidence_ece")
    for name in (*names, *(f"acceptance_{slot}" for slot in range(1, 5))):
        assert logged(trainer, f"eval_{name}") == [returned[f"eval_{name}"]], name
    assert all(0 < returned[f"eval_acceptance_{slot}"] < 1 for slot in range(1, 5))
    assert 1 + returned["eval_acceptance_1"] <= returned["eval_tau"] + 0.05
    assert "eval_acceptance_5" not in returned
    trainer.train()
    assert trainer.state.best_metric == max(logged(trainer, "eval_tau"))
    assert len(logged(trainer, "eval_tau")) == len(logged(trainer, "tau")) == 2
    assert all("eval_tau" not in entry for entry in trainer.state.log_history if "tau" in entry)


def test_a_target_is_read_without_dropout_and_left_in_its_modes(make_trainer, make_target, logged):
    losses = []
    for mode in (False, True):
        target = make_target(attention_dropout=0.5).train(mode)
        trainer = make_trainer(target=target, max_steps=2, logging_steps=1)
        trainer.train()
        trainer.evaluate()
        assert {module.training for module in target.modules()} == {mode}
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]


def test_evaluations_have_their_own_names_and_sums_are_repeatable_and_leave_the_random_state_alone(make_trainer, rows):
    trainer, state = make_trainer(), torch.random.get_rng_state()
    alone = trainer.evaluate()["eval_tau"]
    other = trainer.evaluate(rows[:2], metric_key_prefix="test")
    assert other["test_tau"] != alone and "eval_tau" not in other
    short = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}] * 2  # shorter than a block
    assert trainer.evaluate(short)["eval_loss"] > 0
    assert trainer.evaluate()["eval_tau"] == alone
    assert torch.equal(torch.random.get_rng_state(), state)


def test_reported_calibration_matches_its_definition(make_trainer):
    trainer = make_trainer(num_anchors=1000, per_device_eval_batch_size=8)
    seen = []
    compute_loss = trainer.compute_loss

    def spying(model, inputs, *args, **kwargs):
        loss, output = compute_loss(model, inputs, return_outputs=True)
        seen.append((output, inputs["blocks"].supervised))
        return loss

    trainer.compute_loss = spying
    reported = trainer.evaluate()
    (output, supervised), confidence = seen[0], seen[0][0].confidence_logits.sigmoid()
    survival, predicted = output.acceptance.cumprod(-1), confidence.cumprod(-1)
    ece = sum(
        expected_calibration_error(predicted[..., k][supervised[..., k]], survival[..., k][supervised[..., k]])
        for k in range(4)
    ) / 4  # fmt: skip
    assert reported["eval_confidence_ece"] == pytest.approx(ece, abs=1e-6)


def test_reports_are_the_same_for_batches_of_every_size_and_packed_rows(make_trainer):
    """All anchors of the same documents: the same numbers, whether they stand in one row or in many."""
    first, *others = [
        make_trainer(num_anchors=1000, packing=packing, max_length=64, per_device_eval_batch_size=size).evaluate()
        for packing, size in ((False, 8), (False, 1), (True, 8))
    ]
    for name in ("eval_loss", "eval_tau", "eval_acceptance_2", "eval_confidence_ece"):
        for other in others:
            assert other[name] == pytest.approx(first[name], rel=1e-4), name


def test_bfloat16_and_gradient_checkpointing_train(make_trainer, logged):
    trainer = make_trainer(max_steps=3, bf16=True, gradient_checkpointing=True)
    trainer.train()
    plain = make_trainer(max_steps=3)
    plain.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=2e-2)


@pytest.mark.slow
def test_compiled_training_is_on_the_same_curve(make_trainer, logged):
    curves = []
    for compiled in (False, True):
        trainer = make_trainer(torch_compile=compiled)
        trainer.train()
        curves.append(logged(trainer, "loss"))
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafts_are_loaded_by_name_with_wide_weights(make_trainer, target, tmp_path, kind):
    draft = tiny_draft(target.config, kind).bfloat16()
    draft.save_pretrained(tmp_path / "draft")
    trained = make_trainer(str(tmp_path / "draft")).model
    assert type(trained) is type(draft) and trained.dtype == torch.float32


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_targets_train_drafts(make_trainer, logged, make_quantised, tmp_path, bits):
    target = make_quantised(bits)
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, block_size=4, markov_rank=8))
    trainer = make_trainer(draft, target, max_steps=8, feature_cache_dir=str(tmp_path / "cache"))
    trainer.train()
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]
    assert all(parameter.dtype == torch.float32 for parameter in draft.parameters())


def test_offloaded_targets_train_drafts(make_trainer, make_draft, make_target, tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    names = ("embed_tokens", "layers.0", "layers.3", "norm", "rotary_emb")
    device_map = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map | {"model.layers.1": "disk", "model.layers.2": "disk"},
        offload_folder=str(tmp_path / "offload"),
    )  # fmt: skip
    plain = make_trainer(make_draft(make_target())).evaluate()["eval_loss"]
    found = make_trainer(make_draft(offloaded), target=offloaded).evaluate()["eval_loss"]
    assert found == pytest.approx(plain, abs=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream", "torch"])
def test_data_sets_of_every_kind_train(make_trainer, logged, rows, kind, packing):
    data = Stream(rows) if kind == "torch" else pytest.importorskip("datasets").Dataset.from_list(rows)
    data = data.to_iterable_dataset() if kind == "stream" else data
    workers = {} if kind != "map" else {"dataloader_num_workers": 1, "train_sampling_strategy": "group_by_length"}
    trainer = make_trainer(data=data, eval_data={"a": rows}, max_steps=2, max_length=64, packing=packing, **workers)
    trainer.train()
    assert len(logged(trainer, "loss")) == 2
    assert trainer.evaluate()["eval_a_tau"] > 1


def test_loss_that_is_not_a_number_stops_before_the_weights_change(make_trainer):
    trainer = make_trainer(max_steps=3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    original = trainer.source.states

    def broken(*args, **kwargs):
        states = original(*args, **kwargs)
        states.features[0, 0, 0] = torch.nan
        return states

    trainer.source.states = broken
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0; .* target's own states are not finite"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_what_an_interrupted_run_saw_is_in_no_later_report(make_trainer):
    trainer = make_trainer()
    trainer._metrics["train"]._sums["losses"][1:] = 1e9  # the terms
    trainer.train()
    reports = [entry["cross_entropy"] for entry in trainer.state.log_history if "cross_entropy" in entry]
    assert reports and max(reports) < 100


def test_training_forgets_the_calibration_of_the_old_weights(make_trainer, make_draft, target):
    draft = make_draft(target)
    draft.config.sts_temperatures = {"default": [2.0] * draft.config.block_size}
    draft.config.confidence_fits = {"default": [[0.5, -1.0]] * draft.config.block_size}
    with pytest.warns(UserWarning, match="calibrate it again"):
        make_trainer(draft, max_steps=1).train()
    assert draft.config.sts_temperatures is None and draft.config.confidence_fits is None


def test_mistakes_with_rows_targets_and_arguments_are_named(make_trainer, make_draft, make_target, target, tmp_path):
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="args must be DSparkTrainingArguments, got TrainingArguments"):
        DSparkTrainer(make_draft(target), target, plain, train_dataset=[])
    with pytest.raises(TypeError, match="a DSparkDraftModel or an Eagle3DraftModel is needed, got Qwen3ForCausalLM"):
        make_trainer(target, make_draft(target))
    for row, message in (
        ({"prompt": "a", "completion": "b"}, "the examples are not tokenised, and there is no tokenizer"),
        ({"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0] * 7}, "supervised"),
        ({"input_ids": [1, 2, 3, 4, 5, 6, 48], "loss_mask": [1] * 7}, "48"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(data=[row])
    with pytest.warns(UserWarning, match="small updates are lost in the draft's torch.bfloat16"):
        make_trainer(make_draft(target).bfloat16())

    with pytest.raises(ValueError, match="does something to its logits that this draft's config does not say"):
        make_trainer(make_draft(target, logit_scale=0.5))
    with pytest.raises(ValueError, match="vocab_size: draft 48, target 50"):
        make_trainer(make_draft(target), target=make_target(vocab_size=50))
    with pytest.raises(ValueError, match="soft_cross_entropy_weight=0, got 0.5"):
        make_trainer(make_draft(target, draft_vocab_size=20), soft_cross_entropy_weight=0.5)


def test_arguments_default_to_the_methods_schedule(tmp_path):
    arguments = DSparkTrainingArguments(tmp_path, use_cpu=True)
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.num_train_epochs) == (6e-4, 0.04, 10)
    assert arguments.lr_scheduler_type == "cosine"
    assert [arguments.get_warmup_steps(steps) for steps in (1, 24, 25, 1000)] == [0, 0, 1, 40]
    assert DSparkTrainingArguments(tmp_path, use_cpu=True, warmup_steps=30).get_warmup_steps(10) == 30


def test_a_run_of_one_step_trains_and_is_said_to_train_little(make_trainer, logged):
    schedule = {name: getattr(DSparkTrainingArguments, name) for name in ("warmup_steps", "lr_scheduler_type")}
    trainer = make_trainer(per_device_train_batch_size=8, max_steps=-1, num_train_epochs=1, **schedule)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.warns(UserWarning, match="^1 step trains little: give more examples or epochs"):
        trainer.train()
    assert trainer.state.global_step == 1 and logged(trainer, "learning_rate") == [trainer.args.learning_rate]
    assert not any(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_decay": -4.0}, "position_decay must be positive or None, got -4.0"),
        ({"packing": True, "max_length": None}, "packing joins documents into rows of max_length tokens"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "pickled states"),
    ],
)
def test_arguments_refuse_wrong_values(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_arguments(str(tmp_path), **options)
