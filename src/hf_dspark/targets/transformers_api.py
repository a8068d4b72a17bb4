"""Names of transformers that differ between its versions or are private: one place, asked when they are first used."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import transformers
from packaging.version import parse
from transformers import GenerationConfig, PrefixConstrainedLogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NEWEST_TESTED = parse("5.24")
# Of the cache: since 5.24, of all models before, and of Mamba before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
# Where a config keeps how it attends. The property of that name also sets the configs within, and takes its time.
ATTENDS = "_attn_implementation_internal"


def is_since(version: str) -> bool:
    return parse(transformers.__version__) >= parse(version)


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
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if takes_any and parameters.keys().isdisjoint(CACHE_ARGUMENTS):
        return output_cache_name()  # a wrapper passes on what transformers' models take
    return _first_of(CACHE_ARGUMENTS, parameters, f"{type(target).__name__}.forward")


def pop_cache(model_kwargs: dict[str, Any]) -> Any:
    """Take the cache out of what `generate()` prepared, under whichever name; `None` if there is none."""
    found = [model_kwargs.pop(name, None) for name in CACHE_ARGUMENTS]
    return next((cache for cache in found if cache is not None), None)


def is_users(cache: Any) -> bool:
    """Tell whether `generate()` was given this cache, and did not make it."""
    return getattr(cache, "_is_user_defined", False)


def own_step(target: PreTrainedModel) -> str | None:
    """Return which method between two passes a user has replaced; code on the Hub copies them from transformers, and
    PEFT's adds what only prompt tuning needs."""
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        module = getattr(getattr(type(target), name, None), "__module__", "transformers")
        if module.split(".")[0] not in ("transformers", "transformers_modules", "peft"):
            return name
    return None


def is_transformers_attention(name: str) -> bool:
    """Tell whether an attention implementation is one of transformers or of its kernels (`owner/name`): it computes
    what ours does."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    module = getattr(function, "func", function).__module__ if function is not None else "transformers"
    return "/" in name or module.split(".")[0] in ("transformers", "hf_dspark")


def state_cache_obstacle() -> str | None:
    """Return why recurrent layers cannot be given their states in place of a cache; `None` if they can."""
    if hasattr(Cache, "get_conv_state"):
        return None
    return f"transformers 5.23 or later (this is {transformers.__version__}: upgrade it)"


def eos_token_ids(config: GenerationConfig) -> frozenset[int]:
    """Return the end-of-sequence ids that `generate()` has prepared."""
    prepared = getattr(config, "_eos_token_tensor", None)
    return frozenset(() if prepared is None else prepared.flatten().tolist())


def pad_token_id(config: GenerationConfig) -> int | None:
    prepared = getattr(config, "_pad_token_tensor", None)
    return None if prepared is None else int(prepared)


def mask_width(config: GenerationConfig) -> int | None:
    """Return the columns of an attention mask that `generate()` has dropped, because it was all ones."""
    return getattr(config, "_mask_length", None)


def allowed_tokens(processor: PrefixConstrainedLogitsProcessor, row: int) -> Callable[[Any, Any], Sequence[int]]:
    """Return the user's function, which is asked about this row of a batch: it gets the number of its prompt since
    5.24, and of its sequence before."""
    allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
    return lambda _, token_ids: allowed(number, token_ids)


def generation_obstacles(target: PreTrainedModel) -> list[str]:
    """Return why a target does not generate as `GenerationMixin` does; nothing if it does."""
    own_loop = getattr(type(target), "_sample", GenerationMixin._sample) is not GenerationMixin._sample
    if not own_loop and not hasattr(target, "depth_decoder"):  # CSM, Higgs Audio; Moshi
        return []
    return [f"{type(target).__name__} generates by a loop of its own, which no draft follows: drop assistant_model"]


def _first_of(names: tuple[str, ...], present: Mapping[str, Any] | set[str], where: str) -> str:
    for name in names:
        if name in present:
            return name
    raise RuntimeError(
        f"hf_dspark does not know transformers {transformers.__version__}: {where} has none of {', '.join(names)}. "
        f"Tested are 5.17 to {NEWEST_TESTED}"
    )
