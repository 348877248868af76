"""How rank 0 sends the others a line of text by MPI, where the launcher's variables say nowhere where rank 0 is."""

from __future__ import annotations

import importlib.util

from phalanx.errors import InitializationError
from phalanx.place.place import Place
from phalanx.rendezvous.meet import Broadcast

__all__ = ["mpi_broadcast"]


def mpi_broadcast(place: Place) -> Broadcast | None:
    """MPI's broadcast from rank 0, if ``place`` is one of MPI's and mpi4py is installed.

    Nothing is imported and MPI is not started before it is used; the backend ``mpi`` then shares it. All ranks must use
    it alike.
    """
    if not place.traits.starts_mpi or importlib.util.find_spec("mpi4py") is None:
        return None

    def broadcast(words: str | None) -> str:
        from phalanx.transports.mpi.runtime import start

        world = start().world
        if (world.rank, world.size) != (place.rank, place.world_size):
            raise InitializationError(
                f"{place.launcher} says rank {place.rank} of {place.world_size}, and the MPI library that mpi4py loads "
                f"says rank {world.rank} of {world.size}: that mpiexec does not belong to this library; use the "
                f"library's own"
            )
        heard: str = world.bcast(words, 0)
        return heard

    return broadcast
