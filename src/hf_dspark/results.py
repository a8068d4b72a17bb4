"""Result files: what was measured, of which pair, with its provenance. Cards and figures are made of nothing else.

Knows nothing of how the measuring is done.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .draft_model import DraftModel
from .provenance import provenance

# What a result file of each kind must hold, besides who was measured and where.
REQUIRED = {
    "acceptance": ("sampling", "policy", "domains"),
    "calibration": ("domain", "num_prompts", "ece_before", "ece_after", "auc"),
    "training": ("arguments", "num_rows", "steps", "metrics"),
}
COMMON = ("kind", "provenance", "target", "draft")


def describe_target(target: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies a target: where it was loaded from, at which revision, and in which dtype."""
    return {
        "name": _name(target),
        "revision": getattr(target.config, "_commit_hash", None),
        "dtype": str(target.dtype),
    }


def describe_draft(draft: DraftModel) -> dict[str, Any]:
    """Return what identifies a draft, and the facts of its architecture that a reader of a result wants."""
    config = draft.config
    head = getattr(config, "markov_head_type", None) if config.markov_rank else None
    return {
        "name": _name(draft),
        "revision": getattr(config, "_commit_hash", None),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "markov_head": head,
        "markov_rank": config.markov_rank,
        "num_parameters": sum(parameter.numel() for parameter in draft.parameters()),
    }


def write_result(
    path: str | Path, kind: str, target: Mapping[str, Any], draft: Mapping[str, Any], **found: Any
) -> dict[str, Any]:
    """Write a result file; whatever was there before is replaced at once, or not at all.

    Args:
        path (`str` or `Path`): Where to.
        kind (`str`): What was measured, one of [`REQUIRED`].
        target, draft (`Mapping`): From [`describe_target`] and [`describe_draft`].
        found: What was found; what can't be written as JSON is an error.

    Returns:
        `dict`: What the file holds.

    Raises:
        ValueError: If something is missing.
    """
    result = {"kind": kind, "provenance": provenance(), "target": dict(target), "draft": dict(draft), **found}
    _check(result, str(path))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)
    return result


def read_results(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read result files.

    Args:
        paths (`Iterable`): The files, or folders whose `*.json` files are read.

    Raises:
        ValueError: If a file is no result file; says what it lacks.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    results = []
    for file in files:
        try:
            result = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no result file: {error}") from error
        _check(result, str(file))
        results.append(result)
    return results


def _check(result: Any, where: str) -> None:
    if not isinstance(result, dict) or result.get("kind") not in REQUIRED:
        kind = result.get("kind") if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"{where}: a result file says of which kind it is, one of {sorted(REQUIRED)}, got {kind!r}")
    lacking = [name for name in (*COMMON, *REQUIRED[result["kind"]]) if name not in result]
    if lacking:
        raise ValueError(f"{where}: a result of the kind {result['kind']!r} needs {', '.join(lacking)}")


def _name(model: PreTrainedModel) -> str:
    """Return the Hub id of a model, or the last part of the folder it was loaded from; nothing of the disk."""
    name = model.config._name_or_path
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name
