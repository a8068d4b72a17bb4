"""Fits what is expected of the nodes of trees on recorded rounds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..sampling.drafts import DraftTree
from .calibration import fit_logits
from .tree_plans import LEAST_PROBABILITY, MOST_SIBLINGS, SiblingAcceptance

LEAST_MEAN = 1e-3


class SiblingTest(NamedTuple):
    """A node that was tested, its parent being accepted."""

    depth: int  # of its parent
    rank: int
    known: float  # what its acceptance is predicted from
    was_accepted: bool
    order: int  # among all nodes of its tree, by predicted survival; 1 is the best


def recorded_tests(tree: DraftTree, path: Sequence[int]) -> list[SiblingTest]:
    """Return the tests of one round: of drawn siblings up to the accepted one, of best tokens all."""
    tests, is_drawn = [], bool(tree.distributions)
    order = np.argsort(np.argsort([-survival for survival in tree.survivals], kind="stable")) + 1
    for depth, place in enumerate([0, *path]):
        following = path[depth] if depth < len(path) else None
        for rank, child in enumerate(tree.children(place)):
            facts = tree.known[child - 1], child == following, int(order[child - 1])
            tests.append(SiblingTest(depth, rank, *facts))
            if is_drawn and child == following:
                break
    return tests


def fit_siblings(
    tests: Sequence[SiblingTest], is_drawn: bool, block_size: int, chain: Sequence[float] = ()
) -> SiblingAcceptance:
    """Fit logits by maximum likelihood, and count means. Best tokens share one fit, drawn ones have one per rank.
    `chain` are the survivals of chains, which other rounds count."""
    groups = [[test for test in tests if test.rank == rank] for rank in range(MOST_SIBLINGS)] if is_drawn else [tests]
    fits = [_fit(group) for group in groups if group]
    reached = np.zeros(block_size)
    accepted = np.zeros((block_size, MOST_SIBLINGS))
    for test in tests:
        reached[test.depth] += test.rank == 0
        accepted[test.depth, test.rank] += test.was_accepted
    means = (accepted / reached.clip(1)[:, None]).clip(LEAST_MEAN)
    means = np.minimum.accumulate(means, axis=1).round(4)
    counts = np.bincount(np.array([test.order for test in tests if test.was_accepted], dtype=int), minlength=2)[1:]
    best = (np.sort(counts)[::-1] / max(1.0, reached[0])).round(4)
    return SiblingAcceptance(is_drawn, fits, means.tolist(), best.tolist(), [round(each, 4) for each in chain])


def _fit(tests: Sequence[SiblingTest]) -> tuple[float, float]:
    known = torch.tensor([test.known for test in tests], dtype=torch.double)
    accepted = torch.tensor([float(test.was_accepted) for test in tests], dtype=torch.double)
    return fit_logits(known.logit(LEAST_PROBABILITY), accepted)
