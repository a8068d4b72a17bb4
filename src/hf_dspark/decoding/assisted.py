"""A draft in transformers' own assisted loop, for what our loop does not decode: images, ALiBi, attentions. One
sequence at a time. transformers verifies and commits; what it does not tell is found by hooks on the target."""

import time
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from ..models.modeling_draft import DraftModel
from ..sampling.distributions import Scores
from ..sampling.drafts import Verified
from ..scheduling.rounds import RoundSeconds
from ..targets.feature_capture import FeatureCapture, remove_hook
from ..targets.int8_outliers import forget_groups, has_outliers, outliers_of_each
from .drafter import Drafter, Proposal
from .request import Call, Request, StopRule


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for transformers' assisted loop. Enter it as a context manager: hooks live exactly as long."""

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(self, target: PreTrainedModel, draft: DraftModel, call: Call) -> None:
        self.draft = draft
        self._drafter = Drafter(target, draft, call, grows_trees=False)
        self._call = call
        self._target = target
        self._capture = FeatureCapture(target, draft.config.target_layer_ids)
        self._request: Request | None = None
        self._proposal: Proposal | None = None
        self._hooks = (self._start_pass, self._end_pass)
        self._entered = ExitStack()
        self._pass_started = self._pass_seconds = 0.0
        self._round_started: float | None = None  # None in the prefill

    def __enter__(self) -> "DSparkCandidateGenerator":
        self._capture.attach()
        self._target.register_forward_pre_hook(self._hooks[0])
        self._target.register_forward_hook(self._hooks[1])
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the target as it was; also after an interrupt has kept it from being entered or left."""
        for hook in self._hooks:
            remove_hook(self._target, hook)
        self._capture.detach()
        self._entered.close()
        forget_groups()

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
        """Draft one block after the committed tokens `[1, S]`, of which the last one is the anchor, and cut it.

        Returns them with l draft tokens after them, `[1, S+l]`, and the log draft distribution `[1, l, V]`: `None`
        when l = 0 or when drafts are arg-max. The first call comes before the prefill, when there are no features yet.
        """
        if is_first_iteration:
            return input_ids, None
        self._round_started = self._round_started or time.perf_counter()
        features = self._capture.take(self.draft.device, self.draft.dtype)[0]
        if self._request is None:
            if has_outliers(self._target):  # from now on, the target sees blocks where plain decoding sees tokens
                self._entered.enter_context(outliers_of_each(()))
            rule = StopRule(StoppingCriteriaList())  # transformers' loop stops by its own rules
            max_length = self._call.generation_config.max_length
            self._request = Request(0, input_ids[0], max_length, self._call.logits_processor, rule)
            mask = (model_kwargs or {}).get("attention_mask")
            if mask is not None:  # left padding of the prompt is no context
                features = features[mask[0, : len(features)].bool().to(features.device)]
            self._request.features.append(features)
        else:
            # The last pass saw [old anchor, drafts]; of these the old anchor and the accepted drafts are committed.
            self._request.features.append(features[: int(n_last_matches) + 1])
        self._request.token_ids = input_ids[0]
        requests = [self._request]
        self._proposal = self._drafter.propose(requests, self._drafter.noise(requests))
        self._request.blocks += 1
        block = self._proposal.drafts
        length = int(block.lengths[0])
        if length == 0:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, block.token_ids[:, :length].to(input_ids.device)], dim=1)
        if block.distribution is None:
            return candidate_ids, None
        return candidate_ids, block.distribution[:, :length].dense(self.draft.config.vocab_size).probs.log()

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int | torch.Tensor
    ) -> None:
        """Record the outcome of a round; the target's processed scores are `[1, l+1, V]`."""
        if self._request is None:  # it was the prefill
            return
        now, num_matches = time.perf_counter(), int(num_matches)
        seconds = RoundSeconds(1, self._proposal.seconds, self._pass_seconds, now - self._round_started)
        self._round_started = now  # what the loop does between two rounds belongs to the next one
        num_accepted = torch.tensor([self._num_accepted(input_ids, num_matches)], device="cpu")
        verified = Verified(num_accepted, input_ids[:, -1])
        scores = Scores(scores[0])
        self._drafter.learn([self._request], self._proposal, verified, [num_matches + 1], scores, seconds)

    def _num_accepted(self, input_ids: torch.Tensor, num_matches: int) -> int:
        """Return the accepted drafts: transformers counts an accepted end-of-sequence draft as the bonus. A rejected
        token is never drawn again from the residual, so equality tells."""
        if num_matches == int(self._proposal.drafts.lengths[0]):
            return num_matches
        following = input_ids[0, self._request.length + num_matches]
        return num_matches + int(following == self._proposal.drafts.token_ids[0, num_matches])
