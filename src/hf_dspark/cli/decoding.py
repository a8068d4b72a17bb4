"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on.

Knows nothing of how options are parsed or errors shown.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import TextStreamer

from ..data.prompts import Prompt, PromptFile, read_prompt_file
from ..decoding.endpoint import Endpoint
from ..decoding.many import generate_many
from ..decoding.regenerate import RegenerationReport, regenerate
from ..decoding.rounds import RoundStatistics
from ..evaluation.results import describe_policy, describe_sampling
from ..models.modeling_draft import DraftModel
from .console import Console, Outcome, note_faults
from .models import (
    LoadedTarget,
    all_token_ids,
    as_asked,
    choose_policy,
    generate_kwargs,
    is_sampled,
    load_draft_for,
    load_pair,
    load_target,
    load_tokenizer,
)
from .options import (
    AnsweringTargetOptions,
    ChatOptions,
    DraftOptions,
    GenerateOptions,
    HelpingDraftOptions,
    PolicyChoice,
    RegenerateOptions,
    SamplingOptions,
    TargetOptions,
)


@dataclass
class Decoded:
    """Answers, and the rounds that made them.

    Attributes:
        answers (`dict[int, dict]`): What is known of each prompt's answer.
        statistics ([`RoundStatistics`]): Of all of them.
    """

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    statistics: RoundStatistics = field(default_factory=RoundStatistics)

    def count(self, statistics: RoundStatistics) -> None:
        """Add the rounds of another call."""
        self.statistics = RoundStatistics.joined([self.statistics, statistics])

    @property
    def num_tokens(self) -> int:
        """Tokens written."""
        return sum(len(answer["token_ids"]) for answer in self.answers.values())

    @property
    def seconds(self) -> float:
        """Time in prefills and rounds."""
        return self.statistics.prefill_seconds + self.statistics.total_seconds


def run_generate(
    console: Console,
    words: Sequence[str],
    options: GenerateOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> Outcome:
    """Answer prompts with a draft."""
    read = _given_prompts(words, options.prompts_file)
    note_faults(console, [read])
    target, draft = load_pair(target_options, draft_options)
    prompts = all_token_ids(read.prompts, target, chat)
    policy = choose_policy(PolicyChoice.parse(options.policy), target.model, draft)
    draft.decoding = replace(draft.decoding, policy=policy)
    kwargs = generate_kwargs(sampling, target.model)
    torch.manual_seed(sampling.seed)
    one_by_one = options.compare or options.batch_size == 1 or len(prompts) == 1
    if options.compare:  # what is slow only the first time is in nobody's time
        warm = kwargs | {"max_new_tokens": min(8, sampling.max_new_tokens)}
        _decode_alone(target, prompts[0], warm)
        _decode_alone(target, prompts[0], warm | {"assistant_model": draft})
    if one_by_one:
        decoded = _decode_one_by_one(console, target, draft, prompts, kwargs)
    else:
        decoded = _decode_together(console, target, draft, prompts, options.batch_size, kwargs)
    document = _describe_decoded(decoded, read, describe_sampling(kwargs, target.model, sampling.seed))
    document["policy"] = describe_policy(policy)
    if options.compare:
        document["plain"] = _compare_with_plain(target, prompts, decoded, kwargs)
    console.note(_summary(document))
    return Outcome(document, failed=any("error" in answer for answer in document["answers"]))


def _given_prompts(words: Sequence[str], prompts_file: str | None) -> PromptFile:
    if words and prompts_file is not None:
        raise ValueError("prompts are given as words and as --prompts_file: give one of them")
    if prompts_file is not None:
        return read_prompt_file(prompts_file, several_turns=False)
    if not words:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is no prompt: give it as a word, as --prompts_file, or on stdin")
        words = [sys.stdin.read().rstrip("\n")]
    if not all(words):
        raise ValueError("a prompt is empty")
    return PromptFile("the command line", [Prompt(word) for word in words], [])


def _decode_one_by_one(
    console: Console, target: LoadedTarget, draft: DraftModel, prompts: list[list[int]], kwargs: dict[str, Any]
) -> Decoded:
    """Let `generate()` itself answer; a single answer is shown while it grows."""
    decoded = Decoded()
    streamer = None
    if len(prompts) == 1 and not console.as_json:
        streamer = _ConsoleStreamer(target, console)
    for index, ids in enumerate(prompts):
        answer = _decode_alone(target, ids, kwargs | {"assistant_model": draft, "streamer": streamer})
        decoded.count(draft.last_stats)
        decoded.answers[index] = _describe_answer(index, answer, target)
        if streamer is None:
            _show_answer(console, decoded.answers[index], len(prompts))
    return decoded


def _decode_together(
    console: Console,
    target: LoadedTarget,
    draft: DraftModel,
    prompts: list[list[int]],
    batch_size: int,
    kwargs: dict[str, Any],
) -> Decoded:
    """Keep a batch full; answers are shown as they finish, and one that fails, fails alone."""
    decoded = Decoded()
    for done in generate_many(target.model, draft, prompts, target.tokenizer, batch_size, **kwargs):
        answer = _describe_answer(done.index, done.token_ids.tolist(), target)
        if done.error is not None:
            answer["error"] = " ".join(str(done.error).split()) or type(done.error).__name__
        decoded.answers[done.index] = answer
        _show_answer(console, answer, len(prompts))
    decoded.count(draft.last_stats)
    return decoded


def _decode_alone(target: LoadedTarget, ids: list[int], kwargs: dict[str, Any]) -> list[int]:
    input_ids = torch.tensor([ids], device=target.model.device)
    output = target.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
    return output[0, len(ids) :].tolist()


class _ConsoleStreamer(TextStreamer):
    """Shows an answer while it grows."""

    def __init__(self, target: LoadedTarget, console: Console) -> None:
        super().__init__(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._output = console.output

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, file=self._output, end="\n" if stream_end else "", flush=True)


def _describe_answer(index: int, token_ids: list[int], target: LoadedTarget) -> dict[str, Any]:
    return {
        "index": index, "text": target.tokenizer.decode(token_ids, skip_special_tokens=True), "token_ids": token_ids,
    }  # fmt: skip


def _show_answer(console: Console, answer: dict[str, Any], num_prompts: int) -> None:
    if num_prompts > 1:
        console.show(f"=== prompt {answer['index'] + 1} of {num_prompts}")
    console.show(f"(failed: {answer['error']})" if "error" in answer else answer["text"])


def _describe_decoded(decoded: Decoded, read: PromptFile, sampling: dict[str, Any]) -> dict[str, Any]:
    statistics, seconds = decoded.statistics, decoded.seconds
    return {
        "answers": [decoded.answers[index] for index in sorted(decoded.answers)],
        "tokens": decoded.num_tokens,
        "seconds": seconds,
        "tokens_per_second": decoded.num_tokens / seconds if seconds else None,
        "rounds": statistics.rounds,
        "tau": statistics.tau if statistics.rounds else None,
        "sampling": sampling,
        "skipped_lines": [str(fault) for fault in read.faults],
    }


def _compare_with_plain(
    target: LoadedTarget, prompts: list[list[int]], decoded: Decoded, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Decode the same prompts without the draft."""
    started = time.perf_counter()
    plain = [_decode_alone(target, ids, kwargs) for ids in prompts]
    seconds = time.perf_counter() - started
    same = sum(answer == decoded.answers[index]["token_ids"] for index, answer in enumerate(plain))
    return {
        "seconds": seconds,
        "tokens_per_second": sum(map(len, plain)) / seconds,
        "identical_answers": None if is_sampled(kwargs, target.model) else same,
    }


def _summary(document: dict[str, Any]) -> str:
    answers = len(document["answers"])
    text = f"{document['tokens']} tokens in {document['seconds']:.2f} s"
    if document["tokens_per_second"] is not None:
        text += f" ({document['tokens_per_second']:.0f} tokens/s)"
    if document["tau"] is not None:
        text += f", {document['rounds']} rounds of {document['tau']:.2f} tokens"
    if "plain" in document:
        plain = document["plain"]
        text += f"\nwithout the draft: {plain['seconds']:.2f} s ({plain['tokens_per_second']:.0f} tokens/s)"
        if plain["identical_answers"] is not None:
            text += f"; the same tokens in {plain['identical_answers']} of {answers} answers"
    return text


def run_regenerate(
    console: Console,
    words: Sequence[str],
    options: RegenerateOptions,
    target_options: AnsweringTargetOptions,
    draft_options: HelpingDraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> Outcome:
    """Let the target answer prompts, for training a draft on."""
    if options.endpoint is None and target_options.target is None:
        raise ValueError("who answers? Give --target, or --endpoint and --model")
    if options.endpoint is not None and draft_options.draft is not None:
        raise ValueError("--draft helps a target in this process, not one behind --endpoint: drop one of them")
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    note_faults(console, [read])
    answer = _answer_by_endpoint if options.endpoint is not None else _answer_in_process
    report = answer(read, options, target_options, draft_options, chat, sampling)
    document = asdict(report) | {
        "output_file": str(report.output_file),
        "skipped_lines": [str(fault) for fault in read.faults],
    }
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    return Outcome(document, failed=report.num_failed > 0)


def _answer_in_process(
    read: PromptFile,
    options: RegenerateOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> RegenerationReport:
    target = load_target(target_options)
    draft = None if draft_options.draft is None else load_draft_for(target.model, draft_options)
    return regenerate(
        target.model, as_asked(read.prompts, target, chat), target.tokenizer, options.output_file, draft,
        options.num_samples, options.batch_size, chat.thinking, sampling.seed,
        **generate_kwargs(sampling, target.model),
    )  # fmt: skip


def _answer_by_endpoint(
    read: PromptFile,
    options: RegenerateOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> RegenerationReport:
    api_key = None
    if options.api_key_env is not None:
        api_key = os.environ.get(options.api_key_env)
        if not api_key:
            raise ValueError(f"--api_key_env: the environment variable {options.api_key_env} is not set")
    tokenizer = load_tokenizer(target_options) if target_options.target or target_options.tokenizer else None
    fields = {name: getattr(sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")}
    return regenerate(
        options.model, read.prompts, tokenizer, options.output_file, num_samples=options.num_samples,
        batch_size=options.concurrency, enable_thinking=chat.thinking, seed=sampling.seed,
        endpoint=Endpoint(options.endpoint, api_key, options.timeout), **fields,
    )  # fmt: skip
