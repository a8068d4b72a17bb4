"""The DSpark drafts that DeepSeek-V4 targets carry in their own repositories, as tensors `mtp.0.*`, `mtp.1.*`, ....

Names and numbers are those of DeepSeek-V4-Flash-DSpark, as its own code and the engines that serve it read them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from .fields import COMMON, Field, Format, Source, geometry, integer, look_up

_STAGE = r"mtp(?:_dspark)?\.(\d+)\."
_EXPERT = re.compile(rf"({_STAGE}ffn\.experts)\.(\d+)\.(w[123])\.(weight|scale)")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LAYER = r"(layers\.\d+\.)"
# How names within a layer begin, and begin with us, one after the other.
_IN_LAYERS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", r"attn\.": "self_attn.", r"ffn\.": "mlp.",
    "hc_(attn|ffn)_": r"\2_hc.", r"self_attn\.attn_sink": "self_attn.attention_sink_bias",
    r"self_attn\.q_norm": "self_attn.q_a_norm", r"self_attn\.wkv": "self_attn.kv_proj",
    r"self_attn\.w([qo]_[ab])": r"self_attn.\2_proj", r"mlp\.gate\.bias": "mlp.gate.e_score_correction_bias",
    r"(mlp\.shared_experts\.)w1": r"\2gate_proj", r"(mlp\.shared_experts\.)w2": r"\2down_proj",
    r"(mlp\.shared_experts\.)w3": r"\2up_proj",
}  # fmt: skip


def is_bundled(config: Source) -> bool:
    """Tell whether a `config.json` is that of a target which carries a draft."""
    return config.get("model_type") == "deepseek_v4" and config.get("dspark_block_size") is not None


def is_of_draft(name: str) -> bool:
    return re.match(_STAGE, name) is not None


def bundled_parts(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return of which tensors weights are made: the experts of a layer are one, and scales belong to weights."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        weight = f"{name.removesuffix('scale')}weight"
        if match := _EXPERT.fullmatch(name):
            kind = "down_proj" if match[4] == "w2" else "gate_up_proj"
            found[f"{match[1]}.{kind}"][f"{match[3]}.{match[4]}.{match[5]}"] = name
        elif name.endswith(".scale") and weight in names:
            found[weight] = {"weight": weight, "scale": name}
    return dict(found)


def bundled_shape(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the shape that [`bundled_weight`] has, by types and shapes of its parts: a byte is two of FP4."""
    shapes = {
        part: (*shape[:-1], shape[-1] * (2 if dtype in ("I8", "U8") else 1))
        for part, (dtype, shape) in parts.items()
        if part.endswith("weight") and shape
    }
    if "weight" in parts or not shapes:
        return shapes.get("weight", ())
    experts = {part.split(".")[0] for part in shapes}
    first = [shape for part, shape in shapes.items() if part.split(".")[0] == min(experts)]
    return (len(experts), sum(shape[0] for shape in first), first[0][-1])


def bundled_weight(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight, whose scaled values bfloat16 holds exactly: those of `w1` are before those of `w3`."""
    if "weight" in parts:
        return _values(parts["weight"], parts["scale"])
    numbers, kinds = (sorted({part.split(".")[place] for part in parts}) for place in (0, 1))
    if {*map(int, numbers)} != {*range(len(numbers))}:
        raise ValueError(f"experts are missing before the last of {len(numbers)}")
    experts = ([f"{number}.{kind}" for kind in kinds] for number in sorted(numbers, key=int))
    return torch.stack(
        [torch.cat([_values(parts[f"{one}.weight"], parts.get(f"{one}.scale")) for one in each]) for each in experts]
    )


def _values(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"a weight of {weight.dtype} has no scales: download the checkpoint again")
        return weight
    is_fp4 = weight.dtype in (torch.int8, torch.uint8)
    if is_fp4:  # the lower half of a byte comes first
        codes = weight.view(torch.uint8)
        table = torch.tensor([*_FP4, *(-value for value in _FP4)])
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]
    else:
        values = weight.float()
    rows, columns = (1, 32) if is_fp4 else (128, 128)
    expected = [-(-size // part) for size, part in zip(values.shape, (rows, columns), strict=True)]
    if list(scale.shape) != expected or not scale.is_floating_point():
        raise ValueError(
            f"scales {list(scale.shape)} of {scale.dtype} do not fit a weight {list(values.shape)}, which needs "
            f"{expected} floats, one for each {rows} x {columns} values"
        )
    scales = scale.float().repeat_interleave(rows, dim=0)[: len(values)]
    return (values * scales.repeat_interleave(columns, dim=1)[:, : values.shape[1]]).bfloat16()


def _num_stages(config: Source) -> int:
    """Return what the tensors tell, or without them how many layers follow the target's."""
    told, ratios = config.get("n_mtp_layers"), config.get("compress_ratios") or ()
    return len(ratios) - integer(config, "num_hidden_layers") if told is None else told


def _rope(config: Source) -> dict[str, Any]:
    """Return the rotary parameters of layers without compression, which are those of the draft."""
    main = look_up(config, "rope_parameters.main") or {}
    part = look_up(config, "qk_rope_head_dim")
    part = main.get("partial_rotary_factor", 64 / 512) if part is None else part / look_up(config, "head_dim")
    theta = main.get("rope_theta", look_up(config, "rope_theta", default=10000.0))
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}


BUNDLED = Format(
    name="deepseek_v4",
    recognise=is_bundled,
    fields=(
        *geometry(without=("intermediate_size", "num_hidden_layers", "attention_output_bias", "attention_bias")),
        Field("intermediate_size", "moe_intermediate_size"),
        Field("num_hidden_layers", "n_mtp_layers", read=_num_stages),
        Field("num_target_layers", "num_hidden_layers"),
        Field("target_model_type", "model_type"),
        Field("rope_parameters", read=_rope, reads=("rope_parameters", "rope_theta", "qk_rope_head_dim")),
        Field("block_size", "dspark_block_size"),
        Field("mask_token_id", "dspark_noise_token_id"),
        Field("target_layer_ids", "dspark_target_layer_ids"),
        Field("markov_rank", "dspark_markov_rank"),
        Field("layer_types", read=lambda c: ["sliding_attention"] * min(_num_stages(c), 99), reads=("n_mtp_layers",)),
        Field("num_experts", "n_routed_experts"),
        *map(Field, ("sliding_window", "num_experts_per_tok", "moe_intermediate_size", "hc_mult")),
        *map(Field, ("q_lora_rank", "o_lora_rank", "o_groups")),
    ),
    constants=COMMON
    | {"attention_k_eq_v": True, "attention_sinks": True, "rope_interleaved": True, "sliding_from_anchor": True}
    | {"markov_head_type": "vanilla", "v4_heads": True, "embedding_norm": True},
    engines=("vllm", "sglang"),
    base=lambda target: {},
    # Of these, nothing here computes other values than those of transformers' layers.
    accepts={
        "scoring_func": (None, "sqrtsoftplus"),
        "swiglu_limit": (None, 10),
        "routed_scaling_factor": (None, 1.5),
        "norm_topk_prob": (None, True),
        "n_shared_experts": (None, 1),
        "hc_sinkhorn_iters": (None, 20),
        "hc_eps": (None, 1e-6),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "dspark_markov_head_type": (None, "vanilla"),
        "dspark_enable_confidence_head": (None, True),
        "dspark_confidence_head_with_markov": (None, True),
    },
    renames=(
        (rf"{_STAGE}main_proj\.", "fc."),
        (rf"{_STAGE}main_norm\.", "hidden_norm."),
        (rf"{_STAGE}norm\.", "norm."),
        (rf"{_STAGE}hc_head_(fn|base|scale)$", r"hc_head.hc_\2"),
        (rf"{_STAGE}markov_head\.(markov_w1|embed)\.", "markov_head.markov_w1."),
        (rf"{_STAGE}markov_head\.(markov_w2|head)\.", "markov_head.markov_w2."),
        (rf"{_STAGE}confidence_head\.", "confidence_head."),
        (_STAGE, r"layers.\1."),
        *((_LAYER + theirs, rf"\1{ours}") for theirs, ours in _IN_LAYERS.items()),
    ),
    evidence={
        "num_hidden_layers": lambda shapes: len({name.split(".")[1] for name in shapes if name.startswith("layers.")}),
    },
    layers=(),
)
