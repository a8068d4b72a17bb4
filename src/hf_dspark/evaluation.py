"""How much of its drafts a target accepts: tau and acceptance by position, measured by decoding.

Knows nothing of training or of figures.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .candidate_generator import RoundStatistics
from .draft_model import DraftModel
from .generate_many import generate_many
from .policies import FullBlock, Policy


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
        reached = [statistics.reached(position) for position in range(1, block_size + 1)]
        accepted = [statistics.accepted_at(position) for position in range(1, block_size + 1)]
        rates = [part / whole if whole else float("nan") for part, whole in zip(accepted, reached, strict=True)]
        return cls(statistics.tau, rates, prompts, statistics.rounds, tokens)

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
        generate_kwargs: For `generate()`; `max_new_tokens=128` unless given.

    Returns:
        [`AcceptanceReport`]

    Raises:
        ValueError: If there is no prompt.
        Exception: The error of the first prompt that failed.
    """
    texts = [row["prompt"] if isinstance(row, Mapping) else row for row in prompts]
    if not texts:
        raise ValueError("there is no prompt to measure on: pass at least one")
    before, draft.policy = draft.policy, policy or FullBlock()
    options = {"max_new_tokens": 128} | generate_kwargs
    try:
        tokens = 0
        for done in generate_many(target, draft, texts, tokenizer, batch_size, progress, **options):
            if done.error is not None:
                raise done.error
            tokens += len(done.token_ids)
    finally:
        draft.policy = before
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
