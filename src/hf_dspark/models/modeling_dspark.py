"""The DSpark draft model: a parallel backbone fed with target features, a sequential Markov head, a confidence head.

DFlash is the special case `markov_rank=0`. One backbone serves every target family; what differs is in the config.
Knows nothing of `generate()`, policies or losses.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..cpu.few_rows import FewRowsLinear
from ..maths.sampling import DraftBlock, Sampler, TokenLaw, largest, scatter_to_vocabulary
from .block_attention import BlockLayout, SlidingWindow, attend_blocks, flex_attend_blocks
from .configuration_dspark import DSparkConfig
from .grouped_attention import fold_mask, grouped_attention
from .heads import MARKOV_HEADS, ConfidenceHead, MarkovProjection
from .modeling_draft import DraftModel
from .slot_cache import SlotCache, SlotLayout
from .successors import Successors, with_successors

# Of `draft_top_k` candidates, one in so many is named by the Markov head, the others by the base logits.
SUCCESSORS_ONE_IN = 4


@dataclass(frozen=True)
class DraftPass:
    """One cached pass of the draft: context tokens that are not in the cache yet, then a block, of each request.

    Args:
        cache ([`SlotCache`]): The requests' context. Blocks are written behind it and never counted.
        num_features (`Sequence[int]`): New context tokens of each request.
        num_slots (`int`): Rows of a block.
        device (`torch.device`): The draft's.
    """

    cache: SlotCache
    num_features: Sequence[int]
    num_slots: int
    device: torch.device

    @functools.cached_property
    def layout(self) -> SlotLayout:
        """Context and block of each request, request by request."""
        starts = self.cache.lengths[: len(self.num_features)]
        return SlotLayout(starts, tuple(count + self.num_slots for count in self.num_features))

    @functools.cached_property
    def blocks(self) -> SlotLayout:
        """The blocks alone."""
        starts = tuple(start + new for start, new in zip(self.layout.starts, self.num_features, strict=True))
        return SlotLayout(starts, (self.num_slots,) * len(starts))

    @functools.cached_property
    def order(self) -> torch.Tensor | None:
        """Where each token of `layout` stands when the context of all requests precedes their blocks, `[T]`."""
        if len(self.num_features) == 1:
            return None
        places = torch.arange(self.layout.num_tokens, device="cpu")
        features, blocks = places.split([sum(self.num_features), self.blocks.num_tokens])
        parts = zip(features.split(list(self.num_features)), blocks.split(self.num_slots), strict=True)
        return torch.cat([part for request in parts for part in request]).to(self.device)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all contexts, then of all blocks, `[1, T]`."""
        if self.order is None:
            return self.layout.position_ids(self.device)
        contexts = SlotLayout(self.layout.starts, tuple(self.num_features))
        return torch.cat([part.position_ids(self.device) for part in (contexts, self.blocks)], dim=1)

    def keys_from(self, window: SlidingWindow | None) -> int:
        """Return the first slot that some block row sees."""
        return 0 if window is None else window.first_seen(min(self.blocks.starts))

    @functools.cached_property
    def _masks(self) -> dict[SlidingWindow | None, torch.Tensor | None]:
        return {}

    def mask(self, window: SlidingWindow | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return who sees which slot from `keys_from(window)` on, folded as [`grouped_attention`] wants it.

        `None`: all see all.
        """
        if window not in self._masks:
            self._masks[window] = fold_mask(self._visible(window), group, dtype)
        return self._masks[window]

    def _visible(self, window: SlidingWindow | None) -> torch.Tensor | None:
        keys = torch.arange(self.keys_from(window), self.layout.end, device=self.device)
        own = keys - torch.tensor(self.blocks.starts, device=self.device)[:, None, None, None]  # negative: context
        visible = None if len(set(self.blocks.starts)) == 1 else own < self.num_slots
        if window is not None and (window.causal or self.layout.end > window.size):
            slots = torch.arange(self.num_slots, device=self.device)[:, None]
            near = torch.where(own < 0, window.sees_context(slots, -own), window.sees_slot(slots, own))
            visible = near if visible is None else near & visible
        return None if visible is None else visible.expand(-1, -1, self.num_slots, -1)


class DSparkRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, with_scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if with_scale else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


class DSparkRotaryEmbedding:
    """Rotary cosines and sines from float32 frequencies.

    Not a module: a buffer would be rounded by `model.to(torch.bfloat16)`, and positions beyond a few hundred tokens
    with it.
    """

    def __init__(self, config: DSparkConfig) -> None:
        self._config = config
        self._inv_freq: dict[torch.device, torch.Tensor] = {}
        self._scaling = 1.0

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        if device not in self._inv_freq:
            parameters = self._config.rope_parameters
            if parameters.get("rope_type", "default") == "default":
                size = int(self._config.head_dim * parameters.get("partial_rotary_factor", 1.0))
                exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
                inv_freq = parameters["rope_theta"] ** -exponents
            else:
                inv_freq, self._scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self._config, device)
            self._inv_freq[device] = inv_freq.float()
        return self._inv_freq[device]

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `[B, 1, rows, rotary_dim]` for positions `[B, rows]`."""
        angles = position_ids[:, None, :, None].float() * self._frequencies(position_ids.device)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to the leading `rotary_dim` entries of `[B, heads, rows, head_dim]`."""
    size = cos.shape[-1]
    turning, passing = states[..., :size], states[..., size:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passing], dim=-1) if passing.shape[-1] else turned


class DSparkAttention(nn.Module):
    """Bidirectional attention of block rows over target features and the block itself. DSpark Eq. 3."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_scaling is None else config.attention_scaling
        self.window = None
        if config.layer_types[layer_idx] == "sliding_attention":
            self.window = SlidingWindow(config.sliding_window, config.sliding_from_anchor, config.causal_sliding)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = FewRowsLinear(config.hidden_size, query_size, bias=bias)
        self.k_proj = FewRowsLinear(config.hidden_size, key_size, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else FewRowsLinear(config.hidden_size, key_size, bias=bias)
        self.o_proj = FewRowsLinear(query_size, config.hidden_size, bias=config.attention_output_bias)
        norm = (lambda: DSparkRMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        scale_free = DSparkRMSNorm(config.head_dim, config.rms_norm_eps, with_scale=False)
        self.v_norm = scale_free if config.value_norm else nn.Identity()

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attending: BlockLayout | DraftPass,
    ) -> torch.Tensor:
        """Attend from block rows `[B, Q, d]` to themselves, the new context rows `[B, C, d]` and the cached ones."""
        num_queries = hidden.shape[1]
        cos, sin = rotary
        key_input = torch.cat([context, hidden], dim=1)
        query = rotate(
            self.q_norm(self._heads(self.q_proj(hidden))), cos[:, :, -num_queries:], sin[:, :, -num_queries:]
        )
        raw_key = self._heads(self.k_proj(key_input))
        raw_value = raw_key if self.v_proj is None else self._heads(self.v_proj(key_input))
        key, value = rotate(self.k_norm(raw_key), cos, sin), self.v_norm(raw_value)
        attend = self._attend_to_slots if isinstance(attending, DraftPass) else self._attend_in_training
        return self.o_proj(attend(query, key, value, attending).reshape(*hidden.shape[:2], -1))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _attend_in_training(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BlockLayout
    ) -> torch.Tensor:
        if self.config._attn_implementation == "flex_attention":
            if self.training and self.config.attention_dropout > 0:
                raise ValueError("flex attention knows no dropout: set attention_dropout=0, or use sdpa")
            output = flex_attend_blocks(query, key, value, layout, self.window, self.scaling)
        else:
            dropout = self.config.attention_dropout if self.training else 0.0
            output = attend_blocks(query, key, value, layout, self.window, self.scaling, dropout)
        return output.transpose(1, 2)

    def _attend_to_slots(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, drafting: DraftPass
    ) -> torch.Tensor:
        if drafting.order is not None:
            key, value = key[:, :, drafting.order], value[:, :, drafting.order]
        key, value = drafting.cache.update(key, value, self.layer_idx)
        start = drafting.keys_from(self.window)
        mask = drafting.mask(self.window, self.num_key_value_groups, query.dtype)
        rows = drafting.blocks.to_rows(query)
        attended = grouped_attention(rows, key[:, :, start:], value[:, :, start:], mask, self.scaling)
        return drafting.blocks.to_packed(attended)


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = FewRowsLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = FewRowsLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = FewRowsLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class DSparkLayer(GradientCheckpointingLayer):
    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.sandwich_norms = config.sandwich_norms
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        # With sandwich norms (Gemma) this one follows the attention; without, it precedes the MLP.
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attending: BlockLayout | DraftPass,
    ) -> torch.Tensor:
        # The context rows enter keys and values as they are: only block rows pass the input norm.
        attended = self.self_attn(self.input_layernorm(hidden), context, rotary, attending)
        if self.sandwich_norms:
            hidden = hidden + self.post_attention_layernorm(attended)
            hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        else:
            hidden = hidden + attended
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar


class DSparkDraftModel(DraftModel):
    """A DSpark draft: one parallel pass over the block, then a light head that samples it left to right.

    DSpark Section 3.1.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    _supports_sdpa = True
    _supports_flex_attn = True
    _no_split_modules = ["DSparkLayer"]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = FewRowsLinear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(hidden_size, eps)
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(hidden_size, eps)
        if config.draft_vocab_size is not None:
            # Rows of the target's head, and frozen as that is.
            self.lm_head = FewRowsLinear(hidden_size, config.draft_vocab_size, bias=False).requires_grad_(False)
            # As speculators keeps it: draft id i is the target's token i + d2t[i].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkRMSNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, DSparkLayer) and module.layer_scalar is not None:
            nn.init.ones_(module.layer_scalar)
        elif isinstance(module, MarkovProjection):
            nn.init.zeros_(module.weight)

    @functools.cached_property
    def _pruned_ids(self) -> dict[tuple[torch.device, int], torch.Tensor]:
        return {}

    def draft_token_ids(self) -> torch.Tensor | None:
        """Return the target's token of each draft logit, `[V_d]`; `None` where the vocabularies are one.

        Raises:
            ValueError: If `d2t` names tokens that the target has not, or one twice.
        """
        if self.config.draft_vocab_size is None:
            return None
        state = self.d2t.device, self.d2t._version
        if state not in self._pruned_ids:
            self._pruned_ids.clear()
            with torch.inference_mode(False):  # what is kept may be trained with
                token_ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
            known = (token_ids >= 0) & (token_ids < self.config.vocab_size)
            if not bool(known.all()) or len(token_ids.unique()) < len(token_ids):
                raise ValueError(
                    "the draft's d2t must name distinct tokens of the target's vocabulary of "
                    f"{self.config.vocab_size}; it does not: load another checkpoint"
                )
            self._pruned_ids[state] = token_ids
        return self._pruned_ids[state]

    @functools.cached_property
    def _successor_tables(self) -> dict[int, tuple[Any, Successors]]:
        return {}

    def _successors(self) -> Successors | None:
        """Return whom the Markov head, as it is now, favours behind each token; `None` if nobody is asked for."""
        candidates = self.config.draft_top_k
        count = min(math.ceil(candidates / SUCCESSORS_ONE_IN), candidates - 1)  # a single one is the best one
        if self.markov_head is None or count == 0:
            return None
        weights = [(weight.data_ptr(), weight._version) for weight in self.markov_head.parameters()]
        if self._successor_tables.get(count, (None,))[0] != weights:
            successors = Successors(self.markov_head, self.config.hidden_size, count)
            if self.device.type != "cpu":
                successors.fill()
            self._successor_tables[count] = weights, successors
        return self._successor_tables[count][1]

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        """Return U_k `[..., V]`, or `[..., V_d]` from the draft's own pruned head."""
        if self.config.draft_vocab_size is None:
            return super().base_logits(block_hidden)
        return self.scaled_logits(self.lm_head(block_hidden))

    def draft_head(self) -> nn.Module:
        """Return the LM head behind U_k, the draft's own if its vocabulary is pruned."""
        return super().draft_head() if self.config.draft_vocab_size is None else self.lm_head

    def block_layout(
        self, anchor_positions: torch.Tensor, anchor_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> BlockLayout:
        """Return where this draft's training blocks stand.

        Args:
            anchor_positions, anchor_mask, position_ids: As in [`BlockLayout`].
        """
        config = self.config
        return BlockLayout(anchor_positions, anchor_mask, position_ids, config.block_size, config.sample_from_anchor)

    def backbone(
        self,
        block_embeds: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attending: BlockLayout | DraftPass,
    ) -> torch.Tensor:
        """Run the parallel stage.

        Args:
            block_embeds (`torch.Tensor` of shape `[B, Q, d]`): Embedded anchor and mask tokens of one or more blocks.
            features (`torch.Tensor` of shape `[B, C, m*d]`): Tapped target layers of the context rows, of those alone
                that are not yet cached in a [`DraftPass`].
            position_ids (`torch.LongTensor` of shape `[B, C+Q]`): Positions of those rows, then of the block rows.
            attending ([`BlockLayout`] or [`DraftPass`]): Who sees what: in training, or in a cached pass, where B = 1
                and the rows of all requests are packed.

        Returns:
            `torch.Tensor` of shape `[B, Q, d]`: h, after the final norm.

        DSpark Eq. 2-3.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight)))  # Eq. 2
        rotary = self.rotary(position_ids, block_embeds.dtype)
        hidden = block_embeds
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, attending)
        return self.norm(hidden)

    @torch.no_grad()
    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        sampler: Sampler,
        num_features: Sequence[int] | None = None,
        committed_ids: torch.Tensor | None = None,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        """Draft one block per request: one parallel pass, then γ Markov draws.

        Args:
            anchor_ids, features, cache, sampler, num_features, committed_ids, num_tokens: As in
                [`DraftModel.draft_block`].

        Returns:
            [`DraftBlock`]

        DSpark Eq. 3-7.
        """
        hidden = self.read_block(anchor_ids, features, cache, num_features)
        predicting, anchor_ids = self.predicting(hidden)[:, :num_tokens], anchor_ids.to(self.device)
        rough_logits = self.rough_logits(predicting)
        if rough_logits is None:
            return self.sample_block(hidden, self.base_logits(predicting), anchor_ids, sampler)
        return self.sample_block(hidden, rough_logits, anchor_ids, sampler, self.candidate_logits)

    @torch.no_grad()
    def read_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        num_features: Sequence[int] | None = None,
        committed_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the parallel pass of [`~DSparkDraftModel.draft_block`]: read the new context, and return h.

        Args:
            anchor_ids, features, cache, num_features, committed_ids: As there.

        Returns:
            `torch.Tensor` of shape `[B, slots, d]`.

        DSpark Eq. 2-3.
        """
        requests, num_slots = anchor_ids.shape[0], self.config.num_slots
        if num_features is None:
            num_features = (features.shape[1],) * requests
        drafting = DraftPass(cache, num_features, num_slots, self.device)
        block_ids = torch.full((requests, num_slots), self.config.mask_token_id, device=anchor_ids.device)
        block_ids[:, 0] = anchor_ids
        block_embeds = self.embed(block_ids).flatten(0, 1)[None]
        with cache.writing(drafting.layout):
            hidden = self.backbone(
                block_embeds, features.reshape(1, -1, features.shape[-1]), drafting.position_ids, drafting
            ).view(requests, num_slots, -1)
        for row, count in enumerate(num_features):
            cache.commit(row, count)
        return hidden

    def sample_block(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        anchor_ids: torch.Tensor,
        sampler: Sampler,
        candidate_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> DraftBlock:
        """Run the sequential stage: draw x_k from softmax(U_k + B_k), left to right.

        Args:
            hidden (`torch.Tensor` of shape `[B, slots, d]`): h.
            base_logits (`torch.Tensor` of shape `[B, n, V]`, or `[B, n, V_d]`): U_1..U_n, n <= γ, or, with
                `candidate_logits`, what is like them enough to choose candidates by. As many tokens are drawn.
            anchor_ids (`torch.LongTensor` of shape `[B]`): x_0.
            sampler ([`Sampler`]): Draws each token.
            candidate_logits (`Callable`, *optional*): What gives U_k of candidates `[B, n]` from h_k `[B, d]`; only
                with `draft_top_k`.

        Returns:
            [`DraftBlock`]

        DSpark Eq. 4.
        """
        assert candidate_logits is None or self.config.draft_top_k is not None, "rough logits are no law"
        best, successors = None, None
        if self.config.draft_top_k is not None:  # no full-vocabulary work behind these lines
            best, successors = largest(base_logits, self.config.draft_top_k)[1], self._successors()
        token_ids = self.draft_token_ids()
        previous, state = anchor_ids, None
        if self.markov_head is not None and not self.config.sample_from_anchor:
            _, state = self.markov_head.transition(self.markov_head.markov_w1(anchor_ids), hidden[:, 0], None)
        hidden = self.predicting(hidden)[:, : base_logits.shape[1]]
        tokens = anchor_ids.new_empty(base_logits.shape[:2])
        laws, embeddings = [], []
        slots = zip(base_logits.unbind(dim=1), hidden.unbind(dim=1), strict=True)
        for slot, (slot_scores, slot_hidden) in enumerate(slots):
            slot_candidates = None
            if best is not None:
                slot_candidates = best[:, slot]
                if successors is not None:
                    slot_candidates = with_successors(slot_candidates, successors(previous))
                if candidate_logits is None:
                    slot_scores = slot_scores.gather(-1, slot_candidates)
                else:
                    slot_scores = candidate_logits(slot_hidden, slot_candidates)
            if self.markov_head is not None:
                embedding = self.markov_head.markov_w1(previous)
                transition, state = self.markov_head.transition(embedding, slot_hidden, state)
                slot_scores = slot_scores.float() + self.markov_head.bias(transition, slot_candidates)
                embeddings.append(embedding)
            if token_ids is not None:  # from the draft's vocabulary to the target's
                everything = token_ids.expand(len(tokens), -1)
                slot_candidates = everything if slot_candidates is None else token_ids[slot_candidates]
            previous, law = sampler(slot_scores.float(), slot_candidates, tokens[:, :slot])
            tokens[:, slot] = previous
            laws.append(law)
        law = None if laws[0] is None else TokenLaw.stack(laws)
        confidence_logits = None
        if self.confidence_head is not None:
            stacked = torch.stack(embeddings, dim=1) if embeddings else None
            confidence_logits = self.confidence_head(hidden, stacked).float()  # Eq. 7
        return DraftBlock(tokens, law, confidence_logits)

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Run the parallel stage for N anchored blocks per row: only their anchors are read, the rest is masked.

        Args:
            input_ids, features, layout, labels: As in [`DraftModel.block_hidden`].

        DSpark Eq. 3, Section 3.3.
        """
        anchor_ids = input_ids.gather(1, layout.anchor_positions)
        block_ids = labels.new_full((*anchor_ids.shape, self.config.num_slots), self.config.mask_token_id)
        block_ids[:, :, 0] = torch.where(layout.anchor_mask, anchor_ids, block_ids[:, :, 0])
        position_ids = torch.cat([layout.position_ids, layout.block_position_ids], dim=1)
        hidden = self.backbone(self.embed(block_ids.flatten(1)), features, position_ids, layout)
        return hidden.unflatten(1, block_ids.shape[1:])

    def slot_inputs(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return h_k and the Markov head's r-vector of each predicting slot, along the labels. DSpark Eq. 5-6."""
        if self.markov_head is None:
            return (self.predicting(hidden),)
        transitions = self.markov_head.teacher_forced(self.markov_head.markov_w1(previous_ids), hidden)
        return self.predicting(hidden), self.predicting(transitions)

    def slot_logits(self, hidden: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Return U_k + B_k, minus infinity for what a pruned vocabulary lacks. DSpark Eq. 4."""
        logits = self.base_logits(hidden)
        if self.markov_head is not None:
            logits = logits + self.markov_head.bias(*inputs)
        token_ids = self.draft_token_ids()
        if token_ids is None:
            return logits
        return scatter_to_vocabulary(logits, token_ids.expand(logits.shape), self.config.vocab_size)

    def slot_parameters(self) -> list[nn.Parameter]:
        """Return W_2."""
        return [] if self.markov_head is None else [self.markov_head.markov_w2.weight]

    def slot_confidence(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Return pre-sigmoid c_k. DSpark Eq. 7."""
        if self.confidence_head is None:
            return None
        embedding = None
        if self.markov_head is not None:
            embedding = self.predicting(self.markov_head.markov_w1(previous_ids))
        return self.confidence_head(self.predicting(hidden), embedding)
