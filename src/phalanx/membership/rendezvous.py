"""Rendezvous: rank 0 opens a store, the others find it, prove that they belong to the job, and join.

Rank 0 listens on one port of one address (``meeting_point.py``), or on any, which it then announces by MPI. A port that
was derived from the job's id may be in use by another program, so a listener that does not know this job is skipped and
the search goes on. A port that the launcher or the user gave should be rank 0's, so a listener there that proves
another key, or nothing, is an error at once. If the launcher keeps a store of its own at that port, the ranks use it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.membership.client import Connections, JobStore, connect, kept_store
from phalanx.membership.meeting_point import (
    MeetingPoint,
    Unresolved,
    addresses_of_rank_0,
    listening_addresses,
    meeting_point,
    source_address,
)
from phalanx.membership.store_protocol import Claim, Verdict, own_claim
from phalanx.membership.store_server import Seats, StoreServer
from phalanx.system.host import this_host
from phalanx.system.interfaces import (
    LOOPBACK,
    describe_interfaces,
    holder_of_port,
    is_loopback,
    outward_address,
    resolve,
)
from phalanx.system.threads import AwakeClock
from phalanx.topology.place import Place
from phalanx.wire.key import Key, job_key
from phalanx.wire.proof import Address, NoProof, WrongKey
from phalanx.wire.sockets import listen
from phalanx.words import format_limit, tell

__all__ = ["Broadcast", "leave", "meet"]

# Rank 0 passes a line of text, the other ranks None; all ranks get rank 0's line.
Broadcast = Callable[[str | None], str]
# How often rank 0 prints which ranks are missing, and another rank where it searches for rank 0.
REMIND_S = 5.0
# How long to wait for an answer where only rank 0 should listen. Of several ports any program may have taken one, so
# what does not answer there soon is passed by; a rank that has searched for long is more patient.
ANSWER_S, FIRST_ANSWER_S = 2.0, 0.25
# How long to wait for a port where nobody answers: a process that was killed holds it until all its threads have ended.
ENDING_S = 1.0
_PAUSE_S = 0.2
# The pause between two rounds of a search is an eighth of the time that it has taken, within these limits: it delays
# the meeting by little, and ranks that wait for a long time do not flood rank 0's host.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
# The longest pause between two questions who is missing, for all ranks ask rank 0.
_ASK_S, _ASK_S_PER_RANK = 0.05, 0.0015


@dataclass(frozen=True)
class _Process:
    """This process, as it meets the others: who it is, and how much of the time is over."""

    place: Place
    key: Key
    claim: Claim
    timeout_s: float
    clock: AwakeClock
    quiet: bool

    @property
    def left_s(self) -> float:
        """The time that is left for it, in seconds."""
        return self.timeout_s - self.clock.now()

    def knock(self, where: Address, patience_s: float) -> tuple[Connections, Verdict]:
        """Ask what listens there to let this process in (``client.py``)."""
        source = source_address(where[0]) if self.place.rank else ""
        line, verdict = connect(where, self.key, self.claim, patience_s, source)
        return Connections(line, verdict, where, self.key, self.claim, source), verdict


def meet(
    place: Place, timeout_s: float, opening: int, broadcast: Broadcast | None = None, quiet: bool = False
) -> Store:
    """Return the store in which the ranks of this world find each other. Every rank calls it.

    It returns when all ranks have joined; at the end the store has to be given to :func:`leave`. Every 5 seconds rank 0
    prints which ranks are missing, and a rank that has not found rank 0 prints where it searches.

    Args:
        place: this process, as its launcher says.
        timeout_s: how long to wait for the others, in seconds.
        opening: which of the process's worlds this is, from 1 on; the same on every rank.
        broadcast: how rank 0 can send the others a line of text by MPI; called only where the launcher does not say
            where rank 0 is.
        quiet: print no notes.

    Raises:
        InitializationError: ranks did not come or rank 0 was not found in time, this process was refused, or it is
            unknown where rank 0 is; the message says which of these it is and what to do.
    """
    if place.world_size == 1:
        return HashStore()  # with no other rank to meet, no port is bound and no name resolved
    point, clock = meeting_point(place), AwakeClock()
    if point is None and broadcast is None:
        raise InitializationError(_nowhere(place))
    if point is not None and place.keeps_store:
        return kept_store(place, timeout_s)
    key = job_key()
    # The job's id may be long and is only compared, so a digest of it is sent.
    job = hashlib.sha256(os.fsencode(point.job)).hexdigest() if point is not None and point.job else ""
    own = _Process(place, key, own_claim(place, job, opening), timeout_s, clock, quiet)
    if place.rank == 0:
        if point is None:
            listener, announced = _announce(place, broadcast), list[Address]()
        else:
            listener = _listen(own, point)
            announced = _dialled(point, listener)
        return _serve(own, listener, announced)
    if point is None:
        point = _announced(broadcast)
    connections = _find(own, point)
    address, port = connections.where
    store = JobStore(connections, timedelta(seconds=timeout_s))
    return _joined_by_all(own, store, f"rank 0 at {address} port {port}", f"rank {place.rank} had joined, but")


def leave(store: Store) -> None:
    """Stop using a store of :func:`meet`. Rank 0's answers until all other ranks have left, or its process ends."""
    if isinstance(store, JobStore):
        store.end()


def _nowhere(place: Place) -> str:
    traits = place.traits
    example = f" ({traits.pass_on})" if traits.pass_on else ""
    by_mpi = "; or install mpi4py, and rank 0 will announce it by MPI" if traits.starts_mpi else ""
    return (
        f"{place.launcher} does not say where rank 0 of {place.world_size} listens. Set MASTER_ADDR to its host and "
        f"MASTER_PORT to a port that is free there, for all ranks{example}{by_mpi}"
    )


# -- rank 0 --------------------------------------------------------------------------------------------


def _serve(own: _Process, listener: socket.socket, announced: Sequence[Address]) -> JobStore:
    """Serve the store, join it, and wait until all ranks have."""
    address, port = where = listener.getsockname()[:2]
    if own.key.is_open and not own.quiet and not is_loopback(address):
        tell(
            f"note: the join is open: every process that reaches {address} port {port} can join this job. To keep "
            f"others out, set {settings.KEY_FILE} for all ranks to a file that only you can read, with a key in it"
        )
    seats = Seats(own.claim, own.place.hosts, own.place.num_nodes)
    server = StoreServer(listener, own.key, seats, announced=announced)
    try:
        connections, _ = own.knock(where, ANSWER_S * 10)
    except BaseException:
        server.stop()
        raise
    store = JobStore(connections, timedelta(seconds=own.timeout_s), server)
    return _joined_by_all(own, store, f"rank 0 on {this_host().name}", "")


def _joined_by_all(own: _Process, store: JobStore, at: str, before: str) -> JobStore:
    """Return the store when every rank has joined it; rank 0 prints the missing ones every 5 seconds.

    If some do not come in time, the ranks that wait get the error of rank 0. The texts are those of
    :meth:`InitializationError.ranks_missing`.
    """
    began_s, remind_s = own.clock.now(), REMIND_S
    longest_s = max(_ASK_S, _ASK_S_PER_RANK * own.place.world_size)
    try:
        while missing := store.describe_missing():
            waited_s = own.clock.now() - began_s
            if own.left_s <= 0:
                raise InitializationError.ranks_missing(missing, own.timeout_s, at=at, before=before)
            if own.place.rank == 0 and waited_s >= remind_s:
                remind_s += REMIND_S
                tell(f"waiting for {missing}, {waited_s:.0f} s so far")
            time.sleep(min(max(_SHORTEST_PAUSE_S, waited_s / 8), longest_s))
    except BaseException as error:
        store.give_up(str(error) or f"rank 0 gave up ({type(error).__name__})")
        if isinstance(error, InitializationError) or not isinstance(error, RuntimeError):
            raise
        raise InitializationError(f"{before} {error}".strip()) from error
    return store


def _dialled(point: MeetingPoint, listener: socket.socket) -> list[Address]:
    """Return the addresses by which the others may reach this host, and which are not its own."""
    try:
        return [(number, listener.getsockname()[1]) for number in resolve(point.address)]
    except OSError:
        return []


def _announce(place: Place, broadcast: Broadcast | None) -> socket.socket:
    """Bind any port, and send the others its number by MPI."""
    assert broadcast is not None
    try:
        address = LOOPBACK if place.on_one_host else outward_address()
        listener = listen(address, 0)
    except (OSError, InitializationError) as error:
        trouble = f"rank 0 could not listen: {error}"
        broadcast(json.dumps({"trouble": trouble}))
        raise InitializationError(trouble) from error
    broadcast(json.dumps({"address": address, "port": listener.getsockname()[1]}))
    return listener


def _listen(own: _Process, point: MeetingPoint) -> socket.socket:
    """Listen on the first port that is free, on the first address that is this host's."""
    addresses, note = listening_addresses(own.place, point)
    if note and not own.quiet:
        tell(f"note: {note}")
    until_s = own.clock.now() + ENDING_S
    while True:
        may_end = False
        for port in point.ports:
            for address in addresses:
                try:
                    return listen(address, port)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        may_end |= _is_ending(own, point, (address, port))
                        break
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise InitializationError(f"rank 0 cannot listen on {address} port {port}: {error}") from error
            else:
                raise InitializationError(_not_here(point, addresses))
        if not may_end or own.clock.now() >= until_s:
            raise InitializationError(_taken(point, addresses[0]))
        time.sleep(_PAUSE_S)


def _is_ending(own: _Process, point: MeetingPoint, where: Address) -> bool:
    """Return whether who holds rank 0's port has ended meanwhile, or does not listen.

    Raises:
        InitializationError: it is rank 0 of this job, and refuses this process.
    """
    try:
        connections, verdict = own.knock(where, ANSWER_S if point.fixed else FIRST_ANSWER_S)
    except ConnectionError:
        return True
    except (OSError, NoProof, WrongKey):
        return False
    connections.end()
    if verdict.kind == "refused":
        raise InitializationError.rank_refused(0, verdict.reason)
    return False


def _not_here(point: MeetingPoint, addresses: list[str]) -> str:
    meaning = "" if addresses == [point.address] else f", which means {', '.join(addresses)},"
    return (
        f"rank 0 runs on {this_host().name} and cannot listen on {point.address}{meaning} ({point.source}): it is "
        f"not an address of this host, whose interfaces are {describe_interfaces()}. Set MASTER_ADDR to the host of "
        f"rank 0, and MASTER_PORT, for all ranks"
    )


def _taken(point: MeetingPoint, address: str) -> str:
    if len(point.ports) > 1:
        return (
            f"rank 0 found all {len(point.ports)} ports of this job taken on {point.address} "
            f"({', '.join(map(str, point.ports))}). Set MASTER_PORT to a free one, for all ranks"
        )
    holder = holder_of_port(point.ports[0])
    return (
        f"rank 0 cannot listen on {address} port {point.ports[0]} ({point.source}): the port is taken"
        f"{f' by {holder}' if holder else ' by a process of another user'}. Set MASTER_PORT to a free one, for all "
        f"ranks"
    )


# -- another rank --------------------------------------------------------------------------------------


class _NotHere(Exception):
    """The process that listens there is not rank 0 of this job, or not yet."""


def _announced(broadcast: Broadcast | None) -> MeetingPoint:
    """Return where rank 0 says by MPI that it listens."""
    assert broadcast is not None
    announced = json.loads(broadcast(None))
    if "trouble" in announced:
        raise InitializationError(announced["trouble"])
    return MeetingPoint(announced["address"], (announced["port"],), "", True, "which rank 0 announced by MPI")


def _find(own: _Process, point: MeetingPoint) -> Connections:
    """Search for rank 0 until it has let this process in; raise InitializationError if it refuses, or is not found."""
    place, clock, remind_s = own.place, own.clock, REMIND_S
    while True:
        trouble, addresses = "nothing listens there", [point.address]
        try:
            addresses = addresses_of_rank_0(place, point)
        except Unresolved as error:
            if not error.may_pass:
                raise InitializationError(str(error)) from error.__cause__
            trouble, addresses = str(error), []
        patience_s = ANSWER_S if point.fixed else min(ANSWER_S, FIRST_ANSWER_S + clock.now() / 8)
        for port in point.ports:
            for address in addresses:
                try:
                    limit_s = min(patience_s, max(0.05, own.left_s))
                    return _try(own, point, (address, port), limit_s)
                except ConnectionRefusedError:
                    continue
                except TimeoutError:
                    trouble = f"no rank 0 answers at port {port}"
                except OSError as error:
                    trouble = error.strerror or str(error)
                except _NotHere as error:
                    trouble = str(error)
        now = clock.now()
        if now >= own.timeout_s:
            raise InitializationError(
                f"rank {place.rank} on {own.claim.host} waited {format_limit(own.timeout_s)} for rank 0 at "
                f"{_where(point, addresses)}: {trouble}. {_advice(addresses)}"
            )
        if now >= remind_s:
            remind_s += REMIND_S
            hint = _advice(addresses) if addresses and all(map(is_loopback, addresses)) else ""
            tell(
                f"rank {place.rank} on {own.claim.host} searches for rank 0 at {_where(point, addresses)} "
                f"({point.source}): {trouble}; {now:.0f} s so far{f'. {hint}' if hint else ''}"
            )
        time.sleep(min(max(_SHORTEST_PAUSE_S, now / 8), _LONGEST_PAUSE_S))


def _try(own: _Process, point: MeetingPoint, where: Address, limit_s: float) -> Connections:
    """Try to join at one port.

    Raises:
        OSError, _NotHere: rank 0 does not listen there, but may at another port, or later.
        InitializationError: this process cannot join the listener, and need not search further.
    """
    rank, key, at = own.place.rank, own.key, f"{where[0]} port {where[1]}"
    try:
        connections, verdict = own.knock(where, limit_s)
    except NoProof:
        if point.fixed:
            raise InitializationError(
                f"rank {rank}: what listens on {at} ({point.source}) is not rank 0 of Phalanx. Set "
                f"MASTER_PORT to a port that is free on rank 0's host, for all ranks"
            ) from None
        raise _NotHere(f"something else listens on port {where[1]}") from None
    except WrongKey:
        if point.fixed:
            raise InitializationError(
                f"rank {rank} was refused: rank 0 at {at} proves another key than this process has "
                f"({key.source or 'none'}). Give every rank the same {settings.KEY_FILE}, or none"
            ) from None
        raise _NotHere(f"what listens on port {where[1]} proves another key ({key.source or 'none here'})") from None
    if verdict.kind == "welcome":
        return connections
    connections.end()
    if verdict.kind == "refused":
        raise InitializationError.rank_refused(rank, verdict.reason)
    raise _NotHere(verdict.reason or f"another job's rank 0 listens on port {where[1]}")


def _where(point: MeetingPoint, addresses: list[str]) -> str:
    meaning = "" if addresses in ([], [point.address]) else f" ({', '.join(addresses)})"
    return f"{point.address}{meaning}, port{'s' if len(point.ports) > 1 else ''} {', '.join(map(str, point.ports))}"


def _advice(addresses: list[str]) -> str:
    if addresses and all(map(is_loopback, addresses)):
        return (
            f"That is {this_host().name} itself (loopback): if rank 0 is on another host, set MASTER_ADDR to its "
            f"name or address, and MASTER_PORT, for all ranks"
        )
    return "Check whether rank 0 was started, and on the host that MASTER_ADDR names; a firewall may block the way"
