"""Conversations, questions and wishes in the spellings of this field: read alike by every door, or refused by name."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_dspark.data.conversations import Chat
from hf_dspark.data.examples import prepare_examples, tokenize_example
from hf_dspark.data.prompts import Prompt, as_chat, read_prompt, read_prompts, token_ids
from hf_dspark.data.spellings import COLUMNS
from tests.data.test_examples import CHATML, ENDED, TWO_TURNS, make_tokenizer, message, supervised

ASKED, SAID = TWO_TURNS[:2]
CALLS = "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson if tools }}" + CHATML.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
LOOK = {"name": "look", "arguments": {"at": "sky"}}
LOOKING = {"role": "assistant", "tool_calls": [{"type": "function", "function": LOOK}]}
CALLING = [ASKED, LOOKING, message("tool", "grey"), SAID]
SPEAKERS = (
    ("human", "gpt"), ("user", "assistant"), ("Human", "chatgpt"), ("prompter", "bing"), ("user", "bard"),
    ("User", "Assistant"), ("human", "model"), ("user", "bot"), ("user", "chatbot"), ("user", "ai"), ("user", "gpt\n"),
)  # fmt: skip


def said_by(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"from": user, "value": ASKED["content"]}, {"from": assistant, "value": SAID["content"]}]


def parts(text: str, kind: str = "text") -> list[dict[str, str | None]]:
    return [{"type": kind, "text": text[:2], "image_url": None}, {"type": kind, "text": text[2:]}]


ONE_TURN = {
    **{f"column {name}": {name: [ASKED, SAID]} for name in ("messages", *COLUMNS["messages"])},
    **{f"from {user} and {gpt}": {"conversations": said_by(user, gpt)} for user, gpt in SPEAKERS},
    "other keys beside": {"messages": [ASKED | {"id": 1, "name": None}, SAID | {"tool_calls": None, "weight": None}]},
    "roles of ShareGPT in messages": {"messages": [ASKED | {"role": "human"}, SAID | {"role": "gpt"}]},
    "parts": {"messages": [message("user", parts(ASKED["content"])), message("assistant", parts(SAID["content"]))]},
    "parts of the Responses API": {
        "messages": [message("user", parts(ASKED["content"], "input_text")),
                     message("assistant", parts(SAID["content"], "output_text"))]
    },
    "parts of Gemini": {
        "messages": [{"role": "user", "parts": [{"text": ASKED["content"]}]},
                     {"role": "model", "parts": [{"text": SAID["content"]}]}]
    },
    "texts of OpenAssistant": {"messages": [{"role": "prompter", "text": ASKED["content"]},
                                            {"role": "assistant", "text": SAID["content"]}]},
    "JSON in a table": {"messages": json.dumps([ASKED, SAID])},
    "an array": {"messages": np.array([ASKED, SAID], dtype=object)},
    "columns, as datasets gives sequences": {
        "messages": {"role": ["user", "assistant"], "content": [ASKED["content"], SAID["content"]]}
    },
    "prompt and completion": {"prompt": [ASKED], "completion": [SAID]},
    "prompt and chosen": {"prompt": [ASKED], "chosen": [SAID], "rejected": [message("assistant", "no")]},
    "messages and a chosen one": {"conversations": said_by("human", "gpt")[:1], "chosen": said_by("human", "gpt")[1]},
    "prompt and a chosen message": {"prompt": [ASKED], "chosen": SAID, "rejected": message("assistant", "no")},
    "messages and completion": {"messages": [ASKED], "completion": [SAID]},
    **{f"messages and {said}": {"messages": [ASKED], said: SAID["content"]} for said in COLUMNS["answer"]},
    "a copy under another name": {"query": ASKED["content"], "question": ASKED["content"], "problem": "",
                                  "answer": "", "response": SAID["content"], "output": SAID["content"]},
    "a whole conversation is chosen": {"prompt": "what", "chosen": [ASKED, SAID], "rejected": [ASKED]},
    "chosen alone": {"chosen": [ASKED, SAID], "rejected": [ASKED]},
    **{f"{asked} and {said}": {asked: ASKED["content"], said: SAID["content"]}
       for asked in ("question", *COLUMNS["question"], "prompt") for said in ("answer", *COLUMNS["answer"])},
    "prompt of messages and response": {"prompt": [ASKED], "response": SAID["content"]},
    "instruction without input": {"instruction": ASKED["content"], "input": "", "output": SAID["content"]},
    "nulls of other rows": {"messages": None, "prompt": None, "input_ids": None, "question": ASKED["content"],
                            "answer": SAID["content"], "images": None, "tools": None, "weight": None},
    "wishes that change nothing": {"messages": [ASKED | {"weight": 0}, SAID | {"weight": 1.0, "train": True}],
                                   "train_on_inputs": False, "weight": 1, "mask_prompt": True, "images": []},
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spelling", ONE_TURN)
def test_one_turn_is_read_alike_in_every_spelling(spelling):
    tokenizer = make_tokenizer()
    expected = tokenize_example({"messages": [ASKED, SAID]}, tokenizer)
    assert supervised(expected, tokenizer) == ENDED[:1]
    assert tokenize_example(ONE_TURN[spelling], tokenizer) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spelling", [name for name in ONE_TURN if "chosen" not in name and name != "prompt of"])
def test_prompts_are_read_from_the_same_rows(spelling):
    tokenizer = make_tokenizer()
    prompt = as_chat(read_prompt(ONE_TURN[spelling]), tokenizer)
    assert token_ids(prompt, tokenizer) == token_ids(Prompt([ASKED]), tokenizer)


@pytest.mark.parametrize("asked", ["instruction", "question", "prompt"])
@pytest.mark.parametrize("more", ["input", "context"])
def test_what_stands_beside_a_question_is_read_below_it(asked, more):
    tokenizer = make_tokenizer()
    row = tokenize_example({asked: "is", more: "it?", "answer": SAID["content"]}, tokenizer)
    assert row == tokenize_example({"messages": [message("user", "is\n\nit?"), SAID]}, tokenizer)


@pytest.mark.parametrize("name", ["question", "answer", "completion"])
def test_columns_of_one_meaning_that_disagree_are_refused_by_name(name):
    row = {"question": "q", "answer": "42"} if name != "completion" else {"prompt": "q", "completion": "42"}
    for other in set(COLUMNS[name]) - {"input"}:
        with pytest.raises(ValueError, match=f"'{name}' is .*, but '{other}' is 'more': drop the column"):
            tokenize_example(row | {other: "more"}, make_tokenizer())
        if name == "question":
            with pytest.raises(ValueError, match="drop the column"):
                read_prompt(row | {other: "more"})
        else:
            assert read_prompt(row | {other: "more"}).content  # of no concern to a prompt
    with pytest.raises(ValueError, match="answer must be a text or messages, got 42"):
        tokenize_example({"question": "q", "answer": 42}, make_tokenizer())


def test_thoughts_beside_an_answer_are_part_of_it():
    tokenizer = make_tokenizer(CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}"))
    for asked in ({"question": "q"}, {"messages": [ASKED]}):
        row = tokenize_example(asked | {"reasoning_content": "hm, ", "answer": "so"}, tokenizer)
        assert supervised(row, tokenizer) == ["hm, so<|im_end|>"]
    with pytest.raises(ValueError, match="'reasoning_content' stands beside a prompt that is a text"):
        tokenize_example({"prompt": "q", "completion": "so", "reasoning_content": "hm"}, tokenizer)


def test_a_message_of_a_tree_is_no_text_to_train_on():
    with pytest.raises(ValueError, match="a text with a role is one message"):
        tokenize_example({"text": "what is up", "role": "prompter", "parent_id": None}, make_tokenizer())


SYSTEM = message("system", "be brief")
IN_CONTEXT = {
    "system": {"system": "be brief", "messages": TWO_TURNS},
    "system_prompt": {"system_prompt": "be brief", "conversations": TWO_TURNS},
    "one of its own": {"system": "not this", "messages": [SYSTEM, *TWO_TURNS]},
    "history": {"system": "be brief", "history": [["what is up", "not much"]], "query": "is it?",
                "response": "think so"},
    "prompt of messages": {"system": "be brief", "prompt": TWO_TURNS[:3], "response": "think so"},
    "instruction and input": {"messages": None, "system": "be brief", "history": [["what is up", "not much"]],
                              "instruction": "is", "input": "it?", "output": "think so"},
    "prompt and input": {"system": "be brief", "history": '[["what is up", "not much"]]',
                         "prompt": "is", "input": "it?", "output": "think so"},
}  # fmt: skip


@pytest.mark.parametrize("kind", IN_CONTEXT)
def test_system_prompts_and_histories_stand_before_the_conversation(kind):
    tokenizer, talk = make_tokenizer(), [SYSTEM, *TWO_TURNS]
    if kind.endswith("and input"):
        talk[3] = message("user", "is\n\nit?")
    row = tokenize_example(IN_CONTEXT[kind], tokenizer)
    assert row["input_ids"] == tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    prompt = as_chat(read_prompt(IN_CONTEXT[kind]), tokenizer)
    assert token_ids(prompt, tokenizer) == token_ids(Prompt(talk[:4]), tokenizer)
    with pytest.raises(ValueError, match="'system' stands beside a prompt that is a text"):
        tokenize_example({"system": "be brief", "prompt": "a", "completion": "b"}, tokenizer)


OF_TOOLS = {
    "objects": CALLING,
    "arguments in JSON, content null": [
        ASKED, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {
            "name": "look", "arguments": '{"at": "sky"}'}}]}, *CALLING[2:]],
    "calls in JSON": [ASKED, {"role": "assistant", "tool_calls": json.dumps(CALLING[1]["tool_calls"])}, *CALLING[2:]],
    "one call, as there was once": [ASKED, {"role": "assistant", "function_call": LOOK}, *CALLING[2:]],
    "LLaMA-Factory's": [
        {"from": "human", "value": ASKED["content"]}, {"from": "function_call", "value": json.dumps(LOOK)},
        {"from": "observation", "value": "grey"}, {"from": "gpt", "value": SAID["content"]}],
    "Llama's names": [ASKED, {"role": "assistant", "tool_calls": [{"name": "look", "parameters": {"at": "sky"}}]},
                      message("ipython", "grey"), SAID],
    "Anthropic's names": [ASKED, {"role": "assistant", "tool_calls": [{"name": "look", "input": {"at": "sky"}}]},
                          message("tool_result", "grey"), SAID],
    "functions": [ASKED, {"role": "assistant", "function_call": LOOK}, message("function", "grey"), SAID],
    "ms-swift's": [ASKED, message("tool_call", json.dumps(LOOK)), message("tool_response", "grey"), SAID],
}  # fmt: skip


@pytest.mark.parametrize("spelling", OF_TOOLS)
def test_calls_of_tools_are_read_alike_in_every_spelling(spelling):
    tokenizer = make_tokenizer(WITH_TOOLS)
    tools = {"tools": [{"name": "look"}]}
    row = tokenize_example({"messages": OF_TOOLS[spelling]} | tools, tokenizer)
    assert row == tokenize_example({"messages": CALLING} | tools, tokenizer)
    assert supervised(row, tokenizer) == ['<call>{"name": "look", "arguments": {"at": "sky"}}<|im_end|>', ENDED[0]]


def test_several_calls_in_succession_are_one_turn():
    talk = [
        ASKED,
        message("assistant", "well"),
        *[message("tool_call", json.dumps(LOOK))] * 2,
        message("tool", "a"),
        SAID,
    ]
    tokenizer = make_tokenizer(WITH_TOOLS)
    first, _ = supervised(tokenize_example({"messages": talk}, tokenizer), tokenizer)
    assert first.startswith("well<call>") and first.count("<call>") == 2


TOOLS = {
    "a list": {"tools": [{"type": "function", "function": {"name": "look"}}]},
    "JSON": {"tools": '[{"type": "function", "function": {"name": "look", "default": null}}]'},
    "functions": {"functions": [{"name": "look"}]},
}


@pytest.mark.parametrize("spelling", TOOLS)
def test_tools_and_template_arguments_of_a_row_reach_the_template(spelling):
    template = "{{ documents | length if documents }}{{ reasoning_effort }}{{ thinking }}" + WITH_TOOLS
    tokenizer = make_tokenizer(template)
    talk = [ASKED, message("assistant", "<think></think>so")]
    row = TOOLS[spelling] | {"documents": [{"text": "a"}], "enable_thinking": False, "reasoning_effort": "low",
                             "messages": talk, "thinking": "a text, no argument"}  # fmt: skip
    read = tokenizer.decode(tokenize_example(row, tokenizer)["input_ids"])
    assert read.startswith("1low") and "look" in read and "text" not in read
    asked = tokenizer.decode(token_ids(read_prompt(row), tokenizer))
    assert asked.startswith("1low") and "look" in asked and asked.endswith("<think></think>")
    kwargs = {"chat_template_kwargs": '{"enable_thinking": false, "reasoning_effort": null}', "messages": TWO_TURNS}
    assert tokenizer.decode(token_ids(read_prompt(kwargs), tokenizer)).endswith("<think></think>")


NEGATIVE = {"weight": 0, "loss_weight": 0.0, "loss_scale": 0, "loss_mask": 0, "train": False, "training": False,
            "trainable": False, "loss": False, "masked": True, "ignore": True,
            "supervise": False}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_messages_say_whether_they_are_trained_on(name):
    tokenizer = make_tokenizer(
        CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m | length if m.role == 'user' }}")
    )
    row = {"messages": [TWO_TURNS[0], TWO_TURNS[1] | {name: NEGATIVE[name]}, *TWO_TURNS[2:]]}
    whole = tokenize_example({"messages": TWO_TURNS}, tokenizer)
    read = tokenize_example(row, tokenizer)
    assert read["input_ids"] == whole["input_ids"] and supervised(read, tokenizer) == ENDED[1:]
    wanted = type(NEGATIVE[name])(not NEGATIVE[name])
    row = {
        "messages": [each | {name: wanted if each["role"] == "assistant" else NEGATIVE[name]} for each in TWO_TURNS]
    }
    assert tokenize_example(row, tokenizer) == whole
    for wrong, words in ((0.5, "cannot be honoured"), ([1, 0], "cannot be honoured"), ("yes", "cannot be honoured")):
        with pytest.raises(ValueError, match=f"message 1: {name}: .*{words}.*'weight': 0"):
            tokenize_example({"messages": [ASKED, SAID | {name: wrong}]}, tokenizer)
    with pytest.raises(ValueError, match="message 0, of role 'user', asks to be trained on"):
        tokenize_example({"messages": [ASKED | {name: wanted}, SAID]}, tokenizer)
    assert token_ids(read_prompt({"messages": [ASKED | {name: "yes"}]}), tokenizer)  # of no concern to a prompt


@pytest.mark.parametrize("name", ["mask", "train_detail", "train_on_turn"])
def test_wishes_that_may_mean_either_are_refused(name):
    with pytest.raises(ValueError, match=f"message 1: {name}: True cannot be honoured"):
        tokenize_example({"messages": [ASKED, SAID | {name: True}]}, make_tokenizer())


def test_rows_of_tables_and_frames_are_read_as_those_of_lists():
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("pandas")
    rows = [each for name, each in ONE_TURN.items() if name.startswith(("column", "from")) or " and " in name]
    flags = {"finished": True, "weight": 1.0, "train_on_inputs": False, "images": [], "tools": [], "label": True}
    for row in (each | flags for each in rows):
        expected = prepare_examples([row], make_tokenizer(), 2, 200)
        table = datasets.Dataset.from_list([row | {"text": None}, {"text": "here its columns are null"}])
        for read in (table, table.with_format("numpy"), table.to_pandas().to_dict("records")):
            first = next(iter(prepare_examples(read, make_tokenizer(), 2, 200)))
            assert [{name: list(map(int, values)) for name, values in first.items()}] == expected


@pytest.mark.parametrize("speaker", ["qwen3-8b", "narrator"])
def test_a_conversation_without_the_assistant_names_who_speaks_instead(speaker):
    row = {"conversations": said_by("human", speaker)}
    with pytest.raises(ValueError, match=f"example 0: nobody is the assistant, among .'{speaker}'.: call who"):
        prepare_examples([row], make_tokenizer(), 2, 200)


def test_an_answer_that_its_length_ended_has_no_end():
    tokenizer, row = make_tokenizer(), {"messages": TWO_TURNS, "finish_reason": "length"}
    assert supervised(tokenize_example(row, tokenizer), tokenizer) == [ENDED[0], "think so"]
    assert supervised(tokenize_example(row | {"finish_reason": "stop"}, tokenizer), tokenizer) == ENDED


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"weight": 0}, []), ({"weight": 1.0}, ENDED), ({"sample_weight": 0}, []), ({"label": False}, []),
        ({"kto_tag": False}, []), ({"kto_tag": True}, ENDED),
        ({"label": True}, ENDED), ({"label": 3}, ENDED), ({"train_on_inputs": False}, ENDED),
        ({"mask_history": True}, "mask_history: True cannot"), ({"train_on_last_turn": 1}, "train_on_last_turn: 1"),
        ({"only_last": True}, "only_last: True"),
        ({"mask": "User"}, ENDED), ({"mask": "human"}, ENDED), ({"mask": "Assistant"}, "mask: 'assistant' cannot"),
        ({"mask": [0, 1]}, r"mask: \[0, 1\] cannot .*'loss_mask'"),
        ({"mask_history": False}, ENDED), ({"weight": 0.5}, "weight: 0.5 cannot be honoured"),
        ({"train_on_input": True}, "train_on_input: True can"), ({"mask_prompt": False}, "mask_prompt: False can"),
        ({"loss_scale": [1, 2]}, r"loss_scale: \[1, 2\] cannot"),
        ({"images": ["a.png"]}, "'images' is given, and only text"), ({"audio": {"path": "a"}}, "'audio' is given"),
        ({"tools": 5}, "tools must be a list"), ({"tools": "look"}, "tools must not be a text, unless it is JSON"),
        ({"tools": [{"name": "x"}]}, "the chat template of .* does not read tools"),
        ({"documents": [{"text": "x"}]}, "the chat template of .* does not read documents"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs cannot set add_gen"),
        ({"functions": "look"}, "functions must not be a text, unless it is JSON"), ({"system": 5}, "message 0 has 5"),
        ({"weight": "0"}, []), ({"train_on_inputs": "False"}, ENDED), ({"weight": "much"}, "weight must not be"),
        ({"finished": "false"}, [ENDED[0], "think so"]), ({"finished": "True"}, ENDED),
        ({"loss_mask": [0, 1]}, "loss_mask is of no use without the input_ids or completion_ids that it is about"),
        ({"history": ["a"]}, "history must be a list of .question, answer."),
    ],
)  # fmt: skip
def test_wishes_of_a_row_are_honoured_or_refused_by_name(columns, expected):
    tokenizer, row = make_tokenizer(), {"messages": TWO_TURNS} | columns
    if isinstance(expected, list):
        assert supervised(tokenize_example(row, tokenizer), tokenizer) == expected
        return
    with pytest.raises(ValueError, match=f"example 0: {expected}"):
        prepare_examples([row], tokenizer, 2, 200)
    if columns.keys() & {"images", "audio", "tools", "functions", "documents", "chat_template_kwargs", "history"}:
        with pytest.raises(ValueError, match=expected):
            token_ids(read_prompts([row])[0], tokenizer)


FLAGS = (
    "learn", "is_train", "no_loss", "should_train", "skip", "mask_out", "trained", "compute_loss", "include_in_loss",
    "supervised", "step_loss_mask", "exclude", "train_on_this",
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [False, True, 0, 1])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_names_are_refused_where_they_ask_for_a_loss(flag, value):
    tokenizer, talk = make_tokenizer(), [ASKED, SAID]
    for row, place in (
        ({"messages": [ASKED, SAID | {flag: value}]}, "message 1: "),
        ({"messages": talk, flag: value}, ""),
    ):
        with pytest.raises(ValueError, match=f"^{place}{flag}: {value} cannot be honoured"):
            tokenize_example(row, tokenizer)
    for harmless in (None, "a text", 0.5):
        assert supervised(tokenize_example({"messages": talk, flag: harmless}, tokenizer), tokenizer) == ENDED[:1]


MASK = [0, 0, 1, 1]
BESIDE_TOKENS = {
    **dict.fromkeys(("loss_masks", "lossmask", "answer_mask", "action_mask", "weights", "token_weights"), MASK),
    **dict.fromkeys(("prompt_len", "prompt_length", "num_prompt_tokens", "source_len", "answer_start_index"), 2),
}


@pytest.mark.parametrize("name", BESIDE_TOKENS)
def test_tokens_are_not_all_trained_on_where_another_name_says_which(name):
    row = {"input_ids": [40, 41, 42, 43], name: BESIDE_TOKENS[name]}
    with pytest.raises(ValueError, match=f"^{name}: .*loss_mask"):
        tokenize_example(row, make_tokenizer())
    if name not in ("prompt_len", "answer_start_index"):
        return
    assert tokenize_example(row | {"loss_mask": MASK}, make_tokenizer())["loss_mask"] == MASK


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (message("user", [{"type": "image_url", "image_url": {}}]), "message 0 has {'type': 'image_u.*only text"),
        (message("user", [{"type": "input_audio", "data": "a"}]), "message 0 has {'type': 'input_a.*only text"),
        (message("user", [{"type": "text"}]), "message 0 has {'type': 'text'} for its content"),
        (message("user", 5), "message 0 has 5 for its content"),
        ({"role": 5, "content": "a"}, "message 0 must be a dict with 'role' and 'content'"),
        (message("user", "half a pair: \ud83d"), None),
        (message("assistant", [{"type": "tool_use", "name": "look"}]), "message 0 has {'type': 'tool_u.*'tool_calls'"),
        ({"human": "a", "assistant": "b"}, "message 0 must be a dict with 'role' and 'content'"),
        ({"role": ["user"], "content": "a"}, "message 0 must be a dict with 'role' and 'content'"),
        ({"role": "tool_call", "tool_calls": []}, "message 0 must call tools by 'name'"),
        (message("tool_call", "look at the sky"), "the tool calls of message 0 must not be a text, unless it is JSON"),
        ({"role": "assistant", "tool_calls": [{"function": "look"}]}, "message 0 must call tools by 'name'"),
        ({"role": "assistant", "tool_calls": 5}, "message 0 must call tools by 'name' and 'arguments', got 5"),
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused_with_their_place_by_every_door(wrong, words):
    if words is None:  # JSON can hold it, no tokenizer reads it
        with pytest.raises(ValueError, match="example 0: the tokenizer refuses .*half a pair"):
            prepare_examples([{"messages": [wrong, SAID]}], make_tokenizer(), 2, 200)
        return
    for read in (lambda row: prepare_examples([row], make_tokenizer(), 2, 200), lambda row: read_prompts([row])):
        with pytest.raises(ValueError, match=f"(example|prompt) 0: .*{words}"):
            read({"messages": [wrong, *TWO_TURNS]})


# ---- templates

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
NAMED = CHATML.replace(TURN, "{% if m.role in ('user', 'system', 'assistant') %}" + TURN + "{% endif %}")
PART = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
OF_PARTS = CHATML.replace("{{ m.content }}", PART)
JOINED = (
    "{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
)
JOINING = CHATML.replace("{{ m.content }}", JOINED)
ADDED = "{{ m.content + '<call>' + (m.tool_calls[0].function.arguments | tojson) if m.tool_calls }}" + (
    "{{ m.tool_calls[0].function.name if m.tool_calls }}"
)
THOUGHT = {"type": "thinking", "thinking": "hm"}
ADDING = CHATML.replace("{{ m.content }}", "{{ m.content }}" + ADDED)


@pytest.mark.parametrize(
    ("template", "talk", "expected"),
    [
        (OF_PARTS, [ASKED, SAID], "what is up"),  # a string's letters have no type: nothing would be rendered
        (OF_PARTS, [message("user", parts("what is up")), SAID], "what is up"),
        (NAMED, [message("developer", "be brief"), ASKED, SAID], "system\nbe brief"),
        (CHATML, [message("developer", "be brief"), ASKED, SAID], "developer\nbe brief"),
        (CHATML, [message("critic", "be brief"), ASKED, SAID], "critic\nbe brief"),
        (JOINING, CALLING, '<call>look {"at": "sky"}'),
        (ADDING, CALLING, '<call>{"at": "sky"}look'),
    ],
)
def test_a_conversation_is_spelt_as_the_template_needs_it(template, talk, expected):
    tokenizer = make_tokenizer(template)
    row = tokenize_example({"messages": talk}, tokenizer)
    assert expected in tokenizer.decode(row["input_ids"]) and supervised(row, tokenizer)[-1] == ENDED[0]


@pytest.mark.parametrize(
    ("template", "talk", "words"),
    [
        (NAMED, [message("critic", "be brief"), ASKED, SAID], "leaves out message 0, of role 'critic'"),
        (CHATML, CALLING, "leaves out the tool calls of message 1"),
        *(
            (CHATML, [ASKED, message("assistant", said)], "leaves out the thoughts of message 1 .it may read 'reas.*")
            for said in ([THOUGHT, *parts("so")], THOUGHT, ["so", THOUGHT])
        ),
        ("look at tools, look: " + CHATML, CALLING, "leaves out the tool calls of message 1"),
    ],
)
def test_what_a_template_leaves_out_is_named(template, talk, words):
    tokenizer = make_tokenizer(template)
    for render in (Chat(tokenizer, None, {}).prompt_ids, lambda talk: tokenize_example({"messages": talk}, tokenizer)):
        with pytest.raises(ValueError, match=f"the chat template of .* {words}: leave this conversation out"):
            render(talk)


def test_a_completion_is_tokenised_as_the_prompt_goes_on():
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate("\u2581=24")}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    row = tokenize_example({"prompt": "2=", "completion": "4"}, PreTrainedTokenizerFast(tokenizer_object=inner))
    assert row == {"input_ids": [0, 2, 1, 3], "loss_mask": [0, 0, 0, 1]}  # no space before the 4


def test_a_tokenizer_that_ends_every_text_does_not_end_a_prompt():
    tokenizer = make_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <|im_end|>", special_tokens=[("<bos>", 1), ("<|im_end|>", 4)]
    )
    row = tokenize_example({"prompt": "what", "completion": "so"}, tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "<bos>whatso<|im_end|>"
    assert tokenizer.decode(tokenize_example({"text": "what"}, tokenizer)["input_ids"]) == "<bos>what<|im_end|>"
