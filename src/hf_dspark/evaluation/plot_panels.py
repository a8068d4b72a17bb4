"""What figures are put together from: panels, lines, labels, and what stands around the panels.

Knows nothing of which figures there are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill, wrap
from typing import Any

from .measurements import (
    DraftMeasurement,
    LoadCurves,
    Reliability,
    Result,
    ThresholdSweep,
    provenance_of,
    short_policy,
)

# Of matplotlib, which is imported where it is used.
Axes = Any
Figure = Any

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PINK, SKY, AMBER, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000",
)  # fmt: skip
GREY = "#767676"
# The first shade of a kind is that of its first line; the others are darker and lighter.
KIND_SHADES = {
    "DSpark": (BLUE, SKY, "#00375A"),
    "DFlash": (ORANGE, AMBER, "#7A3600"),
    "Eagle3": (GREEN, "#7FD1B9", "#004F3A"),
}
VARIANTS = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (1, 1)), "v"), ((0, (5, 1, 1, 1)), "P"))
POLICY_STYLES = {
    "autoregressive": {"color": GREY, "linestyle": ":"},
    "full block": {"color": ORANGE, "linestyle": "--"},
    "whole block": {"color": ORANGE, "linestyle": "--"},
    "fixed length 7": {"color": ORANGE, "linestyle": "--"},
    "Algorithm 1": {"color": AMBER, "linestyle": "-", "marker": "s", "markersize": 7},
    "hull + fill": {"color": BLUE, "linestyle": "-", "marker": "o", "markersize": 4},
    "lagged budget + top-K": {"color": GREEN, "linestyle": "-", "marker": "^", "markersize": 4},
    "oracle": {"color": BLACK, "linestyle": (0, (1, 2)), "linewidth": 2},
}
OTHER_STYLES = tuple(
    {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
    for colour, (line, marker) in zip((BLUE, GREEN, PINK, SKY, AMBER, BLACK), VARIANTS, strict=True)
)
SMALL, TINY = 8, 6.5
LINE_INCHES, LETTER_INCHES = 0.16, 0.068  # of small text
LEAST_GAP = 0.05  # between numbers one above the other, of the height of a panel
MOST_POSITIONS = 8
MOST_PANELS = 12
MOST_ROWS = 6
MOST_LINES_WITH_NUMBERS = 4
FEW_ROUNDS = 30


@dataclass(frozen=True)
class FigureKind:
    """A figure that can be drawn from result files.

    Args:
        name (`str`): Of its files.
        title (`str`): Its subject.
        shows (`str`): How to read it, for somebody who does not know the paper.
        command (`str`): What measures what it shows.
        draw (`Callable`): Results in, figure out.
        sources (`Callable`): Results in, those out that it shows.
    """

    name: str
    title: str
    shows: str
    command: str
    draw: Callable[[Sequence[Result]], Figure]
    sources: Callable[[Sequence[Result]], list[Result]]


# ---- drafts in panels


@dataclass(frozen=True)
class PanelGrid:
    """Tasks that have a tau side by side; what can't be compared, such as targets, below each other.

    Args:
        row_of (`Callable`): Tells target, regime and block size (empty if blocks of all sizes share a row).
        rows (`list[tuple[str, str, str]]`): These of each row.
        tasks (`list[str]`): Of each column.
    """

    row_of: Callable[[DraftMeasurement], tuple[str, str, str]]
    rows: list[tuple[str, str, str]]
    tasks: list[str]

    @classmethod
    def of(
        cls, found: Sequence[DraftMeasurement], row_of: Callable[[DraftMeasurement], tuple[str, str, str]]
    ) -> "PanelGrid":
        tasks = dict.fromkeys(each.task for each in found if each.tau is not None)
        return cls(row_of, list(dict.fromkeys(map(row_of, found))), list(tasks))

    def place(self, each: DraftMeasurement) -> tuple[int, int]:
        return self.rows.index(self.row_of(each)), self.tasks.index(each.task)

    def title(self, row: int, column: int) -> str:
        """Return what is drawn in a panel: task, regime, and the block size if there are several."""
        (_, regime, size), several_sizes = self.rows[row], len({size for *_, size in self.rows}) > 1
        return ", ".join(
            [self.tasks[column], regime, *([size.replace(" ", "\N{NO-BREAK SPACE}")] if several_sizes else [])]
        )

    def name(self, axes: Any, quantity: str) -> None:
        """Name the panels, one column per task, and the quantity at the left."""
        for index, (row, (target, *_)) in enumerate(zip(axes, self.rows, strict=True)):
            for column, axis in enumerate(row):
                axis.set_title(fill(self.title(index, column), 40), fontsize=9, fontweight="bold")
            row[0].set_ylabel("\n".join([*([fill(target, 30)] if target else []), quantity]), fontsize=SMALL)


def flowing_panels(grid: PanelGrid, found: Sequence[DraftMeasurement]) -> tuple[Figure, Any, dict]:
    """Return a figure, its panels, and which of them is for which place of a grid: none for places without lines.

    Args:
        grid ([`PanelGrid`]): Where the measurements belong. As many panels stand side by side as it has columns.
        found (`Sequence[DraftMeasurement]`): What is drawn.
    """
    places, columns = sorted({grid.place(each) for each in found}), len(grid.tasks)
    figure, axes = make_panels(math.ceil(len(places) / columns), columns, 2.9, 2.5, sharex=True, sharey=True)
    panels = dict(zip(places, axes.flat, strict=False))
    several_targets = len({target for target, *_ in grid.rows}) > 1
    for (row, column), axis in panels.items():
        target = f"{grid.rows[row][0]}: " if several_targets and grid.rows[row][0] else ""
        axis.set_title(fill(target + grid.title(row, column), 40), fontsize=9, fontweight="bold")
    for index, axis in enumerate(axes.flat):
        axis.set_visible(index < len(places))
        is_lowest = index < len(places) <= index + columns
        axis.tick_params(labelbottom=is_lowest)
    return figure, axes, panels


def by_setting(each: DraftMeasurement) -> tuple[str, str, str]:
    """Put all block sizes of a target and a regime into one row."""
    return each.setting.target or "", each.setting.regime, ""


def by_block_size(each: DraftMeasurement) -> tuple[str, str, str]:
    """Put each block size into a row of its own."""
    return each.setting.target or "", each.setting.regime, f"γ = {each.draft.block_size}"


Parts = tuple[str, ...]
Labels = dict[Parts, tuple[dict[str, Any], str]]  # a line's style, and what the legend says


def _depth(each: DraftMeasurement) -> str:
    layers = each.draft.num_layers
    return each.draft.kind if layers is None else f"{each.draft.kind}, {layers} layer{'s' * (layers > 1)}"


def _head(each: DraftMeasurement) -> str:
    return f"{each.draft.head} head" if each.draft.head else ""


def _circumstances(each: DraftMeasurement) -> Parts:
    setting = each.setting
    batch = f"batch {setting.batch_size}" if setting.batch_size else ""
    return short_policy(setting.policy), batch, setting.dtype, setting.device


def draft_parts(each: DraftMeasurement) -> Parts:
    weights = f"weights {each.draft.weights}" if each.draft.weights else ""
    known = f"γ = {each.draft.block_size}", each.draft.name or "", weights
    return _depth(each), _head(each), *known, *_circumstances(each)


def depth_parts(each: DraftMeasurement) -> Parts:
    return each.draft.kind, _head(each), f"γ = {each.draft.block_size}", *_circumstances(each)


def kind_parts(each: DraftMeasurement) -> Parts:
    return each.draft.kind, _head(each), *_circumstances(each)


def block_parts(each: DraftMeasurement) -> Parts:
    return _depth(each), _head(each), *_circumstances(each)


def parts_within_rows(found: Sequence[DraftMeasurement], grid: PanelGrid) -> Callable[[DraftMeasurement], Parts]:
    """Return what names drafts in a grid: their names, too, only if a panel holds two that are alike without them."""
    places = [(grid.place(each), block_parts(each)) for each in found]
    return block_parts if len(set(places)) == len(places) else draft_parts


def varied(
    found: Sequence[DraftMeasurement],
    parts: Callable[[DraftMeasurement], Parts],
    value: Callable[[DraftMeasurement], int],
) -> list[DraftMeasurement]:
    """Return the measurements of those lines that have two points or more."""
    values: dict[tuple, set[int]] = {}
    for each in found:
        values.setdefault((parts(each), each.setting.target, each.setting.regime, each.task), set()).add(value(each))
    wide = {key for key, seen in values.items() if len(seen) > 1}
    return [e for e in found if (parts(e), e.setting.target, e.setting.regime, e.task) in wide]


def draft_labels(found: Sequence[DraftMeasurement], parts: Callable[[DraftMeasurement], Parts]) -> Labels:
    """Return a line style and the shortest label that tells it apart, for each line."""
    lines = list(dict.fromkeys(parts(each) for each in found))
    kinds = {parts(each): each.draft.kind for each in found}
    seen: dict[str, int] = {}
    labels = {}
    for line, label in zip(lines, distinct_labels(lines), strict=True):
        index = seen[kinds[line]] = seen.get(kinds[line], -1) + 1
        stroke, marker = VARIANTS[index % len(VARIANTS)]
        shades = KIND_SHADES.get(kinds[line], (GREY,))
        labels[line] = {"color": shades[index % len(shades)], "linestyle": stroke, "marker": marker}, label
    return labels


def distinct_labels(lines: Sequence[Parts]) -> list[str]:
    """Return a label of each line: its first part, and of the others as many as tell it from all lines.

    Args:
        lines (`Sequence[tuple[str, ...]]`): The same parts of each line, most telling first. The last one, the
            machine, is named on all lines if on one: times of lines without a machine would seem to be of any.
    """
    telling = []
    for line in lines:
        places, same = [0], [other for other in lines if other[0] == line[0]]
        for place, part in enumerate(line[1:], 1):
            if len({other[place] for other in same}) > 1:
                places.append(place)
                same = [other for other in same if other[place] == part]
        telling.append(places)
    machine = len(lines[0]) - 1 if lines else 0
    if any(machine in places for places in telling):
        telling = [sorted({*places, machine}) for places in telling]
    return [
        ", ".join(line[place] for place in places if line[place]) for line, places in zip(lines, telling, strict=True)
    ]


def draw_lines(
    axes: Any,
    grid: PanelGrid,
    found: Sequence[DraftMeasurement],
    labels: Labels,
    parts: Callable[[DraftMeasurement], Parts],
    value: Callable[[DraftMeasurement], int],
) -> None:
    """Draw tau against something, with its numbers at the points."""
    lines: dict[tuple, list[tuple[int, float]]] = {}
    few = len({parts(each) for each in found}) <= MOST_LINES_WITH_NUMBERS
    for each in found:
        lines.setdefault((grid.place(each), parts(each)), []).append((value(each), each.tau))
    for (place, line), points in lines.items():
        style, label = labels[line]
        points = sorted(points)
        axes[place].plot(*zip(*points, strict=True), label=label, linewidth=1.6, markersize=5, **style)
        for x, y in points if few else ():
            axes[place].annotate(
                f"{y:.2f}", (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=TINY,
                color=style["color"],
            )  # fmt: skip
    for axis in axes.flat:
        axis.margins(y=0.2)


def draw_round_times(
    column: Sequence[Axes], grid: PanelGrid, timed: Sequence[DraftMeasurement], labels: Labels
) -> None:
    """Draw a round's time, mean over the tasks, and by how much the longest block exceeds the shortest."""
    for axis, row in zip(column, grid.rows, strict=True):
        lines: dict[Parts, dict[int, list]] = {}
        grown = []
        for each in timed:
            if grid.row_of(each) == row:
                lines.setdefault(block_parts(each), {}).setdefault(each.draft.block_size, []).append(each.time)
        for line, by_size in lines.items():
            style, label = labels[line]
            sizes = sorted(by_size)
            total, draft = (
                [1e3 * sum(getattr(time, name) for time in by_size[size]) / len(by_size[size]) for size in sizes]
                for name in ("total", "draft")
            )
            axis.plot(sizes, total, label=label, linewidth=1.6, markersize=5, **style)
            axis.plot(sizes, draft, linewidth=1, markersize=3, alpha=0.5, **style)
            grown.append((total[-1], sizes[-1], f"{total[-1] / total[0] - 1:+.0%}", style["color"]))
        axis.set_ylim(bottom=0)
        axis.margins(y=0.18)
        _write_behind_lines(axis, grown)
        axis.set_ylabel("time of a round, ms", fontsize=SMALL)
        of_target = f"{row[0]}, " if row[0] else ""
        axis.set_title(fill(f"time of a round, {of_target}{row[1]}", 40), fontsize=9, fontweight="bold")


def _write_behind_lines(axis: Axes, texts: Sequence[tuple[float, float, str, str]]) -> None:
    """Write texts, given as height, x, text and color, behind the ends of lines, of close ones one above the other."""
    gap, lowest_free = LEAST_GAP * axis.get_ylim()[1], 0.0
    for height, x, text, color in sorted(texts):
        at = max(height, lowest_free)
        axis.annotate(text, (x, at), (7, 0), textcoords="offset points", va="center", fontsize=TINY, color=color)
        lowest_free = at + gap
    axis.set_ylim(top=max(axis.get_ylim()[1], lowest_free))


def set_whole_ticks(axis: Axes, values: Sequence[int]) -> None:
    ticks = sorted(set(values))
    room = 0.08 * (ticks[-1] - ticks[0])
    axis.set_xticks(ticks)
    axis.set_xlim(ticks[0] - room, ticks[-1] + room)


def same_heights(axes: Any) -> None:
    for row in axes:
        limits = [axis.get_ylim() for axis in row]
        for axis in row:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, which stays within 0 and 1 where counts are small."""
    if count == 0:
        return 0.0, 1.0
    z = 1.96
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def left_out_note(shown: int, found: int, what: str) -> str:
    """Return a sentence on what did not fit into a figure; empty if all did."""
    return "" if shown == found else f"The first {shown} of {found} {what}; the report's tables have all. "


def policies_note(found: Sequence[DraftMeasurement]) -> str:
    names = {short_policy(each.setting.policy) for each in found}
    return f"Verified: {', '.join(sorted(names))}."


# ---- confidences and load in panels


def draw_sweep(axis: Axes, sweep: ThresholdSweep) -> None:
    places = range(len(sweep.rows))
    kept = [row.tokens_per_round for row in sweep.rows]
    lost = [row.rejected_per_round for row in sweep.rows]
    bars = axis.bar(places, kept, 0.72, color=SKY, label="tokens per round, bonus included")
    axis.bar_label(bars, fmt="%.1f", fontsize=TINY, label_type="center")
    axis.bar(places, lost, 0.72, bottom=kept, color="none", edgecolor=GREY, hatch="///", label="rejected drafts")
    axis.set_xticks(places, [f"{row.threshold:g}" for row in sweep.rows])
    axis.set_xlabel("confidence threshold", fontsize=SMALL)
    title = "\n".join(fill(line, 44) for line in sweep.title.split("\n"))
    axis.set_title(title, fontsize=9, fontweight="bold")
    rates = axis.twinx()
    known = [(place, 100 * r.acceptance_rate) for place, r in enumerate(sweep.rows) if r.acceptance_rate is not None]
    if known:
        rates.plot(
            *zip(*known, strict=True), color=ORANGE, marker="o", markersize=4, label="accepted of verified drafts"
        )
        for place, rate in (known[0], known[-1]):
            rates.annotate(
                f"{rate:.0f} %", (place, rate), (0, 5), textcoords="offset points", ha="center", fontsize=SMALL,
                color=ORANGE, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
            )  # fmt: skip
    rates.set_ylim(0, 109)
    rates.set_ylabel("accepted of verified drafts, %", fontsize=SMALL, color=ORANGE)
    rates.tick_params(labelsize=SMALL, colors=ORANGE)
    rates.spines["top"].set_visible(False)


def shown_positions(found: Sequence[Reliability]) -> list[int]:
    """Return the positions to show: all, or evenly spread ones."""
    known = sorted({each.position for part in found for curve in part.curves.values() for each in curve})
    if len(known) <= MOST_POSITIONS:
        return known
    step = (len(known) - 1) / (MOST_POSITIONS - 1)
    return [known[round(index * step)] for index in range(MOST_POSITIONS)]


RELIABILITY_STYLES = {"raw": (ORANGE, "s"), "calibrated": (BLUE, "o"), "as decoded": (BLUE, "o")}


def draw_reliability(axis: Axes, part: Reliability, position: int) -> None:
    axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    errors = []
    for name, curve in part.curves.items():
        measured = next((each for each in curve if each.position == position), None)
        if measured is not None:
            colour, marker = RELIABILITY_STYLES[name]
            predicted, happened, counts = zip(*measured.bins, strict=True)
            if name != "raw":
                axis.bar(predicted, [n / sum(counts) for n in counts], 0.05, color=colour, alpha=0.2)
            axis.plot(predicted, happened, color=colour, marker=marker, markersize=3, linewidth=1.2, label=name)
            errors.append(f"{100 * measured.ece:.1f}")
    axis.set_title(
        f"position {position}\nECE {' → '.join(errors)} %" if errors else f"position {position}", fontsize=SMALL
    )
    axis.set_yticks([0, 0.5, 1], ["0", ".5", "1"])


def policy_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    unknown = [name for name in dict.fromkeys(names) if name not in POLICY_STYLES]
    return POLICY_STYLES | {name: OTHER_STYLES[index % len(OTHER_STYLES)] for index, name in enumerate(unknown)}


def draw_load(column: Sequence[Axes], curves: LoadCurves, styles: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    plain = {point.load: point.tokens_per_second for point in curves.policies.get("autoregressive", [])}
    for name, points in curves.policies.items():
        loads = [point.load for point in points]
        column[0].plot(loads, [point.tokens_per_second for point in points], label=name, **styles[name])
        ratios = [(p.load, p.tokens_per_second / plain[p.load]) for p in points if p.load in plain]
        if ratios:
            column[1].plot(*zip(*ratios, strict=True), **styles[name])
        column[2].plot(loads, [point.verified for point in points], **styles[name])
    if curves.reference:
        column[2].plot(
            *zip(*curves.reference, strict=True), "x", color=PINK, markersize=8, label="another implementation"
        )
    if not plain:
        column[1].text(
            0.5, 0.5, "plain decoding\nwas not measured", ha="center", va="center", fontsize=SMALL, color=GREY,
            transform=column[1].transAxes,
        )  # fmt: skip
        column[1].set_yticks([])
    column[0].set_title(curves.title, fontsize=9, fontweight="bold")
    column[0].set_yscale("log")
    column[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    column[0].yaxis.set_major_formatter("{x:g}")
    column[0].yaxis.set_minor_formatter(NullFormatter())
    column[1].set_ylim(bottom=0)
    column[2].set_ylim(bottom=0)
    column[2].set_xscale("log", base=2)
    column[2].set_xlabel(curves.load, fontsize=SMALL)
    column[2].xaxis.set_major_formatter("{x:.0f}")


def rate_label(cell: Mapping[str, Any]) -> str:
    rate = cell["requests_per_second"]
    return "all requests at once" if rate is None else f"{rate:.3g} requests/s"


# ---- around the panels


def make_panels(rows: int, columns: int, width: float, height: float, **share: Any) -> tuple[Figure, Any]:
    """Return a figure without pyplot, whose state belongs to the caller, and its panels; sizes in inches a panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.9 + columns * width, 0.5 + rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **share)


def legend_of(axes: Any) -> tuple[list[Any], list[str]]:
    """Return handles and labels of all panels, each label once."""
    known: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    return list(known.values()), list(known)


def finish(
    figure: Figure,
    axes: Any,
    kind: FigureKind,
    results: Sequence[Result],
    legend: tuple[list[Any], list[str]],
    notes: str = "",
    grid: str = "both",
) -> Figure:
    """Put title and legend above the panels, and below them where the numbers come from."""
    for axis in axes.flat:
        axis.grid(axis=grid, alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=SMALL)
    width, panels = figure.get_size_inches()
    width = max(width, 6.4)
    handles, labels = legend
    columns = max(1, min(len(labels), int((width - 0.2) / (LETTER_INCHES * max(map(len, labels), default=1) + 0.55))))
    labels = [fill(label, int((width - 0.75) / LETTER_INCHES)) for label in labels]
    footer = wrap(notes, int(width * 19)) + provenance_lines(kind.sources(results), int(width * 19))
    heading = wrap(kind.title, int(width * 8.5))
    num_lines = sum(1 + label.count("\n") for label in labels)  # several columns have no label of two lines
    top = 0.12 + 0.24 * len(heading) + LINE_INCHES * math.ceil(num_lines / columns) + 0.14
    bottom = 0.12 + 0.125 * len(footer)
    height = panels + top + bottom
    figure.set_size_inches(width, height)
    figure.get_layout_engine().set(rect=(0, bottom / height, 1, panels / height))
    figure.text(0.1 / width, 1 - 0.1 / height, "\n".join(heading), fontsize=13, fontweight="bold", va="top")
    figure.legend(
        handles, labels, loc="upper left", ncols=columns, fontsize=SMALL, frameon=False, borderaxespad=0, borderpad=0,
        labelspacing=0.3, handlelength=2.6, bbox_to_anchor=(0.1 / width, 1 - (0.16 + 0.24 * len(heading)) / height),
    )  # fmt: skip
    figure.text(
        0.1 / width, 0.06 / height, "\n".join(footer), fontsize=TINY, color="0.35", va="bottom", linespacing=1.25
    )
    return figure


def provenance_lines(results: Sequence[Result], width: int = 10_000) -> list[str]:
    """Return what measured some results, and where; machines and versions that they share are named once.

    Args:
        results (`Sequence[Mapping]`): The results.
        width (`int`): Characters of a line at most.
    """
    commands: dict[str, list[str]] = {}
    for result in results:
        origin = provenance_of(result)
        versions = [f"{name} {origin[name]}" for name in ("torch", "transformers") if name in origin]
        where = "; ".join([str(origin.get("device", "unknown machine")), *versions])
        revision = f" (revision {origin['revision']})" if "revision" in origin else ""
        commands.setdefault(where, []).append(f"{origin.get('command', 'unknown command')}{revision}")
    lines = []
    for where, ran in commands.items():
        shown = list(dict.fromkeys(ran))
        more = [f"and {len(shown) - 3} more commands"] if len(shown) > 3 else []
        lines += wrap(f"Measured on {where}: {'; '.join(shown[:3] + more)}", width, break_on_hyphens=False)
    return lines
