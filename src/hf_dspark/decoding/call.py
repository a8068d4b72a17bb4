"""Turn a `generate()` call into requests, decode them, and build what the call returns.
Rows lose their padding here and get it back at the end."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from ..models.modeling_draft import DraftModel
from ..targets.transformers_api import output_cache_name
from .conversation import Conversation, PromptRow, open_cache, read_prompt
from .drafter import Drafter
from .logits_processing import processors_of_row
from .loop import DecodingLoop
from .outputs import Recording
from .request import BatchRule, Call, Request, StopRule


def decode_call(
    target: PreTrainedModel, draft: DraftModel, call: Call
) -> torch.LongTensor | GenerateDecoderOnlyOutput:
    """Decode all rows of a call, and return what `generate()` does: rows that ended early are padded on the right."""
    config, given = call.generation_config, call.cache
    cache = open_cache(given, len(call.input_ids))
    prompts = [read_prompt(call, row, cache) for row in range(len(call.input_ids))]
    requests = [make_request(call, row, row, prompt) for row, prompt in enumerate(prompts)]
    for row, prompt in enumerate(prompts):  # no row was refused
        cache.truncate(row, prompt.cached)
    longest = max(request.hidden_prompt + request.max_length for request in requests)
    cache.limit = longest + call.policy.most_nodes
    conversation = Conversation.begin_turn(cache, draft, requests)
    drafter = Drafter(target, draft, call, conversation.draft_cache)
    loop = DecodingLoop(drafter, call, cache, Recording.of(call))
    rule = BatchRule(call, requests)
    try:
        loop.admit(requests, [prompt.fed for prompt in prompts], config.prefill_chunk_size)
        rule.ask(loop.recording.scores, loop.end)
        while loop.requests:
            loop.run_round()
            rule.ask(loop.recording.scores, loop.end)
    except torch.OutOfMemoryError as error:  # outside of the cache
        fits = f"try a batch of {len(requests) // 2}" if len(requests) > 1 else "shorten the prompt"
        raise MemoryError(f"no memory for {len(requests)} sequences: {fits} ({error})") from error
    if call.streamer is not None:
        call.streamer.end()

    generated = [request.token_ids[len(prompt.token_ids) :] for request, prompt in zip(requests, prompts, strict=True)]
    # Without a padding token all rows end together.
    continuation = torch.nn.utils.rnn.pad_sequence(generated, batch_first=True, padding_value=call.pad_token_id or 0)
    sequences = torch.cat([call.input_ids, continuation.to(call.input_ids.device)], dim=1)
    if loop.recording.wants_rows:
        conversation.end_turn(cache, loop.ended_rows, requests, prompts)
    if call.fills_users_cache and given is not cache:
        given.layers = cache.to_dynamic_cache().layers
    if not config.return_dict_in_generate:
        return sequences
    kept = given if call.fills_users_cache else cache
    fed = [prompt.columns[prompt.cached :] for prompt in prompts]
    first = min(int(columns[0]) for columns in fed) if any(prompt.cached for prompt in prompts) else 0
    fed, width = [columns - first for columns in fed], prompts[0].width - first
    steps = loop.recording.by_step(requests, fed, width, continuation.shape[1])
    return GenerateDecoderOnlyOutput(sequences=sequences, **{output_cache_name(): kept}, **steps)


def make_request(call: Call, row: int, request_id: int, prompt: PromptRow) -> Request:
    columns = call.input_ids[row : row + 1] if prompt.padding else None
    alone = len(call.input_ids) == 1
    criteria = [each for each in call.stopping_criteria if alone or call.leaves_to_rows(each)]
    return Request(
        id=request_id,
        token_ids=prompt.token_ids,
        max_length=call.max_length - prompt.padding,
        processors=processors_of_row(call.logits_processor, call.input_ids, row, prompt.token_ids[None]),
        stop_rule=StopRule(StoppingCriteriaList(criteria), columns, len(prompt.token_ids)),
        hidden_prompt=prompt.hidden,
        earlier_ids=prompt.earlier_ids,
        token_types=prompt.token_types,
        streamer=call.streamer,
    )


def effective_config(target: PreTrainedModel, generate_kwargs: Mapping[str, Any]) -> GenerationConfig:
    """Return what `generate()` will follow: the arguments, then a configuration among them, then the target's own."""
    given = generate_kwargs.get("generation_config")
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**target.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**{name: value for name, value in generate_kwargs.items() if name != "generation_config"})
    return config
