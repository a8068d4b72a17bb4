"""Decoding with a draft by `custom_generate`, and the plan of a call: what is checked before, and its policy."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.auto import require_draft, weights_obstacle
from ..models.modeling_draft import DraftModel
from ..scheduling.costs import ThroughputTable
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import ConfidenceThreshold, FullBlock, Policy
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_costs import experience_of
from ..targets.adapters import restore_adapters
from ..targets.assistant_draft import as_draft
from ..targets.compiled_target import CompiledTarget
from ..targets.support import TargetSupport
from ..targets.transformers_api import generation_obstacles, warn_if_untested
from .call import decode_call
from .checks import (
    DYNAMIC_CACHES,
    loop_obstacle,
    mask_obstacles,
    option_obstacles,
    policy_obstacles,
    processor_obstacles,
    prompt_obstacles,
    refuse,
)
from .request import Call

# What ends a block early, and the defaults that transformers, and files of its versions, have for other assistants.
CUTOFF_ARGUMENTS = {
    "assistant_confidence_threshold": (0.4,),
    "num_assistant_tokens": (20, 5),
    "num_assistant_tokens_schedule": ("constant", "heuristic", "heuristic_transient"),
}
WITHOUT_EFFECT = (20, "constant")

USUAL_NODES = 15  # of trees that are asked for where no cost is known
# Of machines that were not measured: passes of few tokens cost little more than of one.
USUAL_COST = ThroughputTable((1, 64), (2.0, 1.0))


def decode_with(draft: PreTrainedModel, options: DecodingOptions | None = None) -> Callable:
    """Return a decoding method for `target.generate(..., custom_generate=decode_with(draft))`.

    The same as `assistant_model=draft` through transformers' public door, with none of the wraps needed.
    transformers keeps streamers and tokenizers from custom methods: instead of `stop_strings`, pass
    `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`. An `assistant_confidence_threshold` of 0.4 is
    transformers' default there and means nothing: pass `options`.

    Args:
        draft (`PreTrainedModel`): The target's draft, or a causal LM with its tokenizer, see [`AssistantDraft`].
        options ([`DecodingOptions`], *optional*): How to decode. Default: `draft.decoding`.

    Example:

    ```python
    options = DecodingOptions(policy=FullBlock())
    output = target.generate(**inputs, custom_generate=decode_with(draft, options), max_new_tokens=64)
    ```
    """
    draft = as_draft(draft)
    prepare = prepare_with(draft, 1, options)

    def decode(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any):
        return decode_call(target, draft, prepare(target, input_ids, **prepared))

    return decode


def prepare_with(
    draft: DraftModel, batch_size: int, options: DecodingOptions | None, cutoff: dict[str, Any] | None = None
) -> Callable[..., Call]:
    """Return a `custom_generate` that decodes nothing, and returns the [`Call`], checked for so many sequences.

    What a call says of `CUTOFF_ARGUMENTS` is read from its prepared configuration, unless `cutoff` says it.
    """
    require_draft(draft)

    def prepare(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> Call:
        decoding, num_rows = options or draft.decoding, max(len(input_ids), batch_size)
        config = prepared["generation_config"]
        if (said := cutoff) is None:
            said = {name: value for name in CUTOFF_ARGUMENTS
                    if (value := getattr(config, name)) not in CUTOFF_ARGUMENTS[name]}  # fmt: skip
        drop_cache_of_files(target, config)
        plan, reasons = plan_call(target, draft, decoding, config, said)
        call = Call.of(input_ids, prepared, **plan)
        obstacle = loop_obstacle(call, num_rows)
        if obstacle is not None:
            reasons.append(f"{obstacle}: use generate(assistant_model=draft), one sequence at a time")
        reasons += call_obstacles(call, draft, None)
        if reasons:
            restore_adapters(call.support.modules)
        refuse(reasons)
        return call

    return prepare


def cutoff_of(target: PreTrainedModel, arguments: dict[str, Any], config: GenerationConfig | None) -> dict[str, Any]:
    """Return what a call says of `CUTOFF_ARGUMENTS`: in its arguments, in its configuration, or in the target's own,
    of which defaults for other assistants are named and left out."""
    found, left_out = {}, []
    for name, defaults in CUTOFF_ARGUMENTS.items():
        own, value = getattr(target.generation_config, name, None), arguments.get(name)
        if value is None:
            value = getattr(config, name, None)
            value = own if value is None else value
            if value == own and value in defaults:
                left_out += [] if value in WITHOUT_EFFECT else [f"{name}={value!r}"]
                value = None
        found[name] = value
    if left_out:
        said = f"{' and '.join(left_out)} of the target's generation_config, which its generation_config.json may hold"
        cure = "such defaults are for other assistants, and left out. Pass them to generate() to mean this draft"
        warnings.warn(f"{said}: {cure}", stacklevel=2)
    return found


def drop_cache_of_files(target: PreTrainedModel, config: GenerationConfig) -> None:
    """Let a prepared configuration have a dynamic cache where another kind that gives the same tokens is asked for by
    the target's own configuration alone."""
    kind, own = config.cache_implementation, getattr(target.generation_config, "cache_implementation", None)
    if kind == own and kind not in (None, "quantized", *DYNAMIC_CACHES):
        config.cache_implementation = None
        where = "of the target's generation_config, which its generation_config.json may hold,"
        said = f"cache_implementation={kind!r} {where} is left out: with a draft the cache is a dynamic one"
        warnings.warn(said, stacklevel=2)


def call_obstacles(call: Call, draft: DraftModel, obstacle: str | None) -> list[str]:
    """Return why prompts and processors cannot be decoded; an obstacle leaves a call to transformers' loop."""
    if reasons := mask_obstacles(call):  # then nothing else can be asked
        return reasons
    reasons = prompt_obstacles(call, obstacle)
    if obstacle is not None and not draft.drafts_blocks:
        reasons.append(
            f"{type(draft).__name__} needs hf_dspark's own loop, which is not possible here, because {obstacle}: use "
            "prompt_lookup_num_tokens of transformers"
        )
    if call.columns and len(call.input_ids):  # else processors cannot be tried
        reasons += processor_obstacles(call, draft.config.vocab_size)
    return reasons


def plan_call(
    target: PreTrainedModel,
    draft: DraftModel,
    options: DecodingOptions,
    config: GenerationConfig,
    cutoff: dict[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Return a call's policy, limits, options and target, and why it cannot be decoded as far as that is known before
    the prompt is read."""
    warn_if_untested()
    support = TargetSupport.of(target)
    config.do_sample = bool(config.do_sample)  # `None` asks for nothing
    threshold, max_drafts, schedule = map(cutoff.get, CUTOFF_ARGUMENTS)
    if not draft.drafts_blocks:  # it follows any target
        draft.bind(target)
    reasons = generation_obstacles(target) + support.draft_obstacles(draft.config, draft.drafts_blocks)
    reasons += option_obstacles(config, target.generation_config, schedule, max_drafts)
    reasons += filter(None, [weights_obstacle(draft)])
    draft.config.check_values("draft_top_k")
    device = support.input_device
    if draft.drafts_blocks and draft.device.type == "cpu" and device.type not in ("cpu", "meta"):
        warnings.warn(
            f"the draft is on the CPU, the target on {device}: rounds copy between the two. Use draft.to('{device}')",
            stacklevel=2,
        )
    if support.is_hooked:
        warnings.warn(
            f"hooks around modules of {support.name} see drafted tokens, and all rows of a batch as one sequence: "
            "what they change must not depend on the position or the row",
            stacklevel=2,
        )
    if threshold is None:
        regime = config.do_sample, options.domain
        policy = options.policy or default_policy(draft, target, options.trees, support, regime)
    else:  # the call's own comes first
        policy = ConfidenceThreshold(float(threshold)) if threshold else FullBlock()
    pads = device.type != "cpu" and CompiledTarget.of(support, options.compile) is not None
    if pads and isinstance(policy, Scheduler) and isinstance(policy.cost, ThroughputTable):
        policy = replace(policy, cost=policy.cost.padded())
    reasons += policy_obstacles(policy, draft, support, config.do_sample, max_drafts)
    return {"policy": policy, "max_drafts": max_drafts, "options": options, "support": support}, reasons


def default_policy(
    draft: DraftModel,
    target: PreTrainedModel,
    trees: bool | None = None,
    support: TargetSupport | None = None,
    regime: tuple[bool, str | None] = (False, None),
) -> Policy:
    """Return the scheduler, with what earlier calls have taught of these models in a regime: `do_sample`, domain."""
    obstacle = f"{type(draft).__name__} takes a pass for each token"
    support = support or TargetSupport.of(target)
    if draft.grows_trees:
        obstacle = support.tree_obstacle
    if trees and obstacle is not None:
        raise ValueError(f"DecodingOptions(trees=True) asks for trees of drafts, but {obstacle}: drop it")
    if not draft.drafts_blocks:
        return Scheduler(USUAL_COST, USUAL_NODES)
    return Scheduler(experience_of(target, draft, *regime), trees=trees if obstacle is None else False)
