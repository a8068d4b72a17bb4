"""Find the measured step costs that fit a target, a draft and this machine: this user's own or a shipped table."""

import hashlib
import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from ..cpu import fast_linears
from ..files import replace_text
from ..provenance import device_name
from .costs import ThroughputTable

logger = logging.getLogger(__name__)

GEOMETRY = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "vocab_size")  # fmt: skip
LARGEST_FALL = 1.5  # of a pass over fewer tokens against one over more, which steps of the hardware can explain
LARGEST_SPREAD = 0.5  # of the repetitions of a pass
SHIPPED_TABLES = Path(__file__).parents[1] / "tables"


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on."""

    target: dict[str, int]  # geometry
    draft: dict[str, int]
    dtype: str  # the target's
    device: str  # name of the accelerator or the CPU, its instruction sets included
    threads: int  # of torch on a CPU; 0 on an accelerator
    versions: dict[str, str]  # of Python, torch and transformers
    packed: bool = False  # whether the target multiplied by packed weights

    @classmethod
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel, linears: Sequence[torch.nn.Module] = ()) -> "Machine":
        """`linears` are the target's, where they are known."""
        text, config = target.config.get_text_config(decoder=True), draft.config
        if getattr(text, "is_heterogeneous", False):  # values differ by layer
            text = text.per_layer_config[-1]
        facts = {name: int(getattr(config, name)) for name in (*GEOMETRY, "block_size", "markov_rank")}
        if config.is_autoregressive:  # not named otherwise: the key of measurements of other drafts stays what it was
            facts["is_autoregressive"] = 1
        geometry = {name: getattr(text, name, None) or 0 for name in GEOMETRY}
        return cls(
            target={name: int(value[0] if isinstance(value, Sequence) else value) for name, value in geometry.items()},
            draft=facts,
            dtype=str(target.dtype).removeprefix("torch."),
            device=device_name(target.device),
            threads=torch.get_num_threads() if target.device.type == "cpu" else 0,
            versions=dict(_versions()),
            packed=fast_linears.packs(*linears or (target,)),
        )

    @property
    def key(self) -> str:
        facts = asdict(self)
        if not self.packed:  # the key of measurements without packed weights stays what it was
            del facts["packed"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def distance(self, other: "Machine") -> int | None:
        """Return how far a measurement of the other one is from holding here; `None` if it does not hold at all.

        0: everything agrees. 1: other versions, or other products. 2: another number of cores or threads of the same
        kind of CPU.
        """
        if (self.target, self.draft, self.dtype) != (other.target, other.draft, other.dtype):
            return None
        if (self.device, self.threads) == (other.device, other.threads):
            return int((self.versions, self.packed) != (other.versions, other.packed))
        kinds = {re.sub(r", \d+ cores", "", machine.device) for machine in (self, other)}
        return 2 if len(kinds) == 1 else None


@dataclass(frozen=True)
class Sample:
    """Median time of one kind of forward pass."""

    requests: int
    verify_tokens: int  # of the pass; for a draft the requests, one block each
    context_tokens: int  # cached, of all requests together
    seconds: float
    spread: float = 0.0  # how far apart the middle half of its repetitions lies, as a part of the median


def fault_of(samples: Iterable[Sample]) -> str | None:
    """Return why passes of target or draft cannot be believed; `None` if they can. Other work slows some of them."""
    samples = list(samples)
    spread = max((sample.spread for sample in samples), default=0.0)
    if spread > LARGEST_SPREAD:
        return f"repetitions of one pass lay {spread:.0%} of its time apart"
    for few, many in itertools.permutations(samples, 2):
        is_alike = (few.requests, few.context_tokens) == (many.requests, many.context_tokens)
        if is_alike and few.verify_tokens < many.verify_tokens and few.seconds > LARGEST_FALL * many.seconds:
            times = f"{few.seconds / many.seconds:.1f} times as long"
            return f"a pass over {few.verify_tokens} tokens took {times} as one over {many.verify_tokens}"
    return None


@dataclass(frozen=True)
class ThroughputProfile:
    """A measurement of one machine: the table, and the samples that it was made from."""

    machine: Machine
    table: ThroughputTable  # at the shortest context: one request up to γ+1 tokens, full blocks of several beyond
    samples: dict[str, list[Sample]]  # of `target`, `draft`, and rounds with trees

    @property
    def fault(self) -> str | None:
        """Why the measurement cannot be believed; `None` if it can."""
        return next(filter(None, map(fault_of, self.samples.values())), None)

    def save(self, path: str | Path) -> None:
        """Write JSON that SGLang reads as a 1-D SPS table."""
        fields = self.table.to_sglang() | {"machine": asdict(self.machine)}
        fields["samples"] = {name: [list(asdict(s).values()) for s in part] for name, part in self.samples.items()}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(Path(path), f"{{\n{lines}\n}}\n")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], name: str | None = None) -> "ThroughputProfile":
        table = ThroughputTable.from_sglang(content)
        if name is not None:
            table = replace(table, provenance={"table": name} | table.provenance)
        samples = {name: [Sample(*values) for values in part] for name, part in content["samples"].items()}
        return cls(Machine(**content["machine"]), table, samples)


def cache_folder() -> Path:
    """Return where measurements of this user are kept; `HF_DSPARK_CACHE` overrides."""
    return Path(os.environ.get("HF_DSPARK_CACHE", Path(HF_HOME) / "hf_dspark" / "throughput"))


@lru_cache(maxsize=1)
def known_profiles() -> dict[str, ThroughputProfile]:
    """Return all profiles, read once; `known_profiles.cache_clear()` has them read again."""
    paths = {path.name: path for path in sorted(cache_folder().glob("*.json"))}
    paths |= {f"shipped {path.name}": path for path in sorted(SHIPPED_TABLES.glob("*.json"))}
    profiles = {}
    for name, path in paths.items():
        try:
            profiles[name] = ThroughputProfile.from_dict(json.loads(path.read_text()), name)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("ignoring the throughput table %s: %s", path, error)
    return profiles


_logged: set[str] = set()


def find_cost(
    target: PreTrainedModel, draft: PreTrainedModel, linears: Sequence[torch.nn.Module] = ()
) -> ThroughputTable | None:
    """Return the measured cost that fits these models on this machine best, or `None`: the nearest by
    `Machine.distance`, among equals this user's own. What is found is logged once, at the level of information."""
    machine, profiles = Machine.of(target, draft, linears), known_profiles()
    distances = {name: profile.machine.distance(machine) for name, profile in profiles.items()}
    fitting = [name for name, distance in distances.items() if distance is not None]  # own ones first
    name = min(fitting, key=distances.get, default=None)
    if machine.key not in _logged:
        _logged.add(machine.key)
        found = (
            "no throughput table fits these models: verifying full blocks. `hf-dspark profile` or "
            "hf_dspark.profile_throughput(target, draft) measures one"
        )
        if name is not None:
            measured_on = profiles[name].machine
            found = (
                f"scheduling verification by the throughput table {name}, measured on {measured_on.device} with "
                f"{measured_on.threads} threads"
            )
        logger.info("%s. This is %s, %s, %d threads", found, machine.device, machine.dtype, machine.threads)
    return None if name is None else profiles[name].table


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    """Looking up package metadata takes milliseconds, as much as drafting a block."""
    return (*((name, version(name)) for name in ("torch", "transformers")), ("python", platform.python_version()))
