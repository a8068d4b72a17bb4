"""Answers in the target's own words, to train a draft on."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import Prompt, as_chat, read_prompts, token_ids
from ..decoding.call import effective_config
from ..decoding.many import refuse_made_here
from ..files import Journal, digest, plain_json
from ..models.auto import require_target
from ..models.modeling_draft import DraftModel
from ..targets.fingerprint import fingerprint
from .decode_prompts import NoRoomError, decode_prompts
from .timed_decoding import may_end_early

DEFAULT_NEW_TOKENS = 2048
UNCHOSEN_LENGTH = 20  # transformers' default of `max_length`
# Entries of a generation config that decide nothing about the answers.
NO_OPTIONS = (
    "transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states",
    "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class RegenerationReport:
    """What the file of answers holds."""

    output_file: Path
    num_answers: int  # from earlier runs, too
    num_unfinished: int  # of them, cut by their length
    num_failed: int  # prompts times samples that have an error instead of an answer


def regenerate(
    target: PreTrainedModel,
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase,
    output_file: str | Path,
    draft: DraftModel | None = None,
    num_samples: int = 1,
    batch_size: int = 8,
    enable_thinking: bool | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> RegenerationReport:
    """Let the target answer prompts itself, and write its tokens to a file.

    A line holds `index`, `sample`, `prompt`, `prompt_ids`, `completion_ids`, `text` and `finished` (whether the target
    ended the answer itself), or `error` instead of the last three: a prompt that fails, fails alone. Beside the file,
    `<output_file>.settings.json` says what it was made with. Called again, answers that are there are skipped, failed
    prompts are tried again, and `num_samples` may be raised.

    `seed` and the prompt's place decide every draw, so an interruption changes nothing. Without a draft the answers of
    a batch share its draws, so they depend on `batch_size`, too; with one, other neighbours only round differently.

    Args:
        target (`PreTrainedModel`): The model that answers.
        prompts (`Iterable`): Texts, lists of messages, lists of token ids, or examples with `messages`,
            `conversations`, `prompt` or `question`. Where the tokenizer has a chat template, a text is a user's
            message, unless it begins with a special token. A conversation that ends in an answer gets this one anew.
        processing_class (`PreTrainedTokenizerBase`): The target's tokenizer.
        output_file (`str`): JSON lines.
        draft ([`DraftModel`], *optional*): Makes it faster, without changing the distribution of the answers.
        num_samples (`int`): Answers per prompt.
        batch_size (`int`): Sequences decoded together.
        enable_thinking (`bool`, *optional*): For the chat template, if given.
        seed (`int`): Of all draws.
        generate_kwargs: For `generate()`. Without them the target samples as its generation config recommends.
            `max_new_tokens` is 2048 unless either says otherwise, and never more than the context has room for.

    Returns:
        [`RegenerationReport`]

    Raises:
        TypeError: If `prompts` is a single one.
        ValueError: If the options do not fit, several samples would all be the same, or the file is of another run.

    Example:

    ```python
    report = regenerate(target, prompts, tokenizer, "out/own_words.jsonl", draft=draft, max_new_tokens=64)
    print(report.num_answers, report.num_unfinished)
    ```
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    require_target(target)
    cures = {"max_length": "use max_new_tokens", "num_return_sequences": "use num_samples"}
    refuse_made_here("regenerate", target, generate_kwargs, **cures)
    read, options = read_prompts(prompts, several_turns=False), dict(generate_kwargs)
    if options.get("max_new_tokens", 0) is None:
        del options["max_new_tokens"]
    config = effective_config(target, options)
    if config.max_new_tokens is None and config.max_length in (None, UNCHOSEN_LENGTH):
        options["max_new_tokens"] = config.max_new_tokens = DEFAULT_NEW_TOKENS
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    if num_samples > 1 and not config.do_sample:
        same = "decoding is greedy, so all answers to a prompt would be the same"
        raise ValueError(f"num_samples={num_samples}, but {same}: pass do_sample=True, or num_samples=1")
    prompt_ids = []
    for index, prompt in enumerate(read):
        try:
            prompt_ids.append(token_ids(as_chat(prompt, processing_class, enable_thinking), processing_class))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    chosen = config.to_diff_dict() | {name: each for name, each in options.items() if name != "generation_config"}
    settings = {
        "prompts": digest(prompt_ids),
        "enable_thinking": enable_thinking,
        "seed": seed,
        "target": fingerprint(target),
        **plain_json({name: value for name, value in chosen.items() if name not in NO_OPTIONS}),
    }
    journal = Journal(output_file, settings, _ending)
    # Batches of similar length, the longest first: what does not fit into memory fails early.
    order = sorted(range(len(read)), key=lambda index: -len(prompt_ids[index]))
    places = {index: place for place, index in enumerate(order)}
    samples = {str(sample): [Prompt(prompt_ids[index]) for index in order] for sample in range(num_samples)}
    endings, num_failed = dict(journal.entries), 0
    if draft is None and may_end_early(config, options):
        batch_size = 1  # a row's padding may be a token like others
    for answer in decode_prompts(
        target, samples, processing_class, draft, seed=seed, batch_size=batch_size, continuous=draft is not None,
        done={(str(sample), places[index], 0): () for index, sample in endings}, progress="answering", **options,
    ):  # fmt: skip
        if answer.error is not None and not endings and not isinstance(answer.error, NoRoomError):
            raise answer.error  # nothing has worked so far: the options are wrong, not the prompt
        index, content = order[answer.index], read[order[answer.index]].content
        if read[index].is_token_ids:
            content = processing_class.decode(content)
        line = {"index": index, "sample": int(answer.group), "prompt": content, "prompt_ids": prompt_ids[index]}
        if answer.error is None:
            text = processing_class.decode(answer.token_ids, skip_special_tokens=True)
            line |= {"completion_ids": answer.token_ids, "text": text, "finished": answer.finished}
            endings |= [_ending(line)]
        else:
            line["error"] = f"{type(answer.error).__name__}: {answer.error}"
            num_failed += 1
        journal.append(line)
    if num_failed:
        message = f"{num_failed} prompts failed: see 'error' in {journal.path}; the same call tries them again"
        warnings.warn(message, stacklevel=2)
    counts = Counter(endings.values())
    for how, cure in {"empty": "", "unfinished": "raise max_new_tokens. "}.items():
        if counts[how] > len(endings) / 2:
            form = "Is this the form of prompts that the target was trained with?"
            warnings.warn(f"{counts[how]} of {len(endings)} answers are {how}: {cure}{form}", stacklevel=2)
    return RegenerationReport(journal.path, len(endings), counts["unfinished"], num_failed)


def _ending(line: Mapping[str, Any]) -> tuple[tuple[int, int], str] | None:
    """Return whose answer a line holds, and how that ended; `None` if it holds none."""
    if "error" in line:
        return None
    how = "unfinished" if not line["finished"] else "finished" if line["text"].strip() else "empty"
    return (line["index"], line["sample"]), how
