"""Changing a module of torch that takes seconds to import, when the program imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Have ``change`` called with a module, at once if it has been imported, and else after it is.

    Args:
        name: the module's full name.
        change: gets the module.
    """
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # the others find it
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader, self._change)
        return found


class _Loader(Loader):
    def __init__(self, own: Loader, change: Callable[[Any], None]) -> None:
        self._own, self._change = own, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)  # such as get_source, for tracebacks and TorchScript
