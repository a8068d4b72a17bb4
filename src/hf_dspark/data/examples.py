"""Examples of a data set, as trainers of this field take them, to tokens; those of the target are supervised."""

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..files import shortened
from .conversations import Chat
from .spellings import MASKS, answer_of, canonical, conversation, integers, is_row_wanted, template_arguments

IGNORED_LABEL = -100
STREAM_CHECK = 1000
# Columns that say by a number of tokens where an answer begins.
_BEGINS = re.compile(
    r"(prompt|source|src|context|question|query|instruction|user)_(len|length|size|tokens)$"
    r"|(answer|response|completion|target)_start"
)

Tokens = tuple[list[int], list[int]]  # ids, and ones where they are supervised


def tokenize_example(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Tokenise one example of a data set; only what the target writes is supervised.

    The form of an example is the first of these whose columns it has; the manual lists their other names:

    - `input_ids` with [`MASKS`] (1 where there is a loss) or `labels` (-100 where there is none): taken as they are,
      without what an `attention_mask` leaves out.
    - `prompt_ids` or `prompt` with `completion_ids` (the lines of [`regenerate`]): the completion is supervised.
    - `messages`: the assistant's answers are, and an `answer` or `completion` to what they end in.
    - `prompt` with `completion`: two texts, joined as they are with an end-of-sequence token, or two lists of
      messages, of which the answers in the completion are supervised.
    - `question` or `prompt` with `answer`: what the user says, and what the assistant does.
    - `text`, or `input_ids` alone: everything is; of a conversation that went through the template, the answers.

    A mask that would train on what others than the target say is refused. An example with `finished` false was cut by
    its length: no end-of-turn token is taught there. Answers are found by the template's `{% generation %}` marks, or
    by rendering the conversation up to each answer. What the template gives at the beginning of an answer is not one
    of its tokens. An unmarked answer that the template renders differently later on (Qwen3's drops earlier thinking)
    is context only: the target never wrote those tokens.

    Returns:
        `dict`: `input_ids` and `loss_mask`, of equal length, cut to `max_length`.
    """
    given = canonical(example)
    tools, kwargs = template_arguments(given)
    chat = Chat(tokenizer, tools, dict(chat_template_kwargs or {}) | kwargs)
    read = _reader_of(given.keys())
    alone = [name for name in MASKS if isinstance(given.get(name), list)]
    if alone and read not in (_tokenised, _prompt_and_ids):
        raise ValueError(f"{alone[0]} is of no use without the input_ids or completion_ids that it is about")
    token_ids, mask = read(given, chat)
    mask = mask if is_row_wanted(given) else [0] * len(mask)
    return {"input_ids": token_ids[:max_length], "loss_mask": mask[:max_length]}


def _tokenised(given: Mapping[str, Any], chat: Chat) -> Tokens:
    token_ids = integers("input_ids", given["input_ids"])
    columns = {name: integers(name, given[name]) for name in (*MASKS, "labels", "attention_mask") if name in given}
    for name, column in columns.items():
        if len(column) != len(token_ids):
            raise ValueError(f"input_ids ({len(token_ids)} tokens) and {name} ({len(column)}) differ in length")
        if name != "labels" and not {*column} <= {0, 1}:
            raise ValueError(f"{name} must be zeros and ones, got {shortened(given[name])}")
    for place, label in enumerate(columns.get("labels", ())):
        if label not in (token_ids[place], IGNORED_LABEL):
            expected = f"{token_ids[place]}, the token there, or {IGNORED_LABEL}"
            raise ValueError(f"the label in place {place} must be {expected}, got {label}: do not shift labels")
    kept = columns.pop("attention_mask", [1] * len(token_ids))
    if not columns and (name := next(filter(_BEGINS.search, given), None)):
        cure = "pass prompt_ids and completion_ids, or a loss_mask"
        raise ValueError(f"{name}: {shortened(given[name])} is not read, and all would be trained on: {cure}")
    _refuse_packed(given, kept)
    mask = marked(columns, len(token_ids))
    token_ids, mask = list(itertools.compress(token_ids, kept)), list(itertools.compress(mask, kept))
    return token_ids, _within_answers(token_ids, mask, _answers(token_ids, given, chat), chat, " and ".join(columns))


def marked(columns: Mapping[str, Sequence[int]], count: int) -> list[int]:
    """Return 1 for each of so many tokens that all masks mark and no label ignores, and 0 for the others."""
    labels = [label != IGNORED_LABEL for label in columns.get("labels", ())]
    flags = [labels if name == "labels" else column for name, column in columns.items()]
    return [int(all(column[place] for column in flags)) for place in range(count)]


def _answers(token_ids: list[int], given: Mapping[str, Any], chat: Chat) -> list[int] | None:
    """Return where the answers are, by the template's tokens or by the messages beside; `None` if neither tells."""
    answers = None if chat.tokenizer is None else chat.answers_within(token_ids)
    if answers is not None or "messages" not in given or not getattr(chat.tokenizer, "chat_template", None):
        return answers
    try:
        said = [message["role"] for message in conversation(given, "messages")[1:]].count("assistant")
        ids, mask = _messages(given, chat)
    except ValueError:  # of a template that cannot tell
        return None
    is_whole = said == sum(value for value, _ in itertools.groupby(mask))
    is_same = ids[: len(token_ids)] == token_ids[: len(ids)]
    return [*mask, *[0] * len(token_ids)][: len(token_ids)] if is_whole and is_same else None


def _within_answers(
    token_ids: list[int], mask: list[int], answers: list[int] | None, chat: Chat, names: str
) -> list[int]:
    """Return a mask without what the template gives; columns that claim what others say are refused."""
    if answers is None:
        if not names and chat.tokenizer is not None:
            chat.refuse_rendered(token_ids)
        return mask
    claimed = [token for token, flag, answer in zip(token_ids, mask, answers, strict=True) if flag and not answer]
    if names and (words := chat.tokenizer.decode(claimed, skip_special_tokens=True).strip()):
        raise ValueError(f"{names} would train on {shortened(words)}, beyond what the assistant says: pass 'messages'")
    return [int(flag and answer == 1) for flag, answer in zip(mask, answers, strict=True)]


def _refuse_packed(given: Mapping[str, Any], kept: list[int]) -> None:
    positions = list(itertools.compress(integers("position_ids", given.get("position_ids", ())), kept))
    lengths = given.get("seq_lengths", given.get("seq_lens", ()))
    if len(lengths) > 1 or any(after <= before for before, after in itertools.pairwise(positions)):
        raise ValueError("a row holds several documents: pass each as a row of its own, and packing=True joins them")


def _prompt_and_ids(given: Mapping[str, Any], chat: Chat) -> Tokens:
    prompt, completion_ids = given.get("prompt"), integers("completion_ids", given["completion_ids"])
    if "prompt_ids" in given:
        prompt_ids = integers("prompt_ids", given["prompt_ids"])
    else:
        prompt_ids = chat.prompt_ids(prompt if isinstance(prompt, str) else conversation(given, "prompt"))
    mask = [1] * len(completion_ids)
    for name in {*MASKS} & given.keys():  # what tools wrote in the completion
        own = integers(name, given[name])
        if len(own) not in (len(mask), len(prompt_ids) + len(mask)) or not {*own} <= {0, 1}:
            raise ValueError(f"{name} must be zeros and ones for the {len(mask)} completion_ids, got {len(own)}")
        mask = list(map(min, mask, own[-len(mask) :]))
    return prompt_ids + completion_ids, [0] * len(prompt_ids) + mask


def _messages(given: Mapping[str, Any], chat: Chat) -> Tokens:
    talk = conversation(given, "messages")
    said = next((name for name in ("completion", "answer") if name in given), None)
    if said is not None and talk and talk[-1]["role"] != "assistant":
        talk += answer_of(given, said)
    return chat.mark_answers(talk, finished=given.get("finished", True))


def _prompt_and_completion(given: Mapping[str, Any], chat: Chat) -> Tokens:
    asked, said = ("prompt", "completion") if {"prompt", "completion"} <= given.keys() else ("question", "answer")
    asked = asked if asked in given else "prompt"
    is_chat = said == "answer" and bool(chat.tokenizer.chat_template)
    prompt = conversation(given, asked) if is_chat else given[asked]
    completion, finished = answer_of(given, said, as_text=not is_chat), given.get("finished", True)
    if isinstance(prompt, str) != isinstance(completion, str):
        kinds = " and ".join(type(each).__name__ for each in (prompt, completion))
        raise ValueError(f"{asked} and {said} must be two strings or two lists of messages, got {kinds}")
    if not isinstance(prompt, str):
        prompt = conversation(given, asked)
        return chat.mark_answers(prompt + completion, len(prompt), finished)
    if name := next((name for name in ("system", "history", "reasoning_content") if given.get(name)), None):
        raise ValueError(f"{name!r} stands beside a prompt that is a text: pass 'messages', or a 'question'")
    prompt_ids, end = chat.prompt_ids(prompt), chat.tokenizer.eos_token_id
    completion_ids, whole = chat.rendered_ids(completion), chat.prompt_ids(prompt + completion)
    if whole[: len(prompt_ids)] == prompt_ids:  # no word begins there: some tokenizers begin every text with a space
        completion_ids = whole[len(prompt_ids) :]
    if end is not None:
        completion_ids = completion_ids[: len(completion_ids) - (completion_ids[-1:] == [end])]
        completion_ids += [end] if finished else []
    return prompt_ids + completion_ids, [0] * len(prompt_ids) + [1] * len(completion_ids)


def _text(given: Mapping[str, Any], chat: Chat) -> Tokens:
    if not isinstance(given["text"], str):
        raise ValueError(f"text must be a string, got {shortened(given['text'])}")
    if "role" in given:
        raise ValueError("a text with a role is one message: gather those of a conversation in a column 'messages'")
    token_ids = chat.text_ids(given["text"])
    return token_ids, _within_answers(token_ids, [1] * len(token_ids), chat.answers_within(token_ids), chat, "")


Reader = Callable[[Mapping[str, Any], Chat], Tokens]
# Of an example, the first form counts of which it has a column of each group.
FORMS: tuple[tuple[tuple[tuple[str, ...], ...], Reader], ...] = (
    ((("input_ids",), (*MASKS, "labels")), _tokenised),
    ((("completion_ids",), ("prompt_ids", "prompt")), _prompt_and_ids),
    ((("messages",),), _messages),
    ((("prompt",), ("completion",)), _prompt_and_completion),
    ((("question", "prompt"), ("answer",)), _prompt_and_completion),
    ((("text",),), _text),
    ((("input_ids",),), _tokenised),
    ((("error",),), lambda given, chat: ([], [])),  # a prompt whose regeneration failed
)


def _reader_of(columns: Set[str]) -> Reader:
    for groups, reader in FORMS:
        if not any(columns.isdisjoint(group) for group in groups):
            return reader
    forms = "; ".join(" with ".join(" or ".join(group) for group in groups) for groups, _ in FORMS[:-1])
    raise ValueError(f"columns {sorted(columns)} are not understood; needed are {forms}")


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
    if isinstance(dataset, str) or not (hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)):
        raise ValueError(f"dataset must hold examples, that is dicts, got {shortened(dataset)}")
    reader = _ExampleReader(tokenizer, vocab_size, max_length, chat_template_kwargs)
    datasets = sys.modules.get("datasets")  # imported if one of its objects was passed
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        # Refuses unknown columns before any example is read.
        _reader_of(canonical(dict.fromkeys(dataset.column_names, [])).keys())
        int8, int32 = datasets.Value("int8"), datasets.Value("int32")
        types = datasets.Features({"input_ids": [int32], "loss_mask": [int8], "longest_run": int32})
        options = {"remove_columns": dataset.column_names, "features": types, "num_proc": num_proc}
        read = dataset.map(reader, with_indices=True, desc="tokenising", **options)
        _check_runs(list(map(int, read["longest_run"])), block_size, max_length)
        return read.filter(_has_anchor, num_proc=num_proc, desc="choosing").remove_columns("longest_run")
    if isinstance(dataset, (torch.utils.data.IterableDataset, getattr(datasets, "IterableDataset", ()))):
        runs = []  # of the first examples, up to one that trains a whole block
        for example in map(reader, itertools.islice(dataset, STREAM_CHECK), itertools.count()):
            runs.append(example["longest_run"])
            if runs[-1] > block_size:
                break
        _check_runs(runs, block_size, max_length, "the first ")
        return Stream(dataset, reader.usable)
    if isinstance(dataset, Sized) and not isinstance(dataset, Iterable):
        dataset = map(dataset.__getitem__, range(len(dataset)))
    examples = list(map(reader, dataset, itertools.count()))
    _check_runs([example["longest_run"] for example in examples], block_size, max_length)
    return [_without_run(example) for example in examples if _has_anchor(example)]


@dataclass(frozen=True)
class _ExampleReader:
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
            limit = f"the target's vocabulary of {self.vocab_size}: use its own tokenizer"
            raise ValueError(f"example {index}: token id {wrong[0]} is outside of {limit}")
        runs = [len(list(run)) for value, run in itertools.groupby(tokens["loss_mask"]) if value]
        return tokens | {"longest_run": max(runs, default=0)}

    def usable(self, examples: Iterable[Any]) -> Iterator[dict[str, list[int]]]:
        return map(_without_run, filter(_has_anchor, map(self, examples, itertools.count())))


class Stream(torch.utils.data.IterableDataset):
    """What a function makes of the rows of a stream, as they come."""

    def __init__(self, rows: Iterable[Any], change: Callable[[Iterable[Any]], Iterator[dict[str, list[int]]]]) -> None:
        self._rows, self._change = rows, change

    def set_epoch(self, epoch: int) -> None:
        """Let the stream be shuffled anew, if it can be."""
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self._change(self._rows)


def _check_runs(runs: Sequence[int], block_size: int, max_length: int | None, which: str = "") -> None:
    """Refuse data that cannot train a block; warn of examples that are left out."""
    cut, longer = ("", "") if max_length is None else (f" within max_length={max_length}", " or raise max_length")
    if not runs:
        raise ValueError("the data set is empty (as rows[200:] of 100 rows are): pass at least one example")
    longest, which = max(runs), f"{which}{len(runs)} examples"
    if longest == 0:
        needed = "assistant messages, completions, or ones in the loss mask"
        raise ValueError(f"none of {which} has a supervised token{cut}: there must be {needed}{longer}")
    if longest <= block_size:
        raise ValueError(
            f"the longest answer in {which} has {longest} supervised tokens in succession{cut}, a block of "
            f"{block_size} needs {block_size + 1} (the anchor, too): use longer answers{longer}"
            + (f", or a draft with block_size={longest - 1}" if longest > 1 else "")
        )
    none, single = runs.count(0), runs.count(1)
    if none or single:
        warnings.warn(
            f"{none + single} of {which} are left out, because an anchor needs two supervised tokens in succession: "
            f"{none} without a supervised token{cut} (a regeneration that failed has none), {single} with one",
            stacklevel=3,
        )


def _has_anchor(example: Mapping[str, Any]) -> bool:
    return example["longest_run"] > 1


def _without_run(example: dict[str, Any]) -> dict[str, list[int]]:
    del example["longest_run"]
    return example
