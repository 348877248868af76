"""The rank's process, as its keeper holds it: signalled, asked for its report, and reaped with all its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from phalanx.launch.job.options import Diagnosis
from phalanx.launch.mpi.streams import Streams
from phalanx.launch.output.failure import signal_name
from phalanx.launch.rank.operations import last_operation
from phalanx.launch.rank.trace import Stage, Trace
from phalanx.launch.relay.observer import Observer
from phalanx.system import processes

__all__ = ["Child"]

# How long it may take to write its stack.
_STACK_S = 0.2
# The same if the launcher wants to say where it is: a rank that is stopped does not write, and others may need a core.
_STACK_FOR_LAUNCHER_S = 1.0


class Child:
    """A rank that has been forked and not been reaped.

    Args:
        pid: its process id, which is also its group's.
        streams: its standard streams.
        report: the memfd into which it writes why it failed.
        trace: the memfd into which it writes its stack.
        grace_s: how long it may go on after the MPI launcher has ended the job, in seconds.
        say: sends a message to the relay.
        rank: its rank in the world.
        diagnosis: when it is said that it waits; None if that is not to be said.

    Attributes:
        pid, streams, grace_s: as given.
        observer: looks at it for the launcher.
        by_others: whether it is being ended because the MPI launcher wants that.
        reported: whether a report of it was sent.
    """

    def __init__(
        self,
        pid: int,
        streams: Streams,
        report: int,
        trace: Trace,
        grace_s: float,
        say: Callable[..., None],
        rank: int,
        diagnosis: Diagnosis | None,
    ) -> None:
        self.pid = pid
        self.observer = Observer(trace, [rank], diagnosis, say)
        self.observer.begin([pid])
        self.streams = streams
        self.grace_s = grace_s
        self.by_others = False
        self._rank = rank
        self._report = report
        self._trace = trace
        self._sent = b""
        self._say = say
        self._kill_at: float | None = None
        self._patience_s = 0.0
        self._asked_by: set[int] = set()

    @property
    def reported(self) -> bool:
        return bool(self._sent)

    def own_descriptors(self) -> list[int]:
        """The keeper's descriptors for it."""
        return [self._report, self._trace.descriptor, *self.streams.own_ends()]

    def signal(self, signum: int) -> None:
        """Signal it."""
        if signum and not processes.is_ending(self.pid):
            self._asked_by.add(signum)
        processes.send_to_group(self.pid, signum)
        # A stopped process handles no signal but SIGKILL.
        processes.send_to_group(self.pid, signal.SIGCONT)

    def end(self, signum: int, patience_s: float) -> None:
        """Signal it, and kill it ``patience_s`` seconds later."""
        self.signal(signum)
        until = time.monotonic() + patience_s
        if self._kill_at is None or until < self._kill_at:
            # A rank that has failed by itself is not asked, and its time does not depend on the user's grace.
            self._kill_at, self._patience_s = until, patience_s if signum else 0.0

    def send_stack(self) -> None:
        """Have it write its stack, and send that to the relay."""
        self._trace.ask({0: self.pid}, _STACK_S)
        for text in self._trace.take([0]).values():
            self._say(event="stack", text=text)

    def examine(self, question: dict[str, Any]) -> None:
        """Answer a question of the launcher's about it."""
        parts = [0] if self._rank in question["of"] else []
        self._trace.ask(dict.fromkeys(parts, self.pid), _STACK_FOR_LAUNCHER_S)
        taken = self._trace.take(parts)
        self.observer.answer(question, {self._rank: taken[0]} if taken else {})

    @property
    def kill_at(self) -> float | None:
        """When :meth:`kill_if_due` has something to do; None for never."""
        return self._kill_at

    def kill_if_due(self, now: float) -> None:
        """Kill it, if the time it was given is over."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            if self._patience_s:
                self._say(event="overdue", patience_s=self._patience_s)
            self.signal(signal.SIGKILL)

    def send_report(self) -> None:
        """Send the report that it has written about its failure, unless that has been sent."""
        data = os.pread(self._report, os.fstat(self._report).st_size, 0)
        if not data or data == self._sent:
            return
        with contextlib.suppress(ValueError):  # it is not complete yet
            report: dict[str, Any] = json.loads(data)
            when = (report.get("phalanx") or {}).get("time")
            age = 0.0 if when is None else max(0.0, time.monotonic() - when)
            self._say(event="reported", age=age, report=report)
            self._sent = data

    def last_operation(self, when: float) -> str:
        """Its last operation, in words, as it was at this time; empty if it has recorded none."""
        return last_operation(self._trace, 0, when)

    def ended_late(self, status: int) -> str:
        """That a signal has ended it after its script, in words; empty if not so, or if it has said why it failed.

        It is a consequence if another rank has failed before. A rank that leaves in order waits in MPI_Finalize for the
        others. If one of them aborts the job meanwhile, MPICH reads from a connection that is closed by then, and goes
        on with what it has not read.
        """
        if status >= 0 or self.reported or self._trace.stage(0) is not Stage.ENDED:
            return ""
        name = signal_name(-status)
        return f"{name} ended it after its script had come to its end: in MPI_Finalize, or in another library's end"

    def ended_by_itself(self, status: int) -> bool:
        """Whether the rank, which ended like this, had begun to end before this keeper first asked it to.

        Then it may be what made the MPI launcher, or ``phalanx run``, end the others: they notice the end of a rank
        earlier than its parent does.
        """
        # Nobody can handle SIGKILL, so a rank that was sent no other signal and ended in another way was quicker.
        return not self._asked_by or (self._asked_by == {signal.SIGKILL} and status != -signal.SIGKILL)

    def reap(self) -> tuple[int, float] | None:
        """If the rank has ended, end and reap all its descendants, and return how and when it ended.

        Returns:
            The exit code, or minus the signal that ended it, and the time of ``time.monotonic``. None while it runs.
        """
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            self._reap_orphans()
            return None
        now = time.monotonic()
        os.waitpid(self.pid, 0)
        self.send_report()
        processes.end_descendants()
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status, now

    def _reap_orphans(self) -> None:
        for pid in processes.children_of(os.getpid()):
            if pid != self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
