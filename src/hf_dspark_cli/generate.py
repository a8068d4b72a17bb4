"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, read_prompt_file, token_ids
from hf_dspark.decoding.many import Completion, generate_many
from hf_dspark.measuring.endpoint import Endpoint
from hf_dspark.measuring.regenerate import RegenerationReport, regenerate
from hf_dspark.measuring.results import describe_policy, describe_sampling
from hf_dspark.measuring.rounding import count_best, tolerance_of
from hf_dspark.measuring.timed_decoding import timed_call

from . import Console, said
from .models import Models, choose_policy, generate_kwargs, is_sampled, load_models, note_faults, values_of


def run_generate(options: Namespace, console: Console) -> bool:
    read = _given_prompts(options)
    faults = note_faults(console, read)
    models = load_models(options)
    asked = [as_chat(prompt, models.tokenizer) for prompt in read.prompts]
    prompts = [token_ids(prompt, models.tokenizer, options.enable_thinking) for prompt in asked]
    kwargs = generate_kwargs(options, models.target)
    policy = choose_policy(options.policy, models)
    models.draft.decoding = replace(models.draft.decoding, policy=policy)
    answers = {}
    for done in _completions(prompts, models, options, console, kwargs):
        ids = done.token_ids.tolist()
        text = models.tokenizer.decode(ids, skip_special_tokens=True)
        answers[done.index] = {"index": done.index, "text": text, "token_ids": ids}
        if done.error is not None:
            answers[done.index]["error"] = said(done.error)
            text = f"(failed: {said(done.error)})"
        if len(prompts) > 1:
            console.show(f"=== prompt {done.index + 1} of {len(prompts)}\n{text}")
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
        found = _compare(prompts, document["answers"], models.target, options.seed, kwargs)
        document["plain"] = found
        console.note("without the draft: {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**found))
        if found["identical_answers"] is not None:
            console.note(f"the same tokens in {found['identical_answers']} of {len(prompts)} answers")
        if found["best_tokens"] is not None:
            rounding = tolerance_of(models.target.dtype)
            console.note(f"best up to rounding: {found['best_tokens']} of {num_tokens} tokens ({rounding})")
    console.document(document)
    return not any("error" in answer for answer in answers.values())


def _given_prompts(options: Namespace) -> PromptFile:
    if options.prompts_file is not None:
        return read_prompt_file(options.prompts_file, several_turns=False)
    words = options.prompts or [sys.stdin.read().rstrip("\n")]
    if not all(words):
        raise ValueError("a prompt is empty: give it as a word, as --prompts_file, or on stdin")
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
        shown = None if console.json else TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with redirect_stdout(console.output):
            call = timed_call(target, prompts, options.seed, draft, streamer=shown, **kwargs)
        yield Completion(0, prompts[0], torch.tensor(call.token_ids[0]))
    else:
        torch.manual_seed(options.seed)
        yield from generate_many(target, draft, prompts, models.tokenizer, batch_size, console.progress, **kwargs)


def _compare(
    prompts: list[list[int]], answers: list[dict[str, Any]], target: PreTrainedModel, seed: int, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Decode the answered prompts without the draft, too."""
    pairs = [(prompts[answer["index"]], answer["token_ids"]) for answer in answers if "error" not in answer]
    calls = [timed_call(target, [prompt], seed, **kwargs) for prompt, _ in pairs]
    plain = [call.token_ids[0] for call in calls]
    found = _times(sum(map(len, plain)), sum(call.seconds for call in calls))
    found |= {"identical_answers": None, "best_tokens": None}
    if is_sampled(kwargs, target):
        return found
    found["identical_answers"] = sum(ids == other for (_, ids), other in zip(pairs, plain, strict=True))
    best = [count_best(target, *pair, other, **kwargs) for pair, other in zip(pairs, plain, strict=True)]
    return found | {"best_tokens": None if None in best else sum(best)}


def _times(num_tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / max(seconds, 1e-9)}


def run_regenerate(options: Namespace, console: Console) -> bool:
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
    kwargs = values_of(options, "output_file", "num_samples", "batch_size", "enable_thinking", "seed")
    if options.endpoint is None:
        if options.api_key_env is not None:
            raise ValueError("--api_key_env is for a server: give its --endpoint, too")
        models = load_models(options)
        prompts = [as_chat(prompt, models.tokenizer) for prompt in prompts]
        kwargs |= generate_kwargs(options, models.target)
        return regenerate(models.target, prompts, models.tokenizer, draft=models.draft, **kwargs)
    api_key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not api_key:
        raise ValueError(f"--api_key_env: the environment variable {options.api_key_env} is not set")
    if options.no_chat_template:
        raise ValueError("--no_chat_template: a server puts its own chat template around a text. Drop one of them")
    kwargs |= values_of(options, "draft", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    return regenerate(options.target, prompts, None, endpoint=Endpoint(options.endpoint, api_key), **kwargs)
