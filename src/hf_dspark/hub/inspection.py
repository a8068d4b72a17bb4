"""What a folder or a repository on the Hub is to this package, told from its config and the headers of its weights."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..files import shortened
from ..formats.checkpoint import Checkpoint
from ..formats.fields import Format
from ..formats.keys import read_from
from ..formats.tables import OURS
from ..formats.translate import exports_of, not_exported, read_draft_config, recognise, stored_names
from ..models.auto import DRAFTS
from ..models.configuration_draft import DraftConfig
from .card import draft_kind
from .convert import Target, read_checkpoint, target_config

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes, by the names of safetensors
INTEGERS = ("I64", "I32", "BOOL")
BROUGHT = ("embed_tokens.weight", "lm_head.weight", "d2t")  # what a draft need not borrow


@dataclass(frozen=True)
class DraftReport:
    """What [`inspect_draft`] found."""

    name: str
    found: dict[str, Any]  # texts and lists of texts, by what they are about
    refusal: str | None = None  # why the draft cannot be used, or not with that target; `None` if it can

    def __str__(self) -> str:
        texts = {about: each if isinstance(each, str) else ", ".join(each) for about, each in self.found.items()}
        lines = {"draft": self.name} | {about: text for about, text in texts.items() if text}
        return "\n".join(f"{about:12} {shortened(text, quote=False, size=240)}" for about, text in lines.items())


def inspect_draft(
    draft: str | os.PathLike,
    target: Target | None = None,
    *,
    sample_from_anchor: bool | None = None,
    **hub_kwargs: Any,
) -> DraftReport:
    """Tell what a folder or a repository on the Hub holds, without loading it.

    Of the weights, the headers are read, and which tokens a pruned vocabulary has; of the target, its `config.json`.

    Args:
        draft (`str` or `PathLike`): A folder, or a repository on the Hub.
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`, *optional*): A target to hold it against.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, if the files do not say it.
        hub_kwargs: `revision`, `token`, `subfolder`, ... of the draft.

    Returns:
        [`DraftReport`]: its `found` has a line for each fact, and `refusal` says why the draft cannot be used.

    Raises:
        ValueError: If there is no `config.json`, or it is damaged.
        OSError: If the Hub does not answer.

    Example:

    ```python
    print(inspect_draft("my-draft", target="Qwen/Qwen3-4B"))
    ```
    """
    checkpoint = _Headers(draft, **hub_kwargs)
    source, entry = checkpoint.config, recognise(checkpoint.config)
    name = entry.name if entry else OURS if source.get("model_type") in DRAFTS else "none that is known"
    classes = source.get("architectures") or [source.get("model_type")]
    found: dict[str, Any] = {"format": f"{name} ({', '.join(map(str, classes))})"}
    try:
        infos = checkpoint.tensors.values()
        number, dtypes = sum(prod(info.shape) for info in infos), sorted({info.dtype for info in infos})
        size = sum(os.path.getsize(file) for file in {info.file for info in infos})
        found["weights"] = f"{number:,} numbers of {', '.join(dtypes)}, {size / 2**20:,.1f} MiB"
        if checkpoint.quantisation is not None:
            found["weights"] += ", quantised by bitsandbytes: no format holds them, convert those of full precision"
        config, _ = read_checkpoint(checkpoint, target, sample_from_anchor)
        for field in config.shareable.values():  # as if copies of the target's, with which nothing was compared
            setattr(config, field, False)
        found |= _described(config, checkpoint, entry)
        if target is not None:
            known = target_config(target)
            found["fits"] = known.name_or_path or type(known).__name__
    except ValueError as error:
        return DraftReport(checkpoint.name, found, str(error))
    return DraftReport(checkpoint.name, found)


def memory_needed(name: str, dtype: str | None = None, bits: int = 0) -> tuple[int, int]:
    """Return about how many bytes the weights of a model or a draft take, and its keys and values of a token. They are
    loaded as they are stored, or in a dtype; with so many bits if they are quantised."""
    name, _, revision = (name, "", "") if os.path.exists(name) else name.partition("@")
    checkpoint = Checkpoint(name, **({"revision": revision} if revision else {}))
    config = read_draft_config(checkpoint)
    config, infos = config.get("text_config") or config, checkpoint.tensors.values()
    given, stored = getattr(torch, str(dtype), None), max((SIZES.get(info.dtype, 1) for info in infos), default=0)
    number = given.itemsize if given else stored
    weights = sum(prod(info.shape) for info in infos) * (bits / 8 or number)
    kinds = config.get("layer_types") or ["attention"] * config.get("num_hidden_layers", 0)
    layers = sum(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    heads = config.get("num_attention_heads", 0)
    size = config.get("head_dim") or config.get("hidden_size", 0) // max(1, heads)
    return int(weights), 2 * layers * (config.get("num_key_value_heads") or heads) * size * number


def _described(config: DraftConfig, checkpoint: Checkpoint, entry: Format | None) -> dict[str, Any]:
    places, ignored = ({}, ()) if entry is None else read_from(checkpoint.config, entry)
    layout = {True: "from the anchor", False: "filled in"}.get(getattr(config, "sample_from_anchor", None))
    head = f"{getattr(config, 'markov_head_type', None)} head of rank {config.markov_rank}"
    kind = {draft_kind(config): True, f"blocks of {config.block_size}": True, layout: layout, head: config.markov_rank}
    kind |= {"confidence head": config.enable_confidence_head, "calibrated": config.sts_temperatures}
    rope, slides = config.rope_parameters, (config.layer_types or []).count("sliding_attention")
    layers = f"{config.num_hidden_layers}, each of {config.num_attention_heads} heads"
    heads = f"{config.num_key_value_heads} for keys) of {config.head_dim}"
    width = f"{layers} ({heads}, hidden size {config.hidden_size}, MLP {config.intermediate_size}"
    windows = f", {slides} with a window of {getattr(config, 'sliding_window', None)}" if slides else ""
    taps = f"reads layers {', '.join(map(str, config.target_layer_ids or ()))} of {config.num_target_layers or 'some'}"
    if config.target_layer_ids is None:
        taps = f"reads {config.num_taps} layers, by its target's depth"
    stored, unless = stored_names(checkpoint), " (used unless it is the target's)"
    exports = exports_of(config)
    runs = () if entry is None else exports.get(entry.name, ((), ""))[0]
    return {
        "kind": [what for what, is_there in kind.items() if is_there],
        "layers": f"{width}{windows}, rope {rope.get('rope_type', 'default')} with theta {rope['rope_theta']:g}",
        "target": f"{config.target_model_type or 'a type that is not said'}, {config.vocab_size:,} tokens; {taps}",
        "brings": [f"{name}{unless * (name in config.shareable)}" for name in BROUGHT if name in stored],
        "load with": f"hf_dspark.{DRAFTS[config.model_type].__name__}.from_pretrained({checkpoint.name!r})",
        "read": [f"{ours} from {place}" for ours, place in places.items()],
        "ignored": [f"{place}: no layer reads it" for place in ignored],
        "runs in": [OURS, *runs],
        "converts to": [f"{name} ({'; '.join(able)})" for name, (able, _) in exports.items() if able],
        "but not to": not_exported(exports),
    }


class _Headers(Checkpoint):
    """A checkpoint of which weights are read as shapes alone; integers, which say what others mean, as they are."""

    def load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        whole = [name for name in names if self.tensors[name].dtype in INTEGERS]
        shapes = {name: torch.empty(self.tensors[name].shape, device="meta") for name in names if name not in whole}
        return shapes | super().load(whole)
