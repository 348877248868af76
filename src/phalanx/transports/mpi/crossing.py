"""Lines that ranks of an MPI group have called in different orders.

Each rank compares its lines with those of the group's rank 0, which come with the comparison of the calls
(``native/csrc/mpi_lines.h``). What one rank finds, all must know, since an error of one rank is an error of all; so if
there may be something to find, the ranks confer.
"""

from __future__ import annotations

import sys
from typing import Any

from phalanx.transports.crossing import Judgements, Wish, crossed_lines
from phalanx.transports.mpi.direct import FingerprintCheck
from phalanx.transports.mpi.runtime import Runtime

__all__ = ["Lines", "wish_of"]

_FIRST = 0  # the rank with which the others compare their lines


def wish_of(runtime: Runtime, comm: Any) -> str:
    """What the user wants to happen in this group: a value of ``Wish``. Called by all ranks; rank 0's setting holds.

    Raises:
        InitializationError: the setting has no such value; on all ranks.
    """
    if not runtime.check or comm.size == 1:
        return Wish.IGNORE
    return Wish.read(comm.bcast(Wish.said(), _FIRST))


class Lines:
    """The lines of one group's calls.

    Args:
        runtime, comm: MPI under way, and the group's communicator.
        check: the comparison of the calls.
        wish: what the user wants, equal on all ranks.
    """

    def __init__(self, runtime: Runtime, comm: Any, check: FingerprintCheck, wish: str) -> None:
        self._comm, self._check, self._wish = comm, check, wish
        self._min, self._kind = runtime.mpi.MIN, runtime.mpi.INT64_T
        self._judgements = Judgements(wish)

    def confer(self) -> str | None:
        """Find out whether any rank has called two lines in another order than rank 0; warn if the user wants that.

        Called by all ranks, in the same call. Costs one all_reduce of 8 bytes.

        Returns:
            None if the call is to go on, on all ranks. Else all are to raise an error, and this is what is in disorder,
            on the rank that says it; on the others it is empty.
        """
        rank, size = self._comm.rank, self._comm.size
        nothing, no_mistake = size + 1, size
        found, crossed, result = self._check.note_lines(), None, nothing
        if found is not None:
            crossed = crossed_lines(found, rank, _FIRST)
            result = no_mistake if crossed is None else rank
        says = self._least(result)
        if says == nothing:
            return None
        if says < size and self._wish == Wish.ERROR:
            return crossed.briefly() if crossed is not None and says == rank else ""
        self._judgements.count(mistake=says < size)
        if not self._judgements.left:
            self._check.end_lines()
        if crossed is not None and says == rank:
            crossed.warn()
        return None

    def _least(self, number: int) -> int:
        own, least = (bytearray(number.to_bytes(8, sys.byteorder)) for _ in range(2))
        self._comm.Allreduce([own, 1, self._kind], [least, 1, self._kind], self._min)
        return int.from_bytes(least, sys.byteorder)
