"""The Eagle3 draft model, the autoregressive baseline: one light pass per draft token, fed with its own last output.

Slot i reads what is known of position i, and token i+1, and predicts token i+2. In context slots, what is known are
the target's features; in a block, it is the draft's own output of the slot before.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..sampling.distributions import largest
from ..sampling.drafts import Drafts, Sampler
from ..sampling.transfers import to_device
from .block_attention import BlockLayout, CachedPass, KeyRanges
from .configuration_eagle3 import Eagle3Config
from .layers import Attending, DraftLayer, DSparkRMSNorm, DSparkRotaryEmbedding, Rotary
from .losses import SlotLogits
from .modeling_draft import DraftModel
from .slot_cache import SlotCache, SlotLayout


class Eagle3Layer(DraftLayer):
    """One decoder layer over hidden states; each layer reads the token embeddings anew, side by side with them."""

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx, 2 * config.hidden_size)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotary: Rotary,
        attending: Attending,
        rows: torch.Tensor | None = None,
        *earlier: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run slots through the layer: what is known of each position, and the embedded next token, `[B, T, d]` each.

        Returns the output `[B, Q, d]` of the slots `rows`, and keys and values of all slots, `[B, kv_heads, T, size]`.
        `earlier` are keys and values of earlier passes.
        """
        states = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        of_rows = tuple(take_rows(part[:, 0], rows)[:, None] for part in rotary)
        attended, *own = self.self_attn(take_rows(states, rows), states, of_rows, rotary, attending, *earlier)
        return self.after_attention(take_rows(hidden, rows), attended), *own


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
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_own_weights()
        self.rotary = DSparkRotaryEmbedding(config)
        self.post_init()

    def _read(
        self, anchor_ids: torch.Tensor, features: torch.Tensor, cache: SlotCache, counts: Sequence[int], *more: Any
    ) -> torch.Tensor:
        """Return the output of each request's last slot before the final norm, `[B, d]`."""
        (committed_ids,) = more
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
        return self._read_slots(self.fc(self.as_input(features))[None], committed_ids, cache, layout)

    def _draw(
        self, hidden: torch.Tensor, anchor_ids: torch.Tensor, sampler: Sampler, num_tokens: int | None, *more: Any
    ) -> Drafts:
        tokens, top_k, (cache, counts) = None, self.config.draft_top_k, more
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
        last = to_device([list(accumulate(layout.counts))], self.device) - 1
        last_slots = tuple(start + count - 1 for start, count in zip(layout.starts, layout.counts, strict=True))
        attending = [layout] * (len(self.layers) - 1) + [SlotLayout(last_slots, (1,) * layout.num_rows)]
        for layer, queries in zip(self.layers, attending, strict=True):
            drafting = CachedPass(cache, (layout,), queries, is_causal=True)
            hidden, _, _ = layer(hidden, embeds, rotary, drafting, None if queries is layout else last)
        return hidden[0]

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return h `[B, N, γ, d]` of γ steps at the slot before each anchor.

        The first step runs over all positions. Each later one runs at those slots only, and sees the first step's keys
        up to there and its own slot's keys of the steps between. The outputs of dummies, and of anchors that begin
        their document, are finite but mean nothing.
        """
        length = input_ids.shape[1]
        served = layout.anchor_mask & (layout.anchor_positions > layout.starts)
        slots = (layout.anchor_positions - 1).clamp_min(0)
        # Dummies see the first slot: rows that see nothing would be NaN.
        ends = layout.anchor_positions.where(served, 1)
        ranges = KeyRanges(layout.starts * served, ends, length)
        index = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        whole = KeyRanges(index - layout.position_ids, index + 1, length)
        hidden = self.fc(self.as_input(features))
        embeds = self.embed(torch.cat([input_ids[:, 1:], input_ids[:, -1:]], dim=1))  # the last slot serves no anchor
        rotary = self.rotary(layout.position_ids, embeds.dtype)
        earlier: list[tuple[torch.Tensor, ...]] = []  # keys and values of all steps, by layer
        attending = [(whole, None)] * (len(self.layers) - 1) + [(ranges, slots)]
        for layer, who in zip(self.layers, attending, strict=True):
            hidden, *new = layer(hidden, embeds, rotary, *who)
            earlier.append(tuple(new))
        outputs = [hidden]
        positions = layout.position_ids.gather(1, slots)
        for step in range(1, self.config.block_size):
            embeds = self.embed(labels[:, :, step - 1])
            rotary = self.rotary(positions + step, embeds.dtype)
            for index, layer in enumerate(self.layers):
                hidden, *new = layer(hidden, embeds, rotary, ranges, None, *earlier[index])
                earlier[index] += tuple(new)
            outputs.append(hidden)
        return self.norm(torch.stack(outputs, dim=2))

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, None]:
        hidden = self.block_hidden(input_ids, features, layout, labels)
        return SlotLogits(self.base_logits, (hidden,), self.config.vocab_size), None
