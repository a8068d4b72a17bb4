"""`profile_throughput(target, draft)`: rounds of all sizes in turns, and the table that they teach."""

import inspect
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import product

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import StoppingCriteriaList
from transformers.utils.logging import tqdm

from ..decoding.drafter import Drafter
from ..decoding.loop import DecodingLoop
from ..decoding.request import Call, Request, StopRule
from ..files import require_writable
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from ..scheduling.costs import Load, ThroughputTable
from ..scheduling.learning import LearnedCosts
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import Policy
from ..scheduling.rounds import RoundOutcome
from ..scheduling.step_costs import Machine, ThroughputProfile, cache_folder, estimated_cost, keep_profile, read_again
from ..targets.support import TargetSupport


def profile_throughput(
    target: PreTrainedModel,
    draft: DraftModel,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    context_lengths: Sequence[int] = (64, 512),
    repetitions: int = 9,
    cache: bool = True,
) -> ThroughputProfile:
    """Measure what rounds cost on this machine, and remember it.

    The default policy learns this from its own rounds. A profile spares it the first ones, and serves schedulers that
    are given a table. Let nothing else run meanwhile.

    Args:
        target (`PreTrainedModel`): The model that decodes, in the dtype and on the device it will decode with.
        draft ([`DraftModel`]): Its draft.
        batch_sizes (`Sequence[int]`): Requests per pass, increasing from 1.
        context_lengths (`Sequence[int]`): Cached tokens per request, increasing.
        repetitions (`int`): Rounds of each size, in turns, after some that warm up. They are compiled if
            `draft.decoding` says so.
        cache (`bool`): Store the result for later calls and processes.

    Returns:
        [`ThroughputProfile`]

    Raises:
        ValueError: If the settings are empty, not increasing, or longer than the target's context, or the target is
            decoded by transformers' loop.

    Example:

    ```python
    profile = profile_throughput(target, draft, batch_sizes=(1, 4))
    draft.decoding = DecodingOptions(policy=Scheduler(profile.table))
    ```
    """
    require_pair(target, draft)
    if not draft.drafts_blocks:
        raise ValueError(f"{type(draft).__name__} runs no draft that could be measured: measure the target with one")
    if (obstacle := TargetSupport.of(target).slot_obstacle) is not None:
        raise ValueError(f"{obstacle}: transformers' loop decodes it, in which whole blocks are verified")
    for name, values in (("batch_sizes", batch_sizes), ("context_lengths", context_lengths)):
        if len(values) == 0 or min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"{name} must be increasing whole numbers from 1 up, got {list(values)}")
    if batch_sizes[0] != 1:
        raise ValueError(f"batch_sizes must begin with 1, got {list(batch_sizes)}: the table begins with one request")
    longest = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and context_lengths[-1] >= longest:
        raise ValueError(f"context_lengths must stay below the target's {longest}, got {context_lengths[-1]}")
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    if cache:
        require_writable(cache_folder() / "profile.json")
    draft.bind(target)
    width, guess = 1 + draft.config.block_size, estimated_cost(target, draft)
    tokens = (*range(1, width), *(width * size for size in batch_sizes))
    known = ThroughputTable(tokens, (1 / guess.seconds_of(tokens)).tolist(), guess.drafting)
    costs = LearnedCosts(known, draft.config.block_size)
    last_stats = draft.last_stats
    settings = list(product(context_lengths, batch_sizes))
    for context_length, requests in tqdm(settings, desc="profiling", disable=None):
        _teach(costs, target, draft, requests, context_length, repetitions)
    draft.last_stats = last_stats  # the user's
    machine, measured = Machine.of(target, draft), datetime.now(timezone.utc).isoformat(timespec="minutes")
    if cache:
        keep_profile(machine, costs.table(), measured=measured)
        read_again()
    return ThroughputProfile(machine, costs.table())


class _EverySize(Policy):
    """Plain steps, and blocks of which each length is verified, in turns."""

    def __init__(self, costs: LearnedCosts, lengths: Sequence[int | None], learns_after: int) -> None:
        self._costs, self._sizes, self._learns_after = costs, lengths, learns_after
        self._turn = 0

    def fresh(self) -> "_EverySize":
        return self

    def plan_draft(self, load: Load) -> bool:
        self._load, self._length = load, self._sizes[self._turn % len(self._sizes)]
        return self._length is not None

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        return max_lengths.clamp(max=self._length)

    def observe(self, outcome: RoundOutcome) -> None:
        if self._turn >= self._learns_after:
            self._costs.observe(self._load, outcome)
        self._turn += 1


def _teach(
    costs: LearnedCosts, target: PreTrainedModel, draft: DraftModel, requests: int, context_length: int, times: int
) -> None:
    """Prefill, and run rounds that are undone after they ran, three tokens committed since the last one. States that
    cannot go back go on."""
    gamma = draft.config.block_size
    lengths = [*(range(gamma + 1) if requests == 1 else sorted({gamma // 2, gamma})), None]
    prompt = torch.arange(context_length, device=target.device) % draft.config.vocab_size
    nothing, criteria = LogitsProcessorList(), StoppingCriteriaList()
    own = draft.decoding
    options = DecodingOptions(prompt_lookup=False, compile=own.compile, draft_window=own.draft_window)
    warming = 3 if options.compile else 1  # a CUDA graph is recorded in the second round of a size
    config, policy = GenerationConfig(do_sample=True), _EverySize(costs, lengths, learns_after=warming * len(lengths))
    # As transformers would give it: a compiled pass with other arguments would be another graph.
    arguments = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(target.forward).parameters else {}
    call = Call(prompt[None], nothing, criteria, config, arguments, policy, options=options)
    endless = context_length + (1 + gamma) * len(lengths) * (1 + warming + times)
    rows = [Request(row, prompt.cpu(), endless, nothing, StopRule(criteria)) for row in range(requests)]
    drafter = Drafter(target, draft, call, SlotCache(requests))
    loop = DecodingLoop(drafter, call, SlotCache(requests))
    loop.admit(rows, [prompt] * requests)
    kept = [(row.token_ids, torch.cat(row.features)[-3:]) for row in rows]
    seen = min(context_length, drafter.window or context_length)
    for _ in range(len(lengths) * (warming + times)):
        loop.run_round()
        for row, (token_ids, features) in enumerate([] if drafter.support.keeps_states else kept):
            rows[row].token_ids, rows[row].features = token_ids, [features]
            loop.cache.truncate(row, context_length)
            drafter.cache.truncate(row, seen - len(features))
