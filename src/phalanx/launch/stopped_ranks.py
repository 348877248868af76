"""When it is certain that a stopped rank keeps others, so that a line on it need not wait for as long as on another.

A rank that computes may come yet; one that is stopped does not, before somebody continues it. But a job that is
suspended as a whole is stopped rank by rank, and continued so, and a rank may be stopped for a moment. So the launcher
looks closely twice, a second apart, and is certain if ranks that run wait for the same stopped ones both times.

A rank in the hands of a debugger (state t) does not count: a tracer stops it at each system call, and it goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from phalanx.diagnosis.diagnose import HangDiagnosis
from phalanx.diagnosis.snapshot import RankSnapshot

__all__ = ["StoppedRanks"]

_APART_S = 1.0
_LONGEST_PAUSE_S = 64.0  # between two closer looks while nobody waits for a stopped rank, as in a suspended job


class StoppedRanks:
    """What is known of the stopped ranks of a job.

    Args:
        clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        self._stopped: frozenset[int] = frozenset()
        self._awaited: tuple[int, ...] = ()
        self._awaited_since = 0.0
        self._told: tuple[int, ...] = ()
        self._not_before = 0.0
        self._pause_s = _APART_S

    def ask_for_look(self, stopped: Collection[int]) -> bool:
        """Whether to look closely now, and give what is found to :meth:`are_to_blame`.

        Args:
            stopped: the ranks that are stopped, as a look says that takes microseconds.
        """
        if not stopped:
            self._forget()
            return False
        if self._stopped != frozenset(stopped):
            self._stopped, self._pause_s, self._not_before = frozenset(stopped), _APART_S, 0.0
        return self._clock() >= self._not_before

    @property
    def next_at(self) -> float:
        """When to ask again, on the clock; infinite if no rank is stopped."""
        return self._not_before if self._stopped else math.inf

    def are_to_blame(self, verdict: HangDiagnosis | None, ranks: Sequence[RankSnapshot]) -> bool:
        """Whether it is certain now that ranks wait for stopped ones alone, and has not been said.

        Args:
            verdict: what was found by looking closely.
            ranks: the ranks that it is about.
        """
        now, awaited = self._clock(), _stopped_of(verdict, ranks)
        if awaited != self._awaited:
            self._awaited, self._awaited_since = awaited, now
        if awaited and awaited != self._told:
            self._not_before = self._awaited_since + _APART_S
            return now >= self._not_before
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return False

    def note_told(self, verdict: HangDiagnosis, ranks: Sequence[RankSnapshot]) -> None:
        """A line has said this."""
        self._told = _stopped_of(verdict, ranks)
        self._not_before = self._clock() + self._pause_s

    def are_told(self, verdict: HangDiagnosis, ranks: Sequence[RankSnapshot]) -> bool:
        """Whether a line has said that others wait for these stopped ranks, and they have not gone on since."""
        awaited = _stopped_of(verdict, ranks)
        return bool(awaited) and awaited == self._told


def _stopped_of(verdict: HangDiagnosis | None, ranks: Sequence[RankSnapshot]) -> tuple[int, ...]:
    """The ranks that others wait for, if all of them are stopped."""
    if verdict is None or not verdict.waiting:
        return ()
    states = {seen.rank: seen.state for seen in ranks}
    return verdict.awaited if all(states.get(rank) == "T" for rank in verdict.awaited) else ()
