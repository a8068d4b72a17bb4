"""`target.generate_batch()`, transformers' continuous batching, by the queue of `generate_many`."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .call import effective_config
from .many import generate_many

FOLLOWED = {"self", "kwargs", "inputs", "generation_config", "max_new_tokens", "progress_bar", "warmup"}
MOST_TOGETHER = 32  # fewer where memory runs out


def batch_plan(target: PreTrainedModel, given: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """Return the configuration that transformers' engine would follow, and why our queue would decode otherwise."""
    config = copy.deepcopy(given.get("generation_config") or target.generation_config)
    config.max_new_tokens = given.get("max_new_tokens") or config.max_new_tokens
    own = [name for name, value in given.items() if name not in FOLLOWED and value is not None and value is not False]
    own += ["stop_strings"] * (config.stop_strings is not None)
    own += ["num_return_sequences"] * ((config.num_return_sequences or 1) > 1)
    own += ["no max_new_tokens"] * (config.max_new_tokens is None)
    filled, said = effective_config(target, {"generation_config": config}).to_dict(), config.to_dict()
    own += [f"{name}, which generate() would take from the target's generation_config,"
            for name in filled if filled[name] != said.get(name)]  # fmt: skip
    if config.do_sample:
        config.top_k = config.top_k or 0  # generate() has 50
    config.max_length = config.return_dict_in_generate = None
    return config, [f"{name} is left to generate_batch() of transformers: drop it, or say it" for name in own]


def decode_batch(
    target: PreTrainedModel, inputs: Sequence[Sequence[int]], config: GenerationConfig, bar: bool
) -> dict[str, GenerationOutput]:
    """Decode prompts, and return what `generate_batch()` does: an output for each, by the name of its request."""
    taken: list[float] = []

    def prompts() -> Iterator[Sequence[int]]:
        for prompt in inputs:
            taken.append(time.perf_counter())
            yield prompt

    together, outputs = min(len(inputs), MOST_TOGETHER), {}
    for done in generate_many(target, None, prompts(), None, together, bar, generation_config=config):
        name, start, tokens = f"req_{done.index}", taken[done.index], done.token_ids.tolist()
        output = GenerationOutput(name, list(done.prompt), tokens, created_time=start)
        output.lifespan, output.status = (start, time.perf_counter()), RequestStatus.FINISHED
        if done.error is not None:
            output.error, output.status = str(done.error), RequestStatus.FAILED
        outputs[done.index] = output
    return {outputs[index].request_id: outputs[index] for index in range(len(outputs))}
