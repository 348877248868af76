"""The process that takes the zygote's place when an MPI launcher starts the ranks.

To the supervisor it speaks as the zygote does, over the same control socket, pipes and report files, so the table,
the prefixes, the failure block, the exit codes and the signals are the same code for both launchers. To the other
side it is the MPI launcher's parent, and the one whom the ranks' keepers (``keeper.py``) call.

All keepers have to come before any rank runs: only then is it known who is where. Hosts are what the processes
themselves say they are on; what the MPI launcher was asked for is compared with that, and said if it differs.

A rank has ended when its keeper says so, and the keepers stay until all have: so the MPI launcher sees every rank end
at once and well, and has nothing to say about it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any, NoReturn

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import compile_target
from phalanx.launch.mpi.crew import Member, Pipe
from phalanx.launch.mpi.mpiexec import Mpiexec
from phalanx.launch.mpi.placing import RollCall, find_contradiction, place_ranks
from phalanx.launch.mpi.services import Input, StoreOnDemand
from phalanx.launch.mpi.wire import IN, MESSAGE, Channel, Door, Lost, new_key
from phalanx.launch.rank.descriptors import Descriptors
from phalanx.system import processes
from phalanx.topology.table import RankRow
from phalanx.words import format_spans

__all__ = ["serve_mpi"]

# How long keepers and the MPI launcher may take to leave once all ranks have ended, and the latter after each signal.
_LEAVE_S = 3.0
_ASKED_S = 1.5
# The same where a host is out of reach, for which the MPI launcher would wait.
_LOST_LEAVE_S = 0.7
# Keepers end their ranks within the grace; who says nothing for this much longer is given up.
_SILENCE_S = 6.0
# How long a rank whose script has failed may go on with its exit handlers.
_WIND_DOWN_S = 0.5


class _Refusal(Exception):
    """The job cannot be started.

    Attributes:
        code: the launcher's exit code.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Relay:
    def __init__(self, job: Job, wires: Descriptors) -> None:
        assert job.mpi is not None
        self.job = job
        self.wires = wires
        self.launcher = job.mpi
        self.selector = selectors.DefaultSelector()
        self.door = Door(job.address, new_key())
        self.ranks = [Member(number, Pipe.pair(ends)) for number, ends in enumerate(wires.ranks)]
        self.rows: list[RankRow] = []
        self.mpiexec: Mpiexec | None = None
        self.input = Input(self.selector, self._hand_on_input)
        self.going = False
        self.started = False
        self.ordered = False
        self.ended_by_mpiexec = False
        self.connected = True
        self.roll = RollCall(job)
        self.give_up_at: float | None = None

    def run(self) -> None:
        """Live: check, wait for the order to start, start, watch, clean up."""
        try:
            self.prepare()
            if self.wires.zygote.receive() is None:
                return
            self.start()
            while self.connected and not all(rank.told for rank in self.ranks):
                self.turn()
            self.dismiss()
        except _Refusal as refusal:
            self.dismiss()
            said = self.mpiexec.take_all() if self.mpiexec is not None else ""
            self.wires.zygote.send(event="refused", text=f"{str(refusal).rstrip()}\n{said}", code=refusal.code)
            return
        self.explain()

    def prepare(self) -> None:
        """Refuse what could only fail, once and before anything is started."""
        try:
            compile_target(self.job.target)
        except SyntaxError as error:
            raise _Refusal("".join(traceback.format_exception_only(error)), 1) from error
        except (LaunchError, OSError, ValueError, EOFError) as error:
            raise _Refusal(f"phalanx: {error}", 2) from error

    def start(self) -> None:
        """Start the MPI launcher, and wait for everything there is to wait for."""
        for ends in self.wires.ranks:
            os.set_blocking(ends.out_write, False)
            os.set_blocking(ends.err_write, False)
        try:
            self.mpiexec = Mpiexec(self.job, self.door.invitation)
        except LaunchError as error:
            raise _Refusal(f"phalanx: {error}", 2) from error
        except OSError as error:
            raise _Refusal(f"phalanx: {self.launcher.path} cannot be executed: {error.strerror}", 126) from error
        read = selectors.EVENT_READ
        self.selector.register(self.mpiexec.handle, read, self._on_mpiexec_ended)
        self.selector.register(self.mpiexec.words, read, self._on_words)
        self.selector.register(self.wires.zygote, read, self._on_order)
        self.selector.register(self.door, read, self._on_knock)
        StoreOnDemand(self.job, self.wires, self.selector, self._on_store_lost)
        self.roll.begin()

    def turn(self) -> None:
        """Wait for something, and act on it."""
        assert self.mpiexec is not None
        due = self.mpiexec.due_at() if not self.failing else None
        times = [when for when in (self.give_up_at, self.roll.due_at, due) if when is not None]
        patience_s = max(0.0, min(times) - time.monotonic()) if times else None
        for key, events in self.selector.select(patience_s):
            if isinstance(key.data, Member):
                self._on_keeper(key.data, events)
            else:
                key.data()
        now = time.monotonic()
        if not self.failing:
            for line in self.mpiexec.take_due():
                self._say(f"[{self.launcher.name}] {line}")
        if self.roll.due_at is not None and now >= self.roll.due_at:
            self._call_roll()
        if self.give_up_at is not None and now >= self.give_up_at:
            self.give_up_at = None
            for rank in self.ranks:
                if rank.status is None:
                    self._lose(rank)
        self._tell_ends()

    @property
    def failing(self) -> bool:
        """Whether the job is ending for a reason, so that what the MPI launcher says is about that."""
        return self.ordered or any(rank.status or rank.reported for rank in self.ranks)

    def _say(self, text: str) -> None:
        self.wires.zygote.send(event="said", text=text)

    # The MPI launcher.

    def _on_words(self) -> None:
        assert self.mpiexec is not None
        words = self.mpiexec.words
        descriptor = words.fileno()
        self.mpiexec.read()
        if words.closed:
            self.selector.unregister(descriptor)

    def _on_mpiexec_ended(self) -> None:
        assert self.mpiexec is not None
        self.selector.unregister(self.mpiexec.handle)
        if not self.mpiexec.words.closed:
            self.selector.unregister(self.mpiexec.words)
        self.mpiexec.reap()
        if self.mpiexec.words.closed is False:
            self.mpiexec.words.close()
        if not self.going and not self.ordered:
            missing = [rank.number for rank in self.ranks if not rank.here]
            who = f"{_ranks(missing)} had come" if missing else "the ranks were started"
            raise _Refusal(f"phalanx: {self.mpiexec.describe_end()} before {who}", self.mpiexec.exit_code)
        # The keepers, whose shims have ended with it, are ending the ranks.
        self._give_up_after(self.job.grace_s + 2.0)

    def _call_roll(self) -> None:
        try:
            said = self.roll.call([rank.number for rank in self.ranks if not rank.here])
        except LaunchError as error:
            raise _Refusal(f"phalanx: {error}", 1) from error
        if said:
            self._say(f"phalanx: {said}")

    # The supervisor.

    def _on_order(self) -> None:
        order = self.wires.zygote.receive()
        if order is None:
            self.connected = False
        elif order["do"] == "go":
            self._release()
        elif order["do"] == "end":
            self.ordered = True
            if not self.going:
                self.connected = False
                return
            for rank in self.ranks:
                if rank.channel is not None and rank.status is None:
                    # A rank that has failed by itself may finish, but not for long: MPI_Finalize, which is among its
                    # exit handlers, waits for the others.
                    spared = rank.number in order["spare"]
                    patience_s = min(order["grace_s"], _WIND_DOWN_S) if spared else order["grace_s"]
                    rank.channel.say(do="end", signal=0 if spared else order["signal"], patience_s=patience_s)
                    self._wait_for(rank)
            self._give_up_after(order["grace_s"] + _SILENCE_S)

    def _give_up_after(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        self.give_up_at = until if self.give_up_at is None else min(until, self.give_up_at)

    def _release(self) -> None:
        """Let every keeper fork its rank."""
        self.going = True
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.say(
                    do="become",
                    target=asdict(self.job.target_of(self.rows[rank.number].local_rank)),
                    run_id=self.job.run_id,
                    environment=self.job.environment(rank.number, port=self.wires.port, rows=self.rows),
                    carried=dict(os.environ),
                    directory=os.getcwd(),
                    grace_s=self.job.grace_s,
                    input=rank.number == 0 and self.input.offered,
                )
                self._wait_for(rank)

    # The keepers.

    def _on_knock(self) -> None:
        sock = self.door.knock()
        if sock is not None:
            self.selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_stranger, sock))

    def _on_stranger(self, sock: socket.socket) -> None:
        answer = self.door.answer(sock)
        if answer is True:
            return
        self.selector.unregister(sock)
        if isinstance(answer, Channel):
            self.selector.register(answer, selectors.EVENT_READ, Member(-1, {}, channel=answer))
        else:
            sock.close()

    def _wait_for(self, rank: Member) -> None:
        """Hear a keeper, unless too much of what it said waits here; and write to it, if something waits for that."""
        if rank.channel is None:
            return
        events = selectors.EVENT_WRITE if rank.channel.waiting else 0
        if not rank.congested:
            events |= selectors.EVENT_READ
        known = rank.channel.fileno() in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(rank.channel)
        elif known:
            self.selector.modify(rank.channel, events, rank)
        else:
            self.selector.register(rank.channel, events, rank)

    def _on_keeper(self, rank: Member, events: int) -> None:
        if rank.channel is None:
            return
        if events & selectors.EVENT_WRITE:
            rank.channel.flush()
        if events & selectors.EVENT_READ:
            try:
                frames = rank.channel.receive()
            except Lost:
                self._on_lost(rank)
                return
            for kind, data in frames:
                if kind == MESSAGE:
                    rank = self._on_message(rank, json.loads(data))
                elif rank.pipes:
                    rank.pipes[kind].waiting += data
                    self._feed(rank, rank.pipes[kind])
        self._wait_for(rank)

    def _on_message(self, rank: Member, message: dict[str, Any]) -> Member:
        event = message["event"]
        if event == "here":
            return self._seat(rank, message)
        if event == "started":
            rank.pid = message["pid"]
            self._tell_started()
        elif event == "reported":
            self._write_report(rank, message["report"], time.monotonic() - message["age"])
        elif event == "holds":
            rank.files |= message["files"]
        elif event == "wants":
            self.input.want()
        elif event == "exited":
            if rank.number == 0:
                self.input.release()
            self._end(rank, message["status"], time.monotonic() - message["age"], message["by_others"])
        return rank

    def _seat(self, newcomer: Member, message: dict[str, Any]) -> Member:
        """Give a keeper, which has proven that it belongs to the job, the seat of its rank."""
        number: int = message["rank"]
        size, host = message["size"], message["host"]
        if size != self.job.ranks or self.ranks[number].here:
            already = "" if size != self.job.ranks else ", of which there is one already"
            raise _Refusal(
                f"phalanx: {self.launcher.name} was asked for {self.job.ranks} ranks, and a process on {host} says it "
                f"is rank {number} of {size}{already}; take options that say how many from --mpi",
                2,
            )
        rank = self.ranks[number]
        rank.channel, rank.here = newcomer.channel, message
        self.roll.came()
        if all(other.here for other in self.ranks):
            self.roll.due_at = None
            here = [other.here for other in self.ranks]
            self.rows = place_ranks(self.job, here)
            note = find_contradiction(self.job, self.rows, here)
            rows = [asdict(row) for row in self.rows]
            # The supervisor answers with the order to go, after it has shown the table.
            self.wires.zygote.send(event="placed", rows=rows, notes=[note] if note else [])
        return rank

    def _on_lost(self, rank: Member) -> None:
        """A keeper's connection has ended, which it does not do by itself before it is dismissed."""
        assert rank.channel is not None
        with contextlib.suppress(KeyError):
            self.selector.unregister(rank.channel)
        rank.channel.close()
        rank.channel = None
        if rank.number >= 0 and rank.status is None:
            if not self.going:
                if not self.ordered and self.mpiexec is not None and self.mpiexec.code is None:
                    raise _Refusal(f"phalanx: {_lost(rank)}, before the ranks were started", 1)
                return
            self._lose(rank)

    def _lose(self, rank: Member) -> None:
        now = time.monotonic()
        own_fault = not self.failing and self.mpiexec is not None and self.mpiexec.code is None
        if own_fault:
            text = f"{_lost(rank)}; the host or the way to it may have failed, or the keeper been killed"
            report = {"type": "", "message": text, "traceback": "", "shown": False, "time": now, "code": 1}
            self._write_report(rank, {"message": {"message": text}, "phalanx": report}, now)
        self._end(rank, -signal.SIGKILL, now, by_others=not own_fault)

    def _end(self, rank: Member, status: int, when: float, by_others: bool) -> None:
        if status and by_others and not self.failing:
            self.ended_by_mpiexec = True
        rank.status, rank.ended_at, rank.by_others = status, when, by_others
        rank.pid = rank.pid or rank.here["pid"]
        self._tell_started()

    def _write_report(self, rank: Member, report: dict[str, Any], when: float) -> None:
        """Put a rank's report where the supervisor reads it, with the time on this host's clock."""
        own = report.get("phalanx")
        if own is not None and own["time"] is not None:
            own["time"] = when
        data = json.dumps(report).encode()
        descriptor = self.wires.ranks[rank.number].report
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        rank.reported = True
        if self.started:
            self.wires.zygote.send(event="reported")

    def _tell_started(self) -> None:
        if not self.started and all(rank.pid for rank in self.ranks):
            self.started = True
            self.wires.zygote.send(event="started", pids=[rank.pid for rank in self.ranks], time=time.monotonic())
            if any(rank.reported for rank in self.ranks):
                self.wires.zygote.send(event="reported")

    def _tell_ends(self) -> None:
        """Tell the supervisor of ends, each after everything that the rank has printed."""
        for rank in self.ranks:
            if self.started and rank.status is not None and not rank.told and not rank.waiting:
                rank.told = True
                ended = {"rank": rank.number, "status": rank.status, "time": rank.ended_at, "by_others": rank.by_others}
                self.wires.zygote.send(event="exited", **ended)

    def _feed(self, rank: Member, pipe: Pipe) -> None:
        """Write what a rank has printed, as far as the supervisor takes it now."""
        pipe.flush()
        known = pipe.descriptor in self.selector.get_map()
        if pipe.waiting and not known:
            self.selector.register(pipe.descriptor, selectors.EVENT_WRITE, functools.partial(self._on_room, rank, pipe))
        elif not pipe.waiting and known:
            self.selector.unregister(pipe.descriptor)

    def _on_room(self, rank: Member, pipe: Pipe) -> None:
        self._feed(rank, pipe)
        self._wait_for(rank)

    def _hand_on_input(self, data: bytes) -> None:
        reader = self.ranks[0]
        if reader.channel is not None:
            reader.channel.send(IN, data)
            self._wait_for(reader)

    def _on_store_lost(self, status: int) -> None:
        self.wires.zygote.send(event="store lost", status=status)

    # The end.

    def dismiss(self) -> None:
        """Let keepers and the MPI launcher leave; end whoever does not."""
        self.door.close()
        channels = []
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.say(do="leave", files=self._heritage(rank))
                channels.append(rank.channel)
        if self.mpiexec is not None:
            if not self.going or any(rank.channel is None for rank in self.ranks):
                # There is nobody to leave by himself: it has not begun, or a host is out of reach.
                self.mpiexec.send(signal.SIGTERM)
            control = self.wires.zygote if self.connected else None
            patience_s = _LEAVE_S if len(channels) == len(self.ranks) else _LOST_LEAVE_S
            self.connected = self.mpiexec.see_out(channels, control, patience_s)
            for signum in (signal.SIGTERM, signal.SIGKILL):
                if self.mpiexec.code is None:
                    self.mpiexec.send(signum)
                    self.connected = self.mpiexec.see_out([], control, _ASKED_S)
        processes.end_descendants()
        if self.mpiexec is not None:
            own = {rank.here["folder"] for rank in self.ranks if rank.here and rank.here["host"] == os.uname().nodename}
            for folder in own:
                self.mpiexec.remove_folder(folder)

    def _heritage(self, rank: Member) -> dict[str, list[int]]:
        """The files of ranks on the same host whose keepers cannot remove them any more."""
        lost = [other for other in self.ranks if other.channel is None and other.here and rank.here]
        neighbours = [other for other in lost if _host(other) == _host(rank)]
        return {path: identity for other in neighbours for path, identity in other.files.items()}

    def explain(self) -> None:
        """Where no rank has failed by itself, the end was the MPI launcher's doing: say what it said."""
        bad = [rank for rank in self.ranks if rank.status]
        own = [rank for rank in bad if rank.reported or not rank.by_others]
        if self.mpiexec is not None and self.ended_by_mpiexec and not own:
            text = f"phalanx: {self.mpiexec.describe_end()}, and {_ranks([rank.number for rank in bad])} with it\n"
            code = self.mpiexec.exit_code
            self.wires.zygote.send(event="refused", text=text + self.mpiexec.take_all(), code=code)


def _ranks(numbers: list[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_spans(numbers)}"


def _host(rank: Member) -> tuple[str, str]:
    return rank.here["machine"], rank.here["host"]


def _lost(rank: Member) -> str:
    return f"rank {rank.number} on {rank.here['host']} no longer answers"


def serve_mpi(job: Job, wires: Descriptors, handlers: dict[int, Any]) -> NoReturn:
    """Be the relay; called in the child of the supervisor's fork.

    Args:
        job: the job, with an MPI launcher.
        wires: its descriptors.
        handlers: the signals that the supervisor handles, which are none of the relay's business.
    """
    # Out of the terminal's foreground group: Ctrl-C is the supervisor's to interpret. Its end is the end of the
    # control socket, and then there is tidying to do, so this process does not simply die with it.
    os.setsid()
    processes.set_name("phalanx-relay")
    processes.adopt_orphans()
    for signum in handlers:
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    wires.keep_zygote_ends()
    code = 0
    try:
        _Relay(job, wires).run()
    except BaseException:
        sys.stderr.write(f"phalanx: the launcher itself failed\n{traceback.format_exc()}")
        sys.stderr.flush()
        processes.end_descendants()
        code = 70
    finally:
        os._exit(code)
