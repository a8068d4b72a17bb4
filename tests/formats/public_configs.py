"""Configurations that other projects publish, and what becomes of each: read, as what, or refused, by which word.

Each row has the facts of one file: the keys in which it differs from the plain one of its layout.
`test_public_configs.py` reads them all, and `docs/drafts.md` is made of them.
"""

from typing import Any, NamedTuple

from tests.formats.public_eagle3 import EAGLE3_ROWS


class PublicConfig(NamedTuple):
    """One published configuration."""

    project: str  # who wrote it
    where: str  # the file in the project's repository, or its name on the Hub
    layout: str  # whose layout it has, in the manual's words
    kind: str  # what we read it as
    config: dict[str, Any]
    result: dict[str, Any] | str  # fields of ours that must come out; or a pattern of the refusal

    @property
    def is_read(self) -> bool:
        return isinstance(self.result, dict)


Config = dict[str, Any]
SIZES: Config = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 5, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "vocab_size": 151936,
}  # fmt: skip
FULL = ["full_attention"] * 5
TAPS = [1, 9, 17, 25, 33]
HEADS: Config = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
BLOCK: Config = {"block_size": 7, "mask_token_id": 151669, "target_layer_ids": TAPS, "num_target_layers": 36}
ROPE: Config = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


DEEPSEEK_V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "num_key_value_heads": 1, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "qk_rope_head_dim": 64,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "sliding_window": 128, "rope_theta": 10000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0], "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


# ---- DeepSpec: a copy of the target's configuration, with the draft's own fields over it


def deepspec(**keys: Any) -> Config:
    own = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_anchors": 512, "layer_types": FULL}
    return SIZES | BLOCK | HEADS | ROPE | own | keys


GEMMA4: Config = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text", "mask_token_id": 4, "target_layer_ids": [5, 17, 29, 41, 46],
    "num_target_layers": 48, "global_head_dim": 512, "head_dim": 256, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262144, "sliding_window": 1024, "enable_moe_block": False, "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
NO_HEADS: Config = {
    "markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False, "confidence_head_with_markov": None
}  # fmt: skip
# What a copy of Qwen3.5's or 3.6's configuration says of the target's layers.
OF_QWEN35: Config = {
    "rope_parameters": {
        "rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "partial_rotary_factor": 0.25, "attn_output_gate": True, "output_gate_type": "swish", "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "mtp_num_hidden_layers": 1,
}  # fmt: skip
WHOLE_HEADS: Config = {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
ANCHORED: Config = {"sample_from_anchor": True, "block_size": 7, "rope_interleaved": False}
DEEPSPEC = (
    *(
        PublicConfig("DeepSpec", f"config/dspark/dspark_qwen3_{size}.py", "DeepSpec", "DSpark", deepspec(), ANCHORED)
        for size in ("4b", "8b", "14b")
    ),
    *(
        PublicConfig(
            "DeepSpec", f"config/dflash/dflash_qwen3_{size}.py", "DeepSpec", "DSpark without heads",
            deepspec(**NO_HEADS), ANCHORED | {"markov_rank": 0, "enable_confidence_head": False},
        )
        for size in ("4b", "8b", "14b")
    ),
    PublicConfig(
        "DeepSpec", "config/dspark/dspark_gemma4_12b.py", "DeepSpec, Gemma 4", "DSpark", deepspec(**GEMMA4),
        {"head_dim": 512, "num_key_value_heads": 1, "sandwich_norms": True, "final_logit_softcapping": 30.0},
    ),
    PublicConfig(
        "DeepSpec", "config/dflash/dflash_gemma4_12b.py", "DeepSpec, Gemma 4", "DSpark without heads",
        deepspec(**GEMMA4 | NO_HEADS), {"markov_rank": 0, "layer_scalar": True},
    ),
    PublicConfig(
        "satgeze", "satgeze/Qwen3.6-27B-DSpark", "DeepSpec", "DSpark", deepspec(block_size=15, **OF_QWEN35),
        WHOLE_HEADS | {"block_size": 15},
    ),
    PublicConfig(
        "satgeze", "satgeze/Qwen3.5-0.8B-DSpark", "DeepSpec", "DSpark",
        deepspec(model_type="qwen3_5_text", **OF_QWEN35), WHOLE_HEADS | {"target_model_type": "qwen3_5_text"},
    ),
    PublicConfig(
        "Koopah", "Koopah/Qwen3.6-35B-A3B-NVFP4-DSPARK", "DeepSpec", "DSpark", deepspec(block_size=8),
        {"block_size": 8},
    ),
    PublicConfig(
        "stanleyphoong", "stanleyphoong/Ornith-1.0-9B-DSpark", "its own", "",
        deepspec(architectures=["Qwen35DSparkModel"], enable_qwen35_gated_q_proj=True, **OF_QWEN35),
        "architectures is .*Qwen35",
    ),
    PublicConfig(
        "deepseek-ai", "deepseek-ai/DeepSeek-V4-Flash-DSpark", "inside its target", "DSpark", DEEPSEEK_V4,
        {"num_hidden_layers": 3, "num_target_layers": 43, "target_layer_ids": [40, 41, 42], "sliding_window": 128},
    ),
    PublicConfig(
        "deepseek-ai", "deepseek-ai/DeepSeek-V4-Flash", "inside its target", "",
        DEEPSEEK_V4 | {"dspark_block_size": None}, "is no DSpark draft",
    ),
)  # fmt: skip

# ---- NeMo Automodel: as DeepSpec, and layers of its targets' own families

AUTOMODEL = (
    PublicConfig(
        "Automodel", "examples/speculative/dspark/qwen3_0.6b_dspark.yaml", "DeepSpec", "DSpark",
        deepspec(target_layer_ids=[1, 7, 14, 21, 26], num_target_layers=28), ANCHORED,
    ),
    PublicConfig(
        "Automodel", "examples/speculative/dspark/gemma4_12b_dspark.yaml", "DeepSpec, Gemma 4", "DSpark",
        deepspec(**GEMMA4), {"attention_k_eq_v": True},
    ),
    PublicConfig(
        "Automodel", "examples/speculative/dspark/gemma4_31b_dspark.yaml", "DeepSpec, Gemma 4", "DSpark",
        deepspec(**GEMMA4 | {"target_layer_ids": [7, 22, 37, 52, 58], "num_target_layers": 60, "num_anchors": 128}),
        {"num_target_layers": 60},
    ),
    *(
        PublicConfig(
            "Automodel", f"examples/speculative/dspark/{name}.yaml", "its target's layers", "",
            deepspec(architectures=[architecture], **keys), f"architectures is .*{architecture}",
        )
        for name, architecture, keys in (
            ("deepseek_v4_flash_dspark", "DeepseekV4DSparkModel", {"model_type": "deepseek_v4"}),
            ("deepseek_v4_flash_smoke", "DeepseekV4DSparkModel", {"model_type": "deepseek_v4", "num_hash_layers": 0}),
            ("glm_5.2_dspark", "Glm5_2DSparkModel", {"model_type": "glm_moe_dsa", "mlp_layer_types": ["dense"] * 3}),
            ("kimi_k3_dspark", "KimiK3DSparkModel", {"model_type": "kimi_linear", "num_shared_experts": 0}),
            ("minimax_m3_dspark", "MiniMaxM3DSparkModel", {"model_type": "minimax_m3", "mask_token_id": 128799}),
        )
    ),
)  # fmt: skip


# ---- speculators


def speculators(layers: Config = {}, tokens: int | None = 8, **keys: Any) -> Config:  # noqa: B006
    proposal = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    own = {
        "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "block_size": 8, "mask_token_id": 151669,
        "draft_vocab_size": layers.get("vocab_size", SIZES["vocab_size"]), "tie_word_embeddings": False,
        "transformer_layer_config": SIZES | ROPE | {"model_type": "qwen3", "layer_types": FULL} | layers,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": proposal, "verifier": verifier},
    }  # fmt: skip
    return own | HEADS | keys


SLIDING_5: Config = {"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True, "sliding_window": 2048}
SPECULATORS = (
    PublicConfig(
        "speculators", "examples/train/dspark_qwen3_0_6b_sharegpt_online.sh", "speculators", "DSpark",
        speculators(sample_from_anchor=True), {"block_size": 8, "target_layer_ids": TAPS},
    ),
    PublicConfig(
        "speculators", "docs/user_guide/algorithms/dspark.md: --no-sample-from-anchor", "speculators", "DSpark",
        speculators(sample_from_anchor=False, tokens=7), {"block_size": 7, "sample_from_anchor": False},
    ),
    PublicConfig(
        "speculators", "docs/user_guide/algorithms/dspark.md: --markov-head-type rnn", "speculators", "DSpark",
        speculators(sample_from_anchor=True, markov_head_type="rnn"), {"markov_head_type": "rnn"},
    ),
    PublicConfig(
        "speculators", "docs/user_guide/algorithms/dspark.md: --markov-rank 0", "speculators", "DSpark without heads",
        speculators(sample_from_anchor=True, markov_rank=0, confidence_head_with_markov=False), {"markov_rank": 0},
    ),
    PublicConfig(
        "mgoin", "mgoin/Qwen3-8B-speculator.dspark", "speculators before 0.7", "DSpark", speculators(tokens=7),
        {"block_size": 7, "sample_from_anchor": False},
    ),
    PublicConfig(
        "makora-ai", "makora-ai/gemma4-26b-a4b-dspark", "speculators before 0.7", "DSpark",
        speculators({"vocab_size": 262144}, 6, block_size=7, draft_vocab_size=32000, mask_token_id=4),
        {"block_size": 6, "sample_from_anchor": False, "draft_vocab_size": 32000, "embedding_scale": 1.0},
    ),
    PublicConfig(
        "RedHatAI", "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", "speculators before 0.7", "DSpark", speculators(),
        {"block_size": 8, "sample_from_anchor": True},
    ),
    PublicConfig(
        "DaoCloud", "DaoCloud/Muse-Glimmer-30B-DSpark", "speculators", "DSpark",
        speculators(SLIDING_5, 15, block_size=15, sample_from_anchor=True, sliding_window_non_causal=False),
        {"causal_sliding": True, "sliding_from_anchor": True, "sliding_window": 2048, "block_size": 15},
    ),
    PublicConfig(
        "RedHatAI", "RedHatAI/GLM-5.2-speculator.dspark-preview", "speculators, cut short", "",
        {key: value for key, value in speculators().items() if key != "transformer_layer_config"}
        | {"transformer_layer_config": {"hidden_size": 6144}},
        "lacks 'transformer_layer_config.vocab_size'",
    ),
    PublicConfig(
        "speculators", "scripts/train.py: Qwen3.5 and --no-mrope-full-head-hack", "speculators", "DSpark",
        speculators(
            {"rope_parameters": WHOLE_HEADS["rope_parameters"]
             | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
            sample_from_anchor=True,
        ),
        WHOLE_HEADS,
    ),
    PublicConfig(
        "speculators", "src/speculators/models/dflash/config.py: target_hidden_size", "speculators", "",
        speculators(sample_from_anchor=True, target_hidden_size=4096), "target_hidden_size differs",
    ),
)  # fmt: skip


# ---- SpecForge and SGLang: flat, with the draft's own fields in dflash_config


def flat(inside: Config = {}, **keys: Any) -> Config:  # noqa: B006
    own = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0} | HEADS
    own |= {"mask_token_id": 151669, "target_layer_ids": TAPS}
    top = {
        "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "block_size": 7,
        "model_type": "qwen3", "layer_types": FULL, "max_window_layers": 5, "num_target_layers": 36,
        "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "use_cache": True,
    }  # fmt: skip
    return SIZES | top | {"dflash_config": own | inside} | keys


YARN: Config = {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 1e7, "rope_type": "yarn"}
SPECFORGE = (
    *(
        PublicConfig("SpecForge", f"configs/{name}.json", "SpecForge", "DSpark", flat(**keys), expected)
        for name, keys, expected in (
            ("qwen3-4b-dspark", {}, ANCHORED),
            ("qwen3-8b-dspark", {"hidden_size": 4096}, ANCHORED),
            ("glm-5.2-dspark", {"rope_theta": 8000000, "head_dim": 64}, {"head_dim": 64}),
            ("inkling-dspark", {"rope_theta": 8000000, "num_target_layers": 66}, {"num_target_layers": 66}),
            (
                "kimi-k3-dspark", {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 10000.0}},
                {"rope_parameters": YARN | {"rope_theta": 10000.0}},
            ),
            (
                "qwen3.6-27b-dspark", {"block_size": 16, "target_hidden_size": None, "rope_theta": 10000000},
                {"block_size": 16, "sample_from_anchor": True},
            ),
        )
    ),
    PublicConfig(
        "SpecForge", "specforge/export/checkpoint_io.py: both rotary schemas", "SpecForge", "DSpark",
        flat(rope_theta=1e7, rope_parameters=YARN, rope_scaling={k: v for k, v in YARN.items() if k != "rope_theta"}),
        {"rope_parameters": YARN},
    ),
    PublicConfig(
        "SpecForge", "scripts/gates/normalize_dflash_export.py", "SpecForge", "DSpark",
        flat(architectures=["Qwen3DSparkModel"], auto_map=None, **HEADS), ANCHORED,
    ),
    PublicConfig(
        "SpecForge", "tests/test_modeling/test_draft_registry.py: TINY_DSPARK", "SpecForge", "DSpark",
        flat({"target_layer_ids": None, "enable_confidence_head": None}), {"target_layer_ids": [1, 9, 17, 25, 33]},
    ),
    PublicConfig(
        "SpecForge", "tests/test_runtime/_fixtures.py: domino in DSpark's place", "SpecForge", "",
        flat({"projector_type": "domino", "emb_dim": 16}), "emb_dim",
    ),
    PublicConfig(
        "RadixArk", "RadixArk/Qwen3.8-27B-DSpark", "SpecForge", "DSpark",
        flat(rope_theta=None, rope_parameters=YARN, **HEADS), {"rope_parameters": YARN, "block_size": 7},
    ),
    PublicConfig(
        "verl-SpeCo", "verl_speco/models/dspark/configuration_dspark.py", "verl-SpeCo", "DSpark",
        SIZES | BLOCK | HEADS | {"architectures": ["DSparkDraftModel"], "model_type": "dspark", "rope_theta": 10000.0,
                                 "target_hidden_size": 2560, "target_num_hidden_layers": 36, "num_context_layers": 5},
        ANCHORED | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    ),
)  # fmt: skip

LFM: Config = {
    "architectures": ["Lfm2DSparkDraftModel"], "model_type": "qwen3", "rope_theta": 10000000.0, "rms_norm_eps": 1e-5,
    "layer_types": FULL, "block_size": 9, "rope_is_neox_style": False, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
}  # fmt: skip
NEMOTRON: Config = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 8, "attention_sink_bias": True,
    "dflash_query_causal": True, "dspark_bonus_anchor": True, "dspark_fixup_head_type": "markov",
    "dspark_markov_rank": 512, "markov_rank": 512, "markov_head_type": "vanilla", "enable_confidence_head": False,
    "has_embed_tokens": True, "has_lm_head": False, "layer_types": ["sliding_attention"] * 5, "sliding_window": 1024,
    "mask_token_id": 990, "pard_token": 990, "rope_parameters": None, "rope_theta": 10000, "num_target_layers": 52,
    "sample_from_anchor": False, "target_layer_ids": [1, 5, 19, 29, 41], "train_embed_tokens": False,
    "draft_vocab_size": None, "num_aux_layers": 6, "eagle_aux_hidden_state_layer_ids": [2, 6, 20, 30, 42],
    "dflash_config": {
        "attention_sink_bias": True, "causal": True, "mask_token_id": 990, "swa_window_size": 1024, "use_swa": True,
        "target_layer_ids": [1, 5, 19, 29, 41], "sample_from_anchor": False,
    },
}  # fmt: skip
OF_LFM = {"rope_interleaved": True, "block_size": 9, "sample_from_anchor": True}
ENGINES = (
    *(
        PublicConfig(
            "Liquid AI", f"LiquidAI/{name}-DSpark", "SGLang", "DSpark",
            SIZES | LFM | {"dflash_config": {
                "mask_token_id": 125017, "target_layer_ids": taps, "num_target_layers": layers
            }},
            OF_LFM | {"num_target_layers": layers},
        )
        for name, taps, layers in (
            ("LFM2.5-2.6B", [2, 9, 17, 21, 27], 30), ("LFM2.5-VL-3B", [2, 9, 17, 21, 27], 30),
            ("LFM2.5-1.2B-Instruct", [2, 5, 8, 10, 12], 16), ("LFM2.5-8B-A1B", [2, 6, 10, 14, 18], 24),
        )
    ),
    PublicConfig(
        "NVIDIA", "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark", "SGLang", "",
        SIZES | NEMOTRON | {"quantization_config": {"quant_algo": "W4A16_NVFP4", "quant_method": "modelopt"}},
        "quantised",
    ),
    PublicConfig(
        "NVIDIA", "the same, dequantised", "SGLang", "DSpark", SIZES | NEMOTRON,
        {"attention_sinks": True, "causal_sliding": True, "sliding_window": 1024, "block_size": 7,
         "sample_from_anchor": False},
    ),
    PublicConfig(
        "SGLang", "srt/speculative/dspark_components/dspark_config.py: dspark_config", "SGLang", "DSpark",
        SIZES | {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "rope_theta": 1e6, "block_size": 7,
                 "num_target_layers": 36, "dspark_config": HEADS | {"mask_token_id": 151669},
                 "target_layer_ids": TAPS},
        ANCHORED,
    ),
    PublicConfig(
        "SGLang", "test: k3_dspark", "its target's layers", "",
        {"architectures": ["K3DSparkModel"], "model_type": "k3_dspark"}, "architectures is .*K3DSparkModel",
    ),
    PublicConfig(
        "vLLM", "vllm/model_executor/models/qwen3_dflash.py: is_neox_style", "SGLang", "DSpark",
        flat(is_neox_style=False), {"rope_interleaved": True},
    ),
    PublicConfig(
        "vLLM", "a fork's export of a Qwen3.6-27B draft", "SGLang", "",
        flat(architectures=["DFlashDraftModel"], **HEADS, attn_output_gate=True, output_gate_type="swish"),
        "attn_output_gate is True",
    ),
    PublicConfig(
        "TensorRT-LLM", "tests: a DSpark drafter of head size 128", "Model-Optimizer", "DSpark",
        flat({"causal": False, "shift_label": True, "use_confidence_head": True, "enable_confidence_head": None}),
        ANCHORED | {"enable_confidence_head": True},
    ),
)  # fmt: skip


# ---- Model-Optimizer: flat, heads without a prefix


def modelopt(inside: Config = {}, **keys: Any) -> Config:  # noqa: B006
    own = {"mask_token_id": 151669, "target_layer_ids": TAPS} | inside
    top = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "layer_types": FULL,
        "num_target_layers": 36, "rope_theta": 1000000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "initializer_range": 0.02, "attention_dropout": 0.0,
    }  # fmt: skip
    return SIZES | top | {"dflash_config": own} | keys


OPTIMIZER_HEADS: Config = {
    "projector_type": "dspark", "shift_label": True, "markov_rank": 256, "markov_head_type": "vanilla",
    "use_confidence_head": True,
}  # fmt: skip
MODEL_OPTIMIZER = (
    PublicConfig(
        "Model-Optimizer", "modelopt_recipes/general/speculative_decoding/dspark.yaml", "Model-Optimizer", "DSpark",
        modelopt(OPTIMIZER_HEADS, block_size=16), {"block_size": 16, "enable_confidence_head": True},
    ),
    PublicConfig(
        "Model-Optimizer", "modelopt_recipes/general/speculative_decoding/dflash.yaml", "Model-Optimizer", "DFlash",
        modelopt(), {"block_size": 7, "sample_from_anchor": False, "markov_rank": 0},
    ),
    *(
        PublicConfig(
            "Model-Optimizer", f"tools/launcher/examples/{name}", "Model-Optimizer", kind, modelopt(*inside, **keys),
            expected,
        )
        for name, kind, inside, keys, expected in (
            (
                "MiniMaxAI/MiniMax-M3/hf_streaming_dspark_multi_node.yaml", "DSpark", (OPTIMIZER_HEADS,),
                {"rope_theta": 5000000.0}, {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            ),
            (
                "moonshotai/Kimi-K2.6/hf_streaming_dspark_multi_node.yaml", "DSpark", (OPTIMIZER_HEADS,),
                {"intermediate_size": 18432}, {"block_size": 8},
            ),
            ("Qwen/Qwen3.5-4B/hf_online_dflash.yaml", "DFlash", (), {"rope_theta": 1e7}, WHOLE_HEADS),
            (
                "MiniMax/MiniMax-M2.7-DFlash/hf_online_dflash.yaml", "DFlash", (),
                {"rope_scaling": {"type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096}},
                {"rope_parameters": {"rope_type": "yarn", "factor": 48.0, "rope_theta": 1e6,
                                     "original_max_position_embeddings": 4096}},
            ),
            ("Qwen/Qwen3-0.6B/hf_online_dflash.yaml", "DFlash", (), {}, {"block_size": 7}),
            ("Qwen/Qwen3-8B/hf_online_dflash.yaml", "DFlash", (), {"hidden_size": 4096}, {"hidden_size": 4096}),
        )
    ),
    PublicConfig(
        "Model-Optimizer", "modelopt/torch/export/plugins/hf_spec_export.py: dflash_swa_window_size",
        "Model-Optimizer", "DFlash",
        modelopt({"use_swa": True, "swa_window_size": 2048, "causal": False}, sliding_window=2048),
        {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "causal_sliding": False},
    ),
    PublicConfig(
        "Model-Optimizer", "modelopt/torch/export/plugins/hf_spec_export.py: hf_quant_config", "Model-Optimizer", "",
        modelopt(OPTIMIZER_HEADS, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}), "quantised",
    ),
    PublicConfig(
        "Model-Optimizer", "tests/unit/torch/speculative/plugins/test_hf_dspark.py: rnn", "Model-Optimizer", "DSpark",
        modelopt(OPTIMIZER_HEADS | {"markov_head_type": "rnn", "use_confidence_head": False}),
        {"markov_head_type": "rnn", "enable_confidence_head": False},
    ),
    PublicConfig(
        "Model-Optimizer", "tests/unit/torch/speculative/plugins/test_hf_dspark.py: prefix", "Model-Optimizer", "",
        modelopt(OPTIMIZER_HEADS | {"pure_draft_prefix_len": 1}), "pure_draft_prefix_len is 1",
    ),
)  # fmt: skip


# ---- DFlash and its successors: flat, as z-lab writes them


def dflash(inside: Config = {}, **keys: Any) -> Config:  # noqa: B006
    own = {"mask_token_id": 151669, "target_layer_ids": TAPS} | inside
    top = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
        "model_type": "qwen3", "layer_types": FULL, "max_window_layers": 5, "num_target_layers": 36,
        "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip
    return SIZES | top | {"dflash_config": own} | keys


MIXED: Config = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "use_sliding_window": True,
                 "sliding_window": 2048}  # fmt: skip
DOMINO: Config = {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024}
SELECTOR: Config = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
OF_QWEN38: Config = {
    "architectures": ["DFlash2DraftModel"], "auto_map": None, "hidden_size": 5120, "intermediate_size": 17408,
    "vocab_size": 248320, "num_target_layers": 64, "rope_theta": None, "block_size": None, "is_causal": False,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
} | SLIDING_5  # fmt: skip
AS_DFLASH: Config = {"block_size": 15, "sample_from_anchor": False, "markov_rank": 0, "conv_kernel_size": 0}
AS_DFLASH2: Config = {
    "block_size": 7, "sample_from_anchor": False, "markov_head_type": "selector", "markov_rank": 256,
    "draft_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16, "causal_sliding": False, "sliding_window": 2048,
}  # fmt: skip
AS_DOMINO: Config = {"markov_head_type": "domino", "markov_rank": 256, "markov_state_size": 1024, "markov_start": 1}
DOMINO_NAME: Config = {"architectures": ["DominoDraftModel"], "auto_map": {"AutoModel": "domino.DominoDraftModel"}}
DFLASH = (
    PublicConfig("z-lab", "z-lab/Qwen3-4B-DFlash-b16", "z-lab", "DFlash", dflash(), AS_DFLASH),
    PublicConfig("z-lab", "z-lab/Qwen3-8B-DFlash-b16", "z-lab", "DFlash", dflash(hidden_size=4096), AS_DFLASH),
    PublicConfig(
        "z-lab", "z-lab/Qwen3.5-9B-DFlash: block_size in dflash_config", "z-lab", "DFlash",
        dflash({"block_size": 16}, block_size=None), AS_DFLASH,
    ),
    PublicConfig(
        "z-lab", "z-lab/Qwen3.6-27B-DFlash", "z-lab", "DFlash",
        dflash({"mask_token_id": 248070}, vocab_size=248320, **MIXED), AS_DFLASH | {"causal_sliding": True},
    ),
    PublicConfig(
        "z-lab", "z-lab/gemma-4-31B-it-DFlash", "z-lab", "DFlash",
        dflash({"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]}, hidden_size=5376, vocab_size=262144,
               num_attention_heads=64, num_target_layers=60, final_logit_softcapping=30.0, **MIXED),
        AS_DFLASH | {"final_logit_softcapping": 30.0, "embedding_scale": 1.0, "causal_sliding": True},
    ),
    PublicConfig(
        "z-lab", "dflash/model.py: is_causal with full attention", "z-lab", "", dflash(is_causal=True),
        "blocks are causal",
    ),
    *(
        PublicConfig("SpecForge", f"configs/{name}.json", "z-lab", "DFlash", dflash(inside, **keys), AS_DFLASH | more)
        for name, inside, keys, more in (
            ("qwen3-4b-dflash", {}, {}, {}),
            ("qwen3-8b-dflash", {}, {"hidden_size": 4096}, {}),
            ("qwen2.5-0.5b-dflash", {"target_layer_ids": [1, 6, 11, 16, 21]}, {"num_target_layers": 24}, {}),
            ("longcat-flash-dflash", {"mask_token_id": 2}, {"hidden_size": 6144}, {"mask_token_id": 2}),
            ("lfm2.5-1.2b-instruct-dflash", {"mask_token_id": 16}, {"rms_norm_eps": 1e-5, "head_dim": 64},
             {"rope_interleaved": False}),
            ("qwen3.5-35b-a3b-dflash", {}, {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}, {}),
            ("qwen3.5-4b-dflash", {"target_layer_ids": [1, 8, 15, 22, 29]}, {"num_target_layers": 32}, {}),
            ("qwen3.6-27b-dflash", {"target_layer_ids": [1, 16, 31, 46, 61]}, MIXED | {"num_target_layers": 64},
             {"causal_sliding": True}),
        )
    ),
    PublicConfig(
        "AngelSlim", "configs/qwen3_dflash.json", "z-lab", "DFlash",
        dflash(architectures=["QwenDFlashDraftModel"], num_anchors=512, loss_decay_gamma=7.0), AS_DFLASH,
    ),
    PublicConfig(
        "Automodel", "examples/speculative/dflash/qwen3_dflash.yaml", "z-lab", "DFlash",
        dflash(architectures=["Qwen3DFlashDraftModel"], auto_map=None), AS_DFLASH,
    ),
    PublicConfig(
        "SGLang", "srt/speculative/dflash_utils.py: attention_value_scale", "z-lab", "",
        dflash({"attention_value_scale": 0.7, "use_swa": True, "swa_window_size": 128}),
        "attention_value_scale is 0.7",
    ),
    PublicConfig(
        "incoai", "incoai/Qwen3.8-27B-DFlash2", "z-lab, DFlash 2", "DFlash 2",
        dflash(SELECTOR | {"block_size": 8, "target_layer_ids": [5, 19, 33, 47, 61]}, **OF_QWEN38), AS_DFLASH2,
    ),
    PublicConfig(
        "z-lab", "z-lab/Qwen3.8-27B-DFlash2", "z-lab, DFlash 2", "DFlash 2",
        dflash(SELECTOR | {"block_size": 8, "target_layer_ids": [5, 19, 33, 47, 61]}, **OF_QWEN38), AS_DFLASH2,
    ),
    PublicConfig(
        "SGLang", "DFlash 2 under the name of DFlash", "z-lab, DFlash 2", "DFlash 2",
        dflash(SELECTOR | {"block_size": 8}, **OF_QWEN38 | {"architectures": ["DFlashDraftModel"]}), AS_DFLASH2,
    ),
    PublicConfig(
        "vLLM", "vllm/model_executor/models/qwen3_dflash2.py: scales", "z-lab, DFlash 2", "DFlash 2",
        dflash(SELECTOR | {"block_size": 8, "input_embedding_scale": 2.0, "output_multiplier": 0.5,
                           "final_logit_softcapping": 20.0}, **OF_QWEN38),
        AS_DFLASH2 | {"embedding_scale": 2.0, "logit_scale": 0.5, "final_logit_softcapping": 20.0},
    ),
    *(
        PublicConfig(
            "Automodel", f"examples/speculative/dflash/{name}.yaml", "z-lab, DFlash 2", "DFlash 2",
            dflash(SELECTOR, architectures=["Qwen3DFlash2DraftModel"], auto_map=None, **keys),
            {"markov_head_type": "selector", "draft_top_k": 16} | more,
        )
        for name, keys, more in (
            ("qwen3_dflash2", {}, {"block_size": 15}),
            ("qwen3_8_27b_dflash2", {"block_size": 8, "hidden_size": 5120} | SLIDING_5, {"block_size": 7}),
        )
    ),
    PublicConfig(
        "TokenSpeed", "test: dflash2 with latent attention", "its target's layers", "",
        dflash(SELECTOR | {"block_size": 8, "attention_mode": "mla"}, **OF_QWEN38), "attention_mode is 'mla'",
    ),
    *(
        PublicConfig(project, where, "Domino", "Domino", dflash(DOMINO | shifted, **keys), AS_DOMINO | expected)
        for project, where, shifted, keys, expected in (
            ("Huang2020", "Huang2020/Qwen3-4B-Domino-b16", {"shift_label": True}, DOMINO_NAME | {"emb_dim": 256},
             {"block_size": 16, "sample_from_anchor": True}),
            ("Huang2020", "Huang2020/Qwen3-8B-Domino-b16", {"shift_label": True}, DOMINO_NAME | {"emb_dim": 256},
             {"block_size": 16, "sample_from_anchor": True}),
            ("SpecForge", "configs/qwen3-8b-domino.json", {"shift_label": True}, DOMINO_NAME | {"emb_dim": 256},
             {"block_size": 16}),
            ("SpecForge", "configs/qwen3.6-27b-domino-full-attention.json", {"shift_label": False}, DOMINO_NAME,
             {"block_size": 15, "sample_from_anchor": False}),
            ("Model-Optimizer", "modelopt_recipes/general/speculative_decoding/domino.yaml", {"shift_label": True},
             {"auto_map": None, "emb_dim": 256}, {"block_size": 16}),
            ("Automodel", "examples/speculative/dflash/qwen3_domino.yaml", {"shift_label": False},
             {"architectures": ["Qwen3DFlashDraftModel"], "auto_map": None}, {"block_size": 15}),
        )
    ),
    PublicConfig(
        "SpecForge", "configs/qwen3.5-4b-domino.json", "Domino", "",
        dflash(DOMINO | {"shift_label": True, "target_layer_ids": [3, 11, 19, 27, 31]}, num_target_layers=32,
               **DOMINO_NAME),
        "the last layer .31. is only visible after the final norm",
    ),
    PublicConfig(
        "speculators", "examples/train/dflash_qwen3_8b_sharegpt_online_5k.sh", "speculators", "DFlash",
        {key: value for key, value in speculators(tokens=7, speculators_model_type="dflash").items()
         if key not in HEADS},
        AS_DFLASH | {"block_size": 7},
    ),
    PublicConfig(
        "speculators", "src/speculators/models/dflash2/config.py", "speculators", "DFlash 2",
        {key: value for key, value in speculators(SLIDING_5, 7, speculators_model_type="dflash2", **SELECTOR).items()
         if key not in HEADS},
        AS_DFLASH2 | {"sliding_from_anchor": True},
    ),
    PublicConfig(
        "speculators", "src/speculators/models/dflash2/config.py: draft_ffn_type", "speculators", "",
        speculators(speculators_model_type="dflash2", draft_ffn_type="moe", **SELECTOR), "draft_ffn_type is 'moe'",
    ),
    PublicConfig(
        "speculators", "src/speculators/models/dfly/config.py", "speculators", "",
        speculators(speculators_model_type="dfly"), "DFly",
    ),
)  # fmt: skip

PUBLIC_CONFIGS: tuple[PublicConfig, ...] = (
    *DEEPSPEC, *AUTOMODEL, *SPECULATORS, *SPECFORGE, *ENGINES, *MODEL_OPTIMIZER, *DFLASH,
    *(PublicConfig(*row) for row in EAGLE3_ROWS),
)  # fmt: skip
