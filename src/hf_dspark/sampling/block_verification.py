"""Verification of a drawn block as a whole: a token that is too likely in the draft may be made up for by later ones.

The output has the target's distribution, as with a test of each token alone, and no prefix is accepted less often.
"""

import torch

from .distributions import (
    DraftBlock,
    TokenDistribution,
    VerifiedBlock,
    draft_probabilities,
    drafted_probabilities,
    draw,
    on_support,
    residual_distribution,
)


def verify_block(
    block: DraftBlock,
    lengths: torch.Tensor,
    target_distribution: TokenDistribution,
    first_rows: torch.Tensor,
    accept_uniforms: torch.Tensor,
    uniform: torch.Tensor,
) -> VerifiedBlock:
    """Accept a prefix of each scheduled draft, the longest that its uniform allows, and draw the token after it.

    `lengths` `[B]` are the scheduled draft tokens l; whether a token is sent must be known before it is drawn.
    `target_distribution` `[sum of 1 + l]` stands after the anchor and after each of them, request by request, starting
    at `first_rows` `[B]`, processed like the drafts. The acceptance `accept_uniforms` `[B, γ]` and the noise `uniform`
    `[B]` of the last token, all in [0, 1), are independent of the draft noise.

    After k accepted tokens, fewer than were sent, the next one has the distribution max(p_k p_t - p_d, 0), normalised,
    with p_k of [`prefix_weights`]. After all of them it has the target's.

    Sun et al. 2024 (arXiv 2403.10444), Algorithm 2, in place of the ratio test of DSpark Section 2.1.
    """
    weights = prefix_weights(block, target_distribution, first_rows)
    num_accepted = longest_accepted(
        prefix_chances(block, lengths, target_distribution, first_rows, weights), accept_uniforms
    )
    following = target_distribution[first_rows + num_accepted]
    draft_next = draft_probabilities(block, num_accepted.clamp_max(block.token_ids.shape[1] - 1), following)
    residual = residual_distribution(following.probs * weights.gather(1, num_accepted[:, None]), draft_next)
    distribution = torch.where((num_accepted < lengths)[:, None], residual, following.probs)
    return VerifiedBlock(num_accepted, draw(TokenDistribution(distribution, following.candidate_ids), uniform))


def prefix_weights(
    block: DraftBlock, target_distribution: TokenDistribution, first_rows: torch.Tensor
) -> torch.Tensor:
    """Return p_0..p_γ, `[B, γ+1]`: p_0 = 1, p_k = min(p_{k-1} p_t(x_k) / p_d(x_k), 1). The first k tokens of a block
    or more are accepted with probability p_k, however many are sent."""
    target_probs, draft_probs = drafted_probabilities(block, target_distribution, first_rows)
    ratios = target_probs / draft_probs.clamp_min(torch.finfo(draft_probs.dtype).tiny)
    weights = [torch.ones_like(ratios[:, 0])]
    for slot in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, slot]).clamp_max(1.0))
    return torch.stack(weights, dim=1)


def prefix_chances(
    block: DraftBlock,
    lengths: torch.Tensor,
    target_distribution: TokenDistribution,
    first_rows: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return with what probability the first 1..γ tokens are accepted if no longer prefix is, `[B, γ]`.

    It is p_l at the scheduled length l, and before it s / (s + 1 - p_k) with s = sum max(p_k p_t - p_d, 0) over the
    token after the prefix. Where the target has no distribution there, a prefix is taken with p_k, so that the caller
    learns.
    """
    counts = torch.arange(1, block.token_ids.shape[1] + 1, device=lengths.device)
    after = target_distribution[(first_rows[:, None] + counts[:-1]).clamp_max(len(target_distribution.probs) - 1)]
    draft_after = on_support(
        None if block.distribution is None else block.distribution[:, 1:], block.token_ids[:, 1:], after
    )
    reached = weights[:, 1:-1]
    excess = (reached[..., None] * after.probs - draft_after).clamp_min(0.0).sum(dim=-1)
    inside = excess / (excess + 1.0 - reached).clamp_min(torch.finfo(excess.dtype).tiny)
    inside = torch.where(excess.isnan(), reached, inside)
    chances = torch.where(counts < lengths[:, None], torch.cat([inside, weights[:, -1:]], dim=1), weights[:, 1:])
    return chances.masked_fill(counts > lengths[:, None], 0.0)


def longest_accepted(chances: torch.Tensor, accept_uniforms: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of the longest prefix whose uniform is below its chance, `[B]`."""
    counts = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return ((accept_uniforms < chances) * counts).amax(dim=1)
