"""Training: the loss falls, only the draft moves, and a resumed run is the run that was interrupted."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import hf_dspark
from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
    cache_features,
)
from hf_dspark.maths.calibration import expected_calibration_error
from hf_dspark.maths.losses import LossWeights, expected_tau
from hf_dspark.training.blocks import label_hidden, target_states
from hf_dspark.training.feature_cache import FeatureCache

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(hf_dspark.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_to_end(command: list[str]) -> None:
    """Run a script in processes of its own; one that fails says why."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]


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
    batch, weight_sum = sampled(trainer)
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=weight_sum).backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())
    assert not target.training
    optimised = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert optimised == {id(parameter) for parameter in trainer.model.parameters()}


def sampled(trainer: DSparkTrainer, rows: int = 3) -> tuple[dict, torch.Tensor]:
    """A batch with its anchors, and the sum of its slots' weights."""
    batches, weight_sum = trainer.get_batch_samples(
        iter([trainer.data_collator(trainer.train_dataset[:rows])]), 1, "cpu"
    )
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
    loss, output = trainer.compute_loss(draft, batch, return_outputs=True, num_items_in_batch=weight_sum)

    blocks = batch["blocks"]
    states = target_states(target, [0, 2], batch["input_ids"], batch["attention_mask"], draft.device, draft.dtype)
    hidden = draft.block_hidden(batch["input_ids"], states.features, blocks.layout, blocks.labels)
    anchors = batch["input_ids"].gather(1, blocks.layout.anchor_positions)
    previous = torch.cat([anchors[:, :, None], blocks.labels[:, :, :-1]], dim=-1)
    draft_law = draft.slot_logits(*draft.slot_inputs(hidden, previous)).log_softmax(-1)
    target_law = target.lm_head(label_hidden(states.last_hidden, blocks)).softmax(-1)
    distance = (draft_law.exp() - target_law).abs().sum(-1)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(
        draft.slot_confidence(hidden, previous), 1 - distance / 2, reduction="none"
    )
    alpha = LossWeights(
        weights.get("cross_entropy_weight", 0.1), weights.get("l1_weight", 0.9), weights.get("confidence_weight", 1.0),
        weights.get("soft_cross_entropy_weight", 0.0),
    )  # fmt: skip
    terms = (
        alpha.cross_entropy * -draft_law.gather(-1, blocks.labels[..., None])[..., 0] + alpha.l1 * distance
        + alpha.confidence * bce + alpha.soft_cross_entropy * -(target_law * draft_law).sum(-1)
    )  # fmt: skip
    decay = (
        torch.exp(-torch.arange(4) / weights.get("position_decay", 4.0)) if "position_decay" not in weights else 1.0
    )
    share = blocks.supervised * decay
    assert weight_sum.item() == pytest.approx(share.sum().item(), rel=1e-6)
    torch.testing.assert_close(loss, (terms * share).sum() / share.sum(), atol=1e-5, rtol=1e-5)
    logs = {"loss": 0.0}
    trainer.log(logs)
    acceptance = (1 - distance / 2) * blocks.supervised
    assert logs["tau"] == pytest.approx(expected_tau(acceptance, blocks.supervised).item(), abs=1e-5)
    torch.testing.assert_close(output.acceptance, acceptance, atol=1e-5, rtol=1e-5)


def test_evaluation_reports_tau_and_acceptance_by_slot(make_trainer):
    trainer = make_trainer()
    returned = trainer.evaluate()
    for name in ("tau", "cross_entropy", "l1", "confidence_loss", "confidence_ece", "confidence_auc"):
        name = f"eval_{name}"
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


def test_evaluation_pools_its_batches(make_trainer):
    losses = [make_trainer(num_anchors=1000, per_device_eval_batch_size=size).evaluate() for size in (1, 8)]
    for name in ("eval_loss", "eval_tau", "eval_acceptance_2", "eval_confidence_ece", "eval_confidence_auc"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-4), name


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
    before = torch.cat([torch.ones_like(survival[..., :1]), survival[..., :-1]], dim=-1)
    c, accepted = confidence[supervised], survival[supervised]
    rejected = (before - survival)[supervised]
    above = (c[:, None] > c).float() + 0.5 * (c[:, None] == c)
    auc = (above * accepted[:, None] * rejected).sum() / (accepted.sum() * rejected.sum())
    assert reported["eval_confidence_auc"] == pytest.approx(auc.item(), abs=2e-3)


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
    assert not torch.equal(anchors(3, 2), first)
    assert not torch.equal(anchors(4, 1), first)
    assert not torch.equal(anchors(3, 1, seed=8), first)


def test_killed_run_resumes_on_the_same_curve(tmp_path):
    """A process that is killed between two checkpoints, against one that was left alone."""
    script = Path(__file__).parent / "train_tiny.py"
    logs = {}
    for name, kill_at in (("whole", -1), ("killed", random.Random(os.getpid()).randint(3, 8))):
        command = [sys.executable, str(script), str(tmp_path / name), str(tmp_path / f"{name}.json")]
        done = subprocess.run([*command, str(kill_at)], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == (0 if kill_at < 0 else -signal.SIGKILL), done.stderr
        if kill_at >= 0:
            assert not (tmp_path / f"{name}.json").exists()
            run_to_end([*command, "-1"])
        logs[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert logs["killed"]["losses"] == pytest.approx(logs["whole"]["losses"], abs=1e-5)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in logs]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-5, rtol=0, msg=key)


@pytest.mark.parametrize("draft", ["dspark", "eagle3"])
def test_two_processes_train_as_one_with_twice_the_accumulation(tmp_path, draft):
    script = Path(__file__).parent / "train_tiny.py"
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    run = [sys.executable, str(script), str(tmp_path / "one"), str(one), "-1", draft, "2"]
    run_to_end(run)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = [*launch, str(script), str(tmp_path / "two"), str(two), "-1", draft, "1"]
    run_to_end(run)
    logs = [json.loads(path.read_text()) for path in (one, two)]
    assert logs[0]["processes"] == 1 and logs[1]["processes"] == 2
    assert len(logs[0]["losses"]) == 10
    for name in ("losses", "taus", "eval_losses"):
        assert logs[1][name] == pytest.approx(logs[0][name], abs=1e-4), name


def test_sharded_parameters_get_the_same_gradients(tmp_path):
    script, output = Path(__file__).parent / "shard_tiny.py", tmp_path / "gradients.safetensors"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run_to_end([*launch, str(script), str(output)])
    values = load_file(output)
    names = [name.removeprefix("alone.") for name in values if name.startswith("alone.")]
    assert len(names) > 20
    assert values["loss.sharded"].item() == pytest.approx(values["loss.alone"].item(), abs=1e-6)
    for name in names:
        torch.testing.assert_close(values[f"sharded.{name}"], values[f"alone.{name}"], atol=1e-6, rtol=1e-5, msg=name)


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


# ---- other drafts, other sources of states


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_other_drafts_train_with_the_same_trainer(make_trainer, make_draft, target, kind):
    if kind == "dflash":
        draft = make_draft(target, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
        weights = {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0}
    else:
        draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=4, target_layer_ids=[0, 2]))
        weights = {"cross_entropy_weight": 0.0, "l1_weight": 0.0, "soft_cross_entropy_weight": 1.0}
    trainer = make_trainer(draft, max_steps=25, **weights)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.9 * before["eval_loss"] and after["eval_tau"] > before["eval_tau"] + 0.1
    assert "eval_confidence_loss" not in after and all(f"eval_acceptance_{slot}" in after for slot in range(1, 5))


def test_packed_rows_train_as_padded_ones_do(make_trainer):
    """All anchors of the same documents: the same loss, whether they stand in one row or in many."""
    losses = [
        make_trainer(num_anchors=1000, packing=packing, max_length=64, per_device_eval_batch_size=8).evaluate()
        for packing in (False, True)
    ]
    for name in ("eval_loss", "eval_tau", "eval_confidence_auc"):
        assert losses[1][name] == pytest.approx(losses[0][name], rel=1e-4), name


def test_cached_states_train_without_a_target(make_trainer, make_draft, target, rows, tmp_path):
    draft = make_draft(target)
    cache_features(target, draft.config, rows, tmp_path / "cache", progress=False)
    online = make_trainer(draft, feature_cache_dir=None).evaluate()
    fresh = make_draft(target)
    fresh._borrowed = ()
    cached = make_trainer(fresh, target=None, feature_cache_dir=str(tmp_path / "cache"))
    assert cached.evaluate()["eval_loss"] == pytest.approx(online["eval_loss"], rel=1e-2)  # rounded to bfloat16
    cached.train()
    assert len(logged(cached, "loss")) == 4


@pytest.mark.parametrize("packing", [False, True])
def test_the_cache_fills_while_training(make_trainer, make_draft, target, tmp_path, packing):
    folder = str(tmp_path / "cache")
    trainer = make_trainer(feature_cache_dir=folder, num_train_epochs=1, max_steps=-1, packing=packing, max_length=64)
    trainer.train()
    again = make_trainer(
        make_draft(target), feature_cache_dir=folder, num_train_epochs=1, max_steps=-1, max_length=64
    )  # padded now: the cache knows documents, not rows
    forward, calls = target.get_decoder().forward, []
    target.get_decoder().forward = lambda **kwargs: calls.append(1) or forward(**kwargs)
    again.train()
    target.get_decoder().forward = forward
    assert not calls, "the target ran although all states were on disk"
    assert len(FeatureCache(folder, trainer.model.config)) == 8


def test_training_goes_on_without_its_cache_when_the_disk_is_full(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(feature_cache_dir=str(tmp_path / "cache"))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.source._cache, "add", full)
    with pytest.warns(UserWarning, match="nothing more is added to the cache: .*No space left on device"):
        trainer.train()
    assert len(logged(trainer, "loss")) == 4


def test_states_that_are_nowhere_to_be_had_are_an_error_before_training(
    make_trainer, make_draft, target, rows, tmp_path
):
    with pytest.raises(ValueError, match="the target's states are needed: pass target=..., or args.feature_cache_dir"):
        make_trainer(make_draft(target), target=None)
    cache_features(target, make_draft(target).config, rows[:5], tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="3 of 16 rows are not in the feature cache .* there is no target to compute"):
        make_trainer(make_draft(target), target=None, feature_cache_dir=str(tmp_path / "cache"))


def test_a_cache_of_another_model_is_refused(make_trainer, make_draft, make_target, target, rows, tmp_path):
    draft, other = make_draft(target), make_target(seed=5)
    cache_features(target, draft.config, rows, tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="was made with another target"):
        make_trainer(draft, target=other, feature_cache_dir=str(tmp_path / "cache"))


def test_trainings_of_one_process_fill_a_cache_one_after_the_other(make_trainer, tmp_path):
    first = make_trainer(max_steps=1, feature_cache_dir=str(tmp_path / "cache"))
    first.train()
    first.evaluate()
    second = make_trainer(max_steps=2, feature_cache_dir=str(tmp_path / "cache"))
    second.train()
    second.evaluate()
    assert first.evaluate()["eval_tau"] >= 1


def test_computed_and_cached_states_are_the_same(make_trainer, tmp_path):
    """So that a run that was interrupted sees what one that was not would have seen."""
    trainer = make_trainer(feature_cache_dir=str(tmp_path / "cache"))
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert len(trainer.source._cache) == 8


@pytest.mark.parametrize("chat", [True, False], ids=["messages", "prompt and completion"])
def test_conversations_are_tokenised_by_the_targets_tokenizer(make_draft, target, tmp_path, chat_tokenizer, chat):
    if chat:
        rows = [
            {
                "messages": [
                    {"role": "user", "content": "what is up"},
                    {"role": "assistant", "content": "not much " * 4},
                ]
            }
        ] * 4
    else:
        rows = [{"prompt": "what is up", "completion": "not much " * 4}] * 4
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1
    )
    trainer = DSparkTrainer(make_draft(target), target, arguments, train_dataset=rows, processing_class=chat_tokenizer)
    trainer.train()
    assert logged(trainer, "train_loss")


# ---- bad input


def test_loss_that_is_not_a_number_stops_before_the_weights_change(make_trainer, tmp_path):
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
    saved = load_file(tmp_path / "run" / "bad_batch_step_0_0.safetensors")
    assert {"input_ids", "loss_mask", "anchor_positions"} <= saved.keys()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_resuming_with_other_facts_is_refused(make_trainer, make_draft, target, tmp_path):
    make_trainer(save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    for overrides, message in (
        (
            {"gradient_accumulation_steps": 2},
            r"batches per step \(processes x gradient_accumulation_steps\): then 1, now 2",
        ),
        ({"num_anchors": 5}, "num_anchors: then 6, now 5"),
        ({"l1_weight": 0.5, "cross_entropy_weight": 0.5}, "loss weights, cross_entropy: then 0.1, now 0.5"),
    ):
        for where in (checkpoint, Path(checkpoint), True):
            with pytest.raises(ValueError, match=message):
                make_trainer(make_draft(target), **overrides).train(resume_from_checkpoint=where)


def test_resuming_with_another_draft_or_other_rows_is_refused(make_trainer, make_draft, target, rows, tmp_path):
    make_trainer(save_strategy="steps", save_steps=2).train()
    other = make_draft(target, target_layer_ids=make_draft(target).config.target_layer_ids[::-1])
    with pytest.raises(ValueError, match="draft, target_layer_ids: then"):
        make_trainer(other).train(resume_from_checkpoint=True)
    rows.reverse()
    with pytest.raises(ValueError, match="first rows: then"):
        make_trainer().train(resume_from_checkpoint=True)


def test_training_forgets_the_calibration_of_the_old_weights(make_trainer, make_draft, target):
    draft = make_draft(target)
    draft.config.sts_temperatures = {"default": [2.0] * draft.config.block_size}
    with pytest.warns(UserWarning, match="calibrate it again"):
        make_trainer(draft, max_steps=1).train()
    assert draft.config.sts_temperatures is None


def test_rows_to_evaluate_on_may_be_shorter_than_a_block(make_trainer, target):
    trainer = make_trainer()
    short = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}] * 2
    assert trainer.model.config.block_size > 3
    assert trainer.evaluate(short)["eval_loss"] > 0


def test_resuming_needs_a_checkpoint(make_trainer, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="there is no checkpoint to resume from"):
        make_trainer().train(resume_from_checkpoint=True)


def test_mistakes_with_the_arguments_are_named(make_draft, target, tmp_path):
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="args must be DSparkTrainingArguments, got TrainingArguments"):
        DSparkTrainer(make_draft(target), target, plain, train_dataset=[])
    arguments = DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="the rows are not tokenised, and there is no tokenizer"):
        DSparkTrainer(make_draft(target), target, arguments, train_dataset=[{"prompt": "a", "completion": "b"}])
    with pytest.warns(UserWarning, match="the draft's weights are torch.bfloat16, in which small updates are lost"):
        rows = [{"input_ids": [1] * 9, "loss_mask": [1] * 9}]
        DSparkTrainer(make_draft(target).bfloat16(), target, arguments, train_dataset=rows)


def test_a_target_whose_logits_are_computed_otherwise_is_refused(make_trainer, make_draft, target):
    with pytest.raises(ValueError, match="does something to its logits that this draft's config does not say"):
        make_trainer(make_draft(target, logit_scale=0.5))


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafts_are_loaded_by_name_with_wide_weights(make_draft, target, rows, tmp_path, kind):
    if kind == "dspark":
        draft = make_draft(target)
    else:
        draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=4, target_layer_ids=[0, 2]))
    draft.bfloat16().save_pretrained(tmp_path / "draft")
    arguments = DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = DSparkTrainer(str(tmp_path / "draft"), target, arguments, train_dataset=rows)
    assert type(trainer.model) is type(draft) and trainer.model.dtype == torch.float32


def test_other_evaluations_have_their_own_names_and_sums(make_trainer, rows):
    trainer = make_trainer()
    alone = trainer.evaluate()["eval_tau"]
    other = trainer.evaluate(rows[:2], metric_key_prefix="test")
    assert other["test_tau"] != alone and "eval_tau" not in other
    assert trainer.evaluate()["eval_tau"] == alone


def test_several_processes_train_on_streams(tmp_path):
    script = Path(__file__).parent / "train_tiny.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = [*launch, str(script), str(tmp_path / "run"), str(tmp_path / "log.json"), "-1", "stream"]
    run_to_end(run)
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["processes"] == 2 and len(log["losses"]) == 10


def test_workers_and_length_groups_feed_packed_rows(make_trainer):
    trainer = make_trainer(
        packing=True, max_length=40, dataloader_num_workers=1, train_sampling_strategy="group_by_length", max_steps=2
    )
    trainer.train()
    assert len(logged(trainer, "loss")) == 2


def test_rows_without_answers_are_refused_before_training(make_draft, target, tmp_path):
    arguments = DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0] * 7}]
    with pytest.raises(ValueError, match="supervised"):
        DSparkTrainer(make_draft(target), target, arguments, train_dataset=rows)
    with pytest.raises(ValueError, match="48"):
        rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 48], "loss_mask": [1] * 7}]
        DSparkTrainer(make_draft(target), target, arguments, train_dataset=rows)


def test_bfloat16_and_gradient_checkpointing_train(make_trainer):
    trainer = make_trainer(max_steps=3, bf16=True, gradient_checkpointing=True)
    trainer.train()
    plain = make_trainer(max_steps=3)
    plain.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=2e-2)


@pytest.mark.slow
def test_compiled_training_is_on_the_same_curve(make_trainer):
    curves = []
    for compiled in (False, True):
        trainer = make_trainer(torch_compile=compiled)
        trainer.train()
        curves.append(logged(trainer, "loss"))
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_any_causal_lm_may_be_the_target(make_draft, rows, tmp_path):
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    other = LlamaForCausalLM(config)
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1
    )
    trainer = DSparkTrainer(make_draft(other), other, arguments, train_dataset=rows)
    trainer.train()
    assert logged(trainer, "train_loss")


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_targets_train_drafts(make_target, rows, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    make_target(hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=64).save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map="cpu", dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32
        ),
    )  # fmt: skip
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, block_size=4, markov_rank=8))
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=8, logging_steps=1,
        learning_rate=3e-3, feature_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=rows)
    trainer.train()
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]
    assert all(parameter.dtype == torch.float32 for parameter in draft.parameters())


@pytest.mark.parametrize(
    "layout",
    [{"draft_vocab_size": 20}, {"sample_from_anchor": False, "markov_head_type": "rnn"}],
    ids=["pruned", "fill_in"],
)
def test_drafts_of_other_layouts_learn(make_trainer, make_draft, target, layout):
    trainer = make_trainer(make_draft(target, **layout), max_steps=12, learning_rate=1e-2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert trainer.model.get_output_embeddings() is target.lm_head


def test_pruned_drafts_are_not_trained_on_the_whole_law(make_trainer, make_draft, target):
    with pytest.raises(ValueError, match="soft_cross_entropy_weight=0, got 0.5"):
        make_trainer(make_draft(target, draft_vocab_size=20), soft_cross_entropy_weight=0.5)


def test_checkpoints_with_pickles_are_not_published(tmp_path):
    with pytest.raises(ValueError, match="pickled optimizer states"):
        DSparkTrainingArguments(str(tmp_path), push_to_hub=True, hub_strategy="checkpoint")


def test_offloaded_targets_train_drafts(make_trainer, make_draft, make_target, rows, tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    device_map = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
        "model.layers.3": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    plain = make_trainer(make_draft(make_target())).evaluate()
    assert make_trainer(make_draft(offloaded), target=offloaded).evaluate()["eval_loss"] == pytest.approx(
        plain["eval_loss"], abs=1e-5
    )


@pytest.mark.parametrize("kind", ["map", "stream", "torch"])
def test_data_sets_of_every_kind_train(make_draft, target, rows, tmp_path, kind):
    if kind == "torch":

        class Rows(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(rows)

        data = Rows()
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(rows)
        data = data.to_iterable_dataset() if kind == "stream" else data
    for packing in (False, True):
        arguments = DSparkTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, max_length=64,
            per_device_train_batch_size=2, packing=packing, logging_steps=1,
        )  # fmt: skip
        trainer = DSparkTrainer(make_draft(target), target, arguments, train_dataset=data, eval_dataset={"a": rows})
        trainer.train()
        assert len(logged(trainer, "loss")) == 2
        assert trainer.evaluate()["eval_a_tau"] > 1
