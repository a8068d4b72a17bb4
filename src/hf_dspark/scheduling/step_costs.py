"""Find the measured step costs that fit a target, a draft and this machine: this user's own or a shipped table."""

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from ..cpu import fast_linears
from ..files import replace_text
from ..provenance import device_name
from .costs import ThroughputTable
from .learning import Experience, LearnedCosts

logger = logging.getLogger(__name__)

GEOMETRY = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "vocab_size")  # fmt: skip
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
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel) -> "Machine":
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
            packed=fast_linears.packs(target),
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
class ThroughputProfile:
    """A table, and the machine that it holds for."""

    machine: Machine
    table: ThroughputTable  # one request up to γ+1 tokens, full blocks of several beyond

    def save(self, path: str | Path) -> None:
        """Write JSON that SGLang reads as a 1-D SPS table."""
        fields = self.table.to_sglang() | {"machine": asdict(self.machine)}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_text(Path(path), json.dumps(fields, indent=1) + "\n")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], name: str | None = None) -> "ThroughputProfile":
        table = ThroughputTable.from_sglang(content)
        if name is not None:
            table = replace(table, provenance={"table": name} | table.provenance)
        return cls(Machine(**content["machine"]), table)


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
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("ignoring the throughput table %s: %s", path, error)
    return profiles


def find_cost(target: PreTrainedModel, draft: PreTrainedModel) -> ThroughputTable | None:
    """Return the measured cost that fits these models on this machine best, or `None`: the nearest by
    `Machine.distance`, among equals this user's own."""
    machine, profiles = Machine.of(target, draft), known_profiles()
    distances = {name: profile.machine.distance(machine) for name, profile in profiles.items()}
    fitting = [name for name, distance in distances.items() if distance is not None]  # own ones first
    name = min(fitting, key=distances.get, default=None)
    return None if name is None else profiles[name].table


# What earlier calls have taught, by draft and target.
_experiences: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, dict]] = WeakKeyDictionary()


def experience_of(
    target: PreTrainedModel, draft: PreTrainedModel, do_sample: bool = False, domain: str | None = None
) -> Experience:
    """Return what earlier calls with these models have taught on this machine. Costs begin with the table that fits
    best, or an estimate, and are kept among this user's tables; acceptance is forgotten with the process."""
    known = _experiences.setdefault(draft, WeakKeyDictionary()).setdefault(target, {})
    # What may change between calls; to name the machine takes milliseconds.
    here = target.dtype, target.device, torch.get_num_threads(), fast_linears.packs(target), draft.config.block_size
    key = here, do_sample, domain
    if key not in known:
        if here not in known:
            begin = find_cost(target, draft) or estimated_cost(target, draft)
            keep = partial(keep_profile, Machine.of(target, draft), end=".learned.json")
            known[here] = LearnedCosts(begin, draft.config.block_size, keep)
        known[key] = Experience(known[here])
    return known[key]


def keep_profile(machine: Machine, table: ThroughputTable, end: str = ".json", **facts: Any) -> None:
    """Store what rounds have taught: later processes begin with it."""
    provenance = {"device": machine.device, "dtype": machine.dtype, "threads": machine.threads, **machine.versions}
    profile = ThroughputProfile(machine, replace(table, provenance=provenance | facts))
    profile.save(cache_folder() / f"{machine.key}{end}")


def read_again() -> None:
    """Let calls begin with the tables that are there now."""
    known_profiles.cache_clear()
    _experiences.clear()


def estimated_cost(target: PreTrainedModel, draft: PreTrainedModel) -> ThroughputTable:
    """Return what rounds may cost where nothing was measured: a pass reads all weights once, and some tokens of a
    pass cost little besides. The first rounds correct it."""
    is_cpu, config = target.device.type == "cpu", draft.config
    bandwidth, hidden_tokens = (2e10, 16) if is_cpu else (1e12, 256)  # bytes per second

    def seconds_of(*modules: torch.nn.Module | None) -> float:
        weights = (weight for each in modules if each is not None for weight in each.parameters())
        return sum(weight.numel() * weight.element_size() for weight in weights) / bandwidth

    passes = config.block_size if config.is_autoregressive else 1
    lm_head = None if config.own_lm_head else target.get_output_embeddings()
    plain, drafting = seconds_of(target), passes * seconds_of(draft, lm_head)
    tokens = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
    rates = [1 / (plain * (1 + (count - 1) / hidden_tokens) + drafting) for count in tokens]
    return ThroughputTable(tokens, rates, drafting, provenance={"table": "estimate", "drafted": {}})


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    """Looking up package metadata takes milliseconds, as much as drafting a block."""
    return (*((name, version(name)) for name in ("torch", "transformers")), ("python", platform.python_version()))
