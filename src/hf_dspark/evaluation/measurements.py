"""What figures and tables are made of: result files and files of benchmarks, read, recognised and put into one form.

Knows nothing of drawing, and nothing of how anything was measured.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..maths.calibration import PositionCalibration
from .results import WHOLE_BLOCK, read_results, regime_of, short_policy

Result = Mapping[str, Any]

# Files of benchmarks say nothing of their kind: these top-level names do. The first match counts.
BENCHMARKS = {
    "domains": {"drafts", "steps"},
    "block_sizes": {"block_sizes"},
    "threshold_sweep": {"num_prompts", "regimes"},
    "held_out_calibration": {"num_held_out", "regimes"},
    "scheduler": {"budget"},
    "simulator": {"trace", "results"},
    "comparison": {"methods", "scheduled_minimum"},
}
DRAFT_KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
THRESHOLDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class MissingResults(ValueError):
    """No result that was given holds what a figure shows."""


@dataclass(frozen=True)
class ResultFile:
    """A file that something was measured into.

    Args:
        name (`str`): Folder and file, nothing else of the disk.
        content (`Mapping`): What it holds.
    """

    name: str
    content: Result

    @property
    def kind(self) -> str | None:
        """Its kind, `None` if no figure or table knows it."""
        return kind_of(self.content)


@dataclass(frozen=True)
class DraftFacts:
    """What tells one draft from another in a figure.

    Args:
        kind (`str`): DSpark, DFlash or Eagle3.
        num_layers (`int`, *optional*): Its depth.
        block_size (`int`): gamma, draft tokens a block.
        head (`str`, *optional*): Kind of its sequential head.
        name (`str`, *optional*): What it is called.
        weights (`str`, *optional*): The beginning of their hash: a draft keeps its name when it is trained on.
    """

    kind: str
    num_layers: int | None
    block_size: int
    head: str | None = None
    name: str | None = None
    weights: str | None = None


@dataclass(frozen=True)
class Setting:
    """Under what a draft was measured.

    Args:
        target (`str`, *optional*): Name of the target.
        regime (`str`): Greedy, or a temperature.
        policy (`str`): How much of a block was verified.
        batch_size (`int`, *optional*): Rows decoded together at most.
        device (`str`): The machine.
        dtype (`str`): Of the target.
    """

    target: str | None
    regime: str
    policy: str = WHOLE_BLOCK
    batch_size: int | None = None
    device: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class RoundTime:
    """Mean host time of a round, in seconds: in the draft, in the target's verification, and in all."""

    draft: float
    verify: float
    total: float


@dataclass(frozen=True)
class DraftMeasurement:
    """One draft on the prompts of one task.

    Args:
        draft ([`DraftFacts`]): Who.
        setting ([`Setting`]): Under what.
        task (`str`): Name of the prompts.
        tau (`float`, *optional*): Tokens per round, bonus included; `None` where only time was measured.
        acceptance (`tuple`): Of each position, the share accepted where all before it were; `None` if never reached.
        reached (`tuple[int, ...]`): Rounds that this share rests on.
        time ([`RoundTime`], *optional*): Of a round.
    """

    draft: DraftFacts
    setting: Setting
    task: str
    tau: float | None
    acceptance: tuple[float | None, ...] = ()
    reached: tuple[int, ...] = ()
    time: RoundTime | None = None


@dataclass(frozen=True)
class ThresholdRow:
    """What a confidence threshold does: tokens, rejected drafts (both per round), accepted over verified drafts."""

    threshold: float
    tokens_per_round: float
    rejected_per_round: float
    acceptance_rate: float | None


@dataclass(frozen=True)
class ThresholdSweep:
    """Rows by rising threshold, and what they were measured on."""

    title: str
    rows: list[ThresholdRow]


@dataclass(frozen=True)
class Reliability:
    """How far predicted survival can be trusted, in one regime.

    Args:
        title (`str`): Whose.
        curves (`Mapping[str, list[PositionCalibration]]`): By state of the confidences, such as raw or calibrated.
    """

    title: str
    curves: Mapping[str, list[PositionCalibration]]


@dataclass(frozen=True)
class LoadPoint:
    """Under one load: throughput in tokens per second, and verified tokens per request and round (drafts + 1)."""

    load: float
    tokens_per_second: float
    verified: float


@dataclass(frozen=True)
class LoadCurves:
    """How policies react to load.

    Args:
        title (`str`): Which step times or which machine.
        load (`str`): What the load is counted in.
        policies (`Mapping[str, list[LoadPoint]]`): Points of each policy.
        reference (`list[tuple[float, float]]`): Loads and verified tokens of another implementation.
    """

    title: str
    load: str
    policies: Mapping[str, list[LoadPoint]]
    reference: list[tuple[float, float]] = field(default_factory=list)


# ---- files


def read_result_files(paths: Iterable[str | Path]) -> list[ResultFile]:
    """Read result files and files of benchmarks.

    Args:
        paths (`Iterable`): Files, or folders whose `*.json` files are read.

    Returns:
        `list[ResultFile]`: Sorted within each folder; files that nothing is known about are among them.

    Raises:
        ValueError: If there is no such file, no JSON in it, or no sound result.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"there is no {path}: pass result files, or folders of them")
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError("there is no *.json file to make figures of: hf-dspark eval and benchmarks/*.py write some")
    return [ResultFile("/".join(file.parts[-2:]), _read(file)) for file in files]


def _read(file: Path) -> Result:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no result file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no result file: it holds a {type(content).__name__}, not an object")
    result = read_results([file])[0] if "kind" in content else content
    try:
        for read in (measurements, threshold_sweeps, reliabilities, load_curves, compared_methods):
            read([result])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is no sound result of the kind {kind_of(result)!r} ({error!r}): measure it again"
        ) from error
    return result


def kind_of(result: Result) -> str | None:
    """Return the kind of a result: its own word for it, or the benchmark it looks like; `None` if it is unknown."""
    if "kind" in result:
        return result["kind"]
    return next((kind for kind, names in BENCHMARKS.items() if names <= result.keys()), None)


def of_kind(results: Sequence[Result], *kinds: str) -> list[Result]:
    """Return the results of some kinds."""
    return [result for result in results if kind_of(result) in kinds]


def provenance_of(result: Result) -> Mapping[str, Any]:
    """Return the provenance of a result; empty if it has none."""
    return result.get("provenance") or {}


# ---- drafts by task


def measurements(results: Sequence[Result]) -> list[DraftMeasurement]:
    """Return every draft on every task that some results hold.

    Args:
        results (`Sequence[Mapping]`): Of the kinds evaluation and acceptance, of `benchmarks/domains.py`, and
            measurements by block size: `{"target": str | None, "regime": str, "block_sizes": [{"kind": "dspark",
            "layers": int, "head": str | None, "block_size": int, "batch_size": int, "tau": {task: float},
            "acceptance": {task: [float]}, "rounds": {task: int}, "draft_ms": float, "verify_ms": float, "total_ms":
            float}]}`, in which `tau`, the acceptance by position with its rounds, or the times may be absent, and
            rows may have a `regime` of their own. Others are passed over.
    """
    readers = {
        "evaluation": _of_evaluation,
        "acceptance": _of_acceptance,
        "domains": _of_domains,
        "block_sizes": _of_block_sizes,
    }
    return [each for result in results if kind_of(result) in readers for each in readers[kind_of(result)](result)]


def comparable(found: Sequence[DraftMeasurement]) -> list[DraftMeasurement]:
    """Return what says most about drafts themselves, by kind: of whole blocks if there are any, at the smallest batch.

    A policy that cuts a block leaves only the tokens that it trusts, so acceptance under it says little of the draft.
    """

    def group(each: DraftMeasurement) -> tuple:
        return each.draft, each.setting.target, each.setting.regime, each.task

    best: dict[tuple, tuple] = {}
    for each in found:
        best[group(each)] = min(best.get(group(each), (True, float("inf"))), _rank(each.setting))
    chosen = [each for each in found if _rank(each.setting) == best[group(each)]]
    order = list(DRAFT_KINDS.values())
    return sorted(
        chosen, key=lambda each: (order.index(each.draft.kind), each.draft.num_layers or 0, each.draft.head or "")
    )


def _rank(setting: Setting) -> tuple[bool, float]:
    return setting.policy != WHOLE_BLOCK, setting.batch_size or 1


def _of_evaluation(result: Result) -> list[DraftMeasurement]:
    setting = _setting(result)
    found = []
    for task, metrics in result["tasks"].items():
        if task != "all" and metrics["rounds"]:
            found.append(
                DraftMeasurement(
                    _facts(result["draft"]),
                    setting,
                    task,
                    metrics["tau"],
                    tuple(metrics["acceptance"]),
                    tuple(metrics["reached"]),
                    _round_time(metrics),
                )  # fmt: skip
            )
    return found


def _of_acceptance(result: Result) -> list[DraftMeasurement]:
    setting = _setting(result)
    return [
        _whole_blocks(_facts(result["draft"]), setting, task, part)
        for task, part in result["domains"].items()
        if part["rounds"]
    ]


def _of_domains(result: Result) -> list[DraftMeasurement]:
    device = provenance_of(result).get("device", "")
    found = []
    for name, draft in result["drafts"].items():
        kind = DRAFT_KINDS[name.split("_")[0]]
        for task, regimes in draft["measured"].items():
            for regime, part in regimes.items():
                facts = DraftFacts(kind, draft["layers"], len(part["acceptance"]))
                found.append(_whole_blocks(facts, Setting(None, regime, device=device), task, part))
    return found


def _of_block_sizes(result: Result) -> list[DraftMeasurement]:
    device = provenance_of(result).get("device", "")
    found = []
    for row in result["block_sizes"]:
        facts = DraftFacts(DRAFT_KINDS[row["kind"]], row.get("layers"), row["block_size"], row.get("head"))
        regime = row["regime"] if "regime" in row else result["regime"]
        setting = Setting(result.get("target"), regime, batch_size=row.get("batch_size"), device=device)
        seconds = [row.get(f"{part}_ms") for part in ("draft", "verify", "total")]
        time = None if None in seconds else RoundTime(*(part / 1e3 for part in seconds))
        for task, tau in (row.get("tau") or {"": None}).items():
            rates = row.get("acceptance", {}).get(task, ())
            reached = _reached(row["rounds"][task], rates) if rates else ()
            found.append(DraftMeasurement(facts, setting, task, tau, tuple(rates), reached, time))
    return found


def _whole_blocks(draft: DraftFacts, setting: Setting, task: str, part: Mapping[str, Any]) -> DraftMeasurement:
    """Return a measurement whose counts by position were not kept."""
    rates = tuple(part["acceptance"])
    return DraftMeasurement(draft, setting, task, part["tau"], rates, _reached(part["rounds"], rates))


def _reached(num_rounds: int, rates: Sequence[float | None]) -> tuple[int, ...]:
    """Return how many rounds came to each position: it follows from the rates before it."""
    reached, expected = [], float(num_rounds)
    for rate in rates:
        reached.append(round(expected))
        expected *= rate or 0.0
    return tuple(reached)


def _facts(draft: Mapping[str, Any]) -> DraftFacts:
    head = draft["markov_head"] if draft["markov_rank"] else None
    kind = "eagle3" if "eagle3" in draft["model_type"] else "dspark" if draft["markov_rank"] else "dflash"
    weights = (draft.get("weights") or "")[:8] or None
    layers, block_size = draft["num_hidden_layers"], draft["block_size"]
    return DraftFacts(DRAFT_KINDS[kind], layers, block_size, head, draft.get("name"), weights)


def _setting(result: Result) -> Setting:
    return Setting(
        result["target"].get("name"),
        regime_of(result["sampling"]),
        result["policy"] or WHOLE_BLOCK,
        result.get("batch_size"),
        provenance_of(result).get("device", ""),
        _dtype(result),
    )


def _dtype(result: Result) -> str:
    return (result["target"].get("dtype") or "").removeprefix("torch.")


def _round_time(metrics: Mapping[str, Any]) -> RoundTime | None:
    seconds = metrics.get("seconds_per_round")
    return None if seconds is None else RoundTime(seconds["draft"], seconds["verify"], seconds["total"])


# ---- confidences


def threshold_sweeps(results: Sequence[Result]) -> list[ThresholdSweep]:
    """Return sweeps over confidence thresholds.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/threshold_sweep.py`; and evaluations of whole blocks with
            confidences, whose recorded rounds are cut afterwards: every threshold sees the same rounds.
    """
    sweeps = []
    for result in of_kind(results, "threshold_sweep"):
        for regime, rows in result["regimes"].items():
            names = ("threshold", "tokens_per_round", "rejected_per_round", "acceptance_rate")
            sweeps.append(ThresholdSweep(regime, [ThresholdRow(*(row[name] for name in names)) for row in rows]))
    for result in whole_block_evaluations(results):
        for task in _tasks(result):
            rounds = _rounds_with_confidence(result, task)
            rows = [_cut_afterwards(rounds, threshold) for threshold in THRESHOLDS]
            sweeps.append(ThresholdSweep(f"{task}\n{_owner(result)}", rows))
    return sweeps


def _cut_afterwards(rounds: Sequence[tuple[int, int, int, Sequence[float]]], threshold: float) -> ThresholdRow:
    """Return what a threshold would have done: each block ends before its first confidence below it."""
    lengths, kept, tokens = [], [], []
    for proposed, accepted, committed, confidence in rounds:
        length = next((k for k, value in enumerate(confidence[:proposed]) if value < threshold), proposed)
        lengths.append(length)
        kept.append(min(length, accepted))
        tokens.append(min(length + 1, committed))  # where the answer ended within the block, no bonus token followed
    count = len(rounds)
    rate = sum(kept) / sum(lengths) if sum(lengths) else None
    return ThresholdRow(threshold, sum(tokens) / count, (sum(lengths) - sum(kept)) / count, rate)


def reliabilities(results: Sequence[Result]) -> list[Reliability]:
    """Return predicted against realised survival.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/calibrate_pair.py`, of the kind calibration with bins, and
            evaluations of whole blocks with confidences.
    """
    found = []
    for result in of_kind(results, "held_out_calibration"):
        for regime, part in result["regimes"].items():
            found.append(Reliability(regime, _stored_curves(part)))
    for result in of_kind(results, "calibration"):
        if result.get("raw"):
            found.append(Reliability(f"{result['domain']}, {result['draft'].get('name')}", _stored_curves(result)))
    for result in whole_block_evaluations(results):
        curve = [PositionCalibration(**each) for each in result["tasks"]["all"]["calibration"]]
        if curve:
            found.append(Reliability(", ".join([_owner(result), *_task_names(result)]), {"as decoded": curve}))
    return found


def _stored_curves(part: Mapping[str, Any]) -> dict[str, list[PositionCalibration]]:
    return {name: [PositionCalibration(**each) for each in part[name]] for name in ("raw", "calibrated")}


def whole_block_evaluations(results: Sequence[Result]) -> list[Result]:
    """Return the evaluations that verified whole blocks and kept confidences.

    Of each pair and the same tasks that with the smallest batch.
    """
    best: dict[tuple, Result] = {}
    for result in of_kind(results, "evaluation"):
        if (result["policy"] or WHOLE_BLOCK) == WHOLE_BLOCK and _tasks(result):
            batch_size = result.get("batch_size") or 1
            other = best.get(_pair_of(result))
            if other is None or batch_size < (other.get("batch_size") or 1):
                best[_pair_of(result)] = result
    return list(best.values())


def _pair_of(result: Result) -> tuple:
    tasks = tuple(sorted(_task_names(result)))
    return result["target"].get("name"), _dtype(result), _facts(result["draft"]), regime_of(result["sampling"]), tasks


def _owner(result: Result) -> str:
    facts = _facts(result["draft"])
    return f"{facts.name or facts.kind}, {regime_of(result['sampling'])}"


def _task_names(result: Result) -> list[str]:
    """Return the tasks of an evaluation without what stands for all of them."""
    return [task for task in result["tasks"] if task != "all"]


def _tasks(result: Result) -> list[str]:
    """Return the tasks that have rounds with confidences."""
    return [task for task in _task_names(result) if _rounds_with_confidence(result, task)]


def _rounds_with_confidence(result: Result, task: str) -> list[tuple[int, int, int, Sequence[float]]]:
    """Return proposed, accepted, committed and confidences of each round of a task that drafted with confidences."""
    found = []
    for record in result["records"]:
        rounds = record["rounds"]
        if record["task"] == task and rounds["confidence"] is not None:
            committed = rounds.get("committed", [count + 1 for count in rounds["accepted"]])  # older files lack it
            columns = rounds["proposed"], rounds["accepted"], committed, rounds["confidence"]
            found += [each for each in zip(*columns, strict=True) if each[3] and each[0]]
    return found


# ---- against alternatives


@dataclass(frozen=True)
class ComparedMethod:
    """One way to decode, against plain decoding of the same prompts.

    Args:
        cell (`str`): Task, drawing, prompts and rows, what the drafts learnt from; of several, the machine.
        method (`str`): Which way.
        speedup (`float`, *optional*): Median time of plain decoding over its own; `None` if it cannot decode this.
        milliseconds (`tuple[float, float, float]`, *optional*): Per token: lower quartile, median, upper quartile.
        tokens_per_pass (`float`, *optional*): Of a row, in one pass through the target, prefill included.
        identical (`tuple[int, int]`, *optional*): Greedy rows equal to plain decoding's, of all.
        first_token (`float`, *optional*): Milliseconds until it, median; earlier results do not have it.
        refused (`str`, *optional*): Why it cannot.
    """

    cell: str
    method: str
    speedup: float | None = None
    milliseconds: tuple[float, float, float] | None = None
    tokens_per_pass: float | None = None
    identical: tuple[int, int] | None = None
    first_token: float | None = None
    refused: str | None = None


def compared_methods(results: Sequence[Result]) -> list[ComparedMethod]:
    """Return every method in every cell of `benchmarks/compare.py`; cells name their machine if there are several."""
    found = of_kind(results, "comparison")
    machines = [provenance_of(result).get("device", "unknown machine") for result in found]
    several = len(set(machines)) > 1
    return [
        _compared(cell, f"{_trained_on(result)}; {machine}" if several else _trained_on(result), name, part)
        for result, machine in zip(found, machines, strict=True)
        for cell in result["cells"]
        for name, part in cell["methods"].items()
    ]


def _trained_on(result: Mapping[str, Any]) -> str:
    models = result["models"]
    if "rows" not in models:
        return "shipped draft"
    blocks = f", blocks of {models['block_size']}" if "block_size" in models else ""
    return f"drafts of {models['rows']} answers, {models['steps']} steps{blocks}"


def _compared(cell: Mapping[str, Any], circumstances: str, method: str, part: Mapping[str, Any]) -> ComparedMethod:
    drawn = f"temperature {cell['temperature']:g}" if cell["temperature"] else "greedy"
    tokens = f"{cell['prompt_tokens']['median']:.0f} prompt tokens"
    calls = f"{cell['num_calls']} calls of {cell['batch_size']}"
    name = f"{cell['task']}, {drawn}, {tokens}, {calls}; {circumstances}"
    if "refused" in part:
        return ComparedMethod(name, method, refused=part["refused"])
    times = part["seconds_per_token"]
    first = 1e3 * part["first_token_seconds"]["median"] if "first_token_seconds" in part else None
    identical = None if part["identical_rows"] is None else (part["identical_rows"], part["rows"])
    milliseconds = tuple(1e3 * times[key] for key in ("lower_quartile", "median", "upper_quartile"))
    return ComparedMethod(name, method, part["speedup"], milliseconds, part["tokens_per_pass"], identical, first)


# ---- load


def load_curves(results: Sequence[Result]) -> list[LoadCurves]:
    """Return throughput and verification budget against load.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/scheduler.py` and `benchmarks/simulator.py`; and evaluations
            of one pair at several batch sizes.
    """
    found = []
    for result in of_kind(results, "scheduler"):
        found += [_of_budget(name, rows) for name, rows in result["budget"].items()]
    found += [_of_trace(result) for result in of_kind(results, "simulator")]
    return found + _of_batches(results)


STEP_TIMES = {
    "knee": "20 ms up to 512 tokens,\nthen in proportion",
    "line": "20 ms + 0.03 ms per token",
    "recorded": "recorded confidences,\nmeasured step times",
}


def _of_budget(name: str, rows: Sequence[Mapping[str, Any]]) -> LoadCurves:
    policies = {
        policy: [
            LoadPoint(row["requests"], row["tokens_per_second"][policy], row["mean_verified"][policy]) for row in rows
        ]
        for policy in rows[0]["mean_verified"]
    }
    reference = [(row["requests"], row["reference"]) for row in rows if row["reference"] is not None]
    return LoadCurves(STEP_TIMES.get(name, name), "concurrent requests", policies, reference)


# Of the simulator's fifteen policies, those that are in the other panels, too.
SIMULATED = ("autoregressive", "fixed length 7", "Algorithm 1", "hull + fill", "lagged budget + top-K", "oracle")


def _of_trace(result: Result) -> LoadCurves:
    busiest = result["results"][-1]["policies"]
    policies = {
        name: [
            LoadPoint(g["most"], g["tokens_per_second"], g["mean_verified"]) for g in busiest[name]["by_concurrency"]
        ]
        for name in SIMULATED
        if name in busiest
    }
    return LoadCurves(f"simulated engine,\n{result['trace']}, highest rate", "active requests, up to", policies)


def several_batches(results: Sequence[Result]) -> list[Result]:
    """Return the evaluations of pairs at two batch sizes or more, and plain decoding of the same on that machine."""
    sizes: dict[tuple, set[int]] = {}
    timed = [result for result in of_kind(results, "evaluation") if result["tasks"]["all"]["tokens_per_second"]]
    for result in timed:
        if result["draft"]:
            sizes.setdefault((_bench_of(result), _facts(result["draft"])), set()).add(_rows_together(result))
    wide = {key for key, seen in sizes.items() if len(seen) > 1}
    benches = {bench for bench, _ in wide}
    return [
        result
        for result in timed
        if (result["draft"] and (_bench_of(result), _facts(result["draft"])) in wide)
        or (not result["draft"] and _bench_of(result) in benches)
    ]


@dataclass(frozen=True)
class _Bench:
    """What must be the same if throughputs are to be compared."""

    target: str | None
    dtype: str
    regime: str
    tasks: tuple[str, ...]
    max_new_tokens: int | None
    device: str
    threads: int | None


def _bench_of(result: Result) -> _Bench:
    origin, tasks = provenance_of(result), tuple(sorted(_task_names(result)))
    return _Bench(
        result["target"].get("name"), _dtype(result), regime_of(result["sampling"]), tasks, result["max_new_tokens"],
        origin.get("device", ""), origin.get("threads"),
    )  # fmt: skip


def _rows_together(result: Result) -> int:
    """Return how many rows were decoded together: fewer than asked for where prompts were few, or failed together."""
    rows = [record.get("rows_together", result["batch_size"]) for record in result["records"]]
    rows = rows or [result["batch_size"]]  # somebody has dropped the records, which are long
    return round(sum(rows) / len(rows))


def _of_batches(results: Sequence[Result]) -> list[LoadCurves]:
    plain: dict[tuple, dict[float, LoadPoint]] = {}
    drafted: dict[tuple, dict[str, dict[float, LoadPoint]]] = {}
    for result in several_batches(results):
        metrics, load, bench = result["tasks"]["all"], _rows_together(result), _bench_of(result)
        speed = metrics["tokens_per_second"]
        if result["draft"]:
            policies = drafted.setdefault((bench, _facts(result["draft"])), {})
            verified = 1 + (metrics["proposed_per_round"] or 0)
            policies.setdefault(short_policy(result["policy"]), {})[load] = LoadPoint(load, speed, verified)
            speed = (metrics.get("speedup") or {}).get("plain_tokens_per_second")
        if speed is not None:
            plain.setdefault(bench, {})[load] = LoadPoint(load, speed, 1.0)
    found = []
    for (bench, facts), policies in drafted.items():
        named = policies | ({"autoregressive": plain[bench]} if bench in plain else {})
        ordered = {name: [points[load] for load in sorted(points)] for name, points in named.items()}
        title = f"measured: {facts.name or facts.kind},\n{', '.join([bench.regime, *bench.tasks])}"
        found.append(LoadCurves(title, "rows together", ordered))
    return found
