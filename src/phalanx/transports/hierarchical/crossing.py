"""Lines that ranks of different hosts have called in different orders.

Ranks of one host compare the lines of their calls through the memory that they share. Between hosts a frame has the
line of the leader that sends it, and the first host's leader compares: whoever is out of order is so against that one,
or against the leader of the own host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from phalanx.native.core import Crossing, Status, library
from phalanx.transports.crossing import Judgements, Wish, crossed_lines

__all__ = ["Crossed", "Lines"]


class Crossed(Exception):
    """Two ranks have called two lines in different orders, and the user wants that to be an error; says which."""


class Lines:
    """The lines of one group's calls, on the leader of a host.

    Args:
        rank: this leader's rank in the group.
        peers: the other leaders' ranks, by their hosts, if this one compares; else nothing.
        tells: whether this host is still to tell the user; called once there is something to tell.
    """

    def __init__(self, rank: int, peers: Mapping[int, int], tells: Callable[[], bool]) -> None:
        self._pairs: dict[int, int] = {}
        self._core, self._rank, self._peers = library(), rank, dict(peers)
        self._tells = tells
        self._wish = Wish.read()
        self._judgements = Judgements(self._wish)
        self._unsettled: set[int] = set()
        if self._wish != Wish.IGNORE:
            self._pairs = {host: pairs for host in peers if (pairs := self._core.phx_pairs_open())}

    def __del__(self) -> None:
        for pairs in self._pairs.values():
            self._core.phx_pairs_close(pairs)

    def own(self) -> int:
        """From which line this thread's collective was called, as a number for the other leaders; 0 if not known."""
        return 0 if self._wish == Wish.IGNORE else int(self._core.phx_line_now())

    def meet(self, mine: int, theirs: Mapping[int, int]) -> None:
        """This leader's call has met the others', which are equal.

        Args:
            mine: from which line it was called.
            theirs: from which lines the others' were, by their hosts.

        Raises:
            Crossed: two lines were called in different orders, and the user wants that to be an error.
        """
        for host, pairs in self._pairs.items():
            line = theirs[host]
            if not mine or not line or (mine == line and host not in self._unsettled):
                continue
            found = Crossing()
            status = self._core.phx_pairs_meet(pairs, mine, line, ctypes.byref(found))
            if self._core.phx_pairs_settled(pairs):
                self._unsettled.discard(host)
            else:
                self._unsettled.add(host)
            if status == Status.CROSSED and self._judgements.left:
                self._judge(found, self._peers[host])

    def _judge(self, found: Crossing, peer: int) -> None:
        crossed = crossed_lines(found, self._rank, peer)
        if crossed is not None and self._wish == Wish.ERROR:
            raise Crossed(crossed.briefly())
        self._judgements.count(mistake=crossed is not None)
        if crossed is not None and self._tells():
            crossed.warn()
