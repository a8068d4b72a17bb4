"""Tapped layers, by transformers' own numbering of hidden states, and what a draft reads of them."""

import torch

from hf_dspark.models.modeling_draft import NewContext


def select_features(hidden_states: tuple[torch.Tensor, ...], target_layer_ids: list[int]) -> torch.Tensor:
    """`hidden_states[0]` is the embedding output (id -1), `hidden_states[i + 1]` the raw output of layer i."""
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)


def new_context(anchor_ids, features, cache, counts=None, committed_ids=None) -> NewContext:
    """Context for rows of equally many features, `[R, C, m*d]`, or packed as `counts` say."""
    counts = [features.shape[1]] * len(anchor_ids) if counts is None else counts
    return NewContext(anchor_ids, features.flatten(0, -2), counts, cache, committed_ids)
