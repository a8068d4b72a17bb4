"""Prompt lookup: what followed the longest earlier match of a sequence's end, and how often such text is right."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MATCHES = (4, 3, 2, 1)  # tokens that must agree; the longest match that is found counts
LONGEST = 24  # up to which a match is measured
# From how many matching tokens on, and how often the next token is then right, before anything was measured.
USUAL = ((1, 0.08), (2, 0.15), (3, 0.25), (4, 0.4), (6, 0.6), (9, 0.8), (17, 0.9))
SHORTEST = [least for least, _ in USUAL]  # match of each kind
PRIOR_TESTS = 4  # that these count for


@dataclass(frozen=True)
class LookupMatch:
    """A continuation that was found in a sequence itself."""

    token_ids: Sequence[int] = ()
    chances: Sequence[float] = ()  # of each, if those before it are right


class MatchAcceptance:
    """How often tokens after a match are right, by its length. Every round tells, also one that proposes none:
    committed tokens are compared with what would have been proposed."""

    def __init__(self) -> None:
        self._kinds = [[PRIOR_TESTS * rate, float(PRIOR_TESTS)] for _, rate in USUAL]  # right ones, and all

    def of(self, length: int) -> float:
        hits, tests = self._kinds[bisect.bisect_right(SHORTEST, length) - 1]
        return hits / tests

    def add(self, length: int, was_right: bool) -> None:
        kind = self._kinds[bisect.bisect_right(SHORTEST, length) - 1]
        kind[:] = kind[0] + was_right, kind[1] + 1


class NgramMatcher:
    """Finds the latest match of the end of one request's tokens, the prompt and earlier turns included."""

    def __init__(self) -> None:
        self._acceptance = MatchAcceptance()  # of this request alone: its draws must not depend on its neighbours
        self._token_ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # after each sequence of tokens, where it stood last
        self._length, self._found = 0, LookupMatch()  # of the coming round

    def find(self, token_ids: torch.Tensor, most: int) -> LookupMatch:
        """Return what followed the longest match of a sequence's end, at most so many tokens."""
        self._read(token_ids[len(self._token_ids) :].tolist())
        self._found, tokens, end = LookupMatch(), self._token_ids, len(self._token_ids)
        keys = (tuple(tokens[-size:]) for size in MATCHES)
        place = next((self._places[key] for key in keys if key in self._places), None)
        if place is None or most < 1:
            return self._found
        length = 1
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        # A text that repeats itself up to its end goes on repeating itself.
        found = list(itertools.islice(itertools.cycle(tokens[place : place + most]), most))
        self._length = length
        self._found = LookupMatch(found, [self._acceptance.of(length + offset) for offset in range(len(found))])
        return self._found

    def _read(self, new_tokens: list[int]) -> None:
        for offset, (token, proposed) in enumerate(zip(new_tokens, self._found.token_ids, strict=False)):
            self._acceptance.add(self._length + offset, token == proposed)
            if token != proposed:
                break
        for token in new_tokens:
            for size in MATCHES:
                if len(self._token_ids) >= size:
                    self._places[tuple(self._token_ids[-size:])] = len(self._token_ids)
            self._token_ids.append(token)
