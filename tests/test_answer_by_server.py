"""The example that lets a server answer, which is not always there."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.printed import EXAMPLES


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
    """Run the script on some prompts; returns its lines by (index, sample)."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import answer_by_server

    waits = {"max_retries": 2, "base_wait_time": 0.01, "max_wait_time": 0.01}
    monkeypatch.setattr(answer_by_server, "RETRIES", waits)
    output = tmp_path / "answers.jsonl"

    def call(prompts, **options):
        (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
        given = {"endpoint": f"http://127.0.0.1:{server.server_port}/v1", "model": "target", "output_file": output}
        given |= {"prompts_file": tmp_path / "prompts.jsonl"} | options
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["answer_by_server.py", *words])
        answer_by_server.main()
        return lines_of(output)

    call.path = output
    return call


def lines_of(path) -> dict:
    lines = map(json.loads, path.read_text().splitlines())
    return {(line["index"], line["sample"]): line for line in lines}


def test_a_server_answers_several_at_once(ask, server):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "cut"}]
    lines = ask(["one", {"messages": chat}, "think"], num_samples=2, num_requests=3, temperature=0.7)
    cut = sorted(key for key, line in lines.items() if not line["finished"])  # answers come in any order
    assert len(lines) == 6 and cut == [(1, 0), (1, 1)]
    assert lines[0, 1]["text"] == "to one 3" and lines[0, 1]["prompt"] == lines[0, 1]["messages"][:1]
    assert lines[1, 0]["messages"][:2] == chat and lines[2, 0]["messages"][-1]["reasoning_content"] == "hm"
    assert {body["seed"] for body in server.requests} == set(range(6))
    assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0.7, 2048)}


def test_errors_that_pass_are_retried_and_only_what_is_missing_is_asked_for_again(ask, server):
    prompts = ["shaky", "broken", "fine", "too long", "empty"]
    with pytest.raises(SystemExit, match="3 prompts failed"):
        ask(prompts)
    lines = lines_of(ask.path)
    assert "messages" in lines[0, 0] and "messages" in lines[2, 0] and "500" in lines[1, 0]["error"]
    assert "the prompt is too long" in lines[3, 0]["error"] and "without content" in lines[4, 0]["error"]
    asked = [body["messages"][-1]["content"] for body in server.requests]
    assert asked.count("shaky") == 2 and asked.count("broken") == 3 and asked.count("too long") == 1
    server.requests.clear()
    with pytest.raises(SystemExit, match="3 prompts failed"):
        ask(prompts)
    assert {body["messages"][-1]["content"] for body in server.requests} == {"broken", "too long", "empty"}
    with pytest.raises(ValueError, match="differs in max_tokens \\(2048 there, 5 now\\)"):
        ask(prompts, max_tokens=5)


def test_the_key_is_sent_but_never_written_and_no_other_one_is_sent(ask, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_environment", lambda: "hf_users_own")
    monkeypatch.setenv("SERVER_KEY", "secret-key")
    ask(["one"], api_key_env="SERVER_KEY")
    assert server.keys == ["Bearer secret-key"]
    assert "secret-key" not in "".join(file.read_text() for file in ask.path.parent.iterdir())
    ask.path.unlink()
    ask([{"prompt": "one", "chat_template_kwargs": {"enable_thinking": False}}])
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "hf_users_own" not in server.keys[-1]


def test_a_wrong_model_is_raised_instead_of_recorded(ask):
    with pytest.raises(ValueError, match="refuses model 'other'.*/models"):
        ask(["one"] * 5, model="other", num_requests=1)
    assert not ask.path.exists()
