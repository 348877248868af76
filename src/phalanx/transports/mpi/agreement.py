"""The agreement of an MPI group's ranks before each collective: they wait for each other, and compare their calls.

MPI itself compares nothing. So the ranks first reduce four numbers to their minima: a fingerprint of the call and its
complement, which show whether all calls are equal, and two for the lines from which they are made. The reduction is a
persistent one (of MPI 4), which takes about a microsecond. It is tested for and not waited for in MPI, so that a
timeout and Ctrl-C end it.

A rank may still have timed out after it has taken part; it then sent a notice, so each rank checks for notices next. (A
notice still in flight is missed: the operation then waits until the job ends.) After that comes MPI's own blocking
operation, which nothing keeps waiting but a death, and mpiexec ends the job on a death.

PHALANX_MPI_CHECK=0, on rank 0, leaves all this out.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.diagnosis.call_site import call_text, exchange_text, listed
from phalanx.diagnosis.reading import with_own_wait
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.membership.protocol import Way
from phalanx.native.core import library
from phalanx.transports.call_check import CrossedLines, LinePairs, Wish, fingerprint, weight
from phalanx.transports.contract import COLLECTIVES, with_site
from phalanx.transports.mpi.peers import Notice
from phalanx.transports.mpi.runtime import Runtime
from phalanx.words import format_list, format_named

__all__ = ["CHECK_S", "Agreement", "pause"]

_FINGERPRINT, _COMPLEMENT, _LINE_OF_RANK_0, _FOUND_BY = range(4)  # of the words that are reduced
_NONE = 2**63 - 1
_Call = tuple[str, torch.Tensor | None, int, int]  # name, tensor, operation, root

_MOST_TEXT = 512
SPINS = 100  # some 20 µs
YIELD_S = 0.001
NAP_S = 0.00005
LONG_S, LONG_NAP_S = 0.1, 0.001
CHECK_S = 0.005  # how often a waiting rank checks for notices
# How long a rank that gives up collects the notices of the other ranks that were waiting, if more than one may be
# missing. They send them at once, but on a busy machine that takes them a second.
PATIENCE_S = 2.0
LAST_CALL_S = 2.0  # how long a message of a rank that has left may still be on its way
_MOST_NAMED = 4  # an error that names more ranks with their processes is not read
_OF_ONE = ("last_operation", "last_line", "was_in_it")


class Agreement:
    """One group's comparison of calls.

    One thread at a time is in a collective, any number wait for messages. No lock is needed: each write is one
    assignment, and ``broken`` and ``aborted`` are never reset.

    ============= =============================== ============
    field         written by                      read by
    ============= =============================== ============
    ``broken``    who is in a collective or waits all
    ``aborted``   any thread                      all
    ``timeout_s`` any thread                      all
    ``sequence``  who is in a collective          all
    what is ``_`` who is in a collective          the same
    ============= =============================== ============

    Args:
        runtime, comm: MPI under way, and the group's communicator.
        members: the group's ranks, in the world.
        key: the group's name in notices; equal on every member.
        timeout_s: how long to wait for the others.

    Attributes:
        checks: whether calls are compared at all.
        broken: the error after which the ranks are out of step; every further call raises it.
        sequence: how many comparisons this rank has begun.
        aborted: whether :meth:`abort` has been called.
    """

    def __init__(self, runtime: Runtime, comm: Any, members: Sequence[int], key: str, timeout_s: float) -> None:
        self._runtime, self._comm, self._members, self.key = runtime, comm, tuple(members), key
        self._notices, self._peers = runtime.notices, runtime.peers
        self._rank, self._size = comm.rank, comm.size
        self.checks = runtime.check
        self.broken: PhalanxError | None = None
        self.timeout_s = self.message_timeout_s = timeout_s
        self.aborted = False
        self.sequence = 0
        wish = Wish.read(comm.bcast(Wish.said(), 0)) if runtime.check and comm.size > 1 else Wish.IGNORE
        # Every rank compares its lines with those of rank 0; what it finds the others learn in the next call.
        self._lines = LinePairs(comm.rank, 0, wish) if wish != Wish.IGNORE else None
        self._line_now: Callable[[], int] = library().phx_line_now
        self._is_error = wish == Wish.ERROR
        self._crossed: CrossedLines | None = None  # of which the others are still to learn
        self._own, self._common = array("q", [0, 0, _NONE, _NONE]), array("q", bytes(32))
        self._prepare(runtime.mpi)
        self._notices.sequences[key] = self

    def _prepare(self, mpi: Any) -> None:
        """Have ``_start`` begin a reduction, ``_test`` return whether it is done, and ``_free`` give it back."""
        own, common = ([words, 4, mpi.INT64_T] for words in (self._own, self._common))
        self._start: Callable[[], None]
        self._test: Callable[[], bool]
        self._free: Callable[[], None]
        try:
            request = self._comm.Allreduce_init(own, common, mpi.MIN)
            self._start, self._test, self._free = request.Start, request.Test, request.Free
        except (NotImplementedError, mpi.Exception):  # before MPI 4 each comparison is a reduction of its own

            def start() -> None:
                self._test = self._comm.Iallreduce(own, common, mpi.MIN).Test

            self._start, self._free = start, lambda: None

    def run(
        self,
        operation: Callable[..., object],
        arguments: Sequence[Any],
        name: str,
        tensor: torch.Tensor | None = None,
        op: int = -1,
        root: int = -1,
    ) -> None:
        """Call an operation of MPI when every rank has come with the same call: the last four, if it has them.

        Raises:
            CollectiveMismatch: the calls differ; every rank raises it, with the calls of all.
            CollectiveTimeout, PeerLost: a rank did not come, or MPI failed.
        """
        if self.broken is not None:
            raise self.broken
        call = name, tensor, op, root
        try:
            if self.checks:
                self._compare(call)
            operation(*arguments)
        except BaseException as error:
            self._ended(error, call)
            raise

    def _compare(self, call: _Call) -> None:
        """Return when every rank has come with the same call."""
        name, tensor, op, root = call
        own, common, lines = self._own, self._common, self._lines
        number = fingerprint(name, tensor, op, root)
        own[_FINGERPRINT], own[_COMPLEMENT] = number, ~number
        if lines is not None:
            line = self._line_now()
            if self._rank == 0:
                own[_LINE_OF_RANK_0] = line
        self.sequence += 1
        self._start()
        test, spins = self._test, SPINS
        while not test():
            spins -= 1
            if not spins:
                self._wait(call)
                break
        # All ranks have come, but one may have given up before this one came, and would never answer.
        if self._notices.has_arrived():
            self._check_notices(call, 0.0, came_late=True)
        if common[_FINGERPRINT] != ~common[_COMPLEMENT]:  # min(~x) = ~max(x)
            raise self._differ(_text(call))
        if lines is not None:
            if common[_FOUND_BY] != _NONE:
                self._conclude(common[_FOUND_BY], _text(call))
            elif common[_LINE_OF_RANK_0] != line or not lines.settled:
                self._crossed = lines.meet(line, common[_LINE_OF_RANK_0])
                if self._crossed is not None:
                    own[_FOUND_BY] = self._rank

    def _conclude(self, found_by: int, call: str) -> None:
        """Warn, on the rank that has found lines in different orders, or raise, on all, in the call that follows."""
        disorder = self._crossed if found_by == self._rank else None
        if self._is_error:
            raise self._differ(f"{call} ({disorder.briefly()})" if disorder else call)
        self._lines = None  # on all ranks
        if disorder is not None:
            disorder.warn()

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
        self._comm.Allreduce([part, 1, mpi.UINT64_T], [total, 1, mpi.UINT64_T], mpi.SUM)
        if any(total):
            raise self._differ(with_site(exchange_text(dtype, sent, expected)))

    def _ended(self, error: BaseException, call: _Call) -> None:
        """Take note that an exception ends a call of this rank; PeerLost if it is one of MPI's."""
        if self.broken is not None or isinstance(error, PhalanxError):
            return  # it is the group's error already, or a refusal that all ranks raise
        text = _text(call)
        if isinstance(error, self._runtime.mpi.Exception):
            self.broken = with_own_wait(self.mpi_failed(text, error))
            self._give_up("interrupted", text)
            raise self.broken from None
        self.broken = PeerLost.out_of_step(
            f"{self._named(self._rank)} was interrupted in {text} ({type(error).__name__})",
            group_rank=self._rank,
            **self._facts(self._rank),
        )
        self._give_up("interrupted", text, f"{text} was interrupted by {type(error).__name__}")

    def mpi_failed(self, call: str, error: Exception) -> PeerLost:
        """The error for what MPI itself reports: mostly a process has ended whose memory it reads."""
        return PeerLost(
            f"MPI failed in {call} on rank {self._rank} of the group: {error}. Look at the other ranks' output; the "
            f"ranks of the group are out of step"
        )

    def abort(self, interrupted_in: str = "") -> None:
        """End the operation under way, on every rank, from any thread; an exception has interrupted this call."""
        self.aborted = True
        if self._runtime.usable:
            self._give_up("interrupted" if interrupted_in else "abort", interrupted_in or "destroying it")

    @property
    def in_step(self) -> bool:
        """Return whether no operation of the group is left unanswered."""
        return not self.aborted and (self.broken is None or isinstance(self.broken, CollectiveMismatch))

    def close(self) -> None:
        """Give back what MPI holds for the comparison. No call may follow."""
        self._notices.sequences.pop(self.key, None)
        if self.in_step:
            self._free()

    def check_message(self, text: Callable[[], str], peer: int | None, waited: float) -> None:
        """Raise if a message from or to this rank, or any, cannot come any more, after so many seconds."""
        if self.broken is not None:
            raise self.broken
        if self.aborted:
            raise self._was_aborted(with_site(text()))
        if waited > self.message_timeout_s:
            call = with_site(text())
            if peer is not None and self._peers.stopped(self._members[peer]):
                error = self._did_not_come([peer], self._rank, call, waited)
            else:
                error = CollectiveTimeout.of_message(
                    f"{call} on rank {self._rank} of the group",
                    "the other rank" if peer is None else self._named(peer),
                    self.message_timeout_s,
                    group_rank=-1 if peer is None else peer,
                    elapsed_s=waited,
                    **({} if peer is None else self._facts(peer)),
                )
            self.broken = with_own_wait(error)
            self._give_up("interrupted", call)
            raise self.broken
        if waited > LAST_CALL_S and peer is not None and peer != self._rank:
            last = self._notices.has_left(self._members[peer])
            if last:
                raise with_own_wait(self._left(peer, with_site(text()), last))

    # -- ranks that do not come, and calls that differ ---------------------------------------------

    def _wait(self, call: _Call) -> None:
        began = checked = time.monotonic()
        test = self._test
        while not test():
            waited = pause(began)
            if waited - (checked - began) >= CHECK_S:
                checked = began + waited
                self._check_notices(call, waited)

    def _check_notices(self, call: _Call, waited: float, *, came_late: bool = False) -> None:
        """Raise if the other ranks will not finish the operation that this rank has waited in for so many seconds.

        ``came_late``: all ranks have come, so one that has given up did so before this one came.
        """
        notice = self._notices.about(self.key, self.sequence, self._members)
        if notice is not None:
            self.broken = with_own_wait(self._lost(notice, _text(call), came_late))
            self._runtime.leave_unanswered(self)
        elif self.aborted:
            self.broken = self._was_aborted(_text(call))
        elif waited > self.timeout_s:
            self._give_up("timeout", _text(call))
            self.broken = with_own_wait(self._did_not_come(self._missing(), self._rank, _text(call), waited))
        if self.broken is not None:
            raise self.broken

    def _lost(self, notice: Notice, call: str, came_late: bool) -> PhalanxError:
        """The error for another rank's notice."""
        rank = self._members.index(notice.rank)
        if notice.kind == "left":
            return self._left(rank, call, notice.call)
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

    def _left(self, rank: int, call: str, last: str) -> PeerLost:
        facts = self._facts(rank)
        return PeerLost.gone(Way.LEFT, rank, facts.pop("pid"), f"rank {self._rank} was in {call}", last, **facts)

    def _was_aborted(self, call: str) -> PeerLost:
        return with_own_wait(PeerLost(f"the group was aborted while rank {self._rank} was in {call}"))

    def _missing(self) -> list[int]:
        """The ranks of the group that are not in this operation: those that are in it send notices of giving up."""
        waiting = {self._rank}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            gave_up = self._notices.gave_up_in(self.key, self.sequence)
            waiting.update(self._members.index(rank) for rank in gave_up)
            if len(waiting) >= self._size - 1 or time.monotonic() > deadline:
                return sorted(set(range(self._size)) - waiting)
            time.sleep(CHECK_S)

    def _did_not_come(self, missing: Sequence[int], waiting: int, call: str, waited: float) -> CollectiveTimeout:
        stopped = {rank: text for rank in missing if (text := self._peers.stopped(self._members[rank]))}
        if stopped:
            # A rank may stop in the comparison. Then others may be past it, and wait for that rank in MPI's operation,
            # where they send no notice.
            missing = sorted(stopped)
        shown = format_list([self._named(rank) for rank in missing[:_MOST_NAMED]])
        if len(missing) > _MOST_NAMED:
            shown = f"{format_named('rank', missing)} of the group"
        if stopped:
            shown += f", which {'were' if len(missing) > 1 else 'was'} {stopped[missing[0]]},"
        elif len(missing) == 1 and (place := self._peers.place(self._members[missing[0]])):
            shown += f", which is at {place},"
        facts = self._facts(missing[0]) if missing else {}
        if len(missing) > 1:  # a sentence about what it did last would not say which of several ranks it is about
            facts = {name: value for name, value in facts.items() if name not in _OF_ONE}
        return CollectiveTimeout.did_not_come(
            shown,
            f"rank {waiting} was in {call}",
            self.timeout_s,
            group_rank=missing[0] if missing else -1,
            elapsed_s=waited,
            several=len(missing) > 1,
            stopped_pid=facts.get("pid", 0) if stopped else 0,
            **facts,
        )

    def _differ(self, call: str) -> PhalanxError:
        """The error of calls that do not match. Every rank comes here and gives its own call to the others."""
        try:
            calls = dict(enumerate(self._comm.allgather(call[:_MOST_TEXT])))
        except self._runtime.mpi.Exception as error:
            raise self.mpi_failed(call, error) from None
        self.broken = with_own_wait(CollectiveMismatch.of_calls(listed(calls, range(self._size)), calls))
        return self.broken

    def _named(self, rank: int) -> str:
        return self._peers.name(self._members[rank], rank)

    def _facts(self, rank: int) -> dict[str, Any]:
        """Return what is known of a rank, as attributes of an error about it, and whether it ``was_in_it``."""
        return self._peers.facts(self._members[rank])

    def _give_up(self, kind: str, call: str, why: str = "") -> None:
        """Leave the operation that was begun to MPI, and send the others a notice; ``why`` as in the runtime."""
        self._runtime.leave_unanswered(self, why)
        try:
            self._notices.give_up(kind, self.key, self.sequence, call, self._members)
        except self._runtime.mpi.Exception:
            return  # the others will find out by themselves; the error that led here matters more


def pause(began: float) -> float:
    """Yield the core, or sleep if the wait that began at ``began`` has become long; returns its length so far."""
    waited = time.monotonic() - began
    if waited < YIELD_S:
        os.sched_yield()
    else:
        time.sleep(NAP_S if waited < LONG_S else LONG_NAP_S)
    return waited


def _text(call: _Call) -> str:
    """A call with its line: ``all_reduce(float32[4], sum) at train.py:12``."""
    name, tensor, op, root = call
    dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
    roots = {COLLECTIVES[name]: root} if root >= 0 else {}
    return with_site(call_text(name, dtype, shape, op if op >= 0 else None, **roots))
