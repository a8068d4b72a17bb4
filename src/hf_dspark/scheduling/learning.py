"""What earlier rounds teach the default policy: what rounds cost here, and how often draft tokens are accepted.

All of it is known before the round that it decides about, so that policies stay causal. Older rounds fade.
"""

import contextlib
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..sampling.drafts import DraftTrees
from ..sampling.noise import CallKeys
from .calibration import RAW, SiblingTest, fit_siblings, recorded_tests
from .costs import Load, ThroughputTable
from .prompt_lookup import MatchAcceptance
from .rounds import RoundOutcome
from .tree_plans import LEAST_PROBABILITY, SiblingAcceptance

RECENT = 15  # rounds whose median says how fast the machine is
LARGEST_STEP = 0.5  # of the logarithm of a time, whatever a single round took
LEAST_WEIGHT = 0.05  # of one more round
USUAL_SPREAD = 512  # cached tokens: rounds whose contexts differ by less say little of what each token costs
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
FIRST_DRAFTED = 8  # rounds with drafts for about so many requests, before an estimate of their costs is relied on
FIRST_PLAIN, RARELY = 4, 256  # rounds until the first one without drafts, and between later ones at most
REPROBE_AFTER, LONGEST_WAIT = 16, 64  # rounds that taught nothing
LEAST_PAID = 1.1  # over plain steps of our loop: plain decoding is ahead of these, and reads prompts once
SOME_CALLS, RARE_CALLS = 4, 8  # of which one drafts where it does not pay
KEPT_AFTER = 64  # rounds; again when there are twice as many
FORGETTING = 0.995  # of what confidences said, with each round
PRIOR_PRECISION = (8.0, 0.5)  # of slope 1 and offset 0, in rounds that say as much
TREES_AFTER, TREES_TRIED = 16, 16  # rounds with chains before trees are tried, and how many
CHAINS_BETWEEN = 2  # rounds: most of the latest ones, which say how fast the machine is
TESTS_KEPT, CHAINS_KEPT = 4096, 128  # of nodes, and of the rounds that they come from
ODD = 0xD1B54A32D192ED03  # another one than that of earlier answers, which change the same seeds


class LearnedCurve:
    """Seconds by size. It begins with a known or guessed shape, and rounds bend it.

    The median of some rounds gives the scale. By what the middle one of these differs from it, the curve is bent at
    sizes near its own, in the logarithm and by bounded steps: it tends to the median there, and a change of the load
    bends nothing. Whatever was seen, a larger size never takes less time.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], context_seconds: float = 0.0) -> None:
        self._sizes, self._logs = np.log2(sizes), np.log(seconds)
        self._weights, self.scale = np.zeros(len(sizes)), 1.0
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=RECENT)  # size, seconds, cached tokens
        self._context_seconds = context_seconds
        self._context, self._spread = 0.0, 0.0  # mean and variance of the cached tokens

    @property
    def context_seconds(self) -> float:
        """Seconds that each cached token adds."""
        return self._context_seconds * self.scale

    @property
    def seconds(self) -> np.ndarray:
        """Of all sizes, `[n]`."""
        rising, falling = np.maximum.accumulate(self._logs), np.minimum.accumulate(self._logs[::-1])[::-1]
        return np.exp((rising + falling) / 2) * self.scale

    def at(self, sizes: float | np.ndarray) -> np.ndarray:
        """Return the seconds of some sizes."""
        return np.interp(np.log2(sizes), self._sizes, self.seconds)

    def add(self, size: float, seconds: float, context: int = 0) -> float:
        """Learn from one round of a size, with so many cached tokens. Return what it took over what the shape says."""
        self._rounds.append((math.log2(size), max(seconds, 1e-9), context))
        places, taken, contexts = np.array(self._rounds).T
        bases = np.exp(np.interp(places, self._sizes, self._logs)) + self._context_seconds * contexts
        errors = np.log(taken / bases)
        scale = statistics.median(errors.tolist())
        self.scale = math.exp(scale)
        if len(errors) == RECENT:
            self._bend(places, contexts, bases, errors - scale)
        return math.exp(errors[-1])

    def _bend(self, places: np.ndarray, contexts: np.ndarray, bases: np.ndarray, errors: np.ndarray) -> None:
        """Bend the curve by the middle one of the latest rounds; errors are what each differs by from their median."""
        middle = len(errors) // 2
        step = max(-LARGEST_STEP, min(float(errors[middle]), LARGEST_STEP))
        near = 8.0 ** -np.abs(self._sizes - places[middle])
        self._weights += near
        self._logs += step * near * np.maximum(1 / (1 + self._weights), LEAST_WEIGHT)
        away = contexts[middle] - self._context
        self._context += away * (LEAST_WEIGHT if self._spread else 1.0)
        self._spread += LEAST_WEIGHT * (away**2 - self._spread)
        slope = LEAST_WEIGHT * step * bases[middle] * away / (self._spread + away**2 + USUAL_SPREAD**2)
        self._context_seconds = max(0.0, self._context_seconds + slope)


@dataclass
class ReprobeCounter:
    """Tells when to look again at what the rounds in a row before did not do: ever more rarely, if that is in vain."""

    first: int = REPROBE_AFTER  # rounds
    most: int = REPROBE_AFTER
    is_looking: bool = False  # whether the present round does it for that reason
    gain: float = 1.0  # that prompt lookup brought rounds that did not do it, over plain steps
    paid: float = 1.5  # what all rounds brought over plain steps; so much is hoped at first

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rounds, self._wait, self._calls, self.is_looking = 0, self.first, 0, False

    def look_again(self) -> bool:
        """Count a round, and tell whether it is time."""
        self.is_looking = self.rounds >= self._wait
        if self.is_looking:
            self._wait = min(2 * self._wait, self.most)
        self.rounds = 0 if self.is_looking else self.rounds + 1
        return self.is_looking

    def rests(self) -> bool:
        """Tell whether a whole call shall do without drafts, as all rounds together hardly paid: three of four do, and
        seven of eight if looking again was in vain, too. None does while prompt lookup pays."""
        self._calls += 1
        every = RARE_CALLS if self._wait == self.most else SOME_CALLS
        return max(self.paid, self.gain) < LEAST_PAID and self._calls % every > 0


class LearnedCosts:
    """What rounds cost on this machine, in all calls of a draft and target. `keep` stores the table now and then."""

    def __init__(self, known: ThroughputTable, block_size: int, keep: Callable[..., Any] | None = None) -> None:
        self.name = f"learned from {known.name}"
        self._tokens, self._blocks = known.verify_tokens, np.array(known.verify_tokens) / (1 + block_size)
        self._keep = keep
        passes = known.seconds_of(self._tokens) - known.drafting
        self._passes = LearnedCurve(self._tokens, passes, known.context_seconds)
        self._drafting = LearnedCurve(REQUESTS, [max(known.drafting, 1e-3 * passes[0])] * len(REQUESTS))
        self._growth = [LearnedCurve((1,), (growth,)) for growth in known.growth]
        self.rounds, self.plain = 0, ReprobeCounter(FIRST_PLAIN, RARELY)
        self._rested = 1  # rounds in a row that did not draft
        # Rounds that drafted, by the logarithm of their requests; `None` if the table was measured.
        drafted = known.provenance.get("drafted")
        self._drafted = None if drafted is None else Counter({int(size): count for size, count in drafted.items()})
        self._chains_scale, self._trees_in_a_row = 1.0, 0  # when chains were drafted last, and rounds with trees since
        self._tables: dict[int, tuple[int, ThroughputTable]] = {}  # by the number of requests, and when it was made
        self.new_key = CallKeys(ODD)  # of sampled calls of any domain, as they share the costs: see `Policy.new_key`

    def at(self, load: Load) -> ThroughputTable:
        """Return the costs of rounds of so many requests, as known before the coming one."""
        requests = max(1, load.num_requests)
        made, table = self._tables.get(requests, (-1, None))
        if table is None or self.rounds - made > min(RECENT, made // 4):
            table = self._table(requests)
            self._tables[requests] = self.rounds, table
        return table

    def first_answer(self, load: Load) -> bool | None:
        """Tell whether to draft while too few rounds of about so many requests have shown what they cost: every other
        one, as rounds of one kind in a row would show how fast the machine is, and not which kind takes longer."""
        if self._drafted is None or self._drafted[load.num_requests.bit_length()] >= FIRST_DRAFTED:
            return None
        return self._rested > 0

    def table(self) -> ThroughputTable:
        """Return the costs of one request up to γ+1 tokens, and of full blocks of several beyond."""
        return self._table(self._blocks.clip(1))

    def _table(self, requests: float | np.ndarray) -> ThroughputTable:
        """Return the costs of so many requests, one number for all tokens or one for each."""
        passes, drafting = self._passes.seconds, self._drafting_of(requests) + np.zeros(len(self._tokens))
        rates, growth = (1 / (passes + drafting)).tolist(), tuple(float(each.seconds[0]) for each in self._growth)
        costs = float(drafting[0]), self._passes.context_seconds
        return ThroughputTable(self._tokens, tuple(rates), *costs, growth=growth)

    def _drafting_of(self, requests: float | np.ndarray) -> float | np.ndarray:
        """Return the seconds of drafting chains, on a machine as fast as its latest rounds, drafted or not."""
        return self._drafting.at(requests) * self._passes.scale

    def observe(self, load: Load, outcome: RoundOutcome) -> None:
        """Learn from a round whose requests had all been decoded before: new ones let the draft read their prompts."""
        self.rounds += 1
        tokens, drafting = load.base_tokens + int(outcome.lengths.sum()), outcome.draft_seconds
        slowness = self._passes.add(tokens, outcome.seconds - drafting, load.context_tokens)
        if self._drafted is not None:
            self._drafted[load.num_requests.bit_length()] += outcome.drafted
        if not outcome.drafted:
            self.plain.rounds = 0
        elif outcome.is_tail or self._rested > 1:
            pass  # its heads alone ran, or it has read all that came while it rested
        elif isinstance(outcome.drafts, DraftTrees):
            self._observe_trees(load, outcome, slowness)
        else:
            self._chains_scale, self._trees_in_a_row = self._passes.scale, 0
            self._drafting.add(load.num_requests, drafting / slowness)
        self._rested = 0 if outcome.drafted and not outcome.is_tail else self._rested + 1
        if self._keep is not None and self.rounds >= KEPT_AFTER and self.rounds & (self.rounds - 1) == 0:
            with contextlib.suppress(OSError):  # a read-only place: the next process learns again
                facts = {} if self._drafted is None else {"drafted": dict(self._drafted)}
                self._keep(self.table(), learned_rounds=self.rounds, **facts)

    def _observe_trees(self, load: Load, outcome: RoundOutcome, slowness: float) -> None:
        """Learn what trees add to drafting, by the rounds with chains shortly before; later ones tell of both."""
        growth = self._growth[any(tree.distributions for tree in outcome.drafts.trees)]
        if self._trees_in_a_row < RECENT:
            chains = float(self._drafting.at(load.num_requests)) * self._chains_scale
            growth.add(1, max(1.0, outcome.draft_seconds / chains))  # never less, if some of their rounds were slow
        else:
            self._drafting.add(load.num_requests, outcome.draft_seconds / float(growth.seconds[0]) / slowness)
        self._trees_in_a_row += 1


class LearnedAcceptance:
    """How often draft tokens are accepted: of one draft and target, sampling regime and domain.

    Corrects confidences: a slope and an offset of the logit by position, fitted by maximum likelihood to what was
    accepted, round after round. What is learnt of one position is that of tokens whose predecessors were accepted.
    """

    def __init__(self) -> None:
        self._fits = np.empty((2, 0))  # slopes and offsets, [2, γ]
        self._precision = np.empty((3, 0))  # of slopes, of both, and of offsets, [3, γ]
        self.survival: list[float] = []  # what a block of an unknown request is expected to bring, [γ]
        self.rounds = self.tree_rounds = self._idle = 0
        self._tests: deque[SiblingTest] = deque(maxlen=TESTS_KEPT)
        self._chains: deque[int] = deque(maxlen=CHAINS_KEPT)  # first children accepted in a row
        self._siblings: SiblingAcceptance | None = None

    def corrected(self, confidence: torch.Tensor) -> torch.Tensor:
        """Return c_k `[R, γ]` as earlier rounds correct them."""
        if self.rounds == 0:
            return confidence
        self._reserve(confidence.shape[1])
        slopes, offsets = self._fits[:, : confidence.shape[1]]
        known = confidence.cpu().double().numpy()
        corrected = _sigmoid(np.maximum(slopes, 0.0) * _logits(known) + offsets)
        return torch.from_numpy(np.where((known > 0) & (known < 1), corrected, known)).to(confidence)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round."""
        if outcome.drafted and isinstance(outcome.drafts, DraftTrees):
            self._observe_trees(outcome)
        elif outcome.confidence is not None:
            self.rounds += 1
            self._observe_chains(outcome.confidence.cpu(), outcome.lengths, outcome.num_accepted)
            self._idle = 0
        self._idle += 1

    def expect(self, survivals: Sequence[float]) -> None:
        """Let the survivals of a block, `[n]`, be expected of others."""
        weight = max(1 / (2 + self.rounds), LEAST_WEIGHT)
        known = [*self.survival, *survivals[len(self.survival) :]]
        mixed = [(1 - weight) * old + weight * new for old, new in zip(known, survivals, strict=False)]
        self.survival = [*mixed, *known[len(mixed) :]]

    def _observe_chains(self, confidence: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor) -> None:
        """Take one Newton step towards the most likely fits, position by position."""
        size = confidence.shape[1]
        self._reserve(size)
        places, accepted = np.arange(size), accepted.numpy()[:, None]
        reached, is_right = (places < lengths.numpy()[:, None]) & (places <= accepted), places < accepted
        known = _logits(confidence.double().nan_to_num(0.0).numpy())  # [R, γ]
        slopes, offsets = self._fits[:, :size]
        predicted = _sigmoid(known * slopes + offsets)
        weights = np.where(reached, predicted * (1 - predicted), 0.0)
        errors = np.where(reached, is_right - predicted, 0.0)
        of_slopes, of_both, of_offsets = precision = self._precision[:, :size]
        kept, weighted = FORGETTING**self._idle, weights * known
        precision *= kept
        of_slopes += (1 - kept) * PRIOR_PRECISION[0] + (weighted * known).sum(axis=0)
        of_both += weighted.sum(axis=0)
        of_offsets += (1 - kept) * PRIOR_PRECISION[1] + weights.sum(axis=0)
        to_slopes = (errors * known).sum(axis=0) + (1 - FORGETTING) * PRIOR_PRECISION[0] * (RAW[0] - slopes)
        to_offsets = errors.sum(axis=0) + (1 - FORGETTING) * PRIOR_PRECISION[1] * (RAW[1] - offsets)
        determinants = of_slopes * of_offsets - of_both**2
        slopes += (of_offsets * to_slopes - of_both * to_offsets) / determinants
        offsets += (of_slopes * to_offsets - of_both * to_slopes) / determinants

    def _reserve(self, size: int) -> None:
        """Begin with the raw confidences."""
        if (missing := size - self._fits.shape[1]) > 0:
            begun = np.repeat([*RAW, PRIOR_PRECISION[0], 0.0, PRIOR_PRECISION[1]], missing).reshape(5, missing)
            self._fits = np.concatenate([self._fits, begun[:2]], axis=1)
            self._precision = np.concatenate([self._precision, begun[2:]], axis=1)

    # ---- trees

    @property
    def wants_trees(self) -> bool:
        """Whether a round with trees shall show what these bring: a few do, among chains of the same texts."""
        return self.rounds >= TREES_AFTER + CHAINS_BETWEEN * self.tree_rounds and self.tree_rounds < TREES_TRIED

    def siblings(self, known: SiblingAcceptance) -> SiblingAcceptance:
        """Return what to expect of the nodes of trees: what calibration has measured, else what rounds have shown."""
        return known if known.is_measured or self._siblings is None else self._siblings

    def _observe_trees(self, outcome: RoundOutcome) -> None:
        self.tree_rounds += 1
        trees, count = outcome.drafts.trees, self.tree_rounds
        if count > TREES_TRIED and count % 2 and count & (count - 1):
            return
        for tree, path in zip(trees, outcome.paths, strict=True):
            self._tests += recorded_tests(tree, path)
            first = (node == tree.children(parent)[0] for parent, node in itertools.pairwise((0, *path)))
            self._chains.append(sum(itertools.takewhile(bool, first)))
        if self._tests and count >= TREES_TRIED and count & (count - 1) == 0:
            is_drawn, size = any(tree.distributions for tree in trees), len(self.survival)
            if size and max(test.depth for test in self._tests) < size:
                # Those of the same rounds: chains of other texts would bring more, or less.
                chain = (np.arange(size) < np.array(self._chains)[:, None]).mean(axis=0)
                self._siblings = fit_siblings(self._tests, is_drawn, size, chain.tolist())


@dataclass(frozen=True)
class Experience:
    """What the default policy goes by: it learns in every call, and begins each one with what it knows."""

    costs: LearnedCosts
    acceptance: LearnedAcceptance = field(default_factory=LearnedAcceptance)
    tails: LearnedAcceptance = field(default_factory=LearnedAcceptance)
    matches: Sequence[MatchAcceptance] = field(default_factory=lambda: (MatchAcceptance(), MatchAcceptance()))
    skipped: ReprobeCounter = field(default_factory=lambda: ReprobeCounter(most=LONGEST_WAIT))

    @property
    def name(self) -> str:
        return self.costs.name


def _logits(probabilities: np.ndarray) -> np.ndarray:
    inside = np.minimum(np.maximum(probabilities, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
    return np.log(inside / (1 - inside))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))
