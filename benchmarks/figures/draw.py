"""Draw every figure from the result files into benchmarks/report: what `make figures` runs.

python benchmarks/figures/draw.py
"""

import drafts  # noqa: F401
import schedules  # noqa: F401
from style import FIGURES, REPORT, save

if __name__ == "__main__":
    for name, make in FIGURES.items():
        print(save(make(), REPORT / f"{name}.png"))
