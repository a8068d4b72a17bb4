"""Noise keyed by request, block and slot."""

import itertools

import torch

from hf_dspark.sampling.noise import block_noise

CPU = torch.device("cpu")


def test_noise_of_a_request_does_not_depend_on_its_neighbours():
    together = block_noise(7, [3, 8, 5], [2, 0, 9], 4, CPU)
    for row, (request, block) in enumerate([(3, 2), (8, 0), (5, 9)]):
        alone = block_noise(7, [request], [block], 4, CPU)
        for name in ("draft_uniforms", "accept_uniforms", "next_uniforms"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0])


def test_every_key_has_numbers_of_its_own():
    seen = set()
    for seed, request, block in itertools.product((1, 2), range(4), range(50)):
        noise = block_noise(seed, [request], [block], 7, CPU)
        seen.update(torch.cat([noise.draft_uniforms[0], noise.accept_uniforms[0], noise.next_uniforms]).tolist())
    assert len(seen) == 2 * 4 * 50 * 15


def test_noise_is_uniform_and_below_one():
    noise = block_noise(5, list(range(2000)), [0] * 2000, 7, CPU)
    for part in (noise.draft_uniforms, noise.accept_uniforms, noise.next_uniforms):
        assert part.dtype == torch.float64 and 0.0 <= part.min() and part.max() < 1.0
        # Five standard deviations of a mean of at least 2000 draws.
        assert abs(part.mean() - 0.5) < 0.033
