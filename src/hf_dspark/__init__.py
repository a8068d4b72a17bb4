"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, with the same tokens.

Importing it lets `AutoModel` load drafts and `generate()` decode with them. All else is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel

from .decoding import pipelines
from .decoding.install import install
from .models.configuration_dspark import DSparkConfig
from .models.configuration_eagle3 import Eagle3Config

if TYPE_CHECKING:  # for editors; _NAMES says the same
    from .cpu import fast_linears as fast_linears
    from .decoding.hook import decode_with as decode_with
    from .decoding.many import generate_many as generate_many
    from .decoding.regenerate import regenerate as regenerate
    from .decoding.rounds import RoundStatistics as RoundStatistics
    from .evaluation.calibrate import calibrate as calibrate
    from .evaluation.evaluate import evaluate as evaluate
    from .evaluation.profile import profile_throughput as profile_throughput
    from .maths.costs import ThroughputTable as ThroughputTable
    from .maths.policies import AdaptiveDrafting as AdaptiveDrafting
    from .maths.policies import ConfidenceThreshold as ConfidenceThreshold
    from .maths.policies import FullBlock as FullBlock
    from .maths.policies import LaggedScheduler as LaggedScheduler
    from .maths.policies import Policy as Policy
    from .maths.policies import PrefixScheduler as PrefixScheduler
    from .maths.policies import SLOLimit as SLOLimit
    from .maths.tree_policies import TreeBudget as TreeBudget
    from .maths.tree_policies import TreeScheduler as TreeScheduler
    from .models.modeling_dspark import DSparkDraftModel as DSparkDraftModel
    from .models.modeling_eagle3 import Eagle3DraftModel as Eagle3DraftModel
    from .models.options import DecodingOptions as DecodingOptions
    from .models.prompt_lookup import PromptLookup as PromptLookup
    from .sharing.convert import convert_checkpoint as convert_checkpoint
    from .sharing.training import DSparkTrainer as DSparkTrainer
    from .targets.check import check_target as check_target
    from .training.arguments import DSparkTrainingArguments as DSparkTrainingArguments
    from .training.feature_cache import cache_features as cache_features

__version__ = "0.1.0.dev0"

# The public names by their modules.
_NAMES = {
    "cpu": "fast_linears",
    "decoding.hook": "decode_with",
    "decoding.many": "generate_many",
    "decoding.regenerate": "regenerate",
    "decoding.rounds": "RoundStatistics",
    "evaluation.calibrate": "calibrate",
    "evaluation.evaluate": "evaluate",
    "evaluation.profile": "profile_throughput",
    "maths.costs": "ThroughputTable",
    "maths.policies": "AdaptiveDrafting ConfidenceThreshold FullBlock LaggedScheduler Policy PrefixScheduler SLOLimit",
    "maths.tree_policies": "TreeBudget TreeScheduler",
    "models.configuration_dspark": "DSparkConfig",
    "models.configuration_eagle3": "Eagle3Config",
    "models.modeling_dspark": "DSparkDraftModel",
    "models.modeling_eagle3": "Eagle3DraftModel",
    "models.options": "DecodingOptions",
    "models.prompt_lookup": "PromptLookup",
    "sharing.convert": "convert_checkpoint",
    "sharing.training": "DSparkTrainer",
    "targets.check": "check_target",
    "training.arguments": "DSparkTrainingArguments",
    "training.feature_cache": "cache_features",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES.keys())


class _Late(type):
    """Stands for the class of a draft where `AutoModel` looks for it, until that class is used."""

    def __getattr__(cls, name: str) -> Any:
        model = __getattr__(cls.__name__)
        AutoModel.register(cls.config_class, model, exist_ok=True)
        return getattr(model, name)


for _model, _config in (("DSparkDraftModel", DSparkConfig), ("Eagle3DraftModel", Eagle3Config)):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _Late(_model, (), {"config_class": _config}))
install()
pipelines.install()
