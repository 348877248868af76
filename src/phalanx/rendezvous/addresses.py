"""From the name of rank 0's host to addresses: where rank 0 listens, and where the other ranks connect.

A host's name may resolve to loopback on the host itself (127.0.1.1 on Debian) and to its network address elsewhere, so
the resolver's answer is checked before it is used. Numbers and ``localhost`` are used as they are.
"""

from __future__ import annotations

import ipaddress
import socket

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.rendezvous.meeting_point import MeetingPoint
from phalanx.system.host import this_host
from phalanx.system.interfaces import (
    LOOPBACK,
    chosen_interface,
    is_loopback,
    is_own_name,
    outward_address,
    resolve,
)
from phalanx.topology.place import Place

__all__ = ["Unresolved", "addresses_of_rank_0", "listening_addresses", "resolved_addresses", "source_address"]


class Unresolved(InitializationError):
    """The name of rank 0's host does not resolve here.

    Attributes:
        may_pass: whether the name may resolve later, so that trying again makes sense.
    """

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def addresses_of_rank_0(place: Place, point: MeetingPoint) -> list[str]:
    """The addresses at which this process may find rank 0, in the order in which to try them.

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
    if is_own_name(point.address):
        return [outward]
    return list(dict.fromkeys([outward, *found]))


def listening_addresses(place: Place, point: MeetingPoint) -> tuple[list[str], str]:
    """Where rank 0 listens: on the first of these addresses that is this host's.

    Returns:
        The addresses, and a note for the user; empty if there is none.

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


def resolved_addresses(point: MeetingPoint) -> list[str]:
    """The addresses that the name of rank 0's host means here; none if it does not resolve."""
    try:
        return resolve(point.address)
    except OSError:
        return []


def source_address(target: str) -> str:
    """The address of the chosen interface from which to connect to ``target``; empty for any."""
    chosen = None if is_loopback(target) else chosen_interface()
    if chosen is None:
        return ""
    return next((address for address in chosen[1] if (":" in address) == (":" in target)), "")


def _misleading(place: Place, point: MeetingPoint, found: list[str]) -> bool:
    """Whether the name of rank 0's host means loopback here, and may mean another address on other hosts."""
    if place.on_one_host or not all(map(is_loopback, found)):
        return False
    if _is_number(point.address) or point.address == "localhost":
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


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
