"""`calibrate(target, draft, prompts, ...)`: real rounds with whole blocks, and the calibration that they ask for.
Then rounds with trees, and what to expect of their nodes."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.prompts import as_chat, read_prompts, several, token_ids
from ..decoding.call import effective_config
from ..decoding.many import refuse_made_here
from ..files import Journal, digest, plain_json
from ..models.auto import require_pair
from ..models.configuration_draft import CALIBRATED
from ..models.modeling_draft import DraftModel
from ..sampling.distributions import TokenDistribution
from ..sampling.drafts import DraftBlock, DraftTrees
from ..sampling.verification import prefix_weights
from ..scheduling.calibration import (
    CalibrationRounds,
    LogitFits,
    PositionCalibration,
    SiblingTest,
    conditional_auc,
    fit_confidence,
    fit_siblings,
    fit_temperatures,
    measure_calibration,
    recorded_tests,
    without_worse,
)
from ..scheduling.policies import FullBlock, Policy
from ..scheduling.rounds import RoundOutcome
from ..scheduling.scheduler import Scheduler
from ..targets.fingerprint import fingerprint
from ..targets.support import TargetSupport
from .decode_prompts import decode_prompts, with_limit
from .timed_decoding import decoding_as

DEFAULT_DOMAIN = "default"
DEFAULT_NEW_TOKENS = 128
FEW_ROUNDS = 500
RECORDED_NODES = 31  # of the trees that acceptances are fitted on
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
    fits: LogitFits  # slope and offset by position, which `generate()` uses; (1, 0) where no fit is better
    before: list[PositionCalibration] = field(repr=False)  # raw
    after: list[PositionCalibration] = field(repr=False)  # calibrated
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
    """Fit the draft's confidences on real rounds, and what to expect of the nodes of trees.

    Both are kept in its config: `generate()` uses them from then on, and `draft.save_pretrained` stores them.

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
    prompts = list(several(prompts))  # they are read twice
    reading = (processing_class, output_file, seed)
    rounds = collect_rounds(target, draft, prompts, *reading, **generate_kwargs)
    config = draft.config
    if len(rounds.num_accepted) < FEW_ROUNDS:
        warnings.warn(
            f"a calibration on {len(rounds.num_accepted)} rounds says little, and schedulers will rely on them: "
            f"give prompts for {FEW_ROUNDS} rounds or more",
            stacklevel=2,
        )
    do_sample = effective_config(target, generate_kwargs).do_sample
    regime = "sampled" if do_sample else "greedy"
    domain = domain or regime
    temperatures, found = fit_temperatures(rounds), fit_confidence(rounds)
    fits = without_worse(found, rounds)
    raw = [position for position, (fit, kept) in enumerate(zip(found, fits, strict=True), start=1) if fit != kept]
    if raw:
        warnings.warn(
            f"the raw confidence is kept at draft positions {raw}: the fit is worse there, or falls where the "
            "confidence rises. Give more rounds; if it stays so, the confidence head needs more training",
            stacklevel=2,
        )
    config = draft.config
    earlier = {name: getattr(config, name) for name in CALIBRATED}
    config.sts_temperatures = _with_domain(config.sts_temperatures, domain, temperatures)
    config.confidence_fits = _with_domain(config.confidence_fits, domain, [list(pair) for pair in fits])
    try:  # trees grow by the new fits
        if draft.grows_trees and TargetSupport.of(target).tree_obstacle is None:
            tests = collect_siblings(target, draft, prompts, *reading, **generate_kwargs)
            siblings = fit_siblings(tests, do_sample, config.block_size, rounds.survivals())
            config.sibling_acceptance = (config.sibling_acceptance or {}) | {regime: siblings.to_dict()}
    except BaseException:  # interruptions, too: a config holds a whole calibration or none of it
        config.update(earlier)
        raise
    sides = measure_calibration(rounds), measure_calibration(rounds, fits)
    return CalibrationReport(domain, len(rounds.logits), temperatures, fits, *sides, conditional_auc(rounds))


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
    options = with_limit(target, {"max_new_tokens": DEFAULT_NEW_TOKENS} | generate_kwargs)
    limit, needed = effective_config(target, options).max_new_tokens, draft.config.block_size + 2
    if limit is not None and limit < needed:
        raise ValueError(
            f"answers of max_new_tokens={limit} have no room for a whole block of {draft.config.block_size} draft "
            f"tokens: give {needed} or more"
        )

    def record(outcome: RoundOutcome) -> list[dict[str, Any]]:
        """Keep what a round says; its logits over the vocabulary would soon fill the memory."""
        if not outcome.drafted:
            return []
        found = recorded_round(outcome, draft.config.block_size)
        return [{name: value.tolist() for name, value in vars(found).items()}]

    reading = (prompts, processing_class, output_file, seed, generate_kwargs)
    parts = _decode_and_record(target, draft, FullBlock(), record, *reading)
    return CalibrationRounds.concatenate(
        [CalibrationRounds(**{name: torch.tensor(value) for name, value in part.items()}) for part in parts]
    )


def collect_siblings(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase | None = None,
    output_file: str | Path | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> list[SiblingTest]:
    """Decode prompts with large trees and record every test of a node; resumed as [`collect_rounds`] is."""
    if output_file is not None:
        output_file = f"{str(output_file).removesuffix('.jsonl')}.trees.jsonl"

    def record(outcome: RoundOutcome) -> list[tuple[int, int, float, bool]]:
        if not isinstance(outcome.drafts, DraftTrees):
            return []
        pairs = zip(outcome.drafts.trees, outcome.paths, strict=True)
        return [test for tree, path in pairs for test in recorded_tests(tree, path)]

    reading = (prompts, processing_class, output_file, seed, generate_kwargs)
    parts = _decode_and_record(target, draft, Scheduler(num_nodes=RECORDED_NODES), record, *reading)
    return [SiblingTest(*part) for part in parts]


def _decode_and_record(
    target: PreTrainedModel,
    draft: DraftModel,
    policy: Policy,
    record: Callable[[RoundOutcome], list[Any]],
    prompts: Iterable[Any],
    processing_class: PreTrainedTokenizerBase | None,
    output_file: str | Path | None,
    seed: int,
    generate_kwargs: Mapping[str, Any],
) -> list[Any]:
    """Return what `record` keeps of all rounds, prompt after prompt."""
    read = [as_chat(row, processing_class) for row in read_prompts(prompts)]
    first_turns = [token_ids(prompt, processing_class) for prompt in read]  # fails before anything is decoded
    refuse_made_here("calibrate", target, generate_kwargs, max_length="use max_new_tokens", **CUT_OFFS)
    options = with_limit(target, {"max_new_tokens": DEFAULT_NEW_TOKENS} | generate_kwargs)
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
        if policy.most_nodes > 0:  # trees grow by the confidence
            settings["fits"] = config["confidence_fits"]
        journal = Journal(output_file, settings)
        found = {("", entry["index"], entry["turn"]): entry for entry in journal.entries}
    if policy.most_nodes == 0:  # on the call, so that a threshold in the target's generation config does not count
        options |= {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": draft.config.block_size}
    observer = lambda outcome: rounds.extend(record(outcome))  # noqa: E731
    with decoding_as(draft, policy=policy, prompt_lookup=False, domain=None, observer=observer):
        for answer in decode_prompts(
            target, {"": read}, processing_class, draft, seed=seed, raise_errors=True, progress="collecting rounds",
            done={key: entry["token_ids"] for key, entry in found.items()}, **options,
        ):  # fmt: skip
            facts = {"index": answer.index, "turn": answer.turn, "token_ids": answer.token_ids}
            found[answer.key] = facts | {"rounds": list(rounds)}
            rounds.clear()
            if journal is not None:
                journal.append(found[answer.key])
    return [each for key in sorted(found) for each in found[key]["rounds"]]


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
