"""How a rank leaves a group over several hosts for good: the last one deletes what all have written into the store.

What the ranks write there may be read by each of them as long as it is in the group. So each that has left counts
itself, as the last thing that it does there, and the one that counts the last of all ranks deletes the group's keys:
nobody can read or write them any more. A rank whose script ends counts itself as well, as its interpreter ends.

A rank whose process is gone counts itself no more. Each rank that leaves counts before itself those that it knows to be
gone: of its own host as the kernel says, of the others as its lookout does, or as the reason says for which the group
broke. A host that is silent, or a rank that is stopped, may come back, and is counted by nobody.

Who writes, who reads, and when the writer dies. ``departed/R`` is added to by rank R, or by those that find its process
gone; the first of them adds one to ``departed``, so that each rank counts once. The rank that adds the last one reads
the marks and deletes everything. It has then counted itself, so all that it wrote was there before; and ranks that are
gone write nothing. If a rank dies before it has added to its own key, others count it. If it dies between the two
numbers, or while it deletes, those keys stay that nobody has come to; nobody reads them. So they do if it dies, or is
found gone, only after all others have left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from torch._C._distributed_c10d import Store

from phalanx.transports.hierarchical.inquiry import ASKED, SEEN
from phalanx.transports.hierarchical.whereabouts import NOTED

__all__ = ["AWAY", "depart"]

AWAY = "away"  # the key that is there once a rank of the world has gone
_GONE = "departed/gone"  # the key that is there once a rank has been counted that was gone
# The last rank to leave looks for what only a group has written that broke, or in which a rank waited for long, if it
# finds one of the marks. A rank that writes such a key writes a mark in the same question, or has found one.
_MARKS = ("broken", AWAY, NOTED, ASKED, _GONE)
_WRITTEN_WITH_A_MARK = ("call", "message", "place", "stands", "gone", "how", SEEN)


def depart(
    store: Store,
    rank: int,
    size: int,
    ended: Collection[int],
    forget: Callable[[int], object],
    forget_gone: Callable[[int], object],
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Count this rank as one that has left, and before it those that are gone; the last one clears the store.

    Args:
        store: the group's own part of the job's store.
        rank, size: this process's place in the group.
        ended: the ranks whose processes are gone for sure.
        forget: deletes what a rank has written elsewhere.
        forget_gone: deletes what a rank has written elsewhere that it deletes itself unless it dies.
        goes_on: whether to go on deleting; asked before each rank.
    """
    with contextlib.suppress(RuntimeError):  # it has gone with rank 0
        others = sorted({*ended} - {rank})
        if others:
            store.set(_GONE, "")
        counted = 0
        for each in (*others, rank):
            if store.add(f"departed/{each}", 1) == 1:
                counted = store.add("departed", 1)
        if counted < size:
            return
        marked = any(store.check([mark]) for mark in _MARKS)
        kinds = ("lookout", "left", "departed", *(_WRITTEN_WITH_A_MARK if marked else ()))
        for each in range(size):
            if not goes_on():
                return
            for kind in kinds:
                store.delete_key(f"{kind}/{each}")
            forget(each)
            if marked:
                forget_gone(each)
        for key in ("departed", *(_MARKS if marked else ())):
            store.delete_key(key)
