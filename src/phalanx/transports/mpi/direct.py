"""The fingerprints that the ranks of an MPI group compare before each collective, and their reduction.

Where it is possible, the C core makes the calls of MPI itself (``native/csrc/mpi/meet.c``), and the usual all_reduce
after them: through mpi4py they would take more time in Python than in MPI. The figures of docs/mpi.md for small
all_reduces rest on that. Elsewhere mpi4py makes the calls.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from phalanx.native.core import MPI_WORDS, Crossing, MpiGroup, MpiReduction, Status, library
from phalanx.transports.mpi.notices import TAG as NOTICE_TAG
from phalanx.transports.mpi.runtime import Runtime

__all__ = ["FingerprintCheck"]

# Machines on which an argument of up to eight bytes takes one register, whether it is an int or a pointer.
_MACHINES = ("x86_64", "aarch64")
_CALL_WORDS = 2  # of the MPI_WORDS, those that are compared in any case


class FingerprintCheck:
    """The comparison of one group.

    One MIN-reduction of the pair (x, ~x) gives both bounds of the fingerprints x, since min(~x) = ~max(x). All ranks
    made the same call if and only if min(x) == max(x).

    Args:
        runtime, comm: MPI under way, and the group's communicator.
        spins: how often to test for the others before :meth:`compare` returns.
        lines: whether to compare the lines from which the ranks call as well (``native/csrc/mpi/lines.h``); equal on
            all ranks.

    Attributes:
        direct: True if the C core calls MPI itself (``native/csrc/mpi/meet.c``); False if mpi4py does. :meth:`prepare`
            may be called only if it is True.
        test: a function that returns whether the reduction under way is done.
        free: a function that gives back the persistent request, if there is one.
    """

    def __init__(self, runtime: Runtime, comm: Any, spins: int, *, lines: bool) -> None:
        mpi = runtime.mpi
        self._group = group = MpiGroup(spins=spins, probes=2 if "MPICH" in mpi.Get_library_version() else 1)
        self._spins = spins
        self._core, self._address = core, address = library(), ctypes.addressof(group)
        words = MPI_WORDS if lines else _CALL_WORDS
        if lines and core.phx_mpi_compare_lines(address, comm.rank, comm.size) != Status.OK:
            raise MemoryError
        self._notice = partial(runtime.world.Iprobe, mpi.ANY_SOURCE, NOTICE_TAG)
        own, common = (
            [mpi.buffer.fromaddress(address + field.offset, field.size), words, mpi.INT64_T]
            for field in (MpiGroup.own, MpiGroup.common)
        )
        self.direct = False
        self._start: Callable[[], None]
        self.test: Callable[[], bool]
        self.free: Callable[[], None]
        try:
            request = comm.Allreduce_init(own, common, mpi.MIN)
        except (NotImplementedError, mpi.Exception):
            # MPI before 4.0 has no persistent collectives, so each comparison begins a reduction of its own.
            latest: list[Any] = [None]

            def start() -> None:
                latest[0] = comm.Iallreduce(own, common, mpi.MIN)

            self._start, self.test, self.free = start, lambda: bool(latest[0].Test()), _nothing
            return
        self._start, self.test, self.free = request.Start, request.Test, request.Free
        if runtime.symbols is None or platform.machine() not in _MACHINES:
            return
        for name, symbol in (("start", "Start"), ("test", "Test"), ("all_reduce", "Allreduce"), ("probe", "Iprobe")):
            setattr(group, name, ctypes.cast(runtime.symbols[f"MPI_{symbol}"], ctypes.c_void_p))
        group.request, group.in_place, group.comm = mpi._addressof(request), int(mpi.IN_PLACE), mpi._handleof(comm)
        group.world, group.any_source, group.notice_tag = mpi._handleof(runtime.world), mpi.ANY_SOURCE, NOTICE_TAG
        self._core_compare = core.phx_mpi_meet
        self.direct = True

    def __del__(self) -> None:
        self.end_lines()

    def prepare(self, call: int, count: int, datatype: int, op: int) -> MpiReduction:
        """An all_reduce as the core knows it, to be kept alive while its address is used.

        Args:
            call: what is compared.
            count: number of elements.
            datatype, op: MPI's handles.
        """
        return MpiReduction(self._address, call, datatype, op, count)

    def compare(self, call: int) -> int:
        """Compare a fingerprint with those of the other ranks, without waiting for long.

        Returns:
            What :meth:`outcome` does, which must not be called then; or ``UNDER_WAY`` if a rank has not come yet;
            ``NOTICE`` if all have come but a notice has arrived, perhaps of a rank that gave up; ``SYSTEM`` if MPI
            failed.
        """
        if self.direct:
            status: int = self._core_compare(self._address, call)
            return status
        self._core.phx_mpi_offer(self._address, call)
        self._start()
        for _ in range(self._spins):
            if self.test():
                return Status.NOTICE if self._notice() else self.outcome()
        return Status.UNDER_WAY

    @property
    def sequence(self) -> int:
        """How many comparisons this rank has begun."""
        return int(self._group.sequence)

    @property
    def under_way(self) -> bool:
        """Whether an all_reduce of the core has begun, and neither the core nor :meth:`done` has ended it."""
        return bool(self._group.under_way)

    def done(self) -> None:
        """Record that the all_reduce under way has ended."""
        self._group.under_way = 0

    def outcome(self) -> int:
        """How the comparison has come out that is done; called once.

        Returns:
            ``Status.OK`` or ``MISMATCH``; ``LINES_DIFFER`` if the ranks make the same call from lines about which they
            must confer: then all must tell each other what :meth:`own_line` returns.
        """
        outcome: int = self._core.phx_mpi_compared(self._address)
        return outcome

    def own_line(self) -> int:
        """What this rank tells the others of its line, in 64 bits."""
        return int(self._core.phx_mpi_tell_line(self._address))

    def hear_lines(self, told: bytearray) -> bool:
        """Take what every rank has told.

        Args:
            told: eight bytes a rank, by rank.

        Returns:
            Whether any rank may find something new; equal on all. Then all must go through :meth:`crossings`.
        """
        data = (ctypes.c_char * len(told)).from_buffer(told)
        status: int = self._core.phx_mpi_hear_lines(self._address, ctypes.addressof(data))
        return status == Status.LINES_DIFFER

    def crossings(self) -> Iterator[Crossing]:
        """Note that this rank's line has met those of the lower ranks.

        Returns:
            What this rank and one of those have called in different orders, to be gone through to the end.
        """
        found = Crossing()
        while self._core.phx_mpi_next_crossing(self._address, ctypes.byref(found)) == Status.CROSSED:
            yield found

    def end_lines(self) -> None:
        """Compare lines no longer; on all ranks after the same call."""
        self._core.phx_mpi_end_lines(self._address)


def _nothing() -> None:
    pass
