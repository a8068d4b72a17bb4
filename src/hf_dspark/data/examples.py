"""Examples of a data set, as trainers of this field take them, to tokens; those of the target are supervised."""

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..files import shortened
from .conversations import Chat, read_messages

MASK_COLUMNS = ("loss_mask", "assistant_masks", "completion_mask")
UNDERSTOOD = (
    "'messages' (also with 'tools' and 'chat_template_kwargs'), 'conversations', 'prompt' with 'completion' or "
    "'completion_ids', 'prompt_ids' with 'completion_ids', 'text', or 'input_ids', alone or with 'labels' or one of "
    + ", ".join(f"'{name}'" for name in MASK_COLUMNS)
)
IGNORED_LABEL = -100
STREAM_CHECK = 1000

Tokens = tuple[list[int], list[int]]  # ids, and ones where they are supervised


def tokenize_example(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Tokenise one example of a data set; only what the target writes is supervised.

    The form of an example is the first of these whose columns it has:

    - `input_ids` with `loss_mask`, `assistant_masks`, `completion_mask` or `labels` (-100 where there is no loss):
      taken as they are, without what an `attention_mask` leaves out.
    - `prompt_ids` or `prompt` with `completion_ids` (the lines of [`regenerate`]): the completion is supervised.
    - `messages` (or ShareGPT's `conversations`): the assistant's answers are supervised, see below.
    - `prompt` with `completion`: two texts, joined as they are with an end-of-sequence token, or two lists of
      messages, of which the answers in the completion are supervised.
    - `text`, or `input_ids` alone: everything is supervised.

    An example with `finished` false was cut by its length: no end-of-turn token is taught there. A conversation
    without an answer teaches nothing.

    Answers are found by the template's `{% generation %}` marks, or by rendering the conversation up to each answer.
    What the template gives at the beginning of an answer is not one of its tokens, marked or not. An unmarked answer
    that the template renders differently later on (Qwen3's drops earlier thinking) is context only: the target never
    wrote those tokens. Returns `input_ids` and `loss_mask`, of equal length, cut to `max_length`.
    """
    given = {name: value for name, value in example.items() if value is not None}
    form, finished = _form_of(given), given.get("finished", True)
    kwargs = dict(chat_template_kwargs or {}) | dict(given.get("chat_template_kwargs") or {})
    chat = Chat(tokenizer, given.get("tools"), kwargs)
    if form == "failed":
        token_ids, mask = [], []
    elif form == "tokens":
        token_ids, mask = _with_given_mask(given)
    elif form == "text":
        token_ids = chat.prompt_ids(given["text"])
        mask = [1] * len(token_ids)
    elif form == "messages":
        messages = read_messages(given.get("messages", given.get("conversations")))
        token_ids, mask = chat.mark_answers(messages, finished=finished)
    else:
        token_ids, mask = _prompt_and_completion(given, chat, finished)
    return {"input_ids": token_ids[:max_length], "loss_mask": mask[:max_length]}


def _prompt_and_completion(given: Mapping[str, Any], chat: Chat, finished: bool) -> Tokens:
    prompt = given["prompt_ids"] if "prompt_ids" in given else given["prompt"]
    if "prompt_ids" not in given and not isinstance(prompt, str):
        prompt = read_messages(prompt)
    if "completion_ids" in given:
        completion_ids = list(map(int, given["completion_ids"]))
    elif isinstance(prompt, str) != isinstance(given["completion"], str):
        raise ValueError(
            "prompt and completion must be two strings or two lists of messages, got "
            f"{type(given['prompt']).__name__} and {type(given['completion']).__name__}"
        )
    elif not isinstance(prompt, str):
        return chat.mark_answers(prompt + read_messages(given["completion"]), len(prompt), finished)
    else:
        completion_ids, end = chat.rendered_ids(given["completion"]), chat.tokenizer.eos_token_id
        if end is not None:
            completion_ids = completion_ids[: len(completion_ids) - (completion_ids[-1:] == [end])]
            completion_ids += [end] if finished else []
    prompt_ids = chat.prompt_ids(prompt)
    return prompt_ids + completion_ids, [0] * len(prompt_ids) + [1] * len(completion_ids)


def _form_of(columns: Collection[str]) -> str:
    has = set(columns)
    forms = {  # the first whose columns are there
        "tokens": "input_ids" in has and has.intersection((*MASK_COLUMNS, "labels")),
        "completion_ids": "completion_ids" in has and has & {"prompt_ids", "prompt"},
        "messages": has & {"messages", "conversations"},
        "completion": {"prompt", "completion"} <= has,
        "text": "text" in has,
        "input_ids": "input_ids" in has,
        "failed": "error" in has,  # a prompt whose regeneration failed
    }
    form = next((form for form, fits in forms.items() if fits), None)
    if form is None:
        raise ValueError(f"columns {sorted(has)} are not understood; needed are {UNDERSTOOD}")
    return "tokens" if form == "input_ids" else form


def _with_given_mask(example: Mapping[str, Any]) -> Tokens:
    token_ids = list(map(int, example["input_ids"]))
    names = ["loss_mask"] if "loss_mask" in example else (*MASK_COLUMNS, "labels")
    columns = {name: list(map(int, example[name])) for name in (*names, "attention_mask") if name in example}
    for name, column in columns.items():
        if len(column) != len(token_ids):
            raise ValueError(f"input_ids ({len(token_ids)} tokens) and {name} ({len(column)}) differ in length")
    for place, label in enumerate(columns.get("labels", ())):
        if label not in (token_ids[place], IGNORED_LABEL):
            raise ValueError(
                f"labels must be the token of their own place, or {IGNORED_LABEL} where there is no loss, got {label} "
                f"for the token {token_ids[place]} in place {place}: do not shift them"
            )
        columns["labels"][place] = label != IGNORED_LABEL
    kept = columns.pop("attention_mask", [1] * len(token_ids))
    mask = [int(all(column[place] for column in columns.values())) for place in range(len(token_ids))]
    return list(itertools.compress(token_ids, kept)), list(itertools.compress(mask, kept))


# ---- whole data sets


def prepare_examples(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    block_size: int,
    vocab_size: int,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> Any:
    """Tokenise a data set for [`DSparkTrainer`], and find out before training what is wrong with it.

    Examples in which no anchor fits (it needs two supervised tokens in succession) are left out with a warning. Of a
    stream only the first ones are looked at; the others are checked as they come, and left out silently. Returns
    `input_ids` and `loss_mask` of each: as a `datasets.Dataset` of one, a stream of a stream, a list otherwise.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"dataset holds several splits ({', '.join(map(str, dataset))}): pass one of them")
    reader = _Reader(tokenizer, vocab_size, max_length, chat_template_kwargs)
    datasets = sys.modules.get("datasets")  # imported if one of its objects was passed
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        columns, value = dataset.column_names, datasets.Value
        _form_of(columns)  # refuses unknown ones before any example is read
        types = {"input_ids": [value("int32")], "loss_mask": [value("int8")], "longest_run": value("int32")}
        options = {"with_indices": True, "num_proc": num_proc, "desc": "tokenising"}
        prepared = dataset.map(reader, remove_columns=columns, features=datasets.Features(types), **options)
        _check_runs(list(map(int, prepared["longest_run"])), block_size, max_length)
        return prepared.filter(_has_anchor, num_proc=num_proc, desc="choosing").remove_columns("longest_run")
    if isinstance(dataset, str) or not (hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)):
        raise ValueError(f"dataset must hold examples, that is dicts, got {shortened(dataset)}")
    is_stream = datasets is not None and isinstance(dataset, datasets.IterableDataset)
    if is_stream or isinstance(dataset, torch.utils.data.IterableDataset):
        columns = _check_stream(dataset, reader, block_size)
        if not is_stream:
            return _Stream(dataset, reader)
        stream = dataset.map(reader, with_indices=True, remove_columns=dataset.column_names or columns)
        return stream.filter(_has_anchor).remove_columns("longest_run")
    has_items_only = isinstance(dataset, Sized) and not isinstance(dataset, Iterable)
    examples = (dataset[index] for index in range(len(dataset))) if has_items_only else dataset
    read = [reader(example, index) for index, example in enumerate(examples)]
    _check_runs([example["longest_run"] for example in read], block_size, max_length)
    return list(_usable(read))


@dataclass(frozen=True)
class _Reader:
    """Tokenises examples one by one and checks them; can be sent to other processes."""

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_length: int | None
    chat_template_kwargs: Mapping[str, Any] | None

    def __call__(self, example: Any, index: int) -> dict[str, Any]:
        """Return ids, mask, and the longest run of supervised tokens."""
        if not isinstance(example, Mapping):
            raise ValueError(f"example {index} must be a dict, got {shortened(example)}")
        is_tokenised = "input_ids" in example or {"prompt_ids", "completion_ids"} <= example.keys()
        if self.tokenizer is None and not is_tokenised:
            raise ValueError("the examples are not tokenised, and there is no tokenizer: pass the target's one")
        try:
            tokens = tokenize_example(example, self.tokenizer, self.max_length, self.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"example {index}: {error}") from error
        if wrong := [token for token in tokens["input_ids"] if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"example {index}: token id {wrong[0]} is outside of the target's vocabulary (vocab_size "
                f"{self.vocab_size}): use the target's own tokenizer"
            )
        runs = [len(list(run)) for value, run in itertools.groupby(tokens["loss_mask"]) if value]
        return tokens | {"longest_run": max(runs, default=0)}


class _Stream(torch.utils.data.IterableDataset):
    """The usable examples of a torch stream."""

    def __init__(self, stream: Iterable[Any], reader: _Reader) -> None:
        self._stream, self._reader = stream, reader

    def set_epoch(self, epoch: int) -> None:
        """Let the stream be shuffled anew, if it can be."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return _usable(map(self._reader, self._stream, itertools.count()))


def _check_stream(stream: Iterable[Any], reader: _Reader, block_size: int) -> list[str]:
    """Check the first examples of a stream; return the columns of the first one."""
    runs, columns = [], []
    for index, example in enumerate(itertools.islice(stream, STREAM_CHECK)):
        runs.append(reader(example, index)["longest_run"])
        columns = columns or list(example)
        if runs[-1] > block_size:
            break
    _check_runs(runs, block_size, reader.max_length, "the first ")
    return columns


def _check_runs(runs: Sequence[int], block_size: int, max_length: int | None, which: str = "") -> None:
    """Refuse data that cannot train a block; warn of examples that are left out."""
    cut, longer = ("", "") if max_length is None else (f" within max_length={max_length}", " or raise max_length")
    if not runs:
        raise ValueError("the data set is empty: pass at least one example")
    longest = max(runs)
    if longest == 0:
        raise ValueError(
            f"none of {which}{len(runs)} examples has a supervised token{cut}: there must be assistant messages, "
            f"completions, or ones in the loss mask{longer}"
        )
    if longest <= block_size:
        raise ValueError(
            f"the longest answer in {which}{len(runs)} examples has {longest} supervised tokens in succession{cut}, "
            f"but a block of {block_size} needs {block_size + 1} (the anchor, too), so its last slots would never be "
            f"trained: use longer answers{longer}"
            + (f", or a draft with block_size={longest - 1}" if longest > 1 else "")
        )
    count = Counter(min(run, 2) for run in runs)
    if count[0] or count[1]:
        warnings.warn(
            f"{count[0] + count[1]} of {which}{len(runs)} examples are left out, because an anchor needs two "
            f"supervised tokens in succession: {count[0]} without a supervised token{cut} (a regeneration that failed "
            f"has none), {count[1]} with a single one",
            stacklevel=3,
        )


def _has_anchor(example: Mapping[str, Any]) -> bool:
    return example["longest_run"] > 1


def _usable(examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, list[int]]]:
    for example in filter(_has_anchor, examples):
        del example["longest_run"]
        yield example
