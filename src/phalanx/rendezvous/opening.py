"""Rank 0's side of the meeting: listen, serve the store, and report which ranks are missing until all have come."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.rendezvous.addresses import listening_addresses, resolved_addresses
from phalanx.rendezvous.meeting_point import MeetingPoint
from phalanx.store.claim import Claim
from phalanx.store.client import JobStore, connect
from phalanx.store.seats import Seats
from phalanx.store.server import StoreServer
from phalanx.system.host import this_host
from phalanx.system.interfaces import describe_interfaces, holder_of_port, is_loopback
from phalanx.system.threads import AwakeClock, wait_awake
from phalanx.topology.place import Place
from phalanx.wire.key import Key
from phalanx.wire.proof import Address, NoProof, WrongKey
from phalanx.wire.sockets import listen
from phalanx.words import tell

__all__ = ["FIRST_ANSWER_S", "REMIND_S", "open_store", "serve", "wait_for_all"]

# How often rank 0 prints which ranks are missing, and another rank where it searches for rank 0.
REMIND_S = 5.0
# How long to wait for an answer from the process that holds rank 0's port.
ANSWER_S = 2.0
# The same for each of several ports: any program may have taken it, and what does not answer is passed by.
FIRST_ANSWER_S = 0.25
PAUSE_S = 0.2
# How long to wait for a port of which nobody answers: a process that has been killed holds it until all its threads
# have ended.
ENDING_S = 1.0


def open_store(
    place: Place, point: MeetingPoint, key: Key, claim: Claim, timeout_s: float, *, quiet: bool = False
) -> JobStore:
    """Open the store and wait until every rank has joined.

    Args:
        place, point: this process, and where it should listen.
        key: the job's key.
        claim: what this process says of itself.
        timeout_s: how long to wait for the others, in seconds.
        quiet: print no notes.

    Raises:
        InitializationError: the address is not this host's, the port is taken, or ranks did not come in time.
    """
    clock = AwakeClock()
    listener = _listen(place, point, key, claim, timeout_s, clock, quiet=quiet)
    # The others may reach this host by an address that is not its own.
    dialled = [(number, listener.getsockname()[1]) for number in resolved_addresses(point)]
    server = serve(listener, place, key, claim, quiet=quiet, announced=dialled)
    return wait_for_all(server, timeout_s, clock)


def serve(
    listener: socket.socket, place: Place, key: Key, claim: Claim, *, quiet: bool, announced: Sequence[Address] = ()
) -> StoreServer:
    """Serve the store on a listening socket, and print a note if processes on other hosts can join without a key.

    Args:
        listener, place, key, claim, quiet: as above.
        announced: addresses and ports at which the others dial this host, and that are not its own.
    """
    address, port = listener.getsockname()[:2]
    if key.is_open and not quiet and not is_loopback(address):
        tell(
            f"note: the join is open: every process that reaches {address} port {port} can join this job. To keep "
            f"others out, set {settings.KEY_FILE} for all ranks to a file that only you can read, with a key in it"
        )
    seats = Seats(claim, place.hosts, place.num_nodes)
    return StoreServer(listener, key, seats, announced=announced)


def wait_for_all(server: StoreServer, timeout_s: float, clock: AwakeClock) -> JobStore:
    """Wait until all ranks have joined, print the missing ones every 5 seconds, and return the store.

    Args:
        server: rank 0's store.
        timeout_s: how long the meeting may take, in seconds.
        clock: how long it has taken.

    Raises:
        InitializationError: some did not come in time; the ranks that wait get the same error.
    """
    began_s = clock.now()
    try:
        while not wait_awake(server.wait_for_all, min(REMIND_S, max(0.0, timeout_s - clock.now())), clock):
            missing = server.describe_missing()
            if clock.now() >= timeout_s:
                raise InitializationError.ranks_missing(missing, timeout_s, at=f"rank 0 on {this_host().name}")
            tell(f"waiting for {missing}, {clock.now() - began_s:.0f} s so far")
    except BaseException as error:
        server.end(str(error) or f"rank 0 gave up ({type(error).__name__})")
        raise
    return JobStore(server, timedelta(seconds=timeout_s))


def _listen(
    place: Place, point: MeetingPoint, key: Key, claim: Claim, timeout_s: float, clock: AwakeClock, *, quiet: bool
) -> socket.socket:
    """Listen on the first port that is free, on the first address that is this host's."""
    addresses, note = listening_addresses(place, point)
    if note and not quiet:
        tell(f"note: {note}")
    remind_s = REMIND_S
    ends_at = clock.now() + ENDING_S
    while True:
        trouble = ""
        ending = False
        for port in point.ports:
            for address in addresses:
                try:
                    return listen(address, port)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        try:
                            trouble = _ask_holder(point, address, port, key, claim) or trouble
                        except ConnectionError:
                            ending = True
                        break
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise InitializationError(f"rank 0 cannot listen on {address} port {port}: {error}") from error
            else:
                raise InitializationError(_not_here(place, point, addresses))
        if not trouble and ending and clock.now() < ends_at:
            time.sleep(PAUSE_S)
            continue
        if not trouble or clock.now() >= timeout_s:
            raise InitializationError(_taken(point, addresses[0], trouble))
        if clock.now() >= remind_s:
            remind_s += REMIND_S
            tell(f"rank 0 waits for port {point.ports[0]}: {trouble}")
        time.sleep(PAUSE_S)


def _ask_holder(point: MeetingPoint, address: str, port: int, key: Key, claim: Claim) -> str:
    """Ask the process that holds rank 0's port whether it is an earlier attempt of this job, which will end.

    Returns:
        The reason to wait, as it is shown to the user; empty if there is none.

    Raises:
        InitializationError: the process is rank 0 of this job, and refuses this one.
        ConnectionError: it has ended meanwhile, or it does not listen.
    """
    try:
        line, verdict = connect((address, port), key, claim, ANSWER_S if point.fixed else FIRST_ANSWER_S)
    except ConnectionError:
        raise
    except (OSError, NoProof, WrongKey):
        return ""
    line.close()
    if verdict.kind == "refused":
        raise InitializationError.rank_refused(0, verdict.reason)
    return verdict.reason if verdict.kind == "earlier" else ""


def _not_here(place: Place, point: MeetingPoint, addresses: list[str]) -> str:
    meaning = "" if addresses == [point.address] else f", which means {', '.join(addresses)},"
    return (
        f"rank 0 runs on {this_host().name} and cannot listen on {point.address}{meaning} ({point.source}): it is "
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
