"""Make the rank table from what the agents say about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from phalanx.launch.job.job import Job
from phalanx.launch.protocol import Here
from phalanx.topology.table import RankRow

__all__ = ["find_contradiction", "place_ranks", "planned_hosts"]


def place_ranks(job: Job, here: Sequence[Here]) -> list[RankRow]:
    """Make the rank table of a job whose agents have all come.

    Hosts are numbered by their first rank, and local ranks are counted on each host, so the table is right for every
    placement. A formula like rank // ranks-per-node is wrong if the MPI launcher deals ranks out to hosts in turn.

    Args:
        job: the job.
        here: what each rank's agent said.
    """
    nodes: dict[tuple[str, str], int] = {}
    count: dict[int, int] = {}
    placed = []
    for said in here:
        node = nodes.setdefault((said.machine, said.name), len(nodes))
        placed.append((node, count.get(node, 0)))
        count[node] = placed[-1][1] + 1
    masks = [(node, tuple(said.cpus[0])) for (node, _), said in zip(placed, here, strict=True)]
    rows = []
    for rank, ((node, local), said) in enumerate(zip(placed, here, strict=True)):
        cores = len(said.cpus[0])
        # Ranks with the same set of cores share it; a rank that was bound to cores of its own has them alone.
        threads = int(job.threads.partition(",")[0]) if job.threads else max(1, cores // masks.count(masks[rank]))
        rows.append(RankRow(rank, node, said.name, local, job.device_of(local), None, cores, threads))
    return rows


def planned_hosts(job: Job) -> list[str]:
    """List the host that was asked for, for each rank; empty if the MPI launcher was to choose."""
    return [host.name for host in job.hosts for _ in range(host.slots or 0)]


def find_contradiction(job: Job, launcher_name: str, rows: Sequence[RankRow], here: Sequence[Here]) -> str:
    """Say where the MPI launcher placed ranks otherwise than asked, or contradicts itself; empty if nowhere.

    Args:
        job: the job.
        launcher_name: what the user calls the MPI launcher.
        rows: where the ranks are.
        here: what each rank's agent said.
    """
    planned = planned_hosts(job)
    for first, second in pairwise(rows):
        if planned and (planned[first.rank] == planned[second.rank]) != (first.node_rank == second.node_rank):
            return (
                f"{launcher_name} was asked for rank {first.rank} on {planned[first.rank]} and rank {second.rank} on "
                f"{planned[second.rank]}; they run on {first.host} and {second.host}"
            )
    for row, said in zip(rows, here, strict=True):
        beside = sum(other.node_rank == row.node_rank for other in rows)
        if said.beside not in (0, beside):
            return (
                f"{launcher_name} says to rank {row.rank} that {said.beside} of {len(rows)} ranks are on its host; "
                f"{beside} are, on {row.host}, and LOCAL_RANK follows from that"
            )
    return ""
