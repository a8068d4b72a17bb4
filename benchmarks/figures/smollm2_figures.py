"""SmolLM2-135M: what drafts of three kinds commit that were trained alike, and whether the shipped one knows it."""

from typing import Any

from drafts import FEWEST_ROUNDS, KINDS
from matplotlib.figure import Figure
from style import GREY, MARKERS, METHODS, PALE, finish, handles_of, load, panels

DOMAINS = ("mathematics", "code", "chat")
TARGET = "SmolLM2-135M-Instruct, prompts of the paper's evaluation."


def of_domain(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return position and acceptance over all tasks of a domain, where enough rounds came to the position."""
    points = []
    for place in range(len(rows[0]["acceptance"])):
        reached = sum(row["reached"][place] for row in rows)
        accepted = sum(row["reached"][place] * (row["acceptance"][place] or 0.0) for row in rows)
        if reached >= FEWEST_ROUNDS:
            points.append((place + 1, accepted / reached))
    return points


def smollm2_acceptance() -> Figure:
    """Draw the acceptance of each position by domain, as the paper's Figure 2."""
    figure, axes = panels([list(DOMAINS)], 3.3, sharey=True)
    found = load("smollm2_tau_paper")["rows"]
    for domain, axis in axes.items():
        for key, kind in KINDS.items():
            rows = [row for row in found if (row["kind"], row["regime"]) == (key, "sampled")]
            points = of_domain([row for row in rows if row["domain"] == domain])
            axis.plot(*zip(*points, strict=True), color=METHODS[kind], marker=MARKERS[kind], label=kind)
        axis.set(title=domain, xlabel="draft position", xticks=range(1, 8), ylim=(0, 0.85))
    axes["mathematics"].set_ylabel("conditional acceptance")
    return finish(
        figure,
        "What three kinds of drafts commit after the same training",
        f"{TARGET} Temperature 1, γ = 7. Positions that {FEWEST_ROUNDS} rounds or more reached.",
        axes["mathematics"],
    )


def smollm2_confidence() -> Figure:
    """Draw predicted against realised survival of the first token, and tokens against thresholds, by domain."""
    names = [[f"{domain}, {part}" for domain in DOMAINS] for part in ("reliability", "thresholds")]
    figure, axes = panels(names, 5.4)
    found = {row["domain"]: row for row in load("smollm2_confidence")["rows"] if row["regime"] == "sampled"}
    for domain, row in found.items():
        axis = axes[f"{domain}, reliability"]
        raw, calibrated = row["raw"][0], row["calibrated"][0]
        predicted, _, counts = zip(*calibrated["bins"], strict=True)
        axis.bar(predicted, [count / sum(counts) for count in counts], 0.055, color=PALE)
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
        for part, colour, stroke, label in (
            (raw, GREY, "--", "raw"),
            (calibrated, METHODS["DSpark"], "-", "calibrated"),
        ):
            x, y, _ = zip(*part["bins"], strict=True)
            axis.plot(x, y, color=colour, linestyle=stroke, marker="o", markersize=3.5, label=label)
        axis.set(title=domain, xlim=(0, 1), ylim=(0, 1), xlabel="predicted survival")
        ece = f"ECE {100 * raw['ece']:.1f} → {100 * calibrated['ece']:.1f} %"
        axis.text(0.04, 0.94, ece, transform=axis.transAxes, va="top", fontsize=8.5)
        axis = axes[f"{domain}, thresholds"]
        rows = row["thresholds"]
        kept, lost = ([each[f"{name}_per_round"] for each in rows] for name in ("tokens", "rejected"))
        axis.bar(range(len(rows)), kept, 0.72, color=METHODS["DSpark"], alpha=0.85)
        axis.bar(range(len(rows)), lost, 0.72, bottom=kept, color="white", edgecolor=METHODS["DSpark"], hatch="////")
        axis.set_xticks(range(len(rows)), [f"{each['threshold']:g}".replace("0.", ".") for each in rows])
        axis.set(xlabel="confidence threshold", ylim=(0, 8.6))
        axis.grid(False, axis="x")
    axes["mathematics, reliability"].set_ylabel("realised survival")
    axes["mathematics, thresholds"].set_ylabel("tokens of a round:\ncommitted, rejected")
    return finish(
        figure,
        "How far the shipped draft's confidence can be trusted, by domain",
        f"{TARGET} Temperature 1, whole blocks; none of these prompts was calibrated on. Survival of the first draft "
        "token. Shaded: share of rounds. Hatched: drafts that are verified and rejected.",
        handles_of([axes["mathematics, reliability"]]),
    )
