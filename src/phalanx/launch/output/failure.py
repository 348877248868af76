"""Which rank broke, how, and where: from exit codes and reports to one block of text.

When one rank fails the others soon fail because of it, and the kernel reports their ends in any order. What
is shown first is what happened first: each rank writes the time at which its exception left the script, which
is well before the process ends, and a rank that was killed counts from the moment its end was noticed.
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

__all__ = ["Failure", "Report", "find_cause", "format_failure", "read_report", "signal_name"]

# The kernel closes a dying process's sockets before it tells the parent, so a peer's complaint may carry a
# slightly earlier time than the death it complains about.
NOTICE_DELAY_S = 0.02
# Errors that are by their nature about another rank's end.
_CONSEQUENCES = frozenset({"phalanx.errors.PeerLost"})
_MOST_LINES = 8


@dataclass(frozen=True)
class Report:
    """What a rank wrote about its own end.

    Attributes:
        type: the exception's qualified name; empty if only torch's ``@record`` wrote the report.
        message: the exception's text.
        traceback: the traceback, starting in the user's script; empty if it was shown by other means.
        shown: the traceback, or the text of ``sys.exit``, is in the rank's output already.
        time: when the exception left the script, on the monotonic clock; None if unknown.
        code: the exit code that follows from it.
    """

    type: str
    message: str
    traceback: str
    shown: bool
    time: float | None
    code: int

    @property
    def summary(self) -> str:
        """The last line of a traceback: the exception's name and the first line of its text."""
        name = self.type.removeprefix("builtins.").removeprefix("__main__.")
        first = self.message.partition("\n")[0]
        return f"{name}: {first}" if name and first else name or first


@dataclass(frozen=True)
class Failure:
    """One rank's bad end.

    Attributes:
        rank: which.
        pid: its process id.
        status: its exit code, or minus the signal that ended it; None while it has not ended yet.
        time: when it failed, on the monotonic clock.
        report: what it wrote, if it did.
        ended_by_launcher: it was still well when the launcher ended the job.
    """

    rank: int
    pid: int
    status: int | None
    time: float
    report: Report | None = None
    ended_by_launcher: bool = False

    @property
    def exit_code(self) -> int:
        """What the launcher's exit code will be if this is the cause: 128 + signal, as in a shell."""
        if self.status is not None and self.status > 0:
            return self.status
        if self.report is not None:
            # The launcher may have killed it while it was still winding down.
            return self.report.code
        return 128 - (self.status or 0) if self.status else 1


def read_report(descriptor: int) -> Report | None:
    """Read a rank's report file; None if it wrote none. Other processes' offsets are not disturbed."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not data:
            return None
        content: dict[str, Any] = json.loads(data)
        own = content.get("phalanx")
        if own is not None:
            return Report(own["type"], own["message"], own["traceback"], own["shown"], own["time"], own["code"])
        # Written by torch's @record in a process the rank started, which then printed its traceback itself.
        message = content["message"]
        return Report("", message if isinstance(message, str) else message["message"], "", True, None, 1)
    return None


def find_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from: the earliest, ends that the launcher caused last of all."""

    def order(failure: Failure) -> tuple[bool, bool, float, int]:
        report = failure.report
        consequence = report is not None and report.type in _CONSEQUENCES
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
    """The block that is printed when a job fails.

    Args:
        cause: the failure to explain.
        others: the ranks that failed, or were ended, after it.
        ranks: the world size.
        host: where it ran.
        started: when the ranks were started, on the monotonic clock.
        out_of_memory: the kernel's out-of-memory killer struck during the job.
    """
    report = cause.report
    reason = f": {report.summary}" if report is not None and report.type != "builtins.SystemExit" else ""
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
        if report.type == "builtins.SystemExit":
            return "it called sys.exit; what it had to say, if anything, is above"
        if report.shown:
            return "its traceback was printed by the script itself, above"
        return ""
    if cause.status is None or cause.status >= 0:
        return "it raised no Python exception; what it had to say, if anything, is above"
    return _signal_hints(out_of_memory).get(-cause.status, "")


def _signal_hints(out_of_memory: bool) -> Mapping[int, str]:
    if out_of_memory:
        killed = "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks"
    else:
        killed = f"somebody killed it; if nobody did, {OUT_OF_MEMORY_HINT}"
    return {
        signal.SIGKILL: killed,
        signal.SIGSEGV: "native code touched memory it may not; the Python stack, if there is one, is above",
        signal.SIGBUS: "memory could not be provided (a full /dev/shm?); the Python stack, if any, is above",
        signal.SIGABRT: "native code gave up; its message and the Python stack, if any, are above",
        signal.SIGFPE: "native code divided by zero; the Python stack, if there is one, is above",
        signal.SIGILL: "native code was built for another processor; the Python stack, if any, is above",
        signal.SIGTERM: "somebody asked it to end, and it was not the launcher",
        signal.SIGINT: "somebody interrupted it, and it was not the launcher",
        signal.SIGXCPU: "its limit of processor time is used up (ulimit -t)",
    }


def _aftermath(others: Iterable[Failure]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for failure in sorted(others, key=lambda other: (other.ended_by_launcher, other.time)):
        groups.setdefault(_aftermath_of(failure), []).append(failure.rank)
    lines = [f"  {_ranks(members)} {text}" for text, members in groups.items()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} more kinds of failure after that"]
    return lines


def _aftermath_of(failure: Failure) -> str:
    if failure.ended_by_launcher:
        return "ended by the launcher"
    if failure.report is not None and failure.report.type != "builtins.SystemExit":
        return f"then failed: {failure.report.summary}"
    return f"then failed: {_ending(failure)}"


def _ranks(numbers: list[int]) -> str:
    from phalanx.words import format_spans

    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_spans(numbers)}"
