"""The place of a process in its world, as far as its launcher says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traits:
    """Differences between launchers that matter when ranks meet; part of a launcher's row in ``launchers.py``.

    Attributes:
        starts_mpi: whether the processes it starts are ranks of MPI, so rank 0 can send the others a text by MPI.
        late_names: whether MASTER_ADDR on rank 0 may resolve to loopback or to a load balancer, and a host's name may
            resolve only once its machine is up.
        shared_job: whether several of its jobs may run at the same time under one ``job``, the id of an allocation.
        pass_on: how its command hands MASTER_ADDR and MASTER_PORT to all ranks; empty where it has no option for it.
    """

    starts_mpi: bool = False
    late_names: bool = False
    shared_job: bool = False
    pass_on: str = ""


@dataclass(frozen=True)
class Place:
    """The place of a process in its world.

    A fact that a launcher does not give is None, never guessed: the ranks find it out together once they have met
    (``topology.py``).

    Attributes:
        launcher: the name of the row that was recognised; ``none`` for a process started plainly.
        master_addr: where the ranks can meet.
        master_port: the port there, where it is fixed.
        job: a text that no other job has, from which the ranks can derive a port.
        attempt: how often the launcher has started the job anew.
        hosts: the hosts by node rank, where the launcher lists exactly those of this world.
        first_of_allocation: whether ``master_addr`` is the first host of an allocation, of which this job may use
            others.
        keeps_store: whether the launcher keeps a store of torch's at ``master_addr`` and ``master_port``.
        traits: the launcher's differences from others that matter when ranks meet.
        sources: for each fact where it was read, for people: ``RANK=3``.
        notes: what the user should know, one line each.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    num_nodes: int | None = 1
    master_addr: str | None = None
    master_port: int | None = None
    job: str | None = None
    attempt: int = 0
    hosts: tuple[str, ...] = field(default=(), compare=False)
    first_of_allocation: bool = field(default=False, compare=False)
    keeps_store: bool = field(default=False, compare=False)
    traits: Traits = field(default=Traits(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def on_one_host(self) -> bool:
        """Tell whether the launcher says that all ranks are on this host."""
        return self.local_world_size == self.world_size
