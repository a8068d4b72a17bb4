"""Prompt files: JSON Lines in, prompts and the faults of single lines out; and prompts to tokens, turn by turn.

Knows nothing of models; of a tokenizer only its chat template.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .conversations import read_messages

FORMS = "a string, or an object with 'prompt', 'question', 'messages', 'conversations' or 'turns'"
STDIN = "-"
# What stands between two turns, and between messages, where there is no chat template to say so.
BETWEEN_TURNS = "\n\n"


@dataclass(frozen=True)
class Prompt:
    """What is to be answered.

    Args:
        content (`str` or `list[dict]`): A text or messages.
        later_turns (`tuple[str, ...]`): What the user says after the first answer, the second, and so on.
        tools (*optional*): For the chat template.
        line (`int`, *optional*): Where it stands in its file, from 1.
    """

    content: str | list[dict[str, Any]]
    later_turns: tuple[str, ...] = ()
    tools: Any = None
    line: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Fault:
    """What is wrong with one line.

    Args:
        file (`str`): The file.
        line (`int`): The line, from 1.
        reason (`str`): What is wrong, as the rest of a sentence about the line.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} line {self.line} {self.reason}"


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Args:
        name (`str`): The file.
        prompts (`list[Prompt]`): Of its sound lines, in their order.
        faults (`list[Fault]`): What is wrong with the others.
    """

    name: str
    prompts: list[Prompt]
    faults: list[Fault]


def read_prompt_file(path: str, limit: int | None = None, several_turns: bool = True) -> PromptFile:
    """Read prompts, leaving out malformed lines.

    Args:
        path (`str`): JSON Lines; `-` is stdin.
        limit (`int`, *optional*): Take this many prompts at most.
        several_turns (`bool`): Whether conversations with open turns are wanted.

    Raises:
        ValueError: If there is no such file, or no prompt in it.
    """
    rows, faults = read_json_lines(path)
    prompts = []
    for number, row in rows:
        if limit is not None and len(prompts) == limit:
            break
        try:
            prompt = read_prompt(row)
            if prompt.later_turns and not several_turns:
                raise ValueError("has several turns, which eval and calibrate answer: give 'messages' here")
        except ValueError as error:
            faults.append(Fault(path, number, f"is no prompt: {error}"))
            continue
        prompts.append(replace(prompt, line=number))
    if not prompts:
        found = f" ({faults[0]})" if faults else ""
        raise ValueError(f"{path} holds no prompt: each line must be JSON, {FORMS}{found}")
    return PromptFile(path, prompts, faults)


def read_json_lines(path: str) -> tuple[list[tuple[int, Any]], list[Fault]]:
    """Return the numbered values of a file, and what is wrong with the lines that are no JSON.

    Raises:
        ValueError: If there is no such file.
    """
    if path != STDIN and not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    rows, faults = [], []
    # Bytes: what else Unicode takes for the end of a line may stand inside of a JSON string.
    content = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too; brackets without end
            faults.append(Fault(path, number, f"is not JSON: {error}"))
    return rows, faults


def as_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, no_chat_template: bool = False) -> Prompt:
    """Make a text a user's message, if the tokenizer has a chat template that may be used.

    Raises:
        ValueError: If the prompt needs a chat template, and there is none.
    """
    if no_chat_template or not tokenizer.chat_template:
        if prompt.later_turns or not isinstance(prompt.content, str):
            reason = "which --no_chat_template forbids" if no_chat_template else "which this tokenizer lacks"
            raise ValueError(f"messages and several turns need a chat template, {reason}: give texts")
        return prompt
    if isinstance(prompt.content, str):
        return replace(prompt, content=[{"role": "user", "content": prompt.content}])
    return prompt


def as_text(prompt: Prompt) -> Prompt:
    """Return a conversation as one text, for tokenizers without a chat template: messages with an empty line between
    them, and nothing that tells who said what.
    """
    if isinstance(prompt.content, str):
        return prompt
    return replace(prompt, content=BETWEEN_TURNS.join(str(message.get("content") or "") for message in prompt.content))


def token_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> list[int]:
    """Return the tokens of a prompt, through the chat template if it is a conversation.

    Args:
        prompt ([`Prompt`]): From [`as_chat`].
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        thinking (`bool`, *optional*): `enable_thinking` for the template; not given if `None`.

    Raises:
        ValueError: If it has no tokens, or the tokenizer or the template refuses it.
    """
    if isinstance(prompt.content, str):
        try:
            ids = tokenizer(prompt.content)["input_ids"]
        except Exception as error:  # half a surrogate pair is JSON, but no text that can be encoded
            raise ValueError(f"the tokenizer refuses {_shortened(prompt.content)}: {error}") from error
    else:
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            ids = tokenizer.apply_chat_template(
                prompt.content,
                tools=prompt.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **options,
            )["input_ids"]
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses {_shortened(prompt.content)}: {error}") from error
    if not ids:
        raise ValueError(f"a prompt has no tokens: {_shortened(prompt.content)}")
    return ids


def expand_turns(prompts: Sequence[Prompt], answer: Callable[[list[Prompt]], list[str]]) -> list[Prompt]:
    """Return one prompt per turn: the conversation so far, with answers to the turns before.

    Args:
        prompts (`Sequence[Prompt]`): Conversations, as messages where there are later turns.
        answer (`Callable`): Returns the answers to some prompts, in their order.
    """
    expanded, open_prompts = list(prompts), [prompt for prompt in prompts if prompt.later_turns]
    while open_prompts:
        answers = answer(open_prompts)
        following = [next_turn(prompt, text) for prompt, text in zip(open_prompts, answers, strict=True)]
        expanded += following
        open_prompts = [prompt for prompt in following if prompt.later_turns]
    return expanded


def next_turn(prompt: Prompt, answer: str) -> Prompt:
    """Return what the user says next, behind the conversation so far.

    A text is continued by the answer, an empty line and the next turn; messages get two more.

    Args:
        prompt ([`Prompt`]): With later turns.
        answer (`str`): What was answered to it.
    """
    said, *later = prompt.later_turns
    if isinstance(prompt.content, str):
        return replace(prompt, content=f"{prompt.content}{answer}{BETWEEN_TURNS}{said}", later_turns=tuple(later))
    messages = [*prompt.content, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    return replace(prompt, content=messages, later_turns=tuple(later))


def read_prompt(row: Any) -> Prompt:
    """Read a row in one of the [`FORMS`].

    Raises:
        ValueError: If it has none of them.
    """
    if isinstance(row, str):
        return _text(row)
    if not isinstance(row, Mapping):
        raise ValueError(f"must be {FORMS}, got {_shortened(row)}")
    given = {name: value for name, value in row.items() if value is not None}
    names = ("turns", "messages", "conversations", "prompt", "question")
    name = next((name for name in names if name in given), None)
    if name is None:
        raise ValueError(f"must be {FORMS}, got an object with {sorted(given) or 'nothing'}")
    value, tools = given[name], given.get("tools")
    if name == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
            raise ValueError(f"'turns' must be a list of strings, the user's, got {_shortened(value)}")
        return Prompt(value[0], tuple(value[1:]), tools)
    if isinstance(value, str):
        return replace(_text(value), tools=tools)
    messages = read_messages(value)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # it is answered anew
    if not messages:
        raise ValueError(f"{name!r} holds no message before the answer")
    return Prompt(messages, tools=tools)


def _text(text: str) -> Prompt:
    if not text:
        raise ValueError("the prompt is empty")
    return Prompt(text)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
