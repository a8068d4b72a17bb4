"""`hf-dspark convert` and `push`: a draft on its way to others."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from hf_dspark.hub import convert, repository

from . import Console
from .models import values_of


def run_convert(options: Namespace, console: Console) -> bool:
    layout = {} if options.block_layout is None else {"sample_from_anchor": options.block_layout == "anchor"}
    report = convert.convert_checkpoint(
        options.source, options.destination, options.to, options.target, engine=options.engine, **layout
    )
    console.show(f"{options.destination} holds {', '.join(report.files)}")
    if report.engines:
        console.show(f"checked for {', '.join(report.engines)}")
    for note in report.notes:
        console.show(f"note: {note}")
    console.document(asdict(report) | {"folder": str(report.folder)})
    return True


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
