"""A draft in transformers' own assisted loop, for what hf_dspark's loop does not decode: images, ALiBi, attentions.

One sequence at a time. transformers verifies and commits; what it does not tell is found by hooks on the target.
"""

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from ..models.modeling_draft import DraftModel
from ..targets.feature_capture import FeatureCapture
from ..targets.int8_outliers import has_outliers, outliers_of_each
from .drafter import Drafter, Proposal
from .processing import Scores
from .request import Call, Request, StopRule
from .rounds import RoundSeconds


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for transformers' assisted loop. Enter it as a context manager: hooks live exactly as long.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        call ([`Call`]): Whose options hold; of one sequence.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(self, target: PreTrainedModel, draft: DraftModel, call: Call) -> None:
        self.draft = draft
        self._drafter = Drafter(target, draft, call)
        self._call = call
        self._target = target
        self._capture = FeatureCapture(target, draft.config.target_layer_ids)
        self._request: Request | None = None
        self._proposal = _nothing()
        self._entered = ExitStack()
        self._pass_started = self._pass_seconds = 0.0
        self._round_started: float | None = None  # None in the prefill

    def __enter__(self) -> "DSparkCandidateGenerator":
        self._entered.enter_context(self._capture)
        self._entered.callback(self._target.register_forward_pre_hook(self._start_pass).remove)
        self._entered.callback(self._target.register_forward_hook(self._end_pass).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def _start_pass(self, *_: Any) -> None:
        self._pass_started = time.perf_counter()

    def _end_pass(self, *_: Any) -> None:
        self._pass_seconds = time.perf_counter() - self._pass_started
        if self._round_started is None:
            self._drafter.statistics.prefill_seconds += self._pass_seconds

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft one block after the committed tokens and cut it.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Committed tokens; the last one is the anchor.
            model_kwargs (`dict`): The target's; the attention mask says which prompt positions are padding.
            model_outputs (`ModelOutput`): Not read, the features come by hooks.
            is_first_iteration (`bool`): True before the prefill, when there are no features yet.
            n_last_matches (`int`): Draft tokens accepted in the last round.

        Returns:
            The committed tokens with l draft tokens after them `[1, S+l]`, and the log draft law `[1, l, V]`: `None`
            when l = 0 or when drafts are arg-max.
        """
        self._proposal = _nothing()
        if is_first_iteration:
            return input_ids, None
        self._round_started = self._round_started or time.perf_counter()
        features = self._capture.take(self.draft.device, self.draft.dtype)[0]
        if self._request is None:
            self._request = self._first_request(input_ids[0])
            self._request.features.append(_without_padding(features, model_kwargs))
        else:
            # The last pass saw [old anchor, drafts]; of these the old anchor and the accepted drafts are committed.
            self._request.features.append(features[: int(n_last_matches) + 1])
        self._request.token_ids = input_ids[0]
        requests = [self._request]
        self._proposal = self._drafter.propose(requests, self._drafter.noise(requests))
        self._request.blocks += 1
        length, block = int(self._proposal.lengths[0]), self._proposal.block
        if length == 0:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, block.token_ids[:, :length].to(input_ids.device)], dim=1)
        if block.law is None:
            return candidate_ids, None
        return candidate_ids, block.law[:, :length].dense(self.draft.config.vocab_size).probs.log()

    def _first_request(self, token_ids: torch.Tensor) -> Request:
        if has_outliers(self._target):  # from now on, the target sees blocks where plain decoding sees tokens
            self._entered.enter_context(outliers_of_each(()))
        rule = StopRule(StoppingCriteriaList())  # transformers' loop stops by its own rules
        max_length = self._call.generation_config.max_length
        return Request(0, token_ids, max_length, self._call.logits_processor, rule)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int | torch.Tensor
    ) -> None:
        """Record the outcome of a round.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Committed tokens.
            scores (`torch.FloatTensor` of shape `[1, l+1, V]`): The target's processed scores of the round.
            num_matches (`int`): Draft tokens accepted.
        """
        if self._request is None:  # it was the prefill
            return
        now, num_matches = time.perf_counter(), int(num_matches)
        seconds = RoundSeconds(1, self._proposal.seconds, self._pass_seconds, now - self._round_started)
        self._round_started = now  # what the loop does between two rounds belongs to the next one
        num_accepted = torch.tensor([self._num_accepted(input_ids, num_matches)], device="cpu")
        self._drafter.learn(
            [self._request], self._proposal, num_accepted, [num_matches + 1], Scores(scores[0]), seconds
        )

    def _num_accepted(self, input_ids: torch.Tensor, num_matches: int) -> int:
        """Return the accepted drafts: transformers counts an accepted end-of-sequence draft as the bonus.

        A rejected token is never drawn again from the residual, so equality tells.
        """
        if num_matches == int(self._proposal.lengths[0]):
            return num_matches
        following = input_ids[0, self._request.length + num_matches]
        return num_matches + int(following == self._proposal.block.token_ids[0, num_matches])


def _nothing() -> Proposal:
    return Proposal(torch.zeros(1, dtype=torch.long, device="cpu"))


def _without_padding(features: torch.Tensor, model_kwargs: dict[str, Any] | None) -> torch.Tensor:
    """Return the features `[n, m*d]` of a prompt: left padding is no context."""
    mask = (model_kwargs or {}).get("attention_mask")
    return features if mask is None else features[mask[0, : len(features)].bool().to(features.device)]
