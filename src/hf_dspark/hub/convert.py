"""Drafts on their way into and out of other projects: `convert_checkpoint`.

Reads and writes the files; what a format says and holds is in the tables of `formats/`.
"""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..files import naming
from ..formats.engines import ENGINES, missing_keys
from ..formats.files import CONFIG_FILE, STS_FILE, CheckpointFiles, load_tensors, open_checkpoint, read_temperatures
from ..formats.rows import Format, TargetFacts
from ..formats.tables import FORMAT_NAMES, OURS
from ..formats.tensors import compare_tensors, kept_tokens_mask
from ..formats.translate import config_from_format, config_to_format, find_format, reasons_of, recognise
from ..messages import listed
from ..models.auto import DRAFTS, is_draft
from ..models.configuration_draft import DraftConfig, embedding_scale
from ..models.modeling_draft import DraftModel, check_fits
from ..targets.borrowed_weights import BorrowedModules

Target = str | os.PathLike | PreTrainedConfig | PreTrainedModel


@dataclass(frozen=True)
class Checkpoint:
    """A draft that was read, of whatever format."""

    config: DraftConfig
    tensors: dict[str, torch.Tensor]  # by our names, in the types they are stored in
    format: str  # one of FORMAT_NAMES


@dataclass(frozen=True)
class ExportReport:
    """What [`convert_checkpoint`] has written."""

    folder: Path
    format: str
    files: tuple[str, ...]  # their names
    engines: tuple[str, ...]  # programs that can run the draft from it; the table of each was checked
    notes: tuple[str, ...]  # which engines cannot run it and why, and what lies beside it for want of a field


def convert_checkpoint(
    draft: DraftModel | str | os.PathLike,
    output: str | os.PathLike,
    format: str,
    target: Target | None = None,
    *,
    engine: str | None = None,
    sample_from_anchor: bool | None = None,
    **hub_kwargs: Any,
) -> ExportReport:
    """Write a draft in another project's format, or in ours. Weights are copied bit by bit.

    Args:
        draft ([`DraftModel`], `str` or `PathLike`): A draft in memory, or the folder or the repository on the Hub of
            one in any of [`FORMAT_NAMES`].
        output (`str` or `PathLike`): A folder that does not exist or is empty; not the working folder.
        format (`str`): One of [`FORMAT_NAMES`].
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`, *optional*): The draft's target. DeepSpec's
            format holds copies of its embedding and LM head. speculators' names it, and does not say how deep it is.
            transformers' says neither that nor its vocabulary.
        engine (`str`, *optional*): An engine that must be able to run the result, such as `vllm`.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, if the files of the draft do not say it.
        hub_kwargs: For a draft that is read, as in [`open_checkpoint`].

    Returns:
        [`ExportReport`]

    Raises:
        ValueError: If the draft cannot be read, the format or the engine cannot hold it (with all reasons), or the
            output folder is not empty, or is the working folder. Nothing is left behind.

    Example:
        >>> convert_checkpoint("path/to/draft", "for-vllm", "speculators", target="Qwen/Qwen3-4B", engine="vllm")

    Example:

    ```python
    report = convert_checkpoint("my-draft", "out/for-vllm", "deepspec", target=target)
    print(report.files, report.engines)
    ```
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something already and is not overwritten: name another folder")
    if output.resolve() == Path.cwd():  # a new folder takes the place of an empty one
        raise ValueError(f"{output} is the working folder, which cannot be replaced: name another folder")
    if is_draft(draft):
        if hub_kwargs or sample_from_anchor is not None:
            raise ValueError("the draft is loaded already: leave out the arguments that say how to read one")
        checkpoint = Checkpoint(draft.config, _weights_of(draft), OURS)
    else:
        checkpoint = read_checkpoint(draft, target, sample_from_anchor, **hub_kwargs)
    output.parent.mkdir(parents=True, exist_ok=True)
    with naming(output):
        partial = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        if format == OURS:
            engines, notes = _write_ours(checkpoint, partial, engine)
        else:
            engines, notes = _write_foreign(checkpoint, partial, format, target, engine)
        files = tuple(sorted(path.name for path in partial.iterdir()))
        partial.chmod(0o755)  # mkdtemp's are closed to others
        os.replace(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ExportReport(output, format, files, engines, notes)


# ---- reading


def read_checkpoint(
    source: str | os.PathLike, target: Target | None = None, sample_from_anchor: bool | None = None, **hub_kwargs: Any
) -> Checkpoint:
    """Read a draft of any format, from safetensors alone, checked against its own configuration before it is loaded.

    The arguments are those of [`convert_checkpoint`].
    """
    files = open_checkpoint(source, **hub_kwargs)
    name = detect_format(files.config, f"{files.name}/{CONFIG_FILE}")
    entry = recognise(files.config)
    if entry is None:
        # Code that a repository carries is not used, nor copied.
        ours = {key: value for key, value in files.config.items() if key != "auto_map"}
    else:
        facts = None if target is None else target_facts(target)
        ours = config_from_format(files.config, entry, facts, sample_from_anchor)
        pinned = hub_kwargs | ({} if files.revision is None else {"revision": files.revision})
        temperatures = read_temperatures(source, **pinned)
        ours |= {} if temperatures is None else {"sts_temperatures": temperatures}
    model = DRAFTS[ours["model_type"]]
    config = model.config_class.from_dict(ours)
    renamed = {} if entry is None else entry.renamed
    return Checkpoint(config, model.read_tensors(config, files.tensors, files.name, renamed), name)


def detect_format(config: Mapping[str, Any], path: str | Path = "config.json") -> str:
    """Return the name of the format that a draft's `config.json` is in; a `ValueError` if it is no known draft."""
    entry = recognise(config)
    if entry is not None:
        return entry.name
    if config.get("model_type") in DRAFTS:
        return OURS
    raise ValueError(
        f"{path} (model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r}) "
        f"is no draft in one of the formats {FORMAT_NAMES}"
    )


def target_facts(target: Target) -> TargetFacts:
    """Return what a conversion needs to know of a target. No remote code is run."""
    if isinstance(target, (str, os.PathLike)):
        name, config = os.fspath(target), AutoConfig.from_pretrained(target, trust_remote_code=False)
    else:
        config = target if isinstance(target, PreTrainedConfig) else target.config
        name = config.name_or_path or None
    return TargetFacts(config, name, embedding_scale(config.get_text_config(decoder=True)))


def _weights_of(draft: DraftModel) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in draft.state_dict().items()}
    if away := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"the draft's weights are offloaded ({listed(away, 3)}): load it on one device first")
    return tensors


# ---- writing

Written = tuple[tuple[str, ...], tuple[str, ...]]  # engines and notes of an ExportReport


def _write_ours(checkpoint: Checkpoint, folder: Path, engine: str | None) -> Written:
    if engine is not None:
        raise ValueError(f"the format {OURS!r} is read by this package only, not by {engine!r}: leave engine out")
    config = copy.deepcopy(checkpoint.config)
    config.dtype = checkpoint.tensors["fc.weight"].dtype
    config.architectures = [DRAFTS[config.model_type].__name__]
    config.save_pretrained(folder)
    save_torch_state_dict(checkpoint.tensors, folder)
    return (OURS,), ()


def _write_foreign(
    checkpoint: Checkpoint, folder: Path, format: str, target: Target | None, engine: str | None
) -> Written:
    config, tensors = checkpoint.config, checkpoint.tensors
    entry = find_format(format, config)
    facts = _required_facts(config, entry, target)
    written = config_to_format(config, entry, facts)
    engines, notes = _engines(config, entry, engine)
    theirs = {entry.renamed.get(name, name): tensor for name, tensor in tensors.items()}
    if entry.copies:
        theirs |= _target_copies(target, entry)
    if "d2t" in tensors:
        theirs["t2d"] = kept_tokens_mask(tensors["d2t"], config.vocab_size)
    written["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    written["transformers_version"] = transformers.__version__
    _write_json(folder / CONFIG_FILE, written)
    save_torch_state_dict(theirs, folder)
    if entry.names_target and Path(str(facts.name_or_path)).is_dir():
        notes += (
            f"it names its target by the local path {facts.name_or_path}: to share it, convert with the name that the "
            "target has on the Hub",
        )
    if config.sts_temperatures is not None:
        temperatures = {"temperatures": config.sts_temperatures["default"], "by_domain": config.sts_temperatures}
        _write_json(folder / STS_FILE, temperatures)
        notes += (
            f"the format has no field for the temperatures of the confidence head: they are in {STS_FILE}, as SGLang "
            "reads them (--speculative-dspark-confidence-sts-path). Slopes and offsets (confidence_fits) are left out",
        )
    files = open_checkpoint(folder)
    compare_tensors(files.tensors, theirs, files.name)
    for engine in ENGINES:
        lacking = missing_keys(files.config, entry, engine) if engine.name in engines else ()
        if lacking:
            raise ValueError(
                f"{engine.name} needs {', '.join(lacking)} in config.json, which this draft's configuration does not "
                "hold: pass target=..., which tells it"
            )
    return engines, notes


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _required_facts(config: DraftConfig, entry: Format, target: Target | None) -> TargetFacts | None:
    if entry.copies and (target is None or isinstance(target, PreTrainedConfig)):
        raise ValueError(
            f"the format {entry.name!r} holds copies of the target's embedding and LM head: pass target=..., the "
            "model or where it is"
        )
    facts = None if target is None else target_facts(target)
    if entry.names_target and (facts is None or not facts.name_or_path):
        raise ValueError(
            f"the format {entry.name!r} says where the target is: pass target=..., its folder or its name on the Hub, "
            "or set target.config.name_or_path"
        )
    if facts is not None:
        check_fits(config, facts.config)
    return facts


def _engines(config: DraftConfig, entry: Format, wanted: str | None) -> Written:
    """Return the engines that read a format and can run the draft, and notes about those that cannot."""
    readers = {engine.name: engine for engine in ENGINES if engine.name in entry.engines}
    reasons = {name: reasons_of(reader.refusals, config) for name, reader in readers.items()}
    if wanted is not None and wanted not in readers:
        raise ValueError(f"the format {entry.name!r} is read by {', '.join(readers)}, not by {wanted!r}")
    if wanted is not None and reasons[wanted]:
        raise ValueError(f"{wanted} cannot run this draft: {'; '.join(reasons[wanted])}")
    notes = tuple(f"{name} cannot run it: {'; '.join(found)}" for name, found in reasons.items() if found)
    able = tuple(name for name, found in reasons.items() if not found)
    if not able:
        raise ValueError(f"no engine that reads the format {entry.name!r} can run this draft: {'; '.join(notes)}")
    return able if wanted is None else (wanted,), notes


def _target_copies(target: Target, entry: Format) -> dict[str, torch.Tensor]:
    """Return the target's tensors that a format holds copies of, in the type that the target has them in."""
    if isinstance(target, PreTrainedModel):
        borrowed = BorrowedModules.copy_of(target)
        if borrowed.lm_head.bias is not None:
            raise _no_place_for_bias(entry)
        found = {"embed_tokens.weight": borrowed.embedding.weight, "lm_head.weight": borrowed.lm_head.weight}
    else:
        found = _stored_copies(open_checkpoint(target), entry)
    # Copies of their own: a target may keep both in one tensor, of which a file would hold one.
    return {name: found[name].detach().clone() for name in entry.copies}


def _no_place_for_bias(entry: Format) -> ValueError:
    return ValueError(
        f"the format {entry.name!r} has no place for the bias of the target's LM head, without which drafts would be "
        "other ones: choose a format without copies of the target's weights"
    )


def _stored_copies(files: CheckpointFiles, entry: Format) -> dict[str, torch.Tensor]:
    if any(f".{name}".endswith(".lm_head.bias") for name in files.tensors):
        raise _no_place_for_bias(entry)
    wanted = ("embed_tokens.weight", "lm_head.weight")
    names = [[name for name in files.tensors if f".{name}".endswith(f".{ending}")] for ending in wanted]
    names[1] = names[1] or names[0]  # a tied head is not stored
    if any(len(found) != 1 for found in names):
        raise ValueError(
            f"the embedding and the LM head of {files.name} cannot be told by their names: pass the loaded model"
        )
    stored = load_tensors(files.tensors, {found[0] for found in names})
    return {ending: stored[found[0]] for ending, found in zip(wanted, names, strict=True)}
