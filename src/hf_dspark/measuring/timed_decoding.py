"""One `generate()` call with the clock running: what it answers, and the time to the first token."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ..decoding.call import effective_config
from ..models.modeling_draft import DraftModel
from ..scheduling.rounds import Rounds
from ..targets.support import TargetSupport

TOKENS_TO_WARM_UP = 16

Key = tuple[str, int, int]  # group, place of the prompt in it, turn


@dataclass(frozen=True)
class Answer:
    """What became of one turn of a prompt."""

    group: str
    index: int  # of the prompt in its group, from 0
    turn: int  # its place in the conversation, from 0
    prompt_ids: list[int] = field(default_factory=list)  # the conversation before it
    token_ids: list[int] = field(default_factory=list)  # written, up to and including the end
    finished: bool = False  # whether the target ended it; `False` if its length did
    prefill_seconds: float = 0.0  # from the call until its first new token
    seconds: float = 0.0  # its share of the call's duration, in proportion to its tokens
    rounds: Rounds = field(default_factory=Rounds)  # empty without a draft
    plain: "Answer | None" = None  # the turn without a draft, if compared
    identical: bool | None = None  # whether it has the same tokens; `None` where both are drawn at random
    num_best: int | None = None  # tokens that are the target's best up to rounding; `None` if not checked
    error: Exception | None = None  # why it failed

    @property
    def key(self) -> Key:
        return self.group, self.index, self.turn

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds of an answer that did not fail."""
        kept = vars(self) | {"rounds": self.rounds.to_dict(), "plain": self.plain and self.plain.to_dict()}
        return {name: value for name, value in kept.items() if name != "error"}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Answer":
        """Read what `to_dict` returned."""
        plain = kept["plain"] and cls.from_dict(kept["plain"])
        return cls(**(dict(kept) | {"rounds": Rounds.from_dict(kept["rounds"]), "plain": plain}))


def warm_up(
    target: PreTrainedModel, prompt: Sequence[int], drafts: Iterable[DraftModel | None], **options: Any
) -> None:
    """Decode a little with each of some drafts, `None` for none, so that one-time costs are not timed later."""
    asked = [Answer("", 0, 0, list(prompt[:TOKENS_TO_WARM_UP]))]
    for draft in drafts:
        timed_call(target, asked, draft=draft, **(options | {"max_new_tokens": TOKENS_TO_WARM_UP}))


def timed_call(
    target: PreTrainedModel,
    asked: Sequence[Answer],
    seed: int = 0,
    draft: DraftModel | None = None,
    **generate_kwargs: Any,
) -> list[Answer]:
    """Write answers together, with a draft or without, and measure it; the global generators stay as they were."""
    config = effective_config(target, generate_kwargs)
    ends = end_token_ids(config)
    padding = int(config.pad_token_id) if config.pad_token_id is not None else (ends or [0])[0]
    device = TargetSupport.of(target).input_device
    prompts = [torch.tensor(answer.prompt_ids, device=device) for answer in asked]
    sides = {"batch_first": True, "padding_side": "left"}
    input_ids = pad_sequence(prompts, padding_value=padding, **sides)
    options = generate_kwargs | {
        "attention_mask": pad_sequence([torch.ones_like(prompt) for prompt in prompts], **sides),
        "pad_token_id": padding,
    }
    first_tokens_at: list[float] = []

    def note_time(new_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if not first_tokens_at:
            synchronize(device)
            first_tokens_at.append(time.perf_counter())
        return torch.zeros(len(new_ids), dtype=torch.bool, device=new_ids.device)

    options["assistant_model"] = draft  # also `None`: whatever is attached
    if draft is None:  # rounds note when they begin, and need no criterion of ours
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), note_time])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        synchronize(device)
        started = time.perf_counter()
        sequences = target.generate(input_ids, **options)
        synchronize(device)
        seconds = time.perf_counter() - started
    rounds = Rounds() if draft is None else draft.last_stats
    if rounds.first_round_at is not None:
        first_tokens_at.append(rounds.first_round_at)
    is_filled_up = len(asked) > 1 and may_end_early(config, generate_kwargs)
    written = [
        _new_tokens(row, ends, padding if is_filled_up else None)
        for row in sequences[:, input_ids.shape[1] :].tolist()
    ]
    per_token = seconds / sum(map(len, written))
    return [
        replace(
            answer,
            token_ids=new,
            finished=len(new) < config.max_new_tokens or new[-1] in ends,
            prefill_seconds=first_tokens_at[0] - started if first_tokens_at else seconds,
            seconds=per_token * len(new),
            rounds=rounds.of_request(row),
        )
        for row, (answer, new) in enumerate(zip(asked, written, strict=True))
    ]


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


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
