"""`profile_throughput(target, draft)`: times the passes of target and draft, for the table that schedulers read."""

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import StoppingCriteriaList
from transformers.utils.logging import tqdm

from ..cpu import fast_linears
from ..decoding.drafter import Drafter
from ..decoding.loop import DecodingLoop
from ..decoding.request import Call, Request, StopRule
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache, SlotLayout
from ..provenance import load_hint
from ..sampling.distributions import TokenDistribution, draw
from ..sampling.drafts import ChainSampler
from ..scheduling.costs import ThroughputTable
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import FullBlock, Policy
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_costs import Machine, Sample, ThroughputProfile, cache_folder, fault_of, known_profiles
from ..scheduling.tree_plans import MOST_NODES
from ..targets.slot_attention import PackedTarget
from ..targets.support import TargetSupport
from .timed_decoding import synchronize

TREE_NODES = (7, 15, 31)
# Samples of whole rounds of one request: with a chain, and with trees.
OF_DRAWN, OF_BEST = ("chains", "trees"), ("best_chains", "best_trees")
ATTEMPTS = 3  # at a setting whose samples cannot be believed


@torch.inference_mode()
def profile_throughput(
    target: PreTrainedModel,
    draft: DraftModel,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    context_lengths: Sequence[int] = (64, 512),
    repetitions: int = 9,
    cache: bool = True,
) -> ThroughputProfile:
    """Measure what drafting and verifying cost on this machine, and remember it.

    Afterwards `generate()` schedules by the result whenever the draft is calibrated. The models' passes are timed,
    and, where trees can be verified, whole rounds of one request: what they spend around the passes counts in all.

    Args:
        target (`PreTrainedModel`): The model that decodes, in the dtype and on the device it will decode with.
        draft ([`DraftModel`]): Its draft.
        batch_sizes (`Sequence[int]`): Requests per pass, increasing from 1.
        context_lengths (`Sequence[int]`): Cached tokens per request, increasing.
        repetitions (`int`): Timed passes of each kind, in turns, after one that warms up.
        cache (`bool`): Store the result for [`find_cost`]. One that shows after three attempts that other work held
            the machine is not stored, and a warning says so.

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
        if len(values) < 2 or min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(
                f"{name} must be two or more increasing whole numbers from 1 up, got {list(values)}: one alone does "
                "not tell tokens, context and overhead apart"
            )
    if batch_sizes[0] != 1:
        raise ValueError(f"batch_sizes must begin with 1, got {list(batch_sizes)}: the table begins with one request")
    longest = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and context_lengths[-1] >= longest:
        raise ValueError(f"context_lengths must stay below the target's {longest}, got {context_lengths[-1]}")
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    draft.bind(target)
    last_stats, samples = draft.last_stats, {name: [] for name in ("target", "draft", *OF_DRAWN, *OF_BEST)}
    settings = list(itertools.product(context_lengths, batch_sizes))
    with fast_linears(target, draft):
        for context_length, requests in tqdm(settings, desc="profiling", disable=None):
            passes = _passes(target, draft, requests, context_length)
            for _ in range(ATTEMPTS):
                found = _measured(passes, requests, context_length, repetitions, draft.device)
                if not any(map(fault_of, found.values())):
                    break
            for name, part in found.items():
                samples[name] += part
    draft.last_stats = last_stats  # the user's
    machine = Machine.of(target, draft)
    table = _table(machine, samples, context_lengths[0], draft.config.block_size)
    profile = ThroughputProfile(machine, table, samples)
    if profile.fault is not None:
        again = "measure again when nothing else runs" + (f" ({busy})" if (busy := load_hint()) else "")
        warnings.warn(f"this measurement is not kept: {profile.fault}, {ATTEMPTS} times; {again}", stacklevel=3)
    elif cache:
        profile.save(cache_folder() / f"{profile.machine.key}.json")
        known_profiles.cache_clear()
    return profile


class _Pass(NamedTuple):
    """One kind of pass, ready to run again and again."""

    samples: str  # which ones it belongs to
    verify_tokens: int
    run: Callable[[], None]


def _measured(
    passes: Sequence[_Pass], requests: int, context_length: int, repetitions: int, device: torch.device
) -> dict[str, list[Sample]]:
    """Time all passes in turns, after one round that warms up: what slows the machine for a while slows all alike."""
    rounds = [[_seconds_of(each.run, device) for each in passes] for _ in range(1 + repetitions)][1:]
    found: dict[str, list[Sample]] = {each.samples: [] for each in passes}
    for each, times in zip(passes, zip(*rounds, strict=True), strict=True):
        lower, median, upper = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        spread = (upper - lower) / median
        found[each.samples].append(Sample(requests, each.verify_tokens, requests * context_length, median, spread))
    return found


def _passes(target: PreTrainedModel, draft: DraftModel, requests: int, context_length: int) -> list[_Pass]:
    """Let both models read contexts; return passes of the target over blocks of several lengths and the drafting of
    a block each, and of one request whole rounds with blocks and with trees, drawn ones and those of best tokens."""
    gamma, support = draft.config.block_size, TargetSupport.of(target)
    prompt = torch.arange(context_length, device=target.device)[None] % draft.config.vocab_size
    lengths = range(gamma + 1) if requests == 1 else sorted({0, gamma // 2, gamma})
    tokens = [torch.arange(requests * (1 + length), device=target.device) for length in lengths]
    run = passes_by_slots(target, prompt, requests)
    blocks = [each.view(requests, -1) % draft.config.vocab_size for each in tokens]
    passes = [_Pass("target", block.numel(), functools.partial(run, block)) for block in blocks]
    passes.append(_Pass("draft", requests, _drafting(draft, requests, context_length)))
    if requests == 1 and draft.grows_trees and support.tree_obstacle is None:
        for do_sample, (chains, trees) in ((True, OF_DRAWN), (False, OF_BEST)):
            rounds = functools.partial(_round, target, draft, prompt, do_sample)
            passes.append(_Pass(chains, 1 + gamma, rounds(FullBlock())))
            passes += [_Pass(trees, 1 + nodes, rounds(Scheduler(num_nodes=nodes))) for nodes in TREE_NODES]
    return passes


def passes_by_slots(target: PreTrainedModel, prompt: torch.Tensor, requests: int) -> Callable[..., None]:
    """Prefill as hf_dspark's loop does; return what runs tokens `[requests, n]` after the prompt.

    Recurrent layers read accepted tokens again in the next pass. So half of each block is `accepted`, unless given.
    """
    support, cache = TargetSupport.of(target), SlotCache(requests)
    packed, start, part = PackedTarget(support), 0, 0.5 if support.keeps_states else 0.0

    def run(tokens: torch.Tensor, accepted: int | None = None, is_prefill: bool = False, **options: Any) -> None:
        nonlocal start
        width = tokens.shape[1]
        layout = SlotLayout((start,) * requests, (width,) * requests, is_prefill=is_prefill)
        position_ids = layout.position_ids(tokens.device)
        packed(cache, layout, input_ids=tokens.reshape(1, -1), position_ids=position_ids, **options)
        start += math.ceil(part * width) if accepted is None else accepted

    # By a number, layers that share keys would leave packed rows out.
    last = torch.tensor([-1], device=prompt.device)
    run(prompt.expand(requests, -1), accepted=prompt.shape[1], is_prefill=True, logits_to_keep=last)
    return run


def _drafting(draft: DraftModel, requests: int, context_length: int) -> Callable[[], None]:
    """Let the draft read contexts; return the drafting of a block each, three tokens committed since the last one."""
    width = len(draft.config.target_layer_ids) * draft.config.feature_size
    cache = SlotCache(requests)
    anchors = torch.zeros(requests, dtype=torch.long, device=draft.device)

    def draft_blocks(num_features: int) -> None:
        features = torch.ones(requests, num_features, width, device=draft.device, dtype=draft.dtype)
        committed_ids = torch.zeros(requests * num_features, dtype=torch.long, device=draft.device)
        draft.draft_block(anchors, features, cache, DrawnChains(), committed_ids=committed_ids)

    def one_pass() -> None:
        draft_blocks(3)
        for row in range(requests):
            cache.truncate(row, context_length)

    draft_blocks(context_length)
    return one_pass


def _round(
    target: PreTrainedModel, draft: DraftModel, prompt: torch.Tensor, do_sample: bool, policy: Policy
) -> Callable[[], None]:
    """Prefill; return a round that is undone after it ran, three tokens committed since the last one."""
    config, nothing, criteria = GenerationConfig(do_sample=do_sample), LogitsProcessorList(), StoppingCriteriaList()
    call = Call(prompt, nothing, criteria, config, {}, policy, options=DecodingOptions(prompt_lookup=False))
    context_length = prompt.shape[1]
    endless = context_length + 2 * (1 + MOST_NODES)
    request = Request(0, prompt[0].cpu(), endless, nothing, StopRule(criteria))
    drafter = Drafter(target, draft, call)
    loop = DecodingLoop(drafter, call, SlotCache())
    loop.admit([request], [prompt[0]])
    token_ids, features = request.token_ids, torch.cat(request.features)[-3:]

    def one_round() -> None:
        loop.run_round()
        request.token_ids, request.features = token_ids, [features]
        loop.cache.truncate(0, context_length)
        drafter.cache.truncate(0, context_length - len(features))

    return one_round


class DrawnChains(ChainSampler):
    """Draws without processors: sampling costs more than arg-max, and most decoding samples."""

    def draw(self, logits: torch.Tensor, candidate_ids: torch.Tensor | None) -> tuple[torch.Tensor, TokenDistribution]:
        distribution = TokenDistribution(logits.softmax(dim=-1), candidate_ids)
        return draw(distribution, torch.rand(len(logits), device=logits.device)), distribution


def _seconds_of(one_pass: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    one_pass()
    synchronize(device)
    return time.perf_counter() - started


def context_slope(samples: Sequence[Sample]) -> float:
    """Return the seconds that each cached token adds, by least squares on context, tokens and a constant."""
    columns = np.array([(sample.context_tokens, sample.verify_tokens, 1.0) for sample in samples])
    slope, *_ = np.linalg.lstsq(columns, np.array([sample.seconds for sample in samples]), rcond=None)[0]
    return max(0.0, float(slope))


def _table(machine: Machine, samples: dict[str, list[Sample]], shortest: int, gamma: int) -> ThroughputTable:
    """Return each point at the shortest context, less what that context costs: the table adds the actual one."""
    provenance = {"device": machine.device, "dtype": machine.dtype, "threads": machine.threads, **machine.versions}
    provenance["measured"] = datetime.now(timezone.utc).isoformat(timespec="minutes")
    provenance["spread"] = round(max(sample.spread for part in samples.values() for sample in part), 3)
    context_seconds = context_slope(samples["target"]) + context_slope(samples["draft"])

    def known(name: str) -> list[tuple[Sample, float]]:
        part = [sample for sample in samples[name] if sample.context_tokens == sample.requests * shortest]
        less = [sample.seconds - context_seconds * sample.context_tokens for sample in part]
        return [(sample, max(seconds, sample.seconds / 2)) for sample, seconds in zip(part, less, strict=True)]

    drafting = {sample.requests: sample.seconds for sample, _ in known("draft")}
    rounds = {
        sample.verify_tokens: seconds + drafting[sample.requests]
        for sample, seconds in known("target")
        if sample.requests == 1 or sample.verify_tokens == sample.requests * (1 + gamma)
    }
    around, faster = _beside_passes(samples)
    tokens = tuple(sorted(rounds))
    rates = tuple(1 / (rounds[count] + around) for count in tokens)
    return ThroughputTable(
        tokens, rates, min(drafting[1], 0.9 / max(rates)), context_seconds, provenance,
        trees=tuple((sample.verify_tokens - 1, seconds) for sample, seconds in known(OF_DRAWN[1])),
        best_trees=tuple((sample.verify_tokens - 1, seconds + faster) for sample, seconds in known(OF_BEST[1])),
    )  # fmt: skip


def _beside_passes(samples: dict[str, list[Sample]]) -> tuple[float, float]:
    """Return the seconds that the loop spends around the passes of a round, what these lose by taking turns included;
    and how much faster chains of best tokens are drafted than drawn ones, as they are in all rounds of the table.
    The least of all contexts: a round that is slow because of where its memory lies is so in every repetition."""
    drawn, best = samples[OF_DRAWN[0]], samples[OF_BEST[0]]
    passes = {(sample.context_tokens, sample.verify_tokens): sample.seconds for sample in samples["target"]}
    drafting = {sample.context_tokens: sample.seconds for sample in samples["draft"] if sample.requests == 1}
    around = [
        chain.seconds - passes[chain.context_tokens, chain.verify_tokens] - drafting[chain.context_tokens]
        for chain in drawn
    ]
    faster = [chain.seconds - other.seconds for chain, other in zip(drawn, best, strict=True)]
    return max(0.0, min(around, default=0.0)), max(0.0, min(faster, default=0.0))
