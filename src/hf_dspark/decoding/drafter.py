"""Draft for any number of requests: features in, chains or trees of drafts out, cut by the policy."""

import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from ..models.modeling_draft import DraftModel, NewContext
from ..models.slot_cache import SlotCache
from ..sampling.drafts import DraftBlock, Drafts, Sampler, Verified
from ..sampling.noise import BlockNoise, block_noise
from ..sampling.transfers import joined, to_device, to_host
from ..scheduling.calibration import calibrated_confidence
from ..scheduling.costs import Load
from ..scheduling.policies import Policy
from ..scheduling.prompt_lookup import LookupMatch, NgramMatcher
from ..scheduling.rounds import RoundOutcome, Rounds, RoundSeconds
from ..scheduling.tree_plans import SiblingAcceptance, TreePlan
from ..targets.compiled_target import CompiledTarget
from ..targets.support import TargetSupport
from ..targets.transformers_api import eos_token_ids
from .compiled_drafting import CompiledDraft
from .logits_processing import DraftProcessor
from .request import Call, Request
from .tails import LastBlocks
from .tree_drafting import BestTrees, Chains, DrawnTrees

WAITING_AT_MOST = 128
PARTS_AT_MOST = 16  # of features that wait: each round counts them
USUAL_WINDOW = 4096  # far beyond the texts that drafts are trained on


@dataclass(frozen=True)
class Proposal:
    """The drafts that one round sends to verification."""

    drafts: Drafts
    drafted: bool = True  # whether the draft ran; prompt lookup needs none
    is_tail: bool = False  # whether it drew in the slots that the last blocks have left
    seconds: float = 0.0  # host time that drafting took


class Drafter:
    """Drafts chains or trees, lets the policy cut them, and lets it learn from what the target accepted. It binds the
    draft to the target, and gives the call's policy a fresh state; the KV cache is the draft's."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        call: Call,
        cache: SlotCache | None = None,
        in_own_loop: bool = True,
    ) -> None:
        self.draft = draft
        self.support = support = call.support or TargetSupport.of(target)
        self._borrowed = support.embedding, support.lm_head, target.dtype
        draft.bind(support.target)
        self.cache = SlotCache() if cache is None else cache
        self.device, self.dtype = draft.device, draft.dtype  # looked up once: each time, all modules are walked
        self.policy = call.policy.fresh()
        window = call.options.draft_window
        if window == "auto":
            window = draft.config.draft_window or USUAL_WINDOW
        self.window = window = None if draft.reads_own_tokens else window
        if window is not None and self.cache.limit is not None:
            most = 2 * window + draft.config.num_slots + self.policy.most_nodes
            self.cache.limit = min(self.cache.limit, most)
        self.statistics = draft.last_stats = Rounds(policy=self.policy.to_dict())
        self._options = call.options
        self._processor = DraftProcessor(call.logits_processor, draft.config.vocab_size)
        self._do_sample = call.generation_config.do_sample
        # The user's seed decides about it. Greedy decoding draws nothing, as plain decoding does not.
        self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if self._do_sample else 0
        self._ends = eos_token_ids(call.generation_config)
        self._num_positions, self._rope_switches = support.num_positions, support.rope_switches
        self._max_drafts = min(draft.config.block_size, call.max_drafts or draft.config.block_size)
        fits = draft.config.confidence_fits_for(call.options.domain, self._do_sample)
        self._confidence_fits = None if fits is None else torch.tensor(fits, device="cpu")
        # Who limits the tokens of a block means a chain.
        may_grow = in_own_loop and draft.grows_trees and support.tree_obstacle is None
        self._grows_trees = may_grow and call.max_drafts is None and self.policy.most_nodes > 0
        # What follows a match is a branch of a tree: of another target, answers are not looked up.
        looks_up = call.options.prompt_lookup and support.tree_obstacle is None
        self._answers = call.options.answers if looks_up else None
        if self._do_sample:
            self._seed ^= self.policy.new_key()
        if self._do_sample and self._answers is not None:
            self._seed ^= self._answers.new_key()
        self._siblings = SiblingAcceptance(self._do_sample, ((1.0, 0.0),), ((0.0,),))  # of who proposes nothing
        if self._grows_trees and draft.drafts_blocks:
            self._siblings = draft.config.siblings_for(self._do_sample)
        # Nothing else waits for a block: its tokens come to the host together with what was accepted.
        decides = type(self.policy).plan_verify is not Policy.plan_verify
        self._waits = decides or self._processor.reads_prefixes or not in_own_loop or call.options.observer is not None
        self._noise_width = max(draft.config.block_size, self.policy.most_nodes * self._grows_trees)
        self.compiled_target = CompiledTarget.of(support, call.options.compile)
        self._compiled = CompiledDraft.of(draft, self.compiled_target)
        keeps_blocks = in_own_loop and self.policy.draws_tails and draft.draws_tails and self._compiled is None
        self._last_blocks = LastBlocks() if keeps_blocks else None
        self._matchers: dict[int, NgramMatcher] = {}
        width = len(draft.config.target_layer_ids or ()) * draft.config.feature_size
        self._no_features = torch.empty(0, width, device=self.device, dtype=self.dtype)
        self._given_up: set[int] = set()  # ids of requests for which the draft's numbers overflow
        self._has_warned = False

    def drop(self, request: Request) -> None:
        """Drop what is kept of a request that ended, as a queue may be long, but for its answer."""
        matcher = self._matchers.pop(request.id, None)
        if self._answers is not None:
            (matcher or NgramMatcher(self._answers)).remember(request.token_ids, request.prompt_length)
        if self._last_blocks is not None:
            self._last_blocks.slots.pop(request.id, None)
        self._given_up.discard(request.id)

    def noise(self, requests: Sequence[Request]) -> BlockNoise | None:
        """Return the noise of the coming block of each request; `None` when decoding is greedy."""
        if not self._do_sample:
            return None
        ids, blocks = [request.id for request in requests], [request.blocks for request in requests]
        return block_noise(self._seed, ids, blocks, self._noise_width, self.device)

    def propose(self, requests: Sequence[Request], noise: BlockNoise | None) -> Proposal:
        """Draft a tree or a chain for each request, in the order of the cache's rows; the requests share one budget.

        DSpark Eq. 3-7, Algorithm 1.
        """
        started = time.perf_counter()
        self.draft.bind_parts(*self._borrowed)  # another call may have used the draft since
        # One token of the round is the target's own, so a block may fill the length up to one before the end.
        most = [max(0, min(self._max_drafts, self._room(request))) for request in requests]
        tails = [] if self._last_blocks is None else list(map(min, most, map(self._last_blocks.left, requests)))
        load = Load(
            tuple(request.id for request in requests),
            context_tokens=sum(request.anchor_position + 1 for request in requests),
            other_tokens=self._options.tokens_of_others(),
            tails=tuple(tails) if any(tails) else (),
        )
        num_tokens = 0  # decided before anything is drawn, so it biases nothing
        answer = any(most) and self.policy.plan_draft(load)
        is_tail = answer == "tail" and any(tails)
        most = tails if is_tail else most
        max_lengths = torch.tensor(most, device="cpu")  # whatever the user's default device is
        if answer:
            num_tokens = max(self.policy.limit_lengths(max_lengths, load).tolist())
        siblings, plan, matches = self.policy.expected_siblings(self._siblings), None, []
        if self._grows_trees:
            matches = [self._match(request) for request in requests]
            if num_tokens or any(match.token_ids for match in matches):
                plan = self.policy.plan_tree(siblings, load, [match.chances for match in matches])
        if plan is not None:
            plan.drafts = drafted = plan.drafts and num_tokens > 0
            drafts = self._draft_trees(requests, noise, plan, siblings, most, matches, is_tail)
        elif num_tokens and self.draft.drafts_blocks:
            drafts, drafted = self._draft_chains(requests, noise, num_tokens, max_lengths, load, is_tail), True
        else:
            token_ids = torch.empty(len(requests), 0, dtype=torch.long, device=self.device)
            drafts = DraftBlock(token_ids, lengths=torch.zeros_like(max_lengths), rows=[[]] * len(requests))
            drafted = False
            if not self._read_late(requests):
                return Proposal(drafts, drafted=False)
        return Proposal(drafts, drafted, is_tail and drafted, time.perf_counter() - started)

    def _draft_chains(
        self,
        requests: Sequence[Request],
        noise: BlockNoise | None,
        num_tokens: int,
        max_lengths: torch.Tensor,
        load: Load,
        is_tail: bool,
    ) -> DraftBlock:
        uniforms = None if noise is None else to_device(noise.draft_uniforms, self.device)
        lacks_head = self.policy.requires_confidence and not self.draft.config.enable_confidence_head
        sampler = Chains(requests, self._processor, uniforms, lacks_head)
        block = (self._draw_tails if is_tail else self._read)(requests, sampler, num_tokens)
        block = replace(block, lengths=max_lengths.clamp(max=num_tokens), ends=self._ends)
        if not self._waits:
            return block
        token_ids, marks, logits = to_host(*block.for_host())
        confidence = None
        if logits is not None:
            slots = self._last_blocks.places(requests, num_tokens) if is_tail else slice(num_tokens)
            confidence = self._calibrated(logits, slots)
            if sampler.is_forced:
                confidence = confidence.masked_fill(torch.tensor(sampler.is_forced, device="cpu").T, 1.0)
            if self.policy.requires_confidence:
                marks = marks.where(~confidence.isnan(), torch.nan)
            confidence = confidence.nan_to_num(0.0)
        block = block.on_host(token_ids, marks, logits)
        lengths = self.policy.plan_verify(confidence, max_lengths, load)
        if not all(0 <= length <= most for length, most in zip(lengths.tolist(), max_lengths.tolist(), strict=True)):
            raise ValueError(
                f"{type(self.policy).__name__}.plan_verify must return lengths in [0, max_lengths="
                f"{max_lengths.tolist()}], got {lengths.tolist()}"
            )
        return replace(block, confidence=confidence, lengths=torch.minimum(lengths, block.lengths))

    def _calibrated(self, logits: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
        """Return c_k of some slots of blocks, `[R, n]`, on the host."""
        return calibrated_confidence(logits, None if self._confidence_fits is None else self._confidence_fits[slots])

    def _draft_trees(
        self,
        requests: Sequence[Request],
        noise: BlockNoise | None,
        plan: TreePlan,
        siblings: SiblingAcceptance,
        max_depths: Sequence[int],
        matches: Sequence[LookupMatch],
        is_tail: bool,
    ) -> Drafts:
        rooms = [self._room(request) for request in requests]
        common = requests, plan, siblings, self._processor, max_depths, rooms, self._ends, matches
        if noise is None:
            sampler = BestTrees(*common)
        else:
            sampler = DrawnTrees(*common, noise.draft_uniforms.tolist(), self._confidence_fits)
        if plan.drafts:
            drafts = (self._draw_tails if is_tail else self._read)(requests, sampler, max(max_depths))
        else:
            self._read_late(requests)
            drafts = sampler.finish()
        self._give_up(requests, [[-int(broken)] for broken in sampler.is_broken])
        return drafts

    def _draw_tails(self, requests: Sequence[Request], sampler: Sampler, num_tokens: int) -> Drafts:
        anchors = joined([request.anchor for request in requests]).to(self.device)
        slots = self._last_blocks.tails(requests, num_tokens)
        with self._own_precision():
            return self.draft.sample_block(*slots, anchors, sampler, is_tail=True)

    def keep(self, row: int, request: Request, features: torch.Tensor, end: int) -> None:
        """Keep features of committed tokens, `[n, m*d]`, which end right before a position, until the draft reads
        them, if it will see them: the context in its row of the cache always ends where they begin."""
        request.features.append(features)
        if len(request.features) > PARTS_AT_MOST:
            request.features[:] = [joined(request.features)]
        if self.window is not None and _num_features([request])[0] > self.window:
            request.features[:] = [joined(request.features)[-self.window :].clone()]
            self.make_room(row, request, end)

    def make_room(self, row: int, request: Request, end: int) -> None:
        """Prepare a row of the cache for the features of a request, which end right before a position."""
        self.cache.window = self.window  # it may be a new one
        self.cache.make_room(row, _num_features([request])[0], end)

    def has_given_up(self, request: Request) -> bool:
        return request.id in self._given_up

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

    def _match(self, request: Request) -> LookupMatch:
        most = min(self._room(request), self.policy.most_nodes)
        if forced := request.forced((), most):
            return LookupMatch(forced, [1.0] * len(forced))
        if not self._options.prompt_lookup:
            return LookupMatch()
        matcher = self._matchers.setdefault(request.id, NgramMatcher(self._answers, self.policy.matches))
        return matcher.find(request.token_ids, most)

    def _read(
        self, requests: Sequence[Request], sampler: Sampler | None = None, num_tokens: int | None = None
    ) -> Drafts | None:
        """Let the draft read all features that it has not seen, and draft so many levels if a sampler draws them."""
        draft, num_features = self.draft, _num_features(requests)
        anchors = joined([request.anchor for request in requests]).to(self.device)
        # The features end right before the anchor, so the token after each of them is committed.
        counts = [count + draft.reads_own_tokens for count in num_features]
        committed_ids = joined(list(map(Request.last_ids, requests, counts)))
        for row, request in enumerate(requests):
            self.make_room(row, request, request.anchor_position)
        before = self.cache.lengths
        try:
            with self._own_precision():
                parts = [part for request in requests for part in request.features]
                features = joined(parts or [self._no_features])
                context = NewContext(anchors, features, num_features, self.cache, committed_ids)
                if sampler is None:
                    draft.read_block(context)
                    return None
                if self._compiled is not None and self._compiled.takes(context, sampler):
                    return self._compiled.draft_block(draft, context, sampler, num_tokens)
                if self._last_blocks is not None:
                    hidden = draft.read_block(context)
                    slots = draft.predicting(hidden)[:, :num_tokens]
                    base_logits = draft.base_logits(slots)
                    self._last_blocks.keep(requests, slots, base_logits)
                    return draft.sample_block(slots, base_logits, anchors, sampler)
                return draft.draft_block(context, sampler, num_tokens)
        finally:
            for request, known, length in zip(requests, before, self.cache.lengths, strict=False):
                if length > known:  # in the cache now, even if a processor failed afterwards
                    request.features.clear()

    def _give_up(self, requests: Sequence[Request], token_ids: Sequence[Sequence[int]]) -> None:
        """Draft no more for requests whose draft logits are NaN or infinite, -1 among the tokens, from the first slot
        on: what a cache holds stays broken."""
        if min(map(min, token_ids)) >= 0:
            return
        if not self._has_warned:
            name, dtype = self.draft.name_or_path or type(self.draft).__name__, self.dtype
            warnings.warn(
                f"the draft {name} gives numbers that are NaN or infinite in {dtype}. Sequences in which it does are "
                "decoded without drafts: exact, but slower. Large activations overflow in float16: load the draft "
                "with dtype=torch.bfloat16 or torch.float32, or look for broken weights",
                stacklevel=2,
            )
            self._has_warned = True
        rows = zip(requests, token_ids, strict=True)
        self._given_up |= {request.id for request, row in rows if row[0] < 0 and not request.ended}

    def learn(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        verified: Verified,
        num_committed: Sequence[int],
        seconds: RoundSeconds,
    ) -> None:
        """Record the outcome of a round, and let the policy learn from it.
        Requests that ended gain less than accepted + 1 tokens."""
        observer, drafts, target_logits = self._options.observer, verified.drafts, None
        confidence = drafts.confidence
        if proposal.drafted and isinstance(drafts, DraftBlock):
            self._give_up(requests, drafts.rows)
            if confidence is None and drafts.confidence_logits is not None:
                slots = slice(drafts.token_ids.shape[1])
                confidence = self._calibrated(drafts.confidence_logits, slots).nan_to_num(0.0)
        if self.statistics.first_round_at is None:
            self.statistics.first_round_at = time.perf_counter() - seconds.total
        if observer is not None:
            rows = verified.scores.dense(self.draft.config.vocab_size).split((1 + drafts.lengths).tolist())
            target_logits = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        outcome = RoundOutcome(
            request_ids=tuple(request.id for request in requests),
            confidence=confidence,
            lengths=drafts.lengths,
            num_accepted=verified.num_accepted,
            seconds=seconds.total,
            drafted=proposal.drafted,
            is_tail=proposal.is_tail,
            drafts=drafts,
            paths=verified.paths,
            target_logits=target_logits,
            num_committed=num_committed,
            draft_seconds=seconds.draft,
            verify_seconds=seconds.verify,
        )
        self.statistics.add(outcome)
        self.policy.observe(outcome)
        if observer is not None:
            observer(outcome)

    def _own_precision(self) -> AbstractContextManager:
        """Leave autocast for a draft in half precision of another kind than it casts to, which it cannot mix."""
        kind = self.device.type
        if self.dtype == torch.float32 or kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, enabled=self.dtype == torch.get_autocast_dtype(kind))


def _num_features(requests: Sequence[Request]) -> list[int]:
    return [sum([part.shape[0] for part in request.features]) for request in requests]  # `len` is slow for tensors
