"""Words for why a group over several hosts broke. Every rank puts the same facts into words itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.diagnosis.call_site import listed
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.lost import did_last, let_continue, rank_of_group
from phalanx.membership.protocol import KEEP_ALIVE, Late, Lost, Position, Way
from phalanx.transports.hierarchical.layout import Layout
from phalanx.words import format_list

__all__ = ["Found", "Wording"]


@dataclass(frozen=True)
class Found:
    """Return where the ranks of a group of this size were when it broke, as far as they say."""

    size: int
    positions: Mapping[int, Position]

    @property
    def stopped(self) -> set[int]:
        """The ranks whose processes are stopped."""
        return {rank for rank, each in self.positions.items() if each.kind == "stopped"}

    def call_of(self, rank: int) -> Position | None:
        """The collective or message in which a rank was, if it was in one."""
        found = self.positions.get(rank)
        return found if found is not None and found.kind in ("call", "message") else None

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
        return CollectiveMismatch.of_calls(listed(elsewhere | calls, range(self.size)), calls)

    def behind(self, count: int) -> dict[int, str]:
        """The ranks that have begun fewer collectives than this, each with where it is, as far as that is known."""
        missing = {}
        for rank in range(self.size):
            each = self.positions.get(rank, Position(rank=rank))
            if each.kind in ("", "stopped"):
                missing[rank] = each.text
            elif each.number < count and each.kind == "place":
                missing[rank] = f"at {each.text}" if each.text else "in no collective"
            elif each.number < count:
                missing[rank] = f"in {each.text}"
        return missing


@dataclass(frozen=True)
class Wording:
    """The errors of one rank.

    Attributes:
        layout: where the ranks are.
        pids: their process ids.
        own, call: this rank, and what it was doing.
    """

    layout: Layout
    pids: Sequence[int]
    own: int
    call: str

    def who(self, ranks: Sequence[int]) -> str:
        """Ranks of a group with their processes: ``rank 2 of the group (pid 70 on h1)``, joined by ``and``."""
        return format_list([rank_of_group(rank, self.pids[rank], self.layout.name(rank)) for rank in ranks])

    def lost(self, fact: Lost) -> PeerLost:
        """The error for a rank or a host that went."""
        what, remedy = self._what(fact)
        text = f"{what}. Rank {self.own} was in {self.call}{f'. {remedy}' if remedy else ''}"
        if fact.rank < 0:
            return PeerLost(text)
        known = {name: getattr(fact, name) for name in ("signal", "last_operation", "last_line")}
        host = self.layout.name(fact.rank)
        return PeerLost(text, group_rank=fact.rank, pid=self.pids[fact.rank], host=host, **known)

    def _what(self, fact: Lost) -> tuple[str, str]:
        """Return what has happened, and the next step, if one is known."""
        own_output = "Look at that rank's own output for the cause"
        who = self.who([fact.rank]) if fact.rank >= 0 else "a rank of the group"
        if fact.way == Way.SILENT:
            host = self.layout.name(fact.rank)
            return (
                f"Nothing comes from {host}, for {KEEP_ALIVE.unacknowledged_s:g} s not even acknowledgements: it is "
                f"down, or the network between it and {self.layout.name(fact.by)} is cut. "
                f"On {host}: {self.who(self.layout.ranks_beside(fact.rank))}",
                f"Look at the console of {host} and its links",
            )
        if fact.way == Way.ENDED:
            how = f" {fact.text}" if fact.text else ""
            return f"{who} has ended{how}{did_last(fact.last_operation, within=fact.was_in_it)}", own_output
        if fact.way == Way.FAILED:
            return f"{who} has failed{f' ({fact.text})' if fact.text else ''}", own_output
        if fact.way == Way.LEFT:
            return (
                f"{who} has left the group in order (it destroyed the group, or its script has come to its end)",
                "Every rank must make the same calls before it leaves",
            )
        if fact.way == Way.REPLACED:
            return f"{who} has replaced itself by another program (exec)", "Let it start the program as a child process"
        if fact.way == Way.INTERRUPTED:
            return f"{who} was interrupted ({fact.text})", ""
        if fact.text:
            return fact.text, ""
        if fact.rank < 0:
            return "a rank of the group gave up, and did not say why in time", ""
        return f"a transfer to or from {who} failed: it has ended, or the way to it is cut", own_output

    def late_message(self, fact: Late) -> CollectiveTimeout:
        """The error for a message of another rank that was not done in time."""
        return CollectiveTimeout(f"{fact.text}. Rank {self.own} was in {self.call}", group_rank=fact.rank)

    def awaited_elsewhere(self, fact: Late, found: Found, timeout_s: float) -> CollectiveTimeout:
        """The error of a message whose group broke because the ranks did not all come to a collective."""
        theirs = found.call_of(fact.by)
        places = {} if theirs is None else found.behind(theirs.number)
        places.pop(self.own, None)
        came = f"{self._all_of(places)} did not come" if places else "not all ranks came"
        blamed: dict[str, Any] = {"group_rank": fact.rank}
        advice = CollectiveTimeout.remedy()
        if places:
            first = _first_missing(places)
            advice = let_continue(self.pids[first]) if first in found.stopped else advice
            blamed = {"group_rank": first, "pid": self.pids[first], "host": self.layout.name(first)}
        what = "a collective" if theirs is None else theirs.text
        return CollectiveTimeout(
            f"rank {fact.by} of the group was in {what}, and {came} within {timeout_s:g} s. Rank {self.own} was in "
            f"{self.call}. {advice}",
            elapsed_s=timeout_s,
            **blamed,
        )

    def late(self, found: Found, count: int, timeout_s: float) -> CollectiveTimeout:
        """The error for ranks that did not come in time to the call that is this rank's ``count``-th."""
        waiting, places = f"rank {self.own} was in {self.call}", found.behind(count)
        if not places:
            return CollectiveTimeout(
                f"a transfer between hosts did not end within {timeout_s:g} s while {waiting}, although every rank has "
                "made the call. Is the link between the hosts too slow for it? " + CollectiveTimeout.remedy(),
                elapsed_s=timeout_s,
            )
        first = _first_missing(places)
        return CollectiveTimeout.did_not_come(
            self._all_of(places),
            waiting,
            timeout_s,
            group_rank=first,
            elapsed_s=timeout_s,
            several=len(places) > 1,
            stopped_pid=self.pids[first] if first in found.stopped else 0,
            pid=self.pids[first],
            host=self.layout.name(first),
        )

    def _all_of(self, places: Mapping[int, str]) -> str:
        return format_list([f"{self.who([rank])}{_where(places[rank])}" for rank in sorted(places)])


def _first_missing(places: Mapping[int, str]) -> int:
    # One that says where it is, is missing perhaps only because it waits for one of its host that does not.
    return min(places, key=lambda rank: (places[rank].startswith(("at ", "in ")), rank))


def _where(place: str) -> str:
    return f", which was {place}," if place else ", which does not say where it is,"
