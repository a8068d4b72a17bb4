"""Plan draft trees: expect the acceptance of a node before it is drawn, and admit the nodes that are worth a place.

A level is decided from survivals, confidences and distributions of the levels above it, known before its draws.
"""

import functools
import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..sampling.drafts import DraftTree

MOST_SIBLINGS = 6
MOST_NODES = 63  # of one request
LEAST_PROBABILITY = 1e-6
# Best tokens are grown down to this part of the survival that the last node sent is expected to have.
BELOW_EXPECTATION = 0.5
USUAL_BEST = (0.72, 0.10, 0.045, 0.025, 0.015, 0.01)  # of a draft for which nothing was measured
USUAL_DRAWN = ((1.0, 0.0), (0.7, -1.0), (0.7, -1.5), (0.2, -1.6))


@dataclass(frozen=True)
class SiblingAcceptance:
    """The probability that a child is the one that is accepted, from what is known before it is drawn."""

    is_drawn: bool  # else drafts are the draft's best tokens
    # Slope and offset of a logit. For best tokens one pair, on the draft's own probability of the child. For drawn
    # ones a pair for each rank, on c_k of the parent: of being accepted after those before it were rejected.
    fits: Sequence[tuple[float, float]]
    means: Sequence[Sequence[float]]  # of being accepted where the parent was, by depth and rank, [γ, ranks]
    # How often the best node of a tree was accepted, the second best, and so on, if it was counted. Trees follow what
    # is known in each round, so they commit more than the mean tree.
    best: Sequence[float] = ()
    # How often the first token of a chain was accepted, the first two, and so on, if it was counted: drawn ones are
    # verified as a whole, and easy stretches come together.
    chain: Sequence[float] = ()
    is_measured: bool = True  # whether calibration has found this for the draft

    @functools.cached_property
    def _fits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slopes, and by what an offset multiplies the odds against a child."""
        slopes, offsets = np.array(self.fits, dtype=float).T
        return slopes, np.exp(-offsets)

    def shares(self, known: np.ndarray) -> np.ndarray:
        """Return the expectation for each rank, `[F, ranks]`: of the draft's probabilities of its best tokens,
        `[F, ranks]`, or of confidences `[F, 1]`."""
        slopes, factors = self._fits
        inside = known.clip(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
        chances = 1.0 / (1.0 + factors * ((1.0 - inside) / inside) ** slopes)
        if self.is_drawn:
            chances[:, 1:] *= np.cumprod(1.0 - chances, axis=1)[:, :-1]
        return np.minimum.accumulate(chances, axis=1)

    @functools.cached_property
    def _means(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, self.means))

    def descendants(self, depth: int, most: int) -> np.ndarray:
        """Return the expected survivals of the descendants of a node at a depth given its own, the best first."""
        return _descendants(self._means, depth, most)

    def best_nodes(self, most: int) -> np.ndarray:
        """Return the expected survivals of the nodes of a tree, the best first: counted, or those of the mean tree."""
        return np.array(self.best[:most]) if self.best else self.descendants(0, most)

    def of_chain(self) -> np.ndarray:
        """Return the survivals of a chain, `[γ]`: counted, or those of the first children of the mean tree."""
        return np.array(self.chain) if self.chain else np.cumprod([row[0] for row in self.means])


def usual_acceptance(is_drawn: bool, block_size: int) -> SiblingAcceptance:
    """Return what holds for many drafts, for one of which nothing was measured."""
    fits = USUAL_DRAWN if is_drawn else ((1.0, 0.0),)
    return SiblingAcceptance(is_drawn, fits, (USUAL_BEST,) * block_size, is_measured=False)


@functools.lru_cache(maxsize=256)
def _descendants(means: tuple[tuple[float, ...], ...], depth: int, most: int) -> np.ndarray:
    """Walk down the mean tree, best first."""
    found: list[float] = []
    waiting = [(-1.0, depth - 1)]
    while waiting and len(found) <= most:
        negative, level = heapq.heappop(waiting)
        found.append(-negative)
        for share in means[level + 1] if level + 1 < len(means) else ():
            heapq.heappush(waiting, (negative * share, level + 1))
    return np.array(found[1:])


@dataclass
class TreePlan:
    """One round's trees, planned level by level: every node that survives often enough to pay for its place."""

    cut: float  # the survival that a node must have, as far as is known
    num_nodes: int  # of each request at most
    in_all: int  # nodes of all requests at most
    base_tokens: int = 0  # of a round without drafts
    # Of rounds that verify 0, 1, ... nodes, [in_all + 1]: then the best number of the grown nodes is sent.
    seconds: np.ndarray | None = None
    drafts: bool = True  # whether the draft runs, and not only what prompt lookup found is sent
    gain: float = 1.0  # expected throughput over that of the best chain

    def admit(self, depth: int, rows: Sequence[int], survivals: np.ndarray, trees: Sequence[DraftTree]) -> np.ndarray:
        """Return how many children each node of a level gets, `[F]`. Anchors are at depth 0; `rows` `[F]` tell whose
        trees the nodes are in. The survivals `[F, ranks]` that are predicted for the children fall with the rank."""
        grown = np.array([tree.num_nodes for tree in trees])
        reached = _best(survivals, survivals >= self.cut, self.num_nodes - grown, np.asarray(rows))
        return _best(survivals, reached, np.array([self.in_all - grown.sum()])).sum(axis=1)

    def has_room(self, tree: DraftTree, trees: Sequence[DraftTree], survival: float) -> bool:
        """Tell whether one more node of such a survival, known before, may join a tree that is otherwise grown."""
        in_all = sum(each.num_nodes for each in trees)
        return survival >= self.cut and tree.num_nodes < self.num_nodes and in_all < self.in_all

    def kept(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Return the places that are sent, of trees of best tokens. Of drawn nodes all must be sent."""
        survivals = np.sort([survival for tree in trees for survival in tree.survivals])[::-1]
        count = len(survivals)
        if self.seconds is not None:
            tokens = self.base_tokens + np.concatenate([[0.0], survivals.cumsum()])
            count = int((tokens / self.seconds[: len(tokens)]).argmax())
        cut = float(survivals[count - 1]) if count else 2.0
        return [[place for place, each in enumerate(tree.survivals, start=1) if each >= cut] for tree in trees]


class BudgetPlan(TreePlan):
    """The best `num_nodes` of each request, whatever they cost."""

    def __init__(self, num_nodes: int, siblings: SiblingAcceptance) -> None:
        super().__init__(cut=0.0, num_nodes=num_nodes, in_all=sys.maxsize)
        self._siblings = siblings

    def admit(self, depth: int, rows: Sequence[int], survivals: np.ndarray, trees: Sequence[DraftTree]) -> np.ndarray:
        counts, rows, self.cut = np.zeros(len(rows), dtype=int), np.asarray(rows), 1.0
        for row in np.unique(rows).tolist():
            children, above, left = survivals[rows == row], trees[row].survivals, self.num_nodes
            if self._siblings.is_drawn:
                above, left = (), left - len(above)
            if left < 1:
                continue
            flat, below = children.ravel(), self._siblings.descendants(depth + 1, left)
            pool = np.concatenate([above, flat, np.multiply.outer(flat, below).ravel()])
            cut = np.partition(pool, len(pool) - left)[len(pool) - left] if left < len(pool) else 0.0
            if not self._siblings.is_drawn:  # a better node may take the place of one that was grown
                cut *= BELOW_EXPECTATION
            taken = _best(children, children >= max(cut, LEAST_PROBABILITY), np.array([left]))
            counts[rows == row] = taken.sum(axis=1)
            self.cut = min(self.cut, cut)
        return counts

    def has_room(self, tree: DraftTree, trees: Sequence[DraftTree], survival: float) -> bool:
        fits = not self._siblings.is_drawn or tree.num_nodes < self.num_nodes
        return survival >= max(self.cut, LEAST_PROBABILITY) and fits

    def kept(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        orders = (np.argsort([-survival for survival in tree.survivals], kind="stable") for tree in trees)
        return [sorted((1 + order[: self.num_nodes]).tolist()) for order in orders]


def _best(survivals: np.ndarray, reached: np.ndarray, most: np.ndarray, owners: np.ndarray | int = 0) -> np.ndarray:
    """Return the best of those that are reached, `most[owner]` of each owner, `[F, ranks]`. Of equals the first are
    taken, and survivals fall with the rank: so no child is left out before one that is taken."""
    owners = np.broadcast_to(owners, len(survivals))
    if (np.bincount(owners, reached.sum(axis=1), len(most)) <= most).all():
        return reached
    places = np.flatnonzero(reached)
    of_place = owners[places // reached.shape[1]]
    order = np.argsort(2.0 * of_place - survivals.ravel()[places], kind="stable")  # of each owner, the best first
    ascending = of_place[order]
    number = np.arange(len(order)) - np.searchsorted(ascending, ascending)  # among those of the same owner
    kept = reached.copy()
    kept.ravel()[places[order[number >= most[ascending]]]] = False
    return kept
