"""Which layers of a target can read a slot cache, found by the names that their methods use, and which cannot."""

import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .feature_capture import decoder_layers
from .recurrent import Mixer, find_mixers, names_used_by
from .row_attention import RowAttention

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "moe", "mlp"}
# What layers, or the whole decoder, do to caches that are neither keys and values, nor states, nor an indexer's keys.
OTHER_CACHES = {"store_compression_weights", "update_compressor_states", "indexer_position_ids"}


def keeps_states(target: PreTrainedModel) -> bool:
    """Tell whether a target has recurrent layers or convolutions: a mask alone cannot take them back."""
    return is_stateful(target) or "conv" in _layer_types(target)


def _layer_types(target: PreTrainedModel) -> set[str]:
    return set(getattr(target.config.get_text_config(decoder=True), "layer_types", None) or [])


def is_stateful(target: PreTrainedModel) -> bool:
    """Tell whether transformers refuses assisted generation for a target."""
    return getattr(target, "_is_stateful", False)


def slot_cache_obstacle(target: PreTrainedModel) -> str | None:
    """Return why a target cannot attend to a slot cache; `None` if it can."""
    if keeps_states(target):
        return state_obstacle(target)
    name = type(target).__name__
    if not getattr(target, "_supports_attention_backend", False):
        return f"{name} has attention of its own (ALiBi, for example), which cannot read a slot cache"
    others = sorted(_layer_types(target) - ATTENTION_LAYERS)
    return f"{name} has layers that are not attention ({', '.join(others)})" if others else None


def state_obstacle(target: PreTrainedModel) -> str | None:
    """Return why the layers of a recurrent or hybrid target cannot be decoded with drafts; `None` if they can."""
    name = type(target).__name__
    if not hasattr(Cache, "get_conv_state"):
        version = transformers.__version__
        return f"{name} keeps a recurrent state, which takes transformers 5.23 or later (this is {version})"
    whole, by_rows = names_used_by(type(target.get_decoder())), called_by_rows(target)
    for number, layer in enumerate(decoder_layers(target)):
        used = set().union(*(names_used_by(type(module)) for module in layer.modules()))
        if others := sorted((used | whole) & OTHER_CACHES):
            return f"{name} keeps in its cache what cannot be kept row by row ({', '.join(others)})"
        if "update" in used and "ALL_ATTENTION_FUNCTIONS" not in used:
            return f"{name} has attention of its own, which cannot read a slot cache (layer {number})"
    if not by_rows:
        return f"{name} keeps its recurrent state outside of transformers' caches"
    if any(parameter.device.type == "meta" for layer in by_rows for parameter in layer.module.parameters()):
        return f"{name} has recurrent layers whose weights are offloaded, and would be loaded twice in each round"
    return None


def called_by_rows(target: PreTrainedModel) -> list[Mixer | RowAttention]:
    """Return the layers of a target that packed passes call for some rows at a time."""
    config, modules = target.config.get_text_config(decoder=True), dict(target.named_modules())
    indexed = [name for name, module in modules.items() if "update_indexer" in names_used_by(type(module))]
    attention = [name for name, module in modules.items() if "ALL_ATTENTION_FUNCTIONS" in names_used_by(type(module))]
    with_indexer = [name for name in attention if any(each.startswith(f"{name}.") for each in indexed)]
    return [*find_mixers(target), *(RowAttention(name, modules[name], config) for name in with_indexer)]


def tree_obstacle(target: PreTrainedModel) -> str | None:
    """Return why a target cannot verify trees of drafts; `None` if it can."""
    if called_by_rows(target):
        return f"{type(target).__name__} has layers that read a row token by token, and cannot follow several branches"
    return None


def check_state(target: PreTrainedModel) -> None:
    """Raise a `ValueError` for stateful targets that cannot be decoded with a draft at all."""
    # transformers' own loop, which takes targets with other obstacles, cannot bring a state back, either.
    obstacle = slot_cache_obstacle(target) if is_stateful(target) else None
    if obstacle is not None:
        raise ValueError(f"{obstacle}, so it cannot go back to before a rejected token: decode it without a draft")
