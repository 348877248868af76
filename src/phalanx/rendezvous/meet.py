"""Meeting: rank 0 opens a store, the others find it, prove that they belong to the job, and join.

Rank 0 listens on one port of one address: the given one (MASTER_ADDR and MASTER_PORT, ``tcp://…``), one of those that
follow from the job's id, or any, which MPI tells the others. There everybody goes through the same: ``opening.py`` on
rank 0, ``search.py`` on the others. Only where the launcher keeps a store of its own at that port (torchrun's agent,
``phalanx run``) that one is used.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from phalanx.errors import InitializationError
from phalanx.place.place import Place
from phalanx.rendezvous.meeting_point import LOOPBACK, MeetingPoint, meeting_point
from phalanx.rendezvous.opening import open_store, serve, wait_for_all
from phalanx.rendezvous.search import find_store
from phalanx.store.claim import Claim, own_claim
from phalanx.store.client import JobStore
from phalanx.system.interfaces import outward_address
from phalanx.wire.key import job_key
from phalanx.wire.sockets import listen

__all__ = ["Broadcast", "leave", "meet", "meet_by_broadcast"]

# Rank 0 gives the words, the others None; all get rank 0's. MPI's bcast of an object, for one.
Broadcast = Callable[[str | None], str]


def meet(
    place: Place, timeout_s: float, opening: int, broadcast: Broadcast | None = None, quiet: bool = False
) -> Store:
    """The store in which the ranks of this world find each other. Every rank calls it.

    It returns when all have come. Meanwhile rank 0 says every 5 seconds who is missing, and a rank that does not find
    rank 0 where it looks.

    Args:
        place: this process, as its launcher says.
        timeout_s: how long to wait for the others, in seconds.
        opening: how many worlds this process has opened before; the same on every rank.
        broadcast: how rank 0 can tell the others a line of text, if the launcher's MPI is at hand; used where the
            launcher says nowhere where rank 0 is.
        quiet: print no notes.

    Returns:
        The store. Whoever keeps it must call :func:`leave` at its end.

    Raises:
        InitializationError: ranks did not come or rank 0 was not found in time, this process was refused, or nothing
            says where rank 0 is; the message says which and what to do.
    """
    if place.world_size == 1:
        return HashStore()  # nobody to meet: no port to bind, nothing to resolve
    point = meeting_point(place)
    if point is None:
        if broadcast is not None:
            return meet_by_broadcast(place, timeout_s, opening, broadcast, quiet=quiet)
        raise InitializationError(_nowhere(place))
    if launcher_keeps_store(place):
        return _launchers_store(place, point, timeout_s)
    key, claim = job_key(), _claim(place, opening, point.job)
    if place.rank == 0:
        return open_store(place, point, key, claim, timeout_s, quiet=quiet)
    return find_store(place, point, key, claim, timeout_s)


def leave(store: Store) -> None:
    """Give back what :func:`meet` gave. Rank 0's goes on answering until all have left, or its process ends."""
    if isinstance(store, JobStore):
        store.end()


def meet_by_broadcast(
    place: Place, timeout_s: float, opening: int, broadcast: Broadcast, *, quiet: bool = False
) -> Store:
    """Meet at a port that rank 0 binds and announces. Every rank calls it, with a broadcast among exactly these ranks.

    Raises:
        InitializationError: rank 0's port cannot be reached from here, or rank 0 could bind none.
    """
    deadline = time.monotonic() + timeout_s
    key, claim = job_key(), _claim(place, opening, "")
    if place.rank == 0:
        try:
            all_here = place.local_world_size == place.world_size
            address = LOOPBACK if all_here else outward_address(socket.gethostname())
            listener = listen(address, 0)
        except (OSError, InitializationError) as error:
            broadcast(f"! rank 0 could not listen: {error}")
            raise InitializationError(f"rank 0 could not listen: {error}") from error
        server = serve(listener, place, key, claim, quiet=quiet)
        broadcast(f"{listener.getsockname()[1]} {address}")
        return wait_for_all(server, timeout_s, deadline)
    words = broadcast(None)
    if words.startswith("!"):
        raise InitializationError(words.removeprefix("! "))
    announced, _, address = words.partition(" ")
    point = MeetingPoint(address, (int(announced),), "", True, "which rank 0 announced by MPI")
    return find_store(place, point, key, claim, timeout_s)


def _claim(place: Place, opening: int, job: str) -> Claim:
    # Only whether it is the same job matters, and its name may be long.
    name = hashlib.sha256(job.encode()).hexdigest() if job else ""
    return own_claim(place.rank, place.world_size, name, place.attempt, opening, place.node_rank)


# -- a store of the launcher's -------------------------------------------------------------------------


def launcher_keeps_store(place: Place, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a store of torch's listens at MASTER_PORT already: torchrun's agent or ``phalanx run`` keeps it."""
    environment = os.environ if environment is None else environment
    return (
        place.launcher in ("torchrun", "phalanx")
        and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and place.sources.get("master_addr", "").startswith("MASTER_ADDR=")
        and place.sources.get("master_port", "").startswith("MASTER_PORT=")
    )


def _launchers_store(place: Place, point: MeetingPoint, timeout_s: float) -> Store:
    try:
        return TCPStore(
            point.address,
            point.ports[0],
            place.world_size,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the store that {place.launcher} keeps at "
            f"{point.address}:{point.ports[0]} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def _nowhere(place: Place) -> str:
    return (
        f"{place.launcher} does not say where rank 0 of {place.world_size} listens. Set MASTER_ADDR to its host and "
        f"MASTER_PORT to a port that is free there, for all ranks (mpiexec -genv MASTER_ADDR h1 -genv MASTER_PORT "
        f"29500 for MPICH and Intel MPI, mpiexec -x MASTER_ADDR=h1 -x MASTER_PORT=29500 for Open MPI); or let MPI tell "
        f"it: pip install mpi4py"
    )
