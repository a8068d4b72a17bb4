"""The JSON schema of a request, through the server and its draft."""

import json
import string
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_dspark.scheduling.options import DecodingOptions
from hf_dspark.scheduling.scheduler import Scheduler

from .serving import CHAT, needs_server, serving

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["reader", "writer"]}},
    "required": ["age", "kind"],
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def writing(make_target, make_draft, tmp_path_factory):
    """A server whose tokens are letters."""
    folder, letters = tmp_path_factory.mktemp("writers"), ["<eos>", *string.printable[:95]]
    target = make_target(vocab_size=len(letters), eos_token_id=0)
    target.generation_config.update(do_sample=True)
    target.save_pretrained(folder / "target")
    make_draft(target).save_pretrained(folder / "draft")
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<eos>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}>"
    fields = {"content": {"close_pattern": "<eos>", "content": "text"}}
    tokenizer.response_template = {"start_anchor": ">", "fields": fields}
    tokenizer.save_pretrained(folder / "target")
    with serving(folder) as served:
        served.attached.draft.decoding = DecodingOptions(Scheduler(num_nodes=12))
        yield served


@needs_server
def test_answers_keep_to_a_json_schema_streamed_or_not_and_beside_others(writing):
    pytest.importorskip("xgrammar")
    before, temperatures = writing.attached.num_assisted, [0, 1, 1, 1]
    asked = [(stream, heat) for stream in (False, True) for heat in temperatures]
    with ThreadPoolExecutor(9) as clients:
        free = clients.submit(writing.ask, "abc")
        answers = list(
            clients.map(
                lambda each: writing.ask("abc", CHAT, each[0], temperature=each[1], response_format=JSON_SCHEMA), asked
            )
        )
    for answer in map(json.loads, answers):
        assert list(answer) == ["age", "kind"] and 0 <= answer["age"] <= 99 and answer["kind"] in ("reader", "writer")
    assert answers[0] == answers[4] and len(set(answers)) > 2
    assert free.result() == writing.ask("abc")
    assert writing.attached.num_assisted == before + 10 and writing.attached.num_plain == 0
    assert writing.ask("abc", response_format={"type": "json_object"}).startswith("{")
    body = {
        "input": "abc",
        "stream": False,
        "max_output_tokens": 99,
        "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    status, text = writing.send("/v1/responses", body)
    assert status == 200 and json.loads(json.loads(text)["output"][0]["content"][0]["text"]).keys() == {"age", "kind"}


@needs_server
@pytest.mark.slow
def test_of_a_hundred_answers_to_many_clients_all_are_valid(writing):
    pytest.importorskip("xgrammar")

    def ask(place):
        return json.loads(writing.ask("abc"[: 1 + place % 3], temperature=1, response_format=JSON_SCHEMA))

    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(ask, range(100)))
    valid = [0 <= each["age"] <= 99 and each["kind"] in ("reader", "writer") and len(each) == 2 for each in answers]
    assert sum(valid) == 100 and len({each["age"] for each in answers}) > 20


@pytest.mark.one_in(5)
@needs_server
@pytest.mark.parametrize(
    "asked",
    [5, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": []}}, None],
)
def test_a_format_that_is_wrong_or_not_possible_is_refused_and_disturbs_nobody(writing, monkeypatch, asked):
    if asked is None:  # a schema that is none
        pytest.importorskip("xgrammar")
        asked = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    status, text = writing.send(CHAT, {"messages": [{"role": "user", "content": "abc"}], "response_format": asked})
    assert status == 400 and "\n" not in json.loads(text)["detail"] and ".cc" not in text, text
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    status, text = writing.send(
        CHAT, {"messages": [{"role": "user", "content": "abc"}], "response_format": JSON_SCHEMA}
    )
    assert status == 400 and "pip install xgrammar" in text
    assert writing.ask("abc", response_format={"type": "text"}) == writing.ask("abc")
