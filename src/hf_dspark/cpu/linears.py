"""Route the linear layers of models to the fastest small-batch GEMM of this CPU, and their RMS norms to one operator,
by one context manager."""

import copy
import types
from functools import partial
from typing import Any

import torch
from torch import nn

from .fused_norms import fused_forward
from .small_batch_gemm import MAX_ROWS, WAYS, PackedWeight, may_gain, small_batch_linear

Route = tuple[dict[str, Any], types.MethodType]  # a layer's attributes, and the forward that replaces its own


class fast_linears:
    """While entered, linear layers use the fastest small-batch GEMM that was measured on this kind of CPU.

    Decoding reads all weights for a few tokens at a time, and PyTorch's CPU products are made for many. Products of
    plain `nn.Linear` layers go to oneDNN instead, or swap their operands; results are equal but for rounding. RMS
    norms that models spell out run as one operator where that gives the same bits, on every device: what they cost is
    the calls. Drafted calls enter it by themselves. Enter it to give the same kernels to plain `generate()`, or to
    prepack the weights:

    ```python
    with fast_linears(target, draft, packed=True):
        target.generate(**inputs, max_new_tokens=64)  # the stronger baseline
        target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    ```

    No product changes on kinds of CPU that were not measured (`hf_dspark/cpu/small_batch_gemm.py` lists them). Left
    alone are layers on other devices, quantised layers, other subclasses of `nn.Linear`, layers whose `forward` was
    replaced, and all that computes gradients or is compiled. A nested entry leaves the layers of the outer one.

    Packed weights are the weights as they were on entry. A packed weight is not used when PyTorch knows that the
    weight has changed, but merging adapters by `weight.data += ...` leaves no trace: enter again.

    Args:
        models (`nn.Module`): Such as a target and its draft. A draft borrows the target's LM head: pass both.
        packed (`bool`): Whether to pack the weights into the layout that this CPU multiplies fastest. They take as
            much memory again, are packed on entry and freed on exit.

    Raises:
        RuntimeError: On entry, if there is no memory for the packed weights; nothing has changed then.
    """

    _num_packing = 0  # entries with packed weights that are open, of all models

    def __init__(self, *models: nn.Module, packed: bool = False) -> None:
        ways = WAYS if packed else WAYS[1:]
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._routes: list[Route] = [  # made once: rounds enter often
            (vars(module), types.MethodType(_forward, module))
            for module in modules
            if type(module) is nn.Linear and any(may_gain(way, getattr(module, "weight", None)) for way in ways)
        ]
        forwards = ((module, fused_forward(module)) for module in modules)
        self._norms: list[Route] = [
            (vars(module), types.MethodType(forward, module)) for module, forward in forwards if forward is not None
        ]
        self._packed = packed
        self._entries: list[list[Route]] = []
        self._of_rows: dict[int, fast_linears] = {}

    def of_rows(self, num_rows: int) -> "fast_linears":
        """Return the same for passes over so many rows: layers that gain nothing by them keep their own forward."""
        num_rows = min(num_rows, MAX_ROWS + 1)  # more are alike
        if num_rows not in self._of_rows:
            self._of_rows[num_rows] = some = copy.copy(self)
            some._entries, some._of_rows = [], {}
            some._routes = [
                (attributes, forward)
                for attributes, forward in self._routes
                if any(may_gain(way, forward.__self__.weight, num_rows) for way in WAYS[1:])
            ]
        return self._of_rows[num_rows]

    def __enter__(self) -> None:
        routes = [route for route in self._routes if "forward" not in route[0]]
        if self._packed:
            layers = [forward.__self__ for _, forward in routes]
            weights = {layer.weight for layer in layers if may_gain("packed", layer.weight)}  # each once
            packed = {weight: PackedWeight(weight) for weight in weights}
            routes = [
                (vars(layer), types.MethodType(partial(_forward, packed=packed.get(layer.weight)), layer))
                for layer in layers
            ]
        self._entries.append(routes + [route for route in self._norms if "forward" not in route[0]])
        fast_linears._num_packing += self._packed
        try:
            for attributes, forward in self._entries[-1]:
                attributes["forward"] = forward
        except BaseException:  # an interrupt: then __exit__ is not called
            self.__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        for attributes, forward in self._entries[-1]:
            if attributes.get("forward") is forward:
                del attributes["forward"]
        self._entries.pop()
        fast_linears._num_packing -= self._packed

    def restore(self) -> None:
        """Leave all entries that are still open, after an interrupt."""
        for some in self._of_rows.values():
            some.restore()
        while self._entries:
            self.__exit__()

    @staticmethod
    def packs(model: nn.Module) -> bool:
        """Tell whether some layers of a model multiply by packed weights at present."""
        modules = model.modules() if fast_linears._num_packing else ()  # the walk takes its time
        forwards = (getattr(vars(module).get("forward"), "__func__", None) for module in modules)
        return any(isinstance(each, partial) and each.keywords.get("packed") is not None for each in forwards)


# A function of the module: compiled graphs take its bound methods for the same one in every round.
def _forward(linear: nn.Linear, input: torch.Tensor, packed: PackedWeight | None = None) -> torch.Tensor:
    return small_batch_linear(input, linear.weight, linear.bias, packed)
