"""The scheduler: whether to draft, how many draft tokens are verified, and which ones."""

import functools
import itertools
import math
import operator
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

import numpy as np
import torch

from ..sampling.drafts import DraftTrees
from .costs import Load, ThroughputTable
from .learning import LONGEST_WAIT, Experience, LearnedAcceptance, ReprobeCounter
from .policies import Policy, require_types
from .ranking import Ranking, first_drop
from .rounds import RoundOutcome
from .tree_plans import BELOW_EXPECTATION, MOST_NODES, BudgetPlan, SiblingAcceptance, TreePlan

NUM_NODES = 31  # of a request's tree, where a cost limits it, too
# Tokens after the stop survive less than the first one left out. Without a decay, filling goes too far where the curve
# is a noisy straight line. Its exact value matters little (benchmarks/scheduler.py).
FILL_DECAY = 0.7
PRIOR_ACCEPTANCE = 0.8  # expected of each slot of an unknown request
PRIOR_ROUNDS = 3  # how many rounds that expectation counts for
RECENT_ROUNDS = 10  # older rounds fade
SAME_CONTEXT = 256  # cached tokens: so many more do not change the choice
TAIL_SHARE = 0.25  # of drafting: what the heads alone take
TAIL_ACCEPTANCE = 0.55  # expected of each slot of an unknown tail
GAIN_WEIGHT = 0.03  # of one more round: a call of 60 tokens is most of what is known
LEAST_GAIN = 1.03  # of trees over chains, as predicted: measured step times are no better than that


@dataclass
class Scheduler(Policy):
    """Draft when it pays, and verify the tokens that pay: DSpark's Algorithm 1 on this machine's measured step times.

    It drafts if what a request's past blocks brought, or the last one alone, beats a plain step: good blocks come in
    runs. Every 17th round is drafted anyway.

    Of chains, Algorithm 1 admits tokens on the lower convex hull of the step time, where its early stop finds the
    maximum. It goes on towards the hull's next vertex as far as it pays by the measured time if the tokens there
    survive like the first one left out, less a fixed decay. Of trees, it admits every node whose survival reaches what
    a place in the pass is worth by the draft's mean tree and the cost. Where prompt lookup alone promises more, the
    draft does not run.

    Args:
        cost ([`ThroughputTable`] or `Experience`, *optional*): What a round costs on this machine, as measured, or as
            earlier rounds have shown. Without one, each round drafts the best `num_nodes` of each request.
        num_nodes (`int`, *optional*): Nodes of a request's tree at most, 1 to 63. Default with a cost: 31.
        trees (`bool`, *optional*): Whether trees are drafted where they pay and the target can verify them. Default:
            if calibration or earlier rounds have shown what their nodes bring.
        skip (`bool`): Whether rounds go without drafting where it does not pay.
        lag (`int`): If positive, the number of verified tokens follows from the confidences of so many rounds ago, by
            an unconstrained search, and this round's best tokens fill it. Chains only. DSpark Section 5.2.
        tpot_seconds (`float`, *optional*): Limit of the time per output token of every request, in seconds: caps the
            latency of a round by the tokens that uncut rounds lately brought. If a plain step breaks it, too, a
            warning says so. AdaSpec Algorithm 3.
        tails (`bool`): Whether the slots that the last block has left are drawn anew, without a pass of the draft's
            backbone, where earlier rounds promise more tokens per second of that. Chains only.

    Raises:
        TypeError: If there is neither a cost nor a number of nodes, or another argument needs the cost.
        ValueError: If another argument is out of its range, or does not go with the others.

    Example:

    ```python
    cost = ThroughputTable((1, 8, 64), (95, 94, 80))  # tokens of a pass, passes per second
    draft.decoding = DecodingOptions(policy=Scheduler(cost))
    draft.decoding = DecodingOptions(policy=Scheduler(cost, trees=False, tpot_seconds=0.030))
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=15))  # trees of 15 nodes, whatever they cost
    ```

    DSpark Algorithm 1, with a causal repair for jagged curves; AdaSpec Section 5.1 for a one-pass drafter.
    """

    cost: ThroughputTable | Experience | None = None
    num_nodes: int | None = None
    trees: bool | None = None
    skip: bool = True
    lag: int = 0
    tpot_seconds: float | None = None
    tails: bool = False

    def __post_init__(self) -> None:
        needs_cost = self.num_nodes is None or self.lag != 0 or self.tpot_seconds is not None or self.tails
        if not isinstance(self.cost, ThroughputTable | Experience | None) or (self.cost is None and needs_cost):
            raise TypeError(
                f"{type(self).__name__} needs the cost of a step on this machine, got {type(self.cost).__name__}: "
                "pass hf_dspark.profile_throughput(target, draft).table, or ThroughputTable.load(file)"
            )
        if self.num_nodes is None:
            self.num_nodes = NUM_NODES
        if not (isinstance(self.num_nodes, int) and 1 <= self.num_nodes <= MOST_NODES):
            raise ValueError(f"num_nodes must be a whole number from 1 to {MOST_NODES}, got {self.num_nodes!r}")
        require_types(self, trees=bool | None, skip=bool, lag=int, tpot_seconds=Real | None, tails=bool)
        if self.lag < 0 or (self.lag and self.trees):
            raise ValueError(f"lag must be 0, or a number of rounds with trees=False, got lag={self.lag}")
        if self.lag and self.tails:
            raise ValueError(f"tails have no lagged budgets: drop lag={self.lag} or tails=True")
        limit = self.tpot_seconds
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"tpot_seconds must be a positive number, got {limit}")
        self._forecasts: dict[int, BlockForecast] = {}
        self._latest: dict[int, Sequence[float]] = {}  # survivals of the last round; empty if it was skipped
        self._block_size = 0  # the longest block so far
        self._gain = 1.0  # of the last round's trees over chains
        self._experience = known = self.cost if isinstance(self.cost, Experience) else None
        self._acceptance = LearnedAcceptance() if known is None else known.acceptance
        self._skipped = ReprobeCounter() if known is None else known.skipped
        self._tails = LearnedAcceptance() if known is None else known.tails
        self.matches = Policy.matches if known is None else known.matches
        self._drafts = True  # the last answer of `plan_draft`
        self._shows_costs = False  # whether this round drafts and verifies whole blocks to show what they cost
        self._is_tail, self._untried = False, ReprobeCounter(most=LONGEST_WAIT)  # rounds that could have been tails
        self._cut, self._load = ReprobeCounter(), Load(())  # the load of the latest round
        self._served: Sequence[int] = ()  # by the round before
        self._rankings: deque[Ranking] = deque(maxlen=self.lag)  # of the last rounds
        self._block_tokens = math.inf  # that uncut rounds lately brought a request
        # What to expect by the load, without prompt lookup: it is the same in most rounds.
        self._usual: deque[tuple[tuple, list[RoundForecast]]] = deque(maxlen=4)

    @property
    def requires_confidence(self) -> bool:
        return self.cost is not None

    @property
    def most_nodes(self) -> int:
        return 0 if self.trees is False or self.lag else self.num_nodes

    @property
    def draws_tails(self) -> bool:
        return self.tails

    def new_key(self) -> int:
        return 0 if self._experience is None else self._experience.costs.new_key()

    # ---- whether to draft

    def plan_draft(self, load: Load) -> bool | Literal["tail"]:
        self._drafts = self._plan_draft(load)
        return self._drafts

    def _plan_draft(self, load: Load) -> bool | Literal["tail"]:
        self._load, self._is_tail, self._shows_costs = load, False, False
        for memory in (self._forecasts, self._latest):
            for request in memory.keys() - set(load.request_ids):
                del memory[request]
        if self.tpot_seconds is not None and not self._meets_limit(load):
            return False
        if self.cost is None:
            return True
        self._is_tail = bool(load.tails) and self._prefers_tails(load)
        if self._is_tail:
            return "tail"
        if not self.skip:
            return True
        if self._experience is not None:
            if (answer := self._experience.costs.first_answer(load)) is not None:
                self._shows_costs = answer
                return answer
            if self._experience.costs.plain.look_again():
                return False
        expected, plain = self._expected(load), load.base_tokens / self._cost_of(load).plain_seconds(load)
        if not expected or any(self._rate(load, known) > plain for known in (expected, self._latest)):
            self._skipped.reset()
            return True
        return self._skipped.look_again()

    def _expected(self, load: Load) -> dict[int, Sequence[float]]:
        """Return the survivals that the blocks of requests lead to expect."""
        expected = {request: forecast.survival for request, forecast in self._forecasts.items()}
        if not expected and self._unknown.survival:
            expected = dict.fromkeys(load.request_ids, self._unknown.survival)
        return expected

    def _prefers_tails(self, load: Load) -> bool:
        """Tell whether what the last blocks have left brings more tokens per second than new ones, or than none."""
        known, later = [1.0, *self._tails.survival], TAIL_ACCEPTANCE ** np.arange(1, 1 + max(load.tails))
        survivals = np.array([*known[1:], *known[-1] * later])
        kept = sum(float(survivals[:length].sum()) for length in load.tails)
        cost = self._cost_of(load)
        seconds = float(cost.round_seconds(load, sum(load.tails))[-1]) - (1 - TAIL_SHARE) * cost.drafting
        others = self._rate(load, self._expected(load)), load.base_tokens / cost.plain_seconds(load)
        if (load.base_tokens + kept) / seconds > max(others):
            self._untried.reset()
            return True
        return self._untried.look_again()

    @property
    def _unknown(self) -> "BlockForecast":
        """What is expected of a request before its first round."""
        return BlockForecast(() if self._experience is None else self._acceptance.survival)

    def _cost_of(self, load: Load) -> ThroughputTable:
        return self.cost if self._experience is None else self._experience.costs.at(load)

    def _rate(self, load: Load, known: dict[int, Sequence[float]]) -> float:
        """Return the tokens per second of new blocks with these survivals."""
        if not known:
            return 0.0
        # New requests are expected to be like the others. All verify the same length, as in AdaSpec: a lower bound of
        # what is got out of the same tokens.
        means = np.mean(list(known.values()), axis=0)
        return self._gain * self._of_chains(means, load).rate

    def _of_chains(self, survivals: np.ndarray, load: Load) -> "RoundForecast":
        every = len(survivals) * load.num_requests
        return RoundForecast(survivals, self._cost_of(load).round_seconds(load, every), load)

    def _meets_limit(self, load: Load) -> bool:
        looks_again = self._cut.look_again()
        # Drafting is of no use for less than one token.
        if float(self._cost_of(load).round_seconds(load, 1)[1]) <= self.allowed_seconds or looks_again:
            return True
        plain = self._cost_of(load).plain_seconds(load)
        if plain > self.tpot_seconds:
            warnings.warn(
                f"the limit of {self.tpot_seconds:g} s per token cannot be met: a step without drafting takes longer. "
                "Decoding without drafting.",
                stacklevel=4,
            )
        return False

    # ---- how many tokens, and which

    @property
    def allowed_seconds(self) -> float:
        """How long the coming round may take."""
        return math.inf if self.tpot_seconds is None else self.tpot_seconds * self._block_tokens

    def _capacity(self, all_tokens: int, load: Load) -> int:
        """Return how many of these draft tokens the coming round may verify."""
        if self.tpot_seconds is None or self._cut.is_looking:
            return all_tokens
        # Up to the first B that is too slow. A larger B that is fast enough again could only be used by looking at
        # tokens after those at the slow ones.
        fitting = self._cost_of(load).round_seconds(load, all_tokens) <= self.allowed_seconds
        return max(0, int(fitting.cumprod().sum()) - 1)

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return max_lengths.clamp(max=self._capacity(int(max_lengths.sum()), load))

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        if self.cost is None:
            return max_lengths.clamp(max=self.num_nodes)
        known = self._tails if self._is_tail else self._acceptance
        ranking = Ranking.of(known.corrected(confidence), max_lengths)
        all_tokens = sum(max_lengths.tolist())
        capacity = self._capacity(all_tokens, load)
        if capacity >= all_tokens:
            self._cut.reset()
        # Among the tokens that the cap leaves, the choice is as causal as without it. To give the cap to those that
        # were chosen, once it is known how many they are, would not be.
        return ranking.lengths(min(self._num_admitted(ranking, all_tokens, load), capacity))

    def _num_admitted(self, ranking: Ranking, all_tokens: int, load: Load) -> int:
        """Return how many of the ranked tokens are worth verifying, of so many that could be sent."""
        if self._shows_costs:
            return len(ranking.survivals)
        cost = self._cost_of(load)
        if self.lag and len(self._rankings) == self.lag:
            old = self._rankings[0]
            searched = int(old.throughput(cost, replace(load, request_ids=range(old.num_requests))).argmax())
            capacity = round(searched * load.num_requests / old.num_requests)  # requests may have come or gone
            return min(capacity, len(ranking.survivals))
        # The hull covers all tokens that could be sent. One that ended after the last possible survivor would not be
        # causal.
        hull, vertices = cost.hull(load.base_tokens, load.base_tokens + all_tokens)
        kept = ranking.kept(load)
        stop = first_drop(kept / (hull[: len(kept)] + cost.context_cost(load)))
        if stop < len(ranking.survivals):
            last = min([*(vertex for vertex in vertices if vertex > stop), all_tokens])
            seconds = cost.round_seconds(load, last)[stop:]
            hoped = ranking.survivals[stop] * FILL_DECAY
            stop += int(((kept[stop] + hoped * np.arange(len(seconds))) / seconds).argmax())
        return stop

    def expected_siblings(self, known: SiblingAcceptance) -> SiblingAcceptance:
        return self._acceptance.siblings(known)

    def plan_tree(
        self, siblings: SiblingAcceptance, load: Load, matches: Sequence[Sequence[float]] = ()
    ) -> TreePlan | None:
        if self.most_nodes == 0 or self._is_tail or (self._shows_costs and not self.trees):
            return None
        if self.cost is None:
            return BudgetPlan(self.num_nodes, siblings)
        is_new = self._experience is not None and self.trees is None and not siblings.is_measured
        if is_new and self._drafts and self._acceptance.wants_trees:
            return BudgetPlan(self.num_nodes, siblings)
        every = self.num_nodes * load.num_requests
        in_all = self._capacity(every, load)
        plan = self._priced_plan(siblings, load, matches, in_all)
        if plan is not None and in_all == every:
            self._cut.reset()
        return plan

    def _priced_plan(
        self, siblings: SiblingAcceptance, load: Load, matches: Sequence[Sequence[float]], in_all: int
    ) -> TreePlan | None:
        grows = bool(self._drafts and (self.trees or siblings.is_measured))
        if not (grows or any(map(len, matches))):
            return None
        chains, trees, alone = self._kinds_of_round(siblings, load)
        if grows:
            self._gain = max(1.0, trees.rate / chains.rate)
        if self._drafts and any(map(len, matches)):
            chains, trees, alone = self._kinds_of_round(siblings, load, self._ease(siblings, load))
        best, other = trees if grows else alone, chains if self._drafts else alone
        if any(map(len, matches)):
            ways = [best]
            if grows:
                # The draft may propose the same: a match that is not better than the last place brings nothing, and
                # none makes the trees that are usual worse.
                better = [chances if len(chances) and chances[0] > best.last else () for chances in matches]
                ways.append(replace(best, matches=better))
            if not (self._drafts and self._skipped.is_looking):  # which tries the draft
                ways.append(replace(alone, matches=matches))
            best = max(ways, key=lambda forecast: forecast.rate)
        gain = best.rate / other.rate
        if gain <= LEAST_GAIN:
            return None
        if siblings.is_drawn:
            return TreePlan(best.price, self.num_nodes, in_all, drafts=best.drafts, gain=gain)
        cut = best.price * BELOW_EXPECTATION
        return TreePlan(cut, self.num_nodes, in_all, load.base_tokens, best.seconds, best.drafts, gain)

    def _ease(self, siblings: SiblingAcceptance, load: Load) -> float:
        """Return how many draft tokens blocks of these requests bring, over those of the mean block."""
        usual, known = float(siblings.of_chain().sum()), (self._expected(load).values(), self._latest.values())
        blocks = [sum(map(sum, rows)) / len(rows) for rows in known if rows]
        return 2.0 ** (round(4 * math.log2(max(blocks) / usual)) / 4) if blocks and usual else 1.0

    def _kinds_of_round(self, siblings: SiblingAcceptance, load: Load, ease: float = 1.0) -> "list[RoundForecast]":
        """Return what chains, trees and rounds without the draft are expected to bring, without prompt lookup."""
        cost, every = self._cost_of(load), self.num_nodes * load.num_requests
        key = siblings, cost, ease, load.num_requests, load.other_tokens, load.context_tokens // SAME_CONTEXT
        for kept, found in self._usual:
            if kept == key:
                return found
        known = siblings.of_chain(), siblings.best_nodes(self.num_nodes)
        of_chain, of_tree = (np.minimum(ease * each, 1.0) for each in known)
        trees = RoundForecast(of_tree, cost.tree_seconds(load, every, siblings.is_drawn), load)
        looked_up = cost.round_seconds(load, every) - cost.drafting
        alone = RoundForecast(np.zeros(self.num_nodes), looked_up, load, drafts=False)
        self._usual.append((key, found := [self._of_chains(of_chain, load), trees, alone]))
        return found

    # ---- what rounds teach

    def observe(self, outcome: RoundOutcome) -> None:
        # A round cut short does not tell what a block brings.
        if outcome.drafted and not outcome.is_tail and self._cut.rounds == 0:
            new, old = 1 + _mean(outcome.num_accepted), self._block_tokens
            self._block_tokens = new if math.isinf(old) else 0.9 * old + 0.1 * new
        # In a first round, the draft also reads the prompt.
        is_usual = outcome.request_ids == self._load.request_ids and set(outcome.request_ids) <= set(self._served)
        if self._experience is not None and is_usual:
            self._experience.costs.observe(self._load, outcome)
        if self.cost is not None:
            cost = self._cost_of(self._load)
            brought = (1 + _mean(outcome.num_accepted)) * cost.plain_seconds(self._load)
            if is_usual:
                self._skipped.paid += GAIN_WEIGHT * (brought / outcome.seconds - self._skipped.paid)
            if not outcome.drafted:
                taken = float(cost.round_seconds(self._load, int(outcome.lengths.sum()))[-1]) - cost.drafting
                self._skipped.gain += GAIN_WEIGHT * (brought / taken - self._skipped.gain)
        self._served, confidence = outcome.request_ids, outcome.confidence
        if outcome.is_tail:
            self._tails.observe(outcome)
            for row, length in zip(self._tails.corrected(confidence).tolist(), self._load.tails, strict=True):
                self._tails.expect([*itertools.accumulate(row[:length], operator.mul)])
            return
        self._latest.clear()
        self._acceptance.observe(outcome)
        if confidence is not None and not isinstance(outcome.drafts, DraftTrees):
            confidence = self._acceptance.corrected(confidence)
        if confidence is None:
            return
        size = confidence.shape[1]
        if self.lag:
            full = torch.full((len(confidence),), size, device="cpu")
            self._rankings.append(Ranking.of(confidence, full))
        self._block_size = max(self._block_size, size)
        # A tree that is shallower than its neighbours says nothing of deeper slots.
        confidences = ([each for each in row if not math.isnan(each)] for row in confidence.tolist())
        survivals = [[*itertools.accumulate(row, operator.mul)] for row in confidences]
        for request, row in zip(outcome.request_ids, survivals, strict=True):
            self._latest[request] = latest = _extended(row, self._block_size)
            self._forecasts[request] = self._forecasts.get(request, self._unknown).after(latest)
            self._acceptance.expect(row)


@dataclass(frozen=True)
class BlockForecast:
    """Expected survival of the blocks of one request, by its rounds so far."""

    # Mean of a_k, [γ]. A mean of products, as good slots come together: the product of means would promise too little.
    survival: Sequence[float] = ()
    rounds: int = 0  # how many it rests on, beside the prior

    def after(self, survival: Sequence[float]) -> "BlockForecast":
        """Return the forecast after one more round; survivals of older rounds fade."""
        weight = max(1 / RECENT_ROUNDS, 1 / (PRIOR_ROUNDS + self.rounds + 1))
        pairs = zip(_extended(self.survival, len(survival)), survival, strict=False)
        mean = [(1 - weight) * before + weight * now for before, now in pairs]
        return BlockForecast(mean, self.rounds + 1)


@dataclass(frozen=True)
class RoundForecast:
    """Expected tokens and seconds of rounds with any number of nodes."""

    of_each: np.ndarray  # expected survivals of what the draft proposes for a request, the best first
    seconds: np.ndarray  # with 0, 1, ... nodes of all requests
    load: Load
    drafts: bool = True
    matches: Sequence[Sequence[float]] = ()  # of each request, by prompt lookup

    @functools.cached_property
    def survivals(self) -> np.ndarray:
        """Of the nodes of all requests, the best first."""
        nodes = [self.of_each] * (self.load.num_requests - len(self.matches))
        for chances in self.matches:
            nodes += [self.of_each * (1.0 - chances[0]), np.cumprod(chances)] if len(chances) else [self.of_each]
        return -np.sort(-np.concatenate(nodes))[: len(self.seconds) - 1]

    @functools.cached_property
    def _rates(self) -> np.ndarray:
        tokens = self.load.base_tokens + np.concatenate([[0.0], self.survivals.cumsum()])
        return tokens / self.seconds[: len(tokens)]

    @property
    def rate(self) -> float:
        """Tokens per second of the best size."""
        return float(self._rates.max())

    @property
    def last(self) -> float:
        """The survival of the last place of the best size; 0 where none pays."""
        return float([0.0, *self.survivals][self._rates.argmax()])

    @property
    def price(self) -> float:
        """The survival that pays for the last place of the best size."""
        size = int(self._rates.argmax())
        return (self.last + float([*self.survivals, 0.0][size])) / 2 if size else 1.0


def _mean(counts: torch.Tensor) -> float:
    return sum(counts.tolist()) / len(counts)


def _extended(survivals: Sequence[float], block_size: int) -> Sequence[float]:
    """Return survivals `[n]` as `[block_size]`: in later slots as expected of an unknown request."""
    last, later = survivals[-1] if survivals else 1.0, range(1, block_size - len(survivals) + 1)
    return [*survivals, *(last * PRIOR_ACCEPTANCE**slot for slot in later)]
