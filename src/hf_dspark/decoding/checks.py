"""What cannot be decoded with a draft, or not by our own loop; found before any work, and named all at once.

Each function has a table of reasons, with their cures, and whether they are there.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache
from transformers.generation import GenerationMode

from ..models.slot_cache import SlotCache
from ..scheduling.policies import Policy
from ..targets.support import TargetSupport
from ..targets.transformers_api import is_since
from .logits_processing import is_built_in
from .request import KNOWN_CRITERIA, TYPE_ARGUMENTS, Call
from .reversible import ReversibleProcessor
from .user_objects import copy_of, state_of

# Arguments that our loop reads or has its own answer to: of the target's forward, and of the assisted loop.
INPUT_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "inputs_tensor"}
OUTPUT_ARGUMENTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}
LOOP_ARGUMENTS = {"synced_gpus", "streamer", "tokenizer", "assistant_tokenizer"}
KNOWN_ARGUMENTS = INPUT_ARGUMENTS | OUTPUT_ARGUMENTS | LOOP_ARGUMENTS
WITHOUT_WEIGHTS = {"sdpa"}  # plain decoding returns empty tuples of attentions
DECODED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
# Of caches whose keys and values are as they are; the last one is of layers that read those of others.
PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
DYNAMIC_CACHES = ("dynamic", "dynamic_full")
OTHER_DRAFTERS = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "speculation_type")
UNASKED = (("num_beams", 1), *((name, False) for name in OTHER_DRAFTERS))  # values that ask for nothing
# Built-in processors that keep state between calls, which drafting would advance, and a criterion, by the options that
# ask for them.
OPTIONS_OF = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "StopStringCriteria": "stop_strings",
}
# The first version whose assisted loop was found right for prompts given as embeddings; 5.17.0 was found wrong.
INPUTS_EMBEDS_SINCE = "5.23.0"


class Refused(ValueError):
    """A call that no draft can assist."""

    def __init__(self, reasons: list[str]) -> None:
        several = "\n- ".join([f"there are {len(reasons)} reasons against a draft here:", *reasons])
        super().__init__(several if len(reasons) > 1 else reasons[0])
        self.reasons = reasons


def refuse(reasons: Iterable[str]) -> None:
    """Raise [`Refused`] with all reasons, if there are any: every refusal comes from here."""
    if reasons := list(dict.fromkeys(reasons)):
        raise Refused(reasons)


def _present(reasons: Mapping[str, Any]) -> list[str]:
    return [reason for reason, is_there in reasons.items() if is_there]


# ---- options


def option_obstacles(
    config: GenerationConfig, own: GenerationConfig, schedule: str | None, max_drafts: int | None
) -> list[str]:
    """Return why options cannot be decoded with a draft, and which of them the target's own configuration has set."""
    stated = partial(_stated, config, own)
    mode, cache, caches = config.get_generation_mode(), config.cache_implementation, config.use_cache
    others = [name for name in OTHER_DRAFTERS if getattr(config, name, None) not in (None, False)]
    ensemble = getattr(config, "assistant_ensemble_weight", None) is not None
    modes, chunk = stated("num_beams", "penalty_alpha", "dola_layers"), config.prefill_chunk_size
    return _present(
        {
            f"the draft cannot assist {mode.value!r}, it keeps one hypothesis: use num_beams=1 and neither "
            f"penalty_alpha nor dola_layers, or drop assistant_model{modes}": mode not in DECODED,
            f"the draft needs use_cache=True, got use_cache={caches}: drop it{stated('use_cache')}": not caches,
            f"rejected tokens need a dynamic cache, got cache_implementation={cache!r}: drop it"
            f"{stated('cache_implementation')}": cache not in (None, *DYNAMIC_CACHES),
            "assistant_ensemble_weight changes the output distribution, a draft must not: drop it"
            f"{stated('assistant_ensemble_weight')}": ensemble,
            f"{' and '.join(others)} asks for other drafts than those of assistant_model: drop one of them"
            f"{stated(*others)}": others,
            f"num_assistant_tokens_schedule={schedule!r} is not known to this draft: drop it. A policy adapts the "
            "number of tokens: draft.decoding = DecodingOptions(policy=...)": schedule not in (None, "constant"),
            f"num_assistant_tokens must be a number of tokens, at least 1, got {max_drafts!r}": max_drafts is not None
            and (type(max_drafts) is not int or max_drafts < 1),
            f"prefill_chunk_size must be a number of tokens, at least 1, got {chunk!r}: drop it"
            f"{stated('prefill_chunk_size')}": chunk is not None and (type(chunk) is not int or chunk < 1),
        }
    )


def policy_obstacles(
    policy: Policy, draft: PreTrainedModel, support: TargetSupport, do_sample: bool, max_drafts: int | None
) -> list[str]:
    """Return why the draft cannot serve a policy, or why that would bias sampled output."""
    name, drafter, looks_up = type(policy).__name__, type(draft).__name__, not draft.drafts_blocks
    # Without a head, confidences follow from distributions, which read the tokens before them.
    reads_tokens = draft.config.confidence_head_with_markov or not draft.config.enable_confidence_head
    looks_ahead = not policy.is_causal(reads_tokens) and not policy.accept_bias
    chain = f"num_assistant_tokens={max_drafts}" if max_drafts is not None else name * (policy.most_nodes == 0)
    return _present(
        {
            f"{name} is not causal with this draft: whether it verifies a token depends on confidences computed from "
            "that token, so sampled output would not follow the target's distribution (DSpark, Appendix A). Use "
            "Scheduler, decode greedily, or set accept_bias on the policy.": do_sample and looks_ahead,
            f"{drafter} proposes trees, but {support.tree_obstacle}: use prompt_lookup_num_tokens of "
            "transformers": looks_up and support.tree_obstacle,
            f"{drafter} proposes trees by prompt lookup alone, got {chain}: leave it out, or set draft.decoding = "
            "DecodingOptions(policy=Scheduler(num_nodes=15))": looks_up and chain,
        }
    )


def _stated(config: GenerationConfig, own: GenerationConfig, *names: str) -> str:
    """Return the cure for values that a call has from the target's own configuration."""
    values = {name: getattr(own, name, None) for name in names}
    alike = [name for name, each in values.items() if each is not None and each == getattr(config, name)]
    alike = [name for name in alike if (name, values[name]) not in UNASKED]
    cures = [f"target.generation_config.{name} = None" for name in alike]
    where = ". The target's generation_config says so, and its generation_config.json may: set "
    return where + " and ".join(cures) if cures else ""


# ---- prompts


def loop_obstacle(call: Call, num_rows: int) -> str | None:
    """Return why our loop cannot decode so many sequences of a call together; transformers' loop takes one."""
    support, kwargs = call.support, call.model_kwargs
    others = {name: each for name, each in kwargs.items() if name not in KNOWN_ARGUMENTS and each is not None}
    unknown = ", ".join(sorted(name for name, each in others.items() if not _is_of_text_alone(support, name, each)))
    weights = _returns_attentions(call) and support.text._attn_implementation not in WITHOUT_WEIGHTS
    reasons = {
        "draft.decoding.use_transformers_loop is set": call.options.use_transformers_loop,
        support.slot_obstacle: support.slot_obstacle,
        f"the target gets arguments that belong to whole prompts, such as images ({unknown})": unknown,
        "position_ids are not those that follow from the attention mask": not _has_usual_positions(call),
        "synced_gpus keeps ranks in step, which rounds of different lengths do not": kwargs.get("synced_gpus"),
        "output_attentions asks for attention weights": weights,
        support.batch_obstacle: num_rows > 1 and support.batch_obstacle,
    }
    return "; ".join(_present(reasons)) or None


def _returns_attentions(call: Call) -> bool:
    return bool(call.generation_config.return_dict_in_generate and call.generation_config.output_attentions)


def _is_of_text_alone(support: TargetSupport, name: str, value: Any) -> bool:
    """Tell what a target is given along with texts: types of tokens, which are all zero where they could be images, or
    no encodings."""
    if name == "mm_encoder_outputs":
        return not value
    return not bool(value.any()) if support.is_multimodal and name in TYPE_ARGUMENTS else name == "token_type_ids"


def _has_usual_positions(call: Call) -> bool:
    """Tell whether positions count the tokens that are no padding, from 0; in each dimension, if they have several."""
    positions = call.model_kwargs.get("position_ids")
    if positions is None or mask_obstacles(call):
        return True
    length = positions.shape[-1]
    if positions.dim() not in (2, 3) or length not in (call.columns, call.width):
        return False
    mask = positions.new_ones(1, call.width) if call.mask is None else call.mask.to(positions.device)
    is_token = mask != 0
    usual = is_token.long().cumsum(-1)[:, -length:] - 1
    return bool(((positions == usual) | ~is_token[:, -length:]).all())


def prompt_obstacles(call: Call, obstacle: str | None) -> list[str]:
    """Return why prompts cannot be decoded as they are; an obstacle leaves them to transformers' own loop."""
    support, input_ids, mask, num_rows = call.support, call.input_ids, call.mask, len(call.input_ids)
    lengths = input_ids.new_full((num_rows,), call.columns) if mask is None else (mask != 0).sum(dim=-1)
    ends_in_tokens = mask is None or bool(mask[:, -1:].all())
    rows = (lengths == 0).nonzero()[:, 0].tolist() if call.columns else []
    in_rows = f" in rows {rows}" if rows else ""
    ids = input_ids if call.embeds is None and call.columns else input_ids.new_zeros(1)
    lowest, highest = int(ids.min()), int(ids.max())
    size = getattr(support.embedding, "num_embeddings", support.text.vocab_size)  # adapters do not tell it
    longest = int(lengths.max())
    context = support.num_positions or longest
    at_end = longest + call.max_length - input_ids.shape[1]
    window = support.cache_window or at_end
    padded = [] if mask is None else (mask == 0).any(dim=1).nonzero()[:, 0].tolist()
    reasons = {
        f"the prompt is empty{in_rows}: pass at least one token": rows or call.columns == 0,
        "the prompt is padded on the right: set tokenizer.padding_side = 'left'": not (rows or ends_in_tokens),
        f"the prompt has token ids from {lowest} to {highest}, the target knows 0 to {size - 1}: use the target's "
        "tokenizer": not 0 <= lowest <= highest < size,
        f"a prompt of {longest} tokens does not fit the target's context of {context}: shorten it": longest > context,
        f"the recurrent layers of {support.name} read the padding of rows {padded} in plain decoding: use prompts "
        "of one length without padding, generate_many(), or drop assistant_model": support.reads_padding and padded,
        f"plain decoding of {support.name} forgets tokens of a prompt that its window of {window} has left, which its "
        f"masks do not: generate {max(0, window - longest)} tokens at most, or drop assistant_model": window < at_end,
    }
    for switch in support.rope_switches if obstacle is not None or support.reads_again else ():
        reasons[
            f"{support.name} rotates otherwise beyond {switch} tokens, and plain decoding then reads tokens again or "
            f"one by one: give max_new_tokens={max(1, switch + 1 - longest)} at most, a prompt of more than {switch} "
            "tokens without past_key_values, or drop assistant_model"
        ] = (call.cached or longest) <= switch < at_end - 1
    if obstacle is None:
        return _present(_own_loop_obstacles(call) | reasons)
    if support.state_obstacle is not None:  # which is named anyway
        return _present(reasons)
    elsewhere = _transformers_loop_obstacles(call, obstacle)
    if support.is_stateful or num_rows > 1:
        elsewhere = {
            f"{support.name} keeps a recurrent state, which only hf_dspark's own loop can bring back. It is not "
            f"possible here: {obstacle}": support.is_stateful,
            f"these {num_rows} sequences cannot be decoded together: {obstacle}. Call generate() per prompt, or drop "
            "assistant_model": not support.is_stateful,
        }
    return _present(elsewhere | reasons)


def mask_obstacles(call: Call) -> list[str]:
    """Return why a mask, or types, are none of these prompts: then nothing else can be asked of them."""
    mask, num_rows, columns, width = call.mask, len(call.input_ids), call.columns, call.width
    rows = num_rows if mask is None else len(mask)
    times = math.gcd(rows, num_rows, call.generation_config.num_return_sequences or 1)  # that both were repeated
    shapes = f"{rows // times} rows of {width} columns, the prompts have {num_rows // times} of {columns}"
    types = tuple(getattr(call.model_kwargs.get("token_type_ids"), "shape", ()))
    has_others = mask is not None and bool(((mask != 0) & (mask != 1)).any())
    return _present(
        {
            "there are no prompts: pass at least one": num_rows == 0,
            f"token_type_ids has the shape {types}, the prompts have {(num_rows, columns)}: pass a type for each "
            "token": types and (types[0] not in (1, num_rows) or types[-1] not in (columns, width)),
            f"attention_mask has {shapes}: pass a row for each prompt": rows != num_rows,
            f"attention_mask has {shapes}, and no cache holds the tokens before: pass past_key_values of the earlier "
            "turn, or a column for each token": width < columns or (width > columns and call.cached == 0),
            f"inputs_embeds of {columns} columns beside an attention_mask of {width}: embeddings that continue "
            "past_key_values are those of the whole conversation, as in plain generate()": call.embeds is not None
            and width > columns,
            "attention_mask has other numbers than 0 and 1: pass input_ids != pad_token_id, for example": has_others,
        }
    )


def _own_loop_obstacles(call: Call) -> dict[str, Any]:
    """A cache that cannot be continued, and what a target makes of masked columns between tokens: packed rows have
    none."""
    support, cache, num_rows = call.support, call.cache, len(call.input_ids)
    name, is_static = type(cache).__name__, isinstance(cache, StaticCache)
    is_foreign = cache is not None and not is_static and not isinstance(cache, SlotCache)
    layers = {type(layer).__name__ for layer in getattr(cache, "layers", [cache])} if is_foreign else set()
    writes_itself = is_foreign and type(cache).update is not Cache.update
    is_plain = PLAIN_LAYERS.issuperset(layers) and not (is_foreign and getattr(cache, "offloading", False))
    held = call.cached if is_foreign and is_plain else 0  # recurrent states have no length
    ones = torch.ones(1, call.width, dtype=torch.bool, device="cpu") if call.mask is None else call.mask != 0
    holes = (ones & ~ones.roll(-1, dims=1))[:, :-1].any(dim=1).nonzero()[:, 0].tolist() * bool(ones[:, -1:].all())
    end = call.width + call.max_length - call.input_ids.shape[1]
    windows = [getattr(support.text, kind, None) for kind in ("sliding_window", "attention_chunk_size")]
    window = min((window for window in windows if window), default=end)
    what = "recurrent layers read" if support.keeps_states else f"windows of {window} tokens count"
    return {
        f"the draft needs a dynamic cache, got {name}: pass a DynamicCache or none": is_static,
        f"the recurrent states of a {name} from elsewhere cannot be continued with a draft: pass no cache, or "
        "what an earlier call with the draft returned": is_foreign and support.keeps_states,
        f"the draft cannot continue a {name} of {' and '.join(sorted(layers))} (quantised, offloaded, of another "
        "kind): pass a plain DynamicCache, or what an earlier call with the draft returned": not is_plain
        or writes_itself,
        f"past_key_values holds {held} columns, the prompts have {call.width}: pass the whole conversation with "
        "something new after it": held and not bool(ones[:, held:].any(dim=1).all()),
        f"a streamer takes one sequence, got {num_rows} rows: stream one prompt at a time": num_rows > 1
        and call.streamer is not None,
        f"attention_mask has zeros between ones in rows {holes}, which the {what} in plain decoding of "
        f"{support.name}: take them out of the rows and pad on the left, or drop assistant_model": holes
        and (support.keeps_states or window < end),
    }


def _transformers_loop_obstacles(call: Call, obstacle: str) -> dict[str, Any]:
    embeds, version, cached = call.embeds, transformers.__version__, call.cached
    is_padded = call.mask is not None and not bool(call.mask.all())
    types = " and ".join(sorted(name for name in TYPE_ARGUMENTS if call.model_kwargs.get(name) is not None))
    attends, weights = call.support.text._attn_implementation, _returns_attentions(call)
    is_unfit, name = isinstance(call.cache, SlotCache | StaticCache), type(call.cache).__name__
    others = (type(each).__name__ for each in call.stopping_criteria if type(each) not in KNOWN_CRITERIA)
    asked = " and ".join(OPTIONS_OF.get(name, name) for name in others)
    return {
        "the target's embedding is offloaded, and transformers' assisted loop looks there for the device of its "
        "token ids: keep the embedding on a real device in device_map; other layers may be "
        "offloaded": call.support.target.device.type == "meta",
        f"inputs_embeds are decoded wrongly by the assisted loop of transformers {version}: pass input_ids, or "
        f"install transformers>={INPUTS_EMBEDS_SINCE} ({obstacle})": embeds is not None
        and not is_since(INPUTS_EMBEDS_SINCE),
        "left-padded inputs_embeds are decoded wrongly by transformers' assisted loop: pass the rows without "
        f"padding, or input_ids ({obstacle})": embeds is not None and is_padded,
        f"inputs_embeds beside {types} fail in transformers' assisted loop: pass input_ids, or drop "
        f"assistant_model ({obstacle})": embeds is not None and types,
        f"attn_implementation={attends!r} gives no attention weights, which transformers' assisted loop needs: "
        "load the target with attn_implementation='eager', or drop output_attentions": weights and attends != "eager",
        f"the draft needs a dynamic cache here, got {name}: pass a DynamicCache or none ({obstacle})": is_unfit,
        f"past_key_values already holds {cached} tokens, and transformers' assisted loop would feed the whole "
        "prompt again on top of them: pass the whole conversation as input_ids without past_key_values, or drop "
        f"assistant_model ({obstacle})": cached and not is_unfit,
        f"transformers' assisted loop asks {asked} once per block, and would return tokens beyond the stop "
        f"({obstacle}): use eos_token_id, max_new_tokens or max_time, or drop assistant_model": asked,
    }


# ---- logits processors


def processor_obstacles(call: Call, vocab_size: int) -> Iterator[str]:
    """Yield which processors remember calls, since the loop calls them on tokens that may be rejected, and to which a
    row is not what it is alone, since it calls them row by row."""
    for processor in call.logits_processor:
        name = type(processor).__name__
        if name in OPTIONS_OF:
            option, own = OPTIONS_OF[name], call.support.target.generation_config
            stated = _stated(call.generation_config, own, option)
            yield f"{option} (a {name}) keeps state between calls: drop it, or drop assistant_model{stated}"
        elif not is_built_in(processor) and not isinstance(processor, ReversibleProcessor):
            try:
                together, by_row = (copy_of(processor, with_functions=True) for _ in range(2))
            except Exception as error:  # whatever a user's object does when it is copied
                yield (
                    f"the logits processor {name} cannot be copied ({error}), so it cannot be told "
                    "whether it keeps state between calls: give it a __deepcopy__, or drop assistant_model"
                )
                continue
            with torch.random.fork_rng():  # a call that is refused draws nothing
                found = _found_by_trial(together, by_row, call.input_ids, vocab_size)
            if found is not None:
                yield found


def _found_by_trial(
    together: LogitsProcessor, by_row: LogitsProcessor, input_ids: torch.Tensor, vocab_size: int
) -> str | None:
    """Call copies with the same, other and again the same arguments, all rows together and each alone."""
    steps = torch.linspace(-1.0, 1.0, vocab_size, device=input_ids.device)
    scores = torch.stack([steps.roll(row) for row in range(len(input_ids))])
    results, states, name = [], [], type(together).__name__
    for turn in range(3):
        ids = input_ids
        if turn == 1:  # a token that plain decoding could come to
            ids = torch.cat([ids, results[0].argmax(dim=-1, keepdim=True)], dim=1)
        try:
            results.append(together(given := ids.clone(), scores.clone()))
        except Exception as error:  # whatever a user's object does out of turn
            return (
                f"the logits processor {name} fails when it is tried on the prompt, a token after it, and the prompt "
                f"again ({type(error).__name__}: {error}): let it take any prefix, or drop assistant_model"
            )
        if not torch.equal(given, ids):
            return f"the logits processor {name} writes into input_ids, the tokens: copy them, or drop assistant_model"
        if (shape := getattr(results[-1], "shape", None)) != scores.shape:
            return f"the logits processor {name} must return scores of the shape {tuple(scores.shape)}, got {shape}"
        states.append(state_of(together))
        for row in range(len(ids)) if len(ids) > 1 else ():
            difference = _difference_of_row(by_row, ids, scores, row, results[-1])
            if difference is not None:
                return (
                    f"the logits processor {name} treats rows differently: row {row} alone "
                    f"{difference}. With a draft these {len(ids)} rows are processed one by one: make the result for "
                    "a row depend on its own input_ids and scores, call generate() per prompt, or drop assistant_model"
                )
    if torch.equal(results[0], results[2]) and states[0] == states[1] == states[2]:  # the first call may set things up
        return None
    return (
        f"the logits processor {name} keeps state between calls, and would be called on tokens "
        "that may be rejected: make it a ReversibleProcessor or free of state, or drop assistant_model"
    )


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
        return f"fails ({type(error).__name__}: {error})"
