"""Script functions that use RPC run as the Python functions that they were compiled from.

TorchScript's C++ makes calls, holds remote references and asks for gradients by torch's own agent, which does not run
here. TorchScript is a part of Python, so the function as it was written does the same through Python's functions, which
Phalanx stands in for. All other script functions run as they were compiled.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd import engine
from phalanx.rpc.torch_api.script import slots
from phalanx.rpc.torch_api.script.graphs import takes_module, uses_rpc
from phalanx.rpc.torch_api.torch_names import api, internal, jit

__all__ = ["in_script", "interpret", "run_as_script"]

_script_function: Any = jit.ScriptFunction
_compiled: Any = _script_function.__call__
_runs: dict[str, Callable[..., Any] | None] = {}  # by qualified name; None for those that run as they were compiled
_thread = threading.local()


def interpret() -> None:
    """Have every script function that uses RPC run in Python from now on."""
    if jit._builtins._builtin_table:  # else it is made when a function is first compiled
        jit._builtins._register_builtin(engine.get_gradients, "aten::get_gradients")
        jit._builtins._register_builtin(engine.backward, "aten::dist_backward")
    _script_function.__call__ = _call
    api._build_rpc_profiling_key = partial(_profiling_key, api._build_rpc_profiling_key)


def run_as_script(python: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the Python source of a script function or method."""
    outer, _thread.in_script = in_script(), True
    try:
        return python(*args, **kwargs)
    finally:
        _thread.in_script = outer


def in_script() -> bool:
    """Whether this thread runs the source of a script function."""
    return getattr(_thread, "in_script", False)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    name = function.qualified_name
    try:
        run = _runs[name]
    except KeyError:
        run = _runs[name] = _way(function, name)
    return _compiled(function, *args, **kwargs) if run is None else run(*args, **kwargs)


def _way(function: Any, name: str) -> Callable[..., Any] | None:
    graph = function.inlined_graph
    if uses_rpc(graph):
        return partial(run_as_script, _source_of(name))
    return partial(_by_arguments, function, name) if takes_module(graph) else None


def _by_arguments(function: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if any(slots.in_python(value) for value in (*args, *kwargs.values())):
        return run_as_script(_source_of(name), *args, **kwargs)
    return _compiled(function, *args, **kwargs)


def _source_of(name: str) -> Callable[..., Any]:
    cache = jit._state._jit_caching_layer
    for reference in cache.keyrefs():  # a list: another thread may compile a function meanwhile
        python = reference()
        if python is not None and cache.get(python) == name:
            return python  # type: ignore[no-any-return]
    raise PhalanxError(
        f"the script function {name} uses RPC inside TorchScript, which runs here only as Python, and this process has "
        f"not compiled it from a Python function but loaded it. Import it from its module, or run this program without "
        f"--replace rpc"
    )


def _profiling_key(own: Callable[..., str], exec_type: Any, *args: Any) -> str:
    """The name of a call in a profile, where the calls of script functions are set apart as in torch."""
    modes = internal.RPCExecMode
    if in_script() and exec_type in (modes.SYNC, modes.ASYNC):
        exec_type = modes.ASYNC_JIT
    return own(exec_type, *args)
