"""Calibration on recorded rounds: of the confidence head, by temperatures and by slopes with offsets, the measures of
how calibrated it is, and the expected acceptance of the nodes of trees."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..sampling.drafts import DraftTree
from .tree_plans import LEAST_PROBABILITY, MOST_SIBLINGS, SiblingAcceptance

NUM_BINS = 15
LEAST_MEAN = 1e-3  # acceptance of a node
# SGLang fits on the same grid: the two tools must agree on the same rounds.
TEMPERATURE_GRID = tuple(torch.logspace(-1, 1, 41, dtype=torch.double).tolist())
RIDGE = 1e-2  # keeps fits of few labels near slope 1 and offset 0

# By draft position, what a logit is multiplied by and what is added.
LogitFits = Sequence[tuple[float, float]]
RAW = (1.0, 0.0)  # the fit that changes nothing


def calibrated_confidence(logits: torch.Tensor, fits: LogitFits | torch.Tensor | None) -> torch.Tensor:
    """Return c_k = sigmoid(slope_k logit_k + offset_k), `[..., γ]` in float32; without fits, sigmoid(logit_k).

    DSpark Section 3.2.1, where a slope is 1 / T_k and there is no offset.
    """
    logits = logits.float()
    if fits is not None:
        slopes, offsets = torch.as_tensor(fits, device=logits.device).unbind(dim=-1)
        logits = torch.addcmul(offsets, logits, slopes)
    return logits.sigmoid()


@dataclass(frozen=True)
class CalibrationRounds:
    """Rounds to calibrate on: what the head said and what verification found."""

    logits: torch.Tensor  # raw confidence logits, [n, γ]
    # [n, γ]: sum over the vocabulary of min(p_t, p_d), the probability that verification accepts a fresh draw in this
    # slot (DSpark Eq. 8). Only read where the slots before were accepted.
    acceptance: torch.Tensor
    num_accepted: torch.Tensor  # draft tokens, [n]
    proposed: torch.Tensor  # draft tokens verified, [n]; slots after them say nothing

    def __post_init__(self) -> None:
        if len(self.logits) == 0:
            raise ValueError("there is no round to calibrate on: decode more prompts, or longer answers")
        if not bool(torch.isfinite(self.logits).all()):
            raise ValueError("confidence logits must be finite numbers")
        if not bool(((self.acceptance >= 0) & (self.acceptance <= 1)).all()):
            raise ValueError("acceptance must lie in [0, 1]")
        assert self.acceptance.shape == self.logits.shape
        assert bool(((self.num_accepted <= self.proposed) & (self.proposed <= self.block_size)).all())

    @property
    def block_size(self) -> int:
        """γ."""
        return self.logits.shape[1]

    def realised_labels(self) -> torch.Tensor:
        """Return 1 where the whole prefix up to the slot was accepted, `[n, γ]`."""
        return (torch.arange(self.block_size) < self.num_accepted[:, None]).double()

    def integrated_labels(self) -> torch.Tensor:
        """Return the survival of each slot given the slots before, the last uniform integrated out, `[n, γ]`.

        1[first k-1 accepted] * sum of min(p_t, p_d): same mean as the realised labels, less variance.
        """
        reached = torch.arange(self.block_size) <= self.num_accepted[:, None]
        return torch.where(reached, self.acceptance.double(), 0.0)

    @classmethod
    def concatenate(cls, parts: Sequence["CalibrationRounds"]) -> "CalibrationRounds":
        """Join rounds of several prompts."""
        sizes = sorted({part.block_size for part in parts})
        if len(sizes) != 1:
            raise ValueError(f"rounds to calibrate on must be there, and of one block size γ, got those of {sizes}")
        return cls(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


def check_temperatures(temperatures: Any, block_size: int) -> None:
    """Raise a `ValueError` unless these are γ positive numbers."""
    if not (_are_numbers(temperatures, block_size) and min(temperatures) > 0):
        raise ValueError(f"temperatures must be {block_size} positive numbers, got {temperatures}: calibrate again")


def check_logit_fits(fits: Any, block_size: int) -> None:
    """Raise a `ValueError` unless these are γ pairs of finite numbers."""
    if not _are_numbers(fits, block_size, 2):
        raise ValueError(f"these must be {block_size} pairs of slope and offset, got {fits}: calibrate again")


def check_siblings(entry: Any, block_size: int) -> None:
    """Raise a `ValueError` unless these are the fields of [`SiblingAcceptance`] for γ positions."""
    known = dict(entry) if isinstance(entry, Mapping) else {}
    fits, means, best, chain = (known.pop(name, []) for name in ("fits", "means", "best", "chain"))
    ranks = len(means[0]) if _are_numbers(means, block_size, None) else 0
    sound = (
        1 <= ranks <= MOST_SIBLINGS
        and _are_numbers(fits, None, 2)
        and 1 <= len(fits) <= MOST_SIBLINGS
        and _are_numbers(best, None)
        and _are_numbers(chain, block_size if chain else 0)
        and all(list(each) == sorted(each, reverse=True) for each in (best, chain))
        and all(0 <= share <= 1 for share in [*itertools.chain(*means), *best, *chain])
    )
    if known or not sound:
        raise ValueError(
            f"acceptances must have 'fits', 1 to {MOST_SIBLINGS} pairs, and 'means', {block_size} rows of "
            f"probabilities; those of 'best' and 'chain' must fall. Got {entry!r}: calibrate the draft again"
        )


def _are_numbers(values: Any, *shape: int | None) -> bool:
    """Tell whether lists are an array of finite numbers of a shape; `None` stands for any size."""
    try:
        found = np.array(values)
    except ValueError:  # rows of several lengths
        return False
    is_shape = found.ndim == len(shape) and all(map(lambda size, own: size in (None, own), shape, found.shape))
    return is_shape and found.dtype.kind in "if" and bool(np.isfinite(found).all())


def fit_confidence(rounds: CalibrationRounds) -> LogitFits:
    """Fit a slope and an offset per position by maximum likelihood, on the rounds that accepted all slots before it.

    A temperature never moves a confidence past one half. An offset does, which a head needs that promises too much.
    Platt 1999, position by position as the temperatures of DSpark Section 3.2.1 are.
    """
    labels, fits = rounds.integrated_labels(), []
    for position in range(1, rounds.block_size + 1):
        reached = (rounds.proposed >= position) & (rounds.num_accepted >= position - 1)
        fit = fit_logits(rounds.logits[reached, position - 1].double(), labels[reached, position - 1])
        fits.append(fit if fit[0] > 0 else RAW)  # one that falls says that the head knows nothing there
    return fits


def fit_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the slope and the offset under which sigmoid(slope logit + offset) makes labels in [0, 1] most likely."""
    raw = torch.tensor(RAW, dtype=torch.double)
    weights = raw.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        predicted = logits * weights[0] + weights[1]
        misfit = torch.nn.functional.binary_cross_entropy_with_logits(predicted, labels, reduction="sum")
        total = (misfit + RIDGE * (weights - raw).square().sum()) / max(1, len(labels))
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    slope, offset = weights.detach().tolist()
    return round(slope, 4), round(offset, 4)


def fit_temperatures(rounds: CalibrationRounds) -> list[float]:
    """Fit one temperature per position, left to right, each minimising the ECE of the survival up to it, `[γ]`.

    Of temperatures that are equally good, the one nearest 1 wins. DSpark Section 3.2.1.
    """
    labels = rounds.integrated_labels()
    before, temperatures = torch.ones(len(labels), dtype=torch.double), []
    ordered = sorted(TEMPERATURE_GRID, key=lambda temperature: abs(math.log(temperature)))
    for position in range(1, rounds.block_size + 1):
        seen = rounds.proposed >= position
        if not bool(seen.any()):
            raise ValueError(
                f"no round verified draft position {position}, because the answers ended before it: give a larger "
                "max_new_tokens, or prompts with longer answers"
            )
        logits, label = rounds.logits[:, position - 1].double(), labels[:, position - 1]
        survivals = [before * (logits / temperature).sigmoid() for temperature in ordered]
        errors = [expected_calibration_error(each[seen], label[seen]) for each in survivals]
        best = errors.index(min(errors))
        temperatures.append(ordered[best])
        before = survivals[best]
    return temperatures


@dataclass(frozen=True)
class PositionCalibration:
    """How well the survival predicted for one draft position fits what happened."""

    position: int  # k, from 1
    num_rounds: int  # that verified it
    ece: float  # expected calibration error against the integrated labels
    brier: float  # mean squared error against the realised labels
    auc: float | None  # area under the ROC curve of the realised labels; `None` if all are equal
    bins: list[tuple[float, float, int]]  # mean prediction, mean label and count of each bin that is not empty


def measure_calibration(rounds: CalibrationRounds, fits: LogitFits | None = None) -> list[PositionCalibration]:
    """Measure the survival predicted with given fits; `None` measures the raw head."""
    predicted = calibrated_confidence(rounds.logits, fits).double().cumprod(dim=-1)
    tables, measured = (predicted, rounds.integrated_labels(), rounds.realised_labels()), []
    for position in range(1, rounds.block_size + 1):
        seen = rounds.proposed >= position
        scores, soft, hard = (table[seen, position - 1] for table in tables)
        ece, brier = expected_calibration_error(scores, soft), float((scores - hard).square().mean())
        bins = reliability_bins(scores, soft)
        measured.append(PositionCalibration(position, len(scores), ece, brier, roc_auc(scores, hard), bins))
    return measured


def conditional_auc(rounds: CalibrationRounds) -> float | None:
    """Return the ROC-AUC of c_k against acceptance over all slots whose prefix was accepted."""
    slots = torch.arange(rounds.block_size)
    reached = (slots <= rounds.num_accepted[:, None]) & (slots < rounds.proposed[:, None])
    return roc_auc(rounds.logits[reached].double(), rounds.realised_labels()[reached])


def reliability_bins(predicted: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, float, int]]:
    """Return mean prediction, mean label and count of the equal-width bins over [0, 1] that are not empty."""
    index = _bins(predicted)
    members = [index == each for each in index.unique()]
    return [(float(predicted[each].mean()), float(labels[each].mean()), int(each.sum())) for each in members]


def expected_calibration_error(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the ECE: the mean gap between prediction and label over equal-width bins, weighted by their counts.

    Labels may be probabilities; 1 belongs to the last bin. Naeini et al. 2015.
    """
    if len(predicted) == 0:
        return float("nan")
    gaps = predicted.new_zeros(NUM_BINS).index_add(0, _bins(predicted), predicted - labels)
    return float(gaps.abs().sum() / len(predicted))


def roc_auc(scores: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Return the probability that a positive outscores a negative, ties half; `None` if one kind is missing."""
    positives, negatives = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
    if positives == 0 or negatives == 0:
        return None
    values, index, counts = scores.unique(return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # ranks from 1, ties share their mean
    rank_sum = float(mean_ranks[index][labels > 0.5].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def _bins(predicted: torch.Tensor) -> torch.Tensor:
    return (predicted * NUM_BINS).long().clamp_max(NUM_BINS - 1)


# ---- nodes of trees


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
    fits = []
    for group in filter(None, groups):
        known, was_accepted = torch.tensor([(test.known, test.was_accepted) for test in group], dtype=torch.double).T
        fits.append(fit_logits(known.logit(LEAST_PROBABILITY), was_accepted))
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
