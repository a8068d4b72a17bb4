"""The picture on a model card: speed-up by task and acceptance by position, of the result files that the card is of.

matplotlib draws it. Where that is not installed, a card has its tables alone.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .card import decoded_tasks, held_out_rates, held_out_sets, of_kind, task_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; the tables of the card hold what is too much.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MOST_BARS = 10
INK, GREY, PALE = "#222222", "#767676", "#E6E6E6"

Line = tuple[str, Sequence[float | None]]


def draw_picture(results: Sequence[dict[str, Any]]) -> tuple[str, bytes] | None:
    """Return what a picture of results shows, and the picture as PNG; `None` if nothing can be drawn."""
    decoded = decoded_tasks(results)
    bars = [(task_label(*task), task[2]["speedup"]) for task in decoded if task[2].get("speedup")][:MOST_BARS]
    lines: list[Line] = [(task_label(*task), task[2]["acceptance"]) for task in decoded if task[2].get("acceptance")]
    lines = lines or [line for result in of_kind(results, "training") for line in _of_training(result)]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    parts = [part for part in ("speed-up by task", "acceptance by position") if (bars if "task" in part else lines)]
    if not parts:
        return None
    figure = Figure(figsize=(4.4 * len(parts), 2.9), dpi=160, layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    if bars:
        _draw_bars(panels[0], bars)
    if lines:
        _draw_lines(panels[-1], lines[: len(COLOURS)])
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return ", and ".join(parts).capitalize(), file.getvalue()


def _of_training(result: dict[str, Any]) -> list[Line]:
    times = {"before": result.get("before", {}), "after": result["metrics"]}
    found = [
        (f"{where}, {time} training", held_out_rates(metrics, prefix))
        for prefix, where in held_out_sets(result["metrics"]).items()
        for time, metrics in times.items()
    ]
    return [line for line in found if line[1]]


def _draw_bars(panel: "Axes", bars: list[tuple[str, dict[str, float]]]) -> None:
    ratios = [found["ratio_of_medians"] for _, found in bars]
    below = [max(0.0, found["ratio_of_medians"] - found["lower_quartile"]) for _, found in bars]
    above = [max(0.0, found["upper_quartile"] - found["ratio_of_medians"]) for _, found in bars]
    places = range(len(bars))
    panel.barh(places, ratios, xerr=(below, above), height=0.6, color=COLOURS[0], ecolor=INK)
    for place, ratio in zip(places, ratios, strict=True):
        panel.text(0.04, place, f"{ratio:.2f}", va="center", fontsize=9, color="white", fontweight="bold")
    panel.axvline(1, color=INK, linewidth=1)
    panel.set_yticks(places, [name for name, _ in bars], fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    _dress(panel, "Speed-up over generate() without the draft", "x")


def _draw_lines(panel: "Axes", lines: list[Line]) -> None:
    for (name, rates), colour in zip(lines, COLOURS, strict=False):
        places = [place for place, rate in enumerate(rates, start=1) if rate is not None]
        panel.plot(places, [rates[place - 1] for place in places], marker="o", markersize=4, color=colour, label=name)
    panel.set_ylim(0, 1)
    panel.set_xticks(range(1, max(len(rates) for _, rates in lines) + 1))
    panel.set_xlabel("position in the block", fontsize=9)
    panel.legend(fontsize=8, frameon=False, loc="lower left")
    _dress(panel, "Accepted, if all before it were", "y")


def _dress(panel: "Axes", title: str, values: str) -> None:
    panel.set_title(title, fontsize=9.5, loc="left", color=INK)
    panel.tick_params(labelsize=9, color=GREY, labelcolor=INK)
    panel.grid(axis=values, color=PALE)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
