"""What the configurations of all drafts have in common, and the one place that knows how target layers are numbered.

Model facts only. Knows nothing of how a draft computes its hidden states, of losses, machines or policies.
"""

import copy
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .calibration import check_temperatures

# Rotary types whose frequencies do not depend on the current length: cached keys stay valid as the context grows.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
# Facts of the target, or of DeepSpec's training, that say nothing about a draft.
DEEPSPEC_LEFTOVERS = (
    "use_sliding_window", "max_window_layers", "use_cache", "target_text_model_type", "target_model_name_or_path",
    "transformers_version",
)  # fmt: skip


@strict
class DraftConfig(PreTrainedConfig):
    """Base of the configurations of all drafts.

    A draft has no embedding and no LM head of its own: `vocab_size`, `hidden_size`, `embedding_scale`, `logit_scale`
    and `final_logit_softcapping` describe the target's, which it borrows.

    Args:
        vocab_size (`int`): V of the target.
        hidden_size (`int`): d, of draft and target alike.
        intermediate_size (`int`): Width of the draft's MLPs.
        num_hidden_layers (`int`): Layers of the draft.
        num_attention_heads, num_key_value_heads, head_dim (`int`): Attention geometry; heads * head_dim may differ
            from d.
        hidden_act (`str`): Activation of the gated MLPs.
        max_position_embeddings (`int`): Longest context, in tokens.
        initializer_range (`float`): Standard deviation of initial weights.
        rms_norm_eps (`float`): Epsilon of all norms.
        rope_parameters (`dict`): Rotary parameters as in transformers, one set for all layers.
        attention_bias, attention_output_bias, mlp_bias (`bool`): Biases of q/k/v, o and MLP projections.
        attention_dropout (`float`): Dropout of attention weights in training.
        embedding_scale (`float`): Factor on the embedding rows (Gemma: sqrt(d)).
        logit_scale (`float`): Factor on the LM head's output (Cohere; 1 / logits_scaling of Granite).
        final_logit_softcapping (`float`, *optional*): cap * tanh(logits / cap) on the LM head's output.
        block_size (`int`): γ, the number of draft tokens.
        num_target_layers (`int`): Layers of the target.
        target_layer_ids (`list[int]`): Tapped target layers: -1 is the embedding output, i the output of decoder
            layer i. The last layer must not be tapped, because transformers reports it after the final norm.
        draft_top_k (`int`, *optional*): Sample on the k best candidates of each slot only; the truncated law is then
            the draft law, so the output stays exact.
        target_model_type (`str`, *optional*): The `model_type` of the target, for messages and cards.

    Raises:
        ValueError: For each inconsistent value, naming it.
    """

    # What a draft has unless its own configuration says otherwise.
    markov_rank: ClassVar[int] = 0
    enable_confidence_head: ClassVar[bool] = False
    confidence_head_with_markov: ClassVar[bool] = False
    sts_temperatures: ClassVar[dict[str, list[float]] | None] = None
    # Whether a block takes one pass per token; if so, each context slot reads the committed token behind it, too.
    is_autoregressive: ClassVar[bool] = False
    # How the architecture of DeepSpec's checkpoints of this kind ends.
    deepspec_architecture: ClassVar[str] = ""

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
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float | int = 0.0
    embedding_scale: float | int = 1.0
    logit_scale: float | int = 1.0
    final_logit_softcapping: float | None = None
    block_size: int = 7
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    draft_top_k: int | None = None
    target_model_type: str | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
        super().__post_init__(**kwargs)
        self._check_values()

    def _require(self, condition: bool, name: str, need: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}.{name} must {need}, got {getattr(self, name)!r}")

    def _check_values(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "block_size", "num_target_layers", "max_position_embeddings",
        ):  # fmt: skip
            self._require(getattr(self, name) >= 1, name, "be at least 1")
        self._require(self.head_dim % 2 == 0, "head_dim", "be even (rotary embedding)")
        self._require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads", f"divide num_attention_heads={self.num_attention_heads}",
        )  # fmt: skip
        ids = self.target_layer_ids
        last = self.num_target_layers - 1
        self._require(len(ids) >= 1 and len(set(ids)) == len(ids), "target_layer_ids", "be distinct and not empty")
        self._require(
            all(-1 <= i < last for i in ids),
            "target_layer_ids", f"lie in [-1, {last - 1}]: the last layer ({last}) is only visible after the final "
            f"norm",
        )  # fmt: skip
        if self.draft_top_k is not None:
            self._require(1 <= self.draft_top_k <= self.vocab_size, "draft_top_k", f"lie in [1, {self.vocab_size}]")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"{type(self).__name__}.rope_parameters: rope_type must be one of {ROPE_TYPES}, got {rope_type!r}. "
                "Types whose frequencies change with the length would invalidate the draft's cached keys."
            )

    def temperatures_for(self, domain: str | None, do_sample: bool) -> list[float] | None:
        """Return the temperatures of a domain, else of the sampling regime, else the default; `None` if uncalibrated.

        A domain's entry for one regime, such as `math/greedy`, comes before its common one.

        Raises:
            ValueError: If a domain is asked for that has no temperatures, or they are not γ positive numbers.
        """
        known = self.sts_temperatures or {}
        regime = "sampled" if do_sample else "greedy"
        wanted = [regime, "default"] if domain is None else [f"{domain}/{regime}", domain]
        for name in wanted:
            if name in known:
                check_temperatures(known[name], self.block_size)
                return known[name]
        if domain is None:
            return None
        raise ValueError(
            f"the draft has no temperatures for the domain {domain!r}, only for {sorted(known)}: calibrate it there, "
            "or set draft.domain to one of these or to None"
        )

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DraftConfig":
        """Return the configuration of an untrained draft for a target.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration; its text part is used.
            overrides: Any field of the configuration.

        Returns:
            [`DraftConfig`]: Of this class, with five evenly spaced tapped layers without the last, attention geometry,
            rotary parameters, embedding scale and logit transforms of the target.

        Raises:
            ValueError: If the target is an encoder-decoder.
        """
        require_decoder_only(target_config)
        text = target_config.get_text_config(decoder=True)
        num_heads = text.num_attention_heads
        facts = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _first_int(getattr(text, "intermediate_size", None)) or 4 * text.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "hidden_act": _gated_activation(text),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 32768),
            "initializer_range": getattr(text, "initializer_range", 0.02),
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": full_attention_rope(getattr(text, "rope_parameters", None)),
            "embedding_scale": _embedding_scale(text),
            "logit_scale": _logit_scale(text),
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "num_target_layers": text.num_hidden_layers,
            "target_model_type": text.model_type,
            "pad_token_id": text.pad_token_id,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
        }
        return cls(**(facts | overrides))

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Read our own `config.json`, or DeepSpec's (a copy of the target's, told by its `architectures`)."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        architectures = config_dict.get("architectures") or []
        if any(str(name).endswith(cls.deepspec_architecture) for name in architectures):
            config_dict = cls._translate_deepspec(config_dict)
        elif config_dict.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {config_dict['model_type']!r} model (architectures "
                f"{config_dict.get('architectures')}), which is no {cls._kind()} draft: pass a checkpoint whose "
                f"model_type is {cls.model_type!r}, or a DeepSpec one (architectures ending in "
                f"{cls.deepspec_architecture!r})"
            )
        return config_dict, kwargs

    @classmethod
    def _kind(cls) -> str:
        return cls.__name__.removesuffix("Config")

    @classmethod
    def _translate_deepspec(cls, source: dict[str, Any]) -> dict[str, Any]:
        """DeepSpec writes the target's configuration with draft fields added; `model_type` stays the target's."""
        config = copy.deepcopy(source)
        config["target_model_type"] = config.pop("model_type")
        config["architectures"] = [f"{cls._kind()}DraftModel"]
        config["model_type"] = cls.model_type
        config["tie_word_embeddings"] = False
        # q/k/v and o share one flag in the sources.
        config["attention_output_bias"] = config.get("attention_bias", False)
        config["rope_parameters"] = full_attention_rope(config.get("rope_parameters"))
        return {name: value for name, value in config.items() if name not in DEEPSPEC_LEFTOVERS}


def require_decoder_only(target_config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the target is an encoder-decoder."""
    if getattr(target_config, "is_encoder_decoder", False):
        raise ValueError(
            "the target of a draft must be a decoder-only causal LM, got the encoder-decoder "
            f"{target_config.model_type!r}"
        )


def default_target_layer_ids(num_target_layers: int, count: int = 5) -> list[int]:
    """Return evenly spaced tapped layers: from the second to the third-last one, in shallow targets all but the last.

    Args:
        num_target_layers (`int`): Layers of the target.
        count (`int`): Layers to tap at most.
    """
    if num_target_layers == 1:
        return [-1]  # the only layer is the last one
    first, last = (1, num_target_layers - 3) if num_target_layers >= 8 else (0, num_target_layers - 2)
    count = min(count, last - first + 1)
    if count == 1:
        return [first]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def select_features(hidden_states: tuple[torch.Tensor, ...], target_layer_ids: list[int]) -> torch.Tensor:
    """Concatenate the tapped layers of a full `hidden_states` tuple.

    The only place that knows the offset: `hidden_states[0]` is the embedding output (id -1), `hidden_states[i + 1]`
    the raw output of layer i.

    Args:
        hidden_states (`tuple` of `torch.Tensor` of shape `[B, S, d]`): As transformers returns it.
        target_layer_ids (`list[int]`): The m tapped layers.

    Returns:
        `torch.Tensor` of shape `[B, S, m*d]`.

    DSpark Eq. 2, inside the brackets.
    """
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)


def _first_int(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, (list, tuple)) else value


def _gated_activation(text: PreTrainedConfig) -> str:
    return getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "silu"


def full_attention_rope(rope_parameters: dict | None) -> dict | None:
    """Return the rotary parameters of a target's full-attention layers, if a draft can use them.

    Gemma 3 and 4 keep one set per layer type; a draft has one, that of the full-attention layers.
    """
    if rope_parameters is None:
        return None
    flat = rope_parameters.get("full_attention", rope_parameters)
    flat = {key: value for key, value in flat.items() if value is not None and not isinstance(value, dict)}
    if flat.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": flat.get("rope_theta", 1_000_000.0)}
    return flat


def _embedding_scale(text: PreTrainedConfig) -> float:
    if text.model_type.startswith("gemma"):
        return float(text.hidden_size) ** 0.5
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def _logit_scale(text: PreTrainedConfig) -> float:
    if (scaling := getattr(text, "logits_scaling", None)) is not None:
        # Granite divides by it, HyperCLOVA X multiplies.
        return float(scaling) if text.model_type.startswith("hyperclovax") else 1.0 / float(scaling)
    return float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0)
