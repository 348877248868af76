"""The process that the user started: it prints the ranks' output, passes signals on, and reports how the job ended.

It never imports torch and runs no thread: one selector waits for the ranks' pipes, for the zygote's messages and for
signals. It does not wait for the end of a pipe, because any process that a rank has started may hold the pipe open. A
rank has ended when the zygote says so; the output that it wrote until then is read and printed.

The supervisor decides how the job ends, and the zygote carries that out, because only the parent of a process can be
sure that a process id has not been given to another one:

- A rank fails. For a short settling time the other ranks may report errors of their own, so that the cause can be
  distinguished from its consequences. Then they are asked to end (SIGTERM) and, after a grace, killed.
- SIGINT, SIGTERM or SIGHUP arrives. It is passed on, and after the grace the ranks are killed; another SIGINT kills
  them at once. SIGUSR1 and SIGUSR2 are passed on and end nothing; SIGQUIT prints where the ranks are.
- Nothing reads the output any more. The job ends as after SIGTERM, and silently, like any other tool in a pipe.
- The zygote is killed. The kernel kills the ranks, and the supervisor kills all processes that they had started.
- The zygote is stopped, and hides the end of a rank. It is continued (``zygote_watch.py``).

When ranks run on other hosts, or an MPI launcher starts them, a relay (``launch/relays.py``) takes the zygote's place
and sends the same messages. The rank table is then printed later, when the hosts have been reported.

All that is known of an attempt is in one object, so nothing of it is left when the next one begins (``--restarts``).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from phalanx.errors import OUT_OF_MEMORY_HINT, LaunchError
from phalanx.launch.conclusion import Ended, HandOver, conclude, conclude_attempt, failed, why_it_ends
from phalanx.launch.failed_calls import FailedCalls
from phalanx.launch.hang_watch import HangWatch
from phalanx.launch.job.job import Job
from phalanx.launch.output.failure import (
    End,
    Failure,
    collect_failures,
    describe_lost_zygote,
    describe_status,
    lacks_cause,
)
from phalanx.launch.output.log_files import LogFiles
from phalanx.launch.output.logs import Console, Sink
from phalanx.launch.output.report import Report, read_report
from phalanx.launch.output.streams import RankStream, StreamReader, last_lines, open_streams
from phalanx.launch.patience import Patience
from phalanx.launch.places import Places
from phalanx.launch.rank.descriptors import Descriptors, release_input
from phalanx.launch.rank.operations import last_operation
from phalanx.launch.running.jobs import Description
from phalanx.launch.sight import Sight, SightElsewhere, SightHere
from phalanx.launch.zygote_watch import ZygoteWatch
from phalanx.system import processes
from phalanx.topology.table import RankRow, format_rank_table

__all__ = ["HANDLED", "Supervisor"]

# How long the failures of other ranks are collected after the first one, before the rest is ended.
SETTLE_S = 0.1
# How much longer if all that is known are consequences of another rank's end. The kernel shows that end to the other
# ranks at once, and to the rank's parent when it has taken the process apart, which takes long if that had much memory.
CAUSE_S = 1.0
# How long a reader of the output that has stopped reading may delay the launcher once the job is over.
STALLED_READER_S = 1.0
# How long the keepers of a killed relay may take to end their ranks.
KEEPERS_S = 2.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: The signals that the launcher handles while ranks run.
HANDLED = (*_ENDING, *_HANDED_ON, signal.SIGQUIT)


@dataclass
class _Rank:
    """A rank: its output, and what the zygote has said about it so far."""

    streams: list[RankStream]
    pid: int | None = None
    end: End | None = None


class Supervisor:
    """The supervisor during one attempt.

    Args:
        job: the job.
        descriptors: those of this attempt.
        logs: the ranks' files of this attempt.
        before: the supervisor of the attempt before; None in the first.

    Attributes:
        zygote: the process id of the zygote, or of the relay in its place; 0 while there is none.
        interrupted: the signal with which somebody has ended the job; None if nobody has.
    """

    def __init__(self, job: Job, descriptors: Descriptors, logs: LogFiles, before: Supervisor | None = None) -> None:
        self.job = job
        self.logs = logs
        self.descriptors = descriptors
        self.description: Description = before.description if before is not None else Description(job)
        self.zygote: int = before.zygote if before is not None else 0
        self.over = False
        self.started_at: float | None = None
        self.interrupted: int | None = None
        self.ending = False
        self.settle_until: float | None = None
        self.cause_until = 0.0
        self.watch = ZygoteWatch("the ranks", job.host, range(job.ranks))
        self.early_signals: list[int] = []
        self.overdue: dict[float, list[int]] = {}
        self.places = Places(descriptors.trace, job.ranks, runs_python=job.target.is_python)
        self.refusal: tuple[str, int] | None = None
        self.rows = job.rows()
        # A program that became the launcher by exec may have had children before; they are not this job's.
        self.strangers: list[int] = before.strangers if before is not None else processes.children_of(os.getpid())
        self.wakeup = os.pipe()
        self.selector = selectors.DefaultSelector()
        self.reader = StreamReader(self.selector)
        self.console: Console = (
            before.console if before is not None else Console(Sink(1, os.environ), Sink(2, os.environ))
        )
        if any(map(job.keeps_terminal, range(job.ranks))):
            # The rank writes to the terminal itself, so nothing is drawn over what it writes.
            self.console.out.terminal = self.console.err.terminal = False
        pipes = ((ends.out_read, ends.err_read) for ends in descriptors.ranks)
        self.ranks = [_Rank(streams) for streams in open_streams(job, pipes, self.console, logs)]
        sight: Sight = SightHere(descriptors.trace, lambda: self.ranks, self._tell)
        if not job.is_local:
            sight = SightElsewhere(lambda: self.ranks, lambda: [row.host for row in self.rows], self._tell)
        self.hangs = HangWatch(job, sight, self.console.say)
        self.failed_calls = FailedCalls(job, descriptors.trace)
        self.patience = Patience(self.console.say)

    def listen_to_signals(self) -> None:
        """Take over the signals. One that would end the job and that the launcher was started to ignore stays ignored.

        nohup has SIGHUP ignored. A shell that starts the launcher with & has SIGINT ignored, and SIGQUIT too, which
        here ends nothing: it asks where the ranks are.
        """
        for descriptor in self.wakeup:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        for signum in HANDLED:
            if signum == signal.SIGQUIT or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)

    def forget(self) -> None:
        """In the zygote: close the supervisor's own descriptors."""
        self.selector.close()
        self.watch.close()
        self.logs.close()
        self.description.close()
        for descriptor in self.wakeup:
            os.close(descriptor)

    def take_over(self, before: Supervisor) -> None:
        """Handle signals from here on in the place of the supervisor of the attempt before, which is over."""
        self.listen_to_signals()
        if before.interrupted is not None:
            self.interrupted = before.interrupted
            self._dismiss_zygote()
        before.selector.close()
        for descriptor in before.wakeup:
            os.close(descriptor)

    def run(self, hand_over: HandOver | None) -> int | None:
        """Watch this attempt to its end.

        Args:
            hand_over: see :func:`phalanx.launch.attempts.launch`.

        Returns:
            The launcher's exit code; None if a rank has failed and the next attempt is to start. Then no process of
            this one is left, and a zygote of this host waits for the order to start that.
        """
        if self.job.attempt.is_last and not os.isatty(0):
            # Only then does its writer notice when the rank that reads it ends.
            release_input()
        self.selector.register(self.descriptors.supervisor, selectors.EVENT_READ, self._on_zygote)
        self.selector.register(self.wakeup[0], selectors.EVENT_READ, self._on_wakeup)
        self.selector.register(self.watch, selectors.EVENT_READ, lambda: None)
        for rank in self.ranks:
            self.reader.register(rank.streams)
        if self.job.is_local:
            self._introduce()
        self.descriptors.supervisor.send(do="start")
        while self.zygote and not self.over:
            self._turn()
        self.watch.close()
        self.console.finish()
        self.hangs.leave(self.failed_calls.recordings, [row.host for row in self.rows])
        ended = self._ended()
        if not self.job.attempt.is_last and failed(ended, self.console):
            conclude_attempt(self.job, ended, self.console)
            return None
        if self.over:
            self._dismiss_zygote()
        code = conclude(self.job, ended, self.console, hand_over)
        signal.set_wakeup_fd(-1)
        return code

    def _dismiss_zygote(self) -> None:
        """End a zygote that waits for the order to start another attempt, and has no process left to end."""
        pid, self.zygote = self.zygote, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _introduce(self, notes: Iterable[str] = ()) -> None:
        job, err = self.job, self.console.err
        if job.svg and not job.attempt.number:
            self._draw(job.svg)
        if job.quiet or job.attempt.number:
            return
        width = err.columns() if err.terminal else None
        backend = f"started by {job.mpi.title}" if job.mpi is not None else None
        err.write(format_rank_table(self.rows, title=job.title(), backend=backend, width=width, color=err.color))
        for warning in [*job.warnings(), *notes]:
            self.console.say(f"note: {warning}")

    def _draw(self, path: str) -> None:
        # Not imported at the top, because most jobs draw nothing.
        from phalanx.topology.placement import write_placement

        try:
            write_placement(path, self.rows)
        except LaunchError as error:
            self.console.say(f"warning: {error}; the job goes on without the picture")

    # One turn of the event loop.

    def _turn(self) -> None:
        timeouts = [part.due_in_s() for part in (self.hangs, self.watch, self.patience)]
        settles_in_s = None if self.settle_until is None else max(0.0, self.settle_until - time.monotonic())
        known = [timeout for timeout in (*timeouts, self.console.redraw_in_s(), settles_in_s) if timeout is not None]
        for key, _ in self.selector.select(min(known) if known else None):
            if isinstance(key.data, RankStream):
                self.reader.read(key.data)
            else:
                key.data()
        self.console.redraw()
        if self.started_at is not None and not self.ending:
            self.hangs.look()
        self.watch.act(self.zygote)
        if not (self.console.out.closed or self.console.err.closed):
            self.patience.look(self._unended, self._why_it_ends)
        if (self.console.out.closed or self.console.err.closed) and not self.ending:
            self._order(signal.SIGTERM)
        if self.logs.faults and not self.logs.said:
            self.logs.said = True
            self.console.say(f"warning: {self.logs.faults[0]}; the job goes on, and lines are lost while that lasts")
        if self.settle_until is not None and (time.monotonic() >= self.settle_until or self._all_ended()):
            self.settle_until = None
            if not self.ending and time.monotonic() < self.cause_until and self._awaits_the_cause():
                self.settle_until = time.monotonic() + SETTLE_S
            elif not self.ending:
                self._order(signal.SIGTERM, spare=self._winding_down())

    # The zygote's messages.

    def _on_zygote(self) -> None:
        message = self.descriptors.supervisor.receive()
        if message is None:
            self._on_zygote_gone()
        elif message["event"] == "started":
            self.started_at = message["time"]
            for rank, pid in zip(self.ranks, message["pids"], strict=True):
                rank.pid = pid
            if self.job.is_local:
                self.watch.begin(message["pids"])
            hosts = [row.host for row in self.rows]
            self.logs.note_start(self.job, hosts, message["pids"])
            self.description.add_ranks(message["pids"], hosts, self.descriptors.trace.descriptor)
            if self.interrupted is not None:
                self._order(self.interrupted)
            for signum in self.early_signals:
                self._hand_on(signum)
        elif message["event"] == "overdue":
            self.overdue.setdefault(message["patience_s"], []).append(message["rank"])
        elif message["event"] == "stacks":
            if message.get("unasked") and self.interrupted is None:
                return  # written after the answer that it was for
            self.places.add(message.get("stacks"))
            if message.get("watch"):
                self.hangs.take_stacks(self.places.take())
            elif self.interrupted is None and (text := self.places.answer(message.get("late", ()))):
                self.console.say(text)
        elif message["event"] == "recorded":
            self.failed_calls.hear(message)
        elif message["event"] in ("waits", "examined"):
            if not self.ending:
                self.hangs.hear(message)
        elif message["event"] == "exited":
            by_launcher = (self.ending or message.get("by_others", False)) and not message.get("by_itself", False)
            self._on_exit(
                message["rank"], End(message["status"], message["time"], by_launcher, message["out_of_memory"])
            )
        elif message["event"] == "reported":
            self._settle()
        elif message["event"] == "over":
            self.over = True
        elif message["event"] == "placed":
            self.rows = [RankRow(**row) for row in message["rows"]]
            self._introduce(message["notes"])
            if self.interrupted is None:
                self.descriptors.supervisor.send(do="go")
        elif message["event"] == "said":
            if not self.job.quiet:
                self.console.write(self.console.err, f"{message['text']}\n")
        elif message["event"] == "refused":
            self.refusal = message["text"], message["code"]
        elif message["event"] == "store lost" and not self.ending:
            self.console.say(
                "the process that hosts torch's store has ended; ranks that still want to meet will fail. "
                f"If nobody killed it, {OUT_OF_MEMORY_HINT}"
            )

    def _on_exit(self, rank: int, end: End) -> None:
        self.ranks[rank].end = end
        self.watch.told(rank)
        self.reader.drain(self.ranks[rank].streams)
        self.logs.note_end(rank, describe_status(end.status), self._report(rank))
        if end.status != 0:
            self._settle()

    def _settle(self) -> None:
        """A rank has failed: give the others a moment to report what they know, then end them."""
        if not self.ending and self.settle_until is None:
            self.settle_until = time.monotonic() + SETTLE_S
            self.cause_until = self.settle_until + CAUSE_S

    def _on_zygote_gone(self) -> None:
        # The ranks closed their copies of the zygote's end, so the end of this socket is the end of the zygote.
        self.selector.unregister(self.descriptors.supervisor)
        self.descriptors.supervisor.close()
        pid, self.zygote = self.zygote, 0  # first: a signal's handler may run as soon as the process is gone
        _, status = os.waitpid(pid, 0)
        if not self.job.is_local:
            # The keepers, or this host's agent, end their ranks and tidy up after a killed relay.
            processes.await_children(KEEPERS_S, but=self.strangers)
        # Processes that the zygote could not end have become children of this one, which is a subreaper.
        processes.end_descendants(but=self.strangers)
        for rank in self.ranks:
            self.reader.drain(rank.streams)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and self.interrupted is None:
            self.refusal = self.watch.refusal or describe_lost_zygote(code, pid, self.job.host, "the ranks")

    # Ending.

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup[0], 4096)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        # The event loop may be waiting for a reader that has stopped, so the handler acts by itself.
        if signum in _HANDED_ON or signum == signal.SIGQUIT:
            self._hand_on(signum)
            return
        again = self.interrupted is not None
        if again and signum != signal.SIGINT:
            # Systems that end a job ask more than once: a shell and the kernel both send SIGHUP, for one terminal.
            return
        if not again:
            self.interrupted = signum
            self.settle_until = None
            self.console.out.deadline = self.console.err.deadline = time.monotonic() + STALLED_READER_S
        if self.started_at is not None or not self.job.is_local:
            self._order(signal.SIGKILL if again else signum)
        elif self.zygote and (again or not processes.children_of(self.zygote)):
            os.kill(self.zygote, signal.SIGKILL)  # no rank runs yet, and it reads no order while it imports torch
        else:
            # Its message that ranks have been started is on its way, and they are given this order then.
            self.watch.allow(self.job.patience_s(signum))

    def _order(self, signum: int, spare: list[int] | None = None) -> None:
        self.ending = True
        asked = self.interrupted is not None and signum != signal.SIGKILL
        patience_s = 0.0 if signum == signal.SIGKILL else self.job.patience_s(signum if asked else None)
        self._tell(do="end", signal=int(signum), grace_s=patience_s, spare=spare or [], where=asked)
        self.watch.allow(patience_s)
        self.patience.begin(patience_s)

    def _unended(self) -> list[int]:
        return [number for number, rank in enumerate(self.ranks) if rank.end is None]

    def _why_it_ends(self) -> str:
        said, _ = self.refusal or ("", 0)
        return why_it_ends(self.interrupted, said, self._failures(), [row.host for row in self.rows])

    def _tell(self, **order: Any) -> None:
        """Send the zygote an order, and continue it in case somebody has stopped it."""
        self.descriptors.supervisor.send(**order)
        if self.zygote:
            os.kill(self.zygote, signal.SIGCONT)

    def _hand_on(self, signum: int) -> None:
        if self.started_at is None:
            if signum == signal.SIGQUIT and not (self.job.is_local and processes.children_of(self.zygote)):
                self.console.say("SIGQUIT: the ranks have not been started yet")
            else:
                self.early_signals.append(signum)  # the message that ranks have been started may be on its way
        elif signum == signal.SIGQUIT:
            self.places.ask()
            self._tell(do="stacks")
        else:
            self._tell(do="signal", signal=int(signum))

    def _all_ended(self) -> bool:
        return all(rank.end is not None for rank in self.ranks)

    def _report(self, rank: int) -> Report | None:
        return read_report(self.descriptors.ranks[rank].report)

    def _awaits_the_cause(self) -> bool:
        return lacks_cause([(rank.end, self._report(number)) for number, rank in enumerate(self.ranks)])

    def _winding_down(self) -> list[int]:
        """The ranks whose script has failed already: they are not signalled, so that their exit handlers can finish."""
        reports = {rank: self._report(rank) for rank in range(self.job.ranks)}
        return [rank for rank, report in reports.items() if report is not None and report.time is not None]

    def _failures(self) -> list[Failure]:
        return collect_failures((rank.pid, rank.end, self._report(number)) for number, rank in enumerate(self.ranks))

    def _ended(self) -> Ended:
        trace = self.descriptors.trace
        return Ended(
            failures=self._failures(),
            ends=[rank.end for rank in self.ranks],
            asked_at=self.patience.begun_at,
            hosts=[row.host for row in self.rows],
            started_at=self.started_at,
            interrupted=self.interrupted,
            stacks=self.places.take(),
            overdue=self.overdue,
            refusal=self.refusal,
            stages=[trace.stage(rank) for rank in range(self.job.ranks)],
            asked=[trace.asked(rank) for rank in range(self.job.ranks)],
            last_operation=partial(last_operation, trace),
            parted=lambda rank, at, ended: self.failed_calls.parted(rank, at, self.hangs.stopped_at(at), ended),
            last_lines={
                number: last_lines(rank.streams)
                for number, rank in enumerate(self.ranks)
                if not self.job.output.shows(number) and not self.job.keeps_terminal(number)
            },
        )
