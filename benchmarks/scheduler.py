"""What the verification schedulers decide, and what a decision costs.

python benchmarks/scheduler.py throughput --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --table src/hf_dspark/tables/cpu_2_cores.pair.float32.json --output benchmarks/results/scheduler.json
python benchmarks/scheduler.py decisions --output benchmarks/results/decisions.json

`throughput` is computed: expected throughput on jagged step times over that of an unconstrained search, and verified
tokens against concurrency. `decisions` times one decision for 256 requests.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from pair import RESULTS, provenance_of, scheduler, write_result
from policy_baselines import EarlyStopScheduler, EliminationScheduler, GlobalScheduler
from simulator import LINE, Recording, load_curves, load_rounds
from tqdm import tqdm

from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.policies import (
    ConfidenceThreshold,
    FullBlock,
    Policy,
)
from hf_dspark.scheduling.ranking import survival
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler

LAG = 2
JAGGED_REQUESTS, JAGGED_BLOCK_SIZE = 128, 7
BUDGET_BLOCK_SIZE = 5
# Mean conditional acceptance on math, code and chat: what tau in DSpark Table 1 implies. Their shares of the requests.
DOMAIN_ACCEPTANCE, DOMAIN_SHARES = (0.893, 0.867, 0.739), (0.25, 0.35, 0.40)
# Flat to 512 tokens, then in proportion: 20 ms * max(1, B/512); 1.5 ms of drafting on top.
KNEE = ThroughputTable((1, 512, 8192), (1 / 0.0215, 1 / 0.0215, 1 / 0.3215), drafting=0.0015)
# DSpark Figure 8 under these inputs: mean 1+l by the number of requests.
REFERENCE = {
    "knee": (KNEE, {1: 6.0, 64: 6.0, 100: 5.12, 128: 4.0, 150: 3.41, 200: 2.56, 256: 2.0, 384: 1.39, 1024: 1.16}),
    "line": (LINE, {8: 6.0, 32: 5.88, 64: 5.56, 128: 5.04, 256: 4.34, 512: 3.5, 1024: 2.71}),
}
BETWEEN = (1, 2, 4, 8, 16, 32, 48, 512, 768)  # concurrencies without a reference
RECORDED_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Draw:
    """Confidences of one round, `[R, γ]`, and those of the `LAG` rounds before it, the oldest first."""

    confidence: torch.Tensor
    older: tuple[torch.Tensor, ...]

    @property
    def load(self) -> Load:
        return Load(range(len(self.confidence)))


@dataclass(frozen=True)
class BudgetRow:
    """Rounds of one concurrency. Throughputs in expected tokens per second.

    Args:
        requests (`int`): R.
        mean_verified (`dict[str, float]`): Mean 1+l by policy.
        tokens_per_second (`dict[str, float]`): By policy.
        reference (`float`, *optional*): What 1+l of Algorithm 1 should be.
        relative_deviation (`float`, *optional*): From it.
    """

    requests: int
    mean_verified: dict[str, float]
    tokens_per_second: dict[str, float]
    reference: float | None
    relative_deviation: float | None


@dataclass(frozen=True)
class Decision:
    """Time of one decision: median and 95th percentile, microseconds."""

    median_us: float
    p95_us: float


def expected_throughput(confidence: torch.Tensor, lengths: torch.Tensor, cost: ThroughputTable) -> float:
    """Return the tokens per second that these lengths are expected to give."""
    load = Load(range(len(confidence)))
    verified = torch.arange(confidence.shape[1]) < lengths[:, None]
    kept = load.base_tokens + float((survival(confidence) * verified).sum(dtype=torch.double))
    return kept / float(cost.round_seconds(load, int(lengths.sum()))[-1])


def plain_throughput(num_requests: int, cost: ThroughputTable) -> float:
    """Return the tokens per second without drafting."""
    return num_requests / cost.plain_seconds(Load(range(num_requests)))


def lengths_of(policy: Policy, draw: Draw) -> torch.Tensor:
    """Return what the policy verifies after it saw the older rounds of the draw."""
    policy, full = policy.fresh(), _full(draw.confidence)
    for confidence in draw.older:
        rows = torch.zeros(len(confidence), dtype=torch.long)
        policy.observe(RoundOutcome(draw.load.request_ids, confidence, rows, rows, 1.0))
    return policy.plan_verify(draw.confidence, full, draw.load)


def _full(confidence: torch.Tensor) -> torch.Tensor:
    return torch.full((len(confidence),), confidence.shape[1])


def beta(mean: numpy.ndarray, concentration: float, block_size: int, rng: numpy.random.Generator) -> torch.Tensor:
    """Draw c ~ Beta(s mean, s (1 - mean)) for each request, clipped to [.001, .999], `[R, γ]`."""
    shape = (len(mean), block_size)
    drawn = rng.beta(concentration * mean[:, None], concentration * (1 - mean[:, None]), shape)
    return torch.from_numpy(drawn.clip(0.001, 0.999))


def jagged_draws(count: int, rng: numpy.random.Generator) -> list[Draw]:
    """Draw rounds of 1..128 requests with mean acceptances in [.5, .95]; older rounds are drawn independently."""
    draws = []
    for _ in range(count):
        means = rng.uniform(0.5, 0.95, rng.integers(1, JAGGED_REQUESTS + 1))
        *older, now = (beta(means, 12.0, JAGGED_BLOCK_SIZE, rng) for _ in range(LAG + 1))
        draws.append(Draw(now, tuple(older)))
    return draws


def domain_draws(num_requests: int, count: int, rng: numpy.random.Generator) -> list[Draw]:
    """Draw rounds of math, code and chat requests."""
    means = (rng.choice(DOMAIN_ACCEPTANCE, num_requests, p=DOMAIN_SHARES) for _ in range(count))
    return [Draw(beta(mean, 8.0, BUDGET_BLOCK_SIZE, rng), ()) for mean in means]


def recorded_draws(recording: Recording, sizes: Sequence[int], rng: numpy.random.Generator) -> list[Draw]:
    """Draw rounds of recorded requests, with the rounds that came before them.

    Args:
        recording ([`Recording`]): Calibrated confidences.
        sizes (`Sequence[int]`): R of each draw.
        rng (`numpy.random.Generator`): Chooses requests and rounds, with replacement.

    Raises:
        ValueError: If no request has more than `LAG` rounds.
    """
    ends = zip(recording.first_rounds, recording.first_rounds[1:], strict=False)
    usable = numpy.array([row for first, last in ends for row in range(first + LAG, last)])
    if len(usable) == 0:
        raise ValueError(f"no recorded request has more than {LAG} rounds: record longer outputs")
    draws = []
    for size in sizes:
        rows = torch.from_numpy(rng.choice(usable, size))
        draws.append(
            Draw(recording.confidence[rows], tuple(recording.confidence[rows - k] for k in range(LAG, 0, -1)))
        )
    return draws


def relative_throughput(draws: Sequence[Draw], cost: ThroughputTable) -> dict[str, float]:
    """Return the mean over the draws of each scheduler's expected throughput over the oracle's."""
    policies = {
        "Algorithm 1": EarlyStopScheduler(cost),
        "hull + fill": Scheduler(cost, trees=False),
        "lagged budget + top-K": Scheduler(cost, lag=LAG),
    }
    best = [expected_throughput(d.confidence, lengths_of(GlobalScheduler(cost), d), cost) for d in draws]
    return {
        name: statistics.fmean(
            expected_throughput(draw.confidence, lengths_of(policy, draw), cost) / most
            for draw, most in zip(draws, best, strict=True)
        )
        for name, policy in policies.items()
    }


def table_of(seconds: Callable[[int], float], last: int) -> ThroughputTable:
    """Return a table with a probe at each B in 1..`last`."""
    tokens = range(1, last + 1)
    return ThroughputTable(tuple(tokens), tuple(1 / seconds(b) for b in tokens))


def next_probe(probes: ThroughputTable) -> ThroughputTable:
    """Return the table where each B costs what the next probe at or above it costs: batches padded to the probes."""
    tokens = torch.tensor(list(probes.verify_tokens))
    upper = torch.searchsorted(tokens, torch.arange(1, int(tokens[-1]) + 1))
    rates = [probes.steps_per_second[index] for index in upper.tolist()]
    return ThroughputTable(tuple(range(1, len(rates) + 1)), tuple(rates))


def sawtooth(bucket: int = 64, last: int = 1024) -> ThroughputTable:
    """Return a synthetic jagged curve: each started bucket of tokens adds 2 ms to 5 ms."""
    return table_of(lambda b: 0.005 + 0.002 * ((b - 1) // bucket), last)


def synthetic_curves(rng: numpy.random.Generator) -> dict[str, ThroughputTable]:
    """Return the curves that need no file."""
    last = JAGGED_REQUESTS * (JAGGED_BLOCK_SIZE + 1)
    noise = rng.uniform(-0.02, 0.02, last + 1)
    return {
        "straight line": table_of(lambda b: 0.02 + 3e-5 * b, last),
        "straight line, noise of 2 %": table_of(lambda b: (0.02 + 3e-5 * b) * (1 + noise[b]), last),
        "buckets of 64": sawtooth(last=last),
    }


def jagged_curves(path: str | Path) -> dict[str, ThroughputTable]:
    """Return the step times of each GPU in a file, once linear and once padded to the measured sizes."""
    curves: dict[str, ThroughputTable] = {}
    for name, measured in load_curves(path).items():
        curves |= {f"{name}, linear": measured, f"{name}, next probe": next_probe(measured)}
    return curves


def budget_row(draws: Sequence[Draw], cost: ThroughputTable, reference: float | None) -> BudgetRow:
    """Return what is verified and gained at one concurrency: that of the draws."""
    requests = len(draws[0].confidence)
    policies = {
        "full block": FullBlock(),
        "Algorithm 1": EarlyStopScheduler(cost),
        "hull + fill": Scheduler(cost, trees=False),
        "oracle": GlobalScheduler(cost),
    }
    lengths = {name: [lengths_of(policy, draw) for draw in draws] for name, policy in policies.items()}
    verified = {
        name: 1 + statistics.fmean(float(each.double().mean()) for each in chosen) for name, chosen in lengths.items()
    }
    gained = {
        name: statistics.fmean(
            expected_throughput(draw.confidence, each, cost) for draw, each in zip(draws, chosen, strict=True)
        )
        for name, chosen in lengths.items()
    }
    return BudgetRow(
        requests=requests,
        mean_verified={"autoregressive": 1.0, **verified},
        tokens_per_second={"autoregressive": plain_throughput(requests, cost), **gained},
        reference=reference,
        relative_deviation=None if reference is None else verified["Algorithm 1"] / reference - 1,
    )


def reference_budget(name: str, requests: int, num_rows: int, rng: numpy.random.Generator) -> BudgetRow:
    """Return a concurrency of the paper's setting, from rounds of about `num_rows` requests together."""
    cost, reference = REFERENCE[name]
    return budget_row(domain_draws(requests, -(-num_rows // requests), rng), cost, reference.get(requests))


def recorded_budget(
    recording: Recording, cost: ThroughputTable, requests: int, num_rows: int, rng: numpy.random.Generator
) -> BudgetRow:
    """Return a concurrency of recorded confidences, from rounds of about `num_rows` requests together."""
    return budget_row(recorded_draws(recording, [requests] * -(-num_rows // requests), rng), cost, None)


def time_decisions(num_requests: int, repetitions: int, rng: numpy.random.Generator) -> dict[str, Decision]:
    """Time each policy on fresh confidences of `num_requests` requests, γ 7, on a jagged table."""
    cost = sawtooth(last=num_requests * (JAGGED_BLOCK_SIZE + 1))
    blocks = [
        beta(rng.uniform(0.5, 0.95, num_requests), 12.0, JAGGED_BLOCK_SIZE, rng).float() for _ in range(repetitions)
    ]
    load, full = Load(range(num_requests)), _full(blocks[0])
    policies = {
        "full block": FullBlock(),
        "confidence threshold": ConfidenceThreshold(0.5),
        "Algorithm 1": EarlyStopScheduler(cost),
        "hull + fill": Scheduler(cost, trees=False),
        "lagged budget + top-K": Scheduler(cost, lag=LAG),
        "oracle": GlobalScheduler(cost),
        "elimination": EliminationScheduler(cost),
        "hull + fill, SLO limit": Scheduler(cost, trees=False, tpot_seconds=0.03),
    }
    times = {}
    for name, policy in policies.items():
        _observe(policy, blocks[:LAG], load)
        times[name] = _timed(lambda block, policy=policy: policy.plan_verify(block, full, load), blocks)
    adaptive = scheduler(cost)
    _observe(adaptive, blocks[:LAG], load)
    times["draft or skip"] = _timed(lambda block: adaptive.plan_draft(load), blocks)
    return times


def _observe(policy: Policy, blocks: Sequence[torch.Tensor], load: Load) -> None:
    nothing = torch.zeros(load.num_requests, dtype=torch.long)
    for block in blocks:
        policy.observe(RoundOutcome(load.request_ids, block, nothing, nothing, 1.0))


def _timed(decide: Callable[[torch.Tensor], object], blocks: Sequence[torch.Tensor]) -> Decision:
    microseconds, warm_up = [], blocks[:20]
    for block in [*warm_up, *blocks]:
        started = time.perf_counter_ns()
        decide(block)
        microseconds.append((time.perf_counter_ns() - started) / 1e3)
    measured = sorted(microseconds[len(warm_up) :])
    return Decision(statistics.median(measured), measured[int(0.95 * len(measured))])


def decisions(options: argparse.Namespace) -> dict[str, Any]:
    """Time one decision of each policy for 256 requests, in one thread."""
    torch.set_num_threads(1)
    times = time_decisions(256, options.repetitions, numpy.random.default_rng(0))
    return {"decision": {name: asdict(each) for name, each in times.items()}}


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Compute what the schedulers gain on jagged step times, and what they verify by concurrency."""
    rng = numpy.random.default_rng(0)
    recording = load_rounds(options.rounds)
    curves = synthetic_curves(rng) | (jagged_curves(options.curves) if options.curves else {})
    sizes = rng.integers(1, JAGGED_REQUESTS + 1, options.num_draws).tolist()
    draws = {
        "synthetic": jagged_draws(options.num_draws, rng),
        "recorded": recorded_draws(recording, sizes, rng),
    }
    budget = {
        name: [
            asdict(reference_budget(name, requests, options.num_rows, rng))
            for requests in tqdm(sorted({*reference, *BETWEEN}), desc=name)
        ]
        for name, (_, reference) in REFERENCE.items()
    }
    if options.table:
        cost = ThroughputTable.load(options.table)
        budget["recorded"] = [
            asdict(recorded_budget(recording, cost, requests, options.num_rows, rng))
            for requests in tqdm(RECORDED_REQUESTS, desc="recorded")
        ]
    jagged = {
        kind: {name: relative_throughput(each, cost) for name, cost in tqdm(curves.items(), desc=kind)}
        for kind, each in draws.items()
    }
    return {"jagged": jagged, "budget": budget}


PARTS = {"decisions": decisions, "throughput": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--curves", help="CSV of measured step times; see simulator.load_curves")
    parser.add_argument("--rounds", default=RESULTS / "pair_rounds.json", help="recorded rounds")
    parser.add_argument("--table", help="a throughput table: verified tokens against concurrency")
    parser.add_argument("--num_draws", type=int, default=300, help="rounds per jagged curve")
    parser.add_argument("--num_rows", type=int, default=2048, help="requests drawn per concurrency, over all rounds")
    parser.add_argument("--repetitions", type=int, default=1000, help="decisions timed")
    parser.add_argument("--output", help="JSON file to write instead of printing")
    options = parser.parse_args()
    origin = provenance_of(parser, options)
    write_result(options.output, {"provenance": origin, **PARTS[options.part](options)})


if __name__ == "__main__":
    main()
