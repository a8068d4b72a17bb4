"""Turns of conversations answered one `generate()` call after the other, and noted as they are finished.

Knows nothing of tasks as files, nor of what the records come to.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import Prompt, next_turn, token_ids
from ..decoding.call import effective_config
from ..decoding.rounds import RoundStatistics
from ..files import Journal, digest
from ..models.modeling_draft import DraftModel
from .metrics import PlainTurn, TurnRecord, TurnRounds
from .timed_decoding import TimedCall, timed_call

NEW_TOKENS_TO_WARM_UP = 16
PROMPT_TOKENS_TO_WARM_UP = 16


@dataclass(frozen=True)
class FailedPrompt:
    """A line that could not be evaluated, or not to its last turn.

    Attributes:
        task (`str`): Its task.
        line (`int`): The line of the file, or the place in the list, from 1.
        error (`str`): Why.
    """

    task: str
    line: int
    error: str


@dataclass(frozen=True)
class _Turn:
    """A turn that is to be answered."""

    task: str
    prompt: int
    turn: int
    asked: Prompt

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.prompt, self.turn

    def next(self, answer: str) -> "_Turn":
        return replace(self, turn=self.turn + 1, asked=next_turn(self.asked, answer))


@dataclass(frozen=True)
class _Row:
    """A turn as tokens, and how many may be written behind them."""

    turn: _Turn
    token_ids: list[int]
    new_tokens: int


class EvaluationRun:
    """Answers turns, and notes those that are finished.

    Args:
        target, draft, tokenizer: What is measured.
        batch_size (`int`): Conversations decoded together.
        compare_plain (`bool`): Whether each turn is decoded without the draft, too.
        seed (`int`): Of all draws.
        thinking (`bool`, *optional*): For the chat template.
        options (`dict`): For `generate()`.
        journal ([`Journal`], *optional*): Where finished turns go.

    Attributes:
        records (`dict`): Every answered turn, by task, prompt and turn.
        failed (`list[FailedPrompt]`): What could not be answered.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel | None,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        compare_plain: bool,
        seed: int,
        thinking: bool | None,
        options: dict[str, Any],
        journal: Journal | None,
    ) -> None:
        self.records: dict[tuple[str, int, int], TurnRecord] = {}
        self.failed: list[FailedPrompt] = []
        self.target, self.draft, self._tokenizer = target, draft, tokenizer
        self.batch_size, self._compare_plain, self._seed = batch_size, compare_plain, seed
        self._thinking, self.options, self._journal = thinking, options, journal
        self._do_sample = effective_config(target, options).do_sample
        context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._context = math.inf if context is None else context
        self._token_ids: dict[tuple[str, int, int], list[int]] = {}
        self._is_warm = False
        self._bar = tqdm(disable=True)
        for entry in journal.entries if journal is not None else ():
            for answered in entry["answered"]:
                self._note(TurnRecord.from_dict(answered["record"]), answered["token_ids"])

    def answer(self, prompts: Mapping[str, Sequence[Prompt]], progress: bool) -> None:
        """Answer all turns of all tasks, but those that are finished."""
        total = sum(1 + len(prompt.later_turns) for part in prompts.values() for prompt in part)
        with tqdm(total=total, desc="evaluating", unit="turn", disable=not progress) as self._bar:
            for task, part in prompts.items():
                turns = [_Turn(task, place, 0, prompt) for place, prompt in enumerate(part)]
                for first in range(0, len(turns), self.batch_size):
                    self._answer_conversations(turns[first : first + self.batch_size])

    def _answer_conversations(self, turns: Sequence[_Turn]) -> None:
        """Answer some conversations side by side, turn by turn."""
        while turns:
            for call in self._calls(turns):
                missing = [row for row in call if row.turn.key not in self.records]
                # A call that was answered in part had failed as a whole.
                for part in [missing] if len(missing) == len(call) else [[row] for row in missing]:
                    self._decode(part)
            answered = [turn for turn in turns if turn.key in self.records]
            self._bar.update(len(answered))
            turns = [turn.next(self._text(turn)) for turn in answered if turn.asked.later_turns]

    def _text(self, turn: _Turn) -> str:
        return self._tokenizer.decode(self._token_ids[turn.key], skip_special_tokens=True)

    def _calls(self, turns: Sequence[_Turn]) -> list[list[_Row]]:
        """Return which turns are decoded together: those with all the room they may need; each of the others alone."""
        wanted = self.options["max_new_tokens"]
        rows = []
        for turn in turns:
            try:
                ids = token_ids(turn.asked, self._tokenizer, self._thinking)
                rows.append(_Row(turn, ids, int(min(wanted, self._room(ids)))))
            except ValueError as error:
                self._fail(turn, error)
        together = [row for row in rows if row.new_tokens == wanted]
        return [call for call in [together, *([row] for row in rows if row.new_tokens < wanted)] if call]

    def _room(self, ids: Sequence[int]) -> float:
        room = self._context - len(ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer in the target's context of "
                f"{self._context}: shorten it"
            )
        return room

    def _decode(self, rows: Sequence[_Row]) -> None:
        """Decode turns in one call, and note them; if it fails, each alone."""
        if not rows:
            return
        try:
            self._warm_up(rows[0])
            answered = self._answered(rows)
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            if len(rows) == 1:
                self._fail(rows[0].turn, error)
                return
            warnings.warn(
                f"{len(rows)} prompts could not be decoded together ({' '.join(str(error).split())}): each is decoded "
                "alone, and timed so. If memory is short, lower batch_size",
                stacklevel=2,
            )
            for row in rows:
                self._decode([row])
            return
        if self._journal is not None:
            entries = [{"record": record.to_dict(), "token_ids": ids} for record, ids in answered]
            self._journal.append({"answered": entries})
        for record, ids in answered:
            self._note(record, ids)

    def _warm_up(self, row: _Row) -> None:
        """Let what is slow only the first time be in nobody's time."""
        if self._is_warm:
            return
        options = self.options | {"max_new_tokens": min(NEW_TOKENS_TO_WARM_UP, row.new_tokens)}
        prompts = [row.token_ids[:PROMPT_TOKENS_TO_WARM_UP]]
        for draft in [None, self.draft] if self._compare_plain else [self.draft]:
            timed_call(self.target, prompts, self._seed, draft, **options)
        self._is_warm = True

    def _answered(self, rows: Sequence[_Row]) -> list[tuple[TurnRecord, list[int]]]:
        """Decode turns in one call; return the record and the tokens of each."""
        first = rows[0].turn
        seed = int(digest([self._seed, *first.key]), 16) >> 1
        options = self.options | {"max_new_tokens": rows[0].new_tokens}
        prompts = [row.token_ids for row in rows]
        plain = timed_call(self.target, prompts, seed, **options) if self._compare_plain else None
        call = timed_call(self.target, prompts, seed, self.draft, **options)
        return [
            (_record(row, place, call, self._plain_turn(place, call, plain)), call.token_ids[place])
            for place, row in enumerate(rows)
        ]

    def _plain_turn(self, place: int, call: TimedCall, plain: TimedCall | None) -> PlainTurn | None:
        if plain is None:
            return None
        ids = plain.token_ids[place]
        identical = None if self._do_sample else ids == call.token_ids[place]
        return PlainTurn(len(ids), plain.prefill_seconds, _share_of_seconds(plain, place), identical)

    def _note(self, record: TurnRecord, ids: list[int]) -> None:
        key = record.task, record.prompt, record.turn
        self.records[key], self._token_ids[key] = record, ids

    def _fail(self, turn: _Turn, error: Exception) -> None:
        self._bar.update(1 + len(turn.asked.later_turns))
        where = f"turn {turn.turn + 1}: " if turn.turn else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.failed.append(FailedPrompt(turn.task, turn.asked.line, f"{where}{reason}"))


def _record(row: _Row, place: int, call: TimedCall, plain: PlainTurn | None) -> TurnRecord:
    statistics = RoundStatistics() if call.statistics is None else call.statistics
    return TurnRecord(
        task=row.turn.task,
        prompt=row.turn.prompt,
        turn=row.turn.turn,
        num_prompt_tokens=len(row.token_ids),
        num_tokens=len(call.token_ids[place]),
        prefill_seconds=call.prefill_seconds,
        seconds=_share_of_seconds(call, place),
        rows_together=len(call.token_ids),
        peak_memory_mib=call.peak_memory_mib,
        rounds=TurnRounds.of(statistics, place),
        plain=plain,
    )


def _share_of_seconds(call: TimedCall, place: int) -> float:
    return call.seconds * len(call.token_ids[place]) / sum(map(len, call.token_ids))
