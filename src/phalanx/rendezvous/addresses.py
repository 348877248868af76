"""From the name of rank 0's host to addresses: where rank 0 listens, and where the others look for it.

One name may mean loopback on its own host (127.0.1.1 on Debian) and the network's address elsewhere, so what the
resolver says is not taken as it is. Numbers and ``localhost`` are.
"""

from __future__ import annotations

import ipaddress
import socket

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.place.place import Place
from phalanx.rendezvous.meeting_point import LOOPBACK, MeetingPoint
from phalanx.system.interfaces import chosen_interface, is_loopback, is_own_name, outward_address, resolve

__all__ = ["Unresolved", "addresses_of_rank_0", "listening_addresses", "source_address"]

# They give rank 0 a name for itself that may mean loopback, or a service that stands before it; names appear when the
# machines do.
PLATFORMS = frozenset(("kubeflow", "pai", "azureml", "sagemaker", "tpu"))


class Unresolved(InitializationError):
    """The name of rank 0's host means nothing here.

    Attributes:
        may_pass: whether it may mean something later.
    """

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def addresses_of_rank_0(place: Place, point: MeetingPoint) -> list[str]:
    """Where to look for rank 0 from here, in this order.

    Raises:
        Unresolved: its name means nothing.
        InitializationError: its name means this host, and rank 0 is on another.
    """
    found = _resolve(place, point)
    if not _misleading(place, point, found):
        return found
    if place.rank != 0 and place.node_rank not in (None, 0) and not is_own_name(point.address):
        raise InitializationError(
            f"{point.address} ({point.source}) means loopback ({', '.join(found)}) on {socket.gethostname()}, which is "
            f"node {place.node_rank}, and rank 0 is on another host. Set MASTER_ADDR to the address of rank 0's host, "
            f"or correct the name in /etc/hosts"
        )
    outward = outward_address(point.address)
    if is_own_name(point.address):
        return [outward]
    return list(dict.fromkeys([outward, *found]))


def listening_addresses(place: Place, point: MeetingPoint) -> tuple[list[str], str]:
    """Where rank 0 listens: the first of these that is this host's; and a note for the user, if there is one.

    Raises:
        Unresolved: its own name means nothing.
        InitializationError: there is no interface of the name that was chosen.
    """
    chosen = chosen_interface()
    try:
        found = addresses_of_rank_0(place, point)
    except Unresolved:
        if place.launcher not in PLATFORMS:
            raise
        found = []
    if place.launcher in PLATFORMS and place.local_world_size != place.world_size:
        found = [address for address in found if not is_loopback(address)]
        return [*([] if chosen else found), outward_address(socket.gethostname())], ""
    if chosen is None or all(map(is_loopback, found)):
        return found[:1] if _misleading(place, point, _resolve(place, point)) else found, ""
    name, addresses = chosen
    own = [address for address in found if address in addresses]
    if own:
        return own, ""
    return addresses, (
        f"rank 0 listens on {addresses[0]} ({settings.INTERFACE}={name}), while {point.address} means "
        f"{', '.join(found)}: the others must be able to reach it by that"
    )


def source_address(target: str) -> str:
    """The address of the chosen interface from which to connect to ``target``; empty for any."""
    chosen = None if is_loopback(target) else chosen_interface()
    if chosen is None:
        return ""
    return next((address for address in chosen[1] if (":" in address) == (":" in target)), "")


def _misleading(place: Place, point: MeetingPoint, found: list[str]) -> bool:
    """Whether a name means loopback here, and may mean something else to others."""
    if place.local_world_size == place.world_size or not all(map(is_loopback, found)):
        return False
    if _is_number(point.address) or point.address == "localhost":
        return False
    return is_own_name(point.address) or place.local_world_size is not None


def _resolve(place: Place, point: MeetingPoint) -> list[str]:
    try:
        return resolve(point.address)
    except OSError as error:
        if place.local_world_size == place.world_size and not point.fixed:
            return [LOOPBACK]  # a node's name that only its scheduler knows; all ranks are here
        raise Unresolved(
            f"{point.address} ({point.source}) does not resolve on {socket.gethostname()}, where rank {place.rank} "
            f"runs: {error.strerror or error}. Set MASTER_ADDR to the name or address of rank 0's host, for all ranks",
            may_pass=place.launcher in PLATFORMS or getattr(error, "errno", None) == socket.EAI_AGAIN,
        ) from error


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
