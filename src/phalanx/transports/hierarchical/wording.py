"""Words for why a group over several hosts broke. Every rank puts the same facts into words itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.diagnosis.call_site import listed
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.lost import rank_of_group
from phalanx.membership.protocol import KEEP_ALIVE, Late, Lost, Position, Way
from phalanx.transports.hierarchical.layout import Layout
from phalanx.words import format_list

__all__ = ["Wording"]


@dataclass(frozen=True)
class Wording:
    """The errors of one rank of a group that broke.

    Attributes:
        layout, pids: where the ranks are, and their process ids.
        own, call: this rank, and what it was doing.
        positions: where the ranks were, as far as they say.
    """

    layout: Layout
    pids: Sequence[int]
    own: int
    call: str
    positions: Mapping[int, Position] = field(default_factory=dict)

    def mismatch(self, at: int) -> CollectiveMismatch:
        """The error for calls that differ, with the ranks' calls.

        Args:
            at: which of its calls differs, by the count of the rank that has found it. A rank that need not wait for
                others may be one further by then. -1 if it is a message.
        """
        calls, elsewhere = dict[int, str](), dict[int, str]()
        for rank, each in self.positions.items():
            if each.kind in ("call", "message") and each.text:
                calls[rank] = each.before if each.number == at + 1 and at > 0 and each.before else each.text
            elif each.kind == "place" and each.number == at and each.before:
                calls[rank] = each.before
            elif each.kind == "place" and each.text:
                elsewhere[rank] = f"in no collective, at {each.text}"
        return CollectiveMismatch.of_calls(listed(elsewhere | calls, range(len(self.pids))), calls)

    def late_message(self, fact: Late) -> CollectiveTimeout:
        """The error for a message of another rank that was not done in time."""
        return CollectiveTimeout(f"{fact.text}. Rank {self.own} was in {self.call}", group_rank=fact.rank)

    def late(self, by: int, timeout_s: float) -> CollectiveTimeout:
        """The error for ranks that did not come in time to the call of rank ``by``; this one may be in a message."""
        waiting, theirs = f"rank {self.own} was in {self.call}", self.positions.get(by, Position(rank=by))
        if self.positions[self.own].kind != "call":
            waiting = f"rank {by} was in {theirs.text or 'a collective'}, and {waiting}"
        behind = self._behind(theirs.number or self.positions[self.own].number)
        places = {rank: place for rank, place in behind.items() if rank != self.own} or behind
        if not places:
            return CollectiveTimeout(
                f"a transfer between hosts did not end within {timeout_s:g} s while {waiting}, although every rank has "
                "made the call. Is the link between the hosts too slow for it? " + CollectiveTimeout.remedy(),
                elapsed_s=timeout_s,
            )
        # One that says where it is, is missing perhaps only because it waits for one of its host that does not.
        first = min(places, key=lambda rank: (places[rank].startswith(("at ", "in ")), rank))
        told = {
            rank: f"which was {place}," if place else "which does not say where it is,"
            for rank, place in places.items()
        }
        return CollectiveTimeout.did_not_come(
            format_list([f"{self._who([rank])}, {told[rank]}" for rank in sorted(told)]),
            waiting,
            timeout_s,
            group_rank=first,
            elapsed_s=timeout_s,
            several=len(places) > 1,
            stopped_pid=self.pids[first] if self.positions.get(first, theirs).kind == "stopped" else 0,
            pid=self.pids[first],
            host=self.layout.name(first),
        )

    def _behind(self, count: int) -> dict[int, str]:
        """The ranks that have begun fewer collectives than this, each with where it is, as far as that is known."""
        missing = {}
        for rank in range(len(self.pids)):
            each = self.positions.get(rank, Position(rank=rank))
            if each.kind in ("", "stopped"):
                missing[rank] = each.text
            elif each.number < count and each.kind == "place":
                missing[rank] = f"at {each.text}" if each.text else "in no collective"
            elif each.number < count:
                missing[rank] = f"in {each.text}"
        return missing

    def lost(self, fact: Lost) -> PeerLost:
        """The error for a rank or a host that went."""
        waiting = f"rank {self.own} was in {self.call}"
        if fact.rank < 0:
            what = fact.text or "a rank of the group gave up, and did not say why in time"
            return PeerLost(f"{what}. Rank {self.own} was in {self.call}")
        pid, host = self.pids[fact.rank], self.layout.name(fact.rank)
        if fact.way not in (Way.SILENT, Way.UNKNOWN):
            known = {name: getattr(fact, name) for name in ("signal", "last_operation", "last_line", "was_in_it")}
            return PeerLost.gone(fact.way, fact.rank, pid, waiting, fact.text, host=host, **known)
        what, remedy = fact.text, ""
        if not what:
            what = f"a transfer to or from {self._who([fact.rank])} failed: it has ended, or the way to it is cut"
            remedy = ". Look at that rank's own output for the cause"
        if fact.way == Way.SILENT:
            what = (
                f"Nothing comes from {host}, for {KEEP_ALIVE.unacknowledged_s:g} s not even acknowledgements: it is "
                f"down, or the network between it and {self.layout.name(fact.by)} is cut. "
                f"On {host}: {self._who(self.layout.ranks_beside(fact.rank))}"
            )
            remedy = f". Look at the console of {host} and its links"
        text = f"{what}. Rank {self.own} was in {self.call}{remedy}"
        return PeerLost(text, group_rank=fact.rank, pid=pid, host=host)

    def _who(self, ranks: Sequence[int]) -> str:
        """Ranks of a group with their processes: ``rank 2 of the group (pid 70 on h1)``, joined by ``and``."""
        return format_list([rank_of_group(rank, self.pids[rank], self.layout.name(rank)) for rank in ranks])
