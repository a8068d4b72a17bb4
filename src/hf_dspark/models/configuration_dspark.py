"""The configuration of a DSpark draft: facts about the model, and nothing else."""

from collections.abc import Iterator
from typing import Any

from huggingface_hub.dataclasses import strict

from ..scheduling.calibration import check_logit_fits, check_siblings, check_temperatures
from .configuration_draft import DraftConfig, Target, text_config

# Their classes stand in `heads.py`, in this order. The last two are DFlash 2's and Domino's.
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn", "selector", "domino")
LAYER_TYPES = ("full_attention", "sliding_attention")
# What DeepSeek-V4's attention (`q_lora_rank`) has and others may have.
V4_ATTENTION = {"num_key_value_heads": 1, "attention_k_eq_v": True, "attention_sinks": True, "rope_interleaved": True}
V4_ATTENTION |= {"attention_bias": False, "attention_output_bias": False, "value_norm": False}
V4_ATTENTION |= {"attention_scaling": None}
# What makes a draft DFlash.
WITHOUT_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}


@strict
class DSparkConfig(DraftConfig):
    """Configuration of a [`DSparkDraftModel`].

    Args:
        attention_scaling (`float`, *optional*): Factor on the scores; `None` is head_dim ** -0.5, Gemma 4 has 1.0.
        layer_types (`list[str]`, *optional*): `full_attention` or `sliding_attention` per layer.
        sliding_window (`int`, *optional*): Tokens a sliding layer sees: 0 <= query - key < window.
        value_norm (`bool`): Scale-free RMS norm on values (Gemma 4).
        attention_k_eq_v (`bool`): Values are the key projection; there is no v_proj (Gemma 4).
        sandwich_norms (`bool`): Norms after attention and around the MLP (Gemma).
        layer_scalar (`bool`): A learnt factor on each layer's output (Gemma 4).
        mask_token_id (`int`): Token that fills the block after the anchor.
        markov_rank (`int`): r of the Markov head, whose bias is added after the soft-capping; 0 for none, which is
            DFlash.
        markov_head_type (`str`): `vanilla`, `gated` or `rnn`; `selector` is that of DFlash 2, which `draft_top_k`
            candidates belong to, and `domino` a GRU over the target's embedding rows.
        markov_state_size (`int`, *optional*): Size of the state of a `domino` head; `None` is r.
        markov_start (`int`): How many of the first draft tokens the Markov head leaves alone.
        conv_kernel_size (`int`): Slots that the convolutions around attention and MLP read, the own one and those
            before it in the block (DFlash 2); 0 for no convolutions.
        conv_group_size (`int`): Entries of a hidden state that share a dynamic kernel; it divides d.
        enable_confidence_head (`bool`): Whether there is a confidence head.
        confidence_head_with_markov (`bool`): Whether it also reads the Markov embedding of the previous token.
        sts_temperatures (`dict[str, list[float]]`, *optional*): Calibration of the confidence head: γ temperatures
            per domain or sampling regime (`greedy`, `sampled`), and `default` for all others.
        confidence_fits (`dict[str, list[list[float]]]`, *optional*): The same with offsets: γ pairs of the slope and
            the offset of the head's logit. They come before temperatures, which serving engines read.
        sibling_acceptance (`dict[str, dict]`, *optional*): What calibration found about trees of drafts, by sampling
            regime: `fits`, `means`, `best` and `chain` of `SiblingAcceptance`.
        sample_from_anchor (`bool`): The slot of the anchor predicts the first token, and slot k the token after its
            own. False is the fill-in layout of DFlash: a block has γ+1 slots, the anchor's predicts nothing, and each
            other one the token in its own place.
        sliding_from_anchor (`bool`): In sliding layers, all slots see the same last `sliding_window` tokens of the
            context, and their block (speculators).
        causal_sliding (`bool`): In sliding layers, a slot sees no later slot of its block (speculators).
        attention_sinks (`bool`): A learnt score per head that takes attention weight and gives nothing (MiMo).
        embedding_norm (`bool`): Whether embedding rows pass the norm that a target may have inside its embedding
            (Muse Glimmer); drafts of other projects read the bare table.
        num_experts (`int`): Routed experts of each layer's MLP, beside a shared one (DeepSeek-V4); 0 for a dense MLP.
        num_experts_per_tok, moe_intermediate_size (`int`): How many of them read a token, and the width of each, also
            of the shared one; `None` divides `intermediate_size` among those that read a token, by multiples of 8.
        hc_mult (`int`): Residual streams that manifold-constrained hyper-connections mix around attention and MLP
            (DeepSeek-V4 has 4); 0 for ordinary residuals.
        q_lora_rank (`int`, *optional*): Rank of the queries of DeepSeek-V4's attention, in which one head of keys, of
            which the last entries are turned, is also the values; `None` for ordinary attention.
        o_lora_rank, o_groups (`int`): Rank of its output for each group of heads, and how many groups there are.
        v4_heads (`bool`): The final norm stands before the LM head alone; the confidence head reads states without it,
            and has no bias (DeepSeek-V4).
        kwargs: As for [`DraftConfig`]. Of `draft_top_k` candidates, three quarters are those with the best base
            logits, one quarter those that the Markov head favours most after the previous token.

    Example:

    ```python
    config = DSparkConfig.from_target(target.config, block_size=7, num_hidden_layers=3)
    draft = DSparkDraftModel(config)  # untrained
    ```

    DSpark Section 3.1.
    """

    model_type = "dspark"

    num_hidden_layers: int = 5
    attention_scaling: float | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    value_norm: bool = False
    attention_k_eq_v: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    markov_state_size: int | None = None
    markov_start: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sts_temperatures: dict[str, list[float]] | None = None
    confidence_fits: dict[str, list[list[float]]] | None = None
    sibling_acceptance: dict[str, Any] | None = None
    sample_from_anchor: bool = True
    sliding_from_anchor: bool = False
    causal_sliding: bool = False
    attention_sinks: bool = False
    embedding_norm: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    hc_mult: int = 0
    q_lora_rank: int | None = None
    o_lora_rank: int = 1024
    o_groups: int = 8
    v4_heads: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.mask_token_id is None:
            self.mask_token_id = self.vocab_size - 1
        if self.markov_state_size is None and self.markov_head_type == "domino":
            self.markov_state_size = self.markov_rank
        if self.moe_intermediate_size is None and self.num_experts:
            share = self.intermediate_size // (1 + max(self.num_experts_per_tok, 0))
            self.moe_intermediate_size = share // 8 * 8 or max(1, share)  # grouped products need whole 16 bytes
        super().__post_init__(**kwargs)
        self.check_entries("sts_temperatures", check_temperatures)
        self.check_entries("confidence_fits", check_logit_fits)
        self.check_entries("sibling_acceptance", check_siblings)

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        yield from super().rules()
        layers, types = self.num_hidden_layers, self.layer_types
        known = len(types) == layers and set(types) <= set(LAYER_TYPES)
        yield known, "layer_types", f"name one of {LAYER_TYPES} for each of the {layers} layers"
        if "sliding_attention" in types:
            least = 1 if self.sliding_from_anchor else self.num_slots
            need = f"be at least the {self.num_slots} slots of a block when a layer is sliding"
            yield self.sliding_window is not None and self.sliding_window >= least, "sliding_window", need
        yield 0 <= self.mask_token_id < self.vocab_size, "mask_token_id", f"lie in [0, {self.vocab_size - 1}]"
        yield self.markov_head_type in MARKOV_HEAD_TYPES, "markov_head_type", f"be one of {MARKOV_HEAD_TYPES}"
        reads_markov = self.enable_confidence_head and self.confidence_head_with_markov
        has_embedding = self.markov_rank > 0 and self.markov_head_type != "domino"
        need = "be False when markov_rank is 0 or the head is Domino's: there is no Markov embedding to read"
        yield has_embedding or not reads_markov, "confidence_head_with_markov", need
        yield 0 <= self.markov_start <= self.block_size, "markov_start", f"lie in [0, {self.block_size}]"
        slots, group = self.num_slots, self.conv_group_size
        yield 0 <= self.conv_kernel_size <= slots, "conv_kernel_size", f"lie in [0, {slots}], the slots of a block"
        divides = group >= 1 and self.hidden_size % group == 0
        yield self.conv_kernel_size == 0 or divides, "conv_group_size", f"divide the hidden size {self.hidden_size}"
        experts, reading = self.num_experts, self.num_experts_per_tok
        yield not experts or 1 <= reading <= experts, "num_experts_per_tok", f"lie in [1, {experts}]"
        rank, groups, heads = self.q_lora_rank, self.o_groups, self.num_attention_heads
        for name, value in V4_ATTENTION.items():
            yield rank is None or getattr(self, name) == value, name, f"be {value} with q_lora_rank"
        yield groups >= 1 and (rank is None or heads % groups == 0), "o_groups", f"divide {heads} attention heads"
        for name in ("sandwich_norms", "layer_scalar"):
            yield not (self.hc_mult and getattr(self, name)), name, "be False with hyper-connections (hc_mult)"
        temperatures, fits, regimes = self.sts_temperatures, self.confidence_fits, set(self.sibling_acceptance or ())
        need = "be None without a confidence head"
        yield self.enable_confidence_head or not temperatures, "sts_temperatures", need
        yield self.enable_confidence_head or not fits, "confidence_fits", need
        yield temperatures is None or "default" in temperatures, "sts_temperatures", "have a 'default' entry"
        yield regimes <= {"greedy", "sampled"}, "sibling_acceptance", "have entries 'greedy' and 'sampled'"

    @property
    def num_slots(self) -> int:
        return self.block_size + (not self.sample_from_anchor)

    @classmethod
    def from_target(cls, target_config: Target, **overrides: Any) -> "DSparkConfig":
        """As [`DraftConfig.from_target`]; the layer count goes by the target's depth, and is at most 5."""
        depth = text_config(target_config).num_hidden_layers
        return super().from_target(target_config, **({"num_hidden_layers": max(1, min(5, depth // 6))} | overrides))
