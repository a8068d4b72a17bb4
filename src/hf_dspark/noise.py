"""Uniform noise keyed by (request, block, slot), from a counter-based generator.

What a request draws depends on its own key alone: not on its neighbours, nor on when they come and go. Noise shared
between requests, or used twice, would change the law of the output. Knows nothing of what the numbers are for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class BlockNoise:
    """Independent uniform numbers in [0, 1) for one block of each request.

    Attributes:
        draft (`torch.DoubleTensor` of shape `[B, γ]`): For drawing the drafts.
        coins (`torch.DoubleTensor` of shape `[B, γ]`): For accepting them.
        following (`torch.DoubleTensor` of shape `[B]`): For the token after the accepted ones.
    """

    draft: torch.Tensor
    coins: torch.Tensor
    following: torch.Tensor


def block_noise(
    seed: int, request_ids: Sequence[int], blocks: Sequence[int], block_size: int, device: torch.device
) -> BlockNoise:
    """Return the noise of one block of each request.

    Args:
        seed (`int`): Of the whole call, in [0, 2**63).
        request_ids (`Sequence[int]`): Who draws; distinct.
        blocks (`Sequence[int]`): Which block of each request: how many were drawn before.
        block_size (`int`): γ.
        device (`torch.device`): Where the numbers go.
    """
    dtype, largest = (torch.float32, 1 - 2**-22) if device.type == "mps" else (torch.float64, 1 - 2**-50)
    numbers = np.empty((len(request_ids), 2 * block_size + 1))
    for row, (request, block) in enumerate(zip(request_ids, blocks, strict=True)):
        # The generator counts upwards from the lowest word; the block has the next one, so no two blocks overlap.
        philox = np.random.Philox(key=[seed, request], counter=[0, block, 0, 0])
        numbers[row] = np.random.Generator(philox).random(2 * block_size + 1)
    # Products with a sum must round below the sum: see `sampling.invert`.
    on_device = torch.from_numpy(numbers.clip(max=largest)).to(device, dtype)
    return BlockNoise(on_device[:, :block_size], on_device[:, block_size:-1], on_device[:, -1])
