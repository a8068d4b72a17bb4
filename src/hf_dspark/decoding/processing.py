"""From logits to laws: the processors of a `generate()` call, applied to many positions at once, each sequence as if
alone. Temperature, top-k, top-p and min-p are computed together on the few tokens that survive."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..maths.sampling import TokenLaw, best_tokens, largest, scatter_to_vocabulary

FUSED = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Read the scores alone, so a scatter to the vocabulary changes nothing for them.
READ_SCORES_ONLY = (*FUSED, TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper, LogitNormalization)
READ_NO_PREFIX = (*READ_SCORES_ONLY, SuppressTokensLogitsProcessor)
# Lengths that count the padding of a batch: the attributes that hold them.
PADDED_LENGTHS = {
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "prompt_length_to_skip",
    "ForcedEOSTokenLogitsProcessor": "max_length",
    "ExponentialDecayLengthPenalty": "regulation_start",
    "SuppressTokensAtBeginLogitsProcessor": "begin_index",
}
TIE_MARGIN = 32
TOP_P_CANDIDATES = 1024


@dataclass(frozen=True)
class Scores:
    """Processed scores of n positions."""

    values: torch.Tensor  # `[n, V]` or `[n, candidates]`, not normalised; minus infinity is impossible
    candidate_ids: torch.Tensor | None = None  # `[n, candidates]`; `None` means all tokens

    def __getitem__(self, positions: slice) -> "Scores":
        return Scores(self.values[positions], None if self.candidate_ids is None else self.candidate_ids[positions])

    def law(self) -> TokenLaw:
        return TokenLaw(self.values.softmax(dim=-1, dtype=torch.float32), self.candidate_ids)

    def best(self) -> torch.Tensor:
        return best_tokens(self.values, self.candidate_ids)

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the scores over the whole vocabulary, `[n, V]`, in float32."""
        values = self.values.float()
        return values if self.candidate_ids is None else scatter_to_vocabulary(values, self.candidate_ids, vocab_size)


@dataclass(frozen=True)
class Prefix:
    token_ids: torch.Tensor  # `[1, S]`, without padding
    processors: LogitsProcessorList  # of its request


class BlockProcessor:
    """Applies the processors of a call, which are stateless, to a block of positions.

    Their kinds decide what is done position by position and what at once. `tie_margin` candidates are looked at after
    the k-th, in case they tie with it: the target's law needs them; drafts may come from any law, and save the work.
    """

    def __init__(self, processors: LogitsProcessorList, vocab_size: int, tie_margin: int = TIE_MARGIN) -> None:
        kinds = [type(processor) for processor in processors]
        # Whether any processor looks at the tokens before a position.
        self.reads_prefixes = any(kind not in READ_NO_PREFIX for kind in kinds)
        # Whether some candidates may all be impossible although not all tokens are.
        self.may_forbid_all = any(kind not in READ_SCORES_ONLY for kind in kinds)
        self._processors = processors
        self._vocab_size = vocab_size
        self._fused_from, self._truncation = len(processors), None
        while self._fused_from and (longer := Truncation.of(processors[self._fused_from - 1 :], tie_margin)):
            self._fused_from, self._truncation = self._fused_from - 1, longer

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None = None, prefixes: Sequence[Prefix | None] = ()
    ) -> Scores:
        """Process raw logits `[n, V]` or `[n, candidates]`, without changing them. Each position has a prefix if
        `reads_prefixes`; it is `None` after an end, where plain decoding never comes to: nothing is processed."""
        if not self._processors:
            return Scores(logits, candidate_ids)
        if self._fused_from > 0:  # processors may write into their argument, and expect float32
            logits = logits.to(torch.float32, copy=True)
        for number, processor in enumerate(self._processors[: self._fused_from]):
            if candidate_ids is not None and type(processor) not in READ_SCORES_ONLY:
                logits, candidate_ids = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size), None
            if type(processor) in READ_NO_PREFIX:
                logits = _at_once(logits, [processor])
            else:
                logits = _one_by_one(logits, number, prefixes)
        if self._truncation is None:
            return Scores(logits, candidate_ids)
        truncated = self._truncation(logits)
        if truncated is None:  # more ties, or a flatter law, than the candidates have room for
            logits = logits.to(torch.float32, copy=True)
            return Scores(_at_once(logits, self._processors[self._fused_from :]), candidate_ids)
        if candidate_ids is None:
            return truncated
        if truncated.candidate_ids is not None:
            candidate_ids = candidate_ids.gather(-1, truncated.candidate_ids)
        return Scores(truncated.values, candidate_ids)


def _at_once(scores: torch.Tensor, processors: Sequence[LogitsProcessor]) -> torch.Tensor:
    no_ids = torch.empty(scores.shape[0], 0, dtype=torch.long, device=scores.device)
    for processor in processors:
        scores = processor(no_ids, scores)
    return scores


def _one_by_one(scores: torch.Tensor, number: int, prefixes: Sequence[Prefix | None]) -> torch.Tensor:
    for index, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        processor = prefix.processors[number]
        row = processor(prefix.token_ids, scores[index : index + 1].to(prefix.token_ids.device))
        if row.shape[0] != 1:
            raise ValueError(
                f"the logits processor {type(processor).__name__} returned {row.shape[0]} rows for one: in a batch "
                "each row is processed by itself, so its result must not depend on the row's number"
            )
        scores[index] = row[0]
    return scores


def _can_fuse(warper: LogitsProcessor) -> bool:
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -torch.inf) == -torch.inf


@dataclass(frozen=True)
class Truncation:
    """Temperature, top-k, top-p and min-p in one go, on the tokens that can survive. Without a tie margin, ties are
    broken, and top-p is content with the best candidates: that is for drafts, whose law may be any."""

    temperature: float = 1.0
    top_k: int | None = None  # keeps those tied with the last one, too
    top_p: float | None = None
    min_p: float | None = None
    tie_margin: int = TIE_MARGIN

    @classmethod
    def of(cls, warpers: Sequence[LogitsProcessor], tie_margin: int) -> "Truncation | None":
        """Return the truncation that a chain of warpers makes; `None` for other processors, or another order."""
        kinds = [type(warper) for warper in warpers]
        if kinds != [kind for kind in FUSED if kind in kinds] or not all(map(_can_fuse, warpers)):
            return None
        names = dict(zip(FUSED, ("temperature", "top_k", "top_p", "min_p"), strict=True))
        values = {names[type(warper)]: getattr(warper, names[type(warper)]) for warper in warpers}
        return cls(**values, tie_margin=tie_margin)

    def __call__(self, logits: torch.Tensor) -> Scores | None:
        """Truncate scores `[n, V]`, in any float type; `None` if some survivors may not be among the candidates, which
        cannot be without a tie margin."""
        if self.top_k is None and self.top_p is None:
            scores = logits.float() / self.temperature
            return Scores(scores if self.min_p is None else self._above_min_p(scores))
        size = logits.shape[-1]
        wanted = TOP_P_CANDIDATES if self.top_k is None else self.top_k + self.tie_margin
        best, candidate_ids = largest(logits, min(size, wanted))
        scores = best.float() / self.temperature
        is_whole = scores.shape[-1] == size
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last_kept = scores[:, self.top_k - 1, None]
            if not is_whole and self.tie_margin and bool((scores[:, -1:] >= last_kept).any()):
                return None
            scores = scores.masked_fill(scores < last_kept, -torch.inf)
        if self.top_p is not None:
            probs = scores.softmax(dim=-1)
            if self.top_k is None and not is_whole:
                probs = (scores - (logits.float() / self.temperature).logsumexp(dim=-1, keepdim=True)).exp()
            removed = probs.cumsum(dim=-1) - probs >= self.top_p  # the better tokens have the mass already
            if not (self.top_k is not None or is_whole or self.tie_margin == 0 or bool(removed[:, -1].all())):
                return None  # the candidates do not reach p
            if self.top_p == 0.0:
                removed[:, 0] = False  # the best token stays
            scores = scores.masked_fill_(removed, -torch.inf)
        return Scores(scores if self.min_p is None else self._above_min_p(scores), candidate_ids)

    def _above_min_p(self, scores: torch.Tensor) -> torch.Tensor:
        probs = scores.softmax(dim=-1)
        return scores.masked_fill(probs < self.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)


def processors_of_row(
    processors: LogitsProcessorList, row: int, num_rows: int, left_padding: int, prompt_ids: torch.Tensor
) -> LogitsProcessorList:
    """Return the processors of a padded batch as they are for one of its rows without its padding: `prompt_ids`,
    `[1, S]`, have none. Several sequences per prompt count as rows."""
    row_processors = LogitsProcessorList()
    for processor in processors:
        name = type(processor).__name__
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            own = PrefixConstrainedLogitsProcessor(lambda _, ids, allowed=allowed: allowed(row, ids), num_beams=1)
        elif name == "EncoderRepetitionPenaltyLogitsProcessor":
            own = _changed(processor, encoder_input_ids=prompt_ids)
        elif name == "EncoderNoRepeatNGramLogitsProcessor":
            prompt = row // (num_rows // processor.batch_size)
            own = _changed(processor, batch_size=1, generated_ngrams=[processor.generated_ngrams[prompt]])
        elif name == "RepetitionPenaltyLogitsProcessor" and isinstance(processor.prompt_ignore_length, torch.Tensor):
            own = _changed(processor, prompt_ignore_length=None)  # the padding of each row, of which there is none
        elif name in PADDED_LENGTHS and left_padding:
            attribute = PADDED_LENGTHS[name]
            own = _changed(processor, **{attribute: getattr(processor, attribute) - left_padding})
        else:
            own = processor
        row_processors.append(own)
    return row_processors


def _changed(processor: LogitsProcessor, **attributes: Any) -> LogitsProcessor:
    own = copy.copy(processor)
    own.__dict__ |= attributes
    return own
