"""The collectives that ranks have done on torch's own backends, taken out of their flight recorders as they come.

They may be compared on another host (``comparison.py``), so they are few plain values, each read once. Ranks of one
host that have called the same from the same lines are one class. A call is handed out when all ranks of this host that
are in its group have done it: before that nobody can compare it, so nothing is lost, and equal ranks stay in one class
although one of them is ahead. As much is held back as a recorder holds, and the oldest is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from phalanx import settings
from phalanx.watch.records import KINDS, Group, Record, RecorderCopy

__all__ = ["NOT_COMPARED", "CallGatherer", "DoneCall", "DoneCalls"]

_ROW = struct.Struct("=4Q5I3i2I")  # a SeenRecord
#: Kinds that are no collective.
NOT_COMPARED = ("send", "recv", "init")
_NUMBERS_NOT_COMPARED = {number for number, kind in KINDS.items() if kind in NOT_COMPARED}
_MOST_KNOWN = 1 << 14


@dataclass(frozen=True)
class DoneCall:
    """What a collective was: equal on ranks that have made the same call from the same line.

    Attributes:
        identity: names the line on all ranks; 0 if it is not known.
        kind, nbytes, dtype, op, peer, site, label, step, shape: as in :class:`Record`.
    """

    identity: int
    kind: str
    nbytes: int
    dtype: str
    op: str
    peer: int
    site: str
    label: str
    step: int
    shape: str = ""

    def record(self, group: Group, in_group: int) -> Record:
        """The same as an operation that can be put into words."""
        return Record(
            number=0,
            group=group,
            in_group=in_group,
            kind=self.kind,
            nbytes=self.nbytes,
            dtype=self.dtype,
            op=self.op,
            peer=self.peer,
            site=self.site,
            label=self.label,
            step=self.step,
            entered_ns=1,
            left_ns=1,
            failed=False,
            awaits=-1,
            shape=self.shape,
        )


@dataclass(frozen=True)
class DoneCalls:
    """Collectives of a group that some of its ranks have done alike, one after the other.

    Attributes:
        group: the group, without the rank of whoever recorded it.
        ranks: these ranks, in the world.
        first: the number of the first collective in the group.
        calls: the collectives; None for one of which nothing is known.
        failed: one of these ranks' collectives has failed.
    """

    group: Group
    ranks: tuple[int, ...]
    first: int
    calls: tuple[DoneCall | None, ...]
    failed: bool = False


@dataclass
class _Progress:
    """How far a rank is in a group.

    Attributes:
        handed: up to which collective they have been handed out.
        until: the last collective up to which all are done.
        done: those behind ``handed`` that went well, by their numbers.
        failed: one has failed.
    """

    handed: int = 0
    until: int = 0
    done: dict[int, DoneCall] = field(default_factory=dict)
    failed: bool = False


class _Reader:
    """Reads one rank's recorder, each operation once if it is done by then.

    Attributes:
        first: the first operation that is to be read next.
        groups: how far the rank is in each group of torch's own backends, by the group.
    """

    def __init__(self, rank: int, newest: int, known: dict[DoneCall, DoneCall]) -> None:
        self._rank, self._newest, self._known = rank, newest, known
        self._begun = 0
        self.first = 0
        self.groups: dict[Group, _Progress] = {}
        self._by_number: dict[int, _Progress | None] = {}

    @property
    def is_behind(self) -> bool:
        """Whether some operations that had begun when this was read last were not done, or not there."""
        return self.first < self._begun

    def read(self, copy: RecorderCopy, *, final: bool) -> None:
        """Take what is new in a copy, which has all operations from ``first`` on; ``final``: the rank has ended."""
        rows = list(_ROW.iter_unpack(memoryview(copy.seen).cast("B")))
        after = copy.begun - self._newest
        seen = {row[0] for row in rows}
        # A record that is being written is there at the next look, unless its writer has died, or taken it back.
        fresh = range(copy.begun if final else max(self._begun, after), copy.begun)
        settled = end = next((number for number in fresh if number not in seen), copy.begun)
        waiting: dict[int, int] = {}  # by the id of a group's progress: the first collective that is not done
        calls: dict[tuple[int, ...], DoneCall] = {}
        for index, row in enumerate(rows):
            number, _, left_ns, nbytes, in_group, what, group, site, label, peer, _, step, failed, shape = row
            if not after <= number < end or what & 0xFF in _NUMBERS_NOT_COMPARED:
                continue
            progress = self._progress(copy, group)
            if progress is None or (left_ns and in_group <= progress.handed):
                continue
            if left_ns and not failed:
                about = (what, nbytes, peer, site, label, step, shape)
                if about not in calls:
                    calls[about] = self._call(copy, index, site)
                progress.done[in_group] = calls[about]
            else:
                # One of C++ that stalls has the next one's number, and may be taken back (c10d/stalled_calls.py).
                waiting[id(progress)] = min(waiting.get(id(progress), in_group), in_group)
                progress.failed |= bool(failed)
                settled = min(settled, number)
        for known in self.groups.values():
            self._settle(known, waiting.get(id(known)))
        self.first, self._begun = max(0, after, settled), copy.begun

    def _settle(self, progress: _Progress, waiting: int | None) -> None:
        done = progress.done
        progress.until = max(progress.until, max(done, default=0) if waiting is None else waiting - 1)
        if len(done) > self._newest:
            for number in sorted(done)[: -self._newest]:
                del done[number]

    def _progress(self, copy: RecorderCopy, number: int) -> _Progress | None:
        """Of the group with this number in the recorder; None if it is not to be compared."""
        if number not in self._by_number:
            group = replace(copy.group(number), own=-1)
            compared = self._rank in group.ranks and len(group.ranks) > 1 and group.backend != settings.BACKEND
            self._by_number[number] = self.groups.setdefault(group, _Progress()) if compared else None
        progress = self._by_number[number]
        return None if progress is None or progress.failed else progress

    def _call(self, copy: RecorderCopy, index: int, site: int) -> DoneCall:
        record, (_, identity) = copy.record(index), copy.place(site)
        call = DoneCall(
            identity,
            record.kind,
            record.nbytes,
            record.dtype,
            record.op,
            record.peer,
            record.site,
            record.label,
            record.step,
            record.shape,
        )
        return self._known.setdefault(call, call)


class CallGatherer:
    """Gathers the collectives of the ranks whose recorders this process reads.

    Args:
        ranks: these ranks, in the world.
        newest: how many of the last operations of each rank are looked at, and are held back for others.
    """

    def __init__(self, ranks: Collection[int], newest: int) -> None:
        self._newest = newest
        self._known: dict[DoneCall, DoneCall] = {}
        self._readers = {rank: _Reader(rank, newest, self._known) for rank in ranks}
        self._told: set[tuple[Group, int]] = set()  # groups and ranks whose failure has been handed out

    def first(self, rank: int) -> int:
        """From which operation on a copy of a rank's recorder is needed."""
        return self._readers[rank].first

    def is_behind(self, rank: int) -> bool:
        """Whether some of a rank's operations that had begun when it was read last were not done, or not there."""
        return self._readers[rank].is_behind

    def read(self, rank: int, copy: RecorderCopy, *, final: bool = False) -> None:
        """Take what is new in a rank's recorder.

        Args:
            rank: the rank.
            copy: all of its operations from :meth:`first` on.
            final: the rank has ended.
        """
        self._readers[rank].read(copy, final=final)

    def has_groups(self, rank: int) -> bool:
        """Whether a rank has been seen in a group whose calls are compared."""
        return bool(self._readers[rank].groups)

    def take(self) -> list[DoneCalls]:
        """What has been read and can be compared, each call once."""
        members: dict[Group, dict[int, _Progress]] = {}
        for rank, reader in self._readers.items():
            for group, progress in reader.groups.items():
                members.setdefault(group, {})[rank] = progress
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        return [calls for group, here in members.items() for calls in self._take(group, here)]

    def _take(self, group: Group, here: dict[int, _Progress]) -> list[DoneCalls]:
        taken = []
        for rank, progress in here.items():
            if progress.failed and (group, rank) not in self._told:
                self._told.add((group, rank))
                taken.append(DoneCalls(group, (rank,), progress.handed + 1, (), failed=True))
        if any(progress.failed for progress in here.values()):
            for progress in here.values():
                progress.done.clear()
            return taken
        if any(rank in self._readers and rank not in here for rank in group.ranks):
            return taken
        until = min(progress.until for progress in here.values())
        alike: dict[tuple[int, ...], list[int]] = {}
        calls: dict[tuple[int, ...], tuple[int, tuple[DoneCall | None, ...]]] = {}
        for rank, progress in here.items():
            first = max(progress.handed + 1, until - self._newest + 1)
            own = tuple(progress.done.get(number) for number in range(first, until + 1))
            progress.handed = max(progress.handed, until)
            progress.done = {number: call for number, call in progress.done.items() if number > until}
            if any(own):
                key = (first, *map(id, own))
                alike.setdefault(key, []).append(rank)
                calls[key] = first, own
        return taken + [DoneCalls(group, tuple(ranks), *calls[key]) for key, ranks in alike.items()]
