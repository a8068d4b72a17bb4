"""The tables of the documents, made from the result files: no number in them is typed by hand.

python benchmarks/figures/tables.py

Rewrites what stands between `<!-- table: NAME -->` and `<!-- end of table -->` in every page. `make figures` runs it.
"""

import itertools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_dspark.measuring.tables import markdown_table, number

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMOLLM2 = ROOT / "examples" / "smollm2" / "draft" / "results"
SOURCES_PAGE = ROOT / "benchmarks" / "README.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MACHINES = {"Intel": "Xeon", "avx512": "EPYC, AVX-512", "AMD": "EPYC, AVX2"}  # the first whose mark is in the name
DRAFTS = {f"{name.lower()}_{count}": f"{name}, {count} layers" for name in ("DSpark", "DFlash") for count in (2, 5)}
DRAFTS |= {"v4_2": "DSpark, 2 layers of DeepSeek-V4", "eagle3": "EAGLE-3, 1 layer", "mtp": "MTP module, 1 layer"}
KINDS = {"dspark": "DSpark, 3 layers", "dflash": "DFlash, 3 layers", "eagle3": "EAGLE-3, 1 layer"}
METHODS = {"Eagle3": "EAGLE-3", "DSpark, threshold": "DSpark, confidence threshold", "plain, as it is": "plain, as is"}
TASKS = {
    "gsm8k": "GSM8K", "math500": "MATH500", "aime25": "AIME25", "mbpp": "MBPP", "humaneval": "HumanEval",
    "mt-bench": "MT-Bench", "arena-hard-v2": "Arena-Hard", "mt_bench": "multi-turn chat", "qa": "question answering",
    "math_reasoning": "mathematics", "rag": "retrieval",
}  # fmt: skip
CHAT_DOMAINS = {
    "mathematics: GSM8K, MATH500, AIME25": ("paper", ("gsm8k", "math500", "aime25")),
    "code: MBPP, HumanEval": ("paper", ("mbpp", "humaneval")),
    "chat: MT-Bench, Arena-Hard": ("paper", ("mt-bench", "arena-hard-v2")),
    "Spec-Bench": ("spec_bench", ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")),
}
AHEAD = {"hits, %": "hits", "ahead": "ahead", "if they had all features": "ahead_with_features", "tails": "tails"}
REGIMES = {"greedy": "greedy", "sampled": "temperature 1", "truncated": "truncated", "temperature 1": "temperature 1"}
SUITES = {"paper": ("paper-greedy", "paper-sampled"), "spec_bench": ("spec_bench-greedy", "spec_bench-sampled")}
Result = Mapping[str, Any]
Rows = Iterable[Sequence[Any]]


@dataclass(frozen=True)
class Table:
    """The result files of a table, and what makes its rows of them: the titles first."""

    files: Sequence[str]
    make: Callable[[], Rows]


TABLES: dict[str, Table] = {}


def table(*files: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Return a decorator that makes a table of these result files known under the function's name."""

    def register(make: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[make.__name__] = Table(files, make)
        return make

    return register


def path_of(name: str) -> Path:
    """Return where a result file is: among the results, or beside the draft that it belongs to."""
    beside = SMOLLM2 / f"{name}.json"
    return beside if beside.exists() else RESULTS / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    return json.loads(path_of(name).read_text())


def machine(result: Result) -> str:
    """Return the short name of the machine that a result was measured on."""
    device = result["provenance"]["device"]
    return next((name for mark, name in MACHINES.items() if mark in device), device)


def regime(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def size_of(geometry: str) -> str:
    return geometry.replace("qwen", "Qwen").replace("b", "B")


def percent(share: float | None, digits: int = 1) -> str:
    return number(None if share is None else 100 * share, digits)


def best_in_bold(rows: Sequence[Sequence[float | None]]) -> list[list[str]]:
    """Return the numbers of a table as text, the largest of each column in bold."""
    largest = [max(value for value in column if value is not None) for column in zip(*rows, strict=True)]
    return [
        [f"**{number(value)}**" if value == most else number(value) for value, most in zip(row, largest, strict=True)]
        for row in rows
    ]


def pooled_tau(rows: Sequence[Result]) -> float:
    return sum(row["tau"] * row["rounds"] for row in rows) / sum(row["rounds"] for row in rows)


# ---- the shipped pair and larger models


@table("speed")
def speed() -> Rows:
    result = load("speed")
    yield "", "same kernels", "as it is", "τ", "verified per round", "tokens/s", "identical outputs"
    for cell in result["cells"]:
        speedups = number(cell.get("speedup_same_kernels")), number(cell["speedup"])
        facts = number(cell["tau"]), number(cell["proposed_per_round"]), number(cell["tokens_per_second"], 0)
        yield (f"{regime(cell['temperature'])}, {cell['policy']}", *speedups, *facts, identical_outputs(cell, result))


def identical_outputs(cell: Result, result: Result) -> str:
    same = cell["identical_outputs"]
    return "same distribution" if same is None else f"{same} of {result['num_prompts']}"


@table("speed")
def readme_pair() -> Rows:
    """The default policy against the faster one of the measured ways to decode plainly."""
    result, names = load("speed"), ("speedup_same_kernels", "speedup")
    cells = {cell["temperature"]: cell for cell in result["cells"]}  # of each temperature the last: the default policy
    yield "", "τ", "plain: tokens/s", "with the draft: tokens/s", "speed-up", "identical outputs"
    for temperature, cell in cells.items():
        speedup = min(cell[name] for name in names if cell.get(name))
        rates = [number(rate, 0) for rate in (cell["tokens_per_second"] / speedup, cell["tokens_per_second"])]
        numbers = number(cell["tau"]), *rates, f"**{number(speedup)}**"
        yield regime(temperature), *numbers, identical_outputs(cell, result)


def alternatives(name: str, batch_sizes: Sequence[int]) -> Rows:
    """Every way to decode in one comparison: speed-ups over plain `generate()`."""
    result = load(name)
    cells = [cell for size in batch_sizes for cell in result["cells"] if cell["batch_size"] == size]
    methods = [method for method in result["methods"] if method != "plain"]
    names = [regime(cell["temperature"]).replace("temperature", "T =") for cell in cells]
    if len(batch_sizes) > 1:
        sizes = ["1 row" if cell["batch_size"] == 1 else f"{cell['batch_size']} rows" for cell in cells]
        names = [f"{name}, {size}" for name, size in zip(names, sizes, strict=True)]
    yield "", *names, "tokens per pass, greedy", "T = 1"
    shown = best_in_bold([[cell["methods"][method].get("speedup") for cell in cells] for method in methods])
    for method, speedups in zip(methods, shown, strict=True):
        taus = (number(cell["methods"][method]["tokens_per_pass"]) for cell in cells[:2])
        yield METHODS.get(method, method), *speedups, *taus


TABLES["same_kernels"] = Table(["compare_native_amx"], partial(alternatives, "compare_native_amx", [1]))
TABLES["all_methods"] = Table(["compare_7350"], partial(alternatives, "compare_7350", [1, 4, 16]))


@table("compare_long_1024_amx", "compare_long_8192_amx", "compare_long")
def long_prompts() -> Rows:
    methods = ("DSpark, scheduled", "DSpark", "DSpark, threshold", "prompt lookup", "transformers' DFlash")
    yield "prompt tokens", "rows", "", "machine", "scheduled", "whole", "threshold", "prompt lookup", "DFlash (tf)"
    for result in map(load, TABLES["long_prompts"].files):
        for cell in result["cells"]:
            speedups = [number(cell["methods"][method].get("speedup")) for method in methods]
            yield cell["context"], cell["batch_size"], regime(cell["temperature"]), machine(result), *speedups


@table("loop_batch", "assistants")
def batches() -> Rows:
    """Batches with the shipped draft, and with an ordinary model that drafts for the same target."""
    yield "who drafts", "rows", "greedy", "truncated", "whole blocks: greedy", "truncated", "identical rows"
    for drafter, result in zip(("the draft", "an assistant"), map(load, TABLES["batches"].files), strict=True):
        cells = {(cell["rows"], cell["regime"]): cell for cell in result["cells"]}
        for size in dict.fromkeys(size for size, _ in cells):
            pair = [cells[size, name] for name in ("greedy", "truncated")]
            speedups = [cell["speedup"][policy] for policy in ("scheduled", "full block") for cell in pair]
            yield drafter, size, *map(number, speedups), f"{pair[0]['identical_rows']['scheduled']} of {size}"


@table("loop_0.6b", "loop_0.6b_amx", "loop_1.7b", "loop_1.7b_amx", "loop_4b_amx")
def larger_models() -> Rows:
    """Random weights of larger models, with recorded acceptance."""
    yield "size of", "machine", "rows", "same kernels: greedy", "truncated", "as it is: greedy", "truncated", "τ"
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in map(load, TABLES["larger_models"].files):
        for cell in result["cells"]:
            found.setdefault((cell["geometry"], machine(result), cell["rows"]), {})[cell["regime"]] = cell
    for (geometry, name, count), cells in found.items():
        ways = itertools.product(("speedup_same_kernels", "speedup"), ("greedy", "truncated"))
        speedups = [cells.get(way, {}).get(baseline) for baseline, way in ways]
        yield size_of(geometry), name, count, *map(number, speedups), number(next(iter(cells.values()))["tau"])


@table("compiled_pair", "compiled_0.6b", "loop_h200_4b")
def compiled_rounds() -> Rows:
    """Compiled rounds against eager ones, and against plain decoding that transformers compiles."""
    yield "target", "machine", "rows", "", "of an eager call", "over plain", "over compiled plain", "τ"
    for result in map(load, TABLES["compiled_rounds"].files):
        for cell in result["cells"]:
            facts = {key: value["full block"] if isinstance(value, dict) and "full block" in value else value
                     for key, value in cell.items()}  # fmt: skip
            eager = facts.get("speedup_unpacked", facts["speedup"]) / facts["speedup_compiled"]
            size = size_of(cell["geometry"]) if "geometry" in cell else "shipped pair"
            ratios = eager, facts["speedup_compiled"], facts["speedup_over_compiled"], facts["tau"]
            yield size, machine(result), cell["rows"], cell["regime"], *map(number, ratios)


@table("hybrid_replay")
def hybrid_sizes() -> Rows:
    yield "", "τ", "as it is", "same kernels", "second reading, of a plain step"
    for cell in load("hybrid_replay")["cells"]:
        numbers = map(cell.get, ("tau", "speedup", "speedup_same_kernels", "reading_again"))
        yield cell["regime"], *map(number, numbers)


# ---- drafting


@table("top_k_amx", "top_k_amx_float32", "top_k_avx512_amd", "top_k_avx512_amd_float32")
def candidates() -> Rows:
    """Drafting among candidates over drafting among 152 thousand tokens."""
    yield "machine", "", "greedy: 64", "256", "T = 1: 64", "256", "greedy, all tokens: ms"
    for result in map(load, TABLES["candidates"].files):
        cells = [result["drafting"][way] for way in ("greedy", "temperature 1")]
        ratios = [cell["candidates"][count]["ratio"] for cell in cells for count in ("64", "256")]
        yield machine(result), result["dtype"], *map(number, ratios), number(cells[0]["full_ms"], 0)


@table("domains")
def kinds_of_drafts() -> Rows:
    """Tokens per round of seven drafts of one target on three domains."""
    found = load("domains")["drafts"]
    columns = [(domain, name) for name in ("temperature 1", "greedy") for domain in ("math", "code", "prose")]
    yield "τ", "M parameters", *(f"{domain}, {'T = 1' if name != 'greedy' else name}" for domain, name in columns)
    taus = [[found[draft]["measured"][domain][name]["tau"] for domain, name in columns] for draft in DRAFTS]
    for draft, row in zip(DRAFTS, best_in_bold(taus), strict=True):
        yield DRAFTS[draft], number(found[draft]["parameters"] / 1e6, 1), *row


@table("calibration")
def calibration() -> Rows:
    yield "", "rounds", "ECE raw, %", "ECE calibrated, %", "AUC"
    for name, part in load("calibration")["regimes"].items():
        errors = percent(part["mean_ece_raw"]), percent(part["mean_ece_calibrated"])
        yield REGIMES[name], f"{part['num_rounds']:,}", *errors, number(part["conditional_auc"])


# ---- trees


@table("trees_speed")
def trees_tau() -> Rows:
    taus = {(row["policy"], row["regime"]): number(row["tau"]) for row in load("trees_speed")["rows"]}
    yield "τ", *map(REGIMES.get, ("greedy", "sampled"))
    for policy in ("whole blocks", "trees of 7", "trees of 15", "trees of 31"):
        yield policy.replace("whole blocks", "chains of 7"), taus[policy, "greedy"], taus[policy, "sampled"]


@table("trees_speed")
def trees_speed() -> Rows:
    yield "", "policy", "nodes", "τ", "round, ms", "over plain, median", "over scheduled chains, all answers"
    for row in load("trees_speed")["rows"]:
        milliseconds = sum(row[f"{part}_ms"] for part in ("draft", "verify", "rest"))
        ratios = row["speedup_same_kernels"], row["over_scheduled_chains_in_all"]
        facts = number(row["nodes"], 1), number(row["tau"]), number(milliseconds, 1)
        yield REGIMES[row["regime"]], row["policy"], *facts, *map(number, ratios)


@table("trees_copies")
def prompt_lookup() -> Rows:
    """Branches by prompt lookup, on prompts that ask for a repetition and on others."""
    ways = {
        "prompt lookup": "transformers' prompt lookup", "copies alone": "`PromptLookup`", "chain": "draft, chains",
        "tree": "draft, trees", "tree, copies": "draft, trees and prompt lookup", "default": "default",
    }  # fmt: skip
    found = {(row["way"], row["prompts"]): row["over_plain"] for row in load("trees_copies")["rows"]}
    kinds = dict.fromkeys(kind for _, kind in found)
    yield "over plain", *kinds
    shown = best_in_bold([[found[way, kind] for kind in kinds] for way in ways])
    for label, row in zip(ways.values(), shown, strict=True):
        yield label, *row


@table("trees_answers")
def answers() -> Rows:
    """Prompts that come again, with a memory of earlier answers and without."""
    rows = load("trees_answers")["rows"]
    taus = {(row["way"], row["regime"], row["epoch"]): row["tau"] for row in rows if "tau" in row}
    last = max(row["epoch"] for row in rows)
    yield "τ", "greedy", "greedy, again", "temperature 1", "temperature 1, again"
    for assistant, name in (("lookup", "`PromptLookup`"), ("draft", "default")):
        for way, more in ((assistant, ""), (f"{assistant}, answers", ", earlier answers")):
            places = itertools.product(("greedy", "sampled"), (1, last))
            yield name + more, *(number(taus[way, regime, epoch]) for regime, epoch in places)


@table("trees_blocks")
def verified_as_a_whole() -> Rows:
    yield "temperature", "τ, token by token", "τ, as a whole", "gain, %"
    for row in load("trees_blocks")["rows"]:
        singly, jointly = row["token_by_token"], row["as_a_whole"]
        yield row["temperature"], number(singly), number(jointly), percent(jointly / singly - 1)


# ---- SmolLM2


def suite(name: str) -> Rows:
    """The shipped draft under its default policy, task by task: each speed-up is one of whole calls."""
    found = [load(file)["tasks"] for file in SUITES[name]]
    yield "", "greedy: τ", "speed-up", "temperature 1: τ", "speed-up"
    for task in (task for task in found[0] if task != "all"):
        yield TASKS.get(task, task), *(cell for part in found for cell in tau_and_speedup(part[task]))
    yield "mean", *(cell for part in found for cell in ("", mean_speedup(part)))


def tau_and_speedup(part: Result) -> tuple[str, str]:
    return number(part["tau"]), number(part["speedup"]["ratio_of_medians"])


def mean_speedup(tasks: Mapping[str, Result]) -> str:
    mean = statistics.mean(part["speedup"]["ratio_of_medians"] for task, part in tasks.items() if task != "all")
    return f"**{number(mean)}**"


@table(*SUITES["paper"], *SUITES["spec_bench"])
def chat_model() -> Rows:
    """The same by domain."""
    yield "", "greedy: τ", "speed-up", "temperature 1: τ", "speed-up"
    for label, (name, tasks) in CHAT_DOMAINS.items():
        row: list[str] = []
        for file in SUITES[name]:
            parts = [part for task, part in load(file)["tasks"].items() if task in tasks]
            speedup = statistics.mean(part["speedup"]["ratio_of_medians"] for part in parts)
            row += [number(pooled_tau(parts)), f"**{number(speedup)}**"]
        yield label, *row


@table(*(f"smollm2_avx2_{name}" for names in SUITES.values() for name in names))
def smollm2_avx2() -> Rows:
    """The same draft in float32 on a processor without units for bfloat16, and whether greedy answers are the same."""
    yield "", "greedy: τ", "speed-up", "same answers", "temperature 1: τ", "speed-up"
    for names in SUITES.values():
        greedy, sampled = (load(f"smollm2_avx2_{name}")["tasks"] for name in names)
        same = {task: f"{part['speedup']['identical']} of {part['turns']}" for task, part in greedy.items()}
        for task in (task for task in greedy if task != "all"):
            yield TASKS.get(task, task), *tau_and_speedup(greedy[task]), same[task], *tau_and_speedup(sampled[task])
        yield "mean", "", mean_speedup(greedy), same["all"], "", mean_speedup(sampled)


@table("smollm2_tau_paper")
def smollm2_kinds() -> Rows:
    """Tokens per round of drafts of several kinds that were trained alike, over the tasks of each domain."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for row in load("smollm2_tau_paper")["rows"]:
        found.setdefault((row["kind"], row["domain"], row["regime"]), []).append(row)
    kinds, domains, regimes = (dict.fromkeys(parts) for parts in zip(*found, strict=True))
    columns = [(domain, name) for name in regimes for domain in domains]
    yield "τ", *(f"{domain}, {REGIMES[name]}" for domain, name in columns)
    taus = {kind: [pooled_tau(found[(kind, *column)]) for column in columns] for kind in kinds}
    for kind, row in zip(kinds, best_in_bold([*taus.values()]), strict=True):
        yield KINDS[kind], *row
    yield "DSpark over DFlash", *(number(a / b) for a, b in zip(taus["dspark"], taus["dflash"], strict=True))


@table("smollm2_speed_spec_bench")
def smollm2_ways() -> Rows:
    """Every way to decode Spec-Bench greedily, over plain `generate()`: a draft and its rivals, trained alike."""
    result = load("smollm2_speed_spec_bench")
    cells = {size: [cell for cell in result["cells"] if cell["batch_size"] == size] for size in (1, 4)}
    yield "", *(TASKS.get(cell["task"], cell["task"]) for cell in cells[1]), "mean", "mean, 4 rows"
    methods, columns = [method for method in result["methods"] if method != "plain"], []
    for method in methods:
        taken = {size: [cell["methods"][method].get("speedup") for cell in part] for size, part in cells.items()}
        means = [None if None in part else statistics.mean(part) for part in taken.values()]
        columns.append([*taken[1], *means])
    for method, row in zip(methods, best_in_bold(columns), strict=True):
        yield METHODS.get(method, method), *row


@table("smollm2_speed_paper")
def smollm2_kinds_speed() -> Rows:
    """Speed-ups of whole blocks of three kinds of drafts that were trained alike, greedily, task by task."""
    cells, kinds = load("smollm2_speed_paper")["cells"], ("DSpark", "DFlash", "Eagle3")
    yield "", *(TASKS.get(cell["task"], cell["task"]) for cell in cells)
    taken = best_in_bold([[cell["methods"][kind]["speedup"] for cell in cells] for kind in kinds])
    for kind, row in zip(kinds, taken, strict=True):
        yield METHODS.get(kind, kind), *row


@table("smollm2_trials")
def smollm2_trials() -> Rows:
    """What small changes of the draft do after a short training, on held-out answers at temperature 1."""
    yield "", "steps", "expected τ", "accepted, position 1", "later positions"
    for row in load("smollm2_trials")["rows"]:
        acceptance = [row[name] for place in range(1, 8) if (name := f"acceptance_{place}") in row]
        numbers = row["tau"], acceptance[0], statistics.mean(acceptance[1:])
        yield row["name"].replace("Eagle3", "EAGLE-3"), row["steps"], *map(number, numbers)


@table("smollm2_confidence")
def smollm2_confidence() -> Rows:
    """Calibration on prompts that were not fitted on."""
    errors = ("raw", "calibrated", "fitted_on_the_other_half", "of_a_true_head")
    yield "", "", "rounds", "ECE raw, %", "calibrated", "by its domain", "of a true head", "AUC"
    for row in load("smollm2_confidence")["rows"]:
        shown = (percent(row[f"mean_ece_{name}"]) for name in errors)
        yield row["domain"], REGIMES[row["regime"]], f"{row['num_rounds']:,}", *shown, number(row["conditional_auc"])


@table("smollm2_distribution")
def smollm2_distribution() -> Rows:
    """How well acceptance can be told at temperature 1: by the head, and by the probability of acceptance itself."""
    yield "", "rounds", "AUC of the head", "of the distribution itself"
    for row in load("smollm2_distribution")["rows"]:
        areas = row["conditional_auc"], row["auc_of_the_distribution"]
        yield row["domain"], f"{row['num_rounds']:,}", *map(number, areas)


for _name in SUITES:
    TABLES[f"smollm2_{_name}"] = Table(SUITES[_name], partial(suite, _name))


# ---- the rest


@table("few_rows_amx", "few_rows_avx512_amd", "few_rows_avx2_amd")
def small_batch_gemm() -> Rows:
    """Products of eight rows by the ways that hf_dspark has, over PyTorch's."""
    yield "machine", "", "exchanged factors", "oneDNN", "packed weights"
    for result in map(load, TABLES["small_batch_gemm"].files):
        large = [{"dtype": "float32", **cell} for cell in result["cells"] if cell["rows"] == 8]
        large = [cell for cell in large if cell["outputs"] * cell["inputs"] >= 2**20]
        for dtype in dict.fromkeys(cell["dtype"] for cell in large):
            cells = [cell for cell in large if cell["dtype"] == dtype]
            ways = ("transposed_ratio", "ratio", "packed_ratio")
            ratios = ([cell[way] for cell in cells if way in cell] for way in ways)
            yield machine(result), dtype, *(number(statistics.median(part) if part else None) for part in ratios)


@table("memory", "training_step")
def resources() -> Rows:
    memory, step = load("memory"), load("training_step")
    decoded = f"memory of {memory['rows']} rows of {memory['new_tokens']} new tokens, over plain generate()"
    yield "", "ratio"
    yield decoded, number(memory["cells"]["over_plain"])
    yield "the same without the draft's KV cache", number(memory["cells"]["over_plain_without_draft_cache"])
    for part in ("time", "memory"):
        yield f"{part} of a training step, over dense attention and logits", number(step[f"{part}_ratio"])


@table("operations", "operations_smollm2")
def operations() -> Rows:
    """What a round asks of a device, beside a plain step."""
    yield "pair", "drafts", "plain step", "round", "over plain", "with views", "waits"
    for pair, file in (("shipped", "operations"), ("SmolLM2", "operations_smollm2")):
        for name, phases in load(file)["cells"].items():
            step, whole = phases["plain step"], phases["round"]
            with_views = [part["operations"] + part["views"] for part in (whole, step)]
            ratios = whole["operations"] / step["operations"], with_views[0] / with_views[1]
            counts = (number(part["operations"], 0) for part in (step, whole))
            kind = name.replace("Scheduler", "trees of 15")
            yield pair, kind, *counts, *map(number, ratios), number(whole["waits"], 1)


@table("host")
def host_time() -> Rows:
    """What rounds take outside of both models, at an earlier revision and now."""
    yield "", "before: ms", "now: ms", "ratio", "ratio of whole rounds"
    for cell in load("host")["cells"]:
        milliseconds = (number(1e3 * each) for each in cell["seconds"]["host"])
        yield REGIMES[cell["regime"]], *milliseconds, number(cell["ratios"]["host"]), number(cell["ratios"]["round"])


@table("learning")
def learning() -> Rows:
    """What a draft learns by itself, and what one costs that never pays."""
    yield "speed of", "over", "", "median of the calls", "all calls together"
    for cell in load("learning")["cells"]:
        for name, over in (("learnt", "measured"), ("learnt", "plain"), ("random", "plain")):
            ratio = f"{name}_over_{over}"
            yield name, over, REGIMES[cell["regime"]], number(cell[ratio]), number(cell[f"{ratio}_in_all"])


@table("tasks")
def tasks() -> Rows:
    """An attached draft in tasks: most of them are not those that the shipped pair has learnt from."""
    cells = load("tasks")["cells"]
    named = dict.fromkeys(cell["task"] for cell in cells)
    yield "over", "", "rows", *(TASKS.get(task, task) for task in named)
    sizes = dict.fromkeys((cell["regime"], cell["rows"]) for cell in cells)
    rivals = {"plain": "plain", "lookup": "prompt lookup", "economize": "that of economize"}
    for over, (regime, rows) in itertools.product(rivals, sizes):
        own = {cell["task"]: cell for cell in cells if (cell["regime"], cell["rows"]) == (regime, rows)}
        if all(f"over_{over}_in_all" in cell for cell in own.values()):
            yield rivals[over], REGIMES[regime], rows, *(number(own[task][f"over_{over}_in_all"]) for task in named)


@table("finetune")
def finetune() -> Rows:
    yield "domain", "", "τ before", "τ after", "change, %"
    result = load("finetune")
    for name in ("sampled", "greedy"):
        for domain, part in result[name].items():
            before, after = part["before"]["tau"], part["after"]["tau"]
            yield domain, REGIMES[name], number(before), number(after), f"{100 * (after / before - 1):+.0f}"


@table("ahead_rounds", "ahead")
def ahead_rounds() -> Rows:
    """What blocks without the newest features and tails commit."""
    compared = "τ, new blocks", "without the last features", "of a tail", "tails, % of rounds", "τ of all"
    yield "", *compared, "measured speed"
    for row in load("ahead_rounds")["rows"]:
        tau = row["tau"]
        numbers = map(number, (tau["new"], tau["lagging"], row["tau_of_tails"]))
        last = number(tau["tails"]), number(row["tails_over_new"])
        yield REGIMES[row["regime"]], *numbers, percent(row["share_of_tails"]), *last


@table("ahead")
def ahead_machines() -> Rows:
    titles = (f"{what}{when}" for when in (", greedy", ", T = 1") for what in AHEAD)
    yield "", "drafting / verifying", "blocks", *titles
    rows = load("ahead")["machines"]
    for name in dict.fromkeys(row["machine"] for row in rows):
        both = [row for row in rows if row["machine"] == name]
        numbers = ((percent if key == "hits" else number)(row[key]) for row in both for key in AHEAD.values())
        yield name, number(both[0]["draft_time"]), both[0]["blocks"], *numbers


@table("ahead_threads")
def ahead_threads() -> Rows:
    names = "without contention", "simulated", "measured"
    yield "hits, %", "τ in turns", "τ ahead", "verifying takes, times", "drafting takes, times", *names
    for run in load("ahead_threads")["runs"]:
        yield percent(run["hits"]), *map(number, (*run["tau"].values(), *run["contention"], *map(run.get, names)))


@table()
def sources() -> Rows:
    """Where every number comes from: the command, the revision and the machine of each result file."""
    yield "result", "machine", "revision", "command"
    files = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
    files |= {path.stem: path for path in sorted(SMOLLM2.glob("*-*.json"))}
    for name, path in files.items():
        result = json.loads(path.read_text())
        origin = result["provenance"]
        command = re.sub(r" --output \S+", "", origin["command"])
        link = os.path.relpath(path, SOURCES_PAGE.parent)
        yield f"[{name}]({link})", machine(result), origin.get("revision"), f"`{command}`"


def rendered(name: str, page: Path) -> str:
    """Return a table as Markdown, with a link to where its numbers come from."""
    head, *rows = TABLES[name].make()
    text = markdown_table(head, rows)
    if not TABLES[name].files:
        return f"{text}\n"
    link = "" if page == SOURCES_PAGE else os.path.relpath(SOURCES_PAGE, page.parent)
    named = f": {', '.join(TABLES[name].files)}" if page.parent == SOURCES_PAGE.parent else ""
    return f"{text}\n\n<sub>[How this was measured]({link}#sources){named}</sub>\n"


# ---- serving


@table("serving")
def serving() -> Rows:
    yield "clients", "questions before each", "transformers: tokens/s", "with the draft", "ratio", "identical answers"
    for cell in load("serving")["cells"]:
        plain, own = (statistics.median(cell["tokens_per_second"][name]) for name in ("transformers", "own"))
        same = f"{cell['identical']} of {cell['turns']} turns"
        asked = str(cell["clients"]), str(cell["common"])
        yield *asked, number(plain, 1), number(own, 1), number(own / plain), same


@table("serving_structured")
def serving_structured() -> Rows:
    yield "JSON of a schema", "τ", "time per token, of plain", "valid"
    cells = load("serving_structured")["cells"]
    for name, cell in cells.items():
        share = cell["ms_per_token"] / cells["plain"]["ms_per_token"]
        yield name, number(cell["tau"]), number(share), f"{cell['valid']} of {cell['answers']}"


def refreshed(text: str, page: Path) -> str:
    """Return a page with all its tables made anew."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"{page}: there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return match[1] + rendered(match[2], page) + match[3]

    return MARKED.sub(made, text)


def pages() -> Iterator[Path]:
    """Yield the documents that hold tables."""
    for folder in (ROOT, ROOT / "benchmarks", ROOT / "docs", ROOT / "model_cards"):
        for page in sorted(folder.glob("*.md")):
            if MARKED.search(page.read_text(encoding="utf-8")):
                yield page


def main() -> None:
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := refreshed(before, page)) != before:
            print(f"{page.relative_to(ROOT)} rewritten")
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
