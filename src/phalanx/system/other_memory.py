"""Reading and writing the memory of another process, without its help.

``process_vm_readv`` copies between two processes in one step (Linux 3.2): no file, no shared mapping, and nothing that
the owner of the memory has to do. The kernel allows it to whom it would allow to attach a debugger: the same user, if
Yama (``kernel.yama.ptrace_scope``) does not want more. MPI libraries and UCX use it in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

__all__ = ["allow_readers", "read_memory", "why_refused", "write_memory"]

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Piece),
        ctypes.c_ulong,
        ctypes.POINTER(_Piece),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def read_memory(pid: int, remote: int, local: int, nbytes: int) -> None:
    """Copy from another process into this one.

    Args:
        pid: the other process.
        remote: the address there.
        local: the address here.
        nbytes: how much.

    Raises:
        OSError: the process is gone (ESRCH), its memory is not mapped there (EFAULT), or it may not be read (EPERM).
    """
    _copy(_libc.process_vm_readv, pid, remote, local, nbytes)


def write_memory(pid: int, remote: int, local: int, nbytes: int) -> None:
    """Copy from this process into another one; arguments and errors are those of :func:`read_memory`."""
    _copy(_libc.process_vm_writev, pid, remote, local, nbytes)


def allow_readers() -> None:
    """Let other processes of this user read and write this one's memory where Yama would not (``ptrace_scope`` 1).

    Without Yama they may in any case, and nothing is done.
    """
    if _scope() == 1:
        with contextlib.suppress(OSError):
            zero = ctypes.c_ulong(0)
            _libc.prctl(ctypes.c_int(_PR_SET_PTRACER), _PR_SET_PTRACER_ANY, zero, zero, zero)


def why_refused(pid: int) -> str:
    """Why this process may probably not touch the memory of that one, with the remedy."""
    scope = _scope()
    if scope >= 2:
        return f"the system forbids it (kernel.yama.ptrace_scope is {scope}); an administrator can set it to 1"
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"process {pid} has ended, or is in another pid namespace"
    if owner != os.geteuid():
        return f"process {pid} is user {owner}'s, and this one user {os.geteuid()}'s; run both as one user"
    return "the system forbids it; in a container, it may need the capability SYS_PTRACE"


def _scope() -> int:
    try:
        return int(_SCOPE.read_text())
    except (OSError, ValueError):
        return 0


def _copy(call: ctypes._NamedFuncPointer, pid: int, remote: int, local: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        here = _Piece(local + done, nbytes - done)
        there = _Piece(remote + done, nbytes - done)
        moved = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory of process {pid}: {os.strerror(number)}")
        done += moved
