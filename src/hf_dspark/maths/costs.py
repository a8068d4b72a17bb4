"""What a decoding step costs on a machine: measured tables and linear models, read and written as SGLang's JSON.

Every cost splits into a part that depends on the verified tokens B alone and a part that depends on the requests
(their number, their context), so a scheduler evaluates all B of a round at once. Knows nothing of models or
transformers; `profiling` measures.
"""

import bisect
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Load:
    """What is known before a round: the requests, and what else shares the target's forward pass.

    Args:
        request_ids (`Sequence[int]`): One id per request, stable over its rounds.
        context_tokens (`int`): Cached tokens of all these requests together.
        other_tokens (`int`): Tokens that the rest of the engine adds to the forward pass. They count as kept: other
            requests pay when this forward gets slower.
    """

    request_ids: Sequence[int] = (0,)
    context_tokens: int = 0
    other_tokens: int = 0

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.request_ids)

    @property
    def base_tokens(self) -> int:
        """Tokens of the forward pass when no draft is verified."""
        return self.other_tokens + len(self.request_ids)


@dataclass(frozen=True)
class TokenCurve:
    """Seconds against verified tokens B: straight lines between knots.

    Below the first knot the curve is flat, beyond the last one it rises by `slope`.

    Args:
        tokens (`Sequence[int]`): B of the knots, increasing.
        seconds (`Sequence[float]`): At the knots.
        slope (`float`): Seconds per token beyond the last knot.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]
    slope: float

    def at(self, verify_tokens: np.ndarray) -> np.ndarray:
        """Return the seconds at B, `[n]`, for B of shape `[n]`."""
        verify_tokens = np.asarray(verify_tokens)
        inside = np.interp(verify_tokens, self.tokens, self.seconds)
        return inside + self.slope * np.maximum(verify_tokens - self.tokens[-1], 0)


@dataclass(frozen=True)
class CurveWindow:
    """A curve between two B.

    Args:
        measured (`np.ndarray` of shape `[n]`): The curve, seconds.
        hull (`np.ndarray` of shape `[n]`): Its lower convex hull from the first B onwards, as if the curve
            went on for ever: the hull at a B does not depend on where the window ends.
        vertices (`list[int]`): Offsets in the window at which the hull bends; the last one may lie behind the window.
    """

    measured: np.ndarray
    hull: np.ndarray
    vertices: list[int]

    def next_vertex(self, offset: int) -> int:
        """Return the first vertex behind an offset, or the window's last offset if that comes first."""
        index = bisect.bisect_right(self.vertices, offset)
        last = len(self.hull) - 1
        return min(self.vertices[index], last) if index < len(self.vertices) else last


class CostCurve:
    """A [`TokenCurve`] with its lower convex hulls from any first B onwards.

    Measured step times are jagged: a search that stops at the first drop of throughput is trapped before the first
    cliff. On the hull the throughput of tokens admitted in descending survival is unimodal.
    """

    def __init__(self, curve: TokenCurve) -> None:
        self._curve = curve
        # A hull that falls somewhere would price verification below zero: where a larger B was measured faster, the
        # smaller one could be padded to it.
        lows = list(itertools.accumulate(reversed(curve.seconds), min))[::-1]
        self._tokens, self._lows = list(curve.tokens), lows
        count = len(lows)
        self._next, self._rise = [count] * count, [curve.slope] * count
        for index in range(count - 1, -1, -1):
            self._next[index], self._rise[index] = self._bend(self._tokens[index], lows[index], index + 1)
        self._windows: dict[tuple[int, int], CurveWindow] = {}

    def _bend(self, first: int, seconds: float, index: int) -> tuple[int, float]:
        """Return the next vertex of the hull that starts at a point, and the slope towards it.

        A knot on or above the line to its own successor is no vertex. `len(knots)` stands for no vertex at all.
        """
        while index < len(self._lows):
            rise = (self._lows[index] - seconds) / (self._tokens[index] - first)
            if rise < self._rise[index]:
                return index, rise
            index = self._next[index]
        return index, self._curve.slope

    def window(self, first: int, last: int) -> CurveWindow:
        """Return curve and hull at B = first..last."""
        if (first, last) not in self._windows:
            if len(self._windows) >= 256:
                self._windows.clear()
            self._windows[first, last] = self._compute(first, last)
        return self._windows[first, last]

    def _compute(self, first: int, last: int) -> CurveWindow:
        measured = self._curve.at(np.arange(first, last + 1))
        hull, vertices = np.empty_like(measured), []
        index = bisect.bisect_right(self._tokens, first)
        start, seconds = first, min([float(measured[0]), *self._lows[index : index + 1]])
        while start <= last:
            index, rise = self._bend(start, seconds, index)
            stop = self._tokens[index] if index < len(self._tokens) else last + 1
            part = np.arange(min(stop, last + 1) - start)
            hull[start - first : start - first + len(part)] = seconds + rise * part
            start, seconds = stop, seconds + rise * (stop - start)
            vertices.append(stop - first)
            index += 1
        return CurveWindow(measured, hull, vertices)


class StepCost(ABC):
    """Seconds of a decoding round: a part that depends on the verified tokens B alone, plus `request_seconds`."""

    @property
    @abstractmethod
    def token_curve(self) -> TokenCurve:
        """The part that depends on B."""

    @abstractmethod
    def request_seconds(self, load: Load) -> float:
        """Return the part that depends on requests and context, drafting included, in seconds."""

    @abstractmethod
    def draft_seconds(self, load: Load) -> float:
        """Return what a round without drafting saves, in seconds."""

    @cached_property
    def curve(self) -> CostCurve:
        """`token_curve` with its hulls."""
        return CostCurve(self.token_curve)

    def round_seconds(self, load: Load, num_drafts: int) -> np.ndarray:
        """Return the seconds of a round that drafts and verifies 0..`num_drafts` draft tokens, `[num_drafts + 1]`."""
        first = load.base_tokens
        return self.curve.window(first, first + num_drafts).measured + self.request_seconds(load)

    def plain_seconds(self, load: Load) -> float:
        """Return the seconds of a step without drafting: every request gets one token."""
        return float(self.round_seconds(load, 0)[0]) - self.draft_seconds(load)


@dataclass(frozen=True)
class ThroughputTable(StepCost):
    """SPS: measured steps per second at each number of verified tokens, kept as measured, however jagged.

    Between probes the step *time* is linear, below the first it is the first, beyond the last it grows in proportion
    to the tokens. (SGLang's reader takes the nearest probe at or below instead, so that tokens beyond the last probe
    cost nothing.)

    Args:
        verify_tokens (`Sequence[int]`): B of each probe, strictly increasing, at least 1.
        steps_per_second (`Sequence[float]`): SPS of whole rounds, drafting included; positive.
        drafting (`float`): Seconds of each round that are spent drafting.
        context_seconds (`float`): Seconds that each cached token adds to a round.
        provenance (`dict`): Where the numbers come from; written along.

    Raises:
        ValueError: If the table is empty, not increasing, or holds a rate that is not a positive number.

    DSpark Section 3.2.2.
    """

    verify_tokens: Sequence[int]
    steps_per_second: Sequence[float]
    drafting: float = 0.0
    context_seconds: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, rates = self.verify_tokens, self.steps_per_second
        if len(tokens) == 0 or len(tokens) != len(rates):
            raise ValueError(
                "a throughput table needs as many rates as token counts, at least one: got "
                f"{len(tokens)} token counts and {len(rates)} rates"
            )
        _check_probes("verify_tokens", tokens)
        _check_seconds("context_seconds", [self.context_seconds])
        bad = [rate for rate in rates if not (isinstance(rate, Real) and math.isfinite(rate) and rate > 0)]
        if bad:
            raise ValueError(f"steps_per_second must be positive numbers, got {bad[0]!r}")
        shortest = 1 / max(rates)
        if not 0.0 <= self.drafting < shortest:
            raise ValueError(
                f"drafting takes {self.drafting} s, but the shortest whole round takes {shortest:.3g} s: it must be a "
                "part of it"
            )

    @property
    def token_curve(self) -> TokenCurve:
        seconds = [1 / rate for rate in self.steps_per_second]
        return TokenCurve(self.verify_tokens, seconds, seconds[-1] / self.verify_tokens[-1])

    def request_seconds(self, load: Load) -> float:
        return self.context_seconds * load.context_tokens

    def draft_seconds(self, load: Load) -> float:
        return self.drafting

    def to_sglang(self) -> dict[str, Any]:
        """Return SGLang's 1-D table; fields that its reader ignores carry the rest."""
        return {
            "sample_batch_tokens": [int(count) for count in self.verify_tokens],
            "sample_steps_per_sec": [float(rate) for rate in self.steps_per_second],
            "max_batch_tokens": int(self.verify_tokens[-1]),
            "draft_seconds": self.drafting,
            "context_seconds": self.context_seconds,
            "provenance": self.provenance,
        }

    @classmethod
    def from_sglang(cls, table: dict[str, Any]) -> "ThroughputTable":
        """Read SGLang's 1-D table.

        Raises:
            ValueError: If a field is missing or breaks the format's rules.
        """
        tokens, rates = (_required(table, name) for name in ("sample_batch_tokens", "sample_steps_per_sec"))
        most = _required(table, "max_batch_tokens")
        if len(tokens) and most < tokens[-1]:
            raise ValueError(f"max_batch_tokens={most} is smaller than the last probe {tokens[-1]}")
        extras = (table.get("draft_seconds", 0.0), table.get("context_seconds", 0.0), table.get("provenance", {}))
        return cls(tuple(tokens), tuple(rates), *extras)


@dataclass(frozen=True)
class AdditiveCost(StepCost):
    """SGLang's additive form: step time = bias + alpha(requests) + theta(tokens), linear between probes.

    Beyond the last probes the last slopes go on. (SGLang clamps instead: then a full engine would verify more.)

    Args:
        bias_seconds (`float`): Time of the smallest step.
        requests, request_extra (`Sequence`): Probes of R, and the seconds they add.
        tokens, token_extra (`Sequence`): Probes of B, and the seconds they add.
        drafting (`float`): Seconds of each round that are spent drafting.
        provenance (`dict`): Where the numbers come from.

    Raises:
        ValueError: If a probe list is empty or not increasing, or a time is negative or not a number.
    """

    bias_seconds: float
    requests: Sequence[int]
    request_extra: Sequence[float]
    tokens: Sequence[int]
    token_extra: Sequence[float]
    drafting: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, probes, extra in (
            ("bs_probes", self.requests, self.request_extra),
            ("m_probes", self.tokens, self.token_extra),
        ):
            if len(probes) == 0 or len(probes) != len(extra):
                raise ValueError(f"{name} needs one time per probe, at least one: got {len(probes)} and {len(extra)}")
            _check_probes(name, probes)
        _check_seconds("times", [self.bias_seconds, self.drafting, *self.request_extra, *self.token_extra])
        if self.bias_seconds == 0:
            raise ValueError("bias_seconds must be positive, got 0")

    @property
    def token_curve(self) -> TokenCurve:
        return TokenCurve(self.tokens, self.token_extra, _last_slope(self.tokens, self.token_extra))

    def request_seconds(self, load: Load) -> float:
        curve = TokenCurve(self.requests, self.request_extra, _last_slope(self.requests, self.request_extra))
        return self.bias_seconds + float(curve.at(load.num_requests))

    def draft_seconds(self, load: Load) -> float:
        return self.drafting

    def to_sglang(self) -> dict[str, Any]:
        """Return SGLang's additive form; fields that its reader ignores carry the rest."""
        return {
            "bias_seconds": self.bias_seconds,
            "bs_probes": list(self.requests),
            "alpha_seconds": list(self.request_extra),
            "m_probes": list(self.tokens),
            "theta_seconds": list(self.token_extra),
            "draft_seconds": self.drafting,
            "provenance": self.provenance,
        }

    @classmethod
    def from_sglang(cls, table: dict[str, Any]) -> "AdditiveCost":
        """Read SGLang's additive form."""
        names = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
        return cls(
            *(_required(table, name) for name in names), table.get("draft_seconds", 0.0), table.get("provenance", {})
        )


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward pass: alpha * context tokens + gamma * batch tokens + delta. AdaSpec Eq. 2.

    Args:
        alpha (`float`): Seconds per cached token read.
        gamma (`float`): Seconds per token in the batch.
        delta (`float`): Seconds of the empty pass.
    """

    alpha: float
    gamma: float
    delta: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.alpha, self.gamma, self.delta)):
            raise ValueError(f"cost coefficients must be finite and not negative, got {self}")

    def seconds(self, context_tokens: int, batch_tokens: int) -> float:
        """Return the predicted seconds of a pass."""
        return self.alpha * context_tokens + self.gamma * batch_tokens + self.delta

    @classmethod
    def fit(
        cls, context_tokens: Sequence[int], batch_tokens: Sequence[int], seconds: Sequence[float]
    ) -> tuple["ForwardCost", float]:
        """Fit by least squares under non-negative coefficients.

        Returns:
            [`ForwardCost`], and the share of variance it explains (R squared).

        Raises:
            ValueError: If there are fewer than three measurements.
        """
        if len(seconds) < 3:
            raise ValueError(f"three coefficients need at least three measurements, got {len(seconds)}")
        times = np.asarray(seconds, dtype=float)
        columns = np.stack([np.asarray(context_tokens), np.asarray(batch_tokens), np.ones(len(times))], axis=1)
        # Non-negative least squares over three columns: the best feasible fit over all supports is exact.
        best, best_error = np.zeros(3), float(np.square(times).sum())
        for support in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
            part = np.linalg.lstsq(columns[:, support], times, rcond=None)[0]
            error = float(np.square(columns[:, support] @ part - times).sum())
            if (part >= 0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[support] = part
        spread = float(np.square(times - times.mean()).sum())
        return cls(*best.tolist()), 1.0 - best_error / spread if spread > 0 else 1.0


@dataclass(frozen=True)
class LinearCost(StepCost):
    """AdaSpec's linear cost of draft and target. A multi-token verification reads the context once.

    Args:
        target ([`ForwardCost`]): Of a verification pass over B tokens.
        draft ([`ForwardCost`]): Of a drafting pass; its batch tokens are requests, one block each.
        provenance (`dict`): Where the numbers come from.

    AdaSpec Section 4.1, for a drafter that needs one pass for the whole block.
    """

    target: ForwardCost
    draft: ForwardCost
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def token_curve(self) -> TokenCurve:
        return TokenCurve((1,), (self.target.gamma,), self.target.gamma)

    def request_seconds(self, load: Load) -> float:
        return self.target.seconds(load.context_tokens, 0) + self.draft_seconds(load)

    def draft_seconds(self, load: Load) -> float:
        return self.draft.seconds(load.context_tokens, load.num_requests)

    def to_dict(self) -> dict[str, Any]:
        """Return the coefficients as a JSON object."""
        return {"linear": {"target": asdict(self.target), "draft": asdict(self.draft)}, "provenance": self.provenance}

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "LinearCost":
        """Read what `to_dict` wrote."""
        parts = _required(table, "linear")
        target, draft = (ForwardCost(**_required(parts, name)) for name in ("target", "draft"))
        return cls(target, draft, table.get("provenance", {}))


def save_cost(cost: StepCost, path: str | Path) -> None:
    """Write a cost as JSON: SGLang's forms for tables, ours for [`LinearCost`]."""
    content = cost.to_dict() if isinstance(cost, LinearCost) else cost.to_sglang()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_cost(path: str | Path) -> StepCost:
    """Read a cost: SGLang's additive form (told by `bias_seconds`), its 1-D table, or ours.

    Raises:
        ValueError: If the file is none of them, or breaks the rules of its form.
    """
    try:
        table = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return cost_from_dict(table)


def cost_from_dict(table: dict[str, Any]) -> StepCost:
    """Turn a JSON object into the cost that it holds; see [`load_cost`]."""
    if not isinstance(table, dict):
        raise ValueError(f"a cost table is a JSON object, got {type(table).__name__}")
    if "bias_seconds" in table:
        return AdditiveCost.from_sglang(table)
    if "linear" in table and "sample_batch_tokens" not in table:
        return LinearCost.from_dict(table)
    return ThroughputTable.from_sglang(table)


def _last_slope(probes: Sequence[int], seconds: Sequence[float]) -> float:
    if len(probes) == 1:
        return 0.0
    return max(0.0, (seconds[-1] - seconds[-2]) / (probes[-1] - probes[-2]))


def _check_probes(name: str, probes: Sequence[int]) -> None:
    whole = all(isinstance(probe, Integral) and not isinstance(probe, bool) for probe in probes)
    if not whole or probes[0] < 1 or any(b <= a for a, b in zip(probes, probes[1:], strict=False)):
        raise ValueError(f"{name} must be strictly increasing whole numbers from 1 up, got {list(probes)}")


def _check_seconds(name: str, seconds: Sequence[float]) -> None:
    for value in seconds:
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite numbers, not negative, got {value!r}")


def _required(table: dict[str, Any], name: str) -> Any:
    if not isinstance(table, dict) or name not in table:
        raise ValueError(
            f"the cost table lacks {name!r}; known forms: SGLang's 1-D (sample_batch_tokens, sample_steps_per_sec, "
            "max_batch_tokens), SGLang's additive (bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds), "
            "and ours (linear)"
        )
    return table[name]
