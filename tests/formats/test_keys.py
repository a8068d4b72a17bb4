"""Keys of others' configurations: each that changes what layers compute gives another configuration, or is refused."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedConfig, Qwen3Config

from hf_dspark import DSparkConfig, Eagle3Config
from hf_dspark.formats.fields import HARMLESS, Format, look_up
from hf_dspark.formats.keys import _COMPUTING
from hf_dspark.formats.tables import FORMATS
from hf_dspark.formats.translate import config_from_format, config_to_format, find_format, recognise

FIXTURES = Path(__file__).parents[1] / "fixtures"
FLAT = {
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 5,
    "head_dim": 12, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": 4, "rms_norm_eps": 1e-6, "vocab_size": 48,
    "rope_theta": 5000.0, "max_position_embeddings": 512,
    "dflash_config": {
        "mask_token_id": 47, "target_layer_ids": [0, 2], "projector_type": "dspark", "markov_rank": 6,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}


def stored(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


# Sound configurations of each format, in which different keys matter.
BASES = {
    "deepspec": stored("deepspec/draft_vanilla"),
    "deepspec gemma 4": stored("deepspec/gemma4/draft_vanilla"),
    "speculators": stored("speculators/full_vocab_vanilla"),
    "speculators, sliding": stored("speculators/swa_causal_vanilla"),
    "flat": FLAT,
    "flat, sliding": FLAT | SLIDING,
    "flat, sliding from a layer on": FLAT
    | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
    "flat, fill-in": FLAT | {"sample_from_anchor": False},
    "dflash": FLAT
    | {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 47, "target_layer_ids": [0, 2]}},
    "dflash 2": stored("dflash/dflash2"),
    "domino": stored("dflash/domino_anchored"),
    "speculators, dflash": stored("speculators/full_vocab_vanilla") | {"speculators_model_type": "dflash"},
}
for _head in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
    del BASES["speculators, dflash"][_head]
BOTH = (True, False)  # one of them may be what is meant without the key
# What a place that a base leaves out is set to.
VALUES = {
    "dspark_markov_rank": 7, "sliding_window": 9, "swa_window_size": 9, "use_swa": BOTH,
    "layer_types": (["full_attention"] * 2, SLIDING["layer_types"]),
    "is_causal": BOTH, "causal": BOTH, "dflash_query_causal": BOTH, "attention_sink_bias": True,
    "add_swa_attention_sink_bias": True, "rope_is_neox_style": False, "is_neox_style": False, "shift_label": BOTH,
    "sample_from_anchor": BOTH, "use_confidence_head": False, "confidence_head_alpha": 1.0, "markov_rank": 7,
    "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}, "final_logit_softcapping": 5.0,
    "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7000.0, "projector_type": "domino",
    "target_layer_ids": [0, 1], "sliding_window_non_causal": True, "topk_context": 4, "num_target_layers": 6,
    "input_embedding_scale": 2.0, "output_multiplier": 2.0, "attention_mode": "mla",
}  # fmt: skip
# Overruled by other keys of the base, or read by no layer of the format: whatever they say is the same draft.
WINDOWS = {"sliding_window", "max_window_layers", "use_sliding_window"}
HEADS = {"markov_head_type", "enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"}
OVERRULED = {
    "deepspec": WINDOWS,
    "deepspec gemma 4": {"num_key_value_heads", "target_model_type"},
    "speculators": WINDOWS | {"sliding_window_non_causal", "speculators_config"},
    "speculators, sliding": WINDOWS - {"sliding_window"} | {"speculators_config"},
    "flat": WINDOWS,
    "flat, sliding": WINDOWS - {"sliding_window"},
    "flat, sliding from a layer on": set(),
    "flat, fill-in": WINDOWS,
    "dflash": WINDOWS | HEADS,
    "dflash 2": WINDOWS - {"sliding_window"},
    "domino": WINDOWS | {"projector_type"},  # another says the same
    "speculators, dflash": WINDOWS | {"sliding_window_non_causal", "speculators_config"},
}
ALWAYS = {"num_hidden_layers", "partial_rotary_factor", "confidence_head_alpha"}  # the second place of such


def read(config: dict) -> dict:
    entry = recognise(config)
    return DSparkConfig.from_dict(config_from_format(config, entry)).to_dict()


def with_place(config: dict, place: str, value: object) -> dict:
    changed = copy.deepcopy(config)
    *parents, name = place.split(".")
    inside = changed
    for parent in parents:
        inside = inside.setdefault(parent, {})
    inside[name] = value
    return changed


def other(value: object, name: str) -> object:
    """Return another value of the same kind, which a sound configuration may hold."""
    if value is None or isinstance(value, dict):
        return VALUES.get(name, {"rope_theta": 7000.0, "rope_type": "default"} if isinstance(value, dict) else None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        swapped = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        return [swapped[each] for each in value] if value[0] in swapped else value[::-1]
    if value == 0:
        return 0.5
    if isinstance(value, str):
        return {"silu": "gelu", "vanilla": "gated", "dspark": "domino"}.get(value, "strange")
    return value * 2


def places_of(base: dict, entry: Format) -> list[str]:
    sections = [section for section in entry.sections if section in base]
    places = sorted(entry.known - set(HARMLESS) - set(entry.harmless))
    return places + [f"{section}.{place}" for section in sections for place in places]


def silent_keys(base: dict, read: Callable[[dict], dict], values: dict) -> set[str]:
    """Return the keys whose other values, if they are taken, give no other configuration; `values` are for empty
    places."""

    def changes_nothing(place: str, value: object) -> bool:
        try:
            return read(with_place(base, place, value)) == plain
        except ValueError:
            return False

    plain, silent = read(base), set()
    for place in places_of(base, recognise(base)):
        value, key = look_up(base, place), place.split(".")[-1]
        changed = values[key] if value is None and key in values else other(value, key)
        candidates = changed if isinstance(changed, tuple) else (changed,)
        if changed is not None and all(changes_nothing(place, each) for each in candidates):
            silent.add(key)
    return silent


@pytest.mark.parametrize("name", BASES)
def test_each_place_that_a_format_reads_matters(name):
    assert silent_keys(BASES[name], read, VALUES) <= OVERRULED[name] | ALWAYS


# Keys of layers that no format reads, as they stand in published files, with values that change what layers compute.
UNREAD = {
    "rotary_interleaved": True, "rope_interleave": True, "neox_style": False, "rotary_dim": 6,
    "rope_traditional": True, "rope_local_base_freq": 1e4, "swa_rope_theta": 1e4, "rotary_pct": 0.5,
    "no_rope_layers": [0, 1], "mask_embedding": True,
    "sliding_window_size": 8, "sliding_window_pattern": 2, "attention_chunk_size": 8, "hybrid_layer_pattern": [0, 1],
    "causal_head": True, "use_bidirectional_attention": True, "add_full_attention_sink_bias": True,
    "attn_output_gate": True, "enable_qwen35_gated_q_proj": True, "gating": "per-head", "output_gate_type": "swish",
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 144,
    "attention_multiplier": 0.1, "attention_value_scale": 0.7, "embedding_multiplier": 12.0, "scale_emb": 12.0,
    "input_embedding_scale": 2.0, "output_multiplier": 2.0, "logits_scaling": 8.0, "logit_scale": 0.5,
    "residual_multiplier": 0.2, "scale_depth": 1.4, "use_qk_norm": False, "qk_norm": False, "qk_layernorm": False,
    "norm_before_residual": True, "use_post_norm": True, "offset_rms_norm": True, "layernorm_epsilon": 1e-5,
    "log_snr_conditioning": True, "pure_draft_prefix_len": 1, "mlp_bias": True, "hidden_activation": "gelu",
    "position_embedding_type": "alibi", "quantization_config": {"quant_method": "fp8"}, "logits_start": 1,
    "quantization": {"bits": 4}, "conv_kernel_size": 2, "selector_rank": 4, "emb_dim": 16, "tap_shift": 1,
    "attn_soft_cap": 50.0, "use_parallel_residual": True, "parallel_attn": True, "value_residual": True,
    "clip_qkv": 8.0, "attn_temperature_tuning": True, "logits_temperature": 2.0, "nope_layers": [0],
    "zero_centered_gamma": True, "attention_type": "local", "attn_mode": "prefix", "attention_mask_type": "causal",
    "local_attention": 64, "use_rope": False, "use_rotary": False, "use_pre_norm": False, "is_bidirectional": False,
    "scale_attn_weights": False, "add_bias_linear": True, "act_fn": "gelu", "eps": 1e-3, "label_shift": 1,
    "mask_embed": True, "quant_config": {"bits": 4}, "theta": 1e4, "emb_mult": 12.0, "fusion_type": "gated",
    "num_fc_layers": 2, "logit_cap": 30.0, "pos_emb": "learned", "position_encoding": "alibi", "mup": True,
    "num_denoising_steps": 2, "freq_base": 1e4, "capture_layers": [1, 3], "aux_layer_ids": [0, 2],
}  # fmt: skip
SECTIONS = [("flat", ""), ("flat", "dflash_config."), ("flat", "dspark_config."), ("dflash", "dflash_config.")]
SECTIONS += [("speculators", ""), ("speculators", "transformer_layer_config.")]
OF_SECTIONS_ALONE = {"logits_start", "conv_kernel_size", "selector_rank", "emb_dim"}  # no other key's kind


def is_case(name: str, section: str, key: str) -> bool:
    """Tell whether a key is unread there, and means something."""
    is_strange = section == "transformer_layer_config." or (name, section) == ("flat", "")
    # The test above sees that what is read matters; a convolution makes it another kind of draft.
    is_read = key in recognise(BASES[name]).known or (name, key) == ("dflash", "conv_kernel_size")
    return not is_read and not (key in OF_SECTIONS_ALONE and is_strange)


@pytest.mark.parametrize(("name", "section"), SECTIONS)
def test_keys_that_change_layers_and_are_not_read_are_refused_by_name(name, section):
    base, plain = BASES[name], read(BASES[name])
    for key in (key for key in UNREAD if is_case(name, section, key)):
        with pytest.raises(ValueError, match=f"{section}{key} is .*(delete the key|quantised)"):
            read(with_place(base, section + key, UNREAD[key]))
        neutral = next((values for names, values in _COMPUTING if re.search(names, key)), None)
        for value in (None, *(neutral or ())):
            assert read(with_place(base, section + key, value)) == plain, key


VERL = {key: value for key, value in (FLAT | FLAT["dflash_config"]).items() if key[:2] not in ("df", "pr")}
VERL |= {"model_type": "dspark", "target_hidden_size": 32, "target_num_hidden_layers": 4, "num_context_layers": 2}


@pytest.mark.parametrize("config", [VERL, VERL | {"num_target_layers": 2}], ids=["verl-SpeCo", "taps counted"])
def test_a_flat_file_of_our_own_model_type_is_read_as_flat(config):
    found, plain = read(config), read(FLAT)
    assert {name for name in plain if found[name] != plain[name]} <= {"target_model_type"}


@pytest.mark.parametrize("kind", [DSparkConfig, Eagle3Config])
def test_keys_that_change_layers_are_refused_in_our_own_files_too(kind):
    names = {field.name for field in dataclasses.fields(kind)}
    own = kind(**{key: value for key, value in HELD.items() if key in names}).to_dict()
    for key in UNREAD.keys() - own.keys() - OF_SECTIONS_ALONE:
        with pytest.raises(ValueError, match=key):
            kind.from_dict(own | {key: UNREAD[key]})
    base = own["rope_parameters"]["rope_theta"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for earlier in ({"rope_theta": 5000.0}, {"rope_scaling": yarn}, {"rope_scaling": yarn, "rope_theta": base}):
        with pytest.raises(ValueError, match="rotary parameters in .* disagree"):
            kind.from_dict(own | earlier)
        alone = {"rope_theta": base} | earlier
        expected = {"rope_theta": alone["rope_theta"]} | alone.get("rope_scaling", {"rope_type": "default"})
        assert kind.from_dict(own | alone | {"rope_parameters": None}).rope_parameters == expected
    assert kind.from_dict(own | {"rope_theta": base, "rope_scaling": None}).to_dict() == own


@pytest.mark.parametrize("section", ["dflash_config", "dspark_config"])
def test_unknown_keys_of_a_drafts_own_section_are_refused_by_name(section):
    with pytest.raises(ValueError, match=f"{section}.new_feature is 3"):
        read(with_place(FLAT, f"{section}.new_feature", 3))
    assert read(FLAT | {"new_feature": 3}) == read(FLAT)  # the top is shared with the configuration of a Qwen3 model
    with pytest.raises(ValueError, match="config.json: new_feature is 3"):
        read(BASES["speculators"] | {"new_feature": 3})


@pytest.mark.parametrize("name", BASES)
def test_keys_that_only_drafts_have_are_refused_at_the_top_of_every_format(name):
    for key in ("markov_order", "confidence_scale", "dspark_version", "dflash_mode"):
        with pytest.raises(ValueError, match=f"config.json: {key} is 'new'"):
            read(BASES[name] | {key: "new"})


@pytest.mark.parametrize("given", [{"target_layer_ids": None, "num_target_layers": 12}, {"target_layer_ids": [1, 3]}])
def test_taps_counted_from_the_embedding_on_are_those_of_the_draft(given):
    counted = FLAT | {"dflash_config": FLAT["dflash_config"] | {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    assert read(counted) == read(FLAT)
    nested = counted["dflash_config"] | {"target_layer_ids": given["target_layer_ids"]}
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids counts layers"):
        read(counted | given | {"dflash_config": nested})


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "markov_rank", "rope_theta", "num_target_layers"])
def test_places_that_disagree_are_named(key):
    nested = with_place(FLAT, f"dflash_config.{key}", 6)
    assert read(with_place(nested, key, 6) | {"num_target_layers": 6})
    with pytest.raises(ValueError, match=f"'{key}' is 7, but 'dflash_config.{key}' is 6"):
        read(with_place(nested, key, 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"shift_label": False}, "contradicts the layout"), ({"rope_theta": None}, "lacks 'rope_parameters'")],
)
def test_layouts_that_contradict_themselves_or_lack_a_key_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read(FLAT | change)


COPIED = {
    "partial_rotary_factor": 0.25, "attn_output_gate": True, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "final_logit_softcapping": 30.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "mlp_bias": True,
    "query_pre_attn_scalar": 144, "rope_local_base_freq": 1e4, "model_type": "qwen3_5_text", "use_qk_norm": False,
    "quantization_config": {"quant_method": "fp8"}, "rope_interleave": True, "sliding_window": 4096,
    "add_swa_attention_sink_bias": True,
}  # fmt: skip


def test_what_deepspec_copies_of_a_target_says_nothing_about_its_layers():
    base, plain = BASES["deepspec"], read(BASES["deepspec"])
    for key, value in COPIED.items():
        changed = read(base | {key: value})
        assert {name for name in plain if changed[name] != plain[name]} <= {"target_model_type"}, key


@pytest.mark.parametrize("name", ["deepspec", "flat", "speculators"])
def test_whole_heads_turn_whatever_part_of_the_targets_do(name):
    base = BASES[name]
    place = "transformer_layer_config." if name == "speculators" else ""
    set_here = {"rope_theta": 7000.0, "rope_type": "default"}
    of_target = set_here | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    plain = with_place(with_place(base, f"{place}rope_parameters", set_here), f"{place}rope_theta", None)
    copied = with_place(plain, f"{place}rope_parameters", of_target)
    assert read(copied) == read(plain) and read(plain)["rope_parameters"] == set_here


@pytest.mark.parametrize(
    "architecture",
    ["Qwen35DSparkModel", "DeepseekV4DSparkModel", "KimiK3DSparkModel", "Glm5_2DSparkModel", "MiniMaxM3DSparkModel"],
)
def test_layers_of_other_architectures_are_refused_by_name(architecture):
    for base in (BASES["deepspec"], FLAT):
        with pytest.raises(ValueError, match=f"architectures is .*{architecture}"):
            read(base | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({}, {"markov_rank": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ({"rope_is_neox_style": False}, {"rope_interleaved": True}),
        ({"is_neox_style": False}, {"rope_interleaved": True}),
        ({"architectures": ["Lfm2DSparkDraftModel"]}, {"block_size": 5, "sample_from_anchor": True}),
        ({"use_swa": True, "swa_window_size": 64, "causal": False}, {"sliding_window": 64, "causal_sliding": False}),
        ({"use_swa": True, "sliding_window": 64}, {"layer_types": ["sliding_attention"] * 2, "causal_sliding": False}),
        ({"use_swa": True, "swa_window_size": 64, "causal": True}, {"causal_sliding": True}),
        (SLIDING | {"causal": False}, {"causal_sliding": False}),
        (SLIDING | {"dflash_query_causal": True}, {"causal_sliding": True}),
        ({"add_swa_attention_sink_bias": True}, {"attention_sinks": True}),
        ({"use_confidence_head": False, "enable_confidence_head": None}, {"enable_confidence_head": False}),
        ({"confidence_head_alpha": 0.5, "enable_confidence_head": None}, {"enable_confidence_head": True}),
        ({"target_layer_ids": None, "num_target_layers": 12}, {"target_layer_ids": [1, 9]}),
        ({"markov_rank": 0, "projector_type": None}, {"sample_from_anchor": True, "block_size": 5}),
    ],
)
def test_flat_keys_are_read_at_the_top_and_in_sections(key, expected):
    nested = FLAT | {"dflash_config": FLAT["dflash_config"] | key}
    nested["num_target_layers"] = key.get("num_target_layers", 4)
    top = FLAT | {"dflash_config": {name: v for name, v in FLAT["dflash_config"].items() if name not in key}} | key
    for config in (top, nested) if "architectures" not in key else (top,):
        found = read(config)
        assert {name: found[name] for name in expected} == expected


def test_every_format_has_a_base():
    assert {recognise(base).name for base in BASES.values()} == {entry.name for entry in FORMATS} - {"transformers"}


# ---- and back


TARGET = Qwen3Config(vocab_size=48, hidden_size=32, num_hidden_layers=4, name_or_path="tiny/target")
HELD = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 48, "num_target_layers": 4, "target_layer_ids": [0, 2], "block_size": 5,
    "markov_rank": 6, "mask_token_id": 47, "target_model_type": "qwen3",
}  # fmt: skip
BY_FORMAT = {
    "transformers": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    | {"sample_from_anchor": False}
}
FIELDS = {
    "vocab_size": [47 + 2], "hidden_size": [64], "intermediate_size": [64], "num_hidden_layers": [3],
    "num_attention_heads": [8], "num_key_value_heads": [4], "head_dim": [16], "hidden_act": ["gelu"],
    "max_position_embeddings": [77], "rms_norm_eps": [1e-4], "attention_bias": [True], "attention_output_bias": [True],
    "mlp_bias": [True], "attention_dropout": [0.5], "embedding_scale": [2.0], "logit_scale": [0.5],
    "final_logit_softcapping": [5.0], "block_size": [7], "num_target_layers": [9], "target_layer_ids": [[1], [-1, 2]],
    "draft_top_k": [4], "mask_token_id": [3], "markov_rank": [9, 0], "attention_scaling": [1.0], "qk_norm": [False],
    "value_norm": [True], "attention_k_eq_v": [True], "sandwich_norms": [True], "layer_scalar": [True],
    "markov_head_type": ["gated", "rnn", "selector", "domino"], "enable_confidence_head": [False],
    "confidence_head_with_markov": [False], "sample_from_anchor": [False, True], "draft_vocab_size": [20],
    "attention_sinks": [True], "rope_interleaved": [True], "conv_kernel_size": [2],
    "num_experts": [4], "num_experts_per_tok": [1], "moe_intermediate_size": [8], "hc_mult": [2],
    "q_lora_rank": [8], "o_lora_rank": [8], "o_groups": [2], "v4_heads": [True],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 7000.0},
        {"rope_type": "default", "rope_theta": 7000.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 7000.0, "factor": 2.0, "original_max_position_embeddings": 64},
    ],
    "layer_types": [["sliding_attention"] * 2, ["sliding_attention", "full_attention"]],
    "sliding_window": [9], "causal_sliding": [True], "sliding_from_anchor": [True],
}  # fmt: skip
TOGETHER = {
    "conv_kernel_size": {"conv_group_size": 8}, "markov_rank": {"confidence_head_with_markov": False},
    "enable_confidence_head": {"confidence_head_with_markov": False},
    "layer_types": {"sliding_window": 8}, "num_hidden_layers": {"layer_types": None},
}  # fmt: skip
TOGETHER |= dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), {"num_experts": 4})
OF_V4 = {"q_lora_rank": 8, "o_lora_rank": 6, "o_groups": 4, "num_key_value_heads": 1} | dict.fromkeys(
    ("attention_k_eq_v", "attention_sinks", "rope_interleaved"), True
)
TOGETHER |= dict.fromkeys(("q_lora_rank", "o_lora_rank", "o_groups"), OF_V4)
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
TOGETHER |= dict.fromkeys(("sliding_window", "causal_sliding", "sliding_from_anchor"), SLIDES)
# Calibration travels in a file beside the format, tensors tell of weights of the draft's own, the target of a norm in
# its embedding; a window in decoding is advice, and the rest belongs to a field above.
ELSEWHERE = {
    "sts_temperatures", "confidence_fits", "sibling_acceptance", "own_embedding", "own_lm_head", "target_model_type",
    "initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "conv_group_size",
    "markov_start", "markov_state_size", "embedding_norm", "draft_window",
}  # fmt: skip


def there_and_back(config: PreTrainedConfig, format: str) -> PreTrainedConfig:
    """Return a configuration as it is read from what is written of it; such a draft may be refused: ValueError."""
    written = config_to_format(config, find_format(format, config), TARGET)
    entry = recognise(json.loads(json.dumps(written)))
    return type(config).from_dict(config_from_format(written, entry, TARGET))


@pytest.mark.parametrize("format", ["deepspec", "speculators", "sglang", "transformers"])
def test_no_fact_is_lost_on_the_way_through_a_format(format):
    base, held = HELD | BY_FORMAT.get(format, {}), set()
    for name, value in ((name, value) for name, values in FIELDS.items() for value in values):
        try:
            config = DSparkConfig(**base | TOGETHER.get(name, {}) | {name: value})
            back = there_and_back(config, format)
        except ValueError:
            continue
        ours, theirs = config.to_diff_dict(), back.to_diff_dict()
        lost = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        # Where the format has no place for it, the target says what it is. Without a head, its type means nothing.
        of_target = {"vocab_size"} if format == "transformers" else set()
        unused = {"markov_head_type"} if config.markov_rank == 0 else set()
        assert lost <= {"architectures", "num_target_layers", "target_model_type"} | of_target | unused, (name, value)
        held.add(name)
    assert held >= {"block_size", "mask_token_id", "rope_parameters", "rms_norm_eps"}


def test_every_field_of_a_draft_is_tried():
    own = {field.name for field in dataclasses.fields(DSparkConfig)}
    assert own - {field.name for field in dataclasses.fields(PreTrainedConfig)} - ELSEWHERE == FIELDS.keys()


@pytest.mark.parametrize(
    "kinds", [["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]]
)
def test_one_set_of_rotary_parameters_is_read_for_all_layers(kinds):
    full, sliding = {"rope_theta": 1e6, "rope_type": "default"}, {"rope_theta": 1e4, "rope_type": "default"}
    config = FLAT | {"layer_types": kinds, "sliding_window": 8, "rope_theta": None}
    config |= {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    if len(set(kinds)) == 2:
        with pytest.raises(ValueError, match="rope_parameters has sets for full_attention, sliding_attention"):
            read(config)
        config["rope_parameters"]["full_attention"] = sliding
    expected = full if kinds[0] == "full_attention" else sliding
    assert read(config)["rope_parameters"] == expected


@pytest.mark.parametrize("format", ["deepspec", "speculators", "sglang"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_interleaved", True), ("qk_norm", False), ("attention_bias", True), ("hidden_act", "gelu"),
        ("rms_norm_eps", 1e-4), ("embedding_scale", 2.0), ("logit_scale", 0.5), ("final_logit_softcapping", 5.0),
        ("mlp_bias", True), ("norm_before_residual", True), ("norm_output", True), ("fc_norm", True),
        ("block_size", 3), ("rope_parameters", {"rope_type": "linear", "rope_theta": 7000.0, "factor": 2.0}),
    ],
)  # fmt: skip
def test_no_fact_of_an_eagle3_draft_is_lost_either(format, name, value):
    facts = {key: each for key, each in HELD.items() if not key.startswith(("markov", "mask"))}
    try:
        back = there_and_back(Eagle3Config(**facts | {name: value}), format)
    except ValueError:
        return
    assert getattr(back, name) == value
