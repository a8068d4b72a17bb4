"""Products with an int8 copy of a matrix: rough ones, in half the time that reading a bfloat16 matrix takes.

Good enough to tell the largest entries of a long result from the others, which then can be computed from the matrix
itself. Knows nothing of heads and candidates, or of who keeps copies.
"""

import torch

ROWS_AT_A_TIME = 4096  # in float32 while they are rounded
LEVELS = 127  # on each side of zero
UNSIGNED_ZERO = 128
MADE_FOR = 8  # rows that oneDNN chooses the layout for; it serves any number


class Int8Copy:
    """A matrix in 8 bits and oneDNN's layout, with a scale for each of its rows.

    Args:
        weight (`torch.Tensor` of shape `[out, in]`): On the CPU.

    Raises:
        RuntimeError: If this PyTorch cannot multiply so, or memory is short.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        parts = weight.detach().split(ROWS_AT_A_TIME)
        self._scales = torch.cat([_scales(part)[:, 0] for part in parts])
        rounded = torch.cat([(part.float() / _scales(part)).round_().to(torch.int8) for part in parts])
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, [MADE_FOR, weight.shape[1]])
        self.rough_product(
            weight.new_zeros(1, weight.shape[1])
        )  # operators without public names: better now than later

    def rough_product(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply with each row's own factor left out, so that results compare within a row only.

        The factor is what brings a row of the input to 8 bits. Rows know nothing of each other.

        Args:
            input (`torch.Tensor` of shape `[..., in]`): On the CPU, in a float type.

        Returns:
            `torch.Tensor` of shape `[..., out]`, in bfloat16: an hundredth off, at times more, where a few entries
            of the input are much larger than all others.
        """
        wide = input.float()
        levels = (wide / _scales(wide) + UNSIGNED_ZERO).round_().to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, UNSIGNED_ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.bfloat16,
            "none", [], "",
        )  # fmt: skip


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """Return what one level of each row is worth, `[..., 1]` in float32; no zero, as rows may be nothing but zeros."""
    return (rows.abs().amax(dim=-1, keepdim=True).float() / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
