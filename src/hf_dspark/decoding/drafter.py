"""The drafting half of a decoding round: features in, cut draft blocks out, for any number of requests.

Drafts, cuts and keeps the statistics; whoever calls verifies and commits: hf_dspark's own loop, or transformers' one
through its `CandidateGenerator` interface. Knows nothing of how it is reached from `generate()`.
"""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from ..maths.calibration import calibrated_confidence
from ..maths.costs import Load
from ..maths.noise import BlockNoise, block_noise
from ..maths.policies import Policy, RoundOutcome
from ..maths.sampling import DraftBlock, TokenLaw, draw, greedy_sampler, scatter_to_vocabulary
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from ..targets.feature_capture import FeatureCapture
from ..targets.int8_outliers import has_outliers, outliers_of_each
from .processing import BlockProcessor, Prefix
from .request import Request, StopRule

WAITING_AT_MOST = 128


@dataclass(frozen=True)
class RoundSeconds:
    """How long one round took, for all its requests together.

    On an accelerator, work that is still queued counts for whoever waits for it.

    Attributes:
        num_requests (`int`): Requests that it served.
        draft, verify, total (`float`): Host time in the draft, in the target's verification pass, and in all.
    """

    num_requests: int
    draft: float
    verify: float
    total: float


@dataclass
class RoundStatistics:
    """What happened in one `generate()` call, round by round.

    The first new token comes out of the prefill and belongs to no round. In a batch, each request of a round has its
    own entry in the lists, and counts as a round of its own; only `seconds` has one entry for the whole round.

    Attributes:
        proposed (`list[int]`): Draft tokens sent to verification in each round.
        accepted (`list[int]`): Draft tokens accepted in each round, without the bonus token; an end-of-sequence token
            among them counts.
        committed (`list[int]`): Tokens that the request gained in each round: the accepted ones and the bonus token,
            up to the request's end.
        confidence (`list[torch.Tensor | None]`): Calibrated c_1..c_γ of each round's block, `[γ]`; `None` where
            nothing was drafted or the draft has no confidence head.
        request_ids (`list[int]`): Whose entry it is; the row of a `generate()` call, the prompt's place in
            `generate_many`.
        seconds (`list[RoundSeconds]`): Of each round. A round of R requests belongs to the next R entries of the
            other lists.
        prefill_seconds (`float`): Host time in the target until the first new token.
        first_round_at (`float`, *optional*): When the first round began, by `time.perf_counter`: what comes before it
            ends with the first new token.
        policy ([`Policy`], *optional*): Who decided.
    """

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    confidence: list[torch.Tensor | None] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)
    seconds: list[RoundSeconds] = field(default_factory=list)
    prefill_seconds: float = 0.0
    first_round_at: float | None = None
    policy: Policy | None = None

    @classmethod
    def joined(cls, parts: Iterable["RoundStatistics"]) -> "RoundStatistics":
        """Put the rounds of several calls one behind the other."""
        whole = cls()
        for part in parts:
            for name in ("proposed", "accepted", "committed", "confidence", "request_ids", "seconds"):
                getattr(whole, name).extend(getattr(part, name))
            whole.prefill_seconds += part.prefill_seconds
        return whole

    @property
    def rounds(self) -> int:
        """Number of verification rounds, summed over the requests."""
        return len(self.committed)

    @property
    def tau(self) -> float:
        """Mean tokens per round, bonus token included; `nan` before the first round."""
        return sum(self.committed) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens; `nan` when none was proposed."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else float("nan")

    @property
    def draft_seconds(self) -> float:
        """Time of the rounds in the draft."""
        return sum(part.draft for part in self.seconds)

    @property
    def verify_seconds(self) -> float:
        """Time of the rounds in the target's verification passes."""
        return sum(part.verify for part in self.seconds)

    @property
    def total_seconds(self) -> float:
        """Time of the rounds."""
        return sum(part.total for part in self.seconds)

    @property
    def rest_seconds(self) -> float:
        """Time of the rounds outside draft and verification."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

    def seconds_of_entries(self) -> list[RoundSeconds]:
        """Return the round that each entry was part of."""
        return [part for part in self.seconds for _ in range(part.num_requests)]

    def conditional_acceptance(self, block_size: int) -> list[float]:
        """Return, of each draft position 1..γ, the share accepted where all before it were; `nan` if never reached."""
        positions = range(1, block_size + 1)
        return [_share(self.accepted_at(position), self.reached(position)) for position in positions]

    def survival(self, block_size: int) -> list[float]:
        """Return, of each draft position 1..γ, the share of rounds accepted up to it among those that proposed it."""
        positions = range(1, block_size + 1)
        return [_share(self.accepted_at(position), self.proposed_at(position)) for position in positions]

    def proposed_at(self, position: int) -> int:
        """Rounds that sent a token at a draft position (1..γ) to verification."""
        return sum(length >= position for length in self.proposed)

    def reached(self, position: int) -> int:
        """Rounds that verified the token at a draft position (1..γ) behind an accepted prefix."""
        return sum(
            length >= position and accepted >= position - 1
            for length, accepted in zip(self.proposed, self.accepted, strict=True)
        )

    def accepted_at(self, position: int) -> int:
        """Rounds that accepted the token at a draft position (1..γ)."""
        return sum(length >= position for length in self.accepted)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


@dataclass(frozen=True)
class Proposal:
    """What one round sends to verification.

    Attributes:
        lengths (`torch.LongTensor` of shape `[R]`): Draft tokens l of each request, on the CPU.
        block ([`DraftBlock`], *optional*): The drafts; `None` when nothing was drafted.
        confidence (`torch.FloatTensor` of shape `[R, γ]`, *optional*): Calibrated.
    """

    lengths: torch.Tensor
    block: DraftBlock | None = None
    confidence: torch.Tensor | None = None


class ProcessedSampler:
    """Draws draft tokens under the processors of the target's own decoding, each slot seeing its in-block prefix.

    Args:
        processor ([`BlockProcessor`]): Of the call; stateless.
        requests (`Sequence[Request]`): Who drafts. Drafted tokens are noted behind their committed ones.
        uniform (`torch.DoubleTensor` of shape `[R, γ]`, *optional*): Noise of the draws; `None` draws the arg-max.
        vocab_size (`int`): V.
    """

    def __init__(
        self, processor: BlockProcessor, requests: Sequence[Request], uniform: torch.Tensor | None, vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._processor = processor
        self._requests = requests
        self._uniform = uniform

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
    ) -> tuple[torch.Tensor, TokenLaw | None]:
        slot = drafted_ids.shape[1]
        if self._processor.reads_prefixes and slot > 0:
            for request, token in zip(self._requests, drafted_ids[:, -1].tolist(), strict=True):
                request.token_ids[request.length + slot - 1] = token

        def prefix_of(index: int) -> Prefix | None:
            return self._requests[index].prefix(slot)

        scores = self._processor(logits, candidate_ids, prefix_of)
        if self._processor.may_forbid_all:
            # A constraint may forbid every candidate. Any law is a valid draft law: take the processors' own.
            dead = scores.values.amax(dim=-1, keepdim=True) == -torch.inf
            if bool(dead.any()):
                if candidate_ids is not None:
                    logits = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size)
                scores = self._processor(logits.masked_fill(dead, 0.0), None, prefix_of)
        if self._uniform is None:
            return greedy_sampler(scores.values, scores.candidate_ids, drafted_ids)
        law = scores.law()
        return draw(law, self._uniform[:, slot]), law


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for a decoding loop. Enter it as a context manager: hooks live exactly as long.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft; gets bound to the target.
        generation_config (`GenerationConfig`): Of the call; `do_sample`, `max_length` and the eos ids are read.
        logits_processor (`LogitsProcessorList`): Processors of the call; stateless.
        policy ([`Policy`]): Decides whether to draft and how much of each block is verified; gets a fresh state.
        max_drafts (`int`, *optional*): Draft tokens per round at most, besides γ.
        cache ([`SlotCache`], *optional*): The draft's context of the requests that will be decoded.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        policy: Policy,
        max_drafts: int | None = None,
        cache: SlotCache | None = None,
    ) -> None:
        self.draft = draft.bind(target)
        self.policy = policy.fresh()
        self.statistics = RoundStatistics(policy=self.policy)
        self.processor = BlockProcessor(logits_processor, draft.config.vocab_size)
        self._draft_processor = BlockProcessor(logits_processor, draft.config.vocab_size, tie_margin=0)
        self.cache = SlotCache() if cache is None else cache
        self.do_sample = generation_config.do_sample
        # The user's seed decides about all noise.
        self.seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._target = target
        self._processors = logits_processor
        self._max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self._eos_token_ids = None if eos is None else eos.cpu()
        self._num_positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._max_drafts = min(draft.config.block_size, max_drafts or draft.config.block_size)
        self._capture = FeatureCapture(target, draft.config.target_layer_ids)
        self._temperatures = draft.config.temperatures_for(draft.domain, self.do_sample)
        self._request: Request | None = None  # of transformers' loop
        self._proposal = Proposal(torch.zeros(1, dtype=torch.long, device="cpu"))
        self._forward_started = 0.0
        self._round_started = 0.0
        self._draft_seconds = 0.0
        self._verify_seconds = 0.0
        self._timers: list[torch.utils.hooks.RemovableHandle] = []
        self._apart = ExitStack()

    def __enter__(self) -> "DSparkCandidateGenerator":
        self._capture.__enter__()
        self._timers = [
            self._target.register_forward_pre_hook(self._start_forward),
            self._target.register_forward_hook(self._stop_forward),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._timers:
            handle.remove()
        self._apart.close()
        self._capture.__exit__(kind, error, trace)
        self.draft.last_stats = self.statistics

    def _start_forward(self, *_: Any) -> None:
        self._forward_started = time.perf_counter()

    def _stop_forward(self, *_: Any) -> None:
        elapsed = time.perf_counter() - self._forward_started
        if self._round_started == 0.0:
            self.statistics.prefill_seconds += elapsed
        else:
            self._verify_seconds += elapsed

    def take_features(self) -> torch.Tensor:
        """Return the tapped layers of the target's latest forward pass, `[B, S, m*d]`."""
        return self._capture.take(self.draft.device, self.draft.dtype)

    def start_round(self) -> None:
        """Note that a round begins: forward passes count as verification."""
        self._start_clock(time.perf_counter())
        self._draft_seconds = self._verify_seconds = 0.0

    def _start_clock(self, now: float) -> None:
        self._round_started = now
        if self.statistics.first_round_at is None:
            self.statistics.first_round_at = now

    def start_prefill(self) -> None:
        """Note that forward passes count as prefill from now on."""
        self._round_started = 0.0

    def noise(self, requests: Sequence[Request]) -> BlockNoise | None:
        """Return the noise of the coming block of each request; `None` when decoding is greedy."""
        if not self.do_sample:
            return None
        blocks = [request.blocks for request in requests]
        return block_noise(
            self.seed, [request.id for request in requests], blocks, self.draft.config.block_size, self.draft.device
        )

    def propose(self, requests: Sequence[Request], noise: BlockNoise | None) -> Proposal:
        """Draft one block per request and cut it. The requests share one verification budget.

        Args:
            requests (`Sequence[Request]`): In the order of the draft cache's rows.
            noise ([`BlockNoise`], *optional*): Of their coming blocks; `None` drafts the arg-max.

        DSpark Eq. 3-7, Algorithm 1.
        """
        started = time.perf_counter()
        # One token of the round is the target's own, so a block may fill the length up to one before the end.
        most = [max(0, min(self._max_drafts, self._room(request))) for request in requests]
        max_lengths = torch.tensor(most, device="cpu")  # whatever the user's default device is
        load = Load(
            tuple(request.id for request in requests),
            context_tokens=sum(request.anchor_position + 1 for request in requests),
            other_tokens=self._other_tokens(),
        )
        if not bool(max_lengths.any()) or not self.policy.plan_draft(load):
            self._read_waiting_features(requests)
            return Proposal(torch.zeros_like(max_lengths))
        block = self._draft_blocks(requests, noise)
        confidence = None
        if block.confidence_logits is not None:
            confidence = calibrated_confidence(block.confidence_logits, self._temperatures)
            confidence = confidence.cpu() if self.policy.requires_confidence else confidence
        lengths = self._planned_lengths(confidence, max_lengths, load)
        proposal = Proposal(self._cut_behind_eos(block.token_ids, lengths), block, confidence)
        self._draft_seconds = time.perf_counter() - started
        return proposal

    def _room(self, request: Request) -> int:
        """Return how many drafts of a request may be sent: not beyond its end, nor the target's last position."""
        room = request.max_length - request.length - 1
        return room if self._num_positions is None else min(room, self._num_positions - 1 - request.anchor_position)

    def _read_waiting_features(self, requests: Sequence[Request]) -> None:
        """Let the draft read its context without drafting, now and then: features are larger than what it keeps."""
        num_features = [sum(map(len, request.features)) for request in requests]
        if max(num_features) >= WAITING_AT_MOST:
            started = time.perf_counter()
            anchors = torch.cat([request.anchor for request in requests])
            committed_ids = self._committed_ids(requests, num_features)
            self.draft.read_block(anchors, self._waiting_features(requests), self.cache, num_features, committed_ids)
            for request in requests:
                request.features.clear()
            self._draft_seconds = time.perf_counter() - started

    def _waiting_features(self, requests: Sequence[Request]) -> torch.Tensor:
        width = len(self.draft.config.target_layer_ids) * self.draft.config.hidden_size
        nothing = torch.empty(0, width, device=self.draft.device, dtype=self.draft.dtype)
        return torch.cat([nothing, *(part for request in requests for part in request.features)])

    def _committed_ids(self, requests: Sequence[Request], num_features: Sequence[int]) -> torch.Tensor:
        """Return the committed token behind each waiting feature, request by request, `[T]`."""
        # The features end right before the anchor.
        pairs = zip(requests, num_features, strict=True)
        return torch.cat([request.last_ids(count) for request, count in pairs])

    def _draft_blocks(self, requests: Sequence[Request], noise: BlockNoise | None) -> DraftBlock:
        """Draft; rounds that were not drafted left their features for this one."""
        num_features = [sum(map(len, request.features)) for request in requests]
        features = self._waiting_features(requests)
        uniform = None if noise is None else noise.draft
        sampler = ProcessedSampler(self._draft_processor, requests, uniform, self.draft.config.vocab_size)
        anchors = torch.cat([request.anchor for request in requests])
        committed_ids = self._committed_ids(requests, num_features)
        before = self.cache.lengths[: len(requests)]
        try:
            return self.draft.draft_block(anchors, features, self.cache, sampler, num_features, committed_ids)
        finally:
            for request, length, known in zip(requests, self.cache.lengths, before, strict=False):
                if length > known:  # in the cache now, even if a processor failed afterwards
                    request.features.clear()

    def _planned_lengths(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        lengths = self.policy.plan_verify(confidence, max_lengths, load)
        if not bool(((lengths >= 0) & (lengths <= max_lengths)).all()):
            raise ValueError(
                f"{type(self.policy).__name__}.plan_verify must return lengths in [0, max_lengths="
                f"{max_lengths.tolist()}], got {lengths.tolist()}"
            )
        return lengths

    def _other_tokens(self) -> int:
        load = self.draft.load() if callable(self.draft.load) else self.draft.load
        if not (isinstance(load, Real) and math.isfinite(load) and load >= 0):
            raise ValueError(f"draft.load must be a number of tokens, 0 or more, got {load!r}")
        return int(load)

    def _cut_behind_eos(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return lengths up to and including the first end-of-sequence token.

        The token itself must stay: dropping a token because of its value would bias the output.
        """
        if self._eos_token_ids is None:
            return lengths
        is_eos = torch.isin(token_ids.cpu(), self._eos_token_ids)
        first = torch.where(is_eos.any(dim=-1), is_eos.long().argmax(dim=-1), token_ids.shape[1])
        return torch.minimum(lengths, first + 1)

    def learn(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        num_accepted: torch.Tensor,
        num_committed: Sequence[int],
        target_logits: torch.Tensor | None = None,
    ) -> None:
        """Record the outcome of a round, and let the policy learn from it.

        Args:
            requests (`Sequence[Request]`): As proposed.
            proposal ([`Proposal`]): What was verified.
            num_accepted (`torch.LongTensor` of shape `[R]`): Draft tokens accepted, on the CPU.
            num_committed (`Sequence[int]`): Tokens that each request gained: less than accepted + 1 where it ended.
            target_logits (`torch.FloatTensor` of shape `[R, 1+l, V]`, *optional*): The target's processed scores, for
                an observer.
        """
        now = time.perf_counter()
        seconds = now - self._round_started
        self.statistics.seconds.append(RoundSeconds(len(requests), self._draft_seconds, self._verify_seconds, seconds))
        self._round_started, self._draft_seconds, self._verify_seconds = now, 0.0, 0.0
        self.statistics.request_ids.extend(request.id for request in requests)
        self.statistics.proposed.extend(proposal.lengths.tolist())
        self.statistics.accepted.extend(num_accepted.tolist())
        self.statistics.committed.extend(num_committed)
        confidence = proposal.confidence
        self.statistics.confidence.extend([None] * len(requests) if confidence is None else confidence)
        outcome = RoundOutcome(
            tuple(request.id for request in requests), confidence, proposal.lengths, num_accepted, seconds,
            proposal.block is not None, proposal.block, target_logits,
        )  # fmt: skip
        self.policy.observe(outcome)
        if self.draft.observer is not None:
            self.draft.observer(outcome)

    # What follows is the interface of transformers' assisted loop, for one sequence.

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft one block behind the committed tokens and cut it.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Committed tokens; the last one is the anchor.
            model_kwargs (`dict`): The target's; the attention mask says which prompt positions are padding.
            model_outputs (`ModelOutput`): Not read, the features come by hooks.
            is_first_iteration (`bool`): True before the prefill, when there are no features yet.
            n_last_matches (`int`): Draft tokens accepted in the last round.

        Returns:
            The committed tokens with l draft tokens behind them `[1, S+l]`, and the log draft law `[1, l, V]`:
            `None` when l = 0 or when drafts are arg-max.
        """
        self._proposal = Proposal(torch.zeros(1, dtype=torch.long, device="cpu"))
        if is_first_iteration:
            return input_ids, None
        self._start_clock(self._round_started or time.perf_counter())
        room = torch.zeros(self.draft.config.block_size, dtype=torch.long, device=input_ids.device)
        if self._request is None:
            # transformers' loop stops by its own rules.
            rule = StopRule(StoppingCriteriaList())
            self._request = Request(0, input_ids[0], 0, self._max_length, self._processors, rule)
            self._request.features.append(self._prompt_features(model_kwargs))
            if has_outliers(self._target):  # from now on, the target sees blocks where plain decoding sees tokens
                self._apart.enter_context(outliers_of_each(()))
        else:
            # The last forward saw [old anchor, drafts]; of these the old anchor and the accepted drafts are committed.
            self._request.features.append(self.take_features()[0, : int(n_last_matches) + 1])
        self._request.token_ids = torch.cat([input_ids[0], room])
        self._request.length = input_ids.shape[1]
        self._proposal = self.propose([self._request], self.noise([self._request]))
        self._request.blocks += 1
        length, block = int(self._proposal.lengths[0]), self._proposal.block
        if length == 0:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, block.token_ids[:, :length].to(input_ids.device)], dim=1)
        if block.law is None:
            return candidate_ids, None
        return candidate_ids, block.law[:, :length].dense(self.draft.config.vocab_size).probs.log()

    def _prompt_features(self, model_kwargs: dict[str, Any] | None) -> torch.Tensor:
        """Return the features of the prompt `[n, m*d]`: left padding is no context."""
        features = self.take_features()
        mask = (model_kwargs or {}).get("attention_mask")
        return features[0] if mask is None else features[0, mask[0, : features.shape[1]].bool().to(features.device)]

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int | torch.Tensor
    ) -> None:
        """Record the outcome of a round.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Committed tokens.
            scores (`torch.FloatTensor` of shape `[1, l+1, V]`): The target's processed scores of the round.
            num_matches (`int`): Draft tokens accepted.
        """
        if self._request is not None:  # else it was the prefill
            num_accepted = self._accepted(input_ids, int(num_matches))
            self.learn([self._request], self._proposal, num_accepted, [int(num_matches) + 1], target_logits=scores)

    def _accepted(self, input_ids: torch.Tensor, num_matches: int) -> torch.Tensor:
        """Return the accepted drafts, `[1]`: transformers counts an accepted end-of-sequence draft as the bonus.

        A rejected token is never drawn again from the residual, so equality tells.
        """
        if num_matches < int(self._proposal.lengths[0]):
            following = input_ids[0, self._request.length + num_matches]
            num_matches += int(following == self._proposal.block.token_ids[0, num_matches])
        return torch.tensor([num_matches], device="cpu")
