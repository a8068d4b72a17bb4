"""An accelerator that is pretended: tensors that say `cuda:0`, and compute on the CPU.

What mixes devices fails as on a real one. It works on the level of torch's Python functions: within `Pretended()`,
each one is asked, runs on the host, and its results are of the device that a real one would have chosen.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DEVICE = torch.device("cuda:0")
# Indices may come from the host, and copies may cross; all else takes numbers alone from there.
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
CROSSING = {"to", "copy_", "cpu", "cuda", "type_as"}


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device; `host` holds its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        new = torch.Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=DEVICE)
        new.host = host
        return new

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise NotImplementedError(f"{func} went past torch's Python functions")


class Pretended(TorchFunctionMode):
    """While entered, functions that make tensors know the device, and tensors can be moved to it and back."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


def moved(model: nn.Module) -> nn.Module:
    """Move a model to the pretended device, in place. Tensors that are tied stay so."""
    known: dict[int, DeviceTensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = known.setdefault(id(tensor), DeviceTensor(tensor.detach()))
    return model


def _run(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if func is torch.device:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    leaves, structure = tree_flatten((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if ours and attribute in ("device", "is_cuda", "is_cpu"):
        return {"device": DEVICE, "is_cuda": True, "is_cpu": False}[attribute]
    if ours and name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
    if name not in CROSSING:
        _require_one_device(name, leaves)
    # `to(other)` goes to the device of a tensor; of all others it is the first argument alone that tells.
    asked = [device for leaf in leaves if (device := _device_named(leaf)) is not None]
    if name in ("to", "type_as"):
        asked += ["cuda" if isinstance(leaf, DeviceTensor) else "cpu" for leaf in _tensors(leaves[1:])]
    asked += {"cpu": ["cpu"], "cuda": ["cuda"]}.get(name, [])
    on_device = asked[0] == "cuda" if asked else bool(ours)
    on_host = [torch.device("cpu") if _device_named(leaf) == "cuda" else _host(leaf) for leaf in leaves]
    host_args, host_kwargs = tree_unflatten(on_host, structure)
    with torch._C.DisableTorchFunction():
        result = func(*host_args, **host_kwargs)
    if asked and on_device != bool(ours):  # a real one copies
        result = tree_map_only(torch.Tensor, torch.clone, result)
    known = {id(each.host): each for each in ours}
    return tree_map_only(
        torch.Tensor, lambda each: known.get(id(each), DeviceTensor(each)) if on_device else each, result
    )


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, DeviceTensor) else leaf


def _tensors(leaves: list[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _device_named(leaf: Any) -> str | None:
    """Return the type of device that an argument names, if it does."""
    if isinstance(leaf, torch.device):
        return leaf.type
    return leaf.partition(":")[0] if isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda") else None


def _require_one_device(name: str, leaves: list[Any]) -> None:
    tensors = list(_tensors(leaves))
    ours = [isinstance(each, DeviceTensor) for each in tensors]
    if not any(ours):
        return
    if name in INDEXING:
        if ours[0]:
            return
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({name})")
    if any(each.dim() > 0 for each, is_ours in zip(tensors, ours, strict=True) if not is_ours):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({name})")
