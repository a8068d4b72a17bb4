"""Accelerators that are pretended: tensors that say `cuda:0` or `cuda:1`, and compute on the CPU.

What mixes devices fails as on real ones. It works on the level of torch's Python functions: within `Pretended()`, each
one is asked, runs on the host, and its results are of the device that a real one would have chosen. What a real device
would be asked for meanwhile is counted: see [`Counts`].
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU, DEVICE, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
# Indices may come from the host, and copies may cross; all else takes numbers alone from there.
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
CROSSING = {"to", "copy_", "cpu", "cuda", "type_as"}
FROM_DATA = {"tensor", "as_tensor", "new_tensor"}
PROPERTIES = {"device": None, "is_cuda": True, "is_cpu": False}
# Operations whose results have sizes, or are numbers, that the host must know before it goes on.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "bincount"}
ALLOCATING = {"empty", "empty_strided", "empty_like", "new_empty", "_local_scalar_dense", "set_", "lift_fresh"}
FUSED = {"rms_norm"}  # one kernel there, several operations on the CPU


@dataclass
class Counts:
    """What a device was asked for. Launches are operations that are not views, as PyTorch's CPU backend has them."""

    launches: int = 0
    views: int = 0
    copies: int = 0  # from the host to a device
    waits: Counter[str] = field(default_factory=Counter)  # for all work so far, by the method that waits

    def __sub__(self, other: "Counts") -> "Counts":
        waits = Counter({name: count - other.waits[name] for name, count in self.waits.items()})
        numbers = (self.launches - other.launches, self.views - other.views, self.copies - other.copies)
        return Counts(*numbers, waits)

    def numbers(self) -> dict[str, int]:
        return {"operations": self.launches, "views": self.views, "copies": self.copies, "waits": self.waits.total()}

    def noting(self, asked: Counter[str], run: Callable) -> Callable:
        """Return a function that adds to a counter what is asked for while it runs."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            before, result = self.copy(), run(*args, **kwargs)
            asked.update((self - before).numbers())
            return result

        return noted

    def copy(self) -> "Counts":
        return Counts(self.launches, self.views, self.copies, self.waits.copy())


class DeviceTensor(torch.Tensor):
    """A tensor of a pretended device, its `place`; `host` holds its numbers."""

    host: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, host: torch.Tensor, place: torch.device = DEVICE) -> "DeviceTensor":
        new = torch.Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=place)
        new.host, new.place = host, place
        return new

    def as_subclass(self, kind: type[torch.Tensor]) -> "DeviceTensor":
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {}, None)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise NotImplementedError(f"{func} went past torch's Python functions")


class Pretended(TorchFunctionMode):
    """While entered, functions that make tensors know the devices, and tensors can be moved to them and back."""

    def __init__(self, counts: Counts | None = None) -> None:
        super().__init__()
        self._counts = counts

    def __enter__(self) -> "Pretended":
        # Functions with gradients of their own are asked by no mode.
        self._apply = own = vars(torch.autograd.Function)["apply"]
        torch.autograd.Function.apply = classmethod(lambda cls, *args: _run(own.__get__(None, cls), args, {}, None))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.autograd.Function.apply = self._apply
        super().__exit__(*exception)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {}, self._counts)


def moved(model: nn.Module, places: Mapping[str, torch.device] | None = None) -> nn.Module:
    """Move a model to the pretended device, in place; `places` gives modules, by path, others. What is tied stays."""
    known: dict[int, DeviceTensor] = {}
    for path, module in model.named_modules():
        found = [place for prefix, place in (places or {}).items() if f"{path}.".startswith(f"{prefix}.")]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in known:
                    known[id(tensor)] = new = DeviceTensor(tensor.detach(), found[0] if found else DEVICE)
                    new.host.requires_grad_(tensor.requires_grad)
                    new._is_param = tensors is module._parameters  # what isinstance(new, nn.Parameter) asks
                if tensor is not None:
                    tensors[name] = known[id(tensor)]
    return model


def _run(func: Callable, args: tuple, kwargs: dict[str, Any], counts: Counts | None) -> Any:
    name = getattr(func, "__name__", str(func))
    if func is torch.device or name == "_parse_to":
        return func(*args, **kwargs)
    if name == "to" and type(args[1] if len(args) > 1 else None) is int:
        args = (args[0], torch.device("cuda", args[1]), *args[2:])
    if type(kwargs.get("device")) is int:
        kwargs = kwargs | {"device": torch.device("cuda", kwargs["device"])}
    leaves = list(_leaves((args, kwargs)))
    ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if ours and name == "__get__":
        attribute = getattr(func.__self__, "__name__", "")
        if attribute in PROPERTIES:
            return ours[0].place if attribute == "device" else PROPERTIES[attribute]
    if ours and name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
    if name == "_has_compatible_shallow_copy_type" and len({_place_of(each) for each in leaves}) > 1:
        return False  # modules get new parameters when they are moved
    if name not in CROSSING and ours:
        _require_one_device(name, leaves)
    asked = _place_asked(name, leaves)
    place = asked or (ours[0].place if ours else CPU)
    host_args, host_kwargs = _mapped(_on_host, (args, kwargs))
    with torch._C.DisableTorchFunction():
        if counts is None or not (ours or place != CPU):
            result = func(*host_args, **host_kwargs)
        else:
            result = _counted(func, host_args, host_kwargs, counts, name, args, kwargs, place, ours)
    # A real one copies; what is changed in place, or returned as it is, stays the same object.
    crosses = asked is not None and any(_place_of(leaf) != asked for leaf in leaves if isinstance(leaf, torch.Tensor))
    if crosses and name != "copy_":
        result = _mapped(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
    if place == CPU:
        return result
    known = {id(each.host): each for each in ours if each.place == place}

    def on_device(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else DeviceTensor(leaf, place)

    return _mapped(on_device, result)


def _place_asked(name: str, leaves: list[Any]) -> torch.device | None:
    """Return the device that a call names, if it does."""
    if name == "copy_":
        return _place_of(leaves[0])
    if name in ("cpu", "cuda"):
        return CPU if name == "cpu" else DEVICE
    for leaf in leaves:
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")):
            place = torch.device(leaf)
            return DEVICE if place.type == "cuda" and place.index is None else place
    # `to(other)` goes to the device of a tensor.
    like = [leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)] if name in ("to", "type_as") else []
    return _place_of(like[0]) if like else None


def _counted(
    func: Callable, host_args: tuple, host_kwargs: dict[str, Any], counts: Counts, name: str, args: tuple,
    kwargs: dict[str, Any], place: torch.device, ours: list[DeviceTensor],
) -> Any:  # fmt: skip
    """Run a function that a device is asked for, and count what that takes there."""
    asynchronous = bool(kwargs.get("non_blocking"))
    to_device = (
        place != CPU and name in CROSSING and any(_is_on_host(each) for each in args[: 2 if name == "copy_" else 1])
    )
    to_device |= place != CPU and name in FROM_DATA and not ours
    if to_device:
        counts.copies += 1
        counts.waits[f"{name} (to the device)"] += not asynchronous
    if name in INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        crossing = sum(isinstance(each, list) or (_is_on_host(each) and each.dim() > 0) for each in index)
        crossing += name == "__setitem__" and _is_on_host(args[2]) and args[2].dim() > 0
        counts.copies += crossing
        counts.waits[f"{name} (from the host)"] += crossing
    if ours and (name == "tolist" or (place == CPU and name in CROSSING)):
        counts.waits[name] += not asynchronous
        return func(*host_args, **host_kwargs)
    if to_device or name in FUSED:
        counts.launches += name in FUSED
        return func(*host_args, **host_kwargs)
    with _Operations(counts, name):
        return func(*host_args, **host_kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts, name: str) -> None:
        super().__init__()
        self._counts, self._name = counts, name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operation, returns = func._schema.name.partition("::")[2], func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        is_view |= operation == "_unsafe_view"
        self._counts.views += is_view
        self._counts.launches += not is_view and operation not in ALLOCATING
        if operation in ("index", "index_put", "index_put_"):
            masks = sum(each is not None and each.dtype == torch.bool for each in args[1])
            is_fill = operation != "index" and args[2].numel() == 1
            self._counts.waits[f"{self._name} (mask)"] += 0 if is_fill else masks
        elif operation in WAITING or (operation == "repeat_interleave" and not (kwargs or {}).get("output_size")):
            self._counts.waits[self._name] += 1
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        parts = [_mapped(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return type(value)((name, _mapped(function, each)) for name, each in value.items())
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return function(value)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.host
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return CPU
    return "cpu" if isinstance(leaf, str) and leaf.partition(":")[0] == "cuda" else leaf


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)


def _place_of(tensor: torch.Tensor) -> torch.device:
    return tensor.place if isinstance(tensor, DeviceTensor) else CPU


def _require_one_device(name: str, leaves: list[Any]) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({name})")
    places = {_place_of(each) for each in tensors if _on_host(each).dim() > 0}
    places |= {_place_of(each) for each in tensors if isinstance(each, DeviceTensor)}
    if name in INDEXING:
        own, value = _place_of(tensors[0]), leaves[-1]
        by_number = not any(isinstance(leaf, torch.Tensor) for leaf in leaves[1:-1])
        may_cross = by_number or not _is_on_host(value) or value.dim() == 0  # as slices do, which are copied to
        if not places - {own, CPU} and (may_cross or name == "__getitem__"):
            return
        raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({own})")
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({name})")
