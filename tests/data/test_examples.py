"""From conversations to supervised tokens, under templates that help, hinder and mislead."""

import itertools
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_dspark.data.examples import prepare_examples, tokenize_example

WORDS = "<pad> <bos> <eos> <|im_start|> <|im_end|> ? what is up not much".split()

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ m.content }}<|im_end|>\n{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>\n"
)
# Like Qwen3's: the thinking of earlier turns is dropped.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOSTILE = "{{ messages | length }} messages\n" + CHATML
STRICT = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML


def make_tokenizer(template: str | None = CHATML, **kwargs) -> PreTrainedTokenizerFast:
    """Letters to ids, with the usual special tokens; white space is tokens, too."""
    letters = [chr(code) for code in range(32, 127)] + ["\n", "\n\n"]
    vocab = {token: index for index, token in enumerate([*WORDS[:5], *letters])}
    inner = Tokenizer(models.BPE(vocab, merges=[("\n", "\n")]))
    inner.decoder = decoders.Fuse()
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<|im_end|>"}
    specials["extra_special_tokens"] = ["<|im_start|>", "<eos>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **(specials | kwargs))
    tokenizer.chat_template = template
    return tokenizer


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def supervised(row: dict[str, list[int]], tokenizer) -> list[str]:
    """Return the supervised stretches as text."""
    assert len(row["input_ids"]) == len(row["loss_mask"]) and set(row["loss_mask"]) <= {0, 1}
    stretches = itertools.groupby(zip(row["input_ids"], row["loss_mask"], strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for mask, run in stretches if mask]


TWO_TURNS = [message("user", "what is up"), message("assistant", "not much"), message("user", "is it?"),
             message("assistant", "think so")]  # fmt: skip
ENDED = ["not much<|im_end|>", "think so<|im_end|>"]


def test_marks_around_what_the_prompt_gives_mark_the_answer_alone():
    """SmolLM3's template marks the header of the turn, too, and the empty thought."""
    header = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    marked = MARKED.replace(
        header, "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n<think></think>"
    )
    marked = marked.replace("{% else %}{{ m", "{% else %}<|im_start|>{{ m.role }}\n{{ m")
    tokenizer = make_tokenizer(
        marked.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think></think>{% endif %}")
    )
    for row in ({"messages": TWO_TURNS}, {"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:]}):
        assert supervised(tokenize_example(row, tokenizer), tokenizer) == ENDED


def test_nulls_that_a_table_adds_are_not_trained_on():
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"city": "here"}}]}
    table = call | {"tool_calls": [{"name": "look", "arguments": {"city": "here", "zip": None}}]}
    rows = [tokenize_example({"messages": [TWO_TURNS[0], each]}, tokenizer) for each in (call, table)]
    assert rows[0] == rows[1] and "here" in supervised(rows[0], tokenizer)[0]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END, FORGETFUL, STRICT])
def test_answers_and_their_ends_are_supervised_without_the_templates_white_space(template):
    tokenizer = make_tokenizer(template)
    row = tokenize_example({"messages": TWO_TURNS}, tokenizer)
    assert supervised(row, tokenizer) == ENDED
    assert row["input_ids"] == tokenizer.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]
    assert row == tokenize_example({"messages": [*TWO_TURNS, message("user", "?")]}, tokenizer)


ONCE = TWO_TURNS[:2]
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
)
SHAREGPT = {"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "so"}]}


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (CHATML, {"messages": [message("user", "what"), message("assistant", "  so \n ")]}, ["  so \n <|im_end|>"]),
        # The template's line break and the answer's merge into one token that no answer begins with.
        (CHATML, {"messages": [message("user", "what"), message("assistant", "\nso")]}, ["so<|im_end|>"]),
        # Without an end-of-turn token nothing says that trailing white space is the template's.
        (WITHOUT_END, {"messages": TWO_TURNS}, ["not much\n", "think so\n"]),
        (CHATML, {"messages": [message("user", "what")]}, []),
        (CHATML, {"messages": [message("assistant", "what is up")]}, []),
        (CHATML, {"messages": TWO_TURNS, "finished": False}, [ENDED[0], "think so"]),
        (CHATML, {"prompt": "what", "completion": "so", "finished": False}, ["so"]),
        (CHATML, SHAREGPT, ["so<|im_end|>"]),
    ],
)  # fmt: skip
def test_supervised_stretches_are_what_the_model_would_write(template, row, expected):
    tokenizer = make_tokenizer(template)
    assert supervised(tokenize_example(row, tokenizer), tokenizer) == expected


def test_answers_that_the_template_renders_otherwise_later_are_context_only():
    tokenizer = make_tokenizer(FORGETFUL)
    thoughtful = [TWO_TURNS[0], message("assistant", "<think>hm</think>not much"), *TWO_TURNS[2:]]
    row = tokenize_example({"messages": thoughtful}, tokenizer)
    assert supervised(row, tokenizer) == ENDED[1:]
    assert "hm" not in tokenizer.decode(row["input_ids"])
    alone = tokenize_example({"messages": thoughtful[:2]}, tokenizer)
    assert supervised(alone, tokenizer) == ["<think>hm</think>not much<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (HOSTILE, {"messages": ONCE}, r"(?s)a/model.*1 messages.*2 messages.*{% generation %}.*'prompt'"),
        (STRICT, {"messages": [message("tool", "2"), ONCE[1]]}, "refuses this conversation: no tools here"),
        (None, {"messages": TWO_TURNS}, "no chat template.*tokenizer.chat_template"),
        (CHATML, {"prompt_ids": [1], "answer": "b", "messages": None},
         r"\['answer', 'prompt_ids'\] are not understood; needed are .*messages"),
        (CHATML, {"prompt": ONCE[:1], "completion": "not much"},
         "two strings or two lists of messages, got list and str"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_refused_with_the_cure(template, row, message):
    with pytest.raises(ValueError, match=message):
        tokenize_example(row, make_tokenizer(template, name_or_path="a/model"))


def test_template_arguments_come_from_the_caller_and_from_the_row():
    tokenizer = make_tokenizer()
    messages = [message("user", "what"), message("assistant", "<think></think>so")]
    thinking = tokenize_example({"messages": messages}, tokenizer)
    assert supervised(thinking, tokenizer) == ["<think></think>so<|im_end|>"]
    not_thinking = tokenize_example({"messages": messages}, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert supervised(not_thinking, tokenizer) == ["so<|im_end|>"]
    row = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True, "other": None}}
    assert tokenize_example(row, tokenizer, chat_template_kwargs={"enable_thinking": False}) == thinking
    tokenizer = make_tokenizer("{% if tools %}{{ tools[0].name }}\n{% endif %}" + CHATML)
    for tools in ([{"name": "add", "none": None}], '[{"name": "add"}]'):
        row = tokenize_example({"messages": TWO_TURNS, "tools": tools}, tokenizer)
        assert tokenizer.decode(row["input_ids"]).startswith("add\n") and supervised(row, tokenizer) == ENDED


@pytest.fixture
def starting_tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids; sequences start with <bos>."""
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="?"
    )


def test_only_the_completion_and_its_end_are_supervised(starting_tokenizer):
    ids = starting_tokenizer.convert_tokens_to_ids("<bos> what is up not much <eos>".split())
    expected = {"input_ids": ids, "loss_mask": [0, 0, 0, 0, 1, 1, 1]}
    for completion in ("not much", "not much <eos>"):
        assert tokenize_example({"prompt": "what is up", "completion": completion}, starting_tokenizer) == expected
    for answer in ({"completion": "not much"}, {"completion_ids": [1, 1]}):
        read = tokenize_example({"prompt": "what is up"} | answer, starting_tokenizer, max_length=5)
        assert len(read["input_ids"]) == 5 and read["loss_mask"] == [0, 0, 0, 0, 1]
    assert tokenize_example({"text": "what is up"}, starting_tokenizer)["loss_mask"] == [1, 1, 1, 1]


def test_completion_ids_are_taken_as_they_are(starting_tokenizer):
    for prompt in ({"prompt": "what is"}, {"prompt_ids": [1, 6, 7], "prompt": "ignored", "text": "ignored"}):
        row = tokenize_example(prompt | {"completion_ids": torch.tensor([7, 8])}, starting_tokenizer)
        assert row == {"input_ids": [1, 6, 7, 7, 8], "loss_mask": [0, 0, 0, 1, 1]}
    tokenizer = make_tokenizer()
    row = tokenize_example({"prompt": ONCE[:1], "completion_ids": [9, 4]}, tokenizer)
    rendered = tokenizer.apply_chat_template(ONCE[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert row == {"input_ids": [*rendered, 9, 4], "loss_mask": [0] * len(rendered) + [1, 1]}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_of_messages_are_context_only(template):
    tokenizer = make_tokenizer(template)
    row = tokenize_example({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, tokenizer)
    assert supervised(row, tokenizer) == ENDED[1:]
    assert row["input_ids"] == tokenize_example({"messages": TWO_TURNS}, tokenizer)["input_ids"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        *(({name: [False, True, True, False], "text": "ignored"}, ([3, 4, 5, 6], [0, 1, 1, 0]))
          for name in ("loss_mask", "assistant_masks", "completion_mask")),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 0]}, ([3, 4, 5, 6], [0, 1, 0, 0])),
        ({"labels": [-100, 4, 5, -100]}, ([3, 4, 5, 6], [0, 1, 1, 0])),
        ({"labels": torch.tensor([-100, 4, 5, 6]), "completion_mask": [0, 0, 1, 1]}, ([3, 4, 5, 6], [0, 0, 1, 1])),
        ({}, ([3, 4, 5, 6], [1, 1, 1, 1])),
        ({"attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 5, 6]}, ([4, 5, 6], [0, 1, 1])),  # padding is dropped
        ({"attention_mask": [1, 1, 0, 0]}, ([3, 4], [1, 1])),
    ],
)  # fmt: skip
def test_tokenised_rows_are_read_as_other_trainers_take_them(columns, expected):
    row = tokenize_example({"input_ids": torch.tensor([3, 4, 5, 6])} | columns, make_tokenizer())
    assert (row["input_ids"], row["loss_mask"]) == expected


CHATS = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:1]}, {"messages": TWO_TURNS[:2]}]


class Mapped(torch.utils.data.Dataset):
    """As torch describes them: a length and items, and no end."""

    def __len__(self):
        return len(CHATS)

    def __getitem__(self, index):
        return CHATS[index % len(CHATS)]


class Streamed(torch.utils.data.IterableDataset):
    """Rows that an iterator gives, counted as they are read."""

    def __init__(self, rows=CHATS):
        self.rows, self.read = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


def table(rows=CHATS):
    return pytest.importorskip("datasets").Dataset.from_list([row | {"other": 1.5} for row in rows])


DATASETS = {
    "list": lambda: CHATS, "generator": lambda: (row for row in CHATS), "torch": Mapped, "torch stream": Streamed,
    "table": table, "stream": lambda: table().to_iterable_dataset(),
    "stream of unknown columns": lambda: table().to_iterable_dataset().map(lambda row: row),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATASETS)
def test_every_kind_of_dataset_gives_the_same_rows(kind):
    tokenizer = make_tokenizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = prepare_examples(DATASETS[kind](), tokenizer, 4, 200)
    expected = [tokenize_example(CHATS[index], tokenizer) for index in (0, 2)]
    assert list(prepared) == expected
    assert list(prepared) == expected, "a second epoch"
    told = [str(each.message) for each in caught if "left out" in str(each.message)]
    assert len(told) == (0 if "stream" in kind else 1)
    assert all("1 of 3 examples are left out" in each and "1 without a supervised token" in each for each in told)
    if kind == "table":
        assert prepared.column_names == ["input_ids", "loss_mask"]


def test_tables_are_prepared_by_several_processes_and_in_any_row_order():
    with pytest.warns(UserWarning, match="2 of 6 examples"):
        prepared = prepare_examples(table().repeat(2), make_tokenizer(), 4, 200, num_proc=2)
    assert len(prepared) == 4
    # A first batch without a single token must not decide the type of the column.
    with pytest.warns(UserWarning, match="1001 of 1002"):
        assert len(prepare_examples(table(CHATS[1:2] * 1001 + CHATS[:1]), make_tokenizer(), 4, 200)) == 1


def test_streams_are_read_and_checked_as_they_are_needed():
    endless = Streamed(itertools.repeat(CHATS[0]))
    next(iter(prepare_examples(endless, make_tokenizer(), 4, 200)))
    assert endless.read <= 3
    rows = iter(
        prepare_examples(Streamed([CHATS[0], {"input_ids": [1, 2], "loss_mask": [1]}]), make_tokenizer(), 4, 200)
    )
    next(rows)
    with pytest.raises(ValueError, match=r"example 1: input_ids \(2 tokens\) and loss_mask \(1\) differ in length"):
        next(rows)


def test_kept_rows_are_those_with_an_anchor():
    masks = [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": mask} for mask in masks]
    with pytest.warns(UserWarning, match="2 of 4 examples.*1 without a supervised token.*, 1 with one"):
        kept = prepare_examples(rows, make_tokenizer(), 2, 200)
    assert [row["loss_mask"] for row in kept] == [masks[1], masks[3]]
    row = {"prompt": "a", "prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "text": "b", "finished": True}
    with pytest.warns(UserWarning, match="1 without a supervised token .a regeneration that failed has none"):
        assert len(prepare_examples([row, {"prompt_ids": [5], "error": "too long"}], make_tokenizer(), 2, 200)) == 1
    (prepared,) = prepare_examples([row], None, block_size=2, vocab_size=20)
    assert prepared == {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}


@pytest.mark.parametrize("kind", ["list", "table", "stream"])
def test_data_in_which_nothing_is_supervised_are_refused(kind):
    rows = CHATS[1:2] if kind == "list" else table(CHATS[1:2])
    with pytest.raises(ValueError, match="none of .*1 examples has a supervised token"):
        prepare_examples(rows.to_iterable_dataset() if kind == "stream" else rows, make_tokenizer(), 4, 200)


def test_data_too_short_for_a_block_are_refused_with_the_longest_found():
    rows = [{"input_ids": [5] * 9, "loss_mask": [0, 1, 1, 1, 1, 0, 1, 1, 1]}]
    assert len(prepare_examples(rows, make_tokenizer(), 3, 200)) == 1
    with pytest.raises(ValueError, match="has 4 supervised tokens.*block of 4 needs 5.*block_size=3"):
        prepare_examples(rows, make_tokenizer(), 4, 200)
    with pytest.raises(ValueError, match="within max_length=3.*raise max_length"):
        prepare_examples(rows, make_tokenizer(), 3, 200, max_length=3)


def test_things_that_are_no_dataset_are_refused():
    datasets = pytest.importorskip("datasets")
    foreign = [{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}] * 2 + [{"input_ids": [1, 64], "loss_mask": [1, 1]}]
    for wrong, words in (
        ({"train": CHATS}, "several splits"), ([], "empty"), (["text"], "example 0 must be a dict"),
        ("text", "must hold examples"), (5, "must hold examples"),
        (datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"]}),
         r"columns \['hypothesis', 'premise'\] are not understood"),
        (foreign, "example 2: token id 64.*vocabulary of 64.*own tokenizer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            prepare_examples(wrong, make_tokenizer(), 2, 64)


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_rows_that_are_left_out_are_counted_in_a_data_set_of_every_format(form):
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": mask} for mask in ([1, 1, 1, 1], [0, 0, 0, 0])]
    data = pytest.importorskip("datasets").Dataset.from_list(rows).with_format(form)
    with pytest.warns(UserWarning, match="1 of 2 examples are left out, .*: 1 without a supervised token"):
        assert len(prepare_examples(data, None, block_size=2, vocab_size=9)) == 1
