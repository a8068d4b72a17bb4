"""How good drafts are: acceptance by position, depth and block size. The paper's Figures 2, 3 and 4."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import INK, MARKERS, METHODS, finish, handles_of, load, panels

DOMAINS = ("math", "code", "prose")
KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
FEWEST_ROUNDS = 30  # of a point that is shown
SAMPLED = "temperature 1"
SMALL_TARGET = "A target of 5.5 M parameters, drafts trained alike for 500 steps; 60 held-out prompts, temperature 1."


def drafts_by_domain() -> dict[str, Any]:
    """Return the drafts of both result files by name."""
    return load("domains")["drafts"] | load("domains_depth")["drafts"]


def reached(num_rounds: int, rates: list[float | None]) -> list[float]:
    """Return how many rounds came to each position: as many as accepted all before it."""
    counts = [float(num_rounds)]
    for rate in rates[:-1]:
        counts.append(counts[-1] * (rate or 0.0))
    return counts


def draw_acceptance(axis: Axes, kind: str, label: str, rates: Sequence[float | None], counts: Sequence[float]) -> None:
    """Draw the acceptance of each position to which enough rounds came."""
    points = [
        (place, rate)
        for place, (rate, count) in enumerate(zip(rates, counts, strict=True), start=1)
        if rate is not None and count >= FEWEST_ROUNDS
    ]
    axis.plot(*zip(*points, strict=True), color=METHODS[kind], marker=MARKERS[kind], label=label)
    axis.set(xlabel="draft position", xticks=range(1, 8), ylim=(0, 0.85))


def figure_2_position_wise() -> Figure:
    """Draw the acceptance of each position, given that all before it were accepted."""
    figure, axes = panels([list(DOMAINS)], 3.3, sharey=True)
    drafts = drafts_by_domain()
    for domain, axis in axes.items():
        for name, label in (("dspark_5", "DSpark, 5 layers"), ("dflash_5", "DFlash, 5 layers"), ("eagle3", "Eagle3")):
            measured = drafts[name]["measured"][domain][SAMPLED]
            counts = reached(measured["rounds"], measured["acceptance"])
            draw_acceptance(axis, KINDS[name.split("_")[0]], label, measured["acceptance"], counts)
        axis.set_title(domain)
    axes["math"].set_ylabel("conditional acceptance")
    return finish(
        figure,
        "DSpark's acceptance stays level along the block; DFlash's decays",
        f"{SMALL_TARGET} γ = 7. Positions that {FEWEST_ROUNDS} rounds or more reached.",
        axes["math"],
    )


def figure_3_depth() -> Figure:
    """Draw tokens per round against the number of layers."""
    figure, axes = panels([list(DOMAINS)], 3.2, sharey=True)
    drafts = drafts_by_domain()
    for domain, axis in axes.items():
        for key, kind in list(KINDS.items())[:2]:
            layers = (2, 5)
            taus = [drafts[f"{key}_{count}"]["measured"][domain][SAMPLED]["tau"] for count in layers]
            axis.plot(layers, taus, color=METHODS[kind], marker=MARKERS[kind], label=kind)
            for count, tau in zip(layers, taus, strict=True):
                axis.annotate(
                    f"{tau:.2f}", (count, tau), (0, 7 if kind == "DSpark" else -15), textcoords="offset points",
                    ha="center", color=METHODS[kind],
                )  # fmt: skip
        axis.axhline(taus[-1], color=METHODS["DFlash"], linestyle=":", linewidth=1)
        axis.set(title=domain, xlabel="layers of the draft", xticks=(2, 5), xlim=(1.2, 5.8), ylim=(1.4, 2.9))
    axes["math"].set_ylabel("τ, tokens per round")
    return finish(
        figure,
        "Two layers of DSpark commit more than five of DFlash",
        f"{SMALL_TARGET} γ = 7. Dotted: five layers of DFlash.",
        axes["math"],
    )


def figure_4_block_size() -> Figure:
    """Draw tokens per round, and the time of a round, against the block size."""
    figure, axes = panels([["greedy", SAMPLED, "time"]], 3.3)
    for row_kind, kind in list(KINDS.items())[:2]:
        for regime in ("greedy", SAMPLED):
            rows = [
                (row["block_size"], row["tau"]["math"])
                for row in load("tau_by_block_size")["block_sizes"]
                if row["kind"] == row_kind and row["regime"] == regime
            ]
            axis = axes[regime]
            axis.plot(*zip(*sorted(rows), strict=True), color=METHODS[kind], marker=MARKERS[kind])
            for size, tau in rows:
                axis.annotate(
                    f"{tau:.2f}", (size, tau), (0, 6), textcoords="offset points", ha="center", color=METHODS[kind]
                )
            axis.set(title=f"math, {regime}", xlabel="γ, draft tokens in a block", xticks=(7, 15), xlim=(5, 17))
            axis.set(ylim=(2.0, 4.2))
    axes["greedy"].set_ylabel("τ, tokens per round")
    heads = {
        None: ("DFlash", "DFlash", "-"),
        "vanilla": ("DSpark", "DSpark", "-"),
        "rnn": ("DSpark", "DSpark, RNN head", "--"),
    }
    for head, (kind, label, stroke) in heads.items():
        rows = [
            (row["block_size"], row["total_ms"])
            for row in load("block_sizes_amx")["block_sizes"]
            if row["head"] == head
        ]
        axes["time"].plot(
            *zip(*sorted(rows), strict=True), color=METHODS[kind], marker=MARKERS[kind], linestyle=stroke, label=label
        )
    axes["time"].set(title="time of a round", ylabel="ms", xlabel="γ, draft tokens in a block", xticks=(4, 8, 16))
    axes["time"].set(ylim=(0, 215), xlim=(2.5, 17.5))
    axes["time"].yaxis.label.set_color(INK)
    return finish(
        figure,
        "Longer blocks help DSpark, and its head costs next to nothing",
        "Left: the shipped target, drafts of 2 layers trained alike, 50 held-out questions. Right: Qwen3-0.6B's size, "
        "random weights, bfloat16, whole blocks, two cores of an Intel Xeon with AMX.",
        handles_of([axes["time"]]),
    )
