"""Apply the processors of a `generate()` call to many positions at once, each sequence as if alone. Temperature,
top-k, top-p and min-p are computed together on the few tokens that survive."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
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

from ..sampling.distributions import Scores, largest, scatter_to_vocabulary
from ..targets.transformers_api import allowed_tokens
from .reversible import FollowingProcessor, ReversibleProcessor

FUSED = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# Read the scores alone, so a scatter to the vocabulary changes nothing for them.
READ_SCORES_ONLY = (*FUSED, TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper, LogitNormalization)
READ_NO_PREFIX = (*READ_SCORES_ONLY, SuppressTokensLogitsProcessor)
TIE_MARGIN = 32
ROUNDING = 1e-6  # of a sum of probabilities
TINY = 1e-30
TOP_P_CANDIDATES = 1024


class NoTokenError(RuntimeError):
    """No token can be drawn from the target; begins as PyTorch's error in plain decoding does."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        super().__init__(
            "probability tensor contains either `inf`, `nan` or element < 0: logits processors forbid every token, or "
            f"the target's logits are no numbers, in sequence {request_id}. Plain generate() fails here, too"
        )


def require_token(request_id: int, token_id: int) -> None:
    if token_id < 0:
        raise NoTokenError(request_id)


@dataclass(frozen=True)
class Prefix:
    token_ids: torch.Tensor  # `[1, S]`, without padding
    processors: LogitsProcessorList  # of its request
    parent: int | None = None  # of a node of a tree: the position, earlier in the same call, whose child it is


class BlockProcessor:
    """Applies the processors of a call, whose scores follow from a prefix, to a block of positions. Their kinds decide
    what is done position by position and what at once."""

    tie_margin = TIE_MARGIN  # candidates that are looked at after the k-th, in case they tie with it

    def __init__(self, processors: LogitsProcessorList, vocab_size: int) -> None:
        kinds = [type(processor) for processor in processors]
        # Whether any processor looks at the tokens before a position.
        self.reads_prefixes = any(kind not in READ_NO_PREFIX for kind in kinds)
        # Whether some candidates may all be impossible although not all tokens are.
        self.may_forbid_all = any(kind not in READ_SCORES_ONLY for kind in kinds)
        self._processors = processors
        self._vocab_size = vocab_size
        self._fused_from, self._truncation = len(processors), None
        while self._fused_from and (longer := Truncation.of(processors[self._fused_from - 1 :], self.tie_margin)):
            self._fused_from, self._truncation = self._fused_from - 1, longer
        is_at_once = [kind in READ_NO_PREFIX for kind in kinds[: self._fused_from]]
        groups = [(at_once, len(list(group))) for at_once, group in groupby(is_at_once)]
        ends = accumulate(size for _, size in groups)
        # What is done at once, and what position by position.
        self._stretches = [(each, slice(end - size, end)) for end, (each, size) in zip(ends, groups, strict=True)]

    @property
    def settings(self) -> str:
        """Name the processors and their numbers, but for temperatures: a graph takes any."""
        return str([(type(each), type(each) is TemperatureLogitsWarper or vars(each)) for each in self._processors])

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None = None, prefixes: Sequence[Prefix | None] = ()
    ) -> Scores:
        """Process raw logits `[n, V]` or `[n, candidates]`, without changing them. Each position has a prefix if
        `reads_prefixes`; it is `None` where plain decoding never comes to: nothing is processed. Scores of the whole
        vocabulary may have a doubt."""
        if not self._processors:
            return Scores(logits, candidate_ids)
        if self._fused_from > 0:  # processors may write into their argument, and expect float32
            logits = logits.to(torch.float32, copy=True)
        for at_once, stretch in self._stretches:
            processors = self._processors[stretch]
            if candidate_ids is not None and any(type(each) not in READ_SCORES_ONLY for each in processors):
                logits, candidate_ids = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size), None
            logits = _at_once(logits, processors) if at_once else _one_by_one(logits, stretch, prefixes)
        if self._truncation is None:
            return Scores(logits, candidate_ids)
        truncated = self._truncation(logits)
        if candidate_ids is None:
            return truncated
        truncated = truncated.sure()
        if truncated.candidate_ids is not None:
            candidate_ids = candidate_ids.gather(-1, truncated.candidate_ids)
        return Scores(truncated.values, candidate_ids)


class DraftProcessor(BlockProcessor):
    """Processes a draft's logits as those of the target are. Where processors forbid all of a draft's candidates, it
    takes a distribution of their own: any one is valid for drafts, also one that breaks ties."""

    tie_margin = 0

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None = None, prefixes: Sequence[Prefix | None] = ()
    ) -> Scores:
        scores = super().__call__(logits, candidate_ids, prefixes)
        if not self.may_forbid_all or not bool((dead := _have_no_distribution(scores.values)).any()):
            return scores
        dead &= ~_have_no_distribution(logits)  # by the processors' fault, not the draft's
        if candidate_ids is not None:
            logits = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size)
        scores = super().__call__(logits.masked_fill(dead, 0.0), None, prefixes)
        # Or they forbid every token: the target will say so, if plain decoding comes here.
        values = scores.values.masked_fill(dead & _have_no_distribution(scores.values), 0.0)
        return Scores(values, scores.candidate_ids)


def _have_no_distribution(scores: torch.Tensor) -> torch.Tensor:
    """Tell which rows have no possible token, or one that is NaN or infinite, `[n, 1]`."""
    return ~scores.amax(dim=-1, keepdim=True).isfinite()


def _at_once(scores: torch.Tensor, processors: Sequence[LogitsProcessor]) -> torch.Tensor:
    no_ids = torch.empty(scores.shape[0], 0, dtype=torch.long, device=scores.device)
    for processor in processors:
        scores = processor(no_ids, scores)
    return scores


def _one_by_one(scores: torch.Tensor, stretch: slice, prefixes: Sequence[Prefix | None]) -> torch.Tensor:
    unreachable = set()  # nodes whose token their parent's processors forbid, and those below
    for index, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        # Where prompts are embeddings, the prefix of a root has no tokens.
        if (parent := prefix.parent) is not None:
            token = int(prefix.token_ids[0, -1])
            # Where all are forbidden, plain decoding takes the first best one.
            is_forbidden = bool(scores[parent, token] == -torch.inf) and token != int(scores[parent].argmax())
            if is_forbidden or parent in unreachable:
                unreachable.add(index)
                continue
        row = scores[index : index + 1]
        for processor in prefix.processors[stretch]:
            row = processor(prefix.token_ids, row.to(prefix.token_ids.device))
        scores[index] = row[0]
    return scores


@dataclass(frozen=True)
class Truncation:
    """Temperature, top-k, top-p and min-p in one go, on the tokens that can survive. Without a tie margin, ties are
    broken, and top-p is content with the best candidates: that is for drafts, whose distribution may be any."""

    temperature: float = 1.0
    top_k: int | None = None  # keeps those tied with the last one, too
    top_p: float | None = None
    min_p: float | None = None
    tie_margin: int = TIE_MARGIN
    warpers: Sequence[LogitsProcessor] = ()  # the same, one after the other

    @classmethod
    def of(cls, warpers: Sequence[LogitsProcessor], tie_margin: int) -> "Truncation | None":
        """Return the truncation that a chain of warpers makes; `None` for other processors, or another order."""
        kinds = [type(warper) for warper in warpers]
        usual = {"min_tokens_to_keep": 1, "filter_value": -torch.inf}
        is_usual = all(getattr(warper, name, each) == each for warper in warpers for name, each in usual.items())
        if kinds != [kind for kind in FUSED if kind in kinds] or not is_usual:
            return None
        values = {FUSED[kind]: getattr(warper, FUSED[kind]) for kind, warper in zip(kinds, warpers, strict=True)}
        return cls(**values, tie_margin=tie_margin, warpers=warpers)

    def __call__(self, logits: torch.Tensor) -> Scores:
        """Truncate scores `[n, V]`, in any float type. With a tie margin there may be a doubt: whether some survivors
        are not among the candidates, or what is removed at the edge of top-p."""
        if self.top_k is None and self.top_p is None:
            scores = logits.float() / self.temperature
            return Scores(scores if self.min_p is None else self._above_min_p(scores))
        size = logits.shape[-1]
        wanted = TOP_P_CANDIDATES if self.top_k is None else self.top_k + self.tie_margin
        best, candidate_ids = largest(logits, min(size, wanted))
        scores = best.float() / self.temperature
        is_whole, has_more, unsure, removed = scores.shape[-1] == size, None, None, None
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last_kept = scores[:, self.top_k - 1, None]
            if not is_whole and self.tie_margin:
                has_more = scores[:, -1] >= last_kept[:, 0]
            scores = scores.masked_fill(scores < last_kept, -torch.inf)
        if self.top_p is not None:
            probs = scores.softmax(dim=-1)
            if self.top_k is None and not is_whole:
                probs = (scores - (logits.float() / self.temperature).logsumexp(dim=-1, keepdim=True)).exp()
            better = probs.cumsum(dim=-1) - probs  # the mass of the tokens before each one
            removed = better >= max(self.top_p, TINY)  # but the first one
            if self.tie_margin:
                if self.top_k is None and not is_whole:
                    # The candidates do not reach p, or what ties at the edge goes on after them.
                    kept = scores.masked_fill(better >= self.top_p + ROUNDING, torch.inf)
                    has_more = scores[:, -1] >= kept.amin(dim=-1)
                ties = (removed[:, 1:] != removed[:, :-1]) & (scores[:, 1:] == scores[:, :-1])
                unsure = (ties | ((better[:, 1:] - self.top_p).abs() < ROUNDING)).any(dim=-1)
        truncated = self._without(removed, scores, candidate_ids)
        if has_more is None and unsure is None:
            return truncated
        doubt = unsure if has_more is None else has_more if unsure is None else has_more | unsure

        def settle() -> Scores:
            """Let transformers decide where more ties, or a flatter distribution, than the candidates have room for;
            and what top-p removes in the rows where equal scores or rounding do: it sorts the whole vocabulary, and
            which of equal scores are removed is up to that sort."""
            if has_more is not None and has_more.any():
                return Scores(_at_once(logits.to(torch.float32, copy=True), self.warpers))
            ids = candidate_ids[unsure]
            if self.top_k is None:
                whole = logits[unsure].float() / self.temperature
            else:
                whole = scatter_to_vocabulary(scores[unsure], ids, size)
            removed[unsure] = TopPLogitsWarper(self.top_p)(None, whole).gather(-1, ids) == -torch.inf
            return self._without(removed, scores, candidate_ids)

        return replace(truncated, doubt=doubt.any(), settle=settle)

    def _without(self, removed: torch.Tensor | None, scores: torch.Tensor, candidate_ids: torch.Tensor) -> Scores:
        scores = scores if removed is None else scores.masked_fill(removed, -torch.inf)
        return Scores(scores if self.min_p is None else self._above_min_p(scores), candidate_ids)

    def _above_min_p(self, scores: torch.Tensor) -> torch.Tensor:
        probs = scores.softmax(dim=-1)
        return scores.masked_fill(probs < self.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)


def is_built_in(processor: LogitsProcessor) -> bool:
    """Tell whether transformers' authors wrote a processor; a user's subclass may do anything."""
    return type(processor).__module__.startswith("transformers.")


def processors_of_row(
    processors: LogitsProcessorList, input_ids: torch.Tensor, row: int, prompt_ids: torch.Tensor
) -> LogitsProcessorList:
    """Return the processors of a padded batch `[B, S]` as they are for one of its rows, of which `prompt_ids` `[1, n]`
    have no padding. Several sequences per prompt count as rows. All are shown the padding, as in plain decoding."""
    columns = input_ids[row : row + 1]
    left_padding = columns.shape[1] - prompt_ids.shape[1]
    row_processors = LogitsProcessorList()
    for own in processors:
        kind = type(own)
        if isinstance(own, ReversibleProcessor):  # reads no prompt
            row_processors.append(FollowingProcessor(own.fork(row), prompt_ids.shape[1]))
            continue
        if isinstance(own, PrefixConstrainedLogitsProcessor):
            own = PrefixConstrainedLogitsProcessor(allowed_tokens(own, row), num_beams=1)
        elif kind is EncoderRepetitionPenaltyLogitsProcessor:
            prompt = row // max(1, len(input_ids) // len(own.encoder_input_ids))
            own = _changed(own, encoder_input_ids=own.encoder_input_ids[prompt : prompt + 1])
        elif kind is EncoderNoRepeatNGramLogitsProcessor:
            prompt = row // (len(input_ids) // own.batch_size)
            own = _changed(own, batch_size=1, generated_ngrams=[own.generated_ngrams[prompt]])
        elif isinstance(ignored := getattr(own, "prompt_ignore_length", None), torch.Tensor) and is_built_in(own):
            own = _changed(own, prompt_ignore_length=ignored[row : row + 1])  # the padding of each row
        if left_padding:
            own = functools.partial(_with_padding, own, columns, prompt_ids.shape[1])
        row_processors.append(own)
    return row_processors


def _with_padding(
    processor: LogitsProcessor, columns: torch.Tensor, prompt_length: int, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Show a processor the columns of a padded prompt, `[1, S]`, in place of its tokens, as plain decoding does."""
    return processor(torch.cat([columns, ids[:, prompt_length:]], dim=1), scores)


def _changed(processor: LogitsProcessor, **attributes: Any) -> LogitsProcessor:
    own = copy.copy(processor)
    own.__dict__ |= attributes
    return own
