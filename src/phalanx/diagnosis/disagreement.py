"""In which collective the ranks of a group parted, when an error of another backend cannot say it: from recordings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from phalanx.diagnosis.call_site import lengths_that_count
from phalanx.diagnosis.records import Record, Recording, world_rank
from phalanx.diagnosis.shapes import lengths_in
from phalanx.settings import BACKEND
from phalanx.words import first_kinds, format_named

__all__ = ["calls_that_differ", "disagreement", "ranks_alike"]

_STOPPED = ", which was stopped (state T),"
_ENDED = ", which ended (exit code 0),"
_RECENT = 64  # calls that ranks have done together are compared, the last of them only
# Each rank may bring its own number of bytes in these. Backends of devices also gather parts of different sizes, which
# Gloo refuses; in a gather or scatter no backend of torch's does.
_OWN_SIZES = ("all_to_all", "reduce_scatter")
_OWN_SIZES_BUT_IN_GLOO = (*_OWN_SIZES, "all_gather")


class Call(Protocol):
    """What is compared of a collective, as in :class:`Record`."""

    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def shape(self) -> str: ...


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
        rank: the rank whose operation failed, or that ended in it.
        at_ns: when, on the host's monotonic clock.
        stopped: the ranks that were stopped then (state T).
        ended: those that ended by themselves, with exit code 0.
    """
    last = _last(recordings, rank)
    if last is None:
        return []
    how = dict.fromkeys(stopped, _STOPPED) | dict.fromkeys(ended, _ENDED)
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
    """The collectives of the group by rank and number."""
    return {
        other: {record.in_group: record for record in recordings[other].records if _counts(record, last, at_ns)}
        for other in last.group.ranks
        if other in recordings
    }


def _differing(calls: Mapping[int, Mapping[int, Record]], last: Record) -> list[str]:
    for number in range(max(1, last.in_group - _RECENT), last.in_group + 1):
        of_ranks = {other: records[number] for other, records in calls.items() if number in records}
        alike = ranks_alike(last.group.backend, of_ranks)
        if len(alike) > 1:
            kinds = [f"  {format_named('rank', ranks)}: {of_ranks[ranks[0]].text(with_shape=True)}" for ranks in alike]
            return ["the ranks called different operations:", *first_kinds(kinds)]
    return []


def ranks_alike(backend: str, calls: Mapping[int, Call]) -> list[list[int]]:
    """The ranks whose calls of one collective are alike; more than one list if the calls do not belong together.

    Args:
        backend: of the group, one of torch's.
        calls: of each rank.
    """
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


def _counts(record: Record, failed: Record, at_ns: float) -> bool:
    """Whether a record is of a collective of the group that had begun when the other one failed."""
    is_groups = record.group.name == failed.group.name and record.group.ranks == failed.group.ranks
    return is_groups and not record.is_message and record.entered_ns <= at_ns


def _last_of(records: Sequence[Record]) -> str:
    return f"; its last operation was {records[-1].text()}" if records else ""
