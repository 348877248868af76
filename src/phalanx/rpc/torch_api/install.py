"""Putting Phalanx's functions and classes where ``torch.distributed.rpc`` looks for those of its C++.

torch's Python layer stays as it is. What it takes from ``torch._C._distributed_rpc`` it has taken by value in several
modules, when this is called; so every module of torch that holds one of the old objects gets the new one.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from phalanx.errors import InitializationError, PhalanxError
from phalanx.rpc.autograd import engine
from phalanx.rpc.autograd.contexts import Context, contexts
from phalanx.rpc.torch_api import agent, calls, profiling, rref, service  # noqa: F401 - the last serves
from phalanx.rpc.torch_api.torch_names import api, cpp, cpp_autograd, registry, stand_ins

__all__ = ["install"]

_done = False


def install() -> None:
    """Have ``torch.distributed.rpc`` run over Phalanx in this process from now on; once.

    Raises:
        InitializationError: an agent of torch's is running.
    """
    global _done
    if _done:
        return
    if cpp._is_current_rpc_agent_set():
        raise InitializationError(
            "torch's own RPC is running in this process: import phalanx.rpc.torch_api before init_rpc"
        )
    _done = True
    pairs = [(getattr(cpp, name), new) for name, new in stand_ins.items()]
    pairs += [(getattr(cpp_autograd, name), new) for name, new in _AUTOGRAD.items()]
    pairs += [(api.RRef, rref.RRef), (torch.futures.wait_all, calls.wait_all)]
    pairs += [(registry.init_backend, agent.init_backend)]
    pairs += [(api._wait_all_workers, agent.wait_all_workers)]
    replaced = {id(old): new for old, new in pairs}  # pairs keeps the old objects, and with them their ids, alive
    rref.RRef.__module__, rref.RRef.__qualname__ = api.__name__, "RRef"
    of_torch = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    for module in [cpp, cpp_autograd, *of_torch]:
        held = getattr(module, "__dict__", {})
        for name, value in list(held.items()):
            new = replaced.get(id(value))
            if new is not None:
                setattr(module, name, new)
    profiling.follow_profiles()
    if _OPTIMIZER in sys.modules:
        _optimize_in_python(sys.modules[_OPTIMIZER])
    else:
        sys.meta_path.insert(0, _OptimizerFinder())


_OPTIMIZER = "torch.distributed.optim.optimizer"  # takes seconds to import, so that waits until the program does


def _optimize_in_python(optimizer: Any) -> None:
    """Have ``DistributedOptimizer`` take torch's optimizers as they are.

    It compiles some of them with TorchScript, and these would ask torch's C++ for the gradients.
    """
    optimizer.functional_optim_map = {}


class _OptimizerFinder(MetaPathFinder):
    """Change that module right after its first import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _OPTIMIZER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # the others find it
        found = importlib.util.find_spec(name)
        loader: Any = found.loader if found is not None else None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _optimize_in_python(module)

        loader.exec_module = exec_module
        return found


# What torch.distributed.autograd takes from torch's C++.


def _init(worker_id: int) -> None:
    """The agent says which worker this is, when it is made."""


def _current_context() -> Context:
    found = contexts.current()
    if found is None:
        raise PhalanxError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id`"
        )
    return found


def _is_valid_context(number: int) -> bool:
    contexts.get(number)
    return True


def _release_context(number: int) -> None:
    contexts.get(number)
    contexts.release(number)


def _get_debug_info() -> dict[str, str]:
    living = contexts.all()
    passes = sum(len(context.passes) for context in living)
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(len(living))}


_AUTOGRAD: dict[str, Any] = {
    "DistAutogradContext": Context,
    "_current_context": _current_context,
    "_get_debug_info": _get_debug_info,
    "_get_max_id": contexts.max_id,
    "_init": _init,
    "_is_valid_context": _is_valid_context,
    "_new_context": contexts.new,
    "_release_context": _release_context,
    "_retrieve_context": contexts.get,
    "backward": engine.backward,
    "get_gradients": engine.get_gradients,
}
