"""One host of a job, as the head knows it: the program that starts its agent, the agent's connection, its ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.job.binding import cores_per_rank
from phalanx.launch.job.hosts import HostSlots
from phalanx.launch.job.job import Job
from phalanx.launch.relay.channel import Channel
from phalanx.launch.relay.crew import Member, Pipe
from phalanx.launch.remote.protocol import split_rank
from phalanx.launch.remote.starter import AgentProgram
from phalanx.system.device_files import device_of_rank
from phalanx.topology.table import RankRow

__all__ = ["Host", "place_ranks"]


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        number: its number among the hosts of the job.
        slots: its name, as the user wrote it, and how many ranks it takes.
        ranks: its ranks.
        program: what starts its agent; None before it has been started.
        channel: its agent's connection; None before it has come and after it has gone.
        here: what the agent has said of the host; empty before.
        done: whether no process of the job is left there, as far as the head has been told.
        later_ns: what is to be added to a time of its monotonic clock to get that of this host's, as exactly as the
            quickest message so far can tell.
    """

    number: int
    slots: HostSlots
    ranks: list[Member]
    program: AgentProgram | None = None
    channel: Channel | None = None
    here: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    later_ns: int = 1 << 62

    def hear_clock(self, now_ns: int) -> None:
        """Take the time of its clock, from a message that has just come."""
        self.later_ns = min(self.later_ns, time.monotonic_ns() - now_ns)

    @property
    def name(self) -> str:
        """Its name, as the user wrote it."""
        return self.slots.name

    @property
    def first(self) -> int:
        """Its first rank."""
        return self.ranks[0].number

    @property
    def congested(self) -> bool:
        """Whether so much of its ranks' output waits that its agent should wait too."""
        return any(rank.congested for rank in self.ranks)

    def pipe(self, kind: bytes, data: bytes) -> tuple[Pipe, bytes]:
        """The pipe for a frame of output, and the bytes for it."""
        rank, block = split_rank(data)
        return self.ranks[rank - self.first].pipes[kind], block


def place_ranks(job: Job, hosts: list[Host]) -> list[RankRow]:
    """The rank table, once all agents have come: ranks follow the order of the hosts, as the user wrote them."""
    rows = []
    for host in hosts:
        all_cores, cpus = host.here["cores"], list(map(tuple, host.here["cpus"]))
        share = cores_per_rank(len(host.ranks), all_cores, cpus)
        threads = int(job.threads.partition(",")[0]) if job.threads else share
        for local, rank in enumerate(host.ranks):
            own = cpus[local] if cpus else ()
            device, cores = device_of_rank(local, job.device, host.here["accelerators"]), len(own) or all_cores
            rows.append(RankRow(rank.number, host.number, host.here["name"], local, device, None, cores, threads, own))
    return rows
