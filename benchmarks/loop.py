"""How close the decoding loop comes to its limit, and what batches gain. Ratios of medians, interleaved, one process.

python benchmarks/loop.py efficiency --output benchmarks/results/loop_pair.json
python benchmarks/loop.py replay --output benchmarks/results/loop_0.6b.json
python benchmarks/loop.py replay --geometry qwen3-1.7b --output benchmarks/results/loop_1.7b.json
python benchmarks/loop.py context --output benchmarks/results/loop_context.json
python benchmarks/loop.py batch --output benchmarks/results/loop_batch.json

`batch` schedules by the step times that this machine remembers: `hf-dspark profile` the pair before, with as many
requests as the largest batch (`--batch_sizes 1 2 4 8 16 32 64`). So does `speed.py`.

`replay` has random weights, whose drafts nobody accepts: each round accepts as many as a round of the shipped pair did
at temperature 1 (`results/pair_rounds.json`), greedy and sampled alike, with the mean of the whole recording.

Loop efficiency is the achieved speed-up over the one that the forward passes alone allow,
tau * T_target(1) / (T_draft + T_target(1 + l)), times without prefill.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from pair import RESULTS, held_out_prompts, load_pair
from profile_machine import GEOMETRIES, random_pair
from tqdm import tqdm
from transformers import DynamicCache

from hf_dspark import DecodingOptions, FullBlock, RoundStatistics
from hf_dspark.cpu.copies import packed_weights_of
from hf_dspark.cpu.few_rows import using_copies
from hf_dspark.decoding.hook import default_policy
from hf_dspark.decoding.loop import DecodingLoop
from hf_dspark.decoding.step_costs import _passes_by_columns, _passes_by_slots
from hf_dspark.maths.sampling import VerifiedBlock, greedy_sampler
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.provenance import provenance

SAMPLINGS = {
    "greedy": {"do_sample": False},
    "truncated": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
WARM_UP = 5
CANDIDATES = 256  # of `replay`: what `draft_top_k` takes from tau stays below the noise, see `drafting.py candidates`
REPLAYED_TOKENS = 96
LOOPS = {"plain": {}, "own": {"use_transformers_loop": False}, "transformers": {"use_transformers_loop": True}}
TOKENS_TO_WARM_UP = 16


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def decode(target, draft, ids: torch.Tensor, loop: str, seed: int, **options) -> tuple[float, int]:
    """Return the seconds of decoding alone, and the tokens decoded in them: the first one comes from the prefill."""
    draft.decoding = replace(draft.decoding, **LOOPS[loop])
    assistant = {} if loop == "plain" else {"assistant_model": draft}
    torch.manual_seed(seed)
    first = seconds_of(lambda: target.generate(ids, **options | {"max_new_tokens": 1}, **assistant))
    torch.manual_seed(seed)
    started = time.perf_counter()
    output = target.generate(ids, **options, **assistant)
    return time.perf_counter() - started - first, output.shape[1] - ids.shape[1] - 1


class Forwards:
    """The forward passes alone, at one context length."""

    def __init__(self, target, draft, context_length: int) -> None:
        self.prompt = torch.arange(context_length)[None] % 1000
        self.gamma = draft.config.block_size
        self.draft, self.cache = draft.bind(target), SlotCache()
        self.target = target
        self.width = len(draft.config.target_layer_ids) * draft.config.hidden_size
        self.times: dict[str, list[float]] = {"plain_step": [], "verify": [], "transformers_verify": [], "draft": []}
        self._draft(context_length)

    def _draft(self, new: int) -> None:
        features = torch.ones(1, new, self.width, dtype=self.draft.dtype)
        self.draft.draft_block(torch.zeros(1, dtype=torch.long), features, self.cache, greedy_sampler)

    @torch.no_grad()
    def measure(self, repetitions: int) -> None:
        """Time each pass many times in a row, warm, as it runs in a loop of its own."""
        block = self.prompt[:, : 1 + self.gamma]

        def draft_one() -> None:
            self._draft(4)
            self.cache.truncate(0, self.prompt.shape[1])

        with using_copies(packed_weights_of(self.target, self.draft)):
            with _passes_by_slots(self.target, self.prompt, 1) as by_slots:
                self._time("verify", lambda: by_slots(block), repetitions)
            self._time("draft", draft_one, repetitions)
        with _passes_by_columns(self.target, self.prompt, 1) as by_columns:
            self._time("transformers_verify", lambda: by_columns(block), repetitions)
        cache = DynamicCache(config=self.target.config)
        self.target(self.prompt, past_key_values=cache, logits_to_keep=1)
        # Each step grows the cache, as in plain decoding; cropping would make the next one dearer.
        self._time("plain_step", lambda: self.target(block[:, :1], past_key_values=cache), repetitions)

    def _time(self, name: str, run: Callable[[], object], repetitions: int) -> None:
        for _ in range(WARM_UP):  # the first passes after another model's are slower
            run()
        self.times[name].extend(seconds_of(run) for _ in range(repetitions))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times.items()}


def efficiency_cell(runs: dict[str, list[tuple[float, int]]], forwards: Forwards, tau: float) -> dict:
    medians = {loop: statistics.median(seconds / tokens for seconds, tokens in cells) for loop, cells in runs.items()}
    alone = forwards.medians()
    limit = tau * alone["plain_step"] / (alone["draft"] + alone["verify"])
    speedup = medians["plain"] / medians["own"]
    return {
        "tau": tau,
        "speedup": speedup,
        "limit": limit,
        "efficiency": speedup / limit,
        "transformers_loop_speedup": medians["plain"] / medians["transformers"],
        "own_over_transformers_loop": medians["transformers"] / medians["own"],
        "ms_per_token": {loop: 1e3 * value for loop, value in medians.items()},
        "forwards_ms": {name: 1e3 * value for name, value in alone.items()},
    }


def efficiency(options: argparse.Namespace) -> dict:
    """The shipped pair on held-out prompts, batch 1."""
    target, draft, tokenizer = load_pair()
    draft.decoding = DecodingOptions(policy=FullBlock())
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in held_out_prompts()]
    cells = {}
    for name, sampling in SAMPLINGS.items():
        runs: dict[str, list[tuple[float, int]]] = {loop: [] for loop in LOOPS}
        forwards, taus = Forwards(target, draft, 160), []
        for index, ids in enumerate(tqdm(prompts[: options.num_prompts], desc=name)):
            for loop in LOOPS:
                runs[loop].append(decode(target, draft, ids, loop, index, max_new_tokens=128, **sampling))
                if loop == "own":
                    taus.append(draft.last_stats)
            forwards.measure(15)
        cells[name] = efficiency_cell(runs, forwards, RoundStatistics.joined(taus).tau)
    return cells


def representative(accepted: list[int], count: int, seed: int) -> list[int]:
    """Return so many recorded rounds, in random order, that stand for all of them: one from each equal part."""
    ordered, source = sorted(accepted), random.Random(seed)
    place = source.random()  # the same in each part: else the mean would wander
    chosen = [ordered[int((part + place) * len(ordered) / count)] for part in range(count)]
    source.shuffle(chosen)
    return chosen


def replayed(rounds: list[int]) -> Callable:
    """Return a `_verify` that does all its work, and then accepts as many tokens as a recorded round did."""
    honest, recorded = DecodingLoop._verify, itertools.cycle(rounds)

    def verify(self, proposal, scores, layout, noise):
        verified = honest(self, proposal, scores, layout, noise)
        if proposal.block is None:
            return verified
        accepted = torch.tensor([next(recorded)]).clamp_max(proposal.lengths)
        return VerifiedBlock(accepted, verified.next_token_ids)

    return verify


def replay(options: argparse.Namespace) -> dict:
    """Random weights of a Qwen3 geometry; what is accepted comes from recorded rounds."""
    target, draft = random_pair(options.geometry, getattr(torch, options.dtype))
    draft.decoding = DecodingOptions(policy=FullBlock())
    draft.config.draft_top_k = CANDIDATES
    target.generation_config.eos_token_id = None
    recording = json.loads(Path(options.rounds).read_text())
    accepted = [number for request in recording["requests"] for number in request["accepted"]]
    num_rounds = round(REPLAYED_TOKENS / (1 + statistics.mean(accepted)))
    honest, cells = DecodingLoop._verify, {}
    ids = torch.arange(options.context)[None] + 5
    for name, sampling in SAMPLINGS.items():
        runs: dict[str, list[tuple[float, int]]] = {"plain": [], "own": []}
        forwards, taus = Forwards(target, draft, options.context + 16), []
        decode(target, draft, ids, "own", 0, max_new_tokens=TOKENS_TO_WARM_UP, pad_token_id=0, **sampling)
        for index in tqdm(range(options.repetitions), desc=name):
            DecodingLoop._verify = replayed(representative(accepted, num_rounds, index))
            for loop in runs:
                settings = {
                    "max_new_tokens": 1 + (REPLAYED_TOKENS if loop == "own" else 16),
                    "pad_token_id": 0,
                    **sampling,
                }
                runs[loop].append(decode(target, draft, ids, loop, index, **settings))
                if loop == "own":
                    taus.append(draft.last_stats)
            forwards.measure(5)
        DecodingLoop._verify = honest
        runs["transformers"] = runs["own"]  # rounds cannot be replayed there
        cells[name] = efficiency_cell(runs, forwards, RoundStatistics.joined(taus).tau)
        for key in ("transformers_loop_speedup", "own_over_transformers_loop"):
            del cells[name][key]
        del cells[name]["ms_per_token"]["transformers"]
    return cells


def context(options: argparse.Namespace) -> dict:
    """Qwen3-0.6B geometry, bfloat16: a verification pass of 8 tokens against a step, and drafting, by context."""
    target, draft = random_pair("qwen3-0.6b", torch.bfloat16)
    cells = {}
    for length in (256, 1024, 2048):
        forwards = Forwards(target, draft, length)
        forwards.measure(options.repetitions)
        alone = forwards.medians()
        cells[length] = {
            "forwards_ms": {name: 1e3 * value for name, value in alone.items()},
            "verify_over_step": alone["verify"] / alone["plain_step"],
            "transformers_verify_over_step": alone["transformers_verify"] / alone["plain_step"],
        }
    forwards = Forwards(target, draft, 8192)
    short = Forwards(target, draft, 256)
    for _ in range(options.repetitions):
        for part in (short, forwards):
            part.times["draft"].append(seconds_of(lambda part=part: part._draft(4)))
            part.cache.truncate(0, part.prompt.shape[1])
    medians = [statistics.median(part.times["draft"]) for part in (short, forwards)]
    cells["draft"] = {"ms_at_256": 1e3 * medians[0], "ms_at_8192": 1e3 * medians[1], "growth": medians[1] / medians[0]}
    return cells


def batch(options: argparse.Namespace) -> dict:
    """The shipped pair on batches of held-out prompts: tokens per second against plain batched `generate()`."""
    target, draft, tokenizer = load_pair()
    tokenizer.padding_side = "left"
    prompts = held_out_prompts()
    scheduled = default_policy(draft, target)
    policies = {"full block": FullBlock(), "scheduled": scheduled}
    cells = {}
    for size in options.sizes:
        chosen = [prompts[index % len(prompts)] for index in range(size)]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True)
        for name, sampling in SAMPLINGS.items():
            rates: dict[str, list[float]] = {"plain": [], **{policy: [] for policy in policies}}
            same, rounds = {}, {}
            for index in tqdm(range(options.repetitions), desc=f"{size} rows, {name}"):
                outputs = {}
                for way in rates:
                    draft.decoding = DecodingOptions(policies.get(way))
                    assistant = {"assistant_model": draft} if way in policies else {}
                    torch.manual_seed(index)
                    started = time.perf_counter()
                    outputs[way] = target.generate(
                        **inputs, max_new_tokens=128, pad_token_id=tokenizer.pad_token_id, **sampling, **assistant
                    )[:, inputs["input_ids"].shape[1] :]
                    seconds = time.perf_counter() - started
                    rates[way].append(count_tokens(outputs[way], tokenizer) / seconds)
                    if assistant:
                        rounds[way] = draft.last_stats
                for way in policies:
                    same[way] = sum(map(torch.equal, *trimmed(outputs["plain"], outputs[way])))
            medians = {way: statistics.median(values) for way, values in rates.items()}
            cells[f"{size} {name}"] = {
                "tokens_per_second": medians,
                "speedup": {way: medians[way] / medians["plain"] for way in policies},
                "identical_rows": same if name == "greedy" else None,
                "tau": {way: rounds[way].tau for way in policies},
                "proposed_per_row": {way: sum(rounds[way].proposed) / rounds[way].rounds for way in policies},
            }
    return cells


def count_tokens(generated: torch.Tensor, tokenizer) -> int:
    """Return the tokens that are no padding, end-of-sequence tokens included."""
    ends = generated == tokenizer.eos_token_id
    lengths = torch.where(ends.any(dim=1), ends.long().argmax(dim=1) + 1, generated.shape[1])
    return int(lengths.sum())


def trimmed(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with as many columns as the shorter one has."""
    width = min(first.shape[1], second.shape[1])
    return first[:, :width], second[:, :width]


PARTS = {"efficiency": efficiency, "replay": replay, "context": context, "batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--num_prompts", type=int, default=30, help="of `efficiency`")
    parser.add_argument("--repetitions", type=int, default=5, help="of the other parts")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b", help="of `replay`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of `replay`")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt of `replay`")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 64], help="of `batch`")
    parser.add_argument("--rounds", default=str(RESULTS / "pair_rounds.json"), help="recorded rounds for `replay`")
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    result: dict = {"provenance": provenance()}
    if options.part == "replay":
        result |= {name: getattr(options, name) for name in ("geometry", "dtype", "context")}
    result["cells"] = PARTS[options.part](options)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
