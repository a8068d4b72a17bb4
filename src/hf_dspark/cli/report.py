"""`hf-dspark report`: from result files to one page of figures.

Knows nothing of what figures show.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ..evaluation.report import PAGE, report
from .console import Console, Outcome, require_new_file
from .options import ReportOptions


def run_report(console: Console, words: Sequence[str], options: ReportOptions) -> Outcome:
    """Draw figures, and put them on one page."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need matplotlib: pip install 'hf_dspark[plots]'")
    require_new_file(str(Path(options.output_dir) / PAGE), options.overwrite)
    written = report(words, options.output_dir)
    for reason in written.missing:
        console.note(reason)
    console.show(f"the report is in {written.page}")
    return Outcome(
        {
            "page": str(written.page),
            "figures": [str(path) for path in written.figures],
            "missing": list(written.missing),
        }
    )
