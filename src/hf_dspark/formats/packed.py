"""Weights that bitsandbytes has quantised and transformers has saved, read as ordinary ones."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

_STATE = ".quant_state.bitsandbytes__"  # then nf4 or fp4
_PARTS_OF_8_BITS = ("weight", "SCB", "weight_format")
_PARTS_OF_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def packed_weights(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the parts of each packed weight, and by which of these names they are stored."""
    packed = {}
    for name in names:
        if name.endswith(".SCB"):
            module = name.removesuffix("SCB")
            packed[f"{module}weight"] = {part: module + part for part in _PARTS_OF_8_BITS if module + part in names}
        elif _STATE in name:
            weight = name.partition(_STATE)[0]
            parts = {part: f"{weight}.{part}" for part in _PARTS_OF_4_BITS if f"{weight}.{part}" in names}
            packed[weight] = parts | {"weight": weight, "quant_state": name}
    return {weight: parts for weight, parts in packed.items() if weight in names}


def unpacked(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the values of a weight in float32. Parts that do not fit together raise an error of Python or torch."""
    packed = parts["weight"]
    if "SCB" in parts:  # one scale for each row
        if int(parts.get("weight_format", torch.zeros(()))):
            raise ValueError("its rows of 8 bits are in an order that only old GPUs knew")
        return packed.float() * (parts["SCB"].float() / 127)[:, None]
    facts, shape, scales = _facts(parts), shape_of(parts), parts["absmax"]
    size = math.prod(shape)
    if packed.dtype != torch.uint8 or not 0 <= 2 * packed.numel() - size <= 1:
        raise ValueError(f"{packed.numel()} bytes are no weight of the shape {list(shape)} in 4 bits")
    if "nested_absmax" in parts:
        outer = _of_blocks(parts["nested_absmax"], facts["nested_blocksize"], len(scales))
        scales = parts["nested_quant_map"][scales.long()] * outer + facts["nested_offset"]
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=-1).flatten()[:size]
    return (parts["quant_map"][codes.long()] * _of_blocks(scales, facts["blocksize"], size)).view(shape)


def shape_of(parts: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return the shape of a weight of 4 bits."""
    return tuple(map(int, _facts(parts)["shape"]))


def _facts(parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return json.loads(bytes(parts["quant_state"][: 2**12].tolist()))


def _of_blocks(values: torch.Tensor, block_size: int, length: int) -> torch.Tensor:
    return values[torch.arange(length) // block_size]
