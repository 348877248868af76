"""What the ranks of an MPI group do before each collective: wait for each other, and compare their calls.

MPI itself compares nothing: a broadcast against an all_reduce hangs or gives garbage, and a call that one rank never
makes is waited for without end. So the ranks first reduce one number, a fingerprint of the call, to its minimum and its
maximum. When those agree everybody has come with the same call. One may have given up waiting since: it has told so by
a notice, which is looked for now (a moment is left, while a notice is on its way). Then MPI's own blocking operation
follows, which nothing can keep waiting but a death, and that mpiexec notices. The reduction is a persistent one (of MPI
4): it takes about a microsecond, and since it is tested for and not waited for, a timeout and Ctrl-C end it.

PHALANX_MPI_CHECK=0, on rank 0, leaves all this out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import BackendError, CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.native.core import Status
from phalanx.transports.mpi.direct import FingerprintCheck
from phalanx.transports.mpi.fingerprints import ALL_TO_ALL, KINDS, ROOT_NAMES, fingerprint, weight
from phalanx.transports.mpi.notices import Notice
from phalanx.transports.mpi.runtime import Runtime
from phalanx.watch.call_site import call_site
from phalanx.watch.calls import call_text, dtype_name, listed

__all__ = ["Agreement", "pause"]


TEXT_BYTES = 512
SPINS = 2000  # some 300 µs, as MPI itself spins for ever; with more ranks than cores a hundredth of that
YIELD_S = 0.001
NAP_S = 0.00005
LONG_S, LONG_NAP_S = 0.1, 0.001
LOOK_S = 0.005  # how often a waiting rank looks for notices
PATIENCE_S = 0.3  # how long a rank that gives up listens to who else was waiting


class Agreement:
    """One group's comparison of calls.

    Args:
        runtime: MPI under way.
        comm: the group's communicator.
        members: the group's ranks, in the world.
        key: what the group is called in notices; equal on every member.

    Attributes:
        broken: the error after which the ranks are out of step; every further call raises it.
        timeout_s: how long to wait for the others.
        words: what is compared.
        aborted: another thread wants the operation under way to end.
    """

    def __init__(self, runtime: Runtime, comm: Any, members: Sequence[int], key: str, timeout_s: float) -> None:
        self._runtime, self._comm, self._members, self.key = runtime, comm, tuple(members), key
        self._rank, self._size = comm.rank, comm.size
        self.checks = runtime.check
        self.broken: PhalanxError | None = None
        self.timeout_s = timeout_s
        self.aborted = False
        self.check = FingerprintCheck(runtime, comm, SPINS if runtime.has_cores(members) else SPINS // 100)
        runtime.notices.sequences[key] = self

    @property
    def sequence(self) -> int:
        """How many operations this rank has begun in the group."""
        return self.check.sequence

    def meet(self, kind: int, tensor: torch.Tensor | None = None, op: int = -1, root: int = -1) -> None:
        """Return when every rank has come here with the same call.

        Raises:
            CollectiveMismatch: on every rank, with everybody's call.
            CollectiveTimeout, PeerLost: somebody did not come.
        """
        if self.broken is not None:
            raise self.broken
        if not self.checks:
            return
        try:
            met = self.check.meet(fingerprint(kind, tensor, op, root))
            if met != Status.OK:
                self.unmet(met, kind, tensor, op, root)
        except self._runtime.mpi.Exception as error:
            raise self.failed(error, kind, tensor, op, root) from None
        except BaseException as error:
            self.interrupted(error, kind, tensor, op, root)
            raise

    def unmet(self, met: int, kind: int, tensor: torch.Tensor | None, op: int, root: int) -> None:
        """What follows when the ranks have not met at once: wait for the late ones, or raise why not."""
        if met == Status.SYSTEM:
            raise self.failed(RuntimeError("it reported an error"), kind, tensor, op, root)
        if met == Status.UNDER_WAY:
            self._wait(kind, tensor, op, root)
        if met in (Status.UNDER_WAY, Status.NOTICE):
            # All have come. But one may have given up before, and would be waited for without end.
            self.look(lambda: self._text(kind, tensor, op, root), 0.0, came_late=True)
        if not self.check.agree():
            raise self.differ(self._text(kind, tensor, op, root))

    def balance(self, sent: Sequence[int], expected: Sequence[int], dtype: torch.dtype) -> None:
        """Compare what the ranks of an all_to_all send and expect, in elements: every pair has a size of its own.

        A sum over all pairs of what one sends minus what the other expects, each pair with a weight of its own: 0 if
        all agree, and but for one case in 2**64 only then.
        """
        if not self.checks:
            return
        rank, size, mpi = self._rank, self._size, self._runtime.mpi
        own = sum(count * weight(rank * size + peer) for peer, count in enumerate(sent))
        own -= sum(count * weight(peer * size + rank) for peer, count in enumerate(expected))
        words, total = bytearray((own % 2**64).to_bytes(8, sys.byteorder)), bytearray(8)
        try:
            self._comm.Allreduce([words, 1, mpi.UINT64_T], [total, 1, mpi.UINT64_T], mpi.SUM)
        except mpi.Exception as error:
            raise self.failed(error, ALL_TO_ALL, None) from None
        if any(total):
            raise self.differ(
                f"all_to_all({dtype_name(dtype)}, sends {list(sent)}, expects {list(expected)} elements){_site()}"
            )

    def differ(self, call: str) -> PhalanxError:
        """The error of calls that do not match. Every rank comes here, and tells its own."""
        mpi = self._runtime.mpi
        own, all_ = bytearray(TEXT_BYTES), bytearray(TEXT_BYTES * self._size)
        text = call.encode()[: TEXT_BYTES - 1]
        own[: len(text)] = text
        try:
            self._comm.Allgather([own, mpi.BYTE], [all_, TEXT_BYTES, mpi.BYTE])
        except mpi.Exception as error:
            raise BackendError(f"the ranks of a group called different operations, here {call}; {error}") from None
        texts = [all_[at : at + TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for at in range(0, len(all_), 512)]
        self.broken = CollectiveMismatch(
            f"the ranks of a group called different operations:\n{listed(dict(enumerate(texts)), self._size)}\n"
            f"Every rank of a group must make the same calls in the same order, with the same shapes. Look for an "
            f"`if` that depends on the rank, or data of different sizes"
        )
        return self.broken

    def failed(self, error: Exception, kind: int, tensor: torch.Tensor | None, op: int = -1, root: int = -1) -> Any:
        """The error for what MPI itself reported in an operation."""
        self.broken = BackendError(
            f"MPI failed in {self._text(kind, tensor, op, root)} on rank {self._rank} of the group: {error}. "
            f"Look at the other ranks' output; the ranks of the group are out of step now"
        )
        self._give_up("interrupted", self._text(kind, tensor, op, root))
        return self.broken

    def close(self) -> None:
        """Give back what MPI holds for the comparison. No call may follow."""
        self._runtime.notices.sequences.pop(self.key, None)
        if self.broken is None or isinstance(self.broken, CollectiveMismatch):
            self.check.free()

    # -- waiting for those who do not come ---------------------------------------------------------

    def _wait(self, kind: int, tensor: torch.Tensor | None, op: int, root: int) -> None:
        began = time.monotonic()
        looked = began
        test = self.check.test
        while not test():
            waited = pause(began)
            if waited - (looked - began) < LOOK_S:
                continue
            looked = began + waited
            self.look(lambda: self._text(kind, tensor, op, root), waited)

    def look(self, call: Callable[[], str], waited: float, *, came_late: bool = False) -> None:
        """Whether the operation that this rank waits in can still be answered.

        Args:
            call: what this rank waits in.
            waited: for how long, in seconds.
            came_late: all ranks have come, so who has given up did so before this one came.

        Raises:
            PeerLost: a rank has left, or gave up. CollectiveTimeout: the group's timeout has passed.
        """
        notice = self._runtime.notices.about(self.key, self.sequence, self._members)
        if notice is not None:
            self.broken = self._lost(notice, call(), came_late)
            self._leave_unanswered()
            raise self.broken
        if self.aborted:
            self.broken = PeerLost(f"the group was aborted while rank {self._rank} was in {call()}")
            raise self.broken
        if waited > self.timeout_s:
            raise self._late(call(), waited)

    def look_for_message(self, words: Callable[[], str], peer: int | None, waited: float, last_call_s: float) -> None:
        """The same for a message, from one rank of the group or from any (None)."""

        def call() -> str:
            return words() + _site()

        if self.aborted:
            raise PeerLost(f"the group was aborted while rank {self._rank} was in {call()}")
        if waited > self.timeout_s:
            self.broken = CollectiveTimeout(
                f"{call()} on rank {self._rank} of the group was not done within {self.timeout_s:g} s. Does the other "
                f"rank make the matching call, with the same tag?",
                group_rank=-1 if peer is None else peer,
                elapsed_s=waited,
            )
            self._give_up("interrupted", call())
            raise self.broken
        if waited > last_call_s and peer is not None and peer != self._rank:
            last = self._runtime.notices.has_left(self._members[peer])
            if last:
                raise PeerLost(
                    f"rank {peer} of the group has left ({last}) while rank {self._rank} was in {call()}",
                    group_rank=peer,
                )

    def _lost(self, notice: Notice, call: str, came_late: bool) -> PhalanxError:
        """The error for what another rank told."""
        rank = self._members.index(notice.rank)
        if notice.kind == "left":
            return PeerLost(
                f"rank {rank} of the group has left ({notice.call}) while rank {self._rank} was in {call}. Every rank "
                f"must make the same calls; has rank {rank} less data, or did it end early?",
                group_rank=rank,
            )
        if notice.kind == "timeout" and not came_late:
            self._give_up("timeout", call)
            missing = self._missing()
            if missing:
                return self._did_not_come(missing, rank, notice.call, self.timeout_s)
        if notice.kind == "timeout":
            return CollectiveTimeout(
                f"rank {rank} of the group had waited {self.timeout_s:g} s in {notice.call} and given up when rank "
                f"{self._rank} came to {call}. Was it in other code, or is it much slower? A longer timeout is set "
                f"with phalanx.init(timeout_s=...) or init_process_group(timeout=...)",
                group_rank=self._rank,
                elapsed_s=self.timeout_s,
            )
        what = "was interrupted in" if notice.kind == "interrupted" else "aborted the group in"
        return PeerLost(
            f"rank {rank} of the group {what} {notice.call}, while rank {self._rank} was in {call}; the ranks are out "
            f"of step",
            group_rank=rank,
        )

    def _late(self, call: str, waited: float) -> PhalanxError:
        """The error of this rank's own timeout."""
        self._give_up("timeout", call)
        self.broken = self._did_not_come(self._missing(), self._rank, call, waited)
        return self.broken

    def _missing(self) -> list[int]:
        """The ranks of the group that are not in this operation: who waits in it gives up too, and tells so."""
        members, waiting = self._members, {self._rank}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            told = self._runtime.notices.who_waits(self.key, self.sequence)
            waiting.update(members.index(rank) for rank in told)
            if len(waiting) >= self._size - 1 or time.monotonic() > deadline:
                return sorted(set(range(self._size)) - waiting)
            time.sleep(LOOK_S)

    def _did_not_come(self, missing: Sequence[int], waiting: int, call: str, waited: float) -> PhalanxError:
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of the group"
        return CollectiveTimeout(
            f"{names} did not come within {self.timeout_s:g} s while rank {waiting} was in {call}. Is it in other "
            f"code, or much slower? A longer timeout is set with phalanx.init(timeout_s=...) or "
            f"init_process_group(timeout=...)",
            group_rank=missing[0] if missing else -1,
            elapsed_s=waited,
        )

    def interrupted(self, error: BaseException, kind: int, tensor: torch.Tensor | None, op: int, root: int) -> None:
        """This rank leaves an operation by an exception of its own, a signal handler's: the group is broken.

        Does nothing where the exception is what says that the group is broken.
        """
        if self.broken is not None:
            return
        call = self._text(kind, tensor, op, root)
        self.broken = PeerLost(
            f"rank {self._rank} of the group was interrupted in {call} ({type(error).__name__}); the ranks are out of "
            f"step",
            group_rank=self._rank,
        )
        self._give_up("interrupted", call)

    def _give_up(self, kind: str, call: str) -> None:
        """Let the others know, and MPI be."""
        self._leave_unanswered()
        try:
            self._runtime.notices.tell(kind, self.key, self.sequence, call, self._members)
        except self._runtime.mpi.Exception:
            return  # they will find out by themselves; the error that led here matters more

    def _leave_unanswered(self) -> None:
        """What this rank has begun may never be answered: MPI goes on with it as long as the process lives."""
        self._runtime.leave_unanswered(self)

    def abort(self) -> None:
        """End the operation under way, on every rank, from any thread."""
        self.aborted = True
        if self._runtime.usable:
            self._give_up("abort", "destroying it")

    def _text(self, kind: int, tensor: torch.Tensor | None, op: int, root: int) -> str:
        who = {ROOT_NAMES[kind]: root} if root >= 0 else {}
        return call_text(KINDS[kind], tensor, op if op >= 0 else None, **who) + _site()


def pause(began: float) -> float:
    """Let others have the core, the longer the more; how long the wait has taken so far, in seconds."""
    waited = time.monotonic() - began
    if waited < YIELD_S:
        os.sched_yield()
    else:
        time.sleep(NAP_S if waited < LONG_S else LONG_NAP_S)
    return waited


def _site() -> str:
    site = call_site()
    return f" at {site}" if site else ""
