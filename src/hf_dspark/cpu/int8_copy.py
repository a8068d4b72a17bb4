"""Products with an int8 copy of a matrix: rough ones, in less time than reading the matrix takes.

Good enough to tell the largest entries of a long result from the others, which then can be computed from the matrix
itself. Knows nothing of heads and candidates, or of who keeps copies.
"""

from functools import cache

import torch

ENTRIES_AT_A_TIME = 2**18  # in float32 while they are rounded: 1 MiB, which stays in a cache
LEVELS = 127  # on each side of zero
UNSIGNED_ZERO = 128
MADE_FOR = 8  # rows that oneDNN chooses the layout for; it serves any number


class Int8Copy:
    """A matrix in 8 bits and oneDNN's layout, with a scale for each of its rows. Made in twice the memory it keeps.

    Args:
        weight (`torch.Tensor` of shape `[out, in]`): On the CPU.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        rounded = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
        self._scales = torch.empty(len(weight), device="cpu")
        self._zeros = torch.zeros(len(weight), dtype=torch.int64, device="cpu")
        size = max(1, ENTRIES_AT_A_TIME // weight.shape[1])
        for part, part_rounded, part_scales in zip(
            weight.split(size), rounded.split(size), self._scales.split(size), strict=True
        ):
            wide = part.float()
            scales = _scales(wide)
            part_scales.copy_(scales[:, 0])
            part_rounded.copy_((wide / scales).round_())
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, [MADE_FOR, weight.shape[1]])

    def rough_product(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply with each row's own factor left out, so that results compare within a row only.

        The factor is what brings a row of the input to 8 bits. Rows know nothing of each other.

        Args:
            input (`torch.Tensor` of shape `[..., in]`): On the CPU, in a float type.

        Returns:
            `torch.Tensor` of shape `[..., out]`, in bfloat16: a hundredth off, at times more, where a few entries of
            the input are much larger than all others.
        """
        wide = input.float()
        levels = (wide / _scales(wide) + UNSIGNED_ZERO).round_().to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, UNSIGNED_ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.bfloat16,
            "none", [], "",
        )  # fmt: skip


@cache
def can_multiply() -> bool:
    """Tell whether this PyTorch has the operators, which have no public names, and takes these arguments."""
    try:
        some = torch.ones(64, 64, device="cpu")
        return Int8Copy(some).rough_product(some[:1]).isfinite().all().item()
    except (AttributeError, RuntimeError, TypeError):
        return False


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """Return what one level of each row is worth, `[..., 1]` in float32; no zero, as rows may be nothing but zeros."""
    return (rows.abs().amax(dim=-1, keepdim=True) / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
