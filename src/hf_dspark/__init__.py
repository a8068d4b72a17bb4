"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, without changing a
token."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .calibration import TemperatureScaling, measure_calibration
from .candidate_generator import DSparkCandidateGenerator, RoundStatistics
from .collection import calibrate, collect_rounds
from .configuration_dspark import DSparkConfig
from .generate_hook import decode_with
from .generate_hook import install as _install_generate_hook
from .generate_many import Completion, generate_many
from .modeling_dspark import DSparkDraftModel
from .policies import (
    AdaptiveDrafting,
    ConfidenceThreshold,
    EarlyStopScheduler,
    EliminationScheduler,
    FullBlock,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    RoundOutcome,
    SLOLimit,
)
from .profiling import find_cost, profile_throughput
from .slot_cache import SlotCache
from .target_check import check_target
from .throughput import AdditiveCost, ForwardCost, LinearCost, Load, ThroughputTable, load_cost, save_cost

__version__ = "0.1.0.dev0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)
AutoModelForCausalLM.register(DSparkConfig, DSparkDraftModel)
_install_generate_hook()

__all__ = [
    "AdaptiveDrafting",
    "AdditiveCost",
    "Completion",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "EarlyStopScheduler",
    "EliminationScheduler",
    "ForwardCost",
    "FullBlock",
    "GlobalScheduler",
    "LaggedScheduler",
    "LinearCost",
    "Load",
    "Policy",
    "PrefixScheduler",
    "RoundOutcome",
    "RoundStatistics",
    "SLOLimit",
    "SlotCache",
    "TemperatureScaling",
    "ThroughputTable",
    "calibrate",
    "check_target",
    "collect_rounds",
    "decode_with",
    "find_cost",
    "generate_many",
    "load_cost",
    "measure_calibration",
    "profile_throughput",
    "save_cost",
]


def __getattr__(name: str):
    # The trainer needs accelerate and is slow to import: only who trains pays for it.
    if name in ("DSparkTrainer", "DSparkTrainingArguments"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
