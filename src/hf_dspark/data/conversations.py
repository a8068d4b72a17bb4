"""Conversations through a chat template: to tokens, and to which of them the target wrote."""

import contextlib
import copy
import functools
import itertools
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..files import shortened
from .spellings import ROLES, Messages, is_supervised, map_calls, named, respelt, unseen, without_nones, without_wishes

Spans = list[tuple[int, int]]  # first and after the last

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_BEGIN, _END, _OTHERS, _CONTEXT = (f"\ue000{word}\ue000" for word in ("begin", "end", "others", "context"))


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer of a processor of texts and images, with the chat template of either."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is not processing_class and not tokenizer.chat_template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


class Chat:
    """A tokenizer's chat template with the tools and arguments of one example or prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Any, kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer = tokenizer_of(tokenizer)
        self._tools = without_nones(tools) or None
        self._kwargs = without_nones(kwargs)
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__

    @property
    def template(self) -> str | None:
        return self.tokenizer.chat_template and self.tokenizer.get_chat_template(tools=self._tools)

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Call the chat template; with a conversation respelt if it refuses the usual spelling, or drops a part."""
        template = self.template
        if not template:
            raise ValueError(
                f"tokenizer {self._name} has no chat template, so it cannot read messages: set tokenizer.chat_template"
                " to that of its model, or pass examples of 'prompt' and 'completion' texts"
            )
        options = {"tokenize": False, "tools": self._tools} | self._kwargs | kwargs
        for name in ("tools", "documents"):
            if options.get(name) and name not in template:
                raise ValueError(f"the chat template of {self._name} does not read {name}: leave them out")
        plain, failure, found = [without_wishes(message) for message in messages], None, None
        for spelling in itertools.chain([plain], respelt(plain)):
            try:
                text = self.tokenizer.apply_chat_template(spelling, **options)
                called = map_calls(spelling, named)
                named_text = text if called == spelling else self.tokenizer.apply_chat_template(called, **options)
            except Exception as error:  # templates raise what they like
                failure = failure or error
                continue
            missing = unseen(spelling, text, named_text)
            if not missing:
                return text
            found = found or (text, missing)
        if found is None:
            raise ValueError(f"the chat template of {self._name} refuses this conversation: {failure}") from failure
        text, missing = found
        if lost := [what for is_needed, what in missing if is_needed]:
            raise ValueError(f"the chat template of {self._name} leaves out {lost[0]}: leave this conversation out")
        return text

    def rendered_ids(self, text: str) -> list[int]:
        """Tokenise what was rendered; the template wrote the special tokens itself."""
        return self._ids(text, add_special_tokens=False)

    def text_ids(self, text: str) -> list[int]:
        """Tokenise a text as the tokenizer would, with its special tokens, if it does not begin with them."""
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)  # by a template
        return self._ids(text, add_special_tokens=not begun)

    def _ids(self, text: str, **kwargs: Any) -> list[int]:
        try:
            return self.tokenizer(text, **kwargs)["input_ids"]
        except Exception as error:  # half a surrogate pair is JSON, but no text that can be encoded
            raise ValueError(f"the tokenizer refuses {shortened(text)}: {error}") from error

    def prompt_ids(self, content: "str | Messages | list[int]") -> list[int]:
        """Return the tokens of a text, which is continued as it is, of messages up to the answer, or of tokens."""
        if not isinstance(content, str):
            if content and not isinstance(content[0], Mapping):
                return list(map(int, content))
            return self.rendered_ids(self.render(content, add_generation_prompt=True))
        ids, end = self.text_ids(content), self.tokenizer.eos_token
        is_ended = bool(end) and ids[-1:] == [self.tokenizer.eos_token_id] and not content.rstrip().endswith(end)
        return ids[:-1] if is_ended and len(ids) > 1 else ids  # some tokenizers end every text

    def mark_answers(self, messages: Messages, first: int = 0, finished: bool = True) -> tuple[list[int], list[int]]:
        """Return ids and mask of a conversation; answers before message `first` are context."""
        wanted = [place for place, message in enumerate(messages) if is_supervised(place, message)]
        answers = [place for place in wanted if place >= max(first, 1)]
        if not answers:
            roles = {message["role"] for message in messages}
            if "assistant" not in roles and (unknown := roles - {*ROLES.values()}):
                raise ValueError(f"nobody is the assistant, among {sorted(unknown)}: call who answers 'assistant'")
            return [], []
        messages = messages[: answers[-1] + 1]
        whole = self.render(messages)
        token_ids = self.rendered_ids(whole)
        spans = self._marked_by_template(messages, answers, whole, token_ids)
        if spans is None:
            spans = self._marked_by_prefixes(messages, answers, whole, token_ids)
        mask = [0] * len(token_ids)
        for start, end in spans:
            end = self._end_of_turn(token_ids, start, end)
            mask[start:end] = [1] * (end - start)
        if not finished and 1 in mask:
            last = len(mask) - 1 - mask[::-1].index(1)
            mask[last] = int(not self.is_special(token_ids[last]))
        return token_ids, mask

    def _marked_by_template(
        self, messages: Messages, answers: list[int], whole: str, token_ids: list[int]
    ) -> Spans | None:
        """Return spans by the marks `{% generation %}`; `None` if there are none that can be relied on.

        transformers' own mask runs on to the end where a mark ends in white space, or in token 0.
        """
        template, count = _GENERATION.subn(_written_mark, self.template or "")
        if not count:
            return None
        watched = [self._watched(message, place in answers) for place, message in enumerate(messages)]
        try:
            marked, seen = (_marks_in(self.render(each, chat_template=template)) for each in (messages, watched))
        except ValueError:
            return None
        if marked[0] != whole or len(marked[1]) != len(seen[1]) or not marked[1]:
            return None
        parts = [seen[0][start:end] for start, end in seen[1]]
        if any(_OTHERS in part for part in parts):
            warnings.warn(
                f"the {{% generation %}} marks in the chat template of {self._name} hold what the user says: they are "
                "not used, and answers are found by rendering the conversation up to each",
                stacklevel=2,
            )
            return None
        given = []  # what the prompt gives may be marked, too: the header of the turn, an empty thought
        for place in answers:
            with contextlib.suppress(ValueError):  # not every template renders a part
                begin = 0 if place == answers[0] else self._seam(self.render(messages[:place]), token_ids)
                prompt = self.render(messages[:place], add_generation_prompt=True)
                given.append((begin, self._seam(prompt, token_ids)))
        spans = []
        for (begin, end), part in zip(marked[1], parts, strict=True):
            start, end = self._seam(whole[:begin], token_ids, after=True), self._seam(whole[:end], token_ids)
            start = max([start, *(after for before, after in given if before <= start < after)])
            if _CONTEXT not in part and start < end:
                spans.append((start, end))
        return spans or None

    def _watched(self, message: dict[str, Any], is_answer: bool) -> dict[str, Any]:
        """Put a word into what is not to be supervised, that shows where a template renders it."""
        content = message.get("content", "")
        if is_answer or not isinstance(content, str):
            return message
        if message["role"] == "assistant":
            return message | {"content": f"{content}{_CONTEXT}"}  # the end stays, where thoughts are dropped
        middle = len(content) // 2
        return message | {"content": f"{content[:middle]}{_OTHERS}{content[middle:]}"}

    def _marked_by_prefixes(self, messages: Messages, answers: list[int], whole: str, token_ids: list[int]) -> Spans:
        """Return spans of the answers that stand in the whole as they were written."""
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
                same = len(os.path.commonprefix([prompt, whole]))
                near = slice(max(0, same - 20), same + 20)
                raise ValueError(
                    f"the chat template of {self._name} does not let the answer be found: a prompt with "
                    f"{prompt[near]!r} reads {whole[near]!r} once it is answered. Mark the answers in the template "
                    "with {% generation %} ... {% endgeneration %}, or pass 'prompt' and 'completion' as texts"
                )
        return spans

    def answers_within(self, token_ids: Sequence[int]) -> list[int] | None:
        """Find the answers in a conversation that went through the template already.

        Returns 1 for each token of an answer, 0 for those of others, 2 for what the template gives and for the rest
        of a turn that began before; `None` where no turn of this template begins.
        """
        turn = self.tokenizer.chat_template and _turn(self.tokenizer, str(self.tokenizer.chat_template))
        header, ends = turn[:2] if turn else ((), set())
        starts = [place for place in range(len(token_ids)) if tuple(token_ids[place : place + len(header)]) == header]
        if not header or not starts:
            return None
        bos = self.tokenizer.bos_token_id
        begin = next((place for place, token in enumerate(token_ids) if token != bos and self.is_special(token)), 0)
        found = [2] * begin + [0] * (len(token_ids) - begin)
        for start in starts:
            place = start + len(header)
            while place < len(token_ids) and not self.tokenizer.decode([token_ids[place]]).strip():
                place += 1
            found[start:place] = [2] * (place - start)
            while place < len(token_ids) and (token_ids[place] != header[0] or not self.is_special(header[0])):
                found[place] = 1
                if token_ids[place] in ends:
                    break
                place += 1
        return found

    def refuse_rendered(self, token_ids: Sequence[int]) -> None:
        """Raise a `ValueError` if these look like turns of a template that has no tokens to tell them by."""
        turn = self.tokenizer.chat_template and _turn(self.tokenizer, str(self.tokenizer.chat_template))
        if not turn or turn[0] or not turn[3]:
            return
        before, said, _ = self.tokenizer.decode(token_ids).partition(turn[3])
        if said and turn[2] in before:
            raise ValueError(f"no tokens of {self._name}'s template tell who speaks: pass 'messages', or a loss_mask")

    def _seam(self, text: str, token_ids: list[int], after: bool = False) -> int:
        """Return how many tokens belong to a text that the whole begins with; one across the seam to neither side."""
        own = self.rendered_ids(text)
        return min(len(own) if after else len(os.path.commonprefix([own, token_ids])), len(token_ids))

    def _end_of_turn(self, token_ids: list[int], start: int, end: int) -> int:
        """Return where an answer ends: after its end-of-turn token, before the template's white space."""
        if token_ids[end : end + 1] == [self.tokenizer.eos_token_id] and token_ids[end - 1] != token_ids[end]:
            return end + 1  # marks that leave out the end
        cut = end
        while cut > start and not self.tokenizer.decode([token_ids[cut - 1]]).strip():
            cut -= 1
        return cut if cut > start and self.is_special(token_ids[cut - 1]) else end

    def is_special(self, token_id: int) -> bool:
        if token_id == self.tokenizer.eos_token_id:
            return True
        text = self.tokenizer.decode([token_id])
        return bool(text.strip()) and not self.tokenizer.decode([token_id], skip_special_tokens=True)


def _written_mark(tag: re.Match[str]) -> str:
    """Return a block that writes a mark, and treats white space around it as the tag does."""
    return f"{{%{tag[1]} if true %}}{_END if tag[2] else _BEGIN}{{% endif {tag[3]}%}}"


def _marks_in(marked: str) -> tuple[str, Spans]:
    """Return a text without the marks, and the places between each two."""
    text, spans, begin = "", [], None
    for piece in re.split(f"({_BEGIN}|{_END})", marked):
        if piece == _BEGIN:
            begin = len(text)
        elif piece == _END:
            spans += [] if begin is None else [(begin, len(text))]
            begin = None
        else:
            text += piece
    return text, spans


@functools.lru_cache(maxsize=8)
def _turn(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[tuple[int, ...], set[int], str, str] | None:
    """Return the tokens that a template begins an answer with, none if these tell nothing, those that end it, and the
    words that begin a question and an answer; `None` if it cannot be asked."""
    del template  # a tokenizer's may be changed
    chat, talk = Chat(tokenizer, None, {}), [("user", "asks"), ("assistant", "answers"), ("user", "adds")]
    messages: Messages = [{"role": role, "content": f"\ue000{said}\ue000"} for role, said in talk]
    try:
        asked, prompt = (chat.render(messages[:1], add_generation_prompt=given) for given in (False, True))
        first, between, after, _ = re.split("\ue000(?:asks|answers|adds)\ue000", chat.render(messages))
    except ValueError:  # refused, or not all of it rendered
        return None
    begun = between.removeprefix(asked.partition("asks\ue000")[2])
    header = os.path.commonprefix([prompt.removeprefix(asked), begun]).strip() or between.strip()
    question = os.path.commonprefix([first[::-1], after[::-1]])[::-1].strip()
    header_ids, ends = chat.rendered_ids(header), chat.rendered_ids(after.strip())[:1]
    if not any(map(chat.is_special, ends)) or not (len(header_ids) > 1 or any(map(chat.is_special, header_ids))):
        header_ids = []
    return tuple(header_ids), {*ends, tokenizer.eos_token_id}, question, header
