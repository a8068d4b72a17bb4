"""The DSpark draft model: a parallel backbone fed with target features, a sequential Markov head, a confidence head.

DFlash is the special case `markov_rank=0`. One backbone serves every target family; what differs is in the config.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..formats.checkpoint import kept_token_ids
from ..sampling.distributions import largest
from ..sampling.drafts import Drafts, Sampler
from ..sampling.transfers import to_device
from .attention import attend_with_extras, fold_mask, grouped_attention
from .block_attention import BlockLayout, SlidingWindow, attend_blocks
from .configuration_dspark import DSparkConfig
from .heads import MARKOV_HEADS, ConfidenceHead, Successors, version_of, with_successors
from .losses import SlotLogits
from .modeling_draft import DraftModel
from .slot_cache import SlotCache, SlotLayout

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines

# Of `draft_top_k` candidates, one in so many is named by the Markov head, the others by the base logits.
SUCCESSORS_ONE_IN = 4
MOST_SUCCESSORS = 64  # their table has so many columns: a config must not ask for gigabytes


@dataclass(frozen=True)
class DraftPass:
    """One cached pass of the draft: context tokens that are not in the cache yet, then a block, of each request."""

    cache: SlotCache  # the requests' context; blocks are written after it and never counted
    num_features: Sequence[int]  # new context tokens of each request
    num_slots: int  # rows of a block
    device: torch.device
    masks: dict[SlidingWindow | None, torch.Tensor | None] = field(default_factory=dict)

    @functools.cached_property
    def layout(self) -> SlotLayout:
        """Context and block of each request, request by request."""
        starts = self.cache.lengths[: len(self.num_features)]
        return SlotLayout(starts, tuple(count + self.num_slots for count in self.num_features))

    @functools.cached_property
    def blocks(self) -> SlotLayout:
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
        return to_device(torch.cat([part for request in parts for part in request]), self.device)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all contexts, then of all blocks, `[1, T]`."""
        if self.order is None:
            return self.layout.position_ids(self.device)
        contexts = SlotLayout(self.layout.starts, tuple(self.num_features))
        return torch.cat([part.position_ids(self.device) for part in (contexts, self.blocks)], dim=1)

    def keys_from(self, window: SlidingWindow | None) -> int:
        """Return the first slot that some block row sees."""
        return 0 if window is None else max(0, min(self.blocks.starts) - window.size + (not window.from_anchor))

    def visible(self, window: SlidingWindow | None) -> torch.Tensor | None:
        """Return which slots from `keys_from(window)` on each block row sees, `[R, 1, slots, keys]`; `None`: all."""
        keys = torch.arange(self.keys_from(window), self.layout.end, device=self.device)
        own = keys - to_device(self.blocks.starts, self.device)[:, None, None, None]  # negative: context
        visible = None if len(set(self.blocks.starts)) == 1 else own < self.num_slots
        if window is not None and (window.causal or self.layout.end > window.size):
            slots = torch.arange(self.num_slots, device=self.device)[:, None]
            near = torch.where(own < 0, window.sees_context(slots, -own), window.sees_slot(slots, own))
            visible = near if visible is None else near & visible
        return None if visible is None else visible.expand(-1, -1, self.num_slots, -1)

    def mask(self, window: SlidingWindow | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is visible, folded as [`grouped_attention`] wants it: made once for all layers."""
        if window not in self.masks:
            self.masks[window] = fold_mask(self.visible(window), group, dtype)
        return self.masks[window]


Attending = BlockLayout | DraftPass  # who sees what: in training, in a cached pass


class DSparkRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, with_scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if with_scale else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(hidden.dtype) if self.weight is None else self.weight * normed.to(hidden.dtype)


class DSparkRotaryEmbedding:
    """Rotary cosines and sines from float32 frequencies."""

    # Not a module: `model.to(torch.bfloat16)` would round a buffer, and positions beyond a few hundred tokens with it.
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

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Rotary:
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
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        norm = (lambda: DSparkRMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        scale_free = DSparkRMSNorm(config.head_dim, config.rms_norm_eps, with_scale=False)
        self.v_norm = scale_free if config.value_norm else nn.Identity()
        sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None
        self.attention_sink_bias = sinks

    def forward(
        self, hidden: torch.Tensor, context: torch.Tensor, rotary: Rotary, attending: Attending
    ) -> torch.Tensor:
        """Attend from block rows `[B, Q, d]` to themselves, the new context rows `[B, C, d]` and the cached ones."""
        key_input = torch.cat([context, hidden], dim=1)
        of_block = (part[:, :, -hidden.shape[1] :] for part in rotary)
        query = rotate(self.q_norm(self._heads(self.q_proj(hidden))), *of_block)
        raw_key = self._heads(self.k_proj(key_input))
        raw_value = raw_key if self.v_proj is None else self._heads(self.v_proj(key_input))
        key, value = rotate(self.k_norm(raw_key), *rotary), self.v_norm(raw_value)
        attend = self._attend_to_slots if isinstance(attending, DraftPass) else self._attend_in_training
        return self.o_proj(attend(query, key, value, attending).reshape(*hidden.shape[:2], -1))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _attend_in_training(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BlockLayout
    ) -> torch.Tensor:
        dropout, sinks = self.config.attention_dropout if self.training else 0.0, self.attention_sink_bias
        output = attend_blocks(query, key, value, layout, self.window, self.scaling, dropout, sinks)
        return output.transpose(1, 2)

    def _attend_to_slots(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, drafting: DraftPass
    ) -> torch.Tensor:
        if drafting.order is not None:
            key, value = key[:, :, drafting.order], value[:, :, drafting.order]
        key, value = drafting.cache.update(key, value, self.layer_idx)
        start = drafting.keys_from(self.window)
        key, value, rows = key[:, :, start:], value[:, :, start:], drafting.blocks.to_rows(query)
        if self.attention_sink_bias is None:
            mask = drafting.mask(self.window, self.num_key_value_groups, query.dtype)
            attended = grouped_attention(rows, key, value, mask, self.scaling)
        else:
            mask, sinks = drafting.visible(self.window), self.attention_sink_bias
            attended = attend_with_extras(rows, key, value, mask, self.scaling, sinks=sinks)
        return drafting.blocks.to_packed(attended)


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
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
        self, hidden: torch.Tensor, context: torch.Tensor, rotary: Rotary, attending: Attending
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

    Load one with `from_pretrained(name_or_path)`: a folder or a Hub repository that this package, DeepSpec,
    speculators or SpecForge wrote (DFlash is `markov_rank=0`). Or make an untrained one, `DSparkDraftModel(config)`
    with `config = DSparkConfig.from_target(target.config)`, and train it with [`DSparkTrainer`]. A draft has no
    embedding and no LM head of its own: it borrows those of its target, and fits no other model.

    `draft.decoding` says how `generate()` decodes with it, such as `DecodingOptions(policy=FullBlock())`;
    `draft.last_stats` what the last call drafted and accepted.

    Example:

    ```python
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from hf_dspark import DSparkDraftModel

    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-4B")
    target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
    draft = DSparkDraftModel.from_pretrained("user/Qwen3-4B-DSpark")
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    print(draft.last_stats.tau)  # tokens per round
    ```

    DSpark Section 3.1.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    grows_trees = True
    _supports_sdpa = True
    _no_split_modules = ["DSparkLayer"]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(hidden_size, eps)
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(hidden_size, eps)
        if config.draft_vocab_size is not None:
            # Rows of the target's head, and frozen as that is.
            self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False).requires_grad_(False)
            # As speculators keeps it: draft id i is the target's token i + d2t[i].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        self._successor_tables: dict[int, Successors] = {}
        self._kept_ids: tuple[Any, torch.Tensor] | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkLayer) and module.layer_scalar is not None:
            nn.init.ones_(module.layer_scalar)
        elif self.markov_head is not None and module is self.markov_head.markov_w2:
            nn.init.zeros_(module.weight)  # an untrained head leaves the base logits alone

    def draft_token_ids(self) -> torch.Tensor | None:
        if self.config.draft_vocab_size is None:
            return None
        state = self.d2t.device, version_of(self.d2t)
        if self._kept_ids is None or self._kept_ids[0] != state:
            with torch.inference_mode(False):  # what is kept may be trained with
                self._kept_ids = state, kept_token_ids(self.d2t, self.config.vocab_size)
        return self._kept_ids[1]

    def _successors(self) -> Successors | None:
        candidates = self.config.draft_top_k
        # A single candidate is the best one.
        count = min(math.ceil(candidates / SUCCESSORS_ONE_IN), candidates - 1, MOST_SUCCESSORS)
        if self.markov_head is None or count == 0:
            return None
        table = self._successor_tables.get(count)
        if table is None or not table.is_current():
            table = self._successor_tables[count] = Successors(self.markov_head, self.config.hidden_size, count)
        return table

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        if self.config.draft_vocab_size is None:
            return super().base_logits(block_hidden)
        return self.scaled_logits(self.lm_head(block_hidden))

    def backbone(
        self, block_embeds: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, attending: Attending
    ) -> torch.Tensor:
        """Run the parallel stage from embedded anchor and mask tokens `[B, Q, d]` to h, after the final norm.

        Features `[B, C, m*d]` are of the context rows that are not cached yet, positions `[B, C+Q]` of those, then of
        the block rows. In a [`DraftPass`], B = 1, and the rows of all requests are packed. DSpark Eq. 2-3.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight)))  # Eq. 2
        rotary = self.rotary(position_ids, block_embeds.dtype)
        hidden = block_embeds
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, attending)
        return self.norm(hidden)

    def _read(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        counts: Sequence[int],
        committed_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        num_slots = self.config.num_slots
        drafting = DraftPass(cache, counts, num_slots, self.device)
        block_ids = anchor_ids.new_full((len(counts), num_slots), self.config.mask_token_id)
        block_ids[:, 0] = anchor_ids
        block_embeds = self.embed(block_ids).flatten(0, 1)[None]
        with cache.writing(drafting.layout):
            hidden = self.backbone(block_embeds, features[None], drafting.position_ids, drafting)
        return hidden.view(len(counts), num_slots, -1)

    def _draw(
        self,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        cache: SlotCache,
        sampler: Sampler,
        counts: Sequence[int],
        num_tokens: int | None,
    ) -> Drafts:
        return self.sample_block(
            hidden, self.base_logits(self.predicting(hidden)[:, :num_tokens]), anchor_ids, sampler
        )

    def sample_block(
        self, hidden: torch.Tensor, base_logits: torch.Tensor, anchor_ids: torch.Tensor, sampler: Sampler
    ) -> Drafts:
        """Run the sequential stage level by level: the children of a node at depth k - 1 are drawn from
        softmax(U_k + B_k), whatever branch it is in. DSpark Eq. 4.

        It reads h `[R, slots, d]`, U_1..U_n `[R, n, V or V_d]`, n <= γ, and x_0 `[R]`, and draws n levels at most.
        """
        tokens, state, top_k = anchor_ids, None, self.config.draft_top_k
        best = None if top_k is None else largest(base_logits, top_k)[1]
        successors = None if top_k is None else self._successors()
        if self.markov_head is not None and not self.config.sample_from_anchor:
            _, state = self.markov_head.transition(self.markov_head.markov_w1(tokens), hidden[:, 0], None)
        hidden = self.predicting(hidden)[:, : base_logits.shape[1]]
        embeddings, rows = [], None  # the request of each node of a level; `None`: one node of each
        for depth in range(base_logits.shape[1]):
            scores, node_hidden = of_nodes(base_logits, rows, depth), of_nodes(hidden, rows, depth)
            candidates = None if best is None else of_nodes(best, rows, depth)
            if successors is not None:
                candidates = with_successors(candidates, successors(tokens))
            scores = scores if candidates is None else scores.gather(-1, candidates)
            if self.markov_head is not None:
                embeddings.append(self.markov_head.markov_w1(tokens))
                transition, state = self.markov_head.transition(embeddings[-1], node_hidden, state)
                scores = scores.float() + self.markov_head.bias(transition, candidates)  # Eq. 4
            confidence = None
            if self.confidence_head is not None and sampler.reads_confidence:
                confidence = self.confidence_head(node_hidden, embeddings[-1] if embeddings else None).float()
            level = sampler(scores.float(), self._target_ids(candidates, len(tokens)), confidence)
            if level is None:
                return sampler.finish()
            tokens, parents = level
            if parents is not None:
                rows = parents if rows is None else [rows[parent] for parent in parents]
                state = None if state is None else state[to_device(parents, state.device)]
        if self.confidence_head is None:
            return sampler.finish()
        stacked = torch.stack(embeddings, dim=1) if embeddings else None
        return sampler.finish(self.confidence_head(hidden, stacked).float())  # Eq. 7

    def predicting(self, per_slot: torch.Tensor) -> torch.Tensor:
        """Return the γ slots that predict, `[..., γ, *]` of `[..., slots, *]`."""
        return per_slot[..., -self.config.block_size :, :]

    def _target_ids(self, candidates: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        """Bring candidates from a pruned vocabulary to the target's; `None` where all of one vocabulary are meant."""
        token_ids = self.draft_token_ids()
        if token_ids is None:
            return candidates
        return token_ids.expand(num_rows, -1) if candidates is None else token_ids[candidates]

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return h `[B, N, slots, d]` of N anchored blocks per row, which read their anchors alone. DSpark Eq. 3."""
        anchor_ids = input_ids.gather(1, layout.anchor_positions)
        block_ids = labels.new_full((*anchor_ids.shape, self.config.num_slots), self.config.mask_token_id)
        block_ids[:, :, 0] = torch.where(layout.anchor_mask, anchor_ids, block_ids[:, :, 0])
        position_ids = torch.cat([layout.position_ids, layout.block_position_ids], dim=1)
        hidden = self.backbone(self.embed(block_ids.flatten(1)), features, position_ids, layout)
        return hidden.unflatten(1, block_ids.shape[1:])

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, torch.Tensor | None]:
        hidden = self.block_hidden(input_ids, features, layout, labels)
        inputs, parameters, embedding = [self.predicting(hidden)], [], None
        if self.markov_head is not None:
            # x*_{k-1} of each slot. An anchor's slot that predicts nothing passes through a recurrent head, too.
            anchor_ids = input_ids.gather(1, layout.anchor_positions)[:, :, None]
            anchor_ids = anchor_ids.expand(-1, -1, 1 + self.config.num_slots - self.config.block_size)
            embedding = self.markov_head.markov_w1(torch.cat([anchor_ids, labels[..., :-1]], dim=-1))
            inputs.append(self.predicting(self.markov_head.teacher_forced(embedding, hidden)))  # Eq. 5-6
            parameters.append(self.markov_head.markov_w2.weight)
            embedding = self.predicting(embedding)
        logits = SlotLogits(
            self._slot_logits, tuple(inputs), self.config.vocab_size, tuple(parameters), self.draft_token_ids()
        )
        return logits, None if self.confidence_head is None else self.confidence_head(inputs[0], embedding)  # Eq. 7

    def _slot_logits(self, hidden: torch.Tensor, *transitions: torch.Tensor) -> torch.Tensor:
        """Return U_k + B_k of the tokens that the draft can propose. DSpark Eq. 4."""
        logits = self.base_logits(hidden)
        return logits if self.markov_head is None else logits + self.markov_head.bias(*transitions)


def of_nodes(by_slot: torch.Tensor, rows: list[int] | None, slot: int) -> torch.Tensor:
    """Return what each node of a level reads of its request's slot, `[F, *]` of `[R, slots, *]`."""
    if rows is None:
        return by_slot[:, slot]
    if len(by_slot) == 1:
        return by_slot[:, slot].expand(len(rows), -1)
    return by_slot[to_device(rows, by_slot.device), slot]
