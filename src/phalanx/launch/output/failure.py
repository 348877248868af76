"""Which rank broke, how, and where: from exit codes and reports to one block of text.

When one rank fails, the others soon fail because of it, and the kernel reports their ends in any order. The block names
the rank that failed first. A rank that raised an exception wrote down when the exception left the script, which is well
before its process ended; a rank that was killed could not, so its time is when the launcher noticed its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import OUT_OF_MEMORY_HINT
from phalanx.words import format_named

__all__ = ["Failure", "Report", "find_cause", "format_failure", "read_report", "signal_name"]

# The kernel closes a dying process's sockets before it notifies the parent. So a peer may raise an error because of the
# death slightly before the launcher notices the death.
NOTICE_DELAY_S = 0.02
_MOST_LINES = 8


@dataclass(frozen=True)
class Report:
    """A rank's own account of its end.

    Attributes:
        type: the exception's qualified name, to be shown; empty if torch's ``@record`` wrote the report.
        message: the exception's text.
        traceback: the traceback, starting in the user's script; empty if the rank has printed it.
        shown: the traceback, or the text of ``sys.exit``, is in the rank's output already.
        time: when the exception left the script, on the monotonic clock; None if unknown.
        code: the exit code with which the rank ends because of the exception.
        exited: the script called ``sys.exit``; it raised nothing else.
        consequence: the exception is always caused by another rank's end (``PhalanxError.is_consequence``).
    """

    type: str
    message: str
    traceback: str
    shown: bool
    time: float | None
    code: int
    exited: bool = False
    consequence: bool = False

    @property
    def summary(self) -> str:
        """The last line of a traceback: the exception's name and the first line of its text."""
        name = self.type.removeprefix("builtins.").removeprefix("__main__.")
        first = self.message.partition("\n")[0]
        return f"{name}: {first}" if name and first else name or first


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well.

    Attributes:
        rank: its number in the world.
        pid: its process id.
        status: its exit code, or minus the number of the signal that ended it; None while it still runs.
        time: when it failed, on the monotonic clock.
        report: its own report; None if it wrote none.
        ended_by_launcher: it had not failed when the launcher ended the job.
    """

    rank: int
    pid: int
    status: int | None
    time: float
    report: Report | None = None
    ended_by_launcher: bool = False

    @property
    def exit_code(self) -> int:
        """The launcher's exit code if this failure is the cause; 128 + signal for a signal, as in a shell."""
        if self.status is not None and self.status > 0:
            return self.status
        if self.report is not None:
            # The rank had raised already, and the launcher may have killed it before it had exited.
            return self.report.code
        return 128 - (self.status or 0) if self.status else 1


def read_report(descriptor: int) -> Report | None:
    """Read a rank's report file, without moving the offset that the rank shares; None if it wrote no report."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not data:
            return None
        content: dict[str, Any] = json.loads(data)
        own = content.get("phalanx")
        if own is not None:
            return Report(**own)
        # Written by torch's @record, in a process that the rank started; that process has printed its traceback.
        message = content["message"]
        return Report("", message if isinstance(message, str) else message["message"], "", True, None, 1)
    return None


def find_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others: the earliest one that is neither a consequence nor the launcher's doing.

    If there is none, it is the earliest consequence, or if there is none of those either, the first that the launcher
    ended.
    """

    def order(failure: Failure) -> tuple[bool, bool, float, int]:
        report = failure.report
        consequence = report is not None and report.consequence
        noticed_late = NOTICE_DELAY_S if report is None else 0.0
        return failure.ended_by_launcher, consequence, failure.time - noticed_late, failure.rank

    return min(failures, key=order)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_failure(
    cause: Failure,
    others: Iterable[Failure],
    *,
    ranks: int,
    host: str,
    started: float,
    out_of_memory: bool = False,
) -> str:
    """The block of text that is printed when a job fails.

    Args:
        cause: the failure that caused the others.
        others: the ranks that failed, or were ended by the launcher, after it.
        ranks: the world size.
        host: the name of the host that the failed rank ran on.
        started: when the ranks were started, on the monotonic clock.
        out_of_memory: the kernel's out-of-memory killer ended a process during the job.
    """
    report = cause.report
    reason = f": {report.summary}" if report is not None and not report.exited else ""
    lines = [f"phalanx: rank {cause.rank} of {ranks} failed{reason}"]
    elapsed = max(0.0, cause.time - started)
    lines.append(f"  host {host}, pid {cause.pid}, {elapsed:.1f} s after the start, {_ending(cause)}")
    hint = _hint(cause, out_of_memory)
    if hint:
        lines.append(f"  {hint}")
    if report is not None and report.traceback:
        lines += ["", report.traceback.rstrip("\n"), ""]
    lines += _aftermath(others)
    return "\n".join(lines).rstrip("\n") + "\n"


def _ending(cause: Failure) -> str:
    if cause.report is None and cause.status is not None and cause.status < 0:
        return f"ended by signal {-cause.status} ({signal_name(-cause.status)})"
    return f"exit code {cause.exit_code}"


def _hint(cause: Failure, out_of_memory: bool) -> str:
    report = cause.report
    if report is not None:
        if report.exited:
            return "it called sys.exit; if it printed a reason, that is above"
        if report.shown:
            return "its traceback was printed by the script itself, above"
        return ""
    if cause.status is None or cause.status >= 0:
        return "it raised no Python exception; if it printed a reason, that is above"
    return _signal_hints(out_of_memory).get(-cause.status, "")


def _signal_hints(out_of_memory: bool) -> Mapping[int, str]:
    if out_of_memory:
        killed = "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks"
    else:
        killed = f"another process killed it; if none did, {OUT_OF_MEMORY_HINT}"
    return {
        signal.SIGKILL: killed,
        signal.SIGSEGV: "native code accessed memory that it may not; the Python stack, if there is one, is above",
        signal.SIGBUS: "memory could not be provided (a full /dev/shm?); the Python stack, if any, is above",
        signal.SIGABRT: "native code gave up; its message and the Python stack, if any, are above",
        signal.SIGFPE: "native code divided by zero; the Python stack, if there is one, is above",
        signal.SIGILL: "native code was built for another processor; the Python stack, if any, is above",
        signal.SIGTERM: "another process, not the launcher, asked it to end",
        signal.SIGINT: "another process, not the launcher, interrupted it",
        signal.SIGXCPU: "it has used up its limit of processor time (ulimit -t)",
    }


def _aftermath(others: Iterable[Failure]) -> list[str]:
    """One line for all ranks that ended alike: failures in the order of their times, then what the launcher ended."""
    groups: dict[str, list[int]] = {}
    for failure in sorted(others, key=lambda other: (other.ended_by_launcher, other.time)):
        groups.setdefault(_aftermath_of(failure), []).append(failure.rank)
    lines = [f"  {format_named('rank', members)} {text}" for text, members in groups.items()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} more kinds of failure after that"]
    return lines


def _aftermath_of(failure: Failure) -> str:
    if failure.ended_by_launcher:
        return "ended by the launcher"
    if failure.report is not None and not failure.report.exited:
        return f"then failed: {failure.report.summary}"
    return f"then failed: {_ending(failure)}"
