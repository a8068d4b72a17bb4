"""Which kinds of drafts there are, loading one of any kind, and telling drafts from other things."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..formats.checkpoint import HUB_ARGUMENTS, Checkpoint
from ..formats.deepseek_v4 import is_bundled
from ..formats.translate import draft_model_type, recognise
from .modeling_draft import DraftModel
from .modeling_dspark import DSparkDraftModel
from .modeling_eagle3 import Eagle3DraftModel

DRAFTS = {kind.config_class.model_type: kind for kind in (DSparkDraftModel, Eagle3DraftModel)}


def load_draft(name_or_path: str | os.PathLike, **kwargs: Any) -> DraftModel:
    """Load a draft of any kind and format, as [`DraftModel.from_pretrained`]; a `ValueError` if it is no draft."""
    checkpoint = Checkpoint(name_or_path, **{name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs})
    kind = draft_model_type(checkpoint.config)
    if kind not in DRAFTS:
        raise ValueError(f"{name_or_path} holds a {kind!r} model, which is no draft: pass one of {sorted(DRAFTS)}")
    return DRAFTS[kind].from_pretrained(checkpoint, **kwargs)


def names_a_draft(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> bool:
    """Tell whether a folder or repository holds a draft of any format, and no target; an `OSError` says that it cannot
    be read."""
    try:
        config = Checkpoint(name_or_path, **hub_kwargs).config
        return draft_model_type(config) in DRAFTS and not is_bundled(config)
    except (ValueError, TypeError):  # whoever loads it says what is wrong
        return False


def carries_a_draft(name_or_path: str | os.PathLike, options: Mapping[str, Any]) -> bool:
    """Tell whether a target's folder or repository also holds a DSpark draft. Of `options` for loading, those of the
    Hub are followed."""
    return is_bundled(Checkpoint(name_or_path, **_of_hub(options)).config)


def holds_tensors(name_or_path: str | os.PathLike, pattern: re.Pattern[str], **hub_kwargs: Any) -> bool:
    """Tell whether a folder or repository holds tensors of such names. Headers alone are read."""
    return any(map(pattern.search, Checkpoint(name_or_path, **hub_kwargs).tensors))


def loader_of(name_or_path: str | os.PathLike, options: Mapping[str, Any], ordinary: Callable) -> Callable:
    """Return what loads a folder or repository: [`load_draft`], or `ordinary` if it holds a causal LM of
    transformers. Of `options` for loading, those of the Hub are followed."""
    kind = draft_model_type(Checkpoint(name_or_path, **_of_hub(options)).config)
    return ordinary if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in DRAFTS else load_draft


def _of_hub(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in HUB_ARGUMENTS}


def is_draft(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in DRAFTS


def refuse_misread(assistant: Any) -> None:
    """Raise a `TypeError` if a model was built from the files of a draft that transformers takes for another one."""
    config = getattr(assistant, "config", None)
    entry = recognise(config.to_dict()) if isinstance(config, PreTrainedConfig) else None
    if entry is not None and type(assistant).__name__ not in (config.architectures or ()):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, made of the files of a draft in the format "
            f"{entry.name!r} ({', '.join(config.architectures)}), of which it left out the most:\nload it by "
            f"draft = hf_dspark.{DRAFTS[entry.model_type].__name__}.from_pretrained({config.name_or_path!r})"
        )


def require_pair(target: Any, draft: Any) -> None:
    """Raise a `TypeError` unless these are a target and a draft, and a `ValueError` if the draft cannot run."""
    require_target(target)
    require_draft(draft)


def require_target(target: Any) -> None:
    if is_draft(target):
        raise TypeError(f"the target comes first and its draft second, got the draft {type(target).__name__} first")
    # PEFT's wrappers are no PreTrainedModel, and can.
    if isinstance(target, type) or not callable(getattr(target, "generate", None)):
        raise _not_loaded("a target", target, "AutoModelForCausalLM")


def require_draft(draft: Any) -> None:
    """Raise a `TypeError` unless this is a draft, and a `ValueError` if its weights are elsewhere."""
    if not is_draft(draft):
        raise _not_loaded("an AssistantDraft, a DSparkDraftModel or an Eagle3DraftModel", draft, "DSparkDraftModel")
    if (obstacle := weights_obstacle(draft)) is not None:
        raise ValueError(obstacle)


def weights_obstacle(draft: DraftModel) -> str | None:
    """Return why a draft has no weights that it could run with."""
    if draft.drafts_blocks and draft.device.type == "meta":
        return "the draft is on the meta device, offloaded or without weights: load it onto another device"
    return None


def _not_loaded(wanted: str, given: Any, loader: str) -> TypeError:
    got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    if isinstance(given, (str, os.PathLike)):
        got = f"the name {os.fspath(given)!r}: load it, {loader}.from_pretrained(...)"
    return TypeError(f"{wanted} is needed, got {got}")
