"""Calls through torch's dispatcher, for what wants to see them; and what it knows of each operation.

torch calls a process group that is written in Python directly, past its dispatcher. That lets modes (CommDebugMode,
make_fx, execution traces) and profilers see the call, and asks wrapper subclasses of tensors (AsyncCollectiveTensor,
TwoTensor, FakeTensor) to unwrap themselves or to refuse. So the front of a call (``collectives.py``) hands one that
needs any of that to torch's own method, which also understands every form of the arguments. It dispatches an operation
``c10d::…``, and below all modes and subclasses, at the key BackendSelect, a kernel of this module takes the operation
back to the group that began it, on the same thread. That takes 20 µs. Ranks may go different ways: both end in the same
operation.

- What else comes to a kernel goes on to the backend that torch has chosen. Where that is the Gloo of one of our groups,
  it is made now: C++ has called a method that Python cannot override, or a program an operation of ``torch.ops.c10d``.
- A kernel makes the calls of other backends' groups slower, too, so kernels are registered late: those of the
  operations that C++ may begin (``CPP``) with the first group, the others when a call needs them or a group is boxed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as types
from torch.autograd import profiler

from phalanx.c10d.work import DoneWork
from phalanx.errors import UnsupportedTensor

__all__ = ["OPERATIONS", "UNSET", "DispatchedCall", "begin", "here", "tensors_in", "watch_all", "watch_calls_of_cpp"]

UNSET: timedelta = types.AllreduceOptions().timeout  # the timeout in options that nobody has given one
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_PYTHON = torch._C.DispatchKey.Python


class OperationInfo(NamedTuple):
    """One method of a process group, as torch's dispatcher knows it."""

    title: str  # its name for people, as torch.distributed calls it
    operation: str  # its name in torch's library c10d; empty if it is not there
    arguments: tuple[str, ...]  # the operation's names of the method's arguments before the options
    options: type | None  # their class; None if it takes none
    from_cpp: bool = False  # C++ calls it for a method with an older name, and needs a handle whatever the options say


_LISTS = ("output_tensors", "input_tensors")
_PARTS = ("output_tensor", "input_tensor")
_MANY = ("outputs", "inputs")
_SPLITS = ("output", "input", "output_split_sizes", "input_split_sizes")
_REDUCE, _SCATTER, _GATHER = types.AllreduceOptions, types.ReduceScatterOptions, types.AllgatherOptions
_reduce_scatter_single = OperationInfo("reduce_scatter_single", "_reduce_scatter_base_", _PARTS, _SCATTER)
_all_gather_single = OperationInfo("all_gather_single", "_allgather_base_", _PARTS, _GATHER)

OPERATIONS: dict[str, OperationInfo] = {
    "allreduce": OperationInfo("all_reduce", "allreduce_", ("tensors",), _REDUCE),
    "allreduce_coalesced": OperationInfo(
        "all_reduce_coalesced", "allreduce_coalesced_", ("tensors",), types.AllreduceCoalescedOptions
    ),
    "reduce": OperationInfo("reduce", "reduce_", ("tensors",), types.ReduceOptions),
    "reduce_scatter": OperationInfo("reduce_scatter", "reduce_scatter_", _LISTS, _SCATTER),
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": OperationInfo(
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced_", _MANY, _SCATTER, True
    ),
    "broadcast": OperationInfo("broadcast", "broadcast_", ("tensors",), types.BroadcastOptions),
    "allgather": OperationInfo("all_gather", "allgather_", _LISTS, _GATHER),
    "allgather_coalesced": OperationInfo(
        "all_gather_coalesced", "allgather_coalesced_", ("output_lists", "input_list"), _GATHER
    ),
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": OperationInfo(
        "all_gather_single_coalesced", "allgather_into_tensor_coalesced_", _MANY, _GATHER, True
    ),
    "gather": OperationInfo("gather", "gather_", _LISTS, types.GatherOptions),
    "gather_single": OperationInfo("gather_single", "", ("output", "tensor"), types.GatherOptions),
    "scatter": OperationInfo("scatter", "scatter_", _LISTS, types.ScatterOptions),
    "alltoall": OperationInfo("all_to_all", "alltoall_", _LISTS, types.AllToAllOptions),
    "all_to_all_single": OperationInfo("all_to_all_single", "alltoall_base_", _SPLITS, types.AllToAllOptions, True),
    "barrier": OperationInfo("barrier", "barrier", (), types.BarrierOptions),
    "send": OperationInfo("send", "send", ("tensors", "dst", "tag"), None),
    "recv": OperationInfo("recv", "recv_", ("tensors", "src", "tag"), None),
    "recv_anysource": OperationInfo("recv", "recv_any_source_", ("tensors", "tag"), None),
}

# The operations behind those virtual methods of torch's ProcessGroup that a Python class cannot override.
CPP = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_coalesced_", "alltoall_", "gather_"),
    *("monitored_barrier_", "recv_any_source_", "reduce_", "scatter_"),
)

# -- through torch's dispatcher --------------------------------------------------------------------


class _Here(threading.local):
    """The call of this thread that is on its way through the dispatcher; None if there is none."""

    call: DispatchedCall | None = None


here = _Here()


class DispatchedCall:
    """A call on its way through the dispatcher, from a group's method to the kernel that takes it back."""

    def __init__(self, group: Any, arguments: Sequence[Any]) -> None:
        self.group = group
        self.reduce_op = _reduce_op(arguments)  # the dispatcher carries it as an object that Python cannot read
        self.works: list[Any] = []  # held until torch's method has returned: C++ alone would keep their C++ half
        self._before: DispatchedCall | None = None

    def __enter__(self) -> DispatchedCall:
        watch_all()
        self._before, here.call = here.call, self
        return self

    def __exit__(self, *exception: object) -> None:
        here.call = self._before

    def run(self, start: Callable[[], Any], tensors: Sequence[Any]) -> Any:
        """Do the operation, whose own calls go their own ways; returns its handle, which torch needs in any case."""
        here.call = None
        try:
            work = start()
        finally:
            here.call = self
        work = DoneWork(tensors_in(tensors)) if work is None else work
        self.works.append(work)
        return work


def _reduce_op(arguments: Sequence[Any]) -> Any:
    for argument in arguments:
        if isinstance(argument, dist.ReduceOp):
            return argument
        if isinstance(argument, dist.ReduceOp.RedOpType):
            return dist.ReduceOp(argument)
        found = getattr(argument, "reduceOp", None)
        if found is not None:
            return found
    return dist.ReduceOp(dist.ReduceOp.SUM)


_library = torch.library.Library("c10d", "IMPL")
_watched: set[str] = set()  # the operations that have a kernel; written under the lock
_registering = threading.Lock()
_names: dict[str, str] = {}  # the first method of each operation
for _name, _known in OPERATIONS.items():
    if _known.operation:
        _names.setdefault(_known.operation, _name)


def _register(operations: Iterable[str]) -> None:
    with _registering:
        for operation in operations:
            if operation not in _watched and hasattr(torch.ops.c10d, operation):
                _watched.add(operation)
                _library.impl(operation, _kernel(operation), "BackendSelect", with_keyset=True)


@cache
def watch_calls_of_cpp() -> None:
    """Register the kernels of the operations that C++ may begin for a group of ours without calling its methods."""
    _register(CPP)


@cache
def watch_all() -> None:
    """Register the kernels of all operations."""
    _register(_names)


def _kernel(operation: str) -> Callable[..., Any]:
    overload: Any = getattr(torch.ops.c10d, operation).default
    schema = overload._schema
    names = [argument.name for argument in schema.arguments]
    position = names.index("process_group")
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    name = _names.get(operation)

    def kernel(keyset: Any, *given: Any, **named: Any) -> Any:
        group: Any = dist.ProcessGroup.unbox(given[position] if position < len(given) else named["process_group"])
        if not hasattr(group, "hooked"):  # it is none of ours
            return overload.redispatch(keyset & _BELOW, *given, **named)
        dispatched = here.call
        # A tensor without data, meta or fake, is none of ours: torch knows what comes of it.
        tensors = tensors_in((*given, *named.values()))
        has_data = not any(tensor.is_meta for tensor in tensors)
        # torch has no kernel for sparse tensors that would call a backend written in Python.
        to_hooks = group.hooked and all(tensor.layout is torch.strided for tensor in tensors)
        if name is None or dispatched is None or group is not dispatched.group or not has_data or to_hooks:
            if has_data and all(tensor.is_cpu for tensor in tensors):
                group.attach()
            return overload.redispatch(keyset & _BELOW, *given, **named)
        return take_back(name, dispatched, {**defaults, **dict(zip(names, given, strict=False)), **named})

    def take_back(name: str, dispatched: DispatchedCall, values: dict[str, Any]) -> Any:
        known = OPERATIONS[name]
        given = [values[argument] for argument in known.arguments]
        arguments, filled = _unwrap_nested(known.arguments, given)
        opts = None if known.options is None else _options(known.options, values, dispatched.reduce_op)
        body = getattr(type(dispatched.group), name).__wrapped__
        if filled and opts is not None:
            opts.asyncOp = False

        def start() -> Any:
            work = begin(dispatched.group, name, body, arguments, opts)
            for tensor, stand_in in filled:
                tensor.detach().copy_(stand_in)
            return work

        work = dispatched.run(start, given)
        boxed = work.boxed()
        return (given[0], boxed) if len(schema.returns) == 2 else boxed

    return kernel


def _options(kind: Callable[[], Any], values: dict[str, Any], reduce_op: Any) -> Any:
    opts = kind()
    opts.asyncOp = values["async_op"]
    if "reduce_op" in values:
        opts.reduceOp = reduce_op
    if "root_rank" in values:
        opts.rootRank = values["root_rank"]
    if values.get("timeout", -1) >= 0:
        opts.timeout = timedelta(milliseconds=values["timeout"])
    return opts


def tensors_in(things: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, in lists or not."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, (list, tuple)):
            found.extend(tensors_in(thing))
    return found


# -- wrapper subclasses in lists of lists ----------------------------------------------------------

Filled = list[tuple[torch.Tensor, torch.Tensor]]  # wrappers, and what stands in for each


def _unwrap_nested(names: Sequence[str], arguments: Sequence[Any]) -> tuple[list[Any], Filled]:
    """The arguments with plain tensors in the place of wrappers in lists of lists, where torch does not look for them.

    An argument whose name begins with "output" is to be filled, by copying, as Gloo does, before the call returns. A
    wrapped input is refused, unless it says what it stands for.
    """
    filled: Filled = []

    def plain(tensor: torch.Tensor, is_output: bool) -> torch.Tensor:
        if type(tensor) is torch.Tensor or not torch._C._dispatch_keys(tensor).has(_PYTHON):
            return tensor
        awaited: Callable[[], torch.Tensor] | None = getattr(tensor, "trigger_wait", None)
        if awaited is not None:
            return awaited()  # what the tensor itself does where the dispatcher asks it
        if not is_output:
            raise UnsupportedTensor(
                f"a {type(tensor).__name__} in a list of tensors cannot be unwrapped, because torch's dispatcher does "
                f"not ask it to; give the tensors that it wraps"
            )
        filled.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype)))
        return filled[-1][1]

    def unwrapped(name: str, value: Any) -> Any:
        if not (isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple))):
            return value
        return [[plain(tensor, name.startswith("output")) for tensor in tensors] for tensors in value]

    return list(map(unwrapped, names, arguments)), filled


# -- profiles --------------------------------------------------------------------------------------


def begin(group: Any, name: str, body: Callable[..., Any], arguments: Sequence[Any], opts: Any) -> Any:
    """Do what ``name`` stands for, shown to a profiler that is on."""
    start = partial(body, group, *arguments, *([] if opts is None else [opts]))
    if not profiler._is_profiler_enabled:
        return start()
    title = f"{group.name()}:{OPERATIONS[name].title}"
    return _profiled(title, tensors_in(arguments), start)


def _profiled(name: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
    """``call()``, shown by the profiler as an event with the tensors' shapes and bytes.

    The event of an asynchronous operation ends when this thread has waited for it. A profiler belongs to a thread: what
    another one waits for has no end here, and is shown as if it had ended with what was under way when it began.
    """
    nbytes = sum(t.numel() * t.element_size() for t in tensors if t.layout == torch.strided)
    event = torch._C._profiler._RecordFunctionFast(name, list(tensors), {"nbytes": nbytes})
    caller, ends = threading.get_ident(), [event.__exit__]

    def end() -> None:
        if ends and threading.get_ident() == caller:
            ends.pop()(None, None, None)

    event.__enter__()
    result = None
    try:
        result = call()
    finally:
        operation = getattr(result, "operation", None)
        if operation is None:
            end()
        else:
            operation.waited = end
    return result
