"""Draw the results of the other benchmarks as PNG files.

cd benchmarks/results && python ../figures.py --scheduler scheduler.json --simulator simulator.json --output_dir .
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

STYLES = {
    "autoregressive": {"color": "0.45", "linestyle": ":"},
    "full block": {"color": "tab:brown", "linestyle": "--"},
    "fixed length 1": {"color": "tab:brown", "linestyle": ":"},
    "fixed length 7": {"color": "tab:brown", "linestyle": "--"},
    "confidence threshold .5": {"color": "tab:purple", "linestyle": "-"},
    "Algorithm 1": {"color": "tab:orange", "linestyle": "-", "marker": "o", "markersize": 7},
    "hull + fill": {"color": "tab:blue", "linestyle": "-", "marker": "o", "markersize": 4},
    "lagged budget + top-K": {"color": "tab:green", "linestyle": "-"},
    "oracle": {"color": "black", "linestyle": (0, (1, 2)), "linewidth": 2},
}
BUDGET_TITLES = {
    "knee": "20 ms up to 512 tokens, then in proportion",
    "line": "20 ms + 0.03 ms per token",
    "recorded": "recorded confidences, measured step times",
}


def budget(result: dict[str, Any], path: Path) -> None:
    """Draw verified tokens, throughput and gain against concurrency, one column per step-time curve."""
    from matplotlib import pyplot

    sections = result["budget"]
    figure, axes = pyplot.subplots(
        3,
        len(sections),
        figsize=(4.6 * len(sections), 9),
        squeeze=False,
        sharex="col",
        sharey="row",
        layout="constrained",
    )
    for column, (name, rows) in zip(axes.T, sections.items(), strict=True):
        _budget_column(column, rows)
        column[0].set_title(BUDGET_TITLES[name])
    axes[0, 0].set_ylim(bottom=0)
    axes[2, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("verified tokens per request\nand round (drafts + 1)")
    axes[1, 0].set_ylabel("expected throughput, tokens/s")
    axes[2, 0].set_ylabel("throughput over\nautoregressive decoding's")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    figure.suptitle("The verification budget shrinks as the machine fills up")
    _finish(figure, axes, path)


def _budget_column(column: Any, rows: list[dict[str, Any]]) -> None:
    requests = [row["requests"] for row in rows]
    plain = [row["tokens_per_second"]["autoregressive"] for row in rows]
    for policy in rows[0]["mean_verified"]:
        gained = [row["tokens_per_second"][policy] for row in rows]
        ratio = [mine / least for mine, least in zip(gained, plain, strict=True)]
        lengths = [row["mean_verified"][policy] for row in rows]
        for axis, values in zip(column, (lengths, gained, ratio), strict=True):
            axis.plot(requests, values, label=policy, **STYLES[policy])
    if rows[0]["reference"] is not None:
        reference = [row["reference"] for row in rows]
        column[0].plot(requests, reference, "x", color="tab:red", markersize=10, label="reference values")
    column[1].set_yscale("log")
    column[2].set_xscale("log", base=2)
    column[2].set_xlabel("concurrent requests")
    column[2].xaxis.set_major_formatter("{x:.0f}")


def jagged(result: dict[str, Any], path: Path) -> None:
    """Draw each scheduler's throughput on jagged step-time curves over that of the unconstrained search."""
    from matplotlib import pyplot

    kinds = result["jagged"]
    figure, axes = pyplot.subplots(
        len(kinds), 1, figsize=(11, 3.6 * len(kinds)), squeeze=False, sharex=True, layout="constrained"
    )
    for axis, (kind, curves) in zip(axes[:, 0], kinds.items(), strict=True):
        names = list(curves)
        for place, policy in enumerate(curves[names[0]]):
            values = [curves[name][policy] for name in names]
            places = [index + 0.27 * (place - 1) for index in range(len(names))]
            bars = axis.bar(places, values, 0.25, label=policy, color=STYLES[policy]["color"])
            axis.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7)
        axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
        axis.set(title=f"{kind} confidences", ylabel="throughput / oracle's", ylim=(0, 1.12))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Throughput on jagged step times, over that of an unconstrained search (the oracle, not causal)")
    _finish(figure, axes, path)


def trace(result: dict[str, Any], path: Path) -> None:
    """Draw throughput and SLO attainment of the simulated trace by policy, one bar per arrival rate."""
    from matplotlib import pyplot

    cells = result["results"]
    names = list(cells[0]["policies"])
    height = 0.8 / len(cells)
    figure, axes = pyplot.subplots(
        1, 2, figsize=(12, 1.5 + 0.19 * len(names) * len(cells)), sharey=True, layout="constrained"
    )
    shades = pyplot.get_cmap("viridis")
    for index, cell in enumerate(cells):
        places = [row + height * (index - (len(cells) - 1) / 2) for row in range(len(names))]
        options = {"color": shades(0.15 + 0.7 * index / max(1, len(cells) - 1)), "label": _rate_label(cell)}
        rates = [cell["policies"][name]["tokens_per_second"] for name in names]
        attained = [100 * cell["policies"][name]["slo_attainment"] for name in names]
        axes[0].bar_label(axes[0].barh(places, rates, height, **options), fmt="%.0f", fontsize=7, padding=2)
        axes[1].bar_label(axes[1].barh(places, attained, height, **options), fmt="%.0f", fontsize=7, padding=2)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[0].set(xlabel="throughput, tokens/s")
    axes[0].set_xmargin(0.12)
    axes[1].set(xlabel=f"requests within {result['tpot_ms']:g} ms per output token, %", xlim=(0, 112))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Serving {result['num_requests']} requests of {result['trace']}, at most {result['max_requests']} at a time\n"
        "(AdaSpec and the oracle are not causal)"
    )
    _finish(figure, axes, path, grid="x")


def trace_budget(result: dict[str, Any], path: Path) -> None:
    """Draw verified tokens against concurrency as met in the simulated trace, at the highest rate."""
    from matplotlib import pyplot

    cell = result["results"][-1]
    figure, axis = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
    for name in (name for name in STYLES if name in cell["policies"]):
        groups = cell["policies"][name]["by_concurrency"]
        lengths = [group["mean_verified"] for group in groups]
        axis.plot([group["most"] for group in groups], lengths, label=name, **STYLES[name])
    axis.set(
        xscale="log", xlabel="active requests, up to", ylabel="verified tokens per request and round (drafts + 1)"
    )
    powers = sorted({group["most"] for each in cell["policies"].values() for group in each["by_concurrency"]})
    axis.set_xticks(powers, [str(power) for power in powers])
    axis.minorticks_off()
    axis.set(ylim=(0, None), title=f"{result['trace']}, {_rate_label(cell)}")
    figure.legend(loc="outside right upper")
    _finish(figure, [axis], path)


def reliability(result: dict[str, Any], path: Path) -> None:
    """Draw predicted survival against what happened, raw and calibrated, per draft position (the paper's Figure 6)."""
    from matplotlib import pyplot

    regimes = result["regimes"]
    positions = [part["position"] for part in next(iter(regimes.values()))["raw"]]
    figure, axes = pyplot.subplots(
        len(regimes), len(positions), figsize=(2.3 * len(positions), 2.8 * len(regimes)), squeeze=False, sharex=True,
        sharey=True, layout="constrained",
    )  # fmt: skip
    for row, (regime, found) in zip(axes, regimes.items(), strict=True):
        for axis, raw, calibrated in zip(row, found["raw"], found["calibrated"], strict=True):
            axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            shares = [count / calibrated["num_rounds"] for *_, count in calibrated["bins"]]
            axis.bar([bin_[0] for bin_ in calibrated["bins"]], shares, 0.05, color="tab:blue", alpha=0.2)
            for part, name, colour in ((raw, "raw", "tab:orange"), (calibrated, "calibrated", "tab:blue")):
                predicted, happened, _ = zip(*part["bins"], strict=True)
                axis.plot(predicted, happened, marker="o", markersize=3, color=colour, label=name)
            axis.set_title(
                f"position {raw['position']}\nECE {100 * raw['ece']:.1f} → {100 * calibrated['ece']:.1f} %", fontsize=9
            )
        row[0].set_ylabel(f"{regime}\naccepted so far")
    for axis in axes[-1]:
        axis.set_xlabel("predicted survival", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle("How often the first k draft tokens survive, predicted and realised (bars: share of rounds)")
    _finish(figure, axes, path)


def threshold(result: dict[str, Any], path: Path) -> None:
    """Draw tokens per round (bars) and acceptance rate (line) against the threshold (the paper's Figure 5)."""
    from matplotlib import pyplot

    regimes = result["regimes"]
    figure, axes = pyplot.subplots(1, len(regimes), figsize=(5.5 * len(regimes), 4), squeeze=False, sharey=True,
                                   layout="constrained")  # fmt: skip
    for axis, (regime, rows) in zip(axes[0], regimes.items(), strict=True):
        places = range(len(rows))
        kept = [row["tokens_per_round"] for row in rows]
        lost = [row["rejected_per_round"] for row in rows]
        axis.bar(places, kept, 0.7, color="tab:blue", alpha=0.7, label="tokens per round, bonus included")
        axis.bar(places, lost, 0.7, bottom=kept, color="none", edgecolor="0.5", hatch="///", label="rejected drafts")
        axis.set_xticks(places, [f"{row['threshold']:g}" for row in rows])
        axis.set(title=regime, xlabel="confidence threshold")
        rates = axis.twinx()
        rates.plot(places, [100 * row["acceptance_rate"] for row in rows], color="tab:red", marker="o",
                   label="acceptance rate")  # fmt: skip
        rates.set(ylim=(0, 105), ylabel="accepted of the verified drafts, %")
        rates.spines["top"].set_visible(False)
    axes[0, 0].set_ylabel("tokens per round")
    bars, names = axes[0, 0].get_legend_handles_labels()
    line, name = rates.get_legend_handles_labels()
    figure.legend(bars + line, names + name, loc="outside lower center", ncols=3)
    figure.suptitle("A higher confidence threshold verifies fewer drafts that fail")
    _finish(figure, axes, path, grid="y")


def _rate_label(cell: dict[str, Any]) -> str:
    rate = cell["requests_per_second"]
    return "all requests at once" if rate is None else f"{rate:.3g} requests/s"


def _finish(figure: Any, axes: Any, path: Path, grid: str = "both") -> None:
    from matplotlib import pyplot

    for axis in getattr(axes, "flat", axes):
        axis.grid(axis=grid, alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# What each result file holds.
FIGURES: dict[str, dict[str, Callable[[dict[str, Any], Path], None]]] = {
    "scheduler": {"budget": budget, "jagged": jagged},
    "simulator": {"trace": trace, "trace_budget": trace_budget},
    "calibration": {"reliability": reliability},
    "threshold_sweep": {"threshold": threshold},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for source in FIGURES:
        parser.add_argument(f"--{source}", help=f"benchmarks/results/{source}.json")
    parser.add_argument("--output_dir", default="benchmarks/results", help="folder of the PNG files")
    options = vars(parser.parse_args())
    if not any(options[source] for source in FIGURES):
        parser.error("no result file given: pass at least one of " + ", ".join(f"--{source}" for source in FIGURES))
    for source, figures in FIGURES.items():
        if options[source]:
            result = json.loads(Path(options[source]).read_text())
            for name, draw in figures.items():
                path = Path(options["output_dir"]) / f"{name}.png"
                draw(result, path)
                print(path)


if __name__ == "__main__":
    main()
