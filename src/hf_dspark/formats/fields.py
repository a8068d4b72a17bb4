"""What the table of checkpoint formats is made of, and the fields that several formats share.

A format says where each of our configuration's fields stands in its own `config.json`, and what it cannot hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

Source = Mapping[str, Any]  # a foreign config.json

REQUIRED: Any = object()
OMIT: Any = object()  # the `write` of a field that has no place there

# Rotary types whose frequencies do not depend on the current length: cached keys stay valid as the context grows.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True)
class TargetFacts:
    """What a conversion may need to know of the target."""

    config: PreTrainedConfig
    name_or_path: str | None  # where serving engines find it
    embedding_scale: float  # factor on its embedding rows

    @property
    def text(self) -> PreTrainedConfig:
        """The configuration of its text model."""
        return self.config.get_text_config(decoder=True)


Write = Callable[[PreTrainedConfig, TargetFacts | None], Any]


@dataclass(frozen=True)
class Field:
    """One of our fields and its place in a foreign configuration."""

    name: str  # ours
    path: str = ""  # their place, with dots between nested names; our name unless given
    default: Any = REQUIRED  # what a missing value means there
    also: tuple[str, ...] = ()  # other places that checkpoints have used; the first one that is filled counts
    read: Callable[[Source], Any] | None = None  # our value from their configuration, if no single place holds it
    write: Any = None  # a `Write` of their value from our configuration, if it is not ours

    @property
    def place(self) -> str:
        return self.path or self.name

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
    base: Callable[[TargetFacts | None], dict[str, Any]]  # what is written before all else
    model_type: str = "dspark"  # of our configuration: the kind of draft
    writes: Mapping[str, Write] = field(default_factory=dict)  # their places that none of our fields fills alone
    accepts: Mapping[str, tuple] = field(default_factory=dict)  # their places, and the values that can be imported
    unreadable: Rules = field(default_factory=dict)  # theirs that cannot be imported for other reasons
    refusals: Rules = field(default_factory=dict)  # ours that cannot be exported for other reasons
    renamed: Mapping[str, str] = field(default_factory=dict)  # our names of tensors to theirs
    copies: tuple[str, ...] = ()  # the target's tensors that it holds copies of
    names_target: bool = False  # so exporting needs the target


# ---- reading places of a configuration


def look_up(config: Source, *places: str, default: Any = None) -> Any:
    """Return what stands at the first of several dotted places that is filled; null fills none."""
    for place in places:
        value: Any = config
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    if default is REQUIRED:
        raise ValueError(f"config.json lacks {places[0]!r}, without which the draft cannot be built")
    return default


def integer(config: Source, *places: str) -> int:
    value = look_up(config, *places, default=REQUIRED)
    if type(value) is not int:
        raise ValueError(f"config.json: {places[0]!r} must be an integer, got {value!r}")
    return value


def rope(config: Source, prefix: str = "") -> dict[str, Any]:
    """Return rotary parameters, as transformers 5 or its earlier versions write them."""
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    parameters, scaling, theta = (look_up(config, prefix + name) for name in names)
    for value in (parameters, scaling):
        if not isinstance(value or {}, Mapping):
            raise ValueError(f"config.json: {prefix}rope_parameters must be an object, got {value!r}")
    if not parameters and theta is not None:
        older = dict(scaling or {})
        parameters = {"rope_type": older.pop("type", None) or "default", "rope_theta": theta} | older
    if not parameters:
        raise ValueError(f"config.json lacks {prefix + 'rope_parameters'!r}: where tokens stand is not known")
    return _of_text(parameters)


def full_attention_rope(rope_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the rotary parameters of a target's full-attention layers, if a draft can use them, else the default."""
    # Gemma 3 and 4 keep one set per layer type; layers without rotation have `None`.
    flat = (rope_parameters or {}).get("full_attention", rope_parameters)
    if flat is None:
        return None
    flat = {key: value for key, value in flat.items() if value is not None and not isinstance(value, dict)}
    if flat.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": flat.get("rope_theta", 1_000_000.0)}
    return _of_text(flat)


def _of_text(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A draft reads text, whose positions are the same in all sections of a multimodal target's."""
    return {key: value for key, value in parameters.items() if not key.startswith("mrope_")}


def of_full_attention(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config in which values that differ by layer (Gemma 4's head size) are those of full attention."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    kinds = list(getattr(text, "layer_types", None) or ())
    return text.per_layer_config[kinds.index("full_attention") if "full_attention" in kinds else -1]


def architectures(config: Source) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def slides(config: PreTrainedConfig) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


def slides_there(config: Source, prefix: str = "") -> bool:
    layer_types = look_up(config, prefix + "layer_types")
    return isinstance(layer_types, list) and "sliding_attention" in layer_types


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


# What every format but ours takes for granted, and what most do: Qwen3's layers.
COMMON = {"logit_scale": 1.0, "mlp_bias": False, "draft_top_k": None}
QWEN3_EMBEDDING = COMMON | {"embedding_scale": 1.0, "final_logit_softcapping": None}
_GEMMA_FEATURES = ("value_norm", "attention_k_eq_v", "sandwich_norms", "layer_scalar")
QWEN3_LAYERS = QWEN3_EMBEDDING | dict.fromkeys(_GEMMA_FEATURES, False) | {"qk_norm": True, "attention_sinks": False}
# Why a draft cannot be held whose field has another value than the constant of a format.
REASONS = {(name, False): "its layers are those of Qwen3, not of Gemma" for name in _GEMMA_FEATURES} | {
    ("qk_norm", True): "its layers normalise queries and keys, the draft's do not",
    ("mlp_bias", False): "it has no biases in the MLPs",
    ("attention_bias", False): "its projections have no biases",
    ("attention_sinks", False): "its attention has no sinks: use the format 'sglang'",
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
ONLY_QWEN3_LAYERS = {
    **NO_SUCCESSORS,
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
