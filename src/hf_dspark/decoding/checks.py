"""What cannot be decoded with a draft, or not by our own loop; found before any work. A check raises a `ValueError`.
An obstacle is a reason to leave a call to transformers' loop; `None` if there is none."""

from typing import Any

import torch
import transformers
from packaging.version import parse
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from ..models.slot_cache import SlotCache
from ..scheduling.policies import Policy
from ..targets.adapters import adapter_obstacle, forget_adapters_by_row
from ..targets.slot_attention import rope_parameters, rope_switches
from ..targets.support import is_stateful, keeps_states, slot_cache_obstacle, tree_obstacle
from .logits_processing import is_built_in
from .request import KNOWN_CRITERIA, Call, copy_of

# Arguments that our loop reads or has its own answer to: of the target's forward, and of the assisted loop.
INPUT_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "inputs_tensor"}
OUTPUT_ARGUMENTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}
LOOP_ARGUMENTS = {"synced_gpus", "streamer", "tokenizer", "assistant_tokenizer"}
KNOWN_ARGUMENTS = INPUT_ARGUMENTS | OUTPUT_ARGUMENTS | LOOP_ARGUMENTS
# Which tokens of a prompt are images: all zero for text.
MODALITY_ARGUMENTS = {"token_type_ids", "mm_token_type_ids"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Models that read their whole text again where the frequencies of longrope switch.
READS_AGAIN = {"phi3", "phi4_multimodal", "phimoe"}
# Options that ask for drafts of another kind.
OTHER_DRAFTERS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "speculation_type")
# Built-in processors that keep state between calls: drafting would advance it.
STATEFUL_PROCESSORS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# The first version whose assisted loop was found right for prompts given as embeddings; 5.17.0 was found wrong.
INPUTS_EMBEDS_SINCE = parse("5.23.0")


def loop_obstacle(target: PreTrainedModel, call: Call, num_rows: int) -> str | None:
    """Return why our loop cannot decode so many sequences of a call together."""
    config, kwargs = call.generation_config, call.model_kwargs
    if call.options.use_transformers_loop:
        return "draft.decoding.use_transformers_loop is set"
    obstacle = slot_cache_obstacle(target)
    if obstacle is not None:
        return obstacle
    others = {name: each for name, each in kwargs.items() if name not in KNOWN_ARGUMENTS and each is not None}
    unknown = sorted(name for name, each in others.items() if not _is_of_text_alone(target, name, each))
    if unknown:
        return f"the target gets arguments that belong to whole prompts, such as images ({', '.join(unknown)})"
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and not _are_usual(position_ids, kwargs.get("attention_mask")):
        return "position_ids are not those that follow from the attention mask"
    if kwargs.get("synced_gpus"):
        return "synced_gpus keeps ranks in step, which rounds of different lengths do not"
    if config.return_dict_in_generate and config.output_attentions:
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


def _are_usual(position_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Tell whether positions count the tokens that are no padding, from 0; in each dimension, if they have several."""
    if position_ids.dim() == 3:
        return all(_are_usual(dimension, mask) for dimension in position_ids)
    if position_ids.dim() != 2:
        return False
    if mask is None:
        return bool((position_ids == torch.arange(position_ids.shape[1], device=position_ids.device)).all())
    usual = mask.long().cumsum(-1) - 1
    return usual.shape[1] == position_ids.shape[1] and bool(((position_ids == usual) | (mask == 0)).all())


def check_adapters(target: PreTrainedModel, num_rows: int) -> None:
    """Refuse adapters that drafting or packed rows would get wrong."""
    obstacle = adapter_obstacle(target, num_rows)
    if obstacle is not None:
        forget_adapters_by_row(target)
        raise ValueError(f"{type(target).__name__} cannot be assisted as it is: {obstacle}")


def check_mode(target: PreTrainedModel) -> None:
    """Refuse a target whose layers would forget the cache."""
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        raise ValueError(
            "a target in train() with gradient checkpointing keeps no keys and values, so nothing can be verified: "
            "call target.eval(), or target.gradient_checkpointing_disable()"
        )


def check_options(config: GenerationConfig, schedule: str | None) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        raise ValueError(
            f"the draft cannot assist {mode.value!r}, it keeps one hypothesis: use num_beams=1 and neither "
            "penalty_alpha nor dola_layers, or drop assistant_model"
        )
    if not config.use_cache:
        raise ValueError("the draft needs use_cache=True, got use_cache=False: drop it, or drop assistant_model")
    if config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        name = config.cache_implementation
        raise ValueError(f"rejected tokens need a dynamic cache, got cache_implementation={name!r}: drop it")
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the output distribution, a draft must not: drop it")
    others = " and ".join(name for name in OTHER_DRAFTERS if getattr(config, name, None) not in (None, False))
    if others:
        raise ValueError(f"{others} asks for other drafts than those of assistant_model: drop one of them")
    if schedule not in (None, "constant"):
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} is not known to this draft: drop it. A policy adapts the "
            "number of tokens: draft.decoding = DecodingOptions(policy=...)"
        )


def check_policy(policy: Policy, draft: PreTrainedModel, do_sample: bool) -> None:
    """Refuse a policy that the draft cannot serve, or that would bias sampled output."""
    if policy.requires_confidence and not draft.config.enable_confidence_head and draft.drafts_blocks:
        raise ValueError(
            f"{type(policy).__name__} needs a draft with a confidence head; this one has none "
            "(config.enable_confidence_head is False). Use FullBlock, and leave assistant_confidence_threshold unset."
        )
    if do_sample and not policy.is_causal(draft.config.confidence_head_with_markov) and not policy.accept_bias:
        raise ValueError(
            f"{type(policy).__name__} is not causal with this draft: whether it verifies a token depends on "
            "confidences computed from that token, so sampled output would not follow the target's distribution "
            "(DSpark, Appendix A). Use Scheduler, decode greedily, or set accept_bias on the policy."
        )


def check_trees_alone(draft: PreTrainedModel, target: PreTrainedModel, policy: Policy, max_drafts: int | None) -> None:
    """Refuse what asks a draft for blocks that has none: its proposals are verified as trees."""
    name, obstacle = type(draft).__name__, tree_obstacle(target)
    if obstacle is not None:
        raise ValueError(f"{name} proposes trees, but {obstacle}: use prompt_lookup_num_tokens of transformers")
    if max_drafts is not None or policy.most_nodes == 0:
        given = f"num_assistant_tokens={max_drafts}" if max_drafts is not None else type(policy).__name__
        raise ValueError(
            f"{name} proposes trees of copies alone, got {given}: leave it out, or set "
            "draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=15))"
        )


def check_rows(target: PreTrainedModel, call: Call, obstacle: str | None) -> None:
    """Refuse prompts that cannot be decoded as they are; an obstacle leaves them to transformers' own loop."""
    input_ids, kwargs = call.input_ids, call.model_kwargs
    embeds, mask, cache = (kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values"))
    if obstacle is not None and is_stateful(target):
        raise ValueError(
            f"{type(target).__name__} keeps a recurrent state, which only hf_dspark's own loop can bring back. "
            f"It is not possible here: {obstacle}"
        )
    num_rows, columns = (input_ids if embeds is None else embeds).shape[:2]
    if obstacle is not None and num_rows != 1:
        raise ValueError(
            f"these {num_rows} sequences cannot be decoded together: {obstacle}. Call generate() per prompt, or drop "
            "assistant_model"
        )
    lengths = input_ids.new_full((num_rows,), columns) if mask is None else mask.sum(dim=-1)
    empty = (lengths == 0).nonzero()[:, 0].tolist()
    if columns == 0 or empty:
        raise ValueError(f"the prompt is empty{f' in rows {empty}' if empty else ''}: pass at least one token")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("the prompt is padded on the right: set tokenizer.padding_side = 'left'")
    text = target.config.get_text_config(decoder=True)
    size = getattr(target.get_input_embeddings(), "num_embeddings", text.vocab_size)  # adapters do not tell it
    if embeds is None and not 0 <= (lowest := int(input_ids.min())) <= (highest := int(input_ids.max())) < size:
        raise ValueError(
            f"the prompt has token ids from {lowest} to {highest}, the target knows 0 to {size - 1}: use the target's "
            "tokenizer"
        )
    context, longest = getattr(text, "max_position_embeddings", None), int(lengths.max())
    if context is not None and longest > context:
        raise ValueError(f"a prompt of {longest} tokens does not fit the target's context of {context}: shorten it")
    if obstacle is not None or text.model_type in READS_AGAIN:
        _check_rope_switches(target, call, longest)
    if cache is not None and "Static" in type(cache).__name__:
        raise ValueError(f"the draft needs a dynamic cache, got {type(cache).__name__}: pass a DynamicCache or none")
    if obstacle is not None:
        _check_for_transformers_loop(target, call, obstacle)
        return
    if cache is not None and not isinstance(cache, SlotCache) and keeps_states(target):
        raise ValueError(
            f"the recurrent states of a {type(cache).__name__} from elsewhere cannot be continued with a draft: pass "
            "no cache, or what an earlier call with the draft returned"
        )
    if cache is not None and cache.get_seq_length() > 0 and embeds is not None:
        raise ValueError("inputs_embeds cannot continue past_key_values: pass input_ids, or embeddings of everything")
    if cache is not None and not isinstance(cache, SlotCache) and not _is_plain(cache):
        raise ValueError(
            f"the draft cannot continue a {type(cache).__name__} of {type(cache.layers[0]).__name__}s (quantised "
            "or offloaded): pass a plain DynamicCache, or what an earlier call with the draft returned"
        )
    if num_rows > 1 and call.streamer is not None:
        raise ValueError(f"a streamer takes one sequence, got {num_rows} rows: stream one prompt at a time")
    ends_apart = any(not isinstance(criterion, MaxLengthCriteria) for criterion in call.stopping_criteria)
    if num_rows > 1 and call.pad_token_id is None and ends_apart:
        raise ValueError("rows may end at different lengths: set pad_token_id, for example to the eos_token_id")


def _check_rope_switches(target: PreTrainedModel, call: Call, longest: int) -> None:
    """Refuse what crosses a length where frequencies switch: a prompt that is shorter, of so many tokens at most, and
    an answer that is longer."""
    cache, at_end = call.model_kwargs.get("past_key_values"), longest + call.max_length - call.input_ids.shape[1]
    for switch in rope_switches(target):
        cached = 0 if cache is None else cache.get_seq_length()
        if (cached or longest) <= switch < at_end - 1:
            raise ValueError(
                f"{type(target).__name__} rotates otherwise beyond {switch} tokens, and plain decoding then reads "
                f"tokens again or one by one: give max_new_tokens={max(1, switch + 1 - longest)} at most, a prompt "
                f"of more than {switch} tokens without past_key_values, or drop assistant_model"
            )


def _is_plain(cache: Cache) -> bool:
    """Tell whether a cache holds keys and values as they are, where they are used."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return not getattr(cache, "offloading", False) and all(type(layer) in plain for layer in cache.layers)


def _check_for_transformers_loop(target: PreTrainedModel, call: Call, obstacle: str) -> None:
    embeds, mask, cache = (
        call.model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values")
    )
    if target.device.type == "meta":
        raise ValueError(
            "the target's embedding is offloaded, and transformers' assisted loop looks there for the device of its "
            "token ids: keep the embedding on a real device in device_map; other layers may be offloaded"
        )
    if embeds is not None and parse(transformers.__version__) < INPUTS_EMBEDS_SINCE:
        raise ValueError(
            f"inputs_embeds are decoded wrongly by the assisted loop of transformers {transformers.__version__}: pass "
            f"input_ids, or install transformers>={INPUTS_EMBEDS_SINCE} ({obstacle})"
        )
    if embeds is not None and mask is not None and not bool(mask.all()):
        raise ValueError(
            "left-padded inputs_embeds are decoded wrongly by transformers' assisted loop: pass the rows without "
            f"padding, or input_ids ({obstacle})"
        )
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values already holds {cache.get_seq_length()} tokens, and transformers' assisted loop would "
            "feed the whole prompt again on top of them: pass the whole conversation as input_ids without "
            f"past_key_values, or drop assistant_model ({obstacle})"
        )
    if isinstance(cache, SlotCache):
        raise ValueError("the draft needs a dynamic cache here, got SlotCache: pass a DynamicCache or none")
    for criterion in call.stopping_criteria:
        if not isinstance(criterion, KNOWN_CRITERIA):
            raise ValueError(
                f"transformers' assisted loop asks {type(criterion).__name__} once per block, and would return tokens "
                f"beyond the stop ({obstacle}): use eos_token_id, max_new_tokens or max_time, or drop assistant_model"
            )


def check_processors(processors: LogitsProcessorList, input_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse processors that remember calls, since the loop calls them on tokens that may be rejected, and those to
    which a row is not what it is alone, since it calls them row by row."""
    for processor in processors:
        if type(processor).__name__ in STATEFUL_PROCESSORS:
            raise ValueError(_keeps_state(processor))
        if not is_built_in(processor):
            _try_processor(processor, input_ids, vocab_size)


def _try_processor(processor: LogitsProcessor, input_ids: torch.Tensor, vocab_size: int) -> None:
    """Call copies with the same, other and again the same arguments, all rows together and each alone."""
    name = type(processor).__name__
    try:
        together, by_row = copy_of(processor), copy_of(processor)
    except Exception as error:  # whatever a user's object does when it is copied
        raise ValueError(
            f"the logits processor {name} cannot be copied ({error}), so it cannot be told "
            "whether it keeps state between calls: give it a __deepcopy__, or drop assistant_model"
        ) from error
    steps = torch.linspace(-1.0, 1.0, vocab_size, device=input_ids.device)
    scores = torch.stack([steps.roll(row) for row in range(len(input_ids))])
    longer_ids = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    results, attributes = [], []
    for ids in (input_ids, longer_ids, input_ids):
        results.append(together(ids, scores.clone()))
        attributes.append(repr(getattr(together, "__dict__", None)))
        for row in range(len(ids)) if len(ids) > 1 else ():
            _compare_row(by_row, ids, scores, row, results[-1])
    # The first call may set things up.
    if not torch.equal(results[0], results[2]) or len(set(attributes)) > 1:
        raise ValueError(_keeps_state(processor))


def _compare_row(
    processor: LogitsProcessor, input_ids: torch.Tensor, scores: torch.Tensor, row: int, expected: torch.Tensor
) -> None:
    try:
        found = processor(input_ids[row : row + 1], scores[row : row + 1].clone())
        difference = "gets other scores" if len(found) == 1 else f"returned {len(found)} rows"
        if len(found) == 1 and torch.allclose(found[0], expected[row], rtol=1e-3, atol=1e-3, equal_nan=True):
            return
    except Exception as error:  # whatever a user's object does with other rows than it knows
        difference = f"fails with {type(error).__name__}: {error}"
    raise ValueError(
        f"the logits processor {type(processor).__name__} treats rows differently: row {row} alone {difference}. "
        f"With a draft these {len(input_ids)} rows are processed one by one: make the result for a row depend on its "
        "own input_ids and scores, call generate() per prompt, or drop assistant_model"
    )


def _keeps_state(processor: LogitsProcessor) -> str:
    return (
        f"the logits processor {type(processor).__name__} keeps state between calls, and would be called on tokens "
        "that may be rejected: drop it, make its result depend on its arguments alone, or drop assistant_model"
    )
