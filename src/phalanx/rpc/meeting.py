"""In which part of the world's store its workers meet.

Rank 0 names a part that nobody has used, and the others read the name. The rules are:

- A rank that was a worker does not go again into the part where it was, but waits for the next name. One that is quick
  would otherwise find those who are about to leave.
- An attempt that fails before its rank is a worker leaves no trace. The rank tries again in the same part, where the
  others wait for it.
- A worker that has waited in vain for others says so in the part. Nobody goes into that part any more, and whoever
  waits in it gives up too: those who come later would count the ranks that have gone. Rank 0 names another part.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import InitializationError
from phalanx.place.arguments import place_with
from phalanx.rpc.members import store_lost
from phalanx.system.bounded import within

__all__ = ["NEWEST", "Meeting", "find_meeting"]

NEWEST = "phalanx/rpc/newest"  # the key of the part in which workers of the job meet now, for those that are no rank
_GIVEN_UP = "given up"
_STORE_S = 1.0

_left = ""  # the part in which this process became a worker last
_named = ""  # the part that this process has named last, as rank 0


class Meeting:
    """One part of a store, in which workers meet.

    Attributes:
        store: that part.
    """

    def __init__(self, part: str, whole: Store) -> None:
        self._part, self.store = part, PrefixStore(part, whole)

    def enter(self) -> None:
        """This process has become a worker here."""
        global _left
        _left = self._part

    def give_up(self, rank: int, why: BaseException) -> None:
        """This rank has waited here in vain."""

        def say() -> None:
            if not self.given_up():
                self.store.set(_GIVEN_UP, f"rank {rank} has given up ({str(why) or type(why).__name__})")

        # The store may be gone with its host, and then those who wait learn of that.
        with contextlib.suppress(dist.DistError, RuntimeError, TimeoutError):
            within(_STORE_S, say)

    def given_up(self) -> str:
        """Who has waited here in vain, and for what; empty if nobody has."""
        return self.store.get(_GIVEN_UP).decode() if self.store.check([_GIVEN_UP]) else ""

    def require_others(self) -> None:
        """Check that nobody has waited here in vain.

        Raises:
            InitializationError: somebody has; or the store is gone.
        """
        try:
            said = self.given_up()
        except (dist.DistError, RuntimeError) as error:
            raise store_lost(error) from error
        if said:
            raise InitializationError(f"rpc.init() cannot succeed: {said}. Call it again on all ranks")


def find_meeting(store: Store, rank: int, size: int, wait: Callable[[Callable[[], list[int]]], None]) -> Meeting:
    """The part of a world's store in which its workers meet now.

    Each attempt of a launcher has its own. It lies outside of the prefixes that torch or a program puts before the keys
    of a world, since a worker that is no rank does not know them.

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
            if not _named or _named == _left or Meeting(_named, whole).given_up():
                _named = f"phalanx/rpc/{secrets.token_hex(8)}"
            whole.set(NEWEST, _named)
            store.set(key, _named)
            return Meeting(_named, whole)
        found: list[Meeting] = []

        def named_by() -> list[int]:
            part = store.get(key).decode() if store.check([key]) else ""
            meeting = Meeting(part, whole)
            if not part or part == _left or meeting.given_up():
                return [0]
            found.append(meeting)
            return []

        wait(named_by)
        return found[0]
    except InitializationError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise store_lost(error) from error
