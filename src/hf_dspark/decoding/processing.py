"""From logits to laws: the processors of a `generate()` call, applied to many positions at once.

Each sequence is processed as if it were alone: its ids without padding, its own lengths. Temperature, top-k, top-p and
min-p are computed together on the few tokens that survive.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

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
# Lengths that count the padding of a batch, by the attributes that hold them.
PADDED_LENGTHS = {
    "MinLengthLogitsProcessor": ("min_length",),
    "MinNewTokensLengthLogitsProcessor": ("prompt_length_to_skip",),
    "ForcedEOSTokenLogitsProcessor": ("max_length",),
    "ExponentialDecayLengthPenalty": ("regulation_start",),
    "SuppressTokensAtBeginLogitsProcessor": ("begin_index",),
}
# Hold the prompts of the whole batch.
PROMPT_READERS = {
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_input_ids",
}
TIE_MARGIN = 32
TOP_P_CANDIDATES = 1024


@dataclass(frozen=True)
class Scores:
    """Processed scores of some positions.

    Attributes:
        values (`torch.FloatTensor` of shape `[n, V]` or `[n, candidates]`): Not normalised; minus infinity is
            impossible.
        candidate_ids (`torch.LongTensor` of shape `[n, candidates]`, *optional*): The tokens; `None` means all.
    """

    values: torch.Tensor
    candidate_ids: torch.Tensor | None = None

    def __getitem__(self, positions: slice) -> "Scores":
        return Scores(self.values[positions], None if self.candidate_ids is None else self.candidate_ids[positions])

    def law(self) -> TokenLaw:
        """Return the law that the scores define."""
        return TokenLaw(self.values.softmax(dim=-1, dtype=torch.float32), self.candidate_ids)

    def best(self) -> torch.Tensor:
        """Return the arg-max token of each position, `[n]`."""
        return best_tokens(self.values, self.candidate_ids)

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the scores over the whole vocabulary, `[n, V]`, in float32."""
        values = self.values.float()
        return values if self.candidate_ids is None else scatter_to_vocabulary(values, self.candidate_ids, vocab_size)


@dataclass(frozen=True)
class Prefix:
    """What stands before a position.

    Args:
        token_ids (`torch.LongTensor` of shape `[1, S]`): The sequence up to there, without padding.
        processors (`LogitsProcessorList`): The processors of its request.
    """

    token_ids: torch.Tensor
    processors: LogitsProcessorList


class BlockProcessor:
    """Applies the processors of a call to a block of positions.

    Args:
        processors (`LogitsProcessorList`): Of the call; stateless. Their kinds decide what is done position by
            position and what at once.
        vocab_size (`int`): V.
        tie_margin (`int`): Candidates that are looked at after the k-th, in case they tie with it. The target's law
            needs them; drafts may come from any law, and save the work.
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
        while self._fused_from > 0:
            truncation = Truncation.of(processors[self._fused_from - 1 :], tie_margin)
            if truncation is None:
                break
            self._fused_from, self._truncation = self._fused_from - 1, truncation
        # Stretches of processors that read prefixes, and of those that do not.
        reads_prefix = [kind not in READ_NO_PREFIX for kind in kinds[: self._fused_from]]
        lengths = [len(list(group)) for _, group in groupby(reads_prefix)]
        self._stretches = [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def __call__(
        self,
        logits: torch.Tensor,
        candidate_ids: torch.Tensor | None = None,
        prefixes: Sequence[Prefix | None] = (),
    ) -> Scores:
        """Process the logits of n positions.

        Args:
            logits (`torch.Tensor` of shape `[n, V]` or `[n, candidates]`): Raw; not changed.
            candidate_ids (`torch.LongTensor` of shape `[n, candidates]`, *optional*): Their tokens.
            prefixes (`Sequence[Prefix | None]`): Of each position, if `reads_prefixes`. `None` where plain decoding
                never comes to: what stands after an end is not processed.
        """
        if not self._processors:
            return Scores(logits, candidate_ids)
        for stretch in self._stretches:
            kinds = [type(processor) for processor in self._processors[stretch]]
            if candidate_ids is not None and not all(kind in READ_SCORES_ONLY for kind in kinds):
                logits, candidate_ids = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size), None
            # Processors may write into their argument, and expect float32.
            logits = logits.to(torch.float32, copy=True)
            if kinds[0] in READ_NO_PREFIX:
                logits = self._at_once(logits, stretch)
            else:
                logits = self._one_by_one(logits, stretch, prefixes)
        if self._truncation is None:
            return Scores(logits, candidate_ids)
        truncated = self._truncation(logits)
        if truncated is None:  # more ties, or a flatter law, than the candidates have room for
            logits = logits.to(torch.float32, copy=True)
            return Scores(self._at_once(logits, slice(self._fused_from, None)), candidate_ids)
        if truncated.candidate_ids is None:
            return Scores(truncated.values, candidate_ids)
        if candidate_ids is None:
            return truncated
        return Scores(truncated.values, candidate_ids.gather(-1, truncated.candidate_ids))

    def _at_once(self, scores: torch.Tensor, stretch: slice) -> torch.Tensor:
        no_ids = torch.empty(scores.shape[0], 0, dtype=torch.long, device=scores.device)
        for processor in self._processors[stretch]:
            scores = processor(no_ids, scores)
        return scores

    def _one_by_one(self, scores: torch.Tensor, stretch: slice, prefixes: Sequence[Prefix | None]) -> torch.Tensor:
        for index, prefix in enumerate(prefixes):
            if prefix is None:
                continue
            row = scores[index : index + 1]
            for processor in prefix.processors[stretch]:
                row = processor(prefix.token_ids, row.to(prefix.token_ids.device))
                if row.shape[0] != 1:
                    raise ValueError(
                        f"the logits processor {type(processor).__name__} returned {row.shape[0]} rows for one: in a "
                        "batch each row is processed by itself, so its result must not depend on the row's number"
                    )
            scores[index] = row[0]
        return scores


def _can_fuse(warper: LogitsProcessor) -> bool:
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -torch.inf) == -torch.inf


@dataclass(frozen=True)
class Truncation:
    """Temperature, top-k, top-p and min-p in one go, on the tokens that can survive.

    Args:
        temperature (`float`): Divides the scores.
        top_k (`int`, *optional*): Keep the k best, and those tied with the last of them.
        top_p (`float`, *optional*): Keep the best tokens until their mass reaches p.
        min_p (`float`, *optional*): Keep tokens at least this fraction as likely as the best one.
        tie_margin (`int`): Candidates looked at after the k-th. Without any, ties are broken, and top-p is content
            with the best candidates: that is for drafts, whose law may be any.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    tie_margin: int = TIE_MARGIN

    @classmethod
    def of(cls, warpers: Sequence[LogitsProcessor], tie_margin: int) -> "Truncation | None":
        """Return the truncation that a chain of warpers makes; `None` for other processors, or another order."""
        kinds = [type(warper) for warper in warpers]
        if kinds != [kind for kind in FUSED if kind in kinds] or not all(map(_can_fuse, warpers)):
            return None
        found = dict(zip(kinds, warpers, strict=True))
        values = {
            name: getattr(found[kind], name)
            for kind, name in zip(FUSED, ("temperature", "top_k", "top_p", "min_p"), strict=True)
            if kind in found
        }
        return cls(**values, tie_margin=tie_margin)

    def __call__(self, logits: torch.Tensor) -> Scores | None:
        """Truncate scores `[n, V]`, in any float type; `None` if some survivors may not be among the candidates.

        Without a tie margin the answer is never `None`.
        """
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
            reaches_top_p = self.top_k is not None or is_whole or self.tie_margin == 0 or bool(removed[:, -1].all())
            if not reaches_top_p:
                return None
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
    """Return the processors of a batch as they are for one of its rows without its padding.

    Args:
        processors (`LogitsProcessorList`): Made for the padded batch.
        row, num_rows (`int`): Index in the batch, and its size; several sequences per prompt count.
        left_padding (`int`): Padding in the row's prompt.
        prompt_ids (`torch.LongTensor` of shape `[1, S]`): The prompt without it.
    """
    return LogitsProcessorList(_of_row(processor, row, num_rows, left_padding, prompt_ids) for processor in processors)


def _of_row(
    processor: LogitsProcessor, row: int, num_rows: int, left_padding: int, prompt_ids: torch.Tensor
) -> LogitsProcessor:
    name = type(processor).__name__
    if type(processor) in READ_NO_PREFIX:
        return processor
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    if name in PROMPT_READERS:
        own = copy.copy(processor)
        setattr(own, PROMPT_READERS[name], prompt_ids)
        return own
    if name == "EncoderNoRepeatNGramLogitsProcessor":
        own = copy.copy(processor)
        prompt = row // (num_rows // processor.batch_size)
        own.batch_size, own.generated_ngrams = 1, [processor.generated_ngrams[prompt]]
        return own
    if name == "RepetitionPenaltyLogitsProcessor":
        own = copy.copy(processor)
        if isinstance(own.prompt_ignore_length, torch.Tensor):
            own.prompt_ignore_length = None  # the padding of each row, of which there is none
        return own
    if name in PADDED_LENGTHS and left_padding:
        own = copy.copy(processor)
        for attribute in PADDED_LENGTHS[name]:
            setattr(own, attribute, getattr(own, attribute) - left_padding)
        return own
    return processor
