"""Samplers of drafts, processed as the target's tokens are: chains, and trees that are grown level by level. The draft
gives the distribution of each node's children, the plan their number."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from ..sampling.distributions import Scores, TokenDistribution, draw, largest
from ..sampling.drafts import DraftBlock, DraftTree, DraftTrees, SiblingDistribution
from ..sampling.transfers import to_device, to_host
from ..scheduling.calibration import calibrated_confidence
from ..scheduling.prompt_lookup import LookupMatch
from ..scheduling.tree_plans import LEAST_PROBABILITY, MOST_SIBLINGS, SiblingAcceptance, TreePlan
from .logits_processing import DraftProcessor
from .request import Request

Child = tuple[int, int, float, float, float]  # number of its parent in the level, and what `DraftTree.add` takes


class Chains:
    """Draws a chain for each request, by the noise `[R, γ]`; without it, the arg-max.

    `lacks_head` asks for confidences that follow from the distributions alone, before they are drawn from: what a
    draft that is right would expect, the sum of squares, and of the arg-max its probability.
    """

    reads_confidence = False  # a chain is cut after it was drawn, by confidences that were known before

    def __init__(
        self,
        requests: Sequence[Request],
        processor: DraftProcessor,
        uniforms: torch.Tensor | None,
        lacks_head: bool = False,
    ) -> None:
        self.requests = requests
        self.processor, self.uniforms, self.lacks_head = processor, uniforms, lacks_head
        self.token_ids: list[torch.Tensor] = []  # of each level, [R]
        self._distributions: list[TokenDistribution | None] = []
        self.is_forced: list[list[bool]] = []  # where processors leave one token alone, known before its draw, [γ][R]
        self._expected: list[torch.Tensor] = []  # acceptance of each level, [R]
        self._best: list[torch.Tensor] = []  # scores of arg-max tokens, NaN where there was no distribution

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        token_ids, distribution = self.draw(logits, candidate_ids)
        self.token_ids.append(token_ids)
        self._distributions.append(distribution)
        return token_ids, None

    def draw(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, TokenDistribution | None]:
        """Return a token for each row, `[R]`, and what it was drawn from, `None` for an arg-max."""
        prefixes = []
        if self.processor.reads_prefixes:
            drafted = torch.stack(self.token_ids, dim=1).tolist() if self.token_ids else [[]] * len(self.requests)
            rows = list(zip(self.requests, drafted, strict=True))
            prefixes = [request.prefix(tokens) for request, tokens in rows]
            self.is_forced.append([bool(request.forced(tokens, 1)) for request, tokens in rows])
        scores = self.processor(logits, candidate_ids, prefixes)
        if self.uniforms is None:
            best, token_ids = scores.best()
            self._best.append(best)
            if self.lacks_head:
                self._expected.append((best - scores.values.logsumexp(dim=-1)).exp())
            return token_ids, None
        distribution = scores.distribution()
        if self.lacks_head:
            self._expected.append(distribution.probs.square().sum(dim=-1))
        return draw(distribution, self.uniforms[:, len(self.token_ids)]), distribution

    def finish(self, confidence_logits: torch.Tensor | None = None) -> DraftBlock:
        drawn = None if self.uniforms is None else TokenDistribution.stack(self._distributions)
        marks = torch.stack(self._best, dim=1) if drawn is None else drawn.probs[..., 0]
        confidence_logits = self.expected_logits() if self.lacks_head else confidence_logits
        return DraftBlock(torch.stack(self.token_ids, dim=1), drawn, confidence_logits, marks)

    def expected_logits(self) -> torch.Tensor:
        return torch.stack(self._expected, dim=1).logit(LEAST_PROBABILITY)


@dataclass
class TreeSampler(ABC):
    """Base class that expands draft trees level by level."""

    requests: Sequence[Request]  # the rows
    plan: TreePlan  # decides the shape
    siblings: SiblingAcceptance  # what to expect of children
    processor: DraftProcessor  # processes the draft's logits as the target's are
    max_depths: Sequence[int]  # how deep the draft may grow the tree of each request
    rooms: Sequence[int]  # how deep it may become by prompt lookup
    ends: frozenset[int]  # tokens that end a sequence, and have no children
    matches: Sequence[LookupMatch]  # of each request, tokens that are known before anything is drawn
    reads_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.trees = [DraftTree() for _ in self.requests]
        self.is_broken = [False] * len(self.requests)  # whether the draft gave no distribution after the anchor
        # c_k, or what stands for it, along the first children: what a chain would have known. [R, depth]
        self._confidence: list[list[float]] = [[] for _ in self.requests]
        # Nodes that end a matched path, and how it goes on: tokens, and how often such ones are right.
        self._matched = {
            (row, 0): list(zip(match.token_ids, match.chances, strict=True)) for row, match in enumerate(self.matches)
        }
        self._unreachable: set[tuple[int, int]] = set()  # nodes whose tokens are forbidden, and those below
        self._depth = 0
        self._level = [(row, 0) for row in range(len(self.requests))]  # row and place of each node

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[int]] | None:
        prefixes = []
        for row, place in self._level if self.processor.reads_prefixes else ():
            tree, can_be_reached = self.trees[row], (row, place) not in self._unreachable
            tokens, request = tree.tokens(tree.path(place)), self.requests[row]
            prefixes.append(request.prefix(tokens) if can_be_reached else None)
            most = self.rooms[row] - len(tokens) if can_be_reached and not self._matched.get((row, place)) else 0
            if forced := request.forced(tokens, most):
                self._matched[row, place] = [(token, 1.0) for token in forced]
        scores = self.processor(logits, candidate_ids, prefixes)
        parents, level = [], []
        for number, token, *facts, mass in self._children(scores, confidence_logits):
            row, place = self._level[number]
            added = self.trees[row].add(place, token, *facts, mass=mass)
            may_forbid = self.processor.reads_prefixes
            if (row, place) in self._unreachable or (may_forbid and _is_forbidden(scores, number, token)):
                self._unreachable.add((row, added))
            following = self._matched.get((row, place))
            if following and following[0][0] == token:
                self._matched[row, added] = following[1:]
            inside = self._depth < self.max_depths[row] and token not in self.ends
            if inside and self._survival(row, added) >= self.plan.cut:
                parents.append(number)
                level.append((row, added))
        self._level = level
        if not level:
            return None
        tokens = [self.trees[row].token_ids[place - 1] for row, place in level]
        return to_device(tokens, logits.device), parents

    @abstractmethod
    def _children(self, scores: Scores, confidence_logits: torch.Tensor | None) -> Iterator[Child]:
        """Yield the children of the nodes of a level, each once those before it have joined the tree."""

    def finish(self, confidence_logits: torch.Tensor | None = None) -> DraftTrees:
        for node in list(self._matched):
            self._lengthen(*node)
        confidence = None
        if any(self._confidence):
            rows = [torch.tensor(row, device="cpu") for row in self._confidence]
            confidence = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        return DraftTrees(self.trees, confidence)

    def _shares(self, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return expected acceptance of the draft's children, `[F, ranks]`, and of which nodes it gave a distribution,
        `[F]`."""
        is_distribution = np.isfinite(known).all(axis=1)
        if self._depth == 0:
            self.is_broken = [not fine for fine in is_distribution.tolist()]
        shares = self.siblings.shares(known)
        shares[~is_distribution] = 0.0
        rows = [row for row, _ in self._level]
        for row, own in dict(zip(rows[::-1], shares[::-1, 0].tolist(), strict=True)).items():
            self._confidence[row].append(own)
        return shares, is_distribution

    def _admit(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the survivals of the children that the nodes may have, `[F, ranks]`, and how many they get, `[F]`."""
        so_far = np.array([self._survival(row, place) for row, place in self._level])
        survivals = shares * so_far[:, None]
        counts = self.plan.admit(self._depth, [row for row, _ in self._level], survivals, self.trees)
        self._depth += 1
        return survivals, counts

    def _survival(self, row: int, place: int) -> float:
        return self.trees[row].survivals[place - 1] if place else float(self.max_depths[row] > 0)

    def _matching(self) -> dict[int, tuple[int, float]]:
        """Return, by number, which nodes of the level end a matched path, and what comes next."""
        following = enumerate(map(self._matched.get, self._level))
        return {number: each[0] for number, each in following if each}

    def _lengthen(self, row: int, place: int) -> None:
        """Let a matched path go on below the draft's depth, as far as it pays."""
        tree, following, survival = self.trees[row], self._matched[row, place], self._survival(row, place)
        if any((row, node) in self._matched for node in tree.children(place)):
            return
        for token, chance in following:
            survival *= chance
            is_end = place > 0 and tree.token_ids[place - 1] in self.ends
            is_full = tree.depth_of(place) >= self.rooms[row] or not self.plan.has_room(tree, self.trees, survival)
            if is_end or is_full or tree.child(place, token) is not None:
                break
            place = tree.add(place, token, survival)


@dataclass
class DrawnTrees(TreeSampler):
    """Draws the children of one level after another."""

    uniforms: Sequence[Sequence[float]]  # of the draws of each request, one for each node
    confidence_fits: torch.Tensor | None  # slope and offset of the confidences by depth, [γ, 2], on the CPU
    reads_confidence: ClassVar[bool] = True  # the probabilities of drawn nodes must not decide about them

    def _children(self, scores: Scores, confidence_logits: torch.Tensor | None) -> Iterator[Child]:
        distribution = scores.distribution()
        parts = [distribution.probs]
        if confidence_logits is not None:
            parts.append(confidence_logits[:, None])
        if distribution.candidate_ids is None:
            (probs, *known), ids = to_host(*parts), None
        else:
            probs, *known, ids = to_host(*parts, distribution.candidate_ids)
            distribution, ids = TokenDistribution(probs, ids), ids.numpy()  # verified on the host
        probs = probs.numpy()
        if known:
            fits = None if self.confidence_fits is None else self.confidence_fits[self._depth : self._depth + 1]
            known = calibrated_confidence(known[0], fits).numpy().astype(float)
        else:  # what a draft that is right would have
            known = np.square(probs).sum(axis=1, keepdims=True)
        shares, is_distribution = self._shares(known)
        wanted: dict[int, list[int | None]] = {}  # tokens of nodes with a match, in the order of their tests
        matching = self._matching()
        if matching:
            shares = np.pad(shares, ((0, 0), (0, 1)))  # room for one more child of each node
            for number, (token, chance) in matching.items():
                shares[number], wanted[number] = _with_match(shares[number, :-1], token, chance)
            shares[~is_distribution] = 0.0
        survivals, counts = self._admit(shares)
        for number, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            row, place = self._level[number]
            self.trees[row].distributions[place] = distribution, number
            tokens = wanted[number][:count] if number in wanted else [None] * count
            drawn = self._drawn(row, tokens, SiblingDistribution(probs[number]), None if ids is None else ids[number])
            for order, token, mass in drawn:
                yield number, token, float(survivals[number, order]), float(known[number, 0]), mass

    def _drawn(
        self, row: int, tokens: Sequence[int | None], distribution: SiblingDistribution, ids: np.ndarray | None
    ) -> Iterator[tuple[int, int, float]]:
        """Draw siblings one after another; those of a match are known. A token that was drawn is not used again.
        Yields the order of a sibling, its token, and the mass that was left."""
        tree, seen = self.trees[row], set()
        for order, token in enumerate(tokens):
            mass = 0.0
            if token is None:
                drawn = distribution.draw(self.uniforms[row][tree.num_nodes])
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


class BestTrees(TreeSampler):
    """Takes the draft's best tokens: any tree of them is exact."""

    def _children(self, scores: Scores, confidence_logits: torch.Tensor | None) -> Iterator[Child]:
        values = scores.values.float()
        best, index = largest(values.log_softmax(dim=-1), min(MOST_SIBLINGS, values.shape[-1]))
        ids = index if scores.candidate_ids is None else scores.candidate_ids.gather(-1, index)
        best, ids = (each.numpy() for each in to_host(best, ids))
        known = np.exp(best.astype(float))
        shares, is_distribution = self._shares(known)
        for number, (token, chance) in self._matching().items():
            if is_distribution[number]:
                order = _put_match(ids[number], shares[number], known[number], token, chance)
                for each in (ids, shares, known):
                    each[number] = each[number, order]
        survivals, counts = self._admit(shares)
        numbers, ranks = np.nonzero(np.arange(shares.shape[1]) < counts[:, None])
        of_children = (each[numbers, ranks].tolist() for each in (ids, survivals, known))
        yield from zip(numbers.tolist(), *of_children, itertools.repeat(0.0), strict=False)

    def finish(self, confidence_logits: torch.Tensor | None = None) -> DraftTrees:
        drafts = super().finish()
        kept = zip(self.trees, self.plan.kept(self.trees), strict=True)
        return replace(drafts, trees=[tree.only(places) for tree, places in kept])


def _with_match(shares: np.ndarray, token: int, chance: float) -> tuple[np.ndarray, list[int | None]]:
    """Return shares and tokens of children, in the order of their tests: one is of a match, `None` is drawn."""
    first = int(chance < shares[0])  # before the drawn ones, or after the first of them
    own = chance * (1.0 - shares[:first].sum())
    together = np.concatenate([shares[:first], [own], shares[first:] * (1.0 - chance)])
    return np.minimum.accumulate(together), [None] * first + [token] + [None] * (len(shares) - first)


def _put_match(ids: np.ndarray, shares: np.ndarray, known: np.ndarray, token: int, chance: float) -> list[int]:
    """Put the token of a match among a node's own best ones, in the place of the last if it is none of them, and
    return the order of their tests."""
    tokens, chances = ids.tolist(), shares.tolist()
    place = tokens.index(token) if token in tokens else -1
    own = chances[place] if token in tokens else 0.0
    chances = [each * (1.0 - chance) for each in chances]
    chances[place] = max(chance, own)
    if token not in tokens:
        ids[place], known[place] = token, known[0]
    shares[:] = chances
    return sorted(range(len(chances)), key=lambda rank: -chances[rank])


def _is_forbidden(scores: Scores, number: int, token: int) -> bool:
    """Tell whether processors forbid a token after a node: prompt lookup may propose any."""
    values, ids = scores.values[number], scores.candidate_ids
    return not bool((values[token if ids is None else ids[number] == token] > -torch.inf).any())
