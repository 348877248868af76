"""The process that the user started: it prints the ranks' output, passes signals on, and reports how the job ended.

It never imports torch and runs no thread: one selector waits for the links to its agents (``agent.py``), for the
programs that have started them, for signals, and for ``phalanx top`` (``running/server.py``). A signal's handler only
notes the signal. What has come is acted on in the loop, and while this process waits for a reader of its output that
has stopped reading.

The supervisor decides how the job ends, and the agents carry that out, because only the parent of a process can be sure
that a process id has not been given to another one:

- A rank fails. For a short settling time the other ranks may report errors of their own, so that the cause can be
  distinguished from its consequences. Then they are asked to end (SIGTERM) and, after a grace, killed.
- SIGINT, SIGTERM or SIGHUP arrives. It is passed on, and after the grace the ranks are killed; another SIGINT kills
  them at once. SIGUSR1 and SIGUSR2 are passed on and end nothing; SIGQUIT prints where the ranks are.
- The ranks ask whether they should stop, and somebody wants that: ``stop_in_step.py`` takes such a signal first.
- Nothing reads the output any more. The job ends as after SIGTERM, and silently, like any other tool in a pipe.
- An agent is lost. Its ranks count as killed.

All that is known of an attempt is in one object, so nothing of it is left when the next one begins (``--restarts``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType

from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.diagnosis.stacks import format_stacks
from phalanx.errors import OUT_OF_MEMORY_HINT, LaunchError
from phalanx.launch.conclusion import Ended, HandOver, conclude, conclude_attempt, failed, who_is_awaited, why_it_ends
from phalanx.launch.hang_watch import HangWatch, received_recording
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Refusal
from phalanx.launch.link import MESSAGE, OUT, split_rank
from phalanx.launch.output.failure import (
    End,
    RankState,
    Report,
    as_report,
    describe_status,
    lacks_cause,
    signal_name,
)
from phalanx.launch.output.logs import Console, Sink
from phalanx.launch.output.streams import LogFiles, last_lines, open_streams
from phalanx.launch.protocol import (
    EVENTS,
    Asked,
    AskedToStop,
    CallsShouldStop,
    EndedElsewhere,
    EndOrder,
    Examined,
    Exited,
    Held,
    Looked,
    LookUp,
    Order,
    Over,
    Overdue,
    Owns,
    Ping,
    RankPlan,
    Refused,
    Reported,
    SignalOrder,
    Start,
    Started,
    Unstarted,
    Waits,
    WantsInput,
    decode_event,
)
from phalanx.launch.rank.trace import ending_of
from phalanx.launch.roster import AgentState, Links
from phalanx.launch.running.jobs import Description
from phalanx.launch.running.server import LookServer
from phalanx.launch.services import Input, StoreOnDemand
from phalanx.launch.starters.contract import Starter
from phalanx.launch.stop_in_step import GENTLY, LAUNCHER, StopInStep
from phalanx.system import processes
from phalanx.system.files import own_folder
from phalanx.topology.table import RankRow, format_rank_table
from phalanx.words import format_named

__all__ = ["HANDLED", "Supervisor"]

# How long the failures of other ranks are collected after the first one, before the rest is ended.
SETTLE_S = 0.1
# How much longer if all that is known are consequences of another rank's end. The kernel shows that end to the other
# ranks at once, and to the rank's parent when it has taken the process apart, which takes long if that had much memory.
CAUSE_S = 1.0
# How long a reader of the output that has stopped reading may delay the launcher once the job is over.
STALLED_READER_S = 1.0
# Agents end their ranks within the grace; one that reports nothing for this much longer is given up.
_SILENCE_S = 6.0
_PING_EVERY_S = 1.0
# After how long it is said for whom the launcher waits: ranks have as long by default after a failure.
_NOTICE_S = 5.0
# How many operations all ranks leave together for ``phalanx timeline``, and the fewest of each.
_LEFT, _FEWEST_LEFT, _LEFT_FOR_ERRORS = 16384, 16, 128
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: The signals that the launcher handles while ranks run.
HANDLED = (*_ENDING, *_HANDED_ON, signal.SIGQUIT, GENTLY)


class Supervisor:
    """The supervisor during one attempt.

    Args:
        job: the job.
        listener: the listening socket of this attempt's store.
        logs: the ranks' files of this attempt.
        starter: makes what starts the agents.
        strangers: children of this process that are not the job's.
        before: the supervisor of the attempt before; None in the first.

    Attributes:
        interrupted: the signal with which somebody has ended the job; None if nobody has.
        going: whether the agents have been ordered to start their ranks.
        started_at: when all ranks had been started; None before.
        ending: whether the ranks have been ordered to end.
        over: whether nothing more is to be waited for, because the job cannot go on.
    """

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        logs: LogFiles,
        starter: Callable[[Supervisor], Starter],
        strangers: Sequence[int],
        before: Supervisor | None = None,
    ) -> None:
        self.job, self.logs, self.listener = job, logs, listener
        self.port: int = listener.getsockname()[1]
        self.description: Description = before.description if before is not None else Description(job)
        self.strangers = strangers
        self.console: Console = (
            before.console if before is not None else Console(Sink(1, os.environ), Sink(2, os.environ))
        )
        if any(map(job.keeps_terminal, range(job.ranks))):
            # The rank writes to the terminal itself, so nothing is drawn over what it writes.
            self.console.out.terminal = self.console.err.terminal = False
        for sink in (self.console.out, self.console.err):
            sink.meanwhile = self._act_on_signals
        self.signals: list[int] = []
        self.wakeup = os.pipe()
        self.selector = selectors.DefaultSelector()
        self.rows = job.rows()
        self.ranks = [RankState(rank) for rank in range(job.ranks)]
        self.streams = open_streams(job, self.console, logs)
        self.interrupted: int | None = None
        self.interrupted_again = self.going = self.ending = self.over = False
        self.started_at: float | None = None
        self.settle_until: float | None = None
        self.cause_until = 0.0
        self.give_up_at: float | None = None
        self.asked_at = self.kill_at = math.inf  # when the ranks were first told to end, and when they are killed
        self.notice_at: float | None = None
        self.ping_at = time.monotonic() + _PING_EVERY_S
        self.held: list[int] = []  # signals that came before the ranks were started
        self.overdue: dict[float, list[int]] = {}
        self.refusal: tuple[str, int] | None = None
        self.stopped: Sequence[int] = ()  # the ranks that were stopped when the first one failed
        self.links = Links(self.selector, self.take, self._on_lost)
        self.starter = starter(self)
        self.agents = self.starter.agents
        self.agent_of = {number: agent for agent in self.agents for number in agent.numbers}
        self.hangs = HangWatch(job, self.agents, lambda: self.rows, self.send, self.console.say)
        self.stop = StopInStep(job, self.agents, self.send, self.console.say)
        self.looks = LookServer(job.run_id, self.selector, self.agents, self.send)
        self.reader = job.reader or 0
        self.input = Input(self.selector, lambda data: self.links.feed(self.agent_of[self.reader], self.reader, data))
        self.store: StoreOnDemand | None = None

    def _hosts(self) -> list[str]:
        return [row.host for row in self.rows]

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
                signal.signal(signum, self._note_signal)

    def _note_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.signals.append(signum)

    def forget(self) -> None:
        """Close what is the supervisor's alone, in a fork."""
        self.selector.close()
        self.logs.close()
        self.description.close()
        self.looks.close()
        for descriptor in self.wakeup:
            os.close(descriptor)
        for agent in self.agents:
            if agent.link is not None:
                agent.link.close()

    def begin(self) -> None:
        """Start the agents, or order those that are there to start ranks."""
        job = self.job
        self.selector.register(self.wakeup[0], selectors.EVENT_READ, self._on_wakeup)
        self._act_on_signals()
        try:
            self.starter.begin()
        except Refusal as refusal:
            self.refuse(refusal)
            return
        if job.target.is_python or not job.is_local:
            look_up = self._look_up if not job.is_local else None
            self.store = StoreOnDemand(self.listener, self.selector, look_up, self._on_store_lost, self.forget)
        else:
            self.listener.close()  # rank 0 of a program opens the port itself
        if job.attempt.is_last and job.is_local and not os.isatty(0):
            processes.release_input()  # only then does its writer notice when the rank that reads it ends
        if job.is_local and not self.over:
            self._introduce()
            self._start_ranks()

    def run(self, hand_over: HandOver | None) -> int | None:
        """Watch this attempt to its end.

        Args:
            hand_over: see :func:`phalanx.launch.attempts.launch`.

        Returns:
            The launcher's exit code; None if a rank has failed and the next attempt is to start. Then no process of
            this one is left, and an agent of this host waits for the order to start that.
        """
        while not (self.over or all(agent.over for agent in self.agents)):
            self._turn()
        self.console.finish()
        self.hangs.leave(
            {rank.number: rank.recording for rank in self.ranks if rank.recording is not None}, self._hosts()
        )
        ended = self._explained()
        leaving = [agent.title for agent in self.agents if agent.leaving is not None]
        if self.stop.why and not self.stop.was_reached(self.ranks):
            leaving = []  # the ranks came to their end before
        has_failed = failed(ended, self.console)
        may_go_on = not self.job.attempt.is_last and (bool(leaving) or has_failed)
        goes_on = may_go_on and (not self.stop.why or self.stop.for_node)
        self._dismiss(stays=goes_on and self.job.keeps_agents)
        if goes_on and self.interrupted is None:
            if has_failed:
                conclude_attempt(ended, self.console)
            if leaving:
                after = f"{self.job.attempt.next().title} starts once another has come"
                self.console.say(f"{' and '.join(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}; {after}")
            self._act_on_signals()  # one may have come while that was written
            if self.interrupted is None:
                return None
        if goes_on and self.job.keeps_agents:
            self._dismiss(stays=False)
        ended = self._explained()
        code = conclude(ended, self.console, hand_over) or self.stop.conclude(self.ranks)
        if may_go_on and self.stop.why:
            self.console.say(f"a stop was requested ({self.stop.why}), so nothing is started again")
        self.starter.farewell(code, why_it_ends(ended))
        signal.set_wakeup_fd(-1)
        return code

    def _dismiss(self, *, stays: bool) -> None:
        """Let the agents leave, and end what does not."""
        if not stays:
            self.starter.dismiss(self._turn)
            processes.end_descendants(but=self.strangers)
        if self.store is not None:
            self.store.close()

    def take_over(self, before: Supervisor) -> None:
        """Handle signals from here on in the place of the supervisor of the attempt before, which is over."""
        self.listen_to_signals()
        self.signals = before.signals
        before.selector.close()
        for descriptor in before.wakeup:
            os.close(descriptor)

    def refuse(self, refusal: Refusal) -> None:
        """Give the job up; the refusal is printed at its end."""
        if not self.over and self.refusal is None and self.interrupted is None:
            self.refusal = f"{str(refusal).rstrip()}\n", refusal.code
        self.over = True

    # What is said at the beginning.

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

    def say(self, text: str) -> None:
        """Print a line of what starts the agents, unless the user wants only the ranks' output."""
        if not self.job.quiet:
            self.console.write(self.console.err, f"{text}\n")

    # One turn of the loop.

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self.ping_at:
            # It shows when a host is out of reach, and continues an agent that somebody has stopped.
            self.ping_at = now + _PING_EVERY_S
            for agent in self.agents:
                self.send(agent, Ping())
        due = [
            self.ping_at,
            self.settle_until,
            self.give_up_at,
            self.notice_at,
            self.hangs.answer_by,
            self.looks.due_at,
            self.stop.due_at if not self.ending else None,
            self.starter.due_at(),
            self.console.redraw_at,
            self.hangs.look_at if self._watches() else None,
        ]
        at = now if self.signals else min(when for when in due if when is not None)
        for key, _ in self.selector.select(max(0.0, at - now)):
            key.data()
        self._act_on_signals()
        self.console.redraw()
        self._act_on_time(time.monotonic())

    def _watches(self) -> bool:
        return self.started_at is not None and not self.ending

    def _act_on_time(self, now: float) -> None:
        try:
            for line in self.starter.act(now):
                self.say(line)
        except Refusal as refusal:
            self.refuse(refusal)
        self.hangs.act()
        self.looks.act(now)
        if self._watches():
            self.hangs.look()
        if not self.ending and (signum := self.stop.act(now)) is not None:
            self._on_interrupt(signum) if signum in _ENDING else self._order(signum)
        unread = self.console.out.closed or self.console.err.closed
        if unread and not self.ending:
            self._order(signal.SIGTERM)
        if self.notice_at is not None and now >= self.notice_at:
            self.notice_at = None
            if text := who_is_awaited(self._ended(), self.kill_at - now):
                self.console.say(text)
        if self.logs.faults and not self.logs.said:
            self.logs.said = True
            self.console.say(f"warning: {self.logs.faults[0]}; the job goes on, and lines are lost while that lasts")
        if self.settle_until is not None and (now >= self.settle_until or not self._unended()):
            self.settle_until = None
            if not self.ending and now < self.cause_until and lacks_cause(self.ranks):
                self.settle_until = now + SETTLE_S
            elif not self.ending:
                # Those whose script has failed are not signalled, so that their exit handlers can finish.
                self._order(signal.SIGTERM, [r.number for r in self.ranks if r.report is not None and r.report.time])
        if self.give_up_at is not None and now >= self.give_up_at:
            self.give_up_at = None
            for agent in self.agents:
                if not agent.over:
                    self.starter.give_up(agent)
                    self._lose([agent], silent=False)

    # Links.

    def send(self, agent: AgentState, order: Order) -> None:
        """Send an agent an order, if it is there."""
        self.links.send(agent, order)

    def take(self, agent: AgentState, frames: Sequence[tuple[bytes, bytes]]) -> None:
        """Act on what an agent has sent."""
        for kind, data in frames:
            if kind == MESSAGE:
                self._hear(agent, decode_event(data))
            else:
                rank, block = split_rank(data)
                self.streams[rank][kind != OUT].feed(block)

    def _on_lost(self, agent: AgentState, silent: bool) -> None:
        """Act on the end of a link."""
        lost = [agent]
        if silent and agent.here is not None:
            # No other agent of that host answers either, and their links would only be lost later.
            lost = [each for each in self.agents if each.place == agent.place]
        for each in lost:
            self.links.drop(each)
        lost = [each for each in lost if not each.over]
        if lost and not self.over:
            self._lose(lost, silent=silent)

    def _lose(self, lost: Sequence[AgentState], *, silent: bool) -> None:
        """Count the ranks of lost agents as killed."""
        now = time.monotonic()
        own_fault = not self.ending and self.interrupted is None and not self.starter.is_gone()
        why, code = self.starter.describe_lost(lost[0], silent=silent)
        if own_fault and (not self.going or code):
            self.refuse(Refusal(why if code else f"phalanx: {why}; nothing had been started", code or 1))
        if own_fault:
            self.hangs.drop()
        for agent in lost:
            agent.over = True
            self.hangs.lose(agent)
            self.looks.lose(agent)
            self.stop.lose(agent)
            for rank in agent.ranks:
                if rank.end is None:
                    if own_fault and rank.report is None:
                        rank.report = Report("", why, "", False, now, 1)
                    rank.pid = rank.pid or (agent.here.pid if agent.here is not None else 0)
                    self._on_end(rank, End(-signal.SIGKILL, now, by_launcher=not own_fault))
        if own_fault and self.started_at is None and not self.over:
            self._order(signal.SIGTERM)  # other hosts may be importing torch for long

    # Events.

    def all_here(self, rows: list[RankRow], notes: Iterable[str]) -> None:
        """Start the ranks where the rows say: all agents have come."""
        self.rows = rows
        self._introduce(notes)
        if self.interrupted is None:
            self._start_ranks()

    def _start_ranks(self) -> None:
        job = self.job
        self.going = True
        terminal, hosts = os.isatty(0), not job.is_local
        diagnosis = job.diagnosis
        watched = not diagnosis.why_unwatched(is_python=job.target.is_python, ranks=job.ranks)
        left = max(_FEWEST_LEFT, _LEFT // job.ranks) if diagnosis.report_dir else _LEFT_FOR_ERRORS
        for agent in self.agents:
            plans = [
                RankPlan(
                    rank=number,
                    local_rank=self.rows[number].local_rank,
                    environment=job.environment(number, port=self.port, rows=self.rows),
                    argv=job.target_of(self.rows[number].local_rank).argv,
                    cpus=tuple(self.rows[number].cpus),
                    reads=job.reads(number, terminal=terminal),
                    terminal=job.keeps_terminal(number),
                )
                for number in agent.numbers
            ]
            self.send(
                agent,
                Start(
                    run_id=job.run_id,
                    target=job.target,
                    ranks=plans,
                    before_import={"OMP_NUM_THREADS": plans[0].environment["OMP_NUM_THREADS"], **job.before_torch()},
                    preload=job.preload and job.mpi is None,
                    quiet=job.quiet,
                    feeds_input=hosts,
                    watch_after_s=diagnosis.warn_after_s if watched else 0.0,
                    records=left,
                    carried=dict(os.environ) if job.mpi is not None else {},
                    directory=os.getcwd(),
                    grace_s=job.patience_s(None),
                    is_last=job.attempt.is_last,
                    stop_on=job.stop_on,
                ),
            )

    def _hear(self, agent: AgentState, event: EVENTS) -> None:
        if agent.link is not None and agent.link.peer:
            agent.hear_clock(event.now)
        match event:
            case Started():
                self._on_started(agent, event)
            case Exited():
                self._on_exited(agent, event)
            case Reported():
                rank = self.ranks[event.rank]
                rank.report = as_report(event.report, agent.own_time)
                self._settle()
            case Over():
                agent.over = True
                self.hangs.lose(agent)
                self.looks.lose(agent)
                self.stop.lose(agent)
                for rank in agent.ranks:
                    if rank.end is None:
                        self._on_end(rank, End(-signal.SIGKILL, time.monotonic(), by_launcher=True))
            case CallsShouldStop() | Held() | AskedToStop():
                if not self.is_failing():
                    self.stop.hear(agent, event)
                    self.description.note_stops()
            case Unstarted():
                self.starter.start_after_all(self.agents[event.agent])
            case Refused():
                self.refuse(Refusal(event.text, event.code))
            case Overdue():
                self.overdue.setdefault(event.grace_s, []).append(event.rank)
            case Waits():
                self.hangs.hear_waits(agent, event)
            case Examined():
                self.hangs.hear(agent, event)
            case Looked():
                self.looks.hear(agent, event)
            case WantsInput():
                if self.ranks[self.reader].end is None:
                    self.input.want()
            case Owns():
                if self.store is not None:
                    self.store.found(event.number)
            case Asked():
                self._on_asked(agent, event.signal)

    def _on_started(self, agent: AgentState, event: Started) -> None:
        agent.started = True
        for rank, pid in zip(agent.ranks, event.pids, strict=True):
            rank.pid = pid
        if not all(each.started for each in self.agents):
            return
        self.started_at = time.monotonic()
        hosts, pids = self._hosts(), [rank.pid for rank in self.ranks]
        self.logs.note_start(self.job, hosts, pids)
        self.description.add_ranks(pids, hosts)
        if self.interrupted is not None:
            self._order(signal.SIGKILL if self.interrupted_again else self.interrupted)
        elif any((rank.end is not None and rank.end.status) or rank.report for rank in self.ranks):
            self._settle()
        held, self.held = self.held, []
        for signum in held:
            self._hand_on(signum)

    def _on_exited(self, agent: AgentState, event: Exited) -> None:
        rank = self.ranks[event.rank]
        rank.stage, rank.asked, rank.stack, rank.calls = event.stage, event.asked, event.stack, event.calls
        rank.recording = received_recording(event.recording, agent.later)
        several = len(set(self._hosts())) > 1
        if event.status != 0 and not self.ending and several and agent.here is not None:
            # The ranks of other hosts cannot see how it has ended.
            known = {"host": agent.here.name, "pid": rank.pid, "status": event.status}
            if rank.recording is not None and (last := rank.recording.last) is not None:
                line = os.path.join(own_folder(), last.site) if last.site else ""
                known |= {"last_operation": last.text(), "last_line": line, "was_in_it": last.under_way}
            for other in self.agents:
                if other is not agent and not other.over:
                    self.send(other, EndedElsewhere(known=known))
        by_launcher = (self.ending or event.by_others) and not event.by_itself
        self._on_end(rank, End(event.status, agent.own_time(event.at), by_launcher, event.out_of_memory))

    def _on_end(self, rank: RankState, end: End) -> None:
        rank.end = end
        for stream in self.streams[rank.number]:
            stream.close()
        if rank.number == self.reader and not self.job.is_local:
            self.input.release()
        self.logs.note_end(rank.number, describe_status(end.status), rank.report)
        if self.store is not None:
            host = self.rows[rank.number].host if len(set(self._hosts())) > 1 else ""
            self.store.ended(rank.number, rank.pid, host, ending_of(end.status).text if end.status else "")
        if end.status != 0:
            self._settle()

    def _settle(self) -> None:
        """Give the others a moment to report what they know of a failure, then end them."""
        if not self.ending and self.settle_until is None and self.started_at is not None:
            self.stopped = self.hangs.stopped
            self.settle_until = time.monotonic() + SETTLE_S
            self.cause_until = self.settle_until + CAUSE_S

    def _look_up(self, number: int, end: list[object], other_end: list[object]) -> None:
        """Ask each host of the job whether a connection to the store is its user's."""
        for agent in {agent.place: agent for agent in self.agents if agent.link is not None}.values():
            self.send(agent, LookUp(number=number, end=end, other_end=other_end))

    def _on_store_lost(self) -> None:
        if not self.ending and not self.over:
            self.console.say(
                "the process that hosts torch's store has ended; ranks that still want to meet will fail. "
                f"If nobody killed it, {OUT_OF_MEMORY_HINT}"
            )

    # Signals, and the end.

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup[0], 4096)

    def _act_on_signals(self) -> None:
        while self.signals:
            signum = self.signals.pop(0)
            if signum == GENTLY and self.is_failing():
                self.stop.forbid_restarts("phalanx stop --gently")  # the ranks are ending already
                continue
            if not self.is_failing() and self.stop.ask_by_signal(signum, source=LAUNCHER):
                continue
            if signum in _ENDING:
                self._on_interrupt(signum)
            else:
                self._hand_on(signum)

    def _on_interrupt(self, signum: int) -> None:
        again = self.interrupted is not None
        if again and signum != signal.SIGINT:
            # Systems that end a job ask more than once: a shell and the kernel both send SIGHUP, for one terminal.
            return
        self.interrupted_again = again
        if not again:
            self.interrupted = signum
            self.settle_until = None
            self.console.out.deadline = self.console.err.deadline = time.monotonic() + STALLED_READER_S
        if self.over or self.started_at is None:
            if again:
                self.starter.kill()
            if any(agent.started for agent in self.agents):
                self._order(signal.SIGKILL if again else signum)
            elif again or not self.starter.has_ranks():
                self.over = True  # no rank runs yet
            # Else the agent is about to say that it has started them, and is given the order then.
        else:
            self._order(signal.SIGKILL if again else signum)

    def _on_asked(self, agent: AgentState, signum: int) -> None:
        """Act on a signal that has come to another node. A platform that takes one away may bring another."""
        where = f"node {agent.number} ({agent.name})"
        self.console.say(f"{where} was asked to end by {signal_name(signum)}")
        alone = signum == signal.SIGTERM and not self.job.attempt.is_last and self.interrupted is None and self.going
        again = agent.leaving is not None
        if alone:
            agent.leaving = 128 + signum
        stops = not self.is_failing() and self.stop.ask_by_signal(signum, where, source=agent.number, for_node=alone)
        if not stops and not alone:
            self._on_interrupt(signum)
        elif not stops and not again and not self.ending:
            self._order(signum, grace_s=self.job.patience_s(signum))

    def _order(self, signum: int, spare: Sequence[int] = (), grace_s: float | None = None) -> None:
        """Have the ranks ended."""
        self.ending = True
        self.hangs.drop()
        asked = self.interrupted is not None and signum != signal.SIGKILL
        if grace_s is None:
            grace_s = 0.0 if signum == signal.SIGKILL else self.job.patience_s(signum if asked else None)
        for agent in self.agents:
            self.send(agent, EndOrder(signal=int(signum), grace_s=grace_s, spare=list(spare), where=asked))
        self.give_up_after(grace_s + _SILENCE_S)
        now = time.monotonic()
        self.asked_at = min(self.asked_at, now)
        self.kill_at = min(self.kill_at, now + grace_s)  # a later order gives nobody more time
        self.notice_at = now + _NOTICE_S if self.kill_at - now > _NOTICE_S else None

    def give_up_after(self, patience_s: float) -> None:
        """Count agents as lost that have not ended their ranks within so many seconds."""
        until = time.monotonic() + patience_s
        self.give_up_at = until if self.give_up_at is None else min(until, self.give_up_at)

    def _hand_on(self, signum: int) -> None:
        if self.started_at is None:
            if signum == signal.SIGQUIT and not self.starter.has_ranks():
                self.console.say("SIGQUIT: the ranks have not been started yet")
            else:
                self.held.append(signum)
        elif signum == signal.SIGQUIT:
            self.hangs.ask_for_user(self._say_stacks)
        else:
            for agent in self.agents:
                self.send(agent, SignalOrder(signal=signum))

    def _say_stacks(self, ranks: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> None:
        lines = format_stacks(dict(sorted(stacks.items())))
        late = [seen.rank for seen in ranks if not seen.ended and seen.rank not in stacks]
        if not self.job.target.is_python:
            lines = ["no rank runs Python code, so there are no stacks"]
        elif late:
            why = "stopped, waiting for a core, about to start or to end"
            lines.append(f"{format_named('rank', late)} did not say where: {why}")
        self.console.say("\n".join(lines or ["no rank says where it is: all have ended"]))

    def _unended(self) -> list[int]:
        return [rank.number for rank in self.ranks if rank.end is None]

    def is_failing(self) -> bool:
        """Tell whether the job is ending for a known reason; what is said after it is about the consequences."""
        return self.ending or any(rank.report is not None or (rank.end and rank.end.status) for rank in self.ranks)

    def _explained(self) -> Ended:
        ended = self._ended()
        return dataclasses.replace(ended, refusal=ended.refusal or self.starter.explain(ended.failures))

    def _ended(self) -> Ended:
        shown = self.job.output.shows
        return Ended(
            job=self.job,
            ranks=self.ranks,
            asked_at=self.asked_at,
            hosts=self._hosts(),
            started_at=self.started_at,
            interrupted=self.interrupted,
            overdue=self.overdue,
            refusal=self.refusal or self.stop.explain(self.ranks),
            last_lines={
                rank.number: last_lines(self.streams[rank.number])
                for rank in self.ranks
                if not shown(rank.number) and not self.job.keeps_terminal(rank.number)
            },
            stopped=self.stopped,
        )
