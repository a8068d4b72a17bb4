"""What all figures share: one colour per method, one line style per scheduler, one way to write text around panels."""

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
REPORT = Path(__file__).parents[1] / "report"
WIDTH = 8.4  # inches: text of 9 points is easy to read at the width of a page on GitHub
LETTERS = 146  # of a footnote's line
MARGIN, LEGEND_INCHES = 0.008, 0.32  # at the left, of the width; from the top to the legend
INK, GREY, PALE, LIGHT_BLUE = "#222222", "#767676", "#E6E6E6", "#7FB8D8"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
METHODS = {
    "plain": GREY,
    "DSpark": "#0072B2",
    "DFlash": "#D55E00",
    "Eagle3": "#009E73",
    "assistant": "#CC79A7",
    "prompt lookup": "#E69F00",
}
MARKERS = {"DSpark": "o", "DFlash": "s", "Eagle3": "^"}
# Names of schedulers in result files: what figures call them, and how they are drawn.
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("plain decoding", {"color": GREY, "linestyle": "-"}),
    "fixed length 1": ("one draft token, as MTP-1", {"color": METHODS["DSpark"], "linestyle": (0, (1, 1.2))}),
    "full block": ("DSpark, whole blocks", {"color": METHODS["DSpark"], "linestyle": "--"}),
    "fixed length 3": ("DSpark, 3 tokens", {"color": METHODS["DSpark"], "linestyle": (0, (1, 1.2))}),
    "fixed length 7": ("DSpark, whole blocks", {"color": METHODS["DSpark"], "linestyle": "--"}),
    "scheduled": ("DSpark, scheduled", {"color": METHODS["DSpark"], "linestyle": "-", "marker": "o"}),
    "hull + fill": ("DSpark, scheduled", {"color": METHODS["DSpark"], "linestyle": "-", "marker": "o"}),
    "AdaSpec, limit: expected": ("AdaSpec", {"color": INK, "linestyle": "-", "marker": "^"}),
}
STYLE = {
    "font.size": 9.5, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "axes.labelcolor": INK,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "text.color": INK,
    "axes.grid": True, "grid.color": PALE, "grid.linewidth": 0.8, "axes.axisbelow": True, "lines.linewidth": 1.8,
    "lines.markersize": 5, "legend.frameon": False, "figure.dpi": 160, "savefig.dpi": 160, "hatch.linewidth": 0.7,
    "xtick.major.size": 3, "ytick.major.size": 3, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "figure.constrained_layout.w_pad": 0.06,
}  # fmt: skip
pyplot.rcParams.update(STYLE)
FIGURES: dict[str, Callable[[], Figure]] = {}


def drawn(make: Callable[[], Figure]) -> Callable[[], Figure]:
    """Make a figure known under its function's name."""
    FIGURES[make.__name__] = make
    return make


def load(name: str) -> dict[str, Any]:
    """Return the content of a result file; benchmarks/README.md says which script writes it."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def panels(names: Sequence[Sequence[str]], height: float, **options: Any) -> tuple[Figure, dict[str, Axes]]:
    """Return a figure of the common width, and its panels by name, as `subplot_mosaic` takes them."""
    figure, axes = pyplot.subplot_mosaic(names, figsize=(WIDTH, height), layout="constrained", **options)
    for axis in axes.values():
        axis.tick_params(left=not options.get("sharey") or axis.get_subplotspec().is_first_col())
    return figure, axes


def finish(figure: Figure, message: str, footnote: str, legend: Mapping[str, Any] | Axes | None = None) -> Figure:
    """Write what a figure says and its legend above its panels, and where its numbers come from below them.

    Args:
        figure (`Figure`): With all its panels drawn.
        message (`str`): One sentence.
        footnote (`str`): Machines and conditions.
        legend (`Mapping` or `Axes`, *optional*): Handles by name; of an axes, its own.
    """
    room = "\n" if legend is not None else ""  # for the legend, which stands below the title
    figure.suptitle(message + room, x=MARGIN, ha="left", fontsize=12.5, fontweight="bold")
    figure.supxlabel(textwrap.fill(footnote, LETTERS), x=MARGIN, ha="left", fontsize=8, color=GREY)
    if legend is not None:
        named = legend if isinstance(legend, Mapping) else handles_of([legend])
        figure.legend(
            named.values(), named.keys(), loc="upper left", ncols=len(named), handlelength=2.4, borderpad=0,
            borderaxespad=0, columnspacing=1.6, bbox_to_anchor=(MARGIN, 1 - LEGEND_INCHES / figure.get_figheight()),
        )  # fmt: skip
    return figure


def handles_of(axes: Iterable[Axes]) -> dict[str, Any]:
    """Return the handle of each name that some panels have; of equal ones the first."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    return found


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG with the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return path
