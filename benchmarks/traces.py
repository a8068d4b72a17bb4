"""Arrivals of requests, read from the public traces that `simulator.py` serves."""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy


@dataclass(frozen=True)
class Arrival:
    """A request.

    Args:
        seconds (`float`): When it arrives, counted from the first one.
        context_tokens (`int`): Length of its prompt.
        output_tokens (`int`): Tokens that it decodes, at least 1.
    """

    seconds: float
    context_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class MeanLengths:
    """Mean lengths where a trace has none; drawn from geometric distributions."""

    context_tokens: float = 512.0
    output_tokens: float = 128.0

    def draw(self, rng: numpy.random.Generator) -> tuple[int, int]:
        """Return context and output tokens of one request, at least 1 each."""
        return int(rng.geometric(1 / self.context_tokens)), int(rng.geometric(1 / self.output_tokens))


def load_trace(path: str | Path, rate: float, lengths: MeanLengths, rng: numpy.random.Generator) -> list[Arrival]:
    """Read arrivals, in the order of time, the first at 0.

    Args:
        path (`str`): A CSV file with `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure, a date and time),
            `timestamp_ms,input_length,output_length` (Mooncake, milliseconds) or `Timestamp` (AdaSpec, seconds); or
            Mooncake's own JSON lines.
        rate (`float`): How many times as fast as recorded they arrive.
        lengths ([`MeanLengths`]): For traces that hold none.
        rng (`numpy.random.Generator`): Draws these.

    Raises:
        ValueError: If the rate is not positive, or a line is not as described; names the line.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"the rate must be a positive number, got {rate}")
    arrivals = []
    for number, row in _rows(Path(path)):
        try:
            arrivals.append(_arrival(row, lengths, rng))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {_cause(error)}. {TRACE_FORMS}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no arrivals. {TRACE_FORMS}")
    arrivals.sort(key=lambda arrival: arrival.seconds)
    start = arrivals[0].seconds
    return [Arrival((each.seconds - start) / rate, each.context_tokens, each.output_tokens) for each in arrivals]


TRACE_FORMS = (
    "Known are CSV files with the columns TIMESTAMP,ContextTokens,GeneratedTokens or "
    "timestamp_ms,input_length,output_length or Timestamp, and JSON lines with timestamp, input_length, output_length"
)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                yield number, _json_row(path, number, line)
        else:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row


def _json_row(path: Path, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    return {"timestamp_ms": row["timestamp"], **row} if isinstance(row, dict) and "timestamp" in row else row


def _arrival(row: dict[str, Any], lengths: MeanLengths, rng: numpy.random.Generator) -> Arrival:
    if "TIMESTAMP" in row:
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        context, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    elif "timestamp_ms" in row:
        seconds = float(row["timestamp_ms"]) / 1e3
        context, output = int(row["input_length"]), int(row["output_length"])
    else:
        seconds = float(row["Timestamp"])
        context, output = lengths.draw(rng)
    if not math.isfinite(seconds) or context < 0 or output < 1:
        raise ValueError(f"expected a time, a context of at least 0 and an output of at least 1 token, got {row}")
    return Arrival(seconds, context, output)


def _cause(error: Exception) -> str:
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)
