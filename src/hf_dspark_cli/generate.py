"""`hf-dspark generate`, `race` and `regenerate`: answers for people, their speed, and answers to train on."""

import sys
from argparse import Namespace
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace

from transformers import TextStreamer
from transformers.utils.logging import tqdm

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, read_prompt_file, with_thinking
from hf_dspark.decoding.attach import attach
from hf_dspark.decoding.hook import default_policy
from hf_dspark.measuring.decode_prompts import decode_prompts
from hf_dspark.measuring.metrics import Metrics, metrics_table
from hf_dspark.measuring.regenerate import regenerate
from hf_dspark.measuring.results import describe_sampling, short_policy
from hf_dspark.measuring.timed_decoding import PlainAnswer, decoding_as
from hf_dspark.scheduling.policies import FullBlock

from . import Console, said
from .models import choose_policy, generate_kwargs, load_models, note_faults, values_of


def read_given(options: Namespace, console: Console) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a command, and the lines of its file that are left out."""
    if options.prompts_file is not None:
        read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    else:
        read = PromptFile([Prompt(word) for word in options.prompts or [sys.stdin.read().rstrip("\n")]], [])
    if not all(prompt.content for prompt in read.prompts):
        raise ValueError("a prompt is empty: give it as a word, as --prompts_file, or on stdin")
    return read.prompts, note_faults(console, read)


def run_generate(options: Namespace, console: Console) -> bool:
    read, faults = read_given(options, console)
    target, tokenizer, draft = load_models(options)
    prompts = [with_thinking(as_chat(prompt, tokenizer), options.enable_thinking) for prompt in read]
    kwargs = generate_kwargs(options, target)
    policy = choose_policy(options.policy, target, draft)
    draft.decoding = replace(draft.decoding, policy=policy)
    is_single = len(prompts) == 1
    if is_single and not console.json:  # shown while it grows
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    answers = []
    with redirect_stdout(console.output) if "streamer" in kwargs else nullcontext():
        for answer in decode_prompts(
            target, {"": prompts}, tokenizer, draft, seed=options.seed, continuous=not is_single,
            batch_size=1 if is_single else options.batch_size, raise_errors=is_single,
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
    rounds = answers[0].rounds if is_single else draft.last_stats
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
    console.document(document)
    return all(answer.error is None for answer in answers)


def run_race(options: Namespace, console: Console) -> bool:
    read, faults = read_given(options, console)
    target, tokenizer, draft = load_models(options)
    draft, kwargs = draft or attach(target).draft, generate_kwargs(options, target)
    sampling = describe_sampling(kwargs, target, options.seed)
    ways = {"plain": (None, None, {}), "transformers' prompt lookup": (None, None, {"prompt_lookup_num_tokens": 10})}
    if draft is not None:
        default = default_policy(draft, target)
        ways["draft, whole blocks"] = draft, FullBlock(), {}
        ways[f"draft, by default: {short_policy(default.to_dict())}"] = draft, default, {}
    prompts = [with_thinking(as_chat(prompt, tokenizer), options.enable_thinking) for prompt in read]
    answers = {name: [] for name in ways}
    for place, prompt in enumerate(tqdm([prompts[0], *prompts], disable=not console.progress, unit="prompt")):
        for name, (drafter, policy, more) in ways.items():
            asked = {"seed": options.seed + place, "raise_errors": True, "progress": None} | kwargs | more
            with decoding_as(drafter, policy=policy):
                (answer,) = decode_prompts(target, {"": [prompt]}, tokenizer, drafter, **asked)
            plain = (*answers["plain"], answer)[place]
            same = None if sampling["do_sample"] else answer.token_ids == plain.token_ids
            beside = PlainAnswer(len(plain.token_ids), plain.prefill_seconds, plain.seconds, same)
            answers[name].append(replace(answer, index=place, plain=beside))
    block_size = 0 if draft is None else draft.config.block_size
    found = {name: Metrics.of(given[1:], block_size) for name, given in answers.items()}  # the first one warmed up
    best = max(found, key=lambda name: found[name].speedup.ratio_of_medians)
    console.show(f"{metrics_table(found)}\n\nfastest: {best}")
    told = {"ways": {name: part.to_dict() for name, part in found.items()}, "fastest": best, "sampling": sampling}
    console.document(told | {"skipped_lines": faults})
    return True


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
