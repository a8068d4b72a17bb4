"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, without changing a
token."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .candidate_generator import DSparkCandidateGenerator, RoundStatistics
from .collection import calibrate
from .configuration_dspark import DSparkConfig
from .generate_hook import install as _install_generate_hook
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
    SLOLimit,
)
from .profiling import profile_throughput
from .throughput import AdditiveCost, LinearCost, ThroughputTable, load_cost, save_cost

__version__ = "0.1.0.dev0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig)
AutoModel.register(DSparkConfig, DSparkDraftModel)
AutoModelForCausalLM.register(DSparkConfig, DSparkDraftModel)
_install_generate_hook()

__all__ = [
    "AdaptiveDrafting",
    "AdditiveCost",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "EarlyStopScheduler",
    "EliminationScheduler",
    "FullBlock",
    "GlobalScheduler",
    "LaggedScheduler",
    "LinearCost",
    "Policy",
    "PrefixScheduler",
    "RoundStatistics",
    "SLOLimit",
    "ThroughputTable",
    "calibrate",
    "load_cost",
    "profile_throughput",
    "save_cost",
]


def __getattr__(name: str):
    # The trainer needs accelerate and is slow to import: only who trains pays for it.
    if name in ("DSparkTrainer", "DSparkTrainingArguments"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
