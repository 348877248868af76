"""Meeting: rank 0 opens a store, the others find it, prove that they belong to the job, and join.

Rank 0 listens on one port of one address: the given one (MASTER_ADDR and MASTER_PORT, ``tcp://…``), one that is derived
from the job's id, or any, which it then announces by MPI. From there on all three ways are the same: ``opening.py`` on
rank 0, ``search.py`` on the other ranks. But if the launcher keeps a store of its own at that port, the ranks use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from phalanx.errors import InitializationError
from phalanx.exception import chain
from phalanx.rendezvous.meeting_point import MeetingPoint, meeting_point
from phalanx.rendezvous.opening import open_store, serve, wait_for_all
from phalanx.rendezvous.search import find_store
from phalanx.store.claim import Claim, own_claim
from phalanx.store.client import JobStore
from phalanx.store.ended import met_key, ranks_that_ended
from phalanx.system.interfaces import LOOPBACK, outward_address
from phalanx.system.threads import AwakeClock
from phalanx.topology.place import Place
from phalanx.wire.key import job_key
from phalanx.wire.sockets import listen

__all__ = ["Broadcast", "kept_store", "leave", "meet", "meet_by_broadcast", "tell_meeting", "why_failed"]

# Rank 0 passes a line of text, the other ranks None; all ranks get rank 0's line.
Broadcast = Callable[[str | None], str]


def meet(
    place: Place, timeout_s: float, opening: int, broadcast: Broadcast | None = None, quiet: bool = False
) -> Store:
    """The store in which the ranks of this world find each other. Every rank calls it.

    It returns when all ranks have joined. Until then, every 5 seconds, rank 0 prints which ranks are missing, and a
    rank that has not found rank 0 prints where it searches.

    Args:
        place: this process, as its launcher says.
        timeout_s: how long to wait for the others, in seconds.
        opening: which of the process's worlds this is: 1 for the first that it opens. The same on every rank.
        broadcast: how rank 0 can send the others a line of text, if the launcher's MPI can be used; called only where
            the launcher does not say where rank 0 is.
        quiet: print no notes.

    Returns:
        The store. The caller must pass it to :func:`leave` at the end.

    Raises:
        InitializationError: ranks did not come or rank 0 was not found in time, this process was refused, or it is
            unknown where rank 0 is; the message says which of these it is and what to do.
    """
    if place.world_size == 1:
        return HashStore()  # with no other rank to meet, no port is bound and no name resolved
    point = meeting_point(place)
    if point is None:
        if broadcast is not None:
            return meet_by_broadcast(place, timeout_s, opening, broadcast, quiet=quiet)
        raise InitializationError(_nowhere(place))
    if place.keeps_store:
        return kept_store(place, timeout_s)
    key, claim = job_key(), _claim(place, opening, point.job)
    if place.rank == 0:
        return open_store(place, point, key, claim, timeout_s, quiet=quiet)
    return find_store(place, point, key, claim, timeout_s)


def tell_meeting(store: Store, meeting: Store, rank: int, *, begins: bool) -> None:
    """Say that this rank begins to exchange with the others what they need to work together, or has all of it.

    If this rank ends in between, the others learn of it at once. Phalanx's own store sees that the connection ends;
    the launcher tells the store of ``phalanx run`` which ranks have ended (``store/ended.py``).

    Args:
        store: where the ranks have met.
        meeting: the part of it that is this meeting's.
        rank: this one.
        begins: it begins.
    """
    try:
        if isinstance(store, JobStore):
            store.meeting(begins)
        elif not begins and not isinstance(store, HashStore):
            key = met_key(rank)
            meeting.set(key, "1")
            meeting.check([key])  # the answer comes when the key is there; else this rank's end might be there before
    except DistError:
        # Rank 0 may have all that it needs before this rank has told so, and be gone.
        if begins:
            raise


def why_failed(error: BaseException, store: Store | None, meeting: Store | None) -> BaseException:
    """The reason of an error in a meeting: the error, or ranks that have ended where a launcher's store knows of it."""
    if not any(isinstance(each, DistError) for each in chain(error)):
        return error  # it has another reason than that a wait in the store has ended
    if store is not None and meeting is not None and not isinstance(store, (JobStore, HashStore)):
        with contextlib.suppress(RuntimeError):  # it is gone
            if ended := ranks_that_ended(store, meeting):
                return InitializationError.ranks_ended(ended)
    if isinstance(store, JobStore) and store.company.rank_0_is_stopped():
        return store.company.find_stopped() or error
    # Rank 0 has ended, and the store with it.
    return InitializationError(str(error)) if isinstance(error, DistStoreError) else error


def leave(store: Store, reason: BaseException | None = None) -> None:
    """Stop using a store of :func:`meet`. Rank 0's answers until all other ranks have left, or its process ends.

    Args:
        store: the store.
        reason: why this rank gives up the meeting, if it does. If that is another rank, the others are told of that
            one, and not of this one.
    """
    if not isinstance(store, JobStore):
        return
    if isinstance(reason, InitializationError) and reason.rank >= 0 and not store.company.rank_0_is_stopped():
        with contextlib.suppress(DistError, InitializationError):  # it has gone, or has told this rank the same
            store.give_up(reason)
    store.end()


def meet_by_broadcast(
    place: Place, timeout_s: float, opening: int, broadcast: Broadcast, *, quiet: bool = False
) -> Store:
    """Meet at a port that rank 0 binds and announces. Every rank calls it, with a broadcast among exactly these ranks.

    Raises:
        InitializationError: rank 0's port cannot be reached from here, or rank 0 could not bind one.
    """
    clock = AwakeClock()
    key, claim = job_key(), _claim(place, opening, "")
    if place.rank == 0:
        try:
            address = LOOPBACK if place.on_one_host else outward_address()
            listener = listen(address, 0)
        except (OSError, InitializationError) as error:
            trouble = f"rank 0 could not listen: {error}"
            broadcast(json.dumps({"trouble": trouble}))
            raise InitializationError(trouble) from error
        server = serve(listener, place, key, claim, quiet=quiet)
        broadcast(json.dumps({"address": address, "port": listener.getsockname()[1]}))
        return wait_for_all(server, timeout_s, clock)
    announced = json.loads(broadcast(None))
    if "trouble" in announced:
        raise InitializationError(announced["trouble"])
    point = MeetingPoint(announced["address"], (announced["port"],), "", True, "which rank 0 announced by MPI")
    return find_store(place, point, key, claim, timeout_s)


def _claim(place: Place, opening: int, job: str) -> Claim:
    # The job's id may be long and is only compared, so a digest of it is sent.
    name = hashlib.sha256(os.fsencode(job)).hexdigest() if job else ""
    return own_claim(place, name, opening)


def kept_store(place: Place, timeout_s: float) -> Store:
    """The store that this process's launcher keeps (``Place.keeps_store``).

    Raises:
        InitializationError: it cannot be reached.
    """
    address, port = str(place.master_addr), int(place.master_port or 0)
    try:
        return TCPStore(address, port, place.world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the store that {place.launcher} keeps at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def _nowhere(place: Place) -> str:
    traits = place.traits
    example = f" ({traits.pass_on})" if traits.pass_on else ""
    by_mpi = "; or install mpi4py, and rank 0 will announce it by MPI" if traits.starts_mpi else ""
    return (
        f"{place.launcher} does not say where rank 0 of {place.world_size} listens. Set MASTER_ADDR to its host and "
        f"MASTER_PORT to a port that is free there, for all ranks{example}{by_mpi}"
    )
