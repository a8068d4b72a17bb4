"""What the calls of `compare.py` come to: medians with quartiles, speed-ups, and a short table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from hf_dspark.measuring.tables import markdown_table, number

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
    """Return the time per token of each call, all rows together."""
    return [call["runs"][method]["seconds"] / call["runs"][method]["tokens"] for call in calls]


def method_summary(calls: Sequence[Call], method: str) -> dict[str, Any]:
    """Return what one method did in one cell.

    Args:
        calls (`Sequence[Mapping]`): The calls of the cell, as `compare.py` notes them.
        method (`str`): Its name; a method that is in no call could not decode this cell.

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


def markdown(result: Mapping[str, Any]) -> str:
    """Return the speed-ups of all methods as a table, a column for each cell; `-` if a method takes one sequence."""
    head = ["", *(title(cell) for cell in result["cells"])]
    rows = [
        [method, *(number(cell["methods"][method].get("speedup")) for cell in result["cells"])]
        for method in result["methods"]
    ]
    return markdown_table(head, rows)
