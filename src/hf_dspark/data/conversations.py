"""From conversations, as TRL's trainers take them, to rows of which only tokens of the target are supervised."""

import contextlib
import itertools
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..files import shortened

MASK_COLUMNS = ("loss_mask", "assistant_masks", "completion_mask")
UNDERSTOOD = (
    "'messages' (also with 'tools' and 'chat_template_kwargs'), 'conversations', 'prompt' with 'completion' or "
    "'completion_ids', 'prompt_ids' with 'completion_ids', 'text', or 'input_ids', alone or with 'labels' or one of "
    + ", ".join(f"'{name}'" for name in MASK_COLUMNS)
)
IGNORED_LABEL = -100
ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant"}
STREAM_CHECK = 1000
FAILED = -1  # instead of the longest run: a prompt whose regeneration failed

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]  # of tokens, first and after the last


def tokenize_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Tokenise one row of a data set; only what the target writes is supervised.

    The form of a row is the first of these whose columns it has:

    - `input_ids` with `loss_mask`, `assistant_masks`, `completion_mask` or `labels` (-100 where there is no loss):
      taken as they are, without what an `attention_mask` leaves out.
    - `prompt_ids` or `prompt` with `completion_ids` (the lines of [`regenerate`]): the completion is supervised.
    - `messages` (or ShareGPT's `conversations`): the assistant's answers are supervised, see below.
    - `prompt` with `completion`: two texts, joined as they are with an end-of-sequence token, or two lists of
      messages, of which the answers in the completion are supervised.
    - `text`, or `input_ids` alone: everything is supervised.

    A row with `finished` false was cut by its length: no end-of-turn token is taught there. A conversation without an
    answer teaches nothing.

    Answers are found by the template's `{% generation %}` marks, or by rendering the conversation up to each answer.
    What the template gives at the beginning of an answer is not one of its tokens, marked or not. An unmarked answer
    that the template renders differently later on (Qwen3's drops earlier thinking) is context only: the target never
    wrote those tokens. Returns lists of equal length, cut to `max_length`.
    """
    given = {name: value for name, value in row.items() if value is not None}
    form = _form_of(given)
    kwargs = dict(chat_template_kwargs or {}) | dict(given.get("chat_template_kwargs") or {})
    chat = Chat(tokenizer, given.get("tools"), kwargs)
    finished, prompt = given.get("finished", True), given.get("prompt")
    if form == "failed":
        token_ids, mask = [], []
    elif form == "tokens":
        token_ids, mask = _with_given_mask(given)
    elif form == "completion_ids":
        if "prompt_ids" in given:
            prompt_ids = list(map(int, given["prompt_ids"]))
        elif isinstance(prompt, str):
            prompt_ids = tokenizer(prompt)["input_ids"]
        else:
            prompt_ids = chat.tokens(chat.render(read_messages(prompt), add_generation_prompt=True))
        token_ids, mask = _joined(prompt_ids, list(map(int, given["completion_ids"])))
    elif form == "text":
        token_ids, mask = _joined([], tokenizer(given["text"])["input_ids"])
    elif form == "messages":
        messages = read_messages(given.get("messages", given.get("conversations")))
        token_ids, mask = chat.mark_answers(messages, finished=finished)
    elif isinstance(prompt, str) and isinstance(given["completion"], str):
        completion_ids = tokenizer(given["completion"], add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if completion_ids[-1:] == end:
            completion_ids = completion_ids[: len(completion_ids) - len(end)]
        token_ids, mask = _joined(tokenizer(prompt)["input_ids"], completion_ids + (end if finished else []))
    elif isinstance(prompt, str) or isinstance(given["completion"], str):
        raise ValueError(
            "prompt and completion must be two strings or two lists of messages, got "
            f"{type(prompt).__name__} and {type(given['completion']).__name__}"
        )
    else:
        context = read_messages(prompt)
        token_ids, mask = chat.mark_answers(context + read_messages(given["completion"]), len(context), finished)
    return {"input_ids": token_ids[:max_length], "loss_mask": mask[:max_length]}


def prepare_rows(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    vocab_size: int,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> Any:
    """Tokenise a data set for [`DSparkTrainer`], and find out before training what is wrong with it.

    Rows in which no anchor fits (it needs two supervised tokens in succession) are left out with a warning. Of a
    stream only the first rows are looked at; the others are checked as they come, and left out silently. Returns rows
    of `input_ids` and `loss_mask`: a `datasets.Dataset` of one, a stream of a stream, a list otherwise.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"dataset holds several splits ({', '.join(map(str, dataset))}): pass one of them")
    reader = _RowReader(tokenizer, vocab_size, max_length, chat_template_kwargs)
    datasets = sys.modules.get("datasets")  # imported if one of its objects was passed
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        columns, value = dataset.column_names, datasets.Value
        _form_of(columns)  # refuses unknown ones before any row is read
        types = {"input_ids": [value("int32")], "loss_mask": [value("int8")], "longest_run": value("int32")}
        options = {"with_indices": True, "num_proc": num_proc, "desc": "tokenising"}
        prepared = dataset.map(reader, remove_columns=columns, features=datasets.Features(types), **options)
        _check_runs(list(map(int, prepared["longest_run"])), block_size, max_length)
        return prepared.filter(_has_anchor, num_proc=num_proc, desc="choosing").remove_columns("longest_run")
    if datasets is not None and isinstance(dataset, datasets.IterableDataset):
        columns = _check_stream(dataset, reader, block_size)
        stream = dataset.map(reader, with_indices=True, remove_columns=dataset.column_names or columns)
        return stream.filter(_has_anchor).remove_columns("longest_run")
    if isinstance(dataset, torch.utils.data.IterableDataset):
        _check_stream(dataset, reader, block_size)
        return _StreamedRows(dataset, reader)
    rows = [reader(row, index) for index, row in enumerate(_iterate(dataset))]
    _check_runs([row["longest_run"] for row in rows], block_size, max_length)
    return list(_usable(rows))


def read_messages(messages: Any) -> Messages:
    """Return messages as chat templates take them, from those or ShareGPT's `from` and `value`."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {shortened(messages)}")
    read = []
    for place, message in enumerate(messages):
        if isinstance(message, Mapping):
            message = _without_nones(message)  # tables add nulls, to the arguments of tool calls, too
            if "role" not in message and {"from", "value"} <= message.keys():
                role = ROLES_OF_SHAREGPT.get(message["from"], message["from"])
                message = {"role": role, "content": message["value"]}
            says = message.keys() & {"content", "tool_calls", "reasoning_content", "thinking"}
            if says and isinstance(message.get("role"), str):
                read.append(message)
                continue
        raise ValueError(f"message {place} must be a dict with 'role' and 'content', got {shortened(message)}")
    return read


class Chat:
    """A tokenizer's chat template with the tools and arguments of one row."""

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
                "tokenizer.chat_template to the one its model was trained with, or pass rows of 'prompt' and "
                "'completion' texts"
            )
        options = {"tokenize": False, "tools": self._tools} | self._kwargs | kwargs
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template of {self._name} refuses this conversation: {error}") from error

    def tokens(self, text: str) -> list[int]:
        """Tokenise what was rendered; the template wrote the special tokens itself."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def mark_answers(self, messages: Messages, first: int = 0, finished: bool = True) -> tuple[list[int], list[int]]:
        """Return ids and mask of a conversation; answers before message `first` are context."""
        first_answer = max(first, 1)
        answers = [place for place in range(first_answer, len(messages)) if messages[place]["role"] == "assistant"]
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
        return _common_prefix(self.tokens(self.render(messages, **kwargs)), token_ids)

    def _marked_by_prefixes(self, messages: Messages, answers: list[int]) -> tuple[list[int], Spans]:
        """Return ids and spans of the answers that stand in the whole as they were written."""
        whole = self.render(messages)
        token_ids = self.tokens(whole)
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
                    "with {% generation %} ... {% endgeneration %}, or pass rows of 'prompt' and 'completion' texts"
                )
        return token_ids, spans

    def _seam(self, text: str, token_ids: list[int], after: bool = False) -> int:
        """Return how many tokens belong to a text that the whole begins with; one across the seam to neither side."""
        own = self.tokens(text)
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


@dataclass(frozen=True)
class _RowReader:
    """Tokenises rows one by one and checks them; can be sent to other processes."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_length: int | None
    chat_template_kwargs: Mapping[str, Any] | None

    def __call__(self, row: Any, index: int) -> dict[str, Any]:
        """Return ids, mask, and the longest run of supervised tokens."""
        if not isinstance(row, Mapping):
            raise ValueError(f"row {index} must be a dict, got {shortened(row)}")
        is_tokenised = "input_ids" in row or {"prompt_ids", "completion_ids"} <= row.keys()
        if self.tokenizer is None and not is_tokenised:
            raise ValueError("the rows are not tokenised, and there is no tokenizer: pass the target's one")
        try:
            tokens = tokenize_row(row, self.tokenizer, self.max_length, self.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        if wrong := [token for token in tokens["input_ids"] if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"row {index}: token id {wrong[0]} is outside of the target's vocabulary (vocab_size "
                f"{self.vocab_size}): use the target's own tokenizer"
            )
        runs = [len(list(run)) for value, run in itertools.groupby(tokens["loss_mask"]) if value]
        failed = not tokens["input_ids"] and row.get("error") is not None
        return tokens | {"longest_run": FAILED if failed else max(runs, default=0)}


class _StreamedRows(torch.utils.data.IterableDataset):
    """The usable rows of a torch stream."""

    def __init__(self, stream: Iterable[Any], reader: _RowReader) -> None:
        self._stream, self._reader = stream, reader

    def set_epoch(self, epoch: int) -> None:
        """Let the stream be shuffled anew, if it can be."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return _usable(map(self._reader, self._stream, itertools.count()))


def _check_stream(stream: Iterable[Any], reader: _RowReader, block_size: int) -> list[str]:
    """Check the first rows of a stream; return the columns of the first one."""
    runs, columns = [], []
    for index, row in enumerate(itertools.islice(stream, STREAM_CHECK)):
        runs.append(reader(row, index)["longest_run"])
        columns = columns or list(row)
        if runs[-1] > block_size:
            break
    _check_runs(runs, block_size, reader.max_length, "the first ")
    return columns


def _check_runs(runs: Sequence[int], block_size: int, max_length: int | None, which: str = "") -> None:
    """Refuse data that cannot train a block; warn of rows that are left out."""
    cut = "" if max_length is None else f" within max_length={max_length}"
    longest = max(runs, default=None)
    if longest is None:
        raise ValueError("the data set is empty: pass at least one row")
    if longest <= 0:
        raise ValueError(
            f"none of {which}{len(runs)} rows has a supervised token{cut}: there must be assistant messages, "
            "completions, or ones in the loss mask" + ("" if max_length is None else "; or raise max_length")
        )
    if longest <= block_size:
        raise ValueError(
            f"the longest answer in {which}{len(runs)} rows has {longest} supervised tokens in succession{cut}, but a "
            f"block of {block_size} needs {block_size + 1} (the anchor, too), so its last slots would never be "
            "trained: use longer answers"
            + ("" if max_length is None else ", raise max_length")
            + (f", or a draft with block_size={longest - 1}" if longest > 1 else "")
        )
    count = Counter(min(run, 2) for run in runs)
    reasons = {FAILED: "whose regeneration failed", 0: f"without a supervised token{cut}", 1: "with a single one"}
    parts = [f"{count[run]} {reason}" for run, reason in reasons.items() if count[run]]
    if parts:
        warnings.warn(
            f"{len(runs) - count[2]} of {which}{len(runs)} rows are left out, because an anchor needs two supervised "
            f"tokens in succession: {', '.join(parts)}",
            stacklevel=3,
        )


def _form_of(columns: Collection[str]) -> str:
    has = set(columns)
    if "input_ids" in has and has.intersection((*MASK_COLUMNS, "labels")):
        return "tokens"
    if "completion_ids" in has and has & {"prompt_ids", "prompt"}:
        return "completion_ids"
    if has & {"messages", "conversations"}:
        return "messages"
    if {"prompt", "completion"} <= has:
        return "completion"
    if "text" in has:
        return "text"
    if "input_ids" in has:
        return "tokens"
    if "error" in has:  # a prompt whose regeneration failed
        return "failed"
    raise ValueError(f"columns {sorted(has)} are not understood; needed are {UNDERSTOOD}")


def _with_given_mask(row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    token_ids = list(map(int, row["input_ids"]))
    names = ["loss_mask"] if "loss_mask" in row else [name for name in (*MASK_COLUMNS, "labels") if name in row]
    columns = {name: list(map(int, row[name])) for name in (*names, "attention_mask") if name in row}
    for name, column in columns.items():
        if len(column) != len(token_ids):
            raise ValueError(f"input_ids ({len(token_ids)} tokens) and {name} ({len(column)}) differ in length")
    if "labels" in columns:
        columns["labels"] = [_has_loss(*place) for place in enumerate(zip(token_ids, columns["labels"], strict=True))]
    kept = columns.pop("attention_mask", [1] * len(token_ids))
    mask = [int(all(column[place] for column in columns.values())) for place in range(len(token_ids))]
    return list(itertools.compress(token_ids, kept)), list(itertools.compress(mask, kept))


def _has_loss(place: int, token_and_label: tuple[int, int]) -> bool:
    token, label = token_and_label
    if label not in (token, IGNORED_LABEL):
        raise ValueError(
            f"labels must be the token of their own place, or {IGNORED_LABEL} where there is no loss, got {label} for "
            f"the token {token} in place {place}: do not shift them"
        )
    return label == token


def _joined(prompt_ids: list[int], completion_ids: list[int]) -> tuple[list[int], list[int]]:
    return prompt_ids + completion_ids, [0] * len(prompt_ids) + [1] * len(completion_ids)


def _iterate(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, str) or not (hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)):
        raise ValueError(f"dataset must hold rows, that is dicts, got {shortened(dataset)}")
    if isinstance(dataset, Sized) and not isinstance(dataset, Iterable):
        return (dataset[index] for index in range(len(dataset)))
    return iter(dataset)


def _has_anchor(row: Mapping[str, Any]) -> bool:
    return row["longest_run"] > 1


def _usable(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, list[int]]]:
    for row in filter(_has_anchor, rows):
        del row["longest_run"]
        yield row


def _without_nones(value: Any) -> Any:
    """Drop the `None`s that tables put into dicts with different keys."""
    if isinstance(value, Mapping):
        return {name: _without_nones(inner) for name, inner in value.items() if inner is not None}
    return [_without_nones(inner) for inner in value] if isinstance(value, list | tuple) else value


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences share from the beginning."""
    return len(os.path.commonprefix([first, second]))
