"""The cells of `compare.py` and the prompts in them, after as much other text as a cell asks for."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compare_drafts import Models
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """What is kept equal.

    Args:
        task (`str`): Whose prompts.
        batch_size (`int`): Rows of a call.
        temperature (`float`): 0 is greedy.
        context (`int`): Tokens of a prompt with what precedes it; 0 is the prompt alone.
    """

    task: str
    batch_size: int
    temperature: float
    context: int

    @property
    def key(self) -> str:
        return f"{self.task}, {self.batch_size} rows, temperature {self.temperature:g}, context {self.context}"

    @property
    def sampling(self) -> dict[str, Any]:
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0}


def preceding_ids(rows: Sequence[Row], index: int, tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """Return the last `length` tokens of the texts that follow a row; after the last row comes the first."""
    others = [*rows[index + 1 :], *rows[:index]]
    if not others:
        raise ValueError("a longer context needs other rows to take text from: pass two prompts or more")
    ids: list[int] = []
    for row in itertools.cycle(others):
        if len(ids) >= length:
            return ids[len(ids) - length :]
        ids += tokenizer(f"{row['prompt']}{row.get('completion') or ''}\n\n")["input_ids"]
    raise AssertionError("a cycle has no end")


def prompt_ids(rows: Sequence[Row], index: int, tokenizer: PreTrainedTokenizerBase, context: int) -> list[int]:
    """Return the tokens of a row's prompt after enough other text; a longer prompt stays as it is."""
    ids = tokenizer(rows[index]["prompt"])["input_ids"]
    return preceding_ids(rows, index, tokenizer, context - len(ids)) + ids if context > len(ids) else ids


def with_room(models: Models, room: int) -> tuple[Models, dict[str, int]]:
    """Return models whose prompts all fit, and how many of each task were left out.

    Raises:
        ValueError: If no prompt of a task fits.
    """
    tasks = {
        task: [row for row in rows if len(models.tokenizer(row["prompt"])["input_ids"]) <= room]
        for task, rows in models.tasks.items()
    }
    empty = [task for task, rows in tasks.items() if not rows]
    if empty:
        raise ValueError(f"no prompt of {', '.join(empty)} has {room} tokens or less: lower max_new_tokens")
    left_out = {task: len(rows) - len(tasks[task]) for task, rows in models.tasks.items()}
    return replace(models, tasks=tasks), left_out


def prompts_of(models: Models, cell: Cell, call: int, room: int) -> list[list[int]]:
    """Return the prompts of one call; after the last row comes the first."""
    rows = models.tasks[cell.task]
    first = call * cell.batch_size
    places = [place % len(rows) for place in range(first, first + cell.batch_size)]
    return [prompt_ids(rows, place, models.tokenizer, min(cell.context, room)) for place in places]


def room_for_prompts(target: PreTrainedModel, max_new_tokens: int) -> int:
    """Return how many tokens of the target's context an answer leaves.

    Raises:
        ValueError: If none.
    """
    positions = target.config.get_text_config(decoder=True).max_position_embeddings
    if max_new_tokens >= positions:
        raise ValueError(f"max_new_tokens={max_new_tokens} leaves no room for a prompt in {positions} positions")
    return positions - max_new_tokens
