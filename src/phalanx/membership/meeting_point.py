"""Meeting point of the ranks: the addresses of rank 0's host, and the ports to try there.

A launcher may give an address and a port, or only a list of nodes, or nothing. Where it gives no port, ports are
derived from a text that only this job has. So all ranks try the same ports in the same order, and need not communicate
to know them; rank 0 takes the first that is free. If the launcher does not name the job and all ranks are on one host,
the job is named after the process that started them.

A host's name may resolve to loopback on the host itself (127.0.1.1 on Debian) and to its network address elsewhere, so
the resolver's answer is checked before it is used. Numbers and ``localhost`` are used as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
from dataclasses import dataclass

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.system.host import this_host
from phalanx.system.interfaces import (
    LOOPBACK,
    chosen_interface,
    is_loopback,
    is_own_name,
    outward_address,
    resolve,
)
from phalanx.topology.launchers import STARTERS
from phalanx.topology.place import Place

__all__ = ["MeetingPoint", "Unresolved", "addresses_of_rank_0", "listening_addresses", "meeting_point"]

# How many ports are derived, and their range: below those that systems give to outgoing connections (32768 and up).
PORTS = 16
LOWEST, HIGHEST = 20000, 32767
_STAT_NAME_LENGTH = 15  # the kernel cuts names of processes to this


@dataclass(frozen=True)
class MeetingPoint:
    """The address and ports at which rank 0 listens.

    Attributes:
        address: rank 0's host, by name or number.
        ports: the ports to be tried in turn; a single one where it is fixed.
        job: a text that no other job has; empty where the port is fixed.
        fixed: whether the launcher or the user gave the port, so that its listener should be rank 0.
        source: where the address and the port come from, for people.
    """

    address: str
    ports: tuple[int, ...]
    job: str
    fixed: bool
    source: str


def meeting_point(place: Place) -> MeetingPoint | None:
    """Find where the ranks of this job can meet, by the launcher's variables; None if they do not say."""
    address, source = place.master_addr, place.sources.get("master_addr", "")
    # In an allocation of several hosts, an mpiexec that uses one host need not use the first of the list, so the list
    # is not used when all ranks are on one host.
    if (address is None or place.first_of_allocation) and place.on_one_host:
        address, source = LOOPBACK, "all ranks are on this host"
    if address is None:
        return None
    if place.master_port is not None:
        said = place.sources.get("master_port", "")
        return MeetingPoint(address, (place.master_port,), "", True, f"{source}, {said}")
    job = place.job
    if place.on_one_host and (job is None or place.traits.shared_job):
        # Two jobs of one allocation must not derive the same ports, or the ranks of both could meet in one store.
        job = _starter() or job
    if job is None:
        return None
    return MeetingPoint(address, derived_ports(job), job, False, f"{source}; port derived from {job}")


def derived_ports(job: str) -> tuple[int, ...]:
    """Return the ports that every rank of ``job`` tries, in order."""
    ports: dict[int, None] = {}
    count = 0
    while len(ports) < PORTS:
        number = int.from_bytes(hashlib.sha256(os.fsencode(f"{job}/{count}")).digest()[:8], "big")
        ports[LOWEST + number % (HIGHEST - LOWEST + 1)] = None
        count += 1
    return tuple(ports)


def _starter() -> str | None:
    """Return the nearest ancestor that starts ranks, as a text that fits no later process; None if there is none.

    There may be a shell or numactl between a rank and that ancestor, so all ancestors are checked.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                text = file.read()
            name = text[text.index("(") + 1 : text.rindex(")")]
            fields = text[text.rindex(")") + 2 :].split()
            if any(name == starter[:_STAT_NAME_LENGTH] for starter in STARTERS):
                return f"{name} with pid {pid} of {fields[19]}"
            pid = int(fields[1])
    return None


# -- addresses -----------------------------------------------------------------------------------------


class Unresolved(InitializationError):
    """The name of rank 0's host does not resolve here; ``may_pass``: it may later."""

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def addresses_of_rank_0(place: Place, point: MeetingPoint) -> list[str]:
    """Return the addresses at which this process may find rank 0, in the order in which to try them.

    Raises:
        Unresolved: the name of rank 0's host does not resolve.
        InitializationError: that name means this host, and rank 0 is on another.
    """
    found = _resolve(place, point)
    if not _misleading(place, point, found):
        return found
    if place.rank != 0 and place.node_rank not in (None, 0) and not is_own_name(point.address):
        raise InitializationError(
            f"{point.address} ({point.source}) means loopback ({', '.join(found)}) on {this_host().name}, which is "
            f"node {place.node_rank}, and rank 0 is on another host. Set MASTER_ADDR to the address of rank 0's host, "
            f"or correct the name in /etc/hosts"
        )
    outward = outward_address()
    return [outward] if is_own_name(point.address) else list(dict.fromkeys([outward, *found]))


def listening_addresses(place: Place, point: MeetingPoint) -> tuple[list[str], str]:
    """Return where rank 0 listens, on the first of these addresses that is this host's, and a note for the user.

    Raises:
        InitializationError: the name of rank 0's host does not resolve on that host itself, or the host does not have
            the interface that was chosen.
    """
    chosen = chosen_interface()
    try:
        found = addresses_of_rank_0(place, point)
    except Unresolved as error:
        if not place.traits.late_names:
            raise InitializationError(str(error)) from error.__cause__
        found = []
    if place.traits.late_names and not place.on_one_host:
        found = [address for address in found if not is_loopback(address)]
        return [*([] if chosen else found), outward_address()], ""
    if chosen is None or all(map(is_loopback, found)):
        return found[:1] if _misleading(place, point, _resolve(place, point)) else found, ""
    name, addresses = chosen
    own = [address for address in found if address in addresses]
    if own:
        return own, ""
    return addresses, (
        f"rank 0 listens on {addresses[0]} ({settings.INTERFACE}={name}), while {point.address} means "
        f"{', '.join(found)}: the other ranks must be able to reach rank 0 by that address"
    )


def source_address(target: str) -> str:
    """Return the address of the chosen interface from which to connect to ``target``; empty for any."""
    chosen = None if is_loopback(target) else chosen_interface()
    if chosen is None:
        return ""
    return next((address for address in chosen[1] if (":" in address) == (":" in target)), "")


def _misleading(place: Place, point: MeetingPoint, found: list[str]) -> bool:
    """Return whether the name of rank 0's host means loopback here, and may mean another address on other hosts."""
    if place.on_one_host or not all(map(is_loopback, found)) or point.address == "localhost":
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(point.address.partition("%")[0])
        return False
    return is_own_name(point.address) or place.local_world_size is not None


def _resolve(place: Place, point: MeetingPoint) -> list[str]:
    try:
        return resolve(point.address)
    except OSError as error:
        if place.on_one_host and not point.fixed:
            return [LOOPBACK]  # only the scheduler knows the node by this name, and all ranks are on it
        raise Unresolved(
            f"{point.address} ({point.source}) does not resolve on {this_host().name}, where rank {place.rank} "
            f"runs: {error.strerror or error}. Set MASTER_ADDR to the name or address of rank 0's host, for all ranks",
            may_pass=place.traits.late_names or getattr(error, "errno", None) == socket.EAI_AGAIN,
        ) from error
