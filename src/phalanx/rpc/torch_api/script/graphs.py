"""What compiled functions and methods of TorchScript do, by their graphs.

Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.rpc.torch_api.torch_names import jit

__all__ = ["calls_interface", "holds_list", "holds_reference", "reads_list", "takes_module", "uses_rpc"]

_USES_RPC = {
    "prim::rpc_async",
    "prim::rpc_sync",
    "prim::rpc_remote",
    "aten::dist_backward",
    "aten::get_gradients",
}


def uses_rpc(graph: Any) -> bool:
    """Whether a graph makes calls, has remote references, or asks for distributed gradients."""
    return any(holds_reference(value.type()) for value in graph.inputs()) or any(
        node.kind() in _USES_RPC or any(holds_reference(value.type()) for value in node.outputs())
        for node in _nodes(graph, set())
    )


def takes_module(graph: Any) -> bool:
    """Whether an argument is a script module, known by its interface."""
    return any(_contains(value.type(), {"InterfaceType"}) for value in graph.inputs())


def calls_interface(graph: Any) -> bool:
    """Whether a graph calls a module that is known only by its interface; calls of others are inlined."""
    return any(node.kind() == "prim::CallMethod" for node in _nodes(graph, set()))


def reads_list(graph: Any) -> bool:
    """Whether a graph uses an attribute of a module that is a list or a dictionary."""
    return any(
        node.kind() == "prim::GetAttr" and any(holds_list(value.type()) for value in node.outputs())
        for node in _nodes(graph, set())
    )


def holds_reference(kind: Any) -> bool:
    """Whether a value of this type is or contains a remote reference."""
    return _contains(kind, {"RRefType"})


def holds_list(kind: Any) -> bool:
    """Whether a value of this type is or contains a list or a dictionary."""
    return _contains(kind, {"ListType", "DictType"})


def _contains(kind: Any, kinds: set[str]) -> bool:
    if kind.kind() == "ClassType" and jit._state._get_python_class(kind.qualified_name()) is None:
        return False  # a module, whose attributes count only where they are used
    return kind.kind() in kinds or any(_contains(part, kinds) for part in kind.containedTypes())


def _nodes(block: Any, seen: set[str]) -> Iterator[Any]:
    """All nodes, with those of the parts that ``torch.jit.fork`` runs."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner, seen)
        if node.hasAttribute("Subgraph"):
            yield from _nodes(node.g("Subgraph"), seen)
        for value in node.outputs():
            if value.type().kind() == "FunctionType":  # which a part that is forked calls
                called = jit._state._python_cu.find_function(value.type().annotation_str)
                if called is not None and called.qualified_name not in seen:
                    seen.add(called.qualified_name)
                    yield from _nodes(called.inlined_graph, seen)
