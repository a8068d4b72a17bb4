"""The tokens of a round in the order in which Algorithm 1 admits them, and where its early stop is.

What decides the order of a token is known before it is drawn: its survival, its position and its row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .costs import Load, StepCost


@dataclass(frozen=True)
class Ranking:
    """All draft tokens of a round in the order of admission.

    Descending survival, ties by position, then by request: a tie rule that looked at later slots would not be causal.
    """

    survivals: np.ndarray  # a_{r,j}, descending, only positive ones, [n]
    slots: np.ndarray  # where each lies: (j - 1) * R + r, [n]
    num_requests: int  # R

    @classmethod
    def of(cls, confidence: torch.Tensor | None, max_lengths: torch.Tensor) -> "Ranking":
        """Rank the tokens of rows of c_k, `[R, γ]`, of which `max_lengths` `[R]` may be sent."""
        alive = survival(checked_confidence(confidence).float()).cpu().numpy()
        if len(alive) == 1:
            count = int(np.count_nonzero(alive[0, : int(max_lengths)]))
            return cls(alive[0, :count], np.arange(count), 1)
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
        return cls(survivals[:count], last - (keys[:count] & 0xFFFFFFFF), len(alive))

    @property
    def num_candidates(self) -> int:
        """Tokens that could be admitted, n."""
        return len(self.survivals)

    def kept_tokens(self, load: Load) -> np.ndarray:
        """Return tau, the expected tokens of the round, with the first 0..n candidates admitted, `[n+1]`."""
        kept = np.empty(self.num_candidates + 1)
        kept[0] = load.base_tokens
        np.cumsum(self.survivals, dtype=float, out=kept[1:])
        kept[1:] += load.base_tokens
        return kept

    def throughput(self, cost: StepCost, load: Load) -> np.ndarray:
        """Return Theta, the expected tokens per second with the first 0..n candidates admitted, `[n+1]`."""
        return self.kept_tokens(load) / cost.round_seconds(load, self.num_candidates)

    def lengths(self, count: int) -> torch.Tensor:
        """Return the verification lengths that admit the first `count` candidates, `[R]`."""
        requests = self.slots[:count] % self.num_requests
        return torch.from_numpy(np.bincount(requests, minlength=self.num_requests))


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """Return a_k, the probability that the first k draft tokens are all accepted, `[R, γ]`. DSpark Algorithm 1.

    Never rises with k, also where a product is computed in parallel and rounds differently at each length.
    """
    return confidence.cumprod(dim=-1).cummin(dim=-1).values


def first_drop(throughput: np.ndarray) -> int:
    """Return the index before the first one that does not exceed its predecessor: Algorithm 1's early stop."""
    rises = throughput[1:] > throughput[:-1]
    return len(rises) if rises.all() else int(rises.argmin())


def checked_confidence(confidence: torch.Tensor | None) -> torch.Tensor:
    if confidence is None:
        raise ValueError(
            "this policy needs a draft with a confidence head; this one has none (config.enable_confidence_head is "
            "False). Use FullBlock, or leave assistant_confidence_threshold unset."
        )
    least, most = confidence.aminmax() if confidence.numel() else (0.0, 0.0)
    if not (least >= 0.0 and most <= 1.0):  # NaN fails both
        raise ValueError(f"confidences must lie in [0, 1], got {confidence.tolist()}")
    return confidence
