"""Why a group over several hosts broke, in words. A reason is a few facts, which every rank puts into words itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.lost import did_last, let_continue, rank_of_group
from phalanx.transports.hierarchical.contact import SILENT_S, STILL_S
from phalanx.transports.hierarchical.layout import Layout
from phalanx.words import format_list

__all__ = ["KNOWN_BESIDE", "Fact", "awaited_elsewhere", "late", "late_message", "lost", "who"]

# ``kind``: lost, late, differs or interrupted. ``what``: silent, stopped, ended, raised, left or unreachable, or
# message if one is late, as far as a word says it; else ``text`` says what happened, and with raised by which
# exception. ``group_rank``: whom it is about. ``by``: the rank that noticed it. If that is a rank of the same
# host, the fact may have ``KNOWN_BESIDE`` too. A rank of that host adds to ended ``how``, ``was_in_it`` and these, and
# tells the other hosts. ``at``: which call differs; ``ends``: if it is a message, its ends (``MessageEnd``).
Fact = dict[str, Any]
#: What the ranks beside a lost one know of it, as attributes of their errors.
KNOWN_BESIDE = ("signal", "last_operation", "last_line")


def who(ranks: Sequence[int], layout: Layout, pids: Sequence[int]) -> str:
    """Ranks of a group with their processes: ``rank 2 of the group (pid 70 on h1)``, joined by ``and``."""
    return format_list([rank_of_group(rank, pids[rank], layout.name(rank)) for rank in ranks])


def lost(fact: Fact, layout: Layout, pids: Sequence[int], own: int, call: str) -> PeerLost:
    """The error for a rank or a host that went.

    Args:
        fact: why the group broke.
        layout: where the ranks are.
        pids: their process ids.
        own, call: this rank, and what it was doing.
    """
    rank: int = fact["group_rank"]
    what, remedy = _what(fact, layout, pids)
    text = f"{what}. Rank {own} was in {call}{f'. {remedy}' if remedy else ''}"
    if rank < 0:
        return PeerLost(text)
    known = {name: fact[name] for name in KNOWN_BESIDE if name in fact}
    return PeerLost(text, group_rank=rank, pid=pids[rank], host=layout.name(rank), **known)


def _what(fact: Fact, layout: Layout, pids: Sequence[int]) -> tuple[str, str]:
    """What has happened, and the next step, if one is known."""
    own_output = "Look at that rank's own output for the cause"
    rank, what = fact["group_rank"], fact["what"]
    if what in ("silent", "stopped"):
        host = layout.name(rank)
        there = f"On {host}: {who(layout.ranks_beside(rank), layout, pids)}"
        if what == "silent":
            return (
                f"Nothing comes from {host}, for {SILENT_S:g} s not even acknowledgements: it is down, or the network "
                f"between it and {layout.name(fact['by'])} is cut. {there}",
                f"Look at the console of {host} and its links",
            )
        return (
            f"No rank on {host} runs, for {STILL_S:g} s, although the host answers: all were stopped (SIGSTOP, a "
            f"debugger, a suspended container or batch job). {there}",
            "Suspend a job on all of its hosts together",
        )
    if what == "ended":
        how = f" {fact['how']}" if fact.get("how") else ""
        did = did_last(fact.get("last_operation", ""), within=fact.get("was_in_it", False))
        return f"{_first(rank, layout, pids)} has ended{how}{did}", own_output
    if what == "raised":
        return f"{_first(rank, layout, pids)} has failed ({fact['text']})", own_output
    if what == "left":
        return (
            f"{_first(rank, layout, pids)} has left the group in order (it destroyed the group, or its script has come "
            f"to its end)",
            "Every rank must make the same calls before it leaves",
        )
    if what == "failed":
        return (
            f"{_first(rank, layout, pids)} has ended, or the way to it is cut: a transfer to or from it failed",
            own_output,
        )
    return fact["text"], ""


def _first(rank: int, layout: Layout, pids: Sequence[int]) -> str:
    return who([rank], layout, pids)


def late_message(fact: Fact, own: int, call: str) -> CollectiveTimeout:
    """The error for a message of another rank that was not done in time; see :func:`lost`."""
    return CollectiveTimeout(f"{fact['text']}. Rank {own} was in {call}", group_rank=fact["group_rank"])


def awaited_elsewhere(
    fact: Fact,
    theirs: str,
    places: Mapping[int, str],
    stopped: Collection[int],
    layout: Layout,
    pids: Sequence[int],
    own: int,
    call: str,
    timeout_s: float,
) -> CollectiveTimeout:
    """The error of a message whose group broke because the ranks did not all come to a collective.

    Args:
        fact: why the group broke.
        theirs: the collective, as far as that is known.
        places, stopped: the other ranks that did not come to it; see :func:`late`.
        layout, pids, own, call: see :func:`lost`.
        timeout_s: the group's timeout.
    """
    by, what = fact["by"], theirs or "a collective"
    came = f"{_all_of(places, layout, pids)} did not come" if places else "not all ranks came"
    blamed: dict[str, Any] = {"group_rank": fact["group_rank"]}
    advice = CollectiveTimeout.remedy()
    if places:
        first = _first_missing(places)
        advice = let_continue(pids[first]) if first in stopped else advice
        blamed = {"group_rank": first, "pid": pids[first], "host": layout.name(first)}
    return CollectiveTimeout(
        f"rank {by} of the group was in {what}, and {came} within {timeout_s:g} s. Rank {own} was in {call}. {advice}",
        elapsed_s=timeout_s,
        **blamed,
    )


def late(
    places: Mapping[int, str],
    stopped: Collection[int],
    layout: Layout,
    pids: Sequence[int],
    own: int,
    call: str,
    timeout_s: float,
) -> CollectiveTimeout:
    """The error for ranks that did not come in time.

    Args:
        places: the ranks that are missing, each with where it is instead, as far as that is known.
        stopped: those whose processes are known to be stopped.
        layout, pids, own, call: see :func:`lost`.
        timeout_s: the group's timeout.
    """
    waiting = f"rank {own} was in {call}"
    if not places:
        return CollectiveTimeout(
            f"a transfer between hosts did not end within {timeout_s:g} s while {waiting}, although every rank has "
            f"made the call. Is the link between the hosts too slow for it? {CollectiveTimeout.remedy()}",
            elapsed_s=timeout_s,
        )
    first = _first_missing(places)
    missing = _all_of(places, layout, pids)
    return CollectiveTimeout.did_not_come(
        missing,
        waiting,
        timeout_s,
        group_rank=first,
        elapsed_s=timeout_s,
        several=len(places) > 1,
        stopped_pid=pids[first] if first in stopped else 0,
        pid=pids[first],
        host=layout.name(first),
    )


def _first_missing(places: Mapping[int, str]) -> int:
    # One that says where it is, is missing perhaps only because it waits for one of its host that does not.
    return min(places, key=lambda rank: (places[rank].startswith(("at ", "in ")), rank))


def _all_of(places: Mapping[int, str], layout: Layout, pids: Sequence[int]) -> str:
    return format_list([f"{who([rank], layout, pids)}{_where(places[rank])}" for rank in sorted(places)])


def _where(place: str) -> str:
    return f", which was {place}," if place else ", which does not say where it is,"
