"""Simulate a serving engine with continuous batching: arrivals from a trace, rounds replayed from a recording.

python benchmarks/simulator.py --trace trace.csv --rounds benchmarks/results/pair_rounds.json --rates 1 4 16

Each step decodes one round of all active requests; its duration comes from a cost (`load_cost`), its
tokens from the recording. Not modelled: prefill, memory limits, and the scheduler's own time.
"""

import argparse
import csv
import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

from hf_dspark.maths.costs import ForwardCost, LinearCost, Load, StepCost, load_cost
from hf_dspark.maths.policies import (
    SLO_MODES,
    AdaptiveDrafting,
    ConfidenceThreshold,
    EarlyStopScheduler,
    EliminationScheduler,
    FullBlock,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    RoundOutcome,
    SLOLimit,
)
from hf_dspark.provenance import provenance

WINDOW_SECONDS = 5.0
FIXED_LENGTHS = (1, 3, 5, 7)
# 20 ms + .03 ms per verified token, and 1.5 ms of drafting: what is taken when no measured cost is given.
LINE = LinearCost(ForwardCost(0.0, 3e-5, 0.02), ForwardCost(0.0, 0.0, 0.0015))


@dataclass(frozen=True)
class Arrival:
    """A request.

    Args:
        seconds (`float`): When it arrives, counted from the first one.
        context_tokens (`int`): Length of its prompt.
        output_tokens (`int`): Tokens that it decodes, at least 1.
    """

    seconds: float
    context_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class MeanLengths:
    """Mean lengths where a trace has none; drawn from geometric laws."""

    context_tokens: float = 512.0
    output_tokens: float = 128.0

    def draw(self, rng: numpy.random.Generator) -> tuple[int, int]:
        """Return context and output tokens of one request, at least 1 each."""
        return int(rng.geometric(1 / self.context_tokens)), int(rng.geometric(1 / self.output_tokens))


@dataclass(frozen=True)
class Recording:
    """Rounds with the whole block verified, request after request.

    Args:
        confidence (`torch.FloatTensor` of shape `[n, γ]`): Calibrated c_k of each round.
        accepted (`torch.LongTensor` of shape `[n]`): Draft tokens accepted in each round, 0..γ.
        first_rounds (`Sequence[int]`): Where each request begins, and n behind the last.
    """

    confidence: torch.Tensor
    accepted: torch.Tensor
    first_rounds: Sequence[int]

    @property
    def block_size(self) -> int:
        """γ."""
        return self.confidence.shape[1]

    @property
    def num_requests(self) -> int:
        return len(self.first_rounds) - 1

    def num_rounds(self, request: int) -> int:
        return self.first_rounds[request + 1] - self.first_rounds[request]

    def row(self, request: int, index: int) -> int:
        """Return the row of a request's round; behind its last round it starts over."""
        return self.first_rounds[request] + index % self.num_rounds(request)

    @classmethod
    def of(cls, requests: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "Recording":
        """Join the rounds of each request, `[n_r, γ]` and `[n_r]`."""
        counts = torch.tensor([0, *(len(accepted) for _, accepted in requests)])
        confidence, accepted = (torch.cat(part) for part in zip(*requests, strict=True))
        return cls(confidence, accepted, counts.cumsum(0).tolist())


@dataclass(frozen=True)
class Contender:
    """A policy under the name of its row, with at most `max_drafts` tokens of each block verified."""

    name: str
    policy: Policy
    max_drafts: int


@dataclass(frozen=True)
class NeverDraft(Policy):
    """Autoregressive decoding."""

    def plan_draft(self, load: Load) -> bool:
        return False


@dataclass
class Active:
    """A request in the batch.

    Args:
        request (`int`): Its place in the trace.
        arrival ([`Arrival`]): What it asked for.
        admitted (`float`): When it entered the batch, seconds.
        produced (`int`): Tokens decoded so far.
        replayed (`int`): Recorded rounds used so far; rounds without drafting use none.
    """

    request: int
    arrival: Arrival
    admitted: float
    produced: int = 0
    replayed: int = 0

    @property
    def left(self) -> int:
        """Tokens still to decode."""
        return self.arrival.output_tokens - self.produced


@dataclass(frozen=True)
class Round:
    """One step of the engine. Times in seconds; `verify_tokens` is B, anchors included."""

    ended: float
    seconds: float
    requests: int
    verify_tokens: int
    new_tokens: int
    drafted: bool


@dataclass(frozen=True)
class Finished:
    """A request that got all its tokens. Times in seconds."""

    request: int
    arrived: float
    admitted: float
    ended: float
    tokens: int

    @property
    def tpot_seconds(self) -> float:
        """Time per output token, from admission on."""
        return (self.ended - self.admitted) / self.tokens


@dataclass(frozen=True)
class Run:
    """What happened, in order."""

    rounds: list[Round] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(frozen=True)
class Concurrency:
    """Rounds with `least`..`most` active requests: mean 1+l per request, and tokens per second."""

    least: int
    most: int
    rounds: int
    mean_verified: float
    tokens_per_second: float


@dataclass(frozen=True)
class Summary:
    """One simulated run.

    Args:
        tokens_per_second (`float`): All tokens over the time from the first arrival to the last token.
        slo_attainment (`float`): Share of requests whose time per output token stays within the limit.
        mean_tpot_ms (`float`): Mean time per output token of the requests, milliseconds.
        mean_waiting_seconds (`float`): From arrival to admission.
        drafted_share (`float`): Share of rounds that drafted.
        mean_verified (`float`): Mean 1+l over requests and rounds.
        tau (`float`): Tokens per request and round.
        length_correlation (`float`, *optional*): Of requests and 1+l, means over windows of `WINDOW_SECONDS`; `None`
            where either is constant.
        by_concurrency (`list[Concurrency]`): Split by active requests, in powers of two.
    """

    tokens_per_second: float
    slo_attainment: float
    mean_tpot_ms: float
    mean_waiting_seconds: float
    drafted_share: float
    mean_verified: float
    tau: float
    length_correlation: float | None
    by_concurrency: list[Concurrency]


def load_trace(path: str | Path, rate: float, lengths: MeanLengths, rng: numpy.random.Generator) -> list[Arrival]:
    """Read arrivals, in the order of time, the first at 0.

    Args:
        path (`str`): A CSV file with `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure, a date and time),
            `timestamp_ms,input_length,output_length` (Mooncake, milliseconds) or `Timestamp` (AdaSpec, seconds); or
            Mooncake's own JSON lines.
        rate (`float`): How many times as fast as recorded they arrive.
        lengths ([`MeanLengths`]): For traces that hold none.
        rng (`numpy.random.Generator`): Draws these.

    Raises:
        ValueError: If the rate is not positive, or a line is not as described; names the line.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"the rate must be a positive number, got {rate}")
    arrivals = []
    for number, row in _rows(Path(path)):
        try:
            arrivals.append(_arrival(row, lengths, rng))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {_cause(error)}. {TRACE_FORMS}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no arrivals. {TRACE_FORMS}")
    arrivals.sort(key=lambda arrival: arrival.seconds)
    start = arrivals[0].seconds
    return [Arrival((each.seconds - start) / rate, each.context_tokens, each.output_tokens) for each in arrivals]


TRACE_FORMS = (
    "Known are CSV files with the columns TIMESTAMP,ContextTokens,GeneratedTokens or "
    "timestamp_ms,input_length,output_length or Timestamp, and JSON lines with timestamp, input_length, output_length"
)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                yield number, _json_row(path, number, line)
        else:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row


def _json_row(path: Path, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    return {"timestamp_ms": row["timestamp"], **row} if isinstance(row, dict) and "timestamp" in row else row


def _arrival(row: dict[str, Any], lengths: MeanLengths, rng: numpy.random.Generator) -> Arrival:
    if "TIMESTAMP" in row:
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        context, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    elif "timestamp_ms" in row:
        seconds = float(row["timestamp_ms"]) / 1e3
        context, output = int(row["input_length"]), int(row["output_length"])
    else:
        seconds = float(row["Timestamp"])
        context, output = lengths.draw(rng)
    if not math.isfinite(seconds) or context < 0 or output < 1:
        raise ValueError(f"expected a time, a context of at least 0 and an output of at least 1 token, got {row}")
    return Arrival(seconds, context, output)


def _cause(error: Exception) -> str:
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)


def load_rounds(path: str | Path) -> Recording:
    """Read a recording: `{"block_size": γ, "requests": [{"confidence": [[c_1, ...]], "accepted": [n]}]}`.

    Raises:
        ValueError: If a request has no rounds, or a round is not `block_size` confidences in [0, 1] with an accepted
            count in 0..`block_size`; names the request.
    """
    content = json.loads(Path(path).read_text())
    if not (isinstance(content, dict) and content.get("requests") and "block_size" in content):
        raise ValueError(f"{path} must hold block_size and a list of requests, at least one")
    return Recording.of(
        [
            _recorded(f"{path}, request {number}", each, content["block_size"])
            for number, each in enumerate(content["requests"])
        ]
    )


def _recorded(name: str, request: dict[str, Any], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    confidence, accepted = torch.tensor(request.get("confidence", [])), torch.tensor(request.get("accepted", []))
    if accepted.numel() == 0 or confidence.shape != (len(accepted), block_size):
        raise ValueError(
            f"{name}: expected at least one round of {block_size} confidences and one accepted count each, got "
            f"shapes {tuple(confidence.shape)} and {tuple(accepted.shape)}"
        )
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError(f"{name}: confidences must lie in [0, 1]")
    if not bool(((accepted >= 0) & (accepted <= block_size)).all()):
        raise ValueError(f"{name}: accepted counts must lie in 0..{block_size}")
    return confidence, accepted.long()


def synthetic_recording(
    mean_acceptance: Sequence[float],
    concentration: float,
    block_size: int,
    num_rounds: int,
    rng: numpy.random.Generator,
) -> Recording:
    """Draw calibrated rounds: c_k ~ Beta(s mu, s (1 - mu)), and token k accepted with probability c_k.

    Args:
        mean_acceptance (`Sequence[float]`): mu of each request.
        concentration (`float`): s.
        block_size (`int`): γ.
        num_rounds (`int`): Rounds of each request.
        rng (`numpy.random.Generator`): Draws everything.
    """
    requests = []
    for mean in mean_acceptance:
        shape = (num_rounds, block_size)
        confidence = rng.beta(concentration * mean, concentration * (1 - mean), shape)
        accepted = numpy.cumprod(rng.random(shape) < confidence, axis=1).sum(axis=1)
        requests.append((torch.from_numpy(confidence), torch.from_numpy(accepted)))
    return Recording.of(requests)


def contenders(cost: StepCost, block_size: int, tpot_seconds: float) -> list[Contender]:
    """Return the policies to compare; those named with a limit know it. AdaSpec and the oracle are not causal."""
    adaspec = AdaptiveDrafting(EliminationScheduler(cost), cost)
    policies = {
        "confidence threshold .5": ConfidenceThreshold(0.5),
        "Algorithm 1": EarlyStopScheduler(cost),
        "hull + fill": PrefixScheduler(cost),
        "lagged budget + top-K": LaggedScheduler(cost),
        "hull + fill, draft or skip": AdaptiveDrafting(PrefixScheduler(cost), cost),
        "hull + fill, limit: expected": SLOLimit(
            AdaptiveDrafting(PrefixScheduler(cost), cost), cost, tpot_seconds, "expected"
        ),
        **{f"AdaSpec, limit: {mode}": SLOLimit(adaspec, cost, tpot_seconds, mode) for mode in SLO_MODES},
        "oracle": GlobalScheduler(cost),
    }
    return [
        Contender("autoregressive", NeverDraft(), block_size),
        *(Contender(f"fixed length {n}", FullBlock(), n) for n in FIXED_LENGTHS if n <= block_size),
        *(Contender(name, policy, block_size) for name, policy in policies.items()),
    ]


def simulate(
    arrivals: Sequence[Arrival], recording: Recording, contender: Contender, cost: StepCost, max_requests: int
) -> Run:
    """Decode all requests; request i replays the recorded request i mod n.

    Args:
        arrivals (`Sequence[Arrival]`): In the order of time.
        recording ([`Recording`]): What a round of a request is like.
        contender ([`Contender`]): Decides.
        cost ([`StepCost`]): Duration of a round; also what the policy may know of it.
        max_requests (`int`): Cap of the active requests; the others wait in the order of arrival.
    """
    if max_requests < 1:
        raise ValueError(f"max_requests must be at least 1, got {max_requests}")
    policy, waiting, active = contender.policy.fresh(), deque(enumerate(arrivals)), []
    run, clock = Run(), 0.0
    while waiting or active:
        if not active:
            clock = max(clock, waiting[0][1].seconds)
        while waiting and len(active) < max_requests and waiting[0][1].seconds <= clock:
            active.append(Active(*waiting.popleft(), admitted=clock))
        outcome = _decode(active, recording, policy, contender.max_drafts, cost)
        policy.observe(outcome)
        clock += outcome.seconds
        new = (outcome.num_accepted + 1).tolist()
        drafted = outcome.drafted
        verify_tokens = len(active) + int(outcome.lengths.sum())
        run.rounds.append(Round(clock, outcome.seconds, len(active), verify_tokens, sum(new), drafted))
        for each, tokens in zip(active, new, strict=True):
            each.produced += tokens
            each.replayed += drafted
        run.finished.extend(_finished(each, clock) for each in active if not each.left)
        active = [each for each in active if each.left]
    return run


def _decode(
    active: Sequence[Active], recording: Recording, policy: Policy, max_drafts: int, cost: StepCost
) -> RoundOutcome:
    context = sum(each.arrival.context_tokens + each.produced for each in active)
    load = Load([each.request for each in active], context)
    if not policy.plan_draft(load):
        nothing = torch.zeros(len(active), dtype=torch.long)
        return RoundOutcome(load.request_ids, None, nothing, nothing, cost.plain_seconds(load), drafted=False)
    rows = [recording.row(each.request % recording.num_requests, each.replayed) for each in active]
    confidence = recording.confidence[rows]
    # The bonus token is the last one that a request may still get.
    max_lengths = torch.tensor([each.left - 1 for each in active]).clamp(max=max_drafts)
    lengths = policy.plan_verify(confidence, max_lengths, load)
    seconds = float(cost.round_seconds(load, int(lengths.sum()))[-1])
    return RoundOutcome(load.request_ids, confidence, lengths, recording.accepted[rows].minimum(lengths), seconds)


def _finished(request: Active, clock: float) -> Finished:
    return Finished(request.request, request.arrival.seconds, request.admitted, clock, request.produced)


def summarize(run: Run, tpot_seconds: float) -> Summary:
    """Condense a run; `tpot_seconds` is the limit of the time per output token."""
    rows = sum(each.requests for each in run.rounds)
    new_tokens = sum(each.new_tokens for each in run.rounds)
    return Summary(
        tokens_per_second=new_tokens / (run.rounds[-1].ended - min(each.arrived for each in run.finished)),
        slo_attainment=statistics.fmean(each.tpot_seconds <= tpot_seconds for each in run.finished),
        mean_tpot_ms=1e3 * statistics.fmean(each.tpot_seconds for each in run.finished),
        mean_waiting_seconds=statistics.fmean(each.admitted - each.arrived for each in run.finished),
        drafted_share=statistics.fmean(each.drafted for each in run.rounds),
        mean_verified=sum(each.verify_tokens for each in run.rounds) / rows,
        tau=new_tokens / rows,
        length_correlation=_length_correlation(run.rounds),
        by_concurrency=_by_concurrency(run.rounds),
    )


def _by_concurrency(rounds: Sequence[Round]) -> list[Concurrency]:
    groups: dict[int, list[Round]] = {}
    for each in rounds:
        groups.setdefault((each.requests - 1).bit_length(), []).append(each)
    return [
        Concurrency(
            least=(1 << power) // 2 + 1,
            most=1 << power,
            rounds=len(group),
            mean_verified=sum(each.verify_tokens for each in group) / sum(each.requests for each in group),
            tokens_per_second=sum(each.new_tokens for each in group) / sum(each.seconds for each in group),
        )
        for power, group in sorted(groups.items())
    ]


def _length_correlation(rounds: Sequence[Round]) -> float | None:
    windows: dict[int, list[Round]] = {}
    for each in rounds:
        windows.setdefault(int(each.ended / WINDOW_SECONDS), []).append(each)
    requests = [statistics.fmean(each.requests for each in window) for window in windows.values()]
    lengths = [statistics.fmean(each.verify_tokens / each.requests for each in window) for window in windows.values()]
    if len(set(requests)) < 2 or len(set(lengths)) < 2:
        return None
    return statistics.correlation(requests, lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="arrivals; see load_trace")
    parser.add_argument("--rounds", required=True, help="recorded rounds, JSON; see load_rounds")
    parser.add_argument("--cost", help="JSON for load_cost; default: 20 ms + .03 ms per token, 1.5 ms draft")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="arrive so many times as fast")
    parser.add_argument("--num_requests", type=int, default=500, help="the first of the trace")
    parser.add_argument("--max_requests", type=int, default=256, help="cap of the active requests")
    parser.add_argument("--tpot_ms", type=float, default=30.0, help="limit of the time per output token")
    parser.add_argument("--mean_context", type=float, default=MeanLengths.context_tokens, help="if the trace has none")
    parser.add_argument("--mean_output", type=float, default=MeanLengths.output_tokens, help="if the trace has none")
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    origin = provenance()  # of what runs from here on

    cost = load_cost(options.cost) if options.cost else LINE
    recording, limit = load_rounds(options.rounds), options.tpot_ms / 1e3
    lengths = MeanLengths(options.mean_context, options.mean_output)
    entrants, results = contenders(cost, recording.block_size, limit), []
    for rate in options.rates:
        arrivals = load_trace(options.trace, rate, lengths, numpy.random.default_rng(0))[: options.num_requests]
        summaries = {
            each.name: asdict(summarize(simulate(arrivals, recording, each, cost, options.max_requests), limit))
            for each in tqdm(entrants, desc=f"rate {rate:g}")
        }
        span = arrivals[-1].seconds
        requests_per_second = (len(arrivals) - 1) / span if span else None
        results.append({"rate": rate, "requests_per_second": requests_per_second, "policies": summaries})
    result = {
        "provenance": origin,
        "trace": Path(options.trace).name,
        "num_requests": len(arrivals),
        "max_requests": options.max_requests,
        "tpot_ms": options.tpot_ms,
        "results": results,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
