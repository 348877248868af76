"""Process groups under torch's hooks on collectives: its flight recorder, its check for NaN, and hooks of one's own.

From torch 2.14 on, hooks belong to a process group and are called by torch's dispatcher, in C++. Our groups are called
past the dispatcher, which takes half of the time (docs/design/transports.md, "Not a backend"), so their hooks
would never be called. A hooked group goes the long way: each of its methods calls torch's own method of the same name,
which goes through the dispatcher, calls the hooks, and then calls the group's backend. That backend is written in
Python, too (torch lets one be from 2.14 on), and calls the method that an unhooked group would have called.

A group is hooked if the environment asks for hooks when the group is made: the flight recorder with a size, or the
check for NaN. torch's recorder is on by default, and would be paid by every small call; ours is always on and costs
nothing (``diagnosis/``, ``transports/shm``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from phalanx.c10d.messages import DoneWork
from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.c10d.uncompiled import uncompiled

__all__ = ["CALLS", "HookedProcessGroup", "group_class", "hooks_are_asked_for"]

RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set holds, as in torch
NAN_CHECK = "TORCH_DIST_NAN_CHECK"
CALLS = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "scatter",
    "send",
)


def hooks_are_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether a user has asked for one of torch's hooks, by its own variables."""
    size = next((environment[name] for name in RECORDER_SIZES if environment.get(name)), "0")
    return environment.get(NAN_CHECK) == "1" or (size.isdigit() and int(size) > 0)


def group_class() -> type[PhalanxProcessGroup]:
    """The class of a group that is made now."""
    has_hooks = hasattr(c10d, "FlightRecorderHook")
    return HookedProcessGroup if has_hooks and hooks_are_asked_for(os.environ) else PhalanxProcessGroup


class _Thread(threading.local):
    """What a thread does in a group.

    Attributes:
        serving: it is in the group's backend already, behind the hooks.
        work: what the backend returned to torch.
    """

    serving = False
    work: Any = None


class _Backend(Backend):
    """What torch's dispatcher calls after the hooks: the group's methods as they are without hooks."""

    # torch asks for these without end where a class written in Python leaves them to it.
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_splitting = supports_window = False
    _supports_time_estimate = False

    def __init__(self, group: HookedProcessGroup) -> None:
        super().__init__(group._rank, group._size)
        self.group = group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self.group.getBackendName()


class HookedProcessGroup(PhalanxProcessGroup):
    """A process group whose collectives and messages go through torch's dispatcher, where its hooks are called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own = _Thread()
        self._backend = _Backend(self)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def attach(self) -> None:
        """Nothing to do: torch has this group's own backend, and calls it in Gloo's place."""

    def sum_in_place(self, tensor: torch.Tensor) -> bool:
        """As without hooks, but not for ``Group.all_reduce``, which calls it directly: it goes by the hooks."""
        return self._own.serving and super().sum_in_place(tensor)

    # The three calls below have an older name, under which torch would find our method and call it without the hooks.

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Any:
        opts = c10d.AllToAllOptions() if opts is None else opts
        if self._own.serving:
            return super().all_to_all_single(output, tensor, received, sent, opts)
        call = torch.ops.c10d.alltoall_base_
        return _through(
            self, call, output, tensor, self.boxed(), received, sent, opts.asyncOp, _milliseconds(opts.timeout)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if self._own.serving:
            return super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        call, op = torch.ops.c10d.reduce_scatter_tensor_coalesced_, opts.reduceOp.boxed()
        return _through(self, call, outputs, inputs, self.boxed(), op, opts.asyncOp, _milliseconds(opts.timeout))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = c10d.AllgatherOptions() if opts is None else opts
        if self._own.serving:
            return super().all_gather_single_coalesced(outputs, inputs, opts)
        call = torch.ops.c10d.allgather_into_tensor_coalesced_
        return _through(self, call, outputs, inputs, self.boxed(), opts.asyncOp)

    alltoall_base = all_to_all_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced


def _through(group: HookedProcessGroup, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operation of the dispatcher; the ``Work`` that the group's backend returned at its end.

    torch wraps that ``Work`` into one that can only wait, so the inner one is kept aside, by the thread that calls.
    """
    group._own.work = None
    call(*arguments)
    work, group._own.work = group._own.work, None
    return work


def _of_group(name: str) -> Callable[..., Any]:
    """The method ``name``: torch's own, in C++, which would call this one again, were it not for its name.

    pybind11 passes over the method of a subclass that is just calling its base class, as with ``super()``. It knows
    such a method by the name of its code and its first argument.
    """
    torchs, served = getattr(dist.ProcessGroup, name), getattr(PhalanxProcessGroup, name)

    def call(self: HookedProcessGroup, *arguments: Any, **named: Any) -> Any:
        # torch has no kernel for sparse tensors that would call a backend written in Python.
        if self._own.serving or _is_sparse(arguments):
            return served(self, *arguments, **named)
        self._own.work = None
        torchs(self, *arguments, **named)
        work, self._own.work = self._own.work, None
        return work

    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


def _of_backend(name: str) -> Callable[..., Any]:
    served = getattr(PhalanxProcessGroup, name)

    def call(self: _Backend, *arguments: Any, **named: Any) -> Any:
        own = self.group._own
        own.serving = True
        try:
            own.work = work = served(self.group, *arguments, **named)
        finally:
            own.serving = False
        return DoneWork([]) if work is None else work  # the flight recorder takes a call without one for unfinished

    call.__name__ = name
    return call


def _is_sparse(arguments: Sequence[Any]) -> bool:
    first = arguments[0] if arguments else None
    tensors = first if isinstance(first, list) else [first]
    return any(isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided for tensor in tensors)


def _milliseconds(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)


for _name in CALLS:
    if hasattr(dist.ProcessGroup, _name):  # torch < 2.13 lacks two, and has no hooks
        setattr(HookedProcessGroup, _name, _of_group(_name))
uncompiled(HookedProcessGroup)
for _name in (*CALLS, "all_to_all_single", "reduce_scatter_single_coalesced", "all_gather_single_coalesced"):
    setattr(_Backend, _name, _of_backend(_name))
