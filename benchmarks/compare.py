"""Every way to decode one target, against each other: same prompts, same limits, one process.

python benchmarks/compare.py --work_dir out/gsm8k --num_answers 3675 --steps 2000 \\
    --output benchmarks/results/compare_7350.json
python benchmarks/compare.py --batch_sizes 1 4 --num_prompts 3 --max_new_tokens 32

Of transformers: plain `generate()`, prompt lookup, assisted generation and DFlash, which take one sequence. Of this
package: EAGLE-3, DFlash and DSpark. The scheduler's step times are measured first. Without `--work_dir`, the shipped
pair is compared, and what needs no training; with it, models are those of `domains.py`, trained if missing.

In a cell, all methods decode the same prompts in turns. Times are of whole calls, by the tokens that came out. Sampled
answers all go on until the limit. With `--packed`, all methods multiply by packed weights; "plain, as it is" is plain
`generate()` as users run it. Long contexts are the prompt after other text of its task; `--positions` lets the models
read more than they were made for. A full run takes hours; `--resume FILE` goes on from what an interrupted one wrote.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench import Call, Way, decode_in_turns, identical, main, median_per_token
from domains import RIVALS, Models, Workshop, shipped_models
from tqdm import tqdm

from hf_dspark import ConfidenceThreshold, FullBlock, Scheduler, ThroughputTable, profile_throughput

PLAIN, LOOKUP = "plain", {"prompt_lookup_num_tokens": 10}  # as transformers' documentation has it
NATIVE = ("prompt lookup", "assistant", "transformers' DFlash")  # they take one sequence
LEAST_CALLS = 5  # of a cell, however large the batch


@dataclass(frozen=True)
class Cell:
    """What is kept equal. A temperature of 0 is greedy, a context of 0 is the prompt alone."""

    task: str
    batch_size: int
    temperature: float
    context: int

    def options(self, num_new_tokens: int) -> dict[str, Any]:
        """Return options for `generate()` with which all methods write equally many tokens."""
        if not self.temperature:
            return {"max_new_tokens": num_new_tokens, "do_sample": False}
        lengths = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, **lengths}


def methods_for(models: Models, cost: ThroughputTable, threshold: float, packed: bool = False) -> dict[str, Way]:
    """Return everything that can be compared with these models, plain decoding first."""
    drafted = {
        "assistant": Way(models.assistant),
        "transformers' DFlash": Way(models.fill_in, options={"speculation_type": "dflash"}),
        "Eagle3": Way(models.eagle3, FullBlock()),
        "DFlash": Way(models.dflash, FullBlock()),
        "DSpark": Way(models.dspark, FullBlock()),
        "DSpark, threshold": Way(models.dspark, ConfidenceThreshold(threshold)),
        "DSpark, scheduled": Way(models.dspark, Scheduler(cost, trees=False)),
        "DSpark, default": Way(models.dspark),  # trees and prompt lookup where they pay
    }
    known = {name: way for name, way in drafted.items() if way.assistant is not None}
    found = {PLAIN: Way(), "prompt lookup": Way(options=LOOKUP), **known}
    found = {name: replace(way, packed=packed) for name, way in found.items()}
    return found | ({"plain, as it is": Way()} if packed else {})


def prompt_ids(rows: Sequence[Mapping[str, Any]], index: int, tokenizer: Any, context: int) -> list[int]:
    """Return the tokens of a row's prompt after so much text of the following rows; a longer prompt stays as it is."""
    ids = tokenizer(rows[index]["prompt"])["input_ids"]
    others, before = [*rows[index + 1 :], *rows[:index]], []
    if context > len(ids) and not others:
        raise ValueError("a longer context needs other rows to take text from: pass two prompts or more")
    for row in itertools.cycle(others):
        if len(before) >= context - len(ids):
            break
        before += tokenizer(f"{row['prompt']}{row.get('completion') or ''}\n\n")["input_ids"]
    return before[len(before) - max(0, context - len(ids)) :] + ids


def method_summary(calls: Mapping[str, Sequence[Call]], method: str, greedy: bool) -> dict[str, Any]:
    """Return what one method did in one cell, or that it takes one sequence."""
    if method not in calls:
        return {"refused": "transformers' assisted generation takes one sequence"}
    own, plain = calls[method], calls[PLAIN]
    rows, seconds = len(own[0].token_ids), median_per_token(own)
    return {
        "seconds_per_token": seconds,
        "speedup": median_per_token(plain) / seconds,
        "tokens_per_pass": sum(call.num_tokens for call in own) / sum(call.passes for call in own) / rows,
        "identical_rows": identical(own, plain) if greedy else None,
        "rows": rows * len(own),
    }


def compared(
    models: Models,
    cells: Sequence[Cell],
    done: Sequence[dict[str, Any]],
    num_prompts: int,
    max_new_tokens: int,
    threshold: float = 0.5,
    packed: bool = False,
) -> Iterator[dict[str, Any]]:
    """Measure all methods in all cells that are not done; yield the result after each."""
    context = models.target.config.get_text_config(decoder=True).max_position_embeddings
    room = context - max_new_tokens
    lengths = (min(64, context // 16), min(512, context // 2))
    cost = profile_throughput(models.target, models.dspark, context_lengths=lengths, cache=False).table
    methods, found = methods_for(models, cost, threshold, packed), list(done)
    known = {tuple(cell[name] for name in asdict(cells[0])) for cell in done}
    for cell in tqdm([cell for cell in cells if tuple(asdict(cell).values()) not in known], desc="cells"):
        taking_part = {name: way for name, way in methods.items() if cell.batch_size == 1 or name not in NATIVE}
        rows = [row for row in models.tasks[cell.task] if len(models.tokenizer(row["prompt"])["input_ids"]) <= room]
        if not rows:
            raise ValueError(f"no prompt of {cell.task} has {room} tokens or less: lower max_new_tokens")
        num_calls, batches = max(math.ceil(num_prompts / cell.batch_size), min(num_prompts, LEAST_CALLS)), []
        for call in range(-1, num_calls):  # the first one warms up
            places = [place % len(rows) for place in range(call * cell.batch_size, (call + 1) * cell.batch_size)]
            batches.append([prompt_ids(rows, place, models.tokenizer, min(cell.context, room)) for place in places])
        options = {"label": cell.task, "count_passes": True, **cell.options(max_new_tokens)}
        calls = decode_in_turns(models.target, taking_part, batches, warm_up=1, **options)
        summaries = {name: method_summary(calls, name, not cell.temperature) for name in methods}
        found.append(asdict(cell) | {"num_calls": num_calls, "methods": summaries})
        facts = {"models": dict(models.facts or {}), "methods": list(methods), "packed": packed}
        yield facts | {"max_new_tokens": max_new_tokens, "cells": found}


def compare(
    work_dir: Path | None = None,
    steps: int = 500,
    num_answers: int = 1000,
    rivals: tuple[Literal[RIVALS], ...] = RIVALS[:3],
    block_size: int = 7,
    batch_sizes: tuple[int, ...] = (1, 4, 16),
    temperatures: tuple[float, ...] = (0.0, 1.0),
    contexts: tuple[int, ...] = (0,),
    positions: int | None = None,
    num_prompts: int = 24,
    max_new_tokens: int = 128,
    threshold: float = 0.5,
    packed: bool = False,
    resume: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Compare all methods; `resume` is the file of an interrupted run with the same options."""
    shop = None if work_dir is None else Workshop(work_dir, num_answers, steps)
    models = shipped_models() if shop is None else shop.models(rivals, block_size)
    for name in ("target", "dspark", *RIVALS) if positions else ():  # rotary embeddings have no end
        if (model := getattr(models, name)) is not None:
            model.config.get_text_config(decoder=True).max_position_embeddings = positions
    cells = list(itertools.starmap(Cell, itertools.product(models.tasks, batch_sizes, temperatures, contexts)))
    done = json.loads(resume.read_text())["cells"] if resume is not None else []
    return compared(models, cells, done, num_prompts, max_new_tokens, threshold, packed)


if __name__ == "__main__":
    main(__doc__, compare)
