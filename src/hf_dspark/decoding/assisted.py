"""[`DSparkCandidateGenerator`]: a draft in transformers' assisted loop, or in a loop of one's own.

`generate()` uses it for what our loop does not decode: images, ALiBi, attentions. One sequence at a time.
"""

import copy
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..sampling.distributions import Scores
from ..sampling.drafts import Verified
from ..scheduling.options import DecodingOptions
from ..scheduling.rounds import RoundSeconds
from ..targets import int8_outliers
from ..targets.assistant_draft import as_draft
from ..targets.feature_capture import FeatureCapture, add_hook, remove_hook
from ..targets.int8_outliers import outliers_of_each
from .checks import processor_obstacles, refuse
from .drafter import Drafter, Proposal
from .hook import drop_cache_of_files, plan_call
from .request import Call, Request, StopRule


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for a loop that verifies by itself, by transformers' candidate-generator protocol.

    Such a loop calls `get_candidates`, verifies the candidates in one pass of the target, and says how many matched:
    by `update_candidate_strategy`, and by `n_last_matches` in the next call. It decodes one sequence. Enter the
    generator as a context manager: it reads the target's features by hooks, which live exactly as long.

    Args:
        target (`PreTrainedModel`): The causal LM that verifies.
        draft (`PreTrainedModel`): Its draft, or a causal LM with its tokenizer, see [`AssistantDraft`].
        generation_config (`GenerationConfig`, *optional*): Says whether drafts are sampled, where a sequence ends and
            how long it gets. Default: the target's.
        logits_processor (`LogitsProcessorList`, *optional*): What the loop applies to the target's logits before it
            verifies, temperature and top-p included. Drafts are drawn from logits that are processed alike.
        options ([`DecodingOptions`], *optional*): How to draft. Default: `draft.decoding`.

    Raises:
        TypeError: If these are no target and no draft.
        ValueError: If the target, the options or the processors cannot be decoded with this draft.

    Example:

    ```python
    from transformers import DynamicCache

    cache, ids, matches = DynamicCache(config=target.config), inputs["input_ids"], None
    with DSparkCandidateGenerator(target, draft) as generator, torch.no_grad():
        while ids.shape[1] < 64:
            first = matches is None
            candidates, _ = generator.get_candidates(ids, is_first_iteration=first, n_last_matches=matches or 0)
            drafts = candidates[0, ids.shape[1] :]
            logits = target(candidates[:, cache.get_seq_length() :], past_key_values=cache).logits
            best = logits[0, -len(drafts) - 1 :].argmax(dim=-1)
            matches = int((drafts == best[:-1]).long().cumprod(dim=0).sum())
            cache.crop(matches - len(drafts))
            ids = torch.cat([ids, best[None, : matches + 1]], dim=1)
            generator.update_candidate_strategy(ids, logits[:, -len(drafts) - 1 :], matches)
    ```
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        options: DecodingOptions | None = None,
    ) -> None:
        draft = as_draft(draft, target)
        require_pair(target, draft)
        config = copy.copy(generation_config or target.generation_config)
        drop_cache_of_files(target, config)
        plan, reasons = plan_call(target, draft, options or draft.decoding, config, {})
        processors = logits_processor or LogitsProcessorList()
        some_ids = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        call = Call(some_ids, processors, StoppingCriteriaList(), config, {}, **plan)
        refuse([*reasons, *processor_obstacles(call, draft.config.vocab_size)])
        self._prepare(target, draft, call)

    @classmethod
    def of_call(cls, target: PreTrainedModel, draft: DraftModel, call: Call) -> "DSparkCandidateGenerator":
        """Return one for a `generate()` call that was checked."""
        generator = cls.__new__(cls)
        generator._prepare(target, draft, call, loop="transformers")
        return generator

    def _prepare(self, target: PreTrainedModel, draft: DraftModel, call: Call, loop: str = "caller") -> None:
        self.draft = draft
        self._drafter = Drafter(target, draft, call, in_own_loop=False)
        self._drafter.statistics.loop = loop
        self._call = call
        self._target = target
        self._capture = FeatureCapture(self._drafter.support, draft.config.target_layer_ids)
        self._request: Request | None = None
        self._proposal: Proposal | None = None
        self._hooks = (target, self._start_pass, True), (target, self._end_pass, False)
        self._entered = ExitStack()
        self._pass_started = self._pass_seconds = 0.0
        self._round_started: float | None = None  # None in the prefill

    def __enter__(self) -> "DSparkCandidateGenerator":
        self._capture.attach()
        for hook in self._hooks:
            add_hook(*hook)
        return self

    def __exit__(self, *error: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Leave the target as it was; also after an interrupt has kept it from being entered or left."""
        for hook in self._hooks:
            remove_hook(*hook)
        self._capture.restore()
        self._entered.close()
        int8_outliers.restore()

    def _start_pass(self, module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        self._pass_started = time.perf_counter()
        support, last = self._drafter.support, kwargs.get("logits_to_keep")
        if support.shares_keys and isinstance(last, int):  # then only these positions would have features
            kwargs["logits_to_keep"] = 0 if support.is_spread else torch.arange(-last, 0)
        return args, kwargs

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
        if self._hooks[0][1] not in self._target._forward_pre_hooks.values():
            raise RuntimeError("the candidate generator reads the target by hooks: enter it, with generator: ...")
        if is_first_iteration:
            return input_ids, None
        self._round_started = self._round_started or time.perf_counter()
        features = self._capture.take(self.draft.device, self.draft.dtype)[0]
        if self._request is None:
            # From now on, the target sees blocks where plain decoding sees tokens.
            if self._drafter.support.has_outliers:
                self._entered.enter_context(outliers_of_each(()))
            rule = StopRule(StoppingCriteriaList())  # transformers' loop stops by its own rules
            max_length = self._call.generation_config.max_length or sys.maxsize
            self._request = Request(0, input_ids[0], max_length, self._call.logits_processor, rule)
            mask = (model_kwargs or {}).get("attention_mask")
            if mask is not None:  # left padding of the prompt is no context
                whole = len(features)
                features = features[mask[0, :whole].bool().to(features.device)]
                self._request.hidden_prompt = len(features) - whole
            self._drafter.keep(0, self._request, features, self._request.anchor_position)
        else:
            # The last pass saw [old anchor, drafts]; of these the old anchor and the accepted drafts are committed.
            self._request.token_ids = input_ids[0]
            self._drafter.keep(0, self._request, features[: int(n_last_matches) + 1], self._request.anchor_position)
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
        verified = Verified(num_accepted, input_ids[:, -1], drafts=self._proposal.drafts, scores=Scores(scores[0]))
        self._drafter.learn([self._request], self._proposal, verified, [num_matches + 1], seconds)

    def _num_accepted(self, input_ids: torch.Tensor, num_matches: int) -> int:
        """Return the accepted drafts: transformers counts an accepted end-of-sequence draft as the bonus. A rejected
        token is never drawn again from the residual, so equality tells."""
        if num_matches == int(self._proposal.drafts.lengths[0]):
            return num_matches
        following = input_ids[0, self._request.length + num_matches]
        return num_matches + int(following == self._proposal.drafts.token_ids[0, num_matches])


def decode_assisted(
    assisted_decoding: Callable, generator: DSparkCandidateGenerator, input_ids: torch.LongTensor, **prepared: Any
) -> Any:
    """Run transformers' own assisted loop, a method of models, with a generator of ours."""
    if criteria := prepared.get("stopping_criteria"):
        prepared["stopping_criteria"] = _AfterPrompt(criteria, input_ids.shape[1])
    if (streamer := prepared.get("streamer")) is not None:  # which gets tokens one by one in plain decoding
        each = SimpleNamespace(
            put=lambda value: [streamer.put(token) for token in value[0].split(1)], end=streamer.end
        )
        prepared["streamer"] = each
    try:
        with generator:
            return assisted_decoding(_Assisted(generator), input_ids, **prepared)
    finally:
        generator.restore()  # for an interrupt while it is entered or left


class _AfterPrompt(StoppingCriteriaList):
    """Criteria that never end a prompt: up to 5.22, that loop asks about it before there is any new token."""

    def __init__(self, criteria: StoppingCriteriaList, prompt_length: int) -> None:
        super().__init__(criteria)
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor | None, **kwargs: Any) -> torch.BoolTensor:
        if input_ids.shape[1] == self._prompt_length:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return super().__call__(input_ids, scores, **kwargs)


class _Assisted:
    """A target to that loop, which gets its candidates from here."""

    def __init__(self, generator: DSparkCandidateGenerator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator._target, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._generator._target(**inputs)

    def _get_candidate_generator(self, **_: Any) -> DSparkCandidateGenerator:
        return self._generator
