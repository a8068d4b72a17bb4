"""What a round costs on this machine: measured once, cached, found again; tables shipped with the package.

A measurement is keyed by the models' geometry, their dtype, the device and the versions. Knows nothing of policies or
`generate()`.
"""

import hashlib
import json
import logging
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ..cpu.copies import packed_weights_of
from ..cpu.few_rows import large_linears, multiplying_few_rows, using_copies
from ..maths.costs import ForwardCost, LinearCost, ThroughputTable
from ..maths.sampling import TokenLaw, draw
from ..models.auto import require_pair
from ..models.configuration_draft import DraftConfig
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache, SlotLayout
from ..provenance import device_name
from ..targets.slot_attention import attending_by_slots, packed_pass, slot_cache_obstacle

logger = logging.getLogger(__name__)

GEOMETRY = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "vocab_size")  # fmt: skip
# Not there where this module is part of a draft's remote code.
SHIPPED_TABLES = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on.

    Args:
        target, draft (`dict[str, int]`): Geometry of the models.
        dtype (`str`): The target's.
        device (`str`): Name of the accelerator or the CPU, its instruction sets included.
        threads (`int`): CPU threads of torch; 0 on an accelerator.
        versions (`dict[str, str]`): Of Python, torch and transformers.
    """

    target: dict[str, int]
    draft: dict[str, int]
    dtype: str
    device: str
    threads: int
    versions: dict[str, str]

    @classmethod
    def of(cls, target: PreTrainedModel, draft: DraftModel) -> "Machine":
        """Describe two loaded models and where they run."""
        text = target.config.get_text_config(decoder=True)
        return cls(
            target={name: int(_first(getattr(text, name, None) or 0)) for name in GEOMETRY},
            draft=_draft_facts(draft.config),
            dtype=str(target.dtype).removeprefix("torch."),
            device=device_name(target.device),
            threads=torch.get_num_threads() if target.device.type == "cpu" else 0,
            versions=dict(_versions()),
        )

    @property
    def key(self) -> str:
        """Short hash of everything, for file names."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def distance(self, other: "Machine") -> int | None:
        """Return how far a measurement of the other one is from holding here; `None` if it does not hold at all.

        0: everything agrees. 1: other versions. 2: another number of cores or threads of the same kind of CPU.
        """
        if (self.target, self.draft, self.dtype) != (other.target, other.draft, other.dtype):
            return None
        if (self.device, self.threads) == (other.device, other.threads):
            return int(self.versions != other.versions)
        same_kind = _without_core_count(self.device) == _without_core_count(other.device)
        return 2 if same_kind else None


@dataclass(frozen=True)
class Sample:
    """Median time of one kind of forward pass.

    Args:
        requests (`int`): R.
        verify_tokens (`int`): B, tokens of the pass; for a draft R, one block each.
        context_tokens (`int`): Cached tokens of all requests together.
        seconds (`float`): Median over the repetitions.
    """

    requests: int
    verify_tokens: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True)
class ThroughputProfile:
    """A measurement of one machine: the table, the linear model, and what they were made from.

    Args:
        machine ([`Machine`]): What it holds for.
        table ([`ThroughputTable`]): SPS over B at the shortest context: one request up to γ+1 tokens, full blocks of
            several requests beyond.
        linear ([`LinearCost`]): Least squares over all samples.
        fit (`dict[str, float]`): R squared of `linear` for `target` and `draft`.
        samples (`dict[str, list[Sample]]`): Of `target` and `draft`.
    """

    machine: Machine
    table: ThroughputTable
    linear: LinearCost
    fit: dict[str, float]
    samples: dict[str, list[Sample]]

    def save(self, path: str | Path) -> None:
        """Write JSON that SGLang reads as a 1-D SPS table."""
        extra = {
            "linear": self.linear.to_dict()["linear"],
            "fit": self.fit,
            "machine": asdict(self.machine),
            "samples": {name: [list(asdict(s).values()) for s in part] for name, part in self.samples.items()},
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (self.table.to_sglang() | extra).items()
        ]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def from_dict(cls, content: dict[str, Any], name: str | None = None) -> "ThroughputProfile":
        """Read what `save` wrote; a name goes into the table's provenance."""
        table = ThroughputTable.from_sglang(content)
        if name is not None:
            table = replace(table, provenance={"table": name} | table.provenance)
        return cls(
            Machine(**content["machine"]),
            table,
            LinearCost.from_dict(content),
            content["fit"],
            {name: [Sample(*values) for values in part] for name, part in content["samples"].items()},
        )


@torch.inference_mode()
def profile_throughput(
    target: PreTrainedModel,
    draft: DraftModel,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    context_lengths: Sequence[int] = (64, 512),
    repetitions: int = 5,
    progress: bool = True,
    cache: bool = True,
) -> ThroughputProfile:
    """Measure what drafting and verifying cost on this machine, and remember it.

    Afterwards `generate()` schedules by the result whenever the draft is calibrated. Timed are the models' passes, and
    the drawing of sampled tokens; not what the decoding loop spends around them, with or without a draft.

    Args:
        target (`PreTrainedModel`): The model that decodes, in the dtype and on the device it will decode with.
        draft ([`DraftModel`]): Its draft.
        batch_sizes (`Sequence[int]`): Requests per pass, increasing from 1.
        context_lengths (`Sequence[int]`): Cached tokens per request, increasing.
        repetitions (`int`): Timed passes per setting, after one that warms up.
        progress (`bool`): Show a progress bar.
        cache (`bool`): Store the result for [`find_cost`].

    Returns:
        [`ThroughputProfile`]

    Raises:
        ValueError: If the settings are empty, not increasing, or longer than the target's context.
    """
    require_pair(target, draft)
    _check_settings(target, batch_sizes, context_lengths, repetitions)
    draft.bind(target)
    gamma = draft.config.block_size
    verify: list[Sample] = []
    drafts: list[Sample] = []
    lengths = {
        requests: list(range(gamma + 1)) if requests == 1 else sorted({0, gamma // 2, gamma})
        for requests in batch_sizes
    }
    total = len(context_lengths) * sum(len(part) + 1 for part in lengths.values())
    # transformers' own loop, which decodes the others, has no copies.
    copies = packed_weights_of(target, draft) if slot_cache_obstacle(target) is None else None
    with tqdm(total=total, desc="profiling", disable=not progress) as bar, using_copies(copies):
        for context_length in context_lengths:
            for requests in batch_sizes:
                for length, seconds in _time_verify(target, requests, context_length, lengths[requests], repetitions):
                    tokens = requests * (1 + length)
                    verify.append(Sample(requests, tokens, requests * context_length, seconds))
                    bar.update()
                seconds = _time_draft(draft, requests, context_length, repetitions)
                drafts.append(Sample(requests, requests, requests * context_length, seconds))
                bar.update()
    profile = _summarise(Machine.of(target, draft), verify, drafts, context_lengths[0], gamma)
    if cache:
        profile.save(cache_folder() / f"{profile.machine.key}.json")
        known_profiles.cache_clear()
    return profile


def _check_settings(
    target: PreTrainedModel, batch_sizes: Sequence[int], context_lengths: Sequence[int], repetitions: int
) -> None:
    for name, values in (("batch_sizes", batch_sizes), ("context_lengths", context_lengths)):
        if not values or min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"{name} must be increasing whole numbers from 1 up, got {list(values)}")
    if batch_sizes[0] != 1:
        raise ValueError(f"batch_sizes must begin with 1, got {list(batch_sizes)}: the table begins with one request")
    longest = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and context_lengths[-1] >= longest:
        raise ValueError(f"context_lengths must stay below the target's {longest}, got {context_lengths[-1]}")
    if len(batch_sizes) < 2 or len(context_lengths) < 2:
        raise ValueError(
            "telling tokens, context and overhead apart takes at least two batch sizes and two context lengths, got "
            f"{list(batch_sizes)} and {list(context_lengths)}"
        )
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")


def _time_verify(
    target: PreTrainedModel, requests: int, context_length: int, lengths: Sequence[int], repetitions: int
) -> Iterator[tuple[int, float]]:
    """Yield each draft length with the median seconds of a pass over 1 + length tokens per request."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    start_pass = _passes_by_slots if slot_cache_obstacle(target) is None else _passes_by_columns
    prompt = torch.arange(context_length, device=target.device)[None] % vocab_size
    with start_pass(target, prompt, requests) as run:
        for length in lengths:
            tokens = torch.arange(requests * (1 + length), device=target.device).view(requests, -1) % vocab_size
            yield length, _median_seconds(lambda tokens=tokens: run(tokens), repetitions, target.device)


@contextmanager
def _passes_by_slots(
    target: PreTrainedModel, prompt: torch.Tensor, requests: int
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Prefill as hf_dspark's loop does; what is yielded runs tokens `[requests, n]` behind the prompt."""
    cache = SlotCache(requests)

    def run(tokens: torch.Tensor, start: int = prompt.shape[1], **options: Any) -> None:
        layout = SlotLayout((start,) * requests, (tokens.shape[1],) * requests)
        position_ids = layout.position_ids(tokens.device)
        with packed_pass(cache, layout):
            target(tokens.reshape(1, -1), position_ids=position_ids, past_key_values=cache, use_cache=True, **options)

    with attending_by_slots(target), multiplying_few_rows(large_linears(target)):
        run(prompt.expand(requests, -1), start=0, logits_to_keep=1)
        yield run


@contextmanager
def _passes_by_columns(
    target: PreTrainedModel, prompt: torch.Tensor, requests: int
) -> Iterator[Callable[[torch.Tensor], None]]:
    """The same as transformers' assisted loop does it."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    target(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(requests)
    if hasattr(cache, "activate_past_recording"):  # else sliding layers forget what cropping brings back
        cache.activate_past_recording()

    def run(tokens: torch.Tensor) -> None:
        target(tokens, past_key_values=cache, use_cache=True)
        cache.crop(-tokens.shape[1])

    yield run


def _time_draft(draft: DraftModel, requests: int, context_length: int, repetitions: int) -> float:
    """Return the median seconds of drafting one block per request, three tokens committed since the last one."""
    width = len(draft.config.target_layer_ids) * draft.config.hidden_size
    cache = SlotCache(requests)
    anchors = torch.zeros(requests, dtype=torch.long, device=draft.device)

    def draft_blocks(num_features: int) -> None:
        features = torch.ones(requests, num_features, width, device=draft.device, dtype=draft.dtype)
        committed_ids = torch.zeros(requests * num_features, dtype=torch.long, device=draft.device)
        draft.draft_block(anchors, features, cache, _plain_sampler, committed_ids=committed_ids)

    def one_pass() -> None:
        draft_blocks(3)
        for row in range(requests):
            cache.truncate(row, context_length)

    draft_blocks(context_length)
    return _median_seconds(one_pass, repetitions, draft.device)


def _plain_sampler(
    logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
) -> tuple[torch.Tensor, TokenLaw]:
    """Draw without processors: sampling costs more than arg-max, and most decoding samples."""
    law = TokenLaw(logits.softmax(dim=-1), candidate_ids)
    return draw(law, torch.rand(len(logits), device=logits.device)), law


def _median_seconds(one_pass: Callable[[], None], repetitions: int, device: torch.device) -> float:
    times = []
    for _ in range(1 + repetitions):
        _synchronize(device)
        started = time.perf_counter()
        one_pass()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _summarise(
    machine: Machine, verify: list[Sample], drafts: list[Sample], shortest: int, gamma: int
) -> ThroughputProfile:
    target_cost, target_fit = _fit(verify)
    draft_cost, draft_fit = _fit(drafts)
    provenance = {"device": machine.device, "dtype": machine.dtype, "threads": machine.threads, **machine.versions}
    # Each point at the shortest context, less what that context costs: the table adds the actual one.
    context_seconds = target_cost.alpha + draft_cost.alpha
    drafting = {
        sample.requests: sample.seconds for sample in drafts if sample.context_tokens == sample.requests * shortest
    }
    seconds = {
        sample.verify_tokens: max(
            sample.seconds + drafting[sample.requests] - context_seconds * sample.context_tokens,
            sample.seconds / 2,
        )
        for sample in verify
        if sample.context_tokens == sample.requests * shortest
        and (sample.requests == 1 or sample.verify_tokens == sample.requests * (1 + gamma))
    }
    tokens = tuple(sorted(seconds))
    rates = tuple(1 / seconds[count] for count in tokens)
    table = ThroughputTable(tokens, rates, min(drafting[1], 0.9 / max(rates)), context_seconds, provenance)
    return ThroughputProfile(
        machine, table, LinearCost(target_cost, draft_cost, provenance), {"target": target_fit, "draft": draft_fit},
        {"target": verify, "draft": drafts},
    )  # fmt: skip


def _fit(samples: list[Sample]) -> tuple[ForwardCost, float]:
    return ForwardCost.fit(
        [sample.context_tokens for sample in samples],
        [sample.verify_tokens for sample in samples],
        [sample.seconds for sample in samples],
    )


def cache_folder() -> Path:
    """Return where measurements of this user are kept; `HF_DSPARK_CACHE` overrides."""
    return Path(os.environ.get("HF_DSPARK_CACHE", Path(HF_HOME) / "hf_dspark" / "throughput"))


@lru_cache(maxsize=1)
def known_profiles() -> dict[str, ThroughputProfile]:
    """Return this user's measurements, then the shipped ones, by origin."""
    profiles = {}
    files = sorted(cache_folder().glob("*.json")) if cache_folder().is_dir() else []
    shipped = sorted(SHIPPED_TABLES.glob("*.json"))
    for origin, path in [(f"{path}", path) for path in files] + [(f"shipped {path.name}", path) for path in shipped]:
        try:
            profiles[origin] = ThroughputProfile.from_dict(json.loads(path.read_text()), origin)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("ignoring the throughput table %s: %s", origin, error)
    return profiles


_told: set[str] = set()


def find_cost(target: PreTrainedModel, draft: DraftModel) -> ThroughputTable | None:
    """Return the measured cost that fits these models on this machine best, or `None` with a warning, once.

    Geometry, dtype and kind of device must agree. Measurements with the same cores, threads and versions come first;
    among equals this user's own, then shipped ones. One of other cores or threads is taken with a warning. The name
    of the table is in its `provenance`, and in `draft.last_stats.policy`.
    """
    machine = Machine.of(target, draft)
    found = [(profile.machine.distance(machine), name) for name, profile in known_profiles().items()]
    # Stable: own ones stay first.
    fitting = sorted((item for item in found if item[0] is not None), key=lambda item: item[0])
    first_time = machine.key not in _told
    _told.add(machine.key)
    here = f"{machine.device}, {machine.dtype}, {machine.threads} threads"
    if not fitting:
        if first_time:
            logger.warning(
                "no throughput table fits these models on this machine (%s): verifying full blocks. A table is "
                "optional: with one, only what pays is drafted and verified. `hf-dspark profile --target ... --draft "
                "...` or hf_dspark.profile_throughput(target, draft) measures one.", here,
            )  # fmt: skip
        return None
    distance, name = fitting[0]
    profile = known_profiles()[name]
    if first_time and distance == 2:
        logger.warning(
            "the throughput table %s was measured on %s with %d threads, this is %s: scheduling by it all the same. "
            "hf_dspark.profile_throughput(target, draft) measures this machine.",
            name, profile.machine.device, profile.machine.threads, here,
        )  # fmt: skip
    elif first_time:
        logger.info("scheduling verification by the throughput table %s", name)
    return profile.table


def _draft_facts(config: DraftConfig) -> dict[str, int]:
    facts = {name: int(getattr(config, name)) for name in (*GEOMETRY, "block_size", "markov_rank")}
    # Not named unless it holds: the key of measurements of other drafts stays what it was.
    return facts | ({"is_autoregressive": 1} if config.is_autoregressive else {})


def _without_core_count(device: str) -> str:
    return re.sub(r", \d+ cores", "", device)


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    """Looking up package metadata takes milliseconds, as much as drafting a block."""
    return (*((name, version(name)) for name in ("torch", "transformers")), ("python", platform.python_version()))


def _first(value: int | Sequence[int]) -> int:
    return value[0] if isinstance(value, Sequence) else value
