"""Tapped layers, by transformers' own numbering of hidden states."""

import torch


def select_features(hidden_states: tuple[torch.Tensor, ...], target_layer_ids: list[int]) -> torch.Tensor:
    """`hidden_states[0]` is the embedding output (id -1), `hidden_states[i + 1]` the raw output of layer i."""
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)
