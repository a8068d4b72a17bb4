"""How `target.generate()` reaches a draft: wraps made at import for `assistant_model=draft`, and `custom_generate`.
Only this file and `install` name private transformers generation API. Calls without a draft pass straight through."""

import copy
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, GenerationMode

from ..models.auto import is_draft, require_draft
from ..models.modeling_draft import DraftModel, check_fits
from ..scheduling.costs import ThroughputTable
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import ConfidenceThreshold, FullBlock, Policy
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_costs import find_cost
from ..targets.slot_attention import heal
from ..targets.support import check_state, is_stateful, tree_obstacle
from .assisted import DSparkCandidateGenerator
from .call import decode_call
from .checks import (
    check_adapters,
    check_mode,
    check_options,
    check_policy,
    check_processors,
    check_rows,
    check_trees_alone,
    loop_obstacle,
)
from .request import Call

# transformers fills these with defaults that are meant for other assistants.
CUTOFF_ARGUMENTS = ("assistant_confidence_threshold", "num_assistant_tokens", "num_assistant_tokens_schedule")

USUAL_NODES = 15  # of trees that are asked for where no cost is known
# Of machines that were not measured: passes of few tokens cost little more than of one.
USUAL_COST = ThroughputTable((1, 64), (2.0, 1.0))

_active_generator: ContextVar[DSparkCandidateGenerator | None] = ContextVar("hf_dspark_generator", default=None)


def _prepare_generation_config(
    original: Callable, target: PreTrainedModel, /, generation_config: GenerationConfig | None, **kwargs: Any
):
    """Remember which cut-off arguments the user set, before they are filled with defaults: the call's come first."""
    heal(target)
    configs = [config for config in (generation_config, target.generation_config) if config is not None]
    sources = [kwargs, *map(vars, configs)]
    chosen = {}
    for name in CUTOFF_ARGUMENTS:
        chosen[name] = next((source[name] for source in sources if source.get(name) is not None), None)
    prepared, model_kwargs = original(target, generation_config, **kwargs)
    prepared._hf_dspark_cutoff = chosen
    return prepared, model_kwargs


def _validate_generation_mode(
    original: Callable, target: PreTrainedModel, /, generation_mode, generation_config, generation_mode_kwargs
):
    """Refuse what cannot work before anything is computed, and choose the policy of the call."""
    draft = generation_mode_kwargs.get("assistant_model")
    if isinstance(draft, (str, os.PathLike)):  # transformers would look for its config
        require_draft(draft)
    if is_draft(draft):
        if generation_mode_kwargs.get("assistant_tokenizer") is not None:
            raise ValueError("the draft shares the target's vocabulary: drop assistant_tokenizer")
        check_state(target)
        if is_stateful(target):  # transformers' own loop cannot bring states back, ours need not
            generation_mode = GenerationMode.SAMPLE
        generation_config._hf_dspark_plan = _plan(target, draft, draft.decoding, generation_config, 1)
        if generation_config.num_return_sequences != 1:  # our loop takes any number of rows
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
    return original(target, generation_mode, generation_config, generation_mode_kwargs)


def _get_candidate_generator(original: Callable, *args: Any, **kwargs: Any) -> CandidateGenerator:
    generator = _active_generator.get()
    if generator is not None and kwargs.get("assistant_model") is generator.draft:
        return generator
    return original(*args, **kwargs)


def _assisted_decoding(original: Callable, target: PreTrainedModel, /, input_ids: torch.LongTensor, **prepared: Any):
    """Decode by our loop where the target allows it, else by transformers' own with our drafts."""
    by_transformers = functools.partial(original, target, input_ids, **prepared)
    draft = prepared.get("assistant_model")
    if not is_draft(draft):
        return by_transformers()
    call = Call.of(input_ids, prepared, *prepared["generation_config"]._hf_dspark_plan, draft.decoding)
    check_adapters(target, len(input_ids))
    obstacle = loop_obstacle(target, call, len(input_ids))
    check_rows(target, call, obstacle)
    if obstacle is not None and not draft.drafts_blocks:
        raise ValueError(f"{type(draft).__name__} needs hf_dspark's own loop, which is not possible here: {obstacle}")
    check_processors(call.logits_processor, input_ids, draft.config.vocab_size)
    if obstacle is None:
        return decode_call(target, draft, call)
    generator = DSparkCandidateGenerator(target, draft, call)
    try:
        _active_generator.set(generator)
        try:
            with generator:
                return by_transformers()
        finally:
            generator.close()  # for an interrupt while it is entered or left
    finally:
        _active_generator.set(None)


WRAPS = {
    wrap.__name__: wrap
    for wrap in (_prepare_generation_config, _validate_generation_mode, _get_candidate_generator, _assisted_decoding)
}


def decode_with(draft: DraftModel, options: DecodingOptions | None = None) -> Callable:
    """Return a decoding method for `target.generate(..., custom_generate=decode_with(draft))`.

    The same as `assistant_model=draft` through transformers' public door, with none of the wraps needed.
    transformers keeps streamers and tokenizers from custom methods: instead of `stop_strings`, pass
    `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.

    Args:
        draft ([`DraftModel`]): The target's draft.
        options ([`DecodingOptions`], *optional*): How to decode. Default: `draft.decoding`.

    Example:

    ```python
    options = DecodingOptions(policy=FullBlock())
    output = target.generate(**inputs, custom_generate=decode_with(draft, options), max_new_tokens=64)
    ```
    """
    prepare = prepare_with(draft, 1, options)

    def decode(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any):
        return decode_call(target, draft, prepare(target, input_ids, **prepared))

    return decode


def prepare_with(draft: DraftModel, batch_size: int, options: DecodingOptions | None) -> Callable[..., Call]:
    """Return a `custom_generate` that decodes nothing, and returns the [`Call`], checked for so many sequences."""
    require_draft(draft)

    def prepare(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> Call:
        check_state(target)
        decoding, num_rows = options or draft.decoding, max(len(input_ids), batch_size)
        plan = _plan(target, draft, decoding, prepared["generation_config"], num_rows)
        call = Call.of(input_ids, prepared, *plan, decoding)
        obstacle = loop_obstacle(target, call, num_rows)
        if obstacle is not None:
            raise ValueError(f"{obstacle}: use generate(assistant_model=draft), one sequence at a time")
        check_rows(target, call, obstacle)
        check_processors(call.logits_processor, input_ids, draft.config.vocab_size)
        return call

    return prepare


def _plan(
    target: PreTrainedModel, draft: DraftModel, options: DecodingOptions, config: GenerationConfig, num_rows: int
) -> tuple[Policy, int | None]:
    """Check what is known before the prompt is read; return the policy of the call and its limit of draft tokens."""
    check_fits(draft.config, target)
    check_mode(target)
    check_adapters(target, num_rows)
    cutoff = getattr(config, "_hf_dspark_cutoff", dict.fromkeys(CUTOFF_ARGUMENTS))
    threshold, max_drafts, schedule = (cutoff[name] for name in CUTOFF_ARGUMENTS)
    check_options(config, schedule)
    if max_drafts is not None and max_drafts < 1:
        raise ValueError(f"num_assistant_tokens must be at least 1, got {max_drafts}")
    if threshold is None:
        policy = options.policy or default_policy(draft, target, options.trees)
    else:  # the call's own comes first
        policy = ConfidenceThreshold(float(threshold)) if threshold else FullBlock()
    check_policy(policy, draft, config.do_sample)
    if not draft.drafts_blocks:
        check_trees_alone(draft, target, policy, max_drafts)
    return policy, max_drafts


def default_policy(draft: DraftModel, target: PreTrainedModel, trees: bool | None = None) -> Policy:
    """Return the scheduler if the draft is calibrated and the cost of this machine is known, else the full block, or a
    tree of a usual size if trees are asked for."""
    obstacle = tree_obstacle(target) if draft.grows_trees else f"{type(draft).__name__} takes a pass for each token"
    if trees and obstacle is not None:
        raise ValueError(f"DecodingOptions(trees=True) asks for trees of drafts, but {obstacle}: drop it")
    if not draft.drafts_blocks:
        return Scheduler(USUAL_COST, USUAL_NODES)
    cost = None if draft.config.sts_temperatures is None else find_cost(target, draft)
    if cost is not None:
        return Scheduler(cost, trees=trees if obstacle is None else False)
    return Scheduler(num_nodes=USUAL_NODES) if trees else FullBlock()
