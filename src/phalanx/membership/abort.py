"""Agree why a group over several hosts broke, and where its ranks are: one rank's side of one group.

The rank that finds something sends it to the registrar. The first fact of a group wins there and is pushed to all its
ranks, so every rank raises the same, and ends the waits of its process and of its host's memory. If the registrar does
not answer, as its host is cut off or its process has left, a rank goes by its own fact.

A rank concludes something only while it waits: in a collective for all ranks, in a message for its peer. So ranks that
need each other go on without a third.

When ranks are late, or their calls differ, the registrar asks every rank once where it is. Who does not answer in a
second is named as not saying it: it is stopped, or something holds its interpreter.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from torch._C._distributed_c10d import HashStore, Store

from phalanx.errors import InitializationError
from phalanx.membership.liveness import Membership
from phalanx.membership.protocol import (
    Address,
    Broken,
    Departed,
    Fact,
    Join,
    Joined,
    Left,
    Lost,
    Message,
    Position,
    Positions,
    Way,
    needs_positions,
)
from phalanx.membership.registrar import POSITIONS_S
from phalanx.system.threads import AwakeClock

__all__ = ["GroupAbort", "Member", "address_key"]

# How long the registrar may take to say which fact was first. Where it can be reached it answers at once, unless its
# process is stopped or its interpreter held.
ANSWER_S = 1.0
# For how long a collective goes on that a rank has left unannounced: it may have done its part before.
GRACE_S = 0.4
_LOOK_S = 0.1


class Member(Protocol):
    """This rank, as the end of its group needs to know it. Any thread may ask, and nothing waits."""

    def awaited(self) -> Mapping[int, float]:
        """Return the ranks of other hosts that this one waits for, each with since when, by ``time.monotonic()``."""
        ...

    def position(self, fact: Fact) -> Position:
        """Say where this rank is, and which ranks of its host are stopped."""
        ...

    def end_waits(self, fact: Fact) -> None:
        """Wake the ranks of this host, and end this one's waits for others: the group is broken."""
        ...


class GroupAbort:
    """See above; :meth:`join` begins.

    ==============  =================  ===========  =========================
    field           writer             readers      guard
    ==============  =================  ===========  =========================
    ``fact``        any thread, once   any thread   ``membership.changed``
    ``pids``        the loop, once     any thread   one reference
    ``_left``       the loop           any thread   one step of Python's
    ``_positions``  the loop, once     any thread   one reference
    ==============  =================  ===========  =========================

    Args:
        membership: of which its ranks are; released by :meth:`close`.
        name: of the group, equal on its ranks and of no other group.
        ranks: its ranks in the membership.

    Attributes:
        rank: this one's in the group.
        fact: why the group broke; None while it is whole.
        pids: the process id of each rank; there after :meth:`join`.
    """

    def __init__(self, membership: Membership, name: str, ranks: Sequence[int]) -> None:
        self.membership, self.name, self.ranks = membership, name, [*ranks]
        self.rank = self.ranks.index(membership.rank)
        self.fact: Fact | None = None
        self.pids: list[int] = []
        self._member: Callable[[], Member | None] = lambda: None
        self._addresses: dict[str, Store] = {}
        self._left: set[int] = set()
        self._positions: list[Position] | None = None
        self._first_addresses: list[Address] = []  # until join()
        self._ended = self._closed = False

    def join(self, member: Member, timeout_s: float) -> None:
        """Say that this rank, which is kept weakly, is in the group, and wait until all have said so.

        Raises:
            InitializationError: one has not in time, or has gone.
        """
        self._member = weakref.ref(member)
        self.membership.subscribe(self.name, self)
        self.membership.send(Join(self.name, self.ranks, self._first_addresses))
        clock = AwakeClock()
        while not self.membership.wait_for(lambda: bool(self.pids), 0.1):
            has_registrar = self.membership.connected
            if any(map(self.departed, range(len(self.ranks)))) or not has_registrar or clock.now() >= timeout_s:
                why = "a rank has gone, or did not come in time" if has_registrar else "rank 0 of the job has gone"
                raise InitializationError(f"a group over several hosts could not be made: {why}")

    def addresses(self, name: str) -> Store:
        """Return a store of this process to which the registrar brings the others' addresses of this name."""
        return self._addresses.setdefault(name, HashStore())

    def say_address(self, name: str, address: bytes) -> None:
        """Tell the others an address of this rank."""
        message = Address(self.name, self.rank, name, address)
        if self.pids:
            self.membership.send(message)
        else:
            self._first_addresses.append(message)

    # -- what is known of ranks, from any thread ---------------------------------------------------

    def departed(self, rank: int) -> Departed | None:
        """Return how a rank has gone from the job, if it has."""
        return self.membership.departed.get(self.ranks[rank], (None, 0.0))[0]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left the group in order, and takes no message any more."""
        gone = self.departed(rank)
        return rank in self._left or (gone is not None and gone.way == Way.LEFT)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank does nothing for this one any more."""
        return self.departed(rank) is not None or self.has_left(rank)

    def lost(self, rank: int) -> Lost | None:
        """Return the fact that a rank is lost, or has left; None if it is there as far as is known."""
        gone = self.departed(rank)
        if gone is None or gone.way == Way.LEFT:
            return Lost(self.rank, Way.LEFT, rank) if self.has_left(rank) else None
        return self.fact_of(gone, rank)

    def fact_of(self, gone: Departed, rank: int) -> Lost:
        """Return the fact that a rank of the group has gone in this way."""
        return Lost(**{**msgspec.structs.asdict(gone), "by": self.rank, "rank": rank})

    # -- the first fact, from any thread -----------------------------------------------------------

    def publish(self, fact: Fact, *, departs: bool = False) -> Fact:
        """Tell the others why the group broke, as this rank has found it; return what was told first.

        ``departs``: this rank's script fails with that.
        """
        self.membership.send(Broken(self.name, fact, departs))
        return self.wait(ANSWER_S) or self.know(fact)

    def wait(self, patience_s: float, whether: Callable[[], bool] = lambda: False) -> Fact | None:
        """Wait for the fact, or until something else is so; None if it is not known by then."""
        membership = self.membership
        membership.wait_for(lambda: self.fact is not None or whether() or not membership.connected, patience_s)
        return self.fact

    def know(self, fact: Fact) -> Fact:
        """Note why the group broke; return what this rank has learned first."""
        with self.membership.changed:
            if self.fact is None:
                self.fact = fact
                self.membership.changed.notify_all()
        member = self._member()
        if member is not None and not self._ended:
            self._ended = True
            member.end_waits(self.fact)
        return self.fact

    def positions(self) -> list[Position] | None:
        """Return where the ranks are, in a moment; None if the registrar does not say."""
        patience_s = POSITIONS_S + ANSWER_S
        membership = self.membership
        membership.wait_for(lambda: self._positions is not None or not membership.connected, patience_s)
        return self._positions

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Say that this rank has left in order."""
        self.membership.send(Left(self.name, [self.rank]))

    def close(self) -> None:
        """Stop taking messages about the group."""
        if not self._closed:
            self._closed = True
            self.membership.unsubscribe(self.name)
            self.membership.release()

    # -- the loop's thread -------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        if isinstance(message, Joined):
            for address in message.addresses:
                self.take(address)
            self.pids = message.pids
        elif isinstance(message, Address):
            if message.rank != self.rank:
                self.addresses(message.name).set(address_key(message.rank), message.address)  # type: ignore[arg-type]
        elif isinstance(message, Left):
            self._left.update(message.ranks)
        elif isinstance(message, Positions):
            self._positions = message.ranks
        elif isinstance(message, Broken):
            member = self._member()
            if member is not None and needs_positions(message.fact):
                self.membership.send(member.position(message.fact))
            self.know(message.fact)

    def look(self) -> float | None:
        membership, member = self.membership, self._member()
        away = [rank for rank, each in enumerate(self.ranks) if each in membership.departed]
        if not away or self.fact is not None or member is None:
            return None
        now, waits = time.monotonic(), member.awaited()
        for rank in away:
            if rank not in waits:
                continue
            lost, (_, at) = self.lost(rank), membership.departed[self.ranks[rank]]
            if lost is not None and lost.way != Way.LEFT and now - max(waits[rank], at) >= GRACE_S:
                self._conclude(lost)
                return None
        return _LOOK_S

    def _conclude(self, fact: Fact) -> None:
        """Publish a fact without waiting for the answer, which comes to this thread."""
        if self.membership.connected:
            self.membership.send(Broken(self.name, fact))
            self.membership.later(ANSWER_S, lambda: self.know(fact))
        else:
            self.know(fact)


def address_key(rank: int) -> str:
    """Return the key of a rank's address: Gloo's in a group that listens on one device, and messages use it too."""
    return f"0/{rank}"
