"""Rotary parameters: which kinds a draft can use, and what remains of a target's when it cannot use them.

Knows nothing of models or of checkpoints.
"""

# Rotary types whose frequencies do not depend on the current length: cached keys stay valid as the context grows.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


def full_attention_rope(rope_parameters: dict | None) -> dict | None:
    """Return the rotary parameters of a target's full-attention layers, if a draft can use them.

    Gemma 3 and 4 keep one set per layer type; a draft has one, that of the full-attention layers.
    """
    if rope_parameters is None:
        return None
    flat = rope_parameters.get("full_attention", rope_parameters)
    # A draft reads text, whose positions are the same in all sections of a multimodal target's.
    flat = {
        key: value
        for key, value in flat.items()
        if value is not None and not isinstance(value, dict) and not key.startswith("mrope_")
    }
    if flat.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": flat.get("rope_theta", 1_000_000.0)}
    return flat
