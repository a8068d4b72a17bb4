"""What the calls of `compare.py` come to: medians with quartiles, speed-ups, and tables. Knows nothing of decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

PLAIN = "plain"
SCHEDULED = "DSpark, scheduled"
DSPARK = "DSpark"
NO_BATCHES = "transformers' assisted generation takes one sequence"
Call = Mapping[str, Any]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and what half of the values lie between."""
    lower, median, upper = numpy.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def seconds_per_token(calls: Sequence[Call], method: str) -> list[float]:
    """Return the time per token of each call: of all rows together."""
    return [call["runs"][method]["seconds"] / call["runs"][method]["tokens"] for call in calls]


def method_summary(calls: Sequence[Call], method: str) -> dict[str, Any]:
    """Return what one method did in one cell.

    Args:
        calls (`Sequence[Mapping]`): The calls of the cell, as `compare.py` notes them.
        method (`str`): Its name; if it is in no call, it could not decode this cell.

    Returns:
        `dict`: `seconds_per_token` and `paired_speedup` (of each call against plain decoding of the same) as median
        and quartiles, so `first_token_seconds` (since the call), `speedup` (ratio of the medians),
        `tokens_per_pass` (of a row, prefill pass included),
        `identical_rows` (greedy) of `rows`, and the raw numbers of every call; or `refused`.
    """
    if method not in calls[0]["runs"]:
        return {"refused": NO_BATCHES}
    own, plain = seconds_per_token(calls, method), seconds_per_token(calls, PLAIN)
    runs = [call["runs"][method] for call in calls]
    rows = [len(call["prompt_tokens"]) for call in calls]
    greedy = runs[0]["identical"] is not None
    row_passes = sum(run["passes"] * count for run, count in zip(runs, rows, strict=True))
    times = quartiles(own)
    return {
        "seconds_per_token": times,
        "speedup": quartiles(plain)["median"] / times["median"],
        "paired_speedup": quartiles([p / o for p, o in zip(plain, own, strict=True)]),
        "first_token_seconds": quartiles([run["prefill_seconds"] for run in runs]),
        "tokens_per_pass": sum(run["tokens"] for run in runs) / row_passes,
        "identical_rows": sum(run["identical"] for run in runs) if greedy else None,
        "rows": sum(rows),
        "calls": {name: [run[name] for run in runs] for name in ("seconds", "prefill_seconds", "tokens", "passes")},
    }


def summarise(
    measured: Sequence[tuple[Mapping[str, Any], Sequence[Call]]], methods: Mapping[str, bool]
) -> dict[str, Any]:
    """Return all cells, and what they say together.

    Args:
        measured (`Sequence`): Each cell's task, batch size, temperature and context, and its calls.
        methods (`Mapping[str, bool]`): Their names, and whether they are transformers' own.

    Returns:
        `dict`: `cells`, and of the scheduled line `scheduled_minimum`: its lowest speed-up, and where that was.
    """
    cells = []
    for cell, calls in measured:
        found = {name: method_summary(calls, name) for name in methods}
        lengths = [length for call in calls for length in call["prompt_tokens"]]
        cells.append(
            dict(cell)
            | {"prompt_tokens": quartiles(lengths), "num_calls": len(calls)}
            | leaders(found, methods)
            | {"methods": found}
        )
    return {"cells": cells, "scheduled_minimum": minimum(cells, SCHEDULED)}


def leaders(found: Mapping[str, Mapping[str, Any]], methods: Mapping[str, bool]) -> dict[str, Any]:
    """Return who is fastest in a cell, and DSpark's best line against the best of transformers, plain included."""
    speedups, (dspark, native) = known_speedups(found), rivals(found, methods)
    return {
        "fastest": max(speedups, key=speedups.__getitem__),
        "dspark_over_best_native": speedups[dspark] / speedups[native],
    }


def known_speedups(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed-up of each method that could decode the cell."""
    return {name: part["speedup"] for name, part in found.items() if "speedup" in part}


def rivals(found: Mapping[str, Mapping[str, Any]], methods: Mapping[str, bool]) -> tuple[str, str]:
    """Return the names of DSpark's fastest line in a cell and of transformers' fastest method, plain included."""
    speedups = known_speedups(found)
    ours = [name for name in speedups if name.startswith(DSPARK)]
    theirs = [name for name in speedups if methods[name] or name == PLAIN]
    return max(ours, key=speedups.__getitem__), max(theirs, key=speedups.__getitem__)


def ahead_call_by_call(found: Mapping[str, Mapping[str, Any]], methods: Mapping[str, bool]) -> dict[str, float]:
    """Return the ratio of the same two in each call, which the differences between prompts do not blur: quartiles."""
    dspark, native = (found[name]["calls"] for name in rivals(found, methods))
    per_token = [[s / n for s, n in zip(part["seconds"], part["tokens"], strict=True)] for part in (dspark, native)]
    ratios = [theirs / ours for ours, theirs in zip(*per_token, strict=True)]
    return quartiles(ratios)


def minimum(cells: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """Return the lowest speed-up of a method, and its cell."""
    worst = min(cells, key=lambda cell: cell["methods"][method]["speedup"])
    return {"speedup": worst["methods"][method]["speedup"], "cell": title(worst)}


def title(cell: Mapping[str, Any]) -> str:
    """Return what a cell is called."""
    return f"{cell['task']}, {regime(cell)}, {context(cell)}, {rows(cell)}"


def regime(cell: Mapping[str, Any]) -> str:
    return f"temperature {cell['temperature']:g}" if cell["temperature"] else "greedy"


def rows(cell: Mapping[str, Any]) -> str:
    return "1 row" if cell["batch_size"] == 1 else f"{cell['batch_size']} rows"


def context(cell: Mapping[str, Any]) -> str:
    return f"prompts of {cell['prompt_tokens']['median']:.0f} tokens"


# ---- tables


def markdown(result: Mapping[str, Any]) -> str:
    """Return one table per task and context, rows the methods, columns batch sizes and temperatures.

    Args:
        result (`Mapping`): What `compare.py` wrote.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for cell in result["cells"]:
        groups.setdefault((cell["task"], cell["context"]), []).append(cell)
    parts = [table(cells, result) for cells in groups.values()]
    worst = result["scheduled_minimum"]
    closing = (
        f"Lowest speed-up of the scheduled line: {worst['speedup']:.2f}x ({worst['cell']}). Speed-ups are ratios of "
        "medians; in brackets milliseconds per token, median and quartiles of the calls; –: "
        f"{NO_BATCHES}. Answers of at most {result['max_new_tokens']} tokens."
    )
    origin = result["provenance"]
    where = (
        f"{origin['device']}, {origin['threads']} threads; torch {origin['torch']}, transformers "
        f"{origin['transformers']}, revision {origin.get('revision', 'unknown')}: `{origin['command']}`."
    )
    return "\n\n".join([*parts, closing, where])


def table(cells: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """Return the table of one task in one context."""
    asked = cells[0]["context"]
    bounded = f"; {asked} were asked for, the target has room for {result['longest_prompt']}"
    heading = f"**{cells[0]['task']}, {context(cells[0])}**" + (bounded if asked > result["longest_prompt"] else "")
    lines = [
        "| | " + " | ".join(f"{regime(cell)}, {rows(cell)}" for cell in cells) + " |",
        "|---" * (len(cells) + 1) + "|",
    ]
    for method in result["methods"]:
        lines.append(f"| {method} | " + " | ".join(entry(cell, method) for cell in cells) + " |")
    lines.append(
        "| identical to plain | " + " | ".join(identical(cell, result["methods"]) for cell in cells) + " |"
    )  # fmt: skip
    lines.append(
        "| best DSpark over best of transformers (call by call) | "
        + " | ".join(f"{cell['dspark_over_best_native']:.2f}x ({paired(cell, result['methods'])})" for cell in cells)
        + " |"
    )
    return heading + "\n\n" + "\n".join(lines)


def entry(cell: Mapping[str, Any], method: str) -> str:
    """Return one method in one cell; the fastest in bold."""
    found = cell["methods"][method]
    if "refused" in found:
        return "–"
    times = {name: f"{1e3 * value:.2f}" for name, value in found["seconds_per_token"].items()}
    speedup = f"{found['speedup']:.2f}x"
    shown = f"**{speedup}**" if method == cell["fastest"] else speedup
    return f"{shown} ({times['median']}, {times['lower_quartile']} to {times['upper_quartile']})"


def paired(cell: Mapping[str, Any], methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the ratio of DSpark's best line to the best of transformers in the same calls: median, and quartiles."""
    ratios = ahead_call_by_call(cell["methods"], {name: method["native"] for name, method in methods.items()})
    return f"{ratios['median']:.2f}x, {ratios['lower_quartile']:.2f} to {ratios['upper_quartile']:.2f}"


def identical(cell: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    """Return how many greedy rows of all methods equal plain decoding's."""
    counted = [cell["methods"][name] for name in methods if name != PLAIN and "refused" not in cell["methods"][name]]
    if counted[0]["identical_rows"] is None:
        return "same law"
    return f"{sum(part['identical_rows'] for part in counted)} of {sum(part['rows'] for part in counted)}"
