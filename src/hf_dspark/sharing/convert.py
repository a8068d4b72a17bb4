"""Drafts on their way into and out of other projects: `convert_checkpoint`, `export_checkpoint`, `check_exported`.

Reads and writes the files; what a format says and holds is in the tables of `checkpoint_formats.py` and
`checkpoint_engines.py`. Knows nothing of the Hub's side, of cards, or of how a draft computes.
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

from ..formats.engines import ENGINES, Engine, draft_tensors, format_tensors, missing_keys
from ..formats.files import (
    CONFIG_FILE,
    STS_FILE,
    CheckpointFiles,
    load_tensors,
    open_checkpoint,
    read_temperatures,
)
from ..formats.rows import TargetFacts, has_embedding_norm
from ..formats.tables import (
    FORMAT_NAMES,
    OURS,
    Format,
    config_from_format,
    config_to_format,
    find_format,
    recognise,
    refuse,
)
from ..models.auto import DRAFTS
from ..models.configuration_draft import DraftConfig, embedding_scale
from ..models.modeling_draft import DraftModel, require_finite
from ..targets.borrowed_weights import BorrowedModules

_FLOATING = ("F64", "F32", "F16", "BF16")
_TYPES = {"d2t": ("I64",)}

Target = str | os.PathLike | PreTrainedConfig | PreTrainedModel


@dataclass(frozen=True)
class Checkpoint:
    """A draft that was read, of whatever format.

    Attributes:
        config ([`DraftConfig`]): Ours.
        tensors (`dict[str, torch.Tensor]`): By our names, in the types they are stored in.
        format (`str`): One of [`FORMAT_NAMES`].
    """

    config: DraftConfig
    tensors: dict[str, torch.Tensor]
    format: str


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        folder (`Path`): Where.
        format (`str`): In which format.
        files (`tuple[str, ...]`): Their names.
        engines (`tuple[str, ...]`): Those that can run the draft from it; each one's table was checked.
        notes (`tuple[str, ...]`): What a user should know: which engines cannot run it and why, and what was written
            beside the checkpoint because the format has no field for it.
    """

    folder: Path
    format: str
    files: tuple[str, ...]
    engines: tuple[str, ...]
    notes: tuple[str, ...]


def detect_format(config: Mapping[str, Any]) -> str:
    """Return the name of the format that a draft's `config.json` is in.

    Args:
        config (`Mapping`): As it stands in the file.

    Raises:
        ValueError: If it is no draft that is known here.
    """
    entry = recognise(config)
    if entry is not None:
        return entry.name
    if config.get("model_type") in DRAFTS:
        return OURS
    raise ValueError(
        f"this config.json (model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r}) "
        f"is no draft in one of the formats {FORMAT_NAMES}"
    )


def read_checkpoint(
    source: str | os.PathLike,
    target: Target | None = None,
    sample_from_anchor: bool | None = None,
    **hub_kwargs: Any,
) -> Checkpoint:
    """Read a draft of any format; safetensors alone, checked against its own configuration before it is loaded.

    Args:
        source (`str` or `PathLike`): A folder, or a repository on the Hub.
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`, *optional*): For what the format does not
            say of it, such as its depth.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, where the file does not say.
        hub_kwargs: As in [`open_checkpoint`].

    Returns:
        [`Checkpoint`]

    Raises:
        ValueError: If it is no draft known here, has features that are not, or its tensors are not what its
            configuration says.
    """
    files = open_checkpoint(source, **hub_kwargs)
    name = detect_format(files.config)
    entry = recognise(files.config)
    facts = None if target is None else target_facts(target)
    if entry is None:
        # Code that a repository carries is not used, nor copied.
        ours = {key: value for key, value in files.config.items() if key != "auto_map"}
    else:
        ours = config_from_format(files.config, entry, facts, sample_from_anchor)
        pinned = hub_kwargs | ({} if files.revision is None else {"revision": files.revision})
        temperatures = read_temperatures(source, **pinned)
        ours |= {} if temperatures is None else {"sts_temperatures": temperatures}
    config = DRAFTS[ours["model_type"]].config_class.from_dict(ours)
    return Checkpoint(config, _read_tensors(files, config, entry), name)


def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    format: str,
    target: Target | None = None,
    *,
    engine: str | None = None,
    sample_from_anchor: bool | None = None,
    **hub_kwargs: Any,
) -> ExportReport:
    """Write a draft of any format in another one. Weights are copied bit by bit.

    Args:
        source (`str` or `PathLike`): A folder, or a repository on the Hub, in any of [`FORMAT_NAMES`].
        destination (`str` or `PathLike`): A folder that does not exist or is empty.
        format (`str`): One of [`FORMAT_NAMES`].
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`, *optional*): The draft's target. DeepSpec's
            format holds copies of its embedding and LM head; speculators' names it, and does not say how deep it is;
            transformers' says neither that nor its vocabulary.
        engine (`str`, *optional*): An engine that must be able to run the result, such as `vllm`.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, where the source does not say.
        hub_kwargs: For the source, as in [`open_checkpoint`].

    Returns:
        [`ExportReport`]

    Raises:
        ValueError: If the source cannot be read, the format or the engine cannot hold the draft (with all reasons), or
            the destination holds something.
    """
    _require_free(Path(destination))
    checkpoint = read_checkpoint(source, target, sample_from_anchor, **hub_kwargs)
    return _write(checkpoint.config, checkpoint.tensors, Path(destination), format, target, engine)


def export_checkpoint(
    draft: DraftModel,
    folder: str | os.PathLike,
    format: str,
    target: Target | None = None,
    *,
    engine: str | None = None,
) -> ExportReport:
    """Write a loaded draft in a format.

    Args:
        draft ([`DraftModel`]): The draft, with its weights in memory.
        folder (`str` or `PathLike`): A folder that does not exist or is empty.
        format, target, engine: As in [`convert_checkpoint`].

    Returns:
        [`ExportReport`]

    Raises:
        ValueError: As there.
    """
    _require_free(Path(folder))
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in draft.state_dict().items()}
    away = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
    if away:
        raise ValueError(
            f"the draft's weights are offloaded ({', '.join(away[:3])}, ...): load it on one device first"
        )
    return _write(draft.config, tensors, Path(folder), format, target, engine)


def check_exported(folder: str | os.PathLike, engine: str | None = None, target: Target | None = None) -> None:
    """Check a checkpoint against the tables of its format and of the engines that read it.

    Args:
        folder (`str` or `PathLike`): The checkpoint.
        engine (`str`, *optional*): One engine; all that can run such a draft unless given.
        target: As in [`read_checkpoint`].

    Raises:
        ValueError: If a key or a tensor is missing, unexpected or of another shape, or the engine cannot run it.
    """
    files = open_checkpoint(folder)
    entry = recognise(files.config)
    if entry is None:
        raise ValueError(f"{folder} is a checkpoint of this package (or no draft), which no other engine reads")
    facts = None if target is None else target_facts(target)
    config = DRAFTS[entry.model_type].config_class.from_dict(config_from_format(files.config, entry, facts))
    _check_files(files, config, entry, _readers(config, entry, engine))


def target_facts(target: Target) -> TargetFacts:
    """Return what a conversion needs to know of a target.

    Args:
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`): The target, its configuration, or where
            it is. No remote code is run.
    """
    path = None
    if isinstance(target, PreTrainedModel):
        config = target.config
    elif isinstance(target, PreTrainedConfig):
        config = target
    else:
        path, config = os.fspath(target), AutoConfig.from_pretrained(target, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    return TargetFacts(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        model_type=text.model_type,
        architectures=config.architectures,
        name_or_path=path or config.name_or_path or None,
        embedding_scale=embedding_scale(text),
        embedding_norm=has_embedding_norm(text.model_type),
        text_config=text.to_diff_dict(),
    )


# ---- reading


def _read_tensors(files: CheckpointFiles, config: DraftConfig, entry: Format | None) -> dict[str, torch.Tensor]:
    expected = draft_tensors(config)
    names = {(entry.renamed if entry else {}).get(name, name): name for name in expected}
    ignored = {"t2d", "embed_tokens.weight", "lm_head.weight"}
    found = {
        "missing": sorted(names.keys() - files.tensors.keys()),
        "unexpected": sorted(files.tensors.keys() - names.keys() - ignored),
        "of another shape": sorted(
            theirs for theirs, ours in names.items()
            if theirs in files.tensors and files.tensors[theirs].shape != expected[ours]
        ),
        "of another type": sorted(
            theirs for theirs, ours in names.items()
            if theirs in files.tensors and files.tensors[theirs].dtype not in _TYPES.get(ours, _FLOATING)
        ),
    }  # fmt: skip
    if any(found.values()):
        listed = "; ".join(f"{fault}: {', '.join(tensors)}" for fault, tensors in found.items() if tensors)
        raise ValueError(f"the tensors of {files.name} are not what its config.json says. {listed}")
    tensors = {names[theirs]: tensor for theirs, tensor in load_tensors(files, names.keys()).items()}
    require_finite(tensors, files.name)
    if "d2t" in tensors and "t2d" in files.tensors:
        stored = load_tensors(files, ["t2d"])["t2d"]
        if not torch.equal(stored.bool(), target_to_draft(tensors["d2t"], config.vocab_size)):
            raise ValueError(f"{files.name} is damaged: its t2d and d2t name different tokens")
    return tensors


def target_to_draft(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which of the target's tokens a pruned vocabulary has.

    Args:
        d2t (`torch.LongTensor` of shape `[Vd]`): Draft id i is the target's token i + d2t[i].
        vocab_size (`int`): V.

    Returns:
        `torch.BoolTensor` of shape `[V]`.

    Raises:
        ValueError: If it names a token that the target has not, or one twice.
    """
    token_ids = torch.arange(len(d2t)) + d2t
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size or len(token_ids.unique()) < len(token_ids):
        raise ValueError(f"d2t must name {len(d2t)} distinct tokens of the target's {vocab_size}; it does not")
    kept[token_ids] = True
    return kept


# ---- writing


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already and is not overwritten: name another folder")


def _write(
    config: DraftConfig,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    format: str,
    target: Target | None,
    engine: str | None,
) -> ExportReport:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        if format == OURS:
            engines, notes = _write_ours(config, tensors, partial, engine)
        else:
            engines, notes = _write_foreign(config, tensors, partial, find_format(format, config), target, engine)
        files = tuple(sorted(path.name for path in partial.iterdir()))
        partial.chmod(0o755)  # mkdtemp's are closed to others
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ExportReport(folder, format, files, engines, notes)


def _write_ours(
    config: DraftConfig, tensors: dict[str, torch.Tensor], folder: Path, engine: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if engine is not None:
        raise ValueError(f"the format {OURS!r} is read by this package only, not by {engine!r}: leave engine out")
    config = copy.deepcopy(config)
    config.dtype = tensors["fc.weight"].dtype
    config.architectures = [DRAFTS[config.model_type].__name__]
    config.save_pretrained(folder)
    save_torch_state_dict(tensors, folder)
    return (OURS,), ()


def _write_foreign(
    config: DraftConfig,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    entry: Format,
    target: Target | None,
    engine: str | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    facts = None if target is None else target_facts(target)
    _require_target(config, entry, facts)
    written = config_to_format(config, entry, facts)
    readers = _readers(config, entry, engine)
    theirs = {entry.renamed.get(name, name): tensor for name, tensor in tensors.items()}
    if entry.copies:
        theirs |= _target_copies(target, entry)
    if getattr(config, "draft_vocab_size", None) is not None:
        theirs["t2d"] = target_to_draft(tensors["d2t"], config.vocab_size)
    written["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    written["transformers_version"] = transformers.__version__
    _write_json(folder / CONFIG_FILE, written)
    save_torch_state_dict(theirs, folder)
    notes = tuple(_unable(config, entry).values())
    if entry.names_target and facts is not None and Path(str(facts.name_or_path)).is_dir():
        notes += (
            f"it names its target by the local path {facts.name_or_path}: to share it, convert with the name that the "
            "target has on the Hub",
        )
    if config.sts_temperatures is not None:
        _write_json(folder / STS_FILE, {
            "temperatures": config.sts_temperatures["default"], "by_domain": config.sts_temperatures,
        })  # fmt: skip
        notes += (
            f"the format has no field for the temperatures of the confidence head: they are in {STS_FILE}, as SGLang "
            "reads them (--speculative-dspark-confidence-sts-path)",
        )
    _check_files(open_checkpoint(folder), config, entry, readers)
    return tuple(reader.name for reader in readers), notes


def _require_target(config: DraftConfig, entry: Format, facts: TargetFacts | None) -> None:
    if facts is None and (entry.copies or entry.names_target):
        what = "holds copies of its embedding and LM head" if entry.copies else "says where it is"
        raise ValueError(f"the format {entry.name!r} needs the target, for it {what}: pass target=...")
    if facts is None:
        return
    if entry.names_target and not facts.name_or_path:
        raise ValueError(
            f"the format {entry.name!r} says where the target is, which this one in memory does not know: pass its "
            "folder or its name on the Hub, or set target.config.name_or_path"
        )
    found = {
        "vocab_size": (config.vocab_size, facts.vocab_size),
        "hidden_size": (config.hidden_size, facts.hidden_size),
        "num_target_layers": (config.num_target_layers or facts.num_hidden_layers, facts.num_hidden_layers),
    }
    wrong = [f"{name}: draft {ours}, target {theirs}" for name, (ours, theirs) in found.items() if ours != theirs]
    if wrong:
        raise ValueError(f"this draft was not made for this target ({'; '.join(wrong)}): pass its own")


def _readers(config: DraftConfig, entry: Format, engine: str | None) -> tuple[Engine, ...]:
    """Return the engines that read a format and can run the draft.

    Raises:
        ValueError: If there is none, or the one that was asked for cannot.
    """
    readers = {reader.name: reader for reader in ENGINES if reader.name in entry.engines}
    if engine is not None:
        if engine not in readers:
            raise ValueError(f"the format {entry.name!r} is read by {', '.join(readers)}, not by {engine!r}")
        refuse(config, readers[engine].refusals, f"{engine} cannot run this draft")
        return (readers[engine],)
    unable = _unable(config, entry)
    if len(unable) == len(readers):
        raise ValueError(
            f"no engine that reads the format {entry.name!r} can run this draft: {'; '.join(unable.values())}"
        )
    return tuple(reader for name, reader in readers.items() if name not in unable)


def _unable(config: DraftConfig, entry: Format) -> dict[str, str]:
    """Return the engines that read a format and cannot run the draft, with their reasons."""
    reasons = {
        reader.name: [rule.reason for rule in reader.refusals if rule.applies(config)]
        for reader in ENGINES
        if reader.name in entry.engines
    }
    return {name: f"{name} cannot run it: {'; '.join(found)}" for name, found in reasons.items() if found}


def _target_copies(target: Target | None, entry: Format) -> dict[str, torch.Tensor]:
    """Return the target's tensors that a format holds copies of, in the type that the target has them in."""
    if isinstance(target, PreTrainedModel):
        borrowed = BorrowedModules.copy_of(target)
        found = {"embed_tokens.weight": borrowed.embedding.weight, "lm_head.weight": borrowed.lm_head.weight}
    elif isinstance(target, PreTrainedConfig):
        raise ValueError(
            f"the format {entry.name!r} holds copies of the target's embedding and LM head, which its configuration "
            "has not: pass the target itself, or where it is"
        )
    else:
        found = _stored_copies(open_checkpoint(target))
    # Copies of their own: a target may keep both in one tensor, of which a file would hold one.
    return {name: found[name].detach().clone() for name in entry.copies}


def _stored_copies(files: CheckpointFiles) -> dict[str, torch.Tensor]:
    names = {
        wanted: [name for name in files.tensors if name == wanted or name.endswith(f".{wanted}")]
        for wanted in ("embed_tokens.weight", "lm_head.weight")
    }
    # A tied head is not stored.
    names["lm_head.weight"] = names["lm_head.weight"] or names["embed_tokens.weight"]
    if any(len(found) != 1 for found in names.values()):
        raise ValueError(
            f"the embedding and the LM head of {files.name} cannot be told by their names: pass the loaded model"
        )
    stored = load_tensors(files, {found[0] for found in names.values()})
    return {wanted: stored[found[0]] for wanted, found in names.items()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_files(files: CheckpointFiles, config: DraftConfig, entry: Format, readers: tuple[Engine, ...]) -> None:
    """Raise a `ValueError` that names what a written checkpoint lacks for its format or an engine."""
    expected = format_tensors(config, entry)
    found = {name: info.shape for name, info in files.tensors.items()}
    faults = [f"tensor {name} {list(shape)} is missing" for name, shape in expected.items() if name not in found]
    faults += [f"tensor {name} is unexpected" for name in sorted(found.keys() - expected.keys())]
    faults += [
        f"tensor {name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    for reader in readers:
        faults += [f"{reader.name} needs {key} in config.json" for key in missing_keys(files.config, entry, reader)]
    if faults:
        raise ValueError(f"{files.name} is no sound {entry.name} checkpoint: {'; '.join(faults)}")
