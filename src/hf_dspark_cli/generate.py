"""`hf-dspark generate`, `race` and `regenerate`: answers for people, their speed, and answers to train on."""

import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace

import numpy as np
from transformers import TextStreamer
from transformers.utils.logging import tqdm

from hf_dspark.data.prompts import Prompt, as_chat, read_prompt_file, read_prompts
from hf_dspark.decoding.attach import attach
from hf_dspark.decoding.hook import default_policy
from hf_dspark.measuring.decode_prompts import decode_prompts
from hf_dspark.measuring.metrics import Metrics
from hf_dspark.measuring.regenerate import regenerate
from hf_dspark.measuring.results import describe_sampling
from hf_dspark.measuring.tables import markdown_table, number
from hf_dspark.measuring.timed_decoding import Answer, decoding_as
from hf_dspark.models.prompt_lookup import PromptLookup
from hf_dspark.scheduling.policies import FullBlock
from hf_dspark.scheduling.rounds import Rounds
from hf_dspark.targets.support import TargetSupport

from . import Console, said
from .models import choose_policy, generate_kwargs, load_models, values_of

SEVERAL_KINDS = (  # raced where no prompt is given
    "Why is the sky blue?",
    "A box holds 12 pencils. Tom buys 3 boxes and gives 7 pencils away. How many are left? Explain each step.",
    "Write a Python function that tells whether a text is a palindrome, and a test of it.",
    "Rename x to total, and repeat the whole code:\n\ndef add(items):\n    x = 0\n    for item in items:\n"
    "        x += item\n    return x\n",
    "Write a short story about a lighthouse keeper who finds a letter.",
)


def read_given(options: Namespace, console: Console) -> list[Prompt]:
    if options.prompts_file is None:
        console.skip([])
        return read_prompts(options.prompts or [sys.stdin.read().rstrip("\n")])
    read = read_prompt_file(options.prompts_file, options.num_prompts, several_turns=False)
    console.skip(read.faults)
    return read.prompts


def run_generate(options: Namespace, console: Console) -> bool:
    read = read_given(options, console)
    target, tokenizer, draft = load_models(options)
    prompts = [as_chat(prompt, tokenizer, options.enable_thinking) for prompt in read]
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
    }
    console.note("{tokens} tokens in {seconds:.2f} s ({tokens_per_second:.0f} tokens/s)".format(**document))
    if rounds.rounds:
        console.note(f"{rounds.rounds} rounds of {rounds.tau:.2f} tokens")
    console.document(document)
    return all(answer.error is None for answer in answers)


def run_race(options: Namespace, console: Console) -> bool:
    if options.prompts_file is None:
        options.prompts = options.prompts or list(SEVERAL_KINDS)
    read = read_given(options, console)
    target, tokenizer, draft = load_models(options)
    draft, kwargs = draft or attach(target).draft, generate_kwargs(options, target)
    sampling = describe_sampling(kwargs, target, options.seed)
    ways = {"plain": (None, None, {}), "transformers' prompt lookup": (None, None, {"prompt_lookup_num_tokens": 10})}
    if TargetSupport.of(target).tree_obstacle is None:
        ways["prompt lookup"] = PromptLookup(target), None, {}
    if draft is not None:
        ways["draft, whole blocks"] = draft, FullBlock(), {}
        ways["draft, by default"] = draft, default_policy(draft, target), {}
    prompts = [as_chat(prompt, tokenizer, options.enable_thinking) for prompt in read]
    answers: dict[str, list[Answer]] = {name: [] for name in ways}
    for place, prompt in enumerate(tqdm([prompts[0], *prompts], disable=not console.progress, unit="prompt")):
        for name, (drafter, policy, more) in ways.items():
            asked = {"seed": options.seed + place, "raise_errors": True, "progress": None} | kwargs | more
            with decoding_as(drafter, policy=policy, answers=None):
                (answer,) = decode_prompts(target, {"": [prompt]}, tokenizer, drafter, **asked)
            plain = (*answers["plain"], answer)[place]
            same = None if sampling["do_sample"] else answer.token_ids == plain.token_ids
            answers[name].append(replace(answer, index=place, plain=plain, identical=same))
    answers = {name: given[1:] for name, given in answers.items()}  # the first one warmed up
    block_size = 0 if draft is None else draft.config.block_size
    found = {name: Metrics.of(given, block_size) for name, given in answers.items()}
    best = max(found, key=lambda name: found[name].speedup.ratio_of_medians)
    chosen = {name: _choice(answers[name]) for name in ("prompt lookup", "draft, by default") if name in ways}
    told = "\n".join(f"{name}: {choice}" for name, choice in chosen.items())
    console.show(f"{_race_table(found, answers)}\n\n{told}\nfastest: {best}")
    ways = {name: asdict(part) for name, part in found.items()}
    console.document({"ways": ways, "fastest": best, "chosen": chosen, "sampling": sampling})
    return True


def _race_table(found: Mapping[str, Metrics], answers: Mapping[str, Sequence[Answer]]) -> str:
    rows = []
    for name, part in found.items():
        low, high = np.quantile([len(each.token_ids) / each.seconds for each in answers[name]], (0.25, 0.75))
        speed = part.speedup
        over = f"{speed.ratio_of_medians:.2f} ({speed.lower_quartile:.2f}–{speed.upper_quartile:.2f})"
        same = None if speed.identical is None else f"{speed.identical} of {part.turns}"
        rows.append((name, f"{part.tokens_per_second:.1f} ({low:.1f}–{high:.1f})", over, number(part.tau), same))
    return markdown_table(("", "tokens/s (quartiles)", "over plain (quartiles)", "tokens a round", "identical"), rows)


def _choice(answers: Sequence[Answer]) -> str:
    """Say what a scheduler sent, what it brought, and what that took: that is what it goes by."""
    rounds = Rounds.joined(answer.rounds for answer in answers)
    step = sum(each.plain.seconds for each in answers) / sum(len(each.plain.token_ids) for each in answers)
    facts = zip(rounds.proposed, rounds.depths, rounds.committed, rounds.seconds, strict=True)
    sent = [(nodes, nodes > depth, tokens, each.total) for nodes, depth, tokens, each in facts if nodes]
    if not sent:
        return "sent no drafts, as none was expected to pay"
    nodes, trees, tokens, seconds = (statistics.fmean(column) for column in zip(*sent, strict=True))
    share = len(sent) / rounds.rounds
    off = ". In the others none was expected to pay" * (share < 0.5)
    return (
        f"sent {nodes:.1f} draft tokens in {share:.0%} of its rounds, {trees:.0%} of these as trees. Such a round "
        f"brought {tokens:.2f} tokens and took {seconds / step:.2f} plain steps{off}"
    )


def run_regenerate(options: Namespace, console: Console) -> bool:
    read = read_given(options, console)
    target, tokenizer, draft = load_models(options)
    kwargs = values_of(options, "output_file", "num_samples", "batch_size", "enable_thinking", "seed")
    report = regenerate(target, read, tokenizer, draft=draft, **kwargs, **generate_kwargs(options, target))
    console.show(
        f"{report.num_answers} answers in {report.output_file}, {report.num_unfinished} of them cut by their length; "
        f"{report.num_failed} failed"
    )
    console.document(asdict(report) | {"output_file": str(report.output_file)})
    return report.num_failed == 0
