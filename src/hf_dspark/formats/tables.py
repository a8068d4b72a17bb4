"""The checkpoint formats of other projects, as tables: how each is recognised, where our fields stand in it, and what
it cannot hold; and which drafts a program that serves them cannot run. A new format is a new entry, not new code.

Loaders skip keys that they do not know and take defaults for keys that they miss, without a word.
"""

from typing import Any

from transformers import PreTrainedConfig

from . import eagle3, fields
from .dflash import FLAT_KINDS, speculators_kinds
from .fields import OMIT, ONLY_QWEN3_LAYERS, Field, Format, Source, geometry, integer, slides, slides_there, text_of
from .fields import SPECULATORS_LAYERS as _LAYERS
from .flat import SGLANG

OURS = "hf_dspark"

# ---- engines: drafts that they cannot run

_NEEDS_MARKOV_HEAD = {
    "as DFlash it would drop the anchor's slot, from which a draft with sample_from_anchor predicts its first token, "
    "and as DSpark it needs a Markov head (markov_rank > 0)": lambda c: c.markov_rank == 0 and c.sample_from_anchor
}
_ONLY_VANILLA = {
    "it serves the vanilla Markov head only": lambda c: (
        c.markov_rank > 0 and c.markov_head_type not in ("vanilla", "selector")
    )
}
ENGINE_REFUSALS: dict[str, fields.Rules] = {
    "llama.cpp": _ONLY_VANILLA | _NEEDS_MARKOV_HEAD,
    "vllm": _ONLY_VANILLA | _NEEDS_MARKOV_HEAD,
    "sglang": _NEEDS_MARKOV_HEAD
    | {
        "it needs the full vocabulary and ignores d2t": lambda c: c.draft_vocab_size is not None,
        "it drafts with the target's embedding and LM head, and this draft has its own": lambda c: (
            c.own_embedding or c.own_lm_head
        ),
        "its DFlash layers have the activation silu only": lambda c: c.hidden_act != "silu",
        "it taps layers from 0 on, in ascending order": lambda c: (
            [0, *c.target_layer_ids] != sorted([0, *c.target_layer_ids])
        ),
        "its Domino leaves the first draft token to the base logits, and no other": lambda c: (
            c.markov_head_type == "domino" and c.markov_start != 1
        ),
        "it starts the recurrent head after the anchor's slot": lambda c: (
            not c.sample_from_anchor and c.markov_head_type == "rnn"
        ),
    },
}

# ---- DeepSpec


# What its configurations hold is the target's, but for the fields below: its layers read nothing else of it. No target
# has these keys, so who wrote one meant a flat checkpoint, whose fields stand in the same places.
_NEVER_DEEPSPEC = (
    "dflash_config", "dspark_config", "rope_is_neox_style", "is_neox_style", "is_causal", "dflash_query_causal",
    "attention_sink_bias", "use_swa", "swa_window_size", "log_snr_conditioning", "enable_qwen35_gated_q_proj",
    "shift_label", "projector_type", "dspark_bonus_anchor",
)  # fmt: skip


def _is_deepspec(config: Source, gemma4: bool) -> bool:
    of_gemma4 = str(config.get("model_type")).startswith("gemma4")
    named = any(name.endswith("DSparkModel") for name in fields.architectures(config))
    return of_gemma4 == gemma4 and named and all(config.get(key) is None for key in _NEVER_DEEPSPEC)


def _deepspec_window(config: Source) -> int | None:
    used = config.get("use_sliding_window", True) and slides_there(config)
    return config.get("sliding_window") if used else None


_DEEPSPEC_BLOCK = (
    Field("markov_rank", default=0),
    Field("markov_head_type", default="vanilla"),
    Field("enable_confidence_head"),
    Field("confidence_head_with_markov", default=False),
    fields.TARGET_DEPTH,
    *map(Field, ("target_layer_ids", "mask_token_id")),
    # Its own blocks predict from the anchor's slot; others have kept theirs in its format.
    *fields.layout(fields.is_anchored),
)
_DEEPSPEC_COPIES = ("embed_tokens.weight", "lm_head.weight")
_DEEPSPEC_TRAINING = ("confidence_head_alpha", "confidence_threshold")
_DEEPSPEC_BASE = fields.QWEN3_BASE | {"sliding_window": None, "use_sliding_window": False}

DEEPSPEC_QWEN3 = Format(
    name="deepspec",
    recognise=lambda c: _is_deepspec(c, gemma4=False),
    fields=(
        *geometry(),
        *_DEEPSPEC_BLOCK,
        Field("layer_types", read=fields.layer_types_there, reads=fields.WINDOW_PLACES),
        Field("sliding_window", read=_deepspec_window, reads=fields.WINDOW_PLACES, write=OMIT),
        Field("rope_parameters", read=fields.rope, reads=fields.ROPE_PLACES),
        fields.TARGET_TYPE,
    ),
    constants=fields.QWEN3_LAYERS | {"draft_vocab_size": None},
    # DeepSpec's loader asks for num_anchors; only training uses it.
    base=lambda target: _DEEPSPEC_BASE | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512},
    accepts={"architectures": (["Qwen3DSparkModel"],)},  # those of other targets have layers of their own
    refusals={
        **ONLY_QWEN3_LAYERS,
        **fields.NO_FILL_IN,
        "DeepSpec's attention masks have no sliding windows: every layer would see everything": slides,
    },
    copies=_DEEPSPEC_COPIES,
    layers=(),
    harmless=_DEEPSPEC_TRAINING,
    engines=("deepspec", "llama.cpp", "vllm", "sglang"),
)

# Of Gemma 4's own configuration, what a draft of full-attention layers takes from elsewhere or must not inherit.
_GEMMA4_DROPPED = ("architectures", "dtype", "per_layer_config", "transformers_version", "_name_or_path")


def _gemma4_base(target: PreTrainedConfig | None) -> dict[str, Any]:
    text = {} if target is None else text_of(target).to_diff_dict()
    kept = {name: value for name, value in text.items() if name not in _GEMMA4_DROPPED}
    return kept | {"architectures": ["Gemma4DSparkModel"], "tie_word_embeddings": False, "num_anchors": 512}


DEEPSPEC_GEMMA4 = Format(
    name="deepspec",
    recognise=lambda c: _is_deepspec(c, gemma4=True),
    fields=(
        *geometry(without=("head_dim", "num_key_value_heads", "hidden_act")),
        *_DEEPSPEC_BLOCK,
        # Where Gemma 4 keeps what holds for full-attention layers.
        Field("head_dim", "global_head_dim"),
        Field(
            "num_key_value_heads",
            "num_global_key_value_heads",
            read=lambda c: integer(c, f"num_{'global_' if c.get('attention_k_eq_v') else ''}key_value_heads"),
            reads=("num_global_key_value_heads", "num_key_value_heads"),
        ),
        Field("hidden_act", "hidden_activation"),
        Field("layer_types"),
        Field("attention_k_eq_v", default=False),
        Field("final_logit_softcapping", default=None),
        Field("embedding_scale", read=lambda c: float(integer(c, "hidden_size")) ** 0.5, write=OMIT),
        Field(
            "rope_parameters",
            read=lambda c: fields.rope(c, layer_type="full_attention"),
            reads=fields.ROPE_PLACES,
            write=lambda c, target: text_of(target).rope_parameters | {"full_attention": c.rope_parameters},
        ),
        Field(
            "target_model_type",
            read=lambda c: c["model_type"],
            write=lambda c, target: text_of(target).model_type.removesuffix("_text"),
        ),
    ),
    writes={
        "target_text_model_type": lambda c, target: text_of(target).model_type,
        "num_key_value_heads": lambda c, target: (
            text_of(target).to_dict().get("num_key_value_heads") if c.attention_k_eq_v else c.num_key_value_heads
        ),
    },
    constants=fields.COMMON
    | dict.fromkeys(("qk_norm", "value_norm", "sandwich_norms", "layer_scalar"), True)
    | {"attention_scaling": 1.0, "draft_vocab_size": None, "attention_sinks": False, "rope_interleaved": False},
    base=_gemma4_base,
    accepts={"architectures": (["Gemma4DSparkModel"],)},
    unreadable={"Gemma 4 drafts with sliding layers have two head sizes in one model": slides_there},
    refusals={
        **fields.NO_FILL_IN,
        **fields.NO_V4_LAYERS,
        "its embedding rows are scaled by the root of their size, this draft's by another factor": lambda c: (
            abs(c.embedding_scale - c.hidden_size**0.5) > 1e-6
        ),
        "Gemma 4 drafts with sliding layers have two head sizes in one model": slides,
        **fields.ONE_BIAS_FLAG,
        **fields.NO_SUCCESSORS,
    },
    copies=_DEEPSPEC_COPIES,
    layers=(),
    harmless=_DEEPSPEC_TRAINING,
    engines=("deepspec",),
)

DEEPSPEC_EAGLE3 = Format(
    name="deepspec",
    model_type="dspark_eagle3",
    recognise=lambda c: any(name.endswith("Eagle3Model") for name in fields.architectures(c)),
    fields=(
        *geometry(),
        fields.TARGET_DEPTH,
        Field("target_layer_ids"),
        Field("block_size", "ttt_length"),
        Field("rope_parameters", read=fields.rope, reads=fields.ROPE_PLACES),
        Field("target_model_type", "model_type", write=OMIT),
    ),
    writes={
        "layer_types": lambda c, target: ["full_attention"] * c.num_hidden_layers,
        "draft_num_hidden_layers": lambda c, target: c.num_hidden_layers,
        "target_model_name_or_path": lambda c, target: target and target.name_or_path,
    },
    constants=fields.QWEN3_EMBEDDING
    | dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "mtp"), False)
    | {"qk_norm": True, "embedding_in_all_layers": True}
    | dict.fromkeys(("draft_vocab_size", "target_hidden_size", "mask_token_id")),
    # DeepSpec's loader asks for step_loss_decay, which weights its training loss; 0.8 is its default.
    base=lambda target: _DEEPSPEC_BASE | {"architectures": ["Qwen3Eagle3Model"], "step_loss_decay": 0.8},
    accepts={"model_type": ("qwen3",)} | dict.fromkeys(("rope_is_neox_style", "is_neox_style"), (None, True)),
    unreadable={"an Eagle3 draft attends to its whole context, here layer_types says otherwise": slides_there},
    refusals=ONLY_QWEN3_LAYERS,
    copies=_DEEPSPEC_COPIES,
    layers=(),
    engines=("deepspec",),
)


# ---- speculators

_SLOTS = ("block_size", "speculators_config")  # where blocks show their layout if `sample_from_anchor` does not


def _speculators_anchored(config: Source) -> bool:
    """Tell the layout, which versions before 0.7 did not name, by the number of tokens that a block proposes."""
    slots, tokens = integer(config, "block_size"), fields.proposed_tokens(config)
    anchored = config.get("sample_from_anchor")
    if anchored is None and config.get("speculators_model_type") != "dspark":
        anchored = False  # its DFlash
    if anchored is None and tokens in (slots, slots - 1):
        anchored = tokens == slots
    anchored = config.get(fields.ASKED) if anchored is None else anchored
    if not isinstance(anchored, bool):
        raise ValueError(
            f"config.json lacks 'sample_from_anchor', and its speculative_tokens, {tokens!r}, do not tell it: true "
            "means that slot k of a block predicts the token after its own, false that it predicts its own. Say which "
            "was trained: convert_checkpoint(..., sample_from_anchor=...), or "
            "config=DSparkConfig.from_pretrained(..., sample_from_anchor=...)"
        )
    return anchored


def _is_dflash2(config: Source) -> bool:
    return config.get("speculators_model_type") == "dflash2"


SPECULATORS = Format(
    name="speculators",
    recognise=lambda c: "speculators_model_type" in c,
    fields=(
        *geometry(_LAYERS),
        Field("markov_rank", default=256),
        Field("markov_head_type", default="vanilla"),
        Field("enable_confidence_head", default=True),
        Field("confidence_head_with_markov", default=True),
        Field("mask_token_id"),
        Field(
            "layer_types",
            _LAYERS + "layer_types",
            read=lambda c: fields.layer_types_there(c, _LAYERS),
            reads=tuple(_LAYERS + place for place in fields.WINDOW_PLACES),
        ),
        Field(
            "sliding_window",
            _LAYERS + "sliding_window",
            read=lambda c: integer(c, _LAYERS + "sliding_window") if slides_there(c, _LAYERS) else None,
            write=fields.window_if_sliding,
        ),
        Field(
            "causal_sliding",
            "sliding_window_non_causal",
            read=lambda c: slides_there(c, _LAYERS) and not c.get("sliding_window_non_causal", _is_dflash2(c)),
            write=lambda c, target: slides(c) and not c.causal_sliding,
        ),
        Field("sliding_from_anchor", read=lambda c: slides_there(c, _LAYERS), reads=_SLOTS, write=OMIT),
        fields.SPECULATORS_ROPE,
        Field(
            "target_layer_ids",
            "aux_hidden_state_layer_ids",
            read=lambda c: [
                tap - 1 for tap in fields.layer_ids(c, "aux_hidden_state_layer_ids", default=fields.REQUIRED)
            ],
            write=lambda c, target: [tap + 1 for tap in c.target_layer_ids],
        ),
        *fields.layout(_speculators_anchored, *_SLOTS),
        Field(
            "draft_vocab_size",
            read=fields.speculators_vocab,
            write=lambda c, target: c.draft_vocab_size or c.vocab_size,
        ),
    ),
    writes={_LAYERS + "use_sliding_window": lambda c, target: slides(c), **fields.SPECULATORS_WRITES},
    constants=fields.QWEN3_LAYERS,
    base=lambda target: fields.speculators_base("dspark", "DSparkDraftModel") | {"target_hidden_size": None},
    accepts={
        "speculators_model_type": ("dspark",),
        _LAYERS + "model_type": (None, "qwen3", "llama"),
        "topk_context": (None, 0, False),
        "projector_type": (None, "dflash", "dspark"),
    },
    unreadable={
        "target_hidden_size differs from the draft's hidden_size; a draft here has the target's width": lambda c: (
            c.get("target_hidden_size") not in (None, fields.look_up(c, _LAYERS + "hidden_size"))
        ),
        "transformer_layer_config.use_sliding_window is false, but its layer_types slide": lambda c: (
            slides_there(c, _LAYERS) and fields.look_up(c, _LAYERS + "use_sliding_window") is False
        ),
    },
    refusals={
        **ONLY_QWEN3_LAYERS,
        "its sliding windows count from the anchor for all slots of a block, this draft's from each slot": lambda c: (
            slides(c) and not c.sliding_from_anchor
        ),
    },
    names_target=True,
    own=("",),
    layers=("transformer_layer_config",),
    harmless=("speculators_version", "target_hidden_size", "has_no_defaults_at_init"),
    holds_own_weights=True,
    engines=("speculators", "vllm", "sglang"),
)


# ---- transformers' own DFlash

TRANSFORMERS = Format(
    name="transformers",
    recognise=lambda c: c.get("model_type") == "muse_glimmer_assistant",
    fields=(
        *geometry(without=("vocab_size", "attention_bias", "attention_output_bias")),
        *map(Field, ("mask_token_id", "target_layer_ids", "layer_types")),
        # The anchor's slot counts.
        Field("block_size", read=lambda c: integer(c, "block_size") - 1, write=lambda c, target: c.block_size + 1),
        # Theirs is the largest distance, ours the number of tokens; for layers that do not slide, any number does.
        Field(
            "sliding_window",
            read=lambda c: integer(c, "sliding_window") + 1 if slides_there(c) else None,
            write=lambda c, target: c.sliding_window - 1 if slides(c) else 2048,
        ),
        Field("rope_parameters", read=fields.rope, reads=fields.ROPE_PLACES),
    ),
    constants=fields.QWEN3_LAYERS
    | {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False, "draft_vocab_size": None}
    | {"attention_bias": False, "attention_output_bias": False},
    base=lambda target: {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"},
    unreadable={
        "sliding_window is shorter than the block: there, a block's last slots are hidden from its first": lambda c: (
            slides_there(c) and integer(c, "sliding_window") < integer(c, "block_size") - 1
        )
    },
    refusals={
        **ONLY_QWEN3_LAYERS,
        **fields.NO_WINDOW_FROM_ANCHOR,
        "its sliding layers see the whole block, this draft's only its earlier slots": lambda c: (
            slides(c) and getattr(c, "causal_sliding", False)
        ),
    },
    renamed={"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    engines=("transformers",),
)

FORMATS = (
    DEEPSPEC_GEMMA4,
    DEEPSPEC_QWEN3,
    DEEPSPEC_EAGLE3,
    eagle3.FLAT,
    eagle3.SPECULATORS,
    eagle3.PEAGLE,
    *speculators_kinds(SPECULATORS),
    SPECULATORS,
    *FLAT_KINDS,
    SGLANG,
    TRANSFORMERS,
)
FORMAT_NAMES = (OURS, *dict.fromkeys(entry.name for entry in FORMATS))
