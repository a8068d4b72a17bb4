"""What the tables of checkpoint formats are made of, and the rows that several formats share.

Knows of no format, and nothing of files, tensors or models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

REQUIRED: Any = object()
# Written by no format: the place stays empty.
OMIT: Any = object()

# What our config says of a draft of Qwen3 layers, which is what most formats hold.
QWEN3_LAYERS = {
    "qk_norm": True,
    "value_norm": False,
    "attention_k_eq_v": False,
    "sandwich_norms": False,
    "layer_scalar": False,
    "attention_scaling": None,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "mlp_bias": False,
    "attention_sinks": False,
}


@dataclass(frozen=True)
class TargetFacts:
    """What a conversion may need to know of the target.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers (`int`): Sizes of its text model.
        model_type (`str`): Of its text model.
        architectures (`list[str]`, *optional*): As its config names them.
        name_or_path (`str`, *optional*): Where serving engines find it.
        embedding_scale (`float`): Factor on its embedding rows.
        embedding_norm (`bool`): Whether its embedding has a norm inside.
        text_config (`dict`): Its text configuration, as it would be saved.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    model_type: str
    architectures: list[str] | None
    name_or_path: str | None
    embedding_scale: float
    embedding_norm: bool
    text_config: dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One of our fields that stands in one place of a foreign configuration.

    Attributes:
        name (`str`): Ours.
        path (`str`): Theirs, with dots between nested names; ours unless given.
        default (`Any`): What it means there if it is missing; without a default it must be there.
        decode, encode (`Callable`): Their value to ours, and back.
        written (`Callable`): For which of our configurations it is written.
    """

    name: str
    path: str = ""
    default: Any = REQUIRED
    decode: Callable[[Any], Any] = lambda value: value
    encode: Callable[[Any], Any] = lambda value: value
    written: Callable[[PreTrainedConfig], bool] = lambda config: True

    @property
    def place(self) -> str:
        """Where it stands in the foreign configuration."""
        return self.path or self.name


@dataclass(frozen=True)
class Refusal:
    """What a format or an engine cannot hold, and why.

    Attributes:
        applies (`Callable`): From our configuration (when exporting) or from theirs (when importing).
        reason (`str`): Why, and the way out where there is one.
    """

    applies: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class Format:
    """A foreign layout of checkpoints.

    Attributes:
        name (`str`): By which it is asked for.
        model_type (`str`): Of our configuration: the kind of draft.
        recognise (`Callable`): Whether a `config.json` is of this format.
        fields (`tuple[Field, ...]`): One to one, both ways.
        reads (`Mapping[str, Callable]`): Our fields that need more than one of theirs, from their configuration.
        writes (`Mapping[str, Callable]`): Their places that need more than one of our fields, from our configuration
            and the target's facts.
        constants (`Mapping[str, Any]`): Ours, true of all checkpoints of the format.
        base (`Callable`): What is written before all else.
        unreadable (`tuple[Refusal, ...]`): Theirs that cannot be imported.
        refusals (`tuple[Refusal, ...]`): Ours that cannot be exported.
        renamed (`Mapping[str, str]`): Our names of tensors to theirs.
        copies (`tuple[str, ...]`): The target's tensors that it holds copies of.
        needs_target (`bool`): Whether its configuration does not say all, so that importing needs the target's.
        names_target (`bool`): Whether it says where the target is, so that exporting needs it.
        keeps_target_depth (`bool`): Whether it says how many layers the target has.
        engines (`tuple[str, ...]`): Who reads it.
    """

    name: str
    model_type: str
    recognise: Callable[[dict[str, Any]], bool]
    fields: tuple[Field, ...]
    reads: Mapping[str, Callable[[dict[str, Any]], Any]]
    writes: Mapping[str, Callable[[PreTrainedConfig, TargetFacts | None], Any]]
    constants: Mapping[str, Any]
    engines: tuple[str, ...]
    base: Callable[[TargetFacts | None], dict[str, Any]] = lambda facts: {}
    unreadable: tuple[Refusal, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    needs_target: bool = False
    names_target: bool = False
    keeps_target_depth: bool = True


# ---- reading places of a configuration


def look_up(config: Mapping[str, Any], path: str, default: Any = REQUIRED) -> Any:
    """Return what stands at a dotted place of a foreign configuration.

    Raises:
        ValueError: If it is not there and there is no default.
    """
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            if default is REQUIRED:
                raise ValueError(f"config.json lacks {path!r}, without which the draft cannot be built")
            return default
        value = value[name]
    return value


def integers(config: Mapping[str, Any], path: str) -> list[int]:
    value = look_up(config, path)
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise ValueError(f"config.json: {path!r} must be a list of integers, got {value!r}")
    return value


def integer(config: Mapping[str, Any], path: str, default: Any = REQUIRED) -> Any:
    value = look_up(config, path, default)
    if value is not default and type(value) is not int:
        raise ValueError(f"config.json: {path!r} must be an integer, got {value!r}")
    return value


def mapping(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    value = look_up(config, path, None)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"config.json: {path!r} must be an object, got {value!r}")
    return value or {}


def any_of(*paths: str, default: Any = REQUIRED) -> Callable[[dict[str, Any]], Any]:
    """Read the first of several places that is filled."""

    def read(config: dict[str, Any]) -> Any:
        for path in paths:
            value = look_up(config, path, None)
            if value is not None:
                return value
        return look_up(config, paths[0], default)

    return read


def rope(prefix: str = "") -> Callable[[dict[str, Any]], dict | None]:
    """Read rotary parameters as transformers 5 writes them, or as it did before (`rope_theta`, `rope_scaling`)."""

    def read(config: dict[str, Any]) -> dict | None:
        parameters = mapping(config, prefix + "rope_parameters")
        if not parameters and (theta := look_up(config, prefix + "rope_theta", None)) is not None:
            scaling = dict(mapping(config, prefix + "rope_scaling"))
            kind = scaling.pop("type", None)
            parameters = {"rope_type": kind or "default", "rope_theta": theta} | scaling
        if not parameters:
            raise ValueError(f"config.json lacks {prefix + 'rope_parameters'!r}: where tokens stand is not known")
        # A draft reads text only, whose positions are the same in all sections of a multimodal target's.
        return {key: value for key, value in parameters.items() if not key.startswith("mrope_")}

    return read


def architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else []


def has_sliding(layer_types: Any) -> bool:
    return isinstance(layer_types, list) and "sliding_attention" in layer_types


def slides(config: PreTrainedConfig) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or [])


# ---- rows that several formats share


def geometry(prefix: str = "") -> tuple[Field, ...]:
    defaults = {
        "vocab_size": REQUIRED, "hidden_size": REQUIRED, "intermediate_size": REQUIRED,
        "num_hidden_layers": REQUIRED, "num_attention_heads": REQUIRED, "num_key_value_heads": REQUIRED,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 40960, "initializer_range": 0.02,
        "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "attention_bias": False, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return tuple(Field(name, prefix + name, default) for name, default in defaults.items())


HEADS = (
    Field("markov_rank", default=0),
    Field("markov_head_type", default="vanilla"),
    Field("enable_confidence_head"),
    Field("confidence_head_with_markov", default=False),
)
TARGET_LAYERS = (Field("num_target_layers"), Field("target_layer_ids"))


def has_embedding_norm(model_type: str) -> bool:
    """Tell whether targets of a type normalise rows inside their embedding."""
    return model_type.startswith("muse_glimmer")


_GEMMA_FEATURES = ("value_norm", "attention_k_eq_v", "sandwich_norms", "layer_scalar")
ONLY_QWEN3_LAYERS = (
    Refusal(lambda c: not getattr(c, "qk_norm", True), "its layers normalise queries and keys, the draft's do not"),
    Refusal(
        lambda c: any(getattr(c, name, False) for name in _GEMMA_FEATURES),
        "its layers are those of Qwen3: it has no place for Gemma's value norm, shared keys and values, norms around "
        "the sublayers or layer scalars",
    ),
    Refusal(
        lambda c: getattr(c, "attention_scaling", None) not in (None, c.head_dim**-0.5),
        "it scales attention scores by head_dim ** -0.5 and has no field for another factor",
    ),
    Refusal(lambda c: c.embedding_scale != 1.0, "it has no field for embedding_scale and reads the rows as they are"),
    Refusal(
        lambda c: has_embedding_norm(str(c.target_model_type)) and c.embedding_norm,
        "it reads embedding rows without the norm that this target has inside its embedding, this draft with it",
    ),
    Refusal(lambda c: c.logit_scale != 1.0, "it has no field for logit_scale"),
    Refusal(lambda c: c.final_logit_softcapping is not None, "it has no field for final_logit_softcapping"),
    Refusal(lambda c: c.mlp_bias, "it has no biases in the MLPs"),
    Refusal(
        lambda c: c.attention_bias != c.attention_output_bias,
        "it has one flag for the biases of q, k, v and o; here they differ",
    ),
    Refusal(
        lambda c: c.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0,
        "it rotates whole heads and has no field for partial_rotary_factor",
    ),
)  # fmt: skip
NO_RUN_SETTINGS = (
    Refusal(
        lambda c: c.draft_top_k is not None,
        "it has no field for draft_top_k, which changes the draft law: set draft.config.draft_top_k = None first",
    ),
)
NO_FILL_IN = Refusal(
    lambda c: not getattr(c, "sample_from_anchor", True),
    "it drafts from the anchor's slot; this draft has the fill-in layout, whose anchor predicts nothing, and would be "
    "read one position early: use the format 'speculators'",
)
NO_PRUNING = Refusal(
    lambda c: getattr(c, "draft_vocab_size", None) is not None,
    "it has no pruned vocabulary: use the format 'speculators'",
)
NO_SINKS = Refusal(
    lambda c: getattr(c, "attention_sinks", False),
    "its attention has no sinks: use the format 'sglang'",
)
NO_WINDOW_FROM_ANCHOR = Refusal(
    lambda c: slides(c) and getattr(c, "sliding_from_anchor", False),
    "its sliding windows count from each slot, this draft's from the anchor: use the format 'speculators'",
)
