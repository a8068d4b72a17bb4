"""Schedulers from the papers that are not recommended: baselines for benchmarks, negative controls for tests."""

from dataclasses import dataclass

import numpy as np
import torch

from hf_dspark.scheduling.costs import Load, StepCost
from hf_dspark.scheduling.policies import Policy
from hf_dspark.scheduling.ranking import Ranking


def first_drop(throughput: np.ndarray) -> int:
    """Return the index before the first one that does not exceed its predecessor."""
    rises = throughput[1:] > throughput[:-1]
    return len(rises) if rises.all() else int(rises.argmin())


@dataclass(frozen=True)
class EarlyStopScheduler(Policy):
    """DSpark's Algorithm 1 as printed: admit tokens in descending survival while the predicted throughput rises.

    Optimal when step time is convex in the tokens; on jagged curves it is trapped before the first cliff.
    """

    requires_confidence = True
    cost: StepCost

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        ranking = Ranking.of(confidence, max_lengths)
        return ranking.lengths(first_drop(ranking.throughput(self.cost, load)))


@dataclass(frozen=True)
class GlobalScheduler(Policy):
    """The lengths of greatest predicted throughput, by unconstrained search over this round's confidences.

    Lossless only when the confidence head reads h_k alone: then all c_k are known before any token is drawn.
    DSpark Section 5.2 and Appendix A.
    """

    requires_confidence = True
    cost: StepCost
    accept_bias: bool = False  # let it run on sampled drafts although it biases the output, for experiments

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        return not confidence_reads_tokens

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        ranking = Ranking.of(confidence, max_lengths)
        return ranking.lengths(self._count(ranking, load))

    def _count(self, ranking: Ranking, load: Load) -> int:
        return int(ranking.throughput(self.cost, load).argmax())


@dataclass(frozen=True)
class EliminationScheduler(GlobalScheduler):
    """AdaSpec's confidence prior verifier: drop the least likely token of the full set while throughput rises.

    AdaSpec Algorithm 2. Whether x_k depends on later confidences: lossless only when the head reads h_k alone.
    """

    def _count(self, ranking: Ranking, load: Load) -> int:
        return ranking.num_candidates - first_drop(ranking.throughput(self.cost, load)[::-1])
