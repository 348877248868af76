"""The C core through ctypes: the only Python file that knows a C signature.

ctypes releases the GIL around every call by itself and costs about 0.3 µs, so one call per collective needs
no extension module and ties no wheel to an interpreter.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from phalanx.errors import BackendError

__all__ = [
    "ABI",
    "BROKEN_FROM",
    "DTYPE_NAMES",
    "KIND_NAMES",
    "Breakage",
    "Call",
    "Poll",
    "Status",
    "library",
]

ABI = 1

Poll = CFUNCTYPE(c_int)


class Status:
    """What a call of the core returns (``enum phx_status``)."""

    OK = 0
    BAD_ARGUMENT = 1
    SYSTEM = 2
    MISMATCH = 3
    PEER_LOST = 4
    TIMEOUT = 5
    INTERRUPTED = 6


BROKEN_FROM = Status.MISMATCH

KIND_NAMES = {1: "all_reduce", 2: "broadcast", 3: "all_gather", 4: "barrier"}
DTYPE_NAMES = {0: "bytes", 1: "float32", 2: "float64", 3: "float16", 4: "bfloat16", 5: "int32", 6: "int64"}


class Call(Structure):
    """One collective call as the ranks compare it (``struct phx_call``)."""

    _fields_ = [
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_uint32),
        ("nbytes", c_uint64),
    ]

    kind: int
    dtype: int
    op: int
    root: int
    nbytes: int

    def __str__(self) -> str:
        """The call as a user wrote it: ``all_reduce(16 bytes of float32, sum)``."""
        name = KIND_NAMES.get(self.kind, f"operation {self.kind}")
        if name == "barrier":
            return "barrier()"
        if name == "broadcast":
            return f"broadcast({self.nbytes} bytes, src={self.root})"
        if name == "all_reduce":
            return f"all_reduce({self.nbytes} bytes of {DTYPE_NAMES.get(self.dtype, '?')}, sum)"
        return f"{name}({self.nbytes} bytes)"


class Breakage(Structure):
    """Why a group broke (``struct phx_breakage``)."""

    _fields_ = [
        ("status", c_uint32),
        ("rank", c_uint32),
        ("peer", c_uint32),
        ("peer_pid", c_uint32),
        ("call", Call),
        ("peer_call", Call),
    ]

    status: int
    rank: int
    peer: int
    peer_pid: int
    call: Call
    peer_call: Call


@cache
def library() -> ctypes.CDLL:
    """Load the core once, check that it is the one these signatures describe, and declare them.

    Raises:
        BackendError: the library is missing (the package was not built: ``pip install .``) or of another ABI
            (a stale build: remove ``src/phalanx/native/libphalanx.so`` and install again).
    """
    path = Path(__file__).with_name("libphalanx.so")
    try:
        core = ctypes.CDLL(str(path), use_errno=True)
    except OSError as error:
        raise BackendError(
            f"the C core of Phalanx could not be loaded ({error}); build it with: pip install ."
        ) from error
    core.phx_abi.restype = c_uint32
    if (found := core.phx_abi()) != ABI:
        raise BackendError(
            f"{path} has ABI {found}, this Phalanx needs {ABI}: remove the file and run pip install . again"
        )
    comm = c_void_p
    for name, result, arguments in (
        ("phx_segment_bytes", c_uint64, [c_uint32, c_uint64]),
        ("phx_segment_format", c_int, [c_int, c_uint32, c_uint64, c_char_p]),
        ("phx_open", comm, [c_int, c_uint32, c_char_p, c_uint32, Poll]),
        ("phx_close", None, [comm]),
        ("phx_abort", None, [comm]),
        ("phx_set_timeout", None, [comm, c_uint64]),
        ("phx_breakage", c_int, [comm, POINTER(Breakage)]),
        ("phx_all_reduce", c_int, [comm, c_void_p, c_void_p, c_uint64, c_uint32, c_uint32]),
        ("phx_broadcast", c_int, [comm, c_void_p, c_uint64, c_uint32]),
        ("phx_all_gather", c_int, [comm, c_void_p, POINTER(c_void_p), c_uint64]),
        ("phx_barrier", c_int, [comm]),
    ):
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    return core
