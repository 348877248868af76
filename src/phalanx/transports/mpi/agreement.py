"""The agreement of an MPI group's ranks before each collective: they wait for each other, and compare their calls.

MPI itself compares nothing: a broadcast against an all_reduce hangs or gives garbage, and a call that one rank never
makes is waited for without end. So the ranks first reduce a fingerprint of the call to its minimum and maximum. If the
two are equal, every rank has made the same call. The lines from which they call are compared with that
(``crossing.py``). A rank may still have timed out after contributing its fingerprint; it
then sent a notice, so each rank checks for notices next. (A notice still in flight is missed. That window is not
closed; the operation then waits until the job ends.)

After that comes MPI's own blocking operation, which can be kept waiting by nothing but a death, and mpiexec ends the
job on a death. The reduction is a persistent one (of MPI 4): it takes about a microsecond, and since it is tested for
and not waited for, a timeout and Ctrl-C end it.

PHALANX_MPI_CHECK=0, on rank 0, leaves all this out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.diagnosis.call_site import call_site, call_text, exchange_text, listed
from phalanx.diagnosis.ends import how_ended
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import BackendError, CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.native.core import Status
from phalanx.transports.contract import COLLECTIVES
from phalanx.transports.crossing import Wish
from phalanx.transports.fingerprints import fingerprint, weight
from phalanx.transports.mpi.crossing import Lines, wish_of
from phalanx.transports.mpi.direct import FingerprintCheck
from phalanx.transports.mpi.notices import Notice
from phalanx.transports.mpi.runtime import Runtime
from phalanx.words import format_list, format_named

__all__ = ["Agreement", "pause"]


TEXT_BYTES = 512
SPINS = 2000  # some 300 µs, as MPI itself spins for ever; with more ranks than cores a hundredth of that
YIELD_S = 0.001
NAP_S = 0.00005
LONG_S, LONG_NAP_S = 0.1, 0.001
CHECK_S = 0.005  # how often a waiting rank checks for notices
ENDED_S = 1.0  # how long to look for the rank whose end may be why MPI has failed
# How long a rank that gives up collects the notices of the other ranks that were waiting, if more than one may be
# missing. They send them at once, but on a busy machine that takes them a second.
PATIENCE_S = 2.0
_MOST_NAMED = 4  # an error that names more ranks with their processes is not read
_OF_ONE = ("last_operation", "last_line", "was_in_it")


class Agreement:
    """One group's comparison of calls.

    Args:
        runtime: MPI under way.
        comm: the group's communicator.
        members: the group's ranks, in the world.
        key: the group's name in notices; equal on every member.
        timeout_s: how long to wait for the others.

    One thread at a time is in a collective, and it alone uses ``check``; others read its sequence number for their
    notices. A thread that waits for a message reads the other attributes too, and may set ``broken``; any thread may
    set ``aborted``, ``timeout_s`` and ``message_timeout_s``. No lock is needed: each is one assignment, and ``broken``
    and ``aborted`` are never reset.

    Attributes:
        checks: whether calls are compared at all.
        broken: the error after which the ranks are out of step; every further call raises it.
        timeout_s: how long to wait for the others.
        check: the comparison itself.
        aborted: whether :meth:`abort` has been called.
    """

    def __init__(self, runtime: Runtime, comm: Any, members: Sequence[int], key: str, timeout_s: float) -> None:
        self._runtime, self._comm, self._members, self.key = runtime, comm, tuple(members), key
        self._rank, self._size = comm.rank, comm.size
        self.checks = runtime.check
        self.broken: PhalanxError | None = None
        self.timeout_s = self.message_timeout_s = timeout_s
        self.aborted = False
        wish = wish_of(runtime, comm)
        spins = SPINS if runtime.has_cores(members) else SPINS // 100
        self.check = FingerprintCheck(runtime, comm, spins, lines=wish != Wish.IGNORE)
        self._lines = Lines(runtime, comm, self.check, wish)
        runtime.notices.sequences[key] = self

    @property
    def sequence(self) -> int:
        """How many operations this rank has begun in the group."""
        return self.check.sequence

    def compare(self, name: str, tensor: torch.Tensor | None = None, op: int = -1, root: int = -1) -> None:
        """Return when every rank has come here with the same call.

        Raises:
            CollectiveMismatch: the calls differ; every rank raises it, with the calls of all.
            CollectiveTimeout, PeerLost: a rank did not come.
        """
        if self.broken is not None:
            raise self.broken
        if not self.checks:
            return
        try:
            status = self.check.compare(fingerprint(name, tensor, op, root))
            if status != Status.OK:
                self.conclude(status, name, tensor, op, root)
        except self._runtime.mpi.Exception as error:
            raise self.failed(error, name, tensor, op, root) from None
        except BaseException as error:
            self.interrupted(error, name, tensor, op, root)
            raise

    def conclude(self, status: int, name: str, tensor: torch.Tensor | None, op: int, root: int) -> None:
        """Finish a comparison that has begun: wait for late ranks, then return if all calls agree, else raise."""
        if status == Status.SYSTEM:
            raise self.failed(RuntimeError("it reported an error"), name, tensor, op, root)
        if status == Status.UNDER_WAY:
            self._wait(name, tensor, op, root)
        if status in (Status.UNDER_WAY, Status.NOTICE):
            # All ranks have come, but one may have given up before this one came, and would never answer.
            self._check_notices(lambda: self._text(name, tensor, op, root), 0.0, came_late=True)
            status = self.check.outcome()
        if status == Status.LINES_DIFFER:
            try:
                disorder = self._lines.confer()
            except self._runtime.mpi.Exception as error:
                raise self.failed(error, name, tensor, op, root) from None
            if disorder is not None:
                text = self._text(name, tensor, op, root)
                raise self._differ(f"{text} ({disorder})" if disorder else text)
        if status == Status.MISMATCH:
            raise self._differ(self._text(name, tensor, op, root))

    def balance(self, sent: Sequence[int], expected: Sequence[int], dtype: torch.dtype) -> None:
        """Compare what the ranks of an all_to_all send and expect, in elements: every pair has a size of its own.

        The ranks add up, over all pairs, what one sends minus what the other expects, times a weight of the pair.
        The sum is 0 if all agree; if they do not, it is 0 once in 2**64.
        """
        if not self.checks:
            return
        rank, size, mpi = self._rank, self._size, self._runtime.mpi
        own = sum(count * weight(rank * size + peer) for peer, count in enumerate(sent))
        own -= sum(count * weight(peer * size + rank) for peer, count in enumerate(expected))
        part, total = bytearray((own % 2**64).to_bytes(8, sys.byteorder)), bytearray(8)
        try:
            self._comm.Allreduce([part, 1, mpi.UINT64_T], [total, 1, mpi.UINT64_T], mpi.SUM)
        except mpi.Exception as error:
            raise self.failed(error, "all_to_all", None) from None
        if any(total):
            raise self._differ(exchange_text(dtype, sent, expected) + _site())

    def _differ(self, call: str) -> PhalanxError:
        """The error of calls that do not match. Every rank comes here and gives its own call to the others."""
        mpi = self._runtime.mpi
        own, all_ = bytearray(TEXT_BYTES), bytearray(TEXT_BYTES * self._size)
        text = call.encode()[: TEXT_BYTES - 1]
        own[: len(text)] = text
        try:
            self._comm.Allgather([own, mpi.BYTE], [all_, TEXT_BYTES, mpi.BYTE])
        except mpi.Exception as error:
            raise BackendError(f"the ranks of a group called different operations, here {call}; {error}") from None
        calls = {
            rank: all_[at : at + TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            for rank, at in enumerate(range(0, len(all_), TEXT_BYTES))
        }
        self.broken = with_own_wait(CollectiveMismatch.of_calls(listed(calls, range(self._size)), calls))
        return self.broken

    def failed(self, error: Exception, name: str, tensor: torch.Tensor | None, op: int = -1, root: int = -1) -> Any:
        """The error for what MPI itself reported in an operation."""
        call = self._text(name, tensor, op, root)
        self.broken = self.lost_in(call, range(self._size)) or BackendError(
            f"MPI failed in {call} on rank {self._rank} of the group: {error}. "
            f"Look at the other ranks' output; the ranks of the group are out of step"
        )
        self._give_up("interrupted", call)
        return self.broken

    def lost_in(self, call: str, ranks: Iterable[int]) -> PeerLost | None:
        """The error for the first of these ranks that has ended, if one has.

        MPI copies large data from another process's memory, and fails with the kernel's words if that process is killed
        meanwhile. It may do so a moment before it can be seen that the process has ended.
        """
        others = [rank for rank in ranks if rank != self._rank]
        until = time.monotonic() + ENDED_S
        while not (lost := [rank for rank in others if self._runtime.peers.has_ended(self._members[rank])]):
            if time.monotonic() > until:
                return None
            time.sleep(CHECK_S)
        facts = self._facts(lost[0])
        pid = facts.pop("pid")
        ending, waiting = how_ended(pid), f"rank {self._rank} was in {call}"
        return with_own_wait(PeerLost.ended(lost[0], pid, waiting, ending.text, signal=ending.signal, **facts))

    def close(self) -> None:
        """Give back what MPI holds for the comparison. No call may follow."""
        self._runtime.notices.sequences.pop(self.key, None)
        if self.broken is None or isinstance(self.broken, CollectiveMismatch):
            self.check.free()

    # -- waiting for ranks that do not come --------------------------------------------------------

    def _wait(self, name: str, tensor: torch.Tensor | None, op: int, root: int) -> None:
        began = time.monotonic()
        checked = began
        test = self.check.test
        while not test():
            waited = pause(began)
            if waited - (checked - began) < CHECK_S:
                continue
            checked = began + waited
            self._check_notices(lambda: self._text(name, tensor, op, root), waited)

    def _check_notices(self, call: Callable[[], str], waited: float, *, came_late: bool = False) -> None:
        """Raise if the other ranks will not finish the operation that this rank waits in.

        Args:
            call: what this rank waits in.
            waited: for how long, in seconds.
            came_late: all ranks have come, so a rank that has given up did so before this one came.

        Raises:
            PeerLost: a rank has left, or gave up. CollectiveTimeout: the group's timeout has passed.
        """
        notice = self._runtime.notices.about(self.key, self.sequence, self._members)
        if notice is not None:
            self.broken = with_own_wait(self._lost(notice, call(), came_late))
            self._leave_unanswered()
            raise self.broken
        if self.aborted:
            self.broken = with_own_wait(PeerLost(f"the group was aborted while rank {self._rank} was in {call()}"))
            raise self.broken
        if waited > self.timeout_s:
            raise self._late(call(), waited)

    def check_message(self, text: Callable[[], str], peer: int | None, waited: float, last_call_s: float) -> None:
        """Raise if a message cannot come any more.

        Args:
            text: the message, for the error.
            peer: the other rank in the group; None for any.
            waited: for how long, in seconds.
            last_call_s: how long a message of a rank that has left may still be on its way.
        """

        def call() -> str:
            return text() + _site()

        if self.aborted:
            raise with_own_wait(PeerLost(f"the group was aborted while rank {self._rank} was in {call()}"))
        if waited > self.message_timeout_s:
            if peer is not None and self._standing([peer]):
                self.broken = self._did_not_come([peer], self._rank, call(), waited)
            else:
                self.broken = CollectiveTimeout.of_message(
                    f"{call()} on rank {self._rank} of the group",
                    "the other rank" if peer is None else self._named(peer),
                    self.message_timeout_s,
                    group_rank=-1 if peer is None else peer,
                    elapsed_s=waited,
                    **({} if peer is None else self._facts(peer)),
                )
            with_own_wait(self.broken)
            self._give_up("interrupted", call())
            raise self.broken
        if waited > last_call_s and peer is not None and peer != self._rank:
            last = self._runtime.notices.has_left(self._members[peer])
            if last:
                waiting = f"rank {self._rank} was in {call()}"
                facts = self._facts(peer)
                raise with_own_wait(PeerLost.left(peer, facts.pop("pid"), waiting, last, **facts))

    def _lost(self, notice: Notice, call: str, came_late: bool) -> PhalanxError:
        """The error for another rank's notice."""
        rank = self._members.index(notice.rank)
        if notice.kind == "left":
            facts = self._facts(rank)
            return PeerLost.left(rank, facts.pop("pid"), f"rank {self._rank} was in {call}", notice.call, **facts)
        if notice.kind == "timeout" and not came_late:
            self._give_up("timeout", call)
            missing = self._missing()
            if missing:
                return self._did_not_come(missing, rank, notice.call, self.timeout_s)
        if notice.kind == "timeout":
            return CollectiveTimeout.came_late(
                self._named(rank), notice.call, self._rank, call, self.timeout_s, **self._facts(self._rank)
            )
        what = "was interrupted in" if notice.kind == "interrupted" else "aborted the group in"
        return PeerLost.out_of_step(
            f"{self._named(rank)} {what} {notice.call}, while rank {self._rank} was in {call}",
            group_rank=rank,
            **self._facts(rank),
        )

    def _late(self, call: str, waited: float) -> PhalanxError:
        """The error of this rank's own timeout."""
        self._give_up("timeout", call)
        self.broken = with_own_wait(self._did_not_come(self._missing(), self._rank, call, waited))
        return self.broken

    def _missing(self) -> list[int]:
        """The ranks of the group that are not in this operation: those that are in it send notices of giving up."""
        members, waiting = self._members, {self._rank}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            gave_up = self._runtime.notices.waiting(self.key, self.sequence)
            waiting.update(members.index(rank) for rank in gave_up)
            if len(waiting) >= self._size - 1 or time.monotonic() > deadline:
                return sorted(set(range(self._size)) - waiting)
            time.sleep(CHECK_S)

    def _did_not_come(self, missing: Sequence[int], waiting: int, call: str, waited: float) -> PhalanxError:
        standing = self._standing(missing)
        if standing:
            # A rank may stop in the comparison. Then others may be past it, and wait for that rank in MPI's operation,
            # where they send no notice.
            missing = sorted(standing)
        shown = format_list([self._named(rank) for rank in missing[:_MOST_NAMED]])
        if len(missing) > _MOST_NAMED:
            shown = f"{format_named('rank', missing)} of the group"
        if standing:
            shown += f", which {'were' if len(missing) > 1 else 'was'} {standing[missing[0]]},"
        elif len(missing) == 1 and (place := self._runtime.peers.at(self._members[missing[0]])):
            shown += f", which is at {place},"
        facts = self._facts(missing[0]) if missing else {}
        # A sentence about what it did last would not say which of several ranks it is about.
        of_one = {name: facts.pop(name) for name in _OF_ONE if name in facts and len(missing) > 1}
        error = CollectiveTimeout.did_not_come(
            shown,
            f"rank {waiting} was in {call}",
            self.timeout_s,
            group_rank=missing[0] if missing else -1,
            elapsed_s=waited,
            several=len(missing) > 1,
            stopped_pid=facts.get("pid", 0) if standing else 0,
            **facts,
        )
        of_one.pop("was_in_it", None)
        vars(error).update(of_one)
        return error

    def _named(self, rank: int) -> str:
        return self._runtime.peers.name(self._members[rank], rank)

    def _facts(self, rank: int) -> dict[str, Any]:
        """What is known of a rank of the group, as attributes of an error about it, and whether it ``was_in_it``."""
        return self._runtime.peers.facts(self._members[rank])

    def _standing(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks whose processes are known not to run on, each with the reason in words."""
        return {rank: text for rank in ranks if (text := self._runtime.peers.standing(self._members[rank]))}

    def interrupted(self, error: BaseException, name: str, tensor: torch.Tensor | None, op: int, root: int) -> None:
        """This rank leaves an operation by an exception of its own, a signal handler's: the group is broken.

        Does nothing if the group is broken already: then the exception is its error.
        """
        if self.broken is not None:
            return
        call = self._text(name, tensor, op, root)
        self.broken = PeerLost.out_of_step(
            f"{self._named(self._rank)} was interrupted in {call} ({type(error).__name__})",
            group_rank=self._rank,
            **self._facts(self._rank),
        )
        self._give_up("interrupted", call, f"{call} was interrupted by {type(error).__name__}")

    def _give_up(self, kind: str, call: str, why: str = "") -> None:
        """Leave the operation that was begun to MPI, and send the others a notice; ``why`` as in the runtime."""
        self._leave_unanswered(why)
        try:
            self._runtime.notices.send(kind, self.key, self.sequence, call, self._members)
        except self._runtime.mpi.Exception:
            return  # the others will find out by themselves; the error that led here matters more

    def _leave_unanswered(self, why: str = "") -> None:
        """Keep the memory of the operation under way: it may never end, and MPI goes on with it until MPI ends."""
        self._runtime.leave_unanswered(self, why)

    def abort(self, interrupted_in: str = "") -> None:
        """End the operation under way, on every rank, from any thread.

        Args:
            interrupted_in: the call that an exception has interrupted, if it is one; else the program wants it so.
        """
        self.aborted = True
        if self._runtime.usable:
            self._give_up("interrupted" if interrupted_in else "abort", interrupted_in or "destroying it")

    def _text(self, name: str, tensor: torch.Tensor | None, op: int, root: int) -> str:
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        roots = {COLLECTIVES[name]: root} if root >= 0 else {}
        return call_text(name, dtype, shape, op if op >= 0 else None, **roots) + _site()


def pause(began: float) -> float:
    """Yield the core, or sleep if the wait that began at ``began`` has become long; returns its length so far."""
    waited = time.monotonic() - began
    if waited < YIELD_S:
        os.sched_yield()
    else:
        time.sleep(NAP_S if waited < LONG_S else LONG_NAP_S)
    return waited


def _site() -> str:
    site = call_site()
    return f" at {site}" if site else ""
