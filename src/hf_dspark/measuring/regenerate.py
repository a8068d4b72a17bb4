"""Answers in the target's own words, to train a draft on: by the model in this process, or on a server."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import MaxLengthCriteria
from transformers.utils.logging import tqdm

from ..data.examples import tokenize_example
from ..data.prompts import Prompt, as_messages, read_prompts, token_ids
from ..decoding.batch import end_token_ids, left_padded, new_tokens, refuse_made_here
from ..decoding.call import effective_config
from ..decoding.many import generate_many
from ..files import Journal, digest, plain_json
from ..models.modeling_draft import DraftModel
from ..targets.fingerprint import fingerprint
from ..targets.support import TargetSupport
from .endpoint import Endpoint, Refused, ask

DEFAULT_NEW_TOKENS = 2048
UNCHOSEN_LENGTH = 20  # transformers' default of `max_length`
# Entries of a generation config that decide nothing about the answers.
NO_OPTIONS = (
    "transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states",
    "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class RegenerationReport:
    """What the file of answers holds."""

    output_file: Path
    num_answers: int  # from earlier runs, too
    num_unfinished: int  # of them, cut by their length
    num_failed: int  # prompts times samples that have an error instead of an answer


@dataclass(frozen=True)
class _Job:
    index: int
    sample: int
    prompt_ids: list[int]
    room: int  # tokens at most


def regenerate(
    target: PreTrainedModel | str,
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase | None,
    output_file: str | Path,
    draft: DraftModel | None = None,
    num_samples: int = 1,
    batch_size: int = 8,
    enable_thinking: bool | None = None,
    seed: int = 0,
    endpoint: str | Endpoint | None = None,
    **generate_kwargs: Any,
) -> RegenerationReport:
    """Let the target answer prompts itself, and write its tokens to a file.

    A line holds `index`, `sample`, `prompt`, `prompt_ids`, `completion_ids`, `text` and `finished` (whether the target
    ended the answer itself), or `error` instead of the last three: a prompt that fails, fails alone. Beside the file,
    `<output_file>.settings.json` says what it was made with. Called again, answers that are there are skipped, failed
    prompts are tried again, and `num_samples` may be raised.

    `seed` and the prompt's place decide every draw, so an interruption changes nothing. Without a draft the answers of
    a batch share its draws, so they depend on `batch_size`, too; with one, other neighbours only round differently.

    A target too big for this process can answer from a server. Only text comes back, so a line holds `messages` (the
    prompt and the answer) in place of the token ids. The chat template makes tokens of it later, which is less exact.

    Args:
        target (`PreTrainedModel` or `str`): The model that answers; with an endpoint, the server's name of it.
        prompts (`Iterable`): Texts, which are continued as they are; lists of messages; lists of token ids; or rows
            with `messages`, `conversations`, `prompt` or `question`. A conversation that ends in an answer gets this
            one anew, and keeps its earlier answers. A question is a user's message; for a server, a text is, too.
        processing_class (`PreTrainedTokenizerBase`): The target's tokenizer. Optional with an endpoint: if given, it
            is checked that it can make rows of the conversations.
        output_file (`str`): JSON lines.
        draft ([`DraftModel`], *optional*): Makes it faster, without changing the distribution of the answers.
        num_samples (`int`): Answers per prompt.
        batch_size (`int`): Sequences decoded together; with an endpoint, requests under way at the same time.
        enable_thinking (`bool`, *optional*): For the chat template, if given.
        seed (`int`): Of all draws. Servers follow it as well as they can.
        endpoint (`str` or [`Endpoint`], *optional*): An OpenAI-compatible server. A Hugging Face token stored on this
            machine is not sent to it: pass an `api_key`.
        generate_kwargs: For `generate()`; a server gets them as fields of its requests. Without them the target
            samples as its generation config recommends. `max_new_tokens` is 2048 unless either says otherwise, and
            never more than the context has room for.

    Returns:
        [`RegenerationReport`]

    Raises:
        TypeError: If `prompts` is a single one.
        ValueError: If the options do not fit, several samples would all be the same, the file is of another run, or
            the server refuses key or model.
        ConnectionError: If the server cannot be reached at all.

    Example:

    ```python
    report = regenerate(target, prompts, tokenizer, "out/own_words.jsonl", draft=draft, max_new_tokens=64)
    print(report.num_answers, report.num_unfinished)
    ```
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    refuse_made_here("regenerate", generate_kwargs, num_return_sequences="use num_samples")
    read, options = read_prompts(prompts, several_turns=False), dict(generate_kwargs)
    if endpoint is not None:
        if draft is not None:
            raise ValueError("a draft helps a target in this process, not one on a server: drop one of them")
        server = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        return _answer_by_server(
            server, str(target), read, processing_class, output_file, num_samples, batch_size, enable_thinking, seed,
            options,
        )  # fmt: skip
    if isinstance(target, str):
        raise TypeError(f"target is the name {target!r}: load the model, or say with endpoint=... which server has it")
    config = effective_config(target, options)
    if config.max_new_tokens is None and config.max_length in (None, UNCHOSEN_LENGTH):
        options["max_new_tokens"] = config.max_new_tokens = DEFAULT_NEW_TOKENS
    _check_samples(num_samples, not config.do_sample)
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    first_jobs = []
    for index, prompt in enumerate(read):
        try:
            ids = token_ids(prompt, processing_class, enable_thinking)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
        longest = config.max_length - len(ids) if config.max_new_tokens is None else config.max_new_tokens
        first_jobs.append(_Job(index, 0, ids, int(min(longest, context - len(ids)))))
    jobs = [replace(job, sample=sample) for sample in range(num_samples) for job in first_jobs]
    chosen = config.to_diff_dict() | {name: each for name, each in options.items() if name != "generation_config"}
    asked = digest([job.prompt_ids for job in first_jobs])
    settings = {"prompts": asked, "enable_thinking": enable_thinking, "seed": seed, "target": fingerprint(target)}
    settings |= plain_json({name: value for name, value in chosen.items() if name not in NO_OPTIONS})
    shown = [processing_class.decode(prompt.content) if prompt.is_token_ids else prompt.content for prompt in read]
    answers = _Answers(output_file, settings, shown, len(jobs))
    session = _Session(target, processing_class, answers, end_token_ids(config), seed, options, context)
    with answers.bar, torch.random.fork_rng():
        for job in jobs:
            if job.room < 1 and answers.lack(job.index, job.sample):
                session.fail(job, f"the prompt's {len(job.prompt_ids)} tokens leave no room for an answer")
        if draft is None:
            session.answer_in_batches([job for job in jobs if job.room > 0], batch_size)
        else:
            session.answer_with_draft(draft, jobs, batch_size)
    return answers.report()


def _check_samples(num_samples: int, greedy: bool) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    if num_samples > 1 and greedy:
        raise ValueError(
            f"num_samples={num_samples}, but decoding is greedy, so all answers to a prompt would be the same: pass "
            "do_sample=True (temperature above 0 for an endpoint), or num_samples=1"
        )


class _Answers:
    """The file of answers: failures in it are tried again."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any], prompts: Sequence[Any], total: int) -> None:
        self._journal = Journal(path, settings, _finished)
        self.finished = dict(self._journal.entries)
        self._prompts, self._num_failed = prompts, 0
        self.bar = tqdm(total=total, initial=len(self.finished), desc="answering", unit="answer", disable=None)

    def lack(self, index: int, sample: int) -> bool:
        return (index, sample) not in self.finished

    def append(self, index: int, sample: int, **outcome: Any) -> None:
        line = {"index": index, "sample": sample, "prompt": self._prompts[index]} | outcome
        self._journal.append(line)
        self.bar.update()
        if "error" in line:
            self._num_failed += 1
        else:
            self.finished[index, sample] = line["finished"]

    def report(self) -> RegenerationReport:
        path, failed = self._journal.path, self._num_failed
        if failed:
            message = f"{failed} prompts failed: see 'error' in {path}; the same call tries them again"
            warnings.warn(message, stacklevel=3)
        cut = sum(not finished for finished in self.finished.values())
        return RegenerationReport(path, len(self.finished), cut, failed)


def _finished(line: Mapping[str, Any]) -> tuple[tuple[int, int], bool] | None:
    return None if "error" in line else ((line["index"], line["sample"]), line["finished"])


class _EndOfContext(MaxLengthCriteria):
    """Ends a prompt earlier than its options say. transformers warns of its own class."""


@dataclass(frozen=True)
class _Session:
    target: PreTrainedModel
    processing_class: PreTrainedTokenizerBase
    answers: _Answers
    ends: list[int]
    seed: int
    options: dict[str, Any]
    context: float  # tokens that the target has room for

    def answer_with_draft(self, draft: DraftModel, jobs: Sequence[_Job], batch_size: int) -> None:
        """Answer in continuous batches; noise is keyed by the seed and the job's place among all jobs."""
        todo = [job if job.room > 0 and self.answers.lack(job.index, job.sample) else None for job in jobs]
        # `None` fails at once, and keeps the numbers of the others.
        prompts = [None if job is None else job.prompt_ids for job in todo]
        torch.manual_seed(self.seed)
        options = self.options | {"batch_size": batch_size, "progress": False}
        if self.context < math.inf:
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), _EndOfContext(self.context)]
        for result in generate_many(self.target, draft, prompts, self.processing_class, **options):
            job = todo[result.index]
            if job is not None and result.error is None:
                self.note(job, result.token_ids.tolist())
            elif job is not None:
                self.fail(job, _described(result.error))

    def answer_in_batches(self, jobs: Sequence[_Job], batch_size: int) -> None:
        """Answer in batches of similar length, the longest first: what does not fit into memory fails early. Batches
        are the same whatever is done already, and one that was interrupted is drawn again as a whole."""
        rules = ("stop_strings", "stopping_criteria", "max_time")
        if any(self.options.get(name) or getattr(self.target.generation_config, name, None) for name in rules):
            batch_size = 1  # a batch does not say where a rule ended a row: its padding may be a token like others
        for sample in sorted({job.sample for job in jobs}):
            own = sorted((job for job in jobs if job.sample == sample), key=lambda job: -len(job.prompt_ids))
            for start in range(0, len(own), batch_size):
                self._answer_batch(own[start : start + batch_size], (self.seed, batch_size, sample, start))

    def _answer_batch(self, batch: Sequence[_Job], key: tuple[int, ...]) -> None:
        if not any(self.answers.lack(job.index, job.sample) for job in batch):
            return
        failure = None
        try:
            answers = self._generate(batch, key)
        except Exception as error:  # whatever is wrong with one prompt, the others go on
            if len(batch) == 1 and not self.answers.finished:
                raise  # nothing has worked so far: the options are wrong, not the prompt
            failure = _described(error)  # the error itself would keep the failed pass in memory
        if failure is None:
            for job, ids in zip(batch, answers, strict=True):
                if self.answers.lack(job.index, job.sample):
                    self.note(job, ids)
        elif len(batch) == 1:
            self.fail(batch[0], failure)
        else:
            for row, job in enumerate(batch):
                self._answer_batch([job], (*key, row))

    @torch.no_grad()
    def _generate(self, batch: Sequence[_Job], key: tuple[int, ...]) -> list[list[int]]:
        """Return what plain `generate()` writes after each prompt, up to its end."""
        padding = next((token for token in (self.processing_class.pad_token_id, *self.ends) if token is not None), 0)
        device = TargetSupport.of(self.target).input_device
        input_ids, attention_mask = left_padded([job.prompt_ids for job in batch], padding, device)
        limits = {"max_length": None, "max_new_tokens": max(job.room for job in batch)}
        torch.manual_seed(int(digest(key), 16) % 2**63)
        fixed = {"tokenizer": self.processing_class, "return_dict_in_generate": False}
        options = {"pad_token_id": padding} | self.options | limits | fixed
        output = self.target.generate(input_ids, attention_mask=attention_mask, **options)
        return [new_tokens(row, self.ends) for row in output[:, input_ids.shape[1] :].tolist()]

    def note(self, job: _Job, ids: Sequence[int]) -> None:
        completion = list(ids[: job.room])
        finished = len(completion) < job.room or completion[-1] in self.ends
        text = self.processing_class.decode(completion, skip_special_tokens=True)
        outcome = {"completion_ids": completion, "text": text, "finished": finished}
        self.answers.append(job.index, job.sample, prompt_ids=job.prompt_ids, **outcome)

    def fail(self, job: _Job, error: str) -> None:
        self.answers.append(job.index, job.sample, prompt_ids=job.prompt_ids, error=error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _answer_by_server(
    server: Endpoint,
    model: str,
    prompts: Sequence[Prompt],
    processing_class: PreTrainedTokenizerBase | None,
    output_file: str | Path,
    num_samples: int,
    concurrency: int,
    enable_thinking: bool | None,
    seed: int,
    options: dict[str, Any],
) -> RegenerationReport:
    if constants.is_offline_mode():
        raise ValueError("HF_HUB_OFFLINE is set, which also forbids requests to other servers: unset it")
    given = {name: value for name, value in options.items() if value is not None}
    fields = {"max_new_tokens": DEFAULT_NEW_TOKENS} | given
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0
    _check_samples(num_samples, fields.get("temperature") == 0)
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    conversations = [as_messages(prompt) for prompt in prompts]
    if processing_class is not None:
        answered = [*conversations[0].content, {"role": "assistant", "content": "An answer."}]
        row = {"messages": answered, "tools": conversations[0].tools}
        tokenize_example(row, processing_class, chat_template_kwargs=thinking)
    asked = digest([[prompt.content, prompt.tools] for prompt in conversations])
    settings = {"prompts": asked, "model": model, "enable_thinking": enable_thinking, "seed": seed}
    settings |= plain_json(fields)
    fields["max_tokens"] = fields.pop("max_new_tokens")
    jobs = [(index, sample) for sample in range(num_samples) for index in range(len(conversations))]
    answers = _Answers(output_file, settings, [prompt.content for prompt in conversations], len(jobs))

    def line_of(index: int, sample: int) -> dict[str, Any]:
        prompt = conversations[index]
        extras = {} if prompt.tools is None else {"tools": prompt.tools}
        kwargs = thinking | dict(prompt.chat_template_kwargs or {})
        extras |= {"chat_template_kwargs": kwargs} if kwargs else {}
        own_seed = seed + sample * len(conversations) + index
        body = {"model": model, "messages": prompt.content, "seed": own_seed, **fields, **extras}
        answer, finished = ask(server, body)
        return extras | {"messages": [*prompt.content, answer], "text": answer["content"], "finished": finished}

    executor = ThreadPoolExecutor(concurrency)
    try:
        with answers.bar:
            futures = {executor.submit(line_of, *job): job for job in jobs if answers.lack(*job)}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, Refused) or (isinstance(error, ConnectionError) and not answers.finished):
                    raise error
                outcome = future.result() if error is None else {"error": _described(error)}
                answers.append(*futures[future], **outcome)
    finally:
        executor.shutdown(cancel_futures=True)
    return answers.report()
