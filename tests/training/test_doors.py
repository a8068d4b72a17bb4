"""What `evaluate` does, `predict` does; what Trainer takes and a draft cannot use is refused; what nobody else can run
is said before it is trained."""

import accelerate
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_dspark import DSparkTrainer
from hf_dspark.training.trainer import REFUSED
from tests.training.tiny import tiny_arguments, tiny_draft, tiny_pair, tiny_rows


def metrics_of(found: dict, prefix: str) -> dict:
    """What was measured, without times, by the names that it has without a prefix."""
    timed = ("runtime", "samples_per_second", "steps_per_second", "preparation_time")
    return {name.removeprefix(prefix): value for name, value in found.items()
            if name != "epoch" and not name.endswith(timed)}  # fmt: skip


FORMS = {
    "rows": lambda rows, trainer: rows[:5],
    "a data set": lambda rows, trainer: datasets().from_list(rows[:5]),
    "the trainer's own": lambda rows, trainer: trainer.eval_dataset["short"],
    "its name": lambda rows, trainer: "short",
    "several": lambda rows, trainer: {"one": rows[:5], "two": rows[4:]},
}


def datasets():
    return pytest.importorskip("datasets").Dataset


@pytest.mark.one_in(9)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_predict_measures_what_evaluate_does(make_trainer, rows, form, packing):
    trainer = make_trainer(eval_data={"short": rows[:3], "long": rows}, packing=packing, max_length=64)
    given = FORMS[form](rows, trainer)
    evaluated = metrics_of(trainer.evaluate(given), "eval_")
    predicted = trainer.predict(given)
    assert predicted.predictions is predicted.label_ids is None
    assert metrics_of(predicted.metrics, "test_") == evaluated and any("tau" in name for name in evaluated)
    again = trainer.predict(given, metric_key_prefix="held_out").metrics
    assert metrics_of(again, "held_out_") == evaluated
    if form == "several":
        assert {"one_tau", "two_tau"} <= evaluated.keys()


def test_predict_names_rows_that_cannot_be_used(make_trainer):
    trainer = make_trainer()
    for given, message in ((None, "needs rows, got None"), ([{"text": "x"}], "test_dataset: the examples are not")):
        with pytest.raises(ValueError, match=message):
            trainer.predict(given)


@pytest.mark.parametrize("names", [["one", "two"], []])
def test_a_set_of_another_name_is_refused_by_each_door(make_trainer, rows, names):
    trainer = make_trainer(eval_data=dict.fromkeys(names, rows) or rows)
    for ask in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match=rf"a dictionary with 'three', it has \[{str(names)[1:-1]}\]"):
            ask("three")


def test_callbacks_get_the_metrics_of_blocks(make_trainer, rows):
    seen = {}

    class Seeing(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen["evaluate"] = dict(metrics)

        def on_predict(self, args, state, control, metrics, **kwargs):
            seen["predict"] = dict(metrics)

    trainer = make_trainer(callbacks=[Seeing()])
    evaluated, predicted = trainer.evaluate(), trainer.predict(rows).metrics
    assert (
        seen["evaluate"]["eval_tau"] == evaluated["eval_tau"] == predicted["test_tau"] == seen["predict"]["test_tau"]
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_do_nothing_is_refused_by_name(target, rows, tmp_path, name):
    given = {} if name in ("label_smoothing_factor", "neftune_noise_alpha") else {name: len}
    arguments = tiny_arguments(str(tmp_path), **({} if given else {name: 0.1}))
    with pytest.raises(ValueError, match=f"cannot use {name}=.*Leave it out: "):
        DSparkTrainer(tiny_draft(target.config, "dspark"), target, arguments, rows, **given)


def test_a_collator_of_other_columns_is_named(target, rows, tmp_path):
    others = lambda batch: {"input_ids": batch, "labels": batch}  # noqa: E731
    draft, arguments = tiny_draft(target.config, "dspark"), tiny_arguments(str(tmp_path))
    trainer = DSparkTrainer(draft, target, arguments, rows, data_collator=others)
    with pytest.raises(ValueError, match="without loss_mask, position_ids, attention_mask: leave it out"):
        trainer.train()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_a_draft_that_no_other_format_holds_is_named_before_it_is_trained(make_trainer, target, kind, recwarn):
    draft = tiny_draft(target.config, kind)
    make_trainer(draft)
    assert not [each for each in recwarn if "converted" in str(each.message)]
    draft.config.rope_parameters |= {"partial_rotary_factor": 0.5}
    with pytest.warns(UserWarning, match="only hf_dspark will run this draft.* deepspec.*partial_rotary_factor"):
        make_trainer(draft)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["dspark", "gated", "fill-in", "pruned", "eagle3", "own"])
def test_adapters_are_trained_in_every_layer_of_a_draft(kind, tmp_path):
    peft = pytest.importorskip("peft")
    target, draft = tiny_pair("dspark" if kind == "own" else kind)
    if kind == "own":  # another embedding and head than the target's
        draft.brought = {name: torch.randn(48, 32) for name in draft.config.shareable}
        draft.bind(target)
    layers = [name for name, layer in draft.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    assert {"embed_tokens", "lm_head"} <= {*layers} or kind != "own"
    adapted = peft.get_peft_model(draft, peft.LoraConfig(target_modules=layers, init_lora_weights=False))
    before = {name: weight.detach().clone() for name, weight in adapted.named_parameters()}
    arguments = tiny_arguments(str(tmp_path), "dspark" if kind == "own" else kind, max_steps=1)
    trainer = DSparkTrainer(adapted, target, arguments, tiny_rows(6))
    trainer.train()
    trainer.save_model()
    with pytest.raises(ValueError, match="the draft has adapters, .* save it whole"):
        trainer.create_model_card()
    trained = {name for name, weight in adapted.named_parameters() if not torch.equal(weight, before[name])}
    assert trained == {name for name in before if "lora" in name}


@pytest.mark.parametrize("place", ["frozen", "meta", "cpu_offload"])
def test_a_draft_of_which_nothing_can_be_trained_is_refused(place, tmp_path):
    target, draft = tiny_pair()
    if place == "frozen":
        draft.requires_grad_(False)
    elif place == "meta":
        draft.to("meta")
    else:
        accelerate.cpu_offload(draft, execution_device=torch.device("cpu"))
    message = "all is frozen: call draft.requires_grad_" if place == "frozen" else "on the meta device, offloaded or"
    with pytest.raises(ValueError, match=message):
        DSparkTrainer(draft, target, tiny_arguments(str(tmp_path)), tiny_rows(6))


@pytest.mark.parametrize("name", ["num_anchors", "max_length", "gradient_accumulation_steps"])
@pytest.mark.parametrize("count", [0, -5])
def test_numbers_below_one_are_refused_by_name(name, count, tmp_path):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {count}"):
        tiny_arguments(str(tmp_path), **{name: count})
