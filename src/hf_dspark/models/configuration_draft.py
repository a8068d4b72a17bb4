"""What the configurations of all drafts have in common: facts about the model, and nothing else.

A `config.json` may come from a stranger: every value is checked before anything is built from it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..files import one_line, shortened
from ..formats.checkpoint import HUB_ARGUMENTS, QUANTISATION, Checkpoint
from ..formats.fields import ROPE_TYPES, full_attention_rope, of_full_attention, rope
from ..formats.keys import is_neutral, unknown_key
from ..formats.translate import CLASS_NAMES, draft_model_type, places_of, read_draft_config
from ..scheduling.calibration import LogitFits, check_logit_fits, check_temperatures
from ..scheduling.tree_plans import SiblingAcceptance, usual_acceptance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Target: TypeAlias = "PreTrainedConfig | PreTrainedModel"
CALIBRATED = ("sts_temperatures", "confidence_fits", "sibling_acceptance")  # the fields that a calibration sets
# What each type needs besides rope_theta.
ROPE_NUMBERS = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# The largest ones are far above any model there is: no product of two overflows, and a config cannot ask for more.
SIZES = {
    "vocab_size": (1, 2**24), "hidden_size": (1, 2**17), "intermediate_size": (1, 2**20), "head_dim": (1, 2**13),
    "num_hidden_layers": (1, 512), "num_attention_heads": (1, 2**12), "num_key_value_heads": (1, 2**12),
    "block_size": (1, 256), "num_target_layers": (1, 2**12), "target_hidden_size": (1, 2**17),
    "max_position_embeddings": (1, 2**31), "draft_window": (1, 2**31), "markov_rank": (0, 2**16),
    "markov_state_size": (1, 2**17), "num_experts": (0, 2**12), "moe_intermediate_size": (1, 2**20),
    "hc_mult": (0, 64), "q_lora_rank": (1, 2**17), "o_lora_rank": (1, 2**17),
}  # fmt: skip
MAX_TARGET_LAYER_IDS = 256
# The tensors that a draft shares with its target unless it has its own, and the fields that say so.
SHAREABLE = {"embed_tokens.weight": "own_embedding", "lm_head.weight": "own_lm_head"}
LARGEST = torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Keys of a config.json that say how weights are found, patched or quantised; for a draft, the loader alone decides.
REFUSED_KEYS = (
    "configuration_files", "fusion_config", "kernel_config", "quantization_config", "transformers_weights",
)  # fmt: skip
BITSANDBYTES_ALONE = (
    "Drafts are quantised by bitsandbytes or not at all: take weights of full precision, and load them as they are or "
    "with quantization_config=BitsAndBytesConfig(load_in_8bit=True), or load_in_4bit=True"
)
# Keys that transformers, or its earlier versions, may write, and that say nothing about a draft.
IGNORED_KEYS = (
    "attn_implementation", "experts_implementation", "id2label", "label2id", "name_or_path", "num_labels",
    "output_attentions", "use_return_dict",
)  # fmt: skip


@strict
class DraftConfig(PreTrainedConfig):
    """Base of the configurations of all drafts.

    `vocab_size`, `hidden_size`, `embedding_scale`, `logit_scale` and `final_logit_softcapping` describe the embedding
    and the LM head that a draft uses: the target's, or its own.

    Args:
        vocab_size, hidden_size (`int`): V and d of the target; the draft's d is the same.
        intermediate_size, num_hidden_layers (`int`): Width of the draft's MLPs, and its layers.
        num_attention_heads, num_key_value_heads, head_dim (`int`): Attention geometry; heads * head_dim may differ
            from d.
        hidden_act (`str`), initializer_range, rms_norm_eps (`float`): As in transformers.
        max_position_embeddings (`int`): Longest context, in tokens.
        rope_parameters (`dict`): Rotary parameters as in transformers, one set for all layers.
        rope_interleaved (`bool`): Each entry of a head turns with its neighbour (GPT-J, LFM2.5's drafts) instead of
            the one half a head away.
        attention_bias, attention_output_bias, mlp_bias (`bool`): Biases of q/k/v, o and MLP projections.
        qk_norm (`bool`): RMS norm on queries and keys per head (Qwen3, Gemma 3 and 4).
        attention_dropout (`float`): Dropout of attention weights in training.
        embedding_scale, logit_scale (`float`): Factors on the embedding rows and on the LM head's output.
        final_logit_softcapping (`float`, *optional*): cap * tanh(logits / cap) on the LM head's output.
        block_size (`int`): γ, the number of draft tokens.
        num_target_layers (`int`, *optional*): Layers of the target; `None` where a checkpoint does not say.
        target_layer_ids (`list[int]`): Tapped target layers: -1 is the embedding output, i the output of decoder
            layer i. The last layer, which transformers reports after the final norm, is for MTP drafts alone, and for
            those of DeepSeek-V4, whose streams are read before that.
        draft_vocab_size (`int`, *optional*): V_d of a draft with a pruned vocabulary, which has an LM head of its own
            and never proposes any other token; `None` for the target's whole vocabulary.
        draft_top_k (`int`, *optional*): Draft among k candidates of each slot only, which is as exact, and saves the
            Markov head's products with large vocabularies.
        draft_window (`int`, *optional*): How many tokens before the anchor blocks see in decoding, unless the options
            of a call say otherwise; `None` is 4096.
        target_model_type (`str`, *optional*): The `model_type` of the target, for messages and cards.
        own_embedding, own_lm_head (`bool`): Whether the draft has weights of its own, `embed_tokens.weight` or
            `lm_head.weight`, that are not copies of the target's. Loading and binding find that out.

    Raises:
        ValueError: For each inconsistent value, naming it.
    """

    # What a draft has unless its own configuration says otherwise.
    markov_rank: ClassVar[int] = 0
    enable_confidence_head: ClassVar[bool] = False
    confidence_head_with_markov: ClassVar[bool] = False
    sts_temperatures: ClassVar[dict[str, list[float]] | None] = None
    confidence_fits: ClassVar[dict[str, list[list[float]]] | None] = None
    sibling_acceptance: ClassVar[dict[str, Any] | None] = None
    embedding_norm: ClassVar[bool] = True
    attention_scaling: ClassVar[float | None] = None
    layer_types: ClassVar[list[str] | None] = None
    value_norm: ClassVar[bool] = False
    attention_k_eq_v: ClassVar[bool] = False
    attention_sinks: ClassVar[bool] = False
    sandwich_norms: ClassVar[bool] = False
    layer_scalar: ClassVar[bool] = False
    target_hidden_size: ClassVar[int | None] = None
    mtp: ClassVar[bool] = False
    num_experts: ClassVar[int] = 0
    hc_mult: ClassVar[int] = 0
    q_lora_rank: ClassVar[int | None] = None
    # Whether a block takes one pass per token; if so, each context slot also reads the committed token after it.
    is_autoregressive: ClassVar[bool] = False
    taps_by_depth: ClassVar[bool] = False  # whether `target_layer_ids` may be left to the depth of the target

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    rope_interleaved: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    attention_dropout: float | int = 0.0
    embedding_scale: float | int = 1.0
    logit_scale: float | int = 1.0
    final_logit_softcapping: float | None = None
    block_size: int = 7
    num_target_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    draft_top_k: int | None = None
    draft_window: int | None = None
    target_model_type: str | None = None
    own_embedding: bool = False
    own_lm_head: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    # transformers looks for other names, and for layers that differ: a draft has neither, and a round asks often.
    __getattribute__ = object.__getattribute__

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.target_layer_ids is None and not self.taps_by_depth:
            raise ValueError(f"{type(self).__name__}.num_target_layers must be known to choose tapped layers")
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
        super().__post_init__(**kwargs)
        self.check_values()

    def check_values(self, *names: str) -> None:
        """Raise a `ValueError` at the first rule that does not hold, of all fields or of some."""
        for holds, name, need in self.rules():
            if not holds and (not names or name in names):
                raise ValueError(f"{type(self).__name__}.{name} must {need}, got {shortened(getattr(self, name))}")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield whether a rule holds, the field it is about, and what that must do; later rules need earlier ones."""
        for name, (least, most) in SIZES.items():
            size = getattr(self, name, None)  # other kinds of drafts have some of them
            yield size is None or least <= size <= most, name, f"lie in [{least}, {most}]"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)  # NaN compares false
            yield type(value) is not float or abs(value) <= LARGEST, field.name, "be finite in float32"
        for name in ("embedding_scale", "logit_scale", "final_logit_softcapping", "rms_norm_eps"):
            yield getattr(self, name) is None or getattr(self, name) > 0, name, "be positive"
        heads, tokens = self.num_attention_heads, self.num_draft_tokens
        ids = [0] if self.target_layer_ids is None else self.target_layer_ids
        last = (self.num_target_layers or SIZES["num_target_layers"][1]) - 1
        the_last = f"lie in [-1, {last - 1}]: the last layer ({last}) is only visible after the final norm"
        yield self.initializer_range >= 0, "initializer_range", "not be negative"
        yield 0 <= self.attention_dropout < 1, "attention_dropout", "lie in [0, 1)"
        yield self.head_dim % 2 == 0, "head_dim", "be even (rotary embedding)"
        yield heads % self.num_key_value_heads == 0, "num_key_value_heads", f"divide {heads} attention heads"
        yield len(set(ids)) == len(ids), "target_layer_ids", "be distinct"
        yield 1 <= len(ids) <= MAX_TARGET_LAYER_IDS, "target_layer_ids", f"be 1 to {MAX_TARGET_LAYER_IDS} layers"
        counts_taps = len(ids) == self.num_target_layers and max(ids, default=0) > last
        whole = f"count all layers of the target, not the {len(ids)} that are tapped (target_layer_ids {ids})"
        yield not counts_taps, "num_target_layers", whole
        reads_last = self.mtp or self.target_model_type == "deepseek_v4"
        yield all(-1 <= layer < last + reads_last for layer in ids), "target_layer_ids", the_last
        top_k = self.draft_top_k
        yield top_k is None or 1 <= top_k <= tokens, "draft_top_k", f"lie in [1, {tokens}], or be None"
        pruned = self.draft_vocab_size
        yield pruned is None or 1 <= pruned <= self.vocab_size, "draft_vocab_size", f"lie in [1, {self.vocab_size}]"
        yield self.hidden_act in ACT2FN, "hidden_act", "name an activation that transformers knows"
        yield self.dtype is None or self.dtype in DTYPES, "dtype", f"be one of {DTYPES}"

        rope, name = self.rope_parameters, "rope_parameters"
        kind = rope.get("rope_type", "default")
        yield kind in ROPE_TYPES, name, f"have a rope_type of {ROPE_TYPES}: others would spoil cached keys"
        numbers = {key: value for key, value in rope.items() if type(value) in (int, float)}
        for key in ("rope_theta", *ROPE_NUMBERS.get(kind, ())):
            yield key in numbers, name, f"have a number {key} for the type {kind}"
        plain = all(isinstance(value, (str, bool, int, float)) for value in rope.values())
        yield plain, name, "have numbers, names and flags for values"
        in_range = all(0 < value <= LARGEST for value in numbers.values()) and numbers["rope_theta"] > 1
        yield in_range, name, "have positive numbers, finite in float32, and a rope_theta above 1"
        turned = self.head_dim * numbers.get("partial_rotary_factor", 1.0)
        yield 2 <= turned <= self.head_dim, name, f"turn between 2 and all of the {self.head_dim} entries of a head"

    def check_entries(self, name: str, check: Callable[[Any, int], None]) -> None:
        """Check each entry of a field that maps names to what γ positions have; a `ValueError` names the entry."""
        for key, entry in (getattr(self, name) or {}).items():
            try:
                check(entry, self.block_size)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{type(self).__name__}.{name}[{key!r}]: {error}") from error

    def siblings_for(self, do_sample: bool) -> SiblingAcceptance:
        """Return what to expect of nodes: what was measured, or else what holds for many drafts."""
        entry = (self.sibling_acceptance or {}).get("sampled" if do_sample else "greedy")
        return usual_acceptance(do_sample, self.block_size) if entry is None else SiblingAcceptance(do_sample, **entry)

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def shareable(self) -> dict[str, str]:
        """Those of [`SHAREABLE`] that have the target's shape: the head of a pruned vocabulary has other rows."""
        return {name: field for name, field in SHAREABLE.items() if "head" not in name or not self.draft_vocab_size}

    @property
    def num_slots(self) -> int:
        """Slots of a block: γ, and one more where the anchor's predicts nothing."""
        return self.block_size

    @property
    def feature_size(self) -> int:
        """d of the target, which is the draft's own unless it says otherwise."""
        return self.target_hidden_size or self.hidden_size

    def confidence_fits_for(self, domain: str | None, do_sample: bool) -> LogitFits | None:
        """Return slopes and offsets of a domain, else of the sampling regime, else the default; `None` without any.

        A domain's entry for one regime, such as `math/greedy`, comes before its common one. A `ValueError` says that a
        domain was not calibrated, or that its numbers are not those of γ positions.
        """
        known, fits = self.sts_temperatures or {}, self.confidence_fits or {}
        regime = "sampled" if do_sample else "greedy"
        for name in (regime, "default") if domain is None else (f"{domain}/{regime}", domain):
            if name in fits:
                check_logit_fits(fits[name], self.block_size)
                return fits[name]
            if name in known:
                check_temperatures(known[name], self.block_size)
                return [(1.0 / temperature, 0.0) for temperature in known[name]]
        if domain is None:
            return None
        raise ValueError(
            f"the draft has no calibration for the domain {domain!r}, only for {sorted({*known, *fits})}: calibrate "
            "it there, or decode with DecodingOptions(domain=...) of one of these or None"
        )

    @classmethod
    def from_target(cls, target_config: Target, **overrides: Any) -> "DraftConfig":
        """Return the configuration of an untrained draft for a target.

        It taps five evenly spaced layers, and takes over geometry, rotary parameters and scales. Its layers turn whole
        heads, as those of all formats do, whatever part of a head the target's turn.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration, or the target; the text part is used.
            overrides: Any field of the configuration.

        Raises:
            TypeError: If this is neither, or there is no such field.
            ValueError: If the target is an encoder-decoder.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(overrides.keys() - set(fields)):
            near = get_close_matches(unknown[0], fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}{hint}")
        text = of_full_attention(text_config(target_config))
        # A target without attention has no geometry to take over.
        num_heads = getattr(text, "num_attention_heads", None) or max(1, text.hidden_size // 64)
        width = getattr(text, "intermediate_size", None)
        positions = getattr(text, "max_position_embeddings", None) or 0
        activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
        facts = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": (width[0] if isinstance(width, (list, tuple)) else width) or 4 * text.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "hidden_act": activation or "silu",
            "max_position_embeddings": positions if positions > 0 else 32768,  # XLNet's -1 is without end
            "initializer_range": getattr(text, "initializer_range", 0.02),
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_parameters": full_attention_rope(getattr(text, "rope_parameters", None)),
            **target_scales(text),
            "num_target_layers": text.num_hidden_layers,
            "target_model_type": text.model_type,
        } | {name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        return cls(**(facts | overrides))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Read the `config.json` of a folder or a repository on the Hub. Nothing that it names is followed or run.

        `kwargs` are as in transformers. A `ValueError` names file and field if it is no sound configuration.
        """
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        checkpoint = Checkpoint.open(pretrained_model_name_or_path, **hub)
        with naming_file(checkpoint):
            return super().from_pretrained(checkpoint, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from a `config.json`; refuses keys that are no facts of a draft by a `ValueError`."""
        known = {key: value for key, value in config_dict.items() if key not in IGNORED_KEYS and key[:1] != "_"}
        fields = {field.name for field in dataclasses.fields(cls)}
        # As if the file said so; set afterwards, as transformers does, nothing would be checked.
        known |= {name: kwargs.pop(name) for name in (fields - {"dtype"}) & kwargs.keys()}
        # Where transformers had them once. It would let them overrule what stands in ours.
        earlier = {name: known.pop(name, None) for name in ("rope_scaling", "rope_theta")}
        if any(value is not None for value in earlier.values()):
            found = rope(known | earlier)  # unless they disagree
            known["rope_parameters"] = known.get("rope_parameters") or found
        for key, value in known.items():
            if key in REFUSED_KEYS or (key not in fields and key not in _OTHER_KEYS and hasattr(cls, key)):
                cure = "which is no fact about a draft: delete it if you trust the rest"
                if key == QUANTISATION:
                    cure = f"{shortened(value)}. {BITSANDBYTES_ALONE}"
                raise ValueError(f"config.json has the key {key!r}, {cure}")
            if key not in fields and not is_neutral(key, value, must_be_known=False):
                raise ValueError(unknown_key(key, key, value))
            if key in ("dtype", "torch_dtype") and isinstance(value, str) and f"torch.{value}" not in map(str, DTYPES):
                raise ValueError(f"{cls.__name__}.{key} must be one of {DTYPES}, got {shortened(value)}")
            # Before anything is built that is as long as it says.
            if type(value) is int and value > SIZES.get(key, (0, value))[1]:
                raise ValueError(f"{cls.__name__}.{key} must be at most {SIZES[key][1]}, got {value}")
        try:
            return super().from_dict(known, **kwargs)
        except _MISREADINGS as error:
            raise ValueError(f"{cls.__name__}: {_reason(error)}") from None

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Read our own `config.json`, or one of another project's formats; see [`read_draft_config`]."""
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        checkpoint = Checkpoint.open(pretrained_model_name_or_path, **hub)
        kwargs = {name: value for name, value in kwargs.items() if name not in _LOADER_ARGUMENTS}
        if draft_model_type(checkpoint.config) not in (cls.model_type, None):
            kind, found = cls.__name__.removesuffix("Config"), checkpoint.config
            other = CLASS_NAMES.get(draft_model_type(found))
            cure = f"pass one of model_type {cls.model_type!r}, or one that DeepSpec, speculators or SpecForge wrote"
            raise ValueError(
                f"{checkpoint.name} holds a {found.get('model_type')!r} model (architectures "
                f"{found.get('architectures')}), which is no {kind} draft: "
                f"{cure if other is None else f'load it with {other}.from_pretrained'}"
            )
        return read_draft_config(checkpoint, sample_from_anchor=kwargs.get("sample_from_anchor")), kwargs


@contextmanager
def naming_file(checkpoint: Checkpoint) -> Iterator[None]:
    """Let an error about a configuration name its file, and the key there that holds the field at fault."""
    places = places_of(checkpoint.config)
    try:
        yield
    except (ValueError, *_MISREADINGS) as error:
        message = _reason(error)
        field = re.search(r"Config\.(\w+)", message)
        if field and field[1] in places:
            message += f" (in config.json: {places[field[1]]!r})"
        raise ValueError(message if checkpoint.name in message else f"{checkpoint.name}: {message}") from None


# What code that expects sound values raises on others.
_MISREADINGS = (StrictDataclassError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)
# Keys that are properties of the base class and are turned into fields by it.
_OTHER_KEYS = ("model_type", "torch_dtype")
# Passed on by transformers' loaders; they say nothing about a configuration.
_LOADER_ARGUMENTS = ("trust_remote_code", "_from_pipeline", "_from_auto", "gguf_file")


def _reason(error: Exception) -> str:
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return one_line(error, size=1200)


def text_config(target: Target) -> PreTrainedConfig:
    """Return the text part of a target's configuration; a `ValueError` if the target is an encoder-decoder."""
    config = getattr(target, "config", target)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"a target or its config is needed, got {shortened(target)}: pass one, or AutoConfig.from_pretrained(name)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"a target must be a decoder-only causal LM, got the encoder-decoder {config.model_type!r}")
    return config.get_text_config(decoder=True)


def default_target_layer_ids(num_target_layers: int, count: int = 5) -> list[int]:
    """Return evenly spaced layers from the second to the third-last one, in shallow targets all but the last."""
    if num_target_layers == 1:
        return [-1]  # the only layer is the last one
    first, last = (1, num_target_layers - 3) if num_target_layers >= 8 else (0, num_target_layers - 2)
    count = min(count, last - first + 1)
    return [round(first + i * (last - first) / max(1, count - 1)) for i in range(count)]


def target_scales(text: PreTrainedConfig) -> dict[str, float | None]:
    """Return what a target does to the rows of its embedding and to the output of its LM head, as our fields."""
    return {
        "embedding_scale": embedding_scale(text),
        "logit_scale": _logit_scale(text),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
    }


def embedding_scale(text: PreTrainedConfig) -> float:
    if text.model_type.startswith("gemma") or getattr(text, "scale_embedding", False):
        return float(text.hidden_size) ** 0.5
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def _logit_scale(text: PreTrainedConfig) -> float:
    if (scaling := getattr(text, "logits_scaling", None)) is not None:
        # Granite divides by it, HyperCLOVA X multiplies.
        return float(scaling) if text.model_type.startswith("hyperclovax") else 1.0 / float(scaling)
    return float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0)
