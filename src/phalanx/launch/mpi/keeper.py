"""The process beside each rank that an MPI launcher has started: the rank's parent, and its voice.

It connects to ``phalanx run``, says which rank it stands for and where, waits until all are there and it is told what
to run, forks the rank, and from then on hands on what the rank prints, what it reports, and how it ends, in that
order. It is the subreaper of everything below it, so nothing the rank has started outlives the rank.

Whoever wants the rank to end:

- ``phalanx run`` says so: the rank is asked, and after the grace killed;
- the shim is asked to end (SIGTERM and the like), because the MPI launcher ends the job or the batch system does: the
  rank gets a moment to end by itself, for it may be the one that has just called ``MPI_Abort`` and its exit code is
  the one that counts; then the same as above, and ``phalanx run`` is told whose doing it was;
- the shim is killed: so is the rank, at once. Hydra ends a job like that, and its ``MPI_Abort`` does not even end the
  process that calls it; what that process has printed says that it did;
- the connection is lost: the rank is killed at once, like all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import time
import traceback
from typing import Any, NoReturn

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.mpi_launcher import carried_environment, place_of
from phalanx.launch.job.target import Target, compile_target
from phalanx.launch.mpi.leftovers import SharedMemoryWatch
from phalanx.launch.mpi.streams import Streams
from phalanx.launch.mpi.wire import IN, MESSAGE, Channel, Lost, join
from phalanx.launch.rank.descriptors import RankEnds, report_name
from phalanx.launch.rank.start import RankStart, enter_rank
from phalanx.system import processes

__all__ = ["ASKED", "PASSED_ON", "keep"]

# How much of the rank's output may wait for the network before the rank has to.
_MOST_WAITING = 1 << 20
# How long a rank may take to end by itself once the MPI launcher wants it to.
_OWN_END_S = 0.25
# A file appears before it is mapped.
_SECOND_LOOK_S = 0.05
# How long a rank that is to be signalled may take to stand still; one that is in the kernel finishes there first.
_STANDSTILL_S = 0.02
# How long other ranks may still hold shared memory once all are to end.
_SHARED_S = 0.5
# What MPICH and Intel MPI print in the process that calls MPI_Abort, or that their own errors end.
_ABORT = re.compile(rb"^Abort\((-?\d+)\)(?: on node \d+)?[^\n]*", re.MULTILINE)
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def keep(kind: str, shim: int, handlers: dict[int, Any]) -> RankStart:
    """Be the keeper; called in the child of the shim's fork, with the signals that it handles blocked.

    Args:
        kind: whose MPI launcher started the shim.
        shim: a pipe on which the shim tells of signals, and of its end.
        handlers: the signal handlers that the interpreter started with, which the rank gets back.

    Returns:
        In the rank, its start. The keeper itself never returns.
    """
    own = _Keeper(kind, shim, handlers)
    try:
        return own.run(os.environ.pop(settings.MPI_JOIN))
    except LaunchError as error:
        own.give_up(f"phalanx: {error}\n")
    except BaseException:
        if os.getpid() == own.pid:
            own.give_up(traceback.format_exc())
        raise


class _Keeper:
    def __init__(self, kind: str, shim: int, handlers: dict[Any, Any]) -> None:
        self.pid = os.getpid()
        self.kind = kind
        self.shim = shim
        self.handlers = handlers
        self.channel: Channel | None = None
        self.watch = SharedMemoryWatch()
        self.streams: Streams | None = None
        self.rank = -1
        self.child = 0
        self.grace_s = 1.0
        self.report = -1
        self.reported = b""
        self.connected = True
        self.asked_by_others = False
        self.ended = False
        self.asked_at: float | None = None
        self.ask_with = int(signal.SIGTERM)
        self.kill_at: float | None = None
        self.look_at: float | None = None
        self.wakeup = (-1, -1)

    def run(self, invitation: str) -> RankStart:
        """Join, fork, watch. Returns the start in the rank only."""
        os.setsid()
        processes.adopt_orphans()
        processes.set_name("phalanx-keeper")
        self.wakeup = os.pipe()
        for descriptor in (*self.wakeup, self.shim):
            os.set_blocking(descriptor, False)
        for signum in self.handlers:
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        said = place_of(self.kind, os.environ)
        self.rank = said["rank"]
        try:
            self.channel = join(invitation)
        except OSError as error:
            where = invitation.rpartition(":")[0]
            self.give_up(
                f"phalanx: rank {self.rank} on {os.uname().nodename} could not reach phalanx run at {where}: {error}\n"
                f"  is that address reachable from here? Choose another one with --address\n"
            )
        self.channel.say(event="here", pid=os.getpid(), cpus=sorted(os.sched_getaffinity(0)), **said, **_host())
        while True:
            start = self.turn()
            if start is not None:
                return start

    # One turn of the event loop.

    def turn(self) -> RankStart | None:
        channel = self.channel
        assert channel is not None
        poll = select.poll()
        if self.connected:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.waiting else 0))
        for descriptor in (self.wakeup[0], self.shim, self.watch.descriptor):
            if descriptor is not None and descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        streams = self.streams
        if streams is not None:
            for descriptor in streams.outputs if channel.waiting < _MOST_WAITING else ():
                poll.register(descriptor, select.POLLIN)
            if streams.input >= 0:
                # With nothing to write, this hears of the reader's end only.
                poll.register(streams.input, select.POLLOUT if streams.hungry else 0)
        ready = dict(poll.poll(self._patience_ms()))
        if self.wakeup[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup[0], 4096)
            self._send_report()
        if self.shim in ready:
            self._hear_shim()
        if self.watch.descriptor in ready:
            self.watch.drain()
            self._look()
            self.look_at = time.monotonic() + _SECOND_LOOK_S
        if streams is not None:
            for descriptor in [descriptor for descriptor in streams.outputs if descriptor in ready]:
                self._send(*streams.read(descriptor))
            if streams.input in ready and streams.feed():
                self._say(event="wants")
        start = self._hear_launcher(ready.get(channel.fileno(), 0)) if self.connected else None
        if start is None:
            self._act_on_time()
            self._reap()
        return start

    def _patience_ms(self) -> float | None:
        times = [when for when in (self.asked_at, self.kill_at, self.look_at) if when is not None]
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 1) if times else None

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if self.look_at is not None and now >= self.look_at:
            self.look_at = None
            self._look()
        if self.asked_at is not None and now >= self.asked_at:
            self.asked_at = None
            if self.child:
                self.asked_by_others = True
                self._end(self.ask_with, self.grace_s)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            if self.child:
                self._look_before(signal.SIGKILL)

    def _hear_shim(self) -> None:
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
                if self.child:
                    processes.send_to_group(self.child, signum)
                continue
            self.ask_with = signum
        if any(signum in ASKED for signum in signals) and self.asked_at is None:
            self.asked_at = time.monotonic() + _OWN_END_S

    def _kill_with_shim(self) -> None:
        if not self.child:
            if not self.ended:
                self.leave()
            return
        self.asked_by_others = True
        self._end(signal.SIGKILL, 0.0)

    def _hear_launcher(self, events: int) -> RankStart | None:
        channel = self.channel
        assert channel is not None
        if events & select.POLLOUT:
            channel.flush()
        if not events & ~select.POLLOUT:
            return None
        try:
            frames = channel.receive()
        except Lost:
            self.connected = False
            if self.child:
                self._end(signal.SIGKILL, 0.0)
            else:
                self.leave()
            return None
        for kind, data in frames:
            if kind == IN and self.streams is not None:
                if not data:
                    self.streams.close_input()
                elif self.streams.feed(data):
                    self._say(event="wants")
            if kind != MESSAGE:
                continue
            order = _decode(data)
            if order["do"] == "become":
                start = self._start(order)
                if start is not None:
                    return start
            elif order["do"] == "end" and self.child:
                self._end(order["signal"], order["patience_s"])
            elif order["do"] == "leave":
                self.watch.add(order["files"])
                self.leave()
        return None

    # The rank.

    def _start(self, order: dict[str, Any]) -> RankStart | None:
        """Fork the rank. Returns its start in it, None in the keeper, also when it cannot be started."""
        self.grace_s = order["grace_s"]
        target = Target(**{**order["target"], "argv": tuple(order["target"]["argv"])})
        own = {**carried_environment(order["carried"], os.environ), **order["environment"]}
        try:
            os.chdir(order["directory"])
            code, spec = compile_target(target)
        except (OSError, ValueError, EOFError, SyntaxError, LaunchError) as error:
            self._refuse(f"{type(error).__name__}: {error} (on {os.uname().nodename})")
            return None
        streams = self.streams = Streams(fed=order["input"])
        self.report = os.memfd_create(report_name(order["run_id"], self.rank))
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        keeper = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            self._refuse(f"the rank could not be started: {error.strerror} (on {os.uname().nodename})")
            return None
        if child == 0:
            signal.set_wakeup_fd(-1)
            ends = RankEnds(streams.rank_out, streams.rank_err, self.report)
            start = RankStart(self.rank, target, order["run_id"], own, ends, code, spec, keeper)
            assert self.channel is not None
            self.channel.close()
            self.watch.close()
            streams.keep_rank_ends()
            for descriptor in (*self.wakeup, self.shim):
                if descriptor >= 0:
                    os.close(descriptor)
            enter_rank(start, self.handlers, resource.getrlimit(resource.RLIMIT_NOFILE))
            return start
        self.child = child
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        streams.keep_own_ends()
        self._let_go(streams)
        self._say(event="started", pid=child)
        if streams.input >= 0:
            self._say(event="wants")
        return None

    def _let_go(self, streams: Streams) -> None:
        """Close what is the rank's: its process manager's socket, and pipes that leaked from the outside."""
        assert self.channel is not None
        own = {*self.wakeup, self.shim, self.watch.descriptor, self.report, self.channel.fileno(), *streams.own_ends()}
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in own:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def _refuse(self, text: str) -> None:
        self._say(event="reported", age=0.0, report=_plain_report(text))
        self._say(event="exited", status=2, age=0.0, by_others=False)
        self.ended = True

    def _send(self, kind: bytes, data: bytes) -> None:
        if data and self.connected and self.channel is not None:
            self.channel.send(kind, data)

    def _send_report(self) -> None:
        if self.report < 0:
            return
        data = os.pread(self.report, os.fstat(self.report).st_size, 0)
        if data and data != self.reported:
            self.reported = data
            with contextlib.suppress(ValueError):
                report = _decode(data)
                when = (report.get("phalanx") or {}).get("time")
                age = 0.0 if when is None else max(0.0, time.monotonic() - when)
                self._say(event="reported", age=age, report=report)

    def _look(self) -> None:
        if self.child:
            new = self.watch.look([self.child, *processes.descendants_of([self.child])])
            if new:
                # Whoever is left can remove them if this process cannot.
                self._say(event="holds", files=new)

    def _look_before(self, signum: int) -> None:
        """Signal the rank; held still first where that ends it, or it could make another file after the look.

        Not where the rank has a handler: a signal that finds the threads stopped goes to whichever wakes first, and one
        that an MPI library has started does not wake Python's main thread from its sleep.
        """
        if not processes.catches(self.child, signum):
            processes.send_to_group(self.child, signal.SIGSTOP)
            processes.wait_until_stopped(self.child, _STANDSTILL_S)
        self._look()
        processes.send_to_group(self.child, signum)
        # A stopped process would not see anything but SIGKILL.
        processes.send_to_group(self.child, signal.SIGCONT)

    def _end(self, signum: int, patience_s: float) -> None:
        self._look_before(signum)
        until = time.monotonic() + patience_s
        self.kill_at = until if self.kill_at is None else min(until, self.kill_at)

    def _reap(self) -> None:
        if not self.child:
            # Orphans of an ended rank are reaped with their end.
            return
        info = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            self._reap_orphans()
            return
        now = time.monotonic()
        self.watch.look(processes.descendants_of([os.getpid()]))
        # Left a zombie until here: its number, which is also its group's, stayed its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        self.child = 0
        self.kill_at = None
        self._send_report()
        processes.end_descendants()
        if self.streams is not None:
            for kind, data in self.streams.drain():
                self._send(kind, data)
        status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        status = self._note_abort(status)
        self._say(event="exited", status=status, age=time.monotonic() - now, by_others=self.asked_by_others)
        self.ended = True
        if not self.connected:
            self.leave()

    def _note_abort(self, status: int) -> int:
        """The exit status that counts: the one given to MPI_Abort, if it was this rank that called it."""
        if self.shim >= 0 or not self.asked_by_others or not status or self.streams is None:
            return status
        said = _ABORT.search(self.streams.last_words)
        if said is None:
            return status
        self.asked_by_others = False
        if not self.reported:
            code = int(said[1]) & 0xFF or 1
            self._say(event="reported", age=0.0, report=_plain_report(said[0].decode(errors="replace"), code))
        return status

    def _reap_orphans(self) -> None:
        for pid in processes.children_of(os.getpid()):
            if pid != self.child:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    # The end.

    def _say(self, **message: Any) -> None:
        if self.connected and self.channel is not None:
            self.channel.say(**message)

    def leave(self) -> NoReturn:
        """Remove what the rank has left, and end; the shim ends with this process, and well."""
        if self.child:
            self._look_before(signal.SIGKILL)
            processes.end_descendants()
        self.watch.remove()
        # Others may be being killed just now too, and hold what they share with this one a moment longer.
        until = time.monotonic() + _SHARED_S
        while self.watch.left() and time.monotonic() < until:
            time.sleep(0.02)
            self.watch.remove()
        if self.channel is not None:
            self.channel.finish(1.0)
        os._exit(0 if self.connected else 1)

    def give_up(self, text: str) -> NoReturn:
        """Say what is wrong with the launcher itself, and end everything below."""
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        if self.connected and self.channel is not None and not self.ended:
            with contextlib.suppress(Exception):
                self._refuse(f"the process that watches the rank failed\n{text}")
                self.channel.finish(1.0)
        processes.end_descendants()
        os._exit(70)


def _decode(data: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(data)
    return decoded


def _host() -> dict[str, str]:
    """This host's name, what tells it from another one of the same name, and the MPI launcher's folder on it."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"host": os.uname().nodename, "machine": boot, "folder": os.environ.get("PMIX_SERVER_TMPDIR", "")}


def _plain_report(text: str, code: int = 2) -> dict[str, Any]:
    own = {
        "type": "",
        "message": text,
        "traceback": "",
        "shown": False,
        "time": time.monotonic(),
        "code": code,
    }
    return {"message": {"message": text}, "phalanx": own}
