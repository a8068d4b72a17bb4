"""The checkpoint formats of other projects, as tables: how each is recognised, what its fields mean here, and what
it cannot hold.

A new format is a new entry, not new code. Translates configurations as dictionaries; knows nothing of files, of the
Hub, of tensors or of how a draft computes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from .rope import full_attention_rope
from .rows import (
    HEADS,
    NO_FILL_IN,
    NO_PRUNING,
    NO_RUN_SETTINGS,
    NO_SINKS,
    NO_WINDOW_FROM_ANCHOR,
    OMIT,
    ONLY_QWEN3_LAYERS,
    QWEN3_LAYERS,
    REQUIRED,
    TARGET_LAYERS,
    Field,
    Format,
    Refusal,
    TargetFacts,
    any_of,
    architectures,
    geometry,
    has_sliding,
    integer,
    integers,
    look_up,
    rope,
    slides,
)

# ---- DeepSpec


def _deepspec_window(config: dict[str, Any]) -> int | None:
    used = config.get("use_sliding_window", True) and has_sliding(config.get("layer_types"))
    return config.get("sliding_window") if used else None


_DEEPSPEC_QWEN3_BASE = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
    # DeepSpec's loader asks for it; a draft that is not trained on has no use for it.
    "num_anchors": 512,
}

_ANCHOR_WRITES = {"sample_from_anchor": lambda config, facts: config.sample_from_anchor}


# DeepSpec leaves out what says nothing of a draft without the head.
_DEEPSPEC_HEADS = (
    Field("markov_rank", default=0),
    Field("markov_head_type", default="vanilla", written=lambda c: c.markov_rank > 0),
    Field("enable_confidence_head"),
    Field(
        "confidence_head_with_markov", default=False, written=lambda c: c.markov_rank > 0 or c.enable_confidence_head
    ),
)


def _target_model_type(config: PreTrainedConfig, facts: TargetFacts | None) -> Any:
    return OMIT if config.target_model_type in (None, "qwen3") else config.target_model_type


DEEPSPEC_QWEN3 = Format(
    name="deepspec",
    model_type="dspark",
    recognise=lambda c: any(name.endswith("DSparkModel") for name in architectures(c))
    and not str(c.get("model_type")).startswith("gemma4"),
    fields=(*geometry(), *_DEEPSPEC_HEADS, *TARGET_LAYERS, Field("block_size"), Field("mask_token_id")),
    reads={
        "layer_types": lambda c: c.get("layer_types"),
        "sliding_window": _deepspec_window,
        "rope_parameters": lambda c: full_attention_rope(rope()(c)),
        "attention_output_bias": lambda c: c.get("attention_bias", False),
        "target_model_type": any_of("target_model_type", "model_type"),
        "sample_from_anchor": lambda c: c.get("sample_from_anchor", True),
    },
    writes={
        "layer_types": lambda config, facts: config.layer_types,
        "rope_parameters": lambda config, facts: config.rope_parameters,
        "target_model_type": _target_model_type,
        **_ANCHOR_WRITES,
    },
    constants=QWEN3_LAYERS | {"draft_vocab_size": None},
    base=lambda facts: _DEEPSPEC_QWEN3_BASE,
    unreadable=(
        Refusal(
            lambda c: c.get("sample_from_anchor", True) is not True,
            "sample_from_anchor is not true, but DeepSpec's blocks predict from the anchor's slot",
        ),
    ),
    refusals=(
        *ONLY_QWEN3_LAYERS, *NO_RUN_SETTINGS, NO_FILL_IN, NO_PRUNING, NO_SINKS,
        Refusal(slides, "DeepSpec's attention masks have no sliding windows: every layer would see everything"),
    ),
    copies=("embed_tokens.weight", "lm_head.weight"),
    engines=("deepspec", "llama.cpp", "vllm", "sglang"),
)  # fmt: skip

# Of Gemma 4's own configuration, what a draft of full-attention layers takes from elsewhere or must not inherit.
_GEMMA4_BASE = {
    "architectures": ["Gemma4DSparkModel"],
    "tie_word_embeddings": False,
    "num_anchors": 512,
}
_GEMMA4_DROPPED = ("architectures", "dtype", "per_layer_config", "transformers_version", "_name_or_path")


def _gemma4_base(facts: TargetFacts | None) -> dict[str, Any]:
    text = {} if facts is None else facts.text_config
    return {name: value for name, value in text.items() if name not in _GEMMA4_DROPPED} | _GEMMA4_BASE


# Where Gemma 4 keeps what holds for full-attention layers.
_GEMMA4_OWN = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
    "hidden_act": "hidden_activation",
}

DEEPSPEC_GEMMA4 = Format(
    name="deepspec",
    model_type="dspark",
    recognise=lambda c: any(name.endswith("DSparkModel") for name in architectures(c))
    and str(c.get("model_type")).startswith("gemma4"),
    fields=(
        *(row for row in geometry() if row.name not in _GEMMA4_OWN),
        *_DEEPSPEC_HEADS, *TARGET_LAYERS, Field("block_size"), Field("mask_token_id"), Field("layer_types"),
        Field("attention_k_eq_v", default=False), Field("final_logit_softcapping", default=None),
    ),
    reads={
        "head_dim": any_of("global_head_dim"),
        "num_key_value_heads": any_of("num_global_key_value_heads", "num_key_value_heads"),
        "hidden_act": any_of("hidden_activation"),
        "rope_parameters": lambda c: full_attention_rope(rope()(c)),
        "attention_output_bias": lambda c: c.get("attention_bias", False),
        "embedding_scale": lambda c: float(integer(c, "hidden_size")) ** 0.5,
        "target_model_type": any_of("model_type"),
    },
    writes={
        "global_head_dim": lambda config, facts: config.head_dim,
        "num_global_key_value_heads": lambda config, facts: config.num_key_value_heads,
        "hidden_activation": lambda config, facts: config.hidden_act,
        "target_model_type": lambda config, facts: facts.model_type.removesuffix("_text"),
        "target_text_model_type": lambda config, facts: facts.model_type,
        "rope_parameters": lambda config, facts: facts.text_config["rope_parameters"]
        | {"full_attention": config.rope_parameters},
        **_ANCHOR_WRITES,
    },
    constants={
        "qk_norm": True, "value_norm": True, "sandwich_norms": True, "layer_scalar": True, "attention_scaling": 1.0,
        "sliding_window": None, "logit_scale": 1.0, "mlp_bias": False, "sample_from_anchor": True,
        "draft_vocab_size": None, "attention_sinks": False,
    },
    base=_gemma4_base,
    unreadable=(
        Refusal(
            lambda c: has_sliding(c.get("layer_types")),
            "Gemma 4 drafts with mixed layer types have two head sizes in one model; only drafts whose layers are all "
            "full_attention are supported",
        ),
    ),
    refusals=(
        *NO_RUN_SETTINGS, NO_FILL_IN, NO_PRUNING, NO_SINKS,
        Refusal(
            lambda c: not (c.qk_norm and c.value_norm and c.layer_scalar and c.attention_scaling == 1.0)
            or abs(c.embedding_scale - c.hidden_size**0.5) > 1e-6,
            "its layers are those of Gemma 4, with all norms, layer scalars, attention scores that are not scaled and "
            "embedding rows scaled by the root of their size; this draft's differ",
        ),
        Refusal(slides, "Gemma 4 drafts with sliding layers have two head sizes in one model"),
        Refusal(lambda c: c.mlp_bias, "it has no biases in the MLPs"),
        Refusal(
            lambda c: c.attention_bias != c.attention_output_bias,
            "it has one flag for the biases of q, k, v and o; here they differ",
        ),
        Refusal(lambda c: c.logit_scale != 1.0, "it has no field for logit_scale"),
    ),
    copies=("embed_tokens.weight", "lm_head.weight"),
    engines=("deepspec",),
)  # fmt: skip

DEEPSPEC_EAGLE3 = Format(
    name="deepspec",
    model_type="dspark_eagle3",
    recognise=lambda c: any(name.endswith("Eagle3Model") for name in architectures(c)),
    fields=(*geometry(), *TARGET_LAYERS, Field("block_size", "ttt_length")),
    reads={
        "rope_parameters": lambda c: full_attention_rope(rope()(c)),
        "attention_output_bias": lambda c: c.get("attention_bias", False),
        "target_model_type": any_of("model_type"),
    },
    writes={
        "rope_parameters": lambda config, facts: config.rope_parameters,
        "layer_types": lambda config, facts: ["full_attention"] * config.num_hidden_layers,
        "draft_num_hidden_layers": lambda config, facts: config.num_hidden_layers,
        "target_model_name_or_path": lambda config, facts: None if facts is None else facts.name_or_path,
    },
    constants={"embedding_scale": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None, "mlp_bias": False},
    # DeepSpec's loader asks for step_loss_decay, which weights its training loss; 0.8 is its default.
    base=lambda facts: {
        "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "tie_word_embeddings": False,
        "max_window_layers": 28, "sliding_window": None, "use_cache": True, "use_sliding_window": False,
        "step_loss_decay": 0.8,
    },
    unreadable=(
        Refusal(lambda c: c.get("model_type") != "qwen3", "DeepSpec's Eagle3 drafts are supported for Qwen3 targets"),
        Refusal(
            lambda c: has_sliding(c.get("layer_types")),
            "an Eagle3 draft attends to its whole context, here layer_types says otherwise: train one with "
            "full_attention layers",
        ),
    ),
    refusals=(*ONLY_QWEN3_LAYERS, *NO_RUN_SETTINGS),
    copies=("embed_tokens.weight", "lm_head.weight"),
    engines=("deepspec",),
)  # fmt: skip


# ---- speculators


def _speculators_fill_in(config: dict[str, Any]) -> bool:
    anchored = look_up(config, "sample_from_anchor", None)
    if not isinstance(anchored, bool):
        raise ValueError(
            "config.json lacks 'sample_from_anchor', and it cannot be guessed: true means that block slot k predicts "
            "the token behind its own and block_size is the number of draft tokens, false that the anchor's slot "
            "predicts nothing, slot k predicts the token in its own place, and block_size is one more. Say which was "
            "trained: convert_checkpoint(..., sample_from_anchor=...), or "
            "config=DSparkConfig.from_pretrained(..., sample_from_anchor=...)"
        )
    return not anchored


def _speculators_vocab(config: dict[str, Any]) -> int | None:
    size = integer(config, "draft_vocab_size", None)
    return None if size == look_up(config, "transformer_layer_config.vocab_size") else size


def _speculators_window(config: dict[str, Any]) -> int | None:
    layer_types = look_up(config, "transformer_layer_config.layer_types", None)
    if not has_sliding(layer_types):
        return None
    return integer(config, "transformer_layer_config.sliding_window")


def _verifier(config: PreTrainedConfig, facts: TargetFacts | None) -> dict[str, Any]:
    return {
        "architectures": None if facts is None else facts.architectures,
        "name_or_path": None if facts is None else facts.name_or_path,
    }


_SPECULATORS_HEAD_DEFAULTS = (
    Field("markov_rank", default=256),
    Field("markov_head_type", default="vanilla"),
    Field("enable_confidence_head", default=True),
    Field("confidence_head_with_markov", default=True),
)

SPECULATORS = Format(
    name="speculators",
    model_type="dspark",
    recognise=lambda c: "speculators_model_type" in c,
    fields=(*geometry("transformer_layer_config."), *_SPECULATORS_HEAD_DEFAULTS, Field("mask_token_id")),
    reads={
        "layer_types": lambda c: look_up(c, "transformer_layer_config.layer_types", None),
        "sliding_window": _speculators_window,
        "causal_sliding": lambda c: has_sliding(look_up(c, "transformer_layer_config.layer_types", None))
        and not look_up(c, "sliding_window_non_causal", False),
        "sliding_from_anchor": lambda c: has_sliding(look_up(c, "transformer_layer_config.layer_types", None)),
        "rope_parameters": rope("transformer_layer_config."),
        "attention_output_bias": lambda c: look_up(c, "transformer_layer_config.attention_bias", False),
        "target_layer_ids": lambda c: [id_ - 1 for id_ in integers(c, "aux_hidden_state_layer_ids")],
        "sample_from_anchor": lambda c: not _speculators_fill_in(c),
        "block_size": lambda c: integer(c, "block_size") - _speculators_fill_in(c),
        "draft_vocab_size": _speculators_vocab,
    },
    writes={
        "transformer_layer_config.layer_types": lambda config, facts: config.layer_types,
        "transformer_layer_config.sliding_window": lambda config, facts: config.sliding_window
        if slides(config)
        else None,
        "transformer_layer_config.use_sliding_window": lambda config, facts: slides(config),
        "transformer_layer_config.rope_parameters": lambda config, facts: config.rope_parameters,
        "sliding_window_non_causal": lambda config, facts: slides(config) and not config.causal_sliding,
        "aux_hidden_state_layer_ids": lambda config, facts: [id_ + 1 for id_ in config.target_layer_ids],
        "block_size": lambda config, facts: config.num_slots,
        "draft_vocab_size": lambda config, facts: config.draft_vocab_size or config.vocab_size,
        "speculators_config.verifier": _verifier,
        "speculators_config.proposal_methods": lambda config, facts: [
            {
                "proposal_type": "greedy", "speculative_tokens": config.block_size,
                "accept_tolerance": 0.0, "verifier_accept_k": 1,
            }
        ],
        **_ANCHOR_WRITES,
    },
    constants=QWEN3_LAYERS,
    base=lambda facts: {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy"},
        "transformer_layer_config": {
            "model_type": "qwen3", "tie_word_embeddings": False, "use_cache": True, "max_window_layers": 28,
        },
    },
    unreadable=(
        Refusal(
            lambda c: c["speculators_model_type"] != "dspark",
            "speculators_model_type is not 'dspark': its other kinds of drafts have other heads",
        ),
        Refusal(
            lambda c: look_up(c, "transformer_layer_config.model_type", "qwen3") not in ("qwen3", "llama"),
            "transformer_layer_config.model_type is neither 'qwen3' nor 'llama'; speculators' DSpark layers take "
            "their sizes from one of these",
        ),
        Refusal(
            lambda c: look_up(c, "target_hidden_size", None)
            not in (None, look_up(c, "transformer_layer_config.hidden_size", None)),
            "target_hidden_size differs from the draft's hidden_size; a draft here has the target's width",
        ),
        Refusal(
            lambda c: bool(look_up(c, "topk_context", 0)),
            "topk_context is set: attention to a selection of the context is not implemented",
        ),
        Refusal(
            lambda c: look_up(c, "projector_type", "dflash") not in ("dflash", "dspark"),
            "projector_type names a head that is neither DFlash's nor DSpark's",
        ),
    ),
    refusals=(
        *ONLY_QWEN3_LAYERS, *NO_RUN_SETTINGS, NO_SINKS,
        Refusal(
            lambda c: slides(c) and not c.sliding_from_anchor,
            "its sliding windows count from the anchor for all slots of a block, this draft's from each slot",
        ),
    ),
    names_target=True,
    keeps_target_depth=False,
    engines=("speculators", "vllm", "sglang"),
)  # fmt: skip


# ---- SpecForge and SGLang


def _flat(name: str, default: Any = REQUIRED) -> Callable[[dict[str, Any]], Any]:
    """Read a field that stands at the top or in one of the nested objects that SpecForge has used."""
    return any_of(name, f"dspark_config.{name}", f"dflash_config.{name}", default=default)


def _is_dflash(config: dict[str, Any]) -> bool:
    """Whether a flat checkpoint is the original DFlash: no Markov head, and an anchor that predicts nothing."""
    named = look_up(config, "dflash_config.projector_type", None)
    return not _flat("markov_rank", 0)(config) and named in (None, "dflash")


def _flat_head(name: str, default: Any, without: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: without if _is_dflash(config) else _flat(name, default)(config)


def _flat_causal(config: dict[str, Any]) -> bool:
    if not has_sliding(config.get("layer_types")):
        return False
    explicit = _flat("is_causal", None)(config)
    return True if explicit is None else bool(explicit)  # sliding layers are causal unless it says otherwise


def _flat_nested(config: PreTrainedConfig, facts: TargetFacts | None) -> dict[str, Any]:
    heads = {name: getattr(config, name) for name in (row.name for row in HEADS)}
    return {
        "projector_type": "dspark", "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids, **heads,
        **({"attention_sink_bias": True} if config.attention_sinks else {}),
    }  # fmt: skip


SGLANG = Format(
    name="sglang",
    model_type="dspark",
    recognise=lambda c: bool({"DSparkDraftModel", "DFlashDraftModel"} & set(architectures(c)))
    and "speculators_model_type" not in c
    and (c.get("model_type") != "dspark" or "dflash_config" in c or "dspark_config" in c),
    fields=(*geometry(), Field("num_target_layers")),
    reads={
        "markov_rank": _flat("markov_rank", 0),
        "markov_head_type": _flat_head("markov_head_type", "vanilla", "vanilla"),
        "enable_confidence_head": _flat_head("enable_confidence_head", False, False),
        "confidence_head_with_markov": _flat_head("confidence_head_with_markov", True, False),
        "target_layer_ids": _flat("target_layer_ids"),
        "mask_token_id": _flat("mask_token_id"),
        "layer_types": lambda c: c.get("layer_types"),
        "sliding_window": lambda c: c.get("sliding_window") if has_sliding(c.get("layer_types")) else None,
        "causal_sliding": _flat_causal,
        "attention_sinks": _flat("attention_sink_bias", False),
        "rope_parameters": rope(),
        "attention_output_bias": lambda c: c.get("attention_bias", False),
        "sample_from_anchor": lambda c: not _is_dflash(c),
        "block_size": lambda c: _flat_block_size(c) - _is_dflash(c),
        "target_model_type": any_of("target_model_type", "model_type"),
    },
    writes={
        **{row.name: (lambda config, facts, name=row.name: getattr(config, name)) for row in HEADS},
        "dflash_config": _flat_nested,
        "target_layer_ids": lambda config, facts: config.target_layer_ids,
        "mask_token_id": lambda config, facts: config.mask_token_id,
        "block_size": lambda config, facts: config.block_size,
        "layer_types": lambda config, facts: config.layer_types,
        "sliding_window": lambda config, facts: config.sliding_window if slides(config) else None,
        "use_sliding_window": lambda config, facts: slides(config),
        "rope_parameters": lambda config, facts: config.rope_parameters,
        # Where versions before transformers 5 look for it.
        "rope_theta": lambda config, facts: config.rope_parameters["rope_theta"],
        "rope_scaling": lambda config, facts: _old_rope_scaling(config.rope_parameters),
        "target_model_type": _target_model_type,
        **_ANCHOR_WRITES,
    },
    constants={name: value for name, value in QWEN3_LAYERS.items() if name != "attention_sinks"}
    | {"draft_vocab_size": None, "sliding_from_anchor": False},
    base=lambda facts: {
        "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "tie_word_embeddings": False,
        "max_window_layers": 28, "use_cache": True,
    },
    unreadable=(
        Refusal(
            lambda c: look_up(c, "dflash_config.projector_type", "dspark") not in ("dflash", "dspark"),
            "dflash_config.projector_type names a head that is neither DFlash's nor DSpark's",
        ),
        Refusal(
            lambda c: _flat("sample_from_anchor", None)(c) is (True if _is_dflash(c) else False),
            "sample_from_anchor contradicts the layout of flat checkpoints: DSpark's blocks predict from the anchor's "
            "slot, DFlash's do not",
        ),
        Refusal(
            lambda c: _flat("is_causal", None)(c) is True
            and set(c.get("layer_types") or ["full_attention"]) != {"sliding_attention"},
            "is_causal is set for full-attention layers, whose slots see the whole block here",
        ),
    ),
    refusals=(
        *ONLY_QWEN3_LAYERS, *NO_RUN_SETTINGS, NO_FILL_IN, NO_PRUNING, NO_WINDOW_FROM_ANCHOR,
        Refusal(
            lambda c: slides(c) and not c.causal_sliding,
            "its sliding layers are causal inside the block, this draft's are not",
        ),
    ),
    engines=("sglang",),
)  # fmt: skip


def _flat_block_size(config: dict[str, Any]) -> int:
    value = _flat("block_size")(config)
    if type(value) is not int:
        raise ValueError(f"config.json: 'block_size' must be an integer, got {value!r}")
    return value


def _old_rope_scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    if parameters.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in parameters.items() if name != "rope_theta"}


# ---- transformers' own DFlash

TRANSFORMERS = Format(
    name="transformers",
    model_type="dspark",
    recognise=lambda c: c.get("model_type") == "muse_glimmer_assistant",
    fields=(
        *(row for row in geometry() if row.name not in ("vocab_size", "attention_bias")),
        Field("mask_token_id"),
        Field("target_layer_ids"),
        # The anchor's slot counts.
        Field("block_size", decode=lambda size: size - 1, encode=lambda size: size + 1),
    ),
    reads={
        "layer_types": lambda c: look_up(c, "layer_types"),
        # Theirs is the largest distance, ours the number of tokens.
        "sliding_window": lambda c: integer(c, "sliding_window") + 1 if has_sliding(c.get("layer_types")) else None,
        "rope_parameters": rope(),
    },
    writes={
        "layer_types": lambda config, facts: config.layer_types,
        "rope_parameters": lambda config, facts: config.rope_parameters,
        # Its field takes no null: any number does for layers that do not slide.
        "sliding_window": lambda config, facts: config.sliding_window - 1 if slides(config) else 2048,
    },
    constants=QWEN3_LAYERS
    | {
        "markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False,
        "confidence_head_with_markov": False, "sample_from_anchor": False, "attention_bias": False,
        "attention_output_bias": False, "causal_sliding": False, "draft_vocab_size": None,
    },
    base=lambda facts: {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
    },
    unreadable=(
        Refusal(
            lambda c: has_sliding(c.get("layer_types"))
            and integer(c, "sliding_window") < integer(c, "block_size") - 1,
            "sliding_window is shorter than the block: there, the last slots of a block are hidden from the first",
        ),
    ),
    refusals=(
        *ONLY_QWEN3_LAYERS, *NO_RUN_SETTINGS, NO_PRUNING, NO_WINDOW_FROM_ANCHOR, NO_SINKS,
        Refusal(
            lambda c: getattr(c, "sample_from_anchor", True),
            "DFlash drops the anchor's slot, from which this draft predicts its first token: every token would be "
            "read one position late. Train one with sample_from_anchor=False",
        ),
        Refusal(lambda c: c.markov_rank > 0, "DFlash has no Markov head"),
        Refusal(lambda c: c.enable_confidence_head, "DFlash has no confidence head"),
        Refusal(lambda c: c.attention_bias, "its projections have no biases"),
        Refusal(
            lambda c: slides(c) and getattr(c, "causal_sliding", False),
            "its sliding layers see the whole block, this draft's only its earlier slots",
        ),
    ),
    renamed={"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    needs_target=True,
    keeps_target_depth=False,
    engines=("transformers",),
)  # fmt: skip

FORMATS = (DEEPSPEC_QWEN3, DEEPSPEC_GEMMA4, DEEPSPEC_EAGLE3, SPECULATORS, SGLANG, TRANSFORMERS)
OURS = "hf_dspark"
FORMAT_NAMES = (OURS, *dict.fromkeys(entry.name for entry in FORMATS))


# ---- configurations


def _rank_zero_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Without a Markov head, what is said of it means nothing."""
    if config.get("markov_rank") != 0:
        return config
    return config | {"markov_head_type": "vanilla", "confidence_head_with_markov": False}


def recognise(config: Mapping[str, Any]) -> Format | None:
    """Return the format of a `config.json`; `None` if it is our own, or unknown."""
    return next((entry for entry in FORMATS if entry.recognise(dict(config))), None)


def draft_model_type(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` that a `config.json` of any known format has here; its own if it is of none."""
    foreign = recognise(config)
    return config.get("model_type") if foreign is None else foreign.model_type


def find_format(name: str, config: PreTrainedConfig) -> Format:
    """Return the entry of a format for a draft.

    Args:
        name (`str`): One of [`FORMAT_NAMES`] that is not ours.
        config (`PreTrainedConfig`): Of the draft.

    Raises:
        ValueError: If there is no such format, or it has no place for this kind of draft.
    """
    if name not in FORMAT_NAMES:
        raise ValueError(f"there is no checkpoint format {name!r}: pass one of {FORMAT_NAMES}")
    entries = [entry for entry in FORMATS if entry.name == name and entry.model_type == config.model_type]
    if not entries:
        raise ValueError(f"the format {name!r} has no place for drafts of the kind {config.model_type!r}")
    gemma = str(config.target_model_type).startswith("gemma4") and getattr(config, "sandwich_norms", False)
    return DEEPSPEC_GEMMA4 if gemma and DEEPSPEC_GEMMA4 in entries else entries[0]


def refuse(subject: Any, rules: tuple[Refusal, ...], what: str) -> None:
    """Raise a `ValueError` with the reasons of all rules that apply.

    Args:
        subject: What the rules look at: our configuration, or theirs.
        rules (`tuple[Refusal, ...]`): Of a format or an engine.
        what (`str`): How the message begins.
    """
    reasons = [rule.reason for rule in rules if rule.applies(subject)]
    if reasons:
        raise ValueError(f"{what}: {'; '.join(reasons)}")


def config_from_format(
    source: Mapping[str, Any],
    entry: Format,
    facts: TargetFacts | None = None,
    sample_from_anchor: bool | None = None,
) -> dict[str, Any]:
    """Translate a foreign `config.json` to ours.

    Args:
        source (`Mapping`): Theirs.
        entry ([`Format`]): From [`recognise`].
        facts ([`TargetFacts`], *optional*): Of the target, for formats that do not say all.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, where the file does not say.

    Returns:
        `dict`: Ours, with `model_type` and `architectures`.

    Raises:
        ValueError: If something is missing, or cannot be had here; with the reason.
    """
    config = dict(source)
    if sample_from_anchor is not None:
        config.setdefault("sample_from_anchor", sample_from_anchor)
    refuse(config, entry.unreadable, f"this {entry.name} draft cannot be read")
    if entry.needs_target and facts is None:
        raise ValueError(
            f"a draft in the format {entry.name!r} says neither how many tokens nor how many layers its target has: "
            "pass the target, convert_checkpoint(..., target=...)"
        )
    if facts is not None and facts.embedding_scale != 1.0 and entry.constants.get("embedding_scale") == 1.0:
        raise ValueError(
            f"a draft in the format {entry.name!r} reads embedding rows unscaled, but those of a "
            f"{facts.model_type!r} target are scaled by {facts.embedding_scale:g}: it is another target's"
        )
    ours = dict(entry.constants)
    for row in entry.fields:
        ours[row.name] = row.decode(look_up(config, row.place, row.default))
    ours |= {name: read(config) for name, read in entry.reads.items()}
    ours = _rank_zero_heads(ours)
    if sample_from_anchor not in (None, ours.get("sample_from_anchor", True)):
        raise ValueError(
            f"sample_from_anchor={sample_from_anchor} was asked for, but the {entry.name} draft says otherwise: leave "
            "it out"
        )
    if not entry.keeps_target_depth:
        ours["num_target_layers"] = None if facts is None else facts.num_hidden_layers
        ours["target_model_type"] = None if facts is None else facts.model_type
    if facts is not None:
        ours.setdefault("vocab_size", facts.vocab_size)
        if facts.embedding_norm:
            ours["embedding_norm"] = False
    kind = {"dspark": "DSpark", "dspark_eagle3": "Eagle3"}[entry.model_type]
    ours |= {"model_type": entry.model_type, "architectures": [f"{kind}DraftModel"]}
    if "dtype" in config or "torch_dtype" in config:
        ours["dtype"] = config.get("dtype", config.get("torch_dtype"))
    return ours


def config_to_format(config: PreTrainedConfig, entry: Format, facts: TargetFacts | None = None) -> dict[str, Any]:
    """Translate our configuration to a foreign `config.json`.

    Args:
        config (`PreTrainedConfig`): Ours.
        entry ([`Format`]): From [`find_format`].
        facts ([`TargetFacts`], *optional*): Of the target.

    Raises:
        ValueError: If the format cannot hold the draft; with all reasons.
    """
    refuse(config, entry.refusals, f"the format {entry.name!r} cannot hold this draft")
    written: dict[str, Any] = {}
    for place, value in entry.base(facts).items():
        _put(written, place, value)
    for row in entry.fields:
        if row.written(config):
            _put(written, row.place, row.encode(getattr(config, row.name)))
    for place, write in entry.writes.items():
        _put(written, place, write(config, facts))
    return written


def _put(config: dict[str, Any], place: str, value: Any) -> None:
    if value is OMIT:
        return
    *parents, name = place.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[name] = dict(value) if isinstance(value, dict) else value
