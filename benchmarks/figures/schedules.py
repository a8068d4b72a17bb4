"""What schedulers gain, simulated: the paper's Figures 7 and 8, AdaSpec's attainment, jagged step times; and what
drafting ahead does not."""

from drafts import REGIMES
from matplotlib.figure import Figure
from style import INK, LIGHT_BLUE, METHODS, SCHEDULERS, drawn, finish, load, panels

REPLAYED = "The rounds are recorded ones of the shipped pair (GSM8K, temperature 1)."
ADASPEC = "AdaSpec, limit: expected"
GPU_TIMES = "Step times: linear layers as measured on the GPU, and 1/16 of the shortest step for drafting."


def draw(axis, name: str, x, y, **changes) -> None:
    """Draw one scheduler's line in its style."""
    label, style = SCHEDULERS[name]
    axis.plot(x, y, label=label, **{"markersize": 4, **style, **changes})


def on_gpu(curve: str) -> str:
    """Return how a curve such as `A100 Llama-2-7B` is called in figures."""
    return " on ".join(reversed(curve.split()))


@drawn
def figure_7_frontier() -> Figure:
    """Draw throughput against the speed that each user sees."""
    found = load("frontier")["machines"]
    figure, axes = panels([list(found)], 3.7)
    for machine, axis in axes.items():
        for name, points in found[machine].items():
            speeds, rates = ([point[key] for point in points] for key in ("per_user", "tokens_per_second"))
            draw(axis, name, speeds, [rate / 1e3 for rate in rates])
        axis.set(title=on_gpu(machine), xlabel="speed per user, tokens/s", xlim=(0, None), ylim=(0, None))
    next(iter(axes.values())).set_ylabel("throughput, thousand tokens/s")
    largest = max(point["requests"] for points in found.values() for point in points["scheduled"])
    return finish(
        figure,
        "At any speed per user, the scheduler has the highest throughput",
        f"Simulated: 1 to {largest} requests stay active. {REPLAYED} {GPU_TIMES}",
        next(iter(axes.values())),
    )


@drawn
def figure_8_load() -> Figure:
    """Draw throughput and the tokens that are verified per request against concurrency."""
    titles = {"knee": "20 ms up to 512 tokens, then in proportion", "recorded": "two CPU cores, the shipped pair"}
    rows = ("throughput", "budget")
    figure, axes = panels([[f"{row} {name}" for name in titles] for row in rows], 5.2)
    budgets = load("scheduler")["budget"]
    for name, title in titles.items():
        points, top, below = budgets[name], axes[f"throughput {name}"], axes[f"budget {name}"]
        requests = [point["requests"] for point in points]
        for policy in ("autoregressive", "full block", "hull + fill"):
            draw(top, policy, requests, [point["tokens_per_second"][policy] / 1e3 for point in points])
            draw(below, policy, requests, [point["mean_verified"][policy] for point in points])
        top.set(title=title, xscale="log", ylim=(0, None))
        below.set(xlabel="concurrent requests", xscale="log", ylim=(0, None))
        ticks = [count for count in (1, 4, 16, 64, 256, 1024) if count <= requests[-1]]
        for axis in (top, below):
            axis.set_xticks(ticks, ticks)
            axis.minorticks_off()
    axes["throughput knee"].set_ylabel("throughput,\nthousand tokens/s")
    axes["budget knee"].set_ylabel("verified tokens\nper request and round")
    return finish(
        figure,
        "As load grows, the scheduler verifies fewer tokens and keeps its gain longer",
        "Expected throughput. Left: the paper's setting (γ = 5; math, code and chat with the acceptance that its "
        "Table 1 implies). Right: γ = 7, recorded confidences and measured step times of the shipped pair.",
        axes["throughput knee"],
    )


@drawn
def slo_attainment() -> Figure:
    """Draw the share of requests within the limit of the time per output token, against the arrival rate."""
    found = load("simulator")
    figure, axes = panels([["attainment", "throughput"]], 3.6)
    machine = on_gpu(found["cost"])
    rates = [cell["requests_per_second"] for cell in found["results"]]
    for policy in ("autoregressive", "fixed length 7", "fixed length 3", ADASPEC, "hull + fill"):
        cells = [cell["policies"][policy] for cell in found["results"]]
        draw(axes["attainment"], policy, rates, [100 * cell["slo_attainment"] for cell in cells])
        draw(axes["throughput"], policy, rates, [cell["tokens_per_second"] / 1e3 for cell in cells])
    limit = f"within {found['tpot_ms']:.1f} ms per token, %"
    axes["attainment"].set(ylabel=limit, ylim=(0, 104), xlim=(0, None), xlabel="requests per second")
    axes["throughput"].set(ylabel="thousand tokens/s", ylim=(0, None), xlim=(0, None), xlabel="requests per second")
    return finish(
        figure,
        "The scheduler keeps the time limit under loads where fixed lengths break it",
        f"Simulated: {found['num_requests']} requests of AdaSpec's conversation trace, {machine}. The limit is "
        f"the 90th percentile of plain decoding at the lowest load. {REPLAYED} {GPU_TIMES}",
        axes["attainment"],
    )


@drawn
def jagged_step_times() -> Figure:
    """Draw each scheduler's throughput on measured, jagged step times over that of an unconstrained search."""
    curves = {
        name: found for name, found in load("scheduler")["jagged"]["recorded"].items() if name[:4] in ("H100", "A100")
    }
    figure, axes = panels([["bars"]], 3.4)
    axis = axes["bars"]
    shown = {
        "Algorithm 1": ("Algorithm 1 as printed", {"color": "white", "edgecolor": INK, "hatch": "////"}),
        "hull + fill": ("DSpark, scheduled (default)", {"color": METHODS["DSpark"]}),
        "lagged budget + top-K": ("budget of two rounds ago + top-K", {"color": LIGHT_BLUE}),
    }
    for index, (policy, (label, style)) in enumerate(shown.items()):
        places = [place + 0.27 * (index - 1) for place in range(len(curves))]
        values = [100 * found[policy] for found in curves.values()]
        bars = axis.bar(places, values, 0.25, label=label, linewidth=0.8, **style)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axis.set_xticks(range(len(curves)), [name.replace(", ", "\n").replace("next probe", "padded") for name in curves])
    axis.set(ylabel="throughput, % of the best", ylim=(0, 112))
    axis.tick_params(axis="x", labelsize=8, length=0)
    axis.grid(False, axis="x")
    return finish(
        figure,
        "On jagged step times, the default stays within 2 % of the best search",
        "The best search may look ahead, which is not lossless. Expected throughput, mean of 300 rounds of 1 to 128 "
        "requests with recorded confidences of the shipped pair. Step times of linear layers as measured, "
        "interpolated or padded to the next measured size.",
        axis,
    )


def points(curve: dict[str, float]) -> tuple[list[int], list[float]]:
    """Return the places and values of a curve as a result file holds it."""
    return [*map(int, curve)], [*curve.values()]


@drawn
def drafting_ahead() -> Figure:
    """Draw how often a prepared block is the one that is needed, and what preparing is worth for many requests."""
    found = load("ahead")
    figure, axes = panels([["hits", "batches"]], 3.3)
    for (regime, name), colour in zip(REGIMES.items(), (METHODS["DSpark"], METHODS["DFlash"]), strict=True):
        for kind, line in (("best", "-"), ("uniform", ":")):
            blocks, rates = points(found["hits"][regime][kind])
            style = {"color": colour, "linestyle": line, "marker": "o"}
            axes["hits"].plot(blocks, [100 * rate for rate in rates], label=f"{name}, {kind}", **style)
        requests, speeds = points(found["batches"][regime])
        axes["batches"].plot(requests, speeds, color=colour, marker="o")
    axes["batches"].axhline(1.0, color=INK, linewidth=1)
    for axis, ticks, title, label in (
        (
            axes["hits"],
            blocks,
            "needed blocks of the best or a uniform fan-out, %",
            "blocks prepared in one verification",
        ),
        (axes["batches"], requests, "speed over drafting in turns", "concurrent requests"),
    ):
        axis.set(title=title, xlabel=label, xscale="log", ylim=(0, None))
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
    return finish(
        figure,
        "Many prepared blocks are hits, but drafting in turns is faster",
        "Simulated from recorded rounds of the shipped pair; right: step times of Qwen3-4B, compiled, a second GPU "
        "for the draft. Blocks that are prepared lack the last features. After a miss all requests wait.",
        axes["hits"],
    )
