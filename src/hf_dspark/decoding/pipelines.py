"""Lets `pipeline(..., assistant_model=draft)` take a draft, or the name of its repository. transformers would look for
its tokenizer, which is the target's. None of that can be registered, so `load_assistant_model` is wrapped."""

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

MODULE = "transformers.pipelines.base"


def install() -> None:
    """Wrap the function now, or when its module is imported, as that takes time. Does nothing the second time."""
    if MODULE in sys.modules:
        _wrap(sys.modules[MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the module, and steps aside."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(module: Any) -> None:
    original: Callable | None = getattr(module, "load_assistant_model", None)
    if original is None or hasattr(original, "__wrapped__"):  # not there: such pipelines are left to transformers
        return

    @functools.wraps(original)
    def load_assistant_model(model: Any, assistant_model: Any, *others: Any) -> tuple[Any, Any]:
        from ..models.auto import is_draft, load_draft, names_a_draft

        if isinstance(assistant_model, (str, os.PathLike)) and names_a_draft(assistant_model):
            assistant_model = load_draft(assistant_model, dtype="auto").eval().to(model.device)
        if is_draft(assistant_model):
            return assistant_model, None
        return original(model, assistant_model, *others)

    module.load_assistant_model = load_assistant_model
