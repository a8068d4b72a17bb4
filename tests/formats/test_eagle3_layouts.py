"""EAGLE-3 checkpoints: each key that changes what is computed gives another configuration or is refused, and the same
tensors are found under all names that projects give them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark import Eagle3Config, Eagle3DraftModel
from hf_dspark.formats.translate import config_from_format, recognise
from tests.eagle3_target import NUM_LAYERS, make_target
from tests.formats.test_keys import OF_SECTIONS_ALONE, UNREAD, silent_keys, with_place

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
NAMES = ("safeailab", "specforge", "specforge_narrow", "modelopt", "speculators_qwen3", "speculators_llama")
NAMES += ("speculators_peagle",)
BASES = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES}
VALUES = {
    "eagle_aux_hidden_state_layer_ids": [0, 3, 5], "aux_hidden_states_layer_ids": [0, 3, 5], "head_dim": 6,
    "target_hidden_size": 20, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7000.0,
    "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}, "norm_before_residual": True,
    "norm_before_fc": True, "fc_norm": True, "norm_output": True, "qk_norm": True, "ttt_length": 3, "mlp_bias": True,
    "attention_bias": True, "use_aux_hidden_state": False, "use_last_layernorm": False, "use_mtp_layernorm": True,
    "use_input_layernorm_in_first_layer": False, "next_layer_regular": False, "parallel_draft_step": 2,
    "early_stop_method": "confidence", "final_logit_softcapping": 30.0, "is_causal": False, "logit_scale": 0.5,
    "norm_type": "layer", "num_aux_hidden_states": 4, "parallel_drafting": True, "position_embedding_type": "alibi",
    "quantization_config": {"quant_method": "fp8"}, "use_rotary_pos_emb": False, "target_model_type": "llama",
    "num_key_value_heads": 2,
}  # fmt: skip
# What says nothing about what is computed; layers are read in their own order, in whichever they are named.
SILENT = {"partial_rotary_factor", "num_target_layers", "embedding_in_all_layers", "target_model_type"}
SILENT |= {"eagle_aux_hidden_state_layer_ids"}


def read(config):
    return Eagle3Config.from_dict(config_from_format(config, recognise(config))).to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_each_place_that_is_read_matters(name):
    assert silent_keys(BASES[name], read, VALUES) <= SILENT


SECTIONS = [("safeailab", ""), ("modelopt", "eagle_config."), ("speculators_qwen3", "")]
SECTIONS += [("speculators_qwen3", "transformer_layer_config.")]
KEYS = sorted(UNREAD.keys() - {"norm_before_residual", "mlp_bias", "qk_norm"})
COPIED = {("safeailab", ""), ("speculators_qwen3", "transformer_layer_config.")}  # among what no draft reads


@pytest.mark.parametrize(("name", "section"), SECTIONS)
def test_keys_that_change_layers_and_are_not_read_are_refused_by_name(name, section):
    for key in KEYS:
        if (name, section) not in COPIED or key not in OF_SECTIONS_ALONE:
            with pytest.raises(ValueError, match=f"{section}{key} is "):
                read(with_place(BASES[name], section + key, UNREAD[key]))


def test_taps_count_as_each_project_does():
    flat, speculators = BASES["safeailab"], BASES["speculators_llama"]
    for key, ids, expected in (
        ("eagle_config.eagle_aux_hidden_state_layer_ids", [7, 1, 4], [1, 4, 7]),
        ("aux_hidden_states_layer_ids", [1, 4, 7], [1, 4, 7]),
        ("target_layer_ids", [1, 4, 7], [1, 4, 7]),
        ("target_hidden_layer_ids", [1, 4, 7], [1, 4, 7]),
        ("eagle_config.target_hidden_layer_ids", [1, 4, 7], [1, 4, 7]),
        ("eagle_aux_hidden_state_layer_ids", [2, 5, 8], [1, 4, 7]),
    ):
        assert read(with_place(flat, key, ids))["target_layer_ids"] == expected
    assert read(speculators | {"eagle_aux_hidden_state_layer_ids": [0, 5, 8]})["target_layer_ids"] == [-1, 4, 7]
    both = with_place(flat, "eagle_config.eagle_aux_hidden_state_layer_ids", [2, 5, 8])
    with pytest.raises(ValueError, match="counts layers from the embedding on"):
        read(both | {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]})


@pytest.mark.parametrize(("ids", "count"), [([1, 2, 3, 5, 7], 5), ([1, 4], 2), (None, 3)])
def test_the_number_of_taps_is_that_of_the_layers_named(ids, count):
    config = BASES["safeailab"] | {"target_layer_ids": ids}
    assert read(config | {"num_aux_hidden_states": count}) == read(config)
    with pytest.raises(ValueError, match="num_aux_hidden_states is not the number"):
        read(config | {"num_aux_hidden_states": 4})


@pytest.mark.parametrize("depth", [5, 6])
def test_a_target_too_shallow_for_the_usual_taps_is_named(depth):
    config = Eagle3Config.from_dict(config_from_format(BASES["safeailab"], recognise(BASES["safeailab"])))
    with pytest.raises(ValueError, match=rf"of {depth} layers, and these are not three"):
        config.tap_by_depth(depth)


# ---- tensors


def changed(tmp_path, name, rename=lambda key: key, drop=(), more=None, **keys):
    """Write a fixture with other names and tensors."""
    folder = tmp_path / "changed"
    folder.mkdir()
    tensors = {rename(key): each for key, each in load_file(FIXTURES / name / "model.safetensors").items()}
    tensors = {key: each for key, each in tensors.items() if key not in drop} | (more or {})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BASES[name] | keys))
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("midlayer.", "layers.0."),
        lambda key: key if key in ("d2t", "t2d", "lm_head.weight") else f"model.{key}",
        lambda key: f"model.{key}".replace("midlayer.", "layers.0.") if "." in key and "lm_head" not in key else key,
    ],
    ids=["layers", "model", "both"],
)
def test_tensors_are_found_under_all_their_names(tmp_path, rename):
    plain = Eagle3DraftModel.from_pretrained(FIXTURES / "specforge").state_dict()
    found = Eagle3DraftModel.from_pretrained(changed(tmp_path, "specforge", rename)).state_dict()
    assert plain.keys() == found.keys() and all(torch.equal(plain[key], found[key]) for key in plain)


def test_a_whole_vocabulary_may_be_numbered_anew(tmp_path):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    head = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    more = {"d2t": order - torch.arange(24), "t2d": torch.ones(24, dtype=torch.bool), "lm_head.weight": head}
    folder = changed(tmp_path, "specforge", more=more, draft_vocab_size=24)
    draft = Eagle3DraftModel.from_pretrained(folder).bind(make_target())
    assert torch.equal(draft.draft_token_ids(), order) and torch.equal(draft.lm_head.weight, head)
    stored = load_file(folder / "model.safetensors") | {"d2t": more["d2t"].int(), "t2d": more["t2d"].byte()}
    save_file(stored, folder / "model.safetensors")
    assert Eagle3DraftModel.from_pretrained(folder).d2t.equal(draft.d2t)
    save_file(stored | {"fc.bias": head[0]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected: fc.bias. Check attention_bias"):  # not: it is quantised
        Eagle3DraftModel.from_pretrained(folder)


def test_norms_of_queries_and_keys_are_told_by_the_tensors(tmp_path):
    norms = {f"midlayer.self_attn.{name}_norm.weight": torch.full((12,), 1.5) for name in "qk"}
    draft = Eagle3DraftModel.from_pretrained(changed(tmp_path, "specforge", more=norms))
    assert draft.config.qk_norm and float(draft.layers[0].self_attn.q_norm.weight[0]) == 1.5
    assert not Eagle3DraftModel.from_pretrained(FIXTURES / "specforge").config.qk_norm


@pytest.mark.parametrize(
    ("key", "has_state"), [("mask_token_id", True), ("mask_token_id", False), ("pard_token", False)]
)
def test_p_eagle_is_told_by_its_state_or_by_its_keys(tmp_path, key, has_state):
    state = {"mask_hidden": torch.ones(1, 1, 48)} if has_state else {}
    folder = changed(tmp_path, "specforge", more=state, **{key: 3})
    if has_state or key == "mask_token_id":  # which others copy from their target
        assert Eagle3DraftModel.from_pretrained(folder).config.mask_token_id == (3 if has_state else None)
        return
    with pytest.raises(ValueError, match="missing: mask_hidden.*Check pard_token"):
        Eagle3DraftModel.from_pretrained(folder)


def test_taps_go_by_the_depth_of_the_target_and_are_kept(tmp_path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES / "safeailab")
    assert draft.config.target_layer_ids is None
    draft.save_pretrained(tmp_path / "unbound")
    again = Eagle3DraftModel.from_pretrained(tmp_path / "unbound").bind(make_target())
    assert again.config.target_layer_ids == [1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4]
    again.save_pretrained(tmp_path / "bound")
    assert Eagle3DraftModel.from_pretrained(tmp_path / "bound").config.num_target_layers == NUM_LAYERS
