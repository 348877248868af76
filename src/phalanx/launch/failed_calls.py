"""Compare the calls of a job's ranks when one failed, where an error of torch's own backends cannot say it.

The launcher reads the flight recorders of ranks of its own host. Of other hosts each rank's last operations come with
the news of its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.diagnosis.diagnose import calls_that_differ, disagreement
from phalanx.diagnosis.snapshot import Recording
from phalanx.launch.job.job import Job
from phalanx.launch.rank.operations import last_recording, parted
from phalanx.launch.rank.trace import Trace
from phalanx.system.folder import own_folder

__all__ = ["FailedCalls"]

_CLOCKS_DIFFER_S = 0.1


class FailedCalls:
    """The last calls of the ranks of one attempt.

    Args:
        job: the job.
        trace: where its ranks have their recorders, if they are of this host.
    """

    def __init__(self, job: Job, trace: Trace) -> None:
        self._ranks, self._trace, self._is_local = job.ranks, trace, job.is_local
        self._recordings: dict[int, Recording] = {}  # of ranks of other hosts that have ended

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take the last operations of a rank of another host, as its agent has sent them."""
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            found = Recording.from_json(message["recording"]).later(message["later_ns"])
            self._recordings[message["rank"]] = found.beside(own_folder())

    def parted(self, rank: int, at: float, stopped: Collection[int] = (), ended: Collection[int] = ()) -> list[str]:
        """Lines on how the calls of ranks differed when one failed; see ``diagnosis/diagnose.py``.

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
        found = {rank: last_recording(self._trace, rank, count) for rank in range(self._ranks)}
        return {
            rank: recording.beside(own_folder())
            for rank, recording in found.items()
            if recording is not None and recording.records
        }
