"""What the table of checkpoint formats is made of, and the fields that several formats share.

A format says where each of our configuration's fields stands in its own `config.json`, and what it cannot hold.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

Source = Mapping[str, Any]  # a foreign config.json

REQUIRED: Any = object()
OMIT: Any = object()  # the `write` of a field that has no place there, or what it returns to leave the place out

# Rotary types whose frequencies do not depend on the current length: cached keys stay valid as the context grows.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


# Of the draft's configuration, and the target's where it is known; its `name_or_path` is where engines find it.
Write = Callable[[PreTrainedConfig, PreTrainedConfig | None], Any]


@dataclass(frozen=True)
class Field:
    """One of our fields and its place in a foreign configuration."""

    name: str  # ours
    path: str = ""  # their place, with dots between nested names; our name unless given
    default: Any = REQUIRED  # what a missing value means there
    also: tuple[str, ...] = ()  # other places that checkpoints have used; the first one that is filled counts
    read: Callable[[Source], Any] | None = None  # our value from their configuration, if no single place holds it
    reads: tuple[str, ...] = ()  # the places that `read` looks at, if it is not this one
    write: Any = None  # a `Write` of their value from our configuration, if it is not ours

    @property
    def place(self) -> str:
        return self.path or self.name

    @property
    def places(self) -> tuple[str, ...]:
        return self.reads or (self.place, *self.also)

    def read_from(self, config: Source) -> Any:
        return self.read(config) if self.read else look_up(config, self.place, *self.also, default=self.default)


# Why a configuration cannot be held or read, and the way out where there is one: whether that applies to it.
Rules = Mapping[str, Callable[[Any], bool]]


@dataclass(frozen=True)
class Format:
    """A foreign layout of checkpoints."""

    name: str  # by which it is asked for
    recognise: Callable[[Source], bool]  # whether a `config.json` is of this format
    fields: tuple[Field, ...]  # where our fields stand, both ways
    constants: Mapping[str, Any]  # our fields that all its checkpoints share; it cannot hold others, see `REASONS`
    engines: tuple[str, ...]  # programs that read it
    base: Callable[[PreTrainedConfig | None], dict[str, Any]]  # what is written before all else
    model_type: str = "dspark"  # of our configuration: the kind of draft
    writes: Mapping[str, Write] = field(default_factory=dict)  # their places that none of our fields fills alone
    accepts: Mapping[str, tuple] = field(default_factory=dict)  # their places, and the values that can be imported
    unreadable: Rules = field(default_factory=dict)  # theirs that cannot be imported for other reasons
    refusals: Rules = field(default_factory=dict)  # ours that cannot be exported for other reasons
    renamed: Mapping[str, str] = field(default_factory=dict)  # our names of tensors to theirs
    renames: tuple[tuple[str, str], ...] = ()  # patterns of names that others have given them, and ours
    # What the tensors say of fields that the configuration leaves out, by their names and shapes.
    evidence: Mapping[str, Callable[[Mapping[str, tuple[int, ...]]], Any]] = field(default_factory=dict)
    copies: tuple[str, ...] = ()  # what it has of an embedding and an LM head: the draft's own, or the target's
    holds_own_weights: bool = False  # whether it can hold the draft's own embedding and LM head, and no copies
    names_target: bool = False  # so exporting needs the target
    limits: Mapping[str, Rules] | None = None  # drafts that an engine cannot run, unless `ENGINE_REFUSALS` says it
    sections: tuple[str, ...] = ()  # objects of the draft's own, whose keys count as if they stood at the top
    own: tuple[str, ...] = ()  # other objects of the draft's own ("" is the top), all keys of which must be known
    layers: tuple[str, ...] = ("",)  # objects that describe the draft's layers, and copy nothing of the target's
    harmless: tuple[str, ...] = ()  # places that say nothing about what the draft computes, or are overruled

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """The places that are read, and those that need not be."""
        fields = (place for field in self.fields for place in field.places)
        return frozenset((*fields, *self.accepts, *self.harmless, *HARMLESS))


# What every configuration may have beside what its layers read.
HARMLESS = (
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


# ---- reading places of a configuration


def look_up(config: Source, *places: str, default: Any = None) -> Any:
    """Return what stands at several dotted places, of which any may be filled; null fills none.

    A `ValueError` says that two of them disagree, or that nothing is there and something must be.
    """
    found: list[tuple[str, Any]] = []
    for place in places:
        value: Any = config
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found.append((place, value))
    for place, value in found[1:]:
        if value != found[0][1]:
            raise ValueError(f"config.json: {found[0][0]!r} is {found[0][1]!r}, but {place!r} is {value!r}")
    if not found and default is REQUIRED:
        raise ValueError(f"config.json lacks {places[0]!r}, without which the draft cannot be built: add it")
    return found[0][1] if found else default


def integer(config: Source, *places: str) -> int:
    value = look_up(config, *places, default=REQUIRED)
    if type(value) is not int:
        raise ValueError(f"config.json: {places[0]!r} must be an integer, got {value!r}")
    return value


def layer_ids(config: Source, *places: str, default: Any = None) -> list[int] | None:
    ids = look_up(config, *places, default=default)
    if not (ids is None or (isinstance(ids, list) and all(type(each) is int for each in ids))):
        raise ValueError(f"config.json: {places[0]!r} must be a list of integers, got {ids!r}")
    return ids


ROPE_PLACES = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_PARTIAL = "partial_rotary_factor"  # the type `proportional` turns whole heads, too, some entries by no angle
# What the functions of transformers read of a set of rotary parameters.
_ROPE_KEYS = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", _PARTIAL, "rope_theta", "rope_type",
    "short_factor", "truncate",
}  # fmt: skip


def rope(
    config: Source, prefix: str = "", layer_type: str | None = None, theta: float | None = None
) -> dict[str, Any]:
    """Return rotary parameters, as transformers 5 or its earlier versions write them, or both; of no base, `theta`.

    Of one set per type of layers, that of `layer_type` is taken, or of the one type that the draft's layers have.
    The layers of others' drafts turn whole heads, whatever partial_rotary_factor says: it comes with copies of the
    target's set.
    """
    sets = [
        _rope_set(config, prefix + name, layer_type)
        for name in ("rope_parameters", "rope_scaling")
        if look_up(config, prefix + name)
    ]
    thetas = [look_up(config, prefix + "rope_theta"), *(each.get("rope_theta") for each in sets)]
    thetas = [each for each in thetas if each is not None] or [theta]
    if thetas[0] is None:
        raise ValueError(f"config.json lacks {prefix + 'rope_parameters'!r}: where tokens stand is not known")
    filled = [{"rope_theta": thetas[0]} | each for each in sets or [{"rope_type": "default"}]]
    if any(each != thetas[0] for each in thetas) or any(each != filled[0] for each in filled):
        found = f"{filled}, of the bases {thetas}: keep one"
        raise ValueError(f"config.json: the rotary parameters in {', '.join(ROPE_PLACES[:3])} disagree: {found}")
    return filled[0]


def _rope_set(config: Source, place: str, layer_type: str | None) -> dict[str, Any]:
    value = look_up(config, place)
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {place} must be an object, got {value!r}")
    if any(isinstance(each, Mapping) for each in value.values()):
        own = set(layer_types_there(config, place[: place.rfind(".") + 1]) or ["full_attention"])
        sets = [value.get(kind) for kind in ([layer_type] if layer_type in value else sorted(own))]
        if not all(isinstance(each, Mapping) and each == sets[0] for each in sets):
            found = f"sets for {', '.join(value)}, and the draft's layers are {', '.join(own)}"
            raise ValueError(f"config.json: {place} has {found}: one set is read, for all layers")
        value = sets[0]
    entries = {key: each for key, each in _of_text(value).items() if each is not None}
    kind = entries.pop("type", "default")
    entries.setdefault("rope_type", "default" if kind == "mrope" else kind)
    if unknown := sorted(entries.keys() - _ROPE_KEYS):
        entry = f"{unknown[0]!r}, {entries[unknown[0]]!r}"
        raise ValueError(f"config.json: {place} has {entry}, which no rotary embedding here reads")
    if entries["rope_type"] != "proportional":
        entries.pop(_PARTIAL, None)
    return entries


def old_rope_scaling(config: PreTrainedConfig, target: PreTrainedConfig | None) -> dict[str, Any] | None:
    parameters = dict(config.rope_parameters)
    del parameters["rope_theta"]
    return parameters if parameters.get("rope_type", "default") != "default" else None


def full_attention_rope(rope_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the rotary parameters of a target's full-attention layers, if a draft can use them, else the default."""
    # Gemma 3 and 4 keep one set per layer type; layers without rotation have `None`.
    flat = (rope_parameters or {}).get("full_attention", rope_parameters)
    if flat is None:
        return None
    flat = {key: value for key, value in flat.items() if value is not None and not isinstance(value, dict)}
    kind = flat.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": flat.get("rope_theta", 1_000_000.0)}
    return {key: value for key, value in _of_text(flat).items() if kind == "proportional" or key != _PARTIAL}


def _of_text(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A draft reads text, whose positions are the same in all sections of a multimodal target's."""
    return {key: value for key, value in parameters.items() if not key.startswith("mrope_")}


def of_full_attention(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config in which values that differ by layer (Gemma 4's head size) are those of full attention."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    kinds = list(getattr(text, "layer_types", None) or ())
    return text.per_layer_config[kinds.index("full_attention") if "full_attention" in kinds else -1]


def text_of(target: PreTrainedConfig) -> PreTrainedConfig:
    return target.get_text_config(decoder=True)


def architectures(config: Source) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def slides(config: PreTrainedConfig) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


WINDOW_PLACES = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "num_hidden_layers")


def layer_types_there(config: Source, prefix: str = "") -> Any:
    """Return the types of layers, derived as Qwen3's configuration does it where they are left out."""
    kinds = look_up(config, prefix + "layer_types")
    if kinds is None and look_up(config, prefix + "use_sliding_window") and look_up(config, prefix + "sliding_window"):
        first = look_up(config, prefix + "max_window_layers", default=28)
        layers = range(integer(config, prefix + "num_hidden_layers"))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    return kinds


def slides_there(config: Source, prefix: str = "") -> bool:
    kinds = layer_types_there(config, prefix)
    return isinstance(kinds, list) and "sliding_attention" in kinds


def has_embedding_norm(model_type: Any) -> bool:
    """Tell whether targets of a type normalise rows inside their embedding."""
    return str(model_type).startswith("muse_glimmer")


# ---- fields that several formats share


def geometry(prefix: str = "", without: tuple[str, ...] = ()) -> tuple[Field, ...]:
    layers = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    defaults = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", *layers), REQUIRED)
    defaults |= dict.fromkeys(("head_dim", "bos_token_id", "eos_token_id", "pad_token_id"))
    defaults |= {"hidden_act": "silu", "max_position_embeddings": 40960, "initializer_range": 0.02}
    defaults |= {"rms_norm_eps": 1e-6, "attention_dropout": 0.0}
    defaults |= dict.fromkeys(("attention_bias", "attention_output_bias"), False)
    theirs = {"attention_output_bias": "attention_bias"}  # one flag; drafts whose two differ are refused
    return tuple(
        Field(name, prefix + theirs.get(name, name), default)
        for name, default in defaults.items()
        if name not in without
    )


def _depth(config: PreTrainedConfig, target: PreTrainedConfig | None) -> int:
    depth = config.num_target_layers or (target and text_of(target).num_hidden_layers)
    if depth is None:
        raise ValueError("the format says how many layers the target has, the draft does not: pass target=...")
    return depth


# Some count the taps by the first of these, and the layers by the second.
_DEPTHS = ("num_target_layers", "target_num_hidden_layers")
TARGET_DEPTH = Field(
    "num_target_layers", read=lambda c: look_up(c, _DEPTHS[1]) or integer(c, _DEPTHS[0]), reads=_DEPTHS, write=_depth
)
TARGET_TYPE = Field("target_model_type", read=lambda c: c.get("target_model_type") or c.get("model_type"))
# The block's layout where the file does not say it, as `config_from_format` was told.
ASKED = "sample_from_anchor, asked for"


def is_anchored(config: Source, otherwise: bool = True) -> bool:
    return look_up(config, "sample_from_anchor", default=look_up(config, ASKED, default=otherwise))


def layout(anchored: Callable[[Source], bool], *reads: str, place: str = "sample_from_anchor") -> tuple[Field, Field]:
    """Fields of the layout of blocks, and of γ: their size counts the anchor's slot, whether it predicts or not."""
    return (
        Field("sample_from_anchor", place, read=anchored, reads=(place, *reads)),
        Field(
            "block_size",
            read=lambda c: integer(c, "block_size") - (not anchored(c)),
            write=lambda c, target: c.num_slots,
        ),
    )


def window_if_sliding(config: PreTrainedConfig, target: PreTrainedConfig | None) -> int | None:
    return config.sliding_window if slides(config) else None


# What every format but ours takes for granted, and what most do: Qwen3's layers.
COMMON = {"logit_scale": 1.0, "mlp_bias": False, "draft_top_k": None}
QWEN3_EMBEDDING = COMMON | {"embedding_scale": 1.0, "final_logit_softcapping": None, "rope_interleaved": False}
_GEMMA_FEATURES = ("value_norm", "attention_k_eq_v", "sandwich_norms", "layer_scalar")
QWEN3_LAYERS = QWEN3_EMBEDDING | dict.fromkeys(_GEMMA_FEATURES, False)
QWEN3_LAYERS |= {"qk_norm": True, "attention_sinks": False}
# Why a draft cannot be held whose field has another value than the constant of a format.
REASONS = {(name, False): "its layers are those of Qwen3, not of Gemma" for name in _GEMMA_FEATURES} | {
    ("qk_norm", True): "its layers normalise queries and keys, the draft's do not",
    ("mlp_bias", False): "it has no biases in the MLPs",
    ("attention_bias", False): "its projections have no biases",
    ("mtp", False): "its drafts are no MTP modules",
    ("mask_token_id", None): "its drafts propose one token a pass (mask_token_id): use the format 'speculators'",
    ("attention_sinks", False): "its attention has no sinks: use the format 'sglang'",
    ("rope_interleaved", False): "it turns the halves of a head against each other, this draft neighbours "
    "(rope_interleaved): use the format 'sglang'",
    ("markov_rank", 0): "it has no Markov head",
    ("enable_confidence_head", False): "it has no confidence head",
    ("draft_vocab_size", None): "it has no pruned vocabulary: use the format 'speculators'",
    ("draft_top_k", None): "it has no draft_top_k, which changes the draft distribution: set draft_top_k = None",
    ("sample_from_anchor", False): "it drops the anchor's slot, from which this draft predicts its first token: every "
    "token would be read one position late. Train one with sample_from_anchor=False",
}
QWEN3_BASE = {"model_type": "qwen3", "tie_word_embeddings": False, "max_window_layers": 28, "use_cache": True}

ONE_BIAS_FLAG = {
    "it has one flag for the biases of q, k, v and o; here they differ": lambda c: (
        c.attention_bias != c.attention_output_bias
    )
}
NO_SUCCESSORS = {
    "it has no place for the convolutions and the selector of DFlash 2, nor for the head of Domino": lambda c: (
        getattr(c, "conv_kernel_size", 0) > 0
        or (c.markov_rank > 0 and (c.markov_start > 0 or c.markov_head_type in ("selector", "domino")))
    )
}
NO_V4_LAYERS = {
    "its layers have no experts, hyper-connections or attention of low rank (num_experts, hc_mult, q_lora_rank), and "
    "its heads read states after the final norm (v4_heads)": lambda c: (
        c.num_experts or c.hc_mult or c.q_lora_rank or getattr(c, "v4_heads", False)
    )
}
ONLY_QWEN3_LAYERS = {
    **NO_SUCCESSORS,
    **NO_V4_LAYERS,
    "it scales attention scores by head_dim ** -0.5 and has no field for another factor": lambda c: (
        getattr(c, "attention_scaling", None) not in (None, c.head_dim**-0.5)
    ),
    "it reads embedding rows without the norm in this target's embedding, this draft with it": lambda c: (
        has_embedding_norm(c.target_model_type) and c.embedding_norm
    ),
    **ONE_BIAS_FLAG,
    "it rotates whole heads and has no field for partial_rotary_factor": lambda c: (
        c.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0
    ),
}
NO_FILL_IN = {
    "it drafts from the anchor's slot; this draft has the fill-in layout, whose anchor predicts nothing, and would be "
    "read one position early: use the format 'speculators'": lambda c: not getattr(c, "sample_from_anchor", True)
}
NO_WINDOW_FROM_ANCHOR = {
    "its sliding windows count from each slot, this draft's from the anchor: use the format 'speculators'": lambda c: (
        slides(c) and getattr(c, "sliding_from_anchor", False)
    )
}


# ---- what speculators writes for drafts of all kinds

SPECULATORS_LAYERS = "transformer_layer_config."
# Of sets by layer type, its rotary embedding takes the one of sliding layers.
SPECULATORS_ROPE = Field(
    "rope_parameters",
    SPECULATORS_LAYERS + "rope_parameters",
    read=lambda c: rope(c, SPECULATORS_LAYERS, "sliding_attention"),
    reads=tuple(SPECULATORS_LAYERS + place for place in ROPE_PLACES),
)
_PROPOSAL_METHOD = {"proposal_type": "greedy", "accept_tolerance": 0.0, "verifier_accept_k": 1}
SPECULATORS_WRITES: Mapping[str, Write] = {
    "speculators_config.verifier.architectures": lambda c, target: target.architectures,
    "speculators_config.verifier.name_or_path": lambda c, target: target.name_or_path,
    "speculators_config.proposal_methods": lambda c, target: [_PROPOSAL_METHOD | {"speculative_tokens": c.block_size}],
}


def speculators_base(kind: str, model: str) -> dict[str, Any]:
    return {
        "architectures": [model],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy"},
        "transformer_layer_config": QWEN3_BASE,
    }


def proposed_tokens(config: Source) -> Any:
    """Return how many tokens its first method proposes, `None` if that is not said."""
    proposals = look_up(config, "speculators_config.proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None


def speculators_vocab(config: Source) -> Any:
    size = look_up(config, "draft_vocab_size")
    return None if size == look_up(config, SPECULATORS_LAYERS + "vocab_size") else size
