"""Verification of a drawn block as a whole: a token that is too likely in the draft may be made up for by later ones.

The output has the target's law, as with the test of each token alone, and the expected length is never smaller.
"""

import torch

from .sampling import DraftBlock, TokenLaw, VerifiedBlock, draft_probabilities, draw, residual_distribution


def verify_jointly(
    block: DraftBlock,
    lengths: torch.Tensor,
    target_law: TokenLaw,
    first_rows: torch.Tensor,
    coins: torch.Tensor,
    uniform: torch.Tensor,
) -> VerifiedBlock:
    """Accept the longest prefix whose coin allows it, and draw the token after it. The arguments are those of
    [`verify_block`]; whether a token was sent must not depend on the token.

    With p_0 = 1 and p_k = min(p_{k-1} p_t(x_k) / p_d(x_k), 1), a prefix that ends before the last token is accepted
    with probability s / (s + 1 - p_k), where s = sum max(p_k p_t - p_d, 0) over the token after it, and the whole
    block with p_l. After a prefix, the next token has the law max(p_k p_t - p_d, 0), normalised.

    Sun et al. 2024 (arXiv 2403.10444), Algorithm 2.
    """
    weights = prefix_weights(block, target_law, first_rows)
    num_accepted, undecided = torch.zeros_like(lengths), torch.ones_like(lengths, dtype=torch.bool)
    for count in range(int(lengths.max()), 0, -1):
        ends = lengths == count
        chances = torch.where(ends, weights[:, count], torch.zeros_like(weights[:, count]))
        inside = (lengths > count) & undecided
        if bool(inside.any()):
            chances = torch.where(inside, prefix_chances(block, target_law, first_rows, weights, count), chances)
        chosen = undecided & (coins[:, count - 1] < chances)
        num_accepted, undecided = torch.where(chosen, count, num_accepted), undecided & ~chosen
    following = target_law[first_rows + num_accepted]
    draft_next = draft_probabilities(block, num_accepted.clamp_max(block.token_ids.shape[1] - 1), following)
    weighted = following.probs * weights.gather(1, num_accepted[:, None]).to(following.probs)
    law = torch.where((num_accepted < lengths)[:, None], residual_distribution(weighted, draft_next), following.probs)
    return VerifiedBlock(num_accepted, draw(TokenLaw(law, following.candidate_ids), uniform))


def prefix_weights(block: DraftBlock, target_law: TokenLaw, first_rows: torch.Tensor) -> torch.Tensor:
    """Return p_0..p_γ, `[B, γ+1]`; after the scheduled length they mean nothing."""
    slots = torch.arange(block.token_ids.shape[1], device=first_rows.device)
    rows, tokens = (first_rows[:, None] + slots).clamp_max(len(target_law.probs) - 1), block.token_ids[..., None]
    if target_law.candidate_ids is None:
        target_probs = target_law.probs[rows, block.token_ids]
    else:
        target_probs = target_law[rows].probability(tokens)[..., 0]
    draft_probs = torch.ones_like(target_probs) if block.law is None else block.law.probability(tokens)[..., 0]
    ratios = target_probs / draft_probs.clamp_min(torch.finfo(draft_probs.dtype).tiny)
    weights = [torch.ones_like(ratios[:, 0])]
    for slot in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, slot]).clamp_max(1.0))
    return torch.stack(weights, dim=1)


def prefix_chances(
    block: DraftBlock, target_law: TokenLaw, first_rows: torch.Tensor, weights: torch.Tensor, count: int
) -> torch.Tensor:
    """Return the probability that the first `count` tokens are accepted if no longer prefix is, `[B]`."""
    after = target_law[(first_rows + count).clamp_max(len(target_law.probs) - 1)]
    slots = torch.full_like(first_rows, min(count, block.token_ids.shape[1] - 1))
    weight = weights[:, count]
    excess = (weight[:, None] * after.probs - draft_probabilities(block, slots, after)).clamp_min(0.0).sum(dim=-1)
    return excess / (excess + 1.0 - weight).clamp_min(torch.finfo(excess.dtype).tiny)
