"""For functions that call `generate()` themselves: which arguments they make, rows of token ids to a batch, and the
new tokens of each row back out of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

MADE_HERE = {
    "input_ids", "inputs", "inputs_embeds", "attention_mask", "past_key_values", "streamer", "assistant_model",
    "num_return_sequences", "return_dict_in_generate", "max_length",
}  # fmt: skip


def refuse_made_here(caller: str, generate_kwargs: Mapping[str, Any], **instead: str) -> None:
    """Raise a `ValueError` for arguments of `generate()` that the caller makes itself, and say what to use instead."""
    for name, value in generate_kwargs.items():
        if name in MADE_HERE and value is not None:
            cure = {"max_length": "use max_new_tokens"} | instead
            raise ValueError(f"{caller} makes {name} itself: {cure.get(name, 'drop it')}")


def left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, `[B, n]`, of prompts padded on the left."""
    width = max(map(len, prompts))
    rows = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)


def end_token_ids(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def pad_token_id(config: GenerationConfig) -> int:
    """Return the token that fills rows up: the config's, or else one that ends a sequence."""
    return int(config.pad_token_id) if config.pad_token_id is not None else (end_token_ids(config) or [0])[0]


def new_tokens(row: Sequence[int], ends: Sequence[int], padding: int | None = None) -> list[int]:
    """Return what a row got up to its end: an end-of-sequence token, or where padding begins to fill it up."""
    end = next((place for place, token in enumerate(row) if token in ends), None)
    if end is not None:
        return list(row[: end + 1])
    length = len(row)
    while length > 1 and row[length - 1] == padding:
        length -= 1
    return list(row[:length])
