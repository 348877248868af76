"""The relay's messages to the supervisor: the same ones, in the same order, as the zygote would send."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.launch.rank.descriptors import Descriptors
from phalanx.launch.relay.crew import Member
from phalanx.topology.table import RankRow

__all__ = ["Announcer"]


class Announcer:
    """Sends the supervisor what happens to the ranks, over the control socket.

    The supervisor learns of reports and ends only after it has learnt that all ranks have started, and of an end only
    after everything that the rank has printed.

    Args:
        descriptors: the descriptors of the job.
        ranks: all ranks, by number.

    Attributes:
        started: whether the supervisor has learnt that all ranks have started.
    """

    def __init__(self, descriptors: Descriptors, ranks: Sequence[Member]) -> None:
        self._descriptors = descriptors
        self._control = descriptors.zygote
        self._ranks = ranks
        self.started = False

    def say(self, text: str) -> None:
        """Have a line printed."""
        self._control.send(event="said", text=text)

    def refuse(self, text: str, code: int) -> None:
        """The job ends without a rank's failure: print why, and end with this exit code."""
        self._control.send(event="refused", text=text, code=code)

    def place(self, rows: Sequence[RankRow], note: str) -> None:
        """All ranks have been placed. The supervisor shows the table, and answers with the order to go."""
        self._control.send(event="placed", rows=[asdict(row) for row in rows], notes=[note] if note else [])

    def overdue(self, rank: Member, patience_s: float) -> None:
        """A rank was killed because it did not end within so many seconds."""
        self._control.send(event="overdue", rank=rank.number, patience_s=patience_s)

    def show_stacks(self, stacks: dict[int, str], late: Sequence[int] = ()) -> None:
        """Have the ranks' stacks printed, or kept for the end of a job that somebody has interrupted.

        Args:
            stacks: by rank.
            late: the ranks that were asked and have not written one.
        """
        self._control.send(event="stacks", stacks=stacks, late=list(late))

    def keep_stacks(self, stacks: dict[int, str]) -> None:
        """Have stacks that a rank has left kept for the end of a job that somebody has interrupted."""
        self._control.send(event="stacks", stacks=stacks, unasked=True)

    def wait(self, parent: int, pace: Mapping[str, Any]) -> None:
        """How long a rank of this parent has been in one operation, and which are stopped, as the parent says."""
        said = {"waited_s": pace["waited_s"], "still_s": pace["still_s"], "stopped": pace["stopped"]}
        self._control.send(event="waits", parent=parent, **said)

    def recorded(self, rank: Member, recording: Any, later_ns: int) -> None:
        """A rank's last operations, as its parent has sent them, with what is to be added to their times."""
        self._control.send(event="recorded", rank=rank.number, recording=recording, later_ns=later_ns)

    def lose_store(self, status: int) -> None:
        """The process that hosts the store has ended, with this wait status."""
        self._control.send(event="store lost", status=status)

    def report(self, rank: Member, report: dict[str, Any], when: float) -> None:
        """Put a rank's report where the supervisor reads it.

        Args:
            rank: the rank.
            report: as it has written it on its host.
            when: the time of its failure on this host's monotonic clock.
        """
        own = report.get("phalanx")
        if own is not None and own["time"] is not None:
            own["time"] = when
        data = json.dumps(report).encode()
        descriptor = self._descriptors.ranks[rank.number].report
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        rank.reported = True
        if self.started:
            self._control.send(event="reported")

    def start(self) -> None:
        """Announce that the ranks have started, once all have."""
        if self.started or not all(rank.pid for rank in self._ranks):
            return
        self.started = True
        self._control.send(event="started", pids=[rank.pid for rank in self._ranks], time=time.monotonic())
        if any(rank.reported for rank in self._ranks):
            self._control.send(event="reported")

    def end(self) -> None:
        """Announce the ends of all ranks whose output has been handed on."""
        for rank in self._ranks:
            if self.started and rank.status is not None and not rank.announced and not rank.waiting:
                rank.announced = True
                self._control.send(
                    event="exited",
                    rank=rank.number,
                    status=rank.status,
                    time=rank.ended_at,
                    by_others=rank.by_others,
                    by_itself=rank.by_itself,
                    out_of_memory=rank.out_of_memory,
                )
