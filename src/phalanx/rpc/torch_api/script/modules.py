"""Script modules that have remote references as attributes, or make calls.

They are compiled with the types of their references, so the compiler checks them like any others. A method that uses
references, or makes calls, then runs as the Python method it was compiled from, on the same script module, for the
reason that :mod:`.functions` gives. The other methods run as they were compiled.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.jit import _recursive

from phalanx.errors import PhalanxError
from phalanx.rpc.torch_api.script import slots
from phalanx.rpc.torch_api.script.functions import run_as_script
from phalanx.rpc.torch_api.script.graphs import calls_interface, holds_list, holds_reference, reads_list, uses_rpc

__all__ = ["STAND_INS", "instantiate_in_turn"]

_torch: Any = _recursive
_own_create: Any = _torch.create_script_module_impl
_own_wrap: Any = _torch.wrap_cpp_module


class _Plan(NamedTuple):
    """How modules of a type run.

    Attributes:
        kind: the type.
        lists: the attributes that are lists and dictionaries.
        sources: the Python sources of the methods that do not run compiled, by name; None for one without a source.
    """

    kind: Any
    lists: list[str]
    sources: dict[str, Callable[..., Any] | None]


_plans: dict[str, _Plan] = {}  # by the type's qualified name


def _create_script_module_impl(nn_module: Any, concrete_type: Any, stubs_fn: Any) -> Any:
    kind = concrete_type.jit_type
    references = _references(concrete_type)
    if references:
        slots.declare(kind.qualified_name(), references)
    module = _own_create(nn_module, concrete_type, stubs_fn)
    methods = [module._c._get_method(name) for name in module._c._method_names()]
    inner = any(map(slots.in_python, module._modules.values()))
    if references or inner or any(uses_rpc(method.graph) for method in methods):
        attributes = concrete_type.get_attributes().items()
        plan = _plans[kind.qualified_name()] = _Plan(
            kind,
            [name for name, (its_kind, _) in attributes if holds_list(its_kind)],
            {each.name: _source_of(nn_module, each.name) for each in methods if _needs_python(each.inlined_graph)},
        )
        _follow(plan, module)
    return module


def _wrap_cpp_module(cpp_module: Any) -> Any:
    """What torch's does, by which loaded and copied script modules come to Python."""
    kind = cpp_module._type()
    references = _references(torch._C.ConcreteModuleType.from_jit_type(kind))
    if references:
        raise PhalanxError(
            f"a script module that holds remote references ({', '.join(references)}) cannot be loaded from a file. "
            f"Make it anew from its class"
        )
    module = _own_wrap(cpp_module)
    plan = _plans.get(kind.qualified_name())
    if plan is not None and plan.kind == kind:  # those of a file have types of their own
        _follow(plan, module)
    return module


def _references(concrete_type: Any) -> list[str]:
    return [name for name, (kind, _) in concrete_type.get_attributes().items() if holds_reference(kind)]


def _follow(plan: _Plan, module: Any) -> None:
    slots.keep_lists(module._c, plan.lists)
    for name, source in plan.sources.items():
        module.__dict__[name] = _in_python(module, name, source)


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


def instantiate_in_turn(instantiator: Any) -> None:
    """Have threads wait for each other when they make a template of ``RemoteModule``.

    Workers that make remote modules on each other do so at the same time, on the thread of the program and on one that
    serves, and torch gives the second thread a Python module that the first has not finished.
    """
    own, lock = instantiator._do_instantiate_remote_module_template, threading.Lock()

    def instantiate(*args: Any) -> Any:
        with lock:
            return own(*args)

    instantiator._do_instantiate_remote_module_template = instantiate


STAND_INS = [
    (_own_create, _create_script_module_impl),
    (_own_wrap, _wrap_cpp_module),
]
