"""Result files: what was measured, of which pair, with its provenance. Cards and figures are made of nothing else."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..decoding.call import effective_config
from ..files import replace_text
from ..formats.checkpoint import read_json
from ..models.modeling_draft import DraftModel
from ..provenance import provenance
from ..targets.fingerprint import weight_hash
from ..targets.support import TargetSupport

# What a result file of each kind must hold, besides who was measured and where.
REQUIRED = {
    "acceptance": {"sampling": dict, "policy": dict | str, "domains": dict},
    "evaluation": {
        "sampling": dict, "policy": dict | str | None, "max_new_tokens": int | None, "batch_size": int, "tasks": dict,
        "failed": list,
    },
    "calibration": {
        "domain": str, "num_prompts": int, "ece_before": list, "ece_after": list, "auc": float | int | None,
    },
    "training": {"arguments": dict, "num_rows": int | None, "steps": int, "metrics": dict},
}  # fmt: skip
COMMON = {"kind": str, "provenance": dict, "target": dict, "draft": dict}
MAX_BYTES = 2**29  # evaluations of earlier versions kept every round
UNFINISHED = "*.settings.json"  # beside what an interrupted run has finished: no result
# How `generate()` samples unless its arguments or the target's generation config say something else.
SAMPLED_BY_DEFAULT = {"temperature": 1.0, "top_k": 50}


def describe_target(target: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies a target: where it was loaded from, at which revision, in which dtype; where it is."""
    return {
        "name": _name(target),
        "revision": getattr(target.config, "_commit_hash", None),
        "dtype": str(target.dtype),
        "device": str(TargetSupport.of(target).input_device),
    }


def describe_draft(draft: DraftModel) -> dict[str, Any]:
    """Return what identifies a draft, and the facts of its architecture that a reader of a result wants."""
    config = draft.config
    return {
        "name": _name(draft),
        "revision": getattr(config, "_commit_hash", None),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "markov_head": getattr(config, "markov_head_type", None) if config.markov_rank else None,
        "markov_rank": config.markov_rank,
        "num_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "weights": weight_hash(draft),
    }


def describe_sampling(generate_kwargs: Mapping[str, Any], target: PreTrainedModel, seed: int) -> dict[str, Any]:
    """Return how a target decodes: `do_sample`, the distribution that is sampled with the seed, and
    `max_new_tokens`."""
    config = effective_config(target, generate_kwargs)
    if not config.do_sample:
        return {"do_sample": False, "max_new_tokens": config.max_new_tokens}
    named = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")}
    found = {name: value for name, value in named.items() if value is not None}
    return {"do_sample": True} | SAMPLED_BY_DEFAULT | found | {"seed": seed}


def write_result(
    path: str | Path, kind: str, target: Mapping[str, Any], draft: Mapping[str, Any], **found: Any
) -> dict[str, Any]:
    """Write a result file of one of the [`REQUIRED`] kinds at once, or not at all; return what it holds."""
    origin = provenance(target.get("device", "cpu"))
    result = {"kind": kind, "provenance": origin, "target": dict(target), "draft": dict(draft), **found}
    _check(result, str(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text(Path(path), json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def result_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return result files, all `*.json` files of folders among them; a `ValueError` names what is not there."""
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.exists():
            raise ValueError(f"there is no result file and no folder {path}: hf-dspark eval and calibrate write some")
        files += sorted({*path.glob("*.json")} - {*path.glob(UNFINISHED)}) if path.is_dir() else [path]
    return files


def read_results(paths: str | Path | Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read result files, and all `*.json` files of folders; a `ValueError` says what another file lacks."""
    files = result_files(paths)
    results = [read_json(file, MAX_BYTES) for file in files]
    for file, result in zip(files, results, strict=True):
        _check(result, str(file))
    return results


def _check(result: dict[str, Any], where: str) -> None:
    kind = result.get("kind")
    if not isinstance(kind, str) or kind not in REQUIRED:
        raise ValueError(f"{where}: a result file says of which kind it is, one of {sorted(REQUIRED)}, got {kind!r}")
    needed = COMMON | REQUIRED[kind]
    lacking = [name for name in needed if name not in result]
    if lacking:
        raise ValueError(f"{where}: a result of the kind {kind!r} needs {', '.join(lacking)}")
    wrong = [name for name, types in needed.items() if not isinstance(result[name], types)]
    for parts in (result.get("domains"), result.get("tasks")):
        if isinstance(parts, dict):
            wrong += [name for name, part in parts.items() if not isinstance(part, dict)]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} of a result of the kind {kind!r} are of another type")


def _name(model: PreTrainedModel) -> str:
    """Return the Hub id of a model, or the last part of the folder it was loaded from; nothing of the disk."""
    name = model.config._name_or_path
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def regime_of(sampling: Mapping[str, Any]) -> str:
    """Return what `generate()`'s arguments mean for drawing: greedy, or temperature and truncation."""
    if not sampling.get("do_sample", False):
        return "greedy"
    parts = [f"temperature {sampling.get('temperature') or 1:g}"]
    parts += [f"top-k {sampling['top_k']}"] if sampling.get("top_k") else []
    parts += [f"top-p {sampling['top_p']:g}"] if (sampling.get("top_p") or 1) < 1 else []
    parts += [f"min-p {sampling['min_p']:g}"] if sampling.get("min_p") else []
    return ", ".join(parts)


def short_policy(policy: Mapping[str, Any] | str | None) -> str:
    """Return what `Policy.to_dict` said in a few words; `None` stands for whole blocks, as a name may for a policy."""
    facts = policy if isinstance(policy, Mapping) else {"name": (policy or "FullBlock").removesuffix("()")}
    if facts["name"] == "FullBlock":
        return "whole block"
    if facts["name"] == "ConfidenceThreshold":
        return f"{'survival' if facts['cumulative'] else 'confidence'} threshold {facts['threshold']:g}"
    name = facts["name"] + (f" of {short_policy(facts['policy'])}" if "policy" in facts else "")  # of 0.1
    latency = [f"{1e3 * facts['tpot_seconds']:g} ms"] if facts.get("tpot_seconds") else []
    return ", ".join([name, *latency, *([f"lag {facts['lag']}"] if facts.get("lag") else [])])
