"""Rank the draft tokens of a round as Algorithm 1 admits them.

What decides the order of a token is known before it is drawn: its survival, its position and its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .costs import Load, ThroughputTable


@dataclass(frozen=True)
class Ranking:
    """All draft tokens of a round in the order of admission.

    Descending survival, ties by position, then by request: a tie rule that looked at later slots would not be causal.
    """

    survivals: Sequence[float]  # a_{r,j}, descending, only positive ones, [n]
    slots: np.ndarray  # where each lies: (j - 1) * R + r, [n]
    num_requests: int  # R

    @classmethod
    def of(cls, confidence: torch.Tensor, max_lengths: torch.Tensor) -> "Ranking":
        """Rank the tokens of rows of c_k, `[R, γ]`, of which `max_lengths` `[R]` may be sent."""
        alive = survival(confidence).numpy()
        alive = np.where(np.arange(alive.shape[1]) < max_lengths.numpy()[:, None], alive, 0.0)
        by_position = alive.T.ravel()
        slots = np.argsort(-by_position, kind="stable")[: np.count_nonzero(by_position)]
        return cls(by_position[slots].tolist(), slots, len(alive))

    def kept(self, load: Load) -> np.ndarray:
        """Return the expected tokens of a round with the first 0..n candidates admitted, `[n+1]`."""
        return np.cumsum([load.base_tokens, *self.survivals], dtype=float)

    def throughput(self, cost: ThroughputTable, load: Load) -> np.ndarray:
        """Return Theta, the expected tokens per second with the first 0..n candidates admitted, `[n+1]`."""
        return self.kept(load) / cost.round_seconds(load, len(self.survivals))

    def lengths(self, count: int) -> torch.Tensor:
        """Return the verification lengths that admit the first `count` candidates, `[R]`."""
        requests = self.slots[:count] % self.num_requests
        return torch.from_numpy(np.bincount(requests, minlength=self.num_requests))


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """Return a_k, the probability that the first k draft tokens are all accepted, `[R, γ]` in float64 on the CPU.

    Never rises with k: on a CPU each product is rounded from the one before. DSpark Algorithm 1.
    """
    return confidence.cpu().double().cumprod(dim=-1)


def first_drop(throughput: np.ndarray) -> int:
    """Return the index before the first one that does not exceed its predecessor: Algorithm 1's early stop."""
    rises = throughput[1:] > throughput[:-1]
    return len(rises) if rises.all() else int(rises.argmin())
