"""Copies: what followed the longest earlier match of a sequence's end, and how often such continuations are right."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

MATCHES = (4, 3, 2, 1)  # tokens that must agree; the longest match that is found counts
LONGEST = 24  # up to which a match is measured
# From how many matching tokens on, and how often the next token is then right, before anything was measured.
USUAL = ((1, 0.08), (2, 0.15), (3, 0.25), (4, 0.4), (6, 0.6), (9, 0.8), (17, 0.9))
SHORTEST = [least for least, _ in USUAL]  # match of each kind
PRIOR_TESTS = 4  # that these count for


@dataclass(frozen=True)
class Copy:
    """A continuation that was found in a sequence itself."""

    token_ids: Sequence[int] = ()
    chances: Sequence[float] = ()  # of each, if those before it are right


@dataclass
class CopyRates:
    """How often copied tokens are right, by the length of the match. Every round tells, also one that copies nothing:
    committed tokens are compared with what would have been copied."""

    tests: list[float] = field(default_factory=lambda: [float(PRIOR_TESTS)] * len(USUAL))
    hits: list[float] = field(default_factory=lambda: [PRIOR_TESTS * rate for _, rate in USUAL])

    def of(self, length: int) -> float:
        kind = self._kind(length)
        return self.hits[kind] / self.tests[kind]

    def add(self, length: int, was_right: bool) -> None:
        kind = self._kind(length)
        self.tests[kind] += 1
        self.hits[kind] += was_right

    def _kind(self, length: int) -> int:
        return bisect.bisect_right(SHORTEST, length) - 1


class CopyFinder:
    """Finds what to copy in one request's tokens, the prompt and earlier turns included."""

    def __init__(self) -> None:
        self._rates = CopyRates()  # of this request alone: what it draws must not depend on its neighbours
        self._token_ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # after each sequence of tokens, where it stood last
        self._length, self._copied = 0, Copy()  # of the match of the coming round, and what follows it

    def find(self, token_ids: torch.Tensor, most: int) -> Copy:
        """Return what followed the longest match of a sequence's end, at most so many tokens."""
        self._read(token_ids[len(self._token_ids) :].tolist())
        tokens, end = self._token_ids, len(self._token_ids)
        place = next((self._places[key] for key in map(self._key, MATCHES) if key in self._places), None)
        if place is None or most < 1:
            self._length, self._copied = 0, Copy()
            return self._copied
        length = 1
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        # A text that repeats itself up to its end goes on repeating itself.
        found = list(itertools.islice(itertools.cycle(tokens[place : place + most]), most))
        self._length = length
        self._copied = Copy(found, [self._rates.of(length + offset) for offset in range(len(found))])
        return self._copied

    def _key(self, size: int) -> tuple[int, ...]:
        return tuple(self._token_ids[-size:])

    def _read(self, new_tokens: list[int]) -> None:
        for offset, (token, copied) in enumerate(zip(new_tokens, self._copied.token_ids, strict=False)):
            self._rates.add(self._length + offset, token == copied)
            if token != copied:
                break
        for token in new_tokens:
            for size in MATCHES:
                if len(self._token_ids) >= size:
                    self._places[self._key(size)] = len(self._token_ids)
            self._token_ids.append(token)
