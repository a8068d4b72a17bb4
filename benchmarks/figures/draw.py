"""Draw every figure from the result files: what `make figures` runs.

python benchmarks/figures/draw.py --output_dir benchmarks/report
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import confidence
import drafts
import serving
import smollm2_figures
import tree_figures
from matplotlib.figure import Figure
from style import REPORT, save

FIGURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (
        serving.speedups,
        drafts.figure_2_position_wise,
        drafts.figure_3_depth,
        drafts.figure_4_block_size,
        confidence.figure_5_threshold,
        confidence.figure_6_reliability,
        serving.figure_7_frontier,
        serving.figure_8_load,
        serving.slo_attainment,
        serving.jagged_step_times,
        tree_figures.trees_tau,
        tree_figures.trees_time,
        tree_figures.tree_example,
        smollm2_figures.smollm2_acceptance,
        smollm2_figures.smollm2_confidence,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default=str(REPORT))
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="figures by name")
    options = parser.parse_args()
    for name in options.only:
        print(save(FIGURES[name](), Path(options.output_dir) / f"{name}.png"))


if __name__ == "__main__":
    main()
