"""Copies of a user's processors and criteria, and the state that they keep: in an object, in what a function has
captured, in the owner of a method."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .logits_processing import is_built_in
from .reversible import ReversibleProcessor

SHARED = (torch.nn.Module, PreTrainedTokenizerBase, ModuleType, type)
ATOMS = (int, float, complex, str, bytes, type(None))
VARIABLES = (int, float, bool, list, dict, set)  # of a function's module: what may be its state
TABLE = 10_000  # entries of a container that is data, and no state


def copies_of(user_objects: Iterable[Any]) -> Iterator[Any]:
    """Yield processors or criteria for one more sequence, copies of those that transformers did not write: they may
    count their calls. What cannot be copied (a criterion that waits for an event, say) and functions are shared."""
    for each in user_objects:
        is_users = not is_built_in(each) and not isinstance(each, ReversibleProcessor)
        yield _or_itself(copy_of, each) if is_users else each


def copy_of(user_object: Any, with_functions: bool = False) -> Any:
    """Return a deep copy of a processor or criterion, which shares the models, tokenizers and tables that it holds.
    Its functions are shared, too, or write to copies of what they write to."""
    parts = list(_walk(user_object))
    memo = {id(each): each for each in parts if each is not user_object and _is_shared(each)}
    functions = [each for each in parts if isinstance(each, FunctionType)] if with_functions else []
    for each in functions:
        cells = tuple(CellType() for _ in each.__closure__ or ()) or None
        memo[id(each)] = FunctionType(each.__code__, {**each.__globals__}, each.__name__, None, cells)
    for each in functions:
        twin, (captured, *written) = memo[id(each)], _held_by(each)
        for cell, value in zip(twin.__closure__ or (), captured, strict=True):
            cell.cell_contents = _or_itself(copy.deepcopy, value, memo)
        written = _or_itself(copy.deepcopy, written, memo)
        twin.__defaults__, twin.__kwdefaults__, twin.__dict__, variables = written
        twin.__globals__.update(variables)
    return copy.deepcopy(user_object, memo)


def state_of(user_object: Any) -> list[Any]:
    """Return what differs when a processor, or anything that it holds, has changed."""
    return [_content(each) for each in _walk(user_object)]


def _or_itself(copied: Callable[..., Any], value: Any, *others: Any) -> Any:
    with contextlib.suppress(Exception):  # whatever a user's object does when it is copied
        return copied(value, *others)
    return value


def _walk(user_object: Any) -> Iterator[Any]:
    """Yield an object and what it holds, directly or not, up to so much; what is shared is not looked into."""
    seen, waiting = {}, [user_object]
    while waiting and len(seen) < TABLE:
        if id(each := waiting.pop()) in seen:
            continue
        yield each
        if not isinstance(each, ATOMS):
            seen[id(each)] = each  # it stays in memory, so that its id is not another's
            waiting += reversed(_held_by(each)) if each is user_object or not _is_shared(each) else ()


def _held_by(value: Any) -> list[Any]:
    """Return what an object holds; of a function, what it has captured, and what else it can write to."""
    if isinstance(value, FunctionType):
        cells, known, names = value.__closure__ or (), value.__globals__, value.__code__.co_names
        variables = {name: known[name] for name in names if type(known.get(name)) in VARIABLES}
        captured = [cell.cell_contents for cell in cells]
        return [captured, value.__defaults__, value.__kwdefaults__, vars(value), variables]
    with contextlib.suppress(Exception):  # whatever a user's object does when it is copied
        if not isinstance(value, tuple | torch.Tensor):
            _, *parts = value.__reduce_ex__(4)[:5]  # arguments, attributes, elements and entries
            return [*parts[:2], *chain.from_iterable(filter(None, parts[2:]))]
    return list(value) if isinstance(value, tuple) else []


def _is_shared(value: Any) -> bool:
    return isinstance(value, SHARED) or isinstance(value, dict | list | set | frozenset | tuple) and len(value) > TABLE


def _content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(Exception):  # of no bytes that can be read
            return value.dtype, value.shape, hash(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return value if isinstance(value, ATOMS) else type(value)
