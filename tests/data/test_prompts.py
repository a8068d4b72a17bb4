"""Every form of a prompt has one reader, in Python and in files."""

import json

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import BatchEncoding, ProcessorMixin

import hf_dspark
from hf_dspark.data.prompts import (
    SUITES,
    Prompt,
    as_chat,
    read_prompt,
    read_prompt_file,
    read_prompts,
    suite_files,
    token_ids,
)

HI = [{"role": "user", "content": "what is"}]
TALK = [*HI, {"role": "assistant", "content": "up"}]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("up", Prompt("up")),
        ({"prompt": "up", "text": "dropped", "messages": None}, Prompt("up")),
        ({"question": "what is", "answer": "dropped"}, Prompt(HI)),
        ({"turns": ["what is", "up"]}, Prompt(HI, ("up",))),
        (TALK, Prompt(HI)),
        ({"messages": TALK, "tools": [{"x": 1}]}, Prompt(HI, tools=[{"x": 1}])),
        ({"conversations": [{"from": "human", "value": "what is"}, {"from": "gpt", "value": "up"}]}, Prompt(HI)),
        ([5, 6], Prompt([5, 6])),
        (torch.tensor([[5, 6]]), Prompt([5, 6])),
        (np.array([5, 6]), Prompt([5, 6])),
        (BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1]}), Prompt([5, 6])),
        ({"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}, Prompt([5, 6])),
        ({"input_ids": torch.tensor([[5, 6]])}, Prompt([5, 6])),
        ({"input_ids": [5, 6, 0], "attention_mask": [True, True, False]}, Prompt([5, 6])),
        ({"prompt": "up", "attention_mask": [0, 1]}, Prompt("up")),
        (Prompt("up"), Prompt("up")),
    ],
)
def test_prompts_come_in_many_forms(row, prompt):
    assert read_prompt(row) == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (5, "must be a string, token ids, messages, or an object with"),
        (None, "must be a string"),
        ([], "the prompt is empty"),
        ([1.5], "token ids must be a list of whole numbers"),
        ({}, "got an object with nothing"),
        ({"text": "up"}, r"got an object with \['text'\]"),
        ("", "the prompt is empty"),
        ({"turns": []}, "'turns' must be a list of strings"),
        (TALK[1:], "no message before the answer"),
        ([{"role": "user"}], "message 0 must be a dict with 'role' and 'content'"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1]}, "attention_mask has 2 places for 3 tokens"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_place(row, message):
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        read_prompts(["up", row])


def test_tables_of_prompts_name_the_way_in():
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    table = datasets.Dataset.from_list([{"prompt": "what"}])
    assert read_prompts(table) == read_prompts(table.to_pandas().to_dict("records")) == [Prompt("what")]
    with pytest.raises(TypeError, match=r"prompts hold several splits \(train\): pass one of them"):
        read_prompts(datasets.DatasetDict({"train": table}))
    with pytest.raises(TypeError, match=r"got a DataFrame: pass frame.to_dict\('records'\)"):
        read_prompts(pandas.DataFrame({"prompt": ["what"]}))


def tokens_of(function: str, target, draft, prompts, tokenizer, folder) -> list[list[int]]:
    """Return what a function that takes prompts decodes of them, greedily."""
    options = {"do_sample": False, "max_new_tokens": 8}
    if function == "generate_many":
        found = hf_dspark.generate_many(target, draft, prompts, tokenizer, **options)
        return [done.token_ids.tolist() for done in sorted(found, key=lambda done: done.index)]
    if function == "regenerate":
        hf_dspark.regenerate(target, prompts, tokenizer, folder / "answers.jsonl", **options)
        return [json.loads(line)["completion_ids"] for line in (folder / "answers.jsonl").read_text().splitlines()]
    if function == "evaluate":
        found = hf_dspark.evaluate(target, draft, {"task": prompts}, tokenizer, folder / "result.json", **options)
        return [answer.token_ids for answer in found.answers]
    hf_dspark.calibrate(target, draft, prompts, tokenizer, output_file=folder / "rounds.jsonl", **options)
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


class TextsAndImages(ProcessorMixin):
    """A processor as multimodal models have them: it calls its first argument images, and has no added tokens."""

    attributes = ["tokenizer"]
    tokenizer_class = "PreTrainedTokenizerFast"

    def __call__(self, images=None, text=None, **kwargs):
        assert images is None, "images are not texts"
        return self.tokenizer(text, **kwargs)


FUNCTIONS = ("generate_many", "regenerate", "evaluate", "calibrate")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("prompts", ["what is up", b"what", {"question": "what is"}, Prompt("up"), 5, None])
def test_every_function_that_takes_prompts_refuses_a_single_one(pair, chat_tokenizer, tmp_path, function, prompts):
    message = r"prompts must be several, got \w+: pass \[prompt\] for a single one"
    if function == "evaluate" and isinstance(prompts, str):
        message = "what is up: there is no such file. Name a JSON Lines file, or pass a list of prompts"
    with pytest.raises((TypeError, ValueError), match=message):
        tokens_of(function, *pair, prompts, chat_tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_that_takes_prompts_reads_all_forms_alike(pair, chat_tokenizer, tmp_path, function):
    def decoded(name: str, prompt):
        (tmp_path / name).mkdir()
        return tokens_of(function, *pair, [prompt] * 3, chat_tokenizer, tmp_path / name)

    found = decoded("messages", HI)
    chat_tokenizer = TextsAndImages(tokenizer := chat_tokenizer, chat_template=chat_tokenizer.chat_template)
    assert decoded("processor", "what is") == found
    tokenizer.chat_template = None  # it is the processor's alone
    assert decoded("template", "what is") == found and tokenizer.chat_template is None
    assert len(found) == 3 and decoded("text", "what is") == found
    assert decoded("question", {"question": "what is"}) == decoded("row", {"messages": TALK}) == found
    parts = [{"from": "human", "value": [{"type": "text", "text": "what is"}], "loss": None}]
    assert decoded("ShareGPT", {"conversations": parts}) == decoded("Alpaca", {"instruction": "what is"}) == found


def test_files_name_their_faults_and_keep_their_order(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'"up"\n{"prompt": \n\n{"turns": []}\n"\xff"\n{"prompt": "what"}\n"is"\n')
    read = read_prompt_file(str(path))
    assert [(prompt.content, prompt.line) for prompt in read.prompts] == [("up", 1), ("what", 6), ("is", 7)]
    assert [fault.line for fault in read.faults] == [2, 5, 4]
    assert str(read.faults[2]).endswith("line 4 is no prompt: 'turns' must be a list of strings, the user's, got []")
    assert len(read_prompt_file(str(path), limit=2).prompts) == 2
    path.write_text(json.dumps({"turns": ["a", "b"]}))
    with pytest.raises(ValueError, match="holds no prompt.*line 1 is no prompt: has several turns"):
        read_prompt_file(str(path), several_turns=False)
    with pytest.raises(ValueError, match="there is no such file"):
        read_prompt_file("nowhere.jsonl")


def test_messages_and_texts_go_through_the_template_once(chat_tokenizer):
    asked = chat_tokenizer("user what is <eos> assistant")["input_ids"]
    for prompt in (Prompt(HI), as_chat(Prompt("what is"), chat_tokenizer)):
        assert token_ids(prompt, chat_tokenizer) == asked
    plain = chat_tokenizer("what is")["input_ids"]
    assert token_ids(Prompt("what is"), chat_tokenizer) == plain and token_ids(Prompt([4]), None) == [4]
    rendered = Prompt("<eos> user what is <eos> assistant")
    assert as_chat(rendered, chat_tokenizer) is rendered
    chat_tokenizer.chat_template = None
    assert token_ids(Prompt(HI), chat_tokenizer) == plain  # a question without a template
    assert as_chat(Prompt(TALK), chat_tokenizer).content == "what is\n\nup"
    with pytest.raises(ValueError, match="has no chat template"):
        token_ids(Prompt(TALK), chat_tokenizer)
    with pytest.raises(ValueError, match="pass the target's tokenizer"):
        token_ids(Prompt("what is"), None)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"loss_mask": [0, 0, 1, 1, 0]}, [1, 2]), ({"labels": [-100, 2, -100, 4, 5]}, [1, 2, 3]),
        ({"labels": [-100, -100, -100, 0, 5], "input_ids": [1, 2, 3, 0, 5]}, [1, 2, 3]),
        ({"attention_mask": [0, 1, 1, 1, 1], "completion_mask": [0, 0, 0, 1, 1]}, [2, 3]),
        ({"loss_mask": [0] * 5}, [1, 2, 3, 4, 5]), ({"loss_mask": [1] * 5}, [1, 2, 3, 4, 5]),
    ],
)  # fmt: skip
def test_tokens_with_a_mask_are_asked_up_to_their_last_answer(columns, expected):
    assert read_prompt({"input_ids": [1, 2, 3, 4, 5]} | columns).content == expected
    with pytest.raises(ValueError, match="has 2 places for 5 tokens"):
        read_prompt({"input_ids": [1, 2, 3, 4, 5]} | columns | {next(iter(columns)): [0, 1]})


def test_a_text_that_a_template_has_begun_begins_once(chat_tokenizer):
    chat_tokenizer.bos_token, first = "<unk>", chat_tokenizer.convert_tokens_to_ids("<unk>")
    begin = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", first)])
    chat_tokenizer.backend_tokenizer.post_processor = begin
    assert token_ids(Prompt("what is"), chat_tokenizer) == token_ids(Prompt("<unk> what is"), chat_tokenizer)


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_a_file_of_prompts_for_each_task(suite, tmp_path):
    for task in SUITES[suite]:
        (tmp_path / f"{task}.jsonl").write_text('{"turns": ["Why?"]}\n')
    assert list(suite_files(suite, tmp_path)) == list(SUITES[suite])


def test_missing_files_and_unknown_suites_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"lacks gsm8k.jsonl, .*arena-hard-v2.jsonl: paper has"):
        suite_files("paper", tmp_path)
    with pytest.raises(ValueError, match="no suite 'glue': choose paper or spec_bench"):
        suite_files("glue", tmp_path)
