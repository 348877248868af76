"""Where another process of this host is in its program, although it answers nothing: its interpreter may be held.

A process that can be looked at has a file in memory, and lets whichever thread gets ``PLACE_SIGNAL`` write its stack
there (``stack_signal.py``). The handler is C and needs no interpreter. Another process of the same user finds the file
through /proc, sends the signal to a thread, and reads. There is one such file in a process, for all who want to be
seen in it: its groups, and its RPC, which has a mark besides, by whose name others know that this pid is its process.

Only the handler writes to the file, behind what is there. Readers ask one after the other (they hold a lock of the
file), and take what comes after they have asked, from the first whole stack on. A reader asks again if a stack could
not be read. A process that dies in between writes nothing, and a reader that does lets go of the lock. A process that
ceases to be seen ignores the signal from then on, because somebody may be about to send it. One whose program uses or
blocks the signal has no file, and is sent nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from phalanx.diagnosis import stack_signal
from phalanx.diagnosis.stack_text import SCRIPT_ENDED, frames_of, has_ended
from phalanx.system import processes
from phalanx.system.process_use import start_of

__all__ = ["PLACE_SIGNAL", "Place", "is_there", "place_of", "place_of_main"]

# No library is known to use it. The launcher asks its ranks by the next one (launch/rank/trace.py).
PLACE_SIGNAL = signal.SIGRTMAX - 4
_LARGEST = 1 << 20  # how large the file may be before a reader cuts it
_BLOCK = 1 << 16
# How long the main thread may take to begin and end its handler, and how long another one. A busy machine delays it,
# and so does a disk that the thread waits for; one that cannot write, being stopped or gone, is not waited for.
_MAIN_S, _WRITTEN_S = 2.0, 0.5
_ANSWERED_S = 0.05
_LOOK_S = 0.002
_SILENT = ("", "T", "t", "Z", "X")  # the kernel's letters for a thread that runs no handler: gone, stopped, ended
_MOST_THREADS = 4
_HEADER = "Stack (most recent call first):\n"  # with which each begins
_libc = ctypes.CDLL(None)


def _is_used(pid: int) -> bool:
    """Whether the program uses or blocks the signal; not whether a thread that is answering the launcher blocks it."""
    until = time.monotonic() + _ANSWERED_S
    while processes.uses(pid, PLACE_SIGNAL):
        if processes.has_handler(pid, PLACE_SIGNAL) or time.monotonic() >= until:
            return True
        time.sleep(_LOOK_S)
    return False


class _Stacks:
    """The file of this process, and the handler that writes there."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.holders = 0
        self._file = -1
        if not _is_used(self.pid):
            self._file = os.memfd_create(_stacks_of(self.pid))
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # also after a reader has cut it
            stack_signal.write_stacks_on(PLACE_SIGNAL, self._file)

    def close(self) -> None:
        if self._file >= 0:
            stack_signal.ignore(PLACE_SIGNAL)
            os.close(self._file)
            self._file = -1


# The thread that has the lock may come here again: a collection of garbage may close a group at any allocation. While a
# Place opens (``_opening``), such a close does not close the file, because that Place is about to hold it.
_lock = threading.RLock()
_opening = False
_stacks: _Stacks | None = None


def _forked() -> None:
    global _lock, _opening
    _lock, _opening = threading.RLock(), False  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_forked)


class Place:
    """Lets other processes look at this one, until :meth:`close`, which whoever made it has to call.

    They cannot look at it if it has no descriptor left for the file, or if its program uses the signal itself.

    Args:
        name: by which they know it, unique on the host; empty if its pid is enough.
    """

    def __init__(self, name: str = "") -> None:
        global _opening
        self._mark = -1
        self._of: _Stacks | None = None
        with contextlib.suppress(OSError), _lock:
            before, _opening = _opening, True
            try:
                self._of = _open_stacks()
                self._of.holders += 1
            finally:
                _opening = before
        if name:
            with contextlib.suppress(OSError):
                self._mark = os.memfd_create(name)

    def close(self) -> None:
        """End that. A forked child that calls it changes nothing for its parent."""
        with _lock:
            of, self._of = self._of, None
            if of is not None:
                of.holders -= 1
            if not _opening:
                _close_unused()
            mark, self._mark = self._mark, -1
        if mark >= 0:
            os.close(mark)


def _open_stacks() -> _Stacks:
    global _stacks
    if _stacks is None or _stacks.pid != os.getpid():
        inherited, _stacks = _stacks, None
        if inherited is not None:
            inherited.close()
        _stacks = _Stacks()
    return _stacks


def _close_unused() -> None:
    global _stacks
    if _stacks is not None and not _stacks.holders:
        unused, _stacks = _stacks, None
        unused.close()


def is_there(pid: int, name: str) -> bool:
    """Whether the process of this pid is the one of this name."""
    return bool(_file_of(pid, name))


def place_of(pid: int, name: str) -> str:
    """Where a process is, as ``function (file:line)``: a thread of it that runs, or else its main thread.

    Args:
        pid: the process.
        name: of its :class:`Place`.

    Returns:
        The innermost place in its user's program, or ``SCRIPT_ENDED`` if that is over; empty if it cannot be found out,
        as of a process that is stopped.
    """
    return _place(pid, _threads, _WRITTEN_S) if is_there(pid, name) else ""


def place_of_main(pid: int) -> str:
    """Where the main thread of a process is that has a :class:`Place`; see :func:`place_of`."""
    return _place(pid, lambda pid: [pid], _MAIN_S)


def _place(pid: int, choose: Callable[[int], list[int]], patience_s: float) -> str:
    start = start_of(pid)
    path = _file_of(pid, _stacks_of(pid))
    if not path:
        return ""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        for thread in choose(pid):
            frames = frames_of(_stack_of(_Asked(pid, start, thread), file, patience_s))
            for frame in frames:
                if not frame.is_librarys:
                    return f"{frame.function} ({frame.file}:{frame.line})"
            if has_ended(frames):
                return SCRIPT_ENDED
    except OSError:  # it has ended
        pass
    finally:
        os.close(file)
    return ""


def _stacks_of(pid: int) -> str:
    return f"phalanx-stacks-{pid}"


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


class _Asked(NamedTuple):
    """A thread that is asked for its stack.

    Attributes:
        pid, start: its process, and when that was started.
        thread: the thread's id.
    """

    pid: int
    start: int
    thread: int

    def signal(self) -> None:
        """Have it write its stack, if the process is still the one that does so, and not another program by now.

        Between the look and the signal it could still become one. An exec takes the handler away first, and both are
        microseconds, while a reader may have waited for seconds before.
        """
        if start_of(self.pid) != self.start or not processes.has_handler(self.pid, PLACE_SIGNAL):
            return
        if hasattr(_libc, "tgkill"):
            _libc.tgkill(self.pid, self.thread, int(PLACE_SIGNAL))
        elif self.thread == self.pid:
            os.kill(self.pid, PLACE_SIGNAL)


def _stack_of(asked: _Asked, file: int, patience_s: float) -> str:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:  # without the lock after that: another reader may have been stopped with it
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(_LOOK_S)
    try:
        return _answer(asked, file, patience_s)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _answer(asked: _Asked, file: int, patience_s: float) -> str:
    before = os.fstat(file).st_size
    if before > _LARGEST:
        os.ftruncate(file, 0)
        before = 0
    asked.signal()
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        # The stack is written in many small pieces, by the signal's handler, which blocks the signal until it returns.
        stack = _first_whole(file, before)
        if stack and not processes.blocks(asked.thread, PLACE_SIGNAL):
            if not stack_signal.was_changed(_first_whole(file, before)):
                break
            before = os.fstat(file).st_size
            asked.signal()
        if processes.state_of_thread(asked.pid, asked.thread) in _SILENT:
            break
    return _first_whole(file, before)


def _first_whole(file: int, begin: int) -> str:
    """The first stack that begins at or behind ``begin``, from its first line on; empty if there is none yet.

    What comes before it is the end of a stack for which somebody had no patience left.
    """
    if os.fstat(file).st_size < begin:  # another reader has cut it
        begin = 0
    _, header, stack = os.pread(file, _BLOCK, begin).decode(errors="replace").partition(_HEADER)
    return header + stack.partition(_HEADER)[0]
