"""Where a process stands in its world, as far as its launcher says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Where a process stands in its world, as its launcher says.

    What a launcher does not say is None, never guessed: the ranks find it out together once they have met
    (``topology.py``).

    Attributes:
        launcher: the name of the row that was recognised; ``none`` for a process started plainly.
        rank, world_size: place in the default group.
        local_rank, local_world_size: place among the ranks of the same host.
        node_rank, num_nodes: the host's index in the world.
        master_addr: where the ranks can meet.
        master_port: the port there, where it is fixed.
        job: what no other job has, from which the ranks can derive a port.
        attempt: how often the launcher has started the job anew.
        hosts: the hosts by node rank, where the launcher lists just those.
        sources: for each fact the variable that said so.
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
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
