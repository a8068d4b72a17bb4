"""Names of transformers that differ between its versions or are private: one place, asked when they are first used."""

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import transformers
from packaging.version import parse
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

NEWEST_TESTED = parse("5.24")
# Of the cache: since 5.24, of all models before, and of Mamba before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


@functools.cache
def warn_if_untested() -> None:
    """Warn once of a minor version of transformers above the tested ones."""
    if parse(transformers.__version__).release[:2] > NEWEST_TESTED.release[:2]:
        warnings.warn(
            f"hf_dspark is tested up to transformers {NEWEST_TESTED}, this is {transformers.__version__}: if a call "
            f'fails, or is slow, try pip install "transformers<{NEWEST_TESTED.major}.{NEWEST_TESTED.minor + 1}"',
            stacklevel=2,
        )


@functools.cache
def output_cache_name() -> str:
    """Return the name under which outputs hold the cache."""
    names = {each.name for each in fields(GenerateDecoderOnlyOutput)}
    return _first_of(CACHE_ARGUMENTS, names, "GenerateDecoderOnlyOutput")


def cache_argument(target: PreTrainedModel) -> str:
    """Return the name under which the `forward` of a target takes its cache."""
    parameters = inspect.signature(target.forward).parameters
    if parameters.keys().isdisjoint(CACHE_ARGUMENTS) and any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    ):
        return output_cache_name()  # a wrapper passes on what transformers' models take
    return _first_of(CACHE_ARGUMENTS, parameters, f"{type(target).__name__}.forward")


def pop_cache(model_kwargs: dict[str, Any]) -> Any:
    """Take the cache out of what `generate()` prepared, under whichever name; `None` if there is none."""
    found = [model_kwargs.pop(name, None) for name in CACHE_ARGUMENTS]
    return next((cache for cache in found if cache is not None), None)


def state_cache_obstacle() -> str | None:
    """Return why recurrent layers cannot be given their states in place of a cache; `None` if they can."""
    if hasattr(Cache, "get_conv_state"):
        return None
    return f"transformers 5.23 or later (this is {transformers.__version__}: upgrade it)"


def _first_of(names: tuple[str, ...], present: Mapping[str, Any] | set[str], where: str) -> str:
    for name in names:
        if name in present:
            return name
    raise RuntimeError(
        f"hf_dspark does not know transformers {transformers.__version__}: {where} has none of {', '.join(names)}. "
        f"Tested are 5.17 to {NEWEST_TESTED}"
    )
