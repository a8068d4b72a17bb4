"""Serving by the shipped pair: the server against transformers' own, JSON of a schema.

python benchmarks/serving.py server --output benchmarks/results/serving.json
"""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import bench

from hf_dspark import FullBlock, Scheduler
from hf_dspark.decoding.request import Request
from hf_dspark.decoding.reversible import JsonGrammars

UPSTREAM = "from transformers.cli.transformers import app; app()"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PERSON = {"name": {"type": "string", "maxLength": 20}, "age": {"enum": [20, 30, 40]}, "works": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PERSON, "required": list(PERSON), "additionalProperties": False}


@contextmanager
def served(folder: Path, *words: str) -> Iterator[int]:
    """Start a server on a free port, and yield the port once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *words, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **quiet) as process:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None, f"{command} has ended"
                time.sleep(0.5)
            yield port
        finally:
            process.terminate()


def answers(port: int, prompts: Sequence[str], max_new_tokens: int) -> tuple[float, list[str]]:
    """Return the tokens per second of clients at once, one for each prompt, and what they were answered."""

    def ask(prompt: str) -> tuple[int, str]:
        connection, messages = HTTPConnection("127.0.0.1", port, timeout=600), [{"role": "user", "content": prompt}]
        body = {"messages": messages, "temperature": 0, "max_tokens": max_new_tokens}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(prompts)) as clients:
        seconds, found = bench.timed(lambda: list(clients.map(ask, prompts)))
    return sum(tokens for tokens, _ in found) / seconds, [text for _, text in found]


def server(
    clients: tuple[int, ...] = (1, 4), commons: tuple[int, ...] = (0, 8), turns: int = 8, max_new_tokens: int = 128
) -> Iterator[bench.Result]:
    """The server with the draft against that of transformers with the same model, in turns. All prompts of some cells
    begin with `commons` questions that are the same."""
    cells: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        shutil.copytree(bench.PAIR / "target", Path(folder) / "target")
        (Path(folder) / "target" / "chat_template.jinja").write_text(TEMPLATE)
        own = "-m", "hf_dspark", "serve", "target", "--draft", str(bench.PAIR / "draft"), "--device_map", "cpu"
        commands = {"transformers": ("-c", UPSTREAM, "serve", "target", "--device", "cpu"), "own": own}
        ports = {name: stack.enter_context(served(Path(folder), *command)) for name, command in commands.items()}
        prompts = bench.held_out_prompts()
        for common, count in itertools.product(commons, clients):
            beginning = "".join(prompts[-common:]) if common else ""
            rates, same = {name: [] for name in ports}, 0
            for turn in range(-1, turns):
                asked = [beginning + prompts[(turn * count + place) % len(prompts)] for place in range(count)]
                names = bench.rotated(list(ports), turn)
                found = {name: answers(ports[name], asked, max_new_tokens) for name in names}
                same += turn >= 0 and found["own"][1] == found["transformers"][1]
                for name in names if turn >= 0 else ():
                    rates[name].append(round(found[name][0], 2))
            cell = {"clients": count, "common": common, "tokens_per_second": rates, "identical": same, "turns": turns}
            cells.append(cell)
            yield {"cells": cells, "load": os.getloadavg()[0]}


def structured(num_prompts: int = 10, max_new_tokens: int = 96) -> bench.Result:
    """JSON of a schema, with the tokens that it forces as drafts and without, against plain decoding."""
    target, draft, tokenizer = bench.load_pair()
    grammars, prompts = JsonGrammars(target, tokenizer), bench.held_out_ids(tokenizer, num_prompts)
    policies, cells = {"plain": None, "blocks": FullBlock(), "trees": Scheduler(num_nodes=15)}, {}
    for name in ("plain", "blocks", "blocks, nothing forced", "trees", "trees, nothing forced"):
        policy, _, blind = name.partition(", ")
        own = {"max_new_tokens": max_new_tokens, "assistant": None if policy == "plain" else draft, **bench.GREEDY}
        forced = patch.object(Request, "forced", lambda *_: []) if blind else nullcontext()
        with forced, bench.decoding(draft, policies[policy]):
            calls = [bench.decode(target, [each], logits_processor=[grammars(SCHEMA)], **own) for each in prompts]
        texts = [tokenizer.decode(call.token_ids[0], skip_special_tokens=True) for call in calls]
        valid = sum(text.endswith("}") and json.loads(text).keys() == PERSON.keys() for text in texts)
        tau = 1.0 if policy == "plain" else bench.joined(calls).tau
        milliseconds = 1000 * bench.median_per_token(calls)
        cells[name] = {"ms_per_token": milliseconds, "tau": tau, "valid": valid, "answers": len(calls)}
    return {"cells": cells, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    bench.main(__doc__, server, structured)
