"""A policy whose cost is compared with the clock: a wrong table of step times costs a few rounds, not every call.

A scheduler chooses what the table says is best. What it loses by a wrong table, against whole blocks, is at most how
much further measured and promised seconds are apart in the rounds that it chose than in rounds of whole blocks.
"""

import statistics
import warnings
from collections import deque
from dataclasses import dataclass, field

import torch

from .costs import Load
from .policies import PolicyOverPolicy
from .rounds import RoundOutcome
from .tree_plans import TreePlan, TreeProspects

COMPARISONS = 5  # the latest ones with whole blocks: all but one of them must agree that a cost does not hold
# Chosen rounds may take so much longer than promised, beside whole blocks. With right tables it was .8 to 1.2: what a
# round does outside of the timed passes is a larger part of short ones.
TOLERATED = 1.5


class Evidence:
    """What rounds have said about a cost, over all calls that decide by it; `name` is what a user knows it by."""

    def __init__(self, name: str = "the step cost") -> None:
        self.contradicted = False
        self._name = name
        self._comparisons: dict[int, deque[float]] = {}

    def add(self, size: int, ratio: float) -> None:
        """Note how much longer than promised chosen rounds took, beside whole blocks, in a batch of some size."""
        comparisons = self._comparisons.setdefault(size, deque(maxlen=COMPARISONS))
        comparisons.append(ratio)
        all_but_one = sorted(comparisons)[1:]
        if len(comparisons) == COMPARISONS and all_but_one[0] > TOLERATED and not self.contradicted:
            self.contradicted = True
            times = statistics.median(all_but_one)
            warnings.warn(
                f"{self._name} does not hold: beside whole blocks, the rounds that were chosen by it took {times:.1f} "
                "times as long as it says. Whole blocks are verified from now on. Measure again when nothing else "
                "runs: `hf-dspark profile`, or hf_dspark.profile_throughput(target, draft)",
                stacklevel=2,
            )


@dataclass
class CheckedPolicy(PolicyOverPolicy):
    """Let another policy decide as long as its cost agrees with measured rounds; then verify whole blocks.

    Now and then a round verifies whole blocks, to be compared with. The number of the round decides which one, so
    that equal calls draw equal tokens; and how long earlier rounds took decides whether the cost holds. Both are known
    before anything is drawn, so this policy is as causal as the one inside.

    Args:
        policy ([`Policy`]): Decides.
        evidence ([`Evidence`]): What earlier calls have shown; this one adds to it.
        cost ([`StepCost`], *optional*): What is checked; the inner policy's unless given.

    loss <= (measured / promised seconds of chosen rounds) / (measured / promised seconds of whole blocks)
    """

    evidence: Evidence = field(default_factory=Evidence, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rounds = 0
        self._load: Load | None = None  # of the round, until it is over
        self._chosen: dict[int, list[float]] = {}  # measured and promised seconds since whole blocks, by batch size

    @property
    def _compares(self) -> bool:
        """Whether the present round is one of whole blocks, for comparison; the more often, the less is known."""
        return self._rounds % (8 if self._rounds < 8 * COMPARISONS else 32) == 5

    @property
    def _verifies_all(self) -> bool:
        return self._compares or self.evidence.contradicted

    def plan_draft(self, load: Load) -> bool:
        self._load = load
        self._rounds += 1
        return self.policy.plan_draft(load) or self._verifies_all

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return max_lengths if self._verifies_all else self.policy.limit_lengths(max_lengths, load)

    def plan_tree(self, prospects: TreeProspects, load: Load) -> TreePlan | None:
        return None if self._verifies_all else self.policy.plan_tree(prospects, load)

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        lengths = self.policy.plan_verify(confidence, max_lengths, load)
        return max_lengths.clone() if self._verifies_all else lengths

    def observe(self, outcome: RoundOutcome) -> None:
        self.policy.observe(outcome)
        load, self._load = self._load, None
        if load is None or self.evidence.contradicted:  # nothing could be drafted, or nothing is left to learn
            return
        promised = float(self.cost.round_seconds(load, int(outcome.lengths.sum()))[-1])
        if not outcome.drafted:
            promised -= self.cost.draft_seconds(load)
        size = load.num_requests.bit_length()  # other sizes read other parts of a table
        if not self._compares:
            earlier = self._chosen.get(size, (0.0, 0.0))
            self._chosen[size] = [earlier[0] + outcome.seconds, earlier[1] + promised]
        elif size in self._chosen:
            measured_before, promised_before = self._chosen.pop(size)
            self.evidence.add(size, measured_before / promised_before / (outcome.seconds / promised))
