"""Schedulers from the papers that are not recommended: baselines for benchmarks, negative controls for tests."""

import math
from dataclasses import dataclass

from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.ranking import Ranking, first_drop
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler

SLO_MODES = ("step", "expected", "running")


def linear_cost(per_token: float, constant: float, drafting: float) -> ThroughputTable:
    """Return AdaSpec's linear cost for a drafter that needs one pass: seconds per verified token, of an empty pass,
    and of drafting."""
    last = 10**6
    seconds = [constant + drafting + per_token * tokens for tokens in (1, last)]
    return ThroughputTable((1, last), tuple(1 / each for each in seconds), drafting)


@dataclass
class EarlyStopScheduler(Scheduler):
    """DSpark's Algorithm 1 as printed: admit tokens in descending survival while the predicted throughput rises.

    Optimal when step time is convex in the tokens; on jagged curves it is trapped before the first cliff.
    """

    trees: bool | None = False
    skip: bool = False

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return first_drop(ranking.throughput(self.cost, load))


@dataclass
class GlobalScheduler(Scheduler):
    """The lengths of greatest predicted throughput, by unconstrained search over this round's confidences.

    Lossless only when the confidence head reads h_k alone: then all c_k are known before any token is drawn.
    DSpark Section 5.2 and Appendix A.
    """

    trees: bool | None = False
    skip: bool = False
    accept_bias: bool = False  # let it run on sampled drafts although it biases the output, for experiments

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        return not confidence_reads_tokens

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return int(ranking.throughput(self.cost, load).argmax())


@dataclass
class EliminationScheduler(GlobalScheduler):
    """AdaSpec's confidence prior verifier: drop the least likely token of the full set while throughput rises.

    AdaSpec Algorithm 2. Whether x_k is verified depends on later confidences: lossless only when the head reads h_k
    alone. Its limit of the time per token comes in three modes, by what has to stay below it. `expected`: as
    [`Scheduler`]'s. `step`: every round, as if each request got one token of it. `running`: each request's time so far
    over its tokens so far, this round and one token of it included. Requests that a plain step cannot bring back do
    not hold up the others. When all are late, nothing is capped: they catch up fastest at the best throughput.
    """

    mode: str = "expected"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in SLO_MODES:
            raise ValueError(f"mode must be one of {SLO_MODES}, got {self.mode!r}")
        self._spent: dict[int, tuple[float, int]] = {}  # seconds and tokens of each request

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return ranking.num_candidates - first_drop(ranking.throughput(self.cost, load)[::-1])

    def _meets_limit(self, load: Load) -> bool:
        if self.mode == "expected":
            return super()._meets_limit(load)
        return float(self.cost.round_seconds(load, 1)[1]) <= self.allowed_seconds(load)

    def allowed_seconds(self, load: Load) -> float:
        if self.tpot_seconds is None or self.mode == "expected":
            return super().allowed_seconds(load)
        if self.mode == "step":
            return self.tpot_seconds
        spent = (self._spent.get(request, (0.0, 0)) for request in load.request_ids)
        budgets = [self.tpot_seconds * (tokens + 1) - seconds for seconds, tokens in spent]
        return min((budget for budget in budgets if budget >= self.cost.plain_seconds(load)), default=math.inf)

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(outcome)
        new = (outcome.num_accepted + 1).tolist()
        known = {request: self._spent.get(request, (0.0, 0)) for request in outcome.request_ids}
        self._spent = {
            request: (seconds + outcome.seconds, tokens + more)
            for (request, (seconds, tokens)), more in zip(known.items(), new, strict=True)
        }
