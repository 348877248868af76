"""Find which of a job's hosts are other machines, and the addresses by which they reach this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.host_slots import HostSlots
from phalanx.system import interfaces
from phalanx.system.interfaces import LOOPBACK

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["LOOPBACK", "check_hosts", "is_here", "launcher_addresses", "reach_other_hosts"]


def is_here(name: str, *, starter: bool = False) -> bool:
    """Whether a name that the user wrote means this host, so that nothing has to be reached.

    Args:
        name: the name or address.
        starter: whether a starter of the user's takes the names. They may then be a cluster's own, such as those of
            pods or containers, so they are not resolved.

    Raises:
        LaunchError: the name is another host's, and it resolves to loopback.
    """
    plain = name.rpartition("@")[2]
    if plain == "localhost" or interfaces.is_loopback(plain) or interfaces.is_own_name(plain):
        return True
    if starter:
        return False
    try:
        addresses = interfaces.resolve(plain)
    except OSError:
        return False  # ssh's configuration may know it
    if all(map(interfaces.is_loopback, addresses)):
        raise LaunchError(
            f"{name} resolves to {addresses[0]}, which is this host's loopback and not {name}; correct its line in "
            f"/etc/hosts, or write localhost if you mean this host"
        )
    return not interfaces.is_other_host(plain)


def reach_other_hosts(hosts: Sequence[HostSlots], starter: Sequence[str]) -> bool:
    """Whether ranks of these hosts run elsewhere; False for no host, and for this one alone.

    Raises:
        LaunchError: see :func:`is_here`.
    """
    here = [is_here(host.name, starter=bool(starter)) for host in hosts]  # every name is checked
    return not all(here)


def check_hosts(
    hosts: Sequence[HostSlots],
    filled: Sequence[HostSlots],
    starter: Sequence[str],
    mpi: MpiLauncher | None,
    *,
    elsewhere: bool,
    address: str | None,
    debugged: int | None,
) -> None:
    """Refuse options about other hosts that cannot be carried out.

    Args:
        hosts: as the user wrote them.
        filled: those that get ranks.
        starter: the user's starter.
        mpi: the MPI launcher; None without one.
        elsewhere: whether ranks run on other hosts, or may.
        address: the user's ``--address``.
        debugged: the rank that is to get this terminal.

    Raises:
        LaunchError: one of them cannot.
    """
    if elsewhere and debugged is not None:
        where = "of an MPI launcher" if mpi is not None else "on other hosts"
        raise LaunchError(f"--debug hands over this terminal, which ranks {where} do not have; leave it out")
    if starter and mpi is not None:
        raise LaunchError("--starter and --mpi both start processes on other hosts; give one of them")
    if starter and not hosts:
        raise LaunchError("--starter needs the hosts on which it is to start ranks: -H h1:4,h2:4")
    if address is not None and not elsewhere:
        raise LaunchError("--address is for ranks on other hosts, and there are none; leave it out")
    here = [host.name for host in filled if mpi is None and is_here(host.name, starter=bool(starter))]
    if len(here) > 1:
        raise LaunchError(f"{' and '.join(here)} are one host, this one; list it once, with the number of its ranks")


def launcher_addresses(
    mpi: MpiLauncher | None, hosts: Sequence[HostSlots], interface: str | None, environment: Mapping[str, str]
) -> list[str]:
    """Where the ranks find the launcher: loopback if every rank is on this host, so that no other host can connect.

    Of several addresses, as a login node has, the hosts take the first that answers. Ranks of MPI are given one.

    Args:
        mpi: the MPI launcher; None without one.
        hosts: the hosts of the ranks; without an MPI launcher, empty if they all run here.
        interface: the interface that the user chose.
        environment: where the user's settings are read.

    Raises:
        LaunchError: this host has no address but loopback.
    """
    names = [host.name.rpartition("@")[2] for host in hosts]
    elsewhere = [name for name in names if interfaces.is_other_host(name)]
    if mpi is None and not hosts:
        return [LOOPBACK]
    if mpi is not None and not elsewhere and (hosts or not mpi.may_leave_this_host(environment)):
        return [LOOPBACK]
    # The ranks' interface need not exist on the host that starts them, such as a login node.
    chosen = interface or environment.get(settings.INTERFACE, "")
    own = {settings.INTERFACE: chosen} if interfaces.interface_addresses().get(chosen) else {}
    addresses = interfaces.outward_addresses(elsewhere, own)
    if mpi is not None:
        return addresses[:1]
    if interfaces.is_loopback(addresses[0]):
        raise LaunchError(
            f"other hosts cannot reach this one, whose interfaces are {interfaces.describe_interfaces()}; if one of "
            f"them leads there, name it: --interface, or --address"
        )
    return addresses
