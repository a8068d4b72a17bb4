"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on."""

import os
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import TextStreamer

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, read_prompt_file
from hf_dspark.decoding.drafter import RoundStatistics
from hf_dspark.decoding.many import generate_many
from hf_dspark.decoding.regenerate import RegenerationReport, regenerate, regenerate_with_endpoint
from hf_dspark.evaluation.results import describe_policy, describe_sampling
from hf_dspark.evaluation.timed_decoding import TimedCall, timed_call

from . import Console
from .models import (
    Models,
    all_token_ids,
    choose_policy,
    generate_kwargs,
    is_sampled,
    load_models,
    load_tokenizer,
    thinking_of,
)


@dataclass
class Answers:
    """Answers, and what making them took."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    rounds: RoundStatistics = field(default_factory=RoundStatistics)
    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_plain_tokens: int = 0
    num_identical: int = 0


def run_generate(options: Namespace, console: Console) -> bool:
    """Answer prompts with a draft."""
    read = _given_prompts(options)
    for fault in read.faults:
        console.note(f"skipped {fault}")
    models = load_models(options, console)
    prompts = all_token_ids(read.prompts, models, options)
    models.draft.policy = choose_policy(options.policy, models)
    kwargs = generate_kwargs(options, models.target)
    answer = _answer_each if options.compare or len(prompts) == 1 else _answer_together
    done = answer(options, console, models, prompts, kwargs)
    num_tokens = sum(len(part["token_ids"]) for part in done.answers.values())
    document = {
        "answers": [done.answers[index] for index in sorted(done.answers)],
        "tokens": num_tokens,
        "seconds": done.seconds,
        "tokens_per_second": num_tokens / done.seconds if done.seconds else None,
        "rounds": done.rounds.rounds,
        "tau": done.rounds.tau if done.rounds.rounds else None,
        "sampling": describe_sampling(kwargs, models.target, options.seed),
        "policy": describe_policy(models.draft.policy),
        "skipped_lines": [str(fault) for fault in read.faults],
    }
    console.note(f"{num_tokens} tokens in {done.seconds:.2f} s ({num_tokens / max(done.seconds, 1e-9):.0f} tokens/s)")
    if done.rounds.rounds:
        console.note(f"{done.rounds.rounds} rounds of {done.rounds.tau:.2f} tokens")
    if options.compare:
        rate, same = done.num_plain_tokens / done.plain_seconds, done.num_identical
        same = None if is_sampled(kwargs, models.target) else same
        document["plain"] = {"seconds": done.plain_seconds, "tokens_per_second": rate, "identical_answers": same}
        identical = "" if same is None else f"; the same tokens in {same} of {len(prompts)} answers"
        console.note(f"without the draft: {done.plain_seconds:.2f} s ({rate:.0f} tokens/s){identical}")
    console.document(document)
    return not any("error" in part for part in done.answers.values())


def _given_prompts(options: Namespace) -> PromptFile:
    if options.prompts_file is not None:
        return read_prompt_file(options.prompts_file, several_turns=False)
    words = options.prompts or [sys.stdin.read().rstrip("\n")]
    if not all(words):
        raise ValueError("the prompt on stdin is empty")
    return PromptFile("the command line", [Prompt(word) for word in words], [])


def _answer_each(
    options: Namespace, console: Console, models: Models, prompts: list[list[int]], kwargs: dict[str, Any]
) -> Answers:
    """Answer one prompt after the other, also without the draft to compare; a single answer is shown as it grows."""
    done, streamer = Answers(), None
    if len(prompts) == 1 and not console.json:
        streamer = _Streamer(models.tokenizer, console)

    def call(index: int, draft: Any, **more: Any) -> TimedCall:
        return timed_call(models.target, [prompts[index]], options.seed + index, draft, **(kwargs | more))

    if options.compare:  # one-time costs are not timed
        for draft in (None, models.draft):
            call(0, draft, max_new_tokens=min(8, options.max_new_tokens))
    for index in range(len(prompts)):
        drafted = call(index, models.draft, streamer=streamer)
        done.seconds += drafted.seconds
        done.rounds = RoundStatistics.joined([done.rounds, drafted.statistics])
        done.answers[index] = _described(index, drafted.token_ids[0], models)
        if streamer is None:
            _show(console, done.answers[index], len(prompts))
        if options.compare:
            plain = call(index, None)
            done.plain_seconds += plain.seconds
            done.num_plain_tokens += len(plain.token_ids[0])
            done.num_identical += plain.token_ids == drafted.token_ids
    return done


def _answer_together(
    options: Namespace, console: Console, models: Models, prompts: list[list[int]], kwargs: dict[str, Any]
) -> Answers:
    """Keep a batch full; answers are shown as they finish, and one that fails, fails alone."""
    torch.manual_seed(options.seed)
    done = Answers()
    for part in generate_many(
        models.target, models.draft, prompts, models.tokenizer, options.batch_size, console.progress, **kwargs
    ):
        answer = done.answers[part.index] = _described(part.index, part.token_ids.tolist(), models)
        if part.error is not None:
            answer["error"] = " ".join(str(part.error).split()) or type(part.error).__name__
        _show(console, answer, len(prompts))
    done.rounds = models.draft.last_stats
    done.seconds = done.rounds.prefill_seconds + done.rounds.total_seconds
    return done


class _Streamer(TextStreamer):
    """Shows an answer while it grows."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._output = console.output

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, file=self._output, end="\n" if stream_end else "", flush=True)


def _described(index: int, ids: list[int], models: Models) -> dict[str, Any]:
    return {"index": index, "text": models.tokenizer.decode(ids, skip_special_tokens=True), "token_ids": ids}


def _show(console: Console, answer: dict[str, Any], num_prompts: int) -> None:
    if num_prompts > 1:
        console.show(f"=== prompt {answer['index'] + 1} of {num_prompts}")
    console.show(f"(failed: {answer['error']})" if "error" in answer else answer["text"])


def run_regenerate(options: Namespace, console: Console) -> bool:
    """Let the target answer prompts, for training a draft on."""
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    for fault in read.faults:
        console.note(f"skipped {fault}")
    report = (_by_endpoint if options.endpoint else _in_process)(read.prompts, options, console)
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    skipped = [str(fault) for fault in read.faults]
    console.document(asdict(report) | {"output_file": str(report.output_file), "skipped_lines": skipped})
    return report.num_failed == 0


def _in_process(prompts: list[Prompt], options: Namespace, console: Console) -> RegenerationReport:
    models = load_models(options, console)
    return regenerate(
        models.target,
        models.tokenizer,
        [_row(as_chat(prompt, models.tokenizer, options.no_chat_template)) for prompt in prompts],
        options.output_file,
        models.draft,
        num_samples=options.num_samples,
        batch_size=options.batch_size,
        enable_thinking=thinking_of(options),
        seed=options.seed,
        progress=console.progress,
        **generate_kwargs(options, models.target),
    )


def _by_endpoint(prompts: list[Prompt], options: Namespace, console: Console) -> RegenerationReport:
    api_key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not api_key:
        raise ValueError(f"--api_key_env: the environment variable {options.api_key_env} is not set")
    more = {name: getattr(options, name) for name in ("top_k", "min_p") if getattr(options, name) is not None}
    return regenerate_with_endpoint(
        options.endpoint,
        options.model,
        [_row(prompt) for prompt in prompts],
        options.output_file,
        load_tokenizer(options) if options.target or options.tokenizer else None,
        num_samples=options.num_samples,
        max_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        concurrency=options.concurrency,
        api_key=api_key,
        enable_thinking=thinking_of(options),
        seed=options.seed,
        timeout=options.timeout,
        progress=console.progress,
        extra_body=more or None,
    )


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as `regenerate` takes it."""
    return {"prompt" if isinstance(prompt.content, str) else "messages": prompt.content, "tools": prompt.tools}
