"""What turns of decoding come to: tau, acceptance and survival by position, calibration, speed."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..scheduling.calibration import PositionCalibration, conditional_auc, measure_calibration
from ..scheduling.rounds import Rounds
from .tables import markdown_table, number
from .timed_decoding import Answer

COLUMNS = (
    "task", "prompts", "turns", "tokens", "rounds", "tau", "acceptance by position", "ECE", "tokens/s",
    "draft / verify / rest, ms", "first token, ms",
)  # fmt: skip
COMPARED_COLUMNS = ("speed-up, median over median (quartiles of single turns)", "identical", "best up to rounding")


@dataclass(frozen=True)
class Speedup:
    """How much faster than plain decoding of the same turns."""

    ratio_of_medians: float  # median seconds per token over the turns, plain over drafted
    lower_quartile: float  # of the ratios of single turns
    median: float
    upper_quartile: float
    plain_tokens_per_second: float  # tokens over seconds of all turns
    identical: int | None  # turns whose tokens are the same; `None` if sampled
    best_tokens: int | None  # drafted tokens that are the target's best up to rounding; `None` if not checked


@dataclass(frozen=True)
class Metrics:
    """What some turns come to; `None` where nothing was measured."""

    prompts: int  # conversations answered
    turns: int
    rounds: int
    tokens: int  # written
    tau: float | None  # mean tokens per round, with the bonus token; the first token of a turn is the prefill's
    acceptance: list[float | None]  # by position: accepted of the rounds that verified it after an accepted prefix
    reached: list[int]  # by position: rounds that verified it after an accepted prefix
    acceptance_rate: float | None  # accepted over proposed draft tokens
    proposed_per_round: float | None
    ece_mean: float | None  # of the survival that the confidences predict, over the positions that were proposed
    auc: float | None  # of c_k against acceptance, over all slots after an accepted prefix
    calibration: list[PositionCalibration] = field(repr=False)  # with the bins of a reliability diagram
    tokens_per_second: float | None  # over all turns, prefill included
    seconds_per_round: dict[str, float] | None  # draft, verify, rest, total; a round of several requests counts once
    time_to_first_token: float | None  # median over the turns, in seconds
    speedup: Speedup | None  # against plain decoding, if compared

    @classmethod
    def of(cls, answers: Sequence[Answer], block_size: int) -> "Metrics":
        """Sum up turns; γ is 0 without a draft."""
        rounds = Rounds.joined(answer.rounds for answer in answers)
        confidences = rounds.confident_rounds()
        measured = [] if confidences is None else measure_calibration(confidences)
        calibration = [part for part in measured if part.num_rounds]
        seconds = sum(answer.seconds for answer in answers)
        tokens = sum(len(answer.token_ids) for answer in answers)
        first_tokens = [answer.prefill_seconds for answer in answers]
        return cls(
            prompts=len({(answer.group, answer.index) for answer in answers}),
            turns=len(answers),
            rounds=rounds.rounds,
            tokens=tokens,
            tau=_known(rounds.tau),
            acceptance=[_known(share) for share in rounds.conditional_acceptance(block_size)],
            reached=[rounds.reached(position) for position in range(1, block_size + 1)],
            acceptance_rate=_known(rounds.acceptance_rate),
            proposed_per_round=sum(rounds.proposed) / rounds.rounds if rounds.rounds else None,
            ece_mean=statistics.fmean(part.ece for part in calibration) if calibration else None,
            auc=None if confidences is None else conditional_auc(confidences),
            calibration=calibration,
            tokens_per_second=tokens / seconds if seconds else None,
            seconds_per_round=seconds_per_round(rounds),
            time_to_first_token=statistics.median(first_tokens) if first_tokens else None,
            speedup=speedup(answers),
        )


def metrics_by_task(answers: Sequence[Answer], tasks: Iterable[str], block_size: int) -> dict[str, Metrics]:
    """Return the metrics of each task, and of `all` of them together."""
    found = {task: Metrics.of([answer for answer in answers if answer.group == task], block_size) for task in tasks}
    return found | {"all": Metrics.of(answers, block_size)}


def seconds_per_round(rounds: Rounds) -> dict[str, float] | None:
    """Return the mean seconds of a round by phase, however many requests it served; `None` without rounds."""
    count = sum(1 / each.num_requests for each in rounds.seconds)
    names = ("draft", "verify", "rest", "total")
    return {name: getattr(rounds, f"{name}_seconds") / count for name in names} if count else None


def speedup(answers: Iterable[Answer]) -> Speedup | None:
    """Compare the turns that were decoded both ways; `None` if none was."""
    pairs = [(answer, answer.plain) for answer in answers if answer.plain is not None]
    if not pairs:
        return None
    drafted = [answer.seconds / len(answer.token_ids) for answer, _ in pairs]
    plain = [turn.seconds / len(turn.token_ids) for _, turn in pairs]
    ratios = torch.tensor([slow / fast for slow, fast in zip(plain, drafted, strict=True)], dtype=torch.double)
    quartiles = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.double)).tolist()
    same = [answer.identical for answer, _ in pairs if answer.identical is not None]
    best = [answer.num_best for answer, _ in pairs]
    return Speedup(
        statistics.median(plain) / statistics.median(drafted),
        *quartiles,
        plain_tokens_per_second=sum(len(turn.token_ids) for _, turn in pairs) / sum(turn.seconds for _, turn in pairs),
        identical=sum(same) if same else None,
        best_tokens=None if None in best else sum(best),
    )


def metrics_table(metrics: Mapping[str, Metrics]) -> str:
    """Return a Markdown table, one row per task."""
    compared = any(part.speedup is not None for part in metrics.values())
    head = [*COLUMNS, *(COMPARED_COLUMNS if compared else ())]
    return markdown_table(head, [_row(name, part, compared) for name, part in metrics.items()])


def comparison_table(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of tau and of the acceptance at the first and last position, before and after.

    `before` and `after` are metrics of the same tasks, as a result file holds them.
    """
    rows = []
    for name, old in before.items():
        new = after[name]
        ends = [f"{number(old['acceptance'][place])} → {number(new['acceptance'][place])}" for place in (0, -1)]
        change = f"{new['tau'] / old['tau'] - 1:+.0%}" if old["tau"] and new["tau"] else None
        rows.append((name, number(old["tau"]), number(new["tau"]), change, *ends))
    return markdown_table(("task", "tau before", "tau after", "change", "position 1", "last position"), rows)


def _row(name: str, part: Metrics, compared: bool) -> list[Any]:
    times, first, speed = part.seconds_per_round, part.time_to_first_token, part.speedup
    cells = [
        name, part.prompts, part.turns, part.tokens, part.rounds, number(part.tau),
        " ".join(map(number, part.acceptance)) or None,
        None if part.ece_mean is None else f"{part.ece_mean:.1%}",
        number(part.tokens_per_second, 1),
        times and " / ".join(f"{1e3 * times[phase]:.2f}" for phase in ("draft", "verify", "rest")),
        None if first is None else f"{1e3 * first:.1f}",
    ]  # fmt: skip
    if not compared or speed is None:
        return cells + [None] * (3 * compared)
    spread = f"{speed.ratio_of_medians:.2f}× ({speed.lower_quartile:.2f}–{speed.upper_quartile:.2f})"
    counts = ((speed.identical, f"{part.turns} turns"), (speed.best_tokens, f"{part.tokens} tokens"))
    return [*cells, spread, *(None if count is None else f"{count} of {whole}" for count, whole in counts)]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
