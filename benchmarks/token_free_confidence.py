"""What a confidence head that reads h_k alone loses in discrimination, and gains by a global search.

python benchmarks/token_free_confidence.py --test_file test.jsonl

Such a head knows the whole block's confidences before any token is drawn, so an unconstrained search over them is
lossless. Both heads are fitted here by logistic regression on the same recorded rounds of the shipped draft, one on
[h_k; W_1 x_{k-1}], one on h_k, and calibrated on them; measured on other prompts.
"""

import argparse
from dataclasses import dataclass, replace

import torch
from pair import (
    RESULTS,
    SAMPLING,
    calibration_prompts,
    held_out_prompts,
    load_pair,
    provenance_of,
    write_result,
)
from policy_baselines import GlobalScheduler

from hf_dspark import Policy, Scheduler, ThroughputTable
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.scheduling.calibration import (
    CalibrationRounds,
    calibrated_confidence,
    conditional_auc,
    fit_temperatures,
    fits_of_temperatures,
    measure_calibration,
)
from hf_dspark.scheduling.costs import Load

CONCURRENCY = (1, 4, 16, 64)


@dataclass
class HeadInputs:
    """Recorded rounds, and what a confidence head may read in them, `[n, γ, d or r]`."""

    rounds: CalibrationRounds
    hidden: torch.Tensor
    embedding: torch.Tensor


def record(target, draft, tokenizer, prompts: list[str], max_new_tokens: int) -> HeadInputs:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = draft.confidence_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs))
    try:
        rounds = collect_rounds(target, draft, prompts, tokenizer, max_new_tokens=max_new_tokens, **SAMPLING)
    finally:
        handle.remove()
    hidden, embedding = (
        torch.cat([padded(part, rounds.block_size) for part in parts]) for parts in zip(*seen, strict=True)
    )
    return HeadInputs(rounds, hidden, embedding)


def padded(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return what a head reads, `[1, n, d]`, as `[1, γ, d]`: blocks are shorter where a sequence ends."""
    return torch.nn.functional.pad(values.float(), (0, 0, 0, block_size - values.shape[1]))


def fit_head(features: torch.Tensor, rounds: CalibrationRounds, weight_decay: float = 1e-4) -> torch.nn.Linear:
    """Fit a linear head by cross-entropy against the expected acceptance of the slots that were reached."""
    slots = torch.arange(rounds.block_size)
    reached = (slots <= rounds.num_accepted[:, None]) & (slots < rounds.proposed[:, None])
    inputs, labels = features[reached], rounds.acceptance[reached]
    head = torch.nn.Linear(inputs.shape[-1], 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss_of_head() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(inputs)[:, 0], labels)
        loss = loss + weight_decay * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(loss_of_head)
    return head.requires_grad_(False)


def realised_throughput(
    policy: Policy, cost: ThroughputTable, confidence: torch.Tensor, accepted: torch.Tensor, requests: int, draws: int
) -> float:
    """Return tokens per second when steps of `requests` rounds are drawn from the recorded ones."""
    generator = torch.Generator().manual_seed(0)
    load, limits = Load(range(requests)), torch.full((requests,), confidence.shape[1])
    tokens = seconds = 0.0
    for _ in range(draws):
        rows = torch.randint(len(confidence), (requests,), generator=generator)
        lengths = policy.plan_verify(confidence[rows], limits, load)
        tokens += requests + float(torch.minimum(lengths, accepted[rows]).sum())
        seconds += float(cost.round_seconds(load, int(lengths.sum()))[-1])
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test_file", required=True, help="GSM8K test.jsonl")
    parser.add_argument("--table", required=True, help="the machine's throughput table")
    parser.add_argument("--num_prompts", type=int, default=150, help="questions to fit on")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--draws", type=int, default=400, help="steps per concurrency")
    options = parser.parse_args()
    origin = provenance_of(parser, options)

    target, draft, tokenizer = load_pair()
    fitted_on = calibration_prompts(options.test_file, options.num_prompts)
    fitting = record(target, draft, tokenizer, fitted_on, options.max_new_tokens)
    held_out = record(target, draft, tokenizer, held_out_prompts(), options.max_new_tokens)
    cost, heads, confidences = ThroughputTable.load(options.table), {}, {}
    for name, inputs in {
        "h_k and the previous token": lambda part: torch.cat([part.hidden, part.embedding], dim=-1),
        "h_k alone": lambda part: part.hidden,
    }.items():
        head = fit_head(inputs(fitting), fitting.rounds)
        scaling = fit_temperatures(replace(fitting.rounds, logits=head(inputs(fitting))[..., 0]))
        rounds = replace(held_out.rounds, logits=head(inputs(held_out))[..., 0])
        measured = measure_calibration(rounds, fits_of_temperatures(scaling.temperatures))
        heads[name] = {
            "conditional_auc": conditional_auc(rounds),
            "mean_ece_calibrated": sum(part.ece for part in measured) / len(measured),
            "auc_of_survival": [part.auc for part in measured],
        }
        confidences[name] = calibrated_confidence(rounds.logits, fits_of_temperatures(scaling.temperatures))
    with_token, alone = confidences.values()
    whole = held_out.rounds.proposed == held_out.rounds.block_size
    accepted = held_out.rounds.num_accepted[whole]
    schedules = {
        "token head, hull and fill": (Scheduler(cost, trees=False, skip=False), with_token),
        "token-free head, hull and fill": (Scheduler(cost, trees=False, skip=False), alone),
        "token-free head, global search": (GlobalScheduler(cost), alone),
        "token head, global search (biased; a ceiling)": (GlobalScheduler(cost), with_token),
    }
    throughput = {
        name: {
            str(requests): realised_throughput(policy, cost, table[whole], accepted, requests, options.draws)
            for requests in CONCURRENCY
        }
        for name, (policy, table) in schedules.items()
    }
    content = {
        "provenance": origin,
        "num_fitted_on": len(fitted_on),
        "heads": heads,
        "tokens_per_second": throughput,
    }
    write_result(RESULTS / "token_free_confidence.json", content)
    for name, head in heads.items():
        print(f"{name}: AUC {head['conditional_auc']:.3f}, mean ECE {head['mean_ece_calibrated']:.4f}")
    for name, rates in throughput.items():
        print(name, {requests: round(rate, 1) for requests, rate in rates.items()})


if __name__ == "__main__":
    main()
