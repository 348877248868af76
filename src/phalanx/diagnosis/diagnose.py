"""Conclude from snapshots of a job's ranks who keeps it from going on, and in which collective their calls differ.

A rank in an operation waits for the members of the group that have not come to it, or for the other end of a message; a
rank that is stopped, or in no operation, waits for nobody here. The ranks that the others wait for are where the paths
of this wait-for graph end. Where they end nowhere, ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from phalanx.diagnosis.call_site import lengths_that_count
from phalanx.diagnosis.snapshot import RankSnapshot, Record, Recording, lengths_in, world_rank
from phalanx.settings import BACKEND
from phalanx.system.processes import STATES
from phalanx.words import first_kinds, format_named

_RECENT = 64  # calls that ranks have done together are compared, the last of them only
# Each rank may bring its own number of bytes in these. Backends of devices also gather parts of different sizes, which
# Gloo refuses; in a gather or scatter no backend of torch's does.
_OWN_SIZES = ("all_to_all", "reduce_scatter")
_OWN_SIZES_BUT_IN_GLOO = (*_OWN_SIZES, "all_gather")


class HangDiagnosis(msgspec.Struct, frozen=True):
    """Diagnosis of a hung job: who waits for whom, by ranks in the world."""

    sentence: str = msgspec.field(name="verdict")  # the whole of it, without its full stop
    awaited: tuple[int, ...]  # whom the others wait for; of a circle all of its ranks
    waiting: tuple[int, ...]
    since_ns: int  # when the first of them began to wait, on the host's monotonic clock
    hint: str = ""  # what to look at in the program, as "the `if` in line 55"; empty if that cannot be told

    @property
    def advice(self) -> str:
        """The hint as it ends a sentence; empty if there is none."""
        return f"; look at {self.hint}" if self.hint else ""


def diagnose(ranks: Sequence[RankSnapshot]) -> HangDiagnosis | None:
    """Analyse the wait-for graph of a job; None if no rank is in an operation."""
    seen = {rank.rank: rank for rank in ranks}
    operations = {rank.rank: rank.operation for rank in ranks}
    waiting = {rank: record for rank, record in operations.items() if record is not None}
    if not waiting:
        return None
    arrows = {rank: _awaited(rank, record, seen) for rank, record in waiting.items()}
    reached: dict[int, set[int]] = {rank: _reach(rank, arrows) for rank in waiting}
    ends = {rank for found in reached.values() for rank in found if not arrows.get(rank)}
    since_ns = min(record.entered_ns for record in waiting.values())
    if ends:
        others = {rank: record for rank, record in waiting.items() if rank not in ends and reached[rank] & ends}
        sentence = _sentence([seen[rank] for rank in sorted(ends) if rank in seen], others)
        return HangDiagnosis(sentence, tuple(sorted(ends)), tuple(sorted(others)), since_ns)
    circle = {rank: record for rank, record in waiting.items() if rank in reached[rank]}
    text = _whereabouts(circle or waiting, seen)
    if circle:
        text = f"{format_named('rank', sorted(circle))} wait for each other: {text}"
    else:
        done = max(found.done for rank in waiting if (found := seen[rank].recording) is not None)
        text += f": all have come, and {f'{done} % of it is done' if done >= 0 else 'it is not over'}"
    return HangDiagnosis(text, tuple(sorted(circle)), tuple(sorted(waiting)), since_ns)


def _awaited(rank: int, record: Record, seen: Mapping[int, RankSnapshot]) -> set[int]:
    """The ranks that this one waits for."""
    own = seen[rank]
    if own.is_stopped:
        return set()  # whatever it waits for, it would not go on
    if record.is_message:
        if record.peer >= 0:
            return {world_rank(record.group, record.peer)} - {rank}
        return set(record.group.ranks) - {rank}
    others = [seen[other] for other in record.group.ranks if other != rank and other in seen]
    missing = {other.rank for other in others if not _has_come(other, record)}
    if missing:
        return missing
    # All have come. One that is stopped keeps the others there; else the rank itself says whom it waits for.
    stopped = {other.rank for other in others if other.is_stopped and other.operation is not None}
    if stopped or record.awaits < 0:
        return stopped
    named = world_rank(record.group, record.awaits)
    return {named} - {rank} if named in seen and seen[named].operation is None else set()


def _has_come(other: RankSnapshot, record: Record) -> bool:
    """Return whether a rank is in this collective of the group, or has been."""
    if other.recording is None:
        return False
    same = [
        theirs
        for theirs in other.recording.records
        if theirs.group.name == record.group.name and not theirs.is_message and theirs.in_group >= record.in_group
    ]
    if record.kind == "init":  # one that has failed is not the one that this rank waits in
        return any(theirs.under_way or theirs.kind != "init" for theirs in same)
    return any(theirs.in_group > record.in_group or theirs.kind == record.kind for theirs in same)


def _reach(rank: int, arrows: Mapping[int, set[int]]) -> set[int]:
    """The ranks to which a path of arrows leads; itself if it is on a circle."""
    found: set[int] = set()
    ahead = list(arrows.get(rank, ()))
    while ahead:
        at = ahead.pop()
        if at not in found:
            found.add(at)
            ahead += arrows.get(at, ())
    return found


def _sentence(awaited: Sequence[RankSnapshot], waiting: Mapping[int, Record]) -> str:
    """``rank 3 is in no operation, at train.py:42; ranks 0-2 wait for it in broadcast #118 at train.py:57``."""
    alike: dict[tuple[str, str], list[RankSnapshot]] = {}
    for rank in awaited:
        alike.setdefault((rank.host, _doing(rank)), []).append(rank)
    joining = bool(waiting) and all(record.kind == "init" for record in waiting.values())
    parts = []
    for (host, text), ranks in alike.items():
        does = f"is {text}" if len(ranks) == 1 else f"are {text}"
        if text.startswith("has "):
            does = text if len(ranks) == 1 else f"have {text[4:]}"
        # Of a rank that has never come its user may not know where it should be.
        local = f" ({format_named('local rank', [rank.local_rank for rank in ranks])})" if joining and host else ""
        parts.append(f"{_named([rank.rank for rank in ranks], host)}{local} {does}")
    who = " and ".join(parts)
    if not waiting:
        return who
    waits = f"{'waits' if len(waiting) == 1 else 'wait'} for {'it' if len(awaited) == 1 else 'them'}"
    operations = " and ".join(dict.fromkeys(_called(record) for _, record in sorted(waiting.items())))
    return f"{who}; {format_named('rank', sorted(waiting))} {waits} in {operations}"


def _named(ranks: Sequence[int], host: str) -> str:
    """``ranks 2-3 on h1``; without the host if that goes without saying."""
    return f"{format_named('rank', ranks)}{f' on {host}' if host else ''}"


def _called(record: Record) -> str:
    """``broadcast #118 at train.py:57``."""
    return f"{record.name()}{f' at {record.site}' if record.site else ''}"


def _doing(rank: RankSnapshot) -> str:
    """Describe what an awaited rank is doing, after "is"."""
    if rank.ended:
        return f"has ended ({rank.ended})"
    if rank.silent:
        return "out of sight: the host does not answer"
    how = STATES.get(rank.state, "") if rank.is_stopped or rank.state == "D" else ""
    if rank.operation is not None:
        return f"{how}, in {_called(rank.operation)}" if how else f"in {_called(rank.operation)}"
    last = rank.recording.last if rank.recording is not None else None
    place = f"at {rank.place}" if rank.place else ""
    if how:
        return " ".join(filter(None, [how, place])) if place or last is None else f"{how}, after {_called(last)}"
    said = [place, f"waiting for {rank.asked}" if rank.asked else ""]
    if last is None or place or rank.asked:
        said.append("in no operation yet" if last is None else "in no operation")
        return ", ".join(filter(None, said))
    return f"in no operation; its last was {_called(last)}"


def _whereabouts(waiting: Mapping[int, Record], seen: Mapping[int, RankSnapshot]) -> str:
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(waiting.items()):
        alike.setdefault((seen[rank].host, _called(record)), []).append(rank)
    return ", ".join(
        f"{_named(ranks, host)} {'is' if len(ranks) == 1 else 'are'} in {text}" for (host, text), ranks in alike.items()
    )


def disagreement(
    recordings: Mapping[int, Recording],
    rank: int,
    at_ns: float,
    stopped: Collection[int] = (),
    ended: Collection[int] = (),
) -> list[str]:
    """Lines that say which calls differed, or who had not come, when an operation of a rank failed; none if neither.

    Args:
        recordings: by rank; those that are not known are left out.
        rank: the rank whose operation failed at ``at_ns`` on the host's monotonic clock, or that ended in it.
        stopped, ended: the ranks that were stopped then (state T), and those that had ended with exit code 0.
    """
    last = _last(recordings, rank)
    if last is None:
        return []
    how = dict.fromkeys(stopped, ", which was stopped (state T),")
    how |= dict.fromkeys(ended, ", which ended (exit code 0),")
    if last.is_message:
        ends = last.group.ranks if last.peer < 0 else (world_rank(last.group, last.peer),)
        known = {r: recordings[r].records for r in ends if r in recordings and (last.peer >= 0 or r in how)}
        about = f"is the other end of {last.text()}"
        return [f"rank {r}{how.get(r, '')} {about}{_last_of(records)}" for r, records in known.items()]
    calls = _calls(recordings, last, at_ns)
    late = [other for other, records in calls.items() if max(records, default=0) < last.in_group]
    # A rank that came to such a collective a moment ago has no record of it yet.
    come = "was not seen in" if last.found_late else "had not come to"
    return _differing(calls, last) or [
        f"rank {other}{how.get(other, '')} {come} {last.name()}{last.where()}{_last_of(list(calls[other].values()))}"
        for other in late[:4]
    ]


def calls_that_differ(recordings: Mapping[int, Recording], rank: int, at_ns: float) -> list[str]:
    """The first of these, also of a rank that is still in its operation. The arguments are the same."""
    last = _last(recordings, rank)
    return [] if last is None or last.is_message else _differing(_calls(recordings, last, at_ns), last)


def _last(recordings: Mapping[int, Recording], rank: int) -> Record | None:
    """The operation of another backend that a rank is in, or that has failed."""
    last = recordings[rank].last if rank in recordings else None
    if last is None or last.group.backend == BACKEND or not (last.failed or last.under_way):
        return None
    return last


def _calls(recordings: Mapping[int, Recording], last: Record, at_ns: float) -> dict[int, dict[int, Record]]:
    """The collectives of the group that had begun when this one failed, by rank and number."""
    group = last.group.name, last.group.ranks
    return {
        rank: {
            record.in_group: record
            for record in recordings[rank].records
            if (record.group.name, record.group.ranks) == group and not record.is_message and record.entered_ns <= at_ns
        }
        for rank in last.group.ranks
        if rank in recordings
    }


def _differing(calls: Mapping[int, Mapping[int, Record]], last: Record) -> list[str]:
    for number in range(max(1, last.in_group - _RECENT), last.in_group + 1):
        of_ranks = {other: records[number] for other, records in calls.items() if number in records}
        alike = _ranks_alike(last.group.backend, of_ranks)
        if len(alike) > 1:
            kinds = [f"  {format_named('rank', ranks)}: {of_ranks[ranks[0]].text(with_shape=True)}" for ranks in alike]
            return ["the ranks called different operations:", *first_kinds(kinds)]
    return []


def _ranks_alike(backend: str, calls: Mapping[int, Record]) -> list[list[int]]:
    """The ranks whose calls of one collective are alike; more than one list if the calls do not belong together."""
    own_size = _OWN_SIZES if backend == "gloo" else _OWN_SIZES_BUT_IN_GLOO
    lengths = {
        rank: () if call.kind in own_size else lengths_that_count(lengths_in(call.shape))
        for rank, call in calls.items()
    }
    # One that goes with any shape of its size is alike to all others, if these are alike.
    apart = len({each for each in lengths.values() if each}) > 1
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, call in calls.items():
        size = 0 if call.kind in own_size else call.nbytes
        root = -1 if call.kind == "barrier" else call.peer
        facts = call.kind, call.dtype, call.op, root, size, lengths[rank] if apart else ()
        alike.setdefault(facts, []).append(rank)
    return list(alike.values())


def _last_of(records: Sequence[Record]) -> str:
    return f"; its last operation was {records[-1].text()}" if records else ""
