"""What a rank leaves for the launcher to read while it runs: its Python stack on demand, and how far it has come.

A rank that hangs in C code runs no Python, so it cannot be asked by Python's own signal handlers. A handler in C
writes the stack instead (``diagnosis/stacks.py``), into a file in memory that all ranks of a host share. Each rank
has a part of it, so far from the next one's that it never gets there; the file takes memory only where something was
written.

- The first page of a part is written by the rank and read by its parent: byte 0 is how far the rank
  has come (``Stage``), bytes 4-7 the number of the descriptor by which it writes. Each is written once for a
  value, and a rank that dies in between leaves the value of before. From byte 64 on there is what it has asked another
  process for, as text that ends with a zero; a reader may find it half written, and it is for people.
  Bytes 8-15 are written by the rank's parent once the rank has ended, and read by other ranks, for their errors about
  it: its exit code, or minus the signal that ended it, in bytes 12-15, and then its pid in bytes 8-11. A reader finds
  the code by the pid, so a parent that dies in between has said nothing.
- From ``_RECORDER`` on there is the rank's flight recorder, which the rank writes (``diagnosis/recorder.py``). It takes
  memory from the rank's first group on.
- From ``_ELSEWHERE`` on, in the first part, there is a line for each rank of another host that has failed. The agent of
  this host writes it, behind the last one, and the ranks read it, for their errors about that rank. An agent that dies
  in between leaves a line without its end, which nobody takes.
- From the second page on there are stacks, one after the other. Only the rank's handler writes them, and readers
  remember how far they have read.

A script may close the descriptor and open a file of its own, which then might get its number. So a rank is asked only
after /proc has shown that the descriptor still is this file.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import resource
import signal
import time
from collections.abc import Collection, Mapping

from phalanx.diagnosis import stacks as stack_signal
from phalanx.diagnosis.stacks import ASKED
from phalanx.native.core import RECORDER_BYTES
from phalanx.system import processes
from phalanx.system.limits import TRACE_BYTES_PER_RANK

__all__ = [
    "STACK_SIGNAL",
    "StackRequest",
    "Stage",
    "Trace",
    "advance",
    "look_up_end",
    "note_asked",
    "open_own",
    "open_trace",
    "place_of_recorder",
    "read_elsewhere",
    "trace_name",
]

# No library is known to use it, and a process that a rank starts gets its default action back.
STACK_SIGNAL = signal.SIGRTMAX - 3
_PART = TRACE_BYTES_PER_RANK
_PAGE = 4096
_RECORDER = 1 << 31  # where the recorder begins in a part
_ELSEWHERE = 3 << 30  # behind the recorder
_LONGEST_ELSEWHERE = 1 << 16  # of all lines: after so many failures nobody asks for one more
_END_AT = 8
_ASKED_AT, _ASKED_BYTES = 64, 1024
_BLOCK = 1 << 16
# How often a rank that was asked is looked at, and how long it may take to write a stack that it has begun.
_LOOK_S, _FINISH_S = 0.0025, 0.05
# A script's own descriptors should not get numbers that select() cannot take.
_HIGHEST = 1024


class Stage(enum.IntEnum):
    """How far a rank has come: it runs, has imported torch, has joined the others, and has come to its script's end."""

    STARTED = 0
    IMPORTED = 1
    JOINED = 2
    ENDED = 3  # and Python's exit handlers have run; only of a rank that has joined


_own: tuple[int, int, int] | None = None  # the descriptor, where this rank's part begins, and the rank's pid


def open_trace(run_id: str) -> int:
    """Make the file, in the process that forks the ranks or is their supervisor."""
    return os.memfd_create(trace_name(run_id))


def trace_name(run_id: str) -> str:
    """The name of the file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-trace"


def open_own(descriptor: int, part: int) -> None:
    """In a rank: take a part of the file, and write this thread's stack there whenever ``STACK_SIGNAL`` comes.

    Args:
        descriptor: the file; it is closed.
        part: which part, counted from 0.
    """
    global _own
    # Opened anew, because the offset at which a write lands belongs to the opening.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    os.close(descriptor)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):
        high = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, min(soft, _HIGHEST) - 1)
        os.close(own)
        own = high
    begin = part * _PART
    os.lseek(own, begin + _PAGE, os.SEEK_SET)
    os.pwrite(own, own.to_bytes(4, "little"), begin + 4)
    stack_signal.write_stacks_on(STACK_SIGNAL, own)
    _own = own, begin, os.getpid()


def place_of_recorder(run_id: str) -> tuple[int, int]:
    """In a rank: the file, and where in it the rank's flight recorder is to be.

    Raises:
        OSError: there is no such place: the script has closed the descriptor.
    """
    if _own is None or not _is_trace(os.getpid(), _own[0], run_id):
        raise OSError("this process has no part of a trace")
    descriptor, begin, _ = _own
    # Only ever longer: other ranks are writing to it.
    os.pwrite(descriptor, b"\0", begin + _RECORDER + RECORDER_BYTES - 1)
    return descriptor, begin + _RECORDER


def advance(run_id: str, stage: Stage) -> None:
    """In a rank: note how far it has come. Does nothing in a child that the script has forked."""
    _write(run_id, bytes([stage]), 0)


def note_asked(run_id: str, text: str) -> None:
    """In a rank: note what it has asked another process for; empty for nothing. See :func:`advance`."""
    _write(run_id, _as_noted(text), _ASKED_AT)


def look_up_end(run_id: str, pid: int) -> int | None:
    """In a rank: the exit code of another one of this host, or minus its signal; None if its parent has not said it."""
    if _own is None or not _is_trace(os.getpid(), _own[0], run_id):
        return None
    descriptor, wanted = _own[0], pid.to_bytes(4, "little")
    for begin in range(0, os.fstat(descriptor).st_size, _PART):
        if os.pread(descriptor, 4, begin + _END_AT) == wanted:
            return int.from_bytes(os.pread(descriptor, 4, begin + _END_AT + 4), "little", signed=True)
    return None


def read_elsewhere(run_id: str) -> list[bytes]:
    """In a rank: the lines of :meth:`Trace.note_elsewhere` that are there by now."""
    if _own is None or not _is_trace(os.getpid(), _own[0], run_id):
        return []
    return os.pread(_own[0], _LONGEST_ELSEWHERE, _ELSEWHERE).split(b"\n")[:-1]


def _as_noted(text: str) -> bytes:
    return text.encode(errors="replace")[: _ASKED_BYTES - 1] + b"\0"


def _write(run_id: str, data: bytes, at: int) -> None:
    if _own is None or _own[2] != os.getpid():
        return
    descriptor, begin, pid = _own
    with contextlib.suppress(OSError):
        if _is_trace(pid, descriptor, run_id):
            os.pwrite(descriptor, data, begin + at)


def _is_trace(pid: int, descriptor: int, run_id: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"/memfd:{trace_name(run_id)} ")
    except OSError:
        return False


class Trace:
    """The file, as the processes see it that watch the ranks.

    Args:
        descriptor: the file.
        run_id: the job's name.
    """

    def __init__(self, descriptor: int, run_id: str) -> None:
        self.descriptor = descriptor
        self._run_id = run_id
        self._read: dict[int, int] = {}
        self._elsewhere = 0  # the length of the lines about ranks of other hosts

    def stage(self, part: int) -> Stage:
        """How far the rank with this part has come."""
        found = os.pread(self.descriptor, 1, part * _PART)
        # A rank that has gone wrong may have written over it.
        return Stage(found[0]) if found and found[0] in Stage._value2member_map_ else Stage.STARTED

    def asked(self, part: int) -> str:
        """What the rank with this part has asked another process for; empty if nothing that takes long."""
        data = os.pread(self.descriptor, _ASKED_BYTES, part * _PART + _ASKED_AT)
        return data.partition(b"\0")[0].decode(errors="replace")

    def place_of_recorder(self, part: int) -> int:
        """Where in the file the flight recorder of the rank with this part begins, if it has one."""
        return part * _PART + _RECORDER

    def note_end(self, part: int, pid: int, status: int) -> None:
        """Note how the rank with this part has ended, for the others: its exit code, or minus its signal."""
        os.pwrite(self.descriptor, status.to_bytes(4, "little", signed=True), part * _PART + _END_AT + 4)
        os.pwrite(self.descriptor, pid.to_bytes(4, "little"), part * _PART + _END_AT)

    def note_elsewhere(self, line: bytes) -> None:
        """Note for the ranks of this host how one of another host has ended; one process may do so.

        Args:
            line: what it says, without a line break.
        """
        if self._elsewhere + len(line) < _LONGEST_ELSEWHERE:
            self._elsewhere += os.pwrite(self.descriptor, line + b"\n", _ELSEWHERE + self._elsewhere)

    def ask(self, part: int, pid: int) -> bool:
        """Have a rank write its stack; whether it can. The caller is its parent and has not reaped it."""
        number = os.pread(self.descriptor, 4, part * _PART + 4)
        # A process without the handler, such as a program that the rank has become, would be ended by the signal.
        if not any(number) or not processes.catches(pid, STACK_SIGNAL):
            return False
        if not _is_trace(pid, int.from_bytes(number, "little"), self._run_id):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            return True
        return False

    def end(self, part: int) -> int:
        """Where in the file the next stack of the rank with this part is going to be."""
        at = self._begin(part)
        while text := os.pread(self.descriptor, _BLOCK, at).rstrip(b"\0"):
            at += len(text)
        return at

    def _begin(self, part: int) -> int:
        return part * _PART + _PAGE + self._read.get(part, 0)

    def take(self, parts: Collection[int]) -> dict[int, str]:
        """The stacks that were written since the last call, by part, each with what the rank has asked for behind it.

        A part without a stack is left out.
        """
        found = {}
        for part in parts:
            text = os.pread(self.descriptor, _BLOCK, self._begin(part)).rstrip(b"\0")
            if text:
                self._read[part] = self._read.get(part, 0) + len(text)
                asked = self.asked(part)
                found[part] = text.decode(errors="replace") + (ASKED + asked if asked else "")
        return found


class StackRequest:
    """Ranks that were asked for their stacks, until all have written them or the time is up.

    Args:
        trace: where they write.
        ranks: the pid of each, by its part. The caller is their parent and has not reaped them.
        patience_s: how long to wait. A rank that is stopped, or that has no core to run on, writes later.

    Attributes:
        late: the parts of those that have not written yet.
        look_at: when to :meth:`look` next, on the monotonic clock.
    """

    def __init__(self, trace: Trace, ranks: Mapping[int, int], patience_s: float) -> None:
        self._trace, self._pids = trace, dict(ranks)
        # Behind the answers to earlier questions, which another process may have taken.
        self._ends = {part: trace.end(part) for part in ranks}
        self._seen_at: dict[int, float] = {}
        self.late = [part for part, pid in ranks.items() if trace.ask(part, pid)]
        self._until = time.monotonic() + patience_s
        self.look_at = 0.0

    def forget(self, part: int) -> None:
        """A rank has ended, and its process id may be another's soon."""
        self.late = [other for other in self.late if other != part]

    def look(self) -> bool:
        """Whether all is over: all have written, or the time is up."""
        now = time.monotonic()
        self.look_at = now + _LOOK_S
        self.late = [part for part in self.late if not self._has_answered(part, now)]
        return not self.late or now >= self._until

    def _has_answered(self, part: int, now: float) -> bool:
        """Whether a rank has written a whole stack; one that was just entering a function is asked again."""
        begin, pid = self._ends[part], self._pids[part]
        if not any(os.pread(self._trace.descriptor, 1, begin)):
            return False
        # A stack is written in many small pieces, by the signal's handler, and the signal is blocked until it returns;
        # or for good, by a rank whose other thread handles it.
        if processes.blocks(pid, STACK_SIGNAL) and now - self._seen_at.setdefault(part, now) < _FINISH_S:
            return False
        self._ends[part] = self._trace.end(part)
        written = os.pread(self._trace.descriptor, self._ends[part] - begin, begin).decode(errors="replace")
        return not stack_signal.was_changed(written) or not self._trace.ask(part, pid)
