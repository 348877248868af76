"""Putting Phalanx's functions and classes where ``torch.distributed.rpc`` looks for those of its C++.

torch's Python layer stays as it is. What it takes from ``torch._C._distributed_rpc`` it has taken by value in several
modules, when this is called; so every module of torch that holds one of the old objects gets the new one.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from phalanx.errors import InitializationError
from phalanx.rpc.torch_api import (
    autograd_names,
    current,
    futures,
    gathering,
    invoking,
    leaving,
    profiling,
    torch_agent,
)
from phalanx.rpc.torch_api.late_imports import after_import
from phalanx.rpc.torch_api.rref import PyRRef, RRef
from phalanx.rpc.torch_api.torch_names import api, cpp, cpp_autograd, registry

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
    stand_ins: dict[str, Any] = {
        **invoking.STAND_INS,
        **torch_agent.STAND_INS,
        "TensorPipeAgent": torch_agent.TensorPipeAgent,
        "PyRRef": PyRRef,
        "RemoteProfilerManager": profiling.RemoteProfilerManager,
        "_enable_server_process_global_profiler": profiling.global_profiler.enable,
        "_disable_server_process_global_profiler": profiling.global_profiler.disable,
        "_is_current_rpc_agent_set": current.is_set,
        "_get_current_rpc_agent": current.agent,
        "_set_and_start_rpc_agent": current.start,
        "_reset_current_rpc_agent": current.reset,
    }
    pairs = [(getattr(cpp, name), new) for name, new in stand_ins.items()]
    pairs += [(getattr(cpp_autograd, name), new) for name, new in autograd_names.STAND_INS.items()]
    pairs += [(api.RRef, RRef), (torch.futures.wait_all, futures.wait_all)]
    pairs += [(registry._init_process_group, torch_agent.StoreGroup)]
    pairs += [(registry._tensorpipe_exchange_and_check_all_device_maps, _exchange_device_maps)]
    replaced = {id(old): new for old, new in pairs}  # pairs keeps the old objects, and with them their ids, alive
    RRef.__module__, RRef.__qualname__ = api.__name__, "RRef"
    of_torch = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    for module in [cpp, cpp_autograd, *of_torch]:
        held = getattr(module, "__dict__", {})
        for name, value in list(held.items()):
            new = replaced.get(id(value))
            if new is not None:
                setattr(module, name, new)
    profiling.follow_profiles()
    gathering.count_lost()
    leaving.say_who_is_late()
    after_import("torch.distributed.optim.optimizer", _optimize_in_python)


def _exchange_device_maps(
    name: str, count: int, maps: Any, devices: list[Any], group: torch_agent.StoreGroup
) -> tuple[Any, Any]:
    exchanged: tuple[Any, Any] = group.exchange_device_maps(name, count, maps, devices)
    return exchanged


def _optimize_in_python(optimizer: Any) -> None:
    """Have ``DistributedOptimizer`` take torch's optimizers as they are.

    It compiles some of them with TorchScript, and these would ask torch's C++ for the gradients.
    """
    optimizer.functional_optim_map = {}
