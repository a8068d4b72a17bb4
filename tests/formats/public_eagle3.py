"""Published configurations of EAGLE-3 drafts, as rows of `PublicConfig`; see `public_configs.py`."""

from typing import Any

Config = dict[str, Any]
Row = tuple[str, str, str, str, Config, Config | str]
LLAMA: Config = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "vocab_size": 128256, "draft_vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3: Config = {
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "vocab_size": 151936,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "max_position_embeddings": 40960,
}  # fmt: skip
PLAIN_ROPE: Config = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
QWEN3_ROPE: Config = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
BY_DEPTH: Config = {"target_layer_ids": None, "qk_norm": False, "block_size": 7, "draft_vocab_size": 32000}


def taps(*ids: int, **more: Any) -> Config:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)} | more}


def eagle(where: str, result: Config | str, **keys: Any) -> Row:
    config = {"architectures": ["LlamaForCausalLM"]} | LLAMA | keys
    return "EAGLE", where, "EAGLE", "EAGLE-3" * isinstance(result, dict), config, result


def specforge(name: str, result: Config, **keys: Any) -> Row:
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | LLAMA | keys
    return "SpecForge", f"configs/{name}.json", "SpecForge", "EAGLE-3", config, result


def angelslim(name: str, result: Config | str, **keys: Any) -> Row:
    where = f"angelslim/compressor/speculative/train/configs/{name}.json"
    config = {"architectures": ["Eagle3LlamaForCausalLM"]} | LLAMA | keys
    return "AngelSlim", where, "SpecForge", "EAGLE-3" * isinstance(result, dict), config, result


def modelopt(where: str, result: Config | str, inside: Config | None = None, **keys: Any) -> Row:
    own = {
        "use_aux_hidden_state": True, "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1, "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
    } | (inside or {})  # fmt: skip
    rope = {"rope_theta": 10000, "rope_scaling": {"rope_type": "default", "rope_theta": 10000}}
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | LLAMA | rope | {"eagle_config": own} | keys
    return "Model-Optimizer", where, "Model-Optimizer", "EAGLE-3" * isinstance(result, dict), config, result


def speculators(where: str, result: Config | str, model_type: str = "qwen3", layers: Config | None = None,
                **keys: Any) -> Row:  # fmt: skip
    inside = {key: value for key, value in LLAMA.items() if key not in ("draft_vocab_size", "torch_dtype")}
    inside |= {"model_type": model_type, "head_dim": 128, "vocab_size": 151936} | QWEN3_ROPE | (layers or {})
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": 32000, "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": False,
        "norm_before_residual": False, "target_hidden_size": None, "transformer_layer_config": inside,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
    } | keys  # fmt: skip
    kind = "P-EAGLE" if "mask_token_id" in keys else "EAGLE-3"
    return "speculators", where, "speculators", kind * isinstance(result, dict), config, result


PEAGLE_DEPTHS: Config = {"num_depths": 8, "down_sample_ratio": 0.8, "down_sample_ratio_min": 0.2}
AS_PEAGLE: Config = {"mask_token_id": 151669, "is_autoregressive": False, "num_hidden_layers": 4}


def peagle(project: str, where: str, architecture: str, result: Config | str = AS_PEAGLE, **keys: Any) -> Row:
    config = LLAMA | QWEN3 | {"architectures": [architecture], "num_hidden_layers": 4} | keys
    return project, where, "P-EAGLE", "P-EAGLE" * isinstance(result, dict), config, result


MROPE: Config = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000}
INTERLEAVED: Config = {
    "rope_scaling": {"type": "default", "rope_type": "default", "mrope_interleaved": True,
                     "mrope_section": [24, 20, 20]}, "rope_theta": 5000000,
}  # fmt: skip
YARN: Config = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "rope_type": "yarn",
}  # fmt: skip
_EXPORT = "modelopt/torch/export/plugins/hf_spec_export.py"
_SETTINGS = "src/speculators/models/eagle3/config.py"

EAGLE3_ROWS: tuple[Row, ...] = (
    eagle("eagle/traineagle3/config.json", BY_DEPTH | PLAIN_ROPE, torch_dtype="float16"),
    eagle("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", BY_DEPTH | {"hidden_size": 4096, "own_lm_head": False}),
    eagle(
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        {"target_hidden_size": 8192, "feature_size": 8192, "own_embedding": True, "own_lm_head": True},
        hidden_size=6144, target_hidden_size=8192, num_attention_heads=48, intermediate_size=16384,
    ),
    eagle("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", BY_DEPTH),
    eagle(
        "yuhuili/EAGLE3-Vicuna1.3-13B", {"draft_vocab_size": None, "num_key_value_heads": 40}, hidden_size=5120,
        num_attention_heads=40, num_key_value_heads=None, intermediate_size=13824, vocab_size=32000,
    ),
    eagle("eagle/model/cnets.py: rope_scaling linear", {"rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}, rope_scaling={"type": "linear", "factor": 2.0}),
    eagle("eagle/model/cnets.py: rope_scaling dynamic", "rope_type of",
          rope_scaling={"type": "dynamic", "factor": 2.0}),
    *(
        specforge(name, result, **QWEN3 | keys)
        for name, result, keys in (
            ("qwen3-4b-eagle3", BY_DEPTH | QWEN3_ROPE, {"hidden_size": 2560, "intermediate_size": 9728}),
            ("qwen3-8b-eagle3", BY_DEPTH | QWEN3_ROPE, {"intermediate_size": 12288}),
            ("qwen3-32b-eagle3", {"num_attention_heads": 64, "head_dim": 128},
             {"hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600}),
            ("qwen3-30B-A3B-eagle3.1", {"fc_norm": True, "norm_output": True},
             {"hidden_size": 2048, "num_key_value_heads": 4, "fc_norm": True, "norm_output": True}),
            ("qwen3-235B-A22B-eagle3", {"target_layer_ids": [1, 46, 90]},
             {"num_attention_heads": 64} | taps(1, 46, 90, use_aux_hidden_state=True)),
            ("qwen3-next-80b-a3b-eagle3", {"head_dim": 256}, {"head_dim": 256, "decoder_sparse_step": 1}),
            ("qwen2-5-vl-7b-eagle3", QWEN3_ROPE, MROPE | {"sliding_window": 32768, "pretraining_tp": 1}),
        )
    ),
    specforge("llama3-8B-eagle3", BY_DEPTH | PLAIN_ROPE),
    specforge("gpt-oss-20B-eagle3", {"target_layer_ids": [1, 11, 21], "head_dim": 64}, head_dim=64, hidden_size=2880,
              num_attention_heads=64, **taps(1, 11, 21)),
    specforge("deepseek-v2-lite-eagle3", {"rope_parameters": {"rope_theta": 10000} | YARN}, rope_scaling=YARN,
              rope_theta=10000, vocab_size=102400),
    specforge("gemma3-1b-eagle3", {"embedding_scale": 1.0, "target_model_type": "gemma3_text"}, head_dim=256,
              hidden_size=1152, num_attention_heads=4, num_key_value_heads=1, sliding_window=512, vocab_size=262144,
              use_sliding_window=False, target_model_type="gemma3_text"),
    specforge("longcat-flash-eagle3", {"draft_vocab_size": None}, vocab_size=131072, draft_vocab_size=131072),
    specforge("phi4-eagle3", {"rope_parameters": {"rope_theta": 250000.0, "rope_type": "default"}}, model_type="phi3",
              rope_theta=250000.0, hidden_size=5120, num_attention_heads=40, num_key_value_heads=10),
    specforge("qwq-32B-eagle3", BY_DEPTH | QWEN3_ROPE, model_type="qwen2", rope_theta=1000000.0, sliding_window=32768,
              use_sliding_window=False),
    *(
        angelslim(f"{name}-eagle3", result, **QWEN3 | {"tie_word_embeddings": True} | keys)
        for name, result, keys in (
            ("qwen3-0.6b", BY_DEPTH | QWEN3_ROPE, {"hidden_size": 1024, "num_attention_heads": 16}),
            ("qwen3-1.7b", BY_DEPTH, {"hidden_size": 2048, "num_attention_heads": 16}),
            ("qwen3-4b", BY_DEPTH, {"hidden_size": 2560}),
            ("qwen3-14b", {"num_attention_heads": 40}, {"hidden_size": 5120, "num_attention_heads": 40}),
            ("qwen3-30b-a3b", BY_DEPTH, {"decoder_sparse_step": 1, "output_router_logits": False,
                                         "router_aux_loss_coef": 0.001}),
            ("qwen2.5-7b", {"num_key_value_heads": 4}, {"hidden_size": 3584, "num_attention_heads": 28,
                                                        "num_key_value_heads": 4, "use_mrope": False}),
            ("hunyuan-4b", BY_DEPTH, {"norm_type": "rms", "use_rotary_pos_emb": True}),
            ("qwen2.5-vl-3b-eagle3-mrope", QWEN3_ROPE, MROPE | {"image_token_id": 151655, "modal_type": "VLM"}),
            ("qwen3-vl-4b-eagle3-mrope", {"rope_parameters": {"rope_theta": 5000000, "rope_type": "default"}},
             INTERLEAVED | {"modal_type": "VLM"}),
        )
    ),
    angelslim("cosyvoice3-llm-eagle3", "is no DSpark draft", architectures=["CosyVoice3Eagle3LlamaForCausalLM"]),
    modelopt(f"{_EXPORT}: llama", {"target_layer_ids": [1, 15, 28], "embedding_in_all_layers": False}),
    modelopt("modelopt_recipes/general/speculative_decoding/eagle3.yaml", {"rope_parameters": {
        "rope_theta": 10000, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}},
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}),
    modelopt("examples/speculative_decoding/recipes/CR2_eagle_config.json", {"draft_vocab_size": 32000},
             rope_theta=150000, rope_scaling={
                 "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 8192,
                 "rope_type": "yarn", "truncate": False}),
    modelopt("tests/examples/speculative_decoding/test_eagle.py", {"draft_vocab_size": None, "head_dim": 64},
             vocab_size=32000, head_dim=64, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64),
    modelopt(f"{_EXPORT}: several layers", {"num_hidden_layers": 2, "embedding_in_all_layers": False},
             num_hidden_layers=2),
    modelopt(f"{_EXPORT}: EAGLE-1", "use_aux_hidden_state is False", {"use_aux_hidden_state": False}),
    modelopt(f"{_EXPORT}: no last norm", "use_last_layernorm is False", {"use_last_layernorm": False}),
    modelopt(f"{_EXPORT}: MTP", "use_mtp_layernorm is True", {"use_mtp_layernorm": True}),
    modelopt(f"{_EXPORT}: EagleMedusa", "parallel_draft_step is 4", {"parallel_draft_step": 4}),
    modelopt(f"{_EXPORT}: hf_quant_config", "quanti", quantization_config={"quant_method": "modelopt"}),
    modelopt(f"{_EXPORT}: kimik2", "is no DSpark draft", architectures=["Eagle3DeepseekV2ForCausalLM"],
             model_type="kimi_k2"),
    speculators("examples/train/eagle3_qwen3_8b_sharegpt_online_5k.sh", {"qk_norm": True, "block_size": 3}),
    speculators("examples/train/eagle3_llama3_8b_ultrachat_offline_5k.sh", {"qk_norm": False, "norm_output": True},
                "llama", norm_before_fc=True, norm_output=True),
    speculators("examples/convert/eagle3/apply_eagle3_eagle.sh", {"norm_before_residual": False}, "llama"),
    speculators("examples/convert/eagle3/apply_eagle3_llama4_maverick.sh", {"norm_before_residual": True}, "llama",
                norm_before_residual=True),
    speculators(f"{_SETTINGS}: eagle_aux_hidden_state_layer_ids", {"target_layer_ids": [1, 17, 32]},
                eagle_aux_hidden_state_layer_ids=[2, 18, 33]),
    speculators(
        "examples/train/peagle_qwen3_8b_sharegpt_online_5k.sh", AS_PEAGLE | {"block_size": 3, "qk_norm": True},
        layers={"num_hidden_layers": 4}, speculators_model_type="peagle", architectures=["PEagleSpeculator"],
        embed_requires_grad=True, mask_token_id=151669, **PEAGLE_DEPTHS,
    ),
    speculators("src/speculators/models/peagle/config.py: mask_token_id", "lacks 'mask_token_id'",
                speculators_model_type="peagle", mask_token_id=None),
    peagle("Automodel", "examples/speculative/p-eagle/qwen_peagle_perfectblend.yaml", "LlamaEagle3DraftModel",
           AS_PEAGLE | {"block_size": 8}, parallel_drafting=True, mask_token_id=151669, **PEAGLE_DEPTHS),
    peagle("SpecForge", "configs/qwen3-8b-peagle.json", "PEagleDraftModel", "does not say which: add mask_token_id"),
    peagle("vLLM", "vllm/v1/spec_decode/llm_base_proposer.py: ptd_token_id", "LlamaForCausalLM", ptd_token_id=151669),
    peagle("vLLM", "vllm/transformers_utils/configs/speculators/algos.py: pard_token", "PeagleLlamaForCausalLM",
           pard_token=151669),
    speculators(f"{_SETTINGS}: fc_norm", {"fc_norm": True}, fc_norm=True),
    speculators(f"{_SETTINGS}: both norms", "norm_before_fc must not be True", fc_norm=True, norm_before_fc=True),
    speculators(f"{_SETTINGS}: whole vocabulary", {"draft_vocab_size": None}, draft_vocab_size=151936),
    speculators(f"{_SETTINGS}: embed_requires_grad", {"own_embedding": False}, embed_requires_grad=True),
    speculators("src/speculators/models/eagle3/core.py: sliding_window", "attends to its whole context",
                layers={"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}),
    speculators("src/speculators/models/eagle3/model_definitions.py", "model_type is 'gpt_oss'", "gpt_oss"),
)  # fmt: skip
