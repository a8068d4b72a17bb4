"""What the verification schedulers decide, computed from step times and recorded confidences.

python benchmarks/scheduler.py --curves vidur_linear_layer_ms_vs_tokens.csv \\
    --table src/hf_dspark/tables/cpu_2_cores.pair.float32.json --output benchmarks/results/scheduler.json

Expected throughput on jagged step times over that of an unconstrained search, and verified tokens against concurrency.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from bench import main
from policy_baselines import EarlyStopScheduler, GlobalScheduler, linear_cost
from simulator import Recording, load_curves
from tqdm import tqdm

from hf_dspark import FullBlock, Policy, Scheduler, ThroughputTable
from hf_dspark.scheduling.costs import Load
from hf_dspark.scheduling.ranking import survival
from hf_dspark.scheduling.rounds import RoundOutcome

LAG = 2
JAGGED_REQUESTS = 128
BUDGET_BLOCK_SIZE = 5
# Mean conditional acceptance on math, code and chat: what tau in DSpark Table 1 implies. Their shares of the requests.
DOMAIN_ACCEPTANCE, DOMAIN_SHARES = (0.893, 0.867, 0.739), (0.25, 0.35, 0.40)
# Flat to 512 tokens, then in proportion: 20 ms * max(1, B/512); 1.5 ms of drafting on top.
KNEE = ThroughputTable((1, 512, 8192), (1 / 0.0215, 1 / 0.0215, 1 / 0.3215), drafting=0.0015)
# DSpark Figure 8 under these inputs: mean 1+l by the number of requests.
REFERENCE = {
    "knee": (KNEE, {1: 6.0, 64: 6.0, 100: 5.12, 128: 4.0, 150: 3.41, 200: 2.56, 256: 2.0, 384: 1.39, 1024: 1.16}),
    "line": (linear_cost(3e-5, 0.02, 0.0015), {8: 6, 32: 5.88, 64: 5.56, 128: 5.04, 256: 4.34, 512: 3.5, 1024: 2.71}),
}
BETWEEN = (1, 2, 4, 8, 16, 32, 48, 512, 768)  # concurrencies without a reference
RECORDED_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Draw:
    """Confidences of one round, `[R, γ]`, and those of the `LAG` rounds before it, the oldest first."""

    confidence: torch.Tensor
    older: tuple[torch.Tensor, ...] = ()

    @property
    def load(self) -> Load:
        return Load(range(len(self.confidence)))

    def lengths_of(self, policy: Policy) -> torch.Tensor:
        """Return what the policy verifies after it saw the older rounds."""
        policy, full = policy.fresh(), torch.full((len(self.confidence),), self.confidence.shape[1])
        for confidence in self.older:
            nothing = torch.zeros(len(confidence), dtype=torch.long)
            policy.observe(RoundOutcome(self.load.request_ids, confidence, nothing, nothing, 1.0))
        return policy.plan_verify(self.confidence, full, self.load)

    def throughput(self, policy: Policy, cost: ThroughputTable) -> float:
        """Return the tokens per second that a policy is expected to give."""
        lengths = self.lengths_of(policy)
        verified = torch.arange(self.confidence.shape[1]) < lengths[:, None]
        kept = self.load.base_tokens + float((survival(self.confidence) * verified).sum(dtype=torch.double))
        return kept / float(cost.round_seconds(self.load, int(lengths.sum()))[-1])


def domain_draws(num_requests: int, count: int, rng: numpy.random.Generator) -> list[Draw]:
    """Draw rounds of math, code and chat requests: c ~ Beta(8 mean, 8 (1 - mean)) for each."""
    draws = []
    for _ in range(count):
        mean = rng.choice(DOMAIN_ACCEPTANCE, num_requests, p=DOMAIN_SHARES)[:, None]
        drawn = rng.beta(8.0 * mean, 8.0 * (1 - mean), (num_requests, BUDGET_BLOCK_SIZE))
        draws.append(Draw(torch.from_numpy(drawn.clip(0.001, 0.999))))
    return draws


def recorded_draws(recording: Recording, sizes: Sequence[int], rng: numpy.random.Generator) -> list[Draw]:
    """Draw rounds of as many recorded requests as each size, with replacement, and the rounds before them."""
    ends = zip(recording.first_rounds, recording.first_rounds[1:], strict=False)
    usable = numpy.array([row for first, last in ends for row in range(first + LAG, last)])
    draws = []
    for size in sizes:
        rows = torch.from_numpy(rng.choice(usable, size))
        older = tuple(recording.confidence[rows - k] for k in range(LAG, 0, -1))
        draws.append(Draw(recording.confidence[rows], older))
    return draws


def causal(cost: ThroughputTable) -> dict[str, Policy]:
    return {"Algorithm 1": EarlyStopScheduler(cost), "hull + fill": Scheduler(cost, trees=False, skip=False)}


def relative_throughput(draws: Sequence[Draw], cost: ThroughputTable) -> dict[str, float]:
    """Return the mean over the draws of each scheduler's expected throughput over the oracle's."""
    policies = causal(cost) | {"lagged budget + top-K": Scheduler(cost, lag=LAG, skip=False)}
    best = [draw.throughput(GlobalScheduler(cost), cost) for draw in draws]
    return {
        name: statistics.fmean(draw.throughput(policy, cost) / most for draw, most in zip(draws, best, strict=True))
        for name, policy in policies.items()
    }


def table_of(seconds: Callable[[int], float], last: int) -> ThroughputTable:
    """Return a table with a probe at each B in 1..`last`."""
    return ThroughputTable(tuple(range(1, last + 1)), tuple(1 / seconds(b) for b in range(1, last + 1)))


def next_probe(probes: ThroughputTable) -> ThroughputTable:
    """Return the table where each B costs what the next probe at or above it costs: batches padded to the probes."""
    tokens = torch.tensor(list(probes.verify_tokens))
    upper = torch.searchsorted(tokens, torch.arange(1, int(tokens[-1]) + 1)).tolist()
    return table_of(lambda b: 1 / probes.steps_per_second[upper[b - 1]], len(upper))


def curves_of(path: Path) -> dict[str, ThroughputTable]:
    """Return the step times of each GPU in a file, once linear and once padded to the probes."""
    found = {}
    for name, measured in load_curves(path).items():
        found |= {f"{name}, linear": measured, f"{name}, next probe": next_probe(measured)}
    return found


def budget_row(draws: Sequence[Draw], cost: ThroughputTable, reference: float | None) -> dict[str, Any]:
    """Return what is verified and gained at one concurrency, that of the draws: mean 1+l, expected tokens per second,
    and how far Algorithm 1 is from a reference."""
    requests = len(draws[0].confidence)
    policies = {"full block": FullBlock(), **causal(cost), "oracle": GlobalScheduler(cost)}
    verified, gained = {"autoregressive": 1.0}, {"autoregressive": requests / cost.plain_seconds(draws[0].load)}
    for name, policy in policies.items():
        verified[name] = 1 + statistics.fmean(float(draw.lengths_of(policy).double().mean()) for draw in draws)
        gained[name] = statistics.fmean(draw.throughput(policy, cost) for draw in draws)
    deviation = None if reference is None else verified["Algorithm 1"] / reference - 1
    facts = {"requests": requests, "reference": reference, "relative_deviation": deviation}
    return facts | {"mean_verified": verified, "tokens_per_second": gained}


def reference_budget(name: str, requests: int, num_rows: int, rng: numpy.random.Generator) -> dict[str, Any]:
    """Return a concurrency of the paper's setting, from rounds of about `num_rows` requests together."""
    cost, reference = REFERENCE[name]
    return budget_row(domain_draws(requests, -(-num_rows // requests), rng), cost, reference.get(requests))


def throughput(
    curves: Path | None = None, table: Path | None = None, num_draws: int = 300, num_rows: int = 2048
) -> dict[str, Any]:
    """Compute what the schedulers gain on jagged step times, and what they verify by concurrency."""
    rng, recording = numpy.random.default_rng(0), Recording.load()
    draws = recorded_draws(recording, rng.integers(1, JAGGED_REQUESTS + 1, num_draws).tolist(), rng)
    budget = {}
    for name, (_, reference) in REFERENCE.items():
        sizes = tqdm(sorted({*reference, *BETWEEN}), desc=name)
        budget[name] = [reference_budget(name, requests, num_rows, rng) for requests in sizes]
    if table is not None:
        cost = ThroughputTable.load(table)
        budget["recorded"] = [
            budget_row(recorded_draws(recording, [count] * -(-num_rows // count), rng), cost, None)
            for count in tqdm(RECORDED_REQUESTS, desc="recorded")
        ]
    costs = {} if curves is None else curves_of(curves)
    jagged = {name: relative_throughput(draws, cost) for name, cost in tqdm(costs.items(), desc="jagged")}
    return {"jagged": {"recorded": jagged}, "budget": budget}


if __name__ == "__main__":
    main(__doc__, throughput)
