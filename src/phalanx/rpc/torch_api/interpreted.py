"""Script functions that use RPC run as the Python functions that they were compiled from.

TorchScript's C++ makes calls, holds remote references and asks for gradients by torch's own agent, which does not run
here. TorchScript is a part of Python, so the function as it was written does the same through Python's functions, which
Phalanx stands in for. All other script functions run as they were compiled.

Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd import engine
from phalanx.rpc.torch_api.torch_names import jit

__all__ = ["interpret"]

_USES_RPC = {
    "prim::rpc_async",
    "prim::rpc_sync",
    "prim::rpc_remote",
    "aten::dist_backward",
    "aten::get_gradients",
}

_script_function: Any = jit.ScriptFunction
_compiled: Any = _script_function.__call__
_python: dict[str, Callable[..., Any] | None] = {}  # by qualified name; None for those that run as they were compiled


def interpret() -> None:
    """Have every script function that uses RPC run in Python from now on."""
    if jit._builtins._builtin_table:  # else it is made when a function is first compiled
        jit._builtins._register_builtin(engine.get_gradients, "aten::get_gradients")
        jit._builtins._register_builtin(engine.backward, "aten::dist_backward")
    _script_function.__call__ = _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    name = function.qualified_name
    try:
        python = _python[name]
    except KeyError:
        python = _python[name] = _source_of(name) if _uses_rpc(function, set()) else None
    return _compiled(function, *args, **kwargs) if python is None else python(*args, **kwargs)


def _source_of(name: str) -> Callable[..., Any]:
    for python, compiled in jit._state._jit_caching_layer.items():
        if compiled == name:
            return python  # type: ignore[no-any-return]
    raise PhalanxError(
        f"the script function {name} uses RPC inside TorchScript, which runs here only as Python, and this process has "
        f"not compiled it from a Python function but loaded it. Import it from its module, or run this program without "
        f"--replace rpc"
    )


def _uses_rpc(function: Any, seen: set[str]) -> bool:
    seen.add(function.qualified_name)
    for node in _nodes(function.inlined_graph):
        if node.kind() in _USES_RPC or any(_holds_reference(value.type()) for value in node.outputs()):
            return True
        for value in node.outputs():
            if value.type().kind() == "FunctionType":  # which a part that is forked calls
                called = jit._state._python_cu.find_function(value.type().annotation_str)
                if called is not None and called.qualified_name not in seen and _uses_rpc(called, seen):
                    return True
    return any(_holds_reference(value.type()) for value in function.inlined_graph.inputs())


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        if node.hasAttribute("Subgraph"):  # what torch.jit.fork runs
            yield from _nodes(node.g("Subgraph"))


def _holds_reference(kind: Any) -> bool:
    return kind.kind() == "RRefType" or any(_holds_reference(part) for part in kind.containedTypes())
