"""`inspect_draft`: what is said of a checkpoint is what loading makes of it, and nothing but headers is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark import convert_checkpoint, inspect_draft
from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.hub.inspection import memory_needed
from hf_dspark.models.auto import load_draft
from tests.config_files import change_config, read_config
from tests.training.tiny import tiny_pair

FORMATS = {
    "dspark": ("hf_dspark", "deepspec", "speculators", "sglang"),
    "fill-in": ("hf_dspark", "speculators"),
    "pruned": ("hf_dspark", "speculators"),
    "dflash": ("hf_dspark", "deepspec", "speculators"),
    "eagle3": ("hf_dspark", "deepspec", "speculators"),
}


@pytest.fixture
def written(tmp_path):
    """Write a draft of a kind in a format; return the target, the draft, and where it is."""

    def write(kind: str, form: str):
        target, draft = tiny_pair(kind)
        target.config.name_or_path = "someone/target"
        convert_checkpoint(draft, tmp_path / "draft", form, target=None if form == "hf_dspark" else target)
        return target, draft, tmp_path / "draft"

    return write


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in FORMATS.items() for form in forms])
def test_what_is_said_is_what_loading_makes_of_it(written, monkeypatch, kind, form):
    target, draft, folder = written(kind, form)
    read = []
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda self, names: read.extend(names) or load(self, names))
    report = inspect_draft(folder, target)
    assert set(read) <= {"d2t", "t2d"} and report.refusal is None
    found, config = report.found, load_draft(folder).config
    assert found["format"].startswith(f"{form} (")
    assert f"{type(draft).__name__}.from_pretrained({str(folder)!r})" in found["load with"]
    assert (
        f"blocks of {config.block_size}" in found["kind"]
        and f"{config.num_hidden_layers}, each of " in found["layers"]
    )
    assert "reads layers 0, 2 of" in found["target"] and found["fits"] == "someone/target"
    converted = {each.split(" (")[0] for each in found["converts to"]}
    assert converted == set(FORMATS[kind]) - {"hf_dspark"} if form == "hf_dspark" else form in converted
    assert form == "hf_dspark" or found["runs in"][1:], "an engine reads it as it is"
    assert 8 <= len(str(report).splitlines()) <= 14 and max(map(len, str(report).splitlines())) < 260
    json.dumps(report.found)


def test_places_and_keys_that_nothing_reads_are_named(written):
    folder = written("dspark", "sglang")[2]
    change_config(folder, use_mrope=None, some_label="x")
    found = inspect_draft(folder).found
    assert "attention_output_bias from attention_bias" in found["read"]
    assert "some_label: no layer reads it" in found["ignored"]
    assert not any("use_mrope" in each or "transformers_version" in each for each in found["ignored"])


REFUSED = {
    "another target": (lambda config, weights: config.update(vocab_size=64), "vocab_size|does not match its config"),
    "a value": (lambda config, weights: config.update(block_size=0), "block_size must lie in"),
    "a tensor": (lambda config, weights: weights.pop("fc.weight"), "missing: fc.weight"),
    "no draft": (
        lambda config, weights: config.update(model_type="qwen3", architectures=None),
        "is no draft in one of the formats",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_draft_is_described_as_far_as_it_is_known(written, what):
    change, message = REFUSED[what]
    target, _, folder = written("dspark", "hf_dspark")
    config, weights = read_config(folder), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    report = inspect_draft(folder, target)
    assert {"format", "weights"} <= report.found.keys() and "fits" not in report.found
    with pytest.raises(ValueError, match=message):
        raise ValueError(report.refusal)


def test_an_embedding_of_its_own_is_named(written):
    folder = written("dspark", "deepspec")[2]
    told = [f"{name}.weight (used unless it is the target's)" for name in ("embed_tokens", "lm_head")]
    assert inspect_draft(folder).found["brings"] == told
    pruned = tiny_pair("pruned")[1]
    pruned.save_pretrained(folder.parent / "pruned")
    assert inspect_draft(folder.parent / "pruned").found["brings"] == ["lm_head.weight", "d2t"]
    assert torch.equal(load_draft(folder.parent / "pruned").d2t, pruned.d2t)


FIXTURES = Path(__file__).parents[1] / "fixtures"
OF_DRAFTS = [path.parent for path in sorted(FIXTURES.rglob("config.json"))
             if path.with_name("model.safetensors").exists() and path.parent.name not in ("target", "verifier")
             and not path.parent.name.startswith("target")]  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("folder", OF_DRAFTS, ids=lambda folder: str(folder.relative_to(FIXTURES)))
def test_what_other_projects_have_written_is_described(folder):
    report = inspect_draft(folder)
    assert report.refusal is None and report.found["runs in"][0] == "hf_dspark"
    loader = report.found["load with"].split(".")[1]
    assert type(load_draft(folder)).__name__ == loader


def test_what_is_no_checkpoint_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        inspect_draft(tmp_path)


def test_memory_is_told_from_config_and_headers(make_target, make_draft, tmp_path):
    target = make_target(num_hidden_layers=4, num_key_value_heads=2, head_dim=12)
    draft = make_draft(target)
    for name, model, layers in (("target", target, 4), ("draft", draft, 2)):
        model.save_pretrained(tmp_path / name)
        weights, cache = memory_needed(str(tmp_path / name))
        stored = sum(each.numel() for each in load_file(tmp_path / name / "model.safetensors").values())
        assert (weights, cache) == (4 * stored, layers * 2 * 2 * 12 * 4)
        assert memory_needed(str(tmp_path / name), "bfloat16") == (2 * stored, cache // 2)
        assert memory_needed(str(tmp_path / name), "bfloat16", bits=4) == (stored // 2, cache // 2)
    change_config(tmp_path / "target", layer_types=["linear_attention"] * 3 + ["full_attention"])
    assert memory_needed(str(tmp_path / "target"))[1] == 2 * 2 * 12 * 4
