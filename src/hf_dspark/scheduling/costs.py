"""Price decoding rounds: measured steps per second at each number of verified tokens, and their convex hulls."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from ..files import digest, replace_text

USUAL_GROWTH = 1.5  # where it was not measured
KNOWN_RANGES = 256  # of tokens, that a table remembers


@dataclass(frozen=True)
class Load:
    """The requests of a round, and what else shares the target's forward pass: known before anything is drawn."""

    request_ids: Sequence[int] = (0,)  # stable over the rounds of a request
    context_tokens: int = 0  # cached tokens of all these requests together
    # Tokens that the rest of the engine adds to the forward pass. They count as kept: other requests pay when this
    # forward gets slower.
    other_tokens: int = 0
    # What the slots that each request's last block has left could propose, tokens; empty where none has any.
    tails: Sequence[int] = ()

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.request_ids)

    @property
    def base_tokens(self) -> int:
        """Tokens of the forward pass when no draft is verified."""
        return self.other_tokens + len(self.request_ids)


@dataclass(frozen=True)
class ThroughputTable:
    """SPS: measured steps per second at each number of verified tokens, kept as measured, however jagged.

    Between probes the step *time* is linear, below the first it is the first, beyond the last it grows in proportion
    to the tokens. (SGLang's reader takes the nearest probe at or below instead, so that tokens beyond the last probe
    cost nothing.)

    Args:
        verify_tokens (`Sequence[int]`): B of each probe, strictly increasing, at least 1.
        steps_per_second (`Sequence[float]`): SPS of whole rounds, drafting included; positive.
        drafting (`float`): Seconds of each round that are spent drafting.
        context_seconds (`float`): Seconds that each cached token adds to a round.
        growth (`tuple[float, float]`): Drafting of trees over that of chains: of the draft's best tokens, and of drawn
            ones.
        provenance (`dict`): Where the numbers come from; written along.

    Raises:
        ValueError: If the table is empty, not increasing, or holds a rate that is not a positive number.

    Example:

    ```python
    cost = ThroughputTable((1, 8, 64), (95, 94, 80))  # tokens of a pass, passes per second
    cost.save("out/sps.json")
    cost = ThroughputTable.load("out/sps.json")
    ```

    DSpark Section 3.2.2.
    """

    verify_tokens: Sequence[int]
    steps_per_second: Sequence[float]
    drafting: float = 0.0
    context_seconds: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)
    growth: tuple[float, float] = (USUAL_GROWTH, USUAL_GROWTH)

    def __post_init__(self) -> None:
        tokens, rates = self.verify_tokens, self.steps_per_second
        if len(tokens) == 0 or len(tokens) != len(rates):
            raise ValueError(
                "a throughput table needs as many rates as token counts, at least one: got "
                f"{len(tokens)} token counts and {len(rates)} rates"
            )
        whole = all(isinstance(probe, Integral) and not isinstance(probe, bool) for probe in tokens)
        if not whole or tokens[0] < 1 or any(b <= a for a, b in itertools.pairwise(tokens)):
            raise ValueError(f"verify_tokens must be strictly increasing whole numbers from 1 up, got {list(tokens)}")
        if not (isinstance(self.context_seconds, Real) and 0 <= self.context_seconds < math.inf):
            raise ValueError(f"context_seconds must be a finite number, not negative, got {self.context_seconds!r}")
        bad = [rate for rate in rates if not (isinstance(rate, Real) and math.isfinite(rate) and rate > 0)]
        if bad:
            raise ValueError(f"steps_per_second must be positive numbers, got {bad[0]!r}")
        shortest = 1 / max(rates)
        if not 0.0 <= self.drafting < shortest:
            raise ValueError(f"drafting must be a part of the shortest round, {shortest:.3g} s, got {self.drafting} s")

    @cached_property
    def name(self) -> str:
        """Where the table comes from, if that is known, and a hash of its numbers."""
        numbers = {key: value for key, value in self.to_sglang().items() if key != "provenance"}
        return f"{self.provenance.get('table', 'table')} [{digest(numbers)[:8]}]"

    @cached_property
    def _probes(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.verify_tokens), 1 / np.array(self.steps_per_second)

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], Any]:
        return {}

    def _once(self, of_range: Callable[[int, int], Any], first: int, last: int) -> Any:
        """Return what a method gives for B = first..last; rounds ask for the same few again and again."""
        key = of_range.__name__, first, last
        if key not in self._known:
            if len(self._known) >= KNOWN_RANGES:
                self._known.clear()
            self._known[key] = of_range(first, last)
        return self._known[key]

    def seconds_of(self, verify_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the seconds of rounds over so many tokens, `[n]`, without what the context costs."""
        return self._through(*self._probes, np.asarray(verify_tokens))

    def _through(self, tokens: Sequence[int], seconds: Sequence[float], verify_tokens: np.ndarray) -> np.ndarray:
        slope = self._probes[1][-1] / self._probes[0][-1]
        return np.interp(verify_tokens, tokens, seconds) + slope * np.maximum(verify_tokens - tokens[-1], 0)

    def hull(self, first: int, last: int) -> tuple[np.ndarray, list[int]]:
        """Return the lower convex hull of the seconds at B = first..last, and the offsets from `first` at which it
        bends; the last one may lie after its end.

        Measured step times are jagged: a search that stops at the first drop of throughput is trapped before the first
        cliff. On the hull the throughput of tokens admitted in descending survival is unimodal. It begins at `first`
        and goes on as if the curve had no end: the hull at a B does not depend on `last`.
        """
        return self._once(self._hull, first, last)

    def _hull(self, first: int, last: int) -> tuple[np.ndarray, list[int]]:
        tokens, seconds = self._probes
        # A hull that falls somewhere would price verification below zero. Where a larger B was measured faster, the
        # smaller one could be padded to it.
        lows = np.minimum.accumulate(seconds[::-1])[::-1]
        later, slope = tokens > first, seconds[-1] / tokens[-1]
        tokens, lows = tokens[later], lows[later]
        vertices, heights = [first], [float(min([self.seconds_of([first])[0], *lows[:1]]))]
        while len(tokens) and vertices[-1] <= last:  # to the knot with the least rise; of equals to the last one
            rises = (lows - heights[-1]) / (tokens - vertices[-1])
            best = int(np.flatnonzero(rises == rises.min())[-1])
            if rises[best] >= slope:
                break
            vertices.append(int(tokens[best]))
            heights.append(float(lows[best]))
            tokens, lows = tokens[best + 1 :], lows[best + 1 :]
        hull = self._through(vertices, heights, np.arange(first, last + 1))
        return hull, [vertex - first for vertex in vertices[1:]]

    def context_cost(self, load: Load) -> float:
        """Return the seconds that the cached tokens add to a round."""
        return self.context_seconds * load.context_tokens

    def round_seconds(self, load: Load, num_drafts: int) -> np.ndarray:
        """Return the seconds of a round that drafts and verifies 0..`num_drafts` draft tokens, `[num_drafts + 1]`."""
        first = load.base_tokens
        return self._once(self._seconds, first, first + num_drafts) + self.context_cost(load)

    def _seconds(self, first: int, last: int) -> np.ndarray:
        return self.seconds_of(np.arange(first, last + 1))

    def plain_seconds(self, load: Load) -> float:
        """Return the seconds of a step without drafting: every request gets one token."""
        return float(self.round_seconds(load, 0)[0]) - self.drafting

    def tree_seconds(self, load: Load, num_nodes: int, is_drawn: bool) -> np.ndarray:
        """Return the seconds of a round that grows and verifies trees of 0..`num_nodes` nodes in all,
        `[num_nodes + 1]`. `is_drawn` tells whether nodes are drawn, or the draft's best tokens."""
        return self.round_seconds(load, num_nodes) + (self.growth[is_drawn] - 1) * self.drafting

    def padded(self) -> "ThroughputTable":
        """Return the table of passes that are padded to 2, 4, 8, ... tokens: each costs what its padded size costs."""
        sizes = [2**power for power in range(1, 1 + max(1, (self.verify_tokens[-1] - 1).bit_length()))]
        ranges = [(1, 2), *((size // 2 + 1, size) for size in sizes[1:])]
        rates = [rate for rate in 1 / self.seconds_of(sizes) for _ in range(2)]
        tokens = [count for both in ranges for count in both]
        return replace(self, verify_tokens=tokens, steps_per_second=rates)

    def to_sglang(self) -> dict[str, Any]:
        """Return SGLang's 1-D table; fields that its reader ignores carry the rest."""
        return {
            "sample_batch_tokens": [int(count) for count in self.verify_tokens],
            "sample_steps_per_sec": [float(rate) for rate in self.steps_per_second],
            "max_batch_tokens": int(self.verify_tokens[-1]),
            "draft_seconds": self.drafting,
            "context_seconds": self.context_seconds,
            "growth": list(self.growth),
            "provenance": self.provenance,
        }

    @classmethod
    def from_sglang(cls, table: Mapping[str, Any]) -> "ThroughputTable":
        """Read SGLang's 1-D table.

        Raises:
            ValueError: If a field is missing or breaks the format's rules.
        """
        if not isinstance(table, Mapping):
            raise ValueError(f"a throughput table is a JSON object, got {type(table).__name__}")
        lacking = {"sample_batch_tokens", "sample_steps_per_sec"} - table.keys()
        if lacking:
            additive = " (SGLang's additive form is not read: measure its 1-D one)" if "bias_seconds" in table else ""
            raise ValueError(f"the throughput table lacks {', '.join(sorted(lacking))}{additive}")
        return cls(
            verify_tokens=tuple(table["sample_batch_tokens"]),
            steps_per_second=tuple(table["sample_steps_per_sec"]),
            drafting=table.get("draft_seconds", 0.0),
            context_seconds=table.get("context_seconds", 0.0),
            growth=tuple(table.get("growth", (USUAL_GROWTH, USUAL_GROWTH))),
            provenance=table.get("provenance", {}),
        )

    def save(self, path: str | Path) -> None:
        """Write the table as JSON that SGLang reads, at once or not at all."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(Path(path), json.dumps(self.to_sglang(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ThroughputTable":
        """Read SGLang's 1-D table, what `save` wrote, or a file of [`profile_throughput`].

        Raises:
            ValueError: If the file is none of them, or breaks the rules of the format.
        """
        try:
            table = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        return cls.from_sglang(table)
