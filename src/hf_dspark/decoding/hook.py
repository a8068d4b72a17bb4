"""The wraps that make `target.generate(..., assistant_model=draft)` reach DSpark; `install` puts them in place.

Together they alone name private transformers generation API. Every call without a DSpark draft passes straight
through.
"""

import copy
import functools
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from packaging.version import parse
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import CandidateGenerator, GenerationMode

from ..maths.policies import AdaptiveDrafting, ConfidenceThreshold, FullBlock, Policy, PrefixScheduler
from ..models.auto import is_draft, require_draft
from ..models.modeling_draft import check_fits
from ..models.slot_cache import SlotCache
from ..targets.adapters import forget_adapters_by_row, why_not_with_adapters
from ..targets.slot_attention import require_no_state, rope_parameters, why_not_by_slots
from .call import Call, copy_of, generate_together, needs_padding
from .drafter import DSparkCandidateGenerator
from .step_costs import find_cost

CUTOFF_ARGUMENTS = ("assistant_confidence_threshold", "num_assistant_tokens")
# Built-in processors that keep state between calls: drafting would advance it.
STATEFUL_PROCESSORS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# The first version whose assisted loop was found right for prompts given as embeddings; 5.17.0 was found wrong.
INPUTS_EMBEDS_SINCE = parse("5.23.0")
EXACT_STOPPING_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)

_active_generator: ContextVar[DSparkCandidateGenerator | None] = ContextVar("hf_dspark_generator", default=None)


def _wrap_prepare(original):
    """Remember which cut-off arguments the user set: afterwards they are filled with defaults meant for other
    assistants."""

    @functools.wraps(original)
    def prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs: Any):
        chosen = chosen_cutoff(kwargs, generation_config, self.generation_config)
        prepared, model_kwargs = original(self, generation_config, **kwargs)
        prepared._hf_dspark_cutoff = chosen
        return prepared, model_kwargs

    return prepare_generation_config


def chosen_cutoff(kwargs: Mapping[str, Any], *configs: GenerationConfig | None) -> dict[str, Any]:
    """Return the cut-off arguments that the user set: the call's own ones first, then those of each configuration."""
    sources = (kwargs, *(vars(config) for config in configs if config is not None))
    return {
        name: next((source[name] for source in sources if source.get(name) is not None), None)
        for name in CUTOFF_ARGUMENTS
    }


def _wrap_validate(original):
    """Refuse what cannot work before anything is computed."""

    @functools.wraps(original)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        draft = generation_mode_kwargs.get("assistant_model")
        if isinstance(draft, (str, os.PathLike)):  # transformers would look for its config
            require_draft(draft)
        if is_draft(draft):
            check_fits(draft.config, self)
            _check_adapters(self, num_rows=1)
            _check_options(generation_mode, generation_config, generation_mode_kwargs)
            _policy(draft, self, generation_config)
            if generation_config.num_return_sequences != 1:  # our loop takes any number of rows
                generation_config = copy.copy(generation_config)
                generation_config.num_return_sequences = 1
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate_generation_mode


def _wrap_get_generator(original):
    @functools.wraps(original)
    def get_candidate_generator(self, *args: Any, **kwargs: Any) -> CandidateGenerator:
        generator = _active_generator.get()
        if generator is not None and kwargs.get("assistant_model") is generator.draft:
            return generator
        return original(self, *args, **kwargs)

    return get_candidate_generator


def _wrap_decoding(original):
    """Decode by our loop where the target allows it, else by transformers' own with our generator."""

    @functools.wraps(original)
    def assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        assistant_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        prepared = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
        }
        if not is_draft(assistant_model):
            return original(self, input_ids, assistant_model=assistant_model, **prepared, **kwargs)
        _check_adapters(self, len(input_ids))
        reason = _needs_transformers_loop(self, assistant_model, len(input_ids), generation_config, kwargs)
        if reason is None:
            call = _checked_call(self, assistant_model, input_ids, **prepared, **kwargs)
            return generate_together(self, assistant_model, call)
        _check_single(self, input_ids, stopping_criteria, kwargs, reason)
        _check_processors(logits_processor, input_ids, assistant_model.config.vocab_size)
        policy, max_drafts = _policy(assistant_model, self, generation_config)
        generator = DSparkCandidateGenerator(
            self, assistant_model, generation_config, logits_processor, policy, max_drafts
        )
        token = _active_generator.set(generator)
        try:
            with generator:
                return original(self, input_ids, assistant_model=assistant_model, **prepared, **kwargs)
        finally:
            _active_generator.reset(token)

    return assisted_decoding


WRAPS = {
    "_prepare_generation_config": _wrap_prepare,
    "_validate_generation_mode": _wrap_validate,
    "_get_candidate_generator": _wrap_get_generator,
    "_assisted_decoding": _wrap_decoding,
}


def decode_with(draft: PreTrainedModel) -> Callable:
    """Return a decoding method for `target.generate(..., custom_generate=decode_with(draft))`.

    The same as `assistant_model=draft` through transformers' public door, with none of the wraps needed.
    transformers keeps streamers and tokenizers from custom methods: instead of `stop_strings`, pass
    `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.

    Args:
        draft ([`DraftModel`]): The target's draft.
    """
    prepare = prepare_with(draft)

    def decode(target: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any):
        return generate_together(target, draft, prepare(target, input_ids, **prepared))

    return decode


def prepare_with(draft: PreTrainedModel, together: int = 1) -> Callable[..., Call]:
    """Return a `custom_generate` that decodes nothing, and returns the checked [`Call`].

    Args:
        draft ([`DraftModel`]): The target's draft.
        together (`int`): Sequences that will be decoded together, if more than the call has.
    """
    require_draft(draft)

    def prepare(
        target: PreTrainedModel, input_ids: torch.LongTensor, generation_config: GenerationConfig, **prepared: Any
    ) -> Call:
        require_no_state(target)
        check_fits(draft.config, target)
        mode = generation_config.get_generation_mode()
        plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        _check_adapters(target, num_rows=max(len(input_ids), together))
        _check_options(GenerationMode.ASSISTED_GENERATION if plain else mode, generation_config, {})
        lists = ("logits_processor", "stopping_criteria")
        others = {name: value for name, value in prepared.items() if name not in lists}
        num_rows = max(len(input_ids), together)
        reason = _needs_transformers_loop(target, draft, num_rows, generation_config, others)
        if reason is not None:
            raise ValueError(f"{reason}: use generate(assistant_model=draft), one sequence at a time")
        return _checked_call(target, draft, input_ids, generation_config=generation_config, **prepared)

    return prepare


# Arguments of the target's forward, or of the assisted loop, that our loop reads or has its own answer to.
KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "synced_gpus",
    "streamer",
    "inputs_tensor",
    "tokenizer",
    "assistant_tokenizer",
}
# Which tokens of a prompt are images: all zero for text.
MODALITY_ARGUMENTS = {"token_type_ids", "mm_token_type_ids"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def _needs_transformers_loop(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    num_rows: int,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
) -> str | None:
    """Return why our loop cannot decode this; `None` if it can."""
    unknown = sorted(
        key
        for key, value in kwargs.items()
        if key not in KNOWN_ARGUMENTS and value is not None and not _is_of_text_alone(target, key, value)
    )
    position_ids = kwargs.get("position_ids")
    if draft.use_transformers_loop:
        return "draft.use_transformers_loop is set"
    reason = why_not_by_slots(target)
    if reason is not None:
        return reason
    if unknown:
        return f"the target gets arguments that belong to whole prompts, such as images ({', '.join(unknown)})"
    if position_ids is not None and not _are_usual(position_ids, kwargs):
        return "position_ids are not those that follow from the attention mask"
    if kwargs.get("synced_gpus"):
        return "synced_gpus keeps ranks in step, which rounds of different lengths do not"
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        return "output_attentions asks for attention weights"
    if num_rows > 1 and any(part.get("rope_type") in LENGTH_DEPENDENT_ROPE for part in rope_parameters(target)):
        return f"the rotary frequencies of {type(target).__name__} depend on the longest row"
    return None


def _is_of_text_alone(target: PreTrainedModel, name: str, value: Any) -> bool:
    """Tell what a multimodal target is given along with texts that have no images: no encodings, types all zero."""
    if name == "mm_encoder_outputs":
        return not value
    is_multimodal = target.config.get_text_config(decoder=True) is not target.config
    return is_multimodal and name in MODALITY_ARGUMENTS and not bool(value.any())


def _are_usual(position_ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Tell whether positions count the tokens that are no padding, from 0; in each dimension, if they have several."""
    mask = kwargs.get("attention_mask")
    if position_ids.dim() == 3:
        return all(_are_usual(dimension, kwargs) for dimension in position_ids)
    if position_ids.dim() != 2:
        return False
    if mask is None:
        return bool((position_ids == torch.arange(position_ids.shape[1], device=position_ids.device)).all())
    usual = mask.long().cumsum(-1) - 1
    return usual.shape[1] == position_ids.shape[1] and bool(((position_ids == usual) | (mask == 0)).all())


def _checked_call(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Call:
    _check_rows(target, input_ids, stopping_criteria, generation_config, kwargs)
    _check_processors(logits_processor, input_ids, draft.config.vocab_size)
    policy, max_drafts = _policy(draft, target, generation_config)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return Call(
        input_ids, logits_processor, stopping_criteria, generation_config, kwargs, policy,
        pad_token_id=None if pad is None else int(pad),
        mask_width=getattr(generation_config, "_mask_length", None),
        fills_users_cache=getattr(kwargs.get("past_key_values"), "_is_user_defined", False),
        max_drafts=max_drafts,
        streamer=kwargs.pop("streamer", None),
    )  # fmt: skip


def _policy(
    draft: PreTrainedModel, target: PreTrainedModel, generation_config: GenerationConfig
) -> tuple[Policy, int | None]:
    """Return who cuts the blocks, and the draft limit: the call's threshold, else `draft.policy`, else the default."""
    cutoff = getattr(generation_config, "_hf_dspark_cutoff", dict.fromkeys(CUTOFF_ARGUMENTS))
    threshold, max_drafts = (cutoff[name] for name in CUTOFF_ARGUMENTS)
    if max_drafts is not None and max_drafts < 1:
        raise ValueError(f"num_assistant_tokens must be at least 1, got {max_drafts}")
    if threshold is not None:
        policy = ConfidenceThreshold(float(threshold)) if threshold else FullBlock()
    else:
        policy = draft.policy or default_policy(draft, target)
    _check_policy(policy, draft, generation_config.do_sample)
    return policy, max_drafts


def default_policy(draft: PreTrainedModel, target: PreTrainedModel) -> Policy:
    """Return the scheduler if the draft is calibrated and the cost of this machine is known, else the full block."""
    if draft.config.sts_temperatures is None:
        return FullBlock()
    cost = find_cost(target, draft)
    return FullBlock() if cost is None else AdaptiveDrafting(PrefixScheduler(cost), cost)


def _check_policy(policy: Policy, draft: PreTrainedModel, do_sample: bool) -> None:
    if isinstance(policy, type):
        raise TypeError(f"draft.policy must be a policy, got the class {policy.__name__}: call it with its arguments")
    methods = ("plan_draft", "plan_verify", "observe", "fresh", "is_causal", "accept_bias", "requires_confidence")
    lacking = [name for name in methods if not hasattr(policy, name)]
    if lacking:
        raise TypeError(
            f"draft.policy must be a hf_dspark.Policy, got {type(policy).__name__} without {', '.join(lacking)}: "
            "subclass hf_dspark.Policy"
        )
    if policy.requires_confidence and not draft.config.enable_confidence_head:
        raise ValueError(
            f"{type(policy).__name__} needs a draft with a confidence head; this one has none "
            "(config.enable_confidence_head is False). Use FullBlock, and leave assistant_confidence_threshold unset."
        )
    if do_sample and not policy.is_causal(draft.config.confidence_head_with_markov) and not policy.accept_bias:
        inner = policy
        while hasattr(inner, "policy"):
            inner = inner.policy
        raise ValueError(
            f"{type(inner).__name__} is not causal with this draft: whether it verifies a token depends on "
            "confidences that were computed from that token, so sampled output would not follow the target's "
            "distribution (DSpark, Appendix A). Use PrefixScheduler or LaggedScheduler, decode greedily, or give "
            f"{type(inner).__name__} accept_bias=True for an experiment."
        )


def _check_adapters(target: PreTrainedModel, num_rows: int) -> None:
    reason = why_not_with_adapters(target, num_rows)
    if reason is not None:
        forget_adapters_by_row(target)
        raise ValueError(f"{type(target).__name__} cannot be assisted as it is: {reason}")


def _check_options(
    generation_mode: GenerationMode, generation_config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"the draft cannot assist {generation_mode.value!r}: speculative decoding keeps one hypothesis. Use "
            "num_beams=1 and no penalty_alpha or dola_layers, or drop assistant_model."
        )
    if not generation_config.use_cache:
        raise ValueError("the draft needs use_cache=True, got use_cache=False: drop it, or drop assistant_model")
    if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        raise ValueError(
            "the draft needs a dynamic cache, got "
            f"cache_implementation={generation_config.cache_implementation!r}: rejected tokens must be cropped away. "
            "Drop cache_implementation, or drop assistant_model."
        )
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("the draft shares the target's vocabulary: drop assistant_tokenizer")
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise ValueError(
            "assistant_ensemble_weight changes the output distribution; hf_dspark is lossless and does not support it"
        )


def _check_rows(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
) -> None:
    """Refuse prompts that cannot be decoded as they are."""
    embeds, mask, cache = (kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values"))
    columns = (input_ids if embeds is None else embeds).shape[1]
    lengths = input_ids.new_full((len(input_ids),), columns) if mask is None else mask.sum(dim=-1)
    empty = (lengths == 0).nonzero()[:, 0].tolist()
    if columns == 0 or empty:
        raise ValueError(f"the prompt is empty{f' in rows {empty}' if empty else ''}: pass at least one token")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("the prompt is padded on the right: set tokenizer.padding_side = 'left'")
    text = target.config.get_text_config(decoder=True)
    size = getattr(target.get_input_embeddings(), "num_embeddings", text.vocab_size)  # adapters do not tell it
    if embeds is None and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < size:
        raise ValueError(
            f"the prompt has token ids from {int(input_ids.min())} to {int(input_ids.max())}, the target knows 0 to "
            f"{size - 1}: use the target's tokenizer"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and int(lengths.max()) > longest:
        raise ValueError(
            f"a prompt of {int(lengths.max())} tokens does not fit the target's context of {longest}: shorten it"
        )
    if cache is not None and cache.get_seq_length() > 0 and embeds is not None:
        raise ValueError("inputs_embeds cannot continue past_key_values: pass input_ids, or embeddings of everything")
    if cache is not None and "Static" in type(cache).__name__:
        raise ValueError(f"the draft needs a dynamic cache, got {type(cache).__name__}: pass a DynamicCache or none")
    if cache is not None and not isinstance(cache, SlotCache) and not _is_plain(cache):
        raise ValueError(
            f"the draft cannot continue a {type(cache).__name__} of {type(cache.layers[0]).__name__}s (quantised "
            "or offloaded): pass a plain DynamicCache, or what an earlier call with the draft returned"
        )
    if len(input_ids) == 1:
        return
    if kwargs.get("streamer") is not None:
        raise ValueError(f"a streamer takes one sequence, got {len(input_ids)} rows: stream one prompt at a time")
    if getattr(generation_config, "_pad_token_tensor", None) is None and needs_padding(stopping_criteria):
        raise ValueError(
            "rows may end at different lengths and there is no padding token: set pad_token_id, for example to the "
            "eos_token_id"
        )


def _is_plain(cache: Cache) -> bool:
    """Tell whether a cache holds keys and values as they are, where they are used."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return not getattr(cache, "offloading", False) and all(type(layer) in plain for layer in cache.layers)


def _check_single(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
    reason: str,
) -> None:
    """Refuse what transformers' own assisted loop gets wrong."""
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    batch_size = (input_ids if embeds is None else embeds).shape[0]
    if batch_size != 1:
        raise ValueError(
            f"these {batch_size} sequences cannot be decoded together: {reason}. Call generate() per prompt, or drop "
            "assistant_model"
        )
    if target.device.type == "meta":
        raise ValueError(
            "the target's embedding is offloaded, and transformers' assisted loop looks there for the device of its "
            "token ids: keep the embedding on a real device in device_map; other layers may be offloaded"
        )
    if embeds is None and input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty: pass at least one token")
    if mask is not None and not bool(mask[0, -1]):
        raise ValueError("the prompt is padded on the right: set tokenizer.padding_side = 'left'")
    if embeds is not None and parse(transformers.__version__) < INPUTS_EMBEDS_SINCE:
        raise ValueError(
            f"inputs_embeds are decoded wrongly by the assisted loop of transformers {transformers.__version__}: pass "
            f"input_ids, or install transformers>={INPUTS_EMBEDS_SINCE} ({reason})"
        )
    if embeds is not None and mask is not None and not bool(mask.all()):
        raise ValueError(
            "left-padded inputs_embeds are decoded wrongly by transformers' assisted loop: pass the rows without "
            f"padding, or input_ids ({reason})"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values already holds {cache.get_seq_length()} tokens, whose features the draft never saw, and "
            "transformers' assisted loop would feed the whole prompt again on top of them: pass the whole "
            f"conversation as input_ids without past_key_values, or drop assistant_model ({reason})"
        )
    if cache is not None and ("Static" in type(cache).__name__ or isinstance(cache, SlotCache)):
        raise ValueError(
            f"the draft needs a dynamic cache here, got {type(cache).__name__}: pass a DynamicCache or none"
        )
    for criterion in stopping_criteria:
        if not isinstance(criterion, EXACT_STOPPING_CRITERIA):
            raise ValueError(_STOPPING_MESSAGE.format(type(criterion).__name__, reason))


_STOPPING_MESSAGE = (
    "the stopping criterion {} cannot be combined with transformers' own assisted loop, which checks it once per "
    "block and would return tokens beyond the stop ({}). Use eos_token_id, max_new_tokens or max_time, or drop "
    "assistant_model."
)


def _check_processors(logits_processor: LogitsProcessorList, input_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse processors that remember calls: the loop calls them on tokens that may be rejected."""
    for processor in logits_processor:
        name = type(processor).__name__
        built_in = type(processor).__module__.startswith("transformers.")
        if name in STATEFUL_PROCESSORS or not (built_in or _is_stateless(processor, input_ids, vocab_size)):
            raise ValueError(
                f"the logits processor {name} keeps state between calls: drafting and verifying would call it on "
                "tokens that may be rejected, and change the output. Drop it, make its result depend on its "
                "arguments alone, or drop assistant_model."
            )


def _is_stateless(processor: LogitsProcessor, input_ids: torch.Tensor, vocab_size: int) -> bool:
    """Call a copy with the same, other and again the same arguments: results and plain attributes must not change."""
    try:
        trial = copy_of(processor)
    except Exception as error:  # whatever a user's object does when it is copied
        raise ValueError(
            f"the logits processor {type(processor).__name__} cannot be copied ({error}), so nobody can tell "
            "whether it keeps state between calls: give it a __deepcopy__, or drop assistant_model"
        ) from error
    scores = torch.linspace(-1.0, 1.0, vocab_size, device=input_ids.device).expand(len(input_ids), -1)
    longer_ids = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    attributes = repr(getattr(trial, "__dict__", None))
    results = [trial(ids, scores.clone()) for ids in (input_ids, longer_ids, input_ids)]
    return torch.equal(results[0], results[2]) and repr(getattr(trial, "__dict__", None)) == attributes
