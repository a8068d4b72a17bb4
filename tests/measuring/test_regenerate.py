"""Answers in the target's own words: whole files, interrupted ones, and a server that is not always there."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.data.examples import prepare_examples, tokenize_example
from hf_dspark.measuring import endpoint as endpoint_module
from hf_dspark.measuring.endpoint import Endpoint
from hf_dspark.measuring.regenerate import regenerate

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is false %},,{% endif %}{% endif %}"
)
PROMPTS = ["abc", "bcdef", "cde", "dQ", "efghij", "Xy"]
SAMPLED = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": [62, 42, 11], "pad_token_id": 0}
GREEDY = SAMPLED | {"do_sample": False}


@pytest.fixture
def target(pair):
    return pair[0]


@pytest.fixture
def draft(pair):
    return pair[1]


@pytest.fixture(scope="module")
def tokenizer(tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(params=["plain", "draft"])
def run(request, target, draft, tokenizer, tmp_path):
    """Call `regenerate` with and without the draft; returns the lines by (index, sample)."""

    def call(prompts=PROMPTS, name="answers.jsonl", options=SAMPLED, **changes):
        file, drafting = tmp_path / name, {"draft": draft if request.param == "draft" else None}
        report = regenerate(target, prompts, tokenizer, file, **({"batch_size": 4} | options | drafting | changes))
        lines = read_lines(file)
        done = [line for line in lines if "error" not in line]
        assert report.output_file == file and report.num_answers == len(done)
        assert report.num_failed == len(lines) - len(done)
        assert report.num_unfinished == sum(not line["finished"] for line in done)
        assert len({(line["index"], line["sample"]) for line in lines}) == len(lines)
        return {(line["index"], line["sample"]): line for line in lines}

    call.path = tmp_path / "answers.jsonl"
    return call


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_what_the_target_decodes_alone(run, target, tokenizer):
    lines = run(options=GREEDY)
    assert set(lines) == {(index, 0) for index in range(len(PROMPTS))}
    for (index, _), line in lines.items():
        ids = tokenizer(PROMPTS[index])["input_ids"]
        expected = target.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist()
        assert line == {
            "index": index, "sample": 0, "prompt": PROMPTS[index], "prompt_ids": ids, "completion_ids": expected,
            "text": tokenizer.decode(expected, skip_special_tokens=True),
            "finished": expected[-1] in GREEDY["eos_token_id"],
        }  # fmt: skip


def test_lines_say_whether_the_target_ended_them_and_train_as_they_are(run, tokenizer):
    lines = run(num_samples=3)
    assert {line["finished"] for line in lines.values()} == {True, False}
    for line in lines.values():
        assert line["finished"] == (line["completion_ids"][-1] in SAMPLED["eos_token_id"])
        assert line["finished"] or len(line["completion_ids"]) == 12
        assert not set(line["completion_ids"][:-1]) & set(SAMPLED["eos_token_id"])
        row = tokenize_example(line, tokenizer)
        assert row["input_ids"] == line["prompt_ids"] + line["completion_ids"]
        assert sum(row["loss_mask"]) == len(line["completion_ids"])
    long = [line for line in lines.values() if len(line["completion_ids"]) > 1]
    assert len(prepare_examples(long, tokenizer, 4, 64)) == len(long)


def test_samples_of_a_prompt_differ_and_follow_the_seed(run):
    before = torch.get_rng_state()
    first, again, other = run(num_samples=2), run(name="b", num_samples=2), run(name="c", num_samples=2, seed=1)
    assert first == again and first != other
    assert first[0, 0]["completion_ids"] != first[0, 1]["completion_ids"]
    assert torch.equal(torch.get_rng_state(), before)  # it is the caller's


def test_prompts_are_rendered_as_they_were_given(run, tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    answered = [*chat, {"role": "assistant", "content": "ho"}]
    prompts = {
        "uhi.a": chat, "uhi.aho.uso.a": {"messages": [*answered, {"role": "user", "content": "so"}]},
        "uWhat.a": {"question": "What", "answer": "dropped"}, "Xy": [23 + 26, 24],
        "uhi.a,,": {"messages": answered, "chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    lines = run(list(prompts.values()), max_new_tokens=2)
    assert [tokenizer.decode(lines[index, 0]["prompt_ids"]) for index in range(5)] == list(prompts)
    assert lines[0, 0]["prompt"] == chat and lines[3, 0]["prompt"] == "Xy"
    lines = run([chat], name="not thinking", enable_thinking=False, max_new_tokens=2)
    assert tokenizer.decode(lines[0, 0]["prompt_ids"]) == "uhi.a,,"


def test_the_targets_own_recommendation_is_followed(run, target, monkeypatch):
    for name, value in {"do_sample": False, "max_new_tokens": 3, "eos_token_id": 5}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    lines = run(options={"pad_token_id": 0})
    assert all(len(line["completion_ids"]) <= 3 for line in lines.values())
    with pytest.raises(ValueError, match="num_samples=2, but decoding is greedy"):
        run(name="b", num_samples=2, options={"pad_token_id": 0})


def test_prompts_longer_than_the_context_fail_alone(run, target):
    context = target.config.max_position_embeddings
    long, nearly = "b" * context, "c" * (context - 3)
    with pytest.warns(UserWarning, match="1 prompts failed"):
        lines = run(["abc", long, nearly, "dQ"])
    assert f"{context} tokens leave no room" in lines[1, 0]["error"] and "completion_ids" not in lines[1, 0]
    assert len(lines[2, 0]["completion_ids"]) <= 3
    assert all("error" not in lines[index, 0] for index in (0, 2, 3))


def test_a_prompt_that_breaks_its_batch_fails_alone(target, tokenizer, tmp_path, monkeypatch):
    honest, (breaking,) = target.generate, tokenizer("Q")["input_ids"]

    def fragile(input_ids, **kwargs):
        if (input_ids == breaking).any():
            raise RuntimeError("not this one")
        return honest(input_ids, **kwargs)

    monkeypatch.setattr(target, "generate", fragile)
    with pytest.warns(UserWarning, match="1 prompts failed"):
        regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=3, **SAMPLED)
    lines = read_lines(tmp_path / "a")
    failed = [(line["prompt"], line["error"]) for line in lines if "error" in line]
    assert len(lines) == 6 and failed == [("dQ", "RuntimeError: not this one")]
    monkeypatch.setattr(target, "generate", honest)  # the failed one is tried again
    regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=3, **SAMPLED)
    lines = read_lines(tmp_path / "a")
    assert len(lines) == 6 and not any("error" in line for line in lines)


@pytest.mark.parametrize("drafting", [False, True])
def test_learned_positions_are_never_exceeded(tokenizer, tmp_path, drafting):
    target = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=8, n_layer=2, n_head=1)).eval()
    prompts = ["abcdefghijklmn", "abcdefg", "abc"]
    options = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
    if drafting:
        options["draft"] = DSparkDraftModel(DSparkConfig.from_target(target.config, target_layer_ids=[0])).eval()
    regenerate(target, prompts, tokenizer, tmp_path / "a", **options)
    lengths = {line["prompt"]: len(line["completion_ids"]) for line in read_lines(tmp_path / "a")}
    assert lengths == {"abcdefghijklmn": 2, "abcdefg": 9, "abc": 12}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 2, "do_sample": False}, "num_samples=2, but decoding is greedy"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"num_return_sequences": 2}, "use num_samples"),
        ({"max_length": 20}, "use max_new_tokens"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"prompts": ["abc", {"text": "a"}]}, "prompt 1: a prompt must be .* got an object with \\['text'\\]"),
        ({"prompts": [{"turns": ["a", "b"]}]}, "prompt 0: has several turns"),
    ],
)
def test_wrong_options_are_raised_before_anything_is_written(run, options, words):
    with pytest.raises(ValueError, match=words):
        run(**options)
    with pytest.raises(TypeError, match="pass \\[prompt\\]"):
        run(prompts="abc")
    with pytest.raises(TypeError, match="target is the name 'org/model': load the model, or say with endpoint"):
        regenerate("org/model", PROMPTS, None, run.path)
    assert not run.path.exists()


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_an_interruption_changes_nothing(run, kept):
    whole = run(num_samples=2)
    lines = run.path.read_text().splitlines(keepends=True)
    run.path.write_text("".join(lines[:kept]) + lines[kept][:20])
    assert run(num_samples=2) == whole
    assert run.path.read_text().splitlines(keepends=True)[:kept] == lines[:kept]


def test_what_is_there_is_not_written_again_and_samples_can_be_added(run, target, monkeypatch):
    first, asked, honest = run(), [], target.generate
    monkeypatch.setattr(target, "generate", lambda *args, **kwargs: asked.append(1) or honest(*args, **kwargs))
    assert run() == first and len(asked) <= 1  # with a draft the options are checked once
    more = run(num_samples=2)
    assert len(more) == 12 and {key: more[key] for key in first} == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": PROMPTS[:-1]}, "differs in prompts"),
        ({"seed": 1}, "differs in seed \\(0 there, 1 now\\)"),
        ({"temperature": 0.5}, "differs in temperature \\(.* there, 0.5 now\\)"),
        ({"enable_thinking": True}, "differs in enable_thinking"),
    ],
)
def test_a_file_of_another_run_or_target_is_refused(run, target, monkeypatch, change, words):
    before = run()
    with pytest.raises(ValueError, match=words):
        run(**change)
    assert {(line["index"], line["sample"]): line for line in read_lines(run.path)} == before
    weight = target.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.detach() + 1)
    with pytest.raises(ValueError, match="differs in target"):
        run()


class Server(ThreadingHTTPServer):
    """Imitates chat completions; what a question says decides what happens to it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.keys, self.lock = [], [], threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            times = sum(each["messages"][-1]["content"] == question for each in self.server.requests)
        if "broken" in question or ("shaky" in question and times == 1):
            return self._send(500, {"error": "overloaded"})
        if body["model"] != "target" or self.path != "/v1/chat/completions":
            return self._send(404, {"error": "no such model"})
        if "too long" in question:
            return self._send(400, {"error": "the prompt is too long"})
        message = {"role": "assistant", "content": f"to {question} {body.get('seed')}"}
        if "think" in question:
            message["reasoning_content"] = "hm"
        if "empty" in question:
            message["content"] = None
        reason = "length" if "cut" in question else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return self._send(200, {"id": "1", "model": "target", "created": 0, "choices": [choice]})

    def _send(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it is on this machine
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(server, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_module, "RETRIES", {"max_retries": 2, "base_wait_time": 0.01, "max_wait_time": 0.01})

    def call(prompts, **options):
        url = options.pop("base_url", f"http://127.0.0.1:{server.server_port}/v1")
        model, tokenizer = options.pop("model", "target"), options.pop("tokenizer", None)
        endpoint = Endpoint(url, options.pop("api_key", None))
        report = regenerate(model, prompts, tokenizer, tmp_path / "answers.jsonl", endpoint=endpoint, **options)
        return report, {(line["index"], line["sample"]): line for line in read_lines(report.output_file)}

    call.path = tmp_path / "answers.jsonl"
    return call


def test_a_server_answers_several_at_once(ask, server, tokenizer):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "cut"}]
    report, lines = ask(["one", {"messages": chat}, "think"], num_samples=2, batch_size=3, temperature=0.7)
    assert report.num_answers == 6 and report.num_unfinished == 2 and report.num_failed == 0
    line = lines[0, 1]
    assert line["text"] == "to one 3" and line["finished"] and line["prompt"] == line["messages"][:1]
    assert line["messages"] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "to one 3"}]
    assert lines[1, 0]["messages"][:2] == chat and not lines[1, 0]["finished"]
    assert lines[2, 0]["messages"][-1]["reasoning_content"] == "hm"
    assert {body["seed"] for body in server.requests} == set(range(6))
    assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0.7, 2048)}
    assert tokenizer.decode(tokenize_example(line, tokenizer)["input_ids"]) == "uone.atoone3."


def test_errors_that_pass_are_retried_and_those_that_stay_are_recorded(ask, server):
    with pytest.warns(UserWarning, match="3 prompts failed"):
        report, lines = ask(["shaky", "broken", "fine", "too long", "empty"])
    assert report.num_answers == 2 and report.num_failed == 3
    assert "messages" in lines[0, 0] and "500" in lines[1, 0]["error"]
    assert "the prompt is too long" in lines[3, 0]["error"] and "without content" in lines[4, 0]["error"]
    asked = [body["messages"][-1]["content"] for body in server.requests]
    assert asked.count("shaky") == 2 and asked.count("broken") == 3 and asked.count("too long") == 1


def test_only_what_is_missing_is_asked_for_again(ask, server):
    prompts = ["one", "broken", "two"]
    with pytest.warns(UserWarning, match="1 prompts failed"):
        ask(prompts)
    server.requests.clear()
    with pytest.warns(UserWarning, match="1 prompts failed"):
        _, lines = ask(prompts)
    assert {body["messages"][-1]["content"] for body in server.requests} == {"broken"}
    assert len(lines) == len(read_lines(ask.path)) == 3
    with pytest.raises(ValueError, match="differs in max_new_tokens \\(2048 there, 5 now\\)"):
        ask(prompts, max_new_tokens=5)


def test_the_key_is_sent_but_never_written_and_no_other_one_is_sent(ask, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_environment", lambda: "hf_users_own")
    ask(["one"], api_key="secret-key")
    ask(["one"])
    assert server.keys == ["Bearer secret-key"]
    ask.path.unlink()
    _, lines = ask(["one"], enable_thinking=False, top_k=20)
    assert server.requests[-1]["top_k"] == 20 and "temperature" not in server.requests[-1]
    assert [each["chat_template_kwargs"] for each in (server.requests[-1], lines[0, 0])] == 2 * [
        {"enable_thinking": False}
    ]
    assert "hf_users_own" not in server.keys[-1]
    written = "".join(file.read_text() for file in ask.path.parent.iterdir())
    assert "secret-key" not in written


def test_a_wrong_model_and_a_server_that_is_not_there_are_raised_instead_of_recorded(ask):
    with pytest.raises(ValueError, match="refuses model 'other'.*/models"):
        ask(["one"] * 5, model="other", batch_size=1)
    assert not ask.path.exists()
    with pytest.raises(ConnectionError, match="127.0.0.1:9/v1: is the server running"):
        ask(["one"] * 5, base_url="http://127.0.0.1:9/v1", batch_size=1)


def test_wrong_endpoint_options_are_raised_before_any_request(ask, server, tokenizer, monkeypatch):
    for options, words in (
        ({"num_samples": 2, "temperature": 0}, "decoding is greedy"),
        ({"batch_size": 0}, "batch_size"),
        ({"draft": object()}, "not one on a server"),
        ({"prompts": [[1, 2]]}, "prompt of token ids cannot become a message"),
        ({"tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)}, "no chat template"),
    ):
        with pytest.raises(ValueError, match=words):
            ask(**({"prompts": ["one"]} | options))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        ask(["one"])
    assert not server.requests


def test_answers_are_written_in_batches_of_similar_length(target, tokenizer, tmp_path, monkeypatch):
    widths, honest = [], target.generate
    monkeypatch.setattr(target, "generate", lambda ids, **kw: widths.append(list(ids.shape)) or honest(ids, **kw))
    regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=2, **SAMPLED)
    assert widths == [[2, 6], [2, 3], [2, 2]]


def test_stop_strings_end_answers_as_alone(run):
    """In a batch the rows that end first are filled up, with a token that this target also writes."""
    options = GREEDY | {"eos_token_id": None}
    longest = run(name="whole.jsonl", options=options)
    stop = longest[0, 0]["text"][2]
    lines = run(options=options, stop_strings=[stop])
    assert len({len(line["completion_ids"]) for line in lines.values()}) > 1
    for index, line in lines.items():
        whole = longest[index]["text"]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert line["text"] == whole[:end]
