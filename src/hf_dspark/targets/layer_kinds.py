"""Which layers of a target can read a slot cache, found by the names that their methods use, and which cannot."""

from transformers import PreTrainedModel

from .feature_capture import decoder_layers
from .recurrent import find_mixers, names_used_by
from .row_attention import RowAttention

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "moe", "mlp"}
# What layers, or the whole decoder, do to caches that are neither keys and values, nor states, nor an indexer's keys.
OTHER_CACHES = {"store_compression_weights", "update_compressor_states", "indexer_position_ids"}


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
    if any(layer.is_offloaded for layer in (*mixers, *find_row_attention(target))):
        return f"{name} has recurrent layers whose weights are offloaded, and would be loaded twice in each round"
    whole = names_used_by(type(target.get_decoder()))
    for number, layer in enumerate(decoder_layers(target)):
        used = set().union(*(names_used_by(type(module)) for module in layer.modules()))
        if others := sorted((used | whole) & OTHER_CACHES):
            return f"{name} keeps in its cache what cannot be kept row by row ({', '.join(others)})"
        if "update" in used and "ALL_ATTENTION_FUNCTIONS" not in used:
            return f"{name} has attention of its own, which cannot read a slot cache (layer {number})"
    return None


def find_row_attention(target: PreTrainedModel) -> list[RowAttention]:
    """Return the attention layers of a target that have an indexer."""
    config = target.config.get_text_config(decoder=True)
    indexed = [name for name, each in target.named_modules() if "update_indexer" in names_used_by(type(each))]
    return [
        RowAttention(name, module, config)
        for name, module in target.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in names_used_by(type(module))
        and any(each.startswith(f"{name}.") for each in indexed)
    ]


def check_state(target: PreTrainedModel) -> None:
    """Raise a `ValueError` for recurrent and hybrid targets that cannot be decoded with a draft at all."""
    # transformers' own loop, which takes other obstacles, cannot bring a state back, either.
    obstacle = slot_cache_obstacle(target) if keeps_states(target) else None
    if obstacle is not None:
        raise ValueError(f"{obstacle}, so it cannot go back to before a rejected token: decode it without a draft")
