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

When ranks run on other hosts, or an MPI launcher starts them, a relay (``launch/relays.py``) takes the zygote's place
and sends the same messages. The rank table is then printed later, when the hosts have been reported.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from phalanx.errors import OUT_OF_MEMORY_HINT
from phalanx.launch.conclusion import Ended, conclude
from phalanx.launch.job.job import Job
from phalanx.launch.job.share import Share
from phalanx.launch.output.failure import End, collect_failures, signal_name
from phalanx.launch.output.logs import Console, LineAssembler, Sink, make_prefixes
from phalanx.launch.output.report import Report, read_report
from phalanx.launch.output.stacks import format_stacks
from phalanx.launch.rank.descriptors import Descriptors, open_descriptors, open_store, release_input
from phalanx.launch.rank.start import RankStart
from phalanx.launch.zygote import Inheritance, serve
from phalanx.system import processes
from phalanx.system.interfaces import check_reachable
from phalanx.system.limits import check_limits, count_oom_kills, machine_limits, raise_file_limit
from phalanx.topology.table import RankRow, format_rank_table
from phalanx.words import format_named

__all__ = ["launch"]

BLOCK = 1 << 16
# The most that an ended rank's pipe may still hold; more than this was written by another process.
LARGEST_REMAINDER = 1 << 20
# How long the failures of other ranks are collected after the first one, before the rest is ended.
SETTLE_S = 0.1
# How long a reader of the output that has stopped reading may delay the launcher once the job is over.
STALLED_READER_S = 1.0
# How long the keepers of a killed relay may take to end their ranks.
KEEPERS_S = 2.0
# How much longer than the grace the zygote, or the relay, may take to report the end of every rank.
SILENCE_S = 20.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_HANDLED = (*_ENDING, *_HANDED_ON, signal.SIGQUIT)


@dataclass
class _Stream:
    descriptor: int
    sink: Sink
    lines: LineAssembler


@dataclass
class _Rank:
    """A rank: its output, and what the zygote has said about it so far."""

    streams: list[_Stream]
    pid: int | None = None
    end: End | None = None


def launch(job: Job) -> RankStart | int:
    """Run a job.

    Returns:
        In the process that called: the exit code. In each rank, which is a fork of it: its start, to be
        handed to :func:`phalanx.launch.rank.start.become` at the top of the interpreter.

    Raises:
        LaunchError: the machine has no room for that many ranks. Nothing has been started.
    """
    # getsignal returns None for a handler that Python did not install and cannot put back.
    handlers: dict[int, Any] = {
        signum: signal.getsignal(signum) or signal.SIG_DFL for signum in (*_HANDLED, signal.SIGCHLD)
    }
    file_limit = raise_file_limit()
    check_limits(job.ranks, machine_limits(python=job.target.is_python, forked=job.is_local))
    if job.ranks > 1 or job.target.is_python:
        check_reachable(job.address)
    descriptors = open_descriptors(job.ranks, job.run_id)
    listener = open_store(job.address)
    # Text that is still in the buffers would be copied by the fork, and printed twice.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    processes.adopt_orphans()
    supervisor = _Supervisor(job, descriptors)
    supervisor.listen_to_signals()
    pid = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        supervisor.forget()
        if not job.is_local:
            # Not imported at the top, because most jobs need no relay.
            from phalanx.launch.relays import be_relay

            be_relay(job, descriptors, listener, handlers)
        share = Share(range(job.ranks), job.rows(), listener.getsockname()[1], listener, os.isatty(0))
        return serve(job, share, descriptors, Inheritance(handlers, file_limit), pid)
    descriptors.keep_supervisor_ends()
    listener.close()
    return supervisor.run(zygote)


class _Supervisor:
    def __init__(self, job: Job, descriptors: Descriptors) -> None:
        self.job = job
        self.descriptors = descriptors
        self.zygote = 0
        self.started_at: float | None = None
        self.interrupted: int | None = None
        self.ending = False
        self.settle_until: float | None = None
        self.give_up_at: float | None = None
        self.early_signals: list[int] = []
        self.overdue: dict[float, list[int]] = {}
        self.stacks: dict[int, str] = {}
        self.refusal: tuple[str, int] | None = None
        self.oom_kills = count_oom_kills()
        self.rows = job.rows()
        # A program that became the launcher by exec may have had children before; they are not this job's.
        self.strangers = processes.children_of(os.getpid())
        self.wakeup = os.pipe()
        self.selector = selectors.DefaultSelector()
        self.console = Console(Sink(1, os.environ), Sink(2, os.environ))
        if any(map(job.keeps_terminal, range(job.ranks))):
            # The rank writes to the terminal itself, so nothing is drawn over what it writes.
            self.console.out.terminal = self.console.err.terminal = False
        self.ranks = self._make_ranks()

    def _make_ranks(self) -> list[_Rank]:
        console, count = self.console, self.job.ranks
        nothing = [b""] * count
        out_prefixes = make_prefixes(count, color=console.out.color) if self.job.prefix else nothing
        err_prefixes = make_prefixes(count, color=console.err.color) if self.job.prefix else nothing
        ranks = []
        for rank, ends in enumerate(self.descriptors.ranks):
            out = _Stream(ends.out_read, console.out, LineAssembler(out_prefixes[rank]))
            err = _Stream(ends.err_read, console.err, LineAssembler(err_prefixes[rank]))
            ranks.append(_Rank([out, err]))
        return ranks

    def listen_to_signals(self) -> None:
        """Take over the signals. A signal that the launcher was started to ignore, as by nohup, stays ignored."""
        for descriptor in self.wakeup:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        for signum in _HANDLED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)

    def forget(self) -> None:
        """In the zygote: close the supervisor's own descriptors."""
        self.selector.close()
        for descriptor in self.wakeup:
            os.close(descriptor)

    def run(self, zygote: int) -> int:
        """Watch the job to its end; return the launcher's exit code."""
        self.zygote = zygote
        if not os.isatty(0):
            # Only then does its writer notice when the rank that reads it ends.
            release_input()
        self.selector.register(self.descriptors.supervisor, selectors.EVENT_READ, self._on_zygote)
        self.selector.register(self.wakeup[0], selectors.EVENT_READ, self._on_wakeup)
        for rank in self.ranks:
            for stream in rank.streams:
                self.selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        if self.job.is_local:
            self._introduce()
        self.descriptors.supervisor.send(do="start")
        while self.zygote:
            self._turn()
        code = self._conclude()
        signal.set_wakeup_fd(-1)
        return code

    def _introduce(self, notes: Iterable[str] = ()) -> None:
        job, err = self.job, self.console.err
        if job.quiet:
            return
        width = err.columns() if err.terminal else None
        backend = f"started by {job.mpi.title}" if job.mpi is not None else None
        err.write(
            format_rank_table(self.rows, title=job.title(), backend=backend, width=width, color=err.color).encode()
        )
        for warning in [*job.warnings(), *notes]:
            self.console.say(f"note: {warning}")

    # One turn of the event loop.

    def _turn(self) -> None:
        timeouts = [self.console.redraw_in_s()]
        due = [when for when in (self.settle_until, self.give_up_at) if when is not None]
        if due:
            timeouts.append(max(0.0, min(due) - time.monotonic()))
        known = [timeout for timeout in timeouts if timeout is not None]
        for key, _ in self.selector.select(min(known) if known else None):
            if isinstance(key.data, _Stream):
                self._read(key.data)
            else:
                key.data()
        self.console.redraw()
        if self.give_up_at is not None and time.monotonic() >= self.give_up_at:
            # It is stopped, or hangs; without it the kernel ends the ranks.
            self.give_up_at = None
            os.kill(self.zygote, signal.SIGKILL)
        if (self.console.out.closed or self.console.err.closed) and not self.ending:
            self._order(signal.SIGTERM)
        if self.settle_until is not None and (time.monotonic() >= self.settle_until or self._all_ended()):
            self.settle_until = None
            if not self.ending:
                self._order(signal.SIGTERM, spare=self._winding_down())

    def _read(self, stream: _Stream) -> int:
        """Read and print one block; return its length, 0 when there is nothing (left)."""
        if stream.descriptor < 0:
            # The zygote reported the rank's end in this same turn, and then the stream was drained and closed.
            return 0
        try:
            data = os.read(stream.descriptor, BLOCK)
        except BlockingIOError:
            return 0
        if data:
            lines = stream.lines.feed(data)
            if lines:
                # If a line of this stream was shown live, it is one of these lines now.
                self.console.show(stream.sink, b"", stream)
            self.console.write(stream.sink, lines)
            self.console.show(stream.sink, stream.lines.live(), stream)
        else:
            self._close(stream)
        return len(data)

    def _close(self, stream: _Stream) -> None:
        if stream.descriptor < 0:
            return
        self.selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        stream.descriptor = -1
        self.console.show(stream.sink, b"", stream)
        self.console.write(stream.sink, stream.lines.finish())

    def _drain(self, rank: _Rank) -> None:
        for stream in rank.streams:
            taken = 0
            while stream.descriptor >= 0 and taken < LARGEST_REMAINDER:
                length = self._read(stream)
                if not length:
                    break
                taken += length
            self._close(stream)

    # The zygote's messages.

    def _on_zygote(self) -> None:
        message = self.descriptors.supervisor.receive()
        if message is None:
            self._on_zygote_gone()
        elif message["event"] == "started":
            self.started_at = message["time"]
            for rank, pid in zip(self.ranks, message["pids"], strict=True):
                rank.pid = pid
            if self.interrupted is not None:
                self._order(self.interrupted)
            for signum in self.early_signals:
                self._tell(do="signal", signal=signum)
        elif message["event"] == "overdue":
            self.overdue.setdefault(message["patience_s"], []).append(message["rank"])
        elif message["event"] == "stacks":
            self._show_stacks(message.get("stacks"), message.get("late", ()))
        elif message["event"] == "exited":
            by_launcher = self.ending or message.get("by_others", False)
            self._on_exit(self.ranks[message["rank"]], End(message["status"], message["time"], by_launcher))
        elif message["event"] == "reported":
            self._settle()
        elif message["event"] == "placed":
            self.rows = [RankRow(**row) for row in message["rows"]]
            self._introduce(message["notes"])
            if self.interrupted is None:
                self.descriptors.supervisor.send(do="go")
        elif message["event"] == "said":
            if not self.job.quiet:
                self.console.write(self.console.err, f"{message['text']}\n".encode(errors="backslashreplace"))
        elif message["event"] == "refused":
            self.refusal = message["text"], message["code"]
        elif message["event"] == "store lost" and not self.ending:
            self.console.say(
                "the process that hosts torch's store has ended; ranks that still want to meet will fail. "
                f"If nobody killed it, {OUT_OF_MEMORY_HINT}"
            )

    def _on_exit(self, rank: _Rank, end: End) -> None:
        rank.end = end
        self._drain(rank)
        if end.status != 0:
            self._settle()

    def _settle(self) -> None:
        """A rank has failed: give the others a moment to report what they know, then end them."""
        if not self.ending and self.settle_until is None:
            self.settle_until = time.monotonic() + SETTLE_S

    def _on_zygote_gone(self) -> None:
        # The ranks closed their copies of the zygote's end, so the end of this socket is the end of the zygote.
        self.selector.unregister(self.descriptors.supervisor)
        self.descriptors.supervisor.close()
        pid, status = os.waitpid(self.zygote, 0)
        self.zygote = 0
        if not self.job.is_local:
            self._await_keepers()
        # Processes that the zygote could not end have become children of this one, which is a subreaper.
        processes.end_descendants(but=self.strangers)
        for rank in self.ranks:
            self._drain(rank)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and self.interrupted is None:
            how = f"was ended by signal {-code} ({signal_name(-code)})" if code < 0 else f"failed (code {code})"
            self.refusal = (
                f"phalanx: the process that starts and watches the ranks {how}; the job ended with it\n"
                f"  host {self.job.host}, pid {pid}; "
                f"if nobody killed it, {OUT_OF_MEMORY_HINT}\n",
                128 - code if code < 0 else code,
            )

    def _await_keepers(self) -> None:
        """Give the keepers, or this host's agent, time to end their ranks and to tidy up after a killed relay."""
        until = time.monotonic() + KEEPERS_S
        while time.monotonic() < until and set(processes.children_of(os.getpid())) - set(self.strangers):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.01)

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
        if self.started_at is None and self.job.is_local:
            # No rank runs yet, and the zygote reads no order while it imports torch.
            if self.zygote:
                os.kill(self.zygote, signal.SIGKILL)
        else:
            self._order(signal.SIGKILL if again else signum)

    def _order(self, signum: int, spare: list[int] | None = None) -> None:
        self.ending = True
        asked = self.interrupted is not None and signum != signal.SIGKILL
        patience_s = 0.0 if signum == signal.SIGKILL else self.job.patience_s(signum if asked else None)
        self._tell(do="end", signal=int(signum), grace_s=patience_s, spare=spare or [], where=asked)
        until = time.monotonic() + patience_s + SILENCE_S
        self.give_up_at = until if self.give_up_at is None else min(until, self.give_up_at)

    def _tell(self, **order: Any) -> None:
        """Send the zygote an order, and continue it in case somebody has stopped it."""
        self.descriptors.supervisor.send(**order)
        if self.zygote:
            os.kill(self.zygote, signal.SIGCONT)

    def _hand_on(self, signum: int) -> None:
        if signum == signal.SIGQUIT:
            if self.started_at is None:
                self.console.say("SIGQUIT: the ranks have not been started yet")
            else:
                self._tell(do="stacks")
        elif self.started_at is None:
            self.early_signals.append(signum)
        else:
            self._tell(do="signal", signal=int(signum))

    def _take_stacks(self) -> dict[int, str]:
        """The stacks that ranks have written since the last call, here or on their hosts."""
        taken = {**self.stacks, **self.descriptors.trace.take(range(self.job.ranks))}
        self.stacks = {}
        return dict(sorted(taken.items()))

    def _show_stacks(self, elsewhere: dict[str, str] | None, late: Sequence[int]) -> None:
        self.stacks |= {int(rank): stack for rank, stack in (elsewhere or {}).items()}
        if self.interrupted is None:
            lines = format_stacks(self._take_stacks())
            if late:
                lines.append(f"{format_named('rank', late)} did not say where: stopped, or waiting for a core")
            self.console.say("\n".join(lines) or "no rank runs Python code, so there are no stacks")

    def _all_ended(self) -> bool:
        return all(rank.end is not None for rank in self.ranks)

    def _report(self, rank: int) -> Report | None:
        return read_report(self.descriptors.ranks[rank].report)

    def _winding_down(self) -> list[int]:
        """The ranks whose script has failed already: they are not signalled, so that their exit handlers can finish."""
        reports = {rank: self._report(rank) for rank in range(self.job.ranks)}
        return [rank for rank, report in reports.items() if report is not None and report.time is not None]

    def _conclude(self) -> int:
        self.console.finish()
        trace = self.descriptors.trace
        ended = Ended(
            failures=collect_failures(
                (rank.pid, rank.end, self._report(number)) for number, rank in enumerate(self.ranks)
            ),
            hosts=[row.host for row in self.rows],
            started_at=self.started_at,
            interrupted=self.interrupted,
            stacks=self._take_stacks(),
            overdue=self.overdue,
            refusal=self.refusal,
            stages=[trace.stage(rank) for rank in range(self.job.ranks)],
            asked=[trace.asked(rank) for rank in range(self.job.ranks)],
            out_of_memory=count_oom_kills() > self.oom_kills,
        )
        return conclude(self.job, ended, self.console)
