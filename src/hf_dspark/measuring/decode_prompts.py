"""Decode a list of prompts: conversations turn by turn, in batches, with a draft or without.

A prompt that fails, fails alone. Every draw is keyed by the prompt's place, so an interruption changes nothing.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import MaxLengthCriteria
from transformers.utils.logging import tqdm

from ..data.conversations import tokenizer_of
from ..data.prompts import Prompt, next_turn, token_ids
from ..decoding.call import effective_config
from ..decoding.many import generate_many
from ..files import digest, one_line
from ..models.modeling_draft import DraftModel
from .rounding import count_best
from .timed_decoding import Answer, Key, end_token_ids, timed_call

DEFAULT_NEW_TOKENS = 128  # of answers that are measured


class NoRoomError(ValueError):
    """A prompt fills the target's context."""


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
        prompts (`Mapping`): Groups of prompts: tasks, or samples. A batch holds prompts of one group.
        done (`Mapping`): Tokens of answers from an earlier run, which are not yielded again. A batch that was answered
            in part is drawn again as a whole: draws depend on the seed and the place of its first prompt alone.
        continuous (`bool`): Fill the row of a prompt that ends at once, by [`generate_many`]: faster, but nothing is
            timed, and each prompt has one turn.
        compare_plain (`bool`): Decode each turn without the draft, too, right before.
        raise_errors (`bool`): Raise the error of a prompt that fails alone.
    """
    driver = _Driver(target, processing_class, draft, seed, batch_size, compare_plain, raise_errors, generate_kwargs)
    decode, done = driver.decode_queue if continuous else driver.decode_batches, done or {}
    total = sum(1 + len(prompt.later_turns) for part in prompts.values() for prompt in part)
    hidden = None if progress else True
    with tqdm(total=total, initial=len(done), desc=progress, unit="turn", disable=hidden) as bar:
        for answer in decode(prompts, done):
            missed = 0 if answer.error is None else len(prompts[answer.group][answer.index].later_turns) - answer.turn
            bar.update(1 + missed)
            yield answer


def with_limit(
    target: PreTrainedModel, generate_kwargs: Mapping[str, Any], default: int | None = None
) -> dict[str, Any]:
    """Return options that limit answers: by `max_new_tokens`, `default` unless they say it, or, where it is `None`, as
    the target's generation config says; a `ValueError` if that has no limit."""
    given = generate_kwargs.get("generation_config")  # a default beside it would come before its own
    if default is not None and (given is None or given.max_new_tokens is None):
        generate_kwargs = {"max_new_tokens": default} | generate_kwargs
    options = {name: each for name, each in generate_kwargs.items() if name != "max_new_tokens" or each is not None}
    config = effective_config(target, options)
    if config.max_new_tokens is None and config.max_length is None:
        raise ValueError("answers need a limit, and the target's generation config has none: give max_new_tokens")
    return options


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
        self.generate_kwargs = with_limit(self.target, self.generate_kwargs)
        self.config = effective_config(self.target, self.generate_kwargs)
        text_config = self.target.config.get_text_config(decoder=True)
        self.context = getattr(text_config, "max_position_embeddings", None) or math.inf

    def decode_batches(self, prompts: Mapping[str, Sequence[Prompt]], done: Mapping) -> Iterator[Answer]:
        for group, part in prompts.items():
            for first in range(0, len(part), self.batch_size):
                asked, turn = dict(enumerate(part[first : first + self.batch_size], start=first)), 0
                while asked:
                    written = {index: done[key] for index in asked if (key := (group, index, turn)) in done}
                    for answer in self._answer_turn(group, turn, asked, written.copy()):
                        if answer.error is None:
                            written[answer.index] = answer.token_ids
                        yield answer
                    asked = {
                        index: next_turn(prompt, self.processing_class.decode(answered, skip_special_tokens=True))
                        for index, prompt in asked.items()
                        if (answered := written.get(index)) is not None and prompt.later_turns
                    }
                    turn += 1

    def _answer_turn(self, group: str, turn: int, asked: Mapping[int, Prompt], done: Mapping) -> Iterator[Answer]:
        """Yield the answers to a turn of some conversations that are not done yet."""
        calls: dict[int, list[Answer]] = {}
        for index, prompt in asked.items():
            answer = self._asked(group, index, turn, prompt)
            if answer.error is not None:
                yield answer
            else:
                calls.setdefault(self._room(answer), []).append(answer)
        for call in calls.values():
            if any(answer.index not in done for answer in call):
                yield from (answer for answer in self._decode(call) if answer.index not in done)

    def _asked(self, group: str, index: int, turn: int, prompt: Prompt) -> Answer:
        """Return the answer that is to be written; one with an error if there can be none."""
        answer = Answer(group, index, turn)
        try:
            answer = replace(answer, prompt_ids=token_ids(prompt, self.processing_class))
            if self._room(answer) < 1:
                length = f"a prompt of {len(answer.prompt_ids)} tokens"
                raise NoRoomError(f"{length} leaves no room in the target's context of {self.context}: shorten it")
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
        try:
            answered = self._answered(call)
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            if len(call) > 1:
                failed = f"{len(call)} prompts could not be decoded together ({one_line(error)})"
                cure = "each is decoded alone, and timed so. If memory is short, lower batch_size"
                warnings.warn(f"{failed}: {cure}", stacklevel=2)
                answered = None
            elif self.raise_errors:
                raise
            else:
                answered = [replace(call[0], error=_bare(error))]
        # The error and what it holds are gone by now.
        yield from answered or (each for answer in call for each in self._decode([answer]))

    def _answered(self, call: Sequence[Answer]) -> list[Answer]:
        options = self.generate_kwargs | {"max_new_tokens": self._room(call[0])}
        if self.config.max_new_tokens is None:
            options["max_length"] = None
        if self.config.stop_strings:
            options.setdefault("tokenizer", tokenizer_of(self.processing_class))
        seed = int(digest([self.seed, *call[0].key]), 16) >> 1
        plain = timed_call(self.target, call, seed, **options) if self.compare_plain else [None] * len(call)
        drafted = timed_call(self.target, call, seed, self.draft, **options)
        return [self._compared(own, other, options) for own, other in zip(drafted, plain, strict=True)]

    def _compared(self, answer: Answer, plain: Answer | None, options: Mapping[str, Any]) -> Answer:
        if plain is None or self.config.do_sample:
            return replace(answer, plain=plain)
        best = count_best(self.target, answer.prompt_ids, answer.token_ids, plain.token_ids, **options)
        return replace(answer, plain=plain, identical=answer.token_ids == plain.token_ids, num_best=best)

    def decode_queue(self, prompts: Mapping[str, Sequence[Prompt]], done: Mapping) -> Iterator[Answer]:
        """Decode all prompts by `generate_many`; noise is keyed by the seed and the place among all of them."""
        asked = [
            self._asked(group, index, 0, prompt)
            for group, part in prompts.items()
            for index, prompt in enumerate(part)
        ]
        left = {place: answer for place, answer in enumerate(asked) if answer.key not in done}
        yield from (answer for answer in left.values() if answer.error is not None)
        left = {place: answer for place, answer in left.items() if answer.error is None}
        # An empty one fails at once, and keeps the numbers of the others.
        ids = [answer.prompt_ids if place in left else [] for place, answer in enumerate(asked)]
        options, ends = dict(self.generate_kwargs), end_token_ids(self.config)
        if self.context < math.inf:
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), _EndOfContext(self.context)]
        with torch.random.fork_rng():  # the queue draws the seed of its noise
            torch.manual_seed(self.seed)
            results = generate_many(
                self.target, self.draft, ids, self.processing_class, self.batch_size, progress=False, **options
            )
        for result in results:
            if (answer := left.get(result.index)) is not None:
                new = result.token_ids.tolist()
                finished = result.error is None and (len(new) < self._room(answer) or new[-1] in ends)
                error = None if result.error is None else _bare(result.error)
                yield replace(answer, token_ids=new, finished=finished, error=error)
