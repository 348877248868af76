"""The process that imports torch once and forks the ranks.

Prior art: Android's zygote, Emacs' unexec, gunicorn's ``preload_app``, CPython's own ``forkserver``.
Importing torch costs about a second of CPU, so eight processes that each import it take eight; forked after
one import they share its pages and start in milliseconds.

A fork copies only the calling thread, so the zygote starts no thread: locks that another thread held would
stay locked in the rank for ever. numpy's OpenBLAS is the one exception: if OMP_NUM_THREADS is above 1, it starts a
pool of threads at import, and its own fork handlers stop and restart that pool.

The zygote is the parent of every rank, and adopts the processes that a rank leaves behind. So the zygote ends them, and
not the supervisor: as long as it has not reaped a child, the child's process id cannot be given to another process.
When the control socket shows that the supervisor has ended, the zygote kills everything and ends as well.

With ``--restarts`` it stays when an attempt is over, with torch imported and no process left, until the supervisor
orders the next attempt or ends it. Nothing of an attempt is used again: the order comes with new pipes, a new control
socket and a new port of the store.
"""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import Any

from phalanx import settings
from phalanx.errors import PROCESS_LIMIT_HINT
from phalanx.launch.job.job import Job, Share, next_attempt
from phalanx.launch.job.target import Refusal, prepare_target
from phalanx.launch.rank.descriptors import (
    Control,
    Descriptors,
    ZygoteDescriptors,
    receive_descriptors,
    release_input,
    report_name,
)
from phalanx.launch.rank.held_signals import HeldSignals
from phalanx.launch.rank.preload import preload
from phalanx.launch.rank.start import RankStart, enter_rank, leave_siblings
from phalanx.launch.rank.torch_store import host_store
from phalanx.launch.rank.trace import Trace
from phalanx.store.ended import EndsChannel
from phalanx.system import processes
from phalanx.system.limits import count_oom_kills

__all__ = ["Inheritance", "serve"]

# How long a rank whose script has failed may go on with its exit handlers and its threads. This is longer than the
# grace, because the rank may be saving something, and limited, because the job cannot end before the rank does.
WIND_DOWN_S = 5.0
# How long ranks may take to write their stacks before they are ended; those that are late are left out. A user who asks
# where a running job is waits longer.
STACKS_S = 0.2
STACKS_OF_RUNNING_S = 3.0


@dataclass(frozen=True)
class Inheritance:
    """The settings that the launcher changed for itself, and that the ranks get back.

    Attributes:
        handlers: the signal handlers that the interpreter started with.
        file_limit: the soft and hard limit on open files.
    """

    handlers: dict[int, Any]
    file_limit: tuple[int, int]


@dataclass(frozen=True)
class _Zygote:
    """The zygote until the ranks of an attempt exist."""

    job: Job
    share: Share
    descriptors: ZygoteDescriptors
    inheritance: Inheritance

    def run(self) -> RankStart | None:
        """Prepare, and serve one attempt after the other. Returns in each rank its start, in the zygote None."""
        attempt: _Zygote | None = self
        try:
            code, spec = self._prepare()
            while attempt is not None:
                following = attempt._serve(code, spec)
                if isinstance(following, RankStart):
                    return following
                attempt = following
        except Refusal as refusal:
            control = (attempt or self).descriptors.zygote
            control.send(event="refused", text=f"{str(refusal).rstrip()}\n", code=refusal.code)
            processes.end_descendants()
        return None

    def _serve(self, code: CodeType | None, spec: ModuleSpec | None) -> RankStart | _Zygote | None:
        """Wait for the order to start, fork, watch. Returns in each rank its start, in the zygote the next attempt."""
        if self.descriptors.zygote.receive() is None:
            return None
        # From the first rank on only this process can find what the ranks start, so it must outlive the supervisor. It
        # sees the supervisor's end as the end of the socket, unless it has been stopped.
        processes.wake_with_parent()
        # A rank restores its handlers before it unblocks, so no signal is lost to the zygote's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        forked = self._fork_all(code, spec)
        if isinstance(forked, RankStart):
            return forked
        forked.watch()
        forked.kill_everything()
        return self._next() if self._may_follow else None

    @property
    def _may_follow(self) -> bool:
        """Whether this process may have to start another attempt. On several hosts each attempt has new zygotes."""
        return self.job.is_local and not self.job.attempt.is_last

    def _next(self) -> _Zygote | None:
        """Report that no process of this attempt is left, and wait for the next one; None if there is none."""
        control = self.descriptors.zygote
        control.send(event="over")
        while (order := control.receive()) is not None:
            # An order about ranks may come first: they had not ended yet when it was given.
            if order["do"] == "again":
                received = receive_descriptors(control, len(self.share.ranks), self.job.run_id)
                if received is None:
                    return None
                self.descriptors.close()
                descriptors, listener = received
                share = replace(self.share, listener=listener, port=listener.getsockname()[1])
                return replace(self, job=next_attempt(self.job, order["key"]), share=share, descriptors=descriptors)
        return None

    def _prepare(self) -> tuple[CodeType | None, ModuleSpec | None]:
        """Do once what every rank would have to do: compile the target and import torch."""
        if not self.job.target.is_python:
            return None, None
        os.environ["OMP_NUM_THREADS"] = self.job.threads
        os.environ.update(self.job.before_torch())
        compiled = prepare_target(self.job.target)
        if not self.job.preload:
            return compiled
        # The import makes no garbage, so collecting would only cost time.
        gc.disable()
        try:
            preload()
        except Exception as error:
            raise Refusal(f"phalanx: torch cannot be imported\n\n{traceback.format_exc()}", 1) from error
        # The garbage collector of a rank then leaves these objects alone; marking them would copy every shared page.
        gc.freeze()
        gc.enable()
        return compiled

    def _fork_all(self, code: CodeType | None, spec: ModuleSpec | None) -> RankStart | _Ranks:
        """Fork the store and the ranks. Returns in each rank its start, and in the zygote all ranks."""
        job, share, descriptors = self.job, self.share, self.descriptors
        zygote, oom_kills = os.getpid(), count_oom_kills()
        store = ends = None
        if share.listener is not None:
            if job.target.is_python:
                ends = EndsChannel()
                store = _fork("the store could not be started")
                if store == 0:
                    descriptors.zygote.close()
                    descriptors.close_rank_ends()
                    host_store(share.listener, zygote, ends)
                ends.keep_writing_end()
            # The store has the socket now. Without a store, as for a program, rank 0 opens the port itself.
            share.listener.close()
        pids: dict[int, int] = {}
        for part, rank in enumerate(share.ranks):
            pid = _fork(f"only {part} of {len(share.ranks)} ranks could be started")
            if pid == 0:
                descriptors.zygote.close()
                descriptors.close_rank_ends(but=part)
                if ends is not None:
                    ends.close()
                start = RankStart(
                    rank,
                    job.target_of(share.rows[rank].local_rank),
                    job.run_id,
                    job.environment(rank, port=share.port, rows=share.rows),
                    descriptors.ranks[part],
                    code,
                    spec,
                    zygote,
                    part=part,
                    cpus=job.cpus[part] if job.cpus else (),
                    quiet=job.quiet,
                    reads=job.reads(rank, terminal=share.terminal),
                    terminal=job.keeps_terminal(rank),
                )
                enter_rank(start, self.inheritance.handlers, self.inheritance.file_limit)
                if job.target.is_python and job.preload:
                    leave_siblings(start)
                return start
            pids[part] = pid
        descriptors.close_rank_ends()
        descriptors.zygote.send(event="started", pids=list(pids.values()), time=time.monotonic())
        if not self._may_follow:
            # The ranks of a further attempt read on where those of this one have stopped.
            release_input()
        hosts = [row.host for row in share.rows] if len({row.host for row in share.rows}) > 1 else []
        control, trace = descriptors.zygote, descriptors.trace
        agent = 0 if job.is_local else os.getppid()
        return _Ranks(job.run_id, share.ranks, control, trace, pids, store, oom_kills, ends, hosts, agent)


def _fork(otherwise: str) -> int:
    try:
        return os.fork()
    except OSError as error:
        raise Refusal(
            f"phalanx: {otherwise}: {error.strerror}; start fewer ranks, or {PROCESS_LIMIT_HINT}, or free memory", 1
        ) from error


@dataclass
class _Ranks:
    """The ranks while they run, and the zygote as their parent.

    Attributes:
        run_id: the job's name.
        numbers: the ranks' numbers in the world; everything else here counts them from 0.
        supervisor: where orders come from and events go to.
        trace: where the ranks write their stacks.
        pids: the process id of each rank that has not ended, by rank.
        store: the process id of torch's store; None if there is none (any more).
        oom_kills: how many processes the kernel had killed for want of memory before the ranks were started.
        ends: the channel through which this process tells the store that a rank has ended; None if there is no store.
        hosts: the host of each rank in the world, if there are several.
        agent: the process id of the agent that started this process; 0 if the supervisor did.
        kill_at: when each of the ranks that were asked to end is killed, in the seconds of ``time.monotonic()``, and
            how long it then had.
        held: signals of the user's that a rank has no handler for yet.
    """

    run_id: str
    numbers: range
    supervisor: Control
    trace: Trace
    pids: dict[int, int]
    store: int | None
    oom_kills: int
    ends: EndsChannel | None
    hosts: Sequence[str]
    agent: int
    kill_at: dict[int, tuple[float, float]] = field(default_factory=dict)
    held: HeldSignals = field(default_factory=HeldSignals)

    def watch(self) -> None:
        """Reap ranks and carry out orders until no rank is left or the supervisor has gone."""
        wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.held.begin()
        try:
            self._watch(wakeup)
        finally:
            signal.set_wakeup_fd(-1)
            os.close(wakeup)
            os.close(wakeup_write)

    def _watch(self, wakeup: int) -> None:
        poll = select.poll()
        poll.register(self.supervisor.fileno(), select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        while True:
            self._reap()
            if not self.pids:
                return
            for descriptor, _ in poll.poll(self._patience_ms()):
                if descriptor == wakeup:
                    # A rank sends SIGUSR1 when it has written its report, which may be long before it ends.
                    if signal.SIGUSR1 in os.read(wakeup, 4096):
                        self.supervisor.send(event="reported")
                    continue
                order = self.supervisor.receive()
                if order is None:
                    return
                if order["do"] == "end":
                    if order["where"]:
                        # For the user, to whom it says where a job hangs.
                        self.trace.ask(self.pids, STACKS_S)
                    self._end(order["signal"], order["grace_s"], order["spare"])
                elif order["do"] == "signal":
                    self.held.add(self.pids, order["signal"])
                elif order["do"] == "stacks":
                    asked = {part: pid for part, pid in self.pids.items() if part in order.get("of", self.pids)}
                    late = self.trace.ask(asked, STACKS_OF_RUNNING_S)
                    self.supervisor.send(event="stacks", late=late, watch="of" in order)
            self.held.send(self.pids)
            now = time.monotonic()
            for rank, (when, patience_s) in list(self.kill_at.items()):
                if when <= now:
                    if patience_s:
                        self.supervisor.send(event="overdue", rank=rank, patience_s=patience_s)
                    processes.kill(self.pids[rank])
                    del self.kill_at[rank]

    def _patience_ms(self) -> float | None:
        waits_s = [max(0.0, min(self.kill_at.values())[0] - time.monotonic())] if self.kill_at else []
        held_s = self.held.due_in_s()
        waits_s += [held_s] if held_s is not None else []
        return min(waits_s) * 1000 + 1 if waits_s else None

    def _end(self, signum: int, grace_s: float, spare: Collection[int]) -> None:
        now = time.monotonic()
        for rank, pid in self.pids.items():
            patience_s = grace_s
            if rank in spare:
                patience_s = max(grace_s, WIND_DOWN_S)
            else:
                processes.send_to_group(pid, signum)
                # A stopped process receives the signal only when it continues.
                processes.send_to_group(pid, signal.SIGCONT)
            self.kill_at[rank] = min((now + patience_s, patience_s), self.kill_at.get(rank, (math.inf, 0.0)))

    def _reap(self) -> None:
        ranks = {pid: rank for rank, pid in self.pids.items()}
        while True:
            try:
                # The child stays a zombie for now: until it is reaped, no other process or group gets its number.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            now = time.monotonic()
            rank = ranks.get(info.si_pid)
            status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            if rank is not None:
                self.trace.note_end(rank, info.si_pid, status)  # first: other ranks are raising an error about it
                self._end_remains(rank, info.si_pid)
            os.waitpid(info.si_pid, 0)
            if rank is not None:
                del self.pids[rank]
                self.kill_at.pop(rank, None)
                out_of_memory = count_oom_kills() > self.oom_kills
                if self.ends is not None and not status:
                    number = self.numbers[rank]
                    self.ends.tell(number, self.hosts[number] if self.hosts else "")
                self.supervisor.send(event="exited", rank=rank, status=status, time=now, out_of_memory=out_of_memory)
                if status and self.agent and os.getppid() == self.agent:
                    # Somebody may have stopped it, and the ranks of other hosts would wait for this one.
                    os.kill(self.agent, signal.SIGCONT)
            elif info.si_pid == self.store:
                self.store = None
                self.supervisor.send(event="store lost", status=status)

    def _end_remains(self, rank: int, pid: int) -> None:
        """Kill the processes that an ended rank left behind: they hold its output, its memory and its ports."""
        known = {self.store, *self.pids.values()}
        marks = [f"{settings.RUN_ID}={self.run_id}".encode(), f"RANK={self.numbers[rank]}".encode()]
        for orphan in processes.children_of(os.getpid()):
            if orphan not in known and processes.belongs_to(orphan, pid, report_name(self.run_id, rank), marks):
                for victim in [orphan, *processes.descendants_of([orphan])]:
                    if not processes.is_resource_tracker(victim):
                        processes.kill(victim)

    def kill_everything(self) -> None:
        """Kill and reap every descendant, however many processes lie between."""
        processes.end_descendants()
        if self.ends is not None:
            self.ends.close()


def serve(job: Job, share: Share, descriptors: Descriptors, inheritance: Inheritance, supervisor: int) -> RankStart:
    """Be the zygote; called in the child of a fork of the supervisor, or of a host's agent, which is the same to it.

    Args:
        job: the job.
        share: the ranks of this zygote.
        descriptors: those that were opened for it.
        inheritance: what the ranks get back.
        supervisor: the parent's process id.

    Returns:
        In each rank, its start. The zygote itself never returns.
    """
    # While torch is imported, nothing reads the control socket. Until there are ranks to be ended, the kernel may kill
    # this process with the supervisor.
    processes.die_with_parent(supervisor)
    # Out of the terminal's foreground group: only the supervisor acts on Ctrl-C.
    os.setsid()
    processes.set_name("phalanx-zygote")
    processes.adopt_orphans()
    for signum in inheritance.handlers:
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    descriptors.keep_zygote_ends()
    zygote = _Zygote(job, share, descriptors, inheritance)
    pid = os.getpid()
    try:
        start = zygote.run()
    except BaseException:
        sys.stderr.write(f"phalanx: the launcher itself failed\n{traceback.format_exc()}")
        sys.stderr.flush()
        if os.getpid() == pid:
            processes.end_descendants()
        os._exit(70)
    if start is None:
        os._exit(0)
    return start
