"""What turns of decoding come to: tau, acceptance and survival by position, calibration, speed.

Knows nothing of models, nor of how the turns were decoded.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..decoding.rounds import RoundStatistics
from ..maths.calibration import CalibrationRounds, PositionCalibration, conditional_auc, measure_calibration

# Confidences are kept to 6 digits, so that 1 may be anything above this.
LARGEST_CONFIDENCE = 1 - 1e-6


@dataclass(frozen=True)
class TurnRounds:
    """The rounds of one turn, in their order.

    Attributes:
        proposed, accepted (`list[int]`): Draft tokens verified and accepted, without the bonus token.
        committed (`list[int]`): Tokens gained, the bonus token included, up to the end of the turn.
        confidence (`list[list[float] | None]`, *optional*): Calibrated c_1..c_γ; `None` for a round that drafted
            nothing, and for all of them if the draft has no confidence head.
        draft_seconds, verify_seconds, total_seconds (`list[float]`): Of the whole round, whatever part the turn had
            in it.
        num_requests (`list[int]`): Turns that the round served together.
    """

    proposed: list[int]
    accepted: list[int]
    committed: list[int]
    confidence: list[list[float] | None] | None
    draft_seconds: list[float]
    verify_seconds: list[float]
    total_seconds: list[float]
    num_requests: list[int]

    @classmethod
    def of(cls, statistics: RoundStatistics, request_id: int) -> "TurnRounds":
        """Take the rounds of one request out of those of its call."""
        places = [place for place, each in enumerate(statistics.request_ids) if each == request_id]
        all_seconds = statistics.seconds_of_entries()
        seconds = [all_seconds[place] for place in places]
        confidence = [_rounded(statistics.confidence[place]) for place in places]
        return cls(
            [statistics.proposed[place] for place in places],
            [statistics.accepted[place] for place in places],
            [statistics.committed[place] for place in places],
            None if all(each is None for each in confidence) else confidence,
            [part.draft for part in seconds],
            [part.verify for part in seconds],
            [part.total for part in seconds],
            [part.num_requests for part in seconds],
        )


def _rounded(confidence: torch.Tensor | None) -> list[float] | None:
    return None if confidence is None else [round(value, 6) for value in confidence.tolist()]


@dataclass(frozen=True)
class PlainTurn:
    """The same turn, decoded by the target alone.

    Attributes:
        num_tokens (`int`): Tokens written.
        prefill_seconds, seconds (`float`): As in [`TurnRecord`].
        identical (`bool`, *optional*): Whether the tokens are the same; `None` where both are drawn at random.
    """

    num_tokens: int
    prefill_seconds: float
    seconds: float
    identical: bool | None


@dataclass(frozen=True)
class TurnRecord:
    """One answered turn.

    Attributes:
        task (`str`): Its task.
        prompt, turn (`int`): Its conversation among the sound ones of the task, and its place in that, from 0.
        num_prompt_tokens, num_tokens (`int`): Tokens of the conversation before it, and tokens written.
        prefill_seconds (`float`): From the call until its first new token, the preparation of `generate()` included.
        seconds (`float`): Its share of the duration of its call, in proportion to its tokens; all of it if it was
            decoded alone.
        rows_together (`int`): Turns that its call decoded.
        peak_memory_mib (`float`, *optional*): Peak of what the call had allocated on an accelerator; on a CPU, of the
            memory of the process since its start.
        rounds ([`TurnRounds`]): Its rounds; empty without a draft.
        plain ([`PlainTurn`], *optional*): The turn without a draft, if compared.
    """

    task: str
    prompt: int
    turn: int
    num_prompt_tokens: int
    num_tokens: int
    prefill_seconds: float
    seconds: float
    rows_together: int
    peak_memory_mib: float | None
    rounds: TurnRounds
    plain: PlainTurn | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds; `plain` only if compared."""
        return {name: value for name, value in asdict(self).items() if name != "plain" or value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "TurnRecord":
        """Read what `to_dict` returned."""
        plain = record.get("plain")
        parts = {"rounds": TurnRounds(**record["rounds"]), "plain": None if plain is None else PlainTurn(**plain)}
        return cls(**(dict(record) | parts))


@dataclass(frozen=True)
class RoundTimes:
    """Mean seconds of a round, however many requests it served.

    Attributes:
        draft, verify, rest, total (`float`): In the draft, in the target, elsewhere, and in all.
    """

    draft: float
    verify: float
    rest: float
    total: float


@dataclass(frozen=True)
class Speedup:
    """How much faster than plain decoding of the same turns.

    Attributes:
        ratio_of_medians (`float`): Median seconds per token over the turns, plain over drafted.
        lower_quartile, median, upper_quartile (`float`): Of the ratios of single turns.
        plain_tokens_per_second (`float`): Tokens over seconds of all turns, plain.
        plain_time_to_first_token (`float`): Median over the turns, in seconds.
        identical (`int`, *optional*): Turns whose tokens are the same; `None` if sampled.
    """

    ratio_of_medians: float
    lower_quartile: float
    median: float
    upper_quartile: float
    plain_tokens_per_second: float
    plain_time_to_first_token: float
    identical: int | None


@dataclass(frozen=True)
class Metrics:
    """What some turns come to. `None` for what nothing was measured of.

    Attributes:
        prompts, turns, rounds, tokens (`int`): Conversations and turns answered, rounds of all turns, tokens written.
        tau (`float`): Mean tokens per round over the rounds of all turns, the bonus token included. The first token of
            a turn comes out of the prefill and belongs to no round.
        acceptance (`list[float | None]`): Of each draft position 1..γ, the share of rounds that accepted it among
            those that verified it behind an accepted prefix.
        survival (`list[float | None]`): Of each position k, the share of rounds that accepted the first k tokens among
            those that proposed k or more.
        reached (`list[int]`): Of each position, the rounds that verified it behind an accepted prefix.
        acceptance_rate (`float`): Accepted over proposed draft tokens.
        proposed_per_round (`float`): Mean draft tokens verified.
        ece (`list[float | None]`): Expected calibration error of the survival that the confidences predict, by
            position, against what happened.
        ece_mean, brier (`float`): Mean of the ECE and of the squared error over the positions that were proposed.
        auc (`float`): Area under the ROC curve of c_k against acceptance, over all slots with an accepted prefix.
        calibration (`list[PositionCalibration]`): The same by position, with the bins of a reliability diagram.
        tokens_per_second (`float`): Tokens over seconds of all turns, prefill included.
        seconds_per_round ([`RoundTimes`]): Mean over the rounds; one of several requests counts once.
        time_to_first_token (`float`): Median over the turns, in seconds.
        peak_memory_mib (`float`): Highest of all turns.
        speedup ([`Speedup`]): Against plain decoding, if compared.
    """

    prompts: int
    turns: int
    rounds: int
    tokens: int
    tau: float | None
    acceptance: list[float | None]
    survival: list[float | None]
    reached: list[int]
    acceptance_rate: float | None
    proposed_per_round: float | None
    ece: list[float | None]
    ece_mean: float | None
    brier: float | None
    auc: float | None
    calibration: list[PositionCalibration]
    tokens_per_second: float | None
    seconds_per_round: RoundTimes | None
    time_to_first_token: float | None
    peak_memory_mib: float | None
    speedup: Speedup | None

    @classmethod
    def of(cls, records: Sequence[TurnRecord], block_size: int) -> "Metrics":
        """Sum up turns.

        Args:
            records (`Sequence[TurnRecord]`): The turns.
            block_size (`int`): γ of the draft; 0 without one.
        """
        rounds = joined_rounds(records)
        confidences = predicted_rounds(records)
        calibration = [] if confidences is None else _measured(measure_calibration(confidences))
        seconds = sum(record.seconds for record in records)
        tokens = sum(record.num_tokens for record in records)
        memory = [record.peak_memory_mib for record in records if record.peak_memory_mib is not None]
        return cls(
            prompts=len({(record.task, record.prompt) for record in records}),
            turns=len(records),
            rounds=rounds.rounds,
            tokens=tokens,
            tau=_known(rounds.tau),
            acceptance=[_known(share) for share in rounds.conditional_acceptance(block_size)],
            survival=[_known(share) for share in rounds.survival(block_size)],
            reached=[rounds.reached(position) for position in range(1, block_size + 1)],
            acceptance_rate=_known(rounds.acceptance_rate),
            proposed_per_round=sum(rounds.proposed) / rounds.rounds if rounds.rounds else None,
            ece=[_at(calibration, position) for position in range(1, block_size + 1)] if calibration else [],
            ece_mean=_mean([part.ece for part in calibration]),
            brier=_mean([part.brier for part in calibration]),
            auc=None if confidences is None else conditional_auc(confidences),
            calibration=calibration,
            tokens_per_second=tokens / seconds if seconds else None,
            seconds_per_round=round_times(records),
            time_to_first_token=statistics.median(record.prefill_seconds for record in records) if records else None,
            peak_memory_mib=max(memory, default=None),
            speedup=speedup(records),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds."""
        return asdict(self)


def metrics_by_task(records: Sequence[TurnRecord], tasks: Iterable[str], block_size: int) -> dict[str, Metrics]:
    """Return the metrics of each task, and of `all` of them together."""
    found = {task: Metrics.of([record for record in records if record.task == task], block_size) for task in tasks}
    return found | {"all": Metrics.of(records, block_size)}


def joined_rounds(records: Iterable[TurnRecord]) -> RoundStatistics:
    """Return the rounds of all turns, without times and confidences."""
    return RoundStatistics.joined(
        RoundStatistics(record.rounds.proposed, record.rounds.accepted, record.rounds.committed) for record in records
    )


def predicted_rounds(records: Iterable[TurnRecord]) -> CalibrationRounds | None:
    """Return what confidences said beside what happened; `None` if there are no confidences."""
    confidence, proposed, accepted = [], [], []
    for record in records:
        rounds = record.rounds
        for said, length, count in zip(rounds.confidence or (), rounds.proposed, rounds.accepted, strict=False):
            if said is not None:
                confidence.append(torch.tensor(said, dtype=torch.double))
                proposed.append(length)
                accepted.append(count)
    if not confidence:
        return None
    # Blocks end early where their sequence does.
    padded = torch.nn.utils.rnn.pad_sequence(confidence, batch_first=True, padding_value=0.5)
    logits = padded.logit(eps=1 - LARGEST_CONFIDENCE)
    num_accepted = torch.tensor(accepted)
    realised = (torch.arange(logits.shape[1]) < num_accepted[:, None]).double()
    return CalibrationRounds(logits, realised, num_accepted, torch.tensor(proposed))


def _measured(calibration: Sequence[PositionCalibration]) -> list[PositionCalibration]:
    """Leave out positions that were never proposed."""
    return [part for part in calibration if part.num_rounds]


def _at(calibration: Sequence[PositionCalibration], position: int) -> float | None:
    return next((part.ece for part in calibration if part.position == position), None)


def round_times(records: Iterable[TurnRecord]) -> RoundTimes | None:
    """Return the mean seconds of a round; `None` without rounds.

    A round of R turns is recorded R times, so each record counts 1/R.
    """
    weights, draft, verify, total = 0.0, 0.0, 0.0, 0.0
    for record in records:
        rounds = record.rounds
        rows = zip(rounds.num_requests, rounds.draft_seconds, rounds.verify_seconds, rounds.total_seconds, strict=True)
        for num_requests, *seconds in rows:
            weights += 1 / num_requests
            draft, verify, total = (
                whole + part / num_requests for whole, part in zip((draft, verify, total), seconds, strict=True)
            )
    if not weights:
        return None
    return RoundTimes(draft / weights, verify / weights, (total - draft - verify) / weights, total / weights)


def speedup(records: Iterable[TurnRecord]) -> Speedup | None:
    """Compare the turns that were decoded both ways; `None` if none was."""
    pairs = [(record, record.plain) for record in records if record.plain is not None]
    if not pairs:
        return None
    drafted = [record.seconds / record.num_tokens for record, _ in pairs]
    plain = [turn.seconds / turn.num_tokens for _, turn in pairs]
    ratios = torch.tensor([slow / fast for slow, fast in zip(plain, drafted, strict=True)], dtype=torch.double)
    quartiles = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.double)).tolist()
    same = [turn.identical for _, turn in pairs if turn.identical is not None]
    return Speedup(
        statistics.median(plain) / statistics.median(drafted),
        *quartiles,
        sum(turn.num_tokens for _, turn in pairs) / sum(turn.seconds for _, turn in pairs),
        statistics.median(turn.prefill_seconds for _, turn in pairs),
        sum(same) if same else None,
    )


def metrics_table(metrics: Mapping[str, Metrics]) -> str:
    """Return a Markdown table, one row per task."""
    head = ["task", "prompts", "turns", "tokens", "rounds", "tau", "acceptance by position", "ECE", "tokens/s",
            "draft / verify / rest, ms", "first token, ms"]  # fmt: skip
    compared = any(part.speedup is not None for part in metrics.values())
    head += ["speed-up, median over median (quartiles of single turns)", "identical"] if compared else []
    rows = [_row(name, part, compared) for name, part in metrics.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _row(name: str, part: Metrics, compared: bool) -> list[str]:
    times = part.seconds_per_round
    ms = "–" if times is None else " / ".join(f"{1e3 * each:.2f}" for each in (times.draft, times.verify, times.rest))
    rates = " ".join(_number(rate, 2) for rate in part.acceptance) or "–"
    first = part.time_to_first_token
    cells = [
        name, str(part.prompts), str(part.turns), str(part.tokens), str(part.rounds), _number(part.tau, 2), rates,
        "–" if part.ece_mean is None else f"{part.ece_mean:.1%}", _number(part.tokens_per_second, 1), ms,
        "–" if first is None else f"{1e3 * first:.1f}",
    ]  # fmt: skip
    if not compared:
        return cells
    if part.speedup is None:
        return [*cells, "–", "–"]
    spread = (
        f"{part.speedup.ratio_of_medians:.2f}× ({part.speedup.lower_quartile:.2f}–{part.speedup.upper_quartile:.2f})"
    )
    same = part.speedup.identical
    return [*cells, spread, "–" if same is None else f"{same} of {part.turns}"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
