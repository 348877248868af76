"""Before two ranks connect for the first time, both say in the job's store that they come to it.

An engine that dials a rank which has gone tries for seconds, and prints text of its own; one that waits to be dialled
by such a rank waits for the group's whole timeout. So neither begins before the other has come as well. While a rank
waits for that, it looks whether the other one still can come: one that has left the group in order has said so in the
store, and so has a rank that has broken the group. Whether the other's process or host has gone is seen by the lookout,
which ends the wait from outside, as it does every other, and sooner (``Guard.unmet``).

Who writes, who reads, and when the writer dies. Each pair of ranks has one number there, and each of the two adds one
to it, once. The second to do so knows that the first has come, and goes on at once. The first reads the number until it
is two, and deletes it then, or when it gives up. If a rank dies before it has added its one, it has not come, which the
other one's lookout sees. If it dies right after, that one dials in vain, as it would if this had happened a moment
later. If the first dies before it has deleted the number, that stays; nobody reads it. And if the second comes when the
first has given up, it waits as the first, until it learns why that one has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Protocol

from torch._C._distributed_c10d import Store

from phalanx.system.threads import AwakeClock
from phalanx.transports.hierarchical.asking import Questions
from phalanx.transports.hierarchical.gloo_engine import PeerAbsent, TransferFailed, TransferLate
from phalanx.transports.hierarchical.guard import Guard

__all__ = ["FirstContact"]

# How often a rank that waits looks whether the other one has left; it costs the store two questions.
_LOOK_S = 0.25
# The pause between two questions for the number is an eighth of the time that the wait has taken, within these limits:
# it delays the first collective by little, and many ranks that wait for long do not flood the store.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05
_LONGEST_PAUSE_S_PER_RANK = 0.0005


class Departures(Protocol):
    """What is known of ranks that come to nothing any more. Any thread may ask."""

    questions: Questions
    guard: Guard

    def is_told(self) -> bool:
        """Whether a rank has broken the group."""
        ...

    def unwanting(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks that have left, or all if the group is broken."""
        ...


class FirstContact:
    """One rank's side of it, in one group. Any thread may use it, for one peer at a time.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group.
        size: the number of ranks.
        departures: says which ranks have left.
    """

    def __init__(self, store: Store, rank: int, size: int, departures: Departures) -> None:
        self._store, self._rank, self._departures = store, rank, departures
        self._longest_pause_s = max(_LONGEST_PAUSE_S, _LONGEST_PAUSE_S_PER_RANK * size)

    def meet(self, peer: int, timeout_s: Callable[[], float], over: Callable[[], bool]) -> None:
        """Return when the other rank has come as well.

        Args:
            peer: that rank.
            timeout_s: how long this may take, asked for again and again.
            over: this rank has given up.

        Raises:
            PeerAbsent: that rank has left the group.
            TransferLate: it has not come in time.
            TransferFailed: another rank has broken the group, this one has given up, or the store cannot be reached.
        """
        with self._departures.questions.asking() as asked:
            if not asked:
                raise TransferFailed(peer, "this rank has left the group")
            try:
                self._meet("comes/{}-{}".format(*sorted((self._rank, peer))), peer, timeout_s, over)
            except RuntimeError as error:
                raise TransferFailed(peer, f"the job's store cannot be asked ({error})") from error

    def _meet(self, key: str, peer: int, timeout_s: Callable[[], float], over: Callable[[], bool]) -> None:
        if self._store.add(key, 1) >= 2:
            return
        clock, next_look_s = AwakeClock(), 0.0
        self._departures.guard.unmet.append(peer)
        try:
            while True:
                waited_s = clock.now()
                if over():
                    raise TransferFailed(peer, "the group was aborted")
                if waited_s >= next_look_s:
                    next_look_s = waited_s + _LOOK_S
                    self.look(peer)
                if waited_s >= timeout_s():
                    raise TransferLate(peer, f"it did not come within {timeout_s():g} s")
                time.sleep(min(max(_SHORTEST_PAUSE_S, waited_s / 8), self._longest_pause_s))
                if self._store.add(key, 0) >= 2:
                    return
        finally:
            self._departures.guard.unmet.remove(peer)
            with contextlib.suppress(RuntimeError):  # it has gone
                self._store.delete_key(key)

    def look(self, peer: int) -> None:
        """See whether a rank still can come.

        Raises:
            PeerAbsent: it has left the group.
            TransferFailed: the group is broken.
        """
        if self._departures.is_told():
            raise TransferFailed(peer, "the group is broken")
        if self._departures.unwanting([peer]):
            raise PeerAbsent(peer, "it has left the group")
