"""Flat checkpoints: those of SpecForge and SGLang, and of who writes as they do (Model-Optimizer, Liquid AI, NVIDIA's
drafts of Nemotron). See `tables.py`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from . import fields
from .fields import OMIT, TARGET_DEPTH, Field, Rules, Source, integer, is_anchored, layout, look_up, rope, slides_there

_SECTIONS = ("dspark_config", "dflash_config")
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_SHOWN = ("mask_token_id", "target_layer_ids", *HEADS)
_ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel", "Lfm2DSparkDraftModel", "DFlashDraftModel")


def _has_confidence(config: Source) -> bool:
    said = look_up(config, "enable_confidence_head", "use_confidence_head")
    return bool(look_up(config, "confidence_head_alpha")) if said is None else said


def _all_slide(config: Source) -> bool:
    """Whether all layers slide, whatever their types say."""
    return config.get("use_swa") is True and not slides_there(config)


def _flat_layer_types(config: Source) -> Any:
    if _all_slide(config):
        return ["sliding_attention"] * integer(config, "num_hidden_layers")
    return fields.layer_types_there(config)


def _flat_slides(config: Source) -> bool:
    return _all_slide(config) or slides_there(config)


_CAUSAL = ("is_causal", "causal", "dflash_query_causal")


def _flat_causal(config: Source) -> bool:
    # Layers that slide by their type are causal unless it says otherwise.
    return _flat_slides(config) and bool(look_up(config, *_CAUSAL, default=slides_there(config)))


def _flat_taps(config: Source) -> Any:
    """Return the tapped layers, which SpecForge and SGLang spread over the target where the file names none."""
    if (taps := config.get("target_layer_ids")) is not None:
        return taps
    count, depth = integer(config, "num_hidden_layers"), TARGET_DEPTH.read_from(config)
    if count == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (count - 1)) for index in range(count)]


def is_ours(config: Source) -> bool:
    """Tell our own files from those of verl-SpeCo, whose `model_type` is the same."""
    own_rope = "rope_parameters" in config or "rope_theta" not in config
    return config.get("model_type") == "dspark" and own_rope and not any(name in config for name in _SECTIONS)


def flat_section(kind: str, places: Mapping[str, str]) -> fields.Write:
    """Return what writes the section in which servers look for what is not Qwen3's, of its places and our fields."""

    def write(config: PreTrainedConfig, target: PreTrainedConfig | None) -> dict[str, Any]:
        flags = {} if kind == "dflash" else {"projector_type": kind}
        flags |= {"attention_sink_bias": True} if config.attention_sinks else {}
        return {theirs: getattr(config, ours) for theirs, ours in places.items()} | flags

    return write


def _names_other_taps(config: Source) -> bool:
    others, taps = config.get("eagle_aux_hidden_state_layer_ids"), config.get("target_layer_ids")
    known = [tap + 1 for tap in taps if type(tap) is int] if isinstance(taps, list) else None
    return others is not None and others != known


LAYER_RULES: Rules = {
    "eagle_aux_hidden_state_layer_ids counts layers from the embedding on, and names others than target_layer_ids, "
    "which must be there": _names_other_taps,
    "blocks are causal (is_causal, causal or dflash_query_causal), but have full-attention layers, whose slots "
    "see the whole block here": lambda c: (
        look_up(c, *_CAUSAL) is True and "full_attention" in (_flat_layer_types(c) or ["full_attention"])
    ),
    "use_swa is false, but its layer_types slide": lambda c: c.get("use_swa") is False and slides_there(c),
    "swa_window_size has no use without use_swa or layer_types that slide: it does not say which do": lambda c: (
        c.get("swa_window_size") is not None and c.get("use_swa") is None and not slides_there(c)
    ),
    "draft_vocab_size differs from vocab_size: this format has no pruned vocabularies": lambda c: (
        c.get("draft_vocab_size") not in (None, c.get("vocab_size"))
    ),
    "target_hidden_size differs from the draft's hidden_size; a draft here has the target's width": lambda c: (
        c.get("target_hidden_size") not in (None, c.get("hidden_size"))
    ),
}


def layout_rules(anchored: bool) -> Rules:
    """Return when a configuration contradicts the layout of its kind's blocks, or the one that it names."""
    return {
        "shift_label or dspark_bonus_anchor contradicts the layout, in which the anchor's slot predicts "
        f"{'a token' if anchored else 'nothing'} unless sample_from_anchor says otherwise": lambda c: (
            c.get("shift_label") not in (None, is_anchored(c, anchored))
            or c.get("dspark_bonus_anchor") is is_anchored(c, anchored)
        )
    }


SGLANG = fields.Format(
    name="sglang",
    recognise=lambda c: (
        any(name.endswith(("DSparkDraftModel", "DFlashDraftModel", "DSparkModel")) for name in fields.architectures(c))
        and "speculators_model_type" not in c
        and not is_ours(c)
    ),
    sections=_SECTIONS,
    fields=(
        *fields.geometry(),
        TARGET_DEPTH,
        Field("markov_rank", default=0),
        Field("markov_head_type", default="vanilla"),
        Field(
            "enable_confidence_head",
            read=_has_confidence,
            reads=("enable_confidence_head", "use_confidence_head", "confidence_head_alpha"),
        ),
        Field("confidence_head_with_markov", default=True),
        Field("target_layer_ids", read=_flat_taps),
        Field("mask_token_id"),
        Field("layer_types", read=_flat_layer_types, reads=(*fields.WINDOW_PLACES, "use_swa")),
        Field(
            "sliding_window",
            read=lambda c: look_up(c, "sliding_window", "swa_window_size") if _flat_slides(c) else None,
            reads=("sliding_window", "swa_window_size"),
            write=fields.window_if_sliding,
        ),
        Field(
            "causal_sliding",
            "is_causal",
            read=_flat_causal,
            reads=_CAUSAL,
            write=lambda c, target: False if fields.slides(c) and not c.causal_sliding else OMIT,
        ),
        Field(
            "attention_sinks",
            "attention_sink_bias",
            default=False,
            also=("add_swa_attention_sink_bias",),
            write=OMIT,
        ),
        Field(
            "rope_interleaved",
            "rope_is_neox_style",
            read=lambda c: not look_up(c, "rope_is_neox_style", "is_neox_style", default=True),
            reads=("rope_is_neox_style", "is_neox_style"),
            write=lambda c, target: False if c.rope_interleaved else OMIT,
        ),
        Field("rope_parameters", read=rope, reads=fields.ROPE_PLACES),
        *layout(is_anchored, "shift_label"),
        fields.TARGET_TYPE,
    ),
    writes={
        "dflash_config": flat_section("dspark", {name: name for name in _SHOWN}),
        "is_neox_style": lambda c, target: False if c.rope_interleaved else OMIT,  # as vLLM calls it
        "use_sliding_window": lambda c, target: fields.slides(c),
        # Where versions before transformers 5 look for it.
        "rope_theta": lambda c, target: c.rope_parameters["rope_theta"],
        "rope_scaling": fields.old_rope_scaling,
    },
    constants={
        key: each for key, each in fields.QWEN3_LAYERS.items() if key not in ("attention_sinks", "rope_interleaved")
    }
    | {"draft_vocab_size": None},
    base=lambda target: fields.QWEN3_BASE | {"architectures": ["DSparkDraftModel"]},
    accepts={
        "architectures": tuple([name] for name in _ARCHITECTURES),
        "projector_type": (None, "dflash", "dspark"),
        "attention_mode": (None, "gqa", "mha"),
    },
    unreadable={
        **LAYER_RULES,
        **layout_rules(anchored=True),
        "dspark_markov_rank differs from markov_rank": lambda c: (
            c.get("dspark_markov_rank") not in (None, c.get("markov_rank"))
        ),
    },
    refusals={
        **fields.ONLY_QWEN3_LAYERS,
        **fields.NO_FILL_IN,
        **fields.NO_WINDOW_FROM_ANCHOR,
    },
    renames=(
        (r"logit_head\.", ""),  # SpecForge's first drafts
        (r"(markov_w[12]|gate_proj|joint_proj)\.", r"markov_head.\1."),  # Model-Optimizer
        (r"confidence_proj\.", "confidence_head.proj."),
    ),
    evidence={
        "enable_confidence_head": lambda shapes: any(name.startswith("confidence_head.") for name in shapes),
        "confidence_head_with_markov": lambda shapes: (
            shapes.get("confidence_head.proj.weight", (1, 0))[-1] != shapes.get("hidden_norm.weight", (0,))[0]
        ),
    },
    harmless=(
        "draft_vocab_size", "dspark_bonus_anchor", "dspark_fixup_head_type", "dspark_markov_rank",
        "eagle_aux_hidden_state_layer_ids", "has_embed_tokens", "has_lm_head", "loss_decay_gamma", "num_anchors",
        "num_aux_layers", "pard_token", "target_hidden_size", "train_embed_tokens",
    ),
    engines=("sglang",),
)  # fmt: skip
