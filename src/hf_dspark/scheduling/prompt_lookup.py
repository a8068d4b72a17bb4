"""Prompt lookup: what followed the longest earlier match of a sequence's end, in itself or in earlier answers, and how
often such text is right."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..sampling.noise import CallKeys

MATCHES = (4, 3, 2, 1)  # tokens that must agree; the longest match that is found counts
LONGEST = 24  # up to which a match is measured
# From how many matching tokens on, and how often the next token is then right, before anything was measured.
USUAL = ((1, 0.08), (2, 0.15), (3, 0.25), (4, 0.4), (6, 0.6), (9, 0.8), (17, 0.9))
SHORTEST = [least for least, _ in USUAL]  # match of each kind
PRIOR_TESTS = 4  # that these, or those of other requests, count for
FORGETTING = 0.99  # of the tests of all requests, with each one of a kind
WHOLE = 2**31  # as many tokens as there are
ODD = 0x9E3779B97F4A7C15  # base of polynomials modulo 2^64, whose values are hashes
# Tokens before a place by which an answer is found again, and the base to that power.
CONTEXTS = {size: pow(ODD, size, 2**64) for size in (WHOLE, 16, 8, 4)}


@dataclass(frozen=True)
class LookupMatch:
    """A continuation that was found."""

    token_ids: Sequence[int] = ()
    chances: Sequence[float] = ()  # of each, if those before it are right


class MatchAcceptance:
    """How often tokens after a match are right, by its length. Every round tells, also one that proposes none:
    committed tokens are compared with what would have been proposed. What is known of all requests is where a new one
    begins, and each adds to it."""

    def __init__(self, of_all: "MatchAcceptance | None" = None) -> None:
        rates = [rate for _, rate in USUAL] if of_all is None else [hits / tests for hits, tests in of_all._kinds]
        self._kinds = [[PRIOR_TESTS * rate, float(PRIOR_TESTS)] for rate in rates]  # right ones, and all
        self._of_all = of_all

    def of(self, length: int) -> float:
        hits, tests = self._kinds[bisect.bisect_right(SHORTEST, length) - 1]
        return hits / tests

    def add(self, length: int, was_right: bool) -> None:
        kind = self._kinds[bisect.bisect_right(SHORTEST, length) - 1]
        kept = 1.0 if self._of_all else FORGETTING
        kind[:] = kept * kind[0] + was_right, kept * kind[1] + 1
        if self._of_all is not None:
            self._of_all.add(length, was_right)


class AnswerMemory:
    """The latest answers of a target, which prompt lookup searches, too: an evaluation that is run again, or an epoch
    of RL, says much of what was said before to the same prompt.

    [`attach`] makes one, and `DecodingOptions(answers=...)` takes one. It holds token ids, in this process alone:
    copies and pickles are empty. Who shares one can tell by the time that an answer takes what others were told.

    Args:
        num_tokens (`int`): Tokens that are kept; later answers take the place of the oldest. Each takes 20 bytes at
            most, and a search as long however many are kept.

    Raises:
        ValueError: If there is no room for an answer.
    """

    def __init__(self, num_tokens: int = 2**20) -> None:
        if not (isinstance(num_tokens, int) and 64 <= num_tokens <= 2**30):
            raise ValueError(f"num_tokens must be a whole number from 64 to 2^30, got {num_tokens!r}")
        self.num_tokens, self.new_key = num_tokens, CallKeys(ODD)
        self.clear()

    def __reduce__(self) -> tuple:
        return AnswerMemory, (self.num_tokens,)

    def clear(self) -> None:
        """Drop all answers."""
        self._bits = (2 * self.num_tokens).bit_length()
        # Ids and 1, with 0 between answers; and by a hash of what stands before, where an answer goes on. What was
        # overwritten is told by its tokens.
        self._tokens = np.zeros(self.num_tokens, dtype=np.int32)
        self._places = np.zeros(2**self._bits, dtype=np.int32)
        self._end = 1

    def add(self, token_ids: Sequence[int], hashes: Sequence[int], first: int) -> None:
        """Keep the answer that begins at the `first` of these tokens, `[n]`; hashes are those of the first 0 to n."""
        first = max(first, len(token_ids) - self.num_tokens + LONGEST + 2)
        before = max(0, first - LONGEST)
        if self._end + len(token_ids) - before >= self.num_tokens:
            self._end = 1
        start, self._end = self._end, self._end + len(token_ids) - before + 1
        self._tokens[start : self._end] = [*(token + 1 for token in token_ids[before:]), 0]
        for end in range(first, len(token_ids)):
            for _, key in self._keys(hashes, end):
                self._places[key] = start + end - before

    def find(self, token_ids: Sequence[int], hashes: Sequence[int], most: int) -> tuple[int, Sequence[int]]:
        """Return how many tokens at the end of a sequence agree with those before a place, and what follows there."""
        context = token_ids[: -LONGEST - 1 : -1]
        for size, key in self._keys(hashes, len(token_ids)):
            place = int(self._places[key])
            stood = zip(self._tokens[max(0, place - LONGEST) : place][::-1].tolist(), context, strict=False)
            length = sum(itertools.takewhile(bool, (known == token + 1 for known, token in stood)))
            if length >= min(size, len(context)) and (found := self._tokens[place : place + most].tolist()):
                return LONGEST if size == WHOLE else length, [each - 1 for each in itertools.takewhile(bool, found)]
        return 0, ()

    def _keys(self, hashes: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
        """Yield contexts before an end, the longest first, and where each is in the table."""
        for size, power in CONTEXTS.items():
            mixed = (hashes[end] - hashes[max(0, end - size)] * power + size) * ODD % 2**64
            yield size, mixed >> (64 - self._bits)


class NgramMatcher:
    """Finds the latest match of the end of one request's tokens, the prompt and earlier turns included, and one in
    earlier answers."""

    def __init__(
        self, answers: AnswerMemory | None = None, known: Sequence[MatchAcceptance | None] = (None, None)
    ) -> None:
        # Of this request alone, unless the policy has learnt of others: of matches in itself, and in answers.
        self._acceptance, self._of_answers = map(MatchAcceptance, known)
        self._answers = answers
        self._token_ids: list[int] = []
        self._hashes = [0]  # of the first 0, 1, ... tokens
        self._places: dict[tuple[int, ...], int] = {}  # after each sequence of tokens, where it stood last
        # Of the coming round: what each match is judged by, its length, and what followed.
        self._found: list[tuple[MatchAcceptance, int, Sequence[int]]] = []

    def find(self, token_ids: torch.Tensor, most: int) -> LookupMatch:
        """Return what followed the match that is right most often, at most so many tokens."""
        self._read(token_ids[len(self._token_ids) :].tolist())
        self._found, best = [], LookupMatch()
        if most < 1:
            return best
        if self._answers is not None:
            self._found.append((self._of_answers, *self._answers.find(self._token_ids, self._hashes, most)))
        self._found.append((self._acceptance, *self._find_here(most)))
        for acceptance, length, found in self._found:
            chances = [acceptance.of(length + offset) for offset in range(len(found))]
            best = max(best, LookupMatch(found, chances), key=lambda match: [*match.chances[:1]])
        return best

    def remember(self, token_ids: torch.Tensor, first: int) -> None:
        """Add the answer that ended, from its `first` token on, to the earlier ones."""
        self._read(token_ids[len(self._token_ids) :].tolist())
        self._answers.add(self._token_ids[: len(token_ids)], self._hashes, first)

    def _find_here(self, most: int) -> tuple[int, Sequence[int]]:
        tokens, end = self._token_ids, len(self._token_ids)
        keys = (tuple(tokens[-size:]) for size in MATCHES)
        place = next((self._places[key] for key in keys if key in self._places), None)
        if place is None:
            return 0, ()
        length = 1
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        # A text that repeats itself up to its end goes on repeating itself.
        return length, list(itertools.islice(itertools.cycle(tokens[place : place + most]), most))

    def _read(self, new_tokens: list[int]) -> None:
        for acceptance, length, found in self._found:
            for offset, (token, proposed) in enumerate(zip(new_tokens, found, strict=False)):
                acceptance.add(length + offset, token == proposed)
                if token != proposed:
                    break
        for token in new_tokens:
            for size in MATCHES:
                if len(self._token_ids) >= size:
                    self._places[tuple(self._token_ids[-size:])] = len(self._token_ids)
            self._token_ids.append(token)
            if self._answers is not None:
                self._hashes.append((self._hashes[-1] * ODD + token + 1) % 2**64)
