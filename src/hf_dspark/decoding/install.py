"""Four methods of `GenerationMixin` are wrapped when the package is imported, so that `generate()` knows of drafts.
What the wraps do is in `wraps`, which the first call of `generate()` imports: importing the package stays quick."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import transformers
from transformers.generation import GenerationMixin

PREPARED = ("logits_processor", "stopping_criteria", "generation_config")
# What each wrapped method must accept; a test checks it on every supported version.
WRAPPED_PARAMETERS = {
    "generate": ("generation_config", "assistant_model", "custom_generate"),
    "generate_batch": ("inputs",),
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": ("input_ids", *PREPARED, "assistant_model"),
}


def install() -> None:
    """Wrap the methods of `GenerationMixin`. Does nothing the second time."""
    for name, parameters in WRAPPED_PARAMETERS.items():
        method = getattr(GenerationMixin, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            raise ImportError(
                f"hf_dspark cannot plug into generate() of transformers {transformers.__version__}: "
                f"GenerationMixin.{name}{parameters} is not there. Supported: transformers>=5.17,<6."
            )
    for name in WRAPPED_PARAMETERS:
        method = getattr(GenerationMixin, name)
        if not hasattr(method, "_hf_dspark_wrapped"):
            setattr(GenerationMixin, name, _wrapped(name.lstrip("_"), method))


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        from . import wraps

        return getattr(wraps, name)(original, *args, **kwargs)

    method._hf_dspark_wrapped = True
    return method
