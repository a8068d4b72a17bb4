"""The sequential heads of a draft: what the previous tokens of a block add to its logits, and how likely each slot is.

Knows nothing of the backbone that makes h_k, or of sampling.
"""

import torch
from torch import nn

from ..cpu.few_rows import FewRowsLinear, products_with_rows
from .configuration_dspark import DSparkConfig


class MarkovProjection(FewRowsLinear):
    """W_2; its own class because it starts at zero, so that an untrained head leaves the base logits alone."""


class VanillaMarkovHead(nn.Module):
    """B(x_{k-1}, ·) = W_1[x_{k-1}] W_2. DSpark Eq. 5.

    All heads share one interface: `transition` turns the previous token and h_k into an r-vector and the next state,
    `bias` projects r-vectors on the vocabulary, or on some candidates of it.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = MarkovProjection(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def transition(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the r-vector of slot k, and the state for slot k+1.

        Args:
            embedding (`torch.Tensor` of shape `[..., r]`): W_1[x_{k-1}].
            hidden (`torch.Tensor` of shape `[..., d]`): h_k.
            state (`torch.Tensor` of shape `[..., r]`, *optional*): s_{k-1}; `None` for the first slot.
        """
        return embedding, None

    def bias(self, transitions: torch.Tensor, candidate_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bias `[..., V]` of r-vectors `[..., r]`, or `[..., n]` for candidates `[..., n]`."""
        if candidate_ids is None:
            return self.markov_w2(transitions)
        return products_with_rows(self.markov_w2.weight, candidate_ids, transitions)

    def teacher_forced(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the r-vectors `[..., γ, r]` along W_1 of given previous tokens, `[..., γ, r]`."""
        outputs, state = [], None
        for slot in range(embedding.shape[-2]):
            output, state = self.transition(embedding[..., slot, :], hidden[..., slot, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)


class GatedMarkovHead(VanillaMarkovHead):
    """The Markov embedding gated, entry by entry, by h_k and itself."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = FewRowsLinear(config.hidden_size + config.markov_rank, config.markov_rank)

    def transition(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, None


class RNNHead(VanillaMarkovHead):
    """A recurrent state over the block's prefix. DSpark Eq. 6."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = FewRowsLinear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def transition(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


MARKOV_HEADS = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


class ConfidenceHead(nn.Module):
    """Logit of c_k, the conditional acceptance of slot k, from h_k and W_1[x_{k-1}]. DSpark Eq. 7."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + self.with_markov * config.markov_rank, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        features = torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1) if self.with_markov else hidden
        return self.proj(features)[..., 0]
