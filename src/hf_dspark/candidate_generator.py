"""The drafting half of a decoding round: features in, a cut draft block out, through transformers'
`CandidateGenerator`.

transformers' assisted loop verifies and commits; this module drafts, cuts and keeps the statistics. It knows nothing
of how it is reached from `generate()`.
"""

import math
import time
from dataclasses import dataclass, field
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from .calibration import calibrated_confidence
from .feature_capture import FeatureCapture
from .modeling_dspark import DraftCache, DSparkDraftModel
from .policies import Policy, RoundOutcome
from .sampling import DraftBlock, draw, greedy_sampler, scatter_to_vocabulary
from .throughput import Load


@dataclass
class RoundStatistics:
    """What happened in one `generate()` call, round by round.

    The first new token comes out of the prefill and belongs to no round.

    Attributes:
        proposed (`list[int]`): Draft tokens sent to verification in each round.
        accepted (`list[int]`): Draft tokens accepted in each round, without the bonus token.
        confidence (`list[torch.Tensor | None]`): Calibrated c_1..c_γ of each round's block, `[γ]`; `None` where
            nothing was drafted or the draft has no confidence head.
        draft_seconds, verify_seconds, total_seconds (`float`): Host time in the draft, in the target's verification
            passes, and in all rounds. On an accelerator, work that is still queued counts for whoever waits for it.
        prefill_seconds (`float`): Host time until the first new token.
        policy ([`Policy`], *optional*): Who decided.
    """

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[torch.Tensor | None] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    policy: Policy | None = None

    @property
    def rounds(self) -> int:
        """Number of verification rounds."""
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Mean tokens per round, bonus token included; `nan` before the first round."""
        return sum(self.accepted) / self.rounds + 1.0 if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens; `nan` when none was proposed."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else float("nan")

    @property
    def rest_seconds(self) -> float:
        """Time of the rounds outside draft and verification."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

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


class ProcessedSampler:
    """Draws draft tokens under the processors of the target's own decoding, each slot seeing its in-block prefix.

    Args:
        logits_processor (`LogitsProcessorList`): The processors of the `generate()` call; stateless.
        do_sample (`bool`): Draw from the law, or take its arg-max.
        committed_ids (`torch.LongTensor` of shape `[B, S]`): The sequence up to the anchor.
        vocab_size (`int`): V.
    """

    def __init__(
        self, logits_processor: LogitsProcessorList, do_sample: bool, committed_ids: torch.Tensor, vocab_size: int
    ) -> None:
        self._logits_processor = logits_processor
        self._do_sample = do_sample
        self._committed_ids = committed_ids
        self._vocab_size = vocab_size

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(self._logits_processor) > 0:
            logits, candidate_ids = self._process(logits, candidate_ids, drafted_ids), None
        if not self._do_sample:
            return greedy_sampler(logits, candidate_ids, drafted_ids)
        token_ids, law = draw(logits, candidate_ids)
        if candidate_ids is not None:
            law = scatter_to_vocabulary(law, candidate_ids, self._vocab_size)
        return token_ids, law

    def _process(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return processed scores over the whole vocabulary, minus infinity outside the candidates."""
        if candidate_ids is not None:
            logits = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size)
        prefix = torch.cat([self._committed_ids, drafted_ids.to(self._committed_ids.device)], dim=1)
        scores = self._logits_processor(prefix, logits.to(prefix.device))
        # A constraint may forbid every candidate. Any law is a valid draft law: take the processors' own.
        dead = scores.amax(dim=-1, keepdim=True) == -torch.inf
        if bool(dead.any()):
            scores = torch.where(dead, self._logits_processor(prefix, torch.zeros_like(scores)), scores)
        return scores.to(drafted_ids.device)


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for transformers' assisted loop. Enter it as a context manager: hooks live exactly as long.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DSparkDraftModel`]): Its draft; gets bound to the target.
        generation_config (`GenerationConfig`): Of the call; `do_sample`, `max_length` and the eos ids are read.
        logits_processor (`LogitsProcessorList`): Processors of the call; stateless.
        policy ([`Policy`]): Decides whether to draft and how much of each block is verified; gets a fresh state.
        max_drafts (`int`, *optional*): Draft tokens per round at most, besides γ.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkDraftModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        policy: Policy,
        max_drafts: int | None = None,
    ) -> None:
        self.draft = draft.bind(target)
        self.policy = policy.fresh()
        self.statistics = RoundStatistics(policy=self.policy)
        self._target = target
        self._logits_processor = logits_processor
        self._do_sample = generation_config.do_sample
        self._max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self._eos_token_ids = None if eos is None else eos.cpu()
        self._max_drafts = min(draft.config.block_size, max_drafts or draft.config.block_size)
        self._capture = FeatureCapture(target, draft.config.target_layer_ids)
        self._temperatures = draft.config.temperatures_for(draft.domain, self._do_sample)
        self._cache = DraftCache(draft.config.num_hidden_layers)
        self._prompt_seen = False
        self._waiting_features: list[torch.Tensor] = []
        self._block: DraftBlock | None = None
        self._confidence: torch.Tensor | None = None
        self._num_proposed = 0
        self._committed_before = 0
        self._forward_started = 0.0
        self._round_started = 0.0
        self._timers: list[torch.utils.hooks.RemovableHandle] = []

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
        self._capture.__exit__(kind, error, trace)
        self.draft.last_stats = self.statistics

    def _start_forward(self, *_: Any) -> None:
        self._forward_started = time.perf_counter()

    def _stop_forward(self, *_: Any) -> None:
        elapsed = time.perf_counter() - self._forward_started
        if self._round_started == 0.0:
            self.statistics.prefill_seconds += elapsed
        else:
            self.statistics.verify_seconds += elapsed

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
        self._block, self._confidence, self._num_proposed = None, None, 0
        self._committed_before = input_ids.shape[1]
        if is_first_iteration:
            return input_ids, None
        started = time.perf_counter()
        self._round_started = self._round_started or started
        # One token of the round is the target's own, so a block may fill the length up to one before the end.
        num_drafts = min(self._max_drafts, self._max_length - input_ids.shape[1] - 1)
        if num_drafts <= 0:
            return input_ids, None
        self._waiting_features.append(self._committed_features(model_kwargs, int(n_last_matches)))
        load = Load(context_tokens=input_ids.shape[1], other_tokens=self._other_tokens())
        if not self.policy.plan_draft(load):
            return input_ids, None
        self._block = self._draft(input_ids)
        if self._block.confidence_logits is not None:
            self._confidence = calibrated_confidence(self._block.confidence_logits, self._temperatures).cpu()
        length = self._planned_length(num_drafts, load)
        self._num_proposed = self._cut_behind_eos(self._block.token_ids[0, :length])
        self.statistics.draft_seconds += time.perf_counter() - started
        return self._candidates(input_ids)

    def _planned_length(self, num_drafts: int, load: Load) -> int:
        length = int(self.policy.plan_verify(self._confidence, torch.tensor([num_drafts]), load)[0])
        if not 0 <= length <= num_drafts:
            raise ValueError(
                f"{type(self.policy).__name__}.plan_verify must return lengths in [0, max_lengths={num_drafts}], "
                f"got {length}"
            )
        return length

    def _draft(self, input_ids: torch.Tensor) -> DraftBlock:
        """Draft one block; rounds that were not drafted left their features for this one."""
        features = torch.cat(self._waiting_features, dim=1)
        self._waiting_features.clear()
        sampler = ProcessedSampler(self._logits_processor, self._do_sample, input_ids, self.draft.config.vocab_size)
        return self.draft.draft_block(input_ids[:, -1], features, self._cache, sampler)

    def _candidates(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        length, block = self._num_proposed, self._block
        if length == 0:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, block.token_ids[:, :length].to(input_ids.device)], dim=1)
        return candidate_ids, None if block.log_probs is None else block.log_probs[:, :length]

    def _other_tokens(self) -> int:
        load = self.draft.load() if callable(self.draft.load) else self.draft.load
        if not (isinstance(load, Real) and math.isfinite(load) and load >= 0):
            raise ValueError(f"draft.load must be a number of tokens, 0 or more, got {load!r}")
        return int(load)

    def _committed_features(self, model_kwargs: dict[str, Any] | None, num_accepted: int) -> torch.Tensor:
        """Return features of the tokens committed since the last block, anchor excluded, `[1, C, m*d]`."""
        features = self._capture.take(self.draft.device, self.draft.dtype)
        if self._prompt_seen:
            # The last forward saw [old anchor, drafts]; of these the old anchor and the accepted drafts are committed.
            return features[:, : num_accepted + 1]
        self._prompt_seen = True
        mask = (model_kwargs or {}).get("attention_mask")
        if mask is None:
            return features
        # Left padding is no context; the draft numbers the real prompt tokens from 0, as the target does.
        return features[:, mask[0, : features.shape[1]].bool().to(features.device)]

    def _cut_behind_eos(self, token_ids: torch.Tensor) -> int:
        """Return the length up to and including the first end-of-sequence token.

        The token itself must stay: dropping a token because of its value would bias the output.
        """
        if self._eos_token_ids is None:
            return len(token_ids)
        positions = torch.isin(token_ids.cpu(), self._eos_token_ids).nonzero()
        return int(positions[0]) + 1 if len(positions) else len(token_ids)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int | torch.Tensor
    ) -> None:
        """Record the outcome of a round, and let the policy learn from it.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Committed tokens.
            scores (`torch.FloatTensor` of shape `[1, l+1, V]`): The target's processed scores of the round.
            num_matches (`int`): Draft tokens accepted.
        """
        if self._round_started == 0.0:  # the prefill
            return
        now = time.perf_counter()
        seconds, self._round_started = now - self._round_started, now
        self.statistics.total_seconds += seconds
        self.statistics.proposed.append(self._num_proposed)
        self.statistics.accepted.append(int(num_matches))
        self.statistics.confidence.append(None if self._confidence is None else self._confidence[0])
        outcome = RoundOutcome(
            (0,), self._confidence, torch.tensor([self._num_proposed]), self._accepted(input_ids, int(num_matches)),
            seconds, self._block is not None, self._block, target_logits=scores,
        )  # fmt: skip
        self.policy.observe(outcome)
        if self.draft.observer is not None:
            self.draft.observer(outcome)

    def _accepted(self, input_ids: torch.Tensor, num_matches: int) -> torch.Tensor:
        """Return the accepted drafts, `[1]`: transformers counts an accepted end-of-sequence draft as the bonus.

        A rejected token is never drawn again from the residual, so equality tells.
        """
        if num_matches < self._num_proposed:
            following = input_ids[0, self._committed_before + num_matches]
            num_matches += int(following == self._block.token_ids[0, num_matches])
        return torch.tensor([num_matches])
