"""Configurations on their way between other projects' formats and ours, as dictionaries, by the table of formats."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from .checkpoint import CONFIG_FILE, Checkpoint
from .fields import OMIT, REASONS, Format, Rules, TargetFacts, has_embedding_norm, look_up
from .tables import DEEPSPEC_GEMMA4, FORMAT_NAMES, FORMATS, OURS

_CLASS_NAMES = {"dspark": "DSparkDraftModel", "dspark_eagle3": "Eagle3DraftModel"}


def recognise(config: Mapping[str, Any]) -> Format | None:
    """Return the format of a `config.json`; `None` if it is our own, or unknown."""
    return next((entry for entry in FORMATS if entry.recognise(config)), None)


def draft_model_type(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` that a `config.json` of any known format has here; its own if it is of none."""
    foreign = recognise(config)
    return config.get("model_type") if foreign is None else foreign.model_type


def format_name(checkpoint: Checkpoint) -> str:
    """Return the name of the format that a draft is in; a `ValueError` if it is no known draft."""
    entry, config = recognise(checkpoint.config), checkpoint.config
    if entry is None and config.get("model_type") not in _CLASS_NAMES:
        raise ValueError(
            f"{checkpoint.name}/{CONFIG_FILE} (model_type {config.get('model_type')!r}, architectures "
            f"{config.get('architectures')!r}) is no draft in one of the formats {FORMAT_NAMES}"
        )
    return OURS if entry is None else entry.name


def find_format(name: str, config: PreTrainedConfig) -> Format:
    """Return the entry of a foreign format for a draft."""
    if name not in FORMAT_NAMES:
        raise ValueError(f"there is no checkpoint format {name!r}: pass one of {FORMAT_NAMES}")
    entries = [entry for entry in FORMATS if entry.name == name and entry.model_type == config.model_type]
    if not entries:
        raise ValueError(f"the format {name!r} has no place for drafts of the kind {config.model_type!r}")
    gemma = str(config.target_model_type).startswith("gemma4") and getattr(config, "sandwich_norms", False)
    return DEEPSPEC_GEMMA4 if gemma and DEEPSPEC_GEMMA4 in entries else entries[0]


def reasons_of(rules: Rules, subject: Any) -> list[str]:
    """Return the reasons of all rules that apply to a configuration, ours or theirs."""
    return [reason for reason, applies in rules.items() if applies(subject)]


def read_draft_config(
    checkpoint: Checkpoint, facts: TargetFacts | None = None, sample_from_anchor: bool | None = None
) -> dict[str, Any]:
    """Return a draft's configuration in our words, with the temperatures that lie beside it, whatever its format."""
    entry = recognise(checkpoint.config)
    if entry is None:
        return dict(checkpoint.config)
    ours = config_from_format(checkpoint.config, entry, facts, sample_from_anchor)
    return ours if checkpoint.temperatures is None else ours | {"sts_temperatures": checkpoint.temperatures}


def config_from_format(
    source: Mapping[str, Any], entry: Format, facts: TargetFacts | None = None, sample_from_anchor: bool | None = None
) -> dict[str, Any]:
    """Translate a foreign `config.json` to ours, with `model_type` and `architectures`.

    `sample_from_anchor` is the layout of the blocks, if the file does not say it.
    """
    config = dict(source)
    if sample_from_anchor is not None:
        config.setdefault("sample_from_anchor", sample_from_anchor)
    found = {place: look_up(config, place, None) for place in entry.accepts}
    reasons = [
        f"config.json: {place} is {value!r}, not one of {entry.accepts[place]}"
        for place, value in found.items()
        if value not in entry.accepts[place]
    ]
    if reasons := reasons + reasons_of(entry.unreadable, config):
        raise ValueError(f"this {entry.name} draft cannot be read: {'; '.join(reasons)}")
    if entry.needs_target and facts is None:
        raise ValueError(
            f"a draft in the format {entry.name!r} says neither how many tokens nor how many layers its target has: "
            "pass the target, convert_checkpoint(..., target=...)"
        )
    if facts is not None and facts.embedding_scale != 1.0 and entry.constants.get("embedding_scale") == 1.0:
        raise ValueError(
            f"a draft in the format {entry.name!r} reads embedding rows unscaled, but those of a "
            f"{facts.text.model_type!r} target are scaled by {facts.embedding_scale:g}: it is another target's"
        )
    ours = entry.constants | {field.name: field.read_from(config) for field in entry.fields}
    if ours.get("markov_rank") == 0:  # without a Markov head, what is said of it means nothing
        ours |= {"markov_head_type": "vanilla", "confidence_head_with_markov": False}
    if sample_from_anchor not in (None, ours.get("sample_from_anchor", True)):
        raise ValueError(
            f"sample_from_anchor={sample_from_anchor} was asked for, but the {entry.name} draft says otherwise: leave "
            "it out"
        )
    text = None if facts is None else facts.text
    if not entry.keeps_target_depth:
        ours["num_target_layers"] = None if text is None else text.num_hidden_layers
        ours["target_model_type"] = None if text is None else text.model_type
    if text is not None:
        ours.setdefault("vocab_size", text.vocab_size)
        if has_embedding_norm(text.model_type):
            ours["embedding_norm"] = False
    if "dtype" in config or "torch_dtype" in config:
        ours["dtype"] = config.get("dtype", config.get("torch_dtype"))
    return ours | {"model_type": entry.model_type, "architectures": [_CLASS_NAMES[entry.model_type]]}


def config_to_format(config: PreTrainedConfig, entry: Format, facts: TargetFacts | None = None) -> dict[str, Any]:
    """Translate our configuration to a foreign `config.json`; a `ValueError` gives all reasons why it cannot be."""
    reasons = [
        REASONS.get((name, value), f"it has no field for {name}, which is {value!r} there")
        for name, value in entry.constants.items()
        if getattr(config, name, value) != value
    ]
    if reasons := reasons + reasons_of(entry.refusals, config):
        raise ValueError(f"the format {entry.name!r} cannot hold this draft: {'; '.join(reasons)}")
    values = entry.base(facts)
    for field in entry.fields:
        if field.write is not OMIT:
            values[field.place] = field.write(config, facts) if field.write else getattr(config, field.name)
    values |= {place: write(config, facts) for place, write in entry.writes.items()}
    written: dict[str, Any] = {}
    for path, value in values.items():
        if value is not OMIT:
            *parents, name = path.split(".")
            place = written
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = dict(value) if isinstance(value, dict) else value
    return written
