"""How fast a target decodes, and how much of its drafts it accepts: tasks in, one result file out.

[`evaluate`] is the whole harness; [`measure_acceptance`] counts accepted tokens alone. Knows nothing of training or of
figures.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import (
    FORMS,
    Fault,
    Prompt,
    PromptFile,
    as_chat,
    as_text,
    read_prompt,
    read_prompt_file,
)
from ..decoding.many import generate_many
from ..decoding.rounds import RoundStatistics
from ..files import Journal, digest, plain_json
from ..maths.policies import FullBlock, Policy
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..provenance import provenance
from ..targets.fingerprint import fingerprint
from .metrics import Metrics, TurnRecord, metrics_by_task, metrics_table
from .results import describe_draft, describe_policy, describe_sampling, describe_target, write_result
from .run import EvaluationRun, FailedPrompt

ALL = "all"  # the name that the tasks together have
DEFAULT_NEW_TOKENS = 128
MADE_HERE = (
    "input_ids", "inputs", "inputs_embeds", "attention_mask", "past_key_values", "streamer", "assistant_model",
    "num_return_sequences", "return_dict_in_generate", "max_length",
)  # fmt: skip
CUT_OFFS = ("assistant_confidence_threshold", "num_assistant_tokens")
Task = str | Path | PromptFile | Iterable[Any]


@dataclass(frozen=True)
class Evaluation:
    """What evaluating showed.

    Attributes:
        metrics (`dict[str, Metrics]`): Of each task, and of `all` together.
        records (`list[TurnRecord]`): Every answered turn with its rounds, by task, prompt and turn.
        failed (`list[FailedPrompt]`): What was left out.
        facts (`dict`): Who was measured, and how: the rest of the result file.
    """

    metrics: dict[str, Metrics]
    records: list[TurnRecord]
    failed: list[FailedPrompt]
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return what the result file holds, without kind and provenance where no file was written."""
        return self.facts | {
            "tasks": {name: part.to_dict() for name, part in self.metrics.items()},
            "failed": [asdict(part) for part in self.failed],
            "records": [record.to_dict() for record in self.records],
        }

    def table(self) -> str:
        """Return a Markdown table, one row per task; `all` only if there are several."""
        shown = {name: part for name, part in self.metrics.items() if name != ALL or len(self.metrics) > 2}
        return metrics_table(shown)


def evaluate(
    target: PreTrainedModel,
    draft: DraftModel | None,
    tasks: Mapping[str, Task],
    tokenizer: PreTrainedTokenizerBase,
    output_file: str | Path | None = None,
    policy: Policy | None = None,
    batch_size: int = 1,
    compare_plain: bool = False,
    progress: bool = True,
    seed: int = 0,
    chat_template: bool = True,
    enable_thinking: bool | None = None,
    **generate_kwargs: Any,
) -> Evaluation:
    """Decode the prompts of some tasks, record every round, and sum up.

    Each prompt may have several turns: the target's own answer goes into the conversation before the next one. With a
    chat template, a text is a user's message; without, turns are one text, each answer continuing it, and the next
    turn behind an empty line. `batch_size` conversations of a task are decoded in one `generate()` call per turn; one
    that has little room left in the target's context has a call of its own.

    A line that is malformed, a prompt without room for an answer, or one that fails, is listed in `failed`; the others
    go on. Finished turns are written to `<output_file>.partial.jsonl` as they come: the same call goes on from there
    after an interruption, and the file is deleted when the result is written. All draws of a call are decided by
    `seed`, task, prompt and turn, so an interruption changes no token; policies that look at the clock may cut blocks
    differently.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`], *optional*): Its draft; `None` measures plain decoding.
        tasks (`Mapping`): Prompts of each task: a JSON Lines file, or an iterable, of strings or rows with `turns`,
            `prompt`, `question`, `messages` or `conversations`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        output_file (`str`, *optional*): Where the result of the kind `evaluation` goes; what was there is replaced.
        policy ([`Policy`], *optional*): How much of a block is verified; all of it unless given.
        batch_size (`int`): Conversations decoded together.
        compare_plain (`bool`): Decode each turn without the draft, too, right before. Answers are the draft's.
        progress (`bool`): Show a progress bar.
        seed (`int`): Of all draws.
        chat_template (`bool`): Whether the tokenizer's chat template is used, if it has one.
        enable_thinking (`bool`, *optional*): For the chat template, if given.
        generate_kwargs: For `generate()`; `max_new_tokens=128` unless given, here or in a `generation_config` among
            them, and never more than the target's context has room for.

    Returns:
        [`Evaluation`]

    Raises:
        ValueError: If a file is missing or holds no prompt, the draft does not fit, an option is not for many prompts,
            an unfinished run had other settings (naming them), or no prompt could be answered.
    """
    if draft is not None:
        require_pair(target, draft)
    _check_arguments(draft, tasks, policy, batch_size, compare_plain, generate_kwargs)
    options = _with_length(generate_kwargs)
    if draft is not None:
        draft.bind(target)
        policy = policy or FullBlock()
    read = {name: _read_task(name, task) for name, task in tasks.items()}
    prepared = partial(as_chat, tokenizer=tokenizer) if chat_template and tokenizer.chat_template else as_text
    prompts = {name: [prepared(prompt) for prompt in part.prompts] for name, part in read.items()}
    journal = None
    if output_file is not None:
        settings = _settings(target, draft, prompts, tokenizer, policy, batch_size, compare_plain, seed, options)
        settings["enable_thinking"] = enable_thinking
        journal = Journal(_beside(output_file), settings)
    before = None if draft is None else draft.decoding
    if draft is not None:
        draft.decoding = replace(before, policy=policy)
    run = EvaluationRun(target, draft, tokenizer, batch_size, compare_plain, seed, enable_thinking, options, journal)
    try:
        run.answer(prompts, progress)
    finally:
        if draft is not None:
            draft.decoding = before
    evaluation = _summed_up(run, read, policy, seed)
    if output_file is not None:
        written = write_result(output_file, "evaluation", **evaluation.to_dict())
        evaluation.facts.update({name: written[name] for name in ("kind", "provenance")})
        journal.remove()
    return evaluation


def _check_arguments(
    draft: DraftModel | None,
    tasks: Mapping[str, Task],
    policy: Policy | None,
    batch_size: int,
    compare_plain: bool,
    generate_kwargs: Mapping[str, Any],
) -> None:
    if not isinstance(tasks, Mapping):
        raise TypeError(f"tasks must map names to prompts, got {type(tasks).__name__}: pass {{'math': 'math.jsonl'}}")
    if not tasks:
        raise ValueError("there is no task: pass {'name': 'prompts.jsonl'}")
    if ALL in tasks:
        raise ValueError(f"a task cannot be called {ALL!r}, which stands for all of them: choose another name")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if draft is None and (compare_plain or policy is not None):
        given = "compare_plain" if compare_plain else "a policy"
        raise ValueError(f"{given} needs a draft, got draft=None: pass one, or drop {given}")
    for name in MADE_HERE:
        if generate_kwargs.get(name) is not None:
            instead = "use max_new_tokens" if name == "max_length" else "drop it"
            raise ValueError(f"evaluate makes {name} itself: {instead}")
    for name in CUT_OFFS:
        if generate_kwargs.get(name) is not None:
            raise ValueError(f"{name} cuts blocks, which is the policy's task: pass policy=ConfidenceThreshold(...)")


def _with_length(generate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a length: a `generation_config` among them would lose to a default beside it."""
    given = generate_kwargs.get("generation_config")
    length = None if given is None else given.max_new_tokens
    return {"max_new_tokens": DEFAULT_NEW_TOKENS if length is None else length} | generate_kwargs


def _read_task(name: str, task: Task) -> PromptFile:
    if isinstance(task, PromptFile):
        return task
    if isinstance(task, str | Path):
        return read_prompt_file(str(task))
    prompts, faults = [], []
    for place, row in enumerate(task, start=1):
        try:
            prompts.append(replace(row if isinstance(row, Prompt) else read_prompt(row), line=place))
        except ValueError as error:
            faults.append(Fault(name, place, f"is no prompt: {error}"))
    if not prompts:
        found = f" ({faults[0]})" if faults else ""
        raise ValueError(f"task {name!r} holds no prompt: each must be {FORMS}{found}")
    return PromptFile(name, prompts, faults)


def _settings(
    target: PreTrainedModel,
    draft: DraftModel | None,
    prompts: Mapping[str, Sequence[Prompt]],
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy | None,
    batch_size: int,
    compare_plain: bool,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what an unfinished run must share to be gone on with; long values by their hash."""
    config = {} if draft is None else {**draft.config.to_dict(), "_name_or_path": "", "domain": draft.decoding.domain}
    facts = provenance(target.device)
    generation = {**target.generation_config.to_diff_dict(), "transformers_version": ""}
    return {
        "tasks": {name: digest([asdict(prompt) for prompt in part]) for name, part in prompts.items()},
        "target": fingerprint(target),
        "draft": None if draft is None else fingerprint(draft),
        "draft_config": digest(config),
        "generation_config": digest(generation),
        "chat_template": digest(tokenizer.chat_template),
        "vocabulary": digest(tokenizer.get_vocab()),
        "policy": None if policy is None else describe_policy(policy),
        "loop": None if draft is None else draft.decoding.use_transformers_loop,
        "batch_size": batch_size,
        "compare_plain": compare_plain,
        "seed": seed,
        "options": {name: plain_json(value) for name, value in sorted(options.items())},
        **{name: facts[name] for name in ("device", "threads", "hf_dspark", "torch", "transformers")},
    }


def _summed_up(run: EvaluationRun, read: Mapping[str, PromptFile], policy: Policy | None, seed: int) -> Evaluation:
    order = {name: place for place, name in enumerate(read)}
    records = sorted(run.records.values(), key=lambda record: (order[record.task], record.prompt, record.turn))
    malformed = [FailedPrompt(name, fault.line, fault.reason) for name, part in read.items() for fault in part.faults]
    failed = sorted([*malformed, *run.failed], key=lambda part: (order[part.task], part.line))
    if not records:
        first = failed[0]
        raise ValueError(f"no prompt could be answered; the first: {first.task} line {first.line}: {first.error}")
    target, draft, options = run.target, run.draft, run.options
    facts = {
        "target": describe_target(target),
        "draft": {} if draft is None else describe_draft(draft),
        "sampling": describe_sampling(options, target, seed) | _other_options(options),
        "policy": None if policy is None else describe_policy(policy),
        "max_new_tokens": options["max_new_tokens"],
        "batch_size": run.batch_size,
    }
    block_size = 0 if draft is None else draft.config.block_size
    return Evaluation(metrics_by_task(records, read, block_size), records, failed, facts)


def _other_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that [`describe_sampling`] does not look at."""
    known = ("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "generation_config")
    return {name: plain_json(value) for name, value in options.items() if name not in known and value is not None}


def _beside(output_file: str | Path) -> Path:
    path = Path(output_file)
    return path.with_name(f"{path.name}.partial.jsonl")


@dataclass(frozen=True)
class AcceptanceReport:
    """What decoding some prompts showed.

    Attributes:
        tau (`float`): Mean tokens per round, bonus token included, over the rounds of all prompts.
        acceptance (`list[float]`): Of each draft position, the share accepted where all before it were.
        prompts, rounds, tokens (`int`): Prompts decoded, rounds of all of them, and tokens written.
    """

    tau: float
    acceptance: list[float]
    prompts: int
    rounds: int
    tokens: int

    @classmethod
    def of(cls, statistics: RoundStatistics, block_size: int, prompts: int, tokens: int) -> "AcceptanceReport":
        """Sum up the rounds of one or more calls."""
        return cls(statistics.tau, statistics.conditional_acceptance(block_size), prompts, statistics.rounds, tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds; `None` for a position that was never reached."""
        rates = [None if math.isnan(rate) else round(rate, 4) for rate in self.acceptance]
        return asdict(self) | {"tau": round(self.tau, 4), "acceptance": rates}


def measure_acceptance(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    policy: Policy | None = None,
    batch_size: int = 8,
    progress: bool = True,
    **generate_kwargs: Any,
) -> AcceptanceReport:
    """Decode prompts with a draft and report how much of it was accepted.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        prompts (`Iterable`): Texts, token ids, or rows with a `prompt`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts.
        policy ([`Policy`], *optional*): How much of a block is verified; all of it unless given.
        batch_size (`int`): Prompts decoded together.
        progress (`bool`): Show a progress bar.
        generate_kwargs: For `generate()`; `max_new_tokens=128` unless given, here or in a `generation_config`.

    Returns:
        [`AcceptanceReport`]

    Raises:
        ValueError: If there is no prompt.
        Exception: The error of the first prompt that failed.
    """
    require_pair(target, draft)
    texts = [row["prompt"] if isinstance(row, Mapping) else row for row in prompts]
    if not texts:
        raise ValueError("there is no prompt to measure on: pass at least one")
    decoding = replace(draft.decoding, policy=policy or FullBlock())
    tokens = 0
    for done in generate_many(
        target, draft, texts, tokenizer, batch_size, progress, decoding, **_with_length(generate_kwargs)
    ):
        if done.error is not None:
            raise done.error
        tokens += len(done.token_ids)
    return AcceptanceReport.of(draft.last_stats, draft.config.block_size, len(texts), tokens)


def measure_domains(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Mapping[str, Iterable[Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> dict[str, AcceptanceReport]:
    """Measure a draft on several domains.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        prompts (`Mapping`): Prompts of each domain.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts.
        kwargs: For [`measure_acceptance`].

    Returns:
        One [`AcceptanceReport`] per domain.
    """
    return {name: measure_acceptance(target, draft, part, tokenizer, **kwargs) for name, part in prompts.items()}


def compare_domains(before: Mapping[str, AcceptanceReport], after: Mapping[str, AcceptanceReport]) -> str:
    """Return a Markdown table of tau and of the acceptance at the first and last position, before and after.

    Args:
        before, after (`Mapping`): From [`measure_domains`], with the same domains.

    Raises:
        ValueError: If the domains differ.
    """
    if before.keys() != after.keys():
        raise ValueError(f"before has the domains {sorted(before)}, after has {sorted(after)}: measure the same ones")
    lines = [
        "| domain | tau before | tau after | change | position 1 | last position |",
        "|---|---|---|---|---|---|",
    ]
    for name, old in before.items():
        new = after[name]
        first, last = ((old.acceptance[place], new.acceptance[place]) for place in (0, -1))
        lines.append(
            f"| {name} | {old.tau:.2f} | {new.tau:.2f} | {new.tau / old.tau - 1:+.0%} "
            f"| {first[0]:.2f} → {first[1]:.2f} | {last[0]:.2f} → {last[1]:.2f} |"
        )
    return "\n".join(lines)


@torch.no_grad()
def tokens_per_pass(
    target: PreTrainedModel,
    prompts: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 128,
    **generate_kwargs: Any,
) -> float:
    """Return the tau of transformers' own assisted decoding: `use_mtp=True`, prompt lookup, another assistant.

    Args:
        target (`PreTrainedModel`): The model that decodes; for `use_mtp`, one with multi-token-prediction layers.
        prompts (`Iterable`): Texts or token ids, decoded one by one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts.
        max_new_tokens (`int`): Of each prompt.
        generate_kwargs: For `generate()`, the kind of assistance among them.

    Returns:
        `float`: Tokens per forward pass of the target. The prefill and its token count as none, as everywhere here.

    Raises:
        ValueError: If no pass followed a prefill.
    """
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    tokens = 0
    handle = target.register_forward_hook(count)
    try:
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            input_ids = torch.tensor([ids], device=target.device)
            output = target.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, **generate_kwargs
            )
            tokens += output.shape[1] - len(ids) - 1
            passes -= 1
    finally:
        handle.remove()
    if passes == 0:
        raise ValueError("nothing was decoded behind the first token: pass prompts, and max_new_tokens above 1")
    return tokens / passes
