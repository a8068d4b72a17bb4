"""Grows trees of drafts, level by level: the draft says what follows each node, the plan how many children it gets."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..sampling.distributions import largest
from ..sampling.noise import BlockNoise
from ..sampling.trees import DraftTree, SiblingDistribution
from ..scheduling.calibration import calibrated_confidence
from ..scheduling.prompt_lookup import Copy
from ..scheduling.tree_plans import MOST_SIBLINGS, SiblingAcceptance, TreePlan
from .logits_processing import Scores
from .request import Request
from .sampler import ProcessedDistributions


class TreeGrower:
    """What trees have in common, whose children are drawn or the draft's best tokens.

    Args:
        requests (`Sequence[Request]`): The rows.
        plan ([`TreePlan`]): Decides the shape.
        siblings ([`SiblingAcceptance`]): What to expect of children.
        distributions ([`ProcessedDistributions`]): Processes the draft's logits as the target's are.
        max_depths (`Sequence[int]`): How deep the tree of each request may be.
        ends (`frozenset[int]`): Tokens that end a sequence, and have no children.
        copies (`Sequence[Copy]`): What each request may copy. Its tokens are known before anything is drawn.
    """

    reads_confidence = False

    def __init__(
        self,
        requests: Sequence[Request],
        plan: TreePlan,
        siblings: SiblingAcceptance,
        distributions: ProcessedDistributions,
        max_depths: Sequence[int],
        ends: frozenset[int],
        copies: Sequence[Copy],
    ) -> None:
        self.trees = [DraftTree() for _ in requests]
        # c_k, or what stands for it, along the first children: what a chain would have known. [R, depth]
        self.confidence: list[list[float]] = [[] for _ in requests]
        self.is_broken = [False] * len(requests)  # at the first slot: see `Drafter._give_up`
        self._requests, self._plan, self._siblings, self._distributions = requests, plan, siblings, distributions
        self._max_depths, self._ends, self._copies = max_depths, ends, copies
        # Nodes that end a copied path: how many of its tokens they make up.
        self._copied = {(row, 0): 0 for row, copy in enumerate(copies) if copy.token_ids}
        self._unreachable: set[tuple[int, int]] = set()  # nodes whose tokens are forbidden, and those below
        self._depth = 0
        self._level = [(row, 0) for row in range(len(requests))]  # row and place of each node

    @property
    def max_depth(self) -> int:
        return max(self._max_depths)

    def _scores(self, logits: torch.Tensor, candidate_ids: torch.Tensor | None) -> Scores:
        """Process what follows the nodes of a level."""
        paths = []
        if self._distributions.reads_prefixes:
            paths = [
                None if node in self._unreachable else self.trees[node[0]].tokens(self.trees[node[0]].path(node[1]))
                for node in self._level
            ]
        self._scored = self._distributions(
            logits, candidate_ids, [self._requests[row] for row, _ in self._level], paths
        )
        return self._scored

    def _shares(self, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what to expect of the draft's children, `[F, ranks]`, and of which nodes it gave a distribution,
        `[F]`."""
        is_distribution = np.isfinite(known).all(axis=1)
        if self._depth == 0:
            self.is_broken = [not fine for fine in is_distribution.tolist()]
        shares = self._siblings.shares(known)
        if not is_distribution.all():
            shares[~is_distribution] = 0.0
        rows = [row for row, _ in self._level]
        for row, own in dict(zip(rows[::-1], shares[::-1, 0].tolist(), strict=True)).items():
            self.confidence[row].append(own)
        return shares, is_distribution

    def _admit(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the survivals of the children that the nodes may have, `[F, ranks]`, and how many they get, `[F]`."""
        so_far = np.array([self._survival(row, place) for row, place in self._level])
        survivals = shares * so_far[:, None]
        counts = self._plan.admit(self._depth, [row for row, _ in self._level], survivals, self.trees)
        self._depth += 1
        return survivals, counts

    def _copying(self) -> list[int]:
        """Return which nodes of the level end a copied path that goes on."""
        if not self._copied:
            return []
        copied = [(self._copied.get(node), self._copies[node[0]].token_ids) for node in self._level]
        return [number for number, (count, ids) in enumerate(copied) if count is not None and count < len(ids)]

    def _next_copied(self, number: int) -> tuple[int, float]:
        """Return the token that a copied path goes on with, and how often such a one is right."""
        row, place = self._level[number]
        copied = self._copied[row, place]
        return self._copies[row].token_ids[copied], self._copies[row].chances[copied]

    def _add(self, number: int, token: int, survival: float, known: float, mass: float = 0.0) -> int:
        """Add a child to a node of the level, given by its number; return its place."""
        row, place = self._level[number]
        added = self.trees[row].add(place, token, survival, known, mass=mass)
        if self._distributions.reads_prefixes and (
            (row, place) in self._unreachable or self._is_forbidden(number, token)
        ):
            self._unreachable.add((row, added))
        if self._copied:
            copied, tokens = self._copied.get((row, place)), self._copies[row].token_ids
            if copied is not None and copied < len(tokens) and tokens[copied] == token:
                self._copied[row, added] = copied + 1
        return added

    def _is_forbidden(self, number: int, token: int) -> bool:
        """Tell whether processors forbid a token after a node: a copy may ask for any."""
        values, ids = self._scored.values[number], self._scored.candidate_ids
        return not bool((values[token if ids is None else ids[number] == token] > -torch.inf).any())

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


class DrawnTrees(TreeGrower):
    """Draws the children of one level after another. `noise` is that of the draws, `confidence_fits` slope and offset
    of the confidences by depth, `[γ, 2]`."""

    reads_confidence = True  # the probabilities of drawn nodes must not decide about them

    def __init__(self, *common: Any, noise: BlockNoise, confidence_fits: torch.Tensor | None) -> None:
        super().__init__(*common)
        self._noise, self._confidence_fits = noise.draft_uniforms.tolist(), confidence_fits

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        distribution = self._scores(logits, candidate_ids).distribution()
        probs = distribution.probs.cpu().numpy()
        ids = None if distribution.candidate_ids is None else distribution.candidate_ids.cpu().numpy()
        known = self._confidence(confidence_logits, probs)
        shares, is_distribution = self._shares(known)
        wanted: dict[int, list[int | None]] = {}  # tokens of nodes that may copy, in the order of their tests
        copying = self._copying()
        if copying:
            shares = _wider(shares)
            for number in copying:
                shares[number], wanted[number] = self._with_copy(number, shares[number, :-1])
            shares[~is_distribution] = 0.0
        survivals, counts = self._admit(shares)
        parents, level = [], []
        for number, (row, place) in enumerate(self._level):
            count = int(counts[number])
            if count == 0:
                continue
            self.trees[row].distributions[place] = distribution, number
            tokens = wanted[number][:count] if number in wanted else [None] * count
            drawn = self._drawn(row, tokens, SiblingDistribution(probs[number]), None if ids is None else ids[number])
            for order, token, mass in drawn:
                added = self._add(number, token, float(survivals[number, order]), float(known[number, 0]), mass)
                if self._may_grow(row, added):
                    parents.append(number)
                    level.append((row, added))
        self._level = level
        return parents, [self.trees[row].token_ids[place - 1] for row, place in level]

    def _with_copy(self, number: int, shares: np.ndarray) -> tuple[np.ndarray, list[int | None]]:
        """Return shares and tokens of children, in the order of their tests: one is copied, `None` is drawn."""
        token, chance = self._next_copied(number)
        first = int(chance < shares[0])  # before the drawn ones, or after the first of them
        copied = chance * (1.0 - shares[:first].sum())
        together = np.concatenate([shares[:first], [copied], shares[first:] * (1.0 - chance)])
        return np.minimum.accumulate(together), [None] * first + [token] + [None] * (len(shares) - first)

    def _drawn(
        self, row: int, tokens: Sequence[int | None], distribution: SiblingDistribution, ids: np.ndarray | None
    ) -> Iterator[tuple[int, int, float]]:
        """Draw siblings one after another; what is copied is known. A token that was drawn is not copied, too.
        Yields the order of a sibling, its token, and the mass that was left."""
        tree, seen = self.trees[row], set()
        for order, token in enumerate(tokens):
            mass = 0.0
            if token is None:
                drawn = distribution.draw(self._noise[row][tree.num_nodes])
                if drawn is None:
                    return
                index, mass = drawn
                token = index if ids is None else int(ids[index])
            elif token in seen:
                continue
            else:
                for index in [token] if ids is None else np.flatnonzero(ids == token).tolist():
                    distribution.remove(index)
            seen.add(token)
            yield order, token, mass

    def _confidence(self, logits: torch.Tensor | None, probs: np.ndarray) -> np.ndarray:
        """Return c_k after each node, `[F, 1]`. Without a head, what a draft that is right would have."""
        if logits is None:
            return np.square(probs).sum(axis=1, keepdims=True)
        fits = None if self._confidence_fits is None else self._confidence_fits[self._depth : self._depth + 1]
        return calibrated_confidence(logits[:, None], fits).cpu().numpy().astype(float)


class BestTrees(TreeGrower):
    """Takes the draft's best tokens: any tree of them is exact."""

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        scores = self._scores(logits, candidate_ids)
        values = scores.values.float()
        best, index = largest(values.log_softmax(dim=-1), min(MOST_SIBLINGS, values.shape[-1]))
        ids = index if scores.candidate_ids is None else scores.candidate_ids.gather(-1, index)
        parents = self._grow(ids.cpu().numpy(), np.exp(best.cpu().numpy().astype(float)))
        return parents, self._tokens()

    def _grow(self, ids: np.ndarray, known: np.ndarray) -> list[int]:
        """Add children to the nodes of a level, of the draft's best tokens and their probabilities, `[F, ranks]`.
        Return the number of the parent of each node of the next level."""
        shares, is_distribution = self._shares(known)
        copying = [number for number in self._copying() if is_distribution[number]]
        for number in copying:
            order = self._with_copy(number, ids[number], shares[number], known[number])
            for each in (ids, shares, known):
                each[number] = each[number, order]
        survivals, counts = self._admit(shares)
        numbers, ranks = np.nonzero(np.arange(shares.shape[1]) < counts[:, None])
        of_children = (each[numbers, ranks].tolist() for each in (ids, survivals, known))
        parents, level = [], []
        for number, token, survival, basis in zip(numbers.tolist(), *of_children, strict=True):
            row, _ = self._level[number]
            added = self._add(number, token, survival, basis)
            if self._may_grow(row, added):
                parents.append(number)
                level.append((row, added))
        self._level = level
        return parents

    def _with_copy(self, number: int, ids: np.ndarray, shares: np.ndarray, known: np.ndarray) -> list[int]:
        """Put the token to copy among a node's own best ones, in the place of the last if it is none of them, and
        return the order of their tests."""
        token, chance = self._next_copied(number)
        tokens, chances = ids.tolist(), shares.tolist()
        place = tokens.index(token) if token in tokens else -1
        own = chances[place] if token in tokens else 0.0
        chances = [each * (1.0 - chance) for each in chances]
        chances[place] = max(chance, own)
        if token not in tokens:
            ids[place], known[place] = token, known[0]
        shares[:] = chances
        return sorted(range(len(chances)), key=lambda rank: -chances[rank])

    def _tokens(self) -> list[int]:
        return [self.trees[row].token_ids[place - 1] for row, place in self._level]


def _wider(of_ranks: np.ndarray) -> np.ndarray:
    """Return room for one more child of each node, `[F, ranks + 1]`."""
    wider = np.zeros((len(of_ranks), of_ranks.shape[1] + 1), dtype=of_ranks.dtype)
    wider[:, :-1] = of_ranks
    return wider
