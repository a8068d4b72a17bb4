"""`hf-dspark generate` and `regenerate`: answers for people, and answers to train on."""

import sys
from argparse import Namespace
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace

from transformers import TextStreamer

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, read_prompt_file, token_ids, with_thinking
from hf_dspark.measuring.decode_prompts import decode_prompts
from hf_dspark.measuring.regenerate import regenerate
from hf_dspark.measuring.results import describe_sampling
from hf_dspark.measuring.rounding import tolerance_of
from hf_dspark.measuring.timed_decoding import warm_up
from hf_dspark.scheduling.rounds import Rounds

from . import Console, said
from .models import choose_policy, generate_kwargs, load_models, note_faults, values_of


def run_generate(options: Namespace, console: Console) -> bool:
    read = _given_prompts(options)
    faults = note_faults(console, read)
    models = load_models(options)
    target, draft, tokenizer = models.target, models.draft, models.tokenizer
    prompts = [with_thinking(as_chat(prompt, tokenizer), options.enable_thinking) for prompt in read.prompts]
    kwargs = generate_kwargs(options, target)
    policy = choose_policy(options.policy, models)
    draft.decoding = replace(draft.decoding, policy=policy)
    is_single, is_queue = len(prompts) == 1, len(prompts) > 1 and not options.compare
    if options.compare:  # one by one, as plain decoding is
        warm_up(target, token_ids(prompts[0], tokenizer), [None, draft], **kwargs)
    if is_single and not console.json and not options.compare:  # shown while it grows
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    answers = []
    with redirect_stdout(console.output) if "streamer" in kwargs else nullcontext():
        for answer in decode_prompts(
            target, {"": prompts}, tokenizer, draft, seed=options.seed, continuous=is_queue,
            batch_size=options.batch_size if is_queue else 1, compare_plain=options.compare, raise_errors=is_single,
            progress="decoding" if console.progress and not is_single else None, **kwargs,
        ):  # fmt: skip
            answers.append(answer)
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            shown = text if answer.error is None else f"(failed: {said(answer.error)})"
            if not is_single:
                console.show(f"=== prompt {answer.index + 1} of {len(prompts)}\n{shown}")
            elif "streamer" not in kwargs:
                console.show(shown)
    answers.sort(key=lambda answer: answer.index)
    rounds = draft.last_stats if is_queue else Rounds.joined(answer.rounds for answer in answers)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = rounds.prefill_seconds + rounds.total_seconds
    document = {
        "answers": [
            {"index": answer.index, "token_ids": answer.token_ids}
            | {"text": tokenizer.decode(answer.token_ids, skip_special_tokens=True)}
            | ({} if answer.error is None else {"error": said(answer.error)})
            for answer in answers
        ],
        **_times(num_tokens, seconds),
        "rounds": rounds.rounds,
        "tau": rounds.tau if rounds.rounds else None,
        "sampling": describe_sampling(kwargs, target, options.seed),
        "policy": policy.to_dict(),
        "skipped_lines": faults,
    }
    console.note("{tokens} tokens in {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**document))
    if rounds.rounds:
        console.note(f"{rounds.rounds} rounds of {rounds.tau:.2f} tokens")
    if options.compare:
        plain = [answer.plain for answer in answers if answer.plain is not None]
        found = _times(sum(each.num_tokens for each in plain), sum(each.seconds for each in plain))
        console.note("without the draft: {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**found))
        same, best = [each.identical for each in plain], [each.num_best for each in plain]
        found["identical_answers"] = None if None in same else sum(same)
        found["best_tokens"] = None if None in best else sum(best)
        if found["identical_answers"] is not None:
            console.note(f"the same tokens in {found['identical_answers']} of {len(prompts)} answers")
        if found["best_tokens"] is not None:
            rounding = tolerance_of(target.dtype)
            console.note(f"best up to rounding: {found['best_tokens']} of {num_tokens} tokens ({rounding})")
        document["plain"] = found
    console.document(document)
    return all(answer.error is None for answer in answers)


def _given_prompts(options: Namespace) -> PromptFile:
    if options.prompts_file is not None:
        return read_prompt_file(options.prompts_file, several_turns=False)
    words = options.prompts or [sys.stdin.read().rstrip("\n")]
    if not all(words):
        raise ValueError("a prompt is empty: give it as a word, as --prompts_file, or on stdin")
    return PromptFile([Prompt(word) for word in words], [])


def _times(num_tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / max(seconds, 1e-9)}


def run_regenerate(options: Namespace, console: Console) -> bool:
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    faults = note_faults(console, read)
    models = load_models(options)
    kwargs = values_of(options, "output_file", "num_samples", "batch_size", "enable_thinking", "seed")
    kwargs |= generate_kwargs(options, models.target)
    report = regenerate(models.target, read.prompts, models.tokenizer, draft=models.draft, **kwargs)
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    console.document(asdict(report) | {"output_file": str(report.output_file), "skipped_lines": faults})
    return report.num_failed == 0
