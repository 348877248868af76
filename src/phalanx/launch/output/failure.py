"""Which rank broke, how, and where: from exit codes and reports to one block of text.

When one rank fails, the others soon fail because of it, and the kernel reports their ends in any order. The block names
the rank that failed first: by the time at which its exception left the script, or, of a rank that was killed, at which
the launcher noticed its end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.errors import OUT_OF_MEMORY_HINT
from phalanx.system.foreign_values import checked
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = [
    "End",
    "RankState",
    "Report",
    "as_report",
    "describe_lost_agent",
    "describe_status",
    "failure_in_short",
    "find_cause",
    "format_failure",
    "lacks_cause",
    "signal_name",
]

# The kernel closes a dying process's sockets before it notifies the parent. So a peer may raise an error because of the
# death slightly before the launcher notices the death.
NOTICE_DELAY_S = 0.02
_MOST_LINES = 8
_THEN = "then failed: "
# What a user reads of a failure: the lines of a block beside those of a traceback and of the rank's own output.
_MOST_OWN_LINES = 12


@dataclass(frozen=True)
class Report:
    """A rank's own account of its failure, in its report file as JSON in the form of torch's ``@record``."""

    type: str  # the exception's qualified name, to be shown; empty if torch's ``@record`` wrote the report
    message: str
    traceback: str  # the traceback, starting in the user's script; empty if the rank has printed it
    shown: bool  # the traceback, or the text of ``sys.exit``, is in the rank's output already
    time: float | None  # when the exception left the script, on the monotonic clock; None if unknown
    code: int  # the exit code with which the rank ends because of the exception
    exited: bool = False  # the script called ``sys.exit``; it raised nothing else
    consequence: bool = False  # the exception is always caused by another rank's end (``PhalanxError.is_consequence``)
    hint: str = ""  # what the rank knows about the cause beyond the exception's text; empty if nothing

    @property
    def summary(self) -> str:
        """The last line of a traceback: the exception's name and the first line of its text."""
        name = self.type.removeprefix("builtins.").removeprefix("__main__.")
        first = self.message.partition("\n")[0]
        return f"{name}: {first}" if name and first else name or first

    def to_record(self) -> dict[str, Any]:
        """Make an object for JSON, in which programs that read torch's error files find their fields."""
        return {
            "message": {
                "message": self.summary,
                "extraInfo": {"py_callstack": self.traceback, "timestamp": str(int(time.time()))},
            },
            "phalanx": asdict(self),
        }


def as_report(content: dict[str, Any], own_time: Callable[[float], float]) -> Report | None:
    """Understand what a rank, or torch's ``@record``, has written; None if it is no report."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        own = content.get("phalanx")
        if own is not None:
            report = checked(Report, own)
            return replace(report, time=None if report.time is None else own_time(report.time))
        # Written by torch's @record, in a process that the rank started; that process has printed its traceback.
        message = content["message"]
        text = message if isinstance(message, str) else message["message"]
        return Report("", text, "", True, None, 1) if isinstance(text, str) else None
    return None


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    status: int  # its exit code, or minus the signal that ended it
    at: float
    by_launcher: bool  # which had asked it to end
    out_of_memory: bool = False  # the kernel had ended a process of the job's cgroup for that


@dataclass(eq=False)
class RankState:
    """A rank of a job, as the supervisor knows it."""

    number: int  # its number in the world
    pid: int = 0  # its process on its host; 0 before it was forked
    end: End | None = None  # how it ended; None while it has not
    report: Report | None = None  # why it failed, as it has said; None if it has not
    # stage, asked, stack: what its agent said of it when it ended
    stage: int = 0
    asked: str = ""
    stack: str = ""
    recording: Recording | None = None  # its last operations, on this host's clock; None if there are none

    @property
    def ended_well(self) -> bool:
        """Whether it has ended with exit code 0."""
        return self.end is not None and self.end.status == 0

    @property
    def failed_at(self) -> float:
        """The time of its failure; its exit handlers may have run for long before it ended."""
        if self.report is not None and self.report.time is not None:
            return self.report.time
        return self.end.at if self.end is not None else 0.0

    @property
    def ended_by_launcher(self) -> bool:
        """Whether it had not failed when the launcher ended the job."""
        reported = self.report is not None and self.report.time is not None
        return self.end is not None and self.end.by_launcher and not reported

    @property
    def has_failed(self) -> bool:
        """Whether it has failed by now, and the launcher has not ended it."""
        ended = self.end is not None and not self.ended_well
        return (ended or self.report is not None) and not self.ended_by_launcher

    @property
    def exit_code(self) -> int:
        """The launcher's exit code if this failure is the cause; 128 + signal for a signal, as in a shell."""
        status = self.end.status if self.end is not None else 0
        if status > 0:
            return status
        if self.report is not None:
            # The rank had raised already, and the launcher may have killed it before it had exited.
            return self.report.code
        return 128 - status if status else 1


def find_cause(failures: Iterable[RankState]) -> RankState:
    """Find the earliest failure that is no consequence; or else the earliest consequence, or the launcher's doing."""

    def order(failure: RankState) -> tuple[bool, bool, float, int]:
        consequence = failure.report is not None and failure.report.consequence
        noticed_late = NOTICE_DELAY_S if failure.report is None else 0.0
        return failure.ended_by_launcher, consequence, failure.failed_at - noticed_late, failure.number

    return min(failures, key=order)


def lacks_cause(ranks: Sequence[RankState]) -> bool:
    """Tell whether the failed ranks only say that another one has gone, which may be one that has not ended."""
    if any(rank.ended_well for rank in ranks):
        return False  # it has left them alone, and there is no other cause
    failed = [rank.report for rank in ranks if rank.end or rank.report]
    return all(report is not None and report.consequence for report in failed) and len(failed) < len(ranks)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_status(status: int) -> str:
    """``exit code 1``, or for the minus of a signal ``ended by signal 9 (SIGKILL)``."""
    return f"ended by signal {-status} ({signal_name(-status)})" if status < 0 else f"exit code {status}"


def describe_lost_agent(code: int, pid: int, host: str) -> tuple[str, int]:
    """Say why a job ended whose agent here ended with a code, or minus a signal; and the exit code that follows."""
    how = f"was ended by signal {-code} ({signal_name(-code)})" if code < 0 else f"failed (code {code})"
    return (
        f"phalanx: the process that starts and watches the ranks {how}; the job ended with it\n"
        f"  host {host}, pid {pid}; if nobody killed it, {OUT_OF_MEMORY_HINT}\n",
        128 - code if code < 0 else code,
    )


def failure_in_short(cause: RankState, host: str) -> str:
    """``rank 1 on h1 failed: ValueError: no data``, while the block about it cannot be printed yet."""
    return f"rank {cause.number} on {host} failed: {_why(cause)}"


def format_failure(
    cause: RankState,
    others: Iterable[RankState],
    *,
    ranks: int,
    host: str,
    started: float,
    log: str = "",
    last_lines: Sequence[str] | None = None,
    last: str = "",
    parted: Sequence[str] = (),
) -> str:
    """Format the block that is printed when a job fails.

    ``others`` failed, or were ended by the launcher, after the ``cause``. ``started`` is when all ranks were, ``log``
    the file that has its output, ``last_lines`` the end of that if it was not shown, ``last`` its last operation, and
    ``parted`` lines on how the ranks' calls differed.
    """
    report = cause.report
    reason = f": {_reason(report)}" if report is not None and _reason(report) else ""
    lines = [f"phalanx: rank {cause.number} of {ranks} failed{reason}"]
    elapsed = max(0.0, cause.failed_at - started)
    lines.append(f"  host {host}, pid {cause.pid}, {elapsed:.1f} s after the start, {_ending(cause)}")
    if last and report is None:  # else its traceback says where
        lines.append(f"  {last}")
    lines += [f"  {line}" for line in parted]
    if cause.asked:
        lines.append(f"  it was waiting for {cause.asked}")
    hint = _hint(cause, "above" if last_lines is None else "below")
    if hint:
        lines.append(f"  {hint}")
    if report is not None and report.hint:
        lines.append(f"  {report.hint}")
    room = max(1, min(_MOST_LINES, _MOST_OWN_LINES - 1 - len(lines)))
    if report is not None and report.traceback:
        lines += ["", report.traceback.rstrip("\n"), ""]
    if last_lines:
        lines += ["  the last lines of its output, which was not shown:", *(f"    {line}" for line in last_lines)]
    if log:
        lines.append(f"  its output is in {log}")
    lines += _aftermath(others, "" if report is None else f"{_THEN}{_reason(report)}", room)
    return "\n".join(lines).rstrip("\n") + "\n"


def _reason(report: Report) -> str:
    """The exception, by the first line of its text; of ``sys.exit`` the text that it was given, if any."""
    line = report.message.partition("\n")[0] if report.exited else report.summary
    return line.removesuffix(":") if "\n" in report.message else line  # what follows the colon is in the traceback


def _ending(cause: RankState) -> str:
    if cause.report is None and cause.end is not None and cause.end.status < 0:
        return describe_status(cause.end.status)
    return f"exit code {cause.exit_code}"


def _hint(cause: RankState, where: str) -> str:
    """Say what a user may think of first; ``where`` says where the output is."""
    report, end = cause.report, cause.end
    if report is not None and report.exited:
        said = "with this text" if report.message else f"without a text; if it printed a reason, that is {where}"
        return f"it called sys.exit {said}"
    if report is not None:
        return f"its traceback was printed by the script itself, {where}" if report.shown else ""
    if end is None or end.status >= 0:
        return f"it raised no Python exception; if it printed a reason, that is {where}"
    stack = f"the Python stack, if there is one, is {where}"
    if end.out_of_memory:
        killed = "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks"
    else:
        killed = f"another process killed it; if none did, {OUT_OF_MEMORY_HINT}"
    unhandled = "it does not handle this signal, which the launcher passes on to all ranks"
    hints: Mapping[int, str] = {
        signal.SIGKILL: killed,
        signal.SIGSEGV: f"native code accessed memory that it may not; {stack}",
        signal.SIGBUS: "memory could not be provided; if a DataLoader's workers have filled /dev/shm (df -h /dev/shm), "
        f"enlarge it (in Docker --shm-size=8g); {stack}",
        signal.SIGABRT: f"native code gave up; its message is {where}, and {stack}",
        signal.SIGFPE: f"native code divided by zero; {stack}",
        signal.SIGILL: f"native code was built for another processor; {stack}",
        signal.SIGTERM: "another process, not the launcher, asked it to end",
        signal.SIGINT: "another process, not the launcher, interrupted it",
        signal.SIGUSR1: unhandled,
        signal.SIGUSR2: unhandled,
        signal.SIGXCPU: "it has used up its limit of processor time (ulimit -t)",
    }
    return hints.get(-end.status, "")


def _aftermath(others: Iterable[RankState], known: str, most: int) -> list[str]:
    """Write a line for all ranks that ended alike: failures in the order of their times, then what the launcher ended.

    ``known`` is what it would say of the rank that the block is about. At most ``most`` lines are spent on ranks.
    """
    groups: dict[str, list[RankState]] = {}
    for failure in sorted(others, key=lambda other: (other.ended_by_launcher, other.failed_at)):
        report = failure.report
        # Each rank may say in words of its own that another one has gone: one of them is enough.
        alike = report.type if report is not None and report.consequence else _aftermath_of(failure)
        groups.setdefault(alike, []).append(failure)
    lines = []
    for failures in groups.values():
        ranks = format_named("rank", [failure.number for failure in failures])
        text = _aftermath_of(failures[0])
        if text == known:
            text = "then failed with the same error"
        elif any(_aftermath_of(failure) != text for failure in failures):
            text = f"then failed, rank {failures[0].number} with {_why(failures[0])}"
        lines.append(f"  {ranks} {text}")
    if len(lines) > most:
        lines = [*lines[:most], f"  and {len(lines) - most} more kinds of failure after that"]
    return lines


def _aftermath_of(failure: RankState) -> str:
    return "ended by the launcher" if failure.ended_by_launcher else f"{_THEN}{_why(failure)}"


def _why(failure: RankState) -> str:
    return (_reason(failure.report) if failure.report is not None else "") or _ending(failure)
