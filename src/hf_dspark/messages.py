"""Quoting what others wrote in our error messages: a value or a list of names may be as long as a file."""

from typing import Any


def shortened(value: Any, quote: bool = True, size: int = 120) -> str:
    """Return a value for a message, cut after `size` characters."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= size else f"{text[:size]}..."


def listed(names: list[str], count: int = 10) -> str:
    """Return the first names of a list for a message, each cut after 80 characters."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(name[:80] for name in names[:count]) + more
