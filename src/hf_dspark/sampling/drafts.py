"""Drafts of a round: a tree of tokens for each row. A chain is a tree with one child a level; chains of equal lengths
remain on the device as one block.

Whether a node is drawn may depend on everything that is known before: on its ancestors, its earlier siblings, other
branches and their confidences. It must not depend on its own token, nor on what is drawn after it. A node that was
drawn must be verified. What chooses among drawn nodes by their tokens or by their own probabilities is not exact.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from .distributions import Scores, TokenDistribution
from .transfers import to_device

# A distribution of which less is left draws no more children: sums of float32 probabilities are off by as much.
LEAST_MASS = 1e-5


@dataclass(frozen=True)
class Verified:
    """The accepted drafts of a round, and the token after them. [`verify`] returns it on the host."""

    num_accepted: torch.Tensor  # draft tokens, without the bonus token, [R]
    # [R]: the residual draw after a rejection, else the bonus token; -1 if the target has no distribution there.
    next_token_ids: torch.Tensor
    paths: Sequence[Sequence[int]] | None = None  # the accepted places; `None` for chains: the first ones
    has_nan: bool = False  # whether the target's logits had any, if that was asked
    drafts: "Drafts | None" = None  # as the host knows them
    scores: Scores | None = None  # of the target, without a doubt


@dataclass(frozen=True)
class DraftBlock:
    """A chain for each row, before any of it is verified: place 0 is the anchor, place i the i-th token."""

    token_ids: torch.Tensor  # x_1..x_γ, [R, γ]
    # [R, γ], what each token was drawn from: after temperature, truncation and all processors. `None` when the tokens
    # are arg-max: then the distribution is one-hot, and any cut-off is lossless.
    distribution: TokenDistribution | None = None
    confidence_logits: torch.Tensor | None = None  # of c_k, [R, γ], known before x_k was drawn; not of every draft
    # [R, γ], NaN where the draft gave no distribution, since its numbers overflowed; known before x_k was drawn.
    marks: torch.Tensor | None = None
    lengths: torch.Tensor | None = None  # tokens of each row that are verified, [R], on the CPU
    confidence: torch.Tensor | None = None  # calibrated c_k, [R, n], on the host
    rows: Sequence[Sequence[int]] | None = None  # the tokens on the host, -1 for broken ones; `None`: not there yet
    ends: frozenset[int] = frozenset()  # tokens that end a sequence
    parents: ClassVar[None] = None  # each place follows the one before

    @property
    def depths(self) -> list[int]:
        """Tokens on the longest path of each row, `[R]`."""
        return self.lengths.tolist()

    def for_host(self) -> tuple[torch.Tensor | None, ...]:
        """Return what `on_host` is to be given, on the device: tokens, marks and logits of confidences."""
        return (None,) * 3 if self.rows is not None else (self.token_ids, self.marks, self.confidence_logits)

    def on_host(
        self, token_ids: torch.Tensor | None, marks: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> "DraftBlock":
        """Return the block with what came to the host, cut where tokens say so: before a broken one, and after one
        that ends a sequence. That one must stay: dropping a token because of its value would bias the output."""
        if token_ids is None:
            return self
        rows, known = token_ids.tolist(), self.lengths.tolist()
        for row, of_row in zip(rows, [] if marks is None else marks.tolist(), strict=False):
            row[:] = [-1 if math.isnan(mark) else token for token, mark in zip(row, of_row, strict=True)]
        cut = [min(length, _end(row, self.ends)) for length, row in zip(known, rows, strict=True)]
        lengths = self.lengths if cut == known else torch.tensor(cut, device="cpu")
        return replace(self, rows=rows, lengths=lengths, confidence_logits=confidence_logits)

    def packed(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return anchors `[R]` and drafts row by row, `[T]`, as one packed pass reads them."""
        if self.token_ids.shape[1] == 0:
            return anchors
        columns = torch.cat([anchors.to(self.token_ids.device)[:, None], self.token_ids], dim=1)
        if len(columns) == 1:
            return columns[0, : 1 + int(self.lengths)]
        sent = torch.arange(columns.shape[1], device="cpu") <= self.lengths[:, None]
        return columns.flatten()[to_device(sent.flatten().nonzero()[:, 0], columns.device)]

    def prefixes(self, row: int) -> list[tuple[list[int], None]]:
        """Return the drafts up to each place of a row, and its parent where that may have forbidden its token."""
        tokens = self.rows[row]
        return [(tokens[:count], None) for count in range(1 + int(self.lengths[row]))]

    def accepted(self, verified: Verified) -> list[tuple[Sequence[int], list[int]]]:
        """Return the accepted places of each row, and their tokens with the next one."""
        rows = zip(verified.num_accepted.tolist(), verified.next_token_ids.tolist(), self.rows, strict=True)
        return [(range(1, 1 + count), [*drafted[:count], following]) for count, following, drafted in rows]


def _end(token_ids: Sequence[int], ends: frozenset[int]) -> int:
    """Return how many tokens of a row can be verified: those before a broken one, -1, and up to one that ends it."""
    for count, token in enumerate(token_ids):
        if token < 0:
            return count
        if token in ends:
            return count + 1
    return len(token_ids)


@dataclass
class DraftTree:
    """The tree of one row. Parents come before their children, and siblings in the order in which they are tested."""

    token_ids: list[int] = field(default_factory=list)  # of the nodes, [n]
    parents: list[int] = field(default_factory=list)  # their places, [n]
    depths: list[int] = field(default_factory=list)  # 1 for children of the anchor, [n]
    survivals: list[float] = field(default_factory=list)  # predicted probability that the node is accepted, [n]
    known: list[float] = field(default_factory=list)  # what that was predicted from, see `SiblingAcceptance`, [n]
    # What was left of the parent's distribution when the node was drawn, [n]. 0 where the token was not drawn, but
    # known before: such a node is tested against a distribution that has no other token.
    masses: list[float] = field(default_factory=list)
    # place -> its children's distribution, and its row
    distributions: dict[int, tuple[TokenDistribution, int]] = field(default_factory=dict)

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

    def child(self, place: int, token_id: int) -> int | None:
        """Return the first child with this token."""
        matching = (node for node in self.children(place) if self.token_ids[node - 1] == token_id)
        return next(matching, None)

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


@dataclass(frozen=True)
class DraftTrees:
    """A tree of any shape for each row, on the host; asked as a [`DraftBlock`] is. All nodes are verified."""

    trees: Sequence[DraftTree]
    confidence: torch.Tensor | None = None  # along first children

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([tree.num_nodes for tree in self.trees], device="cpu")

    @property
    def depths(self) -> list[int]:
        return [tree.depth for tree in self.trees]

    @property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """The parent of each place, by row."""
        return tuple((0, *tree.parents) for tree in self.trees)

    def packed(self, anchors: torch.Tensor) -> torch.Tensor:
        nodes = [token for tree in self.trees for token in tree.token_ids]
        parts = to_device(nodes, anchors.device, torch.long).split(self.lengths.tolist())
        return torch.cat([part for pair in zip(anchors.split(1), parts, strict=True) for part in pair])

    def prefixes(self, row: int) -> list[tuple[list[int], int | None]]:
        tree = self.trees[row]
        nodes = [(tree.tokens(tree.path(place)), parent) for place, parent in enumerate(tree.parents, start=1)]
        return [([], None), *nodes]

    def accepted(self, verified: Verified) -> list[tuple[Sequence[int], list[int]]]:
        rows = zip(self.trees, verified.paths, verified.next_token_ids.tolist(), strict=True)
        return [(path, [*tree.tokens(path), following]) for tree, path, following in rows]


Drafts = DraftBlock | DraftTrees  # of all rows of a round


class Sampler(Protocol):
    """Draws what a draft model proposes, one level after another. It is supplied by the caller, so that drafts and
    target share their processors."""

    reads_confidence: bool  # whether it needs the confidence of each node before it draws that node's children

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[int] | None] | None:
        """Draw children of the F nodes of a level from logits `[F, V]`, or `[F, candidates]` of tokens
        `candidate_ids`; `confidence_logits` `[F]` are those of c_k after each node.

        Return the tokens of the next level, `[F']`, and the number of each one's parent, which is `None` where each
        node has one child. Return `None` where no level follows.
        """

    def finish(self, confidence_logits: torch.Tensor | None = None) -> Drafts:
        """Return what was drawn; the confidences are those of whole chains, `[R, γ]`."""


class SiblingDistribution:
    """The distribution `[n]` of the children of one node, and what is left of it while they are drawn without
    replacement. It need not sum to one exactly."""

    def __init__(self, probs: np.ndarray) -> None:
        self._probs = probs
        self._cumulative = probs.cumsum(dtype=np.float64)
        self._removed: list[tuple[float, float]] = []  # where a removed entry starts, and its size; ascending
        self._gone: set[int] = set()

    def remove(self, index: int) -> None:
        if index not in self._gone:
            self._gone.add(index)
            size = float(self._probs[index])
            self._removed = sorted([*self._removed, (float(self._cumulative[index]) - size, size)])

    def draw(self, uniform: float) -> tuple[int, float] | None:
        """Draw an entry by a number in [0, 1), and remove it. Return it and the mass that was left, by which the
        probabilities were divided; `None` if too little was left."""
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
