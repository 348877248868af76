"""Script modules that have remote references as attributes.

They are compiled with the types of their references, so the compiler checks them like any others. A method that uses
references, or makes calls, then runs as the Python method it was compiled from, on the same script module, for the
reason that :mod:`.functions` gives. The other methods run as they were compiled.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _recursive

from phalanx.errors import PhalanxError
from phalanx.rpc.torch_api.script import slots
from phalanx.rpc.torch_api.script.functions import run_as_script
from phalanx.rpc.torch_api.script.graphs import calls_interface, holds_list, holds_reference, reads_list, uses_rpc

__all__ = ["STAND_INS"]

_torch: Any = _recursive
_own_create: Any = _torch.create_script_module_impl
_own_wrap: Any = _torch.wrap_cpp_module


def _create_script_module_impl(nn_module: Any, concrete_type: Any, stubs_fn: Any) -> Any:
    attributes = {name: kind for name, (kind, _) in concrete_type.get_attributes().items()}
    references = [name for name, kind in attributes.items() if holds_reference(kind)]
    if references:
        slots.declare(concrete_type.jit_type.qualified_name(), references)
    module = _own_create(nn_module, concrete_type, stubs_fn)
    if references or any(map(slots.in_python, module._modules.values())):
        slots.keep_lists(module._c, (name for name, kind in attributes.items() if holds_list(kind)))
        for name in module._c._method_names():
            if _needs_python(module._c._get_method(name).inlined_graph):
                module.__dict__[name] = _in_python(module, name, _source_of(nn_module, name))
    return module


def _wrap_cpp_module(cpp_module: Any) -> Any:
    """What torch's does, by which loaded and copied script modules come to Python."""
    concrete_type: Any = torch._C.ConcreteModuleType.from_jit_type(cpp_module._type())
    references = [name for name, (kind, _) in concrete_type.get_attributes().items() if holds_reference(kind)]
    if references:
        raise PhalanxError(
            f"a script module that holds remote references ({', '.join(references)}) cannot be copied, or loaded from "
            f"a file. Make it anew from its class"
        )
    return _own_wrap(cpp_module)


def _needs_python(graph: Any) -> bool:
    return uses_rpc(graph) or calls_interface(graph) or reads_list(graph)


def _source_of(nn_module: Any, name: str) -> Callable[..., Any] | None:
    stub = getattr(type(nn_module), "_methods", {}).get(name)  # of a class that is derived from ScriptModule
    if stub is not None:
        return stub.original_method  # type: ignore[no-any-return]
    return getattr(getattr(nn_module, name, None), "__func__", None)


def _in_python(module: Any, name: str, source: Callable[..., Any] | None) -> Callable[..., Any]:
    if source is None:

        def refuse(*_: Any, **__: Any) -> Any:
            raise PhalanxError(
                f"the method {name} of the script module {module.original_name} uses RPC inside TorchScript, which "
                f"runs here only as Python, and it has no Python source. Write it as a method of the class"
            )

        return refuse

    @functools.wraps(source)
    def method(*args: Any, **kwargs: Any) -> Any:
        return run_as_script(source, module, *args, **kwargs)

    return method


STAND_INS = [
    (_own_create, _create_script_module_impl),
    (_own_wrap, _wrap_cpp_module),
]
