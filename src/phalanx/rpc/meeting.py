"""Rendezvous of the ranks that become workers: they meet in the first part of the world's store that is not over.

Part ``K`` has a random name, which the first rank that comes there gives it. A part is over when its outcome is
written, once: the first who sees that all ranks have come writes that they have met, or the first who has waited in
vain that it gives up. All obey that, and nobody goes into a part that is over. So a rank that is quick does not find
those who are about to leave, and one that tries again does not count those who have gone. An attempt that fails before
its rank is a worker does not count: the others wait for it in the same part.

A worker that is no rank waits until the ranks have met in the part that rank 0 was in last.

======================  ======================  ================================  ================================
key                     written by              read by                           if the writer dies before
======================  ======================  ================================  ================================
``.../K``               any rank, first wins    ranks                             another one writes it
``phalanx/rpc/newest``  rank 0                  workers that are no rank          they wait until their time is over
``came/R`` (of a part)  rank R, as a worker     ranks                             it is waited for
``outcome``             any rank, first wins    all                               others write it after their time
======================  ======================  ================================  ================================
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import InitializationError
from phalanx.rpc.members import StoreGone, store_lost
from phalanx.system.threads import within
from phalanx.topology.environment import place_with

__all__ = ["Meeting", "find_meeting", "newest_meeting"]

_NEWEST = "phalanx/rpc/newest"
_OUTCOME, _MET = "outcome", "met"
_STORE_S = 1.0


class Meeting:
    """One part of a store, in which workers meet.

    Attributes:
        store: that part.
    """

    def __init__(self, part: str, whole: Store) -> None:
        self.store = PrefixStore(part, whole)

    def come(self, rank: int) -> None:
        """Say that this process has become a worker here.

        Raises:
            InitializationError: the store is gone.
        """
        try:
            self.store.set(f"came/{rank}", "")
        except StoreGone as error:
            raise store_lost(error) from error

    def missing(self, seen: set[int], size: int) -> list[int]:
        """Return the ranks that have not come.

        Args:
            seen: the ranks that were seen here; some may have been refused.
            size: how many ranks there are.

        Raises:
            InitializationError: another rank has given up; or the store is gone.
        """
        try:
            late = sorted(set(range(size)) - seen)
            if not late and not self.store.check([f"came/{rank}" for rank in range(size)]):
                late = [rank for rank in range(size) if not self.store.check([f"came/{rank}"])]
            outcome = self.outcome() if late else self._conclude(_MET)
        except StoreGone as error:
            raise store_lost(error) from error
        if outcome in ("", _MET):
            return late
        raise InitializationError(f"rpc.init() cannot succeed: {outcome}. Call it again on all ranks")

    def give_up(self, rank: int, why: BaseException) -> bool:
        """Say that this rank has waited in vain. Whether that counts: not if all have met, as another one has seen."""
        text = f"rank {rank} has given up ({str(why) or type(why).__name__})"
        # The store may be gone with its host, and then those who wait learn of that.
        with contextlib.suppress(*StoreGone, TimeoutError):
            return within(_STORE_S, lambda: self._conclude(text)) != _MET
        return True

    def has_met(self) -> bool:
        """Return whether all ranks have come here, as one of them has seen."""
        return self.outcome() == _MET

    def outcome(self) -> str:
        """Return how it has ended; empty if it has not."""
        return self.store.get(_OUTCOME).decode() if self.store.check([_OUTCOME]) else ""

    def _conclude(self, outcome: str) -> str:
        return self.store.compare_set(_OUTCOME, "", outcome).decode()


def find_meeting(store: Store, rank: int, size: int) -> Meeting:
    """Return the part of a world's store in which its workers meet now.

    Each attempt of a launcher has parts of its own. No prefix of torch's or of the program's stands before their keys:
    a worker that is no rank reads them too, and cannot know such a prefix.

    Args:
        store: the world's.
        rank, size: this process's rank, and the number of ranks.

    Raises:
        InitializationError: the store is gone.
    """
    key = f"phalanx/rpc/{place_with(None, None, None, None).attempt}/of {size}"
    whole = store
    while isinstance(whole, PrefixStore):
        whole = whole.underlying_store
    try:
        for number in itertools.count():
            own = f"phalanx/rpc/{secrets.token_hex(8)}"
            part = store.compare_set(f"{key}/{number}", "", own).decode()
            meeting = Meeting(part, whole)
            if not meeting.outcome():
                break
        if rank == 0:
            whole.set(_NEWEST, part)
    except StoreGone as error:
        raise store_lost(error) from error
    return meeting


def newest_meeting(whole: Store, wait: Callable[[Callable[[], bool]], None]) -> Meeting:
    """Return the part of a job's store in which its ranks have met, for a worker that is none of them.

    Args:
        whole: the job's store.
        wait: waits as long as the function that it is given says so.

    Raises:
        InitializationError: what ``wait`` raises; or the store is gone.
    """
    found = Meeting("", whole)

    def pending() -> bool:
        nonlocal found
        if whole.check([_NEWEST]):
            found = Meeting(whole.get(_NEWEST).decode(), whole)
            return not found.has_met()
        return True

    try:
        wait(pending)
    except InitializationError:
        raise
    except StoreGone as error:
        raise store_lost(error) from error
    return found
