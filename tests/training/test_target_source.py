"""Where target states come from: in process, from disk, or both, with the same numbers."""

import pytest

from hf_dspark import cache_features
from hf_dspark.training import target_states as module
from hf_dspark.training.target_states import FeatureCache
from tests.training.tiny import tiny_draft
from tests.training.train_tiny import Stream


def test_cached_states_train_without_a_target(make_trainer, logged, make_draft, target, rows, tmp_path):
    draft = make_draft(target)
    cache_features(target, draft.config, rows, tmp_path / "cache", progress=False)
    online = make_trainer(draft, feature_cache_dir=None).evaluate()
    fresh = make_draft(target)
    fresh._borrowed = None
    cached = make_trainer(fresh, target=None, feature_cache_dir=str(tmp_path / "cache"))
    assert cached.evaluate()["eval_loss"] == pytest.approx(online["eval_loss"], rel=1e-2)  # rounded to bfloat16
    cached.train()
    assert len(logged(cached, "loss")) == 4


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_cache_is_filled_before_training(make_trainer, make_draft, target, rows, tmp_path, packing):
    folder = str(tmp_path / "cache")
    facts = {"feature_cache_dir": folder, "num_train_epochs": 1, "max_steps": -1, "max_length": 64}
    trainer = make_trainer(**facts, packing=packing)
    assert len(FeatureCache(folder, trainer.model.config)) == 8
    # Padded now: the cache knows documents, not rows.
    again = make_trainer(make_draft(target), **facts)
    forward, calls = target.get_decoder().forward, []
    target.get_decoder().forward = lambda **kwargs: calls.append(1) or forward(**kwargs)
    trainer.train(), again.train()
    assert not calls, "the target ran although all states were on disk"
    assert again.evaluate([rows[0] | {"input_ids": rows[0]["input_ids"][::-1]}])["eval_tau"] > 1 and len(calls) == 1


@pytest.mark.parametrize(
    ("kind", "packing"), [("torch", True), pytest.param("datasets", False, marks=pytest.mark.slow)]
)
def test_what_a_stream_brings_is_computed_when_it_comes(
    make_trainer, logged, make_draft, target, rows, tmp_path, monkeypatch, kind, packing
):
    monkeypatch.setattr(module, "STREAM_CHECK", 2)
    stream = Stream(rows)
    if kind == "datasets":
        stream = pytest.importorskip("datasets").Dataset.from_list(rows).to_iterable_dataset()
    facts = {"data": stream, "eval_data": {"a": stream}, "packing": packing, "max_length": 64}
    plain, trainer = (make_trainer(**facts, feature_cache_dir=path) for path in (None, str(tmp_path / "cache")))
    assert len(trainer.source.cache) == 2
    for run in (plain, trainer):
        run.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-2)  # rounded to bfloat16
    assert trainer.evaluate()["eval_a_tau"] > 1 and len(trainer.source.cache) == 8
    make_trainer(make_draft(target), target=None, **facts, feature_cache_dir=str(tmp_path / "cache")).train()
    for path in sorted((tmp_path / "cache").rglob("states/*/*"))[1:]:
        path.unlink()
    with pytest.raises(ValueError, match="of 4 examples are not in the feature cache .*: pass target=..., or fill"):
        make_trainer(make_draft(target), target=None, **facts, feature_cache_dir=str(tmp_path / "cache"))


@pytest.mark.slow
def test_rows_that_another_machine_has_filled_in_a_folder_of_its_own_are_computed(make_trainer, logged, tmp_path):
    trainers = [make_trainer(feature_cache_dir=str(tmp_path / name)) for name in ("shared", "own")]
    share = sorted((tmp_path / "own").rglob("states/*/*"))[::2]
    for path in share:
        path.unlink()
    for trainer in trainers:
        trainer.train()
    losses = [logged(trainer, "loss") for trainer in trainers]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and all(path.exists() for path in share)


def test_states_that_are_nowhere_are_an_error_before_training(make_trainer, make_draft, target, rows, tmp_path):
    with pytest.raises(ValueError, match="the target's states are needed: pass target=..., or args.feature_cache_dir"):
        make_trainer(make_draft(target), target=None)
    cache_features(target, make_draft(target).config, rows[:5], tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="3 of 16 examples are not in the feature cache .*: pass target=..., or fill"):
        make_trainer(make_draft(target), target=None, feature_cache_dir=str(tmp_path / "cache"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_no_gradient_reaches_the_target_and_it_stays_as_trainable_as_it_was(make_trainer, target, kind):
    target.requires_grad_(True).get_decoder().layers[0].requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in target.named_parameters()}
    make_trainer(tiny_draft(target.config, kind), max_steps=2).train()
    assert {name: parameter.requires_grad for name, parameter in target.named_parameters()} == before
    assert all(parameter.grad is None for parameter in target.parameters())
