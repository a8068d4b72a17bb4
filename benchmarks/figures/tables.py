"""The tables of the documents, made from the result files: no number in them is typed by hand.

python benchmarks/figures/tables.py

Rewrites what stands between `<!-- table: NAME -->` and `<!-- end of table -->` in every page. `make figures` runs it.
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dspark.measuring.tables import markdown_table, number

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMOLLM2 = ROOT / "examples" / "smollm2" / "draft" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DRAFTS = {
    "dspark_2": "DSpark, 2 layers",
    "dspark_5": "DSpark, 5 layers",
    "dflash_2": "DFlash, 2 layers",
    "dflash_5": "DFlash, 5 layers",
    "eagle3": "Eagle3, 1 layer",
}
DOMAINS = ("math", "code", "prose")
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
REGIMES = {"greedy": "greedy", "sampled": "temperature 1", "truncated": "truncated", "temperature 1": "temperature 1"}
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of cells, and the result files that they come from."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    files: Sequence[str]


def path_of(name: str) -> Path:
    """Return where a result file is: among the results, or beside the draft that it belongs to."""
    beside = SMOLLM2 / f"{name}.json"
    return beside if beside.exists() else RESULTS / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    """Return the content of a result file."""
    return json.loads(path_of(name).read_text())


def machine(result: Result) -> str:
    """Return the letter of the machine that a result was measured on; its name if the page has no letter for it."""
    device = result["provenance"]["device"]
    if "Intel" in device:
        return "A"
    if "AMD" in device:
        return "C" if "avx512" in device else "B"
    return device


def regime(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def percent(share: float | None, digits: int = 1) -> str:
    return number(None if share is None else 100 * share, digits)


def best_in_bold(rows: Sequence[Sequence[float | None]], digits: int = 2) -> list[list[str]]:
    """Return the numbers of a table as text, the largest of each column in bold."""
    largest = [max(value for value in column if value is not None) for column in zip(*rows, strict=True)]

    def shown(value: float | None, most: float) -> str:
        return f"**{number(value, digits)}**" if value == most else number(value, digits)

    return [[shown(value, most) for value, most in zip(row, largest, strict=True)] for row in rows]


# ---- speed


def speed() -> Table:
    """The shipped pair on the held-out prompts."""
    result = load("speed")
    rows = []
    for cell in result["cells"]:
        same = cell["identical_outputs"]
        rows.append(
            [
                f"{regime(cell['temperature'])}, {cell['policy']}",
                number(cell.get("speedup_same_kernels")),
                number(cell["speedup"]),
                number(cell["tau"]),
                number(cell["proposed_per_round"]),
                number(cell["tokens_per_second"], 0),
                "same distribution" if same is None else f"{same} of {result['num_prompts']}",
            ]
        )
    head = ("", "same kernels", "as it is", "τ", "verified per round", "tokens/s", "identical outputs")
    return Table(head, rows, ["speed"])


def readme() -> Table:
    """The shipped pair under its default policy, against the faster one of the measured ways to decode plainly."""
    result = load("speed")
    cells = {cell["temperature"]: cell for cell in result["cells"]}  # of each temperature the last: the default policy
    rows, names = [], ("speedup_same_kernels", "speedup")
    for temperature, cell in cells.items():
        speedup = min(cell[name] for name in names if cell.get(name))
        rates = [number(rate, 0) for rate in (cell["tokens_per_second"] / speedup, cell["tokens_per_second"])]
        same = cell["identical_outputs"]
        outputs = "same distribution" if same is None else f"{same} of {result['num_prompts']}"
        rows.append([regime(temperature), number(cell["tau"]), *rates, f"**{number(speedup)}**", outputs])
    both = all(cell.get(name) for cell in cells.values() for name in names)
    plain = f"plain generate(), {'the faster baseline' if both else 'as it is'}: tokens/s"
    return Table(("", "τ", plain, "with the draft: tokens/s", "speed-up", "identical outputs"), rows, ["speed"])


def alternatives(name: str, batch_sizes: Sequence[int]) -> Table:
    """Every way to decode in one comparison: speed-ups over plain `generate()`."""
    result = load(name)
    cells = [cell for size in batch_sizes for cell in result["cells"] if cell["batch_size"] == size]
    methods = [method for method in result["methods"] if method != "plain"]
    shown = best_in_bold([[cell["methods"][method].get("speedup") for cell in cells] for method in methods])
    taus = [[cell["methods"][method]["tokens_per_pass"] for cell in cells[:2]] for method in methods]
    rows = [
        [method, *speedups, *(number(tau) for tau in pair)]
        for method, speedups, pair in zip(methods, shown, taus, strict=True)
    ]
    several = len(batch_sizes) > 1
    names = [regime(cell["temperature"]) + (f", {cell['batch_size']} rows" if several else "") for cell in cells]
    names = [text.replace(", 1 rows", ", 1 row").replace("temperature 1,", "T = 1,") for text in names]
    return Table(("", *names, "tokens per pass, greedy", "T = 1"), rows, [name])


def fair() -> Table:
    return alternatives("compare_native_amx", [1])


def all_methods() -> Table:
    return alternatives("compare_7350", [1, 4, 16])


def long_prompts() -> Table:
    """Speed-ups after long prompts."""
    rows, names = [], ("compare_long_1024_amx", "compare_long_8192_amx", "compare_long")
    methods = ("DSpark, scheduled", "DSpark", "DSpark, threshold", "prompt lookup", "transformers' DFlash")
    for name in names:
        result = load(name)
        for cell in result["cells"]:
            speedups = [number(cell["methods"][method].get("speedup")) for method in methods]
            counts = [str(cell["context"]), str(cell["batch_size"]), regime(cell["temperature"])]
            rows.append([*counts, machine(result), *speedups])
    head = ("prompt tokens", "rows", "", "machine", "scheduled", "whole", "threshold", "prompt lookup", "DFlash (tf)")
    return Table(head, rows, names)


def batches() -> Table:
    """The shipped pair in batches."""
    cells = {(cell["rows"], cell["regime"]): cell for cell in load("loop_batch")["cells"]}
    rows = []
    for size in dict.fromkeys(size for size, _ in cells):
        speedups = [
            cells[size, regime].get(baseline, {}).get("scheduled")
            for baseline in ("speedup_same_kernels", "speedup")
            for regime in ("greedy", "truncated")
        ]
        whole = [cells[size, regime]["speedup"]["full block"] for regime in ("greedy", "truncated")]
        same = cells[size, "greedy"]["identical_rows"]["scheduled"]
        rows.append([size, *map(number, speedups), *map(number, whole), f"{same} of {size}"])
    head = (
        "rows",
        "same kernels: greedy",
        "truncated",
        "as it is: greedy",
        "truncated",
        "whole blocks: greedy",
        "truncated",
    )
    return Table((*head, "identical rows"), rows, ["loop_batch"])


def larger_models() -> Table:
    """Random weights of larger models, with recorded acceptance."""
    others = {"loop_batch", "loop_4b"}  # the latter replayed other rounds
    names = sorted(path.stem for path in RESULTS.glob("loop_*b*.json") if path.stem not in others)
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for name in names:
        result = load(name)
        for cell in result["cells"]:
            found.setdefault((cell["geometry"], machine(result), cell["rows"]), {})[cell["regime"]] = cell
    rows = []
    for key in sorted(found, key=lambda key: (float(key[0].split("-")[-1][:-1]), *key[1:])):
        geometry, letter, count = key
        speedups = [
            found[key].get(name, {}).get(baseline)
            for baseline in ("speedup_same_kernels", "speedup")
            for name in ("greedy", "truncated")
        ]
        tau = number(next(iter(found[key].values()))["tau"])
        rows.append([geometry.replace("qwen", "Qwen").replace("b", "B"), letter, count, *map(number, speedups), tau])
    head = ("size of", "machine", "rows", "same kernels: greedy", "truncated", "as it is: greedy", "truncated", "τ")
    return Table(head, rows, names)


def hybrid_sizes() -> Table:
    """A hybrid target of a published size, with random weights and recorded acceptance."""
    rows = [
        [
            "temperature .8, top-k, top-p" if cell["regime"] == "truncated" else cell["regime"],
            number(cell["tau"]),
            number(cell["speedup"]),
            number(cell["speedup_same_kernels"]),
            number(cell["reading_again"]),
        ]
        for cell in load("hybrid_replay")["cells"]
    ]
    head = ("", "τ", "as it is", "same kernels", "reading again, of a plain step")
    return Table(head, rows, ["hybrid_replay"])


def hybrid_pairs() -> Table:
    """A hybrid target that was trained here, beside one with attention alone, and drafts trained alike."""
    names, rows = ("hybrid_pair_lfm2", "hybrid_pair_qwen3"), []
    for name in names:
        for cell in load(name)["cells"]:
            kind = "LFM2: convolutions and attention" if "lfm2" in name else "Qwen3: attention alone"
            numbers = (cell["tau"], cell["speedup"], cell["speedup_same_kernels"])
            rows.append(
                [kind, "temperature .8" if cell["regime"] == "truncated" else cell["regime"], *map(number, numbers)]
            )
    head = ("target of 11 M parameters", "", "τ", "as it is", "same kernels")
    return Table(head, rows, names)


# ---- drafting


def candidates() -> Table:
    """Drafting among candidates over drafting among 152 thousand tokens."""
    names, rows = ("top_k_amx", "top_k_amx_float32", "top_k_avx512_amd", "top_k_avx512_amd_float32"), []
    for name in names:
        result = load(name)
        cells = [result["drafting"][way] for way in ("greedy", "temperature 1")]
        ratios = [cell["candidates"][count]["ratio"] for cell in cells for count in ("64", "256")]
        rows.append([machine(result), result["dtype"], *map(number, ratios), number(cells[0]["full_ms"], 0)])
    head = ("machine", "", "greedy: 64", "256", "T = 1: 64", "256", "greedy, all tokens: ms")
    return Table(head, rows, names)


def candidate_tau() -> Table:
    """What candidates cost in tokens per round."""
    rows = []
    for name, part in load("candidates")["tau"].items():
        losses = [percent(part["candidates"][count]["loss"]) for count in ("64", "128", "256")]
        rows.append([REGIMES[name], number(part["full"]), *losses])
    return Table(("", "τ, all tokens", "64: loss, %", "128: loss, %", "256: loss, %"), rows, ["candidates"])


def block_sizes() -> Table:
    """The time of a round by block size and head."""
    rows = []
    for name in ("block_sizes_amx", "block_sizes"):
        result = load(name)
        heads = dict.fromkeys(row["head"] for row in result["block_sizes"])
        for head in heads:
            times = [row["total_ms"] for row in result["block_sizes"] if row["head"] == head]
            label = {None: "DFlash, no head", "vanilla": "Markov head", "rnn": "RNN head"}[head]
            rows.append([machine(result), label, *(number(time, 0) for time in times)])
            rows[-1].append(percent(times[-1] / times[0] - 1, 0))
    head = ("machine", "", "γ = 4, ms", "γ = 8, ms", "γ = 16, ms", "growth, %")
    return Table(head, rows, ["block_sizes_amx", "block_sizes"])


def longer_blocks() -> Table:
    """Tokens per round with drafts of 7 and 15 tokens."""
    result = load("tau_by_block_size")
    taus = {(row["kind"], row["regime"], row["block_size"]): row["tau"]["math"] for row in result["block_sizes"]}
    keys = [(name, size) for name in ("greedy", "temperature 1") for size in (7, 15)]
    rows = [
        [label, *(number(taus[(kind, *key)]) for key in keys)]
        for kind, label in (("dspark", "DSpark, 2 layers"), ("dflash", "DFlash, 2 layers"))
    ]
    ratios = [taus[("dspark", *key)] / taus[("dflash", *key)] for key in keys]
    rows.append(["ratio", *map(number, ratios)])
    return Table(("", *(f"{name}, γ = {size}" for name, size in keys)), rows, ["tau_by_block_size"])


# ---- drafts


def kinds_of_drafts() -> Table:
    """Tokens per round of five drafts of one target on three domains."""
    found = load("domains")["drafts"] | load("domains_depth")["drafts"]
    columns = [(domain, name) for name in ("temperature 1", "greedy") for domain in DOMAINS]
    taus = [[found[draft]["measured"][domain][name]["tau"] for domain, name in columns] for draft in DRAFTS]
    sizes = [number(found[draft]["parameters"] / 1e6, 1) for draft in DRAFTS]
    rows = [[label, size, *row] for label, size, row in zip(DRAFTS.values(), sizes, best_in_bold(taus), strict=True)]
    head = ("", "M parameters", *(f"{domain}, {'T = 1' if name != 'greedy' else name}" for domain, name in columns))
    return Table(head, rows, ["domains", "domains_depth"])


def calibration() -> Table:
    """Errors of the predicted survival."""
    rows = [
        [
            REGIMES[name],
            f"{part['num_rounds']:,}",
            percent(part["mean_ece_raw"]),
            percent(part["mean_ece_calibrated"]),
            number(part["conditional_auc"]),
        ]
        for name, part in load("calibration")["regimes"].items()
    ]
    return Table(("", "rounds", "ECE raw, %", "ECE calibrated, %", "AUC"), rows, ["calibration"])


def decisions() -> Table:
    """How long one decision takes."""
    found = load("decisions")["decision"]
    names = {"hull + fill": "scheduled (default)", "draft or skip": "whether to draft", "Algorithm 1": "Algorithm 1"}
    rows = [
        [label, *(number(found[name][key], 0) for key in ("median_us", "p95_us"))] for name, label in names.items()
    ]
    return Table(("256 requests of 7 tokens", "median, µs", "95th percentile, µs"), rows, ["decisions"])


# ---- SmolLM2


def smollm2_suite(suite: str) -> Table:
    """The shipped draft under its default policy, task by task: each speed-up is one of whole calls."""
    names = [f"{suite}-{name}" for name in ("greedy", "sampled")]
    found = [load(name)["tasks"] for name in names]
    rows = [
        [TASKS.get(task, task), *(cell for part in found for cell in tau_and_speedup(part[task]))]
        for task in found[0]
        if task != "all"
    ]
    rows.append(["mean", *(cell for part in found for cell in ("", mean_speedup(part)))])
    return Table(("", "greedy: τ", "speed-up", "temperature 1: τ", "speed-up"), rows, names)


def tau_and_speedup(part: Result) -> tuple[str, str]:
    return number(part["tau"]), number(part["speedup"]["ratio_of_medians"])


def mean_speedup(tasks: dict[str, Result]) -> str:
    mean = statistics.mean(part["speedup"]["ratio_of_medians"] for task, part in tasks.items() if task != "all")
    return f"**{number(mean)}**"


def same_answers(part: Result) -> str:
    return f"{part['speedup']['identical']} of {part['turns']}"


def smollm2_paper() -> Table:
    return smollm2_suite("paper")


def smollm2_spec_bench() -> Table:
    return smollm2_suite("spec_bench")


def smollm2_avx2() -> Table:
    """The same draft in float32 on a processor without units for bfloat16, and whether greedy answers are the same."""
    names = [f"smollm2_avx2_{suite}-{name}" for suite in ("paper", "spec_bench") for name in ("greedy", "sampled")]
    found, rows = {name: load(name)["tasks"] for name in names}, []
    for suite in ("paper", "spec_bench"):
        greedy, sampled = (found[f"smollm2_avx2_{suite}-{name}"] for name in ("greedy", "sampled"))
        for task, part in greedy.items():
            if task != "all":
                cells = same_answers(part), *tau_and_speedup(sampled[task])
                rows.append([TASKS.get(task, task), *tau_and_speedup(part), *cells])
        rows.append(["mean", "", mean_speedup(greedy), same_answers(greedy["all"]), "", mean_speedup(sampled)])
    head = ("", "greedy: τ", "speed-up", "same answers", "temperature 1: τ", "speed-up")
    return Table(head, rows, names)


def smollm2_earlier() -> Table:
    """Mean speed-ups of an earlier run on a faster machine of the same kind, and of the same prompts here."""
    rows, files = [], []
    for suite, label in (("paper", "the paper's tasks"), ("spec_bench", "Spec-Bench")):
        row = [label]
        for name in (f"{suite}-greedy", f"{suite}-sampled"):
            now, before = load(name)["records"], load(f"smollm2_earlier_{name}")["records"]
            asked = {(record["task"], record["prompt"]) for record in before}
            same = [record for record in now if (record["task"], record["prompt"]) in asked]
            row += [number(mean_of_tasks(records)) for records in (same, before)]
            files.append(f"smollm2_earlier_{name}")
        rows.append(row)
    head = ("", "greedy: this machine", "the faster one", "temperature 1: this machine", "the faster one")
    return Table(head, rows, files)


def mean_of_tasks(records: Sequence[Result]) -> float:
    """Return the mean over tasks of the ratio of median seconds per token, without the draft and with it."""
    ratios = []
    for task in dict.fromkeys(record["task"] for record in records):
        own = [record for record in records if record["task"] == task]
        ways = ([record["plain"] for record in own], own)
        plain, drafted = (statistics.median(each["seconds"] / each["num_tokens"] for each in way) for way in ways)
        ratios.append(plain / drafted)
    return statistics.mean(ratios)


def readme_chat_model() -> Table:
    """The same by domain."""
    names = [f"{suite}-{name}" for suite in ("paper", "spec_bench") for name in ("greedy", "sampled")]
    found, rows = {name: load(name)["tasks"] for name in names}, []
    for label, (suite, tasks) in CHAT_DOMAINS.items():
        row: list[str] = [label]
        for name in ("greedy", "sampled"):
            parts = [part for task, part in found[f"{suite}-{name}"].items() if task in tasks]
            speedup = statistics.mean(part["speedup"]["ratio_of_medians"] for part in parts)
            row += [number(pooled_tau(parts)), f"**{number(speedup)}**"]
        rows.append(row)
    return Table(("", "greedy: τ", "speed-up", "temperature 1: τ", "speed-up"), rows, names)


def smollm2_kinds() -> Table:
    return of_kinds("smollm2_tau_paper")


def smollm2_kinds_second() -> Table:
    return of_kinds("smollm2_tau_second_paper")


def of_kinds(result: str) -> Table:
    """Tokens per round of drafts of several kinds that were trained alike, over the tasks of each domain."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for row in load(result)["rows"]:
        found.setdefault((row["kind"], row["domain"], row["regime"]), []).append(row)
    kinds, domains, regimes = (dict.fromkeys(parts) for parts in zip(*found, strict=True))
    columns = [(domain, name) for name in regimes for domain in domains]
    names = {"dspark": "DSpark, 3 layers", "dflash": "DFlash, 3 layers", "eagle3": "Eagle3, 1 layer"}
    taus = [[pooled_tau(found[(kind, *column)]) for column in columns] for kind in kinds]
    rows = [[names[kind], *row] for kind, row in zip(kinds, best_in_bold(taus), strict=True)]
    by_kind = dict(zip(kinds, taus, strict=True))
    ratios = (first / second for first, second in zip(by_kind["dspark"], by_kind["dflash"], strict=True))
    rows.append(["DSpark over DFlash", *map(number, ratios)])
    return Table(("τ", *(f"{domain}, {REGIMES[name]}" for domain, name in columns)), rows, [result])


def smollm2_ways() -> Table:
    """Every way to decode Spec-Bench greedily, over plain `generate()`: a draft and its rivals, trained alike."""
    result = load("smollm2_speed_spec_bench")
    cells = {size: [cell for cell in result["cells"] if cell["batch_size"] == size] for size in (1, 4)}
    methods = [method for method in result["methods"] if method != "plain"]
    taken = {size: [[cell["methods"][method].get("speedup") for cell in part] for method in methods]
             for size, part in cells.items()}  # fmt: skip
    means = [[None if None in part else statistics.mean(part) for part in taken[size]] for size in cells]
    columns = [[*own, *mean] for own, *mean in zip(taken[1], *means, strict=True)]
    rows = [[method, *row] for method, row in zip(methods, best_in_bold(columns), strict=True)]
    tasks = (TASKS.get(cell["task"], cell["task"]) for cell in cells[1])
    return Table(("", *tasks, "mean", "mean, 4 rows"), rows, ["smollm2_speed_spec_bench"])


def smollm2_kinds_speed() -> Table:
    """Speed-ups of whole blocks of three kinds of drafts that were trained alike, greedily, task by task."""
    cells = load("smollm2_speed_paper")["cells"]
    kinds = ("DSpark", "DFlash", "Eagle3")
    taken = best_in_bold([[cell["methods"][kind]["speedup"] for cell in cells] for kind in kinds])
    rows = [[kind, *row] for kind, row in zip(kinds, taken, strict=True)]
    return Table(("", *(TASKS.get(cell["task"], cell["task"]) for cell in cells)), rows, ["smollm2_speed_paper"])


def smollm2_trials() -> Table:
    return of_trials("smollm2_trials")


def smollm2_trials_second() -> Table:
    return of_trials("smollm2_trials_second")


def smollm2_trials_third() -> Table:
    return of_trials("smollm2_trials_third")


def smollm2_trials_fourth() -> Table:
    return of_trials("smollm2_trials_fourth")


def of_trials(result: str) -> Table:
    """What small changes of the draft do after a short training, on held-out answers at temperature 1."""
    rows = []
    for row in load(result)["rows"]:
        acceptance = [row[name] for place in range(1, 8) if (name := f"acceptance_{place}") in row]
        later = statistics.mean(acceptance[1:])
        rows.append([row["name"], str(row["steps"]), *(number(each) for each in (row["tau"], acceptance[0], later))])
    return Table(("", "steps", "expected τ", "accepted, position 1", "later positions"), rows, [result])


def pooled_tau(rows: Sequence[Result]) -> float:
    return sum(row["tau"] * row["rounds"] for row in rows) / sum(row["rounds"] for row in rows)


def smollm2_confidence() -> Table:
    """Calibration on prompts that were not fitted on."""
    errors = ("raw", "calibrated", "fitted_on_the_other_half", "of_a_true_head")
    rows = [
        [
            row["domain"], REGIMES[row["regime"]], f"{row['num_rounds']:,}",
            *(percent(row[f"mean_ece_{name}"]) for name in errors),
            number(row["conditional_auc"]),
        ]
        for row in load("smollm2_confidence")["rows"]
    ]  # fmt: skip
    head = ("", "", "rounds", "ECE raw, %", "calibrated", "by its domain", "of a true head", "AUC")
    return Table(head, rows, ["smollm2_confidence"])


def smollm2_distribution() -> Table:
    """How well acceptance can be told at temperature 1: by the head, and by the probability of acceptance itself."""
    rows = [
        [
            row["domain"],
            f"{row['num_rounds']:,}",
            number(row["conditional_auc"]),
            number(row["auc_of_the_distribution"]),
        ]
        for row in load("smollm2_distribution")["rows"]
    ]
    return Table(("", "rounds", "AUC of the head", "of the distribution itself"), rows, ["smollm2_distribution"])


# ---- the rest


def few_rows() -> Table:
    """Products of eight rows by the ways that hf_dspark has, over PyTorch's."""
    rows = []
    names = ("few_rows_amx", "few_rows_avx512_amd", "few_rows_avx2_amd")
    ways = ("transposed_ratio", "ratio", "packed_ratio")
    for name in names:
        result = load(name)
        for dtype in dict.fromkeys(cell.get("dtype", "float32") for cell in result["cells"]):
            cells = [
                cell
                for cell in result["cells"]
                if cell.get("dtype", "float32") == dtype and cell["rows"] == 8
                and cell["outputs"] * cell["inputs"] >= 2**20
            ]  # fmt: skip
            ratios = [[cell[way] for cell in cells if way in cell] for way in ways]
            shown = [number(statistics.median(part)) if part else number(None) for part in ratios]
            rows.append([machine(result), dtype, *shown])
    return Table(("machine", "", "exchanged factors", "oneDNN", "packed copies"), rows, names)


def resources() -> Table:
    """Memory of decoding, and time and memory of a training step."""
    memory, step = load("memory"), load("training_step")
    cells = memory["cells"]
    rows = [
        [
            f"memory of {memory['rows']} rows of {memory['new_tokens']} new tokens, over plain generate()",
            number(cells["over_plain"]),
        ],
        ["the same without the draft's cache", number(cells["over_plain_without_draft_cache"])],
        ["time of a training step, over dense attention and logits", number(step["time_ratio"])],
        ["memory of a training step, over dense attention and logits", number(step["memory_ratio"])],
    ]
    return Table(("", "ratio"), rows, ["memory", "training_step"])


def finetune() -> Table:
    """Tokens per round before and after fine-tuning for a new domain."""
    result, rows = load("finetune"), []
    for name in ("sampled", "greedy"):
        for domain, part in result[name].items():
            before, after = part["before"]["tau"], part["after"]["tau"]
            rows.append([domain, REGIMES[name], number(before), number(after), f"{100 * (after / before - 1):+.0f}"])
    return Table(("domain", "", "τ before", "τ after", "change, %"), rows, ["finetune"])


TABLES: dict[str, Callable[[], Table]] = {
    "README": readme,
} | {
    make.__name__: make
    for make in (
        speed, fair, all_methods, long_prompts, batches, larger_models, hybrid_sizes, hybrid_pairs, candidates,
        candidate_tau, block_sizes, longer_blocks, kinds_of_drafts, calibration, decisions, few_rows, resources,
        finetune, readme_chat_model, smollm2_paper, smollm2_spec_bench, smollm2_kinds, smollm2_confidence,
        smollm2_ways, smollm2_avx2, smollm2_earlier, smollm2_trials, smollm2_trials_second, smollm2_trials_third,
        smollm2_trials_fourth, smollm2_kinds_second, smollm2_kinds_speed, smollm2_distribution,
    )
}  # fmt: skip


def origin(name: str, page: Path) -> str:
    """Return where the numbers of a result file come from, in one line: the file, machine and command."""
    result = load(name)
    link = os.path.relpath(path_of(name), page.parent)
    words = re.sub(r" --output \S+", "", result["provenance"]["command"])
    return f"[{name}.json]({link}), {machine(result)}: `{words}`"


def rendered(name: str, page: Path) -> str:
    """Return a table as Markdown, with the lines that say where it comes from."""
    table = TABLES[name]()
    sources = " · ".join(origin(file, page) for file in table.files)
    return f"{markdown_table(table.head, table.rows)}\n\n<sub>{sources}</sub>\n"


def refreshed(text: str, page: Path) -> str:
    """Return a page with all its tables made anew.

    Raises:
        ValueError: If a page asks for a table that there is not.
    """

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"{page}: there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return match[1] + rendered(match[2], page) + match[3]

    return MARKED.sub(made, text)


def pages() -> list[Path]:
    """Return the documents that hold tables."""
    candidates = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    candidates += (ROOT / "model_cards").glob("*.md")
    return [page for page in candidates if MARKED.search(page.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    options = parser.parse_args()
    stale = [page for page in pages() if refreshed(page.read_text(encoding="utf-8"), page) != page.read_text("utf-8")]
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'is out of date' if options.check else 'rewritten'}")
        if not options.check:
            page.write_text(refreshed(page.read_text(encoding="utf-8"), page), encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
