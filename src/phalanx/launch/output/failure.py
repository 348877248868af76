"""Find the rank that failed first, from exit codes and the ranks' own reports.

When one rank fails, the others soon fail because of it, and the kernel reports their ends in any order. The first is
told by the time at which its exception left the script, or, of a rank that was killed, at which the launcher noticed
its end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.errors import OUT_OF_MEMORY_HINT
from phalanx.system.foreign_values import checked

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = [
    "End",
    "RankState",
    "Report",
    "as_report",
    "describe_lost_agent",
    "describe_status",
    "find_cause",
    "lacks_cause",
    "signal_name",
]

# The kernel closes a dying process's sockets before it notifies the parent. So a peer may raise an error because of the
# death slightly before the launcher notices the death.
NOTICE_DELAY_S = 0.02


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
    """The end of a rank."""

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
    calls: int = 0  # how often it has called ``should_stop``, as its agent said when it ended

    @property
    def ended_well(self) -> bool:
        """Tell whether it has ended with exit code 0."""
        return self.end is not None and self.end.status == 0

    @property
    def failed_at(self) -> float:
        """The time of its failure; its exit handlers may have run for long before it ended."""
        if self.report is not None and self.report.time is not None:
            return self.report.time
        return self.end.at if self.end is not None else 0.0

    @property
    def ended_by_launcher(self) -> bool:
        """Tell whether it had not failed when the launcher ended the job."""
        reported = self.report is not None and self.report.time is not None
        return self.end is not None and self.end.by_launcher and not reported

    @property
    def has_failed(self) -> bool:
        """Return whether it has failed by now, and the launcher has not ended it."""
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
