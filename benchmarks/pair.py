"""The shipped pair: its calibration, thresholds of its confidence, and throughput tables of this machine.

python benchmarks/pair.py calibrate --test_file test.jsonl
python benchmarks/pair.py thresholds --output benchmarks/results/threshold_sweep.json
python benchmarks/pair.py table --models qwen3-0.6b --dtype bfloat16

`calibrate` fits both regimes on other questions of GSM8K's test file, stores the fits in the pair's config.json, and
writes results/calibration.json and results/pair_rounds.json, which the simulator replays. It resumes. `thresholds`
measures Figure 5. `table` measures this machine for the package's `tables` folder: the pair, or a geometry with random
weights.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import bench
from tqdm import tqdm

from hf_dspark import DSparkConfig, calibrate, profile_throughput
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.provenance import provenance
from hf_dspark.scheduling.calibration import (
    CalibrationRounds,
    LogitFits,
    calibrated_confidence,
    conditional_auc,
    measure_calibration,
)

NUM_REPLAYED = 100  # requests in pair_rounds.json
THRESHOLDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PROFILES = {
    "pair": {"batch_sizes": (1, 2, 4, 8, 16, 32), "context_lengths": (64, 256), "repetitions": 15},
    "qwen3-0.6b": {"batch_sizes": (1, 2, 4, 8), "context_lengths": (64, 512), "repetitions": 3},
    "accelerator": {"batch_sizes": (1, 2, 4, 8, 16, 32, 64), "context_lengths": (64, 512), "repetitions": 5},
    "others": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 128), "repetitions": 2},
    "rehearsal": {"batch_sizes": (1, 2), "context_lengths": (8, 16), "repetitions": 1},
}


def measure(rounds: CalibrationRounds, fits: LogitFits) -> dict[str, Any]:
    """Return raw and calibrated measures of held-out rounds."""
    raw, calibrated = measure_calibration(rounds), measure_calibration(rounds, fits)
    return {
        "num_rounds": len(rounds.logits),
        "fits": [list(pair) for pair in fits],
        "conditional_auc": conditional_auc(rounds),
        "mean_ece_raw": sum(part.ece for part in raw) / len(raw),
        "mean_ece_calibrated": sum(part.ece for part in calibrated) / len(calibrated),
        "raw": [asdict(part) for part in raw],
        "calibrated": [asdict(part) for part in calibrated],
    }


def replayed(per_prompt: list[CalibrationRounds], fits: LogitFits) -> list[dict[str, Any]]:
    """Return calibrated confidences and accepted drafts of the rounds that verified a whole block, per request."""
    requests = []
    for rounds in per_prompt:
        whole = rounds.proposed == rounds.block_size
        if bool(whole.any()):
            confidence = calibrated_confidence(rounds.logits[whole], fits)
            values = [[round(value, 4) for value in row] for row in confidence.tolist()]
            requests.append({"confidence": values, "accepted": rounds.num_accepted[whole].tolist()})
    return requests


def calibrate_pair(
    test_file: Path, num_prompts: int = 600, num_held_out: int = 450, rounds_folder: Path = Path("out/calibration")
) -> dict[str, Any]:
    """Calibrate the shipped draft, and measure on other prompts what that does."""
    target, draft, tokenizer = bench.load_pair()
    draft.config.sts_temperatures = draft.config.confidence_fits = None
    others = bench.calibration_prompts(test_file, num_prompts + num_held_out)
    measured_on = bench.held_out_prompts() + others[:: len(others) // num_held_out][:num_held_out]
    fitted_on = [prompt for prompt in others if prompt not in set(measured_on)]
    regimes, held_out = {}, []
    for regime, sampling in bench.REGIMES.items():
        settings = {"max_new_tokens": 128, **sampling}
        file = rounds_folder / f"{regime}.jsonl"
        calibrate(target, draft, fitted_on, tokenizer, domain=regime, output_file=file, **settings)
        held_out = [
            collect_rounds(target, draft, [prompt], tokenizer, rounds_folder / regime / f"{index}.jsonl", **settings)
            for index, prompt in enumerate(tqdm(measured_on, desc="held-out rounds"))
        ]
        fits = draft.config.confidence_fits_for(None, regime == "sampled")
        regimes[regime] = measure(CalibrationRounds.concatenate(held_out), fits)
    origin = {"provenance": provenance(options={"test_file": test_file})}
    rounds = {"block_size": draft.config.block_size, "requests": replayed(held_out[:NUM_REPLAYED], fits)}
    bench.write_result(bench.RESULTS / "pair_rounds.json", origin | rounds)
    result = {"num_fitted_on": len(fitted_on), "num_held_out": len(measured_on), "regimes": regimes}
    bench.write_result(bench.RESULTS / "calibration.json", origin | result)
    config = DSparkConfig.from_pretrained(bench.PAIR / "draft")
    for name in ("sts_temperatures", "confidence_fits", "sibling_acceptance"):
        setattr(config, name, getattr(draft.config, name))
    config.save_pretrained(bench.PAIR / "draft")
    shown = "mean_ece_calibrated", "num_rounds"
    return {regime: {key: part[key] for key in shown} for regime, part in regimes.items()}


def thresholds(num_prompts: int = 50, max_new_tokens: int = 128) -> dict[str, Any]:
    """Tokens per round and acceptance rate by confidence threshold, on the held-out prompts."""
    target, draft, tokenizer = bench.load_pair()
    prompts, regimes = bench.held_out_ids(tokenizer, num_prompts), {}
    for regime, sampling in bench.REGIMES.items():
        regimes[regime] = []
        for threshold in tqdm(THRESHOLDS, desc=regime):
            options = {"assistant_confidence_threshold": threshold, "max_new_tokens": max_new_tokens, **sampling}
            calls = [bench.decode(target, [ids], index, draft, **options) for index, ids in enumerate(prompts)]
            rounds = bench.joined(calls)
            regimes[regime].append(row(threshold, rounds.rounds, sum(rounds.proposed), sum(rounds.accepted)))
    return {"num_prompts": len(prompts), "regimes": regimes}


def row(threshold: float, rounds: int, proposed: int, accepted: int) -> dict[str, Any]:
    return {
        "threshold": threshold,
        "rounds": rounds,
        "tokens_per_round": 1 + accepted / rounds,
        "acceptance_rate": accepted / proposed if proposed else None,
        "proposed_per_round": proposed / rounds,
        "rejected_per_round": (proposed - accepted) / rounds,
    }


def table(
    models: Literal[("pair", *bench.GEOMETRIES)],
    dtype: bench.Dtype = "float32",
    device: str = "cpu",
    machine: str = "cpu_2_cores",
    rehearse: bool = False,
) -> dict[str, Any]:
    """Measure this machine, and save the table in the package."""
    if models == "pair":
        target, draft = (model.to(device) for model in bench.load_pair(dtype)[:2])
    else:
        target, draft = bench.random_pair(models, dtype, device, rehearse)
    kind = "rehearsal" if rehearse else models if device == "cpu" else "accelerator"
    profile = profile_throughput(target, draft, cache=False, **PROFILES.get(kind, PROFILES["others"]))
    if device == "cpu" and not rehearse:
        profile.save(bench.ROOT / "src" / "hf_dspark" / "tables" / f"{machine}.{models}.{dtype}.json")
    table = profile.table
    return {"tokens": table.verify_tokens, "steps_per_second": table.steps_per_second, "drafting": table.drafting}


if __name__ == "__main__":
    calibrate_pair.__name__ = "calibrate"
    bench.main(__doc__, calibrate_pair, thresholds, table)
