"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import TextStreamer

from hf_dspark.data.prompts import Prompt, PromptFile, read_prompt_file
from hf_dspark.decoding.endpoint import Endpoint
from hf_dspark.decoding.many import Completion, generate_many
from hf_dspark.decoding.regenerate import RegenerationReport, regenerate
from hf_dspark.evaluation.results import describe_policy, describe_sampling
from hf_dspark.evaluation.timed_decoding import timed_call

from . import Console
from .models import (
    Models,
    all_token_ids,
    as_asked,
    choose_policy,
    generate_kwargs,
    is_sampled,
    load_models,
    load_tokenizer,
    note_faults,
)


def run_generate(options: Namespace, console: Console) -> bool:
    """Answer prompts with a draft."""
    read = _given_prompts(options)
    faults = note_faults(console, read)
    models = load_models(options)
    prompts = all_token_ids(read.prompts, models, options)
    policy = choose_policy(options.policy, models)
    models.draft.decoding = replace(models.draft.decoding, policy=policy)
    kwargs = generate_kwargs(options, models.target)
    answers = {}
    for done in _completions(prompts, models, options, console, kwargs):
        ids = done.token_ids.tolist()
        text = models.tokenizer.decode(ids, skip_special_tokens=True)
        answers[done.index] = {"index": done.index, "text": text, "token_ids": ids}
        if done.error is not None:
            answers[done.index]["error"] = text = " ".join(str(done.error).split()) or type(done.error).__name__
        if len(prompts) > 1:
            console.show(f"=== prompt {done.index + 1} of {len(prompts)}")
            console.show(text if done.error is None else f"(failed: {text})")
    rounds = models.draft.last_stats
    num_tokens = sum(len(answer["token_ids"]) for answer in answers.values())
    document = {
        "answers": [answers[index] for index in sorted(answers)],
        **_times(num_tokens, rounds.prefill_seconds + rounds.total_seconds),
        "rounds": rounds.rounds,
        "tau": rounds.tau if rounds.rounds else None,
        "sampling": describe_sampling(kwargs, models.target, options.seed),
        "policy": describe_policy(policy),
        "skipped_lines": faults,
    }
    console.note("{tokens} tokens in {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**document))
    if rounds.rounds:
        console.note(f"{rounds.rounds} rounds of {rounds.tau:.2f} tokens")
    if options.compare:
        document["plain"] = _compare(prompts, answers, models, options, console, kwargs)
    console.document(document)
    return not any("error" in answer for answer in answers.values())


def _given_prompts(options: Namespace) -> PromptFile:
    if options.prompts_file is not None:
        return read_prompt_file(options.prompts_file, several_turns=False)
    words = options.prompts or [sys.stdin.read().rstrip("\n")]
    if not all(words):
        raise ValueError("the prompt on stdin is empty")
    return PromptFile("the command line", [Prompt(word) for word in words], [])


def _completions(
    prompts: list[list[int]], models: Models, options: Namespace, console: Console, kwargs: dict[str, Any]
) -> Iterator[Completion]:
    """Yield answers as they finish; a single one is shown while it grows."""
    target, draft, batch_size = models.target, models.draft, options.batch_size
    if options.compare:  # one by one, as plain decoding will be; and one-time costs are not timed
        batch_size, few = 1, {"max_new_tokens": min(8, options.max_new_tokens)}
        timed_call(target, prompts[:1], **(kwargs | few))
        timed_call(target, prompts[:1], draft=draft, **(kwargs | few))
    if len(prompts) == 1:
        streamer = None if console.json else _Streamer(models.tokenizer, console)
        call = timed_call(target, prompts, options.seed, draft, streamer=streamer, **kwargs)
        yield Completion(0, prompts[0], torch.tensor(call.token_ids[0]))
    else:
        torch.manual_seed(options.seed)
        yield from generate_many(target, draft, prompts, models.tokenizer, batch_size, console.progress, **kwargs)


def _compare(
    prompts: list[list[int]],
    answers: dict[int, dict[str, Any]],
    models: Models,
    options: Namespace,
    console: Console,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Decode the answered prompts without the draft, too."""
    answered = [index for index in sorted(answers) if "error" not in answers[index]]
    calls = {index: timed_call(models.target, [prompts[index]], options.seed, **kwargs) for index in answered}
    num_tokens = sum(len(call.token_ids[0]) for call in calls.values())
    plain = _times(num_tokens, sum(call.seconds for call in calls.values()))
    same = sum(call.token_ids[0] == answers[index]["token_ids"] for index, call in calls.items())
    console.note("without the draft: {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**plain))
    if is_sampled(kwargs, models.target):
        return plain | {"identical_answers": None}
    console.note(f"the same tokens in {same} of {len(prompts)} answers")
    return plain | {"identical_answers": same}


def _times(num_tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / max(seconds, 1e-9)}


class _Streamer(TextStreamer):
    """Shows an answer while it grows."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._output = console.output

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, file=self._output, end="\n" if stream_end else "", flush=True)


def run_regenerate(options: Namespace, console: Console) -> bool:
    """Let the target answer prompts, for training a draft on."""
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    faults = note_faults(console, read)
    report = _regenerate(read.prompts, options)
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    console.document(asdict(report) | {"output_file": str(report.output_file), "skipped_lines": faults})
    return report.num_failed == 0


def _regenerate(prompts: list[Prompt], options: Namespace) -> RegenerationReport:
    same = {"num_samples": options.num_samples, "enable_thinking": options.enable_thinking, "seed": options.seed}
    if options.endpoint is None:
        models = load_models(options)
        return regenerate(
            models.target,
            as_asked(prompts, models),
            models.tokenizer,
            options.output_file,
            models.draft,
            batch_size=options.batch_size,
            **same,
            **generate_kwargs(options, models.target),
        )
    api_key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not api_key:
        raise ValueError(f"--api_key_env: the environment variable {options.api_key_env} is not set")
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    return regenerate(
        options.model,
        prompts,
        load_tokenizer(options) if options.target or options.tokenizer else None,
        options.output_file,
        batch_size=options.concurrency,
        endpoint=Endpoint(options.endpoint, api_key, options.timeout),
        **same,
        **{name: getattr(options, name) for name in names},
    )
