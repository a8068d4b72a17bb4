"""Calibrate the shipped draft, and measure on the held-out prompts what calibration does. Resumes.

python benchmarks/calibrate_pair.py --test_file test.jsonl

Fits the temperatures of both regimes on other questions of GSM8K's test file, stores them in the pair's config.json,
and writes results/calibration.json (ECE, AUC, Brier, reliability bins) and results/pair_rounds.json (the held-out
rounds with their calibrated confidences, which the simulator replays).
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from pair import PAIR, REGIMES, RESULTS, calibration_prompts, held_out_prompts, load_pair, provenance_of, write_result
from tqdm import tqdm

from hf_dspark import DSparkConfig, calibrate
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.scheduling.calibration import (
    CalibrationRounds,
    LogitFits,
    calibrated_confidence,
    conditional_auc,
    measure_calibration,
)

NUM_REPLAYED = 100  # requests in pair_rounds.json


def measure(rounds: CalibrationRounds, fits: LogitFits) -> dict:
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


def replay_requests(per_prompt: list[CalibrationRounds], fits: LogitFits) -> list[dict]:
    """Return calibrated confidences and accepted drafts of the rounds that verified a whole block, per request."""
    requests = []
    for rounds in per_prompt:
        whole = rounds.proposed == rounds.block_size
        if bool(whole.any()):
            confidence = calibrated_confidence(rounds.logits[whole], fits)
            requests.append(
                {
                    "confidence": [[round(value, 4) for value in row] for row in confidence.tolist()],
                    "accepted": rounds.num_accepted[whole].tolist(),
                }
            )
    return requests


def rounds_by_prompt(target, draft, prompts: list[str], tokenizer, folder: Path, settings: dict) -> list:
    """Return the rounds of each prompt, recorded in one file each."""
    return [
        collect_rounds(target, draft, [prompt], tokenizer, folder / f"{index}.jsonl", index, **settings)
        for index, prompt in enumerate(tqdm(prompts, desc="held-out rounds"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test_file", required=True, help="GSM8K test.jsonl")
    parser.add_argument("--num_prompts", type=int, default=600, help="questions to fit on")
    parser.add_argument(
        "--num_held_out", type=int, default=450, help="questions to measure on, besides the shipped 50"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--rounds_folder", default="out/calibration", help="recorded rounds, to resume")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="record these only")
    options = parser.parse_args()
    origin = {"provenance": provenance_of(parser, options)}

    target, draft, tokenizer = load_pair()
    draft.config.sts_temperatures = draft.config.confidence_fits = None
    others = calibration_prompts(options.test_file, options.num_prompts + options.num_held_out)
    step = len(others) // options.num_held_out
    measured_on = held_out_prompts() + others[::step][: options.num_held_out]
    fitted_on = [prompt for prompt in others if prompt not in set(measured_on)]
    folder = Path(options.rounds_folder)
    regimes, held_out = {}, []
    for regime in options.regimes:
        settings = {"max_new_tokens": options.max_new_tokens, **REGIMES[regime]}
        calibrate(
            target, draft, fitted_on, tokenizer, domain=regime, output_file=folder / f"{regime}.jsonl", **settings
        )
        held_out = rounds_by_prompt(target, draft, measured_on, tokenizer, folder / f"{regime}_held_out", settings)
        fits = draft.config.confidence_fits_for(None, regime == "sampled")
        regimes[regime] = measure(CalibrationRounds.concatenate(held_out), fits)
        found = regimes[regime]
        print(
            f"{regime}: mean ECE {found['mean_ece_raw']:.4f} -> {found['mean_ece_calibrated']:.4f}, AUC "
            f"{found['conditional_auc']:.3f}, {found['num_rounds']} held-out rounds"
        )
    if options.regimes != list(REGIMES):
        return
    prompts = {"num_fitted_on": len(fitted_on), "num_held_out": len(measured_on)}
    write_result(RESULTS / "calibration.json", origin | prompts | {"regimes": regimes})
    requests = replay_requests(held_out[:NUM_REPLAYED], fits)
    pair_rounds = {"block_size": draft.config.block_size, "regime": "sampled", "requests": requests}
    write_result(RESULTS / "pair_rounds.json", origin | pair_rounds)
    config = DSparkConfig.from_pretrained(PAIR / "draft")
    config.sts_temperatures, config.confidence_fits = draft.config.sts_temperatures, draft.config.confidence_fits
    config.save_pretrained(PAIR / "draft")


if __name__ == "__main__":
    main()
