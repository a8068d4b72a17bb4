"""Verify drafts by rejection sampling: accept a path of each row, and draw the token after it.

A path is verified as a whole: what follows may make up for a token that is too likely in the draft. The output has the
target's distribution, as with a test of each token alone, and no prefix is accepted less often. Of a chain the rule
is block verification, computed for all rows at once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from .distributions import Scores, TokenDistribution, draw_if_any, residual_distribution
from .drafts import DraftBlock, Drafts, DraftTree, DraftTrees, Verified
from .noise import BlockNoise
from .transfers import first_integers, to_device, to_host

TINY = 1e-30  # keeps a quotient of zeros finite


def verify(
    drafts: Drafts, scores: Scores, first_rows: Sequence[int], noise: BlockNoise | None, logits: torch.Tensor
) -> Verified:
    """Accept a path of each row's drafts, and draw the token after it. A device is waited for once.

    The target's scores `[sum of 1 + nodes, V]` are those after the anchor and after each node sent, row by row from
    `first_rows` on, processed like the drafts. The noise is independent of the draws; without it the target's arg-max
    is followed. `logits` are those of one token: it is told whether any are NaN.

    Sun et al. 2024 (arXiv 2403.10444) for chains, Weng et al. 2025 (arXiv 2505.12398) for trees; both in place of the
    ratio test of DSpark Section 2.1.
    """
    if isinstance(drafts, DraftTrees):
        return _verify_trees(drafts, scores, first_rows, noise, logits)
    parts = scores.best()[1:] if noise is None else _verify_drawn(drafts, scores, first_rows, noise)
    *parts, numbers, doubt, tokens, marks, confidences = to_host(*parts, logits, scores.doubt, *drafts.for_host())
    block = drafts.on_host(tokens, marks, confidences)
    if doubt or (noise is not None and block.lengths.tolist() != drafts.lengths.tolist()):
        return verify(block, scores.sure(), first_rows, noise, logits)
    if noise is None:
        best, rows = parts[0].tolist(), zip(block.rows, block.lengths.tolist(), first_rows, strict=True)
        counts = [walk_chain(row[:length], best[first:]) for row, length, first in rows]
        following = [best[first + count] for first, count in zip(first_rows, counts, strict=True)]
        parts = [torch.as_tensor(each, device="cpu") for each in (counts, following)]
    return Verified(*parts, has_nan=_has_nan(numbers), drafts=block, scores=scores)


def next_tokens(scores: Scores, noise: BlockNoise | None) -> torch.Tensor:
    """Draw the token at each position from the target alone, `[n]`."""
    if noise is None:
        return scores.best()[1]
    return draw_if_any(scores.distribution(), to_device(noise.next_uniforms, scores.values.device))


def _verify_drawn(
    block: DraftBlock, scores: Scores, first_rows: Sequence[int], noise: BlockNoise
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many drafts of each chain are accepted, `[R]`, and the token after them, `[R]`."""
    device, gamma = scores.values.device, max(block.lengths.tolist())
    if gamma == 0:
        return block.lengths.to(device), next_tokens(by_rows(scores, first_rows, 1)[:, 0], noise)
    sent = block
    if gamma < block.token_ids.shape[1]:
        sent = replace(block, token_ids=block.token_ids[:, :gamma], distribution=block.distribution[:, :gamma])
    target = by_rows(scores, first_rows, 1 + gamma).distribution()
    uniforms = [to_device(each, device) for each in (noise.accept_uniforms[:, :gamma], noise.next_uniforms)]
    verified = verify_chains(sent, block.lengths, target, *uniforms)
    return verified.num_accepted, verified.next_token_ids


def _verify_trees(
    drafts: DraftTrees, scores: Scores, first_rows: Sequence[int], noise: BlockNoise | None, logits: torch.Tensor
) -> Verified:
    spans = [slice(first, first + 1 + tree.num_nodes) for first, tree in zip(first_rows, drafts.trees, strict=True)]
    rows = zip(drafts.trees, spans, strict=True)
    if noise is None:
        best, numbers, doubt = to_host(scores.best()[1], logits, scores.doubt)
        best = best.tolist()
        walks = [walk_tree(tree, best[span]) for tree, span in rows]
    else:
        distribution, numbers, doubt = scores.distribution(), None, None
        if distribution.candidate_ids is not None:  # few enough for the host, which need not be waited for
            parts = distribution.probs, distribution.candidate_ids, logits, scores.doubt
            *parts, numbers, doubt = to_host(*parts)
            distribution = TokenDistribution(*parts)
        noisy = zip(rows, noise.accept_uniforms.tolist(), strict=True)
        walks = [verify_tree(tree, distribution[span], uniforms) for (tree, span), uniforms in noisy]
    if doubt:
        return _verify_trees(drafts, scores.sure(), first_rows, noise, logits)
    paths, following = zip(*walks, strict=True)
    if noise is None:
        next_token_ids = torch.tensor(following, device="cpu")
    else:
        drawn_from = TokenDistribution.stack([each[None] for each in following])[0]
        next_token_ids = draw_if_any(drawn_from, to_device(noise.next_uniforms, drawn_from.probs.device))
        next_token_ids, numbers = to_host(next_token_ids, logits if numbers is None else numbers)
    num_accepted = torch.tensor(list(map(len, paths)), device="cpu")
    return Verified(num_accepted, next_token_ids, paths, _has_nan(numbers), drafts, scores)


def _has_nan(numbers: torch.Tensor) -> bool:
    return any(map(math.isnan, numbers.tolist()))


# ---- arg-max drafts: along the target's arg-max


def walk_chain(token_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """Return how many drafts `[l]` are the target's arg-max, `[1 + l]` or more, if all before them are."""
    pairs = enumerate(zip(token_ids, target_ids, strict=False))
    return next((count for count, (ours, theirs) in pairs if ours != theirs), len(token_ids))


def walk_tree(tree: DraftTree, target_ids: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's arg-max after each place, `[1 + n]`, as long as it is a child. Return the accepted places,
    and the token after them."""
    path, node = [], tree.child(0, target_ids[0])
    while node is not None:
        path.append(node)
        node = tree.child(node, target_ids[node])
    return path, target_ids[path[-1] if path else 0]


# ---- drawn chains


def by_rows(scores: Scores, first_rows: Sequence[int], width: int) -> Scores:
    """Return packed scores by row, `[R, width]`; places after a row's own mean nothing."""
    num_scores = len(scores.values)
    if [*first_rows, num_scores] == list(range(0, num_scores + 1, width)):  # rows that were cut have more
        ids = scores.candidate_ids
        return Scores(scores.values.unflatten(0, (-1, width)), None if ids is None else ids.unflatten(0, (-1, width)))
    places = [[min(first + place, num_scores - 1) for place in range(width)] for first in first_rows]
    return scores[to_device(places, scores.values.device)]


def verify_chains(
    block: DraftBlock,
    lengths: torch.Tensor,
    target_distribution: TokenDistribution,
    accept_uniforms: torch.Tensor,
    next_uniforms: torch.Tensor,
) -> Verified:
    """Accept a prefix of each chain, the longest that its uniform allows, and draw the token after it.

    `lengths` `[R]`, on the CPU, are the scheduled draft tokens l; whether a token is sent must be known before it is
    drawn. The target's distributions `[R, γ+1, n]` are those after the anchor and each token; after l they mean
    nothing. The uniforms `[R, γ]` and `[R]`, in [0, 1), are independent of the draws.

    After k accepted tokens the next one has the distribution max(p_k p_t - p_d, 0), normalised, with p_k of
    [`prefix_weights`]. After the last one that was sent p_d is 0: it has the target's. Sun et al. 2024, Algorithm 2.
    """
    weights, gamma = prefix_weights(block, target_distribution), block.token_ids.shape[1]
    drafted = on_support(block.distribution, block.token_ids, target_distribution[:, :-1])
    is_whole = min(lengths.tolist()) == gamma
    sent = None if is_whole else to_device(torch.arange(gamma, device="cpu") < lengths[:, None], drafted.device)
    if not is_whole:
        drafted = torch.where(sent[..., None], drafted, 0.0)
    excess = excess_over(drafted, target_distribution, weights)
    chances = prefix_chances(excess, weights)
    num_accepted = longest_accepted(chances if is_whole else torch.where(sent, chances, 0.0), accept_uniforms)
    rows = first_integers(len(lengths), num_accepted.device)
    following = target_distribution[rows, num_accepted]
    # Where the distributions agree to rounding, nothing exceeds the draft's: the target's own stands in.
    left = torch.add(excess[rows, num_accepted], following.probs, alpha=TINY)
    return Verified(num_accepted, draw_if_any(TokenDistribution(left, following.candidate_ids), next_uniforms))


def prefix_weights(block: DraftBlock, target_distribution: TokenDistribution) -> torch.Tensor:
    """Return p_0..p_γ, `[R, γ+1]`: p_0 = 1, p_k = min(p_{k-1} p_t(x_k) / p_d(x_k), 1). The first k tokens of a block
    or more are accepted with probability p_k, however many are sent. The target's distributions are those before each
    token, `[R, γ or more, n]`."""
    tokens = block.token_ids[..., None]
    ratios = target_distribution[:, : tokens.shape[1]].probability(tokens)[..., 0]
    if block.distribution is not None:  # of which no drawn token has the probability 0
        ratios = ratios / block.distribution.probability(tokens)[..., 0]
    # p_k is the product of the first k ratios over the largest such product so far. By Markov's inequality none grows
    # beyond 10^n more often than in one of 10^n blocks.
    wide = torch.float32 if ratios.device.type == "mps" else torch.float64  # Apple's GPUs have nothing wider
    products = F.pad(ratios, (1, 0), value=1.0).cumprod(dim=1, dtype=wide)
    return (products / products.cummax(dim=1).values).to(ratios.dtype)


def excess_over(drafted: torch.Tensor, target_distribution: TokenDistribution, weights: torch.Tensor) -> torch.Tensor:
    """Return max(p_k p_t - p_d, 0) of each place's next token, `[R, γ+1, n]`: p_d `[R, γ, n]` is 0 after the last."""
    weighted = weights[..., None] * target_distribution.probs
    weighted[:, :-1].sub_(drafted)
    return weighted.clamp_min_(0.0)


def prefix_chances(excess: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return with what probability the first 1..γ tokens are accepted if no longer prefix is, `[R, γ]`; NaN is never.

    It is s / (s + 1 - p_k) with s the sum of the excess `[R, γ+1, n]` over the token after the prefix, p_k at most.
    Where the target has no distribution, a prefix is taken with p_k, so that the caller learns.
    """
    sums = excess.sum(dim=-1).fmin(weights)
    return (sums / (sums - weights + 1.0))[:, 1:]


def longest_accepted(chances: torch.Tensor, accept_uniforms: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of the longest prefix whose uniform is below its chance, `[R]`."""
    counts = first_integers(1 + chances.shape[1], chances.device)[1:]
    return ((accept_uniforms < chances) * counts).amax(dim=1)


def on_support(
    draft_distribution: TokenDistribution | None, drafted_ids: torch.Tensor, target_distribution: TokenDistribution
) -> torch.Tensor:
    """Return p_d `[..., n]` of the tokens on which distributions `[..., n]` of the target stand. Drafts without a
    distribution were known before: all is on the drafted token, `[...]`."""
    if draft_distribution is None:
        tokens = drafted_ids[..., None]
        if target_distribution.candidate_ids is not None:
            return (target_distribution.candidate_ids == tokens).to(target_distribution.probs)
        return torch.zeros_like(target_distribution.probs).scatter(-1, tokens, 1.0)
    if target_distribution.candidate_ids is not None:
        return draft_distribution.probability(target_distribution.candidate_ids)
    return draft_distribution.dense(target_distribution.probs.shape[-1]).probs


# ---- drawn trees


def verify_tree(
    tree: DraftTree, target_distribution: TokenDistribution, accept_uniforms: Sequence[float]
) -> tuple[list[int], TokenDistribution]:
    """Accept a path, the deepest node of a branch first.

    A place is entered with a weight w, with which it or something below it will be accepted; that of the anchor is 1.
    With p_1 the target's distribution there and q_j what child j was drawn from (it stands on the token alone if that
    was known before), child j is entered with min(1, w p_j(z) / q_j(z)). If nothing below it is accepted, s is the sum
    of max(w p_j - q_j, 0) over all tokens, p_{j+1} this excess over s, and w becomes s / (s + 1 - w). After its
    children the place itself is accepted with what w has become.

    The shape below a child may depend on its siblings: the child is accepted as often whatever is below it.

    The tree has every node that was drawn. The target's distributions `[1 + n, m]` are those after each place,
    processed like the drafts. Uniforms, one for each node, are independent of the draws. Returns the accepted places,
    and the distribution of the token after them, `[m]`.
    """
    device = target_distribution.probs.device
    levels = {id(level): level.to(device) for level, _ in tree.distributions.values()}
    drawn_from = {place: levels[id(level)][row] for place, (level, row) in tree.distributions.items()}
    # p_1 and q_1 of all nodes: an accelerator is waited for once here, and then once for each rejected node.
    nodes = list(zip(tree.token_ids, tree.parents, tree.masses, strict=True))
    known = [_probability(target_distribution[parent], token) for token, parent, _ in nodes]
    known += [_probability(drawn_from[parent], token) for token, parent, mass in nodes if mass > 0.0]
    known = iter(map(float, to_host(*known)))
    firsts = [next(known) for _ in nodes]
    draft_probs = [next(known) / mass if mass > 0.0 else 1.0 for mass in tree.masses]

    def accepted_below(place: int, weight: float) -> tuple[list[int], TokenDistribution] | None:
        distribution, tried, own, entered = target_distribution[place], [], None, weight
        probs, children = distribution.probs, tree.children(place)
        prob = firsts[children[0] - 1] if children else 0.0
        for number, node in enumerate(children):
            token, mass = tree.token_ids[node - 1], tree.masses[node - 1]
            ratio = weight * prob / draft_probs[node - 1]
            found = accepted_below(node, min(1.0, ratio)) if ratio > 0.0 else None
            if found is not None:
                return [node, *found[0]], found[1]
            if mass == 0.0:
                left = on_support(None, to_device(token, device), distribution)
            else:
                own = on_support(drawn_from[place], None, distribution) if own is None else own
                left = own.clone()
                for each in tried:
                    left[_places_of(each, distribution.candidate_ids)] = 0.0
                left /= mass
            excess = (weight * probs - left).clamp_min(0.0).sum()
            probs = residual_distribution(weight * probs, left)
            sibling = tree.token_ids[children[min(number + 1, len(children) - 1)] - 1]
            following = _probability(TokenDistribution(probs, distribution.candidate_ids), sibling)
            excess, prob = map(float, to_host(excess, following))
            weight = excess / max(excess + 1.0 - weight, TINY)
            tried.append(token)
        # Where the target has no distribution, a place is taken with the weight that it came with, so that the caller
        # learns.
        if place == 0 or accepts(accept_uniforms[place - 1], entered if math.isnan(weight) else weight):
            return [], TokenDistribution(probs, distribution.candidate_ids)
        return None

    return accepted_below(0, 1.0)


def _probability(distribution: TokenDistribution, token: int) -> torch.Tensor:
    if distribution.candidate_ids is None:
        return distribution.probs[token]
    return distribution.probs.where(distribution.candidate_ids == token, 0.0).sum()  # a mask as index would wait


def _places_of(token: int, candidate_ids: torch.Tensor | None) -> int | torch.Tensor:
    return token if candidate_ids is None else candidate_ids == token


def accepts(uniform: float, chance: float) -> bool:
    """Tell whether a draft is accepted that is to be accepted with this chance."""
    return uniform < chance
