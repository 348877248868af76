"""Says which calls of a job's ranks did not belong together, where torch's own backend has let them pass.

The launcher compares what the ranks have recorded (``watch/comparison.py``): now and then while they go on, and once
more when they have ended. It reads the recorders of ranks of its own host, and of other hosts their agents send what is
new in them (``relay/call_sender.py``). A look is so seldom that it takes 1/400 of the time. A rank that calls
more than 4,096 operations between two looks is compared in part.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from phalanx import settings
from phalanx.launch.job.job import Job
from phalanx.launch.rank.new_calls import EVERY_S, MOST_RANKS, PAUSE, NewCalls, newest_of
from phalanx.launch.rank.operations import last_records, parted
from phalanx.launch.rank.trace import Trace
from phalanx.system.folder import own_folder
from phalanx.watch.comparison import Comparison
from phalanx.watch.disagreement import calls_that_differ, disagreement
from phalanx.watch.done_calls import DoneCalls
from phalanx.watch.records import Recording
from phalanx.watch.sent_calls import calls_from_json

__all__ = ["MistakeWatch"]

_CLOCKS_DIFFER_S = 0.1


class MistakeWatch:
    """The watch over one attempt of a job.

    Args:
        job: the job.
        trace: where its ranks have their recorders, if they are of this host.
        say: prints a line.
        end: ends the job with a text, where the user wants that to come of a mistake.
    """

    def __init__(self, job: Job, trace: Trace, say: Callable[[str], None], end: Callable[[str], None]) -> None:
        self._ranks, self._trace, self._is_local, self._say = job.ranks, trace, job.is_local, say
        self._recordings: dict[int, Recording] = {}  # of ranks of other hosts that have ended
        self._on = job.target.is_python and 1 < job.ranks <= MOST_RANKS
        self._here = NewCalls(trace, range(job.ranks), job.ranks) if self._on and job.is_local else None
        self._next = time.monotonic() + EVERY_S
        wish = "error" if job.diagnosis.strict else os.environ.get(settings.CALL_SITES, "").lower()
        self._tell = end if wish == "error" else lambda text: say(f"warning: {text}")
        self._comparison = Comparison(time.time(), newest_of(max(1, job.ranks)), lines=wish != "ignore")

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        return max(0.0, self._next - time.monotonic()) if self._on and self._here is not None else None

    def look(self, *, ended: bool = False) -> None:
        """Compare the calls of ranks of this host, if it is time to or the ranks have ended."""
        began = time.monotonic()
        if self._here is None or not (ended or began >= self._next):
            return
        self._attempt(self._here.end_all if ended else self._here.look)
        now = time.monotonic()
        self._next = now + max(EVERY_S, PAUSE * (now - began))

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take what a host's agent has sent of its ranks: calls to compare, or the last operations of one."""
        if message["event"] == "calls":
            self._attempt(lambda: calls_from_json(message["calls"], message["ranks"], self._ranks))
            return
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            found = Recording.from_json(message["recording"]).later(message["later_ns"])
            self._recordings[message["rank"]] = found.beside(own_folder())

    def parted(self, rank: int, at: float, stopped: Collection[int] = (), ended: Collection[int] = ()) -> list[str]:
        """Lines on how the calls of ranks differed when one failed; see ``watch/disagreement.py``.

        Args:
            rank: the one that failed.
            at: when, on the monotonic clock.
            stopped: the ranks that were stopped then (state T).
            ended: those that ended by themselves, with exit code 0.
        """
        if self._is_local:
            return parted(self._trace, self._ranks, rank, at, stopped, ended)
        # Which calls differ does not depend on who came first, and clocks of hosts are not known to the microsecond.
        late = (at + _CLOCKS_DIFFER_S) * 1e9
        differing = calls_that_differ(self._recordings, rank, late)
        return differing or disagreement(self._recordings, rank, at * 1e9, stopped, ended)

    def recordings(self, count: int) -> dict[int, Recording]:
        """The last operations of each rank, as many as ``count``; of ranks of other hosts those that they have sent."""
        if not self._is_local:
            return self._recordings
        found = {rank: last_records(self._trace, rank, count) for rank in range(self._ranks)}
        return {rank: recording for rank, recording in found.items() if recording is not None}

    def _attempt(self, calls: Callable[[], list[DoneCalls]]) -> None:
        """Compare these; what goes wrong ends the watch."""
        if not self._on:
            return
        try:
            for text in self._comparison.look(calls()):
                self._tell(text)
        except Exception as error:
            self._on = False
            self._say(f"the job goes on, but calls are not compared any more: {type(error).__name__}: {error}")
