"""Conversations: messages as chat templates take them, and which of their tokens the target wrote."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..files import shortened

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]  # of tokens, first and after the last


def read_messages(messages: Any) -> Messages:
    """Return messages as chat templates take them, from those or ShareGPT's `from` and `value`."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {shortened(messages)}")
    read = []
    for place, message in enumerate(messages):
        if isinstance(message, Mapping):
            message = _without_nones(message)  # tables add nulls, to the arguments of tool calls, too
            if "role" not in message and {"from", "value"} <= message.keys():
                role = SHAREGPT_ROLES.get(message["from"], message["from"])
                message = {"role": role, "content": message["value"]}
            says = message.keys() & {"content", "tool_calls", "reasoning_content", "thinking"}
            if says and isinstance(message.get("role"), str):
                read.append(message)
                continue
        raise ValueError(f"message {place} must be a dict with 'role' and 'content', got {shortened(message)}")
    return read


class Chat:
    """A tokenizer's chat template with the tools and arguments of one example or prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Any, kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._tools = _without_nones(json.loads(tools) if isinstance(tools, str) else tools) or None
        self._kwargs = _without_nones(kwargs)
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """Call the chat template; text, unless `kwargs` ask for tokens."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {self._name} has no chat template, so it cannot read messages: set "
                "tokenizer.chat_template to the one its model was trained with, or pass examples of 'prompt' and "
                "'completion' texts"
            )
        options = {"tokenize": False, "tools": self._tools} | self._kwargs | kwargs
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template of {self._name} refuses this conversation: {error}") from error

    def rendered_ids(self, text: str) -> list[int]:
        """Tokenise what was rendered; the template wrote the special tokens itself."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, content: "str | Messages | list[int]") -> list[int]:
        """Return the tokens of a text, which is continued as it is, of messages up to the answer, or of tokens."""
        if not isinstance(content, str):
            if content and not isinstance(content[0], Mapping):
                return list(map(int, content))
            return self.rendered_ids(self.render(content, add_generation_prompt=True))
        try:
            begun = bool(self.tokenizer.bos_token) and content.startswith(self.tokenizer.bos_token)  # by a template
            return self.tokenizer(content, add_special_tokens=not begun)["input_ids"]
        except Exception as error:  # half a surrogate pair is JSON, but no text that can be encoded
            raise ValueError(f"the tokenizer refuses {shortened(content)}: {error}") from error

    def mark_answers(self, messages: Messages, first: int = 0, finished: bool = True) -> tuple[list[int], list[int]]:
        """Return ids and mask of a conversation; answers before message `first` are context."""
        answers = [place for place in range(max(first, 1), len(messages)) if messages[place]["role"] == "assistant"]
        if not answers:
            return [], []
        messages = messages[: answers[-1] + 1]
        marked = self._marked_by_template(messages, answers, first)
        token_ids, spans = self._marked_by_prefixes(messages, answers) if marked is None else marked
        mask = [0] * len(token_ids)
        for start, end in spans:
            end = self._end_of_turn(token_ids, start, end)
            mask[start:end] = [1] * (end - start)
        if not finished and 1 in mask:
            last = len(mask) - 1 - mask[::-1].index(1)
            mask[last] = int(not self._is_special(token_ids[last]))
        return token_ids, mask

    def _marked_by_template(
        self, messages: Messages, answers: list[int], first: int
    ) -> tuple[list[int], Spans] | None:
        """Return ids and spans by the marks `{% generation %}`; `None` if there are none."""
        template = self.tokenizer.chat_template and self.tokenizer.get_chat_template(tools=self._tools)
        if not self.tokenizer.is_fast or not re.search(r"\{%-?\s*generation\s*-?%\}", template or ""):
            return None
        output = self.render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        token_ids, mask = output["input_ids"], output["assistant_masks"]
        if first:
            begin = self._shared(messages[:first], token_ids, add_generation_prompt=True)
            mask = [0] * begin + mask[begin:]
        for place in answers:  # marks may hold what the prompt gives: the header of the turn, an empty thought
            with contextlib.suppress(ValueError):  # not every template renders a part
                begin = self._shared(messages[:place], token_ids)
                end = self._shared(messages[:place], token_ids, add_generation_prompt=True)
                mask = mask[:begin] + [0] * (end - begin) + mask[max(begin, end) :]
        spans, place = [], 0
        for value, run in itertools.groupby(mask):
            start, place = place, place + len(list(run))
            if value:
                spans.append((start, place))
        return (token_ids, spans) if spans else None

    def _shared(self, messages: Messages, token_ids: list[int], **kwargs: Any) -> int:
        """Return how many tokens a part of a conversation shares with the whole."""
        return _common_prefix(self.rendered_ids(self.render(messages, **kwargs)), token_ids)

    def _marked_by_prefixes(self, messages: Messages, answers: list[int]) -> tuple[list[int], Spans]:
        """Return ids and spans of the answers that stand in the whole as they were written."""
        whole = self.render(messages)
        token_ids = self.rendered_ids(whole)
        spans = []
        for place in answers:
            is_last = place == answers[-1]
            try:
                prompt = self.render(messages[:place], add_generation_prompt=True)
                answered = whole if is_last else self.render(messages[: place + 1])
            except ValueError:
                if is_last:
                    raise
                continue
            if answered.startswith(prompt) and whole.startswith(answered):
                spans.append((self._seam(prompt, token_ids, after=True), self._seam(answered, token_ids)))
            elif is_last:
                same = _common_prefix(prompt, whole)
                near = slice(max(0, same - 20), same + 20)
                raise ValueError(
                    f"the chat template of {self._name} does not let the answer be found: a prompt with "
                    f"{prompt[near]!r} reads {whole[near]!r} once it is answered. Mark the answers in the template "
                    "with {% generation %} ... {% endgeneration %}, or pass 'prompt' and 'completion' as texts"
                )
        return token_ids, spans

    def _seam(self, text: str, token_ids: list[int], after: bool = False) -> int:
        """Return how many tokens belong to a text that the whole begins with; one across the seam to neither side."""
        own = self.rendered_ids(text)
        same = _common_prefix(own, token_ids)
        return min(same + (after and same < len(own)), len(token_ids))

    def _end_of_turn(self, token_ids: list[int], start: int, end: int) -> int:
        """Return where an answer ends: after its end-of-turn token, before the template's white space."""
        if token_ids[end : end + 1] == [self.tokenizer.eos_token_id] and token_ids[end - 1] != token_ids[end]:
            return end + 1  # marks that leave out the end
        cut = end
        while cut > start and not self.tokenizer.decode([token_ids[cut - 1]]).strip():
            cut -= 1
        return cut if cut > start and self._is_special(token_ids[cut - 1]) else end

    def _is_special(self, token_id: int) -> bool:
        if token_id == self.tokenizer.eos_token_id:
            return True
        text = self.tokenizer.decode([token_id])
        return bool(text.strip()) and not self.tokenizer.decode([token_id], skip_special_tokens=True)


def _without_nones(value: Any) -> Any:
    """Drop the `None`s that tables put into dicts with different keys."""
    if isinstance(value, Mapping):
        return {name: _without_nones(inner) for name, inner in value.items() if inner is not None}
    return [_without_nones(inner) for inner in value] if isinstance(value, list | tuple) else value


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences share from the beginning."""
    return len(os.path.commonprefix([first, second]))
