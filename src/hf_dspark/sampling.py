"""Draft blocks, and the rejection test that turns one into tokens of the target's own law.

Shape letters used in the whole package: B requests, S context positions, N anchors, γ draft tokens in a block
(`block_size`), V vocabulary entries, d hidden size, m tapped target layers, r Markov rank.

This module knows nothing of models, caches or transformers: probabilities in, tokens out.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class DraftBlock:
    """One drafted block per request, before any of it is verified.

    Attributes:
        token_ids (`torch.LongTensor` of shape `[B, γ]`): The drafted tokens x_1..x_γ.
        log_probs (`torch.FloatTensor` of shape `[B, γ, V]`, *optional*): Log of the law each token was drawn from,
            that is, after temperature, truncation and all processors. `None` when the tokens are arg-max: then the
            law is one-hot, and any cut-off is lossless.
        confidence_logits (`torch.FloatTensor` of shape `[B, γ]`, *optional*): Raw logits of c_k, the predicted
            conditional acceptance of slot k, known before x_k was drawn. `None` without a confidence head.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor | None
    confidence_logits: torch.Tensor | None


@dataclass(frozen=True)
class VerifiedBlock:
    """What the target made of a block.

    Attributes:
        num_accepted (`torch.LongTensor` of shape `[B]`): Accepted draft tokens, without the bonus token.
        next_token_ids (`torch.LongTensor` of shape `[B]`): The token after them, drawn by the target: the residual
            draw after a rejection, the bonus token when all scheduled tokens were accepted.
    """

    num_accepted: torch.Tensor
    next_token_ids: torch.Tensor


class Sampler(Protocol):
    """Draws one draft token per request; supplied by the caller so that drafts and target share their processors."""

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw from `softmax(logits)`, processed.

        Args:
            logits (`torch.FloatTensor` of shape `[B, n]`): Scores of the candidates.
            candidate_ids (`torch.LongTensor` of shape `[B, n]`, *optional*): Their token ids; `None` means n = V.
            drafted_ids (`torch.LongTensor` of shape `[B, k-1]`): The block's tokens so far, anchor excluded.

        Returns:
            Token ids `[B]`, and the log law over the vocabulary `[B, V]` or `None` for an arg-max draw.
        """


def scatter_to_vocabulary(scores: torch.Tensor, candidate_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return `[B, V]` scores that are minus infinity outside the candidates.

    Args:
        scores (`torch.Tensor` of shape `[B, n]`): Scores of the candidates.
        candidate_ids (`torch.LongTensor` of shape `[B, n]`): Distinct token ids.
        vocab_size (`int`): V.
    """
    full = scores.new_full((scores.shape[0], vocab_size), -torch.inf)
    return full.scatter(-1, candidate_ids, scores)


def greedy_sampler(
    logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Draw the arg-max; a [`Sampler`] without processors."""
    index = logits.argmax(dim=-1)
    if candidate_ids is not None:
        index = candidate_ids.gather(-1, index[:, None])[:, 0]
    return index, None


def draw(logits: torch.Tensor, candidate_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from `softmax(logits)`.

    Args:
        logits (`torch.FloatTensor` of shape `[B, n]`): Scores of the candidates.
        candidate_ids (`torch.LongTensor` of shape `[B, n]`, *optional*): Their token ids; `None` means n = V.

    Returns:
        Token ids `[B]`, and the log law over the candidates `[B, n]`.
    """
    law = logits.log_softmax(dim=-1)
    index = torch.multinomial(law.exp(), num_samples=1)
    return (index if candidate_ids is None else candidate_ids.gather(-1, index))[:, 0], law


def acceptance_probability(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return min(1, p_t(x) / p_d(x)) for drafted tokens.

    Args:
        target_probs, draft_probs (`torch.Tensor` of shape `[..., V]`): The two laws at each position.
        token_ids (`torch.LongTensor` of shape `[...]`): The drafted tokens.

    Returns:
        `torch.Tensor` of shape `[...]`.

    DSpark Section 2.1.
    """
    target = target_probs.gather(-1, token_ids[..., None])[..., 0]
    draft = draft_probs.gather(-1, token_ids[..., None])[..., 0]
    # A drawn token has p_d > 0; the floor only keeps 0/0 out of slots that no token was drawn from.
    return (target / draft.clamp_min(torch.finfo(draft.dtype).tiny)).clamp_max(1.0)


def residual_distribution(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Return max(p_t - p_d, 0), normalised: the law of the token that replaces a rejected one.

    Where both laws agree to rounding, rejection has probability zero and the residual is 0/0: the target's law
    stands in.

    Args:
        target_probs, draft_probs (`torch.Tensor` of shape `[..., V]`): The two laws.

    Returns:
        `torch.Tensor` of shape `[..., V]`.
    """
    residual = (target_probs - draft_probs).clamp_min(0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, residual / mass.clamp_min(torch.finfo(mass.dtype).tiny), target_probs)


def verify_block(
    block: DraftBlock,
    lengths: torch.Tensor,
    target_probs: torch.Tensor,
    uniform: torch.Tensor,
    generator: torch.Generator | None = None,
) -> VerifiedBlock:
    """Accept a prefix of each scheduled draft and draw the token after it.

    Args:
        block ([`DraftBlock`]): The drafts. Without `log_probs` they are arg-max and the law is one-hot.
        lengths (`torch.LongTensor` of shape `[B]`): Scheduled draft tokens l, 0 <= l <= γ.
        target_probs (`torch.FloatTensor` of shape `[B, γ+1, V]`): The target's law after the anchor and after each
            draft token, processed like the drafts. Rows after l are not read. For greedy decoding: one-hot.
        uniform (`torch.FloatTensor` of shape `[B, γ]`): Acceptance coins in [0, 1), independent of the draft noise.
        generator (`torch.Generator`, *optional*): Source of the draw of the token after the accepted prefix.

    Returns:
        [`VerifiedBlock`]

    Raises:
        ValueError: If a length is outside [0, γ].

    DSpark Section 2.1; Leviathan et al. 2023, Algorithm 1.
    """
    num_drafts = block.token_ids.shape[1]
    if bool(((lengths < 0) | (lengths > num_drafts)).any()):
        raise ValueError(f"verification lengths must lie in [0, {num_drafts}], got {lengths.tolist()}")
    if block.log_probs is None:
        draft_probs = torch.nn.functional.one_hot(block.token_ids, target_probs.shape[-1]).to(target_probs.dtype)
    else:
        draft_probs = block.log_probs.exp().to(target_probs.dtype)
    accepted = uniform < acceptance_probability(target_probs[:, :-1], draft_probs, block.token_ids)
    scheduled = torch.arange(num_drafts, device=lengths.device) < lengths[:, None]
    num_accepted = (accepted & scheduled).long().cumprod(dim=-1).sum(dim=-1)

    row = num_accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    target_next = target_probs.gather(1, row)[:, 0]
    draft_next = draft_probs.gather(1, row.clamp_max(num_drafts - 1))[:, 0]
    rejected = num_accepted < lengths  # else every scheduled token was accepted: a bonus token from the target's law
    law = torch.where(rejected[:, None], residual_distribution(target_next, draft_next), target_next)
    return VerifiedBlock(num_accepted, torch.multinomial(law, 1, generator=generator)[:, 0])
