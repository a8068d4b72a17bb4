"""Every way to decode one target, against each other: same prompts, same limits, one process. Resumes.

python benchmarks/compare.py --work_dir out/gsm8k --num_answers 3675 --steps 2000 --contexts 0 \
    --output benchmarks/results/compare_7350.json
python benchmarks/compare.py --pair --output benchmarks/results/compare_pair.json
python benchmarks/compare.py --pair --quick --output out/compare_quick.json

Compared are plain `generate()`; transformers' prompt lookup, assisted generation and DFlash; and Eagle3, DFlash and
DSpark of this package. DSpark verifies whole blocks, stops at a confidence threshold, is scheduled by step times that
the same run measures first, or decodes as users get it without an option. `--pair` takes the shipped target and draft,
and what needs no training besides.

A cell is a task, a batch size, a temperature and a context. For each call of a cell all methods decode the same
prompts, one after the other, in an order that rotates from call to call, after a short warm-up. Times are of whole
`generate()` calls, prefill included, divided by the tokens that came out. A speed-up is the median of plain decoding
over the median of the method. Greedy outputs are compared with plain decoding's row by row. Sampled answers go on
until the limit, so that those of all methods have the same length. transformers' assisted generation takes one
sequence: in batches its methods have no times, and the result says why.

With `--packed`, all methods multiply by packed copies of the weights, plain decoding and those of transformers, too:
the stronger baseline on a CPU. The line "plain, as it is" is plain `generate()` as users run it.

Long contexts are the prompt after other text of its task, up to as many tokens as asked for, or as the target's
`max_position_embeddings` leaves beside the answer. The targets here have 1024 positions and were trained on shorter
texts; so were the drafts. `--positions` lets them read more (`--contexts 1024 8192 --positions 9216`): what they write
there is poor, and drafts guess it less often, but the time of a token after that many others is measured.

`--rivals fill_in` compares DSpark with transformers' own methods alone, of which its DFlash is the fastest. The
assistant drafts as transformers does by default: 20 tokens at most, until one's probability is below .4.

The full run trains two models if they are missing (ten minutes each on two quiet cores) and calibrates, and then takes
about two hours; `--pair` takes one, `--pair --quick` five minutes, most of which go into profiling. Finished calls go
to `<output>.partial.jsonl`: the same command goes on there after an interruption, also with more cells, and the file
is deleted at the end. `--quick` is a smaller run, of few prompts, and no evidence of small differences.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import domains
from compare_drafts import RIVALS, Models, Recipe, shipped_models, trained_models
from compare_prompts import Cell, prompts_of, room_for_prompts, with_room
from compare_summary import markdown, summarise
from pair import WARM_UP_TOKENS, decoding, kernels, provenance_of, scheduler, write_result
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_dspark import ConfidenceThreshold, FullBlock, Policy, ThroughputTable, profile_throughput
from hf_dspark.files import Journal, digest
from hf_dspark.measuring.results import describe_draft, describe_policy, describe_target
from hf_dspark.measuring.timed_decoding import TimedCall, timed_call
from hf_dspark.models.auto import is_draft
from hf_dspark.targets.fingerprint import fingerprint

LOOKUP_TOKENS = 10  # as transformers' documentation has it
LEAST_CALLS = 5  # of a cell, however large the batch
QUICK = {"num_prompts": 3, "max_new_tokens": 32, "batch_sizes": [1, 4], "contexts": [0], "tasks": ["math"]}


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Args:
        name (`str`): What the tables call it.
        assistant (`PreTrainedModel`, *optional*): Who drafts.
        policy ([`Policy`], *optional*): How much of a block is verified, of drafts of this package.
        options (`Mapping`): For `generate()`.
        is_native (`bool`): Part of transformers; all but plain decoding take one sequence.
        packed (`bool`): Whether target and assistant multiply by packed copies of their weights.
    """

    name: str
    assistant: PreTrainedModel | None = None
    policy: Policy | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_native: bool = False
    packed: bool = False


def methods_for(models: Models, cost: ThroughputTable, threshold: float, packed: bool = False) -> list[Method]:
    """Return everything that can be compared with these models, plain decoding first."""
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    native = [
        Method("prompt lookup", options=lookup, is_native=True),
        Method("assistant", models.assistant, is_native=True),
        Method("transformers' DFlash", models.fill_in, options={"speculation_type": "dflash"}, is_native=True),
    ]
    ours = [
        Method("Eagle3", models.eagle3, FullBlock()),
        Method("DFlash", models.dflash, FullBlock()),
        Method("DSpark", models.dspark, FullBlock()),
        Method("DSpark, threshold", models.dspark, ConfidenceThreshold(threshold)),
        Method("DSpark, scheduled", models.dspark, scheduler(cost)),
        Method("DSpark, default", models.dspark),  # trees and copied branches where they pay
    ]
    drafted = [method for method in [*native[1:], *ours] if method.assistant is not None]
    found = [replace(method, packed=packed) for method in (Method("plain"), native[0], *drafted)]
    return [*found, Method("plain, as it is")] if packed else found


def can_decode(method: Method, cell: Cell) -> bool:
    """Tell whether a method takes as many sequences as a cell has."""
    return cell.batch_size == 1 or not method.is_native


def give_positions(models: Models, positions: int) -> None:
    """Let all models read longer texts than they were made for: rotary embeddings have no end."""
    for model in (models.target, models.dspark, models.dflash, models.eagle3, models.fill_in, models.assistant):
        if model is not None:
            model.config.get_text_config(decoder=True).max_position_embeddings = positions


# ---- decoding


@contextmanager
def counted_passes(target: PreTrainedModel) -> Iterator[list[int]]:
    """Count the forward passes of a target: one entry each."""
    passes: list[int] = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()


def decode(
    target: PreTrainedModel, method: Method, prompts: list[list[int]], seed: int, **options: Any
) -> tuple[TimedCall, int]:
    """Return one timed call by a method, and its number of passes through the target."""
    draft = method.assistant if is_draft(method.assistant) else None
    others = {"assistant_model": method.assistant} if draft is None and method.assistant is not None else {}
    with ExitStack() as stack:
        if draft is not None:
            stack.enter_context(decoding(draft, method.policy))
        stack.enter_context(kernels(target, method.assistant, method.packed))
        passes = stack.enter_context(counted_passes(target))
        call = timed_call(target, prompts, seed, draft, **options, **method.options, **others)
    return call, len(passes)


def rotated(methods: Sequence[Method], call: int) -> list[Method]:
    """Return the methods in the order of a call: with as many calls as methods each is first, and last, once."""
    first = call % len(methods)
    return [*methods[first:], *methods[:first]]


def compared_call(
    target: PreTrainedModel, methods: Sequence[Method], prompts: list[list[int]], call: int, **options: Any
) -> dict[str, dict[str, Any]]:
    """Decode some prompts by every method, one after the other; return what each took and gave."""
    found = {method.name: decode(target, method, prompts, call, **options) for method in rotated(methods, call)}
    plain = found["plain"][0].token_ids
    runs = {}
    for method in methods:
        timed, passes = found[method.name]
        same = sum(a == b for a, b in zip(timed.token_ids, plain, strict=True))
        runs[method.name] = {
            "seconds": timed.seconds,
            "prefill_seconds": timed.prefill_seconds,
            "tokens": sum(map(len, timed.token_ids)),
            "passes": passes,
            "identical": None if options["do_sample"] else same,
        }
    return runs


def options_for(cell: Cell, num_new_tokens: int) -> dict[str, Any]:
    """Return options for `generate()` with which all methods write equally many tokens.

    Greedy answers are the same. Sampled ones would have different lengths, and a prefill weighs more in a short one.
    """
    least = {"min_new_tokens": num_new_tokens} if cell.temperature else {}
    return {"max_new_tokens": num_new_tokens, **least, **cell.sampling}


# ---- the run


def measured_cost(models: Models, journal: Journal) -> ThroughputTable:
    """Return what rounds of DSpark cost on this machine; measured once a run."""
    for entry in journal.entries:
        if "table" in entry:
            return ThroughputTable.from_sglang(entry["table"])
    longest = models.target.config.get_text_config(decoder=True).max_position_embeddings
    context_lengths = (min(64, longest // 16), min(512, longest // 2))
    profile = profile_throughput(models.target, models.dspark, context_lengths=context_lengths, cache=False)
    journal.append({"table": profile.table.to_sglang()})
    return profile.table


def settings_of(models: Models, max_new_tokens: int, threshold: float, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an unfinished run must share to be gone on with; `origin` is from `provenance`."""
    drafts = ("dspark", "dflash", "eagle3", "fill_in", "assistant")
    return {
        "target": fingerprint(models.target),
        **{name: None if getattr(models, name) is None else fingerprint(getattr(models, name)) for name in drafts},
        "temperatures": digest([models.dspark.config.sts_temperatures, models.dspark.config.confidence_fits]),
        "prompts": digest(models.tasks),
        "positions": models.target.config.get_text_config(decoder=True).max_position_embeddings,
        "max_new_tokens": max_new_tokens,
        "threshold": threshold,
        **{name: origin.get(name) for name in ("revision", "torch", "transformers", "device", "threads")},
    }


def num_calls(num_prompts: int, batch_size: int) -> int:
    return max(math.ceil(num_prompts / batch_size), min(num_prompts, LEAST_CALLS))


def compare(
    models: Models,
    cells: Sequence[Cell],
    output: Path,
    num_prompts: int = 24,
    max_new_tokens: int = 128,
    threshold: float = 0.5,
    packed: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure all methods in all cells, and write the result.

    Args:
        models ([`Models`]): Who is compared, on what.
        cells (`Sequence[Cell]`): Where.
        output (`Path`): The result file; finished calls are kept in `<output>.partial.jsonl` meanwhile.
        num_prompts (`int`): Per cell; at least five calls are made if there are as many prompts.
        max_new_tokens (`int`): Of an answer, at most.
        threshold (`float`): Of DSpark's confidence threshold.
        packed (`bool`): Whether all methods multiply by packed copies of the weights.
        origin (`Mapping`, *optional*): The provenance of the run.

    Returns:
        `dict`: What the file holds.

    Raises:
        ValueError: If there is no room for prompts, or an unfinished run had other settings.
    """
    origin = origin or {}
    room = room_for_prompts(models.target, max_new_tokens)
    models, left_out = with_room(models, room)
    settings = settings_of(models, max_new_tokens, threshold, origin) | {"packed": packed}
    journal = Journal(output.with_name(f"{output.name}.partial.jsonl"), settings)
    cost = measured_cost(models, journal)
    methods = methods_for(models, cost, threshold, packed)
    done = {(entry["cell"], entry["call"]): entry for entry in journal.entries if "cell" in entry}
    for cell in tqdm(cells, desc="cells"):
        taking_part = [method for method in methods if can_decode(method, cell)]
        missing = [call for call in range(num_calls(num_prompts, cell.batch_size)) if (cell.key, call) not in done]
        if missing:
            warm_up = prompts_of(models, cell, missing[0], room)
            compared_call(models.target, taking_part, warm_up, 0, **options_for(cell, WARM_UP_TOKENS))
        for call in tqdm(missing, desc=cell.key, leave=False):
            prompts = prompts_of(models, cell, call, room)
            runs = compared_call(models.target, taking_part, prompts, call, **options_for(cell, max_new_tokens))
            entry = {"cell": cell.key, "call": call, "prompt_tokens": [len(ids) for ids in prompts], "runs": runs}
            journal.append(entry)
            done[cell.key, call] = entry
    measured = {
        cell: [done[cell.key, call] for call in range(num_calls(num_prompts, cell.batch_size))] for cell in cells
    }
    result = {
        "provenance": origin,
        "target": describe_target(models.target),
        "models": dict(models.facts or {}),
        "methods": {method.name: describe(method) for method in methods},
        "packed": packed,
        "max_new_tokens": max_new_tokens,
        "longest_prompt": room,
        "prompts_left_out": left_out,
        "step_times": cost.to_sglang(),
        **summarise(
            [(asdict(cell), entries) for cell, entries in measured.items()],
            {method.name: method.is_native for method in methods},
        ),
    }
    write_result(output, result)
    journal.remove()
    return result


def describe(method: Method) -> dict[str, Any]:
    """Return what a reader of the result wants to know of a method."""
    facts: dict[str, Any] = {"options": dict(method.options), "native": method.is_native}
    if method.assistant is not None:
        drafts = is_draft(method.assistant)
        facts |= describe_draft(method.assistant) if drafts else {"weights": fingerprint(method.assistant)}
        facts["parameters"] = sum(part.numel() for part in method.assistant.parameters())
    return facts | {"policy": None if method.policy is None else describe_policy(method.policy)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work_dir", default="out/domains", help="data, target and drafts; what is missing is trained"
    )
    parser.add_argument("--pair", action="store_true", help="compare the shipped pair instead")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="of each training in --work_dir")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS, help="what else is trained")
    parser.add_argument("--num_answers", type=int, default=Recipe.num_prompts, help="to train on, in each regime")
    parser.add_argument(
        "--block_size", type=int, choices=domains.POSITION_DECAYS, default=Recipe.block_size, help="of all drafts"
    )
    parser.add_argument("--tasks", nargs="+", help="math, code, prose; all unless given")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[0, 8192], help="tokens; 0: the prompt alone")
    parser.add_argument("--positions", type=int, help="let the models read this many; default: as many as they have")
    parser.add_argument("--num_prompts", type=int, default=24, help="per cell")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threshold", type=float, default=0.5, help="of the confidence")
    parser.add_argument("--quick", action="store_true", help=f"a smaller run: {QUICK}")
    parser.add_argument("--output", default="benchmarks/results/compare.json")
    parser.add_argument("--packed", action="store_true", help="packed weights for all, plain decoding too")
    options = parser.parse_args()
    origin = provenance_of(parser, options)
    if options.quick:
        vars(options).update(QUICK)
    recipe = Recipe(options.num_answers, steps=options.steps, block_size=options.block_size)
    models = shipped_models() if options.pair else trained_models(Path(options.work_dir), recipe, options.rivals)
    if options.positions:
        give_positions(models, options.positions)
    tasks = options.tasks or list(models.tasks)
    unknown = sorted(set(tasks) - set(models.tasks))
    if unknown:
        raise ValueError(f"there is no task {', '.join(unknown)} here: choose from {', '.join(models.tasks)}")
    grid = itertools.product(tasks, options.batch_sizes, options.temperatures, options.contexts)
    cells = list(itertools.starmap(Cell, grid))
    result = compare(
        models,
        cells,
        Path(options.output),
        options.num_prompts,
        options.max_new_tokens,
        options.threshold,
        options.packed,
        origin,
    )
    print(markdown(result))


if __name__ == "__main__":
    main()
