"""Grows trees of drafts, level by level: the draft says what follows each node, the plan how many children it gets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..maths.calibration import calibrated_confidence
from ..maths.noise import BlockNoise
from ..maths.sampling import largest
from ..maths.tree_plans import MOST_SIBLINGS, SiblingAcceptance, TreePlan
from ..maths.trees import DraftTree, SiblingLaw
from .ngrams import Copy
from .processing import Scores
from .request import Request
from .sampler import ProcessedLaws


@dataclass(frozen=True)
class _Child:
    """A child that a node may get."""

    token: int | None  # `None`: will be drawn
    share: float  # predicted probability that it is the accepted one, its parent being accepted
    rank: int  # among the draft's own


class TreeGrower:
    """Draws the children of one level after another.

    Args:
        requests (`Sequence[Request]`): The rows.
        plan ([`TreePlan`]): Decides the shape.
        siblings ([`SiblingAcceptance`]): What to expect of children.
        laws ([`ProcessedLaws`]): Processes the draft's logits as the target's are.
        max_depths (`Sequence[int]`): How deep the tree of each request may be.
        noise ([`BlockNoise`], *optional*): Of the draws; without it, the best tokens are taken.
        confidence_fits (`torch.Tensor` of shape `[γ, 2]`, *optional*): Slope and offset of the confidences, by depth.
        ends (`frozenset[int]`): Tokens that end a sequence, and have no children.
        copies (`Sequence[Copy]`): What each request may copy. Its tokens are known before anything is drawn.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        plan: TreePlan,
        siblings: SiblingAcceptance,
        laws: ProcessedLaws,
        max_depths: Sequence[int],
        noise: BlockNoise | None,
        confidence_fits: torch.Tensor | None,
        ends: frozenset[int],
        copies: Sequence[Copy],
    ) -> None:
        self.trees = [DraftTree() for _ in requests]
        # c_k, or what stands for it, along the first children: what a chain would have known. [R, depth]
        self.confidence: list[list[float]] = [[] for _ in requests]
        self.is_broken = [False] * len(requests)  # at the first slot: see `Drafter._give_up`
        self._requests, self._plan, self._siblings, self._laws = requests, plan, siblings, laws
        self._max_depths, self._confidence_fits, self._ends = max_depths, confidence_fits, ends
        self._noise = None if noise is None else noise.draft.tolist()
        self._copies = copies
        # Nodes that end a copied path: how many of its tokens they make up.
        self._copied = {(row, 0): 0 for row, copy in enumerate(copies) if copy.token_ids}
        self._depth = 0
        self._level = [(row, 0) for row in range(len(requests))]  # row and place of each node

    @property
    def max_depth(self) -> int:
        return max(self._max_depths)

    @property
    def reads_confidence(self) -> bool:
        """Whether nodes are drawn: then their own probabilities must not decide about them."""
        return self._noise is not None

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        """Draw the children of the nodes of a level, in order.

        Args:
            logits (`torch.FloatTensor` of shape `[F, n]`): What follows each node, in float32.
            candidate_ids (`torch.LongTensor` of shape `[F, n]`, *optional*): The tokens that these are of.
            confidence_logits (`torch.FloatTensor` of shape `[F]`, *optional*): Of c_k after each node.

        Returns:
            The nodes of the next level: the number of each one's parent in this level, and its token.
        """
        rows = [row for row, _ in self._level]
        paths = []
        if self._laws.reads_prefixes:
            paths = [self.trees[row].tokens(self.trees[row].path(place)) for row, place in self._level]
        scores = self._laws(logits, candidate_ids, [self._requests[row] for row in rows], paths)
        if self._noise is None:
            (best_ids, known), law, probs = _best_tokens(scores), None, None
        else:
            best_ids, law = [], scores.law()
            probs = law.probs.cpu().numpy()
            ids = None if law.candidate_ids is None else law.candidate_ids.cpu().numpy()
            known = self._confidence(confidence_logits, probs)
        is_law = np.isfinite(known).all(axis=1)
        if self._depth == 0:
            self.is_broken = [not fine for fine in is_law.tolist()]
        of_ranks = self._siblings.shares(known)
        if not is_law.all():
            of_ranks[~is_law] = 0.0
        shares, bases = of_ranks.tolist(), known.tolist()
        so_far = [self._survival(row, place) for row, place in self._level]
        for row, own in dict(zip(rows[::-1], shares[::-1], strict=True)).items():
            self.confidence[row].append(own[0])
        # Most nodes have nothing to copy: their children are made when it is known how many they get.
        with_copy = {number: self._with_copy(number, shares[number], best_ids) for number in self._copying()}
        if with_copy:
            of_ranks = np.pad(of_ranks, ((0, 0), (0, 1)))
            for number, each in with_copy.items():
                of_ranks[number] = 0.0
                of_ranks[number, : len(each)] = [child.share * is_law[number] for child in each]
        survivals = of_ranks * np.array(so_far)[:, None]
        counts = self._plan.admit(self._depth, rows, survivals, self.trees).tolist()
        self._depth += 1
        parents, level = [], []
        for number, (row, place) in enumerate(self._level):
            count = counts[number]
            if count == 0:
                continue
            if number in with_copy:
                wanted = with_copy[number][:count]
            else:
                wanted = self._own_children(number, shares[number][:count], best_ids)
            if self._noise is not None:
                self.trees[row].laws[place] = law, number
                wanted = self._drawn(row, wanted, SiblingLaw(probs[number]), None if ids is None else ids[number])
            for child, mass in wanted if self._noise is not None else ((each, 0.0) for each in wanted):
                basis = bases[number][min(child.rank, len(bases[number]) - 1)]
                added = self._add(row, place, child.token, so_far[number] * child.share, basis, mass)
                if self._may_grow(row, added):
                    parents.append(number)
                    level.append((row, added))
        self._level = level
        return parents, [self.trees[row].token_ids[place - 1] for row, place in level]

    def _own_children(self, number: int, shares: Sequence[float], best_ids: list[list[int]]) -> list["_Child"]:
        """Return as many of the draft's own children as there are shares, in the order of their tests."""
        tokens = [None] * len(shares) if self._noise is not None else best_ids[number]
        pairs = enumerate(zip(tokens, shares, strict=False))
        return [_Child(token, share, rank) for rank, (token, share) in pairs]

    def _copying(self) -> list[int]:
        """Return which nodes of the level end a copied path that goes on."""
        if not self._copied:
            return []
        copied = [(self._copied.get(node), self._copies[node[0]].token_ids) for node in self._level]
        return [number for number, (count, ids) in enumerate(copied) if count is not None and count < len(ids)]

    def _with_copy(self, number: int, shares: Sequence[float], best_ids: list[list[int]]) -> list["_Child"]:
        """Return the children that a node may have, in the order of their tests: the draft's, and one to copy."""
        row, place = self._level[number]
        children, copied = self._own_children(number, shares, best_ids), self._copied[row, place]
        token, chance = self._copies[row].token_ids[copied], self._copies[row].chances[copied]
        if self._noise is not None:
            first = int(chance < shares[0])  # before the drawn ones, or after the first of them
            before = sum(child.share for child in children[:first])
            copy = _Child(token, chance * (1.0 - before), 0)
            rest = [replace(child, share=child.share * (1.0 - chance)) for child in children[first:]]
            return _falling([*children[:first], copy, *rest])
        others = [replace(child, share=child.share * (1.0 - chance)) for child in children if child.token != token]
        own = [child.share for child in children if child.token == token]
        best = _Child(token, max([chance, *own]), 0)
        return sorted([best, *others], key=lambda child: -child.share)

    def _drawn(
        self, row: int, wanted: Sequence["_Child"], law: SiblingLaw, ids: np.ndarray | None
    ) -> Iterator[tuple["_Child", float]]:
        """Draw siblings one after another; what is copied is known. A token that was drawn is not copied, too."""
        tree, seen = self.trees[row], set()
        for child in wanted:
            mass = 0.0
            if child.token is None:
                drawn = law.draw(self._noise[row][tree.num_nodes])
                if drawn is None:
                    return
                index, mass = drawn
                child = replace(child, token=index if ids is None else int(ids[index]))
            elif child.token in seen:
                continue
            else:
                for index in [child.token] if ids is None else np.flatnonzero(ids == child.token).tolist():
                    law.remove(index)
            seen.add(child.token)
            yield child, mass

    def _add(self, row: int, place: int, token: int, survival: float, known: float, mass: float) -> int:
        tree, copied = self.trees[row], self._copied.get((row, place))
        added = tree.add(place, token, survival, known, mass=mass)
        tokens = self._copies[row].token_ids
        if copied is not None and copied < len(tokens) and tokens[copied] == token:
            self._copied[row, added] = copied + 1
        return added

    def _may_grow(self, row: int, place: int) -> bool:
        tree = self.trees[row]
        inside = self._depth < self._max_depths[row] and tree.token_ids[place - 1] not in self._ends
        return inside and tree.survivals[place - 1] >= self._plan.cut

    def copy_on(self, rooms: Sequence[int]) -> None:
        """Let copied paths go on below the draft's depth, as far as they pay; `rooms` are the deepest that fit."""
        for (row, place), copied in list(self._copied.items()):
            tree, copy = self.trees[row], self._copies[row]
            if any(tree.parents[node - 1] == place and (row, node) in self._copied for node in tree.children(place)):
                continue
            survival = self._survival(row, place)
            for token, chance in zip(copy.token_ids[copied:], copy.chances[copied:], strict=True):
                survival *= chance
                is_end = place > 0 and tree.token_ids[place - 1] in self._ends
                if is_end or tree.depth_of(place) >= rooms[row] or not self._plan.has_room(tree, self.trees, survival):
                    break
                known = [node for node in tree.children(place) if tree.token_ids[node - 1] == token]
                if known:
                    break
                place = tree.add(place, token, survival)

    def _survival(self, row: int, place: int) -> float:
        if place == 0:
            return float(self._max_depths[row] > 0)
        return self.trees[row].survivals[place - 1]

    def _confidence(self, logits: torch.Tensor | None, probs: np.ndarray) -> np.ndarray:
        """Return c_k after each node, `[F, 1]`. Without a head, what a draft that is right would have."""
        if logits is None:
            return np.square(probs).sum(axis=1, keepdims=True)
        fits = None if self._confidence_fits is None else self._confidence_fits[self._depth : self._depth + 1]
        return calibrated_confidence(logits[:, None], fits).cpu().numpy().astype(float)


def _falling(children: list[_Child]) -> list[_Child]:
    """Return the same children, none with a larger share than one before it."""
    shares = np.minimum.accumulate([child.share for child in children])
    return [replace(child, share=float(share)) for child, share in zip(children, shares, strict=True)]


def _best_tokens(scores: Scores) -> tuple[list[list[int]], np.ndarray]:
    """Return the best tokens of each node and the draft's probabilities of them, `[F, ranks]`."""
    values = scores.values.float()
    best, index = largest(values.log_softmax(dim=-1), min(MOST_SIBLINGS, values.shape[-1]))
    ids = index if scores.candidate_ids is None else scores.candidate_ids.gather(-1, index)
    return ids.tolist(), np.exp(best.cpu().numpy().astype(float))
