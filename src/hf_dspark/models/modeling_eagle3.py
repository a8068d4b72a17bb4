"""The Eagle3 draft model, the autoregressive baseline: one light pass per draft token, fed with its own last output.

Slot i reads what is known of position i, and token i+1, and predicts token i+2. In context slots, what is known are
the target's features; in a block, it is the draft's own output of the slot before. P-EAGLE puts a learnt state in its
place and a mask token in that of token i+1, and so drafts a block in one pass. One class reads the drafts of all
projects; what differs is in the config.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from ..formats.checkpoint import Checkpoint
from ..formats.translate import stored_names
from ..sampling.distributions import largest
from ..sampling.drafts import Drafts, Sampler
from ..sampling.transfers import to_device
from .block_attention import BlockLayout, CachedPass, KeyRanges
from .configuration_eagle3 import Eagle3Config
from .layers import Attending, DraftLayer, DSparkRMSNorm, DSparkRotaryEmbedding, Rotary, take_rows
from .losses import SlotLogits
from .modeling_draft import DraftModel, NewContext
from .modeling_dspark import of_nodes
from .slot_cache import SlotCache, SlotLayout


class Eagle3Layer(DraftLayer):
    """One decoder layer over hidden states; the first one, or each, reads token embeddings side by side with them."""

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        reads_embedding = layer_idx == 0 or config.embedding_in_all_layers
        size, projects = config.hidden_size, reads_embedding and config.mtp
        super().__init__(config, layer_idx, (1 + (reads_embedding and not projects)) * size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = DSparkRMSNorm(size, config.rms_norm_eps) if reads_embedding else None
        self.enorm = DSparkRMSNorm(size, config.rms_norm_eps) if projects else None
        self.eh_proj = nn.Linear(2 * size, size, bias=False) if projects else None

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rotary: Rotary, attending: Attending, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run slots through the layer: what is known of each position, and the embedded next token, `[B, T, d]` each.

        Returns the output `[B, Q, d]` of those that attend, and keys and values of all, `[B, kv_heads, T, size]`.
        `earlier` are keys and values of earlier passes.
        """
        if self.eh_proj is not None:
            hidden = self.eh_proj(torch.cat([self.enorm(embeds), self.hidden_norm(hidden)], dim=-1))
        if self.hidden_norm is None or self.eh_proj is not None:
            states = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            states = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            hidden = normed if self.norm_before_residual else hidden
        rows = attending.queries
        attended, *own = self.self_attn(take_rows(states, rows), states, rotary, attending, *earlier)
        return self.after_attention(take_rows(hidden, rows), attended), *own


class NodeSlots:
    """Where the nodes of trees stand in the cache while these grow: after their row's context, as they come."""

    def __init__(self, starts: Sequence[int], cache: SlotCache) -> None:
        self._starts, self._free, self._depth = starts, list(starts), 0
        self._firsts, self._offsets = cache.first_seen(starts), cache.offsets
        self._rows = list(range(len(starts)))  # of the nodes of the latest level, in ascending order
        self._paths: list[list[int]] = [[] for _ in starts]  # slots of each of them and its ancestors

    def below(self, parents: Sequence[int], device: torch.device) -> tuple[SlotLayout, torch.Tensor, torch.Tensor]:
        """Give slots to the children of nodes of the latest level. Returns the layout of the new level, the positions
        `[1, F]` of its nodes, and which slots they see, `[R, width, slots]`."""
        self._rows = [self._rows[parent] for parent in parents]
        paths = [self._paths[parent] for parent in parents]
        counts = np.bincount(self._rows, minlength=len(self._free))
        layout = SlotLayout(tuple(self._free), tuple(counts.tolist()))
        sees = np.zeros((layout.num_rows, layout.width, layout.end), dtype=bool)
        sees[np.arange(layout.num_rows), :, self._firsts] = True  # columns without a node would be NaN
        self._paths, positions = [], []
        for row, path in zip(self._rows, paths, strict=True):
            slot = self._free[row]
            self._free[row] = slot + 1
            self._paths.append([*path, slot])
            seen = sees[row, slot - layout.starts[row]]
            seen[self._firsts[row] : self._starts[row]] = True
            seen[self._paths[-1]] = True
            positions.append(self._offsets[row] + self._starts[row] + self._depth)
        self._depth += 1
        return layout, to_device([positions], device), to_device(torch.from_numpy(sees), device)


class Eagle3DraftModel(DraftModel):
    """An Eagle3 draft: γ passes of one layer, each after the tokens drawn from the last one; of P-EAGLE, one pass.

    Load one with `from_pretrained(name_or_path)`: a folder or a Hub repository that this package, DeepSpec, EAGLE,
    SpecForge, speculators, Model-Optimizer or AngelSlim wrote. With `Eagle3Config(mtp=True)` it is a trainable MTP
    module; a target's own is a [`MTPDraft`].

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
    grows_trees = True
    _supports_sdpa = True
    _no_split_modules = ["Eagle3Layer"]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, width, eps = config.hidden_size, config.num_taps * config.feature_size, config.rms_norm_eps
        self.input_norm = DSparkRMSNorm(width, eps) if config.norm_before_fc else None
        norms = (DSparkRMSNorm(config.feature_size, eps) for _ in range(config.num_taps * config.fc_norm))
        self.fc_norm = nn.ModuleList(norms)
        self.fc = None if config.mtp else nn.Linear(width, size, bias=False)
        self.mask_hidden = None if config.is_autoregressive else nn.Parameter(torch.empty(1, 1, width))
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(size, eps)
        self.add_own_weights()
        self.rotary = DSparkRotaryEmbedding(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.mask_hidden is not None:
            nn.init.normal_(self.mask_hidden)

    @classmethod
    def read_tensors(cls, config: Eagle3Config, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        # Some number a whole vocabulary anew.
        if config.draft_vocab_size is None and "d2t" in stored_names(checkpoint):
            config.draft_vocab_size = config.vocab_size
        return super().read_tensors(config, checkpoint)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Turn features `[..., m*d]` of tapped layers into hidden states `[..., d]`."""
        features = self.as_input(features)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        if self.fc is None:  # reentrant checkpointing asks for an input that has a gradient
            return features.detach().requires_grad_(self.training)
        return self.fc(features)

    def _read(self, context: NewContext) -> torch.Tensor:
        """Return the output of each request's last slot before the final norm, `[R, d]`; of P-EAGLE `[R, γ, d]`."""
        features, cache, counts, committed_ids = context.features, context.cache, context.counts, context.committed_ids
        assert committed_ids is not None, "each context token is read together with the next one"
        if 0 in counts:  # its last round failed: it reads a slot without features, which is not kept
            split, blank = list(counts), features.new_zeros(1, features.shape[1])
            features = torch.cat([own if len(own) else blank for own in features.split(split)])
            ids = zip(context.anchor_ids.split(1), committed_ids.split(split), strict=True)
            committed_ids = torch.cat([own if len(own) else anchor for anchor, own in ids])
        hidden, counts = self.fuse(features), [max(1, count) for count in counts]
        width = 1 if self.mask_hidden is None else self.config.block_size  # slots of each request that attend
        if self.mask_hidden is not None:
            masks = self.fuse(self.mask_hidden)[0].expand(width - 1, -1)
            hidden = torch.cat([part for own in hidden.split(counts) for part in (own, masks)])
            mask_ids = committed_ids.new_full((width - 1,), self.config.mask_token_id)
            committed_ids = torch.cat([part for own in committed_ids.split(counts) for part in (own, mask_ids)])
        layout = SlotLayout(cache.lengths[: len(counts)], tuple(count + width - 1 for count in counts))
        last = [[end - width + slot for end in accumulate(layout.counts) for slot in range(width)]]
        last_slots = tuple(start + count - 1 for start, count in zip(layout.starts, counts, strict=True))
        firsts = cache.first_seen([slot + 1 for slot in last_slots])
        whole = CachedPass(cache, (layout,), layout, is_causal=True, firsts=firsts)
        rows = SlotLayout(last_slots, (width,) * layout.num_rows)
        last = to_device(last, self.device)
        ends = CachedPass(cache, (layout,), rows, is_causal=True, firsts=firsts, queries=last)
        passes = [whole] * (len(self.layers) - 1) + [ends]
        read = self._run(hidden[None], committed_ids, whole.position_ids(self.device), passes)
        return read if self.mask_hidden is None else read.unflatten(0, (len(counts), width))

    def _draw(self, hidden: torch.Tensor, context: NewContext, sampler: Sampler, num_tokens: int | None) -> Drafts:
        top_k, kept_ids, cache = self.config.draft_top_k, self.draft_token_ids(), context.cache
        # Where the block begins; a slot that was read without features is not counted.
        starts = [length + (count == 0) for length, count in zip(cache.lengths, context.counts, strict=False)]
        nodes, firsts = NodeSlots(starts, cache), cache.first_seen(starts)
        slots, rows = None, None  # logits of P-EAGLE's slots, and which request each node of a level is of, if not one
        if self.mask_hidden is not None:
            slots = self.base_logits(self.norm(hidden[:, :num_tokens])).unbind(dim=1)
        for depth in range(1, 1 + (num_tokens or self.config.block_size)):
            if slots is not None:
                scores = slots[depth - 1] if rows is None else of_nodes(slots[depth - 1], rows)
            else:
                normed = self.norm(hidden)
                hidden = normed if self.config.norm_output else hidden
                scores = self.base_logits(normed)
            candidate_ids = None
            if top_k is not None:
                scores, candidate_ids = largest(scores, top_k)
            if kept_ids is not None:  # the target's tokens
                candidate_ids = kept_ids.expand(len(scores), -1) if candidate_ids is None else kept_ids[candidate_ids]
            level = sampler(scores.float(), candidate_ids, None)
            if level is None or depth == (num_tokens or self.config.block_size):
                break
            tokens, parents = level
            if slots is not None:
                rows = parents if rows is None or parents is None else [rows[parent] for parent in parents]
                continue
            if parents is None:
                layout, sees = SlotLayout(tuple(start + depth - 1 for start in starts), (1,) * len(starts)), None
                positions = cache.at_positions(layout).position_ids(self.device)
            else:
                hidden = hidden[to_device(parents, hidden.device)]
                layout, positions, sees = nodes.below(parents, self.device)
            drafting = CachedPass(cache, (layout,), layout, is_causal=True, firsts=firsts, sees=sees)
            hidden = self._run(hidden[None], tokens, positions, [drafting] * len(self.layers))
        return sampler.finish()

    def _run(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, position_ids: torch.Tensor, passes: Sequence[CachedPass]
    ) -> torch.Tensor:
        """Run packed slots `[1, T, d]` with their next tokens `[T]` through the layers, each with its own pass; return
        the output of the rows that attend in the last one, `[Q, d]`."""
        embeds = self.embed(token_ids)[None]
        rotary = self.rotary(position_ids, embeds.dtype)
        for layer, drafting in zip(self.layers, passes, strict=True):
            hidden, _, _ = layer(hidden, embeds, rotary, drafting)
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
        hidden = self.fuse(features)
        embeds = self.embed(torch.cat([input_ids[:, 1:], input_ids[:, -1:]], dim=1))  # the last slot serves no anchor
        rotary = self.rotary(layout.position_ids, embeds.dtype)
        earlier: list[tuple[torch.Tensor, ...]] = []  # keys and values of all steps, by layer
        passes = [whole] * (len(self.layers) - 1) + [replace(ranges, queries=slots)]
        for layer, attending in zip(self.layers, passes, strict=True):
            hidden, *new = layer(hidden, embeds, rotary, attending)
            earlier.append(tuple(new))
        outputs = [hidden]
        positions = layout.position_ids.gather(1, slots)
        for step in range(1, self.config.block_size):
            following = labels[:, :, step - 1]
            hidden = self.norm(hidden) if self.config.norm_output else hidden
            if self.mask_hidden is not None:
                following = torch.full_like(following, self.config.mask_token_id)
                hidden = self.fuse(self.mask_hidden).expand_as(hidden)
            embeds = self.embed(following)
            rotary = self.rotary(positions + step, embeds.dtype)
            for index, layer in enumerate(self.layers):
                hidden, *new = layer(hidden, embeds, rotary, ranges, *earlier[index])
                earlier[index] += tuple(new)
            outputs.append(hidden)
        return self.norm(torch.stack(outputs, dim=2))

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, None]:
        hidden = self.block_hidden(input_ids, features, layout, labels)
        parameters = () if self.lm_head is None else tuple(self.lm_head.parameters())
        ids = self.draft_token_ids()
        return SlotLogits(self.base_logits, (hidden,), self.config.vocab_size, parameters, ids), None
