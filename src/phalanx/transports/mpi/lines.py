"""The lines from which the ranks of an MPI group call: whether two ranks have called two lines in different orders."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.native.core import Crossing, Status, library
from phalanx.transports.crossing import CrossedLines, Judgements, Wish, crossed_lines
from phalanx.transports.mpi.runtime import Runtime

__all__ = ["Lines"]

_LINE_BITS = 16
_FORGOT = 1 << _LINE_BITS  # beside a line: its rank has forgotten pairs of lines since the last conference
_MOST_KNOWN = 1024
_CONFERENCE = 1 << 32  # added to the number of a conference: no line is as large


class Lines:
    """The lines of one group's calls. Only the thread that is in a collective uses them.

    ``native/csrc/line_pairs.h`` has the rule for two ranks. Of two, the higher one keeps their pairs of lines. If the
    ranks call from different lines they *confer*: each tells all others its line, and compares it with those of the
    lower ranks. What one rank finds, all must know, since an error of one rank is an error of all.

    A program with an ``if rank == 0:`` would confer at each such call. So a rank that was at this line in an earlier
    conference offers the number of the last one in the place of its line. If all ranks offer the same number, all are
    where they were then, and none can find anything new. The numbers are equal on all ranks because every rank takes
    part in every conference.

    Args:
        runtime, comm: MPI under way, and the group's communicator.
        wish: what the user wants to happen, equal on all ranks; not ``ignore``.

    Attributes:
        unsettled: the lower ranks with which there are pairs now; only if there are any is :meth:`met_again` needed.
    """

    def __init__(self, runtime: Runtime, comm: Any, wish: str) -> None:
        self._comm, self._wish, self._core = comm, wish, library()
        self._min, self._kind = runtime.mpi.MIN, runtime.mpi.INT64_T
        self._line_now: Callable[[], int] = self._core.phx_line_now
        self._judgements = Judgements(wish)
        self._line = 0  # this rank's, in the call under way; 0 if it is not known
        self._pairs: dict[int, int] = {}  # by lower ranks, whose lines were different once
        self.unsettled: set[int] = set()
        self._last: dict[int, tuple[int, tuple[int, ...]]] = {}  # by line, the last conference there, and all lines in it
        self._conferences = 0
        self._known: set[tuple[int, ...]] = set()  # lines of all ranks that have met in a conference; equal on all
        self._forgot = 0

    @classmethod
    def wanted(cls, runtime: Runtime, comm: Any) -> Lines | None:
        """Lines as rank 0's user wants them; None if they are not to be compared. Called by all ranks.

        Raises:
            InitializationError: the setting has no such value; on all ranks.
        """
        if not runtime.check or comm.size == 1:
            return None
        wish = Wish.read(comm.bcast(Wish.said(), 0))
        return None if wish == Wish.IGNORE else cls(runtime, comm, wish)

    def __del__(self) -> None:
        for pairs in self._pairs.values():
            self._core.phx_pairs_close(pairs)

    @property
    def ended(self) -> bool:
        """Whether lines need not be compared any more; equal on all ranks after each call."""
        return not self._judgements.left

    def offer(self) -> int:
        """The number for this thread's line, which is equal on all ranks if nothing new can be found."""
        self._line = line = self._line_now()
        if not self._last:
            return line
        last = self._last.get(line)
        return line if last is None else _CONFERENCE + last[0]

    def met_again(self) -> None:
        """Count a call in which all ranks have offered the same number."""
        if self._line:
            last = self._last.get(self._line)
            self._meet(self.unsettled, () if last is None else last[1])

    def confer(self) -> str | None:
        """Find out whether two ranks have called two lines in different orders; warn if the user wants that.

        Called by all ranks, in the same call. Costs one all_gather of 8 bytes a rank, and one all_reduce of 8 bytes if
        the same lines have not met in an earlier conference.

        Returns:
            None if the call is to go on, on all ranks. Else all are to raise an error, and this is what is in disorder,
            on the rank that says it; on the others it is empty.
        """
        rank, size = self._comm.rank, self._comm.size
        told = array("q", bytes(8 * size))
        self._comm.Allgather([array("q", [self._line | self._forgot]), 1, self._kind], [told, 1, self._kind])
        if any(word & _FORGOT for word in told) or len(self._known) == _MOST_KNOWN:
            self._known.clear()
        self._forgot = 0
        theirs = tuple(word % _FORGOT for word in told)
        self._conferences += 1
        found = self._meet(range(rank), theirs) if self._line else []
        self._last[self._line] = self._conferences, theirs
        if theirs in self._known:
            return None
        self._known.add(theirs)
        mistake = self._judge(found)
        nothing, no_mistake = size + 1, size
        says = self._least(nothing if not found else no_mistake if mistake is None else rank)
        if says == nothing:
            return None
        if says < size and self._wish == Wish.ERROR:
            return mistake.briefly() if mistake is not None and says == rank else ""
        self._judgements.count(mistake=says < size)
        if mistake is not None and says == rank:
            mistake.warn()
        return None

    def _meet(self, peers: Iterable[int], theirs: tuple[int, ...]) -> list[tuple[int, Crossing]]:
        """Note that this rank's line has met those of lower ranks, by rank; empty if all are at this line.

        Returns:
            The ranks with which lines are crossed now, and which lines.
        """
        found, mine = [], self._line
        for peer in tuple(peers):
            line = theirs[peer] if theirs else mine
            if not line or (line == mine and peer not in self.unsettled):
                continue
            if peer not in self._pairs:
                self._pairs[peer] = self._core.phx_pairs_open()
            crossing = Crossing()
            status = self._core.phx_pairs_meet(self._pairs[peer], mine, line, ctypes.byref(crossing))
            if not self._core.phx_pairs_settled(self._pairs[peer]):
                self.unsettled.add(peer)
            elif peer in self.unsettled:
                self.unsettled.discard(peer)
                self._last.clear()  # what has met before is new again
                self._forgot = _FORGOT
            if status == Status.CROSSED:
                found.append((peer, crossing))
        return found

    def _judge(self, found: list[tuple[int, Crossing]]) -> CrossedLines | None:
        """The first of these crossings that is a mistake."""
        judged: set[frozenset[int]] = set()
        for peer, crossing in found:
            lines = frozenset(crossing.lines)
            if lines not in judged:  # with every peer the judgement of two lines is the same
                judged.add(lines)
                mistake = crossed_lines(crossing, self._comm.rank, peer)
                if mistake is not None:
                    return mistake
        return None

    def _least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        own, least = array("q", [number]), array("q", [0])
        self._comm.Allreduce([own, 1, self._kind], [least, 1, self._kind], self._min)
        return least[0]
