"""Speed of the shipped pair against plain `generate()`: paired, interleaved, medians, one process; prints one JSON
line.

python benchmarks/speed.py --output benchmarks/results/speed.json
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import provenance
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkDraftModel

PAIR = Path(__file__).parent.parent / "examples" / "gsm8k_pair"


@dataclass
class Cell:
    """One setting over all prompts. Times in seconds, speeds in tokens per second."""

    temperature: float
    tau: float
    acceptance_rate: float
    conditional_acceptance: list[float]
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    identical_outputs: int | None
    draft_ms_per_round: float
    verify_ms_per_round: float
    rest_ms_per_round: float
    plain_ms_per_token: float


def timed(target, ids: torch.Tensor, **options) -> tuple[torch.Tensor, float]:
    """Return the new tokens and the seconds per new token."""
    started = time.perf_counter()
    output = target.generate(ids, **options)
    seconds = time.perf_counter() - started
    return output[0, ids.shape[1] :], seconds / (output.shape[1] - ids.shape[1])


def measure(target, draft, tokenizer, prompts: list[str], temperature: float, max_new_tokens: int) -> Cell:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    options = {"max_new_tokens": max_new_tokens, **sampling}
    plain_seconds, seconds, identical, stats = [], [], 0, []
    for index, prompt in enumerate(tqdm(prompts, desc=f"temperature {temperature:g}")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        torch.manual_seed(index)
        plain, plain_time = timed(target, ids, **options)
        assisted, assisted_time = timed(target, ids, assistant_model=draft, **options)
        plain_seconds.append(plain_time)
        seconds.append(assisted_time)
        stats.append(draft.last_stats)
        identical += plain.tolist() == assisted.tolist()
    rounds = sum(stat.rounds for stat in stats)
    slots = range(1, draft.config.block_size + 1)
    reached = [sum(min(stat.proposed_at(k), stat.accepted_at(k - 1)) for stat in stats) for k in slots]
    return Cell(
        temperature=temperature,
        tau=1 + sum(sum(stat.accepted) for stat in stats) / rounds,
        acceptance_rate=sum(sum(stat.accepted) for stat in stats) / sum(sum(stat.proposed) for stat in stats),
        conditional_acceptance=[
            round(sum(stat.accepted_at(k) for stat in stats) / max(1, count), 4)
            for k, count in zip(slots, reached, strict=True)
        ],
        plain_tokens_per_second=1 / statistics.median(plain_seconds),
        tokens_per_second=1 / statistics.median(seconds),
        speedup=statistics.median(plain_seconds) / statistics.median(seconds),
        identical_outputs=None if temperature else identical,
        draft_ms_per_round=1e3 * sum(stat.draft_seconds for stat in stats) / rounds,
        verify_ms_per_round=1e3 * sum(stat.verify_seconds for stat in stats) / rounds,
        rest_ms_per_round=1e3 * sum(stat.rest_seconds for stat in stats) / rounds,
        plain_ms_per_token=1e3 * statistics.median(plain_seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_prompts", type=int, default=50)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft_top_k", type=int, default=None)
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=dtype).eval()
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=dtype).eval()
    draft.config.draft_top_k = options.draft_top_k
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = prompts[: options.num_prompts]
    measure(target, draft, tokenizer, prompts[:2], 0.0, options.max_new_tokens)  # warm-up
    cells = [
        asdict(measure(target, draft, tokenizer, prompts, temperature, options.max_new_tokens))
        for temperature in options.temperatures
    ]
    result = {"provenance": provenance(), "dtype": options.dtype, "num_prompts": len(prompts), "cells": cells}
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
