"""Which layers of a target can read a slot cache, found by the names that their methods use, and which cannot."""

from transformers import PreTrainedModel

from .feature_capture import decoder_layers
from .recurrent import find_mixers, names_used_by

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "moe", "mlp"}
# What attention layers do to caches that have more than keys and values: a SlotCache has not.
OTHER_CACHES = {"update_indexer", "store_compression_weights", "update_compressor_states"}


def keeps_states(target: PreTrainedModel) -> bool:
    """Tell whether a target has recurrent or convolutional layers, whose state cannot go back."""
    text = target.config.get_text_config(decoder=True)
    return (
        getattr(target, "_is_stateful", False) or not set(getattr(text, "layer_types", None) or []) <= ATTENTION_LAYERS
    )


def slot_cache_obstacle(target: PreTrainedModel) -> str | None:
    """Return why a target cannot attend to a slot cache; `None` if it can."""
    if keeps_states(target):
        return state_obstacle(target)
    if getattr(target, "_supports_attention_backend", False):
        return None
    return f"{type(target).__name__} has attention of its own (ALiBi, for example), which cannot read a slot cache"


def state_obstacle(target: PreTrainedModel) -> str | None:
    """Return why the layers of a recurrent or hybrid target cannot be decoded with drafts; `None` if they can."""
    name = type(target).__name__
    mixers = find_mixers(target)
    if not mixers:
        return f"{name} keeps its recurrent state outside of transformers' caches"
    if any(mixer.is_offloaded for mixer in mixers):
        return f"{name} has recurrent layers whose weights are offloaded, and would be loaded twice in each round"
    for number, layer in enumerate(decoder_layers(target)):
        used = set().union(*(names_used_by(type(module)) for module in layer.modules()))
        if used & OTHER_CACHES:
            return f"{name} keeps more than keys, values and recurrent states in its cache (layer {number})"
        if "update" in used and "ALL_ATTENTION_FUNCTIONS" not in used:
            return f"{name} has attention of its own, which cannot read a slot cache (layer {number})"
    return None


def check_state(target: PreTrainedModel) -> None:
    """Raise a `ValueError` for recurrent and hybrid targets that cannot be decoded with a draft at all."""
    # transformers' own loop, which takes other obstacles, cannot bring a state back, either.
    obstacle = slot_cache_obstacle(target) if keeps_states(target) else None
    if obstacle is not None:
        raise ValueError(f"{obstacle}, so it cannot go back to before a rejected token: decode it without a draft")
