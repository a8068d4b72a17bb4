"""One `generate()` call with the clock running: tokens of each row, time to the first one, memory."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..decoding.call import effective_config
from ..models.modeling_draft import DraftModel
from ..scheduling.rounds import Rounds
from ..targets.support import TargetSupport

MIB = 2**20
TOKENS_TO_WARM_UP = 16


@dataclass(frozen=True)
class TimedCall:
    """What a `generate()` call gave, and took."""

    token_ids: list[list[int]]  # new tokens of each row, up to and including its end
    prefill_seconds: float  # from the call until the first new tokens
    seconds: float  # from the call until its return
    peak_memory_mib: float | None  # of the call on an accelerator; of the process so far on a CPU
    rounds: Rounds  # empty without a draft

    def seconds_of(self, row: int) -> float:
        """Return a row's share of the call, in proportion to its tokens."""
        return self.seconds * len(self.token_ids[row]) / sum(map(len, self.token_ids))


def warm_up(
    target: PreTrainedModel, prompt: Sequence[int], drafts: Iterable[DraftModel | None], **options: Any
) -> None:
    """Decode a little with each of some drafts, `None` for none, so that one-time costs are not timed later."""
    few = {"max_new_tokens": TOKENS_TO_WARM_UP}
    for draft in drafts:
        timed_call(target, [prompt[:TOKENS_TO_WARM_UP]], draft=draft, **(options | few))


def timed_call(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seed: int = 0,
    draft: DraftModel | None = None,
    **generate_kwargs: Any,
) -> TimedCall:
    """Decode prompts together, with a draft or without, and measure it; the global generators stay as they were."""
    config = effective_config(target, generate_kwargs)
    ends = end_token_ids(config)
    padding = int(config.pad_token_id) if config.pad_token_id is not None else (ends or [0])[0]
    device, width = TargetSupport.of(target).input_device, max(map(len, prompts))
    left_padded = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    input_ids, attention_mask = torch.tensor(left_padded, device=device), torch.tensor(masks, device=device)
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
    rounds = Rounds() if draft is None else draft.last_stats
    first = clock.first if draft is None else rounds.first_round_at
    is_filled_up = len(prompts) > 1 and may_end_early(config, generate_kwargs)
    return TimedCall(
        token_ids=[_new_tokens(row, ends, padding if is_filled_up else None) for row in sequences[:, width:].tolist()],
        prefill_seconds=seconds if first is None else first - started,
        seconds=seconds,
        peak_memory_mib=_peak_memory_mib(device),
        rounds=rounds,
    )


def end_token_ids(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def may_end_early(config: GenerationConfig, generate_kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a rule other than an end-of-sequence token can end a row: a batch does not say where it did."""
    return bool(config.stop_strings or config.max_time or generate_kwargs.get("stopping_criteria"))


def _new_tokens(row: list[int], ends: Sequence[int], padding: int | None) -> list[int]:
    """Return what a row got up to its end: an end-of-sequence token, or where padding begins to fill it up."""
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1]
    while len(row) > 1 and row[-1] == padding:
        row = row[:-1]
    return row


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
