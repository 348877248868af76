"""The usual calls of a group in C (``native/csrc_entry``), where this torch and this Python allow it.

A call of a few bytes takes less time than ctypes needs to pass its arguments. So groups over shared memory get methods
that do the usual form of each collective in C: plain tensors, synchronous, no timeout of its own, nothing queued, no
profiler or mode of torch's. They hand every other call to the methods of the class, which make the same calls of the
core; ranks may differ in which they use.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof
from datetime import timedelta
from functools import cache, partial
from inspect import unwrap
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as types
from torch.autograd import profiler
from torch.utils import _python_dispatch

from phalanx.c10d.work import DoneWork
from phalanx.diagnosis.snapshot import KIND_NUMBERS
from phalanx.native.core import quick_entry
from phalanx.transports.operands import DTYPES, OP_NAMES, OP_NUMBERS, REDUCIBLE, reducible
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import text_of_call
from phalanx.transports.shm.mailbox import Mailbox

__all__ = ["prepared_module", "quicken", "quicken_messages"]

# Of the collectives that the module does: the options, and whether these have an operation, and a root.
_OPTIONS = {
    "all_reduce": (types.AllreduceOptions, True, False),
    "reduce": (types.ReduceOptions, True, True),
    "reduce_scatter": (types.ReduceScatterOptions, True, False),
    "broadcast": (types.BroadcastOptions, False, True),
    "all_gather": (types.AllgatherOptions, False, False),
    "barrier": (types.BarrierOptions, False, False),
}
_SIGNED_64 = 8


def quicken(group: Any, communicator: SharedMemoryCommunicator) -> None:
    """Give a process group its quick methods, if there can be any. They find by themselves that the group is closed."""
    vars(group).update(_methods(group, communicator.handle, communicator, communicator.mailbox))


def quicken_messages(group: Any, mailbox: Mailbox) -> None:
    """Give a process group over several hosts the quick methods of messages."""
    methods = _methods(group, mailbox.comm, None, mailbox)
    vars(group).update({name: methods[name] for name in ("send", "recv", "send_now", "recv_now") if methods})


def _methods(
    group: Any, handle: int, communicator: SharedMemoryCommunicator | None, mailbox: Mailbox
) -> dict[str, Callable[..., Any]]:
    """Return the quick methods by name; none if there can be none, or torch's hooks are to see every call."""
    module = prepared_module()
    if module is None or group.hooked:
        return {}
    recorded, progress = group.recorded, group._progress
    entry = module.Entry(
        handle,
        group.rank(),
        group.size(),
        0 if recorded is None else addressof(recorded),
        # In the order of its struct in entry.h.
        weakref.ref(group),
        progress.queue,
        progress.state,
        progress.running.acquire,
        progress.running.release,
        None if communicator is None else communicator._fail,
        mailbox,
        mailbox.inside,
        mailbox.fail,
        communicator,
        recorded,
    )
    # No functions of their own: pybind11 takes a built-in one for the C++ method, and would not ask for it.
    return {name: partial(entry.call, which) for which, name in enumerate(module.NAMES)}


@cache
def prepared_module() -> ModuleType | None:
    """The module in C, set up for this torch; None if there is none, or this torch lacks what it reads."""
    module = quick_entry()
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    flags = ((profiler, "_is_profiler_enabled"), (_python_dispatch, "_is_in_torch_dispatch_mode"))
    says_who_watches = all(isinstance(getattr(place, flag, None), bool) for place, flag in flags)
    if isinstance(module, str) or capsule is None or not says_who_watches:
        return None
    try:
        module.set_exchange(capsule)
    except ValueError:  # another version of the functions of DLPack's exchange
        return None
    numbers = [OP_NUMBERS.get(op, 0) for op in range(max(OP_NAMES) + 1)]
    module.set_up(
        _dtypes(module),
        struct.pack(f"{len(numbers)}I", *numbers),
        torch.Tensor,
        torch.nn.Parameter,
        torch.Tensor.is_neg,
        vars(profiler),
        vars(_python_dispatch),
        # How the group's method learns that its caller waits for the message, and lets nobody else have the handle.
        _code_of(dist.send),
        _code_of(dist.recv),
        DoneWork,
        DoneWork([]),
        torch._C._len_torch_function_stack,
        text_of_call,
    )
    for name, (kind, has_op, has_root) in _OPTIONS.items():
        layout = _layout(module, kind, has_op, has_root)
        if layout is not None:
            module.set_options(KIND_NUMBERS[name], kind, *layout)
    return module


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = unwrap(function).__code__
    return code


def _dtypes(module: Any) -> bytes:
    """The dtypes that are served: each as DLPack's code, with its numbers in the core and a bit for each operation."""
    found = b""
    for dtype, copied in DTYPES.items():
        reduced = copied if dtype in REDUCIBLE else 0
        # DLPack passes on neither that complex numbers are conjugated nor that an integer has less than 8 bits.
        if not (reduced or dtype.is_floating_point) or dtype in (torch.int8, torch.uint8):
            continue
        bits = sum(1 << op for op in OP_NAMES if reduced and reducible(dtype, op))
        with contextlib.suppress(RuntimeError, BufferError):  # DLPack has no such dtype
            code = module.dtype_of(torch.empty(0, dtype=dtype))
            if code[1] % 8 == 0 and code[2] == 1:
                found += struct.pack("BBHIII", *code, reduced, copied, bits)
    return found


def _layout(module: Any, kind: Any, has_op: bool, has_root: bool) -> tuple[int, int, int, int, int, int] | None:
    """Find where the options of a class lie in memory, and the default timeout there; None if that is unclear.

    Each property is set to several values, and exactly its bytes must change, to exactly these values.
    """
    plain_ops = sorted(OP_NAMES)

    def number(value: int) -> bytes:
        return value.to_bytes(_SIGNED_64, "little", signed=True)

    def find(name: str, values: Sequence[Any], written: Callable[[Any], bytes]) -> int | None:
        options = kind()
        images = []
        for value in values:
            setattr(options, name, dist.ReduceOp(value) if name == "reduceOp" else value)
            images.append((module.bytes_of(options), written(value)))
        width, size = len(images[0][1]), len(images[0][0])
        changed = [i for i in range(size) if len({image[i] for image, _ in images}) > 1]
        for at in range(0, size - width + 1, width):
            if all(at <= i < at + width for i in changed) and all(im[at : at + width] == w for im, w in images):
                return at
        return None

    many = [0x0102030405060708, 3, 0x1122334455667788]
    times, ops = (timedelta(milliseconds=ms) for ms in (1, 0x010203040506, 77)), map(dist.ReduceOp.RedOpType, plain_ops)
    asynchronous = find("asyncOp", [True, False, True], lambda value: bytes([value]))
    timeout = find("timeout", [*times], lambda value: number(value // timedelta(milliseconds=1)))
    op = find("reduceOp", [*ops], lambda value: bytes([value.value])) if has_op else -1
    root = find("rootRank", many, number) if has_root else -1
    part = find("rootTensor", many, number) if has_root else -1
    if asynchronous is None or timeout is None or op is None or root is None or part is None:
        return None
    unset = module.bytes_of(kind())[timeout : timeout + _SIGNED_64]
    return asynchronous, timeout, op, root, part, int.from_bytes(unset, "little", signed=True)
