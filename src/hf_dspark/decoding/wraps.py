"""How `target.generate(assistant_model=draft)` reaches the draft: what `install` wraps around transformers' methods.

`generate` puts the draft into a [`_Drafted`], which transformers carries to `validate_generation_mode` and
`assisted_decoding` as its `assistant_model`. Calls without a draft pass straight through.
"""

import copy
import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..models.auto import is_draft, refuse_misread, require_draft
from ..models.modeling_draft import DraftModel
from ..targets.support import restore
from ..targets.transformers_api import generation_obstacles
from .assisted import DSparkCandidateGenerator, decode_assisted
from .call import decode_call
from .checks import INPUT_ARGUMENTS, loop_obstacle, refuse
from .hook import call_obstacles, cutoff_of, drop_cache_of_files, plan_call, refuse_call
from .request import TYPE_ARGUMENTS, Call


@dataclass
class _Drafted:
    """A draft on its way through transformers' `generate()`, with what the wraps before have found out."""

    draft: DraftModel
    cutoff: dict[str, Any]  # what the user set of CUTOFF_ARGUMENTS
    given: dict[str, Any]  # the user's arguments
    plan: dict[str, Any] | None = None  # what a `Call` needs besides


def generate(original: Callable, target: PreTrainedModel, /, *args: Any, **kwargs: Any):
    """Take the draft among the arguments, and the cut-off arguments before they are filled with defaults."""
    restore(target)
    given = _signature(original).bind(target, *args, **kwargs)
    draft = given.arguments.get("assistant_model")
    if draft is None or given.arguments.get("custom_generate") is not None:
        return original(target, *args, **kwargs)
    if isinstance(draft, (str, os.PathLike)):  # transformers would look for its config
        require_draft(draft)
    if not hasattr(draft, "config"):  # a container, a class, or what is left of a draft
        raise TypeError(f"assistant_model is a {type(draft).__name__}, which is no model: pass the draft itself")
    if not is_draft(draft):
        refuse_misread(draft)
        return original(target, *args, **kwargs)
    refuse(generation_obstacles(target))  # before its own code says less
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("the draft shares the target's vocabulary: drop assistant_tokenizer")
    cutoff = cutoff_of(target, kwargs, given.arguments.get("generation_config"))
    arguments = {name: each for name, each in given.arguments.items() if name != "kwargs"} | kwargs
    given.arguments["assistant_model"] = _Drafted(draft, cutoff, arguments)
    return original(*given.args, **given.kwargs)


@functools.lru_cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def generate_batch(original: Callable, target: PreTrainedModel, /, *args: Any, **kwargs: Any):
    """Say that transformers' continuous batching decodes without the draft, which it takes and does not look at."""
    if kwargs.get("assistant_model") is not None:
        warnings.warn(
            "generate_batch() of transformers decodes without its assistant_model. With a draft: "
            "hf_dspark.generate_many(target, draft, prompts)",
            stacklevel=3,
        )
    return original(target, *args, **kwargs)


def validate_generation_mode(
    original: Callable, target: PreTrainedModel, /, generation_mode, generation_config, generation_mode_kwargs
):
    """Refuse what cannot work before anything is computed, and choose the policy of the call."""
    drafted = generation_mode_kwargs.get("assistant_model")
    if isinstance(drafted, _Drafted):
        draft = drafted.draft
        drop_cache_of_files(target, generation_config)
        drafted.plan, reasons = plan_call(target, draft, draft.decoding, generation_config, drafted.cutoff)
        if reasons:
            refuse_call(*_unprepared(drafted, generation_config, reasons))
        # It is no assistant as transformers knows them: states and several rows are welcome.
        generation_mode = GenerationMode.SAMPLE
        generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
    return original(target, generation_mode, generation_config, generation_mode_kwargs)


def _unprepared(drafted: _Drafted, config: GenerationConfig, reasons: list[str]) -> tuple[Call, list[str]]:
    """Return a call that is refused, and all reasons: also of its prompts, as they are before transformers prepares
    them."""
    given = drafted.given
    names = (*INPUT_ARGUMENTS, *TYPE_ARGUMENTS, "streamer", "synced_gpus")
    prepared = {name: given[name] for name in names if given.get(name) is not None}
    prepared |= {name: given.get(name) or [] for name in ("logits_processor", "stopping_criteria")}
    ids, embeds = given.get("input_ids", given.get("inputs")), given.get("inputs_embeds")
    if ids is None:
        ids = torch.empty(1 if embeds is None else len(embeds), 0, dtype=torch.long)
    config = copy.copy(config)
    config.max_length = ids.shape[-1] + (config.max_new_tokens or 1)
    call = Call.of(ids, prepared | {"generation_config": config}, **drafted.plan)
    try:
        obstacle = loop_obstacle(call, len(ids))
        return call, reasons + call_obstacles(call, drafted.draft, obstacle)
    except Exception:  # on prompts that transformers does not take, either
        return call, reasons


def assisted_decoding(original: Callable, target: PreTrainedModel, /, input_ids: torch.LongTensor, **prepared: Any):
    """Decode by our loop where the target allows it, else by transformers' own with our drafts."""
    drafted = prepared.get("assistant_model")
    if not isinstance(drafted, _Drafted):
        return original(target, input_ids, **prepared)
    draft = drafted.draft
    call = Call.of(input_ids, prepared, **drafted.plan)
    obstacle = loop_obstacle(call, len(input_ids))
    refuse_call(call, call_obstacles(call, draft, obstacle))
    if obstacle is None:
        return decode_call(target, draft, call)
    if not call.options.use_transformers_loop:
        warnings.warn(
            f"this call goes through transformers' assisted loop, because {obstacle}. Its output is as exact, but "
            "it verifies chains alone and loses most of the gain: 1.15 times as fast as without a draft instead of "
            "2.0, where it was measured",
            stacklevel=2,
        )
    return decode_assisted(original, DSparkCandidateGenerator.of_call(target, draft, call), input_ids, **prepared)
