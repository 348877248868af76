"""Attributes of script modules that are kept in Python, beside the C++ object that has the others.

C++ can hold remote references of torch's own agent only. So where a script module has references as attributes, its
compiled form has their types, which lets the compiler check the module's methods, and the references are here. A module
that has some, or a submodule that has, runs its methods as Python where they use these (:mod:`.modules`), and there a
list or dictionary that came from C++ would be a copy. So the module's lists and dictionaries are here as well.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from phalanx.errors import PhalanxError

__all__ = ["declare", "in_python", "keep", "keep_lists"]

_cpp_module: Any = torch._C.ScriptModule
_own_setattr: Any = _cpp_module.setattr
_own_getattr: Any = _cpp_module.getattr

_declared: dict[str, frozenset[str]] = {}  # a type's qualified name -> its attributes that hold references
_kept: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # by C++ object


def keep() -> None:
    """Have script modules keep their references here from now on."""
    _cpp_module.setattr = _setattr
    _cpp_module.getattr = _getattr
    for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"):
        setattr(_cpp_module, name, _refusing(getattr(_cpp_module, name)))


def declare(type_name: str, names: Iterable[str]) -> None:
    """Say which attributes of a compiled module type hold references."""
    _declared[type_name] = frozenset(names)


def in_python(module: Any) -> bool:
    """Whether this is a script module that has attributes here."""
    return isinstance(module, torch.jit.ScriptModule) and module._c in _kept


def keep_lists(module: Any, names: Iterable[str]) -> None:
    """Take attributes of a C++ module over from there."""
    kept = _by_name(module)
    for name in names:
        kept.setdefault(name, _own_getattr(module, name))


def _by_name(module: Any) -> dict[str, Any]:
    return _kept.setdefault(module, {})


def _setattr(self: Any, name: str, value: Any) -> None:
    if _declared and (name in _kept.get(self, ()) or name in _declared.get(self._type().qualified_name(), ())):
        _by_name(self)[name] = value
    else:
        _own_setattr(self, name, value)


def _getattr(self: Any, name: str) -> Any:
    kept = _kept.get(self) if _declared else None
    return kept[name] if kept and name in kept else _own_getattr(self, name)


def _refusing(own: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in _kept:
            raise PhalanxError(
                f"RRef jit pickling is only allowed inside RPC calls: a script module that holds remote references "
                f"({', '.join(sorted(_kept[self]))}) cannot be saved or sent. Send the references themselves, and make "
                f"the module anew from them"
            )
        return own(self, *args, **kwargs)

    return save
