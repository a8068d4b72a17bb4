"""`hf-dspark serve` and `chat`: transformers' server and chat answer as ever, and the draft decodes."""

import io
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark.decoding.attach import attachment_of
from hf_dspark_cli import main
from hf_dspark_cli.parser import parse
from hf_dspark_cli.serve import LOOPBACK, _loaded

from .serving import CHAT, JSON, TEXT, needs_server, serving

PROMPTS = ["w05 w06 w07", "w09 w09 w09 w08", "w20", "w30 w31 w32 w33"]
TEMPLATE = "{% for message in messages %}{{ message.content }} w03 {% endfor %}{{ 'w04' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory) -> Path:
    """The trained pair on disk; each token is a word."""
    folder = tmp_path_factory.mktemp("pair")
    for name, model in zip(("target", "draft"), pair, strict=True):
        model.save_pretrained(folder / name)
    words = {f"w{token:02d}": token for token in range(pair[0].config.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w01"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w01", eos_token="w62")
    tokenizer.chat_template = TEMPLATE
    fields = {"content": {"close_pattern": r"\s*w62", "content": "text"}}
    tokenizer.response_template = {"start_anchor": " w04", "fields": fields}  # else transformers has one of Qwen's
    tokenizer.save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as served:
        yield served


@pytest.mark.one_in(3)
@needs_server
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_answers_are_those_of_the_model_alone_and_the_draft_decodes_them(served, path, stream):
    for prompt in PROMPTS:
        before = served.attached.num_assisted
        assert served.ask(prompt, path, stream) == served.plain(prompt, path)
        assert served.attached.num_assisted == before + 1
        assert served.attached.draft.last_stats.tau > 1.5


@needs_server
def test_an_answer_names_the_model_and_what_it_took(served):
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 5, "temperature": 0}
    answer = json.loads(served.send(CHAT, body)[1])
    assert answer["model"].partition("@")[0] == "target"
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"


@needs_server
def test_clients_at_once_get_what_they_get_alone(served):
    asked = [(prompt, path, stream) for prompt in PROMPTS for path in (CHAT, TEXT) for stream in (False, True)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda each: served.ask(*each), asked))
    assert answers == [served.plain(prompt, path) for prompt, path, _ in asked]


@needs_server
def test_requests_that_begin_alike_read_their_beginning_once(served):
    beginning, before = " ".join(f"w{5 + place % 30:02d}" for place in range(60)), served.prefixes.num_reused
    for prompt in (beginning, f"{beginning} w40", f"{beginning} w41 w42"):
        plain = served.plain(prompt, TEXT, max_new_tokens=8)
        assert served.ask(prompt, TEXT, max_tokens=8).split() == [word for word in plain.split() if word != "w01"]
    assert served.prefixes.num_reused >= before + 2 * 59


@pytest.mark.slow
@needs_server
def test_of_two_hundred_requests_none_is_lost_beside_a_reader_that_takes_its_time(served):
    slow = HTTPConnection(LOOPBACK, served.port, timeout=120)
    body = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0, "stream": True}
    slow.request("POST", TEXT, json.dumps(body), JSON)
    first = slow.getresponse()
    start = first.read(1)
    with ThreadPoolExecutor(32) as clients:
        asked = [PROMPTS[place % 4] for place in range(200)]
        answers = list(clients.map(lambda prompt: served.ask(prompt, TEXT, max_tokens=3), asked))
    plain = {prompt: served.plain(prompt, TEXT, max_new_tokens=3) for prompt in PROMPTS}
    assert answers == [plain[prompt] for prompt in asked]
    parts = [json.loads(line[6:]) for line in (start + first.read()).split(b"\n") if line.startswith(b"data: {")]
    assert "".join(part["choices"][0]["text"] or "" for part in parts) == served.plain(PROMPTS[0], TEXT)
    slow.close()


@needs_server
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_answer_and_disturbs_no_other(served, stream):
    before = served.attached.num_assisted, served.attached.num_plain
    connection = socket.create_connection((LOOPBACK, served.port), timeout=60)
    asked = {"prompt": PROMPTS[0], "stream": stream, "max_tokens": 100_000_000, "logit_bias": {"62": -100}}
    body = json.dumps(asked)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    while stream and b"data: " not in connection.recv(4096):
        pass
    time.sleep(0.0 if stream else 1.0)
    assert not served.is_idle(seconds=0.2)
    connection.close()
    start = time.perf_counter()
    assert served.ask(PROMPTS[1]) == served.plain(PROMPTS[1])
    assert time.perf_counter() - start < 60  # and the answer that was left is not counted, for it did not end
    assert (served.attached.num_assisted, served.attached.num_plain) == (before[0] + 1, before[1])
    assert served.is_idle(seconds=60)


@pytest.mark.one_in(4)
@needs_server
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, "{", 422),
        (CHAT, {"model": "target"}, 400),
        (CHAT, {"messages": 7}, 400),
        (CHAT, {"messages": [{"role": "user"}, "w05"]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "w05"}], "temperature": "warm"}, 400),
        (TEXT, {"prompt": ["w05", 7]}, 400),
        (TEXT, {"prompt": "w05", "max_tokens": -3}, 400),
        (TEXT, {"prompt": "w05", "max_tokens": "many"}, 400),
        (CHAT, {"messages": [], "speed": 9}, 422),
        (TEXT, {"model": "another", "prompt": "w05"}, 400),
        (TEXT, {"prompt": "w05", "generation_config": "{"}, 400),
        ("/load_model", {}, 422),
        ("/v1/nowhere", {}, 404),
    ],
)
def test_requests_that_are_wrong_are_refused_and_the_next_one_is_answered(served, path, body, status):
    assert served.send(path, body)[0] == status
    assert served.ask(PROMPTS[2]) == served.plain(PROMPTS[2])


@needs_server
def test_what_a_draft_cannot_assist_is_answered_without_it(served):
    before = served.attached.num_plain
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 12}
    assert served.ask(PROMPTS[0], generation_config=json.dumps(beams), max_tokens=12) == served.plain(
        PROMPTS[0], num_beams=2, max_new_tokens=12
    )
    assert served.attached.num_plain == before + 1


@needs_server
def test_a_prompt_that_is_longer_than_the_model_goes_is_answered_as_upstream_does(served):
    long = " ".join(f"w{5 + place % 50:02d}" for place in range(served.model.config.max_position_embeddings + 20))
    assert served.ask(long, max_tokens=8) == served.plain(long, max_new_tokens=8)
    assert served.ask(PROMPTS[0]) == served.plain(PROMPTS[0])


@needs_server
def test_a_model_that_is_loaded_again_has_its_draft_again(folder):
    options = parse(shlex.split(f"serve {folder}/target --draft {folder}/draft --device_map cpu"))
    with _loaded(options) as (serve, served):
        manager = serve._model_manager
        first, _ = manager.load_model_and_processor(served["id"])
        manager.shutdown()
        again, _ = manager.load_model_and_processor(served["id"])
        assert first is not again and attachment_of(again) is not None


@needs_server
@pytest.mark.parametrize(("draft", "found"), [("ngram", "ngram"), ("auto", None)])
def test_a_server_without_a_draft_of_its_own_goes_on(folder, monkeypatch, draft, found):
    monkeypatch.setattr("hf_dspark.hub.repository.find_drafts", lambda *_: ("nowhere", []))
    before = Path.cwd()
    with _loaded(parse(["serve", str(folder / "target"), "--draft", draft, "--device_map", "cpu"])) as (_, served):
        assert served["model"] == "target" and served["draft"] == found and served["chat"]
    assert Path.cwd() == before


@pytest.mark.slow
@needs_server
def test_the_command_says_where_it_is_answers_and_ends_with_ctrl_c(folder):
    command = [sys.executable, "-m", "hf_dspark", "serve", f"{folder}/target", "--draft", f"{folder}/draft"]
    words = ["--port", "0", "--host", LOOPBACK, "--device_map", "cpu", "--json", "--quiet"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not said.endswith("}\n"):
                assert (line := process.stdout.readline()), process.stderr.read()
                said += line
            found = json.loads(said)
            connection = HTTPConnection(found["url"].split("/")[2], timeout=60)
            connection.request("POST", TEXT, json.dumps({"prompt": "w05", "max_tokens": 3}), JSON)
            assert connection.getresponse().status == 200 and found["model"] == "target"
            assert (
                found["memory"]["free"]
                > found["memory"]["weights"]
                > found["memory"]["kv_cache_of_1000_tokens"] / 9
                > 0
            )
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0 and process.stdout.read() == process.stderr.read() == ""
        finally:
            process.kill()


@needs_server
def test_chat_talks_to_the_model_and_keeps_what_it_saves_here(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # its client would not call this machine
    monkeypatch.setattr(sys, "stdin", io.StringIO("w05 w06 w07\nn\n!save\n!exit\n"))
    words = f"chat {folder}/target do_sample=False max_new_tokens=4 --draft {folder}/draft --device_map cpu"
    assert main(shlex.split(words)) == 0
    printed = capsys.readouterr()
    (saved,) = tmp_path.glob("chat_history/target/*.json")
    question, answer = json.loads(saved.read_text())["chat_history"]
    assert question["content"] == "w05 w06 w07" and len(answer["content"].split()) in (3, 4)
    assert answer["content"].split()[0] in printed.out and "Traceback" not in printed.err


def refusal(words: str, capsys) -> str:
    """Return the only line that a command says which is refused."""
    assert main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err.rstrip("\n").split("\n")[-1]


@needs_server
def test_memory_is_told_before_a_model_is_loaded_also_where_it_does_not_fit(folder, capsys, monkeypatch):
    monkeypatch.setattr("hf_dspark_cli.serve._Server", lambda *_, **__: 1 / 0)
    for free, said in ((2**40, "are free\n"), (1000, "it will not fit")):
        monkeypatch.setattr("hf_dspark_cli.serve.get_max_memory", lambda free=free: {"cpu": free})
        main(["serve", f"{folder}/target", "--draft", f"{folder}/draft", "--port", "0"])
        assert said in capsys.readouterr().err.partition("Traceback")[0]


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setattr("hf_dspark_cli.serve._loaded", lambda *_, **__: 1 / 0)
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        said = refusal(f"serve {folder}/target --host {LOOPBACK} --port {port}", capsys)
    assert f"cannot listen at port {port} of {LOOPBACK} (Address already in use): give another --port" in said
    assert "cannot listen at port 0 of no.such.host.invalid" in refusal(
        f"serve {folder}/target --host no.such.host.invalid --port 0", capsys
    )


@pytest.mark.parametrize("command", ["serve --port 0", "chat"])
def test_models_and_installations_that_cannot_serve_are_refused_in_a_line(folder, capsys, monkeypatch, command):
    name, _, rest = command.partition(" ")
    assert "is a draft: name its target" in refusal(f"{name} {folder}/draft {rest}", capsys)
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    assert "pip install transformers[serving]" in refusal(f"{name} {folder}/target {rest}", capsys)


@needs_server
def test_a_draft_that_does_not_fit_is_refused_and_a_model_without_a_template_cannot_chat(
    folder, capsys, tmp_path, make_target, make_draft
):
    make_draft(make_target()).save_pretrained(tmp_path / "other")
    assert "vocab_size" in refusal(f"serve {folder}/target --draft {tmp_path}/other --port 0", capsys)
    for file in (folder / "target").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / "bare").mkdir(exist_ok=True)
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    assert "bare has no chat template" in refusal(f"chat {tmp_path}/bare --draft ngram", capsys)
    assert main(["serve", "no/such-model", "--port", "0"]) == 1
    assert "Traceback" not in capsys.readouterr().err
