"""What cannot be decoded with a draft, or not by our own loop; found before any work, and named all at once.

Each function yields reasons: of the options, of the prompts, of the loop that they need.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
import transformers
from packaging.version import parse
from transformers import GenerationConfig, LogitsProcessor, MaxLengthCriteria, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.generation import GenerationMode

from ..models.slot_cache import SlotCache
from ..scheduling.policies import Policy
from ..targets.support import TargetSupport
from .logits_processing import is_built_in
from .request import KNOWN_CRITERIA, Call, copy_of

# Arguments that our loop reads or has its own answer to: of the target's forward, and of the assisted loop.
INPUT_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "inputs_tensor"}
OUTPUT_ARGUMENTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}
LOOP_ARGUMENTS = {"synced_gpus", "streamer", "tokenizer", "assistant_tokenizer"}
KNOWN_ARGUMENTS = INPUT_ARGUMENTS | OUTPUT_ARGUMENTS | LOOP_ARGUMENTS
# Which tokens of a prompt are images: all zero for text.
MODALITY_ARGUMENTS = {"token_type_ids", "mm_token_type_ids"}
# Attention that gives no weights: plain decoding returns empty tuples.
WITHOUT_WEIGHTS = {"sdpa"}
# Options that ask for drafts of another kind.
OTHER_DRAFTERS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "speculation_type")
# Built-in processors that keep state between calls: drafting would advance it.
STATEFUL_PROCESSORS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
# The first version whose assisted loop was found right for prompts given as embeddings; 5.17.0 was found wrong.
INPUTS_EMBEDS_SINCE = parse("5.23.0")


def refuse(reasons: Iterable[str]) -> None:
    """Raise a `ValueError` with all reasons, if there are any."""
    reasons = list(dict.fromkeys(reasons))
    if len(reasons) > 1:
        raise ValueError("\n- ".join([f"there are {len(reasons)} reasons against a draft here:", *reasons]))
    if reasons:
        raise ValueError(reasons[0])


# ---- options


def option_obstacles(config: GenerationConfig, schedule: str | None, max_drafts: int | None) -> Iterator[str]:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        yield (
            f"the draft cannot assist {mode.value!r}, it keeps one hypothesis: use num_beams=1 and neither "
            "penalty_alpha nor dola_layers, or drop assistant_model"
        )
    if not config.use_cache:
        yield "the draft needs use_cache=True, got use_cache=False: drop it, or drop assistant_model"
    if config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        name = config.cache_implementation
        yield f"rejected tokens need a dynamic cache, got cache_implementation={name!r}: drop it"
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        yield "assistant_ensemble_weight changes the output distribution, a draft must not: drop it"
    others = " and ".join(name for name in OTHER_DRAFTERS if getattr(config, name, None) not in (None, False))
    if others:
        yield f"{others} asks for other drafts than those of assistant_model: drop one of them"
    if schedule not in (None, "constant"):
        yield (
            f"num_assistant_tokens_schedule={schedule!r} is not known to this draft: drop it. A policy adapts the "
            "number of tokens: draft.decoding = DecodingOptions(policy=...)"
        )
    if max_drafts is not None and max_drafts < 1:
        yield f"num_assistant_tokens must be at least 1, got {max_drafts}"


def policy_obstacles(
    policy: Policy, draft: PreTrainedModel, support: TargetSupport, do_sample: bool, max_drafts: int | None
) -> Iterator[str]:
    """Yield why the draft cannot serve a policy, or why that would bias sampled output."""
    if policy.requires_confidence and not draft.config.enable_confidence_head and draft.drafts_blocks:
        yield (
            f"{type(policy).__name__} needs a draft with a confidence head; this one has none "
            "(config.enable_confidence_head is False). Use FullBlock, and leave assistant_confidence_threshold unset."
        )
    if do_sample and not policy.is_causal(draft.config.confidence_head_with_markov) and not policy.accept_bias:
        yield (
            f"{type(policy).__name__} is not causal with this draft: whether it verifies a token depends on "
            "confidences computed from that token, so sampled output would not follow the target's distribution "
            "(DSpark, Appendix A). Use Scheduler, decode greedily, or set accept_bias on the policy."
        )
    if draft.drafts_blocks:
        return
    name = type(draft).__name__
    if support.tree_obstacle is not None:
        obstacle = support.tree_obstacle
        yield f"{name} proposes trees, but {obstacle}: use prompt_lookup_num_tokens of transformers"
    if max_drafts is not None or policy.most_nodes == 0:
        given = f"num_assistant_tokens={max_drafts}" if max_drafts is not None else type(policy).__name__
        yield (
            f"{name} proposes trees of copies alone, got {given}: leave it out, or set "
            "draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=15))"
        )


# ---- prompts


def loop_obstacle(call: Call, num_rows: int) -> str | None:
    """Return why our loop cannot decode so many sequences of a call together; transformers' loop takes one."""
    return "; ".join(_loop_obstacles(call, num_rows)) or None


def _loop_obstacles(call: Call, num_rows: int) -> Iterator[str]:
    support, kwargs = call.support, call.model_kwargs
    if call.options.use_transformers_loop:
        yield "draft.decoding.use_transformers_loop is set"
    if support.slot_obstacle is not None:
        yield support.slot_obstacle
    others = {name: each for name, each in kwargs.items() if name not in KNOWN_ARGUMENTS and each is not None}
    unknown = sorted(name for name, each in others.items() if not _is_of_text_alone(support, name, each))
    if unknown:
        yield f"the target gets arguments that belong to whole prompts, such as images ({', '.join(unknown)})"
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and not _are_usual(position_ids, kwargs.get("attention_mask")):
        yield "position_ids are not those that follow from the attention mask"
    if kwargs.get("synced_gpus"):
        yield "synced_gpus keeps ranks in step, which rounds of different lengths do not"
    if _returns_attentions(call) and support.text._attn_implementation not in WITHOUT_WEIGHTS:
        yield "output_attentions asks for attention weights"
    if num_rows > 1 and support.batch_obstacle is not None:
        yield support.batch_obstacle


def _returns_attentions(call: Call) -> bool:
    return bool(call.generation_config.return_dict_in_generate and call.generation_config.output_attentions)


def _is_of_text_alone(support: TargetSupport, name: str, value: Any) -> bool:
    """Tell what a multimodal target is given along with texts that have no images: no encodings, types all zero."""
    if name == "mm_encoder_outputs":
        return not value
    is_multimodal = support.text is not support.target.config
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


def prompt_obstacles(call: Call, obstacle: str | None) -> Iterator[str]:
    """Yield why prompts cannot be decoded as they are; an obstacle leaves them to transformers' own loop."""
    support, input_ids, kwargs = call.support, call.input_ids, call.model_kwargs
    embeds, mask, cache = (kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values"))
    num_rows, columns = (input_ids if embeds is None else embeds).shape[:2]
    if obstacle is not None and support.is_stateful:
        yield (
            f"{support.name} keeps a recurrent state, which only hf_dspark's own loop can bring back. "
            f"It is not possible here: {obstacle}"
        )
    elif obstacle is not None and num_rows != 1:
        yield (
            f"these {num_rows} sequences cannot be decoded together: {obstacle}. Call generate() per prompt, or drop "
            "assistant_model"
        )
    elif obstacle is not None:
        yield from _transformers_loop_obstacles(call, obstacle)
    else:
        yield from _own_loop_obstacles(call, num_rows)
    lengths = input_ids.new_full((num_rows,), columns) if mask is None else mask.sum(dim=-1)
    empty = (lengths == 0).nonzero()[:, 0].tolist()
    if columns == 0 or empty:
        yield f"the prompt is empty{f' in rows {empty}' if empty else ''}: pass at least one token"
        return
    if mask is not None and not bool(mask[:, -1].all()):
        yield "the prompt is padded on the right: set tokenizer.padding_side = 'left'"
    size = getattr(support.embedding, "num_embeddings", support.text.vocab_size)  # adapters do not tell it
    if embeds is None and not 0 <= (lowest := int(input_ids.min())) <= (highest := int(input_ids.max())) < size:
        yield (
            f"the prompt has token ids from {lowest} to {highest}, the target knows 0 to {size - 1}: use the target's "
            "tokenizer"
        )
    context, longest = support.num_positions, int(lengths.max())
    if context is not None and longest > context:
        yield f"a prompt of {longest} tokens does not fit the target's context of {context}: shorten it"
    at_end = longest + call.max_length - input_ids.shape[1]
    for switch in support.rope_switches if obstacle is not None or support.reads_again else ():
        cached = 0 if cache is None else cache.get_seq_length()
        if (cached or longest) <= switch < at_end - 1:
            yield (
                f"{support.name} rotates otherwise beyond {switch} tokens, and plain decoding then reads "
                f"tokens again or one by one: give max_new_tokens={max(1, switch + 1 - longest)} at most, a prompt "
                f"of more than {switch} tokens without past_key_values, or drop assistant_model"
            )


def _own_loop_obstacles(call: Call, num_rows: int) -> Iterator[str]:
    cache = call.model_kwargs.get("past_key_values")
    if isinstance(cache, StaticCache):
        yield f"the draft needs a dynamic cache, got {type(cache).__name__}: pass a DynamicCache or none"
    elif cache is not None and not isinstance(cache, SlotCache) and call.support.keeps_states:
        yield (
            f"the recurrent states of a {type(cache).__name__} from elsewhere cannot be continued with a draft: pass "
            "no cache, or what an earlier call with the draft returned"
        )
    elif cache is not None and not isinstance(cache, SlotCache) and not _is_plain(cache):
        yield (
            f"the draft cannot continue a {type(cache).__name__} of {type(cache.layers[0]).__name__}s (quantised "
            "or offloaded): pass a plain DynamicCache, or what an earlier call with the draft returned"
        )
    elif cache is not None and cache.get_seq_length() > 0 and call.model_kwargs.get("inputs_embeds") is not None:
        yield "inputs_embeds cannot continue past_key_values: pass input_ids, or embeddings of everything"
    yield from _mask_obstacles(call, num_rows)
    yield from _criterion_obstacles(call, num_rows)
    if num_rows > 1 and call.streamer is not None:
        yield f"a streamer takes one sequence, got {num_rows} rows: stream one prompt at a time"
    ends_apart = any(not isinstance(criterion, MaxLengthCriteria) for criterion in call.stopping_criteria)
    if num_rows > 1 and call.pad_token_id is None and ends_apart:
        yield "rows may end at different lengths: set pad_token_id, for example to the eos_token_id"


def _mask_obstacles(call: Call, num_rows: int) -> Iterator[str]:
    """Yield what is no mask of these prompts, and what a target makes of masked columns between tokens: packed rows
    have none."""
    support, embeds = call.support, call.model_kwargs.get("inputs_embeds")
    mask, cache = call.model_kwargs.get("attention_mask"), call.model_kwargs.get("past_key_values")
    columns = (call.input_ids if embeds is None else embeds).shape[1]
    if mask is None:  # or all ones
        rows, width = num_rows, getattr(call.generation_config, "_mask_length", columns)
    else:
        rows, width = mask.shape
    if rows != num_rows or width < columns or (width > columns and (cache is None or cache.get_seq_length() == 0)):
        yield (
            f"attention_mask has {rows} rows of {width} columns, the prompts have {num_rows} of {columns}, and no "
            "cache holds the tokens before: pass past_key_values of the earlier turn, or a column for each token"
        )
        return
    if mask is None:
        return
    if bool(((mask != 0) & (mask != 1)).any()):
        yield "attention_mask has other numbers than 0 and 1: pass input_ids != pad_token_id, for example"
    if not bool(mask[:, -1].all()):  # padding on the right is refused anyway
        return
    padded = (mask == 0).any(dim=1).nonzero()[:, 0].tolist()
    if padded and support.reads_padding:
        yield (
            f"the recurrent layers of {support.name} read the padding of rows {padded} in plain decoding: use prompts "
            "of one length without padding, generate_many(), or drop assistant_model"
        )
        return
    rows = (mask.bool() & ~mask.bool().roll(-1, dims=1))[:, :-1].any(dim=1).nonzero()[:, 0].tolist()
    windows = [getattr(support.text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    end = mask.shape[1] + call.max_length - call.input_ids.shape[1]
    window = min((window for window in windows if window), default=end)
    if rows and (support.keeps_states or window < end):
        what = "recurrent layers read" if support.keeps_states else f"windows of {window} tokens count"
        yield (
            f"attention_mask has zeros between ones in rows {rows}, which the {what} in plain decoding of "
            f"{support.name}: take them out of the rows and pad on the left, or drop assistant_model"
        )


def _criterion_obstacles(call: Call, num_rows: int) -> Iterator[str]:
    """Yield which criteria hold an entry for each row, and cannot be asked about a row alone; found by a trial."""
    for criterion in call.stopping_criteria if num_rows > 1 else ():
        held = vars(criterion).values() if hasattr(criterion, "__dict__") else ()
        if is_built_in(criterion) or not any(isinstance(value, Sized) and _size(value) == num_rows for value in held):
            continue
        try:
            answer = copy_of(criterion)(call.input_ids[:1], None)
            found = None if torch.as_tensor(answer).shape == (1,) else f"answers {answer!r} for one row"
        except Exception as error:  # whatever a user's object does with other rows than it knows
            found = f"fails with {type(error).__name__} for one row: {error}"
        if found is not None:
            yield (
                f"the stopping criterion {type(criterion).__name__} holds an entry for each of {num_rows} rows, and "
                f"{found}. With a draft rows end one by one: let it answer for the rows of its input_ids, pass "
                "stop_strings instead, decode one row at a time (batch_size=1), or drop assistant_model"
            )


def _size(value: Sized) -> int | None:
    try:
        return len(value)
    except TypeError:  # a tensor of one number
        return None


def _is_plain(cache: Cache) -> bool:
    """Tell whether a cache holds keys and values as they are, where they are used."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return not getattr(cache, "offloading", False) and all(type(layer) in plain for layer in cache.layers)


def _transformers_loop_obstacles(call: Call, obstacle: str) -> Iterator[str]:
    embeds, mask, cache = (
        call.model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values")
    )
    if call.support.target.device.type == "meta":
        yield (
            "the target's embedding is offloaded, and transformers' assisted loop looks there for the device of its "
            "token ids: keep the embedding on a real device in device_map; other layers may be offloaded"
        )
    if embeds is not None and parse(transformers.__version__) < INPUTS_EMBEDS_SINCE:
        yield (
            f"inputs_embeds are decoded wrongly by the assisted loop of transformers {transformers.__version__}: pass "
            f"input_ids, or install transformers>={INPUTS_EMBEDS_SINCE} ({obstacle})"
        )
    if embeds is not None and mask is not None and not bool(mask.all()):
        yield (
            "left-padded inputs_embeds are decoded wrongly by transformers' assisted loop: pass the rows without "
            f"padding, or input_ids ({obstacle})"
        )
    types = sorted(name for name in MODALITY_ARGUMENTS if call.model_kwargs.get(name) is not None)
    if embeds is not None and types:
        yield (
            f"inputs_embeds beside {' and '.join(types)} fail in transformers' assisted loop: pass input_ids, or drop "
            f"assistant_model ({obstacle})"
        )
    implementation = call.support.text._attn_implementation
    if _returns_attentions(call) and implementation != "eager":
        yield (
            f"attn_implementation={implementation!r} gives no attention weights, which transformers' assisted loop "
            "needs: load the target with attn_implementation='eager', or drop output_attentions"
        )
    if isinstance(cache, SlotCache | StaticCache):
        yield f"the draft needs a dynamic cache here, got {type(cache).__name__}: pass a DynamicCache or none"
    elif cache is not None and cache.get_seq_length() > 0:
        yield (
            f"past_key_values already holds {cache.get_seq_length()} tokens, and transformers' assisted loop would "
            "feed the whole prompt again on top of them: pass the whole conversation as input_ids without "
            f"past_key_values, or drop assistant_model ({obstacle})"
        )
    for criterion in call.stopping_criteria:
        if not isinstance(criterion, KNOWN_CRITERIA):
            yield (
                f"transformers' assisted loop asks {type(criterion).__name__} once per block, and would return tokens "
                f"beyond the stop ({obstacle}): use eos_token_id, max_new_tokens or max_time, or drop assistant_model"
            )


# ---- logits processors


def processor_obstacles(call: Call, vocab_size: int) -> Iterator[str]:
    """Yield which processors remember calls, since the loop calls them on tokens that may be rejected, and to which a
    row is not what it is alone, since it calls them row by row."""
    for processor in call.logits_processor:
        name = type(processor).__name__
        if name in STATEFUL_PROCESSORS:
            yield _keeps_state(name)
        elif not is_built_in(processor):
            try:
                together, by_row = copy_of(processor), copy_of(processor)
            except Exception as error:  # whatever a user's object does when it is copied
                yield (
                    f"the logits processor {name} cannot be copied ({error}), so it cannot be told "
                    "whether it keeps state between calls: give it a __deepcopy__, or drop assistant_model"
                )
                continue
            found = _found_by_trial(together, by_row, call.input_ids, vocab_size)
            if found is not None:
                yield found


def _found_by_trial(
    together: LogitsProcessor, by_row: LogitsProcessor, input_ids: torch.Tensor, vocab_size: int
) -> str | None:
    """Call copies with the same, other and again the same arguments, all rows together and each alone."""
    steps = torch.linspace(-1.0, 1.0, vocab_size, device=input_ids.device)
    scores = torch.stack([steps.roll(row) for row in range(len(input_ids))])
    longer_ids = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    results, attributes = [], []
    for ids in (input_ids, longer_ids, input_ids):
        results.append(together(ids, scores.clone()))
        attributes.append(repr(getattr(together, "__dict__", None)))
        for row in range(len(ids)) if len(ids) > 1 else ():
            difference = _difference_of_row(by_row, ids, scores, row, results[-1])
            if difference is not None:
                return (
                    f"the logits processor {type(together).__name__} treats rows differently: row {row} alone "
                    f"{difference}. With a draft these {len(ids)} rows are processed one by one: make the result for "
                    "a row depend on its own input_ids and scores, call generate() per prompt, or drop assistant_model"
                )
    # The first call may set things up.
    changes = not torch.equal(results[0], results[2]) or len(set(attributes)) > 1
    return _keeps_state(type(together).__name__) if changes else None


def _difference_of_row(
    processor: LogitsProcessor, input_ids: torch.Tensor, scores: torch.Tensor, row: int, expected: torch.Tensor
) -> str | None:
    try:
        found = processor(input_ids[row : row + 1], scores[row : row + 1].clone())
        if len(found) != 1:
            return f"returned {len(found)} rows"
        same = torch.allclose(found[0], expected[row], rtol=1e-3, atol=1e-3, equal_nan=True)
        return None if same else "gets other scores"
    except Exception as error:  # whatever a user's object does with other rows than it knows
        return f"fails with {type(error).__name__}: {error}"


def _keeps_state(name: str) -> str:
    return (
        f"the logits processor {name} keeps state between calls, and would be called on tokens "
        "that may be rejected: drop it, make its result depend on its arguments alone, or drop assistant_model"
    )
