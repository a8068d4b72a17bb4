"""Turns of conversations answered one `generate()` call after the other, and noted as they are finished."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

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
    """A prompt that could not be evaluated, or not to its last turn; `line` is its place in the task, from 1."""

    task: str
    line: int
    error: str


@dataclass(frozen=True)
class Setup:
    """Who decodes, and how; see [`evaluate`]."""

    target: PreTrainedModel
    draft: DraftModel | None
    processing_class: PreTrainedTokenizerBase
    batch_size: int
    compare_plain: bool
    seed: int
    enable_thinking: bool | None
    generate_kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Turn:
    """A turn that is to be answered: its tokens, and how many may follow them."""

    task: str
    prompt: int
    turn: int
    asked: Prompt
    token_ids: list[int]
    room: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.task, self.prompt, self.turn


class EvaluationRun:
    """Answers turns, and notes in the journal those that are finished.

    Attributes:
        records (`dict`): Every answered turn, by task, prompt and turn.
        failed (`list[FailedPrompt]`): What could not be answered.
    """

    def __init__(self, setup: Setup, journal: Journal | None) -> None:
        self.records: dict[tuple[str, int, int], TurnRecord] = {}
        self.failed: list[FailedPrompt] = []
        self._setup, self._journal, self._is_warm = setup, journal, False
        self._answers: dict[tuple[str, int, int], list[int]] = {}
        for entry in journal.entries if journal is not None else ():
            for answered in entry["answered"]:
                self._note(TurnRecord.from_dict(answered["record"]), answered["token_ids"])

    def answer(self, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        """Answer all turns of all tasks, but those that are finished."""
        total = sum(1 + len(prompt.later_turns) for part in prompts.values() for prompt in part)
        size = self._setup.batch_size
        with tqdm(total=total, desc="evaluating", unit="turn", disable=None) as bar:
            for task, part in prompts.items():
                for first in range(0, len(part), size):
                    group = enumerate(part[first : first + size], start=first)
                    self._answer_conversations(task, dict(group), bar)

    def _answer_conversations(self, task: str, conversations: dict[int, Prompt], bar: Any) -> None:
        """Answer some conversations side by side, turn by turn."""
        turn = 0
        while conversations:
            turns = [self._turn(task, place, turn, asked) for place, asked in conversations.items()]
            for call in self._calls([each for each in turns if each is not None]):
                missing = [each for each in call if each.key not in self.records]
                # A call that was answered in part had failed as a whole.
                for part in [missing] if len(missing) == len(call) else [[each] for each in missing]:
                    self._decode(part)
            answered = {place: asked for place, asked in conversations.items() if (task, place, turn) in self.records}
            lost = [1 + len(asked.later_turns) for place, asked in conversations.items() if place not in answered]
            bar.update(len(answered) + sum(lost))
            conversations = {
                place: next_turn(asked, self._text((task, place, turn)))
                for place, asked in answered.items()
                if asked.later_turns
            }
            turn += 1

    def _text(self, key: tuple[str, int, int]) -> str:
        return self._setup.processing_class.decode(self._answers[key], skip_special_tokens=True)

    def _turn(self, task: str, place: int, turn: int, asked: Prompt) -> _Turn | None:
        """Return a turn as tokens; `None` if it cannot be answered."""
        target = self._setup.target
        context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
        try:
            ids = token_ids(asked, self._setup.processing_class, self._setup.enable_thinking)
            if len(ids) >= context:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens leaves no room for an answer in the target's context of "
                    f"{context}: shorten it"
                )
        except ValueError as error:
            self._fail(task, turn, asked, error)
            return None
        room = int(min(self._setup.generate_kwargs["max_new_tokens"], context - len(ids)))
        return _Turn(task, place, turn, asked, ids, room)

    def _calls(self, turns: Sequence[_Turn]) -> list[list[_Turn]]:
        """Return which turns are decoded together: those with all the room they may need; each of the others alone."""
        wanted = self._setup.generate_kwargs["max_new_tokens"]
        together = [turn for turn in turns if turn.room == wanted]
        return [call for call in [together, *([turn] for turn in turns if turn.room < wanted)] if call]

    def _decode(self, turns: Sequence[_Turn]) -> None:
        """Decode turns in one call, and note them; if it fails, each alone."""
        if not turns:
            return
        try:
            self._warm_up(turns[0])
            answered = self._answered(turns)
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            if len(turns) == 1:
                self._fail(turns[0].task, turns[0].turn, turns[0].asked, error)
                return
            warnings.warn(
                f"{len(turns)} prompts could not be decoded together ({' '.join(str(error).split())}): each is "
                "decoded alone, and timed so. If memory is short, lower batch_size",
                stacklevel=2,
            )
            for turn in turns:
                self._decode([turn])
            return
        if self._journal is not None:
            entries = [{"record": record.to_dict(), "token_ids": ids} for record, ids in answered]
            self._journal.append({"answered": entries})
        for record, ids in answered:
            self._note(record, ids)

    def _warm_up(self, turn: _Turn) -> None:
        """Decode something before the first turn, so that one-time costs are not timed."""
        if self._is_warm:
            return
        options = self._setup.generate_kwargs | {"max_new_tokens": min(NEW_TOKENS_TO_WARM_UP, turn.room)}
        prompts = [turn.token_ids[:PROMPT_TOKENS_TO_WARM_UP]]
        for draft in [None, self._setup.draft] if self._setup.compare_plain else [self._setup.draft]:
            timed_call(self._setup.target, prompts, self._setup.seed, draft, **options)
        self._is_warm = True

    def _answered(self, turns: Sequence[_Turn]) -> list[tuple[TurnRecord, list[int]]]:
        """Decode turns in one call; return the record and the tokens of each."""
        setup = self._setup
        seed = int(digest([setup.seed, *turns[0].key]), 16) >> 1
        options = setup.generate_kwargs | {"max_new_tokens": turns[0].room}
        prompts = [turn.token_ids for turn in turns]
        plain = timed_call(setup.target, prompts, seed, **options) if setup.compare_plain else None
        call = timed_call(setup.target, prompts, seed, setup.draft, **options)
        return [
            (_record(turn, row, call, self._plain_turn(row, call, plain)), call.token_ids[row])
            for row, turn in enumerate(turns)
        ]

    def _plain_turn(self, row: int, call: TimedCall, plain: TimedCall | None) -> PlainTurn | None:
        if plain is None:
            return None
        ids = plain.token_ids[row]
        is_sampled = effective_config(self._setup.target, self._setup.generate_kwargs).do_sample
        identical = None if is_sampled else ids == call.token_ids[row]
        return PlainTurn(len(ids), plain.prefill_seconds, _share_of_seconds(plain, row), identical)

    def _note(self, record: TurnRecord, ids: list[int]) -> None:
        key = record.task, record.prompt, record.turn
        self.records[key], self._answers[key] = record, ids

    def _fail(self, task: str, turn: int, asked: Prompt, error: Exception) -> None:
        where = f"turn {turn + 1}: " if turn else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.failed.append(FailedPrompt(task, asked.line, f"{where}{reason}"))


def _record(turn: _Turn, row: int, call: TimedCall, plain: PlainTurn | None) -> TurnRecord:
    return TurnRecord(
        task=turn.task,
        prompt=turn.prompt,
        turn=turn.turn,
        num_prompt_tokens=len(turn.token_ids),
        num_tokens=len(call.token_ids[row]),
        prefill_seconds=call.prefill_seconds,
        seconds=_share_of_seconds(call, row),
        rows_together=len(call.token_ids),
        peak_memory_mib=call.peak_memory_mib,
        rounds=TurnRounds.of(call.statistics or RoundStatistics(), row),
        plain=plain,
    )


def _share_of_seconds(call: TimedCall, row: int) -> float:
    return call.seconds * len(call.token_ids[row]) / sum(map(len, call.token_ids))
