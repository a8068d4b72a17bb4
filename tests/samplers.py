"""A sampler of chains that knows no requests and no processors."""

import torch

from hf_dspark.sampling.distributions import Scores, TokenDistribution
from hf_dspark.sampling.drafts import DraftBlock


class ChainSampler:
    """Draws the arg-max; a subclass may draw otherwise."""

    reads_confidence = False  # a chain is cut after it was drawn, by confidences that were known before

    def __init__(self) -> None:
        self.token_ids: list[torch.Tensor] = []  # of each level, [R]
        self._distributions: list[TokenDistribution | None] = []

    def draw(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, TokenDistribution | None]:
        """Return a token for each row, `[R]`, and what it was drawn from, `None` for an arg-max."""
        return Scores(logits, candidate_ids).best()[1], None

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        token_ids, distribution = self.draw(logits, candidate_ids)
        self.token_ids.append(token_ids)
        self._distributions.append(distribution)
        return token_ids, None

    def finish(self, confidence_logits: torch.Tensor | None = None) -> DraftBlock:
        drawn = None if self._distributions[0] is None else TokenDistribution.stack(self._distributions)
        return DraftBlock(torch.stack(self.token_ids, dim=1), drawn, confidence_logits)
