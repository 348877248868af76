"""What the ranks of one trace have called since the last look, for the comparison of their calls."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import PhalanxError
from phalanx.launch.rank.trace import Trace
from phalanx.watch.done_calls import CallGatherer, DoneCalls
from phalanx.watch.glance import Glance, glance
from phalanx.watch.records import RecorderCopy, Recording, copy_recorder, in_words

__all__ = ["EVERY_S", "MOST_RANKS", "PAUSE", "NewCalls", "newest_of"]

#: How often the calls are looked at: so seldom that looking takes at most 1/PAUSE of the time.
EVERY_S, PAUSE = 2.0, 400
#: The calls of larger jobs are not compared.
MOST_RANKS = 128
_FEW = 16
_NEWEST, _NEWEST_OF_ALL = 4096, 1 << 15  # operations, of a rank and of all together


def newest_of(ranks: int) -> int:
    """How many operations of each rank are compared at a time, in a job of so many."""
    return min(_NEWEST, _NEWEST_OF_ALL // ranks)


class NewCalls:
    """The ranks of one trace.

    Args:
        trace: where they have their recorders.
        numbers: their ranks in the world, in the order of their parts of the trace.
        ranks: how many ranks the job has.
    """

    def __init__(self, trace: Trace, numbers: Sequence[int], ranks: int) -> None:
        self._trace, self._numbers = trace, numbers
        self._gatherer = CallGatherer(numbers, newest_of(ranks))
        self._glances: dict[int, Glance | None] = {}
        self._running = set(range(len(numbers)))

    @property
    def all_ended(self) -> bool:
        """Whether each rank's last calls have been read."""
        return not self._running

    def look(self) -> list[DoneCalls]:
        """What is new of the ranks that run; only a look of microseconds is needed if none of them has gone on."""
        before, self._glances = (
            self._glances,
            {
                part: glance(self._trace.descriptor, self._trace.place_of_recorder(part))
                for part in sorted(self._running)
            },
        )
        have_gone_on = before != self._glances or None in self._glances.values()
        for part in self._running:
            if have_gone_on or self._gatherer.is_behind(self._numbers[part]):
                self._read(part, final=False)
        return self._gatherer.take()

    def end(self, part: int) -> list[DoneCalls]:
        """What is new now that this rank has ended."""
        if part in self._running:
            self._running.discard(part)
            self._read(part, final=True)
        return self._gatherer.take()

    def end_all(self) -> list[DoneCalls]:
        """What is new now that all ranks have ended."""
        return [calls for part in range(len(self._numbers)) for calls in self.end(part)]

    def recording(self, part: int, count: int) -> Recording | None:
        """The last operations of a rank that has ended, for the account of a failure in a group that is compared.

        Args:
            part: the rank's part of the trace.
            count: how many; of a rank that has never been in such a group fewer, which say what it did instead.
        """
        rank = self._numbers[part]
        first = 0 if self._gatherer.has_groups(rank) else max(0, self._gatherer.first(rank) - _FEW)
        found = in_words(self._copy(part, first))
        return None if found is None else found.excerpt(count)

    def _read(self, part: int, *, final: bool) -> None:
        rank = self._numbers[part]
        copy = self._copy(part, self._gatherer.first(rank))
        if copy is not None:
            self._gatherer.read(rank, copy, final=final)

    def _copy(self, part: int, first: int) -> RecorderCopy | None:
        try:
            return copy_recorder(self._trace.descriptor, self._trace.place_of_recorder(part), first)
        except (OSError, ValueError, PhalanxError):
            return None
