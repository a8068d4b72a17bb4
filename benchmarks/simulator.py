"""A simulated serving engine with continuous batching: arrivals from a trace, rounds replayed from a recording.

python benchmarks/simulator.py trace --trace adaspec_conv.csv --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --num_requests 1000 --rates 2 4 6 8 10 12 14 16 18 20 24 28 --output benchmarks/results/simulator.json
python benchmarks/simulator.py frontier --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --curve "A100 Llama-2-7B" "H100 Llama-2-7B" --output benchmarks/results/frontier.json

Each step decodes one round of all active requests. Its duration comes from a cost, its tokens from the recording.
Prefill, memory limits and the scheduler's own time are not modelled.

`trace` serves the requests of a trace at several rates. The limit of the time per output token is the 90th percentile
of plain decoding at the first rate, as in AdaSpec. `frontier` keeps R requests active and measures the throughput and
the speed that each user sees, for many R: DSpark's Figure 7. Step times of GPUs are those of the linear layers; for
drafting, they get `DRAFT_SHARE` of the shortest step on top.
"""

import argparse
import csv
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from pair import RESULTS, provenance_of, scheduler, write_result
from policy_baselines import SLO_MODES, EarlyStopScheduler, EliminationScheduler, GlobalScheduler, linear_cost
from tqdm import tqdm
from traces import Arrival, MeanLengths, load_trace

from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.policies import (
    ConfidenceThreshold,
    FullBlock,
    Policy,
)
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler

WINDOW_SECONDS = 5.0
FIXED_LENGTHS = (1, 3, 5, 7)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
SLO_QUANTILE = 0.9  # AdaSpec's limit: the 90th percentile of plain decoding
DRAFT_SHARE = 2 / 32  # a draft of 2 layers for a target of 32
# 20 ms + .03 ms per verified token, and 1.5 ms of drafting: the cost if none is given.
LINE = linear_cost(3e-5, 0.02, 0.0015)


@dataclass(frozen=True)
class Recording:
    """Rounds with the whole block verified, request after request.

    Args:
        confidence (`torch.FloatTensor` of shape `[n, γ]`): Calibrated c_k of each round.
        accepted (`torch.LongTensor` of shape `[n]`): Draft tokens accepted in each round, 0..γ.
        first_rounds (`Sequence[int]`): Where each request begins, and n after the last.
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
        """Return the row of a request's round; after its last round it starts over."""
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
class NeverDraft(FullBlock):
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


def contenders(cost: ThroughputTable, block_size: int, tpot_seconds: float) -> list[Contender]:
    """Return the policies to compare. AdaSpec and the oracle are not causal."""
    policies = {
        "confidence threshold .5": ConfidenceThreshold(0.5),
        "Algorithm 1": EarlyStopScheduler(cost),
        "hull + fill": Scheduler(cost, trees=False, skip=False),
        "lagged budget + top-K": Scheduler(cost, lag=2, skip=False),
        "hull + fill, draft or skip": scheduler(cost),
        "hull + fill, limit: expected": Scheduler(cost, trees=False, tpot_seconds=tpot_seconds),
        **{
            f"AdaSpec, limit: {mode}": EliminationScheduler(cost, skip=True, tpot_seconds=tpot_seconds, mode=mode)
            for mode in SLO_MODES
        },
        "oracle": GlobalScheduler(cost),
    }
    return [
        Contender("autoregressive", NeverDraft(), block_size),
        *(Contender(f"fixed length {n}", FullBlock(), n) for n in FIXED_LENGTHS if n <= block_size),
        *(Contender(name, policy, block_size) for name, policy in policies.items()),
    ]


def simulate(
    arrivals: Sequence[Arrival],
    recording: Recording,
    contender: Contender,
    cost: ThroughputTable,
    max_requests: int,
    max_rounds: int | None = None,
) -> Run:
    """Decode all requests; request i replays the recorded request i mod n.

    Args:
        arrivals (`Sequence[Arrival]`): In the order of time.
        recording ([`Recording`]): What a round of a request is like.
        contender ([`Contender`]): Decides.
        cost ([`ThroughputTable`]): Duration of a round; also what the policy may know of it.
        max_requests (`int`): Cap of the active requests; the others wait in the order of arrival.
        max_rounds (`int`, *optional*): Stop after this number of rounds.
    """
    if max_requests < 1:
        raise ValueError(f"max_requests must be at least 1, got {max_requests}")
    policy, waiting, active = contender.policy.fresh(), deque(enumerate(arrivals)), []
    run, clock = Run(), 0.0
    while (waiting or active) and (max_rounds is None or len(run.rounds) < max_rounds):
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
    active: Sequence[Active], recording: Recording, policy: Policy, max_drafts: int, cost: ThroughputTable
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


def frontier(
    recording: Recording, cost: ThroughputTable, concurrencies: Sequence[int], rounds: int = 200
) -> dict[str, list[dict[str, float]]]:
    """Return throughput and speed per user of each policy, for several numbers of requests that stay active.

    Args:
        recording ([`Recording`]): What a round of a request is like.
        cost ([`ThroughputTable`]): Duration of a round.
        concurrencies (`Sequence[int]`): R of each point.
        rounds (`int`): About how many rounds a point rests on.
    """
    entrants = [
        Contender("autoregressive", NeverDraft(), recording.block_size),
        Contender("fixed length 1", FullBlock(), 1),
        Contender("full block", FullBlock(), recording.block_size),
        Contender("scheduled", scheduler(cost), recording.block_size),
    ]
    found: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in entrants}
    for requests in tqdm(concurrencies, desc="concurrency"):
        endless = [Arrival(0.0, 0, 10**9) for _ in range(requests)]
        for contender in entrants:
            run = simulate(endless, recording, contender, cost, requests, max_rounds=rounds)
            throughput = sum(step.new_tokens for step in run.rounds) / sum(step.seconds for step in run.rounds)
            point = {"requests": requests, "tokens_per_second": throughput, "per_user": throughput / requests}
            found[contender.name].append(point)
    return found


def load_curves(path: str | Path, draft_share: float = 0.0) -> dict[str, ThroughputTable]:
    """Read step times of GPUs: `gpu_model,num_tokens,gemm_ms_all_layers_tp1`.

    Args:
        path (`str`): The CSV file.
        draft_share (`float`): What drafting adds, as a share of the shortest step.

    Raises:
        ValueError: If a line is not as described, naming it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                point = int(row["num_tokens"]), float(row["gemm_ms_all_layers_tp1"]) / 1e3
                points.setdefault(row["gpu_model"], []).append(point)
            except (KeyError, TypeError, ValueError) as error:
                columns = "gpu_model,num_tokens,gemm_ms_all_layers_tp1"
                raise ValueError(f"{path}, line {reader.line_num}: expected {columns}, got {row}") from error
    curves = {}
    for name, curve in points.items():
        tokens, seconds = zip(*sorted(curve), strict=True)
        drafting = draft_share * min(seconds)
        curves[name] = ThroughputTable(tokens, tuple(1 / (each + drafting) for each in seconds), drafting)
    return curves


def chosen_cost(options: argparse.Namespace) -> ThroughputTable:
    """Return the cost that the command line names."""
    if options.table:
        return ThroughputTable.load(options.table)
    if options.curves:
        return load_curves(options.curves, DRAFT_SHARE)[options.curve[0]]
    return LINE


def trace(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests of a trace at several rates, by every policy."""
    cost, recording = chosen_cost(options), load_rounds(options.rounds)
    lengths = MeanLengths(options.mean_context, options.mean_output)

    def arrivals(rate: float) -> list[Arrival]:
        return load_trace(options.trace, rate, lengths, numpy.random.default_rng(0))[: options.num_requests]

    plain = Contender("autoregressive", NeverDraft(), recording.block_size)
    first = simulate(arrivals(options.rates[0]), recording, plain, cost, options.max_requests)
    times = [each.tpot_seconds for each in first.finished]
    limit = options.slo_scale * float(numpy.quantile(times, SLO_QUANTILE))
    entrants, results = contenders(cost, recording.block_size, limit), []
    for rate in options.rates:
        served = arrivals(rate)
        summaries = {
            each.name: asdict(summarize(simulate(served, recording, each, cost, options.max_requests), limit))
            for each in tqdm(entrants, desc=f"rate {rate:g}")
        }
        span = served[-1].seconds
        requests_per_second = (len(served) - 1) / span if span else None
        results.append({"rate": rate, "requests_per_second": requests_per_second, "policies": summaries})
    return {
        "trace": Path(options.trace).name,
        "cost": options.table or (options.curve[0] if options.curves else "line"),
        "num_requests": len(served),
        "max_requests": options.max_requests,
        "tpot_ms": 1e3 * limit,
        "results": results,
    }


def frontiers(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the frontier of each curve, or of the one cost that is given."""
    recording = load_rounds(options.rounds)
    if options.curves and not options.table:
        curves = load_curves(options.curves, DRAFT_SHARE)
        costs: dict[str, ThroughputTable] = {name: curves[name] for name in options.curve}
    else:
        costs = {Path(options.table).stem if options.table else "line": chosen_cost(options)}
    return {"machines": {name: frontier(recording, cost, CONCURRENCIES) for name, cost in costs.items()}}


PARTS = {"trace": trace, "frontier": frontiers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--trace", help="arrivals; see load_trace")
    parser.add_argument("--rounds", default=RESULTS / "pair_rounds.json", help="recorded rounds; see load_rounds")
    parser.add_argument("--table", help="a throughput table; default: 20 ms + .03 ms per token, 1.5 ms draft")
    parser.add_argument("--curves", help="CSV of step times; see load_curves")
    parser.add_argument("--curve", nargs="+", default=["A100 Llama-2-7B"], help="which of them; one for `trace`")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="multiples of the recorded rate")
    parser.add_argument("--num_requests", type=int, default=500, help="the first of the trace")
    parser.add_argument("--max_requests", type=int, default=256, help="cap of the active requests")
    parser.add_argument("--slo_scale", type=float, default=1.0, help="of the limit of the time per output token")
    parser.add_argument("--mean_context", type=float, default=MeanLengths.context_tokens, help="if the trace has none")
    parser.add_argument("--mean_output", type=float, default=MeanLengths.output_tokens, help="if the trace has none")
    parser.add_argument("--output", help="JSON file to write instead of printing")
    options = parser.parse_args()
    if options.part == "trace" and not options.trace:
        parser.error("`trace` needs --trace: a file of arrivals")
    origin = provenance_of(parser, options)
    write_result(options.output, {"provenance": origin, **PARTS[options.part](options)})


if __name__ == "__main__":
    main()
