"""How good drafts are, and how far their confidences can be trusted. The paper's Figures 2, 5 and 6."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from style import GREY, INK, MARKERS, METHODS, PALE, drawn, finish, handles_of, load, panels

DOMAINS = ("math", "code", "prose")
KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
FEWEST_ROUNDS = 30  # of a point that is shown
SMALL_TARGET = "A target of 5.5 M parameters, drafts trained alike for 500 steps; 60 held-out prompts, temperature 1."
PAIR = "The shipped pair, GSM8K."
POSITIONS = (1, 3, 5, 7)
REGIMES = {"greedy": "greedy", "sampled": "temperature 1"}


@drawn
def figure_2_position_wise() -> Figure:
    """Draw the acceptance of each position, given that all before it were accepted."""
    figure, axes = panels([list(DOMAINS)], 3.3, sharey=True)
    drafts = load("domains")["drafts"]
    for domain, axis in axes.items():
        for name, label in (("dspark_5", "DSpark, 5 layers"), ("dflash_5", "DFlash, 5 layers"), ("eagle3", "Eagle3")):
            measured = drafts[name]["measured"][domain]["temperature 1"]
            before = [rate or 0.0 for rate in measured["acceptance"][:-1]]
            counts = [*accumulate(before, float.__mul__, initial=float(measured["rounds"]))]  # that came so far
            pairs = enumerate(zip(measured["acceptance"], counts, strict=True), start=1)
            points = [(place, rate) for place, (rate, count) in pairs if rate is not None and count >= FEWEST_ROUNDS]
            kind = KINDS[name.split("_")[0]]
            axis.plot(*zip(*points, strict=True), color=METHODS[kind], marker=MARKERS[kind], label=label)
        axis.set(title=domain, xlabel="draft position", xticks=range(1, 8), ylim=(0, 0.85))
    axes["math"].set_ylabel("conditional acceptance")
    return finish(
        figure,
        "DSpark's acceptance stays level along the block; DFlash's decays",
        f"{SMALL_TARGET} γ = 7. Positions that {FEWEST_ROUNDS} rounds or more reached.",
        axes["math"],
    )


def draw_thresholds(axis: Axes, rows: Sequence[Mapping[str, float]]) -> None:
    """Draw tokens and rejected drafts of a round at each threshold."""
    blue, places = METHODS["DSpark"], range(len(rows))
    kept, lost = ([row[f"{name}_per_round"] for row in rows] for name in ("tokens", "rejected"))
    axis.bar(places, kept, 0.72, color=blue, alpha=0.85)
    axis.bar(places, lost, 0.72, bottom=kept, color="white", edgecolor=blue, hatch="////", linewidth=0.8)
    axis.set_xticks(places, [f"{row['threshold']:g}".replace("0.", ".") for row in rows])
    axis.set_xlabel("confidence threshold")
    axis.grid(False, axis="x")


def draw_reliability(axis: Axes, raw: Mapping[str, Any], calibrated: Mapping[str, Any]) -> None:
    """Draw realised against predicted survival, before and after calibration."""
    predicted, _, counts = zip(*calibrated["bins"], strict=True)
    axis.bar(predicted, [count / sum(counts) for count in counts], 0.055, color=PALE)
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for part, colour, stroke, label in ((raw, GREY, "--", "raw"), (calibrated, METHODS["DSpark"], "-", "calibrated")):
        x, y, _ = zip(*part["bins"], strict=True)
        axis.plot(x, y, color=colour, linestyle=stroke, marker="o", markersize=3.5, label=label)
    axis.set(xlim=(0, 1), ylim=(0, 1))
    ece = f"ECE {100 * raw['ece']:.1f} → {100 * calibrated['ece']:.1f} %"
    axis.text(0.04, 0.94, ece, transform=axis.transAxes, va="top", fontsize=8.5)


@drawn
def figure_5_threshold() -> Figure:
    """Draw tokens per round and the acceptance rate against the confidence threshold."""
    figure, axes = panels([list(REGIMES)], 3.4, sharey=True)
    blue, twins = METHODS["DSpark"], {}
    for regime, axis in axes.items():
        rows = load("threshold_sweep")["regimes"][regime]
        draw_thresholds(axis, rows)
        places = range(len(rows))
        axis.set(title=REGIMES[regime], ylim=(0, 10.5))
        twin = twins[regime] = axis.twinx()
        rates = [100 * row["acceptance_rate"] for row in rows]
        twin.plot(places, rates, color=INK, marker="o", label="acceptance rate")
        for place in (0, len(rows) - 1):
            at = place, rates[place]
            twin.annotate(
                f"{at[1]:.0f} %", at, (0, 9), textcoords="offset points", ha="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        twin.set(ylim=(0, 105))
        twin.grid(False)
        twin.spines["right"].set_visible(regime == "sampled")
        twin.tick_params(right=regime == "sampled", labelright=regime == "sampled")
    axes["greedy"].set_ylabel("tokens per round")
    twins["sampled"].set_ylabel("acceptance rate, %")
    legend = {
        "tokens per round": Patch(facecolor=blue, alpha=0.85),
        "rejected drafts": Patch(facecolor="white", edgecolor=blue, hatch="////"),
        **handles_of([twins["greedy"]]),
    }
    return finish(
        figure,
        "A confidence threshold prunes the drafts that would be rejected",
        f"{PAIR} 50 held-out questions. A threshold of 0 verifies the whole block.",
        legend,
    )


@drawn
def figure_6_reliability() -> Figure:
    """Draw predicted survival against what happened, at four positions."""
    names = [[f"{regime} {position}" for position in POSITIONS] for regime in REGIMES]
    figure, axes = panels(names, 5.2, sharex=True, sharey=True)
    found = load("calibration")
    for regime, title in REGIMES.items():
        curves = found["regimes"][regime]
        for position in POSITIONS:
            axis = axes[f"{regime} {position}"]
            raw, calibrated = (curves[name][position - 1] for name in ("raw", "calibrated"))
            draw_reliability(axis, raw, calibrated)
            axis.set(aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            axis.set_xticklabels(["0", ".5", "1"])
            axis.set_yticklabels(["0", ".5", "1"])
            axis.set_title(f"position {position}" if regime == "greedy" else "")
        axes[f"{regime} 1"].set_ylabel(f"{title}\nrealised survival")
    for position in POSITIONS:
        axes[f"sampled {position}"].set_xlabel("predicted survival")
    return finish(
        figure,
        "Calibrated confidences predict what survives",
        f"{PAIR} {found['num_held_out']} questions that were not fitted on. Survival: all drafts up to this "
        "position are accepted. Shaded: share of rounds.",
        axes["greedy 1"],
    )
