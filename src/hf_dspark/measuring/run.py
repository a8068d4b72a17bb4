"""Turns of conversations answered one `generate()` call after the other, and noted as they are finished."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from ..cpu import fast_linears
from ..data.prompts import Prompt, next_turn, token_ids
from ..decoding.call import effective_config
from ..files import Journal, digest
from ..models.modeling_draft import DraftModel
from ..scheduling.rounds import Rounds
from .metrics import PlainTurn, TurnRecord
from .rounding import count_best
from .timed_decoding import timed_call

TOKENS_TO_WARM_UP = 16


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
    packed: bool
    generate_kwargs: dict[str, Any]

    def kernels(self) -> AbstractContextManager[None]:
        """Return what decoding takes place in: packed copies of the weights, where they are asked for."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return fast_linears(*models, packed=True) if self.packed else nullcontext()


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
    """Answers turns, and notes in the journal those that are finished."""

    def __init__(self, setup: Setup, journal: Journal | None) -> None:
        self.records: dict[tuple[str, int, int], TurnRecord] = {}  # by task, prompt and turn
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
                    conversations = dict(enumerate(part[first : first + size], start=first))
                    turn = 0
                    while conversations:
                        conversations = self._answer_turn(task, conversations, turn, bar)
                        turn += 1

    def _answer_turn(self, task: str, conversations: dict[int, Prompt], turn: int, bar: Any) -> dict[int, Prompt]:
        """Answer a turn of some conversations side by side; return those that go on, with their next turn."""
        turns = [self._turn(task, place, turn, asked) for place, asked in conversations.items()]
        wanted = self._setup.generate_kwargs["max_new_tokens"]
        together = [each for each in turns if each is not None and each.room == wanted]
        # Those with all the room they may need are decoded together; each of the others alone.
        alone = [[each] for each in turns if each is not None and each.room < wanted]
        for call in [together, *alone]:
            missing = [each for each in call if each.key not in self.records]
            # A call that was answered in part had failed as a whole.
            for part in [missing] if len(missing) == len(call) else [[each] for each in missing]:
                self._decode(part)
        going_on = {}
        for place, asked in conversations.items():
            key = (task, place, turn)
            bar.update(1 if key in self.records else 1 + len(asked.later_turns))
            if key in self.records and asked.later_turns:
                answer = self._setup.processing_class.decode(self._answers[key], skip_special_tokens=True)
                going_on[place] = next_turn(asked, answer)
        return going_on

    def _turn(self, task: str, place: int, turn: int, asked: Prompt) -> _Turn | None:
        """Return a turn as tokens; `None` if it cannot be answered."""
        config = self._setup.target.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or math.inf
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
        options = self._setup.generate_kwargs | {"max_new_tokens": min(TOKENS_TO_WARM_UP, turn.room)}
        prompts = [turn.token_ids[:TOKENS_TO_WARM_UP]]
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
        is_sampled = effective_config(setup.target, setup.generate_kwargs).do_sample
        statistics = call.statistics or Rounds()
        answered = []
        for row, (turn, ids) in enumerate(zip(turns, call.token_ids, strict=True)):
            plain_turn = None
            if plain is not None:
                plain_ids = plain.token_ids[row]
                same = None if is_sampled else plain_ids == ids
                best = None if is_sampled else count_best(setup.target, turn.token_ids, ids, plain_ids, **options)
                plain_turn = PlainTurn(len(plain_ids), plain.prefill_seconds, plain.seconds_of(row), same, best)
            record = TurnRecord(
                *turn.key,
                num_prompt_tokens=len(turn.token_ids),
                num_tokens=len(ids),
                prefill_seconds=call.prefill_seconds,
                seconds=call.seconds_of(row),
                rows_together=len(turns),
                peak_memory_mib=call.peak_memory_mib,
                rounds=statistics.of_request(row),
                plain=plain_turn,
            )
            answered.append((record, ids))
        return answered

    def _note(self, record: TurnRecord, ids: list[int]) -> None:
        key = record.task, record.prompt, record.turn
        self.records[key], self._answers[key] = record, ids

    def _fail(self, task: str, turn: int, asked: Prompt, error: Exception) -> None:
        where = f"turn {turn + 1}: " if turn else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        self.failed.append(FailedPrompt(task, asked.line, f"{where}{reason}"))
