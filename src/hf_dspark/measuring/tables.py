"""Markdown tables: the one writer that summaries, cards, reports and the command line share."""

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

ABSENT = "–"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table of a row of titles and as many cells in each other row; `None` is shown as a dash."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with a fixed count of decimals, or a dash for `None`."""
    if not isinstance(value, Real | None):
        raise TypeError(f"a number is needed, got {value!r}")
    return ABSENT if value is None else f"{value:.{digits}f}"


def _cell(value: Any) -> str:
    return ABSENT if value is None else str(value).replace("|", "\\|").replace("\n", " ")
