"""In which collective the ranks of a group parted, when an error of another backend cannot say it: from recordings."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.settings import BACKEND
from phalanx.watch.records import Record, Recording
from phalanx.words import format_named

__all__ = ["calls_that_differ", "disagreement", "has_own_size"]

_RECENT = 64  # calls that ranks have done together are compared, the last of them only
# Each rank may bring its own number of bytes in these. Backends of devices also gather parts of different sizes, which
# Gloo refuses; in a gather or scatter no backend of torch's does.
_OWN_SIZES = ("all_to_all", "reduce_scatter")
_OWN_SIZES_BUT_IN_GLOO = (*_OWN_SIZES, "all_gather")


def disagreement(recordings: Mapping[int, Recording], rank: int, at_ns: float) -> list[str]:
    """Lines that say which calls differed, or who had not come, when an operation of a rank failed; none if neither.

    Args:
        recordings: by rank; those that are not known are left out.
        rank: the rank whose operation failed, or that ended in it.
        at_ns: when, on the host's monotonic clock.
    """
    last = _last(recordings, rank)
    if last is None:
        return []
    calls = _calls(recordings, last, at_ns)
    late = [other for other, records in calls.items() if max(records, default=0) < last.in_group]
    # A rank that came to such a collective a moment ago has no record of it yet.
    come = "was not seen in" if last.found_late else "had not come to"
    return _differing(calls, last) or [
        f"rank {other} {come} {last.name()}{last.where()}{_before(calls[other])}" for other in late[:4]
    ]


def calls_that_differ(recordings: Mapping[int, Recording], rank: int, at_ns: float) -> list[str]:
    """The first of these, also of a rank that is still in its operation. The arguments are the same."""
    last = _last(recordings, rank)
    return [] if last is None else _differing(_calls(recordings, last, at_ns), last)


def _last(recordings: Mapping[int, Recording], rank: int) -> Record | None:
    """The collective of another backend that a rank is in, or that has failed."""
    last = recordings[rank].last if rank in recordings else None
    if last is None or last.is_message or last.group.backend == BACKEND or not (last.failed or last.under_way):
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
        alike: dict[tuple[object, ...], list[int]] = {}
        for other, records in calls.items():
            if number in records:
                alike.setdefault(_facts(records[number]), []).append(other)
        if len(alike) > 1:
            return [
                "the ranks called different operations:",
                *(f"  {format_named('rank', ranks)}: {calls[ranks[0]][number].text()}" for ranks in alike.values()),
            ]
    return []


def has_own_size(kind: str, backend: str) -> bool:
    """Whether ranks may record other bytes than the others in a collective of this kind on a backend of torch's."""
    return kind in (_OWN_SIZES if backend == "gloo" else _OWN_SIZES_BUT_IN_GLOO)


def _counts(record: Record, failed: Record, at_ns: float) -> bool:
    """Whether a record is of a collective of the group that had begun when the other one failed."""
    is_groups = record.group.name == failed.group.name and record.group.ranks == failed.group.ranks
    return is_groups and not record.is_message and record.entered_ns <= at_ns


def _facts(record: Record) -> tuple[object, ...]:
    """In what the ranks' calls of one collective must agree, as far as a recorder has it."""
    nbytes = 0 if has_own_size(record.kind, record.group.backend) else record.nbytes
    root = -1 if record.kind == "barrier" else record.peer
    return record.kind, record.dtype, record.op, root, nbytes


def _before(records: Mapping[int, Record]) -> str:
    return f"; its last operation was {records[max(records)].text()}" if records else ""
