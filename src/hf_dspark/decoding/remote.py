"""Decoding with a draft from its repository alone, where this package is not installed.

`hub.write_remote_code` copies this file into a draft's repository as `custom_generate/generate.py`, together with the
modules it imports: transformers reads the classes of the draft from it, and calls [`generate`] for
`target.generate(..., custom_generate=repository, trust_remote_code=True)`. Nothing in the package imports it. Knows
nothing of training, calibration or measuring, and changes nothing in transformers.
"""

import inspect
import os
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from ..models.auto import load_draft
from ..models.configuration_dspark import DSparkConfig
from ..models.configuration_eagle3 import Eagle3Config
from ..models.modeling_draft import DraftModel, input_device
from ..models.modeling_dspark import DSparkDraftModel
from ..models.modeling_eagle3 import Eagle3DraftModel
from .hook import chosen_cutoff, decode_with

# transformers finds them here, by the names in `auto_map`.
__all__ = ["DSparkConfig", "DSparkDraftModel", "Eagle3Config", "Eagle3DraftModel", "generate"]

# The drafts of targets that are still there, by repository and revision.
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str | None], DraftModel]] = (
    weakref.WeakKeyDictionary()
)


def generate(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    **arguments: Any,
) -> Any:
    """Decode with the draft of this repository; what `generate(custom_generate=...)` calls.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model ([`DraftModel`], *optional*): The draft, if it is loaded already; else it is loaded from the
            repository that `custom_generate` names, once per target, in the dtype it was saved in.
        streamer (`BaseStreamer`, *optional*): Gets the tokens of one row.
        tokenizer, stop_strings, stopping_criteria (*optional*): As for `generate()`; stop strings need the tokenizer.
        revision, cache_dir, token, local_files_only: Of the repository; transformers has read this file with them.
        arguments: All others of `generate()`.

    Returns:
        What `generate()` returns.

    Raises:
        ValueError: If stop strings come without a tokenizer, or the call cannot be decoded with the draft.
    """
    hub = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    draft = _own_draft(model, hub) if assistant_model is None else assistant_model
    decode_drafts = decode_with(draft)
    cutoff = chosen_cutoff(arguments, arguments.get("generation_config"), model.generation_config)

    # transformers keeps tokenizers and streamers from methods that it is given as functions.
    criteria = StoppingCriteriaList(stopping_criteria or ())
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} need the target's tokenizer: pass tokenizer=tokenizer")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))

    def decode(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> Any:
        prepared["generation_config"]._hf_dspark_cutoff = cutoff
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return decode_drafts(target, input_ids, streamer=streamer, **prepared)

    return model.generate(custom_generate=decode, stopping_criteria=criteria, **arguments)


def _own_draft(target: PreTrainedModel, hub: dict[str, Any]) -> DraftModel:
    """Return the draft of the repository that this call names, on the target's device."""
    repository = _repository()
    # Code from the Hub lies in a folder named by its commit: weights and code are of one revision.
    revision = None if os.path.isdir(repository) else Path(__file__).parent.parent.name
    drafts = _loaded.setdefault(target, {})
    if (repository, revision) not in drafts:
        drafts[repository, revision] = load_draft(repository, dtype="auto", revision=revision, **hub).eval()
    return drafts[repository, revision].to(input_device(target.get_input_embeddings()))  # it may have moved since


def _repository() -> str:
    """Return what the running `generate()` was given as `custom_generate`.

    transformers passes all arguments on but this one, and the path of this file says it only for Hub repositories that
    were never renamed; the argument itself is right for forks, renamed repositories and folders, too.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code and isinstance(frame.f_locals["custom_generate"], str):
            return frame.f_locals["custom_generate"]
        frame = frame.f_back
    raise ValueError(
        "the draft's repository is not known here: call target.generate(custom_generate=repository, "
        "trust_remote_code=True), or pass assistant_model=draft, from AutoModel.from_pretrained(repository, "
        "trust_remote_code=True)"
    )
