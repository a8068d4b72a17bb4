"""How much of its drafts a target accepts: tau and acceptance by position, measured by decoding.

Knows nothing of training or of figures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
        """Return what a JSON file holds."""
        return asdict(self) | {"tau": round(self.tau, 4), "acceptance": [round(rate, 4) for rate in self.acceptance]}


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
