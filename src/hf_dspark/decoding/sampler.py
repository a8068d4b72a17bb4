"""From a draft's logits to the distributions of its tokens: the processors of the target's own decoding, after each
prefix."""

from collections.abc import Sequence

import torch

from ..sampling.distributions import TokenDistribution, draw, scatter_to_vocabulary
from .logits_processing import BlockProcessor, Scores
from .request import Request


class ProcessedDistributions:
    """Processes a draft's logits as those of the target are. Where processors forbid all of a draft's candidates, it
    takes a distribution of their own."""

    def __init__(self, processor: BlockProcessor, vocab_size: int) -> None:
        self._processor, self._vocab_size = processor, vocab_size

    @property
    def reads_prefixes(self) -> bool:
        """Whether the drafts before a position are looked at."""
        return self._processor.reads_prefixes

    def __call__(
        self,
        logits: torch.Tensor,
        candidate_ids: torch.Tensor | None,
        requests: Sequence[Request],
        drafts: Sequence[torch.Tensor] | Sequence[list[int] | None],
    ) -> Scores:
        """Process logits `[n, V]` or `[n, candidates]`, each after its request and some drafts, `[k]`. `None` stands
        for drafts that plain decoding cannot come to."""
        prefixes = []
        if self._processor.reads_prefixes:
            prefixes = [
                None if before is None else request.prefix(torch.as_tensor(before, device="cpu"))
                for request, before in zip(requests, drafts, strict=True)
            ]
        scores = self._processor(logits, candidate_ids, prefixes)
        if not self._processor.may_forbid_all or not bool((dead := _have_no_distribution(scores.values)).any()):
            return scores
        dead &= ~_have_no_distribution(logits)  # by the processors' fault, not the draft's
        # A constraint may forbid every candidate. Any distribution is a valid draft distribution: take the processors'
        # own.
        if candidate_ids is not None:
            logits = scatter_to_vocabulary(logits, candidate_ids, self._vocab_size)
        scores = self._processor(logits.masked_fill(dead, 0.0), None, prefixes)
        # Or every token: the target will say so, if plain decoding comes here.
        return Scores(
            scores.values.masked_fill(dead & _have_no_distribution(scores.values), 0.0), scores.candidate_ids
        )


class ProcessedSampler:
    """Draws draft tokens of chains, each slot seeing its in-block prefix.
    `uniform` is the noise of the draws, `[R, γ]`; without it, the arg-max is drawn. `broken` tells of each slot where
    the draft gave no distribution, `[R]`: its numbers overflowed. It is known before the slot's token is drawn."""

    def __init__(
        self, distributions: ProcessedDistributions, requests: Sequence[Request], uniform: torch.Tensor | None
    ) -> None:
        self.broken: list[torch.Tensor] = []
        self._distributions, self._requests, self._uniform = distributions, requests, uniform

    def __call__(
        self, logits: torch.Tensor, candidate_ids: torch.Tensor | None, drafted_ids: torch.Tensor
    ) -> tuple[torch.Tensor, TokenDistribution | None]:
        scores = self._distributions(logits, candidate_ids, self._requests, drafted_ids)
        if self._uniform is None:
            token_ids = scores.best()
            best = scores.values if scores.candidate_ids is not None else scores.values.gather(-1, token_ids[:, None])
            self.broken.append(best.amax(dim=-1).isnan())
            return token_ids, None
        distribution = scores.distribution()
        token_ids = draw(distribution, self._uniform[:, drafted_ids.shape[1]])
        self.broken.append(token_ids < 0)
        return token_ids.clamp_min(0), distribution


def _have_no_distribution(scores: torch.Tensor) -> torch.Tensor:
    """Tell which rows have no possible token, or one that is NaN or infinite, `[R, 1]`."""
    return ~scores.amax(dim=-1, keepdim=True).isfinite()
