"""Uniform noise keyed by (request, block, slot), from a counter-based generator.

What a request draws depends on its own key alone: not on its neighbours, nor on when they come and go. Noise shared
between requests, or used twice, would change the distribution of the output.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

BLOCKS_AT_ONCE = 32
# Products with a sum must round below the sum, see `sampling.distributions.invert`; in float32 without float64.
LARGEST, LARGEST_SINGLE = 1 - 2**-50, 1 - 2**-22


@dataclass(frozen=True)
class BlockNoise:
    """Independent uniform numbers in [0, 1) for one block of each request, on the host, in float64 if possible."""

    draft_uniforms: torch.Tensor  # for drawing the drafts, [B, γ]
    accept_uniforms: torch.Tensor  # for accepting them, [B, γ]
    next_uniforms: torch.Tensor  # for the token after the accepted ones, [B]


def block_noise(
    seed: int, request_ids: Sequence[int], blocks: Sequence[int], block_size: int, device: torch.device
) -> BlockNoise:
    """Return the noise of one block of each request, for use on a device; `blocks` says how many each has drawn.

    The seed, in [0, 2**63), is that of the whole call; request ids are distinct.
    """
    rows = []
    for request, block in zip(request_ids, blocks, strict=True):
        stretch, place = divmod(block, BLOCKS_AT_ONCE)
        rows.append(_stretch(seed, request, stretch, block_size)[place])
    uniforms = torch.from_numpy(np.stack(rows))
    if device.type == "mps":
        uniforms = uniforms.clamp_max(LARGEST_SINGLE).float()
    return BlockNoise(uniforms[:, :block_size], uniforms[:, block_size:-1], uniforms[:, -1])


class CallKeys:
    """Numbers below 2^63 to change seeds by, 0 at first and another one each time: a seed may return, and its noise
    must not where something is known of earlier calls, which was drawn by it."""

    def __init__(self, odd: int) -> None:
        self._odd, self._calls = odd, itertools.count()

    def __call__(self) -> int:
        return next(self._calls) * self._odd % 2**63


@functools.lru_cache(maxsize=1024)
def _stretch(seed: int, request: int, stretch: int, block_size: int) -> np.ndarray:
    """Return the numbers of some blocks in a row, `[BLOCKS_AT_ONCE, 2γ+1]`: creating a generator is expensive.

    It counts upwards from the lowest word of its counter; the stretch is in the next one, so no two overlap.
    """
    philox = np.random.Philox(key=[seed, request], counter=[0, stretch, 0, 0])
    numbers = np.random.Generator(philox).random((BLOCKS_AT_ONCE, 2 * block_size + 1))
    return numbers.clip(max=LARGEST)
