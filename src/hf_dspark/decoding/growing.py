"""Grows trees of drafts, level by level: the draft says what follows each node, the plan how many children it gets."""

from collections.abc import Sequence

import numpy as np
import torch

from ..maths.calibration import calibrated_confidence
from ..maths.noise import BlockNoise
from ..maths.sampling import largest
from ..maths.tree_plans import MOST_SIBLINGS, SiblingAcceptance, TreePlan
from ..maths.trees import DraftTree, draw_siblings
from .processing import Scores
from .request import Request
from .sampler import ProcessedLaws


class TreeGrower:
    """Draws the children of one level after another.

    Args:
        requests (`Sequence[Request]`): The rows.
        plan ([`TreePlan`]): Decides the shape.
        siblings ([`SiblingAcceptance`]): What to expect of children.
        laws ([`ProcessedLaws`]): Processes the draft's logits as the target's are.
        max_depths (`Sequence[int]`): How deep the tree of each request may be.
        noise ([`BlockNoise`], *optional*): Of the draws; without it, the best tokens are taken.
        temperatures (`Sequence[float]`, *optional*): Of the confidences, by depth.
        ends (`frozenset[int]`): Tokens that end a sequence, and have no children.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        plan: TreePlan,
        siblings: SiblingAcceptance,
        laws: ProcessedLaws,
        max_depths: Sequence[int],
        noise: BlockNoise | None,
        temperatures: Sequence[float] | None,
        ends: frozenset[int],
    ) -> None:
        self.trees = [DraftTree() for _ in requests]
        # c_k, or what stands for it, along the first children: what a chain would have known. [R, depth]
        self.confidence: list[list[float]] = [[] for _ in requests]
        self.is_broken = torch.zeros(len(requests), 1, dtype=torch.bool)  # the first slot: see `Drafter._give_up`
        self._requests, self._plan, self._siblings, self._laws = requests, plan, siblings, laws
        self._max_depths, self._temperatures, self._ends = max_depths, temperatures, ends
        self._noise = None if noise is None else noise.draft.tolist()
        self._depth = 0
        self._level = [(row, 0) for row in range(len(requests))]  # row and place of each node

    @property
    def max_depth(self) -> int:
        return max(self._max_depths)

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
        paths = [self.trees[row].tokens(self.trees[row].path(place)) for row, place in self._level]
        scores = self._laws(logits, candidate_ids, [self._requests[row] for row in rows], paths)
        if self._noise is None:
            best_ids, known = _best_tokens(scores)
        else:
            law = scores.law()
            probs = law.probs.cpu().numpy()
            known = self._confidence(confidence_logits, probs)
        is_broken = ~np.isfinite(known).all(axis=1)
        if self._depth == 0:
            self.is_broken = torch.from_numpy(is_broken)[:, None]
        shares = self._siblings.shares(np.where(is_broken[:, None], 0.0, known))
        so_far = np.array([self._survival(row, place) for row, place in self._level])
        survivals = np.where(is_broken[:, None], 0.0, so_far[:, None] * shares)
        for row, first in dict(zip(rows[::-1], shares[::-1, 0], strict=True)).items():
            self.confidence[row].append(float(first))
        counts = self._plan.admit(self._depth, rows, survivals, self.trees)
        parents, tokens, level = [], [], []
        self._depth += 1
        for number, (row, place) in enumerate(self._level):
            tree, count = self.trees[row], int(counts[number])
            if self._noise is None:
                children = [(token, 0.0) for token in best_ids[number][:count]]
            else:
                uniform = self._noise[row][tree.num_nodes : tree.num_nodes + count]
                children = draw_siblings(probs[number], uniform)
                if law.candidate_ids is not None:
                    children = [(int(law.candidate_ids[number, index]), mass) for index, mass in children]
                tree.laws[place] = law, number
            for rank, (token, mass) in enumerate(children):
                survival = float(survivals[number, rank])
                child = tree.add(
                    place, token, survival, float(known[number, min(rank, known.shape[1] - 1)]), mass=mass
                )
                if self._depth < self._max_depths[row] and token not in self._ends and survival >= self._plan.cut:
                    parents.append(number)
                    tokens.append(token)
                    level.append((row, child))
        self._level = level
        return parents, tokens

    def _survival(self, row: int, place: int) -> float:
        if place == 0:
            return float(self._max_depths[row] > 0)
        return self.trees[row].survivals[place - 1]

    def _confidence(self, logits: torch.Tensor | None, probs: np.ndarray) -> np.ndarray:
        """Return c_k after each node, `[F, 1]`. Without a head, what a draft that is right would have."""
        if logits is None:
            return np.square(probs).sum(axis=1, keepdims=True)
        temperatures = None if self._temperatures is None else self._temperatures[self._depth : self._depth + 1]
        return calibrated_confidence(logits[:, None], temperatures).cpu().numpy().astype(float)


def _best_tokens(scores: Scores) -> tuple[list[list[int]], np.ndarray]:
    """Return the best tokens of each node and the draft's probabilities of them, `[F, ranks]`."""
    values = scores.values.float()
    best, index = largest(values, min(MOST_SIBLINGS, values.shape[-1]))
    ids = index if scores.candidate_ids is None else scores.candidate_ids.gather(-1, index)
    probs = (best - values.logsumexp(dim=-1, keepdim=True)).exp()
    return ids.tolist(), probs.cpu().numpy().astype(float)
