"""Draw every figure from the result files: what `make figures` runs.

python benchmarks/figures/draw.py --output_dir benchmarks/report
"""

import argparse
from pathlib import Path

import confidence  # noqa: F401
import drafts  # noqa: F401
import schedules  # noqa: F401
from style import FIGURES, REPORT, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=REPORT)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="figures by name")
    options = parser.parse_args()
    for name in options.only:
        print(save(FIGURES[name](), options.output_dir / f"{name}.png"))
