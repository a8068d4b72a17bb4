"""Answers in the target's own words, which is what a draft must be trained on: [`regenerate`] with the model in
process, [`regenerate_with_endpoint`] with one behind an OpenAI-compatible server.

Both write one JSON line per answer and go on where they were interrupted. Knows nothing of training: the lines are
rows for [`~conversations.prepare_rows`].
"""

import json
import math
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.conversations import read_messages, tokenize_row
from ..files import differences, digest, plain_json, replace_text
from ..models.modeling_draft import DraftModel, input_device
from ..targets.fingerprint import fingerprint
from .call import effective_config
from .many import generate_many

DEFAULT_NEW_TOKENS = 2048
MADE_HERE = (
    "input_ids", "inputs", "inputs_embeds", "attention_mask", "past_key_values", "streamer", "assistant_model",
    "num_return_sequences", "return_dict_in_generate", "max_length",
)  # fmt: skip
# What a generation config holds besides options that decide about the answers.
NO_OPTIONS = (
    "transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states",
    "pad_token_id",
)  # fmt: skip
OTHERWISE_KNOWN = ("generation_config", *NO_OPTIONS)  # of the options
NOTHING_TO_DO = None  # `generate_many` reports it as failed at once, which keeps the numbers of the others


@dataclass(frozen=True)
class RegenerationReport:
    """What the file of answers holds.

    Attributes:
        output_file (`Path`): The file.
        num_answers (`int`): Answers in it, from earlier runs too.
        num_unfinished (`int`): Answers among them that were cut by their length.
        num_failed (`int`): Prompts times samples that have an error instead of an answer.
    """

    output_file: Path
    num_answers: int
    num_unfinished: int
    num_failed: int


@dataclass(frozen=True)
class _Prompt:
    """A prompt as it was given, and what goes with it into its lines."""

    content: str | list[dict[str, Any]]
    tools: Any = None
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Job:
    """One answer to be written."""

    index: int
    sample: int
    prompt_ids: list[int]
    new_tokens: int


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    output_file: str | Path,
    draft: DraftModel | None = None,
    num_samples: int = 1,
    batch_size: int = 8,
    enable_thinking: bool | None = None,
    seed: int = 0,
    progress: bool = True,
    **generate_kwargs: Any,
) -> RegenerationReport:
    """Let the target answer prompts itself, and write its tokens to a file.

    A line holds `index`, `sample`, `prompt`, `prompt_ids`, `completion_ids`, `text` and `finished` (whether the target
    ended the answer itself), or `error` instead of the last three: a prompt that fails, fails alone. Beside the file,
    `<output_file>.settings.json` says what it was made with. Called again, answers that are there are skipped, failed
    prompts are tried again, and `num_samples` may be raised.

    Every draw is decided by `seed` and the prompt's place. With a draft an answer depends on nothing else, save the
    rounding of other neighbours in the batch, so an interruption changes nothing. Without one, the answers of a batch
    share its draws: the same `batch_size` gives the same answers, interrupted or not.

    Args:
        target (`PreTrainedModel`): The model that answers.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompts (`Iterable`): Texts, which are continued as they are; lists of messages; lists of token ids; or rows
            with `messages`, `conversations`, `prompt` or `question`. A conversation that ends in an answer gets this
            one anew, and keeps its earlier answers. A question is a user's message if there is a chat template.
        output_file (`str`): JSON lines.
        draft ([`DraftModel`], *optional*): Makes it faster, without changing the law of the answers.
        num_samples (`int`): Answers per prompt.
        batch_size (`int`): Sequences decoded together.
        enable_thinking (`bool`, *optional*): For the chat template, if given.
        seed (`int`): Of all draws.
        progress (`bool`): Show a progress bar.
        generate_kwargs: For `generate()`. Without them the target samples as its generation config recommends;
            `max_new_tokens` is 2048 unless either says otherwise, and never more than the context has room for.

    Returns:
        [`RegenerationReport`]

    Raises:
        ValueError: If the options do not fit, several samples would all be the same, or the file is of another run.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for name in MADE_HERE:
        if generate_kwargs.get(name) is not None:
            instead = {"num_return_sequences": "use num_samples", "max_length": "use max_new_tokens"}
            raise ValueError(f"regenerate makes {name} itself: {instead.get(name, 'drop it')}")
    options = dict(generate_kwargs)
    config = _config_with_length(target, options)
    _check_samples(num_samples, not config.do_sample)
    template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    read = [_read_prompt(row, index, tokenizer) for index, row in enumerate(_several(prompts))]
    prompt_ids = [_prompt_ids(prompt, index, tokenizer, template_kwargs) for index, prompt in enumerate(read)]
    settings = {
        "prompts": digest(prompt_ids), "enable_thinking": enable_thinking, "seed": seed,
        "target": fingerprint(target),
        **plain_json({name: value for name, value in config.to_diff_dict().items() if name not in NO_OPTIONS}),
        **plain_json({name: value for name, value in options.items() if name not in OTHERWISE_KNOWN}),
    }  # fmt: skip
    file = _AnswerFile(output_file, settings)
    room = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    jobs = []
    for sample in range(num_samples):  # all prompts once, then again
        for index, token_ids in enumerate(prompt_ids):
            longest = config.max_length - len(token_ids) if config.max_new_tokens is None else config.max_new_tokens
            jobs.append(_Job(index, sample, token_ids, int(min(longest, room - len(token_ids)))))
    eos = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or [])
    written = _Written(file, read, tokenizer, eos)
    with (
        tqdm(total=len(jobs), desc="answering", unit="answer", disable=not progress) as bar,
        torch.random.fork_rng(),
    ):
        written.bar = bar
        bar.update(len(jobs) - sum(written.is_missing(job) for job in jobs))
        for job in jobs:
            if job.new_tokens < 1 and written.is_missing(job):
                limit = f"max_length={config.max_length}" if len(job.prompt_ids) < room else f"a context of {room}"
                written.fail(job, f"the prompt's {len(job.prompt_ids)} tokens leave no room for an answer in {limit}")
        jobs = [job if job.new_tokens > 0 else None for job in jobs]
        if draft is None:
            _answer_in_batches(target, tokenizer, jobs, written, batch_size, seed, options)
        else:
            _answer_with_draft(target, draft, tokenizer, jobs, written, batch_size, seed, options)
    return file.report()


def regenerate_with_endpoint(
    base_url: str,
    model: str,
    prompts: Iterable[Any],
    output_file: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_samples: int = 1,
    max_tokens: int = DEFAULT_NEW_TOKENS,
    temperature: float | None = None,
    top_p: float | None = None,
    concurrency: int = 8,
    api_key: str | None = None,
    enable_thinking: bool | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    num_retries: int = 5,
    retry_wait: float = 1.0,
    progress: bool = True,
    extra_body: Mapping[str, Any] | None = None,
) -> RegenerationReport:
    """Let a target behind an OpenAI-compatible server answer prompts, and write its answers to a file.

    For targets too big for this process, served by vLLM, SGLang or llama.cpp. Only text comes back, so a line holds
    `index`, `sample`, `prompt`, `messages` (the prompt and the answer, with `reasoning_content` if the server sends
    it), `text` and `finished`, or `error`; the chat template makes tokens of it later, which is less exact than
    [`regenerate`]. Called again, answers that are there are skipped, and failed requests are tried again.

    Args:
        base_url (`str`): Such as `http://localhost:8000/v1`.
        model (`str`): Name by which the server knows the target.
        prompts (`Iterable`): As for [`regenerate`]; a text becomes a user's message.
        output_file (`str`): JSON lines.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; if given, it is checked before the first
            request that it can make rows of the conversations.
        num_samples (`int`): Answers per prompt.
        max_tokens (`int`): Longest answer.
        temperature, top_p (`float`, *optional*): What the server recommends (its model's generation config) if not
            given.
        concurrency (`int`): Requests under way at the same time.
        api_key (`str`, *optional*): Sent to the server, never written. A Hugging Face token stored on this machine is
            not sent: pass it if the server is yours.
        enable_thinking (`bool`, *optional*): For the server's chat template, and noted in each line for the later one.
        seed (`int`): Each request sends its own, derived from this; servers follow it as well as they can.
        timeout (`float`): Seconds a request may take.
        num_retries (`int`): How often a request is repeated after an error that may pass (overload, lost connection).
        retry_wait (`float`): Seconds before the first repetition; doubles each time, 60 at most.
        progress (`bool`): Show a progress bar.
        extra_body (`Mapping`, *optional*): More fields of each request, such as `{"top_k": 20}`.

    Returns:
        [`RegenerationReport`]

    Raises:
        ValueError: If the options do not fit, the file is of another run, or the server refuses key or model.
        ConnectionError: If the server cannot be reached at all.
    """
    from huggingface_hub import InferenceClient, constants

    if constants.is_offline_mode():
        raise ValueError("HF_HUB_OFFLINE is set, which also forbids requests to other servers: unset it")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    _check_samples(num_samples, temperature == 0)
    template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    read = [_as_messages(_read_prompt(row, index)) for index, row in enumerate(_several(prompts))]
    if tokenizer is not None and read:
        answered = [*read[0].content, {"role": "assistant", "content": "An answer."}]
        tokenize_row({"messages": answered, "tools": read[0].tools}, tokenizer, chat_template_kwargs=template_kwargs)
    settings = {
        "prompts": digest([[prompt.content, prompt.tools] for prompt in read]), "model": model,
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "enable_thinking": enable_thinking,
        "seed": seed, "extra_body": plain_json(extra_body),
    }  # fmt: skip
    file = _AnswerFile(output_file, settings)
    # Without a key the client would send the user's Hugging Face token to whoever listens there.
    client = InferenceClient(base_url=base_url, api_key=api_key or "none", timeout=timeout)

    def ask(index: int, sample: int) -> dict[str, Any]:
        prompt = read[index]
        kwargs = {**template_kwargs, **(prompt.chat_template_kwargs or {})}
        body = {**(extra_body or {}), **({"chat_template_kwargs": kwargs} if kwargs else {})}
        output = _retried(
            lambda: client.chat_completion(
                prompt.content, model=model, max_tokens=max_tokens, temperature=temperature, top_p=top_p,
                seed=seed + sample * len(read) + index, tools=prompt.tools, extra_body=body or None,
            ),
            num_retries, retry_wait, stopped,
        )  # fmt: skip
        line = {"index": index, "sample": sample, "prompt": prompt.content}
        line |= {} if prompt.tools is None else {"tools": prompt.tools}
        return line | ({"chat_template_kwargs": kwargs} if kwargs else {}) | _answer_of(output, prompt.content)

    jobs = [(index, sample) for sample in range(num_samples) for index in range(len(read))]
    missing = [job for job in jobs if job not in file.finished]
    executor, stopped = ThreadPoolExecutor(concurrency), threading.Event()
    try:
        futures = {executor.submit(ask, *job): job for job in missing}
        for future in tqdm(
            as_completed(futures), desc="answering", unit="answer", disable=not progress, total=len(jobs),
            initial=len(jobs) - len(missing),
        ):  # fmt: skip
            index, sample = futures[future]
            error = future.exception()
            if error is not None:
                if _is_hopeless(error, answered=bool(file.finished)):
                    raise _explained(error, base_url, model) from error
                line = {"index": index, "sample": sample, "prompt": read[index].content, "error": _described(error)}
            file.append(future.result() if error is None else line)
    finally:
        stopped.set()
        executor.shutdown(wait=True, cancel_futures=True)
    return file.report()


# ---- prompts


def _several(prompts: Iterable[Any]) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        raise ValueError("prompts must be several: pass [prompt] for a single one")
    read = list(prompts)
    if not read:
        raise ValueError("there are no prompts: pass at least one")
    return read


def _read_prompt(row: Any, index: int, tokenizer: PreTrainedTokenizerBase | None = None) -> _Prompt:
    """Take a prompt out of its row; of a conversation, everything but an answer that ends it."""
    extras = {}
    if isinstance(row, Mapping):
        given = {name: value for name, value in row.items() if value is not None}
        extras = {name: given[name] for name in ("tools", "chat_template_kwargs") if name in given}
        name = next((name for name in ("messages", "conversations", "prompt", "question") if name in given), None)
        if name is None:
            raise ValueError(
                f"prompt {index} has columns {sorted(given)}; needed is one of 'messages', 'conversations', 'prompt', "
                "'question'"
            )
        row = given[name]
        if name == "question" and isinstance(row, str) and tokenizer is not None and tokenizer.chat_template:
            row = [{"role": "user", "content": row}]
    if isinstance(row, str):
        return _Prompt(row, **extras)
    if isinstance(row, Sequence) and len(row) > 0 and all(isinstance(token, int) for token in row):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is a list of token ids: a server needs texts or messages")
        return _Prompt(list(row))
    try:
        messages = read_messages(row)
    except ValueError as error:
        raise ValueError(f"prompt {index} must be a text, messages, or a row of either: {error}") from error
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"prompt {index} is empty: there must be a message before the answer")
    return _Prompt(messages, **extras)


def _as_messages(prompt: _Prompt) -> _Prompt:
    if isinstance(prompt.content, str):
        return _Prompt([{"role": "user", "content": prompt.content}], prompt.tools, prompt.chat_template_kwargs)
    return prompt


def _prompt_ids(
    prompt: _Prompt, index: int, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> list[int]:
    if isinstance(prompt.content, list) and isinstance(prompt.content[0], int):
        return prompt.content
    row = {"prompt": prompt.content, "completion_ids": [], "tools": prompt.tools}
    row["chat_template_kwargs"] = {**template_kwargs, **(prompt.chat_template_kwargs or {})}
    try:
        token_ids = tokenize_row(row, tokenizer)["input_ids"]
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error
    if not token_ids:
        raise ValueError(f"prompt {index} has no tokens: got {prompt.content!r}")
    return token_ids


# ---- the target in process


def _config_with_length(target: PreTrainedModel, options: dict[str, Any]) -> GenerationConfig:
    """Return what `generate()` will follow; sets the length in `options` if nobody did."""
    config = effective_config(target, options)
    if config.max_new_tokens is None and config.max_length in (None, 20):  # 20 is what nobody chose
        options["max_new_tokens"] = config.max_new_tokens = DEFAULT_NEW_TOKENS
    return config


def _check_samples(num_samples: int, greedy: bool) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    if num_samples > 1 and greedy:
        raise ValueError(
            f"num_samples={num_samples}, but decoding is greedy, so all answers to a prompt would be the same: pass "
            "do_sample=True (temperature above 0 for an endpoint), or num_samples=1"
        )


class _Written:
    """Turns tokens into lines of the file."""

    def __init__(
        self, file: "_AnswerFile", prompts: list[_Prompt], tokenizer: PreTrainedTokenizerBase, eos: set[int]
    ) -> None:
        self._file, self._prompts, self._tokenizer, self.eos = file, prompts, tokenizer, eos
        self.bar: tqdm | None = None

    @property
    def any(self) -> bool:
        return bool(self._file.finished)

    def is_missing(self, job: _Job) -> bool:
        return (job.index, job.sample) not in self._file.finished

    def answer(self, job: _Job, token_ids: list[int]) -> None:
        completion = token_ids[: job.new_tokens]
        finished = len(completion) < job.new_tokens or completion[-1] in self.eos
        text = self._tokenizer.decode(completion, skip_special_tokens=True)
        self._append(job, {"completion_ids": completion, "text": text, "finished": finished})

    def fail(self, job: _Job, error: str) -> None:
        self._append(job, {"error": error})

    def _append(self, job: _Job, outcome: dict[str, Any]) -> None:
        prompt = self._prompts[job.index].content
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            prompt = self._tokenizer.decode(prompt)
        line = {"index": job.index, "sample": job.sample, "prompt": prompt, "prompt_ids": job.prompt_ids}
        self._file.append(line | outcome)
        self.bar.update()


def _answer_with_draft(
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[_Job | None],
    written: _Written,
    batch_size: int,
    seed: int,
    options: dict[str, Any],
) -> None:
    """Answer in continuous batches; noise is keyed by the seed and the job's place among all jobs."""
    todo = [job if job is not None and written.is_missing(job) else None for job in jobs]
    prompts = [NOTHING_TO_DO if job is None else job.prompt_ids for job in todo]
    torch.manual_seed(seed)
    for result in generate_many(target, draft, prompts, tokenizer, batch_size, progress=False, **options):
        job = todo[result.index]
        if job is None:
            continue
        if result.error is None:
            written.answer(job, result.token_ids.tolist())
        else:
            written.fail(job, _described(result.error))


def _answer_in_batches(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[_Job | None],
    written: _Written,
    batch_size: int,
    seed: int,
    options: dict[str, Any],
) -> None:
    """Answer in batches of similar length, the longest first: what does not fit into memory fails early.

    The batches are the same whatever is done already, and one that was interrupted is drawn again as a whole.
    """
    config = target.generation_config
    rules = ("stop_strings", "stopping_criteria", "max_time")
    if any(options.get(name) or getattr(config, name, None) for name in rules):
        batch_size = 1  # in a batch, nobody says where a rule ended a row: its padding may be a token like others
    real = [job for job in jobs if job is not None]
    for sample in sorted({job.sample for job in real}):
        own = sorted((job for job in real if job.sample == sample), key=lambda job: -len(job.prompt_ids))
        for start in range(0, len(own), batch_size):
            batch = own[start : start + batch_size]
            if any(written.is_missing(job) for job in batch):
                key = (seed, batch_size, sample, start)
                _answer_batch(target, tokenizer, batch, written, key, options)


def _answer_batch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[_Job],
    written: _Written,
    key: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    failure = None
    try:
        answers = _generate(target, tokenizer, batch, written.eos, key, options)
    except Exception as error:  # whatever is wrong with one prompt, the others go on
        if len(batch) == 1 and not written.any:
            raise  # nothing has worked so far: the options are wrong, not the prompt
        failure = _described(error)  # the error itself would keep the failed pass in memory
    if failure is None:
        for job, token_ids in zip(batch, answers, strict=True):
            if written.is_missing(job):
                written.answer(job, token_ids)
    elif len(batch) == 1:
        written.fail(batch[0], failure)
    else:
        for row, job in enumerate(batch):
            if written.is_missing(job):
                _answer_batch(target, tokenizer, [job], written, (*key, row), options)


@torch.no_grad()
def _generate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[_Job],
    eos: set[int],
    key: tuple[int, ...],
    options: dict[str, Any],
) -> list[list[int]]:
    """Return what plain `generate()` writes behind each prompt, up to its end."""
    width = max(len(job.prompt_ids) for job in batch)
    pad = next((token for token in (tokenizer.pad_token_id, *sorted(eos)) if token is not None), 0)
    input_ids = torch.tensor([[pad] * (width - len(job.prompt_ids)) + job.prompt_ids for job in batch])
    lengths = torch.tensor([len(job.prompt_ids) for job in batch])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()
    limits = {"max_length": None, "max_new_tokens": max(job.new_tokens for job in batch)}
    torch.manual_seed(int(digest(key), 16) % 2**63)
    home = input_device(target.get_input_embeddings())
    output = target.generate(
        input_ids.to(home), attention_mask=attention_mask.to(home),
        **{"pad_token_id": pad, **options, **limits}, tokenizer=tokenizer, return_dict_in_generate=False,
    )  # fmt: skip
    answers = []
    for row in output[:, width:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in eos), None)
        answers.append(row[:end])
    return answers


# ---- a target behind a server


def _retried(request: Callable[[], Any], num_retries: int, wait: float, stopped: threading.Event) -> Any:
    for attempt in range(num_retries + 1):
        try:
            return request()
        except Exception as error:
            if attempt == num_retries or stopped.is_set() or not _may_pass(error):
                raise
        stopped.wait(min(60.0, wait * 2**attempt) * (0.5 + random.random() / 2))  # not all at the same time


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_lost_connection(error: BaseException) -> bool:
    names = {base.__name__ for base in type(error).__mro__}  # of the client's HTTP library, whichever that is
    return _status(error) is None and (isinstance(error, OSError) or "TransportError" in names)


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    return _is_lost_connection(error) if status is None else status in (408, 425, 429) or status >= 500


def _is_hopeless(error: BaseException, answered: bool) -> bool:
    return _status(error) in (401, 403, 404) or (_is_lost_connection(error) and not answered)


def _explained(error: BaseException, base_url: str, model: str) -> Exception:
    if _is_lost_connection(error):
        return ConnectionError(f"no answer from {base_url}: is the server running? ({_described(error)})")
    return ValueError(
        f"{base_url} refuses model {model!r} or the key: pass the name that the server lists under /models, and "
        f"api_key if it needs one ({_described(error)})"
    )


def _answer_of(output: Any, prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a line that a server's answer gives."""
    choice = output.choices[0] if output.choices else None
    message = None if choice is None else choice.message
    reasoning = None if message is None else message.get("reasoning_content") or message.get("reasoning")
    calls = None if message is None else message.get("tool_calls")
    if message is None or (not message.content and not reasoning and not calls):
        return {"error": f"the server sent an answer without content: {json.dumps(output, default=str)[:500]}"}
    answer = {"role": "assistant", "content": message.content or ""}
    answer |= {"reasoning_content": reasoning} if reasoning else {}
    answer |= {"tool_calls": json.loads(json.dumps(calls))} if calls else {}
    return {
        "messages": [*prompt, answer], "text": message.content or "", "finished": choice.finish_reason != "length",
    }  # fmt: skip


# ---- the file


# What `str.splitlines()` takes for the end of a line though JSON lets it stand: escaped, rows survive such readers.
_LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})


class _AnswerFile:
    """JSON lines that grow, and beside them what they were made with.

    Args:
        path (`str`): The file; its folder is made.
        settings (`dict`): What lines must have in common.

    Raises:
        ValueError: If the file is of another run, or of nobody knows which.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self._beside = self.path.with_name(self.path.name + ".settings.json")
        self.finished: dict[tuple[int, int], bool] = {}
        self._num_failed = 0
        settings = json.loads(json.dumps(settings))
        if self.path.exists() and self.path.stat().st_size > 0:
            self._compare(settings)
            self._read()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._beside, json.dumps(settings, indent=1, sort_keys=True) + "\n")

    def _compare(self, settings: dict[str, Any]) -> None:
        if not self._beside.exists():
            raise ValueError(
                f"{self.path} has no {self._beside.name} beside it, so nobody knows what it was made with: delete it, "
                "or name another file"
            )
        try:
            known = json.loads(self._beside.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._beside} is damaged: delete it and {self.path}, or name another file") from error
        different = differences(known, settings)
        if different:
            raise ValueError(
                f"{self.path} holds answers of another run, which differs in {different}: delete it, name another "
                "file, or go on as before"
            )

    def _read(self) -> None:
        """Note what is there; drop a line cut short by an interruption, and failures, which are tried again."""
        kept, dropped = [], False
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line) if line.endswith("\n") else None
                except json.JSONDecodeError as error:
                    raise ValueError(f"{self.path} line {number} is not JSON: delete it, or the file") from error
                if record is None or "error" in record:
                    dropped = True
                    continue
                self.finished[record["index"], record["sample"]] = record["finished"]
                kept.append(line)
        if dropped:
            rewritten = self.path.with_name(self.path.name + ".tmp")
            rewritten.write_text("".join(kept), encoding="utf-8")
            os.replace(rewritten, self.path)

    def append(self, record: dict[str, Any]) -> None:
        """Write a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n")
        if "error" in record:
            self._num_failed += 1
        else:
            self.finished[record["index"], record["sample"]] = record["finished"]

    def report(self) -> RegenerationReport:
        """Return what is in the file; warn of failures."""
        if self._num_failed:
            warnings.warn(
                f"{self._num_failed} prompts failed: see 'error' in {self.path}; the same call tries them again",
                stacklevel=3,
            )
        unfinished = sum(not finished for finished in self.finished.values())
        return RegenerationReport(self.path, len(self.finished), unfinished, self._num_failed)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
