"""`hf-dspark convert`, `push` and `card`: a draft on its way to others.

Knows nothing of formats, of the Hub, or of what a card says.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..evaluation.results import read_results
from ..sharing import convert as checkpoints
from ..sharing import hub
from .console import Console, Outcome, require_new_file, require_new_folder
from .models import require_model
from .options import CardFacts, CardOptions, ConvertOptions, PushOptions


def run_convert(console: Console, words: Sequence[str], options: ConvertOptions) -> Outcome:
    """Write a draft in another project's format."""
    source, destination = words
    require_model(source, "SOURCE")
    if options.target is not None:
        require_model(options.target, "--target")
    require_new_folder(destination)
    layout = {} if options.block_layout is None else {"sample_from_anchor": options.block_layout == "anchor"}
    report = checkpoints.convert_checkpoint(
        source, destination, options.to, target=options.target, engine=options.engine, **layout
    )
    console.show(f"{destination} holds {', '.join(report.files)}")
    if report.engines:
        console.show(f"checked for {', '.join(report.engines)}")
    for note in report.notes:
        console.show(f"note: {note}")
    return Outcome(asdict(report) | {"folder": str(report.folder)})


def run_push(console: Console, words: Sequence[str], options: PushOptions) -> Outcome:
    """Publish a draft with its card."""
    folder, repo_id = words
    require_model(folder, "FOLDER")
    results = _results_of(folder, options.results)
    private = True if options.private else None  # else the Hub's default: some organisations make everything private
    try:
        url = hub.push_draft(folder, repo_id, results, private=private, **_card_kwargs(options))
    except OSError as error:  # the input was sound
        raise ConnectionError(str(error)) from error
    console.show(url)
    return Outcome({"repo_id": repo_id, "url": url, "results": [str(path) for path in results]})


def run_card(console: Console, words: Sequence[str], options: CardOptions) -> Outcome:
    """Write the model card of a draft."""
    (folder,) = words
    require_model(folder, "FOLDER")
    results = _results_of(folder, options.results)
    output = require_new_file(options.output or str(Path(folder) / hub.CARD_FILE), options.overwrite)
    written = hub.write_card(folder, results, output, **_card_kwargs(options))
    if not results:
        console.note("no result file was given, so the card says that nothing was measured")
    console.show(f"the card is in {written}")
    return Outcome({"card": str(written), "results": [str(path) for path in results]})


def _card_kwargs(options: CardFacts) -> dict[str, Any]:
    kwargs = {"target": options.target, "license": options.license}
    return {name: value for name, value in kwargs.items() if value is not None}


def _results_of(folder: str, given: Sequence[str]) -> list[Path]:
    """Return the results for a card: those that are given, else those beside the draft."""
    if not given:
        beside = Path(folder) / hub.RESULTS_FOLDER
        return [beside] if beside.is_dir() else []
    paths = [Path(path) for path in given]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"--results: there is no {missing[0]}")
    read_results(paths)
    return paths
