"""Until every keeper has come: each takes the seat of its rank, and the ranks that are missing are named."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Refusal
from phalanx.launch.mpi.placing import planned_hosts
from phalanx.launch.relay.channel import Channel
from phalanx.launch.relay.crew import Member
from phalanx.words import format_named

__all__ = ["RollCall", "take_seat"]

# After this long without some ranks the missing ones are named.
_NAMED_S = 5.0
# This long after the last one came, the job is given up.
_GIVEN_UP_S = 120.0


def take_seat(ranks: Sequence[Member], launcher_name: str, channel: Channel, message: Mapping[str, Any]) -> Member:
    """Give a keeper, which has proven that it belongs to the job, the seat of its rank.

    Args:
        ranks: all ranks, by number.
        launcher_name: what the user calls the MPI launcher.
        channel: the keeper's connection.
        message: what it says of itself.

    Raises:
        Refusal: the MPI launcher has started other ranks than it was asked for.
    """
    number: int = message["rank"]
    size: int = message["size"]
    if size != len(ranks) or number >= size or ranks[number].here:
        already = "" if size != len(ranks) else ", of which there is one already"
        raise Refusal(
            f"phalanx: {launcher_name} was asked for {len(ranks)} ranks, and a process on {message['host']} says it "
            f"is rank {number} of {size}{already}; remove options that set the number of ranks from --mpi",
            2,
        )
    rank = ranks[number]
    rank.channel, rank.here = channel, dict(message)
    return rank


class RollCall:
    """Notices ranks that do not come.

    Not all MPI launchers notice that a process has ended before it has called MPI, so Phalanx must. As long as no rank
    has come there is no hurry: the job may still be waiting in the queue of a batch system.

    Args:
        job: the job.
        launcher_name: what the user calls the MPI launcher.

    Attributes:
        due_at: when to :meth:`call` next; None for never.
    """

    def __init__(self, job: Job, launcher_name: str) -> None:
        self._job = job
        self._launcher_name = launcher_name
        self._named = False
        self._begun = time.monotonic()
        self._came_at = self._begun
        self.due_at: float | None = self._begun + _NAMED_S

    def came(self) -> None:
        """A rank has come."""
        self._came_at = time.monotonic()
        if self._named:
            self.due_at = self._came_at + _GIVEN_UP_S

    def end(self) -> None:
        """All ranks have come."""
        self.due_at = None

    def call(self, missing: Sequence[int]) -> str:
        """The line to print about the missing ranks now; empty if there is none.

        Raises:
            LaunchError: they will not come any more.
        """
        now = time.monotonic()
        some = len(missing) < self._job.ranks
        if some and now >= self._came_at + _GIVEN_UP_S:
            raise LaunchError(
                f"{format_named('rank', list(missing))} did not come within {_GIVEN_UP_S:.0f} s of the others; "
                f"{self._launcher_name} may have lost the process, or its host cannot start Python"
            )
        self.due_at = self._came_at + _GIVEN_UP_S if some else None
        if self._named:
            return ""
        self._named = True
        planned = planned_hosts(self._job)
        hosts = list(dict.fromkeys(planned[rank] for rank in missing)) if planned else []
        where = f" (on {', '.join(hosts)})" if hosts else ""
        waited_s = now - self._begun
        ranks = format_named("rank", list(missing))
        return f"after {waited_s:.0f} s {self._launcher_name} has not brought {ranks}{where} yet"
