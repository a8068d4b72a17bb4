"""Configurations on their way between other projects' formats and ours, as dictionaries, by the table of formats."""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..files import shortened
from .checkpoint import Checkpoint
from .deepseek_v4 import BUNDLED
from .dflash import DFLY
from .fields import ASKED, OMIT, REASONS, Format, Rules, Source, has_embedding_norm, look_up, text_of
from .keys import read_from, unfolded, unknown_keys
from .tables import ENGINE_REFUSALS, FORMAT_NAMES, FORMATS

CLASS_NAMES = {"dspark": "DSparkDraftModel", "dspark_eagle3": "Eagle3DraftModel"}


def recognise(config: Source) -> Format | None:
    """Return the format of a `config.json`; `None` if it is our own, or unknown."""
    return next((entry for entry in (DFLY, BUNDLED, *FORMATS) if entry.recognise(config)), None)


def draft_model_type(config: Source) -> str | None:
    """Return the `model_type` that a `config.json` of any known format has here; its own if it is of none."""
    foreign = recognise(config)
    return config.get("model_type") if foreign is None else foreign.model_type


def places_of(config: Source) -> dict[str, str]:
    """Return where a `config.json` says our fields, if not under their names."""
    foreign = recognise(config)
    return {} if foreign is None else read_from(config, foreign)[0]


def find_format(name: str, config: PreTrainedConfig) -> Format:
    """Return the entry of a foreign format for a draft."""
    if name not in FORMAT_NAMES:
        raise ValueError(f"there is no checkpoint format {name!r}: pass one of {', '.join(FORMAT_NAMES)}")
    entries = [entry for entry in FORMATS if (entry.name, entry.model_type) == (name, config.model_type)]
    if not entries:
        raise ValueError(f"the format {name!r} has no place for drafts of the kind {config.model_type!r}")
    if able := [entry for entry in entries if not _not_held(config, entry)]:
        return able[0]
    return min(reversed(entries), key=lambda entry: len(_not_held(config, entry)))  # whose reasons say most


def read_draft_config(
    checkpoint: Checkpoint, target: PreTrainedConfig | None = None, sample_from_anchor: bool | None = None
) -> dict[str, Any]:
    """Return a draft's configuration in our words, with the temperatures that lie beside it, whatever its format."""
    entry = recognise(checkpoint.config)
    if entry is None:
        return dict(checkpoint.config)
    told = _told_by_tensors(checkpoint, entry)
    ours = config_from_format(checkpoint.config | told, entry, target, sample_from_anchor)
    return ours if checkpoint.temperatures is None else ours | {"sts_temperatures": checkpoint.temperatures}


# What draft models, and layers, are wrapped in when they are trained and saved: of torch.compile, of FSDP and
# checkpointing, of DDP and PEFT, and of projects.
_WRAPPED = re.compile(r"_(orig_mod|(fsdp|checkpoint)_wrapped_module|forward_module)\.")
_WRAPPERS = (r"(((\w+_)?module|draft(er|_model)?|(base_)?model)\.)+", "")


def stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return our names of a checkpoint's tensors, and those that they have in its files."""
    entry = recognise(checkpoint.config)
    renames = () if entry is None else entry.renames
    ours = {} if entry is None else {theirs: ours for ours, theirs in entry.renamed.items()}
    found = {}
    for theirs in sorted(checkpoint.tensors):
        name = _WRAPPED.sub("", theirs)
        for pattern, replacement in (_WRAPPERS, *renames):
            name = re.sub(f"^{pattern}", replacement, name)
        name = ours.get(name, name)
        found.setdefault(name if name not in checkpoint.tensors else theirs, theirs)
    return found


def _told_by_tensors(checkpoint: Checkpoint, entry: Format) -> dict[str, Any]:
    """Return the fields that a configuration leaves out and its tensors tell."""
    try:
        config = unfolded(checkpoint.config, entry)
        places = {name: (name,) for name in entry.evidence} | {field.name: field.places for field in entry.fields}
        missing = {name: tell for name, tell in entry.evidence.items() if look_up(config, *places[name]) is None}
        if not missing:
            return {}
        shapes = {ours: checkpoint.tensors[theirs].shape for ours, theirs in stored_names(checkpoint).items()}
    except (ValueError, OSError):  # of a configuration alone, or of files that loading finds fault with
        return {}
    return {places[name][0]: tell(shapes) for name, tell in missing.items()}


def config_from_format(
    source: Source, entry: Format, target: PreTrainedConfig | None = None, sample_from_anchor: bool | None = None
) -> dict[str, Any]:
    """Translate a foreign `config.json` to ours, with `model_type` and `architectures`.

    `sample_from_anchor` is the layout of the blocks, if the file does not say it.
    """
    config = unfolded(source, entry)
    unknown = list(unknown_keys(config, entry))
    config[ASKED] = sample_from_anchor
    reasons = [
        f"config.json: {place} is {shortened(value)}, not one of {known}"
        for place, known in entry.accepts.items()
        if (value := look_up(config, place)) not in known
    ]
    if reasons := reasons + _reasons(entry.unreadable, config) + unknown:
        raise ValueError(f"this {entry.name} draft cannot be read: {'; '.join(reasons)}")
    text = target and text_of(target)
    ours = entry.constants | {field.name: field.read_from(config) for field in entry.fields}
    if ours.get("markov_rank") == 0:  # without a Markov head, what is said of it means nothing
        ours |= {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    if sample_from_anchor not in (None, ours.get("sample_from_anchor", True)):
        asked = f"sample_from_anchor={sample_from_anchor} was asked for"
        raise ValueError(f"{asked}, but the {entry.name} draft says otherwise: leave it out")
    if "vocab_size" not in ours and text is None:
        lacking = "neither how many tokens nor how many layers its target has"
        raise ValueError(f"a draft in the format {entry.name!r} says {lacking}: pass the target to convert_checkpoint")
    if "num_target_layers" not in ours:
        ours["num_target_layers"] = None if text is None else text.num_hidden_layers
        ours["target_model_type"] = None if text is None else text.model_type
    if text is not None:
        ours.setdefault("vocab_size", text.vocab_size)
    # They read the bare table; what that means for an embedding without a norm is the same.
    if entry.model_type == "dspark" and (text is None or has_embedding_norm(text.model_type)):
        ours["embedding_norm"] = False
    if (dtype := look_up(config, "dtype", "torch_dtype")) is not None:
        ours["dtype"] = dtype
    return ours | {"model_type": entry.model_type, "architectures": [CLASS_NAMES[entry.model_type]]}


def config_to_format(
    config: PreTrainedConfig, entry: Format, target: PreTrainedConfig | None = None
) -> dict[str, Any]:
    """Translate our configuration to a foreign `config.json`; a `ValueError` gives all reasons why it cannot be."""
    if reasons := _not_held(config, entry):
        raise ValueError(f"the format {entry.name!r} cannot hold this draft: {'; '.join(reasons)}")
    values = entry.base(target)
    for field in entry.fields:
        if field.write is not OMIT:
            values[field.place] = field.write(config, target) if field.write else getattr(config, field.name)
    values |= {place: write(config, target) for place, write in entry.writes.items()}
    written: dict[str, Any] = {}
    for path, value in ((path, value) for path, value in values.items() if value is not OMIT):
        *parents, name = path.split(".")
        place = written
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = dict(value) if isinstance(value, dict) else value
    return written


def exports_of(config: PreTrainedConfig) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return for each foreign format of a kind of drafts the engines that can run one from it, or why it is none."""
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for name in dict.fromkeys(entry.name for entry in FORMATS if entry.model_type == config.model_type):
        entry = find_format(name, config)
        reasons = "; ".join(_not_held(config, entry))
        try:
            found[name] = ((), reasons) if reasons else (engines_of(config, entry)[0], "")
        except ValueError as error:
            found[name] = (), str(error)
    return found


def not_exported(exports: Mapping[str, tuple[tuple[str, ...], str]]) -> str:
    """Return of what [`exports_of`] found why formats are none, those of one reason together; else an empty text."""
    by_reason: dict[str, list[str]] = {}
    for name, (_, reason) in exports.items():
        by_reason.setdefault(reason, []).append(name)
    return ". ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items() if reason)


def _not_held(config: PreTrainedConfig, entry: Format) -> list[str]:
    reasons = [
        REASONS.get((name, value), f"it has no field for {name}, which is {value!r} there")
        for name, value in entry.constants.items()
        if getattr(config, name, value) != value
    ]
    own = [name for name, field in config.shareable.items() if getattr(config, field)]
    if own and not entry.copies and not entry.holds_own_weights:
        reasons.append(
            f"it has no place for the draft's {' and '.join(own)}, not known to be copies of the target's (target=... "
            "compares them)"
        )
    return list(dict.fromkeys(reasons + _reasons(entry.refusals, config)))


def engines_of(
    config: PreTrainedConfig, entry: Format, wanted: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the engines that read a format and can run the draft, all or the wanted one, and notes about others."""
    if wanted not in (None, *entry.engines):
        raise ValueError(f"the format {entry.name!r} is read by {', '.join(entry.engines)}, not by {wanted!r}")
    limits = ENGINE_REFUSALS if entry.limits is None else entry.limits
    reasons = {name: "; ".join(_reasons(limits.get(name, {}), config)) for name in entry.engines}
    notes = {name: f"{name} cannot run this draft: {reason}" for name, reason in reasons.items() if reason}
    able = tuple(name for name in entry.engines if name not in notes and wanted in (None, name))
    if not able:
        raise ValueError(notes[wanted] if wanted else "; ".join(notes.values()))
    return able, tuple(notes.values())


def _reasons(rules: Rules, subject: Any) -> list[str]:
    return [reason for reason, applies in rules.items() if applies(subject)]
