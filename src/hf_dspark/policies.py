"""How many tokens of a drafted block to verify.

A policy sees confidences, never drafted tokens: c_k is known before x_k is drawn, so stopping before slot k because
of c_1..c_k leaves the law of x_k untouched, and every policy here is lossless. Knows nothing of models or machines.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Policy(Protocol):
    """Decides the verification length of each request."""

    def plan_verify(self, confidence: torch.Tensor | None, num_drafts: int) -> torch.Tensor:
        """Return the lengths l, `[B]`, 0 <= l <= `num_drafts`.

        Args:
            confidence (`torch.FloatTensor` of shape `[B, γ]`, *optional*): c_k, the conditional acceptances.
            num_drafts (`int`): Draft tokens that exist or may be sent, at most γ.
        """


@dataclass(frozen=True)
class FullBlock:
    """Verify every drafted token."""

    def plan_verify(self, confidence: torch.Tensor | None, num_drafts: int) -> torch.Tensor:
        num_requests = 1 if confidence is None else confidence.shape[0]
        return torch.full((num_requests,), num_drafts, dtype=torch.long)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stop before the first slot whose confidence is below a threshold.

    Args:
        threshold (`float`): In [0, 1]. 0 verifies every token.

    Raises:
        ValueError: If the threshold is outside [0, 1], or the draft has no confidence head.

    DSpark Section 4.3.3.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and 0.0 <= self.threshold <= 1.0):
            raise ValueError(f"assistant_confidence_threshold must lie in [0, 1], got {self.threshold}")

    def plan_verify(self, confidence: torch.Tensor | None, num_drafts: int) -> torch.Tensor:
        if confidence is None:
            raise ValueError(
                "a confidence threshold needs a draft with a confidence head; this one has none "
                "(config.enable_confidence_head is False). Leave assistant_confidence_threshold unset."
            )
        confident = confidence[:, :num_drafts] >= self.threshold
        return confident.long().cumprod(dim=-1).sum(dim=-1).cpu()
