"""In which part of the world's store its workers meet.

Rank 0 names a part that nobody has used, and the others read the name. The rules are:

- A rank does not go again into a part where it was a worker, but waits for the next name. One that is quick would
  otherwise find those who are about to leave.
- An attempt that fails before its rank is a worker does not count. The rank tries again in the same part, where the
  others wait for it: each that has come says so there.
- How it ends is said once, in one key: the first who sees that all have come writes that they have met, or the first
  who has waited in vain that it gives up. All obey that. If one has given up, nobody goes into that part any more, and
  whoever waits in it gives up too: those who come later would count ranks that have gone. Rank 0 names another part.
- A worker that is no rank waits until the ranks have met in the part that was named last, and only then becomes a
  worker there. If it came earlier, and the ranks gave that part up, it would stay there alone.

The keys, who writes them, and what a death leaves:

- The name, at the world's store, and once more for workers that are no rank: rank 0 writes both, the others read them.
  If rank 0 dies before it writes, all wait until their time is over. If it dies after that, the other ranks wait for
  rank 0 in the part that it has named, and a worker that is no rank waits for them.
- ``came/R``, in the part: rank R writes it when it is a worker, all read it. A rank that dies before that is waited
  for; one that dies after that counts as come, and its loss is noticed as that of any worker.
- ``outcome``, in the part: by compare_set from empty, so the first writer decides, and nobody changes it. Who dies
  before it writes leaves that to the others: each writes it when it sees all, or when its own time is over.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import InitializationError
from phalanx.rpc.members import store_lost
from phalanx.system.threads import within
from phalanx.topology.environment import place_with

__all__ = ["Meeting", "find_meeting", "newest_meeting"]

_NEWEST = "phalanx/rpc/newest"  # the key of the part in which workers of the job meet now, for those that are no rank
_OUTCOME, _MET = "outcome", "met"
_STORE_S = 1.0

_been: set[str] = set()  # the parts in which this process has been a worker
_named = ""  # the part that this process has named last, as rank 0


class Meeting:
    """One part of a store, in which workers meet.

    Attributes:
        store: that part.
    """

    def __init__(self, part: str, whole: Store) -> None:
        self._part, self.store = part, PrefixStore(part, whole)

    def come(self, rank: int) -> None:
        """This process has become a worker here.

        Raises:
            InitializationError: the store is gone.
        """
        _been.add(self._part)
        try:
            self.store.set(_came(rank), "")
        except (dist.DistError, RuntimeError) as error:
            raise store_lost(error) from error

    def missing(self, seen: set[int], size: int) -> list[int]:
        """The ranks that have not come.

        Args:
            seen: the ranks that were seen here; some may have been refused.
            size: how many ranks there are.

        Raises:
            InitializationError: another rank has given up; or the store is gone.
        """
        try:
            late = sorted(set(range(size)) - seen)
            if not late and not self.store.check([_came(rank) for rank in range(size)]):
                late = [rank for rank in range(size) if not self.store.check([_came(rank)])]
            outcome = self._outcome() if late else self._conclude(_MET)
        except (dist.DistError, RuntimeError) as error:
            raise store_lost(error) from error
        if outcome in ("", _MET):
            return late
        raise InitializationError(f"rpc.init() cannot succeed: {outcome}. Call it again on all ranks")

    def give_up(self, rank: int, why: BaseException) -> bool:
        """This rank has waited here in vain. Whether that counts: False if all have met, as another one has seen."""
        text = f"rank {rank} has given up ({str(why) or type(why).__name__})"
        # The store may be gone with its host, and then those who wait learn of that.
        with contextlib.suppress(dist.DistError, RuntimeError, TimeoutError):
            return within(_STORE_S, lambda: self._conclude(text)) != _MET
        return True

    def was_given_up(self) -> bool:
        """Whether somebody has waited here in vain."""
        return self._outcome() not in ("", _MET)

    def has_met(self) -> bool:
        """Whether all ranks have come here, as one of them has seen."""
        return self._outcome() == _MET

    def _outcome(self) -> str:
        return self.store.get(_OUTCOME).decode() if self.store.check([_OUTCOME]) else ""

    def _conclude(self, outcome: str) -> str:
        return self.store.compare_set(_OUTCOME, "", outcome).decode()


def _came(rank: int) -> str:
    return f"came/{rank}"


def find_meeting(store: Store, rank: int, size: int, wait: Callable[[Callable[[], list[int]]], None]) -> Meeting:
    """The part of a world's store in which its workers meet now.

    Each attempt of a launcher has a part of its own. No prefix of torch's or of the program's stands before its keys: a
    worker that is no rank reads them too, and cannot know such a prefix.

    Args:
        store: the world's.
        rank, size: this process's rank, and the number of ranks.
        wait: waits until the function that it is given names no rank any more.

    Raises:
        InitializationError: what ``wait`` raises; or the store is gone.
    """
    global _named
    key = f"phalanx/rpc/{place_with(None, None, None, None).attempt}/of {size}"
    whole = store
    while isinstance(whole, PrefixStore):
        whole = whole.underlying_store
    try:
        if rank == 0:
            if not _named or _named in _been or Meeting(_named, whole).was_given_up():
                _named = f"phalanx/rpc/{secrets.token_hex(8)}"
            whole.set(_NEWEST, _named)
            store.set(key, _named)
            return Meeting(_named, whole)
        found: list[Meeting] = []

        def named_by() -> list[int]:
            part = store.get(key).decode() if store.check([key]) else ""
            meeting = Meeting(part, whole)
            if not part or part in _been or meeting.was_given_up():
                return [0]
            found.append(meeting)
            return []

        wait(named_by)
        return found[0]
    except InitializationError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise store_lost(error) from error


def newest_meeting(whole: Store, wait: Callable[[Callable[[], bool]], None]) -> Meeting:
    """The part of a job's store in which its ranks have met, for a worker that is none of them.

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
    except (dist.DistError, RuntimeError) as error:
        raise store_lost(error) from error
    return found
