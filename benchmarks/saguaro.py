"""What drafting while the target verifies is worth: the theory, for `simulator.py ahead` and `ahead.py threads`.

Blocks are prepared for likely outcomes of a verification: how many drafts were accepted, and which token came after
them. Times are in units of one verification. The drafter that prepares blocks takes `draft_time`. After a miss, an
outcome that was not among them, a fallback takes `fallback_time` while nothing is verified. Saguaro.
"""

import math
from collections.abc import Sequence

import numpy as np

from hf_dspark.sampling.distributions import TokenDistribution

Pair = tuple[float, float]


def hit_rate(after_hit: float, after_miss: float) -> float:
    """Return the share of rounds whose block was prepared, from that in rounds after a hit and after a miss."""
    return after_miss / (1 - after_hit + after_miss)


def overlapped(draft_time: float, contention: Pair) -> Pair:
    """Return when a verification ends, and when the drafting does that began with it. While both run, they take
    `contention` times as long as alone: the verification, and the drafting."""
    both = min(contention[0], contention[1] * draft_time)
    return both + 1 - both / contention[0], both + draft_time - both / contention[1]


def speedup(
    hits: float,
    tokens: Pair,
    draft_time: float,
    fallback_time: float,
    batch_size: int = 1,
    contention: Pair = (1.0, 1.0),
    rest_time: float = 0.0,
) -> float:
    """Return the speed over plain decoding if a share `hits` of blocks were prepared; `tokens` are those of a round
    with a prepared block, and of one after a miss. A row that misses lets the batch wait. Each round takes `rest_time`
    beside drafting and verifying. Theorem 7, Corollary 16; with passes that slow each other down, [`overlapped`].
    """
    all_hit, (verified, prepared) = hits**batch_size, overlapped(draft_time, contention)
    return _mean(hits, *tokens) / (rest_time + _mean(all_hit, max(verified, prepared), verified + fallback_time))


def outcome_chances(acceptance: float, block_size: int) -> np.ndarray:
    """Return how probable 0..γ accepted drafts are, `[γ+1]`, if each is accepted with the same probability."""
    return np.append((1 - acceptance) * acceptance ** np.arange(block_size), acceptance**block_size)


def geometric_fan_out(budget: float, acceptance: float, exponent: float, block_size: int) -> np.ndarray:
    """Return for how many tokens after 0..γ accepted drafts blocks are best prepared, `[γ+1]`, if F of them miss with
    probability F^-exponent: real numbers whose sum is the budget. Theorem 12.
    """
    rate = acceptance ** (1 / (1 + exponent))
    shares = rate ** np.arange(block_size + 1)
    shares[-1] *= (1 - acceptance) ** (-1 / (1 + exponent))
    return budget * shares / shares.sum()


def best_fan_out(budget: int, chances: Sequence[float], hits: Sequence[Sequence[float]]) -> tuple[list[int], float]:
    """Return the best whole fan-outs `[γ+1]` with that sum at most, and their hit rate, by a dynamic programme.

    Args:
        budget (`int`): Blocks that can be prepared.
        chances (`Sequence[float]`): How probable 0..γ accepted drafts are, `[γ+1]`.
        hits (`Sequence`): How often the token after them is among the best 0, 1, ... prepared ones, `[γ+1][n]`, as
            measured, of any shape.
    """
    values, choices = np.zeros(budget + 1), []
    for chance, curve in zip(chances, hits, strict=True):
        gains = chance * np.asarray(curve, dtype=float)
        best, chosen = np.full(budget + 1, -math.inf), np.zeros(budget + 1, dtype=int)
        for count, gain in enumerate(gains[: budget + 1]):
            candidates = values[: budget + 1 - count] + gain
            better = candidates > best[count:]
            best[count:][better], chosen[count:][better] = candidates[better], count
        values = best
        choices.append(chosen)
    found, left = [], int(values.argmax())
    rate = float(values[left])
    for chosen in reversed(choices):
        found.append(int(chosen[left]))
        left -= found[-1]
    return found[::-1], rate


def largest_batch(hits_slow: float, hits_fast: float, tokens: Pair, draft_time: float) -> float:
    """Return up to which batch size a miss is best answered by drafting, with `hits_slow`, rather than by something at
    no cost, with `hits_fast`; infinite if always. `tokens` are those of a round of either. Theorem 17.
    """
    gain = tokens[0] / _mean(hits_fast, *tokens) - 1
    if gain >= draft_time:
        return math.inf
    return math.log(1 - gain / draft_time) / math.log(hits_slow)


def with_likely_residual(distribution: TokenDistribution, count: int, factor: float) -> TokenDistribution:
    """Return draft distributions `[..., n]` in which the `count` best tokens have `factor` times their weight. With a
    factor below 1, they are more often what replaces a rejected draft.

    What is drawn from them must be tested against them. Saguaro sampling.
    """
    best = distribution.probs.topk(min(count, distribution.probs.shape[-1]), dim=-1).indices
    probs = distribution.probs.scatter(-1, best, factor * distribution.probs.gather(-1, best))
    return TokenDistribution(probs / probs.sum(dim=-1, keepdim=True), distribution.candidate_ids)


def _mean(share: float, first: float, second: float) -> float:
    return share * first + (1 - share) * second
