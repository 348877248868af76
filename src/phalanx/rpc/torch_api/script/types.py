"""The types that TorchScript gives to remote references: the owner of a value says which type it has."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.errors import PhalanxError
from phalanx.rpc.torch_api.torch_names import api, cpp, jit

__all__ = ["STAND_INS", "interface_of"]

_internal: Any = torch._jit_internal
_own_infer: Any = torch._C._jit_try_infer_type


def _jit_try_infer_type(value: Any) -> Any:
    """What torch's does, which takes a remote reference for an object of a class that it can compile."""
    if not _holds_references(value):
        return _own_infer(value)
    try:
        return torch._C.InferredType(_type_of(value))
    except PhalanxError as error:
        return torch._C.InferredType(str(error))


def _holds_references(value: Any) -> bool:
    """Whether a Python value is a remote reference, or a list, tuple or dictionary with some."""
    if isinstance(value, dict):
        return any(map(_holds_references, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_references, value))
    return isinstance(value, cpp.PyRRef)


def _type_of(value: Any) -> Any:
    """The TorchScript type of a value that may hold references, whose owners are asked.

    Raises:
        PhalanxError: it has none.
    """
    if isinstance(value, cpp.PyRRef):
        owner = value.owner()
        text = _on_owner(value) if value.is_owner() else api.rpc_sync(owner, _on_owner, args=(value,))
        return torch._C.RRefType(_parsed(text))
    if _holds_references(value):
        if isinstance(value, tuple):
            return torch._C.TupleType([_type_of(each) for each in value])
        if isinstance(value, list):
            return torch._C.ListType(_common(value))
        return torch._C.DictType(_common(list(value)), _common(list(value.values())))
    inferred = _own_infer(value)
    if not inferred.success():
        raise PhalanxError(inferred.reason())
    return inferred.type()


def interface_of(module: Any, hint: Any) -> str:
    """The qualified name of a script module's interface.

    Args:
        module: the script module.
        hint: a class with the decorator ``torch.jit.interface``.

    Raises:
        PhalanxError: there is no such interface, or the module has not its methods.
    """
    name = _internal._qualified_name(hint)
    interface = jit._state._python_cu.get_interface(name)
    if interface is None or not module._c._type().isSubtypeOf(interface):
        raise PhalanxError(
            f"{module._c._type().qualified_name()} is not a subtype of the type hint: {name}, did you pass a valid "
            f"interface type?"
        )
    return str(name)


def _on_owner(reference: Any) -> str:
    """The type of the value of a reference on its owner, as text; empty if TorchScript has none for it."""
    value = reference.local_value()
    declared: str = reference._reference.script_type  # which is there when the value is
    if declared:
        return declared
    its_class = type(value)
    if _internal.can_compile_class(its_class) and jit._state._get_script_class(its_class) is None:
        return ""  # an object of a class of Python's, which is not compiled for this
    try:
        return str(_type_of(value).annotation_str)
    except PhalanxError:
        return ""


def _parsed(text: str) -> Any:
    if not text:
        raise PhalanxError("the value of the remote reference has no type in TorchScript")
    compiled = jit._state._python_cu
    if text.startswith("__torch__."):
        found = compiled.get_interface(text) or compiled.get_class(text)
        if found is None:
            raise PhalanxError(f"the remote reference is to a value of the type {text}, which is not compiled here")
        return found
    of_that_type: Any = torch._C.CompilationUnit(f"def of(value: {text}):\n    return value\n").find_function("of")
    return of_that_type.schema.arguments[0].type


def _common(values: list[Any]) -> Any:
    first, *others = [_type_of(each) for each in values]
    for other in others:
        if other != first:
            raise PhalanxError(f"it has values of several types: {first.annotation_str} and {other.annotation_str}")
    return first


STAND_INS = [(_own_infer, _jit_try_infer_type)]
