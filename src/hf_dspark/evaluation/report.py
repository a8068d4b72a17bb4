"""One page of figures and tables out of result files, as Markdown and as HTML that needs no other file.

Knows nothing of how figures are drawn. Every number comes from the files.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .measurements import (
    LoadPoint,
    MissingResults,
    Result,
    ResultFile,
    compared_methods,
    load_curves,
    measurements,
    of_kind,
    provenance_of,
    read_result_files,
    regime_of,
    reliabilities,
    short_policy,
    threshold_sweeps,
)
from .plot_panels import FigureKind, distinct_labels, draft_parts, provenance_lines
from .plots import FIGURES, save_figure

PAGE = "report.html"
TITLE = "What was measured"
INTRODUCTION = (
    "A draft model proposes a block of tokens, and the target model verifies them in one pass. Each pass is a round; "
    "tau is the mean number of tokens of a round, among them the one that the target adds itself (the bonus token). "
    "All figures and tables are made of result files by one command, hf-dspark report; the files are listed last."
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:13px;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}th{background:#f3f3f3}"
    ".origin{font-size:12px;color:#555}.missing{border-left:4px solid #d55e00;padding-left:.8em}"
    ".table{overflow-x:auto}"
)


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
        title (`str`): What it is about.
        head (`Sequence[str]`): Names of the columns.
        rows (`Sequence[Sequence[str]]`): The cells.
        text (`str`): How to read it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title (`str`): Its heading.
        text (`str`): How to read it.
        image (`Path`, *optional*): Its figure as PNG, with an SVG of the same name beside it.
        origin (`Sequence[str]`): What measured its numbers, and where.
        missing (`str`, *optional*): Why there is no figure, and what makes it possible.
        table (`Table`, *optional*): Its numbers.
    """

    title: str
    text: str = ""
    image: Path | None = None
    origin: Sequence[str] = ()
    missing: str | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Report:
    """What was written.

    Args:
        page (`Path`): The HTML page; `report.md` is beside it.
        figures (`tuple[Path, ...]`): The figures as PNG; each has an SVG of the same name beside it.
        missing (`tuple[str, ...]`): Of the figures that could not be drawn: why, and what makes it possible.
    """

    page: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]


def report(results: str | Path | Iterable[str | Path], output_folder: str | Path) -> Report:
    """Draw every figure that some result files allow, and put figures and tables on one page.

    Args:
        results (`str`, `Path`, or several of them): Result files, or folders of them.
        output_folder (`str` or `Path`): Gets `report.html`, `report.md`, and each figure as PNG and SVG.

    Returns:
        [`Report`]: The page says, too, which command makes possible what could not be drawn.

    Raises:
        ValueError: If a file is no sound result file, or nothing in the files is known.
    """
    files = read_result_files([results] if isinstance(results, (str, Path)) else results)
    known = [file.content for file in files if file.kind is not None]
    if not known:
        raise ValueError(
            f"none of {', '.join(file.name for file in files)} holds what a figure or a table shows: hf-dspark eval, "
            "hf-dspark calibrate and benchmarks/*.py write such files"
        )
    folder = Path(output_folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = [_figure(kind, known, folder) for kind in FIGURES]
    tables = [table for table in (*_tables(known), _files(files)) if table.rows]
    sections += [Section(table.title, table.text, table=table) for table in tables]
    (folder / "report.md").write_text(to_markdown(sections), encoding="utf-8")
    page = folder / PAGE
    page.write_text(to_html(sections), encoding="utf-8")
    return Report(
        page,
        tuple(section.image for section in sections if section.image),
        tuple(section.missing for section in sections if section.missing),
    )


def _figure(kind: FigureKind, results: Sequence[Result], folder: Path) -> Section:
    try:
        figure = kind.draw(results)
    except MissingResults as error:
        return Section(kind.title, kind.shows, missing=f"Not drawn: {error}")
    image, _ = save_figure(figure, folder / kind.name)
    return Section(kind.title, kind.shows, image, provenance_lines(kind.sources(results)))


# ---- tables


def _tables(results: Sequence[Result]) -> list[Table]:
    return [
        _draft_table(results),
        _speed_table(results),
        _comparison_table(results),
        _threshold_table(results),
        _calibration_table(results),
        _load_table(results),
    ]


def _draft_table(results: Sequence[Result]) -> Table:
    """Return tau and acceptance by position of every draft on every task."""
    found = [each for each in measurements(results) if each.tau is not None]
    lines = list(dict.fromkeys(draft_parts(each) for each in found))
    labels = dict(zip(lines, distinct_labels(lines), strict=True))
    rows = [
        (
            labels[draft_parts(each)],
            each.setting.target or "–",
            each.setting.regime,
            each.task,
            _number(each.tau, 2),
            " ".join(_number(rate, 2).removeprefix("0") for rate in each.acceptance),
        )
        for each in found
    ]
    head = ("draft", "target", "drawn", "task", "tau", "accepted by position, given that all before were")
    return Table("Drafts by task", head, rows)


def _speed_table(results: Sequence[Result]) -> Table:
    """Return what evaluations say beyond acceptance."""
    rows = []
    for result in of_kind(results, "evaluation"):
        for task, metrics in result["tasks"].items():
            times = metrics.get("seconds_per_round") or {}
            against_plain = metrics.get("speedup") or {}
            policy = short_policy(result["policy"]) if result["draft"] else "no draft"
            rows.append(
                (
                    str(result["draft"].get("name") or "–"),
                    f"{regime_of(result['sampling'])}; {policy}; batch {result['batch_size']}",
                    task,
                    f"{metrics['turns']} / {metrics['rounds']}",
                    _number(metrics["tau"], 2),
                    _number(metrics["acceptance_rate"], 2),
                    _number(metrics["proposed_per_round"], 2),
                    _number(metrics["tokens_per_second"], 1),
                    _number(against_plain.get("ratio_of_medians"), 2),
                    " + ".join(_number(times.get(name), 1, 1e3) for name in ("draft", "verify", "rest")),
                    _number(metrics.get("time_to_first_token"), 0, 1e3),
                    _number(metrics.get("peak_memory_mib"), 0),
                    f"{_number(metrics.get('ece_mean'), 3)} / {_number(metrics.get('auc'), 2)} / "
                    f"{_number(metrics.get('brier'), 3)}",
                )
            )
    head = (
        "draft", "how", "task", "turns / rounds", "tau", "acceptance rate", "drafts verified a round", "tokens/s",
        "times plain decoding", "draft + verify + rest, ms a round", "first token, ms", "peak memory, MiB",
        "ECE / AUC / Brier",
    )  # fmt: skip
    return Table("Evaluations", head, rows)


def _comparison_table(results: Sequence[Result]) -> Table:
    """Return every way to decode against plain decoding."""
    rows: list[tuple[str, ...]] = []
    refused: dict[str, dict[str, None]] = {}  # methods by reason, each once
    for each in compared_methods(results):
        if each.refused:
            refused.setdefault(each.refused, {})[each.method] = None
            continue
        lower, median, upper = each.milliseconds or (None, None, None)
        rows.append(
            (
                each.cell,
                each.method,
                _number(each.speedup, 2),
                "–" if median is None else f"{median:.2f} ({lower:.2f} to {upper:.2f})",
                _number(each.tokens_per_pass, 2),
                _number(each.first_token, 0),
                "–" if each.identical is None else f"{each.identical[0]} of {each.identical[1]}",
            )
        )
    text = (
        "A row of a batch that has ended gets no more tokens while the others are decoded: plain decoding gives less "
        "than one token to a row and pass there. Identical are greedy rows that equal those of plain decoding."
    )
    text += "".join(f" Not in batches: {', '.join(methods)} ({reason})." for reason, methods in refused.items())
    head = (
        "on", "method", "times plain decoding", "ms per token, median (quartiles)", "tokens a row and pass",
        "first token, ms", "identical",
    )  # fmt: skip
    return Table("Against the alternatives", head, rows, text)


def _threshold_table(results: Sequence[Result]) -> Table:
    rows = [
        (
            sweep.title.replace("\n", ", "),
            f"{row.threshold:g}",
            _number(row.tokens_per_round, 2),
            _number(row.rejected_per_round, 2),
            _number(row.acceptance_rate, 1, 100),
        )
        for sweep in threshold_sweeps(results)
        for row in sweep.rows
    ]
    head = ("measured on", "threshold", "tokens per round", "rejected drafts per round", "accepted of verified, %")
    return Table("Confidence thresholds", head, rows)


def _calibration_table(results: Sequence[Result]) -> Table:
    rows = [
        (
            part.title,
            name,
            _number(sum(each.ece for each in curve) / len(curve), 1, 100),
            " ".join(_number(each.ece, 1, 100) for each in curve),
            " ".join(_number(each.auc, 2) for each in curve),
        )
        for part in reliabilities(results)
        for name, curve in part.curves.items()
    ]
    head = ("measured on", "confidences", "mean ECE, %", "ECE by position, %", "AUC of the survival by position")
    return Table("Calibration", head, rows)


def _load_table(results: Sequence[Result]) -> Table:
    rows = [
        (curves.title.replace("\n", " "), policy, _at_load(points[0], curves.load), _at_load(points[-1], curves.load))
        for curves in load_curves(results)
        for policy, points in curves.policies.items()
    ]
    return Table("Load", ("on", "policy", "at the lowest load", "at the highest load"), rows)


def _at_load(point: LoadPoint, unit: str) -> str:
    return f"{unit} {point.load:g}: {point.tokens_per_second:.0f} tokens/s, {point.verified:.2f} verified"


def _files(files: Sequence[ResultFile]) -> Table:
    rows = []
    for file in files:
        origin = provenance_of(file.content)
        rows.append(
            (
                file.name,
                file.kind or "in no figure or table here",
                str(origin.get("command", "–")),
                str(origin.get("revision", "–")),
                str(origin.get("device", "–")),
                f"torch {origin.get('torch', '–')}, transformers {origin.get('transformers', '–')}",
            )
        )
    return Table("Result files", ("file", "kind", "command", "revision", "machine", "versions"), rows)


def _number(value: float | None, digits: int, times: float = 1) -> str:
    return "–" if value is None else f"{times * value:.{digits}f}"


# ---- pages


def to_markdown(sections: Sequence[Section]) -> str:
    """Return a page that shows the figures beside it."""
    parts = [f"# {TITLE}", INTRODUCTION]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [section.text] if section.text else []
        parts += [f"**{section.missing}**"] if section.missing else []
        parts += [f"![{section.title}]({section.image.name})"] if section.image else []
        parts += [f"*{line}*" for line in section.origin]
        parts += [_markdown_table(section.table)] if section.table else []
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def to_html(sections: Sequence[Section]) -> str:
    """Return a page with the figures in it."""
    body = [f"<h1>{escape(TITLE)}</h1>", f"<p>{escape(INTRODUCTION)}</p>"]
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2>")
        body += [f"<p>{escape(section.text)}</p>"] if section.text else []
        body += [f'<p class="missing">{escape(section.missing)}</p>'] if section.missing else []
        body += [_html_image(section.image, section.title)] if section.image else []
        body += [f'<p class="origin">{escape(line)}</p>' for line in section.origin]
        body += [_html_table(section.table)] if section.table else []
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(TITLE)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _html_image(image: Path, title: str) -> str:
    data = base64.b64encode(image.with_suffix(".svg").read_bytes()).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="table"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
