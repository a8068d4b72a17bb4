"""Prompts: one reader for every form, in Python or in files; and prompts to tokens, turn by turn."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..files import shortened
from .conversations import Chat, tokenizer_of
from .examples import marked
from .row_files import Fault, RowFile, read_rows
from .spellings import MASKS, canonical, conversation, integers, read_messages, template_arguments

COLUMNS = ("turns", "messages", "prompt", "question", "input_ids")
FORMS = f"a string, token ids, messages, or an object with {', '.join(map(repr, COLUMNS[:-1]))} or 'input_ids'"
SUITES = {
    # DSpark Table 1, with the names of DeepSpec's files: mathematics, code, chat.
    "paper": ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "mt-bench", "arena-hard-v2"),
    # Xia et al. 2024 (arXiv 2401.07851), by its categories.
    "spec_bench": ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"),
}
BETWEEN_TURNS = "\n\n"  # without a chat template; between messages, too


class FormError(ValueError):
    """Of a prompt that is wrong as its whole list will be: of no form, or a text without a tokenizer."""


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: a text, messages, or token ids."""

    content: str | list[dict[str, Any]] | list[int]
    later_turns: tuple[str, ...] = ()  # what the user says after the first answer, the second, and so on
    tools: Any = None  # for the chat template
    chat_template_kwargs: Mapping[str, Any] | None = None
    line: int | None = field(default=None, compare=False)  # where it stands in its file or list, from 1

    @property
    def is_token_ids(self) -> bool:
        return not isinstance(self.content, str) and isinstance(self.content[0], int)


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file's sound lines, in their order, and the faults of the others."""

    prompts: list[Prompt]
    faults: list[Fault]


def read_prompt(row: Any, several_turns: bool = True) -> Prompt:
    """Read a prompt in one of the [`FORMS`]. A conversation that ends in an answer loses it: it is answered anew."""
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        return Prompt(_content(row))
    given = canonical(row)
    name = next((name for name in COLUMNS if name in given), None)
    if name is None:
        raise FormError(f"a prompt must be {FORMS}, got an object with {sorted(given) or 'nothing'}")
    value, later = given[name], ()
    if name in ("messages", "question") or (name == "prompt" and given.keys() & {"system", "history"}):
        value = conversation(given, name)
    if name == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
            raise ValueError(f"'turns' must be a list of strings, the user's, got {shortened(value)}")
        value, *later = value
        if later and not several_turns:
            raise ValueError("has several turns, which evaluate and calibrate answer: give 'messages' here")
    if name == "input_ids":
        token_ids = integers(name, value)
        columns = {each: integers(each, given[each]) for each in ("attention_mask", *MASKS, "labels") if each in given}
        for each, column in columns.items():
            if len(column) != len(token_ids):
                raise ValueError(f"{each} has {len(column)} places for {len(token_ids)} tokens of 'input_ids'")
        kept = columns.pop("attention_mask", [1] * len(token_ids))
        asked = bytes(marked(columns, len(token_ids))).rstrip(b"\0").rstrip(b"\1")  # what comes before the last answer
        value = list(itertools.compress(token_ids[: len(asked) or None], kept))
    tools, kwargs = template_arguments(given)
    prompt = Prompt(_content(value), tuple(later), tools, kwargs or None)
    return as_messages(prompt) if name == "turns" else prompt


def read_prompts(prompts: Iterable[Any], several_turns: bool = True) -> list[Prompt]:
    read = []
    for index, row in enumerate(several(prompts)):
        try:
            read.append(read_prompt(row, several_turns))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    if not read:
        raise ValueError("there are no prompts: pass at least one")
    return read


def several(prompts: Iterable[Any]) -> Iterable[Any]:
    """Return prompts, unless they are a single one: a string would be read letter by letter, an object key by key."""
    if isinstance(prompts, Mapping) and hasattr(prompts, "column_names"):
        raise TypeError(f"prompts hold several splits ({', '.join(map(str, prompts))}): pass one of them")
    if isinstance(prompts, str | bytes | Mapping | Prompt) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be several, got {type(prompts).__name__}: pass [prompt] for a single one")
    if hasattr(prompts, "iterrows"):  # its iterator gives the names of the columns
        raise TypeError("prompts must be a list, got a DataFrame: pass frame.to_dict('records')")
    return prompts


def suite_files(suite: str, folder: str | Path) -> dict[str, str]:
    """Return the prompt file of each task of a suite; a `ValueError` names what is missing."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}: choose {' or '.join(SUITES)}")
    files = {task: Path(folder) / f"{task}.jsonl" for task in SUITES[suite]}
    if missing := [path.name for path in files.values() if not path.is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: {suite} has a JSON Lines file for each task")
    return {task: str(path) for task, path in files.items()}


def read_prompt_file(
    path: str, limit: int | None = None, several_turns: bool = True, prompts: Iterable[Any] | None = None
) -> PromptFile:
    """Read at most `limit` prompts of a file, `-` for stdin; malformed lines are left out and listed.

    `prompts` are read as if they were the lines of a file of this name.
    """
    file = read_rows(path) if prompts is None else RowFile(enumerate(prompts, start=1), [])
    sound, faults = [], [*file.faults]
    for number, row in file.rows:
        if len(sound) == limit:
            break
        try:
            sound.append(replace(read_prompt(row, several_turns), line=number))
        except ValueError as error:
            faults.append(Fault(path, number, f"is no prompt: {error}", file.unit))
    if not sound:
        first = f" ({faults[0]})" if faults else ""
        raise ValueError(f"{path} holds no prompt: each must be {FORMS}{first}")
    return PromptFile(sound, faults)


def as_messages(prompt: Prompt) -> Prompt:
    """Make a text a user's message."""
    if prompt.is_token_ids:
        raise ValueError("a prompt of token ids cannot become a message: give a text or messages")
    if isinstance(prompt.content, str):
        return replace(prompt, content=[{"role": "user", "content": prompt.content}])
    return prompt


def as_chat(
    prompt: Prompt, processing_class: PreTrainedTokenizerBase | None, enable_thinking: bool | None = None
) -> Prompt:
    """Make a text a user's message if there is a chat template; a conversation one text if there is none.

    A text that begins with a special token has gone through the template already. The template is told whether to
    think, if that is given and the prompt does not say it.
    """
    if enable_thinking is not None:
        kwargs = {"enable_thinking": enable_thinking, **(prompt.chat_template_kwargs or {})}
        prompt = replace(prompt, chat_template_kwargs=kwargs)
    has_template, is_text = bool(getattr(processing_class, "chat_template", None)), isinstance(prompt.content, str)
    if prompt.is_token_ids or (is_text and not has_template):
        return prompt
    if has_template:
        added = tokenizer_of(processing_class).added_tokens_decoder
        special = tuple(str(each) for each in added.values() if each.special)
        return prompt if is_text and prompt.content.startswith(special) else as_messages(prompt)
    return replace(prompt, content=BETWEEN_TURNS.join(str(message.get("content") or "") for message in prompt.content))


def token_ids(prompt: Prompt, processing_class: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the tokens of a prompt. Messages go through the chat template; a text is continued as it is."""
    if prompt.is_token_ids:
        return prompt.content
    if processing_class is None:
        raise FormError("the prompts are texts or messages: pass the target's tokenizer, or token ids")
    if len(prompt.content) == 1 and not processing_class.chat_template:
        prompt = as_chat(prompt, processing_class)  # a question
    ids = Chat(processing_class, prompt.tools, prompt.chat_template_kwargs or {}).prompt_ids(prompt.content)
    if not ids:
        raise ValueError(f"a prompt has no tokens: {shortened(prompt.content)}. Are the tokenizer's files there?")
    return ids


def next_turn(prompt: Prompt, answer: str) -> Prompt:
    """Return the conversation so far with the user's next turn.

    A text is continued by the answer, an empty line and the next turn; messages get two more.
    """
    said, *later = prompt.later_turns
    content: Any = f"{prompt.content}{answer}{BETWEEN_TURNS}{said}"
    if not isinstance(prompt.content, str):
        content = [*prompt.content, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    return replace(prompt, content=content, later_turns=tuple(later))


def _content(value: Any) -> str | list[dict[str, Any]] | list[int]:
    """Read a text, messages or token ids."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if not isinstance(value, str | Sequence):
        hint = ": pass [prompt] for a single one" if isinstance(value, int) else ""
        raise FormError(f"a prompt must be {FORMS}, got {shortened(value)}{hint}")
    if not value:
        raise ValueError("the prompt is empty: give at least one token")
    if isinstance(value, str):
        return value
    if len(value) == 1 and isinstance(value[0], list):  # a batch of one
        (value,) = value
    if value and all(isinstance(token, int | float) for token in value):
        return integers("token ids", value)
    messages = read_messages(value)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("the prompt holds no message before the answer")
    return messages
