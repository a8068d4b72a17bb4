"""One `generate()` call with the clock running: tokens of each row, time to the first one, memory."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..decoding.batch import end_token_ids, left_padded, new_tokens, pad_token_id
from ..decoding.call import effective_config
from ..models.modeling_draft import DraftModel
from ..scheduling.rounds import Rounds
from ..targets.support import TargetSupport

MIB = 2**20


@dataclass(frozen=True)
class TimedCall:
    """What a `generate()` call gave, and took."""

    token_ids: list[list[int]]  # new tokens of each row, up to and including its end
    prefill_seconds: float  # from the call until the first new tokens
    seconds: float  # from the call until its return
    peak_memory_mib: float | None  # of the call on an accelerator; of the process so far on a CPU
    statistics: Rounds | None  # of the rounds, if there was a draft

    def seconds_of(self, row: int) -> float:
        """Return a row's share of the call, in proportion to its tokens."""
        return self.seconds * len(self.token_ids[row]) / sum(map(len, self.token_ids))


def timed_call(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seed: int = 0,
    draft: DraftModel | None = None,
    **generate_kwargs: Any,
) -> TimedCall:
    """Decode prompts together, with a draft or without, and measure it; the global generators stay as they were."""
    config = effective_config(target, generate_kwargs)
    padding = pad_token_id(config)
    device = TargetSupport.of(target).input_device
    input_ids, attention_mask = left_padded(prompts, padding, device)
    options = dict(generate_kwargs) | {"pad_token_id": padding}
    clock = _FirstTokenClock(device)
    if draft is None:  # rounds note when they begin, and need no criterion of ours
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), clock])
    else:
        options["assistant_model"] = draft
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for index in range(torch.cuda.device_count() if device.type == "cuda" else 0):
            torch.cuda.reset_peak_memory_stats(index)
        synchronize(device)
        started = time.perf_counter()
        sequences = target.generate(input_ids, attention_mask=attention_mask, **options)
        synchronize(device)
        seconds = time.perf_counter() - started
    statistics = None if draft is None else draft.last_stats
    first = clock.first if statistics is None else statistics.first_round_at
    rows, ends = sequences[:, input_ids.shape[1] :].tolist(), end_token_ids(config)
    return TimedCall(
        token_ids=[new_tokens(row, ends, padding if len(rows) > 1 else None) for row in rows],
        prefill_seconds=seconds if first is None else first - started,
        seconds=seconds,
        peak_memory_mib=_peak_memory_mib(device),
        statistics=statistics,
    )


@contextmanager
def decoding_as(draft: DraftModel | None, **changes: Any) -> Iterator[None]:
    """Let a draft decode with other options for a while."""
    if draft is None:
        yield
        return
    before, draft.decoding = draft.decoding, replace(draft.decoding, **changes)
    try:
        yield
    finally:
        draft.decoding = before


class _FirstTokenClock(StoppingCriteria):
    """Notes when it is first called, which is after the first new token; never stops anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if self.first is None:
            synchronize(self._device)
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak_memory_mib(device: torch.device) -> float | None:
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) / MIB
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
