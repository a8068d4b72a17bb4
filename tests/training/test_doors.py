"""What `evaluate` does, `predict` does; what Trainer takes and a draft cannot use is refused; what nobody else can run
is said before it is trained."""

import pytest
from transformers import TrainerCallback

from hf_dspark import DSparkTrainer
from hf_dspark.training.trainer import REFUSED
from tests.training.tiny import tiny_arguments, tiny_draft


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


@pytest.mark.one_in(3)
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


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_a_draft_that_no_other_format_holds_is_named_before_it_is_trained(make_trainer, target, kind, recwarn):
    draft = tiny_draft(target.config, kind)
    make_trainer(draft)
    assert not [each for each in recwarn if "converted" in str(each.message)]
    draft.config.rope_parameters |= {"partial_rotary_factor": 0.5}
    with pytest.warns(UserWarning, match="only hf_dspark will run this draft.* deepspec.*partial_rotary_factor"):
        make_trainer(draft)
