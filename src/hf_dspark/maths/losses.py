"""The training losses of draft blocks, position-weighted, as weighted means.

The vocabulary-sized part runs in chunks of slots, and its gradient is taken in the same go: of the logits of all slots
only one chunk exists at a time, and none is computed twice. Torch only: knows nothing of models, anchors or trainers.
All terms are in natural-log units.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

# DeepSpec adds it to every denominator; kept so that losses and gradients agree with the reference.
DENOMINATOR_EPSILON = 1e-6
# Logits of one chunk: 32 MiB in float32. Half of it makes the matrix products 7 % slower, more wins nothing.
CHUNK_ELEMENTS = 2**23
# Fewer rows than this make matrix products inefficient, on accelerators above all.
MINIMUM_CHUNK = {"cpu": 32, "cuda": 512}


@dataclass(frozen=True)
class LossWeights:
    """The α of each loss and the decay over the block.

    Args:
        cross_entropy (`float`): Of the cross-entropy to the data token. DSpark Eq. 9.
        l1 (`float`): Of the L1 distance to the target's law. DSpark Eq. 10.
        confidence (`float`): Of the confidence head's binary cross-entropy. DSpark Eq. 11.
        soft_cross_entropy (`float`): Of the cross-entropy to the target's law, which is what Eagle3 trains on.
        position_decay (`float`, *optional*): See [`position_weights`].

    Raises:
        ValueError: If a weight is negative, or nothing would be trained.

    DSpark Eq. 12.
    """

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    soft_cross_entropy: float = 0.0
    position_decay: float | None = 4.0

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "l1", "confidence", "soft_cross_entropy"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}_weight must be 0 or more, got {getattr(self, name)}")
        if self.cross_entropy + self.l1 + self.confidence + self.soft_cross_entropy == 0:
            raise ValueError("the weights of all losses are 0: nothing would be learnt")
        if self.position_decay is not None and not self.position_decay > 0:
            raise ValueError(f"position_decay must be positive or None, got {self.position_decay}")


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
        cross_entropy, l1 ([`WeightedSum`]): Terms, detached.
        soft_cross_entropy, confidence ([`WeightedSum`], *optional*): Terms, detached; `None` without weight, or
            without a confidence head.
        acceptance (`torch.FloatTensor` of shape `[..., γ]`): c*_k = 1 - L1/2 of every slot, detached. DSpark Eq. 8.
    """

    total: torch.Tensor
    cross_entropy: WeightedSum
    l1: WeightedSum
    soft_cross_entropy: WeightedSum | None
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


@dataclass(frozen=True)
class SlotScores:
    """How the logits of slots come about, so that they can be computed a chunk at a time.

    Args:
        draft (`Callable`): From a chunk of each of `draft_inputs` to draft logits `[c, V]`.
        draft_inputs (`Sequence[torch.Tensor]`): `[..., γ, *]` each.
        draft_parameters (`Sequence[torch.nn.Parameter]`): What `draft` reads besides, and is to be trained.
        target (`Callable`): From a chunk of `target_input` to the target's logits `[c, V]`.
        target_input (`torch.Tensor` of shape `[..., γ, d]`): Of the same slots.
        vocab_size (`int`): V.
    """

    draft: Callable[..., torch.Tensor]
    draft_inputs: Sequence[torch.Tensor]
    draft_parameters: Sequence[torch.Tensor]
    target: Callable[[torch.Tensor], torch.Tensor]
    target_input: torch.Tensor
    vocab_size: int

    def select(self, slots: torch.Tensor) -> "SlotScores":
        """Return the scores of some slots `[..., γ]` alone, flat."""
        inputs = [tensor[slots] for tensor in self.draft_inputs]
        return replace(self, draft_inputs=inputs, target_input=self.target_input[slots])

    @property
    def chunk_size(self) -> int:
        """Slots whose logits exist at a time."""
        fewest = MINIMUM_CHUNK.get(self.target_input.device.type, MINIMUM_CHUNK["cuda"])
        return max(fewest, CHUNK_ELEMENTS // self.vocab_size)


def block_losses(
    scores: SlotScores,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    weights: LossWeights,
    weight_sum: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> BlockLosses:
    """Return the training objective of a batch of blocks.

    Args:
        scores ([`SlotScores`]): Where draft logits, teacher-forced, and target logits of the slots come from.
        labels (`torch.LongTensor` of shape `[..., γ]`): The data tokens x*_k.
        supervised (`torch.BoolTensor` of shape `[..., γ]`): Slots that count; no work is done for others.
        confidence_logits (`torch.Tensor` of shape `[..., γ]`, *optional*): Pre-sigmoid c_k.
        weights ([`LossWeights`]): The α and the decay.
        weight_sum (`torch.Tensor`, *optional*): Denominator of all means; that of these blocks unless given. Sums
            over accumulation steps and processes make the pooled mean a plain sum of what each contributes.
        chunk_size (`int`, *optional*): Slots whose logits exist at a time.

    Returns:
        [`BlockLosses`]

    DSpark Eq. 9-12.
    """
    slot_weights = position_weights(supervised, weights.position_decay)[supervised]
    own_sum = slot_weights.sum()
    inverse = 1.0 / ((own_sum if weight_sum is None else weight_sum) + DENOMINATOR_EPSILON)
    selected = scores.select(supervised)
    total, nll, soft_nll, distance = _VocabularyLosses.apply(
        selected, labels[supervised], slot_weights, inverse, weights, chunk_size or scores.chunk_size,
        *selected.draft_inputs, *selected.draft_parameters,
    )  # fmt: skip
    slot_acceptance = (1.0 - 0.5 * distance).clamp(0.0, 1.0)  # Eq. 8
    confidence = None
    if confidence_logits is not None:
        bce = F.binary_cross_entropy_with_logits(
            confidence_logits[supervised].float(), slot_acceptance, reduction="none"
        )
        total = total + weights.confidence * inverse * (slot_weights * bce).sum()  # Eq. 11
        confidence = WeightedSum((slot_weights * bce.detach()).sum(), own_sum)

    def weighted(values: torch.Tensor) -> WeightedSum:
        return WeightedSum((slot_weights * values).sum(), own_sum)

    return BlockLosses(
        total,  # Eq. 12
        weighted(nll),  # Eq. 9
        weighted(distance),  # Eq. 10, not halved
        weighted(soft_nll) if weights.soft_cross_entropy > 0 else None,
        confidence,
        torch.zeros(supervised.shape, device=distance.device).masked_scatter(supervised, slot_acceptance),
    )


class _VocabularyLosses(torch.autograd.Function):
    """Everything that needs logits, a chunk of slots at a time.

    The gradient with respect to a chunk's logits is known as soon as they are, because every slot's weight is: it is
    sent back through the head at once, and the logits are forgotten.
    """

    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any,
        scores: SlotScores,
        labels: torch.Tensor,
        slot_weights: torch.Tensor,
        inverse: torch.Tensor,
        weights: LossWeights,
        chunk_size: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs, parameters = tensors[: len(scores.draft_inputs)], tensors[len(scores.draft_inputs) :]
        trained = any(ctx.needs_input_grad)
        input_gradients = [torch.empty_like(tensor) for tensor in inputs] if trained else []
        parameter_gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in parameters]
        nll, soft_nll, distance = (labels.new_zeros(labels.shape, dtype=torch.float32) for _ in range(3))
        for start in range(0, len(labels), chunk_size):
            chunk = slice(start, start + chunk_size)
            target_probs = scores.target(scores.target_input[chunk]).float().softmax(dim=-1)
            with torch.set_grad_enabled(trained):
                leaves = [tensor[chunk].detach().requires_grad_(trained) for tensor in inputs]
                logits = scores.draft(*leaves)
            with torch.autocast(labels.device.type, enabled=False):  # logits are float32 from here on
                nll[chunk], soft_nll[chunk], distance[chunk], gradient = _slot_losses(
                    logits.detach().float(), target_probs, labels[chunk], slot_weights[chunk], weights, trained
                )
            if not trained:
                continue
            wanted = [tensor for tensor in parameters if tensor.requires_grad]
            gradients = torch.autograd.grad(logits, [*leaves, *wanted], gradient.to(logits.dtype), allow_unused=True)
            for whole, part in zip(input_gradients, gradients, strict=False):
                whole[chunk] = 0 if part is None else part
            parts = iter(gradients[len(leaves) :])
            for whole, tensor in zip(parameter_gradients, parameters, strict=True):
                if tensor.requires_grad and (part := next(parts)) is not None:
                    whole += part
        total = (slot_weights * (weights.cross_entropy * nll + weights.l1 * distance)).sum()
        if weights.soft_cross_entropy > 0:
            total = total + weights.soft_cross_entropy * (slot_weights * soft_nll).sum()
        ctx.save_for_backward(
            inverse, *input_gradients, *(g.to(p.dtype) for g, p in zip(parameter_gradients, parameters, strict=True))
        )
        ctx.mark_non_differentiable(nll, soft_nll, distance)
        return total * inverse, nll, soft_nll, distance

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # Divided by the weights of a whole step, gradients in float16 would vanish before the loss scale reaches them.
        inverse, *gradients = ctx.saved_tensors
        factor = gradient.float() * inverse
        return *(None,) * 6, *((saved.float() * factor).to(saved.dtype) for saved in gradients)


def _slot_losses(
    logits: torch.Tensor,
    target_probs: torch.Tensor,
    labels: torch.Tensor,
    slot_weights: torch.Tensor,
    weights: LossWeights,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor, torch.Tensor | None]:
    """Return -log p_d(x*), -Σ p_t log p_d, Σ |p_d - p_t| of each slot, and the gradient of their weighted sum.

    Written out, because autograd would keep and pass over several tensors of this size. With s = sign(p_d - p_t):
    ∂Σ|p_d - p_t|/∂logits = p_d (s - Σ p_d s).
    """
    log_probs = logits.log_softmax(dim=-1)
    nll = -log_probs.gather(-1, labels[:, None])[:, 0]
    soft_nll: torch.Tensor | float = 0.0
    if weights.soft_cross_entropy > 0:
        soft_nll = -_row_products(target_probs, log_probs)
    draft_probs = log_probs.exp_()
    signs = draft_probs - target_probs
    distance = signs.norm(p=1, dim=-1)
    if not trained:
        return nll, soft_nll, distance, None
    signs.sign_()
    offsets = weights.cross_entropy + weights.soft_cross_entropy - weights.l1 * _row_products(draft_probs, signs)
    gradient = signs.mul_(weights.l1 * slot_weights[:, None]).add_((slot_weights * offsets)[:, None]).mul_(draft_probs)
    if weights.soft_cross_entropy > 0:
        gradient.addcmul_(target_probs, slot_weights[:, None], value=-weights.soft_cross_entropy)
    gradient.scatter_add_(-1, labels[:, None], (-weights.cross_entropy * slot_weights)[:, None])
    return nll, soft_nll, distance, gradient


def _row_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the scalar product of each row of two matrices, without writing the products down."""
    return (first[:, None] @ second[:, :, None])[:, 0, 0]


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
