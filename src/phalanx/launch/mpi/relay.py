"""The process that takes the zygote's place when an MPI launcher starts the ranks.

Towards the supervisor it acts as the zygote does (``announcer.py``), over the same control socket, pipes and report
files; so the table, the prefixes, the failure block, the exit codes and the signals are the same code for both
launchers. On its other side it is the parent of the MPI launcher, and the ranks' keepers (``keeper.py``) connect to it.

All keepers have to come before any rank runs, because only then is it known where each rank is (``gathering.py``,
``placing.py``). A rank's host is the one that its keeper reports; if the MPI launcher was asked for another one, a note
is printed.

A rank has ended when its keeper reports it. The keepers stay until all ranks have ended, so the MPI launcher sees all
its processes end at once and with exit code 0, and has nothing to report.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.job.target import Refusal, prepare_target
from phalanx.launch.mpi.gathering import RollCall, take_seat
from phalanx.launch.mpi.mpiexec import Mpiexec
from phalanx.launch.mpi.placing import find_contradiction, place_ranks
from phalanx.launch.output.report import Report
from phalanx.launch.rank.descriptors import Descriptors
from phalanx.launch.relay.announcer import Announcer
from phalanx.launch.relay.channel import IN, Channel, open_door
from phalanx.launch.relay.crew import Member, Pipe
from phalanx.launch.relay.exchange import Exchange
from phalanx.launch.relay.services import Input, StoreOnDemand
from phalanx.launch.relay.survey import Survey
from phalanx.system import processes
from phalanx.topology.table import RankRow
from phalanx.words import format_named

__all__ = ["serve_mpi"]

# How long keepers and the MPI launcher may take to leave once all ranks have ended, and the latter after each signal.
_LEAVE_S = 3.0
_ASKED_S = 1.5
# The same if a host is out of reach, for which the MPI launcher would wait.
_LOST_LEAVE_S = 0.7
# Keepers end their ranks within the grace; a keeper that reports nothing for this much longer is given up.
_SILENCE_S = 6.0
# How long a rank whose script has failed may go on with its exit handlers.
_WIND_DOWN_S = 0.5
# How long the ranks' stacks may be on their way.
_STACKS_S = 0.5


def serve_mpi(job: Job, launcher: MpiLauncher, descriptors: Descriptors, listener: socket.socket) -> None:
    """Check, wait for the order to start, start, and relay until the end.

    Args:
        job: the job.
        launcher: the MPI launcher that starts its ranks.
        descriptors: its descriptors.
        listener: the listening socket of its store.
    """
    ranks = [Member(number, Pipe.pair(ends)) for number, ends in enumerate(descriptors.ranks)]
    announcer = Announcer(descriptors, ranks)
    try:
        prepare_target(job.target)
        if descriptors.zygote.receive() is None:
            return
        relay = _Relay(job, launcher, descriptors, listener, ranks, announcer)
    except Refusal as refusal:
        announcer.refuse(f"{str(refusal).rstrip()}\n", refusal.code)
        return
    relay.run()


class _Relay:
    """A job whose MPI launcher has been started, which is what making this object does.

    Raises:
        Refusal: the MPI launcher cannot be started.
    """

    def __init__(
        self,
        job: Job,
        launcher: MpiLauncher,
        descriptors: Descriptors,
        listener: socket.socket,
        ranks: list[Member],
        announcer: Announcer,
    ) -> None:
        self.job = job
        self.descriptors = descriptors
        self.launcher = launcher
        self.ranks = ranks
        self.announcer = announcer
        self.selector = selectors.DefaultSelector()
        self.rows: list[RankRow] = []
        self.exchange = Exchange(self.selector, self._on_first, self._on_message, self._on_lost)
        self.door, invitation = open_door(job.addresses, self.selector, self.exchange.welcome)
        self.reader = ranks[job.reader or 0]
        self.input = Input(
            self.selector,
            lambda data: self.exchange.send(self.reader, IN, data),
            offered=job.reads(self.reader.number, terminal=os.isatty(0)),
        )
        self.going = False
        self.ordered = False
        self.ended_by_mpiexec = False
        self.connected = True
        self.give_up_at: float | None = None
        self.stacks: dict[int, str] = {}
        self.stacks_at: float | None = None
        self.survey = Survey(lambda rank, order: self.exchange.say(ranks[rank], **order), descriptors.zygote.send)
        for ends in descriptors.ranks:
            os.set_blocking(ends.out_write, False)
            os.set_blocking(ends.err_write, False)
        try:
            self.mpiexec = Mpiexec(job, launcher, invitation)
        except LaunchError as error:
            raise Refusal(f"phalanx: {error}", 2) from error
        except OSError as error:
            raise Refusal(f"phalanx: {launcher.path} cannot be executed: {error.strerror}", 126) from error
        read = selectors.EVENT_READ
        self.selector.register(self.mpiexec.handle, read, self._on_mpiexec_ended)
        self.selector.register(self.mpiexec.output, read, self._on_mpiexec_output)
        self.selector.register(descriptors.zygote, read, self._on_order)
        self.port = listener.getsockname()[1]
        self.store = StoreOnDemand(descriptors, listener, self.selector, self._look_up, announcer.lose_store)
        self.roll = RollCall(job, launcher.name)

    def run(self) -> None:
        """Relay until all ranks have ended, and clean up."""
        try:
            while self.connected and not all(rank.announced for rank in self.ranks):
                self.turn()
            if self.stacks:
                self.announcer.show_stacks(self._take_stacks())
            self.dismiss()
        except Refusal as refusal:
            self.dismiss()
            self.announcer.refuse(f"{refusal}\n{self.mpiexec.take_all()}", refusal.code)
            return
        self.explain()

    def turn(self) -> None:
        """Wait for something, and act on it."""
        due = self.mpiexec.due_at() if not self.failing else None
        known = (self.give_up_at, self.stacks_at, self.roll.due_at, due, self.survey.due_at)
        times = [when for when in known if when is not None]
        until = min([self.door.tend(time.monotonic()), self.exchange.due_at, *times])
        patience_s = max(0.0, until - time.monotonic()) if until < math.inf else None
        for key, events in self.selector.select(patience_s):
            if isinstance(key.data, Member):
                self.exchange.serve(key.data, events)
            else:
                key.data()
        now = time.monotonic()
        self.exchange.look(now)
        if not self.failing:
            for line in self.mpiexec.take_due():
                self.announcer.say(f"[{self.launcher.name}] {line}")
        if self.roll.due_at is not None and now >= self.roll.due_at:
            self._call_roll()
        if self.give_up_at is not None and now >= self.give_up_at:
            self.give_up_at = None
            for rank in self.ranks:
                if rank.status is None:
                    self._lose([rank])
        if self.stacks_at is not None and now >= self.stacks_at:
            self.announcer.show_stacks(self._take_stacks())
        self.survey.act(now)
        self.announcer.end()

    def _take_stacks(self) -> dict[int, str]:
        taken, self.stacks, self.stacks_at = self.stacks, {}, None
        return taken

    @property
    def failing(self) -> bool:
        """Whether the job is ending for a known reason; what the MPI launcher then prints is about the consequences."""
        return self.ordered or any(rank.status or rank.reported for rank in self.ranks)

    # The MPI launcher.

    def _on_mpiexec_output(self) -> None:
        if self.mpiexec.output.closed:
            return  # its end has been noticed in this very turn
        descriptor = self.mpiexec.output.fileno()
        self.mpiexec.read()
        if self.mpiexec.output.closed:
            self.selector.unregister(descriptor)

    def _on_mpiexec_ended(self) -> None:
        self.selector.unregister(self.mpiexec.handle)
        if not self.mpiexec.output.closed:
            self.selector.unregister(self.mpiexec.output)
        self.mpiexec.reap()
        self.mpiexec.output.close()
        if not self.going and not self.ordered:
            missing = [rank.number for rank in self.ranks if not rank.here]
            which = f"{format_named('rank', missing)} had come" if missing else "the ranks were started"
            raise Refusal(f"phalanx: {self.mpiexec.describe_end()} before {which}", self.mpiexec.exit_code)
        # The shims have ended with it, so the keepers are ending their ranks.
        self._give_up_after(self.job.patience_s(None) + 2.0)

    def _call_roll(self) -> None:
        try:
            line = self.roll.call([rank.number for rank in self.ranks if not rank.here])
        except LaunchError as error:
            raise Refusal(f"phalanx: {error}", 1) from error
        if line:
            self.announcer.say(f"phalanx: {line}")

    # The supervisor.

    def _on_order(self) -> None:
        order = self.descriptors.zygote.receive()
        if order is None:
            self.connected = False
        elif order["do"] == "go":
            self._release()
        elif order["do"] == "signal":
            self._tell_all(do="signal", signal=order["signal"])
        elif order["do"] == "examine":
            running = [rank for rank in self.ranks if rank.status is None and rank.channel is not None]
            self.survey.begin(order, {rank.number: [rank.number] for rank in running})
        elif order["do"] == "stacks":
            self.stacks_at = time.monotonic() + _STACKS_S
            self._tell_all(do="stacks")
        elif order["do"] == "end":
            self.ordered = True
            if not self.going:
                self.connected = False
                return
            for rank in self.ranks:
                if rank.status is None:
                    # A rank that has failed by itself may finish, but not for long: its exit handlers include
                    # MPI_Finalize, which waits for the other ranks.
                    spared = rank.number in order["spare"]
                    patience_s = min(order["grace_s"], _WIND_DOWN_S) if spared else order["grace_s"]
                    signum = 0 if spared else order["signal"]
                    self.exchange.say(rank, do="end", signal=signum, patience_s=patience_s, where=order["where"])
            self._give_up_after(order["grace_s"] + _SILENCE_S)

    def _tell_all(self, **order: Any) -> None:
        for rank in self.ranks:
            if rank.status is None:
                self.exchange.say(rank, **order)

    def _give_up_after(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        self.give_up_at = until if self.give_up_at is None else min(until, self.give_up_at)

    def _release(self) -> None:
        """Let every keeper fork its rank."""
        self.going = True
        self.exchange.continue_when_called(self.ranks)
        unwatched = self.job.diagnosis.why_unwatched(is_python=self.job.target.is_python, ranks=self.job.ranks)
        for rank in self.ranks:
            self.exchange.say(
                rank,
                do="become",
                target=asdict(self.job.target_of(self.rows[rank.number].local_rank)),
                run_id=self.job.run_id,
                environment=self.job.environment(rank.number, port=self.port, rows=self.rows),
                carried=dict(os.environ),
                directory=os.getcwd(),
                grace_s=self.job.patience_s(None),
                quiet=self.job.quiet,
                input=rank is self.reader and self.input.offered,
                warn_after_s=0.0 if unwatched else self.job.diagnosis.warn_after_s,
            )

    # The keepers.

    def _on_first(self, channel: Channel, here: dict[str, Any]) -> Member:
        """A keeper has come, and said which rank it stands for."""
        rank = take_seat(self.ranks, self.launcher.name, channel, here)
        self.roll.came()
        if all(other.here for other in self.ranks):
            self.roll.end()
            all_here = [other.here for other in self.ranks]
            self.rows = place_ranks(self.job, all_here)
            self.announcer.place(self.rows, find_contradiction(self.job, self.launcher.name, self.rows, all_here))
        return rank

    def _on_message(self, rank: Member, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "started":
            rank.pid = message["pid"]
            self.announcer.start()
        elif event == "reported":
            self.announcer.report(rank, message["report"], time.monotonic() - message["age"])
        elif event == "wants":
            self.input.want()
        elif event == "overdue":
            self.announcer.overdue(rank, message["patience_s"])
        elif event == "stack":
            self.stacks[rank.number] = message["text"]
        elif event == "waits":
            self.announcer.wait(rank.number, message)
        elif event == "examined":
            self.survey.hear(rank.number, message)
        elif event == "owns":
            self.store.found(message["number"])
        elif event == "exited":
            if rank is self.reader:
                self.input.release()
            rank.out_of_memory, rank.by_itself = message["out_of_memory"], message["by_itself"]
            self.descriptors.trace.note_operation(rank.number, message.get("operation", ""))
            if message["status"] == 0:
                several = len({row.host for row in self.rows}) > 1
                self.store.ended(rank.number, self.rows[rank.number].host if several else "")
            self._end(rank, message["status"], time.monotonic() - message["age"], message["by_others"])

    def _look_up(self, number: int, end: Any, other_end: Any) -> None:
        """Ask each host of the job whether a connection to the store is its user's."""
        keepers = {rank.host: rank for rank in self.ranks if rank.channel is not None and rank.here}
        for rank in keepers.values():
            self.exchange.say(rank, do="look", number=number, end=end, other_end=other_end)

    def _on_lost(self, rank: Member, silent: bool) -> None:
        """A keeper's connection has ended, although no keeper closes it before it is dismissed."""
        lost = [rank]
        if silent:
            # No keeper of that host answers any more, and the connections of the others would only be lost later.
            lost = [other for other in self.ranks if other.here and other.host == rank.host]
            for other in lost:
                self.exchange.drop(other)
        lost = [other for other in lost if other.status is None]
        if lost and self.going:
            self._lose(lost, silent=silent)
        elif lost and not self.ordered and self.mpiexec.code is None:
            raise Refusal(f"phalanx: {_lost(rank, silent=silent)}; nothing had been started", 1)

    def _lose(self, lost: Sequence[Member], *, silent: bool = False) -> None:
        """These ranks are lost: all of a host that does not answer, or one."""
        now = time.monotonic()
        own_fault = not self.failing and self.mpiexec.code is None
        if own_fault:
            self.survey.drop()
        for rank in lost:
            if own_fault:
                text = _lost(rank, silent=silent)
                self.announcer.report(rank, Report("", text, "", False, now, 1).to_record(), now)
            self._end(rank, -signal.SIGKILL, now, by_others=not own_fault)

    def _end(self, rank: Member, status: int, when: float, by_others: bool) -> None:
        if status and by_others and not self.failing:
            self.ended_by_mpiexec = True
        rank.status, rank.ended_at, rank.by_others = status, when, by_others
        rank.pid = rank.pid or rank.here["pid"]
        self.survey.lose(rank.number)
        self.announcer.wait(rank.number, {"waited_s": 0.0, "still_s": 0.0, "stopped": []})
        self.announcer.start()

    # The end.

    def dismiss(self) -> None:
        """Let keepers and the MPI launcher leave; end those that do not."""
        self.door.close()
        channels = []
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.say(do="leave")
                channels.append(rank.channel)
        if not self.going or any(rank.channel is None for rank in self.ranks):
            # The MPI launcher would wait for processes that have not begun, or whose host is out of reach.
            self.mpiexec.send(signal.SIGTERM)
        control = self.descriptors.zygote if self.connected else None
        patience_s = _LEAVE_S if len(channels) == len(self.ranks) else _LOST_LEAVE_S
        self.connected = self.mpiexec.see_out(channels, control, patience_s)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self.mpiexec.code is None:
                self.mpiexec.send(signum)
                self.connected = self.mpiexec.see_out([], control, _ASKED_S)
        processes.end_descendants()

    def explain(self) -> None:
        """If no rank has failed by itself, the MPI launcher ended the job: print its output."""
        bad = [rank for rank in self.ranks if rank.status]
        own = [rank for rank in bad if rank.reported or not rank.by_others]
        if self.ended_by_mpiexec and not own:
            ranks = format_named("rank", [rank.number for rank in bad])
            text = f"phalanx: {self.mpiexec.describe_end()}, and {ranks} with it\n"
            self.announcer.refuse(text + self.mpiexec.take_all(), self.mpiexec.exit_code)


def _lost(rank: Member, *, silent: bool) -> str:
    host = rank.here["host"]
    if silent:
        return f"host {host} is lost: it has failed, or its network has"
    return f"rank {rank.number} on {host} is lost: its keeper was killed, or its host shut down"
