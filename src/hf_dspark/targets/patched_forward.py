"""Calls a layer of a target for some rows at a time, within a packed pass: its `forward` is replaced meanwhile."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

ELSEWHERE = (
    "this target is decoding with a DSpark draft in another thread: call it when that is done, or give each thread a "
    "model of its own"
)


class Replacement:
    """Stands in for a module's `forward`: `run` is called with that one, and then its arguments."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        restore(module)  # what an interrupted pass may have left
        self.own, self.run = module.forward, run
        self.earlier = vars(module).get("forward")  # accelerate's, for example
        self.thread = threading.get_ident()
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            raise RuntimeError(ELSEWHERE)
        return self.run(self.own, *args, **kwargs)


def restore(module: nn.Module) -> None:
    """Give a module its own `forward` back, whichever pass replaced it."""
    forward = vars(module).get("forward")
    if not isinstance(forward, Replacement):
        return
    if forward.earlier is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward.earlier


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_of_tokens(leaf: Any, num_tokens: int) -> bool:
    """Tell whether an input has an entry for each token, `[R, T, ...]`."""
    return _is_tensor(leaf) and leaf.dim() > 1 and leaf.shape[1] == num_tokens


def part_of(inputs: Any, num_tokens: int, first: int, count: int) -> Any:
    """Return the inputs of some of the tokens."""
    return tree_map(lambda leaf: leaf[:, first : first + count] if _is_of_tokens(leaf, num_tokens) else leaf, inputs)


def joined(parts: Sequence[Any], count: int) -> Any:
    """Return the inputs of rows as those of one call."""
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *leaves: torch.cat(leaves) if _is_of_tokens(leaves[0], count) else leaves[0], *parts)


def successive(outputs: Sequence[Any]) -> Any:
    """Return outputs of successive tokens as one."""
    return tree_map(lambda *leaves: torch.cat(leaves, dim=1) if _is_tensor(leaves[0]) else leaves[0], *outputs)


def row_of(leaf: Any, row: int) -> Any:
    return leaf[row : row + 1] if _is_tensor(leaf) else leaf


def copied(inputs: Any) -> Any:
    """Copy inputs that are kept: what comes after a layer may write into them."""
    return tree_map(lambda leaf: leaf.clone() if _is_tensor(leaf) else leaf, inputs)
