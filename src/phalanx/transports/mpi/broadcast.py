"""How rank 0 sends the others a line of text by MPI, where the launcher's variables do not say where rank 0 is."""

from __future__ import annotations

import importlib.util

from phalanx.errors import InitializationError
from phalanx.membership.rendezvous import Broadcast
from phalanx.topology.place import Place

__all__ = ["mpi_broadcast"]


def mpi_broadcast(place: Place) -> Broadcast | None:
    """MPI's broadcast from rank 0, if ``place`` is one of MPI's and mpi4py is installed.

    Only a call of the function that is returned imports mpi4py and starts MPI, which the backend ``mpi`` uses later.
    All ranks must call it, or none.
    """
    if not place.traits.starts_mpi or importlib.util.find_spec("mpi4py") is None:
        return None

    def broadcast(line: str | None) -> str:
        from phalanx.transports.mpi.runtime import start

        world = start().world
        if (world.rank, world.size) != (place.rank, place.world_size):
            raise InitializationError(
                f"{place.launcher} says rank {place.rank} of {place.world_size}, and the MPI library that mpi4py loads "
                f"says rank {world.rank} of {world.size}: that mpiexec does not belong to this library; use the "
                f"library's own"
            )
        received: str = world.bcast(line, 0)
        return received

    return broadcast
