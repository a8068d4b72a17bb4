"""How fast a target decodes, and how much of its drafts it accepts: tasks in, one result file out."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cpu import fast_linears
from ..data.conversations import tokenizer_of
from ..data.prompts import Prompt, PromptFile, as_chat, read_prompt_file, several, token_ids
from ..decoding.call import effective_config
from ..decoding.many import refuse_made_here
from ..files import Journal, digest, one_line, plain_json
from ..models.auto import require_draft, require_target
from ..models.modeling_draft import DraftModel
from ..provenance import provenance
from ..scheduling.policies import FullBlock, Policy
from ..targets.fingerprint import fingerprint
from .decode_prompts import DEFAULT_NEW_TOKENS, decode_prompts, with_limit
from .metrics import Metrics, metrics_by_task, metrics_table
from .results import describe_draft, describe_sampling, describe_target, write_result
from .rounding import tolerance_of
from .timed_decoding import Answer, decoding_as, warm_up

ALL = "all"  # the name of the tasks together
# Blocks are cut by the policy.
CUT_OFFS = dict.fromkeys(
    ("assistant_confidence_threshold", "num_assistant_tokens"), "pass policy=ConfidenceThreshold(...)"
)
# Options that other facts of a result tell.
DESCRIBED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "generation_config")
Task = str | Path | PromptFile | Iterable[Any]


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that could not be evaluated, or not to its last turn; `line` is its place in the task, from 1."""

    task: str
    line: int
    error: str


@dataclass(frozen=True)
class Evaluation:
    """What evaluating showed."""

    metrics: dict[str, Metrics]  # of each task, and of `all` together
    # Every answered turn with its rounds, by task (`group`), prompt and turn.
    answers: list[Answer] = field(repr=False)
    failed: list[FailedPrompt]  # what was left out
    facts: dict[str, Any] = field(repr=False)  # who was measured, and how: the rest of the result file

    def to_dict(self) -> dict[str, Any]:
        """Return what the result file holds; kind and provenance only if a file was written."""
        return self.facts | {
            "tasks": {name: asdict(part) for name, part in self.metrics.items()},
            "failed": [asdict(part) for part in self.failed],
        }

    def table(self) -> str:
        """Return a Markdown table, one row per task; `all` only if there are several."""
        shown = {name: part for name, part in self.metrics.items() if name != ALL or len(self.metrics) > 2}
        rounding = self.facts["rounding"]
        return metrics_table(shown) + (f"\n\nBest up to rounding: {rounding}." if rounding else "")

    __str__ = table


def evaluate(
    target: PreTrainedModel,
    draft: DraftModel | None,
    tasks: Mapping[str, Task],
    processing_class: PreTrainedTokenizerBase,
    output_file: str | Path | None = None,
    policy: Policy | None = None,
    batch_size: int = 1,
    compare_plain: bool = False,
    seed: int = 0,
    enable_thinking: bool | None = None,
    packed: bool = False,
    **generate_kwargs: Any,
) -> Evaluation:
    """Decode the prompts of some tasks, and sum up their rounds.

    Each prompt may have several turns: the target's own answer goes into the conversation before the next one. With a
    chat template, a text is a user's message. Without one, a conversation is one text: each answer continues it, and
    the next turn follows after an empty line.

    A line that is malformed, a prompt without room for an answer, or one that fails, is listed in `failed`; the others
    go on. Finished turns are kept in `<output_file>.partial.jsonl` until the result is written: after an interruption
    the same call goes on from there. `seed`, task, prompt and turn decide all draws, so it changes no token.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`], *optional*): Its draft; `None` measures plain decoding.
        tasks (`Mapping`): Prompts of each task: a JSON Lines file, or a list of strings or of examples with
            `turns`, `prompt`, `question`, `messages` or `conversations`.
        processing_class (`PreTrainedTokenizerBase`): The target's tokenizer.
        output_file (`str`, *optional*): Where the result of the kind `evaluation` goes; replaces what was there.
        policy ([`Policy`], *optional*): How much of a block is verified; all of it unless given.
        batch_size (`int`): Conversations of a task decoded together, in one `generate()` call per turn.
        compare_plain (`bool`): Decode each turn without the draft, too, right before. Answers are the draft's. Of
            greedy ones, those that are identical are counted, and the tokens that are the target's best up to
            rounding: in bfloat16 an answer may differ where two tokens are as good.
        seed (`int`): Of all draws.
        enable_thinking (`bool`, *optional*): For the chat template, if given.
        packed (`bool`): Decode with packed weights, see [`fast_linears`], without the draft, too.
        generate_kwargs: For `generate()`; `max_new_tokens=128` unless given, and never more than the target's context
            has room for. `None` leaves it to the target's generation config.

    Returns:
        [`Evaluation`]

    Raises:
        TypeError: If tasks are no mapping, or a task is a single prompt.
        ValueError: If a file is missing or holds no prompt, the draft does not fit, an option is not for many prompts,
            an unfinished run had other settings (naming them), or no prompt could be answered.

    Example:

    ```python
    tasks = {"math": prompts, "code": "code.jsonl"}
    found = evaluate(target, draft, tasks, tokenizer, "out/eval.json", compare_plain=True, max_new_tokens=64)
    print(found, found.metrics["math"].tau)
    ```
    """
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
    require_target(target)
    models = [target]
    if draft is not None:
        require_draft(draft)
        models.append(draft.bind(target))
        policy = policy or FullBlock()
    refuse_made_here("evaluate", target, generate_kwargs, max_length="use max_new_tokens", **CUT_OFFS)
    options = with_limit(target, generate_kwargs, DEFAULT_NEW_TOKENS)
    read = {name: _read_task(name, task) for name, task in tasks.items()}
    prompts = {
        name: [as_chat(prompt, processing_class, enable_thinking) for prompt in part.prompts]
        for name, part in read.items()
    }
    sampling = describe_sampling(options, target, seed)
    others = {name: value for name, value in options.items() if name not in DESCRIBED and value is not None}
    facts = {
        "target": describe_target(target),
        "draft": {} if draft is None else describe_draft(draft),
        "sampling": sampling | plain_json(others),
        "policy": None if policy is None else policy.to_dict(),
        "max_new_tokens": effective_config(target, options).max_new_tokens,
        "batch_size": batch_size,
        "packed": packed,
        "rounding": tolerance_of(target.dtype) if compare_plain and not sampling["do_sample"] else None,
    }
    journal, answers, failed = None, {}, []
    if output_file is not None:
        settings = {"compare_plain": compare_plain, "seed": seed, "enable_thinking": enable_thinking}
        settings |= {name: facts[name] for name in ("policy", "batch_size", "packed")}
        settings |= _settings(target, draft, processing_class, prompts, options)
        journal = Journal(f"{output_file}.partial.jsonl", settings, Answer.from_dict)
        answers = {answer.key: answer for answer in journal.entries}
    with decoding_as(draft, policy=policy), fast_linears(*models, packed=True) if packed else nullcontext():
        with suppress(Exception):  # a prompt that fails is named when its turn comes
            first = next(prompt for part in prompts.values() for prompt in part)
            warm_up(target, token_ids(first, processing_class), {draft, None} if compare_plain else {draft}, **options)
        for answer in decode_prompts(
            target, prompts, processing_class, draft, done={key: each.token_ids for key, each in answers.items()},
            seed=seed, batch_size=batch_size, compare_plain=compare_plain, progress="evaluating", **options,
        ):  # fmt: skip
            if answer.error is None:
                answers[answer.key] = answer
                if journal is not None:
                    journal.append(answer.to_dict())
            else:
                where = f"turn {answer.turn + 1}: " if answer.turn else ""
                line = read[answer.group].prompts[answer.index].line
                failed.append(FailedPrompt(answer.group, line, where + one_line(answer.error)))
    order = {name: place for place, name in enumerate(read)}
    failed += [FailedPrompt(name, fault.line, fault.reason) for name, part in read.items() for fault in part.faults]
    failed.sort(key=lambda part: (order[part.task], part.line))
    if not answers:
        first = failed[0]
        raise ValueError(f"no prompt could be answered; the first: {first.task} line {first.line}: {first.error}")
    answered = sorted(answers.values(), key=lambda answer: (order[answer.group], answer.index, answer.turn))
    block_size = 0 if draft is None else draft.config.block_size
    evaluation = Evaluation(metrics_by_task(answered, read, block_size), answered, failed, facts)
    if journal is not None:
        written = write_result(output_file, "evaluation", **evaluation.to_dict())
        journal.remove()
        facts |= {name: written[name] for name in ("kind", "provenance")}
    return evaluation


def _read_task(name: str, task: Task) -> PromptFile:
    if isinstance(task, str | Path):
        return read_prompt_file(str(task))
    return task if isinstance(task, PromptFile) else read_prompt_file(name, prompts=several(task))


def _settings(
    target: PreTrainedModel,
    draft: DraftModel | None,
    processing_class: PreTrainedTokenizerBase,
    prompts: Mapping[str, Sequence[Prompt]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the settings that an unfinished run must share to be continued; long values by their hash."""
    origin, drafting, tokenizer = provenance(target.device), None, tokenizer_of(processing_class)
    if draft is not None:
        config = draft.config.to_dict() | {"_name_or_path": ""}
        drafting = digest([config, draft.decoding.domain, draft.decoding.use_transformers_loop])
    return {
        "tasks": {name: digest([asdict(prompt) for prompt in part]) for name, part in prompts.items()},
        "target": fingerprint(target),
        "draft": None if draft is None else fingerprint(draft),
        "draft_config": drafting,
        "generation_config": digest({**target.generation_config.to_diff_dict(), "transformers_version": ""}),
        "tokenizer": digest([tokenizer.chat_template, tokenizer.get_vocab()]),
        "options": {name: plain_json(value) for name, value in sorted(options.items())},
        **{name: origin[name] for name in ("device", "threads", "hf_dspark", "torch", "transformers")},
    }
