"""Rank the draft tokens of a round as Algorithm 1 admits them, and find its early stop.

What decides the order of a token is known before it is drawn: its survival, its position and its row.
"""

import itertools
import math
import operator
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
    slots: Sequence[int]  # where each lies: (j - 1) * R + r, [n]
    num_requests: int  # R

    @classmethod
    def of(cls, confidence: torch.Tensor | None, max_lengths: torch.Tensor) -> "Ranking":
        """Rank the tokens of rows of c_k, `[R, γ]`, of which `max_lengths` `[R]` may be sent."""
        confidence = checked_confidence(confidence)
        if len(confidence) == 1:  # after a pass of the target, one call of PyTorch takes as long as all of this
            sent = confidence[0].tolist()[: int(max_lengths)]
            survivals = [*itertools.takewhile(bool, itertools.accumulate(sent, operator.mul))]
            return cls(survivals, range(len(survivals)), 1)
        alive = survival(confidence.float()).cpu().numpy()
        alive = np.where(np.arange(alive.shape[1]) < max_lengths.numpy()[:, None], alive, np.float32(0.0))
        # One integer per token, survival above slot. The bits of non-negative floats sort like the floats, and slots
        # count down, so that position-major order breaks ties. A stable sort of floats takes several times as long.
        last = alive.size - 1
        keys = alive.T.ravel().view(np.int32).astype(np.int64) << 32
        keys |= np.arange(last, -1, -1)
        keys.sort()
        keys = keys[::-1]
        survivals = (keys >> 32).astype(np.int32).view(np.float32)
        count = int(np.count_nonzero(survivals))
        return cls(survivals[:count].tolist(), last - (keys[:count] & 0xFFFFFFFF), len(alive))

    @property
    def num_candidates(self) -> int:
        """Tokens that could be admitted, n."""
        return len(self.survivals)

    def throughput(self, cost: ThroughputTable, load: Load) -> np.ndarray:
        """Return Theta, the expected tokens per second with the first 0..n candidates admitted, `[n+1]`."""
        kept = np.cumsum([load.base_tokens, *self.survivals], dtype=float)
        return kept / cost.round_seconds(load, self.num_candidates)

    def lengths(self, count: int) -> torch.Tensor:
        """Return the verification lengths that admit the first `count` candidates, `[R]`."""
        if self.num_requests == 1:
            return torch.tensor([count], device="cpu")
        requests = self.slots[:count] % self.num_requests
        return torch.from_numpy(np.bincount(requests, minlength=self.num_requests))


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """Return a_k, the probability that the first k draft tokens are all accepted, `[R, γ]`. DSpark Algorithm 1.

    Never rises with k, also where a product is computed in parallel and rounds differently at each length.
    """
    return confidence.cumprod(dim=-1).cummin(dim=-1).values


def early_stop(survivals: Sequence[float], base_tokens: int, seconds: Sequence[float]) -> tuple[int, float]:
    """Return how many candidates are admitted until one does not raise the throughput, and the tokens kept then.
    DSpark Algorithm 1.

    Args:
        survivals (`Sequence[float]`): Of the candidates, descending, `[n]`.
        base_tokens (`int`): Tokens of the round without any.
        seconds (`Sequence[float]`): Of a round that verifies 0, 1, ... candidates, at least `[n + 1]`.
    """
    kept, best = float(base_tokens), base_tokens / seconds[0]
    for count, alive in enumerate(survivals):
        throughput = (kept + alive) / seconds[count + 1]
        if throughput <= best:
            return count, kept
        kept, best = kept + alive, throughput
    return len(survivals), kept


def checked_confidence(confidence: torch.Tensor | None) -> torch.Tensor:
    if confidence is None:
        raise ValueError(
            "this policy needs a draft with a confidence head; this one has none (config.enable_confidence_head is "
            "False). Use FullBlock, or leave assistant_confidence_threshold unset."
        )
    values = confidence.flatten().tolist()
    if values and (min(values) < 0.0 or max(values) > 1.0 or math.isnan(sum(values))):
        raise ValueError(f"confidences must lie in [0, 1], got {confidence.tolist()}")
    return confidence
