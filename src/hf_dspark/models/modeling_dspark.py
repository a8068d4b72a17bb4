"""The DSpark draft model: a parallel backbone fed with target features, a sequential Markov head, a confidence head.

DFlash is the special case `markov_rank=0`. One backbone serves every target family; what differs is in the config.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..sampling.distributions import largest
from ..sampling.drafts import Drafts, Sampler
from ..sampling.transfers import to_device
from . import layers
from .block_attention import BlockLayout, CachedPass, KeyRanges
from .configuration_dspark import DSparkConfig
from .fixed_cache import FixedBlocks
from .heads import MARKOV_HEADS, ConfidenceHead, Successors, with_successors
from .layers import Attending, BlockConvolution, DSparkRMSNorm, Rotary, connected, v4_module
from .losses import SlotLogits
from .modeling_draft import DraftModel, NewContext
from .slot_cache import SlotLayout

# Of `draft_top_k` candidates, one in so many is named by the Markov head, the others by the base logits.
SUCCESSORS_ONE_IN = 4
MOST_SUCCESSORS = 64  # their table has so many columns: a config must not ask for gigabytes


class DSparkLayer(layers.DraftLayer):
    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.hidden_size)
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.attn_hc = v4_module("HyperConnection", config) if config.hc_mult else None
        self.ffn_hc = v4_module("HyperConnection", config) if config.hc_mult else None

    def forward(
        self, hidden: torch.Tensor, context: torch.Tensor, rotary: Rotary, attending: Attending
    ) -> torch.Tensor:
        """Attend from block rows `[B, Q, d]` to the new context rows `[B, C, d]`, themselves, and the cached ones.
        With hyper-connections, block rows are streams `[B, Q, n, d]`."""

        def attend(block: torch.Tensor) -> torch.Tensor:
            # The context rows enter keys and values as they are: only block rows pass norm and convolution.
            return self.self_attn(block, torch.cat([context, block], dim=1), rotary, attending)[0]

        def attended(states: torch.Tensor) -> torch.Tensor:
            normed = self.input_layernorm(states)
            return attend(normed) if self.attention_conv is None else self.attention_conv.around(normed, attend)

        if self.attn_hc is None:
            return self.after_attention(hidden, attended(hidden))
        hidden = connected(self.attn_hc, hidden, attended)
        return connected(self.ffn_hc, hidden, lambda states: self.feed_forward(self.post_attention_layernorm(states)))

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self.mlp(normed) if self.mlp_conv is None else self.mlp_conv.around(normed, self.mlp)


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
        self.hc_head = v4_module("HyperHead", config) if config.hc_mult else None
        self.norm = DSparkRMSNorm(hidden_size, eps)
        self.add_own_weights()
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = layers.DSparkRotaryEmbedding(config)
        self._successor_tables: dict[int, Successors] = {}
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        layers.init_v4_weights(module, self.config.initializer_range)
        if isinstance(module, DSparkLayer) and module.layer_scalar is not None:
            nn.init.ones_(module.layer_scalar)
        elif isinstance(module, layers.V4Attention):
            nn.init.zeros_(module.attention_sink_bias)
        elif isinstance(module, BlockConvolution):
            nn.init.zeros_(module.kernel_projection.weight)
        elif self.markov_head is not None and module is self.markov_head.markov_w2:
            nn.init.zeros_(module.weight)  # an untrained head leaves the base logits alone

    @property
    def draws_tails(self) -> bool:
        """Whether slots say the same wherever drawing begins: not with a head whose state comes from the first one."""
        return self.markov_head is None or not (self.markov_head.has_state or self.config.markov_start > 1)

    def successors(self) -> Successors | None:
        """Return the table by which the Markov head names some of the candidates, if it does."""
        candidates = self.config.draft_top_k
        if candidates is None:
            return None
        # A single candidate is the best one.
        count = min(math.ceil(candidates / SUCCESSORS_ONE_IN), candidates - 1, MOST_SUCCESSORS)
        if self.markov_head is None or not self.markov_head.names_successors or count == 0:
            return None
        table = self._successor_tables.get(count)
        # Who runs a graph has asked before: in it, versions of weights cannot be read.
        if table is None or not (torch.compiler.is_compiling() or table.is_current()):
            table = self._successor_tables[count] = Successors(self.markov_head, self.config.hidden_size, count)
        return table

    def backbone(
        self, block_embeds: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, attending: Attending
    ) -> torch.Tensor:
        """Run the parallel stage from embedded anchor and mask tokens `[B, Q, d]` to h, after the final norm (with
        `v4_heads`, before it).

        Features `[B, C, m*d]` are of the context rows that are not cached yet, positions `[B, C+Q]` of those, then of
        the block rows. In a [`CachedPass`], B = 1, and the rows of all requests are packed. DSpark Eq. 2-3.
        """
        context = self.hidden_norm(self.fc(features.to(block_embeds)))  # Eq. 2
        rotary = self.rotary(position_ids, block_embeds.dtype)
        hidden = block_embeds
        if self.hc_head is not None:
            hidden = hidden[:, :, None].repeat(1, 1, self.config.hc_mult, 1)
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, attending)
        hidden = hidden if self.hc_head is None else self.hc_head(hidden)
        return hidden if self.config.v4_heads else self.norm(hidden)

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        return super().base_logits(self._before_lm_head(block_hidden))

    def _before_lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) if self.config.v4_heads else hidden

    def _read(self, context: NewContext) -> torch.Tensor:
        cache, counts, num_slots = context.cache, context.counts, self.config.num_slots
        starts = cache.lengths[: len(counts)]
        after_context = tuple(start + count for start, count in zip(starts, counts, strict=True))
        blocks = SlotLayout(after_context, (num_slots,) * len(counts))  # written after the context and never counted
        # Of a single request, both are written at once.
        is_single = len(counts) == 1
        contexts = SlotLayout(starts, (counts[0] + num_slots,) if is_single else tuple(counts))
        written = (contexts,) if is_single else (contexts, blocks)
        drafting = CachedPass(cache, written, blocks, firsts=cache.first_seen(after_context))
        return self.read_cached(context.anchor_ids, context.features, drafting)

    def read_cached(
        self, anchor_ids: torch.Tensor, features: torch.Tensor, drafting: CachedPass | FixedBlocks
    ) -> torch.Tensor:
        """Run a cached pass over new context `[T, m*d]` and one block after each anchor `[R]`; return h
        `[R, slots, d]`."""
        block_ids = F.pad(anchor_ids[:, None], (0, self.config.num_slots - 1), value=self.config.mask_token_id)
        block_embeds = self.embed(block_ids).flatten(0, 1)[None]
        hidden = self.backbone(block_embeds, features[None], drafting.position_ids(features.device), drafting)
        return hidden.view(len(anchor_ids), self.config.num_slots, -1)

    def _draw(self, hidden: torch.Tensor, context: NewContext, sampler: Sampler, num_tokens: int | None) -> Drafts:
        base_logits = self.base_logits(self.predicting(hidden)[:, :num_tokens])
        return self.sample_block(hidden, base_logits, context.anchor_ids, sampler)

    def sample_block(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        anchor_ids: torch.Tensor,
        sampler: Sampler,
        is_tail: bool = False,
    ) -> Drafts:
        """Run the sequential stage level by level: the children of a node at depth k - 1 are drawn from
        softmax(U_k + B_k), whatever branch it is in. DSpark Eq. 4.

        It reads h `[R, slots, d]`, U_1..U_n `[R, n, V or V_d]`, n <= γ, and x_0 `[R]`, and draws n levels at most. In
        a tail the n slots are later ones of a block.
        """
        tokens, state, top_k, kept_ids = anchor_ids, None, self.config.draft_top_k, self.draft_token_ids()
        head, confidence_head, start = self.markov_head, self.confidence_head, self.config.markov_start
        embed = None if head is None else self.markov_embedding
        successors = self.successors()
        if head is not None and head.reads_anchor_slot and not self.config.sample_from_anchor:
            _, state = head.transition(embed(tokens), hidden[:, 0], None)
        num_levels = base_logits.shape[1]
        hidden = self.predicting(hidden)[:, :num_levels]
        best = [None] * num_levels if top_k is None else largest(base_logits, top_k)[1].unbind(dim=1)
        slots = zip(base_logits.unbind(dim=1), hidden.unbind(dim=1), best, strict=True)
        reads_confidence = confidence_head is not None and sampler.reads_confidence
        embeddings, rows = [], None  # the request of each node of a level; `None`: one node of each
        for depth, slot in enumerate(slots):
            scores, node_hidden, candidates = slot if rows is None else (of_nodes(each, rows) for each in slot)
            if successors is not None:
                candidates = with_successors(candidates, successors(tokens))
            scores = scores if candidates is None else scores.gather(-1, candidates)
            if head is not None:
                embeddings.append(embed(tokens))
                transition, state = head.transition(embeddings[-1], node_hidden, state)
                if is_tail or depth >= start:
                    scores = head.added_to(scores, transition, candidates)  # Eq. 4
            confidence = None
            if reads_confidence:
                confidence = confidence_head(node_hidden, embeddings[-1] if embeddings else None).float()
            if kept_ids is not None:  # the target's tokens
                candidates = kept_ids.expand(len(tokens), -1) if candidates is None else kept_ids[candidates]
            level = sampler(scores.float(), candidates, confidence)
            if level is None:
                return sampler.finish()
            tokens, parents = level
            if parents is not None:
                rows = parents if rows is None else [rows[parent] for parent in parents]
                state = None if state is None else state[to_device(parents, state.device)]
        if confidence_head is None:
            return sampler.finish()
        stacked = torch.stack(embeddings, dim=1) if embeddings else None
        return sampler.finish(confidence_head(hidden, stacked).float())  # Eq. 7

    @property
    def markov_embedding(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What turns tokens x_{k-1} into what the Markov head reads: rows of W_1, or without one the target's."""
        return self.markov_head.markov_w1 or self.embed

    def predicting(self, per_slot: torch.Tensor) -> torch.Tensor:
        """Return the γ slots that predict, `[..., γ, *]` of `[..., slots, *]`."""
        return per_slot[..., -self.config.block_size :, :]

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return h `[B, N, slots, d]` of N anchored blocks per row, which read their anchors alone. DSpark Eq. 3."""
        anchor_ids = input_ids.gather(1, layout.anchor_positions)
        block_ids = labels.new_full((*anchor_ids.shape, self.config.num_slots), self.config.mask_token_id)
        block_ids[:, :, 0] = torch.where(layout.anchor_mask, anchor_ids, block_ids[:, :, 0])
        slots = torch.arange(self.config.num_slots, device=labels.device)
        block_positions = (layout.anchor_positions - layout.starts)[:, :, None] + slots  # in their documents
        position_ids = torch.cat([layout.position_ids, block_positions.flatten(1)], dim=1)
        length = input_ids.shape[1]
        starts, ends = layout.starts.where(layout.anchor_mask, length), layout.anchor_positions * layout.anchor_mask
        ranges = KeyRanges(starts, ends, length, self.config.num_slots)  # dummies see their own blocks alone
        hidden = self.backbone(self.embed(block_ids.flatten(1)), features, position_ids, ranges)
        return hidden.unflatten(1, block_ids.shape[1:])

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, torch.Tensor | None]:
        hidden = self.block_hidden(input_ids, features, layout, labels)
        read, embedding = self.predicting(hidden), None
        parameters = [] if self.lm_head is None else [*self.lm_head.parameters()]  # adapters among them
        inputs = [self._before_lm_head(read)]
        if self.markov_head is not None:
            # x*_{k-1} of each slot. An anchor's slot that predicts nothing passes through a recurrent head, too.
            anchor_ids = input_ids.gather(1, layout.anchor_positions)[:, :, None]
            anchor_ids = anchor_ids.expand(-1, -1, 1 + self.config.num_slots - self.config.block_size)
            embedding = self.markov_embedding(torch.cat([anchor_ids, labels[..., :-1]], dim=-1))
            if not self.markov_head.reads_anchor_slot:
                embedding, hidden = self.predicting(embedding), read
            transitions = self.predicting(self.markov_head.teacher_forced(embedding, hidden))  # Eq. 5-6
            start = self.config.markov_start
            inputs.append(F.pad(transitions[..., start:, :], (0, 0, start, 0)))  # zeros have no bias
            parameters += self.markov_head.markov_w2.parameters()
            embedding = self.predicting(embedding)
        ids = self.draft_token_ids()
        logits = SlotLogits(self._slot_logits, tuple(inputs), self.config.vocab_size, tuple(parameters), ids)
        return logits, None if self.confidence_head is None else self.confidence_head(read, embedding)  # Eq. 7

    def _slot_logits(self, hidden: torch.Tensor, *transitions: torch.Tensor) -> torch.Tensor:
        """Return U_k + B_k of the tokens that the draft can propose. DSpark Eq. 4."""
        logits = super().base_logits(hidden)
        return logits if self.markov_head is None else logits + self.markov_head.bias(*transitions)


def of_nodes(of_slot: torch.Tensor | None, rows: list[int]) -> torch.Tensor | None:
    """Return what each node of a level reads of its request's slot, `[F, *]` of `[R, *]`."""
    if of_slot is None:
        return None
    return of_slot.expand(len(rows), -1) if len(of_slot) == 1 else of_slot[to_device(rows, of_slot.device)]
