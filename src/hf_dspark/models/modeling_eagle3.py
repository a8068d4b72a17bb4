"""The Eagle3 draft model, the autoregressive baseline: one light pass per draft token, fed with its own last output.

Slot i reads what is known of position i, and token i+1, and predicts token i+2. In context slots, what is known are
the target's features; in a block, it is the draft's own output of the slot before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..sampling.distributions import largest
from ..sampling.drafts import Drafts, Sampler
from .attention import fold_mask, grouped_attention
from .block_attention import BlockLayout, KeyRanges, KeysValues, append_own
from .configuration_eagle3 import Eagle3Config
from .losses import SlotLogits
from .modeling_draft import DraftModel
from .modeling_dspark import DSparkMLP, DSparkRMSNorm, DSparkRotaryEmbedding, Rotary, rotate
from .slot_cache import SlotCache, SlotLayout

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class SlotPass:
    """One cached causal pass over new slots of each request, packed."""

    cache: SlotCache
    layout: SlotLayout  # the new slots of each request
    queries: SlotLayout  # those of them that attend
    layer_idx: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: KeysValues, dropout: float
    ) -> torch.Tensor:
        """Write keys and values `[1, kv_heads, T, size]` of a layer, and attend from `[1, heads, Q, size]`."""
        key, value = self.cache.update(key, value, self.layer_idx)
        mask = self._mask(query.shape[1] // key.shape[1], query.dtype, query.device)
        attended = grouped_attention(self.queries.to_rows(query), key, value, mask, None)
        return self.queries.to_packed(attended).transpose(1, 2)

    def _mask(self, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        if all(start == self.layout.end - 1 for start in self.queries.starts):
            return None  # the last slot sees all
        slots = torch.arange(self.layout.end, device=device)
        return fold_mask(slots <= self.queries.row_positions(device)[:, None, :, None], group, dtype)


class Eagle3Attention(nn.Module):
    """Causal attention whose rows are a hidden state and a token embedding side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, states: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None, *context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what some rows of `[B, T, 2d]` read, `[B, Q, d]`, and the keys and values of all rows."""
        key = rotate(self.k_norm(self._heads(self.k_proj(states))), *rotary)
        value = self._heads(self.v_proj(states))
        states, rotary = take_rows(states, rows), tuple(take_rows(part[:, 0], rows)[:, None] for part in rotary)
        query = rotate(self.q_norm(self._heads(self.q_proj(states))), *rotary)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended = attend(query, key, value, context, dropout)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), key, value

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class Eagle3Layer(GradientCheckpointingLayer):
    """One decoder layer over hidden states; each layer reads the token embeddings anew."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = DSparkMLP(config)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotary: Rotary,
        attend: Attend,
        rows: torch.Tensor | None = None,
        *context: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run slots through the layer: what is known of each position, and the embedded next token, `[B, T, d]` each.

        Returns the output `[B, Q, d]` of the slots `rows`, and keys and values of all slots, `[B, kv_heads, T, size]`.
        `context` are keys and values of earlier passes, for `attend`.
        """
        states = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        attended, key, value = self.self_attn(states, rotary, attend, rows, *context)
        hidden = take_rows(hidden, rows) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


def take_rows(states: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return rows `[B, Q]` of `[B, T, size]`; all of them without `rows`."""
    return states if rows is None else states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[-1]))


class Eagle3DraftModel(DraftModel):
    """An Eagle3 draft: γ passes of one layer, each after the token drawn from the last one.

    Train it with soft cross-entropy, as the reference does. There, a slot is masked by the two tokens before its
    label, which leaves out the first two tokens of each supervised stretch and takes in the one after it; here it is
    masked by its label.

    Example:

    ```python
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config))  # untrained
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=16)
    ```
    """

    config_class = Eagle3Config
    config: Eagle3Config
    _supports_sdpa = True
    _no_split_modules = ["Eagle3Layer"]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = DSparkRotaryEmbedding(config)
        self.post_init()

    def _read(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        counts: Sequence[int],
        committed_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of each request's last slot before the final norm, `[B, d]`."""
        if committed_ids is None:
            raise ValueError(
                "an Eagle3 draft reads each context token together with the next one: pass committed_ids, the "
                "committed token after each token of features"
            )
        if 0 in counts:  # its last round failed: it reads a slot without features, which is not kept
            split, blank = list(counts), features.new_zeros(1, features.shape[1])
            features = torch.cat([own if len(own) else blank for own in features.split(split)])
            ids = zip(anchor_ids.split(1), committed_ids.split(split), strict=True)
            committed_ids = torch.cat([own if len(own) else anchor for anchor, own in ids])
        layout = SlotLayout(cache.lengths[: len(counts)], tuple(max(1, count) for count in counts))
        return self._read_slots(self.fc(features.to(self.fc.weight))[None], committed_ids, cache, layout)

    def _draw(
        self,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        cache: SlotCache,
        sampler: Sampler,
        counts: Sequence[int],
        num_tokens: int | None,
    ) -> Drafts:
        tokens, top_k = None, self.config.draft_top_k
        # Where the block begins; a slot that was read without features is not counted.
        starts = [length + (count == 0) for length, count in zip(cache.lengths, counts, strict=False)]
        for slot in range(num_tokens or self.config.block_size):
            if slot > 0:
                layout = SlotLayout(tuple(start + slot - 1 for start in starts), (1,) * len(starts))
                hidden = self._read_slots(hidden[None], tokens, cache, layout)
            scores, candidate_ids = self.base_logits(self.norm(hidden)), None
            if top_k is not None:
                scores, candidate_ids = largest(scores, top_k)
            tokens, _ = sampler(scores.float(), candidate_ids, None)
        return sampler.finish()

    def _read_slots(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, cache: SlotCache, layout: SlotLayout
    ) -> torch.Tensor:
        """Run packed slots `[1, T, d]` with their next tokens `[T]`; return each request's last one, `[B, d]`."""
        embeds = self.embed(token_ids)[None]
        rotary = self.rotary(layout.position_ids(self.device), embeds.dtype)
        last = torch.tensor([list(accumulate(layout.counts))], device=self.device) - 1
        last_slots = tuple(start + count - 1 for start, count in zip(layout.starts, layout.counts, strict=True))
        outer = SlotPass(cache, layout, SlotLayout(last_slots, (1,) * layout.num_rows), len(self.layers) - 1)
        with cache.writing(layout):
            for index, layer in enumerate(self.layers[:-1]):
                hidden, _, _ = layer(hidden, embeds, rotary, SlotPass(cache, layout, layout, index).attend)
            hidden, _, _ = self.layers[-1](hidden, embeds, rotary, outer.attend, last)
        return hidden[0]

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return h `[B, N, γ, d]` of γ steps at the slot before each anchor.

        The first step runs over all positions. Each later one runs at those slots only, and sees the first step's keys
        up to there and its own slot's keys of the steps between. The outputs of dummies, and of anchors that begin
        their document, are finite but mean nothing.
        """
        served = layout.anchor_mask & (layout.anchor_positions > layout.starts)
        slots = (layout.anchor_positions - 1).clamp_min(0)
        # Dummies see the first slot: rows that see nothing would be NaN.
        ranges = KeyRanges(torch.where(served, layout.starts, 0), torch.where(served, layout.anchor_positions, 1))
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        whole = KeyRanges(index - layout.position_ids, index + 1)
        hidden = self.fc(features.to(self.fc.weight))
        embeds = self.embed(torch.cat([input_ids[:, 1:], input_ids[:, -1:]], dim=1))  # the last slot serves no anchor
        rotary = self.rotary(layout.position_ids, embeds.dtype)
        contexts: list[KeysValues] = []
        for layer in self.layers[:-1]:
            hidden, *context = layer(hidden, embeds, rotary, whole.attend)
            contexts.append(tuple(context))
        hidden, *context = self.layers[-1](hidden, embeds, rotary, ranges.attend, slots)
        contexts.append(tuple(context))
        outputs = [hidden]
        positions = layout.position_ids.gather(1, slots)
        for step in range(1, self.config.block_size):
            embeds = self.embed(labels[:, :, step - 1])
            rotary = self.rotary(positions + step, embeds.dtype)
            for index, layer in enumerate(self.layers):
                context = contexts[index]
                hidden, key, value = layer(hidden, embeds, rotary, ranges.attend, None, *context)
                contexts[index] = (*context[:2], *append_own(context[2:], key, value))
            outputs.append(hidden)
        return self.norm(torch.stack(outputs, dim=2))

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, None]:
        hidden = self.block_hidden(input_ids, features, layout, labels)
        return SlotLogits(self.base_logits, (hidden,), self.config.vocab_size), None
