"""The training losses of draft blocks: position-weighted sums over slots, in natural-log units, chunk by chunk."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

# DeepSpec adds it to every denominator; kept so that losses and gradients agree with the reference.
DENOMINATOR_EPSILON = 1e-6
# Logits of one chunk: 32 MiB in float32. Half of it makes the matrix products 7 % slower, more wins nothing.
CHUNK_ELEMENTS = 2**23
# Fewer rows than this make matrix products inefficient, on accelerators above all.
MINIMUM_CHUNK = {"cpu": 32, "cuda": 512}


def argument(default: Any, help: str) -> Any:
    """Return a field whose help the command line shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class LossWeights:
    """The weight α of each loss, and the decay over the block. DSpark Eq. 12.

    Args:
        cross_entropy_weight (`float`): Of the cross-entropy to the data token. DSpark Eq. 9.
        l1_weight (`float`): Of the L1 distance to the target's distribution. DSpark Eq. 10.
        confidence_weight (`float`): Of the confidence head's binary cross-entropy. DSpark Eq. 11.
        soft_cross_entropy_weight (`float`): Of the cross-entropy to the target's distribution, as EAGLE-3 trains.
        position_decay (`float`, *optional*): Slots after which a loss weighs 1/e; `None` weighs all slots alike. The
            paper writes γ, the reference implementation uses 4.0.
    """

    cross_entropy_weight: float = argument(0.1, "Weight of the cross-entropy (Eq. 9).")
    l1_weight: float = argument(0.9, "Weight of the L1 distance to the target's distribution (Eq. 10).")
    confidence_weight: float = argument(1.0, "Weight of the confidence loss (Eq. 11).")
    soft_cross_entropy_weight: float = argument(0.0, "Weight of the cross-entropy to the target's distribution.")
    position_decay: float | None = argument(4.0, "Slots after which a loss weighs 1/e; None weighs all slots alike.")

    def __post_init__(self) -> None:
        names = ("cross_entropy_weight", "l1_weight", "confidence_weight", "soft_cross_entropy_weight")
        for name in names:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not any(getattr(self, name) for name in names):
            raise ValueError("the weights of all losses are 0: nothing would be learnt. Give one of them a weight")
        if self.position_decay is not None and not self.position_decay > 0:
            raise ValueError(f"position_decay must be positive or None, got {self.position_decay}")


def position_weights(supervised: torch.Tensor, position_decay: float | None) -> torch.Tensor:
    """Return w_k = exp(-(k-1)/decay), positive, on supervised slots `[..., γ]` and 0 elsewhere. DSpark Section 3.3."""
    slots = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    weights = torch.exp(-slots / (math.inf if position_decay is None else position_decay))
    return weights.clamp_min(torch.finfo(weights.dtype).tiny) * supervised


@dataclass(frozen=True)
class SlotLogits:
    """Logits of slots that are yet to be computed, a chunk at a time."""

    compute: Callable[..., torch.Tensor]  # from a chunk [n, *] of each of `inputs` to logits [n, V]
    inputs: tuple[torch.Tensor, ...]  # [..., γ, *]
    vocab_size: int
    parameters: tuple[torch.Tensor, ...] = ()  # what `compute` reads besides, and is to be trained
    token_ids: torch.Tensor | None = None  # the vocabulary's token of each logit, [V_d], where they are fewer


class BlockLosses(NamedTuple):
    """The objective of a batch of blocks, and its terms, as weighted sums. All but `loss` is detached."""

    loss: torch.Tensor
    weight_sum: torch.Tensor  # of the slots: the denominator of the terms' means
    cross_entropy: torch.Tensor
    l1: torch.Tensor
    soft_cross_entropy: torch.Tensor | None  # `None` without weight
    confidence: torch.Tensor | None  # `None` without a confidence head
    acceptance: torch.Tensor  # c*_k = 1 - L1/2 of every slot, [..., γ]. DSpark Eq. 8
    confidence_logits: torch.Tensor | None  # pre-sigmoid c_k, [..., γ]


def block_losses(
    draft: SlotLogits,
    target: SlotLogits,
    labels: torch.Tensor,
    slot_weights: torch.Tensor,
    weights: LossWeights,
    confidence_logits: torch.Tensor | None = None,
    weight_sum: torch.Tensor | None = None,
) -> BlockLosses:
    """Return the training objective of a batch of blocks. DSpark Eq. 9-12.

    Labels are the data tokens x*_k, `[..., γ]`; one that the draft cannot propose has no cross-entropy, but counts in
    all other terms. Slots of weight 0 cost nothing. `weight_sum` is the denominator of all means, that of these blocks
    unless given: with that of a whole step, the losses of its parts add up. Logits of some slots exist at a time, and
    none are computed twice.
    """
    counted = slot_weights > 0
    own_sum, slot_weights, labels = slot_weights.sum(), slot_weights[counted], labels[counted]
    if draft.token_ids is not None:  # the place of each label among the tokens that the draft can propose, or -1
        places = torch.arange(len(draft.token_ids), device=labels.device)
        labels = labels.new_full((draft.vocab_size,), -1).scatter(0, draft.token_ids, places)[labels]
    inverse = 1.0 / ((own_sum if weight_sum is None else weight_sum) + DENOMINATOR_EPSILON)
    draft, target = (replace(each, inputs=tuple(part[counted] for part in each.inputs)) for each in (draft, target))
    trained = [*draft.inputs, *(parameter for parameter in draft.parameters if parameter.requires_grad)]
    cross_entropy, l1, soft_cross_entropy, gradients = _vocabulary_losses(
        draft, target, labels, slot_weights, weights,
        trained if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained) else [],
    )  # fmt: skip
    acceptance = (1.0 - 0.5 * l1).clamp(0.0, 1.0)  # Eq. 8
    # Sums, not products of vectors: autocast would compute these in half precision, where thousands of slots overflow.
    cross_entropy, l1 = (slot_weights * cross_entropy).sum(), (slot_weights * l1).sum()
    loss = weights.cross_entropy_weight * cross_entropy + weights.l1_weight * l1  # Eq. 9, 10
    if soft_cross_entropy is not None:
        soft_cross_entropy = (slot_weights * soft_cross_entropy).sum()
        loss = loss + weights.soft_cross_entropy_weight * soft_cross_entropy
    if gradients:
        loss = _WithGradients.apply(loss, gradients, *trained)
    confidence, of_every_slot = None, acceptance.new_zeros(counted.shape).masked_scatter(counted, acceptance)
    if confidence_logits is not None:
        logits, confidence_logits = confidence_logits[counted].float(), confidence_logits.detach().float()
        confidence = F.binary_cross_entropy_with_logits(logits, acceptance, slot_weights, reduction="sum")  # Eq. 11
        loss, confidence = loss + weights.confidence_weight * confidence, confidence.detach()
    loss = loss * inverse  # Eq. 12
    terms = (cross_entropy, l1, soft_cross_entropy, confidence)
    return BlockLosses(loss, own_sum, *terms, of_every_slot, confidence_logits)


class _WithGradients(torch.autograd.Function):
    """A scalar whose gradients are known in advance: backward passes them on."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The factor holds the loss scale and the weights of the whole step: only their product fits float16.
        return None, None, *((saved.float() * factor).to(saved.dtype) for saved in ctx.saved_tensors)


@torch.compiler.disable
@torch.no_grad()
def _vocabulary_losses(
    draft: SlotLogits,
    target: SlotLogits,
    labels: torch.Tensor,
    slot_weights: torch.Tensor,
    weights: LossWeights,
    trained: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Return Eq. 9, Eq. 10 and the soft cross-entropy of n slots, `[n]` each, and the gradients of `trained`.

    Every slot's weight is known, so the gradient of a chunk's logits is known, too, and goes back through the head
    at once. Checkpointing would be shorter, but needs five products with the vocabulary in place of three.
    """
    chunk_size = max(MINIMUM_CHUNK.get(labels.device.type, MINIMUM_CHUNK["cuda"]), CHUNK_ELEMENTS // draft.vocab_size)
    count, parameters = len(draft.inputs), trained[len(draft.inputs) :]
    gradients = [torch.empty_like(tensor) for tensor in trained[:count]]
    gradients += [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    losses = slot_weights.new_zeros(3, len(labels))
    for start in range(0, len(labels), chunk_size):
        chunk = slice(start, start + chunk_size)
        target_probs = target.compute(*(tensor[chunk] for tensor in target.inputs)).softmax(-1, dtype=torch.float32)
        if draft.token_ids is not None:  # what the draft cannot propose adds a constant to the distance
            target_probs = target_probs.index_select(-1, draft.token_ids)
            losses[1, chunk] = 1.0 - target_probs.sum(dim=-1)
        leaves = [tensor[chunk].detach().requires_grad_(bool(trained)) for tensor in draft.inputs]
        with torch.set_grad_enabled(bool(trained)):
            logits = draft.compute(*leaves)
        with torch.autocast(labels.device.type, enabled=False):  # logits are float32 from here on
            terms, gradient = _slot_losses(
                logits.detach().float(), target_probs, labels[chunk], slot_weights[chunk], weights, bool(trained)
            )
            losses[:, chunk] += terms
        if trained:
            parts = torch.autograd.grad(
                logits, [*leaves, *parameters], gradient.to(logits.dtype), materialize_grads=True
            )
            for whole, part in zip(gradients[:count], parts[:count], strict=True):
                whole[chunk] = part
            for whole, part in zip(gradients[count:], parts[count:], strict=True):
                whole += part
    gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, trained, strict=True)]
    cross_entropy, l1, soft_cross_entropy = losses
    return cross_entropy, l1, soft_cross_entropy if weights.soft_cross_entropy_weight > 0 else None, gradients


def _slot_losses(
    logits: torch.Tensor,
    target_probs: torch.Tensor,
    labels: torch.Tensor,
    slot_weights: torch.Tensor,
    weights: LossWeights,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return -log p_d(x*), Σ |p_d - p_t| and -Σ p_t log p_d of each slot, and the gradient of their weighted sum.

    Written out, because autograd would keep and pass over several tensors of this size. With s = sign(p_d - p_t):
    ∂Σ|p_d - p_t|/∂logits = p_d (s - Σ p_d s).
    """
    is_missing, labels = labels < 0, labels.clamp(min=0)
    hard, soft = weights.cross_entropy_weight * (~is_missing).float(), weights.soft_cross_entropy_weight
    log_probs = logits.log_softmax(dim=-1)
    cross_entropy = -log_probs.gather(-1, labels[:, None])[:, 0].masked_fill(is_missing, 0.0)
    soft_cross_entropy = -_row_products(target_probs, log_probs) if soft > 0 else torch.zeros_like(cross_entropy)
    draft_probs = log_probs.exp_()
    signs = draft_probs - target_probs
    losses = torch.stack([cross_entropy, signs.norm(p=1, dim=-1), soft_cross_entropy])
    if not trained:
        return losses, None
    signs.sign_()
    offsets = hard + soft - weights.l1_weight * _row_products(draft_probs, signs)
    gradient = signs.mul_(weights.l1_weight * slot_weights[:, None])
    gradient = gradient.add_((slot_weights * offsets)[:, None]).mul_(draft_probs)
    if soft > 0:
        gradient.addcmul_(target_probs, slot_weights[:, None], value=-soft)
    gradient.scatter_add_(-1, labels[:, None], (-hard * slot_weights)[:, None])
    return losses, gradient


def _row_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the scalar product of each row of two matrices, without writing the products down."""
    return (first[:, None] @ second[:, :, None])[:, 0, 0]
