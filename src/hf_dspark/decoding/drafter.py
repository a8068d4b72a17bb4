"""The drafting half of a decoding round: features in, cut draft blocks out, for any number of requests."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from ..models.modeling_draft import DraftModel, lm_head_of
from ..models.slot_cache import SlotCache
from ..sampling.distributions import DraftBlock, Grower, Sampler, VerifiedBlock
from ..sampling.noise import BlockNoise, block_noise
from ..sampling.trees import DraftTree
from ..scheduling.calibration import calibrated_confidence
from ..scheduling.costs import Load
from ..scheduling.prompt_lookup import Copy, CopyFinder
from ..scheduling.rounds import RoundOutcome, Rounds, RoundSeconds
from ..scheduling.tree_plans import TreePlan, TreeProspects, no_acceptance
from ..targets.slot_attention import rope_switches
from ..targets.support import tree_obstacle
from .logits_processing import BlockProcessor, Scores
from .request import Call, Request
from .sampler import ProcessedDistributions, ProcessedSampler
from .tree_drafting import BestTrees, DrawnTrees

WAITING_AT_MOST = 128


@dataclass(frozen=True)
class Proposal:
    """What one round sends to verification."""

    lengths: torch.Tensor  # `[R]`, draft tokens l of each request, on the CPU; of trees, their nodes
    block: DraftBlock | None = None  # `None` when nothing was drafted, or trees were
    trees: Sequence[DraftTree] | None = None  # instead of a block, `[R]`
    confidence: torch.Tensor | None = None  # `[R, n]`, calibrated
    seconds: float = 0.0  # host time that drafting took
    drafted: bool = True  # whether the draft ran; copies need none


class Drafter:
    """Drafts blocks, lets the policy cut them, and lets it learn from what the target accepted. It binds the draft
    to the target, and gives the call's policy a fresh state; the cache is the draft's."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        call: Call,
        cache: SlotCache | None = None,
        grows_trees: bool = True,
    ) -> None:
        self.draft = draft.bind(target)
        self._borrowed = target.get_input_embeddings(), lm_head_of(target), target.dtype
        self.cache = SlotCache() if cache is None else cache
        self.policy = call.policy.fresh()
        self.statistics = draft.last_stats = Rounds(policy=self.policy.to_dict())
        self._options = call.options
        processor = BlockProcessor(call.logits_processor, draft.config.vocab_size, tie_margin=0)
        self._distributions = ProcessedDistributions(processor, draft.config.vocab_size)
        self._do_sample = call.generation_config.do_sample
        self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # the user's decides about it
        eos_token_ids = getattr(call.generation_config, "_eos_token_tensor", None)
        self._ends = frozenset(() if eos_token_ids is None else eos_token_ids.flatten().tolist())
        self._num_positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._rope_switches = rope_switches(target)
        self._max_drafts = min(draft.config.block_size, call.max_drafts or draft.config.block_size)
        fits = draft.config.confidence_fits_for(call.options.domain, self._do_sample)
        self._confidence_fits = None if fits is None else torch.tensor(fits, device=draft.device)
        # Who limits the tokens of a block means a chain.
        self._grows_trees = grows_trees and draft.grows_trees and call.max_drafts is None and not tree_obstacle(target)
        self._siblings = None
        if self._grows_trees:
            expected = draft.config.siblings_for if draft.drafts_blocks else no_acceptance
            self._siblings = expected(self._do_sample)
        self._noise_width = max(draft.config.block_size, self.policy.most_nodes * self._grows_trees)
        self._finders: dict[int, CopyFinder] = {}
        self._given_up: set[int] = set()  # ids of requests for which the draft's numbers overflow
        self._has_warned = False

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request that ended: a queue may be long."""
        self._finders.pop(request_id, None)
        self._given_up.discard(request_id)

    def noise(self, requests: Sequence[Request]) -> BlockNoise | None:
        """Return the noise of the coming block of each request; `None` when decoding is greedy."""
        if not self._do_sample:
            return None
        ids, blocks = [request.id for request in requests], [request.blocks for request in requests]
        return block_noise(self._seed, ids, blocks, self._noise_width, self.draft.device)

    def propose(self, requests: Sequence[Request], noise: BlockNoise | None) -> Proposal:
        """Draft one block per request, in the order of the cache's rows, and cut it: the requests share one budget.

        DSpark Eq. 3-7, Algorithm 1.
        """
        started = time.perf_counter()
        self.draft.bind_parts(*self._borrowed)  # another call may have used the draft since
        load = Load(
            tuple(request.id for request in requests),
            context_tokens=sum(request.anchor_position + 1 for request in requests),
            other_tokens=self._options.tokens_of_others(),
        )
        # One token of the round is the target's own, so a block may fill the length up to one before the end.
        most = [max(0, min(self._max_drafts, self._room(request))) for request in requests]
        max_lengths = torch.tensor(most, device="cpu")  # whatever the user's default device is
        num_tokens = self._tokens_to_draft(max_lengths, load)
        if num_tokens == 0:
            return self._nothing(requests, started)
        if self._grows_trees and self.policy.most_nodes > 0:
            copies = [self._copy(request) for request in requests]
            prospects = TreeProspects(self._siblings, [copy.chances for copy in copies])
            plan = self.policy.plan_tree(prospects, load)
            if plan is not None:
                return self._grow_trees(requests, noise, plan, most, copies, started)
        if not self.draft.drafts_blocks:
            return self._nothing(requests, started)
        block = self._draft_blocks(requests, noise, num_tokens)
        confidence, broken = None, block.broken
        if block.confidence_logits is not None:
            fits = None if self._confidence_fits is None else self._confidence_fits[:num_tokens]
            predicted = calibrated_confidence(block.confidence_logits, fits)
            confidence = predicted.nan_to_num(0.0)
            if self.policy.requires_confidence:
                broken = predicted.isnan() if broken is None else broken | predicted.isnan()
                confidence = confidence.cpu()
        lengths = self._planned_lengths(confidence, max_lengths, load)
        lengths = self._cut(requests, block.token_ids, broken, lengths)
        return Proposal(lengths, block, None, confidence, time.perf_counter() - started)

    def _nothing(self, requests: Sequence[Request], started: float) -> Proposal:
        has_read = self._read_late(requests)
        lengths = torch.zeros(len(requests), dtype=torch.long, device="cpu")
        return Proposal(lengths, seconds=time.perf_counter() - started if has_read else 0.0, drafted=False)

    def _read_late(self, requests: Sequence[Request]) -> bool:
        """Let the draft read what waits if it is much: features are larger than what it keeps of them."""
        is_much = max(_num_features(requests)) >= WAITING_AT_MOST
        if is_much:
            self._read(requests)
        return is_much

    def _room(self, request: Request) -> int:
        """Return how many drafts of a request may be sent: not beyond its end, nor the target's last position."""
        if request.id in self._given_up:
            return 0
        room = request.max_length - request.length - 1
        # Plain decoding reads the tokens before a switch of frequencies in passes of their own.
        lengths = [length for length in self._rope_switches if length > request.anchor_position]
        lengths += [] if self._num_positions is None else [self._num_positions]
        return min([room, *(length - 1 - request.anchor_position for length in lengths)])

    def _tokens_to_draft(self, max_lengths: torch.Tensor, load: Load) -> int:
        """Return how long the blocks have to be. It is decided before anything is drawn, so it biases nothing."""
        if not bool(max_lengths.any()) or not self.policy.plan_draft(load):
            return 0
        return int(self.policy.limit_lengths(max_lengths, load).max())

    def _draft_blocks(self, requests: Sequence[Request], noise: BlockNoise | None, num_tokens: int) -> DraftBlock:
        uniform = None if noise is None else noise.draft_uniforms
        sampler = ProcessedSampler(self._distributions, requests, uniform)
        block = self._read(requests, sampler, num_tokens=num_tokens)
        return replace(block, broken=torch.stack(sampler.broken, dim=1))

    def _grow_trees(
        self,
        requests: Sequence[Request],
        noise: BlockNoise | None,
        plan: TreePlan,
        max_depths: Sequence[int],
        copies: Sequence[Copy],
        started: float,
    ) -> Proposal:
        common = requests, plan, self._siblings, self._distributions, max_depths, self._ends, copies
        if noise is None:
            grower = BestTrees(*common)
        else:
            grower = DrawnTrees(*common, noise=noise, confidence_fits=self._confidence_fits)
        if plan.drafts:
            self._read(requests, grower=grower)
        else:
            self._read_late(requests)
        grower.copy_on([self._room(request) for request in requests])
        if any(grower.is_broken):
            self._give_up(requests, grower.is_broken)
        trees = grower.trees
        if noise is None:
            trees = [tree.only(places) for tree, places in zip(trees, plan.kept(trees), strict=True)]
        lengths, confidence = torch.tensor([tree.num_nodes for tree in trees], device="cpu"), None
        if any(grower.confidence):
            rows = [torch.tensor(row, device="cpu") for row in grower.confidence]
            confidence = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Proposal(lengths, None, trees, confidence, time.perf_counter() - started, plan.drafts)

    def _copy(self, request: Request) -> Copy:
        if not self._options.copies:
            return Copy()
        finder = self._finders.setdefault(request.id, CopyFinder())
        return finder.find(request.token_ids, min(self._room(request), self.policy.most_nodes))

    def _read(
        self,
        requests: Sequence[Request],
        sampler: Sampler | None = None,
        grower: Grower | None = None,
        num_tokens: int | None = None,
    ) -> DraftBlock | None:
        """Let the draft read all features that it has not seen, and draft a block or grow trees if it shall."""
        draft, num_features = self.draft, _num_features(requests)
        width = len(draft.config.target_layer_ids) * draft.config.hidden_size
        nothing = torch.empty(0, width, device=draft.device, dtype=draft.dtype)
        features = torch.cat([nothing, *(part for request in requests for part in request.features)])
        anchors = torch.cat([request.anchor for request in requests])
        # The features end right before the anchor, so the token after each of them is committed.
        pairs = zip(requests, num_features, strict=True)
        committed_ids = torch.cat([request.last_ids(count) for request, count in pairs])
        before = self.cache.lengths
        try:
            if grower is not None:
                draft.grow_tree(anchors, features, self.cache, grower, num_features, committed_ids)
                return None
            if sampler is None:
                draft.read_block(anchors, features, self.cache, num_features, committed_ids)
                return None
            return draft.draft_block(
                anchors, features, self.cache, sampler, num_features, committed_ids, num_tokens=num_tokens
            )
        finally:
            for request, known, length in zip(requests, before, self.cache.lengths, strict=False):
                if length > known:  # in the cache now, even if a processor failed afterwards
                    request.features.clear()

    def _give_up(self, requests: Sequence[Request], begins_broken: Sequence[bool]) -> None:
        """Draft no more for requests whose blocks begin with a broken slot: what a cache holds stays broken."""
        if not self._has_warned:
            name, dtype = self.draft.name_or_path or type(self.draft).__name__, self.draft.dtype
            warnings.warn(
                f"the draft {name} gives numbers that are NaN or infinite in {dtype}. Sequences in which it does are "
                "decoded without drafts: exact, but slower. Large activations overflow in float16: load the draft "
                "with dtype=torch.bfloat16 or torch.float32, or look for broken weights",
                stacklevel=2,
            )
            self._has_warned = True
        self._given_up |= {request.id for request, broken in zip(requests, begins_broken, strict=True) if broken}

    def _planned_lengths(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        lengths = self.policy.plan_verify(confidence, max_lengths, load)
        if not all(0 <= length <= most for length, most in zip(lengths.tolist(), max_lengths.tolist(), strict=True)):
            raise ValueError(
                f"{type(self.policy).__name__}.plan_verify must return lengths in [0, max_lengths="
                f"{max_lengths.tolist()}], got {lengths.tolist()}"
            )
        return lengths

    def _cut(
        self,
        requests: Sequence[Request],
        token_ids: torch.Tensor,
        broken: torch.Tensor | None,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Return lengths up to the first slot without a distribution, and up to and including the first
        end-of-sequence token. That must stay: dropping a token because of its value would bias the output."""
        rows = (token_ids if broken is None else token_ids.masked_fill(broken, -1)).tolist()  # one transfer
        if min(map(min, rows)) < 0:
            self._give_up(requests, [row[0] < 0 for row in rows])
        ends = [_end(row, self._ends) for row in rows]
        return torch.minimum(lengths, torch.tensor(ends, device="cpu"))

    def learn(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        verified: VerifiedBlock,
        num_committed: Sequence[int],
        scores: Scores,
        seconds: RoundSeconds,
    ) -> None:
        """Record the outcome of a round, and let the policy learn from it.
        Requests that ended gain less than accepted + 1 tokens. Scores are the target's, after anchors and drafts."""
        observer, target_logits = self._options.observer, None
        if self.statistics.first_round_at is None:
            self.statistics.first_round_at = time.perf_counter() - seconds.total
        if observer is not None:
            rows = scores.dense(self.draft.config.vocab_size).split((1 + proposal.lengths).tolist())
            target_logits = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        outcome = RoundOutcome(
            request_ids=tuple(request.id for request in requests),
            confidence=proposal.confidence,
            lengths=proposal.lengths,
            num_accepted=verified.num_accepted.cpu(),
            seconds=seconds.total,
            drafted=proposal.drafted,
            block=proposal.block,
            target_logits=target_logits,
            trees=proposal.trees,
            paths=verified.paths,
            num_committed=num_committed,
            draft_seconds=seconds.draft,
            verify_seconds=seconds.verify,
        )
        self.statistics.add(outcome)
        self.policy.observe(outcome)
        if observer is not None:
            observer(outcome)


def _end(token_ids: Sequence[int], ends: frozenset[int]) -> int:
    """Return how many tokens of a row can be sent: those before a broken one, -1, and up to one that ends it."""
    for count, token in enumerate(token_ids):
        if token < 0:
            return count
        if token in ends:
            return count + 1
    return len(token_ids)


def _num_features(requests: Sequence[Request]) -> list[int]:
    return [sum(map(len, request.features)) for request in requests]
