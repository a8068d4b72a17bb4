"""Policies that shape trees of drafts: the best nodes of a fixed budget, or as many as pay on this machine."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .costs import Load
from .policies import Policy, PrefixScheduler
from .tree_plans import (
    BELOW_EXPECTATION,
    MOST_NODES,
    BudgetPlan,
    PricePlan,
    SiblingAcceptance,
    TreePlan,
    TreeProspects,
)

SAME_CONTEXT = 256  # cached tokens: so many more do not change the choice
LEAST_GAIN = 1.03  # of trees over chains, as predicted: measured step times are no better than that


@dataclass(frozen=True)
class TreeBudget(Policy):
    """Verify a tree of so many nodes for each request, the most promising ones.

    Args:
        num_nodes (`int`): At least 1, at most 63.

    Raises:
        ValueError: If it is another number.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=TreeBudget(15))
    ```
    """

    num_nodes: int

    def __post_init__(self) -> None:
        if not (isinstance(self.num_nodes, int) and 1 <= self.num_nodes <= MOST_NODES):
            raise ValueError(f"num_nodes must be a whole number from 1 to {MOST_NODES}, got {self.num_nodes!r}")

    @property
    def most_nodes(self) -> int:
        return self.num_nodes

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        return BudgetPlan(int(min(self.num_nodes, prospects.most // load.num_requests)), prospects.siblings)

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return max_lengths.clamp(max=self.num_nodes)


@dataclass(frozen=True)
class TreeScheduler(PrefixScheduler):
    """Algorithm 1 on the nodes of trees: a node is verified if it survives often enough to pay for its place.

    What a place in the pass is worth follows from the mean tree of the draft and the cost of this machine, before
    anything is drawn. Every node whose survival reaches that price is admitted, level by level, in all requests. So
    the budget is one for all of them, and a loaded machine gets shorter trees, then chains, then nothing. Where
    drafts are the best tokens, nothing needs to be known before a draw: the nodes that were grown are sorted, and the
    best number of them is verified. Where copies alone promise more, the draft's pass is saved.

    Where trees cannot be verified, it schedules chains.

    Args:
        cost ([`StepCost`]): What a round costs on this machine.
        num_nodes (`int`): Nodes of a request at most.

    Example:

    ```python
    cost = ThroughputTable((1, 8, 64), (95, 94, 80))  # tokens of a pass, passes per second
    draft.decoding = DecodingOptions(policy=TreeScheduler(cost))
    ```

    DSpark Algorithm 1, for trees.
    """

    num_nodes: int = 31

    @property
    def most_nodes(self) -> int:
        return self.num_nodes

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        usual = self._usual(prospects.siblings, load)
        best = usual.trees
        # A copy that is not better than the last place brings nothing.
        copies = [chances if len(chances) and chances[0] > best.last else () for chances in prospects.copies]
        if any(map(len, copies)):
            # A copy may be what the draft proposes, too: it never makes the trees that are usual worse.
            best = max([best, *usual.with_copies(copies)], key=lambda outlook: outlook.rate)
        gain = best.rate / usual.chain_rate
        if gain <= LEAST_GAIN:
            return None
        in_all = int(min(prospects.most, load.num_requests * self.num_nodes))
        if prospects.siblings.is_drawn:
            return PricePlan(best.price, self.num_nodes, in_all, drafts=best.drafts, gain=gain)
        spread = np.arange(in_all + 1) / load.num_requests
        of_all = np.interp(spread, np.arange(self.num_nodes + 1), best.seconds)
        cut = best.price * BELOW_EXPECTATION
        return PricePlan(cut, self.num_nodes, in_all, load.base_tokens, of_all, best.drafts, gain)

    def _usual(self, siblings: SiblingAcceptance, load: Load) -> "_Usual":
        """Return what to expect where nothing is copied. It is the same in most rounds, and is remembered."""
        key = load.num_requests, load.other_tokens, load.context_tokens // SAME_CONTEXT
        if key not in self._remembered or self._remembered[key].siblings is not siblings:
            of_chain = siblings.of_chain()
            chains = self.cost.round_seconds(load, load.num_requests * len(of_chain))[:: load.num_requests]
            grown = self.cost.tree_seconds(load, self.num_nodes, siblings.is_drawn)
            copied = self.cost.round_seconds(load, self.num_nodes * load.num_requests)[:: load.num_requests]
            trees = _Outlook(siblings.best_nodes(self.num_nodes), grown, load)
            alone = _Outlook(np.zeros(self.num_nodes), copied - self.cost.draft_seconds(load), load, drafts=False)
            self._remembered.clear()
            self._remembered[key] = _Usual(siblings, float((_kept(load, of_chain) / chains).max()), trees, alone)
        return self._remembered[key]

    @functools.cached_property
    def _remembered(self) -> dict[tuple[int, int, int], "_Usual"]:
        return {}


@dataclass(frozen=True)
class _Outlook:
    """What trees of every size would bring and cost."""

    survivals: np.ndarray  # of the nodes of each request, the best first
    seconds: np.ndarray  # with 0, 1, ... nodes of each request
    load: Load
    drafts: bool = True

    @functools.cached_property
    def rates(self) -> np.ndarray:
        return _kept(self.load, self.survivals) / self.seconds[: 1 + len(self.survivals)]

    @functools.cached_property
    def rate(self) -> float:
        return float(self.rates.max())

    @functools.cached_property
    def last(self) -> float:
        """Return the survival of the last place of the best size; 0 where none pays."""
        count = int(self.rates.argmax())
        return float(self.survivals[count - 1]) if count else 0.0

    @property
    def price(self) -> float:
        """Return the survival that pays for the last place of the best size."""
        count = int(self.rates.argmax())
        return (self.last + [*self.survivals, 0.0][count]) / 2 if count else 1.0


@dataclass(frozen=True)
class _Usual:
    """What to expect where nothing is copied."""

    siblings: SiblingAcceptance
    chain_rate: float  # tokens per second of the best chains
    trees: _Outlook
    alone: _Outlook  # of rounds without a pass of the draft, which copies could fill

    def with_copies(self, copies: Sequence[Sequence[float]]) -> list[_Outlook]:
        """Return what to expect of trees with copied branches, and of copies alone."""
        both = (self.trees, self.alone)
        return [replace(each, survivals=_with_copies(each.survivals, copies)) for each in both]


def _with_copies(expected: np.ndarray, copies: Sequence[Sequence[float]]) -> np.ndarray:
    """Return survivals of the best nodes if copied ones join them, the mean of all requests."""
    longest = max(map(len, copies))
    chances = np.array([[*row, *[0.0] * (longest - len(row))] for row in copies])
    together = np.concatenate([expected * (1.0 - chances[:, :1]), chances.cumprod(axis=1)], axis=1)
    return -np.sort(-together, axis=1)[:, : len(expected)].mean(axis=0)


def _kept(load: Load, survivals: np.ndarray) -> np.ndarray:
    """Return the expected tokens of a round in which every request verifies the first 0, 1, ... nodes."""
    return load.base_tokens + load.num_requests * np.concatenate([[0.0], survivals.cumsum()])
