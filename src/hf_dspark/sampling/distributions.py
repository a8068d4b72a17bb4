"""Token distributions and scores, and how tokens are drawn from them.

Shape letters used in the whole package: B requests, S context positions, N anchors, γ draft tokens in a block
(`block_size`), V vocabulary entries, d hidden size, m tapped target layers, r Markov rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# `largest` and `best_of` on a CPU: vocabularies from this size on are searched by groups of so many tokens.
LARGE_VOCABULARY = 2**15
GROUP_SIZE = 64


@dataclass(frozen=True)
class TokenDistribution:
    """Distributions over the vocabulary, one per row, dense or on a few candidates."""

    probs: torch.Tensor  # [..., n]
    candidate_ids: torch.Tensor | None = None  # [..., n], distinct; other tokens are impossible. `None`: n = V

    @classmethod
    def stack(cls, distributions: "list[TokenDistribution]") -> "TokenDistribution":
        """Return distributions `[B, n]` as one `[B, len(distributions), n]`."""
        probs = torch.stack([distribution.probs for distribution in distributions], dim=1)
        if distributions[0].candidate_ids is None:
            return cls(probs)
        return cls(probs, torch.stack([distribution.candidate_ids for distribution in distributions], dim=1))

    def __getitem__(self, index) -> "TokenDistribution":
        """Select rows by an index into the leading dimensions."""
        return TokenDistribution(self.probs[index], None if self.candidate_ids is None else self.candidate_ids[index])

    def to(self, device: torch.device) -> "TokenDistribution":
        """Return the same distributions on a device, which is not waited for if it is an accelerator."""
        how, ids = {"device": device, "non_blocking": device.type == "cuda"}, self.candidate_ids
        return TokenDistribution(self.probs.to(**how), None if ids is None else ids.to(**how))

    def dense(self, vocab_size: int) -> "TokenDistribution":
        """Return the same distributions over the whole vocabulary, `[..., V]`."""
        if self.candidate_ids is None:
            return self
        full = self.probs.new_zeros(*self.probs.shape[:-1], vocab_size)
        return TokenDistribution(full.scatter(-1, self.candidate_ids, self.probs))

    def probability(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of some tokens of each row, `[..., m]` for `[..., m]`."""
        if self.candidate_ids is None:
            return self.probs.gather(-1, token_ids)
        same = token_ids[..., :, None] == self.candidate_ids[..., None, :]
        return (same * self.probs[..., None, :]).sum(dim=-1)


@dataclass(frozen=True)
class Scores:
    """Processed scores of n positions, from which a distribution or the best token follows."""

    values: torch.Tensor  # [n, V] or [n, candidates], not normalised; minus infinity is impossible
    candidate_ids: torch.Tensor | None = None  # [n, candidates]; `None` means all tokens
    doubt: torch.Tensor | None = None  # whether they may be wrong, []; nothing has waited for it
    settle: Callable[[], "Scores"] | None = None  # returns those that are right then

    def sure(self) -> "Scores":
        """Return scores without a doubt: an accelerator is waited for."""
        return self.settle() if self.doubt is not None and self.doubt else self

    def __getitem__(self, positions: slice | list[int] | torch.Tensor) -> "Scores":
        return Scores(self.values[positions], None if self.candidate_ids is None else self.candidate_ids[positions])

    def distribution(self) -> TokenDistribution:
        return TokenDistribution(self.values.softmax(dim=-1, dtype=torch.float32), self.candidate_ids)

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest score of each row and its token, `[n]` each, of equal ones the first of the vocabulary.
        Where any is NaN, the largest is."""
        if self.candidate_ids is None:
            return best_of(self.values)
        best, last = self.values.amax(dim=-1, keepdim=True), torch.iinfo(self.candidate_ids.dtype).max
        return best[..., 0], self.candidate_ids.masked_fill(self.values < best, last).amin(dim=-1)

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the scores over the whole vocabulary, `[n, V]`, in float32."""
        values = self.values.float()
        return values if self.candidate_ids is None else scatter_to_vocabulary(values, self.candidate_ids, vocab_size)


def largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores `[..., count]` of each row, the best first, and their ids: `topk` for vocabularies.

    On a CPU `topk` looks at every entry of a large vocabulary with its index beside it. The best of each group of
    tokens are found in a fraction of that time; a token can be among the `count` largest only in one of the `count`
    best groups, so that what is left to search is small. Which of several equal scores are named may differ.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size < LARGE_VOCABULARY or size // GROUP_SIZE < 4 * count:
        return scores.topk(count, dim=-1)
    members = _members(_group_maxima(scores).topk(count, dim=-1, sorted=False).indices, size)
    values, index = scores.gather(-1, members).topk(count, dim=-1)
    return values, members.gather(-1, index)


def best_of(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of scores `[..., V]` and its id, of equal ones the first, by groups as in [`largest`]."""
    if scores.device.type != "cpu" or scores.shape[-1] < LARGE_VOCABULARY:
        return scores.max(dim=-1)
    members = _members(_group_maxima(scores).argmax(dim=-1, keepdim=True), scores.shape[-1])
    best, index = scores.gather(-1, members).max(dim=-1, keepdim=True)
    return best[..., 0], members.gather(-1, index)[..., 0]


def _group_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Return the best score of each whole group of tokens, `[..., V // GROUP_SIZE]`."""
    num_groups = scores.shape[-1] // GROUP_SIZE
    return scores[..., : num_groups * GROUP_SIZE].unflatten(-1, (num_groups, GROUP_SIZE)).amax(dim=-1)


def _members(groups: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the tokens of some groups `[..., n]`, and after them those at the end that are too few for a group."""
    members = (groups[..., None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=groups.device)).flatten(-2)
    rest = torch.arange(vocab_size // GROUP_SIZE * GROUP_SIZE, vocab_size, device=groups.device)
    return torch.cat([members, rest.expand(*groups.shape[:-1], -1)], dim=-1)


def scatter_to_vocabulary(scores: torch.Tensor, candidate_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return `[..., V]` scores that are minus infinity outside the candidates."""
    full = scores.new_full((*scores.shape[:-1], vocab_size), -torch.inf)
    return full.scatter(-1, candidate_ids, scores)


def draw(distribution: TokenDistribution, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, `[B]`, with one number in [0, 1) each: what a row draws depends on its own noise. Any
    token may come out where there is no distribution."""
    index = invert(distribution.probs, uniform[:, None])
    return (index if distribution.candidate_ids is None else distribution.candidate_ids.gather(-1, index))[:, 0]


def draw_if_any(distribution: TokenDistribution, uniform: torch.Tensor) -> torch.Tensor:
    """Draw as [`draw`] does; -1 where there is no distribution: a softmax of scores that are NaN or infinite, or of no
    possible token, is all NaN."""
    return draw(distribution, uniform).masked_fill(distribution.probs[..., 0].isnan(), -1)


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative probability exceeds the noise, `[B, 1]`.

    `probs` `[B, n]` need not sum to one. The noise `[B, 1]` must stay so far below 1 that its product with their sum
    rounds below the sum: else a last, impossible token could be drawn.
    """
    # In float32 the sum over 152 thousand entries is off by more than the rarest of them.
    cumulative = probs.cumsum(dim=-1, dtype=uniform.dtype)
    points = uniform * cumulative[:, -1:]
    # NaN sorts after everything. Of several rows, all entries but the last would be a copy.
    if len(probs) == 1 and not torch.compiler.is_compiling():
        return torch.searchsorted(cumulative[:, :-1], points, right=True)
    return torch.searchsorted(cumulative, points, right=True).clamp_max(probs.shape[-1] - 1)


def residual_distribution(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Return max(p_t - p_d, 0), normalised: the distribution of the token that replaces a rejected one, `[..., n]`.

    Both distributions must stand on every token that the target's makes possible. Where they agree to rounding,
    rejection has probability zero and the residual is 0/0: the target's distribution stands in.
    """
    residual = (target_probs - draft_probs).clamp_min(0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, residual / mass, target_probs)
