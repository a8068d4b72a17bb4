"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on."""

import sys
from argparse import Namespace
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace

from transformers import TextStreamer

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, read_prompt_file, token_ids, with_thinking
from hf_dspark.measuring.decode_prompts import decode_prompts
from hf_dspark.measuring.metrics import speedup
from hf_dspark.measuring.regenerate import regenerate
from hf_dspark.measuring.results import describe_sampling
from hf_dspark.measuring.rounding import tolerance_of
from hf_dspark.measuring.timed_decoding import warm_up
from hf_dspark.scheduling.rounds import Rounds

from . import Console, said
from .models import choose_policy, generate_kwargs, load_models, note_faults, values_of


def run_generate(options: Namespace, console: Console) -> bool:
    if options.prompts_file is not None:
        read = read_prompt_file(options.prompts_file, several_turns=False)
    else:
        read = PromptFile([Prompt(word) for word in options.prompts or [sys.stdin.read().rstrip("\n")]], [])
    if not all(prompt.content for prompt in read.prompts):
        raise ValueError("a prompt is empty: give it as a word, as --prompts_file, or on stdin")
    faults = note_faults(console, read)
    target, tokenizer, draft = load_models(options)
    prompts = [with_thinking(as_chat(prompt, tokenizer), options.enable_thinking) for prompt in read.prompts]
    kwargs = generate_kwargs(options, target)
    policy = choose_policy(options.policy, target, draft)
    draft.decoding = replace(draft.decoding, policy=policy)
    is_single, is_queue = len(prompts) == 1, len(prompts) > 1 and not options.compare
    if options.compare:  # one by one, as plain decoding is
        warm_up(target, token_ids(prompts[0], tokenizer), [None, draft], **kwargs)
    if is_single and not (console.json or options.compare):  # shown while it grows
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    answers = []
    with redirect_stdout(console.output) if "streamer" in kwargs else nullcontext():
        for answer in decode_prompts(
            target, {"": prompts}, tokenizer, draft, seed=options.seed, continuous=is_queue,
            batch_size=options.batch_size if is_queue else 1, compare_plain=options.compare, raise_errors=is_single,
            progress="decoding" if console.progress and not is_single else None, **kwargs,
        ):  # fmt: skip
            told = {"index": answer.index, "token_ids": answer.token_ids}
            told["text"] = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            told |= {} if answer.error is None else {"error": said(answer.error)}
            answers.append((answer.index, answer, told))
            if "streamer" not in kwargs:
                shown = f"(failed: {told['error']})" if "error" in told else told["text"]
                console.show(shown if is_single else f"=== prompt {answer.index + 1} of {len(prompts)}\n{shown}")
    _, answers, told = zip(*sorted(answers, key=lambda each: each[0]), strict=True)
    rounds = draft.last_stats if is_queue else Rounds.joined(answer.rounds for answer in answers)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = rounds.prefill_seconds + rounds.total_seconds
    document = {
        "answers": told,
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / max(seconds, 1e-9),
        "rounds": rounds.rounds,
        "tau": rounds.tau if rounds.rounds else None,
        "sampling": describe_sampling(kwargs, target, options.seed),
        "policy": policy.to_dict(),
        "skipped_lines": faults,
    }
    console.note("{tokens} tokens in {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**document))
    if rounds.rounds:
        console.note(f"{rounds.rounds} rounds of {rounds.tau:.2f} tokens")
    if (found := speedup(answers)) is not None:
        document["plain"] = asdict(found)
        times = f"{found.plain_tokens_per_second:.0f} tokens/s; with it {found.ratio_of_medians:.2f} times as fast"
        console.note(f"without the draft: {times}")
        if found.identical is not None:
            console.note(f"the same tokens in {found.identical} of {len(prompts)} answers")
        if found.best_tokens is not None:
            best = f"{found.best_tokens} of {num_tokens} tokens ({tolerance_of(target.dtype)})"
            console.note(f"best up to rounding: {best}")
    console.document(document)
    return all(answer.error is None for answer in answers)


def run_regenerate(options: Namespace, console: Console) -> bool:
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    faults = note_faults(console, read)
    target, tokenizer, draft = load_models(options)
    kwargs = values_of(options, "output_file", "num_samples", "batch_size", "enable_thinking", "seed")
    report = regenerate(target, read.prompts, tokenizer, draft=draft, **kwargs, **generate_kwargs(options, target))
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    console.document(asdict(report) | {"output_file": str(report.output_file), "skipped_lines": faults})
    return report.num_failed == 0
