"""`hf-dspark inspect`, `convert` and `push`: a draft on its way from and to others."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from hf_dspark.hub import convert, inspection, repository

from . import Console
from .models import require_revisions, values_of


def run_inspect(options: Namespace, console: Console) -> bool:
    require_revisions(options)
    report = inspection.inspect_draft(
        options.draft, options.target, sample_from_anchor=_layout(options), revision=options.draft_revision
    )
    console.show(str(report))
    console.document(asdict(report))
    if report.refusal is not None:
        raise ValueError(report.refusal)
    return True


def run_convert(options: Namespace, console: Console) -> bool:
    report = convert.convert_checkpoint(
        options.source, options.destination, options.to, options.target, engine=options.engine,
        sample_from_anchor=_layout(options),
    )  # fmt: skip
    console.show(f"{options.destination} holds {', '.join(report.files)}")
    if report.engines:
        console.show(f"checked for {', '.join(report.engines)}")
    for note in report.notes:
        console.show(f"note: {note}")
    if report.launch is not None:
        console.show(report.launch)
    console.document(asdict(report) | {"folder": str(report.folder)})
    return True


def _layout(options: Namespace) -> bool | None:
    return None if options.block_layout is None else options.block_layout == "anchor"


def run_push(options: Namespace, console: Console) -> bool:
    beside = Path(options.folder) / repository.RESULTS_FOLDER
    results = options.results or ([str(beside)] if beside.is_dir() else [])
    card = values_of(options, "target", "license")
    private = True if options.private else None  # else as the Hub does it: some organisations make everything private
    facts = card | {"private": private, "complete": not options.private}
    url = repository.push_draft(options.folder, options.repository, results, **facts)
    console.show(url)
    console.document({"repo_id": options.repository, "url": url, "results": results})
    return True
