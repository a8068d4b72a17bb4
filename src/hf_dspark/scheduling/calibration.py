"""Calibration of the confidence head, by temperatures and by slopes with offsets, and the measures of how calibrated
it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_BINS = 15
# SGLang fits on the same grid: the two tools must agree on the same rounds.
TEMPERATURE_GRID = tuple(torch.logspace(-1, 1, 41, dtype=torch.double).tolist())
RIDGE = 1e-2  # keeps fits of few labels near slope 1 and offset 0

# By draft position, what a logit is multiplied by and what is added.
LogitFits = Sequence[tuple[float, float]]


def calibrated_confidence(logits: torch.Tensor, fits: LogitFits | torch.Tensor | None) -> torch.Tensor:
    """Return c_k = sigmoid(slope_k logit_k + offset_k), `[..., γ]` in float32; without fits, sigmoid(logit_k).

    DSpark Section 3.2.1, where a slope is 1 / T_k and there is no offset.
    """
    logits = logits.float()
    if fits is not None:
        slopes, offsets = torch.as_tensor(fits, device=logits.device).unbind(dim=-1)
        logits = logits * slopes + offsets
    return logits.sigmoid()


def fits_of_temperatures(temperatures: Sequence[float]) -> LogitFits:
    """Return the slopes 1 / T_k, without offsets."""
    return [(1.0 / temperature, 0.0) for temperature in temperatures]


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
        if self.logits.dim() != 2 or self.logits.numel() == 0:
            raise ValueError(
                f"there is no round to calibrate on: logits are [rounds, γ], got {list(self.logits.shape)}. Decode "
                "more prompts, or longer answers."
            )
        rounds = len(self.logits)
        if self.acceptance.shape != self.logits.shape or not len(self.num_accepted) == len(self.proposed) == rounds:
            raise ValueError(
                f"logits {list(self.logits.shape)}, acceptance {list(self.acceptance.shape)}, num_accepted "
                f"{list(self.num_accepted.shape)} and proposed {list(self.proposed.shape)} must describe the same "
                "rounds"
            )
        if not bool(torch.isfinite(self.logits).all()):
            raise ValueError("confidence logits must be finite numbers")
        if not bool(((self.acceptance >= 0) & (self.acceptance <= 1)).all()):
            raise ValueError("acceptance must lie in [0, 1]")
        accepted, proposed = torch.as_tensor(self.num_accepted), torch.as_tensor(self.proposed)
        if not bool(((accepted >= 0) & (accepted <= proposed) & (proposed <= self.block_size)).all()):
            raise ValueError(f"rounds need 0 <= num_accepted <= proposed <= γ = {self.block_size}")

    @property
    def block_size(self) -> int:
        """γ."""
        return self.logits.shape[1]

    def observed(self, position: int) -> torch.Tensor:
        """Return which rounds verified draft position k (1..γ), `[n]`."""
        return self.proposed >= position

    def realised_labels(self) -> torch.Tensor:
        """Return 1 where the whole prefix up to the slot was accepted, `[n, γ]`."""
        return (torch.arange(self.block_size) < self.num_accepted[:, None]).double()

    def integrated_labels(self) -> torch.Tensor:
        """Return the survival of each slot given the slots before, the last uniform integrated out, `[n, γ]`.

        1[first k-1 accepted] * sum of min(p_t, p_d): same mean as the realised labels, less variance.
        """
        reached = torch.arange(self.block_size) <= self.num_accepted[:, None]
        return torch.where(reached, self.acceptance.double(), 0.0)

    def survivals(self) -> list[float]:
        """Return how often the first 1..γ tokens were all accepted where so many were verified, `[γ]`."""
        accepted, seen = self.realised_labels(), torch.arange(self.block_size) < self.proposed[:, None]
        shares = (accepted * seen).sum(dim=0) / seen.sum(dim=0).clamp(min=1)
        return shares.cummin(dim=0).values.tolist()

    @classmethod
    def concatenate(cls, parts: Sequence["CalibrationRounds"]) -> "CalibrationRounds":
        """Join rounds of several prompts."""
        sizes = {part.block_size for part in parts}
        if len(sizes) != 1:
            raise ValueError(
                "there is no round to calibrate on: the calibration set is empty"
                if not sizes
                else f"rounds of different block sizes γ cannot be calibrated together: got {sorted(sizes)}"
            )
        names = ("logits", "acceptance", "num_accepted", "proposed")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class TemperatureScaling:
    """Fitted temperatures, one per draft position."""

    temperatures: Sequence[float]  # T_1..T_γ, positive
    num_samples: int  # rounds they were fitted on
    ece_before: Sequence[float]  # of the survival at each position, on those rounds
    ece_after: Sequence[float]


def check_temperatures(temperatures: Any, block_size: int | None = None) -> None:
    """Raise a `ValueError` unless these are γ positive numbers."""
    numbers = isinstance(temperatures, Sequence) and all(
        isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in temperatures
    )
    if not numbers or len(temperatures) == 0:
        raise ValueError(f"temperatures must be a list of positive numbers, got {temperatures}")
    if block_size is not None and len(temperatures) != block_size:
        raise ValueError(
            f"got {len(temperatures)} temperatures for blocks of {block_size} tokens: they were fitted for another "
            "draft. Calibrate this one."
        )


def check_logit_fits(fits: Any, block_size: int) -> None:
    """Raise a `ValueError` unless these are γ pairs of finite numbers."""
    pairs = isinstance(fits, Sequence) and all(
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(isinstance(number, (int, float)) and math.isfinite(number) for number in pair)
        for pair in fits
    )
    if not pairs or len(fits) != block_size:
        raise ValueError(
            f"confidence fits must be {block_size} pairs of slope and offset, got {fits}: calibrate again"
        )


def fit_confidence(rounds: CalibrationRounds, realised: bool = False) -> LogitFits:
    """Fit a slope and an offset per position by maximum likelihood, on the rounds that accepted all slots before it.

    A temperature never moves a confidence past one half. An offset does, which a head needs that promises too much.
    Platt 1999, position by position as the temperatures of DSpark Section 3.2.1 are.
    """
    labels = rounds.realised_labels() if realised else rounds.integrated_labels()
    fits = []
    for position in range(1, rounds.block_size + 1):
        reached = rounds.observed(position) & (rounds.num_accepted >= position - 1)
        fits.append(fit_logits(rounds.logits[reached, position - 1].double(), labels[reached, position - 1]))
    return fits


def fit_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the slope and the offset under which sigmoid(slope logit + offset) makes labels in [0, 1] most likely."""
    weights = torch.tensor([1.0, 0.0], dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        predicted = logits * weights[0] + weights[1]
        misfit = torch.nn.functional.binary_cross_entropy_with_logits(predicted, labels, reduction="sum")
        total = (misfit + RIDGE * ((weights[0] - 1.0) ** 2 + weights[1] ** 2)) / max(1, len(labels))
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    slope, offset = weights.detach().tolist()
    return round(slope, 4), round(offset, 4)


def fit_temperatures(rounds: CalibrationRounds, realised: bool = False) -> TemperatureScaling:
    """Fit one temperature per position, left to right, each minimising the ECE of the survival up to it.

    Of temperatures that are equally good, the one nearest 1 wins. `realised` labels with the realised acceptance
    instead of the integrated one. DSpark Section 3.2.1.
    """
    labels = rounds.realised_labels() if realised else rounds.integrated_labels()
    before = torch.ones(len(labels), dtype=torch.double)
    raw_survival, temperatures, errors_before, errors_after = before, [], [], []
    ordered = sorted(TEMPERATURE_GRID, key=lambda temperature: abs(math.log(temperature)))
    for position in range(1, rounds.block_size + 1):
        seen = rounds.observed(position)
        if not bool(seen.any()):
            raise ValueError(
                f"no round verified draft position {position}, because the answers ended before it: give a larger "
                "max_new_tokens, or prompts with longer answers"
            )
        logits, label = rounds.logits[:, position - 1].double(), labels[:, position - 1]
        errors = [
            expected_calibration_error((before * (logits / temperature).sigmoid())[seen], label[seen])
            for temperature in ordered
        ]
        best = min(range(len(ordered)), key=errors.__getitem__)
        raw_survival = raw_survival * logits.sigmoid()
        before = before * (logits / ordered[best]).sigmoid()
        temperatures.append(ordered[best])
        errors_before.append(expected_calibration_error(raw_survival[seen], label[seen]))
        errors_after.append(errors[best])
    return TemperatureScaling(temperatures, len(labels), errors_before, errors_after)


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
    if fits is not None:
        check_logit_fits(fits, rounds.block_size)
    predicted = calibrated_confidence(rounds.logits, fits).double().cumprod(dim=-1)
    integrated, realised = rounds.integrated_labels(), rounds.realised_labels()
    measured = []
    for position in range(1, rounds.block_size + 1):
        seen = rounds.observed(position)
        scores, soft, hard = (table[seen, position - 1] for table in (predicted, integrated, realised))
        measured.append(
            PositionCalibration(
                position=position,
                num_rounds=int(seen.sum()),
                ece=expected_calibration_error(scores, soft),
                brier=float((scores - hard).square().mean()),
                auc=roc_auc(scores, hard),
                bins=reliability_bins(scores, soft),
            )
        )
    return measured


def conditional_auc(rounds: CalibrationRounds) -> float | None:
    """Return the ROC-AUC of c_k against acceptance over all slots whose prefix was accepted."""
    slots = torch.arange(rounds.block_size)
    reached = (slots <= rounds.num_accepted[:, None]) & (slots < rounds.proposed[:, None])
    return roc_auc(rounds.logits[reached].double(), rounds.realised_labels()[reached])


def reliability_bins(predicted: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, float, int]]:
    """Return mean prediction, mean label and count of the equal-width bins over [0, 1] that are not empty."""
    index = _bins(predicted)
    return [
        (float(predicted[index == i].mean()), float(labels[index == i].mean()), int((index == i).sum()))
        for i in index.unique().tolist()
    ]


def expected_calibration_error(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the ECE: the mean gap between prediction and label over equal-width bins, weighted by their counts.

    Labels may be probabilities. Naeini et al. 2015.
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
    """Return the equal-width bin of each prediction in [0, 1]; 1 belongs to the last one."""
    return (predicted * NUM_BINS).long().clamp_max(NUM_BINS - 1)
