"""The configuration: what it refuses, what it derives from a target, and what it reads from DeepSpec."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
    T5Config,
)

from hf_dspark import DSparkConfig, DSparkDraftModel, Eagle3Config
from hf_dspark.models.configuration_draft import default_target_layer_ids
from tests.config_files import read_config

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 13, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def small(**overrides) -> DSparkConfig:
    sizes = SIZES | {"num_hidden_layers": 2, "num_target_layers": 6, "target_layer_ids": [0, 3], "markov_rank": 4}
    return DSparkConfig(**(sizes | overrides))


# ---- values


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        *(
            (field, {field: value})
            for value, fields in {
                0: (
                    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "head_dim", "block_size", "num_target_layers", "max_position_embeddings",
                    "draft_top_k", "draft_vocab_size", "draft_window",
                ),
                -1: ("mask_token_id", "markov_rank"),
            }.items() for field in fields
        ),
        *(("target_layer_ids", {"target_layer_ids": ids}) for ids in ([], [1, 1], [-2, 1], [0, 5])),
        ("head_dim", {"head_dim": 7}), ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("layer_types", {"layer_types": ["full_attention", "linear_attention"]}),
        ("sliding_window", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("sliding_window", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}),
        ("mask_token_id", {"mask_token_id": 96}), ("markov_head_type", {"markov_head_type": "transformer"}),
        ("confidence_head_with_markov", {"markov_rank": 0}), ("draft_vocab_size", {"draft_vocab_size": 10**9}),
        ("draft_top_k", {"draft_top_k": 97}), ("draft_top_k", {"draft_vocab_size": 8, "draft_top_k": 9}),
        ("rope_parameters", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        (r"target_layer_ids.*lie in \[-1, 4\].*last layer \(5\).*got \[5\]", {"target_layer_ids": [5]}),
    ],
    ids=str,
)  # fmt: skip
def test_config_refuses_a_wrong_value_and_names_its_field(field, overrides):
    with pytest.raises(ValueError, match=rf"DSparkConfig\.{field}"):
        small(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"target_layer_ids": [-1, 4]},
        {"mask_token_id": 0},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"draft_top_k": 96},
        {"head_dim": 10},
    ],
)
def test_config_accepts_values_at_the_limits(overrides):
    config = small(**overrides)
    assert {name: getattr(config, name) for name in overrides} == overrides


def test_config_fills_in_what_is_left_out():
    config = small(target_layer_ids=None)
    assert config.head_dim == 8
    assert config.layer_types == ["full_attention", "full_attention"]
    assert config.mask_token_id == 95
    assert config.target_layer_ids == default_target_layer_ids(6)
    assert config.rope_parameters["rope_type"] == "default"


def test_config_survives_saving_and_loading(tmp_path):
    config = small(
        layer_types=["full_attention", "sliding_attention"], sliding_window=9, draft_top_k=11, markov_head_type="rnn",
        target_layer_ids=[-1, 2], embedding_scale=2.5, logit_scale=0.5, final_logit_softcapping=3.0,
        eos_token_id=[1, 2],
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for loaded in (DSparkConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DSparkConfig
        assert loaded.to_diff_dict() == config.to_diff_dict()
    assert read_config(tmp_path)["model_type"] == "dspark"


# ---- tapped layers


def test_default_target_layer_ids_are_evenly_spaced_and_valid_for_every_depth():
    assert default_target_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(28) == [1, 7, 13, 19, 25]
    for depth in range(2, 70):
        ids = default_target_layer_ids(depth)
        assert ids == sorted(set(ids)) and 1 <= len(ids) <= 5 and (depth < 8 or len(ids) == 5)
        assert small(num_target_layers=depth, target_layer_ids=ids).target_layer_ids == ids


# ---- from a target


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 123_456.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 8.0},
}  # fmt: skip
COPIED = SIZES.keys() - {"num_hidden_layers"} | {
    "head_dim", "rms_norm_eps", "hidden_act", "eos_token_id", "bos_token_id", "pad_token_id", "initializer_range",
}  # fmt: skip


def test_from_target_copies_the_geometry_of_qwen3():
    target = Qwen3Config(
        **SIZES, head_dim=24, rms_norm_eps=1e-5, rope_parameters=ROPES["default"], hidden_act="gelu", eos_token_id=7,
        bos_token_id=6, pad_token_id=5, initializer_range=0.05,
    )  # fmt: skip
    config = DSparkConfig.from_target(target)
    assert {name: getattr(config, name) for name in COPIED} == {name: getattr(target, name) for name in COPIED}
    assert (config.embedding_scale, config.logit_scale, config.final_logit_softcapping) == (1.0, 1.0, None)
    assert (config.num_target_layers, config.target_model_type) == (13, "qwen3")
    assert config.target_layer_ids == default_target_layer_ids(13)


@pytest.mark.parametrize("rope", ROPES)
def test_from_target_keeps_rope_scaling_that_does_not_depend_on_the_length(rope):
    found = DSparkConfig.from_target(LlamaConfig(**SIZES, rope_parameters=ROPES[rope])).rope_parameters
    kept = {"rope_type": "default", "rope_theta": 5e5} if rope == "dynamic" else ROPES[rope]
    assert kept.items() <= found.items()


GEMMA_SCALE = {"embedding_scale": 32**0.5}
GPT2 = GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64)


@pytest.mark.parametrize(
    ("target", "facts"),
    [
        (Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=30.0),
         GEMMA_SCALE | {"final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}),
        (Gemma3TextConfig(**SIZES, head_dim=8), GEMMA_SCALE | {"target_model_type": "gemma3_text"}),
        (GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=8.0),
         {"embedding_scale": 12.0, "logit_scale": 0.125}),
        (CohereConfig(**SIZES, logit_scale=0.0625), {"embedding_scale": 1.0, "logit_scale": 0.0625}),
        (GPT2, {"hidden_size": 32, "head_dim": 8, "num_key_value_heads": 4, "num_target_layers": 4,
                "intermediate_size": 128}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)  # fmt: skip
def test_from_target_reads_scales_and_manages_without_what_a_family_lacks(target, facts):
    config = DSparkConfig.from_target(target)
    assert {name: getattr(config, name) for name in facts} == pytest.approx(facts)
    assert config.layer_types == ["full_attention"] * config.num_hidden_layers
    if target.model_type == "gemma3_text":  # which has another one for its sliding layers
        assert config.rope_parameters["rope_theta"] == target.rope_parameters["full_attention"]["rope_theta"] == 1e6
        assert "full_attention" not in config.rope_parameters


def test_from_target_refuses_fields_that_there_are_not(target):
    with pytest.raises(TypeError, match="DSparkConfig has no field block_sise; did you mean block_size?"):
        DSparkConfig.from_target(target.config, block_sise=4)


def test_from_target_refuses_encoder_decoders():
    with pytest.raises(ValueError, match="decoder-only causal LM, got the encoder-decoder 't5'"):
        DSparkConfig.from_target(T5Config())


@pytest.mark.parametrize(("depth", "expected"), [(2, 1), (6, 1), (12, 2), (28, 4), (36, 5), (80, 5)])
def test_from_target_chooses_the_drafts_depth_by_the_targets_and_lets_overrides_win(depth, expected):
    target = Qwen3Config(**SIZES | {"num_hidden_layers": depth})
    config = DSparkConfig.from_target(target)
    assert config.num_hidden_layers == len(config.layer_types) == expected
    overrides = {"num_hidden_layers": 1, "block_size": 3, "target_layer_ids": [-1], "intermediate_size": 8}
    assert overrides.items() <= DSparkConfig.from_target(target, **overrides).to_dict().items()


# ---- from DeepSpec


def test_deepspec_leftovers_do_not_enter_the_saved_config(fixtures, tmp_path):
    for name in ("draft_vanilla", "gemma4/draft_vanilla", "eagle3"):
        kind = Eagle3Config if name == "eagle3" else DSparkConfig
        config = kind.from_pretrained(fixtures / "deepspec" / name)
        config.save_pretrained(tmp_path)
        saved = read_config(tmp_path)
        known = set(kind().to_dict()) | {"dtype", "transformers_version", "architectures"}
        assert set(saved) <= known, set(saved) - known
        assert kind.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_deepspec_gemma4_draft_with_mixed_layers_is_refused(fixtures, tmp_path):
    source = read_config(fixtures / "deepspec" / "gemma4" / "draft_vanilla")
    source["layer_types"] = ["sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(source))
    with pytest.raises(ValueError, match="sliding layers have two head sizes"):
        DSparkConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [DSparkConfig, Eagle3Config])
def test_a_target_itself_is_as_good_as_its_config(target, kind):
    assert kind.from_target(target).to_dict() == kind.from_target(target.config).to_dict()
    for wrong in ("someone/target", None, {"hidden_size": 8}):
        with pytest.raises(TypeError, match=r"a target or its config is needed, got .*AutoConfig.from_pretrained"):
            kind.from_target(wrong)


@pytest.mark.parametrize("value", [-1, 0, 49])
def test_an_impossible_draft_top_k_that_is_set_later_is_refused_when_the_draft_meets_its_target(draft, target, value):
    draft.config.draft_top_k = value
    with pytest.raises(ValueError, match=rf"draft_top_k must lie in \[1, 48\], or be None, got {value}"):
        target.generate(torch.tensor([[5]]), assistant_model=draft, max_new_tokens=4, do_sample=True)


def test_a_draft_of_another_kind_names_its_class_and_a_draft_is_no_target(tmp_path):
    small().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no Eagle3 draft: load it with DSparkDraftModel.from_pretrained"):
        Eagle3Config.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a target is needed, and this is a draft, of the model_type 'dspark'"):
        DSparkDraftModel(small()).bind(DSparkDraftModel(small()))
