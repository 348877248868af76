"""The trace: a file in memory by which a rank can be looked at while it runs, and after it was killed.

A rank that hangs in C code runs no Python, so a handler in C writes its stack (``diagnosis/stacks.py``). All ranks of a
host share the file. Each has a part of it, so far from the next one's that it never gets there; the file takes memory
only where something was written.

=================  ============================================  =========  ======================================
where in a part    what                                          writer     if the writer dies in between
=================  ============================================  =========  ======================================
byte 0             how far the rank has come (``Stage``)         rank       the value of before
bytes 4-7          the descriptor by which the rank writes       rank       none: it is not asked for its stack
bytes 8-11, 12-15  its pid, after its exit code or minus signal  its agent  nothing is said: the pid comes last
from byte 64       what it has asked another process for         rank       part of a text, which is for people
from ``_PAGE``     its stacks, one after the other               handler    part of a stack
``_RECORDER``      its flight recorder                           rank       ``diagnosis/recorder.py``
``_ELSEWHERE``     in the first part: a line for each rank of    the agent  a line without its end, which nobody takes
                   another host that has failed
=================  ============================================  =========  ======================================

What ``its agent`` writes the other ranks read, for their errors about that rank; the agent reads the rest. A script may
close the descriptor and open a file of its own under the number, so both sides look first whether it still is this
file.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.diagnosis.ends import Ending
from phalanx.diagnosis.stacks import ASKED, was_changed, write_stacks_on
from phalanx.errors import PhalanxError
from phalanx.launch.output.failure import signal_name
from phalanx.native.core import RECORDER_BYTES, RECORDS
from phalanx.system import processes
from phalanx.system.limits import TRACE_BYTES_PER_RANK

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = [
    "STACK_SIGNAL",
    "StackRequest",
    "Stage",
    "Trace",
    "advance",
    "ending_of",
    "how_ended",
    "how_ended_elsewhere",
    "note_asked",
    "open_own",
    "open_trace",
    "place_of_recorder",
    "trace_name",
]

# No library is known to use it, and a process that a rank starts gets its default action back.
STACK_SIGNAL = signal.SIGRTMAX - 3
_PART = TRACE_BYTES_PER_RANK
_PAGE = 4096
_RECORDER = 1 << 31  # it takes memory from the rank's first group on
_ELSEWHERE = 3 << 30
_LONGEST_ELSEWHERE = 1 << 16  # of all lines: after so many failures nobody asks for one more
_END_AT = 8
_ASKED_AT, _ASKED_BYTES = 64, 1024
_BLOCK = 1 << 16
# How often a rank that was asked is looked at, and how long it may take to write a stack that it has begun.
_LOOK_S, _FINISH_S = 0.0025, 0.05


class Stage(enum.IntEnum):
    """Progress of a rank: it runs, has imported torch, has joined the others and come to its script's end."""

    STARTED = 0
    IMPORTED = 1
    ENDED = 3


# -- in a rank -----------------------------------------------------------------------------------------


class _Own(NamedTuple):
    descriptor: int
    begin: int  # of this rank's part
    pid: int
    about: os.stat_result


_own: _Own | None = None


def open_own(descriptor: int, part: int) -> None:
    """Take a part of the file, which is closed, and write a thread's stack there whenever ``STACK_SIGNAL`` comes."""
    global _own
    # Opened anew, because the offset at which a write lands belongs to the opening.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    os.close(descriptor)
    begin = part * _PART
    os.lseek(own, begin + _PAGE, os.SEEK_SET)
    os.pwrite(own, own.to_bytes(4, "little"), begin + 4)
    write_stacks_on(STACK_SIGNAL, own)
    _own = _Own(own, begin, os.getpid(), os.fstat(own))


def _opened() -> _Own | None:
    """Return what this process has of the file; None without a part of it, or if the script has closed it."""
    with contextlib.suppress(OSError):
        if _own is not None and os.path.samestat(os.fstat(_own.descriptor), _own.about):
            return _own
    return None


def place_of_recorder() -> tuple[int, int]:
    """Return the file, and where in it the rank's flight recorder is to be; OSError if there is no such place."""
    own = _opened()
    if own is None:
        raise OSError("this process has no part of a trace")
    place = own.begin + _RECORDER
    # Only ever longer: other ranks are writing to it.
    os.pwrite(own.descriptor, b"\0", place + RECORDER_BYTES - 1)
    return own.descriptor, place


def advance(stage: Stage) -> None:
    """Note how far the rank has come."""
    _write(bytes([stage]), 0)


def note_asked(text: str) -> None:
    """Note what the rank has asked another process for; empty for nothing."""
    _write(text.encode(errors="replace")[: _ASKED_BYTES - 1] + b"\0", _ASKED_AT)


def _write(data: bytes, at: int) -> None:
    own = _opened()
    if own is not None and own.pid == os.getpid():  # and not a child that the script has forked
        os.pwrite(own.descriptor, data, own.begin + at)


def how_ended(pid: int) -> Ending | None:
    """Read how another rank of this host has ended, by its pid; None if its agent has not said it."""
    own, wanted = _opened(), pid.to_bytes(4, "little")
    if own is not None:
        for begin in range(0, os.fstat(own.descriptor).st_size, _PART):
            if os.pread(own.descriptor, 4, begin + _END_AT) == wanted:
                status = os.pread(own.descriptor, 4, begin + _END_AT + 4)
                return ending_of(int.from_bytes(status, "little", signed=True))
    return None


def how_ended_elsewhere(host: str, pid: int) -> dict[str, Any] | None:
    """Read how a rank of another host has failed, and what it did last, by its pid there; None if that is not known."""
    own = _opened()
    lines = os.pread(own.descriptor, _LONGEST_ELSEWHERE, _ELSEWHERE).split(b"\n")[:-1] if own is not None else []
    for known in map(json.loads, lines):
        if (known.pop("host"), known.pop("pid")) == (host, pid):
            ending = ending_of(known.pop("status"))
            return {**known, "how": ending.text, "signal": ending.signal}
    return None


def ending_of(status: int) -> Ending:
    """Return how a process ended with this exit code, or minus the number of a signal."""
    if status < 0:
        return Ending(f"by signal {-status} ({signal_name(-status)})", -status)
    return Ending(f"with exit code {status}")


# -- in the agent, and in who looks at the job from outside --------------------------------------------


def open_trace(run_id: str) -> int:
    """Make the file, in the process that forks the ranks."""
    return os.memfd_create(trace_name(run_id))


def trace_name(run_id: str) -> str:
    """The name of the file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-trace"


class Trace:
    """The file of a job, as the processes see it that watch the ranks."""

    def __init__(self, descriptor: int, run_id: str) -> None:
        self.descriptor = descriptor
        self._run_id = run_id
        self._read: dict[int, int] = {}
        self._elsewhere = 0  # the length of the lines about ranks of other hosts

    def stage(self, part: int) -> Stage:
        """Return how far the rank with this part has come."""
        found = os.pread(self.descriptor, 1, part * _PART)
        # A rank that has gone wrong may have written over it.
        return Stage(found[0]) if found and found[0] in Stage._value2member_map_ else Stage.STARTED

    def asked(self, part: int) -> str:
        """Return what the rank with this part has asked another process for; empty if nothing that takes long."""
        data = os.pread(self.descriptor, _ASKED_BYTES, part * _PART + _ASKED_AT)
        return data.partition(b"\0")[0].decode(errors="replace")

    def place_of_recorder(self, part: int) -> int:
        """Return where in the file the flight recorder of the rank with this part begins, if it has one."""
        return part * _PART + _RECORDER

    def recording(self, part: int, count: int = RECORDS) -> Recording | None:
        """Read what a rank has recorded, the last ``count`` operations; None if it cannot be read."""
        # The job may have been one without Phalanx, so what reads it is not imported before.
        from phalanx.diagnosis.reading import read_recording

        try:
            return read_recording(self.descriptor, self.place_of_recorder(part), count)
        except (OSError, ValueError, PhalanxError):
            return None

    def note_end(self, part: int, pid: int, status: int) -> None:
        """Note for the others how a rank has ended: its exit code, or minus its signal."""
        os.pwrite(self.descriptor, status.to_bytes(4, "little", signed=True), part * _PART + _END_AT + 4)
        os.pwrite(self.descriptor, pid.to_bytes(4, "little"), part * _PART + _END_AT)

    def note_elsewhere(self, line: bytes) -> None:
        """Note for the ranks of this host how one of another host has ended, as a line of JSON; one process does so."""
        if self._elsewhere + len(line) < _LONGEST_ELSEWHERE:
            self._elsewhere += os.pwrite(self.descriptor, line + b"\n", _ELSEWHERE + self._elsewhere)

    def ask(self, part: int, pid: int) -> bool:
        """Have a rank write its stack; whether it can. The caller is its parent and has not reaped it."""
        number = int.from_bytes(os.pread(self.descriptor, 4, part * _PART + 4), "little")
        # A process without the handler, such as a program that the rank has become, would be ended by the signal.
        if not number or "SigCgt" not in processes.signal_sets(pid, STACK_SIGNAL):
            return False
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{trace_name(self._run_id)} "):
                os.kill(pid, STACK_SIGNAL)
                return True
        return False

    def end(self, part: int) -> int:
        """Return where in the file the next stack of the rank with this part is going to be."""
        at = self._begin(part)
        while text := os.pread(self.descriptor, _BLOCK, at).rstrip(b"\0"):
            at += len(text)
        return at

    def _begin(self, part: int) -> int:
        return part * _PART + _PAGE + self._read.get(part, 0)

    def take(self, parts: Collection[int]) -> dict[int, str]:
        """The stacks since the last call, by part if it has one, each with what the rank has asked for behind it."""
        found = {}
        for part in parts:
            text = os.pread(self.descriptor, _BLOCK, self._begin(part)).rstrip(b"\0")
            if text:
                self._read[part] = self._read.get(part, 0) + len(text)
                asked = self.asked(part)
                found[part] = text.decode(errors="replace") + (ASKED + asked if asked else "")
        return found


class StackRequest:
    """A question to ranks for their stacks, until all have written them or ``patience_s`` seconds are over.

    A rank that is stopped, or that has no core to run on, writes later. The caller is the parent of the ``ranks`` (pid
    by part) and has not reaped them.

    Attributes:
        late: the parts of those that have not written yet.
        look_at: when to :meth:`look` next.
    """

    def __init__(self, trace: Trace, ranks: Mapping[int, int], patience_s: float) -> None:
        self._trace, self._pids = trace, dict(ranks)
        self._ends = {part: trace.end(part) for part in ranks}
        self._seen_at: dict[int, float] = {}
        self.late = [part for part, pid in ranks.items() if trace.ask(part, pid)]
        self._until = time.monotonic() + patience_s
        self.look_at = 0.0

    def forget(self, part: int) -> None:
        """A rank has ended, and its process id may be another's soon."""
        self.late = [other for other in self.late if other != part]

    def look(self) -> bool:
        """Tell whether all is over: all have written, or the time is up."""
        now = time.monotonic()
        self.look_at = now + _LOOK_S
        self.late = [part for part in self.late if not self._has_answered(part, now)]
        return not self.late or now >= self._until

    def _has_answered(self, part: int, now: float) -> bool:
        """Tell whether a rank has written a whole stack; one that was just entering a function is asked again."""
        begin, pid = self._ends[part], self._pids[part]
        if not any(os.pread(self._trace.descriptor, 1, begin)):
            return False
        # A stack is written in many small pieces, by the signal's handler, and the signal is blocked until it returns;
        # or for good, by a rank whose other thread handles it.
        is_writing = "SigBlk" in processes.signal_sets(pid, STACK_SIGNAL)
        if is_writing and now - self._seen_at.setdefault(part, now) < _FINISH_S:
            return False
        self._ends[part] = self._trace.end(part)
        written = os.pread(self._trace.descriptor, self._ends[part] - begin, begin).decode(errors="replace")
        return not was_changed(written) or not self._trace.ask(part, pid)
