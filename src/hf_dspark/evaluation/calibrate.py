"""Rounds of real decoding, recorded for calibration: `calibrate(target, draft, prompts)`.

Runs `generate()` with the full block and keeps, of each round, what the confidence head said and what verification
found. Knows nothing of how temperatures are fitted (`calibration`).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import Journal, digest, plain_json
from ..maths.calibration import (
    CalibrationRounds,
    PositionCalibration,
    TemperatureScaling,
    conditional_auc,
    fit_temperatures,
    measure_calibration,
)
from ..maths.policies import FullBlock, RoundOutcome
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel, input_device
from ..targets.fingerprint import fingerprint

DEFAULT_DOMAIN = "default"
FEW_ROUNDS = 500


def _record(rounds: list[CalibrationRounds], block_size: int, outcome: RoundOutcome) -> None:
    """Keep what a round says; its logits over the vocabulary would soon fill the memory."""
    if outcome.drafted:
        rounds.append(recorded_round(outcome, block_size))


def recorded_round(outcome: RoundOutcome, block_size: int) -> CalibrationRounds:
    """Return what one drafted round of one request says about its confidences."""
    num_verified = int(outcome.lengths[0])
    acceptance, logits = torch.zeros(2, 1, block_size)  # blocks end early where the sequence does
    acceptance[:, :num_verified] = expected_acceptance(outcome, num_verified)
    logits[:, : outcome.block.token_ids.shape[1]] = outcome.block.confidence_logits.float().cpu()
    return CalibrationRounds(logits, acceptance, outcome.num_accepted, outcome.lengths)


def expected_acceptance(outcome: RoundOutcome, num_verified: int) -> torch.Tensor:
    """Return sum over the vocabulary of min(p_t, p_d) at each verified slot, `[1, num_verified]`. DSpark Eq. 8.

    Arg-max drafts have a one-hot law, and so has a target that decodes greedily.
    """
    target_logits = outcome.target_logits[:, :num_verified].float()
    if outcome.block.law is None:
        drafted = outcome.block.token_ids[:, :num_verified].to(target_logits.device)
        return (target_logits.argmax(dim=-1) == drafted).float().cpu()
    draft_law = outcome.block.law[:, :num_verified].dense(target_logits.shape[-1])
    draft_probs = draft_law.probs.to(target_logits.device)
    return torch.minimum(target_logits.softmax(dim=-1), draft_probs).sum(dim=-1).clamp_max(1.0).cpu()


def collect_rounds(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    output_file: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
    **generate_kwargs: Any,
) -> CalibrationRounds:
    """Decode prompts with the full block and record every round.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft, with a confidence head.
        prompts (`Iterable`): Texts, token ids, or rows with `prompt` or `input_ids`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts.
        output_file (`str`, *optional*): JSON lines, one per prompt, written as they come; prompts already in it are
            not decoded again.
        seed (`int`): Seed of each prompt's draws, together with its index.
        progress (`bool`): Show a progress bar.
        generate_kwargs: For `target.generate()`; `max_new_tokens=128` unless given.

    Returns:
        [`CalibrationRounds`]

    Raises:
        ValueError: If the draft has no confidence head, there are no prompts, the file belongs to another run, or the
            block would be cut.
    """
    require_pair(target, draft)
    if not draft.config.enable_confidence_head:
        raise ValueError("this draft has no confidence head (config.enable_confidence_head is False)")
    rows = [_token_ids(row, tokenizer) for row in prompts]
    if not rows:
        raise ValueError("the calibration set is empty: pass at least one prompt")
    cut_off = {"assistant_confidence_threshold", "num_assistant_tokens"} & generate_kwargs.keys()
    if cut_off:
        raise ValueError(f"rounds are recorded with the full block: drop {', '.join(sorted(cut_off))}")
    options = {"max_new_tokens": 128} | generate_kwargs
    journal, done = None, {}
    if output_file is not None:
        journal = Journal(output_file, _settings(target, draft, rows, seed, options))
        done = {entry["index"]: _rounds_of(entry) for entry in journal.entries}
    before = draft.decoding
    # Set on the call, so that a threshold in the target's generation config does not count.
    options |= {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": draft.config.block_size}
    try:
        for index, row in enumerate(tqdm(rows, desc="collecting rounds", disable=not progress)):
            if index in done:
                continue
            rounds: list[CalibrationRounds] = []
            observer = partial(_record, rounds, draft.config.block_size)
            draft.decoding = replace(before, policy=FullBlock(), domain=None, observer=observer)
            input_ids = torch.tensor([row], device=input_device(target.get_input_embeddings()))
            with torch.random.fork_rng():
                torch.manual_seed(seed + index)
                target.generate(input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=draft, **options)
            done[index] = rounds
            if journal is not None:
                journal.append(_entry(index, rounds))
    finally:
        draft.decoding = before
    return CalibrationRounds.concatenate([part for index in sorted(done) for part in done[index]])


def _settings(
    target: PreTrainedModel, draft: DraftModel, rows: list[list[int]], seed: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what rounds recorded in one file must share."""
    return {
        "prompts": digest(rows),
        "options": plain_json(options),
        "target_options": plain_json(target.generation_config),
        "seed": seed,
        "block_size": draft.config.block_size,
        "draft": fingerprint(draft),
        "target": fingerprint(target),
    }


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration found, on the rounds it was fitted on.

    Args:
        scaling ([`TemperatureScaling`]): The temperatures.
        before, after (`list[PositionCalibration]`): Per position, raw and calibrated.
        auc (`float`, *optional*): Of c_k against acceptance over all reached slots.
    """

    scaling: TemperatureScaling
    before: list[PositionCalibration]
    after: list[PositionCalibration]
    auc: float | None

    @property
    def mean_ece(self) -> tuple[float, float]:
        """Mean ECE over the positions, raw and calibrated."""
        return tuple(sum(part.ece for part in side) / len(side) for side in (self.before, self.after))


def calibrate(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    domain: str = DEFAULT_DOMAIN,
    realised: bool = False,
    output_file: str | Path | None = None,
    **collect_kwargs: Any,
) -> CalibrationReport:
    """Fit the draft's confidence temperatures on real rounds, and keep them in its config.

    `generate()` uses them from then on; `draft.save_pretrained` stores them.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        prompts (`Iterable`): Held-out prompts of the domain; see [`collect_rounds`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts.
        domain (`str`): Name to keep the temperatures under. `greedy` and `sampled` are used by themselves when
            `generate()` decodes that way; others when `draft.decoding` names them, `math/greedy` before `math`. The
            first calibration also becomes the default.
        realised (`bool`): Fit on realised acceptance instead of the one with the last coin integrated out.
        output_file (`str`, *optional*): Where rounds are recorded, to resume.
        collect_kwargs: For [`collect_rounds`] and `generate()`, such as `do_sample=True, temperature=0.7`.

    Returns:
        [`CalibrationReport`]

    Raises:
        ValueError: If there is nothing to calibrate on.

    DSpark Section 3.2.1.
    """
    rounds = collect_rounds(target, draft, prompts, tokenizer, output_file, **collect_kwargs)
    if len(rounds.num_accepted) < FEW_ROUNDS:
        warnings.warn(
            f"temperatures fitted on {len(rounds.num_accepted)} rounds say little, and schedulers will rely on them: "
            f"give prompts for {FEW_ROUNDS} rounds or more",
            stacklevel=2,
        )
    scaling = fit_temperatures(rounds, realised, dataset=domain)
    known = dict(draft.config.sts_temperatures or {})
    known[domain] = list(scaling.temperatures)
    known.setdefault(DEFAULT_DOMAIN, known[domain])
    draft.config.sts_temperatures = known
    return CalibrationReport(
        scaling,
        measure_calibration(rounds),
        measure_calibration(rounds, scaling.temperatures),
        conditional_auc(rounds),
    )


def _token_ids(row: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(row, Mapping):
        row = row["input_ids"] if "input_ids" in row else row.get("prompt")
    if isinstance(row, str):
        if tokenizer is None:
            raise ValueError("the prompts are texts: pass tokenizer=..., or token ids")
        row = tokenizer(row)["input_ids"]
    if isinstance(row, torch.Tensor):
        row = row.flatten().tolist()
    if not isinstance(row, Sequence) or len(row) == 0:
        raise ValueError(f"a prompt must be a text, token ids, or a row with 'prompt' or 'input_ids', got {row!r}")
    return [int(token) for token in row]


def _entry(index: int, rounds: list[CalibrationRounds]) -> dict[str, Any]:
    """Return what a journal keeps of a prompt."""
    return {
        "index": index,
        "rounds": [{name: value.tolist() for name, value in vars(part).items()} for part in rounds],
    }


def _rounds_of(entry: Mapping[str, Any]) -> list[CalibrationRounds]:
    return [
        CalibrationRounds(**{name: torch.tensor(value) for name, value in part.items()}) for part in entry["rounds"]
    ]
