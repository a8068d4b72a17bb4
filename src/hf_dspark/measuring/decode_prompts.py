"""Decode a list of prompts: conversations turn by turn, in batches, with a draft or without.

A prompt that fails, fails alone. Every draw is keyed by the prompt's place, so an interruption changes nothing.
"""

import itertools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import MaxLengthCriteria
from transformers.utils.logging import tqdm

from ..data.prompts import Prompt, next_turn, token_ids
from ..decoding.call import effective_config
from ..decoding.many import generate_many
from ..files import digest
from ..models.modeling_draft import DraftModel
from ..scheduling.rounds import Rounds
from ..targets.transformers_api import CACHE_ARGUMENTS
from .rounding import count_best
from .timed_decoding import end_token_ids, timed_call

MADE_HERE = {
    "input_ids", "inputs", "inputs_embeds", "attention_mask", *CACHE_ARGUMENTS, "assistant_model",
    "num_return_sequences", "return_dict_in_generate", "max_length", "streamer",
}  # fmt: skip

Key = tuple[str, int, int]  # group, place of the prompt in it, turn


class NoRoomError(ValueError):
    """A prompt fills the target's context."""


@dataclass(frozen=True)
class PlainAnswer:
    """The same turn, decoded by the target alone."""

    num_tokens: int
    prefill_seconds: float
    seconds: float
    identical: bool | None  # whether the tokens are the same; `None` where both are drawn at random
    num_best: int | None = None  # drafted tokens that are the target's best up to rounding; `None` if not checked


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
    rows_together: int = 1  # turns that its call decoded
    peak_memory_mib: float | None = None  # allocated by the call on an accelerator; by the process so far on a CPU
    rounds: Rounds = field(default_factory=Rounds)  # empty without a draft
    plain: PlainAnswer | None = None  # the turn without a draft, if compared
    error: Exception | None = None  # why it failed

    @property
    def key(self) -> Key:
        return self.group, self.index, self.turn

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds of an answer that did not fail."""
        kept = vars(self) | {"rounds": self.rounds.to_dict(), "plain": self.plain and asdict(self.plain)}
        return {name: value for name, value in kept.items() if name != "error"}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Answer":
        """Read what `to_dict` returned."""
        plain = None if kept["plain"] is None else PlainAnswer(**kept["plain"])
        return cls(**(dict(kept) | {"rounds": Rounds.from_dict(kept["rounds"]), "plain": plain}))


def decode_prompts(
    target: PreTrainedModel,
    prompts: Mapping[str, Sequence[Prompt]],
    processing_class: PreTrainedTokenizerBase | None,
    draft: DraftModel | None = None,
    *,
    done: Mapping[Key, Sequence[int]] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    continuous: bool = False,
    compare_plain: bool = False,
    raise_errors: bool = False,
    progress: str | None = "decoding",
    **generate_kwargs: Any,
) -> Iterator[Answer]:
    """Yield the answers to all turns of all prompts as they come, those that failed with their error.

    `batch_size` prompts of a group are decoded in one `generate()` call per turn; one that has less room left in the
    target's context than the others has a call of its own. The answer goes into the conversation before the next turn.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        prompts (`Mapping`): Groups of prompts: tasks, or samples. A batch holds prompts of one group.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The tokenizer; optional for token ids of one turn.
        draft ([`DraftModel`], *optional*): Its draft, which decodes as `draft.decoding` says.
        done (`Mapping`): Tokens of answers from an earlier run, which are not yielded again. A batch that was answered
            in part is drawn again as a whole: draws depend on the seed and the place of its first prompt alone.
        seed (`int`): Of all draws.
        batch_size (`int`): Prompts decoded together.
        continuous (`bool`): Fill the row of a prompt that ends at once, by [`generate_many`]: faster, but nothing is
            timed, and each prompt has one turn.
        compare_plain (`bool`): Decode each turn without the draft, too, right before.
        raise_errors (`bool`): Raise the error of a prompt that fails alone.
        progress (`str`, *optional*): What the progress bar says.
        generate_kwargs: For `generate()`.
    """
    driver = _Driver(target, processing_class, draft, seed, batch_size, compare_plain, raise_errors, generate_kwargs)
    total = sum(1 + len(prompt.later_turns) for part in prompts.values() for prompt in part)
    with tqdm(total=total, desc=progress, unit="turn", disable=None if progress else True) as bar:
        decode = driver.decode_queue if continuous else driver.decode_batches
        yield from decode(prompts, done or {}, bar)


def refuse_made_here(caller: str, generate_kwargs: Mapping[str, Any], **instead: str) -> None:
    """Raise a `ValueError` for arguments of `generate()` that the caller makes itself, and say what to use instead."""
    asked, config = dict(generate_kwargs), generate_kwargs.get("generation_config")
    if config is not None:  # its lengths are followed
        asked.setdefault("num_return_sequences", (config.num_return_sequences or 1) > 1 or None)
        asked.setdefault("return_dict_in_generate", config.return_dict_in_generate or None)
    for name, value in asked.items():
        if name in MADE_HERE and value is not None:
            cure = {"max_length": "use max_new_tokens"} | instead
            raise ValueError(f"{caller} makes {name} itself: {cure.get(name, 'drop it')}")


def _bare(error: Exception) -> Exception:
    """Return an error without its frames: they would keep what a failed pass has allocated."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class _EndOfContext(MaxLengthCriteria):
    """Ends a prompt earlier than its options say. transformers warns of its own class."""


@dataclass
class _Driver:
    target: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | None
    draft: DraftModel | None
    seed: int
    batch_size: int
    compare_plain: bool
    raise_errors: bool
    generate_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.config = effective_config(self.target, self.generate_kwargs)
        text_config = self.target.config.get_text_config(decoder=True)
        self.context = getattr(text_config, "max_position_embeddings", None) or math.inf
        self.ends = end_token_ids(self.config)

    def decode_batches(self, prompts: Mapping[str, Sequence[Prompt]], done: Mapping, bar: tqdm) -> Iterator[Answer]:
        for group, part in prompts.items():
            for first in range(0, len(part), self.batch_size):
                asked, turn = dict(enumerate(part[first : first + self.batch_size], start=first)), 0
                while asked:
                    written = {index: done[key] for index in asked if (key := (group, index, turn)) in done}
                    bar.update(len(written))
                    for answer in self._answer_turn(group, turn, asked, written.keys()):
                        failed = answer.error is not None
                        bar.update(1 + len(asked[answer.index].later_turns) if failed else 1)
                        if not failed:
                            written[answer.index] = answer.token_ids
                        yield answer
                    asked = {
                        index: next_turn(
                            prompt, self.processing_class.decode(written[index], skip_special_tokens=True)
                        )
                        for index, prompt in asked.items()
                        if index in written and prompt.later_turns
                    }
                    turn += 1

    def _answer_turn(
        self, group: str, turn: int, asked: Mapping[int, Prompt], done: Collection[int]
    ) -> Iterator[Answer]:
        """Yield the answers to a turn of some conversations that are not done yet."""
        calls: dict[int, list[Answer]] = {}
        for index, prompt in asked.items():
            answer = self._asked(group, index, turn, prompt)
            if answer.error is not None:
                yield answer
            else:
                calls.setdefault(self._room(answer), []).append(answer)
        for call in calls.values():
            if not all(answer.index in done for answer in call):
                yield from (answer for answer in self._decode(call) if answer.index not in done)

    def _asked(self, group: str, index: int, turn: int, prompt: Prompt) -> Answer:
        """Return the answer that is to be written; one with an error if there can be none."""
        answer = Answer(group, index, turn)
        try:
            answer = replace(answer, prompt_ids=token_ids(prompt, self.processing_class))
            if self._room(answer) < 1:
                raise NoRoomError(
                    f"a prompt of {len(answer.prompt_ids)} tokens leaves no room for an answer in the target's "
                    f"context of {self.context}: shorten it"
                )
        except ValueError as error:
            if self.raise_errors:
                raise
            answer = replace(answer, error=_bare(error))
        return answer

    def _room(self, answer: Answer) -> int:
        """Return how many tokens an answer may have."""
        length, most = len(answer.prompt_ids), self.config.max_new_tokens
        return int(min(self.config.max_length - length if most is None else most, self.context - length))

    def _decode(self, call: Sequence[Answer]) -> Iterator[Answer]:
        """Decode turns in one call; if it fails, each alone."""
        failed = None
        try:
            answered = self._answered(call)
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            if len(call) == 1 and self.raise_errors:
                raise
            failed, answered = _bare(error), [replace(call[0], error=_bare(error))]
        if failed is not None and len(call) > 1:
            warnings.warn(
                f"{len(call)} prompts could not be decoded together ({' '.join(str(failed).split())}): each is "
                "decoded alone, and timed so. If memory is short, lower batch_size",
                stacklevel=2,
            )
            answered = itertools.chain.from_iterable(self._decode([answer]) for answer in call)
        yield from answered

    def _answered(self, call: Sequence[Answer]) -> list[Answer]:
        room = self._room(call[0])
        options = self.generate_kwargs | {"max_new_tokens": room}
        if self.config.max_new_tokens is None:
            options["max_length"] = None
        if self.config.stop_strings:
            options.setdefault("tokenizer", self.processing_class)
        seed = int(digest([self.seed, *call[0].key]), 16) >> 1
        ids = [answer.prompt_ids for answer in call]
        plain = timed_call(self.target, ids, seed, **options) if self.compare_plain else None
        timed = timed_call(self.target, ids, seed, self.draft, **options)
        return [
            replace(
                answer,
                token_ids=new,
                finished=len(new) < room or new[-1] in self.ends,
                prefill_seconds=timed.prefill_seconds,
                seconds=timed.seconds_of(row),
                rows_together=len(call),
                peak_memory_mib=timed.peak_memory_mib,
                rounds=timed.rounds.of_request(row),
                plain=None if plain is None else self._compared(answer.prompt_ids, new, plain, row, options),
            )
            for row, (answer, new) in enumerate(zip(call, timed.token_ids, strict=True))
        ]

    def _compared(
        self, prompt_ids: list[int], new: list[int], plain: Any, row: int, options: Mapping[str, Any]
    ) -> PlainAnswer:
        plain_ids, same, best = plain.token_ids[row], None, None
        if not self.config.do_sample:
            same, best = plain_ids == new, count_best(self.target, prompt_ids, new, plain_ids, **options)
        return PlainAnswer(len(plain_ids), plain.prefill_seconds, plain.seconds_of(row), same, best)

    def decode_queue(self, prompts: Mapping[str, Sequence[Prompt]], done: Mapping, bar: tqdm) -> Iterator[Answer]:
        """Decode all prompts by `generate_many`; noise is keyed by the seed and the place among all of them."""
        asked = [
            self._asked(group, index, 0, prompt)
            for group, part in prompts.items()
            for index, prompt in enumerate(part)
        ]
        for answer in asked:
            if answer.error is not None and answer.key not in done:
                yield answer
        is_open = [answer.error is None and answer.key not in done for answer in asked]
        # `None` fails at once, and keeps the numbers of the others.
        ids = [answer.prompt_ids if each else None for answer, each in zip(asked, is_open, strict=True)]
        options = dict(self.generate_kwargs)
        if self.context < math.inf:
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), _EndOfContext(self.context)]
        results = generate_many(
            self.target, self.draft, ids, self.processing_class, self.batch_size, progress=False, **options
        )
        with torch.random.fork_rng():  # the queue draws the seed of its noise with the first result
            torch.manual_seed(self.seed)
            result = next(results, None)
        while result is not None:
            answer, error, new = asked[result.index], result.error, result.token_ids.tolist()
            bar.update()
            if is_open[result.index]:
                finished = error is None and (len(new) < self._room(answer) or new[-1] in self.ends)
                yield replace(answer, token_ids=new, finished=finished, error=error)
            result = next(results, None)
