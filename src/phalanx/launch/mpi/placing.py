"""Who is where: from what the ranks' processes say about themselves to the rank table; and who has not come yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.topology.table import RankRow
from phalanx.words import format_spans

__all__ = ["RollCall", "find_contradiction", "place_ranks"]

# After this long without some ranks it is said who is missing.
_TOLD_S = 5.0
# This long after the last one came, the job is given up.
_GIVEN_UP_S = 120.0


def place_ranks(job: Job, here: Sequence[Mapping[str, Any]]) -> list[RankRow]:
    """The rank table of a job whose processes have all come.

    Hosts are numbered by their first rank, and local ranks counted on each, so any placement is described rightly:
    rank // ranks-per-node would not, where an MPI launcher deals ranks out in turn.

    Args:
        job: the job.
        here: for each rank what its process said: ``machine`` and ``host``, which together tell hosts apart, and
            ``cpus``, the cores it may run on.
    """
    nodes: dict[tuple[str, str], int] = {}
    count: dict[int, int] = {}
    seats = []
    for said in here:
        node = nodes.setdefault((said["machine"], said["host"]), len(nodes))
        seats.append((node, count.get(node, 0)))
        count[node] = seats[-1][1] + 1
    masks = [(node, tuple(said["cpus"])) for (node, _), said in zip(seats, here, strict=True)]
    rows = []
    for rank, ((node, local), said) in enumerate(zip(seats, here, strict=True)):
        cores = len(said["cpus"])
        # Ranks that may run on the same cores share them; one that was bound to cores of its own has them alone.
        threads = int(job.threads.partition(",")[0]) if job.threads else max(1, cores // masks.count(masks[rank]))
        rows.append(RankRow(rank, node, said["host"], local, job.device_of(local), None, cores, threads))
    return rows


def _planned_hosts(job: Job) -> list[str]:
    """The host that each rank was asked for on; empty where the MPI launcher was to choose."""
    return [host.name for host in job.hosts for _ in range(host.slots or 0)]


def find_contradiction(job: Job, rows: Sequence[RankRow], here: Sequence[Mapping[str, Any]]) -> str:
    """What the MPI launcher did or says otherwise than it was told, in words; empty if nothing."""
    name = job.mpi.name if job.mpi is not None else ""
    planned = _planned_hosts(job)
    for first, second in pairwise(rows):
        if planned and (planned[first.rank] == planned[second.rank]) != (first.node_rank == second.node_rank):
            return (
                f"{name} was asked for rank {first.rank} on {planned[first.rank]} and rank {second.rank} on "
                f"{planned[second.rank]}; they run on {first.host} and {second.host}"
            )
    for row, said in zip(rows, here, strict=True):
        beside = sum(other.node_rank == row.node_rank for other in rows)
        if said["beside"] not in (0, beside):
            return (
                f"{name} told rank {row.rank} that {said['beside']} of {len(rows)} ranks are on its host; "
                f"{beside} are, on {row.host}, and that is what LOCAL_RANK follows"
            )
    return ""


class RollCall:
    """Watches for ranks that do not come.

    MPI launchers do not all notice that a process has ended before it has called MPI, so somebody must. As long as
    nobody has come there is no hurry: a batch system may still be waiting for its turn.

    Args:
        job: the job.

    Attributes:
        due_at: when to :meth:`call` next; None for never.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = self._came_at = 0.0
        self._told = False
        self.due_at: float | None = None

    def begin(self) -> None:
        """The MPI launcher has been started."""
        self._begun = time.monotonic()
        self.due_at = self._begun + _TOLD_S

    def came(self) -> None:
        """A rank has come."""
        self._came_at = time.monotonic()
        if self._told:
            self.due_at = self._came_at + _GIVEN_UP_S

    def call(self, missing: Sequence[int]) -> str:
        """What is to be said about the missing ranks now; empty if nothing.

        Raises:
            LaunchError: they will not come any more.
        """
        now = time.monotonic()
        name = self._job.mpi.name if self._job.mpi is not None else ""
        who = f"{'rank' if len(missing) == 1 else 'ranks'} {format_spans(missing)}"
        some = len(missing) < self._job.ranks
        if some and now >= self._came_at + _GIVEN_UP_S:
            raise LaunchError(
                f"{who} did not come within {_GIVEN_UP_S:.0f} s of the others; {name} may have lost the process, or "
                f"its host cannot start Python"
            )
        self.due_at = self._came_at + _GIVEN_UP_S if some else None
        if self._told:
            return ""
        self._told = True
        planned = _planned_hosts(self._job)
        hosts = list(dict.fromkeys(planned[rank] for rank in missing)) if planned else []
        where = f" (on {', '.join(hosts)})" if hosts else ""
        return f"after {now - self._begun:.0f} s {name} has not brought {who}{where} yet"
