"""Acceptance against tokens per round as the confidence threshold rises, on the held-out prompts: Figure 5.

python benchmarks/threshold_sweep.py
"""

import argparse

import torch
from pair import REGIMES, RESULTS, held_out_prompts, load_pair, provenance_of, write_result
from simulator import load_rounds
from tqdm import tqdm

from hf_dspark import ConfidenceThreshold, Rounds
from hf_dspark.scheduling.costs import Load

THRESHOLDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def sweep(target, draft, tokenizer, prompts: list[str], thresholds: list[float], **options) -> list[dict]:
    """Return one row per threshold: tokens per round, acceptance rate, proposed and rejected drafts per round."""
    rows = []
    for threshold in tqdm(thresholds, desc="threshold"):
        runs = []
        for index, prompt in enumerate(prompts):
            inputs = tokenizer(prompt, return_tensors="pt")
            torch.manual_seed(index)
            target.generate(**inputs, assistant_model=draft, assistant_confidence_threshold=threshold, **options)
            runs.append(draft.last_stats)
        stats = Rounds.joined(runs)
        rows.append(row(threshold, stats.rounds, sum(stats.proposed), sum(stats.accepted), stats.tau))
    return rows


def replay(thresholds: list[float], confidence: torch.Tensor, num_accepted: torch.Tensor) -> list[dict]:
    """Return the same rows for recorded whole blocks, cut afterwards: every threshold sees the same rounds.

    Args:
        thresholds (`list[float]`): Least c_k of a verified draft.
        confidence (`torch.FloatTensor` of shape `[n, γ]`): Calibrated c_k of each round.
        num_accepted (`torch.LongTensor` of shape `[n]`): Draft tokens accepted in each round, 0..γ.
    """
    limits = torch.full((len(num_accepted),), confidence.shape[1])
    rows = []
    for threshold in thresholds:
        lengths = ConfidenceThreshold(threshold).plan_verify(confidence, limits, Load(range(len(limits))))
        proposed, accepted = int(lengths.sum()), int(torch.minimum(lengths, num_accepted).sum())
        rows.append(row(threshold, len(limits), proposed, accepted, 1 + accepted / len(limits)))
    return rows


def row(threshold: float, rounds: int, proposed: int, accepted: int, tau: float) -> dict:
    return {
        "threshold": threshold,
        "rounds": rounds,
        "tokens_per_round": tau,
        "acceptance_rate": accepted / proposed if proposed else None,
        "proposed_per_round": proposed / rounds,
        "rejected_per_round": (proposed - accepted) / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_prompts", type=int, default=50)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    parser.add_argument("--output", default=RESULTS / "threshold_sweep.json")
    options = parser.parse_args()
    origin = provenance_of(parser, options)
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts()[: options.num_prompts]
    regimes = {
        name: sweep(
            target, draft, tokenizer, prompts, options.thresholds, max_new_tokens=options.max_new_tokens, **sampling
        )
        for name, sampling in REGIMES.items()
    }
    recorded = load_rounds(RESULTS / "pair_rounds.json")
    regimes["sampled, recorded rounds cut afterwards"] = replay(
        options.thresholds, recorded.confidence, recorded.accepted
    )
    write_result(options.output, {"provenance": origin, "num_prompts": len(prompts), "regimes": regimes})


if __name__ == "__main__":
    main()
