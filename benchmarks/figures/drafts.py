"""How good drafts are: acceptance by position. The paper's Figure 2."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import MARKERS, METHODS, drawn, finish, load, panels

DOMAINS = ("math", "code", "prose")
KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
FEWEST_ROUNDS = 30  # of a point that is shown
SAMPLED = "temperature 1"
SMALL_TARGET = "A target of 5.5 M parameters, drafts trained alike for 500 steps; 60 held-out prompts, temperature 1."


def draw_acceptance(axis: Axes, kind: str, label: str, rates: Sequence[float | None], counts: Sequence[float]) -> None:
    """Draw the acceptance of each position to which enough rounds came."""
    points = [
        (place, rate)
        for place, (rate, count) in enumerate(zip(rates, counts, strict=True), start=1)
        if rate is not None and count >= FEWEST_ROUNDS
    ]
    axis.plot(*zip(*points, strict=True), color=METHODS[kind], marker=MARKERS[kind], label=label)
    axis.set(xlabel="draft position", xticks=range(1, 8), ylim=(0, 0.85))


@drawn
def figure_2_position_wise() -> Figure:
    """Draw the acceptance of each position, given that all before it were accepted."""
    figure, axes = panels([list(DOMAINS)], 3.3, sharey=True)
    drafts = load("domains")["drafts"] | load("domains_depth")["drafts"]
    for domain, axis in axes.items():
        for name, label in (("dspark_5", "DSpark, 5 layers"), ("dflash_5", "DFlash, 5 layers"), ("eagle3", "Eagle3")):
            measured = drafts[name]["measured"][domain][SAMPLED]
            before = [rate or 0.0 for rate in measured["acceptance"][:-1]]
            counts = [*accumulate(before, float.__mul__, initial=float(measured["rounds"]))]  # that came so far
            draw_acceptance(axis, KINDS[name.split("_")[0]], label, measured["acceptance"], counts)
        axis.set_title(domain)
    axes["math"].set_ylabel("conditional acceptance")
    return finish(
        figure,
        "DSpark's acceptance stays level along the block; DFlash's decays",
        f"{SMALL_TARGET} γ = 7. Positions that {FEWEST_ROUNDS} rounds or more reached.",
        axes["math"],
    )
