"""Agree why a group over several hosts broke, and where its ranks are: one rank's side of one group.

The rank that finds something sends it to the registrar. The first fact of a group wins there and is pushed to all its
ranks, so every rank raises the same. A rank that hears of it ends the waits of its process and of its host's memory. If
the registrar does not answer, as its host is cut off or its process has left, a rank goes by its own fact.

A rank concludes something only while it waits: in a collective for all ranks, in a message for its peer. So a host that
comes back before anybody waits for it is missed by nobody, and ranks that need each other go on without a third.

When ranks are late, or their calls differ, every rank is asked where it is, once, by the registrar. Whoever does not
answer in a second is named as not saying it: it is stopped, or something holds its interpreter.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
    Leave,
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

__all__ = ["GroupAbort", "Member"]

# How long the registrar may take to say which fact was first. Where it can be reached it answers at once, unless its
# process is stopped or its interpreter held.
ANSWER_S = 1.0
# For how long a collective goes on that a rank has left unannounced: it may have done its part before.
GRACE_S = 0.4
# For how long a rank waits at least for one whose host is silent: that may be back, and dials once a second.
AWAITED_S = 1.5
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
        self._addresses: dict[str, bytes] = {}
        self._stores: dict[str, Store] = {}
        self._others_addresses: dict[tuple[str, int], bytes] = {}
        self._left: set[int] = set()
        self._positions: list[Position] | None = None
        self._ended = self._closed = False

    def join(self, member: Member, timeout_s: float) -> None:
        """Say that this rank is in the group, and wait until all have said so.

        Args:
            member: this rank; kept weakly.
            timeout_s: for the others, which have come as far as this in the job's store.

        Raises:
            InitializationError: one has not, or has gone.
        """
        self._member = weakref.ref(member)
        self.membership.subscribe(self.name, self)
        self.membership.send(Join(self.name, self.ranks, self._addresses))
        clock = AwakeClock()
        while not self.membership.wait_for(lambda: bool(self.pids), 0.1):
            has_registrar = self.membership.connected or bool(self.membership.silent)
            if any(map(self.departed, range(len(self.ranks)))) or not has_registrar or clock.now() >= timeout_s:
                why = "a rank has gone, or did not come in time" if has_registrar else "rank 0 of the job has gone"
                raise InitializationError(f"a group over several hosts could not be made: {why}")

    def publish_address(self, name: str, address: bytes) -> None:
        """Tell the others an address of this rank by :meth:`join`."""
        self._addresses[name] = address

    def address_of(self, name: str, rank: int) -> bytes:
        """Return the address that a rank has published, after :meth:`join`."""
        return self._others_addresses[name, rank]

    def address_store(self, name: str) -> Store:
        """Make a store for a group of Gloo's in this process; the others' addresses come there by the registrar."""
        self._stores[name] = made = HashStore()
        return made

    def say_address(self, name: str) -> None:
        """Tell the others this rank's address, which Gloo has written into that store; by :meth:`join` or after it."""
        address = self._stores[name].get(_address_key(self.rank))
        if self.pids:
            self.membership.send(Address(self.name, self.rank, name, address))
        else:
            self._addresses[name] = address

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
        ended = gone.way == Way.ENDED
        return Lost(
            by=self.rank,
            rank=rank,
            way=gone.way,
            text="" if ended else gone.text,
            how=gone.text if ended else "",
            signal=gone.signal,
            last_operation=gone.last_operation,
            last_line=gone.last_line,
            was_in_it=gone.was_in_it,
        )

    # -- the first fact, from any thread -----------------------------------------------------------

    def publish(self, fact: Fact, *, departs: bool = False) -> Fact:
        """Tell the others why the group broke; return what was told first.

        Args:
            fact: as this rank has found it.
            departs: this rank's script fails with it.
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
        self.membership.send(Leave(self.name))

    def close(self) -> None:
        """Stop taking messages about the group."""
        if not self._closed:
            self._closed = True
            self.membership.unsubscribe(self.name)
            self.membership.release()

    # -- the loop's thread -------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        if isinstance(message, Joined):
            for rank, addresses in enumerate(message.addresses):
                for name, address in addresses.items():
                    self._note_address(name, rank, address)
            self.pids = message.pids
        elif isinstance(message, Address):
            self._note_address(message.name, message.rank, message.address)
        elif isinstance(message, Left):
            self._left.update(rank for name, rank in message.ranks if name == self.name)
        elif isinstance(message, Positions):
            self._positions = message.ranks
        elif isinstance(message, Broken):
            member = self._member()
            if member is not None and needs_positions(message.fact):
                self.membership.send(member.position(message.fact))
            self.know(message.fact)

    def _note_address(self, name: str, rank: int, address: bytes) -> None:
        if name not in self._stores:
            self._others_addresses[name, rank] = address
        elif rank != self.rank:
            self._stores[name].set(_address_key(rank), address)  # type: ignore[arg-type]

    def look(self) -> float | None:
        membership, member = self.membership, self._member()
        away = [rank for rank, each in enumerate(self.ranks) if each in membership.silent or self.departed(rank)]
        if not away or self.fact is not None or member is None:
            return None
        now, waits = time.monotonic(), member.awaited()
        for rank in away:
            if rank not in waits:
                continue
            lost, awaited_s = self.lost(rank), now - waits[rank]
            if lost is not None and lost.way != Way.LEFT:
                _, at = membership.departed[self.ranks[rank]]
                if min(awaited_s, now - at) >= GRACE_S:
                    self._conclude(lost)
                    return None
            elif lost is None and awaited_s >= AWAITED_S:
                self._conclude(Lost(self.rank, Way.SILENT, rank))
                return None
        return _LOOK_S

    def _conclude(self, fact: Fact) -> None:
        """Publish a fact without waiting for the answer, which comes to this thread."""
        if self.membership.connected:
            self.membership.send(Broken(self.name, fact))
            self.membership.later(ANSWER_S, lambda: self.know(fact))
        else:
            self.know(fact)


def _address_key(rank: int) -> str:
    return f"0/{rank}"  # of a Gloo group that listens on one device
