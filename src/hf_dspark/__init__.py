"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=draft)`, with the same tokens.

Importing it lets `AutoModel` and `AutoModelForCausalLM` load drafts, and `generate()` decode with them. All else is
imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .decoding.install import install
from .models import publisher
from .models.configuration_dspark import DSparkConfig
from .models.configuration_eagle3 import Eagle3Config

if TYPE_CHECKING:  # for editors; _NAMES says the same
    from .cpu import fast_linears as fast_linears
    from .decoding.assisted import DSparkCandidateGenerator as DSparkCandidateGenerator
    from .decoding.attach import attach as attach
    from .decoding.attach import detach as detach
    from .decoding.hook import decode_with as decode_with
    from .decoding.many import generate_many as generate_many
    from .decoding.reversible import ReversibleProcessor as ReversibleProcessor
    from .hub.convert import convert_checkpoint as convert_checkpoint
    from .hub.inspection import inspect_draft as inspect_draft
    from .measuring.calibrate import calibrate as calibrate
    from .measuring.evaluate import evaluate as evaluate
    from .measuring.profile import profile_throughput as profile_throughput
    from .measuring.regenerate import regenerate as regenerate
    from .models.modeling_dspark import DSparkDraftModel as DSparkDraftModel
    from .models.modeling_eagle3 import Eagle3DraftModel as Eagle3DraftModel
    from .models.prompt_lookup import PromptLookup as PromptLookup
    from .scheduling.costs import ThroughputTable as ThroughputTable
    from .scheduling.options import DecodingOptions as DecodingOptions
    from .scheduling.policies import ConfidenceThreshold as ConfidenceThreshold
    from .scheduling.policies import FullBlock as FullBlock
    from .scheduling.policies import Policy as Policy
    from .scheduling.rounds import Rounds as Rounds
    from .scheduling.scheduler import Scheduler as Scheduler
    from .targets.assistant_draft import AssistantDraft as AssistantDraft
    from .targets.check import check_target as check_target
    from .training.arguments import DSparkTrainingArguments as DSparkTrainingArguments
    from .training.target_states import cache_features as cache_features
    from .training.trainer import DSparkTrainer as DSparkTrainer

__version__ = "0.2.0"

# The public names by their modules.
_NAMES = {
    "cpu": "fast_linears",
    "decoding.assisted": "DSparkCandidateGenerator",
    "decoding.attach": "attach detach",
    "decoding.hook": "decode_with",
    "decoding.many": "generate_many",
    "decoding.reversible": "ReversibleProcessor",
    "measuring.regenerate": "regenerate",
    "measuring.calibrate": "calibrate",
    "measuring.evaluate": "evaluate",
    "measuring.profile": "profile_throughput",
    "scheduling.costs": "ThroughputTable",
    "scheduling.policies": "ConfidenceThreshold FullBlock Policy",
    "scheduling.rounds": "Rounds",
    "scheduling.scheduler": "Scheduler",
    "models.configuration_dspark": "DSparkConfig",
    "models.configuration_eagle3": "Eagle3Config",
    "models.modeling_dspark": "DSparkDraftModel",
    "models.modeling_eagle3": "Eagle3DraftModel",
    "scheduling.options": "DecodingOptions",
    "models.prompt_lookup": "PromptLookup",
    "hub.convert": "convert_checkpoint",
    "hub.inspection": "inspect_draft",
    "targets.assistant_draft": "AssistantDraft",
    "targets.check": "check_target",
    "training.arguments": "DSparkTrainingArguments",
    "training.target_states": "cache_features",
    "training.trainer": "DSparkTrainer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES.keys())


_LOADERS = (AutoModel, AutoModelForCausalLM)  # the second loads the assistants in transformers' manual


class _Late(type):
    """Stands for the class of a draft where Auto-classes look for it, until that class is used."""

    def __getattr__(cls, name: str) -> Any:
        model = __getattr__(cls.__name__)
        for loader in _LOADERS:
            loader.register(cls.config_class, model, exist_ok=True)
        return getattr(model, name)


for _model, _config in (("DSparkDraftModel", DSparkConfig), ("Eagle3DraftModel", Eagle3Config)):
    AutoConfig.register(_config.model_type, _config)
    for _loader in _LOADERS:
        _loader.register(_config, _Late(_model, (), {"config_class": _config}))
publisher.load = lambda: import_module(".hub.repository", __name__)
install()
