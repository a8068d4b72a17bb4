"""Schedulers from the papers that are not recommended: baselines for benchmarks, negative controls for tests."""

from dataclasses import dataclass

from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.ranking import Ranking, first_drop
from hf_dspark.scheduling.scheduler import Scheduler


def linear_cost(per_token: float, constant: float, drafting: float) -> ThroughputTable:
    """Return AdaSpec's linear cost for a drafter that needs one pass: seconds per verified token, of an empty pass,
    and of drafting."""
    last = 10**6
    seconds = [constant + drafting + per_token * tokens for tokens in (1, last)]
    return ThroughputTable((1, last), tuple(1 / each for each in seconds), drafting)


@dataclass
class ChainScheduler(Scheduler):
    trees: bool | None = False
    skip: bool = False


class EarlyStopScheduler(ChainScheduler):
    """DSpark's Algorithm 1 as printed: admit tokens in descending survival while the predicted throughput rises.

    Optimal when step time is convex in the tokens; on jagged curves it is trapped before the first cliff.
    """

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return first_drop(ranking.throughput(self.cost, load))


@dataclass
class GlobalScheduler(ChainScheduler):
    """The lengths of greatest predicted throughput, by unconstrained search over this round's confidences.

    Lossless only when the confidence head reads h_k alone: then all c_k are known before any token is drawn.
    DSpark Section 5.2 and Appendix A.
    """

    accept_bias: bool = False  # let it run on sampled drafts although it biases the output, for experiments

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        return not confidence_reads_tokens

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return int(ranking.throughput(self.cost, load).argmax())


class EliminationScheduler(GlobalScheduler):
    """AdaSpec's confidence prior verifier: drop the least likely token of the full set while throughput rises.

    AdaSpec Algorithm 2. Whether x_k is verified depends on later confidences: lossless only when the head reads h_k
    alone.
    """

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        return len(ranking.survivals) - first_drop(ranking.throughput(self.cost, load)[::-1])
