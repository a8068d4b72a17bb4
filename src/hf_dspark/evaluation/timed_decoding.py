"""One `generate()` call with the clock running: tokens of each row, time to the first one, memory.

Knows nothing of what is measured with it, nor of the rounds inside.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..decoding.call import effective_config
from ..decoding.rounds import RoundStatistics
from ..models.modeling_draft import DraftModel, input_device

MIB = 2**20


@dataclass(frozen=True)
class TimedCall:
    """What a `generate()` call gave, and took.

    Attributes:
        token_ids (`list[list[int]]`): New tokens of each row, up to and including its end.
        prefill_seconds (`float`): From the call until the first new tokens.
        seconds (`float`): From the call until its return.
        peak_memory_mib (`float`, *optional*): On an accelerator, the peak of what was allocated during the call; on a
            CPU, that of the process since its start; `None` where nobody tells.
        statistics ([`RoundStatistics`], *optional*): Of the rounds, if there was a draft.
    """

    token_ids: list[list[int]]
    prefill_seconds: float
    seconds: float
    peak_memory_mib: float | None
    statistics: RoundStatistics | None


def timed_call(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seed: int = 0,
    draft: DraftModel | None = None,
    **generate_kwargs: Any,
) -> TimedCall:
    """Decode prompts together, with a draft or without, and measure it.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        prompts (`Sequence[Sequence[int]]`): Token ids of each row; shorter ones are padded on the left.
        seed (`int`): Of all draws of the call. The state of the global generators is as before afterwards.
        draft ([`DraftModel`], *optional*): Its draft; plain decoding unless given.
        generate_kwargs: For `generate()`.

    Returns:
        [`TimedCall`]
    """
    config = effective_config(target, generate_kwargs)
    pad_token_id = _pad_token_id(config)
    device = input_device(target.get_input_embeddings())
    input_ids, attention_mask = _left_padded(prompts, pad_token_id, device)
    options = dict(generate_kwargs) | {"pad_token_id": pad_token_id}
    clock = _FirstTokenClock(device)
    if draft is None:  # rounds note when they begin, and no criterion of ours has to be asked in them
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), clock])
    else:
        options["assistant_model"] = draft
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _reset_peak_memory(device)
        _synchronize(device)
        started = time.perf_counter()
        sequences = target.generate(input_ids, attention_mask=attention_mask, **options)
        _synchronize(device)
        seconds = time.perf_counter() - started
    statistics = None if draft is None else draft.last_stats
    first = clock.first if statistics is None else statistics.first_round_at
    rows = sequences[:, input_ids.shape[1] :].tolist()
    ends = _end_token_ids(config)
    return TimedCall(
        [_cut(row, ends, pad_token_id if len(rows) > 1 else None) for row in rows],
        seconds if first is None else first - started, seconds, _peak_memory_mib(device), statistics,
    )  # fmt: skip


class _FirstTokenClock(StoppingCriteria):
    """Notes when it is first called, which is behind the first new token; never stops anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if self.first is None:
            _synchronize(self._device)
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    rows = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)


def _end_token_ids(config: GenerationConfig) -> set[int]:
    ends = config.eos_token_id
    return {ends} if isinstance(ends, int) else set(torch.as_tensor([] if ends is None else ends).tolist())


def _pad_token_id(config: GenerationConfig) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    return int(torch.as_tensor(0 if ends is None else ends).flatten()[0])


def _cut(row: list[int], ends: set[int], pad_token_id: int | None) -> list[int]:
    """Drop what stands behind the end of a row: an end-of-sequence token, or padding where something else ended it."""
    end = next((place for place, token in enumerate(row) if token in ends), None)
    if end is not None:
        return row[: end + 1]
    length = len(row)
    while length > 1 and row[length - 1] == pad_token_id:
        length -= 1
    return row[:length]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def _peak_memory_mib(device: torch.device) -> float | None:
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) / MIB
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
