"""Whether to draft, and how many tokens of the drafted blocks to verify.

A policy sees confidences, never drafted tokens. It is *causal*, hence lossless, when admitting draft token k depends
only on what was known before x_k was drawn; c_k is, c_{k+1} is not if the confidence head reads x_k. Policies that
are not causal say so in `is_causal` and are refused when drafts are sampled.
"""

import copy
import dataclasses
import itertools
import math
import operator
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files import digest
from .costs import Load, StepCost
from .ranking import Ranking, checked_confidence, early_stop, survival
from .rounds import RoundOutcome
from .tree_plans import MOST_NODES, TreePlan, TreeProspects


class Policy:
    """Decides, round by round, whether to draft and how much to verify. Subclass it, and say what it does otherwise:
    this one drafts always and verifies everything.

    Attributes:
        requires_confidence (`bool`): Whether `plan_verify` needs a draft with a confidence head.
        accept_bias (`bool`): Whether the user lets a policy that is not causal run on sampled drafts, as an
            experiment.
        most_nodes (`int`): Nodes of a request's tree at most; 0 if it never plans trees.

    Example:

    ```python
    class AtMostFour(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            return max_lengths.clamp(max=4)

    draft.decoding = DecodingOptions(policy=AtMostFour())
    ```
    """

    requires_confidence: bool = False
    accept_bias: bool = False
    most_nodes: int = 0

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        """Tell whether sampled drafts keep the target's distribution.

        Args:
            confidence_reads_tokens (`bool`): Whether c_k depends on x_{k-1} (`config.confidence_head_with_markov`).
        """
        return True

    def fresh(self) -> "Policy":
        """Return the same policy without memory of earlier rounds; each `generate()` call works with its own.

        A dataclass is made anew from its fields; any other object is copied as it is.
        """
        return dataclasses.replace(self) if dataclasses.is_dataclass(self) else copy.deepcopy(self)

    def plan_draft(self, load: Load) -> bool:
        """Tell whether to draft at all this round; asked before anything is drawn."""
        return True

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        """Return upper bounds of what `plan_verify` will return, `[R]`: longer blocks need not be drafted.

        Args:
            max_lengths, load: As for `plan_verify`.
        """
        return max_lengths

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        """Return the verification lengths l, `[R]`, 0 <= l <= max_lengths.

        Args:
            confidence (`torch.FloatTensor` of shape `[R, γ]`, *optional*): c_k, the calibrated conditional
                acceptances.
            max_lengths (`torch.LongTensor` of shape `[R]`): Draft tokens that exist or may be sent, at most γ.
            load ([`Load`]): The rows, and what shares their forward pass.
        """
        return max_lengths.clone()

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        """Return how the round's trees are shaped; `None` if chains are drafted, of which `plan_verify` decides.

        Args:
            prospects ([`TreeProspects`]): What to expect of nodes, and how many may be sent.
            load ([`Load`]): As for `plan_verify`.
        """
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""

    def to_dict(self) -> dict[str, Any]:
        """Return its name and arguments as plain JSON data; of a table of costs, its type and a hash."""
        if dataclasses.is_dataclass(self):
            values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.repr}
        else:
            values = {name: value for name, value in vars(self).items() if isinstance(value, (str, int, float))}
        return {"name": type(self).__name__} | {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return value.to_dict()
    return f"{type(value).__name__}[{digest(repr(value))[:8]}]" if isinstance(value, StepCost) else value


@dataclass(frozen=True)
class FullBlock(Policy):
    """Verify every drafted token.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=FullBlock())  # whatever was measured
    ```
    """


@dataclass(frozen=True)
class ConfidenceThreshold(Policy):
    """Stop before the first slot whose confidence is below a threshold.

    Args:
        threshold (`float`): In [0, 1]. 0 verifies every token.
        cumulative (`bool`): Compare the survival (the product of the confidences so far) instead of c_k.

    Raises:
        ValueError: If the threshold is outside [0, 1], or the draft has no confidence head.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.6))
    ```

    DSpark Section 4.3.3.
    """

    requires_confidence = True
    threshold: float
    cumulative: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and 0.0 <= self.threshold <= 1.0):
            raise ValueError(f"assistant_confidence_threshold must lie in [0, 1], got {self.threshold}")

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        confidence = checked_confidence(confidence)
        score = survival(confidence) if self.cumulative else confidence
        run = (score >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)
        return torch.minimum(run.cpu(), max_lengths)


def _require_cost(policy: Policy) -> None:
    cost = policy.cost
    if not isinstance(cost, StepCost):
        got = "None" if cost is None else type(cost).__name__
        cure = "hf_dspark.profile_throughput(target, draft).table, or ThroughputTable.load(file)"
        if isinstance(getattr(cost, "table", None), StepCost):
            cure = "its table"
        raise TypeError(f"{type(policy).__name__} needs the cost of a step on this machine, got {got}: pass {cure}")


# Tokens after the stop survive less than the first one left out. Without a decay, filling goes too far where the curve
# is a noisy straight line. Its exact value matters little (benchmarks/scheduler.py).
FILL_DECAY = 0.7


@dataclass(frozen=True)
class PrefixScheduler(Policy):
    """Algorithm 1 on the lower convex hull of the step time, then the hardware's bucket filled up by rank.

    On the hull the early stop finds the maximum. The measured time at the stop may lie far above the hull. Then
    admission goes on towards the next vertex, where the measured curve touches the hull again, as far as it pays if
    the tokens there survive like the first one left out, less a fixed decay. Both decisions read nothing after that
    token, which makes them causal.

    Args:
        cost ([`StepCost`]): What a round costs on this machine.

    Example:

    ```python
    cost = ThroughputTable((1, 8, 64), (95, 94, 80))  # tokens of a pass, passes per second
    draft.decoding = DecodingOptions(policy=PrefixScheduler(cost))
    ```

    DSpark Algorithm 1, with a causal repair for jagged curves.
    """

    requires_confidence = True
    cost: StepCost = None

    def __post_init__(self) -> None:
        _require_cost(self)

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        ranking = Ranking.of(confidence, max_lengths)
        all_tokens = sum(max_lengths.tolist())
        # The window holds all tokens that could be sent. One that ended after the last possible survivor would not be
        # causal.
        window = self.cost.curve.window(load.base_tokens, load.base_tokens + all_tokens)
        fixed = self.cost.request_seconds(load)
        stop, kept = early_stop(ranking.survivals, load.base_tokens, [seconds + fixed for seconds in window.hull])
        if stop < ranking.num_candidates:
            hoped = ranking.survivals[stop] * FILL_DECAY
            bucket = window.measured[stop : window.next_vertex(stop) + 1].tolist()
            predicted = [(kept + more * hoped) / (seconds + fixed) for more, seconds in enumerate(bucket)]
            stop += predicted.index(max(predicted))
        return ranking.lengths(stop)


@dataclass
class LaggedScheduler(Policy):
    """Capacity by unconstrained search over the confidences of an older round, filled with this round's best tokens.

    The capacity knows nothing of this round's tokens, so the search may be global. Until there is an old enough
    round, [`PrefixScheduler`] decides.

    Args:
        cost ([`StepCost`]): What a round costs on this machine.
        lag (`int`): Age of the confidences in rounds, at least 1.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=LaggedScheduler(cost, lag=2))
    ```

    DSpark Section 5.2.
    """

    requires_confidence = True
    cost: StepCost = None
    lag: int = 2

    def __post_init__(self) -> None:
        _require_cost(self)
        if self.lag < 1:
            raise ValueError(f"lag must be at least 1 round, got {self.lag}: this round's confidences are not causal")
        self._history: deque[Ranking] = deque(maxlen=self.lag)

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        if len(self._history) < self.lag:
            return PrefixScheduler(self.cost).plan_verify(confidence, max_lengths, load)
        old = self._history[0]
        then = dataclasses.replace(load, request_ids=range(old.num_requests))
        searched = int(old.throughput(self.cost, then).argmax())
        capacity = round(searched * load.num_requests / old.num_requests)  # requests may have come or gone
        ranking = Ranking.of(confidence, max_lengths)
        return ranking.lengths(min(capacity, ranking.num_candidates))

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.confidence is not None:
            full = torch.full((outcome.confidence.shape[0],), outcome.confidence.shape[1], device="cpu")
            self._history.append(Ranking.of(outcome.confidence, full))


LOOK_AGAIN_AFTER = 16  # rounds that taught nothing
PRIOR_ACCEPTANCE = 0.8  # expected of each slot of an unknown request
PRIOR_ROUNDS = 3  # how many rounds that expectation counts for
RECENT_ROUNDS = 10  # older rounds fade
PRIOR_TOKENS = 8.0  # of a request, promised and kept, before its first round


@dataclass
class Patience:
    """Counts rounds in a row that taught nothing, being skipped or cut short. After some it is time to look again."""

    rounds: int = 0
    looking: bool = False  # whether the present round is drafted, and not cut short, only to look again

    def look_again(self) -> bool:
        """Count a round, and tell whether it is time."""
        self.looking = self.rounds >= LOOK_AGAIN_AFTER
        self.rounds = 0 if self.looking else self.rounds + 1
        return self.looking


@dataclass
class PolicyOverPolicy(Policy):
    """Leaves part of the decision to another policy, and is as causal as that one."""

    policy: Policy
    cost: StepCost | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.cost is None:
            self.cost = getattr(self.policy, "cost", None)
        if not isinstance(self.cost, StepCost):
            raise ValueError(
                f"{type(self).__name__} needs to know what a round costs, and {self.policy!r} does not: pass "
                "PrefixScheduler(cost), or cost=..."
            )

    @property
    def requires_confidence(self) -> bool:
        return self.policy.requires_confidence

    @property
    def accept_bias(self) -> bool:
        return self.policy.accept_bias

    @property
    def most_nodes(self) -> int:
        return self.policy.most_nodes

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        return self.policy.is_causal(confidence_reads_tokens)

    def fresh(self) -> "PolicyOverPolicy":
        return dataclasses.replace(self, policy=self.policy.fresh())

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return self.policy.limit_lengths(max_lengths, load)

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        return self.policy.plan_tree(prospects, load)


SLO_MODES = ("step", "expected", "running")
_limits_warned_of: set[tuple[float, str]] = set()


@dataclass
class SLOLimit(PolicyOverPolicy):
    """Keep the time per output token (TPOT) of every request under a limit, whatever another policy would verify.

    The limit becomes a cap on the verified tokens before anything is drafted, so a causal policy stays causal. If
    even a round that verifies one draft token breaks the limit, the round is not drafted. If a plain step breaks it,
    too, the limit cannot be met, and a warning says so once. `cost` predicts the seconds of the coming round.

    Args:
        policy ([`Policy`]): Decides under the cap.
        tpot_seconds (`float`): The limit, seconds per token.
        mode (`str`): What has to stay under the limit. `step`: every round, as if each request got one token of it.
            The strictest: it forgoes drafting where a step alone is too slow although drafting would make up for it.
            `expected`: the round over the tokens that whole blocks lately brought a request. Now and then a round is
            not capped, to learn that. `running`: each request's time so far over its tokens so far, this round and
            one token of it included; time saved earlier may be spent. Requests that a plain step cannot bring back
            under the limit do not hold up the others. When all are late, nothing is capped: they catch up fastest at
            the best throughput.
        cost ([`StepCost`], *optional*): What a round costs on this machine; the inner policy's unless given.

    Raises:
        ValueError: If the limit is not positive, the mode is unknown, or there is no cost.

    Example:

    ```python
    policy = SLOLimit(PrefixScheduler(cost), tpot_seconds=0.030, mode="expected")
    draft.decoding = DecodingOptions(policy=policy)
    ```

    AdaSpec Algorithm 3.
    """

    tpot_seconds: float
    mode: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.tpot_seconds) and self.tpot_seconds > 0):
            raise ValueError(f"tpot_seconds must be a positive number, got {self.tpot_seconds}")
        if self.mode not in SLO_MODES:
            raise ValueError(f"mode must be one of {SLO_MODES}, got {self.mode!r}")
        self._spent: dict[int, tuple[float, int]] = {}  # seconds and tokens of each request
        self._block_tokens = math.inf  # that whole blocks lately brought a request
        self._patience = Patience()

    def allowed_seconds(self, load: Load) -> float:
        """Return how long the coming round may take."""
        if self.mode == "step":
            return self.tpot_seconds
        if self.mode == "expected":
            return self.tpot_seconds * self._block_tokens
        spent = (self._spent.get(request, (0.0, 0)) for request in load.request_ids)
        budgets = [self.tpot_seconds * (tokens + 1) - seconds for seconds, tokens in spent]
        return min((budget for budget in budgets if budget >= self.cost.plain_seconds(load)), default=math.inf)

    def plan_draft(self, load: Load) -> bool:
        _forget(self._spent, load)
        allowed = self.allowed_seconds(load)
        if allowed == math.inf and self.mode == "running":
            self._warn_if_out_of_reach(load, "Decoding for throughput.")
        fits = float(self.cost.round_seconds(load, 1)[1]) <= allowed  # drafting is of no use for less than one token
        looking = self.mode == "expected" and self._patience.look_again()
        if fits or looking:
            return self.policy.plan_draft(load)
        self._warn_if_out_of_reach(load, "Decoding without drafting.")
        return False

    def _warn_if_out_of_reach(self, load: Load, consequence: str) -> None:
        limit = (self.tpot_seconds, self.mode)
        if self.cost.plain_seconds(load) > self.tpot_seconds and limit not in _limits_warned_of:
            _limits_warned_of.add(limit)
            warnings.warn(
                f"the limit of {self.tpot_seconds:g} s per token cannot be met (mode {self.mode!r}): a step of "
                f"{load.base_tokens} tokens without drafting takes {self.cost.plain_seconds(load):.3g} s. "
                f"{consequence}",
                stacklevel=4,
            )

    def _capacity(self, all_tokens: int, load: Load) -> int:
        """Return how many draft tokens the coming round may verify."""
        # Up to the first B that is too slow. A larger B that is fast enough again could only be used by looking at
        # tokens after those at the slow ones.
        allowed = math.inf if self._patience.looking else self.allowed_seconds(load)
        fitting = self.cost.round_seconds(load, all_tokens) <= allowed
        return max(0, int(fitting.cumprod().sum()) - 1)

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        limits = self.policy.limit_lengths(max_lengths, load)
        return limits.clamp(max=self._capacity(int(max_lengths.sum()), load))

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        capacity = self._capacity(MOST_NODES * load.num_requests, load)
        plan = self.policy.plan_tree(dataclasses.replace(prospects, most=min(prospects.most, capacity)), load)
        if plan is not None and capacity >= self.policy.most_nodes * load.num_requests:
            self._patience.rounds = 0  # it was not cut short
        return plan

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        lengths = self.policy.plan_verify(confidence, max_lengths, load)
        all_tokens = int(max_lengths.sum())
        capacity = self._capacity(all_tokens, load)
        if capacity >= all_tokens:
            self._patience.rounds = 0
            return lengths
        # The policy's choice among the tokens that the cap leaves is as causal as the policy. Asking how much it chose
        # in all, to give its tokens more of the cap, would not be.
        score = torch.ones(len(lengths), int(max_lengths.max()), device="cpu") if confidence is None else confidence
        return torch.minimum(lengths, Ranking.of(score, max_lengths).lengths(capacity))

    def observe(self, outcome: RoundOutcome) -> None:
        self.policy.observe(outcome)
        tokens = outcome.num_accepted + 1
        for request, new in zip(outcome.request_ids, tokens.tolist(), strict=True):
            seconds, before = self._spent.get(request, (0.0, 0))
            self._spent[request] = (seconds + outcome.seconds, before + new)
        if outcome.drafted and self._patience.rounds == 0:  # a round cut short does not tell what a block brings
            new, old = float(tokens.double().mean()), self._block_tokens
            self._block_tokens = new if math.isinf(old) else 0.9 * old + 0.1 * new


@dataclass(frozen=True)
class Prospect:
    """How far the blocks of one request survive, by its rounds so far."""

    # Mean of a_k, [γ]. A mean of products, as good slots come together: the product of means would promise too little.
    survival: Sequence[float]
    rounds: int = 0  # how many it rests on, beside the prior
    promised: float = PRIOR_TOKENS  # draft tokens: the sum of the survivals of those that were verified
    kept: float = PRIOR_TOKENS  # draft tokens that were accepted

    @property
    def truth(self) -> float:
        """Return how many tokens came for each one that was promised: a text may be harder than it looks."""
        return self.kept / self.promised

    def after(self, survival: Sequence[float], promised: float, kept: float) -> "Prospect":
        """Return what is expected after one more round; survivals of older rounds fade."""
        weight = max(1 / RECENT_ROUNDS, 1 / (PRIOR_ROUNDS + self.rounds + 1))
        pairs = zip(_extended(self.survival, len(survival)), survival, strict=True)
        mean = [(1 - weight) * before + weight * now for before, now in pairs]
        return Prospect(mean, self.rounds + 1, self.promised + promised, self.kept + kept)

    @classmethod
    def unknown(cls, block_size: int) -> "Prospect":
        """Return what is expected of a request before its first round."""
        return cls([PRIOR_ACCEPTANCE**slot for slot in range(1, block_size + 1)])


@dataclass
class AdaptiveDrafting(PolicyOverPolicy):
    """Draft only when it is predicted to pay; another policy decides how much of a drafted block is verified.

    Predicts the survivals of each request's coming block by the mean of its past ones, times how many of the promised
    tokens came so far. It drafts if the best throughput with drafting beats that of a plain step, or if the last
    drafted round would have: good blocks come in runs. Trees gain as much over chains as the other policy expected in
    the last round. A request starts with the benefit of the doubt: a few unlucky rounds prove nothing. Skipped rounds
    give no confidences, so now and then one is drafted to look again.

    Args:
        policy ([`Policy`]): Decides how much to verify.
        cost ([`StepCost`], *optional*): What a round costs on this machine; the inner policy's unless given.

    Raises:
        ValueError: If there is no cost.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=AdaptiveDrafting(PrefixScheduler(cost)))
    ```

    AdaSpec Section 5.1 for a one-pass drafter; the difficulty-aware skip that DSpark Section 7 leaves open.
    """

    requires_confidence = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prospects: dict[int, Prospect] = {}
        self._latest: dict[int, Sequence[float]] = {}  # survivals of the last round; empty if it was skipped
        self._block_size = 0  # the longest block so far
        self._gain = 1.0  # of the last round's trees over chains
        self._patience = Patience()

    def plan_draft(self, load: Load) -> bool:
        _forget(self._prospects, load)
        _forget(self._latest, load)
        expected = {request: prospect.survival for request, prospect in self._prospects.items()}
        if not expected or self._pays(load, expected) or self._pays(load, self._latest):
            self._patience.rounds = 0
            return self.policy.plan_draft(load)
        return self._patience.look_again() and self.policy.plan_draft(load)

    def _pays(self, load: Load, known: dict[int, Sequence[float]]) -> bool:
        if not known:
            return False
        # New requests are expected to be like the others. All verify the same length, as in AdaSpec: a lower bound of
        # what a scheduler gets out of the same tokens.
        truths = [self._prospects[request].truth for request in known]
        columns = zip(*known.values(), strict=True)
        means = [sum(map(operator.mul, truths, column)) / len(truths) for column in columns]
        kept = itertools.accumulate((load.num_requests * mean for mean in means), initial=load.base_tokens)
        seconds = self.cost.round_seconds(load, load.num_requests * len(means))[:: load.num_requests].tolist()
        best = max(map(operator.truediv, kept, seconds))
        return self._gain * best > load.base_tokens / self.cost.plain_seconds(load)

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        plan = self.policy.plan_tree(prospects, load)
        self._gain = 1.0 if plan is None else plan.gain
        return plan

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return self.policy.plan_verify(confidence, max_lengths, load)

    def observe(self, outcome: RoundOutcome) -> None:
        self.policy.observe(outcome)
        self._latest.clear()
        if outcome.confidence is None:
            return
        alive_so_far = [[*itertools.accumulate(row, operator.mul)] for row in outcome.confidence.tolist()]
        self._block_size = max(self._block_size, outcome.confidence.shape[1])
        facts = zip(outcome.request_ids, alive_so_far, _promised(outcome, alive_so_far), strict=True)
        for (request, alive, promised), kept in zip(facts, outcome.num_accepted.tolist(), strict=True):
            before = self._prospects.get(request, Prospect.unknown(self._block_size))
            self._latest[request] = _extended(alive, self._block_size)
            self._prospects[request] = before.after(self._latest[request], promised, kept)


def _promised(outcome: RoundOutcome, survivals: Sequence[Sequence[float]]) -> list[float]:
    """Return how many draft tokens each request was expected to keep, given the survivals of chains, `[R, γ]`."""
    if outcome.trees is not None:
        return [sum(tree.survivals) for tree in outcome.trees]
    return [sum(row[:length]) for row, length in zip(survivals, outcome.lengths.tolist(), strict=True)]


def _extended(survivals: Sequence[float], block_size: int) -> Sequence[float]:
    """Return survivals `[n]` as `[block_size]`: in later slots as expected of an unknown request."""
    later = range(1, block_size - len(survivals) + 1)
    return [*survivals, *(survivals[-1] * PRIOR_ACCEPTANCE**slot for slot in later)]


def _forget(memory: dict[int, Any], load: Load) -> None:
    """Drop the memory of requests that have left."""
    for request in memory.keys() - set(load.request_ids):
        del memory[request]
