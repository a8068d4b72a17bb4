"""Trees of drafts: siblings drawn without replacement, their verification as a whole, and the greedy walk.

Whether a node is drawn may depend on everything that is known before: on its ancestors, its earlier siblings, other
branches and their confidences. It must not depend on its own token, nor on what is drawn after it. A node that was
drawn must be verified. What chooses among drawn nodes by their tokens or by their own probabilities is not exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .distributions import TokenDistribution, residual_distribution

# A distribution of which less is left draws no more children: sums of float32 probabilities are off by as much.
LEAST_MASS = 1e-5
TINY = 1e-30  # keeps a quotient of zeros finite


@dataclass
class DraftTree:
    """The tree of one request. Its anchor has place 0, its i-th node place i. Parents come before their children, and
    siblings in the order in which they are tested."""

    token_ids: list[int] = field(default_factory=list)  # of the nodes, [n]
    parents: list[int] = field(default_factory=list)  # their places, [n]
    depths: list[int] = field(default_factory=list)  # 1 for children of the anchor, [n]
    survivals: list[float] = field(default_factory=list)  # predicted probability that the node is accepted, [n]
    known: list[float] = field(default_factory=list)  # what that was predicted from, see `SiblingAcceptance`, [n]
    # What was left of the parent's distribution when the node was drawn, [n]. 0 where the token was not drawn, but
    # known before: such a node is tested against a distribution that has no other token.
    masses: list[float] = field(default_factory=list)
    distributions: dict[int, tuple[TokenDistribution, int]] = field(
        default_factory=dict
    )  # place -> its children's distribution, and its row

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    def add(self, parent: int, token_id: int, survival: float = 1.0, known: float = 1.0, *, mass: float = 0.0) -> int:
        """Add a node after the last one, and return its place."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(1 + self.depth_of(parent))
        self.survivals.append(survival)
        self.known.append(known)
        self.masses.append(mass)
        return len(self.token_ids)

    def depth_of(self, place: int) -> int:
        return self.depths[place - 1] if place else 0

    def children(self, place: int) -> list[int]:
        return [node for node, parent in enumerate(self.parents, start=1) if parent == place]

    def path(self, place: int) -> list[int]:
        """Return the places from the first node down to this one."""
        places = []
        while place:
            places.append(place)
            place = self.parents[place - 1]
        return places[::-1]

    def tokens(self, places: Iterable[int]) -> list[int]:
        return [self.token_ids[place - 1] for place in places]

    def only(self, places: Sequence[int]) -> "DraftTree":
        """Return the tree with some nodes alone, in ascending order, whose parents are among them: for arg-max drafts.
        A node that was drawn must not be left out."""
        new_place = {0: 0} | {place: new for new, place in enumerate(places, start=1)}
        kept = DraftTree()
        for place in places:
            facts = self.token_ids[place - 1], self.survivals[place - 1], self.known[place - 1]
            kept.add(new_place[self.parents[place - 1]], *facts)
        return kept


class SiblingDistribution:
    """The distribution `[n]` of the children of one node, and what is left of it while they are drawn. It need not sum
    to one exactly."""

    def __init__(self, probs: np.ndarray) -> None:
        self._probs = probs
        self._cumulative = probs.cumsum(dtype=np.float64)
        self._removed: list[tuple[float, float]] = []  # where a removed entry starts, and its size; ascending
        self._gone: set[int] = set()

    def remove(self, index: int) -> None:
        """Let an entry not be drawn any more."""
        if index not in self._gone:
            self._gone.add(index)
            size = float(self._probs[index])
            self._removed = sorted([*self._removed, (float(self._cumulative[index]) - size, size)])

    def draw(self, uniform: float) -> tuple[int, float] | None:
        """Draw an entry by a number in [0, 1), and remove it.

        Returns:
            The entry, and the mass that was left: it was drawn from probs / mass. `None` if too little was left.
        """
        mass = float(self._cumulative[-1]) - sum(size for _, size in self._removed)
        if not mass > LEAST_MASS:  # nor NaN
            return None
        index = invert_without(self._cumulative, self._removed, uniform * mass)
        if index in self._gone or not self._probs[index] > 0.0:  # by rounding alone
            return None
        self.remove(index)
        return index, mass


def invert_without(cumulative: np.ndarray, removed: Sequence[tuple[float, float]], point: float) -> int:
    """Return the entry at a point of a cumulative distribution out of which some stretches, (start, size) in ascending
    order, were cut."""
    for start, size in removed:
        if point >= start:
            point += size
    return min(int(cumulative.searchsorted(point, side="right")), len(cumulative) - 1)


def accepts(uniform: float, chance: float) -> bool:
    """Tell whether a draft is accepted that is to be accepted with this chance."""
    return uniform < chance


def walk_greedily(tree: DraftTree, target_ids: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's arg-max after each place, `[1 + n]`, as long as it is a child.

    Returns:
        The accepted places, and the token after them.
    """
    place, path = 0, []
    while True:
        following = target_ids[place]
        matching = [node for node in tree.children(place) if tree.token_ids[node - 1] == following]
        if not matching:
            return path, following
        place = matching[0]
        path.append(place)


def verify_tree(
    tree: DraftTree, target_distribution: TokenDistribution, accept_uniforms: Sequence[float]
) -> tuple[list[int], TokenDistribution]:
    """Accept a path, the deepest node of a branch first: what follows may make up for a token that is too likely.

    A place is entered with a weight w, with which it or something below it will be accepted; that of the anchor is 1.
    With p_1 the target's distribution there and q_j what child j was drawn from (it stands on the token alone if that
    was known before), child j is entered with min(1, w p_j(z) / q_j(z)). If nothing below it is accepted, s is the sum
    of max(w p_j - q_j, 0) over all tokens, p_{j+1} this excess over s, and w becomes s / (s + 1 - w). After its
    children the place itself is accepted with what w has become. Of a chain, this is the rule of `block_verification`.

    The shape below a child may depend on its siblings: the child is accepted as often whatever is below it.

    Args:
        tree ([`DraftTree`]): With every node that was drawn.
        target_distribution ([`TokenDistribution`] of shape `[1 + n, m]`): After each place, processed like the drafts.
        accept_uniforms (`Sequence[float]`): One for each node, in [0, 1), independent of the draws.

    Returns:
        The accepted places, and the distribution of the token after them, `[m]`.

    Weng et al. 2025 (arXiv 2505.12398).
    """
    found = _accepted(tree, target_distribution, accept_uniforms, 0, 1.0)
    assert found is not None, "the anchor is accepted already"
    return found


def _accepted(
    tree: DraftTree,
    target_distribution: TokenDistribution,
    accept_uniforms: Sequence[float],
    place: int,
    weight: float,
) -> tuple[list[int], TokenDistribution] | None:
    """Return the path from a place on, without it, and the distribution after it; `None` if not even the place is
    accepted."""
    distribution, tried, draft_probs, entered = target_distribution[place], [], None, weight
    probs = distribution.probs
    for node in tree.children(place):
        token, mass = tree.token_ids[node - 1], tree.masses[node - 1]
        draft_prob = 1.0
        if mass > 0.0:
            children_distribution, row = tree.distributions[place]
            draft_distribution = children_distribution[row]
            draft_prob = _probability(draft_distribution.probs, draft_distribution.candidate_ids, token) / mass
        ratio = weight * _probability(probs, distribution.candidate_ids, token) / draft_prob
        if ratio > 0.0:
            below = _accepted(tree, target_distribution, accept_uniforms, node, min(1.0, ratio))
            if below is not None:
                return [node, *below[0]], below[1]
        if mass > 0.0:
            if draft_probs is None:
                draft_probs = _on_stand_of(distribution, draft_distribution)
            left = _without(draft_probs, distribution.candidate_ids, tried) / mass
        else:
            left = _one_hot(probs, distribution.candidate_ids, token)
        excess = float((weight * probs - left).clamp_min(0.0).sum())
        probs = residual_distribution(weight * probs, left)
        weight = excess / max(excess + 1.0 - weight, TINY)
        tried.append(token)
    # Where the target has no distribution, a place is taken with the weight that it came with, so that the caller
    # learns.
    if place == 0 or accepts(accept_uniforms[place - 1], entered if math.isnan(weight) else weight):
        return [], TokenDistribution(probs, distribution.candidate_ids)
    return None


def _probability(probs: torch.Tensor, candidate_ids: torch.Tensor | None, token: int) -> float:
    return float(probs[_places_of(token, candidate_ids)].sum())


def _on_stand_of(distribution: TokenDistribution, draft_distribution: TokenDistribution) -> torch.Tensor:
    """Return a draft distribution's probabilities of the tokens on which the target's stands, `[m]`."""
    if distribution.candidate_ids is not None:
        return draft_distribution.probability(distribution.candidate_ids)
    return draft_distribution.dense(distribution.probs.shape[-1]).probs


def _without(probs: torch.Tensor, candidate_ids: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
    left = probs.clone()
    for token in tokens:
        left[_places_of(token, candidate_ids)] = 0.0
    return left


def _one_hot(probs: torch.Tensor, candidate_ids: torch.Tensor | None, token: int) -> torch.Tensor:
    hot = torch.zeros_like(probs)
    hot[_places_of(token, candidate_ids)] = 1.0
    return hot


def _places_of(token: int, candidate_ids: torch.Tensor | None) -> int | torch.Tensor:
    return token if candidate_ids is None else candidate_ids == token
