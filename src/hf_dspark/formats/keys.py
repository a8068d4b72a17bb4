"""Keys of a foreign `config.json` that no field reads: which may be passed over, and which may not.

In an object of the draft's own, every key must be known. Elsewhere, in what describes its layers, a key is refused if
its name says that it changes what layers compute, and its value that it does.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..files import shortened
from .fields import HARMLESS, Format, Source, look_up

# Names by what they are about, and the values that leave layers as they are without the key.
_COMPUTING = (
    (r"quant(?!um)|compression_config", (False,)),
    (r"neox|qk_(layer)?norm|^use_(rope|rotary|pre_norm)|^(is_)?bidirectional$|^scale_attn", (True,)),
    (
        r"multiplier|scal(e|ar|ing)(_|$)|^mup(_|$)|dim_model_base|rotary_p(er)?ct|rotary_percent"
        r"|(att\w*|softmax|logits?)_temperature",
        (1, False),
    ),
    (
        r"(?<!m)rope|rotary|interleav|swa|window|chunk|causal|bidirectional|sink|gat(e|ed|ing)(_|$)|soft_?cap"
        r"|_cap$|alibi|denois|base_freq|freq\w*_base|norm(?!_topk)|(^|_)shift(_|$)|prefix_len|log_snr"
        r"|conditioning|bias(_linear)?$|pos\w*_(emb|enc)|pattern|activation|anchor|offset|projector|mask_embed"
        r"|embedding_size|target_hidden|draft_vocab|topk_context|tap_|residual(?!_(dropout|in_fp32))|parallel_att"
        r"|clip_qkv|nope_|zero_cent|(^|_)act(_fn)?$|(^|_)eps(ilon)?$|local_att|att\w*_(mode|types?)$|mask_type$"
        r"|^theta$|emb\w*_mult$|fusion|num_fc",
        (False, 0),
    ),
)
_OF_DRAFTS = re.compile("(markov|confidence|dspark|dflash)_")  # at the top, among what no target has
_QUANTISED = (
    "its weights are quantised, which cannot be read: take the checkpoint of the same draft that is not quantised, or "
    "dequantise it and delete the key"
)


def unfolded(config: Source, entry: Format) -> dict[str, Any]:
    """Return a configuration with the keys of a format's sections at its top; a `ValueError` names unknown ones."""
    flat = {key: value for key, value in config.items() if key not in entry.sections}
    for section in entry.sections:
        inside = config.get(section) or {}
        if not isinstance(inside, Mapping):
            raise ValueError(f"config.json: {section!r} must be an object, got {inside!r}")
        for key, value in inside.items():
            if key not in entry.known and not is_neutral(key, value):
                raise ValueError(unknown_key(f"{section}.{key}", key, value))
            if value is not None and flat.get(key) not in (None, value):
                raise ValueError(f"config.json: {key!r} is {flat[key]!r}, but '{section}.{key}' is {value!r}")
            flat[key] = flat.get(key) if value is None else value
    return flat


def unknown_keys(config: Source, entry: Format) -> Iterator[str]:
    """Yield why a configuration cannot be read whose sections are unfolded: each key that must not be passed over."""
    for section in dict.fromkeys(("", *entry.own, *entry.layers)):
        inside = look_up(config, section) if section else config
        for key, value in (inside if isinstance(inside, Mapping) else {}).items():
            place = f"{section}.{key}" if section else key
            known = place in entry.known or any(each.startswith(f"{place}.") for each in entry.known)
            is_own = section in entry.own or bool(not section and _OF_DRAFTS.match(key))
            if not known and (is_own or section in entry.layers) and not is_neutral(key, value, is_own):
                yield unknown_key(place, key, value)


def is_neutral(key: str, value: Any, must_be_known: bool = True) -> bool:
    """Tell whether a key that nothing reads leaves layers as they are, by its name and value."""
    if value is None or value == {}:
        return True
    if "layer" in key and isinstance(value, list) and any(type(each) is int for each in value):
        return False  # tapped layers, or layers that differ from the others
    for names, neutral in _COMPUTING:
        if re.search(names, key):
            return any(value is each or (value == each and type(value) in (int, float)) for each in neutral)
    return not must_be_known


def unknown_key(place: str, key: str, value: Any) -> str:
    """Return why a key that is not neutral cannot be passed over."""
    shown = f"config.json: {place} is {shortened(value)}"
    if re.search(_COMPUTING[0][0], key):
        return f"{shown}: {_QUANTISED}"
    return (
        f"{shown}, and nothing here computes what that means. If it is a remnant that the draft's layers do not read, "
        "as of a copied config, delete the key"
    )


def read_from(config: Source, entry: Format) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return where a configuration says our fields, if not under their names, and the keys that nothing reads."""
    told = {key: place for place, key in _filled(config, entry)}
    found: dict[str, str] = {}
    for field in entry.fields:
        places = [told[key] for key in field.places if key in told]
        places.sort(key=lambda place: place.rpartition(".")[2] != field.name)  # its own name comes first
        if places and places[0] != field.name:
            found[field.name] = places[0]
    found = dict(sorted(found.items(), key=lambda each: each[1].endswith(f".{each[0]}")))  # other names come first
    read = {*entry.accepts, *(key for field in entry.fields for key in field.places)}
    left = (place for key, place in told.items() if key not in read)
    return found, tuple(place for place in left if place.rpartition(".")[2] not in HARMLESS)


def _filled(config: Source, entry: Format, outer: str = "") -> Iterator[tuple[str, str]]:
    """Yield the places of a configuration that are filled, down to what is read whole, and their unfolded names."""
    for key, value in config.items():
        place = f"{outer}{key}"
        is_split = place in entry.sections or any(each.startswith(f"{place}.") for each in entry.known)
        if isinstance(value, Mapping) and is_split:
            yield from _filled(value, entry, f"{place}.")
        elif value is not None:
            yield place, key if outer.removesuffix(".") in entry.sections else place
