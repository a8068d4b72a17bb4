"""Marks of templates and masks of rows are checked: what is supervised are the assistant's words alone."""

import json

import pytest
import torch

from hf_dspark.data.examples import prepare_examples, tokenize_example
from tests.data.test_examples import CHATML, ENDED, MARKED, TWO_TURNS, make_tokenizer, message, supervised

GREETING = [message("assistant", "hello"), *TWO_TURNS]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}]}
CALLING = [TWO_TURNS[0], CALL, message("tool", "grey"), TWO_TURNS[1]]
ANSWER = "{{ m.content }}<|im_end|>\n"
HEADER = "<|im_start|>{{ m.role }}\n"


def marked(body: str) -> str:
    """Return a template whose messages are written by `body`."""
    return (
        "{% for m in messages %}"
        + body
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


BY_ROLE = HEADER + "{% if m.role == 'assistant' %}{MARKED}{% else %}" + ANSWER + "{% endif %}"
MARKS = {
    "as they should": BY_ROLE.replace("{MARKED}", "{% generation %}" + ANSWER + "{% endgeneration %}"),
    "that end before the end of the turn": BY_ROLE.replace(
        "{MARKED}", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    ),
    "with dashes": BY_ROLE.replace(
        "{MARKED}", "{%- generation -%}\n  {{ m.content }}<|im_end|>{{ '\n' }}\n  {%- endgeneration -%}\n"
    ),
    "with the header": (
        "{% if m.role == 'assistant' %}{% generation %}" + HEADER + ANSWER + "{% endgeneration %}{% else %}"
        + HEADER + ANSWER + "{% endif %}"
    ),
    "of everybody": "{% generation %}" + HEADER + ANSWER + "{% endgeneration %}",
    "of the user": HEADER + "{% if m.role == 'user' %}{% generation %}" + ANSWER + "{% endgeneration %}{% else %}"
    + ANSWER + "{% endif %}",
    "in a macro": (
        "{% macro turn(m) %}" + HEADER + "{% generation %}" + ANSWER + "{% endgeneration %}{% endmacro %}"
        "{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}" + HEADER + ANSWER + "{% endif %}"
    ),
    "that a filter trims": HEADER + "{% set text %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}  "
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endset %}{{ text | trim }}<|im_end|>\n",
    "that hold nothing": BY_ROLE.replace("{MARKED}", "{% generation %}{% endgeneration %}" + ANSWER),
    "of whole pairs": (
        "{% if loop.index0 is odd %}{% set u = messages[loop.index0 - 1] %}{% generation %}<|im_start|>user\n"
        "{{ u.content }}<|im_end|>\n" + HEADER + ANSWER + "{% endgeneration %}{% elif loop.last %}" + HEADER + ANSWER
        + "{% endif %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("row", ["messages", "prompt and completion", "greeting", "weighted"])
@pytest.mark.filterwarnings("ignore:the {% generation %} marks")
def test_marks_of_every_kind_leave_the_answers_alone(kind, row):
    tokenizer = make_tokenizer(marked(MARKS[kind]))
    if row == "greeting" and kind == "of whole pairs":
        pytest.skip("such a template begins with the user")
    rows = {
        "messages": {"messages": TWO_TURNS},
        "prompt and completion": {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]},
        "greeting": {"messages": GREETING},
        "weighted": {"messages": [TWO_TURNS[0], TWO_TURNS[1] | {"weight": 0}, *TWO_TURNS[2:]]},
    }
    expected = ENDED[1:] if row in ("prompt and completion", "weighted") else ENDED
    found = tokenize_example(rows[row], tokenizer)
    assert supervised(found, tokenizer) == expected
    messages = GREETING if row == "greeting" else TWO_TURNS
    assert found["input_ids"] == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


def test_marks_that_hold_the_users_words_are_named():
    tokenizer = make_tokenizer(marked(MARKS["of everybody"]), name_or_path="a/model")
    with pytest.warns(UserWarning, match="marks in the chat template of a/model hold what the user says"):
        tokenize_example({"messages": TWO_TURNS}, tokenizer)


@pytest.mark.parametrize("end", ["\n", " ", "\n\n", "<|im_end|>", "<pad>", ""])
@pytest.mark.parametrize("template", ["marks", "no marks"])
def test_answers_may_end_and_begin_with_anything(template, end):
    """huggingface/transformers#47325: its mask runs on to the end after white space, and after token 0."""
    body = BY_ROLE.replace("{MARKED}", "{% generation %}{{ m.content }}" + end + "{% endgeneration %}")
    body = body.replace("generation", "with" if template == "no marks" else "generation")
    tokenizer = make_tokenizer(marked(body))
    for answer in ("not much", " not much ", "<pad>not much", "\n\nnot"):
        talk = [TWO_TURNS[0], message("assistant", answer), *TWO_TURNS[2:]]
        row = tokenize_example({"messages": talk}, tokenizer)
        found = "".join(supervised(row, tokenizer))
        assert "is it" not in found and "what" not in found and "user" not in found
        assert all(word in found for word in (answer.strip().removeprefix("<pad>"), "think so"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_calls_are_answers_and_results_of_tools_are_not(template):
    calls = "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}"
    template = "{% if tools %}tools{% endif %}" + template.replace("{{ m.content }}", "{{ m.content }}" + calls)
    tokenizer = make_tokenizer(template)
    found = supervised(tokenize_example({"messages": CALLING, "tools": TOOLS}, tokenizer), tokenizer)
    assert len(found) == 2 and "look" in found[0] and "sky" in found[0] and found[1] == ENDED[0]
    assert not any("grey" in part or "what" in part for part in found)


# ---- masks that rows bring

RENDERED = make_tokenizer().apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]
RIGHT = tokenize_example({"messages": TWO_TURNS}, make_tokenizer())
MASK_NAMES = (
    "loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask", "train_mask", "label_mask",
)  # fmt: skip


def as_column(name: str, mask: list[int]) -> dict[str, list[int]]:
    if name == "labels":
        return {name: [token if flag else -100 for token, flag in zip(RENDERED, mask, strict=True)]}
    return {name: mask}


@pytest.mark.parametrize("name", [*MASK_NAMES, "labels"])
def test_a_mask_that_claims_what_others_say_is_refused(name):
    tokenizer = make_tokenizer()
    assert tokenize_example({"input_ids": RENDERED} | as_column(name, RIGHT["loss_mask"]), tokenizer) == RIGHT
    for wrong in ([1] * len(RENDERED), [0] * 14 + [1] * 4 + [0] * (len(RENDERED) - 18)):
        with pytest.raises(ValueError, match=f"{name} would train on '.*', beyond what the assistant says"):
            tokenize_example({"input_ids": RENDERED} | as_column(name, wrong), tokenizer)
    # The header of a turn and the template's white space are no one's words: they are left out.
    start = RENDERED.index(tokenizer.convert_tokens_to_ids("<|im_start|>"), 5)
    wide = [int(flag or start <= at <= start + 10) for at, flag in enumerate(RIGHT["loss_mask"])]
    assert tokenize_example({"input_ids": RENDERED} | as_column(name, wide), tokenizer) == RIGHT


def test_a_mask_is_compared_with_the_messages_beside_it():
    """Where nothing but the messages tell turns apart; so is the mask of transformers itself."""
    plain = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}"
    tokenizer = make_tokenizer(plain + "{% else %}> {{ m.content }}\n{% endif %}{% endfor %}", eos_token=None)
    right = tokenize_example({"messages": TWO_TURNS}, tokenizer)
    row = {"messages": TWO_TURNS} | right
    assert tokenize_example(row, tokenizer) == right
    for wrong in ([1] * len(right["input_ids"]), [0] * 4 + [1] * 3 + [0] * (len(right["input_ids"]) - 7)):
        with pytest.raises(ValueError, match="assistant_masks would train on '.*', beyond what the assistant says"):
            tokenize_example(
                {"messages": TWO_TURNS, "input_ids": right["input_ids"], "assistant_masks": wrong}, tokenizer
            )
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert tokenize_example(row, tokenizer) == right
    other = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}  # of another rendering: nothing to compare
    assert tokenize_example({"messages": TWO_TURNS} | other, tokenizer) == other


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"], "input_ids": None}, "text must be a string, got"),
        ({"loss_mask": [1, 1, 1]}, r"input_ids \(4 tokens\) and loss_mask \(3\) differ in length"),
        ({"attention_mask": [1]}, r"input_ids \(4 tokens\) and attention_mask \(1\) differ"),
        ({"loss_mask": [0, 0.5, 1, 1]}, "loss_mask must be a list of whole numbers"),
        ({"loss_mask": [0, 2, 1, 1]}, "loss_mask must be zeros and ones"),
        ({"attention_mask": [1, 1, 2, 2]}, "attention_mask must be zeros and ones"),
        ({"position_ids": [0, 1, 0, 1]}, "several documents: pass each as a row of its own, and packing=True"),
        ({"seq_lengths": [2, 2]}, "several documents"),
        ({"input_ids": [1, 2.5]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": "abc"}, "input_ids must not be a text, unless it is JSON"),
        ({"labels": [-1, 4, 5, 6]}, "the label in place 0 must be .*, got -1"),
        ({"labels": [4, 5, 6, -100]}, "do not shift labels"),
    ],
)
def test_masks_that_are_none_are_refused_by_name(columns, words):
    with pytest.raises(ValueError, match=f"example 0: .*{words}"):
        prepare_examples([{"input_ids": [3, 4, 5, 6]} | columns], make_tokenizer(), 2, 200)


@pytest.mark.parametrize("form", [list, torch.tensor, json.dumps, lambda ids: torch.tensor([ids]), lambda ids: [ids]])
def test_tokens_come_in_every_container(form):
    row = {"input_ids": form([3, 4, 5, 6]), "loss_mask": form([0, 1, 1, 1]), "position_ids": form([0, 1, 2, 3])}
    read = tokenize_example(row, make_tokenizer())
    assert read == {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 1, 1, 1]}


@pytest.mark.parametrize("name", ["completion_mask", "tool_mask", "response_mask"])
def test_a_completion_may_hold_what_a_tool_wrote(name):
    row = {"prompt_ids": [3, 4], "completion_ids": [5, 6, 7]}
    for mask in ([1, 0, 1], [0, 0, 1, 0, 1]):
        assert tokenize_example(row | {name: mask}, None)["loss_mask"] == [0, 0, 1, 0, 1]
    with pytest.raises(ValueError, match=f"{name} must be zeros and ones for the 3 completion_ids, got 4"):
        tokenize_example(row | {name: [1, 1, 1, 1]}, None)


@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_a_conversation_that_went_through_the_template_trains_its_answers_alone(column):
    tokenizer = make_tokenizer()
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert tokenize_example({column: text if column == "text" else RENDERED}, tokenizer) == RIGHT
    vicuna = "{% for m in messages %}{{ ('USER: ' if m.role == 'user' else ' ASSISTANT: ') + m.content }}" + (
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ ' ASSISTANT:' if add_generation_prompt }}"
    )
    other = make_tokenizer(vicuna)
    said = other.apply_chat_template(TWO_TURNS, tokenize=False)
    row = {column: said if column == "text" else other.apply_chat_template(TWO_TURNS)["input_ids"]}
    assert supervised(tokenize_example(row, other), other) == ENDED
    endless = make_tokenizer("{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
                             "{{ '<assistant> ' if add_generation_prompt }}")  # fmt: skip
    said = endless.apply_chat_template(TWO_TURNS, tokenize=False)
    ids = endless(said)["input_ids"]
    with pytest.raises(ValueError, match="no tokens of .* tell who speaks: pass 'messages'"):
        tokenize_example({column: said if column == "text" else ids}, endless)
    given = {"input_ids": ids, "loss_mask": [place % 2 for place in range(len(ids))]}
    assert tokenize_example(given, endless) == given
    assert 0 not in tokenize_example({"text": "what <assistant> is"}, endless)["loss_mask"]
    plain = "what <|im_end|> is"
    row = {column: plain if column == "text" else tokenizer(plain)["input_ids"]}
    assert 0 not in tokenize_example(row, tokenizer)["loss_mask"]


@pytest.mark.parametrize("max_length", range(1, len(RENDERED) + 2, 7))
def test_cut_rows_keep_ids_and_mask_together(max_length):
    row = tokenize_example({"messages": TWO_TURNS}, make_tokenizer(), max_length)
    assert row == {name: values[:max_length] for name, values in RIGHT.items()}
