"""`calibrate(target, draft, prompts, ...)`: real rounds with whole blocks, and the calibration that they ask for."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import as_chat, read_prompts, token_ids
from ..decoding.call import effective_config
from ..decoding.many import refuse_made_here
from ..files import Journal, digest, plain_json
from ..models.auto import require_pair
from ..models.configuration_draft import CALIBRATED
from ..models.modeling_draft import DraftModel
from ..sampling.distributions import TokenDistribution
from ..sampling.drafts import DraftBlock
from ..sampling.verification import prefix_weights
from ..scheduling import calibration
from ..scheduling.calibration import CalibrationRounds
from ..scheduling.policies import FullBlock
from ..scheduling.rounds import RoundOutcome
from ..targets.fingerprint import fingerprint
from .decode_prompts import DEFAULT_NEW_TOKENS, decode_prompts, with_limit
from .timed_decoding import decoding_as

DEFAULT_DOMAIN = "default"
FEW_ROUNDS = 500
CUT_OFFS = dict.fromkeys(
    ("assistant_confidence_threshold", "num_assistant_tokens"), "rounds are recorded with the full block, drop it"
)
NOT_RECORDED = (*CALIBRATED, "_name_or_path", "transformers_version")  # what decides nothing about the rounds


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration found, on the rounds it was fitted on."""

    domain: str  # the name under which the temperatures are kept
    num_rounds: int
    temperatures: list[float]  # by position, for serving engines
    fits: calibration.LogitFits  # slope and offset by position, which `generate()` uses; (1, 0) where no fit is better
    before: list[calibration.PositionCalibration] = field(repr=False)  # raw
    after: list[calibration.PositionCalibration] = field(repr=False)  # calibrated
    auc: float | None  # of c_k against acceptance over all reached slots

    @property
    def mean_ece(self) -> tuple[float, float]:
        """Mean ECE over the positions, raw and calibrated."""
        return tuple(sum(part.ece for part in side) / len(side) for side in (self.before, self.after))


def calibrate(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase | None = None,
    domain: str | None = None,
    output_file: str | Path | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> CalibrationReport:
    """Fit the draft's confidences on real rounds.

    The fits are kept in its config: `generate()` begins with them from then on, and corrects them by its own rounds.
    `draft.save_pretrained` stores them.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft, with a confidence head.
        prompts (`Iterable`): Held-out prompts of the domain: texts, token ids, messages, or examples with
            `prompt`, `question`, `messages`, `conversations`, `input_ids` or `turns`. Where the tokenizer has a chat
            template, a text is a user's message. Of several turns each is answered, and its rounds count.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; needed unless the prompts are
            token ids.
        domain (`str`, *optional*): The name under which the calibration is kept. Unless given, `sampled` or
            `greedy`, as these rounds are decoded; calls that decode so use them by themselves. Another name is used
            where the draft's `domain` says so; `math/greedy` comes before `math`. The first calibration also becomes
            the default, and so does each later one of its domain.
        output_file (`str`, *optional*): Where rounds are recorded, to resume.
        seed (`int`): Of all draws.
        generate_kwargs: For `generate()`, such as `do_sample=True, temperature=0.7`; `max_new_tokens=128` unless
            given; `None` leaves it to the target's generation config.

    Returns:
        [`CalibrationReport`]

    Raises:
        TypeError: If `prompts` is a single one.
        ValueError: If there is nothing to calibrate on, or `max_new_tokens` leaves no room for a whole block.

    Example:

    ```python
    report = calibrate(target, draft, prompts, tokenizer, do_sample=False, max_new_tokens=64)
    print(report.mean_ece)  # before and after
    draft.save_pretrained("out/calibrated")
    ```

    DSpark Section 3.2.1.
    """
    rounds = collect_rounds(target, draft, prompts, processing_class, output_file, seed, **generate_kwargs)
    if len(rounds.num_accepted) < FEW_ROUNDS:
        few = f"a calibration on {len(rounds.num_accepted)} rounds says little"
        warnings.warn(f"{few}: give prompts for {FEW_ROUNDS} rounds or more", stacklevel=2)
    domain = domain or ("sampled" if effective_config(target, generate_kwargs).do_sample else "greedy")
    temperatures, fits = calibration.fit_temperatures(rounds), calibration.fit_confidence(rounds)
    config = draft.config
    config.sts_temperatures = _with_domain(config.sts_temperatures, domain, temperatures)
    config.confidence_fits = _with_domain(config.confidence_fits, domain, [list(pair) for pair in fits])
    sides = calibration.measure_calibration(rounds), calibration.measure_calibration(rounds, fits)
    auc = calibration.conditional_auc(rounds)
    return CalibrationReport(domain, len(rounds.logits), temperatures, fits, *sides, auc)


def _with_domain(known: Mapping[str, list] | None, domain: str, found: list) -> dict[str, list]:
    """Return what is known by domain with what was found for one; a default that came from it goes along."""
    known = dict(known or {})
    if known.get(DEFAULT_DOMAIN) in (None, known.get(domain)):
        known[DEFAULT_DOMAIN] = found
    return known | {domain: found}


def collect_rounds(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase | None = None,
    output_file: str | Path | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> CalibrationRounds:
    """Decode prompts with whole blocks and record every round, one JSON line per prompt in `output_file`; see
    [`calibrate`]."""
    require_pair(target, draft)
    if not draft.config.enable_confidence_head:
        raise ValueError("this draft has no confidence head (config.enable_confidence_head is False)")
    # A prompt's first token is the target's own, and so is the last one of a round.
    options = with_limit(target, generate_kwargs, DEFAULT_NEW_TOKENS)
    limit, needed = effective_config(target, options).max_new_tokens, draft.config.block_size + 2
    if limit is not None and limit < needed:
        whole = f"a whole block of {draft.config.block_size} draft tokens"
        raise ValueError(f"answers of max_new_tokens={limit} have no room for {whole}: give {needed} or more")

    def observe(outcome: RoundOutcome) -> None:
        """Keep what a round says; its logits over the vocabulary would soon fill the memory."""
        if outcome.drafted:
            found = recorded_round(outcome, draft.config.block_size)
            rounds.append({name: value.tolist() for name, value in vars(found).items()})

    read = [as_chat(row, processing_class) for row in read_prompts(prompts)]
    first_turns = [token_ids(prompt, processing_class) for prompt in read]  # fails before anything is decoded
    refuse_made_here("calibrate", target, generate_kwargs, max_length="use max_new_tokens", **CUT_OFFS)
    journal, found, rounds = None, {}, []
    if output_file is not None:
        config = draft.config.to_dict()
        settings = {
            "prompts": digest([first_turns, [prompt.later_turns for prompt in read]]),
            "options": plain_json(options),
            "target_options": plain_json(target.generation_config),
            "seed": seed,
            "draft": fingerprint(draft),
            "draft_config": digest({name: each for name, each in config.items() if name not in NOT_RECORDED}),
            "target": fingerprint(target),
        }
        journal = Journal(output_file, settings)
        found = {("", entry["index"], entry["turn"]): entry for entry in journal.entries}
    # On the call, so that a threshold in the target's generation config does not count.
    options |= {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": draft.config.block_size}
    with decoding_as(draft, policy=FullBlock(), prompt_lookup=False, domain=None, observer=observe):
        for answer in decode_prompts(
            target, {"": read}, processing_class, draft, seed=seed, raise_errors=True, progress="collecting rounds",
            done={key: entry["token_ids"] for key, entry in found.items()}, **options,
        ):  # fmt: skip
            facts = {"index": answer.index, "turn": answer.turn, "token_ids": answer.token_ids}
            found[answer.key] = facts | {"rounds": list(rounds)}
            rounds.clear()
            if journal is not None:
                journal.append(found[answer.key])
    parts = [part for key in sorted(found) for part in found[key]["rounds"]]
    return CalibrationRounds.concatenate(
        [CalibrationRounds(**{name: torch.tensor(value) for name, value in part.items()}) for part in parts]
    )


def recorded_round(outcome: RoundOutcome, block_size: int) -> CalibrationRounds:
    """Return what one drafted round of one request says about its confidences."""
    num_verified = int(outcome.lengths[0])
    acceptance, logits = torch.zeros(2, 1, block_size)  # blocks end early where the sequence does
    acceptance[:, :num_verified] = expected_acceptance(outcome, num_verified)
    logits[:, : outcome.drafts.token_ids.shape[1]] = outcome.drafts.confidence_logits.float().cpu()
    return CalibrationRounds(logits, acceptance, outcome.num_accepted, outcome.lengths)


def expected_acceptance(outcome: RoundOutcome, num_verified: int) -> torch.Tensor:
    """Return with what probability each verified slot is accepted if those before it are, over all tokens that could
    have been drawn there: sum min(p_t, p_d / p_{k-1}), `[1, num_verified]`. With p_{k-1} = 1 that is DSpark Eq. 8."""
    target_logits = outcome.target_logits[:, :num_verified].float()
    drafted = outcome.drafts.token_ids[:, :num_verified].to(target_logits.device)
    if outcome.drafts.distribution is None:  # arg-max drafts are one-hot, and so is a target that decodes greedily
        return (target_logits.argmax(dim=-1) == drafted).float().cpu()
    draft_distribution = outcome.drafts.distribution[:, :num_verified].dense(target_logits.shape[-1])
    block = DraftBlock(drafted, TokenDistribution(draft_distribution.probs.to(target_logits.device)), None)
    target_probs = target_logits.softmax(dim=-1)
    before = prefix_weights(block, TokenDistribution(target_probs))[:, :-1, None]
    shared = torch.minimum(before * target_probs, block.distribution.probs).sum(dim=-1)
    return (shared / before[..., 0].clamp_min(torch.finfo(before.dtype).tiny)).clamp_max(1.0).cpu()
