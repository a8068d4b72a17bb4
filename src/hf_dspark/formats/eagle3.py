"""EAGLE-3 drafts as EAGLE, SpecForge, SGLang, Model-Optimizer, AngelSlim and Automodel write them, flat, and as
speculators does; and P-EAGLE drafts, which draft a block in one pass.

Flat ones are alike but for names: the first layer is `midlayer` or `layers.0`, and all may follow `model.`. None
says how many tokens to draft, most do not say which layers they tap. Those that do count outputs of layers from 0 on,
speculators and vLLM from the embedding on.
"""

from dataclasses import replace
from typing import Any

from . import fields
from .fields import OMIT, ONLY_QWEN3_LAYERS, WINDOW_PLACES, Field, Format, Source, architectures, geometry, look_up
from .fields import SPECULATORS_LAYERS as _LAYERS

USUAL_STEPS = 7  # of the projects' trainings, and so the number of draft tokens where a checkpoint does not say it
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel", "Qwen2ForCausalLMEagle3",
    "Qwen3ForCausalLMEagle3", "Eagle3Qwen2ForCausalLM", "Eagle3Qwen3ForCausalLM",
)  # fmt: skip
_PARALLEL_ARCHITECTURES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")
_PLAIN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FULL_ATTENTION = {
    "an Eagle3 draft attends to its whole context, here layer_types says otherwise": fields.slides_there
}
_FIRST_LAYER = (
    *(f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")),
    *(f"mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")),
    *(f"{part}.weight" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)


def _is_flat(config: Source) -> bool:
    names = architectures(config)
    plain = any(name in _PLAIN_ARCHITECTURES for name in names) and "draft_vocab_size" in config
    known = any(name in (*_ARCHITECTURES, *_PARALLEL_ARCHITECTURES) for name in names)
    return (plain or known) and "speculators_model_type" not in config


_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")  # as Automodel, Amazon and vLLM name it


def _is_parallel(config: Source) -> bool:
    named = any(name in _PARALLEL_ARCHITECTURES for name in architectures(config))
    return named or bool(config.get("parallel_drafting")) or look_up(config, *_MASK_TOKENS[1:]) is not None


def _narrow(prefix: str = "") -> tuple[Field, ...]:
    """Fields of drafts whose size is not the target's, for which reason they cannot borrow anything."""
    places = (prefix + "hidden_size", "target_hidden_size")

    def target_size(config: Source) -> Any:
        own, size = (look_up(config, place) for place in places)
        return None if size == own else size

    return (
        Field(
            "target_hidden_size",
            read=target_size,
            reads=places[1:],
            write=lambda c, target: OMIT if c.target_hidden_size is None else c.target_hidden_size,
        ),
        *(
            Field(name, read=lambda c: target_size(c) is not None, reads=places[1:], write=OMIT)
            for name in ("own_embedding", "own_lm_head")
        ),
    )


def _taps(outputs: tuple[str, ...], counted_from_embedding: str, config: Source) -> list[int] | None:
    """Return which layers' outputs are read, in the order of the layers; `None`: by the depth of the target."""
    ids, others = fields.layer_ids(config, *outputs), fields.layer_ids(config, counted_from_embedding)
    others = others and [tap - 1 for tap in others]
    if ids and others and sorted(ids) != sorted(others):
        raise ValueError(
            f"config.json: {counted_from_embedding!r} counts layers from the embedding on and means {sorted(others)}, "
            f"but {outputs[0]!r} is {ids!r}"
        )
    return sorted(ids or others) if ids or others else None


# What the layers of all have in common. Drafts of several layers give the embedding to the first one alone.
_COMMON = {name: value for name, value in fields.QWEN3_EMBEDDING.items() if name != "mlp_bias"} | {"mtp": False}
_LAYERS_AND_NORMS = (
    Field("embedding_in_all_layers", read=lambda c: False, write=OMIT),
    *(Field(name, default=False) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")),
)
_EMBEDDING_ONCE = {
    "its first layer alone reads the embedded token, here all of them do": lambda c: (
        c.embedding_in_all_layers and c.num_hidden_layers > 1
    )
}
_FLAT_TAPS = (
    "eagle_config.eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids", "target_layer_ids",
    "eagle_config.target_hidden_layer_ids", "target_hidden_layer_ids",
)  # fmt: skip
_VLLM_TAPS = "eagle_aux_hidden_state_layer_ids"


FLAT = Format(
    name="sglang",
    model_type="dspark_eagle3",
    recognise=_is_flat,
    fields=(
        *geometry(without=("num_key_value_heads",)),
        Field("num_key_value_heads", read=lambda c: look_up(c, "num_key_value_heads") or c["num_attention_heads"]),
        Field("mlp_bias", default=False),
        *_narrow(),
        Field(
            "draft_vocab_size",
            read=lambda c: None if c.get("draft_vocab_size") == c.get("vocab_size") else c.get("draft_vocab_size"),
            write=lambda c, target: c.draft_vocab_size or OMIT,
        ),
        Field("qk_norm", default=False, write=OMIT),
        *_LAYERS_AND_NORMS,
        Field("block_size", "ttt_length", USUAL_STEPS, also=("num_depths",)),
        Field(
            "mask_token_id",
            read=lambda c: look_up(c, *_MASK_TOKENS) if _is_parallel(c) else None,
            reads=_MASK_TOKENS,
            write=OMIT,
        ),
        Field(
            "rope_parameters",
            read=lambda c: fields.rope(c, layer_type="sliding_attention", theta=10000.0),  # Llama's
            reads=fields.ROPE_PLACES,
            write=OMIT,
        ),
        Field(
            "target_layer_ids",
            read=lambda c: _taps(_FLAT_TAPS, _VLLM_TAPS, c),
            reads=(*_FLAT_TAPS, _VLLM_TAPS),
            write=OMIT,
        ),
        Field("num_target_layers", read=lambda c: None, write=OMIT),
        Field("target_model_type", default=None),
    ),
    writes={
        "eagle_config": lambda c, target: (
            {_VLLM_TAPS: c.target_layer_ids, "use_aux_hidden_state": True} if c.target_layer_ids is not None else OMIT
        ),
        "rope_theta": lambda c, target: c.rope_parameters["rope_theta"],
        "rope_scaling": fields.old_rope_scaling,
    },
    constants=_COMMON,
    base=lambda target: {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    accepts={
        "eagle_config.use_aux_hidden_state": (None, True),
        "eagle_config.use_last_layernorm": (None, True),
        "eagle_config.use_input_layernorm_in_first_layer": (None, True),
        "eagle_config.use_mtp_layernorm": (None, False),
        "eagle_config.next_layer_regular": (None, True),
        "eagle_config.parallel_draft_step": (None, 0, 1),
        "early_stop_method": (None,),
        "final_logit_softcapping": (None,),
        "is_causal": (None, True),
        "logit_scale": (None, 1.0),
        "norm_type": (None, "rms"),
        "parallel_drafting": (None, False, True),
        "position_embedding_type": (None, "rope"),
        "quantization_config": (None,),
        "use_rotary_pos_emb": (None, True),
    },
    unreadable={
        **_FULL_ATTENTION,
        "layers of the model_type 'llama4_text' have an MLP of another size, intermediate_size_mlp": lambda c: (
            c.get("model_type") == "llama4_text"
        ),
        "num_aux_hidden_states is not the number of tapped layers, which is three unless they are named": lambda c: (
            c.get("num_aux_hidden_states") not in (None, len(_taps(_FLAT_TAPS, _VLLM_TAPS, c) or (1, 2, 3)))
        ),
        "P-EAGLE drafts a block in one pass from a mask token, and config.json does not say which: add mask_token_id, "
        "as it was in training (of SpecForge, the tokenizer's, or the first id after its tokens)": lambda c: (
            _is_parallel(c) and look_up(c, *_MASK_TOKENS) is None
        ),
    },
    refusals={
        **ONLY_QWEN3_LAYERS,
        "it has one layer: use the format 'speculators'": lambda c: c.num_hidden_layers > 1,
        "its layers are those of Llama, which do not normalise queries and keys: use the format "
        "'speculators'": lambda c: c.qk_norm,
        "it taps three layers": lambda c: c.num_taps != 3,
        "its drafts propose one token a pass: use the format 'speculators'": lambda c: c.mask_token_id is not None,
    },
    renamed={f"layers.0.{name}": f"midlayer.{name}" for name in _FIRST_LAYER},
    renames=((r"model\.", ""), (r"midlayer\.", "layers.0.")),
    evidence={
        "qk_norm": lambda shapes: "layers.0.self_attn.q_norm.weight" in shapes,
        "parallel_drafting": lambda shapes: "mask_hidden" in shapes,
    },
    holds_own_weights=True,
    own=("eagle_config",),
    harmless=(*WINDOW_PLACES, "eagle_config.parallel_draft_heads_num_layers", "num_aux_hidden_states"),
    limits={
        "sglang": {
            "its layers have no norm before the residual": lambda c: c.norm_before_residual,
            "it has no single norm before fc": lambda c: c.norm_before_fc,
            "its projections have no biases": lambda c: c.attention_bias,
            "it drafts with the target's embedding, and this draft has its own": lambda c: (
                c.own_embedding and c.target_hidden_size is None
            ),
        }
    },
    engines=("sglang",),
)


# ---- speculators


def _full_attention_base(kind: str, model: str) -> dict[str, Any]:
    layers = fields.QWEN3_BASE | {"use_sliding_window": False, "sliding_window": None}
    return fields.speculators_base(kind, model) | {"transformer_layer_config": layers}


SPECULATORS = Format(
    name="speculators",
    model_type="dspark_eagle3",
    recognise=lambda c: c.get("speculators_model_type") == "eagle3",
    fields=(
        *geometry(_LAYERS),
        Field("mlp_bias", _LAYERS + "mlp_bias", False),
        *_narrow(_LAYERS),
        Field("draft_vocab_size", read=fields.speculators_vocab, write=lambda c, target: c.num_draft_tokens),
        Field(
            "qk_norm",
            _LAYERS + "model_type",
            read=lambda c: look_up(c, _LAYERS + "model_type", default="qwen3") == "qwen3",
            write=lambda c, target: "qwen3" if c.qk_norm else "llama",
        ),
        *_LAYERS_AND_NORMS,
        Field(
            "block_size",
            read=lambda c: USUAL_STEPS if fields.proposed_tokens(c) is None else fields.proposed_tokens(c),
            reads=("speculators_config",),
            write=OMIT,
        ),
        fields.SPECULATORS_ROPE,
        Field(
            "target_layer_ids",
            _VLLM_TAPS,
            read=lambda c: _taps((), _VLLM_TAPS, c),
            write=lambda c, target: c.target_layer_ids and [tap + 1 for tap in c.target_layer_ids],
        ),
        Field("num_target_layers", read=lambda c: None, write=OMIT),
        Field("target_model_type", read=lambda c: None, write=OMIT),
    ),
    writes={
        **fields.SPECULATORS_WRITES,
        _LAYERS + "layer_types": lambda c, target: ["full_attention"] * c.num_hidden_layers if c.qk_norm else OMIT,
    },
    constants=_COMMON | {"mask_token_id": None},
    base=lambda target: _full_attention_base("eagle3", "Eagle3Speculator") | {"embed_requires_grad": False},
    accepts={"speculators_model_type": ("eagle3",), _LAYERS + "model_type": (None, "qwen3", "llama")},
    unreadable={reason: lambda c: fields.slides_there(c, _LAYERS) for reason in _FULL_ATTENTION},
    refusals={**ONLY_QWEN3_LAYERS, **_EMBEDDING_ONCE},
    copies=("lm_head.weight",),
    holds_own_weights=True,
    names_target=True,
    own=("",),
    layers=("transformer_layer_config",),
    harmless=(
        "speculators_version", "has_no_defaults_at_init", "embed_requires_grad", *(_LAYERS + p for p in WINDOW_PLACES),
    ),
    limits={},
    engines=("speculators", "vllm"),
)  # fmt: skip

PEAGLE = replace(
    SPECULATORS,
    recognise=lambda c: c.get("speculators_model_type") == "peagle",
    fields=(*SPECULATORS.fields, Field("mask_token_id")),
    constants=_COMMON,
    base=lambda target: _full_attention_base("peagle", "PEagleSpeculator") | {"embed_requires_grad": True},
    accepts=SPECULATORS.accepts | {"speculators_model_type": ("peagle",)},
    refusals=SPECULATORS.refusals
    | {"its drafts propose a block in one pass, from a mask_token_id": lambda c: c.is_autoregressive},
    harmless=(*SPECULATORS.harmless, "num_depths", "down_sample_ratio", "down_sample_ratio_min"),
)
