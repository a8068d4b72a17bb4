"""From the arguments of a `generate()` call to requests, and from ended requests to what the call returns.

Rows lose their padding here and get it back at the end. Caches of an earlier turn are recognised and continued. Knows
nothing of rounds.
"""

import contextlib
import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..maths.policies import Policy
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from .drafter import DSparkCandidateGenerator
from .loop import DecodingLoop, Recording
from .processing import processors_of_row
from .request import Request, StopRule

ROOM_AT_FIRST = 4096  # tokens: a limit of many more may just mean "until it ends"
SHARED = (torch.nn.Module, PreTrainedTokenizerBase)


@dataclass(frozen=True)
class Prompt:
    """One row of a call, without its padding.

    Attributes:
        columns (`torch.LongTensor` of shape `[positions]`): Where its positions stand in the whole, padded sequence,
            those that are cached included.
        width (`int`): Columns of that sequence.
        padding (`int`): Columns of `input_ids` that are not its own.
        token_ids (`torch.LongTensor` of shape `[S]`): Its ids; empty when it is given as embeddings alone.
        fed (`torch.Tensor` of shape `[n]` or `[n, d]`): Ids or embeddings that the target has to see.
        cached (`int`): Positions before `fed`, in the cache already.
        earlier_ids (`torch.LongTensor`, *optional*): The ids of positions that `token_ids` does not have, if known.
    """

    columns: torch.Tensor
    width: int
    padding: int
    token_ids: torch.Tensor
    fed: torch.Tensor
    cached: int = 0
    earlier_ids: torch.Tensor | None = None

    @property
    def hidden(self) -> int:
        """Positions of the prompt that have no id in `token_ids`."""
        return self.cached + len(self.fed) - len(self.token_ids)

    def known_ids(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the ids of all positions, given those behind the hidden ones; `None` if some are not known."""
        if self.hidden == 0:
            return token_ids
        return None if self.earlier_ids is None else torch.cat([self.earlier_ids.to(token_ids.device), token_ids])

    def columns_of(self, length: int) -> torch.Tensor:
        """Return the columns of the first positions, generated ones behind the prompt included, `[length]`."""
        generated = self.width + torch.arange(max(0, length - len(self.columns)), device="cpu")
        return torch.cat([self.columns, generated])[:length]


@dataclass(frozen=True)
class Call:
    """A `generate()` call, prepared by transformers and found feasible.

    Attributes:
        input_ids (`torch.LongTensor` of shape `[B, S]`): Left-padded prompts; empty when given as embeddings.
        logits_processor (`LogitsProcessorList`): Stateless.
        stopping_criteria (`StoppingCriteriaList`): All of them.
        generation_config (`GenerationConfig`): Prepared.
        model_kwargs (`dict`): Attention mask, cache, embeddings.
        policy ([`Policy`]): Decides how much is drafted and verified.
        pad_token_id (`int`, *optional*): Fills rows that ended early.
        mask_width (`int`, *optional*): Columns of the attention mask if transformers has dropped it, all being ones.
        fills_users_cache (`bool`): Whether `past_key_values` is the user's, and wanted back.
        max_drafts (`int`, *optional*): Draft tokens per round at most, besides γ.
        streamer (`BaseStreamer`, *optional*): Gets the tokens as they are committed; for one row.
    """

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    policy: Policy
    pad_token_id: int | None = None
    mask_width: int | None = None
    fills_users_cache: bool = False
    max_drafts: int | None = None
    streamer: BaseStreamer | None = None

    @property
    def max_length(self) -> int:
        """Columns at which every row ends."""
        limits = [rule.max_length for rule in self.stopping_criteria if isinstance(rule, MaxLengthCriteria)]
        return min([self.generation_config.max_length, *limits])

    @property
    def keeps_some_logits(self) -> bool:
        """Whether the target's `forward` takes `logits_to_keep`: then transformers has set it."""
        return "logits_to_keep" in self.model_kwargs


@torch.no_grad()
def generate_together(
    target: PreTrainedModel, draft: DraftModel, call: Call
) -> torch.LongTensor | GenerateDecoderOnlyOutput:
    """Decode all rows of a call together.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        call ([`Call`]): What to decode.

    Returns:
        What `generate()` returns: rows that ended early are padded on the right.
    """
    config, given_cache = call.generation_config, call.model_kwargs.get("past_key_values")
    cache = _slot_cache(given_cache, len(call.input_ids), num_layers(target))
    prompts = [read_prompt(call, row, cache) for row in range(len(call.input_ids))]
    requests = [make_request(call, row, row, prompt, draft.config.block_size) for row, prompt in enumerate(prompts)]
    cache.limit = max(request.hidden_prompt + request.max_length for request in requests)
    _continue_drafting(cache, draft, requests)
    returns_dict = config.return_dict_in_generate
    recording = Recording(
        wants_scores=bool(returns_dict and config.output_scores),
        wants_logits=bool(returns_dict and config.output_logits),
        wants_hidden_states=bool(returns_dict and config.output_hidden_states),
    )
    loop = make_loop(target, draft, call, cache, recording, keeps_rows=bool(returns_dict or call.fills_users_cache))
    try:
        loop.admit(requests, [prompt.fed for prompt in prompts], config.prefill_chunk_size)
        while loop.requests:
            loop.run_round()
    except torch.OutOfMemoryError as error:  # outside of the cache, which says more
        fits = f"try a batch of {len(requests) // 2}" if len(requests) > 1 else "shorten the prompt"
        raise MemoryError(f"no memory for {len(requests)} sequences: {fits} ({error})") from error
    if call.streamer is not None:
        call.streamer.end()

    sequences = _sequences(call, requests, prompts)
    if not returns_dict and not call.fills_users_cache:
        return sequences
    _arrange_rows(cache, loop, requests, prompts)
    if call.fills_users_cache and given_cache is not cache:
        _give_back(given_cache, cache, prompts)
    if not returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        past_key_values=given_cache if call.fills_users_cache else cache,
        **_recorded(recording, requests),
    )


def make_loop(
    target: PreTrainedModel,
    draft: DraftModel,
    call: Call,
    cache: SlotCache,
    recording: Recording | None = None,
    keeps_rows: bool = False,
) -> DecodingLoop:
    """Return the loop that decodes a call, or several that differ in their prompts only.

    Args:
        target, draft: The pair.
        call ([`Call`]): Whose options hold.
        cache ([`SlotCache`]): The target's; `cache.draft` is the draft's.
        recording ([`Recording`], *optional*): Keeps scores and hidden states.
        keeps_rows (`bool`): Whether caches of requests that ended are needed afterwards.
    """
    generator = DSparkCandidateGenerator(
        target, draft, call.generation_config, call.logits_processor, call.policy, call.max_drafts, cache.draft
    )

    def stream(request: Request, new_tokens: list[int]) -> None:
        if call.streamer is not None:
            call.streamer.put(torch.tensor(new_tokens, device="cpu"))

    return DecodingLoop(target, generator, cache, recording, keeps_rows, call.keeps_some_logits, on_commit=stream)


def make_request(call: Call, row: int, request_id: int, prompt: "Prompt", block_size: int) -> Request:
    """Return the request that decodes a row of a call.

    Args:
        call ([`Call`]): The call.
        row (`int`): Its row.
        request_id (`int`): Key of its noise.
        prompt ([`Prompt`]): The row's.
        block_size (`int`): γ.
    """
    own_max_length = call.max_length - prompt.padding
    room = max(1, min(own_max_length - len(prompt.token_ids), ROOM_AT_FIRST)) + block_size
    token_ids = prompt.token_ids.new_zeros(len(prompt.token_ids) + room)
    token_ids[: len(prompt.token_ids)] = prompt.token_ids
    num_rows = len(call.input_ids)
    processors = processors_of_row(call.logits_processor, row, num_rows, prompt.padding, prompt.token_ids[None])
    return Request(
        id=request_id,
        token_ids=token_ids,
        length=len(prompt.token_ids),
        max_length=own_max_length,
        processors=processors,
        stop_rule=StopRule(own_criteria(call.stopping_criteria) if row else call.stopping_criteria),
        hidden_prompt=prompt.hidden,
        earlier_ids=prompt.earlier_ids,
    )


def own_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return criteria for one more sequence: custom ones may count their calls, so each gets copies of its own.

    What cannot be copied (a criterion that waits for an event, say) is shared.
    """
    own = StoppingCriteriaList()
    for criterion in criteria:
        if not type(criterion).__module__.startswith("transformers."):
            with contextlib.suppress(Exception):  # whatever a user's object does when it is copied
                criterion = copy_of(criterion)
        own.append(criterion)
    return own


def copy_of(user_object: Any) -> Any:
    """Return a deep copy of a processor or criterion, which shares the models and tokenizers that it holds."""
    shared = [value for value in getattr(user_object, "__dict__", {}).values() if isinstance(value, SHARED)]
    return copy.deepcopy(user_object, {id(value): value for value in shared})


def num_layers(model: PreTrainedModel) -> int:
    """Return the decoder layers of a model."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def _slot_cache(given: Cache | None, batch_size: int, layers: int) -> SlotCache:
    if isinstance(given, SlotCache):
        num_rows = given.num_rows
    else:
        filled = [] if given is None else [layer for layer in given.layers if layer.is_initialized]
        num_rows = filled[0].keys.shape[0] if filled else batch_size
    if num_rows != batch_size:
        raise ValueError(f"past_key_values holds {num_rows} sequences, the prompts are {batch_size}")
    if not isinstance(given, SlotCache):
        return SlotCache(batch_size, num_layers=layers)
    if given.token_ids is None:  # an earlier turn was interrupted
        given.reset()
    return given


def read_prompt(call: Call, row: int, cache: SlotCache) -> Prompt:
    """Take one row out of its padding, and find out what of it is cached."""
    input_ids = call.input_ids
    embeds, mask, given_cache = (
        call.model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "past_key_values")
    )
    columns = input_ids.shape[1] if embeds is None else embeds.shape[1]
    width = (call.mask_width or columns) if mask is None else mask.shape[1]
    real = torch.ones(width, dtype=torch.bool, device="cpu") if mask is None else mask[row].bool().cpu()
    before, own = real[: width - columns], real[width - columns :]
    place = {"columns": real.nonzero()[:, 0], "width": width}
    if embeds is not None:
        has_ids = input_ids.shape[1] == columns
        token_ids = input_ids[row][own.to(input_ids.device)] if has_ids else input_ids[row]
        padding = columns - int(own.sum()) if has_ids else 0
        return Prompt(**place, padding=padding, token_ids=token_ids, fed=embeds[row][own.to(embeds.device)])
    token_ids = input_ids[row][own.to(input_ids.device)]
    place |= {"padding": columns - len(token_ids), "token_ids": token_ids}
    past = 0 if given_cache is None else given_cache.get_seq_length()
    if len(before) > 0:  # only what is new was given
        cached, earlier = int(before.sum()), None
        if isinstance(given_cache, SlotCache):
            earlier = _earlier_ids(row, cached, cache)
        elif past > 0:
            _copy_row(given_cache, cache, row, before)
        return Prompt(**place, fed=token_ids, cached=cached, earlier_ids=earlier)
    if past == 0:
        return Prompt(**place, fed=token_ids)
    if isinstance(given_cache, SlotCache):
        cached = _common_prefix(row, token_ids, cache)
        return Prompt(**place, fed=token_ids[cached:], cached=cached)
    if past >= width or not bool(real[past:].any()):
        raise ValueError(
            f"past_key_values holds {past} columns, the prompts have {width}: pass the whole conversation with "
            "something new behind it"
        )
    cached = _copy_row(given_cache, cache, row, real[:past])
    return Prompt(**place, fed=token_ids[cached:], cached=cached)


def _earlier_ids(row: int, claimed: int, cache: SlotCache) -> torch.Tensor | None:
    """Return the cached ids of a row of which only what is new was given."""
    if claimed != cache.lengths[row]:
        raise ValueError(
            f"past_key_values holds {cache.lengths[row]} tokens of sequence {row}, the attention mask says {claimed} "
            "before the new ones: pass the whole conversation as input_ids instead"
        )
    return None if cache.token_ids is None else cache.token_ids[row]


def _common_prefix(row: int, token_ids: torch.Tensor, cache: SlotCache) -> int:
    """Return how much of a conversation is cached; what differs behind that is overwritten."""
    if cache.lengths[row] == 0:
        return 0
    known = cache.token_ids[row]
    if known is None:
        raise ValueError(
            f"nobody knows which tokens past_key_values holds of sequence {row} (they came as embeddings, or from "
            "another cache): pass only what is new, with an attention_mask over everything"
        )
    shortest = min(len(known), len(token_ids))
    same = int((known.to(token_ids.device)[:shortest] == token_ids[:shortest]).long().cumprod(dim=0).sum())
    # An answer may have lost its long thoughts since then; but where even the last prompt is gone, or only what is new
    # was given, hardly anything is the same.
    expected = min(len(token_ids), cache.prompt_lengths[row]) // 2
    if same < shortest and len(token_ids) < len(known) and same < expected:
        raise ValueError(
            f"past_key_values holds {len(known)} tokens of sequence {row}, and of the {len(token_ids)} given only the "
            f"first {same} are the same: for another conversation pass no past_key_values; to continue this one pass "
            "all of it, or only what is new with an attention_mask over everything"
        )
    if same < len(known):
        same = max(0, same - 1)  # an autoregressive draft read the last one together with a token that is gone
    same = min(same, len(token_ids) - 1)  # at least one position has to give logits
    cache.lengths[row] = same
    return same


def _copy_row(given: Cache, cache: SlotCache, row: int, real: torch.Tensor) -> int:
    """Copy a row of one of transformers' caches; its features are unknown: the draft starts behind it."""
    columns = real.nonzero()[:, 0]
    for layer_idx in range(len(given.layers)):
        if given.layers[layer_idx].is_initialized:
            cache.take_from(given, layer_idx, row, row, columns)
    cache.lengths[row] = len(columns)
    return len(columns)


def _continue_drafting(cache: SlotCache, draft: DraftModel, requests: Sequence[Request]) -> None:
    """Give the requests what an earlier turn left of the draft's context, as far as its tokens are still there."""
    if cache.draft is None or cache.drafted_by is None or cache.drafted_by() is not draft:
        cache.draft = SlotCache(cache.num_rows, num_layers=draft.config.num_hidden_layers)
        cache.drafted_by = weakref.ref(draft)
        cache.waiting_features, cache.unseen = [[] for _ in requests], list(cache.lengths)
    cache.draft.limit = cache.limit + draft.config.num_slots
    for row, request in enumerate(requests):
        known, context = cache.lengths[row] - cache.unseen[row], cache.draft.lengths[row]
        cache.unseen[row] = min(cache.unseen[row], cache.lengths[row])
        cache.draft.lengths[row] = max(0, min(known, context))
        if known > context:
            request.features.append(torch.cat(cache.waiting_features[row])[: known - context])
    cache.token_ids = None  # until the call has ended well, nobody knows which row holds what


def _arrange_rows(
    cache: SlotCache, loop: DecodingLoop, requests: Sequence[Request], prompts: Sequence[Prompt]
) -> None:
    """Bring the rows of both caches into the order of the prompts, and note what they hold."""
    rows = [loop.ended_rows[request.id] for request in requests]
    for place in range(len(rows)):
        while rows[place] != place:
            other = rows[place]
            for each in (cache, cache.draft):
                each.swap_rows(place, other)
            holder = rows.index(place)
            rows[place], rows[holder] = place, other
    cache.token_ids = [
        prompt.known_ids(request.token_ids[: request.length - 1].clone())
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    cache.prompt_lengths = [prompt.cached + len(prompt.fed) for prompt in prompts]
    cache.waiting_features = [list(request.features) for request in requests]


def _give_back(given: Cache, cache: SlotCache, prompts: Sequence[Prompt]) -> None:
    """Fill the user's own cache with what was decoded, in the columns where plain `generate()` would have left it."""
    columns = [prompt.columns_of(length) for prompt, length in zip(prompts, cache.lengths, strict=True)]
    given.layers = cache.to_dynamic_cache(columns).layers


def _sequences(call: Call, requests: Sequence[Request], prompts: Sequence[Prompt]) -> torch.Tensor:
    generated = [
        request.token_ids[len(prompt.token_ids) : request.length]
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    # Without a padding token all rows end together.
    continuation = torch.nn.utils.rnn.pad_sequence(generated, batch_first=True, padding_value=call.pad_token_id or 0)
    return torch.cat([call.input_ids, continuation.to(call.input_ids.device)], dim=1)


def _recorded(recording: Recording, requests: Sequence[Request]) -> dict[str, Any]:
    """Return scores, logits and hidden states by step, as plain `generate()` does; zeros behind a row's end."""
    result: dict[str, Any] = {"scores": None, "logits": None, "hidden_states": None}
    for name, wanted, kept in (
        ("scores", recording.wants_scores, recording.scores),
        ("logits", recording.wants_logits, recording.logits),
    ):
        if wanted:
            rows = [torch.stack(kept[request.id]) for request in requests]
            result[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).unbind(dim=1)
    if recording.wants_hidden_states:
        steps = [recording.hidden_states[request.id] for request in requests]
        longest = max(map(len, steps))
        result["hidden_states"] = tuple(_hidden_step(steps, step) for step in range(longest))
    return result


def _hidden_step(rows: Sequence[list[tuple[torch.Tensor, ...]]], step: int) -> tuple[torch.Tensor, ...]:
    """Return one step's hidden states `[B, n, d]` of all layers, rows aligned on the right."""
    width = max(len(row[step][0]) for row in rows if step < len(row))
    layers = []
    for layer in range(len(rows[0][0])):
        like = rows[0][0][layer]
        states = like.new_zeros(len(rows), width, like.shape[-1])
        for index, row in enumerate(rows):
            if step < len(row):
                states[index, width - len(row[step][layer]) :] = row[step][layer]
        layers.append(states)
    return tuple(layers)


def needs_padding(stopping_criteria: StoppingCriteriaList) -> bool:
    """Tell whether rows may end at different lengths."""
    return any(not isinstance(criterion, MaxLengthCriteria) for criterion in stopping_criteria)


def effective_config(target: PreTrainedModel, generate_kwargs: Mapping[str, Any]) -> GenerationConfig:
    """Return what `generate()` will follow: the arguments, then a configuration among them, then the target's own."""
    given = generate_kwargs.get("generation_config")
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**target.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**{name: value for name, value in generate_kwargs.items() if name != "generation_config"})
    return config
