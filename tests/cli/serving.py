"""A server in a thread, and a client that reads its answers."""

import json
import shlex
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_serve_available

from hf_dspark.decoding.attach import Attachment, attachment_of
from hf_dspark.decoding.prefixes import PrefixMemory
from hf_dspark_cli.parser import parse
from hf_dspark_cli.serve import LOOPBACK, _listen, _loaded, _Manager

needs_server = pytest.mark.skipif(not is_serve_available(), reason="needs pip install transformers[serving]")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@dataclass
class Served:
    port: int
    model: PreTrainedModel
    folder: Path
    manager: _Manager

    @property
    def attached(self) -> Attachment:
        return attachment_of(self.model)

    @property
    def prefixes(self) -> PrefixMemory:
        return self.manager.prefixes

    def is_idle(self, seconds: float) -> bool:
        """Tell whether the thread that decodes comes to an end of its work within some seconds."""
        return bool(wait([self.manager._thread.submit(int)], seconds).done)

    def send(self, path: str, body: dict | str) -> tuple[int, str]:
        """Return status and body of an answer, which names no folder of this machine."""
        connection = HTTPConnection(LOOPBACK, self.port, timeout=120)
        connection.request("POST", path, body if isinstance(body, str) else json.dumps(body), JSON)
        answer = connection.getresponse()
        status, text = answer.status, answer.read().decode()
        connection.close()
        assert str(self.folder) not in text and self.folder.name not in text
        return status, text

    def ask(self, prompt: str, path: str = CHAT, stream: bool = False, **options) -> str:
        """Return the text of an answer."""
        asked = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
        body = {"max_tokens": 40, "temperature": 0, "stream": stream} | asked | options
        status, text = self.send(path, body)
        assert status == 200, text
        if not stream:
            (choice,) = json.loads(text)["choices"]
            return choice["text"] if path == TEXT else choice["message"]["content"]
        parts = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        choices = [part["choices"][0] for part in parts if part["choices"]]
        return "".join((each.get("text") if path == TEXT else each["delta"].get("content")) or "" for each in choices)

    def plain(self, prompt: str, path: str = CHAT, **options) -> str:
        """Return the text that the model generates without a draft."""
        words = (prompt if path == TEXT else f"{prompt} w03 w04").split()
        ids = torch.tensor([[int(word[1:]) for word in words]])
        options = {"max_new_tokens": 40, "do_sample": False} | options
        output = self.model.generate(ids, assistant_model=None, **options)[0, len(words) :].tolist()
        return " ".join(f"w{token:02d}" for token in output if token != 62)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    options = parse(shlex.split(f"serve {folder}/target --draft {folder}/draft --dtype float32 --device_map cpu"))
    with _listen(LOOPBACK, 0) as listener, _loaded(options) as (serve, _):
        thread = Thread(target=serve.server.run, args=([listener],))
        thread.start()
        (loaded,) = serve._model_manager.loaded_models.values()
        try:
            (manager,) = serve._generation_state._generate_managers.values()
            yield Served(listener.getsockname()[1], loaded.model, folder, manager)
        finally:
            serve.server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
