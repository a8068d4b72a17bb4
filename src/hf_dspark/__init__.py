"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, without changing a
token."""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .decoding.assisted import DSparkCandidateGenerator
from .decoding.hook import decode_with
from .decoding.hook import install as _install_generate_hook
from .decoding.many import Completion, generate_many
from .decoding.pipelines import install as _install_pipelines
from .decoding.rounds import RoundStatistics
from .decoding.step_costs import find_cost
from .evaluation.calibrate import calibrate, collect_rounds
from .evaluation.evaluate import Evaluation, evaluate
from .evaluation.profile import profile_throughput
from .maths.costs import Load, ThroughputTable
from .maths.policies import (
    AdaptiveDrafting,
    ConfidenceThreshold,
    FullBlock,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    RoundOutcome,
    SLOLimit,
)
from .models.auto import DRAFTS as _DRAFTS
from .models.configuration_dspark import DSparkConfig
from .models.configuration_eagle3 import Eagle3Config
from .models.modeling_dspark import DSparkDraftModel
from .models.modeling_eagle3 import Eagle3DraftModel
from .models.options import DecodingOptions
from .models.slot_cache import SlotCache
from .sharing.hub import push_draft, save_repository, write_card, write_remote_code
from .targets.check import check_target

__version__ = "0.1.0.dev0"

for _type, _model in _DRAFTS.items():
    AutoConfig.register(_type, _model.config_class)
    AutoModel.register(_model.config_class, _model)
    AutoModelForCausalLM.register(_model.config_class, _model)
_install_generate_hook()
_install_pipelines()

__all__ = [
    "AdaptiveDrafting",
    "Completion",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "DecodingOptions",
    "Eagle3Config",
    "Eagle3DraftModel",
    "Evaluation",
    "FeatureCache",
    "FullBlock",
    "LaggedScheduler",
    "Load",
    "Policy",
    "PrefixScheduler",
    "RoundOutcome",
    "RoundStatistics",
    "SLOLimit",
    "SlotCache",
    "ThroughputTable",
    "cache_features",
    "calibrate",
    "check_target",
    "collect_rounds",
    "convert_checkpoint",
    "decode_with",
    "evaluate",
    "find_cost",
    "generate_many",
    "profile_throughput",
    "push_draft",
    "regenerate",
    "save_repository",
    "write_card",
    "write_remote_code",
]


# Who only decodes does not pay for what others need.
_IMPORTED_WHEN_USED = {
    "DSparkTrainer": "sharing.training",
    "DSparkTrainingArguments": "training.arguments",
    "FeatureCache": "training.feature_cache",
    "cache_features": "training.feature_cache",
    "convert_checkpoint": "sharing.convert",
    "regenerate": "decoding.regenerate",
}


def __getattr__(name: str):
    if name in _IMPORTED_WHEN_USED:
        return getattr(import_module(f".{_IMPORTED_WHEN_USED[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
