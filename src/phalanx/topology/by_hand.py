"""The row of RANK and WORLD_SIZE themselves, from which the rows of some platforms are made."""

from __future__ import annotations

from phalanx.topology.launcher import Kind, Launcher
from phalanx.topology.readers import number

__all__ = ["BY_HAND"]

BY_HAND = Launcher(
    "env",
    "RANK and WORLD_SIZE, set by hand or by another launcher",
    Kind.HAND,
    (Kind.PLATFORM, Kind.HAND, Kind.ALLOCATION),
    any_of=("RANK", "WORLD_SIZE"),
    rank=number("RANK"),
    world_size=number("WORLD_SIZE"),
    local_rank=number("LOCAL_RANK"),
    local_world_size=number("LOCAL_WORLD_SIZE"),
    node_rank=number("GROUP_RANK", "NODE_RANK"),
    num_nodes=number("GROUP_WORLD_SIZE", "NNODES"),
)
