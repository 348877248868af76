"""Says which calls of a job's ranks did not belong together, where torch's own backend has let them pass.

The launcher compares what the ranks of this host have recorded (``watch/comparison.py``): now and then while they go
on, and once more when they have ended. A look at a rank takes about a millisecond, so looks are so seldom that they
take 1/400 of the time. A rank that calls more than 4,096 operations between two looks is compared in part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from phalanx import settings
from phalanx.errors import PhalanxError
from phalanx.launch.job.job import Job
from phalanx.launch.rank.trace import Trace
from phalanx.watch.comparison import Comparison
from phalanx.watch.glance import Glance, glance
from phalanx.watch.records import RecorderCopy, copy_recorder

__all__ = ["MistakeWatch"]

_EVERY_S = 2.0
_PAUSE = 400
_MOST_RANKS = 128
_NEWEST, _NEWEST_OF_ALL = 4096, 1 << 15  # operations, of a rank and of all together


class MistakeWatch:
    """The watch over one attempt of a job.

    Args:
        job: the job.
        trace: where its ranks have their recorders, if they are of this host.
        say: prints a line.
    """

    def __init__(self, job: Job, trace: Trace, say: Callable[[str], None]) -> None:
        self._ranks, self._trace, self._say = job.ranks, trace, say
        self._on = job.is_local and job.target.is_python and 1 < job.ranks <= _MOST_RANKS
        self._next = time.monotonic() + _EVERY_S
        newest = min(_NEWEST, _NEWEST_OF_ALL // job.ranks)
        lines = os.environ.get(settings.CALL_SITES, "").lower() != "ignore"
        self._glances: list[Glance | None] = []
        self._comparison = Comparison(time.time(), newest, lines=lines)

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        return max(0.0, self._next - time.monotonic()) if self._on else None

    def look(self, *, ended: bool = False) -> None:
        """Compare the ranks' operations, if it is time to or the ranks have ended; what goes wrong ends the watch."""
        began = time.monotonic()
        if not self._on or not (ended or began >= self._next):
            return
        try:
            if not (ended or self._have_gone_on()):
                return
            copies = {rank: copy for rank in range(self._ranks) if (copy := self._copy(rank)) is not None}
            for warning in self._comparison.look(copies) if copies else ():
                self._say(warning)
        except Exception as error:
            self._on = False
            self._say(f"the calls of ranks are compared no longer: {type(error).__name__}: {error}")
        finally:
            now = time.monotonic()
            self._next = now + max(_EVERY_S, _PAUSE * (now - began))

    def _have_gone_on(self) -> bool:
        """Whether a rank may have begun or ended an operation since the last look, by looks that take microseconds."""
        before, self._glances = (
            self._glances,
            [glance(self._trace.descriptor, self._trace.place_of_recorder(rank)) for rank in range(self._ranks)],
        )
        return before != self._glances or None in self._glances

    def _copy(self, rank: int) -> RecorderCopy | None:
        try:
            return copy_recorder(self._trace.descriptor, self._trace.place_of_recorder(rank))
        except (OSError, ValueError, PhalanxError):
            return None
