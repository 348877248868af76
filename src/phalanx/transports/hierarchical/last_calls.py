"""Comparing the last calls of a group over several hosts, which no later call will, before a rank leaves it.

The leaders of the hosts compare every call before it is done, so only what the ranks beside them called can be unknown
then. A host's ranks compare that through the memory that they share, as the first of them to leave the group finds it,
also of those that still have to leave. A rank that has found it right says so in the group's part of the store, for the
ranks of other hosts; one that has found it wrong breaks the group, which they hear as ever (``breaking.py``).

``compared/L``, where L is the leader of a host, is how many calls of the group's ranks there have been compared. It is
written by each rank of that host when it leaves, and read by those of other hosts when they do. Two ranks write
different counts only if one of them has left without calls that the other has made; that other one then finds it left
out, and writes nothing. A rank that dies before it has written leaves it to the others of its host; if none comes, each
rank that leaves waits as long as it would for a rank of its own host. Whatever a rank writes stays right after its
death. The last rank to leave deletes the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch._C._distributed_c10d import Store

from phalanx.errors import CollectiveMismatch, PeerLost
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.asking import Questions
from phalanx.transports.hierarchical.calls import LeftOut
from phalanx.transports.hierarchical.gloo_engine import TransferFailed
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.whereabouts import PROMPT_S
from phalanx.transports.hierarchical.wording import Fact

__all__ = ["LastCalls"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Reason(Protocol):
    """Why the group broke, as its ranks share it."""

    questions: Questions

    def told(self) -> Fact | None:
        """The reason, as far as this rank can know it; None while the group is whole."""
        ...


class LastCalls:
    """One rank's side of it.

    Args:
        store: the group's own part of the job's store.
        layout: where the ranks are.
        local: the communicator of this host's ranks.
        reason: the group's.
    """

    def __init__(self, store: Store, layout: Layout, local: Communicator, reason: Reason) -> None:
        self._store, self._local, self._reason = store, local, reason
        # A leader that is alone on its host has nobody beside it whose call could be unknown.
        own, others = layout.here, [ranks for ranks in layout.hosts if ranks[0] != layout.here[0]]
        self._own = _key(own[0]) if len(own) > 1 else None
        self._awaited = [_key(ranks[0]) for ranks in others if len(ranks) > 1]

    def difference(self, calls: int, is_compared: bool, patience_s: float) -> Exception | None:
        """Compare the last calls of the ranks; return what is wrong with them, and new to this rank.

        Args:
            calls: how many this rank has made. None of them has failed here.
            is_compared: every rank's last call has been compared when it was made.
            patience_s: how long to wait for ranks that are behind, and for what the other hosts find.
        """
        known = self._reason.told()
        if known is not None:
            return _of_last(known, calls)
        if is_compared:
            return None
        until = time.monotonic() + patience_s
        try:
            compared = self._local.compare_rest(patience_s)
        except CollectiveMismatch as error:
            return error
        except PeerLost as error:
            return LeftOut(error.group_rank)
        if compared and self._own is not None:
            own = self._own
            self._reason.questions.say(lambda: self._store.set(own, str(calls)))
        if not compared:
            # A rank is behind, and then the time is over; or another one has broken the group, and says why at once.
            until = min(until, time.monotonic() + PROMPT_S)
        return self._heard(calls, until, lambda: compared and self._are_all_right(calls))

    def _heard(self, calls: int, until: float, are_all_right: Callable[[], bool]) -> Exception | None:
        """What another rank finds wrong with the last calls, before all hosts have found them right."""
        pause_s = _FIRST_PAUSE_S
        while not are_all_right():
            known = self._reason.told()
            if known is not None:
                return _of_last(known, calls)
            if time.monotonic() >= until:
                break
            time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _are_all_right(self, calls: int) -> bool:
        """Whether the other hosts have compared that many calls, or nobody can say so any more."""

        def look() -> bool:
            try:
                if not self._store.check(self._awaited):
                    return False
                return all(int(said) >= calls for said in self._store.multi_get(self._awaited))
            except RuntimeError:  # it has gone with rank 0
                return True

        return not self._awaited or self._reason.questions.ask(look) is not False


def forget(store: Store, layout: Layout, rank: int) -> None:
    """Delete what has been said of the host that this rank leads, if it leads one; all ranks have left the group."""
    host, place = layout.place(rank)
    if place == 0 and len(layout.hosts[host]) > 1:
        store.delete_key(_key(rank))


def _key(leader: int) -> str:
    return f"compared/{leader}"


def _of_last(known: Fact, calls: int) -> Exception | None:
    """Why the group is known to have broken, if that is what the last of so many calls was, for :class:`Reason`."""
    if known.get("at", -1) != calls:
        return None
    return TransferFailed(-1, "another rank has found what is wrong with the last call")
