"""A refusal names the key that is to blame, where it stands in the file, and what is needed there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark import DSparkConfig, DSparkDraftModel, Eagle3DraftModel, convert_checkpoint, inspect_draft
from tests.config_files import change_config, read_config
from tests.training.tiny import tiny_pair

# What is wrong with a checkpoint, and the keys that are named for it, which are all that are.
CHANGED = {
    "markov_rank": (8, ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]),
    "markov_head_type": ("gated", ["markov_rank", "markov_head_type"]),
    "enable_confidence_head": (False, ["enable_confidence_head", "confidence_head_with_markov"]),
    "confidence_head_with_markov": (False, ["enable_confidence_head", "confidence_head_with_markov"]),
    "qk_norm": (False, ["qk_norm", "head_dim"]),
    "intermediate_size": (40, ["intermediate_size"]),
    "mlp_bias": (True, ["attention_bias", "attention_output_bias", "mlp_bias"]),
    "attention_bias": (True, ["attention_bias", "attention_output_bias", "mlp_bias"]),
    "attention_sinks": (True, ["attention_sinks"]),
    "layer_scalar": (True, ["layer_scalar"]),
    "sandwich_norms": (True, ["sandwich_norms"]),
    "target_layer_ids": ([0], ["target_layer_ids", "hidden_size"]),
    "draft_vocab_size": (24, ["draft_vocab_size", "vocab_size", "markov_rank", "markov_head_type"]),
    "num_hidden_layers": (3, ["num_hidden_layers"]),
    "num_attention_heads": (6, ["num_attention_heads", "num_key_value_heads", "head_dim", "attention_k_eq_v"]),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_pair()[1].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", CHANGED)
def test_tensors_of_another_config_blame_the_keys_that_decide_about_them(folder, key):
    value, blamed = CHANGED[key]
    change_config(folder, **{key: value, "layer_types": None})
    with pytest.raises(ValueError, match="does not match its config") as error:
        DSparkDraftModel.from_pretrained(folder)
    assert str(error.value).endswith(f"Check {', '.join(blamed)} in its config.json")
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "packed",
    [
        lambda name, w: {name: torch.zeros(w.shape[0], w.shape[1] // 2, dtype=torch.uint8)},
        lambda name, w: {name.replace("weight", "weight_packed"): w, name.replace("weight", "weight_scale"): w[:, :1]},
        lambda name, w: {name: w.to(torch.float8_e4m3fn), name.replace("weight", "weight_scale_inv"): w[:1]},
        lambda name, w: {name.replace("weight", "qweight"): w.to(torch.int32), name.replace("weight", "qzeros"): w},
    ],
    ids=["NVFP4", "compressed-tensors", "FP8", "GPTQ"],
)
def test_quantised_weights_are_named_as_such(folder, packed):
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight") and "layers" in name]:
        weights |= {key: value.contiguous() for key, value in packed(name, weights.pop(name)).items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="weights are quantised in a way that is not read: take the draft of full"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_depth_that_counts_the_taps_is_named_and_not_the_taps():
    with pytest.raises(ValueError, match="num_target_layers must count all layers of the target, not the 3"):
        DSparkConfig(num_target_layers=3, target_layer_ids=[1, 9, 17])
    with pytest.raises(ValueError, match=r"target_layer_ids must lie in \[-1, 6\]"):
        DSparkConfig(num_target_layers=8, target_layer_ids=[1, 9, 17])


def test_other_kinds_of_drafts_blame_their_own_keys(tmp_path):
    tiny_pair("eagle3")[1].save_pretrained(tmp_path)
    change_config(tmp_path, intermediate_size=40)
    with pytest.raises(ValueError, match="Check intermediate_size in its config.json"):
        Eagle3DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("form", "place", "value", "blamed"),
    [
        ("sglang", "dflash_config.target_layer_ids", [0, 99], "target_layer_ids"),
        ("sglang", "dflash_config.mask_token_id", 10**6, "mask_token_id"),
        ("speculators", "transformer_layer_config.rms_norm_eps", -1.0, "rms_norm_eps"),
        ("speculators", "aux_hidden_state_layer_ids", [1, 1], "target_layer_ids"),
        ("deepspec", "markov_head_type", "new", "markov_head_type"),
    ],
)
def test_a_value_of_another_format_is_blamed_where_it_stands(tmp_path, form, place, value, blamed):
    target, draft = tiny_pair()
    target.config.name_or_path = "someone/target"
    folder = tmp_path / form
    convert_checkpoint(draft, folder, form, target=target)
    config = read_config(folder)
    *outer, name = place.split(".")
    inner = config
    for each in outer:
        inner = inner[each]
    inner[name] = value
    config.pop(name, None) if outer else None  # where both say it
    (folder / "config.json").write_text(json.dumps(config))
    for load in (
        DSparkConfig.from_pretrained,
        DSparkDraftModel.from_pretrained,
        lambda where: convert_checkpoint(where, tmp_path / "out", "hf_dspark"),
    ):
        with pytest.raises(ValueError, match=f"{blamed} must ") as error:
            load(folder)
        message = str(error.value)
        assert str(folder) in message and (place == blamed or f"(in config.json: {place!r})" in message)
    assert f"(in config.json: {place!r})" in inspect_draft(folder).refusal or place == blamed


def test_tensors_of_another_format_blame_its_own_keys(tmp_path):
    target, draft = tiny_pair()
    target.config.name_or_path = "someone/target"
    convert_checkpoint(draft, tmp_path / "draft", "speculators", target=target)
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["intermediate_size"] = 40
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Check transformer_layer_config\.intermediate_size in its config.json"):
        DSparkDraftModel.from_pretrained(path.parent)
