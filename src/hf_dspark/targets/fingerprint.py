"""Short hashes of all weights of a model, computed where they are, which tie records and caches to it."""

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel

from .adapters import adapter_facts

_CHUNK_WORDS = 2**18


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of a model's dtype, and of the names, shapes and values of all its weights, in 16 hex digits.

    It is the same on every device, offloaded or not. Packed weights count with their scales, adapters with whether
    they are active, weights on the meta device that no hook can load with names and shapes only. A changed value goes
    unnoticed with a probability below 1e-9, unless it was made to deceive.
    """
    from accelerate.utils import align_module_device  # slow to import

    digest = hashlib.sha256(str(model.dtype).encode())
    factors = _odd_factors(_CHUNK_WORDS)
    for path, module in model.named_modules():
        with align_module_device(module):
            state: dict[str, Any] = {}
            # The module's own part of state_dict(): with the scales that quantised layers keep beside their weights.
            module._save_to_state_dict(state, f"{path}.", keep_vars=False)
            for name, value in state.items():
                digest.update(name.encode())
                _update(digest, value, factors)
            digest.update((adapter_facts(module) or "").encode())
    return digest.hexdigest()[:16]


@torch.no_grad()
def weight_hash(model: PreTrainedModel) -> str:
    """Return a hash of a draft's weights in bfloat16: the same for every type they are loaded in, 16 hex digits.

    An embedding and an LM head do not count, because copies of the target's are dropped when a draft is bound.
    """
    digest, factors, shared = hashlib.sha256(), _odd_factors(_CHUNK_WORDS), model.config.shareable
    for name, value in sorted((name, value) for name, value in model.state_dict().items() if name not in shared):
        digest.update(name.encode())
        _update(digest, value.to(torch.bfloat16) if value.is_floating_point() else value, factors)
    return digest.hexdigest()[:16]


def _update(digest: "hashlib._Hash", value: Any, factors: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
    if value.is_meta:
        return
    if hasattr(value, "__tensor_flatten__"):  # a wrapper around other tensors has no bytes of its own
        for name in value.__tensor_flatten__()[0]:
            _update(digest, getattr(value, name), factors)
        return
    flat = value.detach().as_subclass(torch.Tensor).contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) - len(flat) % 8
    factors = factors.to(flat.device)
    # The high half is folded down first: modulo 2^64, an even number of flipped top bits would cancel.
    sums = [
        ((words ^ (words >> 32)) * factors[: len(words)]).sum()
        for words in flat[:whole].view(torch.int64).split(_CHUNK_WORDS)
        if len(words)
    ]
    digest.update(repr(torch.stack(sums).tolist() if sums else []).encode())
    digest.update(bytes(flat[whole:].tolist()))


def _odd_factors(count: int) -> torch.Tensor:
    """Return irregular odd numbers, the same everywhere: as factors, they make a sum depend on the order of words."""
    factors = torch.arange(1, count + 1) * -7046029254386353131  # 2^64 / golden ratio; products wrap around
    factors = (factors ^ (factors >> 29)) * -4658895280553007687
    return (factors ^ (factors >> 32)) | 1
