"""Prompt files: which lines are prompts, and how turns follow each other."""

import json

from hf_dspark.data.prompts import Prompt, expand_turns, read_prompt_file


def test_prompt_files_take_every_form_and_drop_answers(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = ["a", {"prompt": "b"}, {"question": "c"}, {"turns": ["d", "e"]}, {"messages": talk, "tools": [{"x": 1}]}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_prompt_file(str(path))
    expected = [Prompt("a"), Prompt("b"), Prompt("c"), Prompt("d", ("e",)), Prompt(talk[:1], tools=[{"x": 1}])]
    assert read.prompts == expected
    assert len(read_prompt_file(str(path), limit=2).prompts) == 2


def test_each_turn_is_asked_after_the_answers_before_it():
    first = Prompt([{"role": "user", "content": "a"}], ("b", "c"))
    expanded = expand_turns(
        [first, Prompt("alone")], lambda prompts: [f"re {p.content[-1]['content']}" for p in prompts]
    )
    contents = [prompt.content if isinstance(prompt.content, str) else len(prompt.content) for prompt in expanded]
    assert contents == [1, "alone", 3, 5]
    assert [message["content"] for message in expanded[-1].content] == ["a", "re a", "b", "re b", "c"]
