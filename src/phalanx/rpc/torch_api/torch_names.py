"""torch's private names that this room uses or replaces; its modules have no types, so they are ``Any`` here.

Checked on torch 2.13.0.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.autograd
import torch.autograd.profiler_legacy
import torch.autograd.profiler_util
from torch._C import _distributed_autograd, _distributed_rpc
from torch.distributed.rpc import api as _api
from torch.distributed.rpc import backend_registry as _backend_registry
from torch.distributed.rpc import internal as _internal
from torch.distributed.rpc import rref_proxy as _rref_proxy

__all__ = [
    "api",
    "autograd",
    "cpp",
    "cpp_autograd",
    "internal",
    "profiler_legacy",
    "profiler_util",
    "registry",
    "rref_proxy",
    "stand_in",
    "stand_ins",
]

T = TypeVar("T")

api: Any = _api
autograd: Any = torch.autograd
cpp: Any = _distributed_rpc
cpp_autograd: Any = _distributed_autograd
internal: Any = _internal
profiler_legacy: Any = torch.autograd.profiler_legacy
profiler_util: Any = torch.autograd.profiler_util
registry: Any = _backend_registry
rref_proxy: Any = _rref_proxy

# By its name what stands in for something of ``torch._C._distributed_rpc``.
stand_ins: dict[str, Any] = {}


def stand_in(thing: T, name: str = "") -> T:
    """Let a function or class stand in for that of torch's C++ with this name; its own by default."""
    stand_ins[name or getattr(thing, "__name__", "")] = thing
    return thing
