"""A sampler of chains that knows no requests and no processors."""

import torch

from hf_dspark.decoding.tree_drafting import Chains
from hf_dspark.sampling.distributions import Scores, TokenDistribution
from hf_dspark.sampling.drafts import DraftBlock


class ChainSampler(Chains):
    """Draws the arg-max; a subclass may draw otherwise."""

    def __init__(self) -> None:
        super().__init__(requests=(), processor=None, uniforms=None)

    def draw(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, TokenDistribution | None]:
        return Scores(logits, candidate_ids).best()[1], None

    def finish(self, confidence_logits: torch.Tensor | None = None) -> DraftBlock:
        drawn = None if self._distributions[0] is None else TokenDistribution.stack(self._distributions)
        return DraftBlock(torch.stack(self.token_ids, dim=1), drawn, confidence_logits)
