"""RMS norms as one operator: the bits of the six that models of transformers spell out, and half their host time."""

import functools
import inspect
import weakref
from collections.abc import Callable

import torch
from torch import nn

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Way = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # from states, weight and epsilon to the result
Known = tuple[torch.dtype, torch.device, Forward | None]  # of a norm's weight, and what was found for these

_known: "weakref.WeakKeyDictionary[nn.Module, Known]" = weakref.WeakKeyDictionary()


def fused_forward(module: nn.Module) -> Forward | None:
    """Return a forward of one operator whose results were those of an RMS norm's own, bit for bit, where it was tried
    on random states; `None` if there is none, or if this is no such norm."""
    if not _is_rms_norm(type(module)) or type(weight := module._parameters.get("weight")) is not nn.Parameter:
        return None
    known = _known.get(module)
    if known is None or known[:2] != (weight.dtype, weight.device):
        known = _known[module] = weight.dtype, weight.device, _same_forward(module, weight)
    return known[2]


@functools.cache
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Tell whether these are norms of one argument that are not fused yet."""
    is_named = kind.__name__.endswith("RMSNorm") and not issubclass(kind, nn.RMSNorm)
    return is_named and len(inspect.signature(kind.forward).parameters) == 2


@torch.no_grad()
def _same_forward(norm: nn.Module, weight: nn.Parameter) -> Forward | None:
    eps = vars(norm).get("variance_epsilon", vars(norm).get("eps"))
    if weight.dim() != 1 or weight.device.type == "meta" or not isinstance(eps, float):
        return None
    states = torch.randn(8, 4, len(weight), generator=torch.Generator().manual_seed(0), device="cpu")
    states = (states * torch.logspace(-4, 4, 8, device="cpu")[:, None, None]).to(weight)
    for way in _WAYS:
        forward = _forward_by(way, eps)
        try:
            tried = [
                (forward(norm, each), type(norm).forward(norm, each)) for each in (states, states.transpose(0, 1))
            ]
        except (RuntimeError, TypeError, AttributeError):  # of a norm with a weight or settings of another kind
            return None
        if all(ours.dtype == theirs.dtype and torch.equal(ours, theirs) for ours, theirs in tried):
            return forward
    return None


# How norms scale, the commonest first.
_WAYS: tuple[Way, ...] = (
    lambda states, weight, eps: torch.rms_norm(states, weight.shape, weight, eps),
    # As Llama in bfloat16, which rounds before it scales.
    lambda states, weight, eps: weight * torch.rms_norm(states, weight.shape, None, eps),
    # As Gemma, which scales in float32 by one more than its weight.
    lambda states, weight, eps: torch.rms_norm(states.float(), weight.shape, 1.0 + weight.float(), eps).to(states),
)


@functools.cache  # compiled graphs know it again
def _forward_by(way: Way, eps: float) -> Forward:
    def forward(norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
        weight = norm._parameters["weight"]
        if (
            states.dtype != weight.dtype
            # Compilers fuse by themselves, and autocast would treat one operator otherwise than six.
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(states.device.type)
        ):
            return type(norm).forward(norm, states)
        return way(states, weight, eps)

    return forward
