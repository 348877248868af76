"""Attributes of script modules that are kept in Python, beside the C++ object that has the others.

C++ can hold remote references of torch's own agent only. So where a script module has references as attributes, its
compiled form has their types, which lets the compiler check the module's methods, and the references are here. Where
methods of a module run as Python (:mod:`.modules`), a list or dictionary that came from C++ would be a copy of it. So
the lists and dictionaries of such a module are here as well.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from phalanx.errors import PhalanxError

__all__ = ["declare", "in_python", "keep", "keep_lists"]

_cpp_module: Any = torch._C.ScriptModule
_WRITES = ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile", "__copy__", "__deepcopy__")
_own_setattr: Any = _cpp_module.setattr
_own_getattr: Any = _cpp_module.getattr

_declared: dict[str, frozenset[str]] = {}  # a type's qualified name -> its attributes that hold references
_kept: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # by C++ object


def keep() -> None:
    """Have script modules keep their references here from now on."""
    _cpp_module.setattr = _setattr
    _cpp_module.getattr = _getattr
    for name in _WRITES:
        setattr(_cpp_module, name, _settled(getattr(_cpp_module, name)))


def declare(type_name: str, names: Iterable[str]) -> None:
    """Say which attributes of a compiled module type hold references."""
    _declared[type_name] = frozenset(names)


def in_python(module: Any) -> bool:
    """Whether this is a script module of which some methods run as Python."""
    return isinstance(module, torch.jit.ScriptModule) and module._c in _kept


def keep_lists(module: Any, names: Iterable[str]) -> None:
    """Take lists and dictionaries of a C++ module over, some methods of which will run as Python."""
    _declared.setdefault(module._type().qualified_name(), frozenset())
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


def _settled(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes or copies a C++ module, called when C++ has all of its attributes."""

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        for module in _tree(self) if _kept else ():
            references = _declared.get(module._type().qualified_name(), frozenset())
            if references:
                raise PhalanxError(
                    f"RRef jit pickling is only allowed inside RPC calls: a script module that holds remote references "
                    f"({', '.join(sorted(references))}) cannot be saved, copied or sent. Send the references, and "
                    f"make the module anew from them"
                )
            for name, value in _kept.get(module, {}).items():
                _own_setattr(module, name, value)
        return own(self, *args, **kwargs)

    return write


def _tree(module: Any) -> Iterator[Any]:
    yield module
    for _, inner in torch._C.ModuleDict(module).items():  # noqa: PERF102 - it is not a dict
        yield from _tree(inner)
