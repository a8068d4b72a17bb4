"""How close the decoding loop comes to its limit, and what batches gain: ratios of medians, in turns, one process.

python benchmarks/loop.py efficiency --output benchmarks/results/loop_pair.json
python benchmarks/loop.py replay --geometry qwen3-0.6b qwen3-1.7b --output benchmarks/results/loop_0.6b.json
python benchmarks/loop.py replay --device cuda --geometry qwen3-0.6b qwen3-4b qwen3-8b --rows 1 8 32 --output ...
python benchmarks/loop.py context --output benchmarks/results/loop_context.json
python benchmarks/loop.py batch --output benchmarks/results/loop_batch.json

`efficiency` decodes held-out prompts with the shipped pair, or with `--pair`. `replay` has random weights of a larger
model: each round accepts as many drafts as a recorded round of the shipped pair. `context` times passes after long
prompts. `batch` decodes batches of held-out prompts, scheduled by the step times that this machine remembers
(`hf-dspark profile`).

On a CPU, `--baseline both` (the default) times plain `generate()` and drafted calls with packed copies of the weights,
too. `speedup` is over plain `generate()` as users run it, `speedup_same_kernels` over plain with packed copies.
`efficiency` is the speed-up over `limit`, the one that the passes alone allow:
tau * T_target(1) / (T_draft + T_target(1 + l)). Times are without the prefill. A cell is written when it is there.

Recurrent layers read the tokens accepted in a round again in the next pass (`--geometry qwen3.5-0.8b`). `verify` has
half of each block accepted, `verify_alone` nothing; `reading_again` is the difference, as a part of a plain step.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pair import (
    BASELINES,
    GEOMETRIES,
    HYBRID_GEOMETRIES,
    PAIR,
    RESULTS,
    Way,
    decoding,
    default_policy,
    held_out_prompts,
    kernels,
    load_pair,
    num_rounds_for,
    passes_by_columns,
    passes_by_slots,
    provenance_of,
    random_pair,
    recorded_acceptance,
    replaying,
    representative,
    speedups,
    synchronize,
    ways_of,
    write_result,
)
from tqdm import tqdm
from transformers import DynamicCache

from hf_dspark import FullBlock, Rounds
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling.drafts import ChainSampler
from hf_dspark.targets.support import keeps_states

SAMPLINGS = {
    "greedy": {"do_sample": False},
    "truncated": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
SIZES = [*GEOMETRIES, *HYBRID_GEOMETRIES]
WARM_UP = 5
CANDIDATES = 256  # `draft_top_k` of `replay`: what it costs in tau is below the noise, see `drafting.py candidates`
DRAFTED_TOKENS, PLAIN_TOKENS = 96, 16  # of a call of `replay`, for each row
Cell = dict[str, Any]


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def decode(target, draft, way: Way, ids: torch.Tensor, seed: int, **options) -> tuple[float, int]:
    """Return the seconds of decoding alone, and the tokens of all rows in them: the prefill gives the first."""
    assistant = {"assistant_model": draft} if way.drafted else {}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **assistant}
    outputs = []
    with kernels(target, draft, way.packed):
        torch.manual_seed(seed)
        first = seconds_of(lambda: target.generate(**inputs, **options | {"max_new_tokens": 1}), ids.device)
        torch.manual_seed(seed)
        whole = seconds_of(lambda: outputs.append(target.generate(**inputs, **options)), ids.device)
    return whole - first, len(ids) * (outputs[0].shape[1] - ids.shape[1] - 1)


class Forwards:
    """The forward passes alone, after one context, for some rows."""

    def __init__(self, target, draft, context_length: int, rows: int = 1) -> None:
        device = target.device
        self.target, self.draft, self.rows = target, draft.bind(target), rows
        self.prompt = torch.arange(context_length, device=device)[None] % 1000
        self.anchors = torch.zeros(rows, dtype=torch.long, device=device)
        self.block = self.prompt[:, : 1 + draft.config.block_size].expand(rows, -1)
        self.width = len(draft.config.target_layer_ids) * draft.config.hidden_size
        self.cache = SlotCache(rows)
        self.times: dict[str, list[float]] = {"plain_step": [], "verify": [], "transformers_verify": [], "draft": []}
        self.reads_again = keeps_states(target)
        if self.reads_again:
            self.times["verify_alone"] = []
        self.draft_blocks(context_length)

    def draft_blocks(self, num_new: int) -> None:
        """Draft one block for each row, after `num_new` new tokens."""
        shape = self.rows, num_new, self.width
        features = torch.ones(shape, dtype=self.draft.dtype, device=self.prompt.device)
        ids = torch.zeros(self.rows * num_new, dtype=torch.long, device=self.prompt.device)
        self.draft.draft_block(self.anchors, features, self.cache, ChainSampler(), committed_ids=ids)
        for row in range(self.rows):
            self.cache.truncate(row, self.prompt.shape[1])

    @torch.no_grad()
    def measure(self, repetitions: int, packed: bool = False) -> None:
        """Time each pass many times in a row, as it runs in a loop of its own."""
        with kernels(self.target, self.draft, packed):
            with passes_by_slots(self.target, self.prompt, self.rows) as by_slots:
                self._time("verify", lambda: by_slots(self.block), repetitions)
            if self.reads_again:
                with passes_by_slots(self.target, self.prompt, self.rows) as by_slots:
                    self._time("verify_alone", lambda: by_slots(self.block, accepted=0), repetitions)
            self._time("draft", lambda: self.draft_blocks(4), repetitions)
        if not self.reads_again:  # transformers' own loop refuses these
            with passes_by_columns(self.target, self.prompt, self.rows) as by_columns:
                self._time("transformers_verify", lambda: by_columns(self.block), repetitions)
        cache = DynamicCache(config=self.target.config)
        self.target(self.prompt.expand(self.rows, -1), past_key_values=cache, logits_to_keep=1)
        # Each step grows the cache, as in plain decoding.
        self._time("plain_step", lambda: self.target(self.block[:, :1], past_key_values=cache), repetitions)

    def _time(self, name: str, run: Callable[[], object], repetitions: int) -> None:
        for _ in range(WARM_UP):  # the first passes after another model's are slower
            run()
        self.times[name].extend(seconds_of(run, self.prompt.device) for _ in range(repetitions))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times.items() if times}


def cell_of(runs: dict[str, list[tuple[float, int]]], forwards: Forwards, tau: float) -> Cell:
    """Return what some runs came to: seconds and tokens of each call, by way."""
    medians = {way: statistics.median(seconds / tokens for seconds, tokens in calls) for way, calls in runs.items()}
    alone, found = forwards.medians(), speedups(medians)
    limit = tau * alone["plain_step"] / (alone["draft"] + alone["verify"])
    cell = {"tau": tau, **found, "limit": limit, "efficiency": found["speedup"] / limit}
    if "verify_alone" in alone:
        cell["reading_again"] = (alone["verify"] - alone["verify_alone"]) / alone["plain_step"]
    if "transformers" in medians:
        cell["transformers_loop_speedup"] = medians["plain"] / medians["transformers"]
        cell["own_over_transformers_loop"] = medians["transformers"] / medians["own"]
    return cell | {
        "ms_per_token": {way: 1e3 * value for way, value in medians.items()},
        "forwards_ms": {name: 1e3 * value for name, value in alone.items()},
    }


def efficiency(options: argparse.Namespace) -> Iterator[Cell]:
    """A trained pair on held-out prompts, one row."""
    target, draft, tokenizer = load_pair(folder=options.pair)
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in held_out_prompts()]
    ways = ways_of(options.baseline)
    if not keeps_states(target):
        ways.append(Way("transformers", True, False, "with the draft, in transformers' own loop"))
    for regime, sampling in SAMPLINGS.items():
        runs: dict[str, list[tuple[float, int]]] = {way.name: [] for way in ways}
        forwards, statistics_of_calls = Forwards(target, draft, 160), []
        for index, ids in enumerate(tqdm(prompts[: options.num_prompts], desc=regime)):
            for way in ways:
                with decoding(draft, FullBlock(), transformers_loop=way.name == "transformers"):
                    runs[way.name].append(decode(target, draft, way, ids, index, max_new_tokens=128, **sampling))
                if way.name == "own":
                    statistics_of_calls.append(draft.last_stats)
            forwards.measure(15, packed="own_packed" in runs)
        yield {"regime": regime} | cell_of(runs, forwards, Rounds.joined(statistics_of_calls).tau)


def replay(options: argparse.Namespace) -> Iterator[Cell]:
    """Random weights of published sizes; how much is accepted comes from recorded rounds."""
    accepted = recorded_acceptance(options.rounds)
    for geometry in options.geometry:
        target, draft = random_pair(geometry, getattr(torch, options.dtype), options.device, options.rehearse)
        draft.config.draft_top_k = CANDIDATES
        target.generation_config.eos_token_id = None
        for rows, regime in itertools.product(options.rows, SAMPLINGS):
            yield {"geometry": geometry, "rows": rows, "regime": regime} | replayed_cell(
                target, draft, accepted, rows, regime, options
            )
        del target, draft


def replayed_cell(target, draft, accepted: list[int], rows: int, regime: str, options: argparse.Namespace) -> Cell:
    """Time one number of rows in one regime."""
    ways = ways_of(options.baseline, target.device)
    ids = torch.arange(rows * options.context, device=target.device).view(rows, -1) % 1000 + 5
    runs: dict[str, list[tuple[float, int]]] = {way.name: [] for way in ways}
    forwards, statistics_of_calls = Forwards(target, draft, options.context + 16, rows), []
    lengths = {way.name: 1 + (options.new_tokens if way.drafted else PLAIN_TOKENS) for way in ways}
    num_rounds = rows * num_rounds_for(options.new_tokens, accepted)
    settings = {"pad_token_id": 0, **SAMPLINGS[regime]}
    for index in tqdm(range(-1, options.repetitions), desc=f"{rows} rows, {regime}"):
        for way in ways:
            with decoding(draft, FullBlock()), replaying(representative(accepted, num_rounds, max(index, 0))):
                timed = decode(target, draft, way, ids, max(index, 0), max_new_tokens=lengths[way.name], **settings)
            if index >= 0:  # the first round warms up
                runs[way.name].append(timed)
                if way.name == "own":
                    statistics_of_calls.append(draft.last_stats)
        if index >= 0:
            forwards.measure(5, packed="own_packed" in runs)
    return cell_of(runs, forwards, Rounds.joined(statistics_of_calls).tau)


def context(options: argparse.Namespace) -> Iterator[Cell]:
    """A verification pass of 8 tokens against a step, and drafting, by the length of the context."""
    target, draft = random_pair("qwen3-0.6b", getattr(torch, options.dtype), options.device, options.rehearse)
    packed = ways_of(options.baseline, target.device)[-1].packed
    for length in (16, 32) if options.rehearse else (256, 1024, 2048, 8192):
        forwards = Forwards(target, draft, length)
        forwards.measure(options.repetitions, packed)
        alone = forwards.medians()
        yield {
            "context": length,
            "forwards_ms": {name: 1e3 * value for name, value in alone.items()},
            "verify_over_step": alone["verify"] / alone["plain_step"],
            "transformers_verify_over_step": alone["transformers_verify"] / alone["plain_step"],
        }


def batch(options: argparse.Namespace) -> Iterator[Cell]:
    """The shipped pair on batches of held-out prompts: tokens per second of whole calls."""
    target, draft, tokenizer = load_pair()
    tokenizer.padding_side = "left"
    prompts, policies = held_out_prompts(), {"full block": FullBlock(), "scheduled": default_policy(draft, target)}
    for size, (regime, sampling) in itertools.product(options.rows, SAMPLINGS.items()):
        chosen = [prompts[index % len(prompts)] for index in range(size)]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True)
        settings = {"max_new_tokens": 128, "pad_token_id": tokenizer.pad_token_id, **sampling}
        packs = sorted({way.packed for way in ways_of(options.baseline)})
        names = [(name, packed) for name in ("plain", *policies) for packed in packs]
        rates: dict[str, list[float]] = {named(*way): [] for way in names}
        outputs, rounds = {}, {}
        for index, (name, packed) in itertools.product(
            tqdm(range(options.repetitions), desc=f"{size} {regime}"), names
        ):
            assistant = {"assistant_model": draft} if name in policies else {}
            with kernels(target, draft, packed), decoding(draft, policies.get(name)):
                torch.manual_seed(index)
                started = time.perf_counter()
                whole = target.generate(**inputs, **settings, **assistant)
                seconds = time.perf_counter() - started
            outputs[name] = whole[:, inputs["input_ids"].shape[1] :]
            rates[named(name, packed)].append(count_tokens(outputs[name], tokenizer) / seconds)
            if assistant:
                rounds[name] = draft.last_stats
        yield {"rows": size, "regime": regime} | batch_cell(rates, outputs, rounds, regime == "greedy")


def named(way: str, packed: bool) -> str:
    return f"{way}, packed" if packed else way


def batch_cell(rates: dict[str, list[float]], outputs: dict, rounds: dict, greedy: bool) -> Cell:
    """Return what one batch came to."""
    medians = {way: statistics.median(values) for way, values in rates.items()}
    is_packed = "plain, packed" in medians
    ours = {name: medians[named(name, is_packed)] for name in rounds}
    same = {name: sum(map(torch.equal, *trimmed(outputs["plain"], outputs[name]))) for name in rounds}
    cell = {
        "tokens_per_second": medians,
        "speedup": {name: rate / medians["plain"] for name, rate in ours.items()},
        "identical_rows": same if greedy else None,
        "tau": {name: part.tau for name, part in rounds.items()},
        "proposed_per_row": {name: sum(part.proposed) / part.rounds for name, part in rounds.items()},
    }
    if is_packed:
        cell["speedup_same_kernels"] = {name: rate / medians["plain, packed"] for name, rate in ours.items()}
    return cell


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
ROWS = {"replay": [1], "batch": [8, 32, 64]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--baseline", choices=BASELINES, default="both", help="of `efficiency`, `replay` and `batch`")
    parser.add_argument("--pair", type=Path, default=PAIR, help="of `efficiency`: a folder with `target` and `draft`")
    parser.add_argument("--num_prompts", type=int, default=30, help="of `efficiency`")
    parser.add_argument("--repetitions", type=int, default=5, help="of the other parts")
    parser.add_argument(
        "--geometry", nargs="+", choices=[*GEOMETRIES, *HYBRID_GEOMETRIES], default=["qwen3-0.6b"], help="of `replay`"
    )
    parser.add_argument("--rows", type=int, nargs="+", help=f"of a batch; default: {ROWS}")
    parser.add_argument("--device", default="cpu", help="of `replay` and `context`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of `replay`, `context`")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt of `replay`")
    parser.add_argument("--new_tokens", type=int, default=DRAFTED_TOKENS, help="drafted ones of `replay`")
    parser.add_argument("--rounds", default=RESULTS / "pair_rounds.json", help="recorded rounds for `replay`")
    parser.add_argument("--rehearse", action="store_true", help="tiny models and short calls: tries the script")
    parser.add_argument("--output", help="JSON file to write instead of printing")
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance_of(parser, options, options.device)}
    options.rows = options.rows or ROWS.get(options.part)
    if options.rehearse:
        options.repetitions, options.new_tokens, options.context = 1, 12, 32
    if options.part in ("efficiency", "replay"):
        result["ways"] = {way.name: way.meaning for way in ways_of(options.baseline, options.device)}
    if options.part in ("replay", "context"):
        result |= {"dtype": options.dtype, "context": options.context}
    result["cells"] = []
    for cell in PARTS[options.part](options):
        result["cells"].append(cell)
        if options.output:
            write_result(options.output, result)
    if not options.output:
        write_result(None, result)


if __name__ == "__main__":
    main()
