"""A simulated serving engine with continuous batching: arrivals from a trace, rounds replayed from a recording.

python benchmarks/simulator.py trace --arrivals adaspec_conv.csv --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --num_requests 1000 --rates 2 4 6 8 10 12 14 16 18 20 24 28 --output benchmarks/results/simulator.json
python benchmarks/simulator.py frontier --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --curve "A100 Llama-2-7B" "H100 Llama-2-7B" --output benchmarks/results/frontier.json
python benchmarks/simulator.py ahead --output benchmarks/results/ahead.json

Each step decodes one round of all active requests. Its duration comes from a cost, its tokens from the recording.
Prefill, memory limits and the scheduler's own time are not modelled.

`trace` serves a trace, a CSV file with a column `Timestamp` in seconds (AdaSpec's), at several rates, with drawn
lengths. The limit of the time per output token is the 90th percentile of plain decoding at the first rate, as in
AdaSpec. `frontier` keeps R requests active, for many R: DSpark's Figure 7. Step times of GPUs are those of the linear
layers; drafting adds `DRAFT_SHARE` of the shortest step. `ahead` prices drafting on a device of its own while the
target verifies (Saguaro), and tails of blocks, by what `ahead.py` recorded and the times of several machines.
"""

import csv
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from bench import RESULTS, main
from policy_baselines import EliminationScheduler
from saguaro import Pair, best_fan_out, hit_rate, speedup
from tqdm import tqdm

from hf_dspark import FullBlock, Policy, Scheduler, ThroughputTable
from hf_dspark.scheduling.costs import Load
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import TAIL_SHARE

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
SLO_QUANTILE = 0.9  # AdaSpec's limit: the 90th percentile of plain decoding
DRAFT_SHARE = 2 / 32  # a draft of 2 layers for a target of 32
MEAN_CONTEXT, MEAN_OUTPUT = 512, 128  # tokens of a request in a trace, geometrically distributed
COLUMNS = ("gpu_model", "num_tokens", "gemm_ms_all_layers_tp1")


@dataclass(frozen=True)
class Recording:
    """Rounds with the whole block verified, request after request."""

    confidence: torch.Tensor  # calibrated c_k of each round, `[n, γ]`
    accepted: torch.Tensor  # draft tokens accepted in each round, `[n]`
    first_rounds: Sequence[int]  # where each request begins, and n after the last

    @property
    def block_size(self) -> int:
        return self.confidence.shape[1]

    def row(self, request: int, index: int) -> int:
        """Return the row of a request's round; after its last round it starts over, as requests do."""
        request %= len(self.first_rounds) - 1
        first, last = self.first_rounds[request], self.first_rounds[request + 1]
        return first + index % (last - first)

    @classmethod
    def of(cls, requests: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "Recording":
        """Join the rounds of each request, `[n_r, γ]` and `[n_r]`."""
        counts = torch.tensor([0, *(len(accepted) for _, accepted in requests)])
        confidence, accepted = (torch.cat(part) for part in zip(*requests, strict=True))
        return cls(confidence, accepted, counts.cumsum(0).tolist())

    @classmethod
    def load(cls, path: str | Path = RESULTS / "pair_rounds.json") -> "Recording":
        requests = json.loads(Path(path).read_text())["requests"]
        return cls.of([(torch.tensor(each["confidence"]), torch.tensor(each["accepted"])) for each in requests])


@dataclass(frozen=True)
class Arrival:
    """A request: when it arrives in seconds, the length of its prompt, and how many tokens it decodes, at least 1."""

    seconds: float
    context_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class NeverDraft(FullBlock):
    """Autoregressive decoding."""

    def plan_draft(self, load: Load) -> bool:
        return False


@dataclass
class Active:
    """A request in the batch: when it entered, tokens so far, and recorded rounds used so far."""

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

    @property
    def throughput(self) -> float:
        """Tokens per second of the time in which the engine worked."""
        return sum(each.new_tokens for each in self.rounds) / sum(each.seconds for each in self.rounds)

    def summary(self, tpot_seconds: float) -> dict[str, float]:
        """Condense a run: throughput since the first arrival, and the share of requests within a limit."""
        tokens = sum(each.new_tokens for each in self.rounds)
        return {
            "tokens_per_second": tokens / (self.rounds[-1].ended - min(each.arrived for each in self.finished)),
            "slo_attainment": statistics.fmean(each.tpot_seconds <= tpot_seconds for each in self.finished),
        }


def contenders(cost: ThroughputTable, block_size: int, tpot_seconds: float) -> dict[str, tuple[Policy, int]]:
    """Return the policies to compare, and how many tokens of a block they verify at most. AdaSpec is not
    causal."""
    limit = EliminationScheduler(cost, skip=True, tpot_seconds=tpot_seconds)
    fixed = {f"fixed length {n}": (FullBlock(), n) for n in (3, 7) if n <= block_size}
    others = {"hull + fill": Scheduler(cost, trees=False, skip=False), "AdaSpec, limit: expected": limit}
    plain = {"autoregressive": (NeverDraft(), block_size)}
    return plain | fixed | {name: (policy, block_size) for name, policy in others.items()}


def simulate(
    arrivals: Sequence[Arrival],
    recording: Recording,
    contender: tuple[Policy, int],
    cost: ThroughputTable,
    max_requests: int,
    max_rounds: int | None = None,
) -> Run:
    """Decode all requests; request i replays the recorded request i mod n. At most `max_requests` are active, the
    others wait in the order of arrival."""
    policy, max_drafts = contender
    policy, waiting, active = policy.fresh(), deque(enumerate(arrivals)), []
    run, clock = Run(), 0.0
    while (waiting or active) and (max_rounds is None or len(run.rounds) < max_rounds):
        if not active:
            clock = max(clock, waiting[0][1].seconds)
        while waiting and len(active) < max_requests and waiting[0][1].seconds <= clock:
            active.append(Active(*waiting.popleft(), admitted=clock))
        outcome = decoded(active, recording, policy, max_drafts, cost)
        policy.observe(outcome)
        clock += outcome.seconds
        new = (outcome.num_accepted + 1).tolist()
        verify_tokens = len(active) + int(outcome.lengths.sum())
        run.rounds.append(Round(clock, outcome.seconds, len(active), verify_tokens, sum(new)))
        for each, tokens in zip(active, new, strict=True):
            each.produced += tokens
            each.replayed += outcome.drafted
        run.finished.extend(
            Finished(each.request, each.arrival.seconds, each.admitted, clock, each.produced)
            for each in active
            if not each.left
        )
        active = [each for each in active if each.left]
    return run


def decoded(
    active: Sequence[Active], recording: Recording, policy: Policy, max_drafts: int, cost: ThroughputTable
) -> RoundOutcome:
    """Return what one round of these requests comes to."""
    context = sum(each.arrival.context_tokens + each.produced for each in active)
    load = Load([each.request for each in active], context)
    if not policy.plan_draft(load):
        nothing = torch.zeros(len(active), dtype=torch.long)
        return RoundOutcome(load.request_ids, None, nothing, nothing, cost.plain_seconds(load), drafted=False)
    rows = [recording.row(each.request, each.replayed) for each in active]
    confidence = recording.confidence[rows]
    # The bonus token is the last one that a request may still get.
    max_lengths = torch.tensor([each.left - 1 for each in active]).clamp(max=max_drafts)
    lengths = policy.plan_verify(confidence, max_lengths, load)
    seconds = float(cost.round_seconds(load, int(lengths.sum()))[-1])
    return RoundOutcome(load.request_ids, confidence, lengths, recording.accepted[rows].minimum(lengths), seconds)


def load_arrivals(path: Path, rate: float, num_requests: int) -> list[Arrival]:
    """Read arrivals in the order of time, the first at 0, `rate` times as fast as recorded."""
    rng = numpy.random.default_rng(0)
    with path.open(newline="") as file:
        seconds = [float(row["Timestamp"]) for row in csv.DictReader(file)]
    lengths = [[int(rng.geometric(1 / mean)) for mean in (MEAN_CONTEXT, MEAN_OUTPUT)] for _ in seconds]
    start = min(seconds)
    found = [Arrival((each - start) / rate, *pair) for each, pair in zip(seconds, lengths, strict=True)]
    return sorted(found, key=lambda arrival: arrival.seconds)[:num_requests]


def load_curves(path: Path, draft_share: float = 0.0) -> dict[str, ThroughputTable]:
    """Read step times of GPUs, `COLUMNS` of a CSV file. Drafting adds a share of the shortest."""
    points: dict[str, list[tuple[int, float]]] = {}
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            name, tokens, milliseconds = (row[column] for column in COLUMNS)
            points.setdefault(name, []).append((int(tokens), float(milliseconds) / 1e3))
    curves = {}
    for name, curve in points.items():
        tokens, seconds = zip(*sorted(curve), strict=True)
        drafting = draft_share * min(seconds)
        curves[name] = ThroughputTable(tokens, tuple(1 / (each + drafting) for each in seconds), drafting)
    return curves


def trace(
    arrivals: Path,
    curves: Path,
    curve: str = "A100 Llama-2-7B",
    rates: tuple[float, ...] = (1.0,),
    num_requests: int = 500,
    max_requests: int = 256,
) -> dict[str, Any]:
    """Serve the requests of a trace at several rates, by every policy."""
    cost, recording = load_curves(curves, DRAFT_SHARE)[curve], Recording.load()
    plain = (NeverDraft(), recording.block_size)
    first = simulate(load_arrivals(arrivals, rates[0], num_requests), recording, plain, cost, max_requests)
    limit = float(numpy.quantile([each.tpot_seconds for each in first.finished], SLO_QUANTILE))
    entrants, results = contenders(cost, recording.block_size, limit), []
    for rate in rates:
        served = load_arrivals(arrivals, rate, num_requests)
        summaries = {
            name: simulate(served, recording, each, cost, max_requests).summary(limit)
            for name, each in tqdm(entrants.items(), desc=f"rate {rate:g}")
        }
        per_second = (len(served) - 1) / served[-1].seconds
        results.append({"rate": rate, "requests_per_second": per_second, "policies": summaries})
    facts = {"trace": arrivals.name, "cost": curve, "num_requests": num_requests, "tpot_ms": 1e3 * limit}
    return facts | {"results": results}


def points_of(recording: Recording, cost: ThroughputTable, sizes: Sequence[int], rounds: int = 200) -> dict[str, Any]:
    """Return throughput and speed per user of each policy, for several numbers of requests that stay active."""
    gamma = recording.block_size
    entrants = {
        "autoregressive": (NeverDraft(), gamma),
        "fixed length 1": (FullBlock(), 1),
        "full block": (FullBlock(), gamma),
        "scheduled": (Scheduler(cost, trees=False), gamma),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in entrants}
    for requests in tqdm(sizes, desc="concurrency"):
        endless = [Arrival(0.0, 0, 10**9) for _ in range(requests)]
        for name, contender in entrants.items():
            rate = simulate(endless, recording, contender, cost, requests, max_rounds=rounds).throughput
            found[name].append({"requests": requests, "tokens_per_second": rate, "per_user": rate / requests})
    return found


def frontier(curves: Path, curve: tuple[str, ...] = ("A100 Llama-2-7B",)) -> dict[str, Any]:
    """Measure the frontier of each curve."""
    recording, costs = Recording.load(), load_curves(curves, DRAFT_SHARE)
    return {"machines": {name: points_of(recording, costs[name], CONCURRENCIES) for name in curve}}


TABLES = RESULTS.parents[1] / "src" / "hf_dspark" / "tables"
ON_CPUS = {"the pair": "pair.float32", "Qwen3-0.6B": "qwen3-0.6b.bfloat16", "Qwen3-4B": "qwen3-4b.bfloat16"}
GPU_BLOCKS, MOST_BLOCKS = 64, 112  # that a pass of a GPU drafts in the time of one; whose hits were recorded
BUDGETS, BATCHES = (7, 14, 28, 56, 112), (1, 4, 16, 64)


def machines() -> dict[str, tuple[Any, ...]]:
    """Return the seconds of drafting and verifying a block, blocks of a draft's pass, and contention if there is."""
    found = {}
    for name, table in ON_CPUS.items():
        cost = ThroughputTable.load(TABLES / f"cpu_2_cores.{table}.json")
        found[f"{name}: two CPUs"] = cost.drafting, float(cost.seconds_of([8])[0]) - cost.drafting, 1
    for name, rounds in json.loads((RESULTS / "loop_h200_4b.json").read_text())["cells"][0]["rounds_ms"].items():
        kind = "compiled" if "compiled" in name else "eager"
        found[f"Qwen3-4B: two GPUs, {kind}"] = rounds["draft"] / 1e3, rounds["verify"] / 1e3, GPU_BLOCKS
    runs = json.loads((RESULTS / "ahead_threads.json").read_text())["runs"]
    ratio, *slower = numpy.median([(run["draft_time"], *run["contention"]) for run in runs], axis=0).tolist()
    found["the pair: two threads"] = ratio, 1.0, 1, *slower
    (slow, verifying, _), (fast, quick, _) = found["Qwen3-4B: two CPUs"], found["Qwen3-4B: two GPUs, compiled"]
    found["Qwen3-4B: draft on the CPU, target on the GPU"] = slow, quick, 1
    found["Qwen3-4B: draft on the GPU, target on the CPU"] = fast, verifying, GPU_BLOCKS
    return found


def hits_of(row: dict[str, Any], blocks: int) -> float:
    """Return how often the block was prepared, if the best `blocks` are: after a hit, and after a new block."""
    return hit_rate(*(best_fan_out(blocks, *row["outcomes"][name].values())[1] for name in ("lagging", "new")))


def gains(
    row: dict[str, Any], draft_time: float, hits: float, batch_size: int = 1, contention: Pair = (1.0, 1.0)
) -> dict[str, float]:
    """Return speeds over drafting and verifying in turns; drafting is in units of a verification: of tails wherever a
    slot is left; of prepared blocks, after a miss the best of a new block, a tail and none; and of prepared blocks if
    they had all features. Blocks are prepared as long as the target verifies, or one is."""
    tau, own = row["tau"], max(1.0, row["tau"]["new"] / (1 + draft_time))  # or without drafts
    fallbacks = (tau["new"], draft_time), (row["tau_of_tails"], TAIL_SHARE * draft_time), (1.0, 0.0)
    preparing = draft_time * max(1, int(1 / draft_time))
    best = [
        max(speedup(hits, (tokens, other), preparing, took, batch_size, contention) for other, took in fallbacks) / own
        for tokens in (tau["lagging"], tau["new"])
    ]
    drafted = 1 - row["share_of_tails"] * (1 - TAIL_SHARE)
    return {"tails": tau["tails"] / (1 + draft_time * drafted) / own, "ahead": best[0], "ahead_with_features": best[1]}


def pays_from(row: dict[str, Any], name: str) -> float | None:
    """Return from which ratio of drafting to verifying something pays, if every prepared block comes in time."""
    ratios, hits = numpy.arange(0.01, 1.005, 0.01), hits_of(row, MOST_BLOCKS)
    return next((round(float(each), 2) for each in ratios if gains(row, float(each), hits)[name] > 1), None)


def ahead() -> dict[str, Any]:
    """Price tails, and drafting on a device of its own while the target verifies, on machines that were measured."""
    found: dict[str, Any] = {"machines": [], "pays_from": {}, "hits": {}, "batches": {}}
    for row in json.loads((RESULTS / "ahead_rounds.json").read_text())["rows"]:
        regime, recorded = row["regime"], row["outcomes"]["new"]
        for name, (drafting, verifying, at_once, *slower) in machines().items():
            ratio, blocks = drafting / verifying, min(MOST_BLOCKS, at_once * max(1, int(verifying / drafting)))
            facts = {"regime": regime, "machine": name, "draft_time": ratio, "blocks": blocks}
            facts["hits"] = hits = hits_of(row, blocks)
            found["machines"].append(facts | gains(row, ratio, hits, contention=slower or (1.0, 1.0)))
            if "compiled" in name:
                found["batches"][regime] = {batch: gains(row, ratio, hits, batch)["ahead"] for batch in BATCHES}
        names = ("tails", "ahead", "ahead_with_features")
        found["pays_from"][regime] = {name: pays_from(row, name) for name in names}
        uniform = {
            budget: sum(chance * curve[budget // 7] for chance, curve in zip(*recorded.values(), strict=True))
            for budget in BUDGETS
        }
        best = {budget: best_fan_out(budget, *recorded.values())[1] for budget in BUDGETS}
        found["hits"][regime] = {"uniform": uniform, "best": best}
    return found


if __name__ == "__main__":
    main(__doc__, trace, frontier, ahead)
