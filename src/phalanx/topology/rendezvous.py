"""Meeting: rank 0 opens a store, the others find it.

Where a launcher gives MASTER_ADDR and MASTER_PORT, torch's own rendezvous is used, with the launcher's store if it
keeps one. Where it gives none, rank 0 binds one of the job's derived ports on the address the others will come to, and
says there where the store is (``signpost.py``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from phalanx.errors import InitializationError
from phalanx.topology.meeting_point import LOOPBACK, MeetingPoint, meeting_point
from phalanx.topology.place import Place
from phalanx.topology.signpost import answer_ranks, ask

__all__ = ["Broadcast", "meet", "meet_by_broadcast"]

# Rank 0 gives the words, the others None; all get rank 0's. MPI's bcast of an object, for one.
Broadcast = Callable[[str | None], str]


def meet(place: Place, timeout_s: float, opening: int, broadcast: Broadcast | None = None) -> Store:
    """The store in which the ranks of this world find each other. Every rank calls it.

    Args:
        place: this process, as its launcher says.
        timeout_s: how long to wait for rank 0, in seconds.
        opening: how many worlds this process has opened before; the same on every rank.
        broadcast: how rank 0 can tell the others a line of text, if the launcher's MPI is at hand; used where the
            launcher says nowhere where rank 0 is.

    Raises:
        InitializationError: rank 0 was not found in time, or nothing says where it is.
    """
    if place.world_size == 1:
        return HashStore()  # nobody to meet: no port to bind, nothing to resolve
    point = meeting_point(place)
    if point is None:
        if broadcast is not None:
            return meet_by_broadcast(place, timeout_s, broadcast)
        raise InitializationError(_nowhere(place))
    if point.fixed:
        return _meet_at_fixed_port(place, point, timeout_s)
    if place.local_world_size == place.world_size and not _resolves(point.address):
        point = replace(point, address=LOOPBACK)  # a node's name that only its scheduler knows; all ranks are here
    word = hashlib.sha256(f"{point.job}/{opening}".encode()).hexdigest()
    if place.rank == 0:
        return _open_store(place, point, word, timeout_s)
    return _find_store(place, point, word, timeout_s)


def meet_by_broadcast(place: Place, timeout_s: float, broadcast: Broadcast) -> Store:
    """Meet at a port that rank 0 binds and announces. Every rank calls it, with a broadcast among exactly these ranks.

    Raises:
        InitializationError: rank 0's port cannot be reached from here, or rank 0 could bind none.
    """
    timeout = timedelta(seconds=timeout_s)
    if place.rank == 0:
        address = _outward_address(socket.gethostname())
        try:
            listener = _bind(address, 0)
        except OSError as error:
            broadcast(f"! rank 0 could not listen on {address}: {error}")
            raise InitializationError(f"rank 0 could not listen on {address}: {error}") from error
        port = listener.getsockname()[1]
        store = _serve(listener, address, place.world_size, timeout)
        broadcast(f"{port} {address}")
        return store
    words = broadcast(None)
    if words.startswith("!"):
        raise InitializationError(words.removeprefix("! "))
    announced, _, address = words.partition(" ")
    try:
        return TCPStore(address, int(announced), place.world_size, is_master=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise InitializationError(
            f"rank {place.rank} could not reach rank 0 at {address} port {announced}, which it announced by "
            f"MPI: {error}"
        ) from error


# -- a given port --------------------------------------------------------------------------------------


def _meet_at_fixed_port(place: Place, point: MeetingPoint, timeout_s: float) -> Store:
    port = point.ports[0]
    host = f"[{point.address}]" if ":" in point.address else point.address
    try:
        # Not env://, which reads RANK and WORLD_SIZE: not every launcher sets them.
        found = rendezvous(f"tcp://{host}:{port}", place.rank, place.world_size, timeout=timedelta(seconds=timeout_s))
        store: Store = next(found)[0]
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the meeting point {point.address}:{port} (MASTER_ADDR, MASTER_PORT) "
            f"that {place.launcher} gave: {error}"
        ) from error
    return store


# -- a derived port ------------------------------------------------------------------------------------


def _open_store(place: Place, point: MeetingPoint, word: str, timeout_s: float) -> Store:
    """Rank 0: open the store, and say where it is on the first free one of the ports."""
    address = point.address
    if place.local_world_size != place.world_size:
        address = _outward_address(address)
    for port in point.ports:
        try:
            signpost = _bind(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise InitializationError(
                f"rank 0 runs on {socket.gethostname()} and cannot listen on {point.address} ({point.source}): "
                f"{error}. Set MASTER_ADDR to the host of rank 0, and MASTER_PORT, for all ranks"
            ) from error
        listener = _bind(address, 0)
        where = listener.getsockname()
        store = _serve(listener, address, place.world_size, timedelta(seconds=timeout_s))
        answer_ranks(signpost, word, place.world_size, (where[0], where[1]), timeout_s)
        return store
    raise InitializationError(
        f"rank 0 found all {len(point.ports)} ports of this job taken on {point.address} "
        f"({', '.join(map(str, point.ports))}). Set MASTER_PORT to a free one, for all ranks"
    )


def _find_store(place: Place, point: MeetingPoint, word: str, timeout_s: float) -> Store:
    """Another rank: ask for the store, and connect to it."""
    address, port = ask(point.address, point.ports, word, place.rank, place.world_size, timeout_s)
    try:
        return TCPStore(address, port, place.world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError) as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the store of rank 0 at {address} port {port}: {error}"
        ) from error


def _bind(address: str, port: int) -> socket.socket:
    """A listening socket on exactly this address.

    Raises:
        OSError: the port is taken, the address is not this host's, or the name does not resolve.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _serve(listener: socket.socket, address: str, world_size: int, timeout: timedelta) -> Store:
    # The server closes the descriptor it is given, so Python lets go of it.
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _outward_address(name: str) -> str:
    """The address of this host that others can reach, where its own name may mean loopback here (127.0.1.1)."""
    with contextlib.suppress(OSError):
        number = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        if not number.startswith("127.") and number != "::1":
            return number
    # The interface that a packet to elsewhere would leave by; none is sent. 192.0.2.1 is nobody's (RFC 5737).
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return name


def _nowhere(place: Place) -> str:
    return (
        f"{place.launcher} does not say where rank 0 of {place.world_size} listens. Set MASTER_ADDR to its host and "
        f"MASTER_PORT to a port that is free there, for all ranks (mpiexec -genv MASTER_ADDR h1 -genv MASTER_PORT "
        f"29500 for MPICH and Intel MPI, mpiexec -x MASTER_ADDR=h1 -x MASTER_PORT=29500 for Open MPI)"
    )
