"""The paper's figures, and two of our own, drawn from result files.

Knows nothing of how anything was measured, and of files only how a figure is saved.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .measurements import (
    DraftMeasurement,
    MissingResults,
    Result,
    comparable,
    kind_of,
    load_curves,
    measurements,
    of_kind,
    reliabilities,
    several_batches,
    threshold_sweeps,
    whole_block_evaluations,
)
from .plot_panels import (
    AMBER,
    BLACK,
    BLUE,
    FEW_ROUNDS,
    GREEN,
    MOST_PANELS,
    MOST_ROWS,
    ORANGE,
    SKY,
    SMALL,
    TINY,
    FigureKind,
    PanelGrid,
    block_parts,
    by_block_size,
    by_setting,
    depth_parts,
    draft_labels,
    draw_lines,
    draw_load,
    draw_reliability,
    draw_round_times,
    draw_sweep,
    finish,
    flowing_panels,
    kind_parts,
    left_out_note,
    legend_of,
    make_panels,
    parts_within_rows,
    policies_note,
    policy_styles,
    rate_label,
    same_heights,
    set_whole_ticks,
    shown_positions,
    varied,
    wilson_interval,
)

# Of matplotlib, which is imported where it is used.
Figure = Any

EVAL = "hf-dspark eval --target TARGET --draft DRAFT ..."


def save_figure(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG; the same figure gives the same bytes.

    Args:
        figure (`matplotlib.figure.Figure`): The figure.
        path (`str` or `Path`): Where to, without a suffix.

    Returns:
        `tuple[Path, Path]`: The PNG file and the SVG file.
    """
    from matplotlib import rc_context

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg"))
    with rc_context({"svg.hashsalt": "hf_dspark", "svg.fonttype": "none"}):
        figure.savefig(png, dpi=130)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


# ---- the paper's figures


def figure_2_position_wise(results: Sequence[Result]) -> Figure:
    """Draw how often each draft position is accepted, given that all before it were; one line per draft.

    Args:
        results (`Sequence[Mapping]`): Evaluations (or acceptance results) of drafts, `benchmarks/domains.py`'s.

    Returns:
        `matplotlib.figure.Figure`: Tasks side by side, targets, block sizes and temperatures below each other; where
        tasks were not measured, the next panels take their places.

    Raises:
        MissingResults: If no result holds acceptance by position.

    The paper's Figure 2.
    """
    found = _position_wise(results)
    _require(found, POSITION_WISE, "acceptance by position")
    grid = PanelGrid.of(found, by_block_size)
    parts = parts_within_rows(found, grid)
    labels = draft_labels(found, parts)
    figure, axes, panels = flowing_panels(grid, found)
    for each in found:
        style, label = labels[parts(each)]
        points = [(k, rate) for k, rate in enumerate(each.acceptance, 1) if rate is not None]
        axis = panels[grid.place(each)]
        axis.plot(*zip(*points, strict=True), label=label, linewidth=1.6, markersize=4, **style)
        few = [(k, rate) for k, rate in points if each.reached[k - 1] < FEW_ROUNDS]
        if few:
            hollow = style | {"linestyle": "none", "markerfacecolor": "white"}
            axis.plot(*zip(*few, strict=True), markersize=4, zorder=3, **hollow)
        axis.vlines(
            [k for k, _ in points],
            *zip(*(wilson_interval(rate, each.reached[k - 1]) for k, rate in points), strict=True),
            color=style["color"], linewidth=0.8, alpha=0.45,
        )  # fmt: skip
    for axis in axes[:, 0]:
        axis.set_ylabel("accepted, given that\nall before it were", fontsize=SMALL)
    for axis in list(panels.values())[-len(grid.tasks) :]:
        axis.set_xlabel("draft position", fontsize=SMALL)
    for axis in axes.flat:
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylim(0, 1.03)
    notes = f"Thin bars: 95 % intervals, as if rounds were independent. Hollow: fewer than {FEW_ROUNDS} rounds. "
    return finish(figure, axes, POSITION_WISE, results, legend_of(axes), notes + policies_note(found))


def figure_3_depth(results: Sequence[Result]) -> Figure:
    """Draw tau against the number of layers of the draft.

    Args:
        results (`Sequence[Mapping]`): As for [`figure_2_position_wise`], of drafts of several depths.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        MissingResults: If no kind of draft was measured at two depths or more.

    The paper's Figure 3.
    """
    found = _by_depth(results)
    _require(found, DEPTH, "tau at two depths of one kind of draft")
    grid = PanelGrid.of(found, by_block_size)
    figure, axes = make_panels(len(grid.rows), len(grid.tasks), 2.9, 2.3, sharex=True, sharey="row")
    labels = draft_labels(found, kind_parts)
    draw_lines(axes, grid, found, labels, kind_parts, lambda each: each.draft.num_layers)
    grid.name(axes, "τ, tokens per round\n(bonus included)")
    for axis in axes[-1]:
        axis.set_xlabel("layers of the draft", fontsize=SMALL)
        set_whole_ticks(axis, [each.draft.num_layers for each in found])
    return finish(figure, axes, DEPTH, results, legend_of(axes), policies_note(found))


def figure_4_block_size(results: Sequence[Result]) -> Figure:
    """Draw tau, and the time of a round, against the block size.

    Args:
        results (`Sequence[Mapping]`): As for [`figure_2_position_wise`], of drafts with several block sizes; or
            measurements by block size, see [`measurements`].

    Returns:
        `matplotlib.figure.Figure`: A panel per task, target and temperature, and beside them those of times, which
        may be of another target.

    Raises:
        MissingResults: If no draft was measured at two block sizes or more.

    The paper's Figure 4.
    """
    found = _by_block_size(results)
    _require(found, BLOCK_SIZE, "one kind of draft at two block sizes")
    labels = draft_labels(found, block_parts)
    with_tau = [each for each in found if each.tau is not None]
    timed = [each for each in found if each.time is not None]
    taus, times = PanelGrid.of(with_tau, by_setting), PanelGrid.of(timed, by_setting)
    rows, tasks = max(len(taus.rows), len(times.rows)), len(taus.tasks)
    figure, axes = make_panels(rows, tasks + bool(timed), 2.9, 2.5)
    if with_tau:
        panels = axes[: len(taus.rows), :tasks]
        draw_lines(panels, taus, with_tau, labels, block_parts, lambda each: each.draft.block_size)
        taus.name(panels, "τ, tokens per round\n(bonus included)")
        same_heights(panels)
    if timed:
        draw_round_times(axes[: len(times.rows), -1], times, timed, labels)
    for shown, columns in ((with_tau, axes[:, :tasks]), (timed, axes[:, tasks:])):
        for axis in columns.flat:
            axis.set_visible(axis.has_data())
            axis.set_xlabel("γ, draft tokens in a block", fontsize=SMALL)
            set_whole_ticks(axis, [each.draft.block_size for each in shown])
    notes = "Times: bold lines are whole rounds, faint ones the drafting in them. " if timed else ""
    return finish(
        figure,
        axes,
        BLOCK_SIZE,
        results,
        legend_of(axes),
        notes + policies_note(found),
    )


def figure_5_threshold(results: Sequence[Result]) -> Figure:
    """Draw tokens per round, rejected drafts and the acceptance rate against the confidence threshold.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/threshold_sweep.py`; or evaluations of whole blocks with
            confidences, which are cut afterwards.

    Returns:
        `matplotlib.figure.Figure`: A panel per regime, or per task and evaluation.

    Raises:
        MissingResults: If no result holds thresholds or confidences.

    The paper's Figure 5.
    """
    found = threshold_sweeps(results)
    _require(found, THRESHOLD, "confidences of whole blocks, or thresholds")
    sweeps = found[:MOST_PANELS]
    columns = min(len(sweeps), 3)
    figure, axes = make_panels(math.ceil(len(sweeps) / columns), columns, 3.5, 2.6, sharey=True)
    for axis, sweep in zip(axes.flat, sweeps, strict=False):
        draw_sweep(axis, sweep)
    for axis in axes.flat[len(sweeps) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("tokens per round", fontsize=SMALL)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    line = figure.axes[-1].get_legend_handles_labels()
    notes = left_out_note(len(sweeps), len(found), "measurements")
    legend = handles + line[0], labels + line[1]
    return finish(figure, axes, THRESHOLD, results, legend, notes, grid="y")


def figure_6_reliability(results: Sequence[Result]) -> Figure:
    """Draw predicted survival against what happened, by draft position.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/calibrate_pair.py`, of the kind calibration, or evaluations of
            whole blocks with confidences.

    Returns:
        `matplotlib.figure.Figure`: A column per position (eight of them at most), a row per regime.

    Raises:
        MissingResults: If no result holds predictions.

    The paper's Figure 6.
    """
    found = reliabilities(results)
    _require(found, RELIABILITY, "predicted and realised survival")
    count, found = len(found), found[:MOST_ROWS]
    positions = shown_positions(found)
    figure, axes = make_panels(len(found), len(positions), 1.55, 1.7, sharex=True, sharey=True)
    for row, part in zip(axes, found, strict=True):
        for axis, position in zip(row, positions, strict=True):
            draw_reliability(axis, part, position)
        row[0].set_ylabel(f"{fill(part.title, 26)}\nrealised survival", fontsize=SMALL)
    for axis in axes[-1]:
        axis.set_xlabel("predicted survival", fontsize=SMALL)
        axis.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    notes = left_out_note(len(found), count, "measurements")
    return finish(figure, axes, RELIABILITY, results, legend_of(axes), notes)


def figure_8_load(results: Sequence[Result]) -> Figure:
    """Draw throughput, gain over plain decoding and verification budget against load; one line per policy.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/scheduler.py` and `benchmarks/simulator.py`; or evaluations at
            several batch sizes.

    Returns:
        `matplotlib.figure.Figure`: A column per machine.

    Raises:
        MissingResults: If no result holds several loads.

    The paper's Figure 8.
    """
    found = load_curves(results)
    _require(found, LOAD, "several loads")
    figure, axes = make_panels(3, len(found), 2.7, 2.1, sharex="col")
    styles = policy_styles(name for curves in found for name in curves.policies)
    for column, curves in zip(axes.T, found, strict=True):
        draw_load(column, curves, styles)
    names = ("throughput, tokens/s", "throughput over\nautoregressive decoding's",
             "verified tokens per request\nand round (drafts + 1)")  # fmt: skip
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.set_ylabel(name, fontsize=SMALL)
    return finish(figure, axes, LOAD, results, legend_of(axes))


# ---- our own


def figure_jagged(results: Sequence[Result]) -> Figure:
    """Draw each scheduler's throughput on jagged step-time curves over that of the unconstrained search.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/scheduler.py`; the first is drawn.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        MissingResults: If there is none.
    """
    found = [result for result in of_kind(results, "scheduler") if result.get("jagged")][:1]
    _require(found, JAGGED, "throughput on jagged step times")
    kinds = found[0]["jagged"]
    styles = policy_styles(policy for curves in kinds.values() for rows in curves.values() for policy in rows)
    figure, axes = make_panels(len(kinds), 1, 10.5, 2.2, sharex=True)
    for axis, (kind, curves) in zip(axes[:, 0], kinds.items(), strict=True):
        names = list(curves)
        policies = list(curves[names[0]])
        width = 0.8 / len(policies)
        for index, policy in enumerate(policies):
            places = [place + width * (index - (len(policies) - 1) / 2) for place in range(len(names))]
            values = [curves[name][policy] for name in names]
            colour = styles[policy]["color"]
            bars = axis.bar(places, values, 0.92 * width, label=policy, color=colour)
            axis.bar_label(bars, [f"{value:.2f}".lstrip("0") for value in values], fontsize=TINY)
        axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
        axis.set_title(f"{kind} confidences", fontsize=9)
        axis.set_ylabel("throughput over\nthe oracle's", fontsize=SMALL)
        axis.set_ylim(0, 1.15)
    return finish(figure, axes, JAGGED, found, legend_of(axes), grid="y")


def figure_trace(results: Sequence[Result]) -> Figure:
    """Draw throughput and SLO attainment of a simulated engine by policy, one bar per arrival rate.

    Args:
        results (`Sequence[Mapping]`): Of `benchmarks/simulator.py`; the first is drawn.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        MissingResults: If there is none.
    """
    found = of_kind(results, "simulator")[:1]
    _require(found, TRACE, "a simulated trace")
    cells, limit = found[0]["results"], found[0]["tpot_ms"]
    names = list(cells[0]["policies"])
    height = 0.8 / len(cells)
    figure, axes = make_panels(1, 2, 4.6, 0.3 + 0.17 * len(names) * len(cells), sharey=True)
    for index, (cell, colour) in enumerate(
        zip(cells, itertools.cycle((SKY, BLUE, BLACK, AMBER, ORANGE, GREEN)), strict=False)
    ):
        places = [row + height * (index - (len(cells) - 1) / 2) for row in range(len(names))]
        rates = [cell["policies"][name]["tokens_per_second"] for name in names]
        attained = [100 * cell["policies"][name]["slo_attainment"] for name in names]
        for axis, values in zip(axes[0], (rates, attained), strict=True):
            bars = axis.barh(places, values, 0.9 * height, color=colour, label=rate_label(cell))
            axis.bar_label(bars, fmt="%.0f", fontsize=TINY, padding=2)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    axes[0, 0].set_xlabel("throughput, tokens/s", fontsize=SMALL)
    axes[0, 0].set_xmargin(0.12)
    axes[0, 1].set_xlabel(f"requests within {limit:g} ms per output token, %", fontsize=SMALL)
    axes[0, 1].set_xlim(0, 112)
    notes = (
        f"{found[0]['num_requests']} requests of {found[0]['trace']}, at most {found[0]['max_requests']} at a time."
    )
    return finish(figure, axes, TRACE, found, legend_of(axes), notes, grid="x")


# ---- what each figure uses


def _position_wise(results: Sequence[Result]) -> list[DraftMeasurement]:
    return [each for each in comparable(measurements(results)) if any(rate is not None for rate in each.acceptance)]


def _by_depth(results: Sequence[Result]) -> list[DraftMeasurement]:
    """Return drafts of several depths, and those of one depth with the same target and block size beside them."""
    found = [each for each in comparable(measurements(results)) if each.tau is not None and each.draft.num_layers]
    depths = varied(found, depth_parts, lambda each: each.draft.num_layers)
    wanted = {(each.setting.target, each.draft.block_size) for each in depths}
    return [each for each in found if (each.setting.target, each.draft.block_size) in wanted]


def _by_block_size(results: Sequence[Result]) -> list[DraftMeasurement]:
    return varied(comparable(measurements(results)), block_parts, lambda each: each.draft.block_size)


def _holding(results: Sequence[Result], found: Sequence[DraftMeasurement]) -> list[Result]:
    wanted = set(found)
    return [result for result in results if not wanted.isdisjoint(measurements([result]))]


def _with_confidences(results: Sequence[Result], *kinds: str) -> list[Result]:
    chosen = whole_block_evaluations(results)
    return [result for result in results if kind_of(result) in kinds or any(result is each for each in chosen)]


POSITION_WISE = FigureKind(
    "figure_2_position_wise",
    "How often each position of a draft is accepted",
    "Each point is the share of rounds in which the target accepted the draft token at this position, among the "
    "rounds in which it had accepted all before it. In the paper, drafts that see the tokens they have drawn (DSpark, "
    "Eagle3) stay level along the block, and those that guess all positions at once (DFlash) fall off.",
    f"{EVAL} for each draft, or python benchmarks/domains.py --output benchmarks/results/domains.json",
    figure_2_position_wise,
    lambda results: _holding(results, _position_wise(results)),
)
DEPTH = FigureKind(
    "figure_3_depth",
    "Tokens per round against the depth of the draft",
    "The block size is fixed. In the paper, two layers of DSpark do more than five of DFlash.",
    f"{EVAL} for drafts with different num_hidden_layers, or python benchmarks/domains.py --output "
    "benchmarks/results/domains.json",
    figure_3_depth,
    lambda results: _holding(results, _by_depth(results)),
)
BLOCK_SIZE = FigureKind(
    "figure_4_block_size",
    "Tokens per round, and the time of a round, against the block size",
    "A longer block pays as long as its last tokens are still accepted, and as it makes the round hardly longer. The "
    "percentages say how much longer a round with the longest block takes than one with the shortest.",
    f"{EVAL} for drafts with different block_size",
    figure_4_block_size,
    lambda results: _holding(results, _by_block_size(results)),
)
THRESHOLD = FigureKind(
    "figure_5_threshold",
    "What a confidence threshold prunes, and what it costs",
    "A block is verified up to its first token whose confidence is below the threshold; 0 verifies all of it. Bars "
    "are what a round yields and, hatched, what was verified in vain; the line is the share of verified drafts that "
    "were accepted.",
    f"python benchmarks/threshold_sweep.py, or {EVAL} with whole blocks",
    figure_5_threshold,
    lambda results: _with_confidences(results, "threshold_sweep"),
)
RELIABILITY = FigureKind(
    "figure_6_reliability",
    "Whether predicted survival can be trusted",
    "The survival of position k is the predicted probability that the first k draft tokens are all accepted. On the "
    "diagonal, predictions are true; below it, the draft is overconfident. Shaded bars are shares of rounds. ECE is "
    "the mean distance from the diagonal.",
    f"python benchmarks/calibrate_pair.py, hf-dspark calibrate, or {EVAL} with whole blocks",
    figure_6_reliability,
    lambda results: _with_confidences(results, "held_out_calibration", "calibration"),
)
LOAD = FigureKind(
    "figure_8_load",
    "Throughput and verification budget as the machine fills up",
    "Verifying costs little on an idle machine and competes with other requests on a busy one. A scheduler is "
    "to verify fewer drafts then; whole blocks stay as long as they are.",
    "python benchmarks/scheduler.py ... --output benchmarks/results/scheduler.json, python benchmarks/simulator.py "
    f"... --output benchmarks/results/simulator.json, or {EVAL} at several batch sizes",
    figure_8_load,
    lambda results: [*of_kind(results, "scheduler", "simulator"), *several_batches(results)],
)
JAGGED = FigureKind(
    "jagged_step_times",
    "Schedulers on step times with steps",
    "Expected throughput over that of a search that may look ahead (the oracle, which is not causal). Real step "
    "times rise in steps; a greedy search stops at the first one.",
    "python benchmarks/scheduler.py ... --output benchmarks/results/scheduler.json",
    figure_jagged,
    lambda results: of_kind(results, "scheduler"),
)
TRACE = FigureKind(
    "simulated_trace",
    "Schedulers serving a recorded trace in a simulated engine",
    "One bar per rate at which requests arrive. AdaSpec and the oracle are not causal: sampled drafts would not stay "
    "exact.",
    "python benchmarks/simulator.py ... --output benchmarks/results/simulator.json",
    figure_trace,
    lambda results: of_kind(results, "simulator")[:1],
)
FIGURES = (POSITION_WISE, DEPTH, BLOCK_SIZE, THRESHOLD, RELIABILITY, LOAD, JAGGED, TRACE)


def _require(found: Sequence[Any], kind: FigureKind, what: str) -> None:
    if not found:
        raise MissingResults(f"{kind.name}: no result that was given holds {what}. Measure it: {kind.command}")
