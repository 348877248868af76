"""The agent: the parent of the ranks of one host, on every host of a job, this one included.

It waits for the order to start (``protocol.py``), compiles the script and imports torch once, and forks the ranks. From
then on it moves orders one way, and output, reports and ends the other way. It adopts the processes that a rank leaves
behind, and ends them: as long as it has not reaped a child, the child's process id cannot be given to another process.
When its link ends it kills everything, and ends as well. Further attempts (``--restarts``) of a job on one host are
orders to the same agent, which has torch imported and no process left.

Prior art of the fork: Android's zygote, Emacs' unexec, gunicorn's ``preload_app``, CPython's ``forkserver``. Importing
torch costs about a second of CPU, so eight processes that each import it take eight; forked after one import they share
its pages and start in milliseconds. A fork copies only the calling thread, so an agent starts no thread: locks that
another thread held would stay locked in the rank for ever. (numpy's OpenBLAS stops and restarts its pool at a fork.)

What starts an agent is in ``starters/``: a fork of the supervisor, ssh, another program, or MPI's launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import Any, NoReturn

from phalanx import settings
from phalanx.diagnosis.ends import learn_by
from phalanx.errors import PROCESS_LIMIT_HINT
from phalanx.launch.job.target import Refusal, Target, prepare_target
from phalanx.launch.link import ERR, IN, OUT, Link, Lost, split_rank
from phalanx.launch.observer import Observer, within
from phalanx.launch.output.failure import signal_name
from phalanx.launch.protocol import (
    ORDERS,
    AskedToStop,
    EndedElsewhere,
    EndOrder,
    Event,
    Examine,
    Exited,
    Hold,
    Leave,
    Look,
    LookUp,
    Over,
    Overdue,
    Owns,
    RankPlan,
    Refused,
    Reported,
    SignalOrder,
    Start,
    Started,
    StopAt,
    Unstarted,
    WantsInput,
    decode_order,
)
from phalanx.launch.rank.preload import preload
from phalanx.launch.rank.start import RankStart, enter_rank, leave_siblings, report_name
from phalanx.launch.rank.trace import StackRequest, Trace, how_ended, how_ended_elsewhere, open_trace
from phalanx.launch.stop_in_step import HostStop
from phalanx.system import processes
from phalanx.system.foreign_values import read_json
from phalanx.system.limits import count_oom_kills

__all__ = ["Agent", "Rank"]

# How long a rank whose script has failed may go on with its exit handlers and its threads. This is longer than the
# grace, because the rank may be saving something, and limited, because the job cannot end before the rank does.
WIND_DOWN_S = 5.0
# How long ranks may take to write their stacks before they are ended; a user who asks where a running job is waits
# longer.
_STACKS_S, _STACKS_OF_RUNNING_S = 0.2, 3.0
_BLOCK = 1 << 16
# How much an ended rank may have left in a pipe (its size is at most this); more than that comes from another process.
_LARGEST_REMAINDER = 1 << 20
# How many bytes of the ranks' output may wait for the link before the ranks have to.
_MOST_WAITING = 1 << 20
# How many bytes the last operations of an ended rank may take as JSON.
_LARGEST_RECORDING = 1 << 22
# How long what has been said may take to leave this host once the job is over.
_LAST_WORDS_S = 1.0
# How long after its start a rank, or the program that it becomes, may take to set a handler for the user's signals. The
# kernel reports no change of a process's handlers, so the agent looks again and again, but only while it holds a
# signal.
_HANDLERS_S, _HANDLERS_LOOK_S = 20.0, 0.05
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HANDLED = (*_ASKED, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCHLD, signal.SIGCONT)


@dataclass(eq=False)
class Rank:
    """A rank that has been forked and not been reaped."""

    plan: RankPlan
    pid: int  # its process, which is also its group
    report: int  # the memfd into which it writes why it failed
    outputs: dict[int, bytes]  # the pipes of its output that are open, with the kind of their blocks
    sent: bytes = b""  # its report as far as it was sent
    kill_at: tuple[float, float] | None = None  # when it is killed, and how long it then had; None for never
    asked_by: set[int] = field(default_factory=set)  # the signals by which it was asked to end, before it had begun to
    last_errors: bytes = b""  # the end of its standard error


class Agent:
    """One agent.

    Args:
        link: to the supervisor.
        file_limit: the soft and hard limit on open files, which the ranks get back.
        name: the host, as the user wrote it.
    """

    def __init__(self, link: Link, file_limit: tuple[int, int], name: str) -> None:
        self.link, self.file_limit, self.name = link, file_limit, name
        # The handlers that the interpreter started with, which the ranks get back. getsignal returns None for one that
        # Python did not install and cannot put back.
        self.handlers: dict[int, Any] = {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in _HANDLED}
        self.peer = link.peer
        self.ranks: dict[int, Rank] = {}  # those that run, by their part of the trace
        self.pids: dict[int, int] = {}  # the same, for the observer
        self.start: Start | None = None
        self.orders: deque[ORDERS] = deque()
        self.compiled: tuple[CodeType | None, ModuleSpec | None] | None = None
        self.trace = Trace(-1, "")
        self.observer: Observer | None = None
        self.held: list[tuple[int, int]] = []  # the user's signals to ranks that have no handler yet, by part
        self.handlers_by = 0.0  # until when such a signal waits
        self.stop = HostStop()
        self.request: tuple[StackRequest, Callable[[], None]] | None = None
        self.feed = -1  # the writing end of the standard input of the rank that reads
        self.unwritten = b""  # the input that its pipe has not taken yet; the selector waits for room
        self.oom_kills = 0
        self.logins: dict[int, int] = {}  # hosts whose agents programs of this one start (``starters/tree.py``), by pid
        self.asked = 0  # the signal by which somebody but the supervisor has asked this process to end
        self.asked_to_stop = False  # whether the first one had the ranks stop in step
        self.selector = selectors.DefaultSelector()
        self.congested = False
        self.wakeup = os.pipe()
        for end in self.wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        for signum in _HANDLED:
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.selector.register(self.wakeup[0], selectors.EVENT_READ, lambda: None)  # each turn reads it
        self.selector.register(link, selectors.EVENT_READ, self._read_orders)
        link.continue_when_called()

    def _on_signal(self, signum: int, _frame: object) -> None:
        if signum in _ASKED:
            self.asked = signum

    def _read_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # A rank sends SIGUSR1 when it has written its report, which may be long before it ends, or a word.
            if signal.SIGUSR1 in os.read(self.wakeup[0], 4096):
                for part, rank in self.ranks.items():
                    self.send_report(part, rank)
                for event in self.stop.news():
                    self.say(event)

    def run(self, target: Target | None = None, before_import: Mapping[str, str] | None = None) -> RankStart:
        """Serve until the supervisor lets this process go. Returns in each rank its start; the agent never returns.

        Args:
            target: what the order to start will name, to be prepared at once; None if that is not known.
            before_import: as of :class:`Start`; None to import nothing.
        """
        own = os.getpid()
        try:
            if target is not None:
                self._try(functools.partial(self._prepare, target, before_import))
            while True:
                start = self.turn()
                if start is not None:
                    return start
        except BaseException:
            if os.getpid() == own:
                sys.stderr.write(f"phalanx: the launcher itself failed\n{traceback.format_exc()}")
                sys.stderr.flush()
                self.leave(70)
            raise

    # One turn of the loop.

    def turn(self) -> RankStart | None:
        """Wait for something, and act on it. Returns in each rank its start."""
        ready = self.selector.select(self._due_in_s())
        self._read_wakeup()  # before a rank's output: what the rank said first is to arrive first
        for key, _ in ready:
            key.data()
        if self.asked:
            self.on_asked()
        self.reap()
        while self.orders:
            start = self._obey(self.orders.popleft())
            if start is not None:
                return start
        self.act_on_time(time.monotonic())
        self._balance()
        return None

    def due_at(self) -> list[float | None]:
        """Return when :meth:`act_on_time` has something to do."""
        kills = [rank.kill_at[0] for rank in self.ranks.values() if rank.kill_at is not None]
        observed = self.observer.look_at if self.observer is not None and self.ranks else None
        held = time.monotonic() + _HANDLERS_LOOK_S if self.held else None
        return [min(kills, default=None), observed, held, self.request[0].look_at if self.request is not None else None]

    def _due_in_s(self) -> float | None:
        due = [when - time.monotonic() for when in self.due_at() if when is not None]
        return max(0.0, min(due)) if due else None

    def act_on_time(self, now: float) -> None:
        """Do what is due."""
        self._send_held(now)
        for rank in self.ranks.values():
            if rank.kill_at is not None and rank.kill_at[0] <= now:
                grace_s, rank.kill_at = rank.kill_at[1], None
                if grace_s:
                    self.say(Overdue(rank=rank.plan.rank, grace_s=grace_s))
                self.signal(rank, signal.SIGKILL)
        if self.request is not None and now >= self.request[0].look_at:
            request, then = self.request
            if request.look():
                self.request = None
                then()
        if self.observer is not None and (waits := self.observer.look(now)) is not None:
            self.say(waits)

    def _send_held(self, now: float) -> None:
        """Send the user's signals to the ranks that have a handler, or have had the time to set one.

        One that comes during a start or a restart would end the job. What ranks have started, such as a loader's
        workers, need not handle the signal, so it goes to the ranks alone.
        """
        held, self.held = dict.fromkeys(self.held), []
        for part, signum in held:
            rank = self.ranks.get(part)
            if rank is None:
                continue
            sets = processes.signal_sets(rank.pid, signum)
            is_handled = "SigIgn" in sets or ("SigCgt" in sets and "SigBlk" not in sets)
            if now < self.handlers_by and not is_handled:
                self.held.append((part, signum))
            else:
                with contextlib.suppress(PermissionError):  # it has become a program of another user
                    os.kill(rank.pid, signum)

    def _balance(self) -> None:
        """Wait for room on the link while bytes wait for it, and let the ranks wait while too many do."""
        waiting = self.link.waiting
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if self.selector.get_key(self.link).events != events:
            self.selector.modify(self.link, events, self._read_orders)
        if (waiting >= _MOST_WAITING) != self.congested:
            self.congested = not self.congested
            for rank in self.ranks.values():
                for descriptor in rank.outputs:
                    if self.congested:
                        self.selector.unregister(descriptor)
                    else:
                        self._await_output(rank, descriptor)

    def say(self, event: Event) -> None:
        """Tell the supervisor something."""
        event.now = time.monotonic()
        self.link.send(event)

    # Orders.

    def _read_orders(self) -> None:
        self.link.flush()
        try:
            for kind, data in self.link.receive():
                if kind == IN:
                    self._give(split_rank(data)[1])
                else:
                    self.orders.append(decode_order(data))
        except Lost:
            self.on_lost()

    def on_lost(self) -> None:
        """Act on the end of the supervisor, or of the way to it."""
        self.leave(1)

    def on_asked(self) -> None:
        """End because somebody but the supervisor wants it, as a batch system does; if it can, first stop in step."""
        if self.stop.used and self.start is not None and self.asked in self.start.stop_on and not self.asked_to_stop:
            self.asked_to_stop, signum, self.asked = True, self.asked, 0
            self.say(AskedToStop(signal=signum, where=f"the agent on {self.name}"))
            return
        text = f"the agent on {self.name} was ended by {signal_name(self.asked)}"
        self.say(Refused(text=f"phalanx: {text}; the job ended with it\n", code=128 + self.asked))
        self.leave(128 + self.asked)

    def _obey(self, order: ORDERS) -> RankStart | None:
        """Carry out an order. Returns in each rank its start."""
        match order:
            case Start():
                return self._start(order)
            case EndOrder():
                end = functools.partial(self.end, order.signal, order.grace_s, order.spare)
                if order.where and self.ranks:
                    self._ask(self.ranks, _STACKS_S, end)  # for the user, to whom it says where a job hangs
                else:
                    end()
            case SignalOrder():
                self.held += [(part, order.signal) for part in self.ranks]
            case Hold():
                self.say(self.stop.hold())
            case StopAt():
                self.stop.stop_at(order.call)
            case Examine():
                # A rank that is stopped writes only when it goes on.
                runs = [part for part, rank in self.ranks.items() if processes.state_of(rank.pid) not in ("T", "t")]
                self._ask(runs if order.stacks else (), _STACKS_OF_RUNNING_S, lambda: self._answer(order))
            case Look():
                if self.observer is not None:
                    self.say(self.observer.look_closely(order))
            case EndedElsewhere():
                if self.ranks:
                    self.trace.note_elsewhere(json.dumps(order.known).encode())
            case LookUp():
                from phalanx.membership.launcher_store import is_own

                if is_own(tuple(order.end), tuple(order.other_end)):
                    self.say(Owns(number=order.number))
            case Leave():
                self.leave(0)
        return None

    # Where the ranks are.

    def _ask(self, parts: Iterable[int], patience_s: float, then: Callable[[], None]) -> None:
        """Have ranks write their stacks, and go on when they have. A question that is still open is given up."""
        request = StackRequest(self.trace, {part: self.ranks[part].pid for part in parts}, patience_s)
        self.request = (request, then) if request.late else None
        if self.request is None:
            then()

    def _answer(self, question: Examine) -> None:
        if self.observer is not None and self.start is not None:
            plans = self.start.ranks
            stacks = {plans[part].rank: text for part, text in self.trace.take(range(len(plans))).items()}
            self.say(self.observer.answer(question, stacks))

    # Starting.

    def _start(self, order: Start) -> RankStart | None:
        """Prepare once what every rank would have to do, and fork. Returns in each rank its start."""
        self.start = order
        if self.compiled is None:
            self._try(functools.partial(self._prepare, order.target, order.before_import if order.preload else None))
        return self._try(functools.partial(self._fork_all, order)) if self.compiled is not None else None

    def _try(self, step: Callable[[], RankStart | None]) -> RankStart | None:
        """Go on towards ranks, or say why there can be none."""
        try:
            return step()
        except Refusal as refusal:
            self._kill_everything()
            self.say(Refused(text=f"{str(refusal).rstrip()}\n", code=refusal.code))
        return None

    def _prepare(self, target: Target, before_import: Mapping[str, str] | None) -> None:
        """Compile the target and import torch. An order to end is obeyed meanwhile."""
        if not target.is_python:
            self.compiled = None, None
            return
        os.environ.update(before_import or {})
        signal.signal(signal.SIGCONT, self._while_importing)
        self._while_importing(signal.SIGCONT, None)
        try:
            compiled = prepare_target(target)
            if before_import is not None:
                # The import makes no garbage, so collecting would only cost time.
                gc.disable()
                preload()
                # The collector of a rank then leaves these objects alone; marking them would copy every shared page.
                gc.freeze()
                gc.enable()
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(f"phalanx: torch cannot be imported\n\n{traceback.format_exc()}", 1) from error
        finally:
            signal.signal(signal.SIGCONT, self._on_signal)
        self.compiled = compiled

    def _while_importing(self, signum: int, frame: object) -> None:
        """Read an order that has come, as the kernel says by this signal."""
        # One at a time: a second one inside would find the link's end before this one has kept the last order.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        try:
            self.end_import()  # for an order that came with the one to start: the link may have ended since
            self._read_orders()
            self.end_import()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCONT})

    def end_import(self) -> None:
        """Leave while torch is imported, if that is wanted: nothing has been started."""
        if self.asked or any(isinstance(order, (EndOrder, Leave)) for order in self.orders):
            self.leave(0)

    def _fork_all(self, order: Start) -> RankStart | None:
        # A rank restores its handlers before it unblocks, so no signal is lost to this process's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.trace = Trace(open_trace(order.run_id), order.run_id)
        self.stop = HostStop([plan.rank for plan in order.ranks])
        self.oom_kills = count_oom_kills()
        fed, feed = -1, -1
        if order.feeds_input and any(plan.reads for plan in order.ranks):
            fed, feed = os.pipe()
            os.set_blocking(feed, False)
        for part, plan in enumerate(order.ranks):
            try:
                (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
                report = os.memfd_create(report_name(order.run_id, plan.rank))
                parent, pid = os.getpid(), os.fork()
            except OSError as error:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                raise Refusal(
                    f"phalanx: only {part} of {len(order.ranks)} ranks could be started: {error.strerror}; start fewer "
                    f"ranks, or {PROCESS_LIMIT_HINT}, or free memory",
                    1,
                ) from error
            if pid == 0:
                signal.set_wakeup_fd(-1)
                input_of = fed if plan.reads else -1
                for descriptor in (out_read, err_read, feed, *(() if plan.reads else (fed,))):
                    if descriptor >= 0:
                        os.close(descriptor)
                return self._become(order, part, plan, (out_write, err_write), report, parent, input_of)
            for descriptor in (out_write, err_write):
                os.close(descriptor)
            for descriptor in (out_read, err_read):
                os.set_blocking(descriptor, False)
            rank = self.ranks[part] = Rank(plan, pid, report, {out_read: OUT, err_read: ERR})
            for descriptor in rank.outputs:
                self._await_output(rank, descriptor)
        if fed >= 0:
            os.close(fed)
            self.feed = feed
        if order.is_last and not order.feeds_input:
            processes.release_input()  # the ranks of a further attempt read on where those of this one have stopped
        self.pids = {part: rank.pid for part, rank in self.ranks.items()}
        self.observer = Observer(self.trace, [plan.rank for plan in order.ranks], self.pids, order.watch_after_s)
        self.handlers_by = time.monotonic() + _HANDLERS_S
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.say(Started(pids=list(self.pids.values())))
        if fed >= 0:
            self.say(WantsInput())
        return None

    def _become(
        self, order: Start, part: int, plan: RankPlan, outputs: tuple[int, int], report: int, parent: int, input_of: int
    ) -> RankStart:
        """Become a rank, in its fork: keep only what it uses."""
        self.forget()
        environment = self.environment_of(order, plan)
        if self.peer:
            environment["MASTER_ADDR"] = self.peer  # of the launcher's addresses the one that this host reaches
        code, spec = self.compiled or (None, None)
        if input_of >= 0:
            os.dup2(input_of, 0)
            os.close(input_of)
        target = dataclasses.replace(order.target, argv=plan.argv)
        start = RankStart(
            plan=plan,
            target=target,
            run_id=order.run_id,
            environment=environment,
            code=code,
            spec=spec,
            parent=parent,
            part=part,
            quiet=order.quiet,
            stop_cell=self.stop.cell(part),
            stop_on=order.stop_on,
            outputs=outputs,
            report=report,
            trace=self.trace.descriptor,
        )
        enter_rank(start, self.handlers, self.file_limit)
        if order.target.is_python and order.preload:
            leave_siblings(start)
        if order.target.is_python:
            learn_by(how_ended, how_ended_elsewhere if self.peer else None)
        return start

    def environment_of(self, order: Start, plan: RankPlan) -> dict[str, str]:
        """Return what is added to the environment of a rank."""
        return dict(plan.environment)

    def forget(self) -> None:
        """Close what is the agent's alone, in a fork."""
        self.selector.close()
        self.link.close()
        for rank in self.ranks.values():
            for descriptor in (*rank.outputs, rank.report):
                os.close(descriptor)
        for descriptor in self.wakeup:
            os.close(descriptor)

    # Output and input.

    def _await_output(self, rank: Rank, descriptor: int) -> None:
        read = functools.partial(self._read_output, rank, descriptor)
        self.selector.register(descriptor, selectors.EVENT_READ, read)

    def _read_output(self, rank: Rank, descriptor: int) -> int:
        """Send one block of an output; return its length, 0 when there is nothing now."""
        if descriptor not in rank.outputs:
            return 0  # its rank has ended in this very turn
        try:
            data = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return 0
        kind = rank.outputs[descriptor]
        if data:
            if kind == ERR:
                rank.last_errors = (rank.last_errors + data)[-(1 << 14) :]
            self.forward(kind, rank.plan.rank, data)
        else:
            self._close_output(rank, descriptor)
        return len(data)

    def forward(self, kind: bytes, rank: int, data: bytes) -> None:
        """Send on what a rank has printed."""
        self.link.send_block(kind, rank, data)

    def _close_output(self, rank: Rank, descriptor: int) -> None:
        del rank.outputs[descriptor]
        if not self.congested:
            self.selector.unregister(descriptor)
        os.close(descriptor)

    def _drain(self, rank: Rank) -> None:
        """Send what an ended rank has left in its pipes, and close them, whoever else holds them open."""
        for descriptor in list(rank.outputs):
            taken = 0
            while taken < _LARGEST_REMAINDER and (length := self._read_output(rank, descriptor)):
                taken += length
            if descriptor in rank.outputs:
                self._close_output(rank, descriptor)

    def _give(self, data: bytes) -> None:
        """Hand a block of input on when its reader has room for it; the empty one is the end."""
        if not data:
            self._close_feed()
        elif self.feed >= 0:
            self.unwritten = data
            self.selector.register(self.feed, selectors.EVENT_WRITE, self._write_input)

    def _write_input(self) -> None:
        try:
            self.unwritten = self.unwritten[os.write(self.feed, self.unwritten) :]
        except BlockingIOError:
            return
        except OSError:
            self._close_feed()  # nobody reads any more
            return
        if not self.unwritten:
            self.selector.unregister(self.feed)
            self.say(WantsInput())

    def _close_feed(self) -> None:
        if self.unwritten:
            self.selector.unregister(self.feed)
        if self.feed >= 0:
            os.close(self.feed)
        self.feed, self.unwritten = -1, b""

    # Ending.

    def signal(self, rank: Rank, signum: int) -> None:
        """Signal a rank and its group, and continue it: a stopped process receives the signal only then."""
        if signum and not processes.is_ending(rank.pid):
            rank.asked_by.add(signum)
        processes.send_to_group(rank.pid, signum)
        processes.send_to_group(rank.pid, signal.SIGCONT)

    def end(self, signum: int, grace_s: float, spare: Collection[int]) -> None:
        """Ask the ranks to end, and kill them later."""
        now = time.monotonic()
        self.stop.end()
        for rank in self.ranks.values():
            patience_s = grace_s
            if rank.plan.rank in spare:
                patience_s = self.spared_s(grace_s)
            else:
                self.signal(rank, signum)
            rank.kill_at = min((now + patience_s, patience_s), rank.kill_at or (math.inf, 0.0))

    def spared_s(self, grace_s: float) -> float:
        """Return how long a rank may take that has failed by itself."""
        return max(grace_s, WIND_DOWN_S)

    def reap(self) -> None:
        """Reap the children that have ended, and send how ranks have."""
        parts = {rank.pid: part for part, rank in self.ranks.items()}
        while True:
            try:
                # The child stays a zombie for now: until it is reaped, no other process or group gets its number.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None:
                break
            part = parts.get(info.si_pid)
            status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            if part is not None:
                at = time.monotonic()
                self.trace.note_end(part, info.si_pid, status)  # first: other ranks are raising an error about it
                self.end_remains(self.ranks[part])
            os.waitpid(info.si_pid, 0)
            if part is not None:
                self._on_exit(part, status, at)
            elif (number := self.logins.pop(info.si_pid, None)) is not None and status:
                self.say(Unstarted(agent=number))
        if parts and not self.ranks:
            self._kill_everything()
            self.say(Over())

    def end_remains(self, rank: Rank) -> None:
        """Kill the processes that an ended rank left behind: they hold its output, its memory and its ports."""
        assert self.start is not None
        known = {other.pid for other in self.ranks.values()}
        marks = [f"{settings.RUN_ID}={self.start.run_id}".encode(), f"RANK={rank.plan.rank}".encode()]
        name = report_name(self.start.run_id, rank.plan.rank)
        killed: set[int] = set()
        while True:  # each round finds what those of the round before have forked meanwhile, or orphaned
            orphans = [
                pid
                for pid in processes.children_of(os.getpid())
                if pid not in known and processes.belongs_to(pid, rank.pid, name, marks)
            ]
            victims = {*orphans, *processes.descendants_of(orphans)} - killed
            if not victims:
                return
            for victim in victims:
                if not processes.is_resource_tracker(victim):
                    processes.kill(victim)
            killed |= victims

    def _on_exit(self, part: int, status: int, at: float) -> None:
        assert self.start is not None
        rank, trace = self.ranks.pop(part), self.trace
        self.pids.pop(part, None)
        if self.request is not None:
            self.request[0].forget(part)
        self._drain(rank)
        self.send_report(part, rank)
        killed = count_oom_kills()
        out_of_memory, self.oom_kills = status == -signal.SIGKILL and killed > self.oom_kills, killed
        records = self.start.records if status == 0 else max(self.start.records, 1024)
        recording = trace.recording(part, records) if self.start.target.is_python else None
        event = Exited(
            rank=rank.plan.rank,
            status=status,
            at=at,
            out_of_memory=out_of_memory,
            stage=int(trace.stage(part)),
            asked=trace.asked(part),
            stack=trace.take([part]).get(part, ""),
            recording=within(_LARGEST_RECORDING, recording, records),
            calls=self.stop.calls(part),
        )
        self.say(self.explained(rank, event))
        os.close(rank.report)

    def explained(self, rank: Rank, event: Exited) -> Exited:
        """Add to a rank's end what else is known of it."""
        return event

    def send_report(self, part: int, rank: Rank) -> None:
        """Send the report that a rank has written about its failure, unless that has been sent."""
        data = os.pread(rank.report, os.fstat(rank.report).st_size, 0)
        if data and data != rank.sent:
            # It may not be complete yet, and a script may have written anything.
            with contextlib.suppress(ValueError):
                if isinstance(report := read_json(data), dict):
                    rank.sent = data
                    self.say(Reported(rank=rank.plan.rank, report=report))

    def _kill_everything(self) -> None:
        """Kill and reap every descendant but logins, however many processes lie between, and forget the attempt."""
        processes.end_descendants(but=self.logins)
        for part in list(self.ranks):
            rank = self.ranks.pop(part)
            self._drain(rank)
            os.close(rank.report)
        self._close_feed()
        self.held.clear()
        self.request = self.observer = None
        if self.trace.descriptor >= 0:
            os.close(self.trace.descriptor)
            self.trace = Trace(-1, "")

    def leave(self, code: int) -> NoReturn:
        """Kill what is left of the job on this host, and end."""
        signal.set_wakeup_fd(-1)
        processes.end_descendants()
        self.link.finish(_LAST_WORDS_S)
        os._exit(code)
