"""The three training losses of a draft block, position-weighted, as weighted means.

Torch only: knows nothing of models, anchors or trainers. All terms are in natural-log units.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# DeepSpec adds it to every denominator; kept so that losses and gradients agree with the reference.
DENOMINATOR_EPSILON = 1e-6


@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum and the sum of its weights, kept apart so that means can be pooled over steps and processes."""

    numerator: torch.Tensor
    denominator: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        return self.numerator / (self.denominator + DENOMINATOR_EPSILON)


@dataclass(frozen=True)
class BlockLosses:
    """The terms of DSpark Eq. 12 and what is reported beside them.

    Attributes:
        total (`torch.Tensor`, scalar): The value to differentiate.
        cross_entropy, l1, confidence ([`WeightedSum`]): The terms. `confidence` is `None` without a confidence head.
        acceptance (`torch.FloatTensor` of shape `[..., γ]`): c*_k = 1 - L1/2 of every slot, detached. DSpark Eq. 8.
    """

    total: torch.Tensor
    cross_entropy: WeightedSum
    l1: WeightedSum
    confidence: WeightedSum | None
    acceptance: torch.Tensor


def position_weights(
    supervised: torch.Tensor, position_decay: float | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return w_k = exp(-(k-1)/decay) on supervised slots and 0 elsewhere.

    Args:
        supervised (`torch.BoolTensor` of shape `[..., γ]`): Slots that have a label.
        position_decay (`float`, *optional*): In slots; `None` weighs all slots alike. The paper writes γ, the
            reference implementation uses 4.0.

    Returns:
        `torch.FloatTensor` of shape `[..., γ]`.

    Raises:
        ValueError: If `position_decay` is not positive.

    DSpark Section 3.3.
    """
    if position_decay is None:
        return supervised.to(dtype)
    if position_decay <= 0:
        raise ValueError(f"position_decay must be positive or None, got {position_decay}")
    slots = torch.arange(supervised.shape[-1], device=supervised.device, dtype=dtype)
    return torch.exp(-slots / position_decay) * supervised


def block_losses(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    cross_entropy_weight: float = 0.1,
    l1_weight: float = 0.9,
    confidence_weight: float = 1.0,
    position_decay: float | None = 4.0,
) -> BlockLosses:
    """Return the training objective of a batch of blocks.

    Args:
        draft_logits (`torch.Tensor` of shape `[B, N, γ, V]`): Corrected logits, teacher-forced.
        target_logits (`torch.Tensor` of shape `[B, N, γ, V]`): The target's logits for the same positions.
        labels (`torch.LongTensor` of shape `[B, N, γ]`): The data tokens x*_k.
        supervised (`torch.BoolTensor` of shape `[B, N, γ]`): Slots that count.
        confidence_logits (`torch.Tensor` of shape `[B, N, γ]`, *optional*): Pre-sigmoid c_k.
        cross_entropy_weight, l1_weight, confidence_weight (`float`): The α of each term.
        position_decay (`float`, *optional*): See [`position_weights`].

    Returns:
        [`BlockLosses`]

    DSpark Eq. 9-12.
    """
    weights = position_weights(supervised, position_decay)
    # Only supervised slots enter the vocabulary-sized work.
    draft_log_probs = draft_logits[supervised].float().log_softmax(dim=-1)
    target_probs = target_logits[supervised].float().softmax(dim=-1)
    slot_weights = weights[supervised]
    weight_sum = slot_weights.sum()

    nll = F.nll_loss(draft_log_probs, labels[supervised], reduction="none")
    distance = (draft_log_probs.exp() - target_probs).abs().sum(dim=-1)
    cross_entropy = WeightedSum((slot_weights * nll).sum(), weight_sum)  # Eq. 9
    l1 = WeightedSum((slot_weights * distance).sum(), weight_sum)  # Eq. 10, not halved
    total = cross_entropy_weight * cross_entropy.mean + l1_weight * l1.mean

    slot_acceptance = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)  # Eq. 8
    confidence = None
    if confidence_logits is not None:
        bce = F.binary_cross_entropy_with_logits(
            confidence_logits[supervised].float(), slot_acceptance, reduction="none"
        )
        confidence = WeightedSum((slot_weights * bce).sum(), weight_sum)  # Eq. 11
        total = total + confidence_weight * confidence.mean
    acceptance = torch.zeros_like(weights).masked_scatter(supervised, slot_acceptance)
    return BlockLosses(total, cross_entropy, l1, confidence, acceptance)  # Eq. 12


def expected_tau(acceptance: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """Return 1 + the expected number of accepted tokens, averaged over blocks that have a supervised slot.

    Args:
        acceptance (`torch.FloatTensor` of shape `[..., γ]`): c*_k per slot.
        supervised (`torch.BoolTensor` of shape `[..., γ]`): Contiguous supervised prefixes.

    Returns:
        Scalar `torch.Tensor`, in tokens per round, bonus token included.
    """
    blocks = supervised.any(dim=-1)
    accepted = (acceptance * supervised).cumprod(dim=-1).sum(dim=-1)
    return 1.0 + (accepted * blocks).sum() / blocks.sum().clamp_min(1)
