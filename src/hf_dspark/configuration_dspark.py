"""The configuration of a DSpark draft: model facts only, and the one place that knows how target layers are numbered.

Knows nothing of losses, machines or policies; those are training arguments, tables and generation options.
"""

import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .calibration import check_temperatures

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Rotary types whose frequencies do not depend on the current length: cached keys stay valid as the context grows.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


@strict
class DSparkConfig(PreTrainedConfig):
    """Configuration of a [`DSparkDraftModel`].

    The draft has no embedding and no LM head of its own: `vocab_size`, `hidden_size`, `embedding_scale`,
    `logit_scale` and `final_logit_softcapping` describe the target's, which it borrows.

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
        attention_scaling (`float`, *optional*): Factor on the scores; `None` is head_dim ** -0.5, Gemma 4 has 1.0.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` per layer.
        sliding_window (`int`, *optional*): Tokens a sliding layer sees: 0 <= query - key < window.
        qk_norm (`bool`): RMS norm on queries and keys per head (Qwen3, Gemma 3 and 4).
        value_norm (`bool`): Scale-free RMS norm on values (Gemma 4).
        attention_k_eq_v (`bool`): Values are the key projection; there is no v_proj (Gemma 4).
        sandwich_norms (`bool`): Norms after attention and around the MLP (Gemma).
        layer_scalar (`bool`): A learnt factor on each layer's output (Gemma 4).
        embedding_scale (`float`): Factor on the embedding rows (Gemma: sqrt(d)).
        logit_scale (`float`): Factor on the LM head's output (Cohere; 1 / logits_scaling of Granite).
        final_logit_softcapping (`float`, *optional*): cap * tanh(logits / cap) on the base logits; the Markov bias
            is added after it.
        block_size (`int`): γ, the number of draft tokens.
        num_target_layers (`int`): Layers of the target.
        target_layer_ids (`list[int]`): Tapped target layers: -1 is the embedding output, i the output of decoder
            layer i. The last layer must not be tapped, because transformers reports it after the final norm.
        mask_token_id (`int`): Token that fills the block behind the anchor.
        markov_rank (`int`): r of the Markov head; 0 for none, which is DFlash.
        markov_head_type (`str`): `vanilla`, `gated` or `rnn`.
        enable_confidence_head (`bool`): Whether there is a confidence head.
        confidence_head_with_markov (`bool`): Whether it also reads the Markov embedding of the previous token.
        draft_top_k (`int`, *optional*): Evaluate the Markov bias and sample on the k best base candidates of each
            slot only; the truncated law is then the draft law, so the output stays exact.
        sts_temperatures (`dict[str, list[float]]`, *optional*): Calibration of the confidence head: γ temperatures
            per domain or sampling regime (`greedy`, `sampled`), and `default` for all others.
        sample_from_anchor (`bool`): The anchor is the first prediction position. Always true here; written because
            serving engines guess when it is missing.
        target_model_type (`str`, *optional*): The `model_type` of the target, for messages and cards.

    Raises:
        ValueError: For each inconsistent value, naming it.

    DSpark Section 3.1.
    """

    model_type = "dspark"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
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
    attention_scaling: float | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    qk_norm: bool = True
    value_norm: bool = False
    attention_k_eq_v: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    embedding_scale: float | int = 1.0
    logit_scale: float | int = 1.0
    final_logit_softcapping: float | None = None
    block_size: int = 7
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_top_k: int | None = None
    sts_temperatures: dict[str, list[float]] | None = None
    sample_from_anchor: bool = True
    target_model_type: str | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.mask_token_id is None:
            self.mask_token_id = self.vocab_size - 1
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
        super().__post_init__(**kwargs)
        self._check_values()

    def _check_values(self) -> None:
        def require(condition: bool, name: str, need: str) -> None:
            if not condition:
                raise ValueError(f"DSparkConfig.{name} must {need}, got {getattr(self, name)!r}")

        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "block_size", "num_target_layers", "max_position_embeddings",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, name, "be at least 1")
        require(self.head_dim % 2 == 0, "head_dim", "be even (rotary embedding)")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads", f"divide num_attention_heads={self.num_attention_heads}",
        )  # fmt: skip
        require(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
            "layer_types", f"name one of {LAYER_TYPES} for each of the {self.num_hidden_layers} layers",
        )  # fmt: skip
        if "sliding_attention" in self.layer_types:
            require(
                self.sliding_window is not None and self.sliding_window >= self.block_size,
                "sliding_window", f"be at least block_size={self.block_size} when a layer is sliding",
            )  # fmt: skip
        ids = self.target_layer_ids
        last = self.num_target_layers - 1
        require(len(ids) >= 1 and len(set(ids)) == len(ids), "target_layer_ids", "be distinct and not empty")
        require(
            all(-1 <= i < last for i in ids),
            "target_layer_ids", f"lie in [-1, {last - 1}]: the last layer ({last}) is only visible after the final "
            f"norm",
        )  # fmt: skip
        require(0 <= self.mask_token_id < self.vocab_size, "mask_token_id", f"lie in [0, {self.vocab_size - 1}]")
        require(self.markov_rank >= 0, "markov_rank", "be 0 (no Markov head) or positive")
        require(self.markov_head_type in MARKOV_HEAD_TYPES, "markov_head_type", f"be one of {MARKOV_HEAD_TYPES}")
        if self.markov_rank == 0 and self.enable_confidence_head:
            require(
                not self.confidence_head_with_markov,
                "confidence_head_with_markov", "be False when markov_rank is 0: there is no Markov embedding to read",
            )  # fmt: skip
        if self.draft_top_k is not None:
            require(1 <= self.draft_top_k <= self.vocab_size, "draft_top_k", f"lie in [1, {self.vocab_size}]")
        if self.sts_temperatures is not None:
            require(self.enable_confidence_head, "sts_temperatures", "be None without a confidence head")
            require("default" in self.sts_temperatures, "sts_temperatures", "have a 'default' entry")
            for name, temperatures in self.sts_temperatures.items():
                try:
                    check_temperatures(temperatures, self.block_size)
                except ValueError as error:
                    raise ValueError(f"DSparkConfig.sts_temperatures[{name!r}]: {error}") from error
        require(self.sample_from_anchor, "sample_from_anchor", "be True: this layout predicts from the anchor slot")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"DSparkConfig.rope_parameters: rope_type must be one of {ROPE_TYPES}, got {rope_type!r}. Types "
                "whose frequencies change with the length would invalidate the draft's cached keys."
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
    def from_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DSparkConfig":
        """Return the configuration of an untrained draft for a target.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration; its text part is used.
            overrides: Any field of [`DSparkConfig`].

        Returns:
            [`DSparkConfig`]: Layer count by the target's depth (at most 5), five evenly spaced tapped layers without
            the last, attention geometry, rotary parameters, embedding scale and logit transforms of the target.

        Raises:
            ValueError: If the target is an encoder-decoder.
        """
        require_decoder_only(target_config)
        text = target_config.get_text_config(decoder=True)
        num_heads = text.num_attention_heads
        depth = text.num_hidden_layers
        facts = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _first_int(getattr(text, "intermediate_size", None)) or 4 * text.hidden_size,
            "num_hidden_layers": max(1, min(5, depth // 6)),
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "hidden_act": _gated_activation(text),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 32768),
            "initializer_range": getattr(text, "initializer_range", 0.02),
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": _full_attention_rope(getattr(text, "rope_parameters", None)),
            "embedding_scale": _embedding_scale(text),
            "logit_scale": _logit_scale(text),
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "num_target_layers": depth,
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
        if _is_deepspec(config_dict):
            config_dict = _translate_deepspec(config_dict)
        elif config_dict.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {config_dict['model_type']!r} model (architectures "
                f"{config_dict.get('architectures')}), not a DSpark draft: pass a checkpoint whose model_type is "
                "'dspark', or a DeepSpec one (architectures ending in 'DSparkModel')"
            )
        return config_dict, kwargs


def require_decoder_only(target_config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the target is an encoder-decoder."""
    if getattr(target_config, "is_encoder_decoder", False):
        raise ValueError(
            f"a DSpark target must be a decoder-only causal LM, got the encoder-decoder {target_config.model_type!r}"
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


def _full_attention_rope(rope_parameters: dict | None) -> dict | None:
    """Gemma 3 and 4 keep one set per layer type; a draft has one, that of the full-attention layers."""
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
        return 1.0 / float(scaling)
    return float(getattr(text, "logit_scale", None) or 1.0)


def _is_deepspec(config_dict: dict[str, Any]) -> bool:
    return any(str(name).endswith("DSparkModel") for name in config_dict.get("architectures") or [])


def _translate_deepspec(source: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec writes the target's configuration with draft fields added; `model_type` stays the target's."""
    config = copy.deepcopy(source)
    model_type = config.pop("model_type")
    config["target_model_type"] = model_type
    config["architectures"] = ["DSparkDraftModel"]
    config["model_type"] = DSparkConfig.model_type
    config["tie_word_embeddings"] = False
    if not config.get("use_sliding_window", True):
        config["sliding_window"] = None
    if config.get("markov_rank", 0) == 0:
        config["confidence_head_with_markov"] = False
        config["markov_head_type"] = "vanilla"
    # q/k/v and o share one flag in the sources.
    config["attention_output_bias"] = config.get("attention_bias", False)
    config["rope_parameters"] = _full_attention_rope(config.get("rope_parameters"))
    if model_type.startswith("gemma4"):
        config.update(_translate_gemma4(config))
    for key in _DEEPSPEC_LEFTOVERS:
        config.pop(key, None)
    return config


def _translate_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    if set(config["layer_types"]) != {"full_attention"}:
        raise ValueError(
            f"Gemma 4 drafts with mixed layer types {config['layer_types']} have two head sizes in one model; only "
            "drafts whose layers are all full_attention are supported"
        )
    return {
        "head_dim": config["global_head_dim"],
        "num_key_value_heads": config.get("num_global_key_value_heads") or config["num_key_value_heads"],
        "hidden_act": config["hidden_activation"],
        "attention_scaling": 1.0,
        "value_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        "sliding_window": None,
    }


# Facts of the target, or of DeepSpec's training, that say nothing about the draft.
_DEEPSPEC_LEFTOVERS = (
    "num_anchors", "use_sliding_window", "max_window_layers", "use_cache", "global_head_dim",
    "num_global_key_value_heads", "hidden_activation", "hidden_size_per_layer_input", "enable_moe_block",
    "moe_intermediate_size", "num_experts", "top_k_experts", "num_kv_shared_layers", "use_bidirectional_attention",
    "use_double_wide_mlp", "vocab_size_per_layer_input", "target_text_model_type", "transformers_version",
)  # fmt: skip
