"""Lines that ranks of an MPI group have called in different orders.

Whether all ranks call from one line comes with the comparison of the calls (``native/csrc/mpi/lines.h``). If they do
not, and the same lines have not just met, the ranks confer: each tells all others its line, and compares its own with
those of the lower ranks. What one rank finds, all must know, since an error of one rank is an error of all.
"""

from __future__ import annotations

import sys
from typing import Any

from phalanx.transports.crossing import CrossedLines, Judgements, Wish, crossed_lines
from phalanx.transports.mpi.direct import FingerprintCheck
from phalanx.transports.mpi.runtime import Runtime

__all__ = ["Lines", "wish_of"]

_WORD_BYTES = 8


def wish_of(runtime: Runtime, comm: Any) -> str:
    """What the user wants to happen in this group: a value of ``Wish``. Called by all ranks; rank 0's setting holds.

    Raises:
        InitializationError: the setting has no such value; on all ranks.
    """
    if not runtime.check or comm.size == 1:
        return Wish.IGNORE
    return Wish.read(comm.bcast(Wish.said(), 0))


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
        """Find out whether two ranks have called two lines in different orders; warn if the user wants that.

        Called by all ranks, in the same call. Costs one all_gather of 8 bytes a rank, and one all_reduce of 8 bytes if
        the same lines have not met in an earlier conference.

        Returns:
            None if the call is to go on, on all ranks. Else all are to raise an error, and this is what is in disorder,
            on the rank that says it; on the others it is empty.
        """
        rank, size = self._comm.rank, self._comm.size
        nothing, no_mistake = size + 1, size
        if not self._check.hear_lines(self._told()):
            return None
        has_found, crossed = self._judge()
        result = nothing if not has_found else no_mistake if crossed is None else rank
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

    def _judge(self) -> tuple[bool, CrossedLines | None]:
        """Whether lines of this rank are crossed with a lower one's, and the first such pair that is a mistake."""
        judged: set[frozenset[int]] = set()
        mistake: CrossedLines | None = None
        for found in self._check.crossings():
            lines = frozenset(found.lines)
            if mistake is None and lines not in judged:  # with every peer the judgement of two lines is the same
                judged.add(lines)
                mistake = crossed_lines(found, self._comm.rank, found.peer)
        return bool(judged), mistake

    def _told(self) -> bytearray:
        """Tell the other ranks this one's line; returns what each rank has told, eight bytes a rank."""
        own = bytearray(self._check.own_line().to_bytes(_WORD_BYTES, sys.byteorder))
        told = bytearray(_WORD_BYTES * self._comm.size)
        self._comm.Allgather([own, 1, self._kind], [told, 1, self._kind])
        return told

    def _least(self, number: int) -> int:
        own, least = (bytearray(number.to_bytes(_WORD_BYTES, sys.byteorder)) for _ in range(2))
        self._comm.Allreduce([own, 1, self._kind], [least, 1, self._kind], self._min)
        return int.from_bytes(least, sys.byteorder)
