"""What a decoding step costs on a machine: measured tables and linear models, read and written as SGLang's JSON.

Every cost splits into a part that depends on the verified tokens B alone and a part that depends on the requests
(their number, their context), so a scheduler evaluates all B of a round at once. Knows nothing of models or
transformers; `profiling` measures.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch


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


class StepCost(ABC):
    """Seconds of a decoding round as `request_seconds(load) + token_seconds(B)`."""

    @abstractmethod
    def token_seconds(self, verify_tokens: torch.Tensor) -> torch.Tensor:
        """Return the part that depends on the verified tokens B.

        Args:
            verify_tokens (`torch.LongTensor` of shape `[n]`): B, at least 1.

        Returns:
            `torch.DoubleTensor` of shape `[n]`, seconds.
        """

    @abstractmethod
    def request_seconds(self, load: Load) -> float:
        """Return the part that depends on requests and context, drafting included, in seconds."""

    @abstractmethod
    def draft_seconds(self, load: Load) -> float:
        """Return the share of `request_seconds` that a round without drafting saves, in seconds."""

    def round_seconds(self, load: Load, num_drafts: int) -> torch.Tensor:
        """Return the seconds of a round that drafts and verifies 0..`num_drafts` draft tokens, `[num_drafts + 1]`."""
        first = load.base_tokens
        return self.curve.measured(first, first + num_drafts) + self.request_seconds(load)

    def plain_seconds(self, load: Load) -> float:
        """Return the seconds of a step without drafting: every request gets one token."""
        return float(self.round_seconds(load, 0)) - self.draft_seconds(load)

    @cached_property
    def curve(self) -> "CostCurve":
        """`token_seconds` at every B, and its lower convex hulls; `request_seconds` shifts all of it."""
        return CostCurve(self)


class CostCurve:
    """A cost at every B, evaluated once, with the lower convex hulls from any first B onwards.

    Measured step times are jagged: a search that stops at the first drop of throughput is trapped before the first
    cliff. On the hull the throughput of tokens admitted in descending survival is unimodal.

    Args:
        cost ([`StepCost`]): The cost.
        capacity (`int`): Largest B to begin with; grows as needed.
    """

    def __init__(self, cost: StepCost, capacity: int = 256) -> None:
        self._cost = cost
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        tokens = torch.arange(capacity + 1)
        self._measured = self._cost.token_seconds(tokens.clamp_min(1))
        # A hull that falls somewhere would price verification below zero: where a larger B was measured faster, the
        # smaller one could be padded to it.
        self._seconds = self._measured.flip(0).cummin(0).values.flip(0).tolist()
        self._next = [capacity] * (capacity + 1)
        # From the right: _next[b] is the vertex behind b on the hull of b..capacity. A vertex that lies on or above
        # the line to its own successor is skipped, so each is skipped at most once.
        for first in range(capacity - 1, 0, -1):
            vertex = first + 1
            while vertex < capacity:
                behind = self._next[vertex]
                rise = (self._seconds[behind] - self._seconds[first]) / (behind - first)
                if self._seconds[vertex] < self._seconds[first] + rise * (vertex - first) * (1 - 1e-12):
                    break
                vertex = behind
            self._next[first] = vertex
        self._hulls = lru_cache(maxsize=256)(self._hull)

    def _reach(self, last: int) -> None:
        if last >= len(self._next) - 1:
            self._grow(2 * last)

    def next_vertex(self, verify_tokens: int) -> int:
        """Return the first vertex behind B on the hull that starts at B."""
        self._reach(verify_tokens)
        return self._next[verify_tokens]

    def measured(self, first: int, last: int) -> torch.Tensor:
        """Return `token_seconds` at B = first..last, `[last - first + 1]`."""
        self._reach(last)
        return self._measured[first : last + 1]

    def hull(self, first: int, last: int) -> torch.Tensor:
        """Return the lower convex hull that starts at `first`, at B = first..last, `[last - first + 1]` seconds."""
        self._reach(last)
        return self._hulls(first, last)

    def _hull(self, first: int, last: int) -> torch.Tensor:
        seconds, start = torch.empty(last - first + 1, dtype=torch.double), first
        seconds[0] = self._seconds[first]
        while start < last:
            stop = self._next[start]
            rise = (self._seconds[stop] - self._seconds[start]) / (stop - start)
            part = torch.arange(1, min(stop, last) - start + 1, dtype=torch.double)
            seconds[start + 1 - first : start + 1 - first + len(part)] = self._seconds[start] + rise * part
            start = stop
        return seconds


@dataclass(frozen=True)
class ThroughputTable(StepCost):
    """SPS: measured steps per second at each number of verified tokens, kept as measured, however jagged.

    Between probes the step *time* is linear, below the first it is the first, beyond the last it grows in proportion
    to the tokens. (SGLang's reader takes the nearest probe at or below instead.)

    Args:
        verify_tokens (`Sequence[int]`): B of each probe, strictly increasing, at least 1.
        steps_per_second (`Sequence[float]`): SPS of whole rounds, drafting included; positive.
        drafting (`float`): Seconds of each round that are spent drafting.
        provenance (`dict`): Where the numbers come from; written along.

    Raises:
        ValueError: If the table is empty, not increasing, or holds a rate that is not a positive number.

    DSpark Section 3.2.2.
    """

    verify_tokens: Sequence[int]
    steps_per_second: Sequence[float]
    drafting: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, rates = self.verify_tokens, self.steps_per_second
        if len(tokens) == 0 or len(tokens) != len(rates):
            raise ValueError(
                "a throughput table needs as many rates as token counts, at least one: got "
                f"{len(tokens)} token counts and {len(rates)} rates"
            )
        _check_probes("verify_tokens", tokens)
        bad = [rate for rate in rates if not (math.isfinite(rate) and rate > 0)]
        if bad:
            raise ValueError(f"steps_per_second must be positive numbers, got {bad[0]}")
        shortest = 1 / max(rates)
        if not 0.0 <= self.drafting < shortest:
            raise ValueError(
                f"drafting takes {self.drafting} s, but the shortest whole round takes {shortest:.3g} s: it must be a "
                "part of it"
            )

    @cached_property
    def _curve(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(list(self.verify_tokens)), 1 / torch.tensor(
            list(self.steps_per_second), dtype=torch.double
        )

    def token_seconds(self, verify_tokens: torch.Tensor) -> torch.Tensor:
        probes, seconds = self._curve
        inside = interpolate(probes, seconds, verify_tokens)
        return torch.where(verify_tokens > probes[-1], seconds[-1] * verify_tokens / probes[-1], inside)

    def request_seconds(self, load: Load) -> float:
        return 0.0

    def draft_seconds(self, load: Load) -> float:
        return self.drafting

    def to_sglang(self) -> dict[str, Any]:
        """Return SGLang's 1-D table; fields that its reader ignores carry the rest."""
        return {
            "sample_batch_tokens": list(self.verify_tokens),
            "sample_steps_per_sec": list(self.steps_per_second),
            "max_batch_tokens": self.verify_tokens[-1],
            "draft_seconds": self.drafting,
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
        return cls(tuple(tokens), tuple(rates), table.get("draft_seconds", 0.0), table.get("provenance", {}))


@dataclass(frozen=True)
class AdditiveCost(StepCost):
    """SGLang's additive form: step time = bias + alpha(requests) + theta(tokens), linear between probes, clamped.

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
        times = [self.bias_seconds, self.drafting, *self.request_extra, *self.token_extra]
        if not all(math.isfinite(time) and time >= 0 for time in times) or self.bias_seconds <= 0:
            raise ValueError("times must be finite and not negative, and bias_seconds positive")

    def token_seconds(self, verify_tokens: torch.Tensor) -> torch.Tensor:
        extra = torch.tensor(list(self.token_extra), dtype=torch.double)
        return interpolate(torch.tensor(list(self.tokens)), extra, verify_tokens)

    def request_seconds(self, load: Load) -> float:
        extra = torch.tensor(list(self.request_extra), dtype=torch.double)
        requests = torch.tensor([load.num_requests])
        return self.bias_seconds + float(interpolate(torch.tensor(list(self.requests)), extra, requests))

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
        times = torch.tensor(list(seconds), dtype=torch.double)
        columns = torch.stack(
            [
                torch.tensor(list(context_tokens)).double(),
                torch.tensor(list(batch_tokens)).double(),
                torch.ones_like(times),
            ],
            dim=1,
        )
        # Non-negative least squares over three columns: the best feasible fit over all supports is exact.
        best, best_error = torch.zeros(3, dtype=torch.double), float(times.square().sum())
        for support in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
            part = torch.linalg.lstsq(columns[:, support], times[:, None], driver="gelsd").solution[:, 0]
            error = float((columns[:, support] @ part - times).square().sum())
            if bool((part >= 0).all()) and error < best_error:
                best, best_error = torch.zeros(3, dtype=torch.double), error
                best[support] = part
        spread = float((times - times.mean()).square().sum())
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

    def token_seconds(self, verify_tokens: torch.Tensor) -> torch.Tensor:
        return self.target.gamma * verify_tokens.double()

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
    if "bias_seconds" in table:
        return AdditiveCost.from_sglang(table)
    if "linear" in table and "sample_batch_tokens" not in table:
        return LinearCost.from_dict(table)
    return ThroughputTable.from_sglang(table)


def interpolate(probes: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return values linear between probes and constant outside of them.

    Args:
        probes (`torch.LongTensor` of shape `[p]`): Strictly increasing.
        values (`torch.DoubleTensor` of shape `[p]`): At the probes.
        at (`torch.LongTensor` of shape `[n]`): Where to evaluate.
    """
    upper = torch.searchsorted(probes, at).clamp(max=len(probes) - 1)
    lower = (upper - 1).clamp_min(0)
    width = (probes[upper] - probes[lower]).clamp_min(1)
    weight = ((at - probes[lower]).double() / width).clamp(0.0, 1.0)
    return values[lower] + weight * (values[upper] - values[lower])


def _check_probes(name: str, probes: Sequence[int]) -> None:
    whole = all(isinstance(probe, int) and not isinstance(probe, bool) for probe in probes)
    if not whole or probes[0] < 1 or any(b <= a for a, b in zip(probes, probes[1:], strict=False)):
        raise ValueError(f"{name} must be strictly increasing whole numbers from 1 up, got {list(probes)}")


def _required(table: dict[str, Any], name: str) -> Any:
    if not isinstance(table, dict) or name not in table:
        raise ValueError(
            f"the cost table lacks {name!r}; known forms: SGLang's 1-D (sample_batch_tokens, sample_steps_per_sec, "
            "max_batch_tokens), SGLang's additive (bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds), "
            "and ours (linear)"
        )
    return table[name]
