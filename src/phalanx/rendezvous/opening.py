"""Rank 0's side of the meeting: listen, serve the store, say who is missing until all have come."""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.place.place import Place
from phalanx.rendezvous.addresses import listening_addresses
from phalanx.rendezvous.meeting_point import MeetingPoint
from phalanx.store.client import JobStore, connect
from phalanx.store.seats import Seats
from phalanx.store.server import StoreServer
from phalanx.system.interfaces import describe_interfaces, holder_of_port, is_loopback
from phalanx.wire.key import Key
from phalanx.wire.proof import Claim, NoProof, WrongKey
from phalanx.words import tell

__all__ = ["REMIND_S", "bind", "open_store", "serve", "wait_for_all"]

REMIND_S = 5.0
# Who holds a port that should be free is asked, and not waited for long.
ANSWER_S = 2.0
PAUSE_S = 0.2


def open_store(
    place: Place, point: MeetingPoint, key: Key, claim: Claim, timeout_s: float, *, quiet: bool = False
) -> JobStore:
    """Open the store and wait until every rank has joined.

    Args:
        place, point: this process, and where it should listen.
        key: the job's.
        claim: who this process is.
        timeout_s: how long to wait for the others, in seconds.
        quiet: say nothing of an open join.

    Raises:
        InitializationError: the address is not this host's, the port is taken, or ranks did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    listener = _listen(place, point, key, claim, deadline, quiet=quiet)
    server = serve(listener, place, key, claim, quiet=quiet)
    return wait_for_all(server, timeout_s, deadline)


def serve(listener: socket.socket, place: Place, key: Key, claim: Claim, *, quiet: bool) -> StoreServer:
    """Serve the store on a listening socket, and say so if anybody can join."""
    address, port = listener.getsockname()[:2]
    if key.is_open and not quiet and not is_loopback(address):
        tell(
            f"note: the join is open: whoever reaches {address} port {port} can join this job. To keep others out, set "
            f"{settings.KEY_FILE} for all ranks to a file that only you can read, with a key in it"
        )
    return StoreServer(listener, key, Seats(claim, place.hosts, place.num_nodes))


def wait_for_all(server: StoreServer, timeout_s: float, deadline: float) -> JobStore:
    """The store, once all ranks have joined; says every 5 seconds who is missing.

    Raises:
        InitializationError: some did not come before the deadline; the others are told the same.
    """
    start = time.monotonic()
    try:
        while not server.wait_for_all(max(0.0, min(REMIND_S, deadline - time.monotonic()))):
            missing = server.describe_missing()
            if time.monotonic() >= deadline:
                raise InitializationError.ranks_missing(missing, timeout_s, at=f"rank 0 on {socket.gethostname()}")
            tell(f"waiting for {missing}, {time.monotonic() - start:.0f} s so far")
    except BaseException as error:
        server.end(str(error) or f"rank 0 gave up ({type(error).__name__})")
        raise
    return JobStore(server, timedelta(seconds=timeout_s))


def bind(address: str, port: int) -> socket.socket:
    """A listening socket on exactly this address.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(4096)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen(
    place: Place, point: MeetingPoint, key: Key, claim: Claim, deadline: float, *, quiet: bool
) -> socket.socket:
    """The first port that is free, on the first address that is this host's."""
    addresses, note = listening_addresses(place, point)
    if note and not quiet:
        tell(f"note: {note}")
    remind = time.monotonic() + REMIND_S
    while True:
        trouble = ""
        for port in point.ports:
            for address in addresses:
                try:
                    return bind(address, port)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        trouble = _ask_who_is_there(address, port, key, claim) or trouble
                        break
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise InitializationError(f"rank 0 cannot listen on {address} port {port}: {error}") from error
            else:
                raise InitializationError(_not_here(place, point, addresses))
        if not trouble or time.monotonic() >= deadline:
            raise InitializationError(_taken(point, addresses[0], trouble))
        if time.monotonic() >= remind:
            remind += REMIND_S
            tell(f"rank 0 waits for port {point.ports[0]}: {trouble}")
        time.sleep(PAUSE_S)


def _ask_who_is_there(address: str, port: int, key: Key, claim: Claim) -> str:
    """Who holds the port that this process should listen on: what to wait for, or empty.

    Raises:
        InitializationError: it is rank 0 of this very job.
    """
    try:
        sock, verdict = connect((address, port), key, claim, ANSWER_S)
    except (OSError, NoProof, WrongKey):
        return ""
    sock.close()
    if verdict.word == "refused":
        raise InitializationError.rank_refused(0, verdict.said)
    return verdict.said if verdict.word == "earlier" else ""


def _not_here(place: Place, point: MeetingPoint, addresses: list[str]) -> str:
    meaning = "" if addresses == [point.address] else f", which means {', '.join(addresses)},"
    return (
        f"rank 0 runs on {socket.gethostname()} and cannot listen on {point.address}{meaning} ({point.source}): it is "
        f"not an address of this host, whose interfaces are {describe_interfaces()}. Set MASTER_ADDR to the host of "
        f"rank 0, and MASTER_PORT, for all ranks"
    )


def _taken(point: MeetingPoint, address: str, trouble: str) -> str:
    if len(point.ports) > 1:
        return (
            f"rank 0 found all {len(point.ports)} ports of this job taken on {point.address} "
            f"({', '.join(map(str, point.ports))}). Set MASTER_PORT to a free one, for all ranks"
        )
    holder = trouble or holder_of_port(point.ports[0])
    return (
        f"rank 0 cannot listen on {address} port {point.ports[0]} ({point.source}): the port is taken"
        f"{f' by {holder}' if holder else ' by a process of another user'}. Set MASTER_PORT to a free one, for all "
        f"ranks"
    )
