"""The process beside each rank that an MPI launcher has started: the rank's parent, and its link to ``phalanx run``.

It connects to ``phalanx run``, reports which rank it stands for and on which host, waits for the order that says what
to run, and forks the rank. From then on it hands on what the rank prints, what it reports, and how it ends, in that
order. It is the subreaper of everything below it, so no process that the rank has started outlives the rank.

There are four ways in which the rank is made to end:

- ``phalanx run`` orders it: the rank is sent a signal, and killed after the grace.
- The shim is asked to end (SIGTERM and the like), because the MPI launcher ends the job, or the batch system does. The
  rank first gets a moment to end by itself, because it may be the one that has just called ``MPI_Abort``, and then its
  exit code is the one that counts. After that it ends as above, and ``phalanx run`` learns that the rank was not the
  cause.
- The shim is killed: so is the rank, at once. Some MPI launchers end a job like that. ``MPI_Abort`` may then not even
  end the process that calls it; what that process has printed shows that it did.
- The connection is lost: the rank is killed at once, and so are all others, by their keepers.

A stopped keeper is continued by the kernel when an order comes, and by the shim when its rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.mpi_launcher import carried_environment, find_abort, place_of
from phalanx.launch.job.options import Diagnosis
from phalanx.launch.job.target import Target, compile_target
from phalanx.launch.mpi.child import Child
from phalanx.launch.mpi.leftovers import remove_unused
from phalanx.launch.mpi.streams import Streams
from phalanx.launch.output.report import Report
from phalanx.launch.rank.descriptors import RankEnds, report_name
from phalanx.launch.rank.held_signals import HeldSignals
from phalanx.launch.rank.start import RankStart, enter_rank
from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.launch.relay.channel import Lost, join
from phalanx.store.torch_server import is_own
from phalanx.system import processes
from phalanx.system.host import this_host
from phalanx.system.limits import count_oom_kills

__all__ = ["ASKED", "PASSED_ON", "keep"]

# How many bytes of the rank's output may wait for the network before the rank has to.
_MOST_WAITING = 1 << 20
# How long a rank may take to end by itself once the MPI launcher wants it to.
_OWN_END_S = 0.25
# The signals that ask a shim to end, and those that are only handed on to the rank, once it can have a handler.
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def keep(kind: str, shim: int, handlers: dict[int, Any]) -> RankStart:
    """Be the keeper; called in the child of the shim's fork, with the signals that it handles blocked.

    Args:
        kind: which MPI launcher started the shim.
        shim: a pipe by which the shim passes on the signals that it receives; its end is the shim's end.
        handlers: the signal handlers that the interpreter started with, which the rank gets back.

    Returns:
        In the rank, its start. The keeper itself never returns.
    """
    keeper = os.getpid()
    try:
        own = _Keeper(kind, shim, _wake_up_by_signals(shim, handlers), handlers, os.environ.pop(settings.MPI_JOIN))
    except LaunchError as error:
        _end_at_once(f"phalanx: {error}\n")
    except BaseException:
        _end_at_once(traceback.format_exc())
    try:
        while True:
            start = own.turn()
            if start is not None:
                return start
    except BaseException:
        if os.getpid() == keeper:
            own.give_up(traceback.format_exc())
        raise


def _wake_up_by_signals(shim: int, handlers: dict[Any, Any]) -> tuple[int, int]:
    """Become a process of its own in which signals do nothing but write to a pipe; the pipe's two ends."""
    os.setsid()
    processes.adopt_orphans()
    processes.set_name("phalanx-keeper")
    wakeup = os.pipe()
    for descriptor in (*wakeup, shim):
        os.set_blocking(descriptor, False)
    for signum in handlers:
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(wakeup[1], warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return wakeup


class _Keeper:
    """A keeper that has joined ``phalanx run``, which is what making this object does.

    Raises:
        LaunchError: ``phalanx run`` cannot be reached, or the MPI launcher did not say which rank this is.
    """

    def __init__(
        self, kind: str, shim: int, wakeup: tuple[int, int], handlers: dict[int, Any], invitation: str
    ) -> None:
        self.kind = kind
        self.shim = shim
        self.wakeup = wakeup
        self.handlers = handlers
        said = place_of(kind, os.environ)
        self.rank: int = said["rank"]
        try:
            self.channel = join(invitation)
        except OSError as error:
            where = invitation.rpartition(":")[0]
            raise LaunchError(
                f"rank {self.rank} on {this_host().name} could not reach phalanx run at {where}: {error}\n"
                f"  is that address reachable from here? Choose another one with --address"
            ) from error
        self.channel.continue_when_called()
        self.connected = True
        remove_unused()
        self.child: Child | None = None
        self.held = HeldSignals()
        self.oom_kills = count_oom_kills()
        self.ended = False
        self.asked_at: float | None = None
        self.ask_with = int(signal.SIGTERM)
        cpus = sorted(os.sched_getaffinity(0))
        self.channel.say(event="here", pid=os.getpid(), cpus=cpus, **said, **_host())

    # One turn of the event loop.

    def turn(self) -> RankStart | None:
        """Wait for something, and act on it. Returns the rank's start in the rank only."""
        channel = self.channel
        poll = select.poll()
        if self.connected:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.waiting else 0))
        for descriptor in (self.wakeup[0], self.shim):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        streams = self.child.streams if self.child is not None else None
        if streams is not None:
            for descriptor in streams.outputs if channel.waiting < _MOST_WAITING else ():
                poll.register(descriptor, select.POLLIN)
            if streams.feed.descriptor >= 0:
                # With nothing to write, this reports only that the reader has gone.
                poll.register(streams.feed.descriptor, select.POLLOUT if streams.feed.hungry else 0)
        ready = dict(poll.poll(self._patience_ms()))
        if self.wakeup[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup[0], 4096)
            if self.child is not None:
                self.child.send_report()
        if self.shim in ready:
            self._read_shim()
        if streams is not None:
            for descriptor in [descriptor for descriptor in streams.outputs if descriptor in ready]:
                self._send(*streams.read(descriptor))
            if streams.feed.descriptor in ready and streams.feed.feed():
                self._say(event="wants")
        start = self._read_orders(ready.get(channel.fileno(), 0)) if self.connected else None
        if start is None:
            self._act_on_time()
            self._reap()
        return start

    def _patience_ms(self) -> float | None:
        kill_at = self.child.kill_at if self.child is not None else None
        times = [when for when in (self.asked_at, kill_at) if when is not None]
        waits = [max(0.0, min(times) - time.monotonic())] if times else []
        due_in_s = self.child.observer.due_in_s() if self.child is not None else None
        waits += [wait_s for wait_s in (due_in_s, self.held.due_in_s()) if wait_s is not None]
        return min(waits) * 1000 + 1 if waits else None

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if self.asked_at is not None and now >= self.asked_at:
            self.asked_at = None
            if self.child is not None:
                self.child.by_others = True
                self.child.end(self.ask_with, self.child.grace_s)
        if self.child is not None:
            self.child.kill_if_due(now)
            self.child.observer.look()
        self.held.send({self.rank: self.child.pid} if self.child is not None else {})

    def _read_shim(self) -> None:
        try:
            signals = os.read(self.shim, 64)
        except BlockingIOError:
            return
        if not signals:
            os.close(self.shim)
            self.shim = -1
            self._kill_with_shim()
            return
        for signum in signals:
            if signum in PASSED_ON:
                self.held.add([self.rank], signum)
                continue
            self.ask_with = signum
        if any(signum in ASKED for signum in signals) and self.asked_at is None:
            self.asked_at = time.monotonic() + _OWN_END_S

    def _kill_with_shim(self) -> None:
        if self.child is not None:
            self.child.by_others = True
            self.child.end(signal.SIGKILL, 0.0)
        elif not self.ended:
            self.leave()

    def _read_orders(self, events: int) -> RankStart | None:
        try:
            orders = self.channel.serve(events)
        except Lost:
            self.connected = False
            if self.child is None:
                self.leave()
            self.child.end(signal.SIGKILL, 0.0)
            return None
        for order in orders:
            if isinstance(order, bytes):
                self._feed(order)
            elif order["do"] == "become":
                start = self._start(order)
                if start is not None:
                    return start
            elif order["do"] == "end":
                if self.child is not None:
                    if order["where"]:
                        self.child.send_stack()
                    self.child.end(order["signal"], order["patience_s"])
            elif order["do"] == "signal":
                self.held.add([self.rank], order["signal"])
            elif order["do"] == "stacks":
                if self.child is not None:
                    self.child.send_stack()
            elif order["do"] == "examine":
                if self.child is not None:
                    self.child.examine(order)
            elif order["do"] == "look":
                # Of a connection to the job's store: may it be this user's?
                if is_own(tuple(order["end"]), tuple(order["other_end"])):
                    self._say(event="owns", number=order["number"])
            elif order["do"] == "leave":
                self.leave()
        return None

    def _feed(self, data: bytes) -> None:
        """Hand a block of input on to the rank; the empty one is the end."""
        if self.child is None:
            return
        if not data:
            self.child.streams.feed.close()
        elif self.child.streams.feed.feed(data):
            self._say(event="wants")

    # The rank.

    def _start(self, order: dict[str, Any]) -> RankStart | None:
        """Fork the rank. Returns its start in the rank; None in the keeper, and if the rank cannot be started."""
        target = Target(**{**order["target"], "argv": tuple(order["target"]["argv"])})
        own = {**carried_environment(order["carried"], os.environ), **order["environment"]}
        try:
            os.chdir(order["directory"])
            code, spec = compile_target(target)
        except (OSError, ValueError, EOFError, SyntaxError, LaunchError) as error:
            self._refuse(f"{type(error).__name__}: {error} (on {this_host().name})")
            return None
        streams = Streams(fed=order["input"])
        report = os.memfd_create(report_name(order["run_id"], self.rank))
        trace = Trace(open_trace(order["run_id"]), order["run_id"])
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            self._refuse(f"the rank could not be started: {error.strerror} (on {this_host().name})")
            return None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            ends = RankEnds(streams.rank_out, streams.rank_err, report, trace.descriptor)
            start = RankStart(
                self.rank,
                target,
                order["run_id"],
                own,
                ends,
                code,
                spec,
                keeper,
                quiet=order["quiet"],
                reads=order["input"],
            )
            self.channel.close()
            streams.keep_rank_ends()
            for descriptor in (*self.wakeup, self.shim):
                if descriptor >= 0:
                    os.close(descriptor)
            enter_rank(start, self.handlers, resource.getrlimit(resource.RLIMIT_NOFILE))
            return start
        diagnosis = Diagnosis(order["warn_after_s"]) if order["warn_after_s"] else None
        grace_s = order["grace_s"]
        child = self.child = Child(pid, streams, report, trace, grace_s, self._say, self.rank, diagnosis)
        self.held.begin()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        streams.keep_own_ends()
        # Only the rank needs the rest, as the socket of its process manager; pipes may be inherited by mistake.
        kept = [*self.wakeup, self.shim, self.channel.fileno()]
        _close_all_but([*kept, *child.own_descriptors()])
        self._say(event="started", pid=pid)
        if streams.feed.descriptor >= 0:
            self._say(event="wants")
        return None

    def _refuse(self, text: str) -> None:
        self._say(event="reported", age=0.0, report=_plain_report(text))
        self._say(event="exited", status=2, age=0.0, by_others=False, by_itself=True, out_of_memory=False)
        self.ended = True

    def _send(self, kind: bytes, data: bytes) -> None:
        if data and self.connected:
            self.channel.send(kind, data)

    def _reap(self) -> None:
        """Report the rank's end, after everything that it has printed."""
        child = self.child
        if child is None:
            return
        found = child.reap()
        if found is None:
            return
        status, when = found
        for kind, data in child.streams.drain():
            self._send(kind, data)
        by_itself = child.ended_by_itself(status)
        by_others = child.by_others and not by_itself
        if self._has_aborted(child, status):
            by_others = False
        elif not by_others and (late := child.ended_late(status)):
            self._say(event="reported", age=0.0, report=_plain_report(late, 128 - status, True))
        out_of_memory = count_oom_kills() > self.oom_kills
        operation = child.last_operation(when) if status != 0 else ""
        age = time.monotonic() - when
        self._say(
            event="exited",
            status=status,
            age=age,
            by_others=by_others,
            by_itself=by_itself,
            out_of_memory=out_of_memory,
            operation=operation,
        )
        self.child = None
        self.ended = True
        if not self.connected:
            self.leave()

    def _has_aborted(self, child: Child, status: int) -> bool:
        """Whether this rank called MPI_Abort, or MPI ended it for an error of its own; if so, that is its report.

        Such an error is said to be a consequence. It often is: a library that reads the memory of a rank which has just
        ended, for one, ends the process that reads. Where it is not, no other rank has failed by itself.
        """
        abort = find_abort(self.kind, child.streams.last_errors) if status else None
        # The MPI launcher may kill the shim of such a rank before the rank has ended, or after that.
        if abort is None or not (self.shim < 0 or abort.by_mpi or status == abort.code):
            return False
        if not child.reported:
            self._say(event="reported", age=0.0, report=_plain_report(abort.text, abort.code, abort.by_mpi))
        return True

    # The end.

    def _say(self, **message: Any) -> None:
        if self.connected:
            self.channel.say(**message)

    def leave(self) -> NoReturn:
        """Remove the files that the rank has left, and end."""
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
            processes.end_descendants()
        remove_unused()
        # Last, because a relay that ends kills its descendants whose connections have ended.
        self.channel.finish(1.0)
        os._exit(0 if self.connected else 1)

    def give_up(self, text: str) -> NoReturn:
        """Report that this process itself has failed, and end everything below."""
        if self.connected and not self.ended:
            with contextlib.suppress(Exception):
                self._refuse(f"the process that watches the rank failed\n{text}")
                self.channel.finish(1.0)
        _end_at_once(text)


def _host() -> dict[str, str]:
    """This host's name, and what distinguishes it from another one of the same name."""
    here = this_host()
    return {"host": here.name, "machine": here.machine}


def _plain_report(text: str, code: int = 2, consequence: bool = False) -> dict[str, Any]:
    return Report("", text, "", False, time.monotonic(), code, consequence=consequence).to_record()


def _end_at_once(text: str) -> NoReturn:
    """End everything below, and this process, which itself has failed; ``text`` is printed."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    processes.end_descendants()
    os._exit(70)


def _close_all_but(kept: Iterable[int]) -> None:
    """Close what this process has inherited and does not need, and open the null device as its standard streams."""
    own = {*kept}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in own:
            with contextlib.suppress(OSError):
                os.close(int(name))
