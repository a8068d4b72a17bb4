"""The target of the EAGLE-3 drafts in `tests/fixtures/eagle3`, made of seeded random numbers."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, GAMMA = 24, 16, 10, 4
DEFAULT_TAPS = [1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4]
PROMPT, NUM_TOKENS = [5, 17, 2, 9, 9, 21], 24


@torch.no_grad()
def fill(model: nn.Module, seed: int, spread: float = 0.25) -> None:
    """Give every parameter a random value that does not depend on how it was made."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name))


def make_target() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=24, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config)
    fill(target, seed=3)
    with torch.no_grad():  # the next token has something to do with the last one
        target.model.embed_tokens.weight.mul_(6.0)
        target.lm_head.weight.add_(target.model.embed_tokens.weight, alpha=0.1)
    return target.eval().requires_grad_(False)


def target_features(target: PreTrainedModel, token_ids: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """Return what a draft reads of each token, `[S, m*d]`: the outputs of the tapped layers."""
    states = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
