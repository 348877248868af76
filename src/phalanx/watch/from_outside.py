"""Where another process of this host is in its program, although it answers nothing: its interpreter may be held.

A process that can be looked at has a file in memory, by whose name others know it, and lets ``faulthandler`` write
there the stack of whichever thread gets ``PLACE_SIGNAL``. The handler is C and needs no interpreter. Another process of
the same user finds the file through /proc, sends the signal to a thread, and reads.

Only the handler writes to the file, behind what is there. A reader takes what comes after it has asked; of two that ask
at once each may read what the other has asked for, which is as good. A process that dies in between writes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import time

from phalanx.system import processes
from phalanx.watch.stack_text import frames_of

__all__ = ["PLACE_SIGNAL", "Place", "is_there", "place_of"]

# No library is known to use it. The launcher asks its ranks by the next one (launch/rank/trace.py).
PLACE_SIGNAL = signal.SIGRTMAX - 4
_LARGEST = 1 << 20  # how large the file may be before a reader cuts it
_BLOCK = 1 << 16
# How long a thread may take to begin and end its handler. A busy machine delays it, and so does a disk that the thread
# waits for; one that cannot write, being stopped or gone, is not waited for.
_WRITTEN_S = 0.5
_LOOK_S = 0.002
_SILENT = ("", "T", "t", "Z", "X")  # the kernel's letters for a thread that runs no handler: gone, stopped, ended
_MOST_THREADS = 4
_libc = ctypes.CDLL(None)


class Place:
    """Lets other processes look at this one, until :meth:`close`.

    Args:
        name: by which they know it; unique on the host.
    """

    def __init__(self, name: str) -> None:
        self._file = os.memfd_create(name)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # also after a reader has cut it
        self._registered = not processes.catches(os.getpid(), PLACE_SIGNAL)  # else the program uses it
        if self._registered:
            faulthandler.register(PLACE_SIGNAL, file=self._file, all_threads=False)

    def close(self) -> None:
        """End that. A forked child that calls it changes nothing for its parent."""
        if self._registered:
            faulthandler.unregister(PLACE_SIGNAL)
            self._registered = False
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_there(pid: int, name: str) -> bool:
    """Whether the process of this pid is the one of this name."""
    return bool(_file_of(pid, name))


def place_of(pid: int, name: str) -> str:
    """Where a process is, as ``function (file:line)``: a thread of it that runs, or else its main thread.

    Args:
        pid: the process.
        name: of its :class:`Place`.

    Returns:
        The innermost place in its user's program; empty if it cannot be found out, as of a process that is stopped.
    """
    path = _file_of(pid, name)
    if not path or not processes.catches(pid, PLACE_SIGNAL):
        return ""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        for thread in _threads(pid):
            for frame in frames_of(_stack_of(pid, thread, file)):
                if not frame.is_librarys:
                    return f"{frame.function} ({frame.file}:{frame.line})"
    except OSError:  # it has ended
        pass
    finally:
        os.close(file)
    return ""


def _file_of(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{name} "):
                    return path
    return ""


def _threads(pid: int) -> list[int]:
    """The threads to be asked: those that run, and then the main one."""
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    running = [thread for thread in threads if processes.state_of_thread(pid, thread) == "R" and thread != pid]
    if processes.state_of_thread(pid, pid) == "R":
        return [pid, *running[:_MOST_THREADS]]
    return [*running[:_MOST_THREADS], pid]


def _stack_of(pid: int, thread: int, file: int) -> str:
    before = os.fstat(file).st_size
    if before > _LARGEST:
        os.ftruncate(file, 0)
        before = 0
    if hasattr(_libc, "tgkill"):
        _libc.tgkill(pid, thread, int(PLACE_SIGNAL))
    elif thread == pid:
        os.kill(pid, PLACE_SIGNAL)
    until = time.monotonic() + _WRITTEN_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        # The stack is written in many small pieces, by the signal's handler, which blocks the signal until it returns.
        if os.fstat(file).st_size > before and not processes.blocks(thread, PLACE_SIGNAL):
            break
        if processes.state_of_thread(pid, thread) in _SILENT:
            break
    return os.pread(file, _BLOCK, before).decode(errors="replace")
