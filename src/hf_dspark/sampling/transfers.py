"""Tensors on their way from stage to stage, and between the host and an accelerator. A transfer to the host waits for
all that the device has been asked for, so a round makes few of them."""

import functools
from collections.abc import Sequence

import torch


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return tensors one after the other; a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def first_integers(end: int, device: torch.device) -> torch.Tensor:
    """Return 0, 1, ..., `[end]`, part of a tensor that is kept."""
    return _integers(max(1024, 1 << (end - 1).bit_length()), device)[:end]


@functools.lru_cache(maxsize=64)
def _integers(end: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(end, device=device)


def to_device(
    numbers: torch.Tensor | Sequence, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy numbers of the host to a device. CUDA has read memory that is not pinned when the call returns, so it need
    not be waited for."""
    return torch.as_tensor(numbers, device="cpu", dtype=dtype).to(device, non_blocking=device.type == "cuda")


def to_host(*parts: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copy tensors of one device, of any shapes and types, to the host at once; `None` stays. Whole numbers are less
    than 2**24."""
    given = [part for part in parts if part is not None]
    if not given or given[0].device.type == "cpu":
        return list(parts)
    # Joined with others, whole numbers become float32.
    flat = torch.cat([part.float().flatten() if part.is_floating_point() else part.flatten() for part in given])
    flat = flat.cpu().split([part.numel() for part in given])
    found = (flat_part.view(part.shape).to(part.dtype) for flat_part, part in zip(flat, given, strict=True))
    return [None if part is None else next(found) for part in parts]
