"""The configuration of a DSpark draft: model facts only.

Knows nothing of losses, machines or policies; those are training arguments, tables and generation options.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .calibration import check_temperatures
from .draft_config import DraftConfig, require_decoder_only

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class DSparkConfig(DraftConfig):
    """Configuration of a [`DSparkDraftModel`].

    Args:
        attention_scaling (`float`, *optional*): Factor on the scores; `None` is head_dim ** -0.5, Gemma 4 has 1.0.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` per layer.
        sliding_window (`int`, *optional*): Tokens a sliding layer sees: 0 <= query - key < window.
        qk_norm (`bool`): RMS norm on queries and keys per head (Qwen3, Gemma 3 and 4).
        value_norm (`bool`): Scale-free RMS norm on values (Gemma 4).
        attention_k_eq_v (`bool`): Values are the key projection; there is no v_proj (Gemma 4).
        sandwich_norms (`bool`): Norms after attention and around the MLP (Gemma).
        layer_scalar (`bool`): A learnt factor on each layer's output (Gemma 4).
        mask_token_id (`int`): Token that fills the block behind the anchor.
        markov_rank (`int`): r of the Markov head, whose bias is added after the soft-capping; 0 for none, which is
            DFlash.
        markov_head_type (`str`): `vanilla`, `gated` or `rnn`.
        enable_confidence_head (`bool`): Whether there is a confidence head.
        confidence_head_with_markov (`bool`): Whether it also reads the Markov embedding of the previous token.
        sts_temperatures (`dict[str, list[float]]`, *optional*): Calibration of the confidence head: γ temperatures
            per domain or sampling regime (`greedy`, `sampled`), and `default` for all others.
        sample_from_anchor (`bool`): The anchor is the first prediction position. Always true here; written because
            serving engines guess when it is missing.
        kwargs: As for [`DraftConfig`]. With `draft_top_k`, the Markov bias, too, is computed for the best base
            candidates only.

    Raises:
        ValueError: For each inconsistent value, naming it.

    DSpark Section 3.1.
    """

    model_type = "dspark"
    deepspec_architecture: ClassVar[str] = "DSparkModel"

    num_hidden_layers: int = 5
    attention_scaling: float | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    qk_norm: bool = True
    value_norm: bool = False
    attention_k_eq_v: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sts_temperatures: dict[str, list[float]] | None = None
    sample_from_anchor: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.mask_token_id is None:
            self.mask_token_id = self.vocab_size - 1
        super().__post_init__(**kwargs)

    def _check_values(self) -> None:
        super()._check_values()
        self._require(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
            "layer_types", f"name one of {LAYER_TYPES} for each of the {self.num_hidden_layers} layers",
        )  # fmt: skip
        if "sliding_attention" in self.layer_types:
            self._require(
                self.sliding_window is not None and self.sliding_window >= self.block_size,
                "sliding_window", f"be at least block_size={self.block_size} when a layer is sliding",
            )  # fmt: skip
        self._require(0 <= self.mask_token_id < self.vocab_size, "mask_token_id", f"lie in [0, {self.vocab_size - 1}]")
        self._require(self.markov_rank >= 0, "markov_rank", "be 0 (no Markov head) or positive")
        self._require(self.markov_head_type in MARKOV_HEAD_TYPES, "markov_head_type", f"be one of {MARKOV_HEAD_TYPES}")
        if self.markov_rank == 0 and self.enable_confidence_head:
            self._require(
                not self.confidence_head_with_markov,
                "confidence_head_with_markov", "be False when markov_rank is 0: there is no Markov embedding to read",
            )  # fmt: skip
        if self.sts_temperatures is not None:
            self._require(self.enable_confidence_head, "sts_temperatures", "be None without a confidence head")
            self._require("default" in self.sts_temperatures, "sts_temperatures", "have a 'default' entry")
            for name, temperatures in self.sts_temperatures.items():
                try:
                    check_temperatures(temperatures, self.block_size)
                except ValueError as error:
                    raise ValueError(f"DSparkConfig.sts_temperatures[{name!r}]: {error}") from error
        self._require(
            self.sample_from_anchor, "sample_from_anchor", "be True: this layout predicts from the anchor slot"
        )

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DSparkConfig":
        """Return the configuration of an untrained draft, as [`DraftConfig.from_target`] does.

        Args:
            target_config, overrides: As there. The layer count goes by the target's depth, and is at most 5.
        """
        require_decoder_only(target_config)
        depth = target_config.get_text_config(decoder=True).num_hidden_layers
        return super().from_target(target_config, **({"num_hidden_layers": max(1, min(5, depth // 6))} | overrides))

    @classmethod
    def _translate_deepspec(cls, source: dict[str, Any]) -> dict[str, Any]:
        config = super()._translate_deepspec(source)
        if not source.get("use_sliding_window", True):
            config["sliding_window"] = None
        if config.get("markov_rank", 0) == 0:
            config["confidence_head_with_markov"] = False
            config["markov_head_type"] = "vanilla"
        if source["model_type"].startswith("gemma4"):
            config.update(_translate_gemma4(config))
        return {name: value for name, value in config.items() if name not in _LEFTOVERS}


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


# Facts of the target, or of DeepSpec's training, that say nothing about this draft.
_LEFTOVERS = (
    "num_anchors", "global_head_dim", "num_global_key_value_heads", "hidden_activation",
    "hidden_size_per_layer_input", "enable_moe_block", "moe_intermediate_size", "num_experts", "top_k_experts",
    "num_kv_shared_layers", "use_bidirectional_attention", "use_double_wide_mlp", "vocab_size_per_layer_input",
)  # fmt: skip
