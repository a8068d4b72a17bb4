"""Runs the drafting of a round as a compiled graph: the pass over new context and block, and of chains all draws too.

Trees grow on the host, level by level: of them the graph ends with the base logits.
"""

import weakref

import torch
from torch import nn

from ..models.fixed_cache import FixedBlocks, mark_dynamic
from ..models.modeling_draft import DraftModel, NewContext
from ..models.modeling_dspark import DSparkDraftModel
from ..sampling.distributions import TokenDistribution
from ..sampling.drafts import DraftBlock, Drafts, Sampler
from ..targets.compiled_target import CompiledPasses, CompiledTarget, one_at_a_time
from ..targets.support import has_users_hooks
from .logits_processing import DraftProcessor
from .tree_drafting import Chains

MOST_FEATURES = 8  # for each slot of the blocks, in one pass: prompts are read without a graph
MOST_WAYS = 6  # to draw that get graphs of their own; others draw after the graph that trees have

Chain = tuple[DraftProcessor, torch.Tensor | None, bool]  # what `Chains` takes beside requests

_known: "weakref.WeakKeyDictionary[DraftModel, CompiledDraft]" = weakref.WeakKeyDictionary()


class CompiledDraft(CompiledPasses):
    """The compiled passes of one draft. Get it by [`CompiledDraft.of`]."""

    def __init__(self, draft: DSparkDraftModel) -> None:
        is_quantised = getattr(draft, "hf_quantizer", None) is not None
        obstacle = "its weights are quantised" if is_quantised else None
        super().__init__(f"the draft {draft.name_or_path or type(draft).__name__}", _run, draft.device, obstacle)
        self.blocks = FixedBlocks(self.device, draft.config.num_slots)
        self._ways: set[tuple] = set()

    @classmethod
    def of(cls, draft: DraftModel, target: CompiledTarget | None) -> "CompiledDraft | None":
        """Return those of a draft, made once on its device, if its kind can be compiled, and its target beside it."""
        if target is None or target.device != draft.device or not isinstance(draft, DSparkDraftModel):
            return None
        if draft not in _known or _known[draft].device != draft.device:
            _known[draft] = cls(draft)
        if has_users_hooks(draft.modules()):
            _known[draft].warn("hooks are around its modules")
            return None
        return _known[draft]

    def takes(self, context: NewContext, sampler: Sampler) -> bool:
        """Tell whether a pass can be compiled: one of a round, by processors that read scores alone."""
        return (
            self.obstacle is None
            and not (isinstance(sampler, Chains) and sampler.processor.may_forbid_all)
            and bool(context.cache.stores)
            and sum(context.counts) <= MOST_FEATURES * self.blocks.num_slots * len(context.counts)
            and not torch.is_autocast_enabled(self.device.type)
        )

    @torch.no_grad()
    def draft_block(self, draft: DSparkDraftModel, context: NewContext, sampler: Sampler, num_tokens: int) -> Drafts:
        """Do what [`~DraftModel.draft_block`] does. A graph draws whole blocks, of which so many tokens are kept."""
        self.blocks.num_slots = draft.config.num_slots
        chain = self._chain(draft, sampler) if isinstance(sampler, Chains) else None
        anchor_ids, features, cache, counts = context.anchor_ids, context.features, context.cache, context.counts
        num_features = self._padded(len(features), len(counts))
        padded = mark_dynamic(nn.functional.pad(features, (0, 0, 0, num_features - len(features))), 0)
        with one_at_a_time:
            try:
                self.blocks.begin(cache, counts, num_features)
                found = self._run(draft, self.blocks, mark_dynamic(anchor_ids, 0), padded, chain)
                if self.device.type != "cpu":  # the next pass writes where this one did
                    found = [part if part is None else part.clone() for part in found]
            except Exception as error:  # of the compiler, or memory: nothing is committed yet
                self.give_up(error)
                found = None
            finally:
                self.blocks.stores = {}
        if found is None:
            return draft.draft_block(context, sampler, num_tokens)
        for row, count in enumerate(counts):
            cache.commit(row, count)
        if chain is None:
            hidden, base_logits = found
            return draft.sample_block(hidden, base_logits[:, :num_tokens], anchor_ids, sampler)
        kept = (part if part is None else part[:, :num_tokens] for part in found)
        token_ids, confidence_logits, marks, probs, ids = kept
        distribution = None if probs is None else TokenDistribution(probs, ids)
        return DraftBlock(token_ids, distribution, confidence_logits, marks)

    def _chain(self, draft: DSparkDraftModel, sampler: Chains) -> Chain | None:
        """Return how chains are drawn within the graph; `None`: after it."""
        if self.device.type == "cpu" and draft.successors() is not None:  # their table is made as tokens are met
            return None
        way = sampler.processor.settings, sampler.uniforms is None, sampler.lacks_head, draft.config.draft_top_k
        if way not in self._ways and len(self._ways) >= MOST_WAYS:
            return None
        self._ways.add(way)
        uniforms = None if sampler.uniforms is None else mark_dynamic(sampler.uniforms, 0)
        return sampler.processor, uniforms, sampler.lacks_head

    def _padded(self, num_features: int, num_rows: int) -> int:
        if self.device.type == "cpu":
            return max(2, num_features)  # a graph for a single one would be one of its own
        size = num_rows * (1 + self.blocks.num_slots)
        return size << max(0, -(-num_features // size) - 1).bit_length()


def _run(
    draft: DSparkDraftModel,
    blocks: FixedBlocks,
    anchor_ids: torch.Tensor,
    features: torch.Tensor,
    chain: Chain | None,
) -> tuple[torch.Tensor | None, ...]:
    hidden = draft.read_cached(anchor_ids, features, blocks)
    base_logits = draft.base_logits(draft.predicting(hidden))
    if chain is None:
        return hidden, base_logits
    block = draft.sample_block(hidden, base_logits, anchor_ids, Chains((), *chain))
    drawn = block.distribution
    probs, ids = (None, None) if drawn is None else (drawn.probs, drawn.candidate_ids)
    return block.token_ids, block.confidence_logits, block.marks, probs, ids
