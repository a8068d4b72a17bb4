"""How `target.generate(assistant_model=draft)` reaches the draft: what `install` wraps around transformers' methods.

`generate` puts the draft into a [`_Drafted`], which transformers carries to `validate_generation_mode` and
`assisted_decoding` as its `assistant_model`. Calls without a draft pass straight through.
"""

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..models.auto import is_draft, refuse_misread, require_draft
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import FullBlock
from ..scheduling.step_costs import experience_of
from ..targets.adapters import restore_adapters
from ..targets.support import TargetSupport, restore
from ..targets.transformers_api import CACHE_ARGUMENTS, generation_obstacles
from .assisted import DSparkCandidateGenerator, decode_assisted
from .attach import Attachment, attachment_of
from .batch import batch_plan, decode_batch
from .call import decode_call, effective_config
from .checks import DECODED, INPUT_ARGUMENTS, Refused, loop_obstacle, option_obstacles, refuse
from .conversation import open_cache, read_prompt
from .hook import call_obstacles, cutoff_of, drop_cache_of_files, plan_call
from .request import TYPE_ARGUMENTS, Call


@dataclass
class _Drafted:
    """A draft on its way through transformers' `generate()`, with what the wraps before have found out."""

    draft: DraftModel
    cutoff: dict[str, Any]  # what the user set of CUTOFF_ARGUMENTS
    given: dict[str, Any]  # the user's arguments
    decoding: DecodingOptions
    plan: dict[str, Any] | None = None  # what a `Call` needs besides
    is_prepared: bool = False  # a streamer has been given the prompt


def generate(original: Callable, target: PreTrainedModel, /, *args: Any, **kwargs: Any):
    """Take the draft among the arguments, or the attached one, and the cut-off arguments before they are filled with
    defaults."""
    restore(target)
    given = _signature(original).bind(target, *args, **kwargs)
    arguments = {name: each for name, each in given.arguments.items() if name not in ("self", "kwargs")} | kwargs
    attached, reasons = _attachment_for(target, arguments)
    draft = arguments.get("assistant_model") if attached is None else attached.draft
    if arguments.get("custom_generate") is not None:
        return original(target, *args, **kwargs)
    if draft is not None and not hasattr(draft, "config"):  # a name, a container, a class, or what is left of a draft
        require_draft(draft)
    if not is_draft(draft):
        refuse_misread(draft)
        return original(target, *args, **_without_slots(target, arguments, kwargs))
    cutoff = cutoff_of(target, arguments, arguments.get("generation_config"))
    given.arguments["assistant_model"] = drafted = _Drafted(draft, cutoff, arguments, (attached or draft).decoding)
    try:
        refuse(reasons + generation_obstacles(target))  # before its own code says less
        if arguments.get("assistant_tokenizer") is not None:
            refuse(["the draft shares the target's vocabulary: drop assistant_tokenizer"])
        output, reasons = original(*given.args, **given.kwargs), []
    except Refused as refusal:
        if attached is None:
            restore_adapters(target.modules())  # PEFT does it only after calls that end well
            raise
        reasons = refusal.reasons
    if attached is not None:
        attached.count(reasons)
    if not reasons:
        return output
    del given.arguments["assistant_model"]
    if drafted.is_prepared and (streamer := arguments.get("streamer")) is not None:  # it has been given the prompt
        puts = itertools.count()
        later = SimpleNamespace(put=lambda value: next(puts) and streamer.put(value), end=streamer.end)
        given.arguments["streamer"] = later
    given.arguments["kwargs"] = _without_slots(target, arguments, given.arguments.get("kwargs", {}))
    with TargetSupport.of(target).switch.lock:  # rounds of other threads wait
        return original(*given.args, **given.kwargs)


def _attachment_for(target: PreTrainedModel, arguments: dict[str, Any]) -> tuple[Attachment | None, list[str]]:
    """Return what is attached, if the call leaves it to that to decode it, and why it shall not. In modes that no
    draft can assist, transformers would only say that it is ignored."""
    attached = attachment_of(target)
    if attached is None or "assistant_model" in arguments or arguments.get("cache_implementation") == "paged":
        return None, []
    config = effective_config(target, arguments)
    mode = config.get_generation_mode()
    if mode is GenerationMode.ASSISTED_GENERATION:  # by another drafter
        return None, []
    if mode not in DECODED:
        return attached, option_obstacles(config, target.generation_config, None, None)
    draft = attached.draft
    if draft.drafts_blocks and draft.decoding.policy is None:
        if experience_of(target, draft, bool(config.do_sample), draft.decoding.domain).skipped.rests():
            return attached, ["drafting has not paid in earlier calls: it is tried again in some of them"]
    return attached, []


@functools.lru_cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def generate_batch(original: Callable, target: PreTrainedModel, /, *args: Any, **kwargs: Any):
    """Decode transformers' continuous batches with the attached draft by our queue, unless an option is of its own
    engine. A draft among the arguments is what transformers takes and does not look at."""
    attached, given = attachment_of(target), _signature(original).bind(target, *args, **kwargs).arguments
    if attached is None or not given["inputs"]:
        if kwargs.get("assistant_model") is not None:
            said = "generate_batch() of transformers decodes without its assistant_model: use hf_dspark.attach(...)"
            warnings.warn(said, stacklevel=3)
        return original(target, *args, **kwargs)
    config, reasons = batch_plan(target, given | given.get("kwargs", {}))
    try:
        refuse(reasons)
        output = decode_batch(target, given["inputs"], config, given.get("progress_bar", False))
    except Refused as refusal:
        attached.count(refusal.reasons)
        return original(target, *args, **kwargs)
    attached.count()
    return output


def validate_generation_mode(
    original: Callable, target: PreTrainedModel, /, generation_mode, generation_config, generation_mode_kwargs
):
    """Refuse what cannot work before anything is computed, and choose the policy of the call."""
    drafted = generation_mode_kwargs.get("assistant_model")
    if isinstance(drafted, _Drafted):
        draft = drafted.draft
        drop_cache_of_files(target, generation_config)
        drafted.plan, reasons = plan_call(target, draft, drafted.decoding, generation_config, drafted.cutoff)
        if reasons:
            refuse(_unprepared(drafted, generation_config, reasons))
        # It is no assistant as transformers knows them: states and several rows are welcome.
        generation_mode = GenerationMode.SAMPLE
        generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
    return original(target, generation_mode, generation_config, generation_mode_kwargs)


def _without_slots(target: PreTrainedModel, given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a plain call without the cache of an earlier call with a draft: a whole conversation is
    read again, and what only goes on gets a copy."""
    for name in CACHE_ARGUMENTS:
        if isinstance(cache := kwargs.get(name), SlotCache):
            call = _call_of(given, target.generation_config, policy=FullBlock())
            for row in range(open_cache(cache, len(call.input_ids)).num_rows):
                read_prompt(call, row, cache)  # refuses another conversation
            kwargs = kwargs | {name: cache.to_dynamic_cache() if call.width > call.columns else None}
    return kwargs


def _call_of(given: dict[str, Any], config: GenerationConfig, **plan: Any) -> Call:
    """Return a call as it is before transformers prepares it."""
    names = (*INPUT_ARGUMENTS, *CACHE_ARGUMENTS, *TYPE_ARGUMENTS, "streamer", "synced_gpus")
    prepared = {name: given[name] for name in names if given.get(name) is not None}
    prepared |= {name: given.get(name) or [] for name in ("logits_processor", "stopping_criteria")}
    ids, embeds = given.get("input_ids", given.get("inputs")), given.get("inputs_embeds")
    if ids is None:
        ids = torch.empty(1 if embeds is None else len(embeds), 0, dtype=torch.long)
    config = copy.copy(config)
    config.max_length = ids.shape[-1] + (config.max_new_tokens or 1)
    return Call.of(ids, prepared | {"generation_config": config}, **plan)


def _unprepared(drafted: _Drafted, config: GenerationConfig, reasons: list[str]) -> list[str]:
    """Return all reasons of a call that is refused: also of its prompts, as they are before transformers prepares
    them."""
    call = _call_of(drafted.given, config, **drafted.plan)
    try:
        obstacle = loop_obstacle(call, len(call.input_ids))
        return reasons + call_obstacles(call, drafted.draft, obstacle)
    except Exception:  # on prompts that transformers does not take, either
        return reasons


def assisted_decoding(original: Callable, target: PreTrainedModel, /, input_ids: torch.LongTensor, **prepared: Any):
    """Decode by our loop where the target allows it, else by transformers' own with our drafts."""
    drafted = prepared.get("assistant_model")
    if not isinstance(drafted, _Drafted):
        return original(target, input_ids, **prepared)
    draft, drafted.is_prepared = drafted.draft, True
    call = Call.of(input_ids, prepared, **drafted.plan)
    obstacle = loop_obstacle(call, len(input_ids))
    refuse(call_obstacles(call, draft, obstacle))
    if obstacle is None:
        return decode_call(target, draft, call)
    if not call.options.use_transformers_loop:
        warnings.warn(
            f"this call goes through transformers' assisted loop, because {obstacle}. Its output is as exact, but "
            "it verifies chains alone and loses most of the gain: 1.15 times as fast as without a draft instead of "
            "2.0, where it was measured",
            stacklevel=2,
        )
    prepared["logits_processor"] = call.logits_processor
    return decode_assisted(original, DSparkCandidateGenerator.of_call(target, draft, call), input_ids, **prepared)
