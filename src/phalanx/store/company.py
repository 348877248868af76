"""The ranks of this host that a rank looks at while it waits in the store: which of them is stopped.

The store sees that a rank goes, by its connection, and never that one is stopped; and a store cannot answer whose rank
0 is stopped. But every rank says in its claim which process it is. Rank 0's claim comes with its verdict, and when all
have joined the store names to each the ranks of its host that stand next to it in the order of the ranks, which is a
ring. So each can look by itself, while it waits for an answer, however long that takes.

Several see a rank that is stopped, and one tells of it: the one that gets to bind a name of the kernel's (an abstract
socket), which the kernel frees when it closes it or ends. Nobody else needs to answer for that.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from phalanx.errors import InitializationError
from phalanx.store.claim import Claim
from phalanx.system.processes import own_sight, state_if_stopped, state_text
from phalanx.system.threads import AwakeClock
from phalanx.words import format_named, tell

__all__ = ["NEIGHBOURS", "Company", "neighbours"]

NEIGHBOURS = 4  # on either side
# For how long a rank is stopped before the user is told: one that is suspended with its whole job goes on with it.
_STOPPED_S = 3.0


def neighbours(claims: Sequence[Claim], rank: int) -> list[Claim]:
    """The ranks next to this one in the ring of those that see each other.

    Args:
        claims: of all ranks, in their order.
        rank: the one that asks.
    """
    own = claims[rank]
    ring = [claim for claim in claims if claim.sight == own.sight] if own.sight else [own]
    place = ring.index(own)
    others = ring[place + 1 :] + ring[:place]
    return others[:NEIGHBOURS] + others[NEIGHBOURS:][-NEIGHBOURS:]


class Company:
    """The ranks that this process looks at. Any thread may use it.

    Args:
        say: takes a line for the user.
    """

    def __init__(self, say: Callable[[str], None] = tell) -> None:
        self._say = say
        self._sight = own_sight()
        self._clock = AwakeClock()
        self._lock = threading.Lock()  # of the thread that looks; another one need not look at the same time
        # Replaced whole by the thread that meets the other ranks, and read by any.
        self._all: tuple[Claim, ...] = ()
        self._meets = True
        self._since_s: dict[int, float] = {}
        self._names: list[socket.socket] = []  # of the ranks of which this process has told
        self._done: set[int] = set()  # those, and the ranks of which another one has

    def know_rank_0(self, claim: Claim) -> None:
        """Look at rank 0, in whose process the store is, if it can be seen."""
        if claim.sight and claim.sight == self._sight:
            self._all = (claim,)

    def meet(self, others: Sequence[Claim]) -> None:
        """Look at these as well, until :meth:`part`."""
        self._all = tuple({claim.rank: claim for claim in (*self._all, *others)}.values())

    def part(self) -> None:
        """The ranks have all that they need of each other, or this one gives up: tell no more, and look at rank 0."""
        self._all = tuple(claim for claim in self._all if claim.rank == 0)
        self._meets = False
        with self._lock:
            for name in self._names:
                name.close()
            self._names.clear()

    def look(self) -> None:
        """Tell of a rank that has been stopped for some seconds. Called every second or so while this process waits."""
        if not self._meets or not self._lock.acquire(blocking=False):
            return
        try:
            now_s = self._clock.now()
            stopped = [claim for claim in self._all if _state(claim)]
            self._since_s = {claim.rank: self._since_s.get(claim.rank, now_s) for claim in stopped}
            for claim in stopped:
                if now_s - self._since_s[claim.rank] >= _STOPPED_S and claim.rank not in self._done:
                    self._done.add(claim.rank)
                    error = self._error(claim)
                    if error is not None and self._is_first(claim):
                        self._say(str(error))
        finally:
            self._lock.release()

    def _is_first(self, claim: Claim) -> bool:
        """Whether this process is the first to tell of that rank; the others then say nothing."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0phalanx/stopped/{claim.sight}/{claim.pid}/{claim.start}")
        except OSError:
            name.close()
            return False
        self._names.append(name)
        return True

    def rank_0_is_stopped(self) -> bool:
        """Whether the store cannot answer because its process is stopped, as far as this one sees."""
        return any(_state(claim) for claim in self._all if claim.rank == 0)

    def find_stopped(self) -> InitializationError | None:
        """The error that names a stopped rank, or None. It is for the timeout: until then the rank may go on."""
        for claim in sorted(self._all, key=lambda claim: claim.rank):
            if (error := self._error(claim)) is not None:
                return error
        return None

    @staticmethod
    def _error(claim: Claim) -> InitializationError | None:
        state = _state(claim)
        if not state:
            return None
        group = format_named("rank", range(claim.world_size))
        return InitializationError.rank_stopped(claim.rank, claim.pid, claim.host, state_text(state), group)


def _state(claim: Claim) -> str:
    return state_if_stopped(claim.pid, claim.start)
