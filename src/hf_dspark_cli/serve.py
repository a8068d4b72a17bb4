"""`hf-dspark serve` and `chat`: transformers' own server and chat, with a model that decodes with a draft."""

import asyncio
import functools
import logging
import os
import socket
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from threading import Thread
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from accelerate.utils import get_max_memory
from transformers import PreTrainedModel
from transformers.cli.chat import Chat
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerateManager, _GenerationCancelled, _StreamError

from hf_dspark.decoding.attach import AUTO, MTP, NGRAM, attach
from hf_dspark.decoding.prefixes import PrefixMemory
from hf_dspark.decoding.reversible import JsonGrammars, XGrammarProcessor
from hf_dspark.decoding.together import Asked, decode_waiting
from hf_dspark.hub.inspection import memory_needed
from hf_dspark.models.auto import names_a_draft

from . import Console
from .models import values_of

LOOPBACK = "127.0.0.1"
_grammar: ContextVar[XGrammarProcessor | None] = ContextVar("grammar", default=None)  # of the request


class _Server(Serve):
    def start_server(self) -> None:
        """Leave it to who made this: by now the model is loaded."""


class _Manager(GenerateManager):
    """Lets answers of several clients be decoded together, each with its own grammar."""

    def __init__(self, prefix_bytes: int) -> None:
        super().__init__()
        self._waiting: deque[Asked] = deque()
        self.prefixes = PrefixMemory(prefix_bytes) if prefix_bytes else None

    def generate_streaming(self, model: PreTrainedModel, *rest: Any, **options: Any):
        return super().generate_streaming(self._asking(model), *rest, **options)

    def generate_non_streaming(self, model: PreTrainedModel, *rest: Any, **options: Any):
        return super().generate_non_streaming(self._asking(model), *rest, **options)

    def _asking(self, model: PreTrainedModel) -> SimpleNamespace:
        own = {} if _grammar.get() is None else {"logits_processor": [_grammar.get()]}
        return SimpleNamespace(generate=functools.partial(self._ask, model, **own))

    def _ask(self, model: PreTrainedModel, **given: Any) -> Future:
        asked = Asked(model, **given)
        if (streamer := given.get("streamer")) is not None:
            asked.outcome.add_done_callback(functools.partial(_tell, streamer))
        self._waiting.append(asked)
        self._thread.submit(decode_waiting, self._waiting, self.prefixes)
        return asked.outcome

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        return fn(*args, **kwargs)  # it asks, and does not wait

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        client = _Client()
        waiting = asyncio.wrap_future(fn(*args, client=client, **kwargs))
        waiting.add_done_callback(lambda done: setattr(client, "is_gone", done.cancelled()))
        return waiting


class _Client:
    """A client that waits for a whole answer: a streamer that ends the answer once the client is gone."""

    is_gone = False

    def put(self, tokens: torch.Tensor) -> None:
        if self.is_gone:
            raise _GenerationCancelled

    def end(self) -> None:
        """There is nothing to flush."""


class _Departures:
    """Middleware that cancels a request whose client goes away; transformers notices it only where it streams."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        messages: asyncio.Queue = asyncio.Queue()
        answering = asyncio.ensure_future(self.app(scope, messages.get, send))

        async def pass_on() -> None:
            message: Mapping[str, Any] = {"type": ""}
            while message["type"] != "http.disconnect":
                messages.put_nowait(message := await receive())
            answering.cancel()

        passing = asyncio.ensure_future(pass_on())
        try:
            await asyncio.wait([answering])
        finally:  # also where the server ends
            passing.cancel()
            answering.cancel()
        return None if answering.cancelled() else answering.result()


def _tell(streamer: Any, outcome: Future) -> None:
    if (error := outcome.exception()) is not None:
        streamer._enqueue(None if isinstance(error, _GenerationCancelled) else _StreamError(str(error)))


def _follow_format(handler: BaseHandler, grammars: Callable[[], JsonGrammars]) -> None:
    """Let a handler of transformers, which would ignore it, follow the form that a request asks for, and say what is
    wrong with a request."""
    from fastapi import HTTPException

    handle, handler._unused_fields = handler.handle_request, handler._unused_fields - {"response_format", "text"}

    async def handle_request(body: dict[str, Any], request_id: str) -> Any:
        try:
            if (schema := _schema_of(body)) is not None:
                _grammar.set(await asyncio.to_thread(lambda: grammars()(schema)))
        except ImportError as error:
            raise HTTPException(400, "JSON needs xgrammar where the server runs: pip install xgrammar") from error
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        try:
            return await handle(body, request_id)
        except KeyError as error:
            raise HTTPException(400, f"the request lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise HTTPException(400, f"the request is wrong: {error}") from error

    handler.handle_request = handle_request


def _schema_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        asked = body.get("response_format", (body.get("text") or {}).get("format"))
        if asked is not None and asked["type"] == "json_schema":
            return {**(asked.get("json_schema") or asked)["schema"]}
        return None if asked is None else {"text": None, "json_object": {"type": "object"}}[asked["type"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        known = 'json_schema, with {"json_schema": {"schema": {...}}} (in /responses, the schema beside the type)'
        raise ValueError(f"the type of a format is text, json_object or {known}") from error


def run_serve(options: Namespace, console: Console) -> bool:
    settings = values_of(options, "quiet", "host", "port", "enable_cors")
    settings["note"] = console.note
    with _listen(options.host, options.port) as listener, _loaded(options, **settings) as (serve, served):
        host = f"[{options.host}]" if ":" in options.host else options.host
        served["url"] = f"http://{host}:{listener.getsockname()[1]}/v1"
        console.show(f"{served['model']} at {served['url']}, draft: {served['draft'] or 'none'}")
        if not served["chat"]:
            console.note(f"{served['model']} has no chat template: /completions is all that it answers")
        console.document(served)
        with suppress(KeyboardInterrupt):  # which is how a server ends
            serve.server.run([listener])
    return True


def run_chat(options: Namespace, console: Console) -> bool:
    saved = os.path.abspath("chat_history")
    with _listen(LOOPBACK, 0) as listener, _loaded(options, quiet=True) as (serve, served):
        if not served["chat"]:
            raise ValueError(f"{served['model']} has no chat template: chat with a model that has one")
        thread = Thread(target=serve.server.run, args=([listener],))
        thread.start()
        try:
            with redirect_stdout(console.output), suppress(EOFError, KeyboardInterrupt):
                url, asked = f"http://{LOOPBACK}:{listener.getsockname()[1]}", options.generate_flags
                Chat(served["model"], url, asked, system_prompt=options.system_prompt, save_folder=saved)
        finally:
            serve.server.should_exit = True
            thread.join()
    return True


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        cure = "give another --port, or an address of this machine as --host"
        raise ValueError(f"cannot listen at port {port} of {host} ({why}): {cure}") from error


def _memory(options: Namespace) -> dict[str, int]:
    """Return the bytes that weights and 1,000 tokens will take, and those that are free, before anything is loaded."""
    named = [options.model] + [options.draft] * (options.draft not in (AUTO, NGRAM, MTP))
    device, bits = get_max_memory(), 4 * bool(options.load_in_4bit) or 8 * bool(options.load_in_8bit)
    on_cpu = options.device_map == "cpu" or device.keys() == {"cpu"}
    needed = [memory_needed(name, options.dtype, bits if name == options.model else 0) for name in named]
    return {
        "weights": sum(weights for weights, _ in needed),
        "kv_cache_of_1000_tokens": 1000 * sum(cache for _, cache in needed),
        "prefixes": options.prefix_memory << 20,
        "free": device["cpu"] if on_cpu else sum(free for where, free in device.items() if where != "cpu"),
    }


def _memory_text(memory: dict[str, int]) -> str:
    *needed, available = memory.values()
    weights, cache, prefixes, free = (f"{size / 2**20:,.0f} MiB" for size in memory.values())
    said = (
        f"memory: {weights} for weights, {cache} for each 1,000 tokens that are cached, {prefixes} at most for "
        f"beginnings of prompts; {free} are free"
    )
    fits = sum(needed) < available
    return said if fits else f"{said}: it will not fit, take a smaller model, --load_in_4bit or less --prefix_memory"


@contextmanager
def _loaded(
    options: Namespace, quiet: bool = False, note: Callable[[str], None] | None = None, **settings: Any
) -> Iterator[tuple[Serve, dict[str, Any]]]:
    """Yield transformers' server, and what it serves: the names of a model and its draft, whether it can chat, and
    the memory that is needed, if `note` is to tell it before it is taken.

    A model in a folder is named after it, and served from the folder around it: no answer tells a path.
    """
    settings |= {"device": options.device_map or "auto", "log_level": "error" if quiet else "warning"}
    settings |= values_of(options, "dtype", "trust_remote_code")
    if options.load_in_8bit or options.load_in_4bit:
        settings["quantization"] = "bnb-8bit" if options.load_in_8bit else "bnb-4bit"
    draft = os.path.abspath(options.draft) if os.path.isdir(options.draft) else options.draft
    around, name = os.getcwd(), options.model
    if os.path.isdir(name):
        if names_a_draft(name):
            raise ValueError(f"{name} is a draft: name its target, and the draft as --draft")
        around, name = os.path.split(os.path.abspath(name))
    served: dict[str, Any] = {"model": name}
    if note is not None:
        with suppress(OSError, ValueError, TypeError):  # who loads them says what is wrong
            served["memory"] = _memory(options)
            note(_memory_text(served["memory"]))
    known, load = WeakSet(), ModelManager.load_model_and_processor

    def load_and_attach(manager: ModelManager, called: str, *args: Any, **kwargs: Any):
        model, processor = load(manager, called, *args, **kwargs)
        if called == served.setdefault("id", called) and model not in known:  # it alone, and after /reset again
            known.add(model)
            found = attach(model, draft, remember=False).draft  # clients must not learn of each other
            served["draft"] = getattr(found, "name_or_path", None) if options.draft == AUTO else options.draft
            served["chat"] = getattr(processor, "chat_template", None) is not None
        return model, processor

    before, ModelManager.load_model_and_processor = os.getcwd(), load_and_attach
    os.chdir(around)
    try:
        serve = _Server(name, non_blocking=True, **settings)
        serve._generation_state._generate_managers[served["id"]] = _Manager(options.prefix_memory << 20)

        @functools.cache
        def grammars() -> JsonGrammars:
            model, processor = serve._model_manager.load_model_and_processor(served["id"])
            return JsonGrammars(model, getattr(processor, "tokenizer", processor))

        for handler in (serve._chat_handler, serve._response_handler, serve._completion_handler):
            _follow_format(handler, grammars)
        serve.server.config.app = _Departures(serve.server.config.app)
        for log in ("uvicorn.access", "uvicorn.error") if quiet else ():
            logging.getLogger(log).setLevel(logging.WARNING)
        yield serve, served
    finally:
        ModelManager.load_model_and_processor = load
        os.chdir(before)
