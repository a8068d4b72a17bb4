"""Tiny targets of all families that transformers calls stateful, with random weights and layers of both kinds, and
untrained drafts for them."""

import dataclasses
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_dspark import DSparkConfig, DSparkDraftModel

# Layers of older versions write into the caches' tensors themselves.
HAVE_PROTOCOL = hasattr(Cache, "get_conv_state")
# Sizes that configurations share; a configuration takes those that it knows.
SMALL = {
    "vocab_size": 96, "unpadded_vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "tie_word_embeddings": False, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_local_experts": 4, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "chunk_size": 8, "mamba_chunk_size": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4, "use_mamba_kernels": False, "initializer_range": 0.2,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
QWEN = MIXED | {"decoder_sparse_step": 1}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
# By family: what its text configuration needs besides.
TEXT = {
    "bailing_hybrid": {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "layer_group_size": 2},
    "bamba": {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1, 3], "mamba_expand": 2,
    },
    "falcon_h1": {
        "num_hidden_layers": 3, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    },
    "falcon_mamba": {},
    "glm5_next_text": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 8, "index_kpool": 4,
        "index_head_dim": 16, "index_n_heads": 16, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
        "shared_intermediate_size": 64, "position_embedding_type": "rope",
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "kimi_linear": MIXED | {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 1, "mamba_n_groups": 1,
    },
    "olmo_hybrid": MIXED | {"linear_num_key_heads": 4},
    "qwen3_5_text": MIXED,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN,
    "recurrent_gemma": {
        "lru_width": 64, "attention_window_size": 32, "num_hidden_layers": 6, "w_init_variance_scale": 1.0,
    },
    "zamba": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "n_mamba_heads": 2, "attn_layer_period": 3,
        "attn_layer_offset": 2, "mamba_dt_rank": 4, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "attention_head_dim": 32,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

EAR = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
EYE = EAR | {"insert_layer_id": 0, "image_size": 32, "patch_size": 16}
# Families around the text model of another one: that one, and what their configuration needs besides.
AROUND = {
    "glm5_next": ("glm5_next_text", {"vision_config": VISION}),
    "minicpm_ocr": ("qwen3_5_text", {"vision_config": EYE, "insert_layer_id": 0}),
    "minicpmv4_6": ("qwen3_5_text", {"vision_config": EYE, "insert_layer_id": 0}),
    "minicpmv4_7": ("qwen3_5_text", {"vision_config": EYE, "insert_layer_id": 0}),
    "nemotron3_5_transcribe": (
        "nemotron_h",
        {
            "audio_config": {"asr_config": EAR, "diarization_config": EAR},
            "word_timestamp_config": EAR | {"vocab_size": 96, "blank_token_id": 3},
            "audio_token_id": 95,
        },
    ),
    "nemotron_h_omni": (
        "nemotron_h",
        {
            "vision_config": EAR | {"video_temporal_patch_size": 2},
            "audio_config": EAR | {"projection_hidden_size": 16, "projection_bias": False},
            "projector_hidden_size": 16,
            "vision_hidden_size": 16,
        },
    ),
}
# What transformers calls stateful and cannot be kept row by row, with what a configuration needs.
REFUSED = {
    "deepseek_v4": {},
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_heads": 4, "chunkwise_kernel": "chunkwise--native_autograd", "chunk_size": 16},
}  # fmt: skip


@cache
def sources() -> dict[str, Path]:
    """Return the modelling files of the installed transformers, by family."""
    paths = {path.name: path / f"modeling_{path.name}.py" for path in Path(transformers.models.__path__[0]).iterdir()}
    return {family: path for family, path in sorted(paths.items()) if path.exists()}


def stateful_families() -> list[str]:
    return [family for family, path in sources().items() if "_is_stateful = True" in path.read_text()]


def known(family: str) -> bool:
    """Tell whether the installed transformers has a family."""
    return family.removesuffix("_text") in sources()


def _generating_classes(family: str) -> list[type[PreTrainedModel]]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    return [each for each in own if inspect.isclass(each) and issubclass(each, GenerationMixin)]


def build(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a tiny target of a family, in float32; `options` are of its text configuration."""
    classes = _generating_classes(family.removesuffix("_text"))
    text, others = AROUND.get(family, (family, None))
    sizes = SMALL | (TEXT | REFUSED).get(text, {}) | options
    if others is None:
        kinds = (family, f"{family}_text")
        model_class = next(each for each in classes if each.config_class.model_type in kinds)
        config = model_class.config_class(**_of(model_class.config_class, sizes))
    else:
        model_class = classes[-1]
        config = model_class.config_class(text_config=sizes | {"model_type": text}, **others)
    torch.manual_seed(seed)
    target = model_class(config).eval()
    # Else some families say one token again and again.
    torch.nn.init.normal_(target.get_input_embeddings().weight)
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = 0, None
    return target


def make_own_draft(target: PreTrainedModel, **facts: Any) -> DSparkDraftModel:
    """Return an untrained draft for a target of any type; `facts` are of its configuration."""
    torch.manual_seed(1)
    config = DSparkConfig.from_target(target, **{"markov_rank": 8, "block_size": 4} | facts)
    return DSparkDraftModel(config).eval()


# Names that other families have for sizes, and what they need besides.
OTHER_SIZES = {
    "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "d_model": 64, "num_layers": 4, "num_heads": 4,
    "n_layers": 4, "n_heads": 4, "emb_dim": 64, "max_seq_len": 256, "ffn_dim": 64, "ffn_hidden_size": 64,
    "word_embed_proj_dim": 64, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "expert_ffn_hidden_size": 32,
    "n_shared_experts": 1, "moe_topk": 2, "zero_expert_num": 2, "is_decoder": True, "rotary_dim": 8,
    "qk_rope_head_dim": 16, "laurel_rank": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96, "use_cache": True, "sliding_window": 16, "attention_window_size": 16,
}  # fmt: skip
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# What the small configuration of a type needs besides the sizes that all share, its parts included.
NEEDED: dict[str, dict[str, Any]] = TEXT | REFUSED | {
    # Without the first three, which its tests in transformers set, too, plain generate() fails.
    "blt": {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "encoder_hash_byte_group_vocab": 64,
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": SHARED_KEYS | {"rope_parameters": {"sliding_attention": ROTATED, "full_attention": None}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "emu3": {"vocabulary_map": {"<image>": 9}},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16}},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 96, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2,
        "n_layers_per_attn_res_block": 1,
    },
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "qwen3_5": {"text_config": MIXED},
    "qwen3_5_moe": {"text_config": QWEN},
    "qwen4_exp": {"text_config": REFUSED["qwen4_exp"]},
    "qwen4_exp_text": REFUSED["qwen4_exp"],
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 32)},
    "xlstm": REFUSED["xlstm"] | {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
# What no small target can be made of, and why.
UNBUILT = {
    "gemma3n": "its vision tower takes the timm library; gemma3n_text is the same text model",
    "gemma4_assistant": "a drafter of Gemma 4, which reads its target's keys and values: it decodes nothing alone",
    "gemma4_unified_assistant": "a drafter of Gemma 4, as gemma4_assistant",
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), "a step has a token of each of four audio codebooks, not of text"
    ),
}


def build_any(model_type: str) -> PreTrainedModel:
    """Return a tiny causal LM of any type that transformers knows; fails as its configuration or model does."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    if model_type in UNBUILT:
        raise ValueError(UNBUILT[model_type])
    config = config_class(**_small(config_class, NEEDED.get(model_type, {})))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if model.num_parameters() > 10**8:
        raise ValueError("its small configuration is not small")
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = 0, None
    return target


def _small(config_class: type[PreTrainedConfig], needed: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration takes, those of its parts included."""
    names = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: size for name, size in (SMALL | OTHER_SIZES).items() if name in names}
    if "num_kv_shared_layers" in names:
        sizes |= SHARED_KEYS
    if "kv_lora_rank" in names:
        sizes |= {"num_key_value_heads": 4}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        part = needed.get(name, {})
        if part_class is transformers.AutoConfig and "model_type" in part:
            part_class = transformers.CONFIG_MAPPING[part["model_type"]]
        known = part_class is not transformers.AutoConfig
        sizes[name] = _small(part_class, part) if known else dict(part)
    return sizes | {
        name: size for name, size in needed.items() if name not in sizes or not isinstance(sizes[name], dict)
    }


def _of(config_class: type[PreTrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: size for name, size in sizes.items() if name in names}
