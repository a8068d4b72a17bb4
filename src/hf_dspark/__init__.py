"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, without changing a
token."""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import hub as _hub
from .calibration import TemperatureScaling, measure_calibration
from .candidate_generator import DSparkCandidateGenerator, RoundStatistics
from .collection import calibrate, collect_rounds
from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config
from .draft_kinds import DRAFTS as _DRAFTS
from .draft_model import DraftModel as _DraftModel
from .evaluation import (
    AcceptanceReport,
    Evaluation,
    compare_domains,
    evaluate,
    measure_acceptance,
    measure_domains,
    tokens_per_pass,
)
from .generate_hook import decode_with
from .generate_hook import install as _install_generate_hook
from .generate_many import Completion, generate_many
from .hub import push_draft, save_repository, write_card, write_remote_code
from .modeling_dspark import DSparkDraftModel
from .modeling_eagle3 import Eagle3DraftModel
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

for _type, _model in _DRAFTS.items():
    AutoConfig.register(_type, _model.config_class)
    AutoModel.register(_model.config_class, _model)
    AutoModelForCausalLM.register(_model.config_class, _model)
_install_generate_hook()
_DraftModel.sharing = _hub

__all__ = [
    "AcceptanceReport",
    "AdaptiveDrafting",
    "AdditiveCost",
    "Completion",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "Eagle3Config",
    "Eagle3DraftModel",
    "EarlyStopScheduler",
    "EliminationScheduler",
    "Evaluation",
    "FeatureCache",
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
    "cache_features",
    "calibrate",
    "check_target",
    "collect_rounds",
    "compare_domains",
    "convert_checkpoint",
    "decode_with",
    "evaluate",
    "export_checkpoint",
    "find_cost",
    "generate_many",
    "load_cost",
    "measure_acceptance",
    "measure_calibration",
    "measure_domains",
    "profile_throughput",
    "push_draft",
    "regenerate",
    "regenerate_with_endpoint",
    "save_cost",
    "save_repository",
    "tokens_per_pass",
    "write_card",
    "write_remote_code",
]


# Who only decodes does not pay for what others need.
_IMPORTED_WHEN_USED = {
    "DSparkTrainer": "trainer",
    "DSparkTrainingArguments": "trainer",
    "FeatureCache": "feature_cache",
    "cache_features": "feature_cache",
    "convert_checkpoint": "checkpoints",
    "export_checkpoint": "checkpoints",
    "regenerate": "regeneration",
    "regenerate_with_endpoint": "regeneration",
}


def __getattr__(name: str):
    if name in _IMPORTED_WHEN_USED:
        return getattr(import_module(f".{_IMPORTED_WHEN_USED[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
