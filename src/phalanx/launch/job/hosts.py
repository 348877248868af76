"""Read the hosts of a job, as written, allotted by a batch system, or rehearsed.

Every MPI launcher places ranks on a list of hosts by a rule of its own. Here each host is filled before the next, in
the order in which they are written, and every launcher gets the exact counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx import settings
from phalanx.errors import LauncherEnvironmentError, LaunchError
from phalanx.system import interfaces
from phalanx.topology.environment import read_allocated

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = [
    "Allocation",
    "HostSlots",
    "Placement",
    "Rehearsal",
    "fill_hosts",
    "find_allocation",
    "is_here",
    "launcher_addresses",
    "parse_address",
    "parse_hosts",
    "parse_rehearsal",
    "read_hostfile",
]

Placement = Literal["block", "cyclic"]
# One task on one node, beside whatever runs there, with all that the job has there. ``srun`` hands its standard input
# on. Ranks must not take the variables of its process manager for theirs.
_SRUN = (
    "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --cpu-bind=none --kill-on-bad-exit=0 --export=ALL "
    "--mpi=none --quiet -w"
)
# How processes are started on the nodes of an allocation, by the batch system's own program. Without one: by ssh.
_ALLOCATION_STARTERS = {"": (), "srun": tuple(_SRUN.split()), "blaunch": ("blaunch",)}


@dataclass(frozen=True)
class HostSlots:
    """A host, by name or address, and how many ranks it takes; None if the user did not say."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts that a batch system has allotted, its title for people, and the way to start processes there."""

    title: str
    hosts: tuple[HostSlots, ...]
    starter: tuple[str, ...]


def parse_hosts(text: str) -> list[HostSlots]:
    """Read ``--hosts``: names separated by commas, each with the number of its ranks after a colon."""
    where = f"--hosts {text}"
    return _add_up((_entry(part.strip(), where) for part in text.split(",")), where)


def read_hostfile(path: str) -> list[HostSlots]:
    """Read ``--hostfile``: one host a line, as ``h1``, ``h1:4`` or ``h1 slots=4``; # begins a comment.

    These are the forms of MPICH, Intel MPI, Open MPI (whose ``max_slots`` says nothing here), DeepSpeed and PBS.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        found = re.fullmatch(r"(\S+)(?:\s+(?:slots=(\S+)|max[_-]slots=\S+))*", text)
        if found is None:
            raise LaunchError(f"{where}: {text!r} is not understood; write h1, h1:4 or h1 slots=4")
        host = _entry(found[1], where)
        hosts.append(_entry(f"{host.name}:{found[2]}", where) if found[2] else host)
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no host")
    return _add_up(hosts, f"--hostfile {path}")


def _entry(text: str, where: str) -> HostSlots:
    name, colon, count = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if not name or any(letter.isspace() for letter in name):
        raise LaunchError(f"{where}: {text!r} names no host; write h1:4,h2:4")
    if colon and (not count.isdecimal() or int(count) < 1):
        raise LaunchError(f"{where}: {text!r}: the number after the colon is how many ranks the host takes, at least 1")
    return HostSlots(name, int(count) if colon else None)


def _add_up(entries: Iterable[HostSlots], where: str) -> list[HostSlots]:
    """Add up neighbours of the same name, as batch systems write a line for each slot; refuse any other repetition."""
    hosts: list[HostSlots] = []
    for host in entries:
        if hosts and hosts[-1].name == host.name:
            host = HostSlots(host.name, (hosts.pop().slots or 1) + (host.slots or 1))
        if any(other.name == host.name for other in hosts):
            raise LaunchError(
                f"{where}: {host.name} is listed twice; list each host once, with the number of its ranks"
            )
        hosts.append(host)
    return hosts


def fill_hosts(hosts: Sequence[HostSlots], ranks: int | None, ppn: int | None = None) -> list[HostSlots]:
    """Fill each host before the next one; return those that get a rank, each with the number it gets.

    ``ranks``: None for as many as there are slots. ``ppn``: the most ranks that a host may take, and how many it takes
    if the user did not say.
    """
    slots = [min((count for count in (host.slots, ppn) if count), default=1) for host in hosts]
    left = sum(slots) if ranks is None else ranks
    if left > sum(slots):
        room = ", ".join(f"{host.name}:{count}" for host, count in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"-n {ranks}: the hosts take {sum(slots)} ranks ({room}); write how many each takes, as in "
            f"--hosts {hosts[0].name}:{-(-left // len(hosts))}, or give --ppn"
        )
    filled = []
    for host, count in zip(hosts, slots, strict=True):
        if left > 0:
            filled.append(HostSlots(host.name, min(count, left)))
        left -= count
    return filled


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Find the allocation that this process may use as a whole; None if there is none, or it is this host alone.

    A process that a launcher has started is a rank, or starts ranks for itself alone, so it has none.
    """
    try:
        read = read_allocated(environment)
    except LauncherEnvironmentError as error:
        raise LaunchError(f"{error}; name the nodes: -H h1:4,h2:4") from None
    if read is None:
        return None
    hosts = tuple(HostSlots(name, count) for name, count in read.nodes) or tuple(read_hostfile(read.file))
    if len(hosts) == 1 and interfaces.is_own_name(hosts[0].name):
        return None
    return Allocation(read.title, hosts, _ALLOCATION_STARTERS[read.program])


def is_here(name: str, *, starter: bool = False) -> bool:
    """Tell whether a name that the user wrote means this host, so that nothing has to be reached.

    If a ``starter`` of the user's takes the names, they may be those of pods or containers, and are not resolved.

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
        meant = "correct its line in /etc/hosts, or write localhost if you mean this host"
        raise LaunchError(f"{name} resolves to {addresses[0]}, which is this host's loopback; {meant}")
    return not interfaces.is_other_host(plain)


def parse_address(text: str) -> str:
    """Read ``--address``: an address of this host, IPv6 with brackets or without, or a name for one."""
    plain = text.removeprefix("[").removesuffix("]")
    if interfaces.is_other_host(plain):
        own = interfaces.describe_interfaces()
        raise LaunchError(f"--address {text}: is not an address of this host, whose interfaces are {own}")
    return plain


def launcher_addresses(
    mpi: MpiLauncher | None, hosts: Sequence[HostSlots], interface: str, environment: Mapping[str, str]
) -> list[str]:
    """Find where the ranks reach the launcher: loopback if all are on this host, so that no other host can connect.

    Of several addresses, as a login node has, the hosts take the first that answers. Ranks of MPI are given one.
    Without an MPI launcher, no ``hosts`` means that all ranks run here.
    """
    elsewhere = [name for host in hosts if interfaces.is_other_host(name := host.name.rpartition("@")[2])]
    if mpi is None and not hosts:
        return [interfaces.LOOPBACK]
    if mpi is not None and not elsewhere and (hosts or not mpi.may_leave_this_host(environment)):
        return [interfaces.LOOPBACK]
    # The ranks' interface need not exist on the host that starts them, such as a login node.
    chosen = interface or environment.get(settings.INTERFACE, "")
    own = {settings.INTERFACE: chosen} if interfaces.interface_addresses().get(chosen) else {}
    addresses = interfaces.outward_addresses(elsewhere, own)
    if mpi is not None:
        return addresses[:1]
    if interfaces.is_loopback(addresses[0]):
        there = interfaces.describe_interfaces()
        raise LaunchError(
            f"other hosts cannot reach this one; name the way there by --interface, or --address: {there}"
        )
    return addresses


@dataclass(frozen=True)
class Rehearsal:
    """Hosts that do not exist: all ranks run here, with the variables that a launcher sets on such hosts.

    Devices are the CPU, and groups that span hosts share memory, because Gloo among hundreds of ranks on a few cores
    would measure the rehearsal and not the program. ``hosts`` are the counts of ranks, by node rank, and ``given`` is
    what the user wrote.
    """

    hosts: tuple[int, ...]
    placement: Placement = "block"
    given: str = ""

    @property
    def ranks(self) -> int:
        return sum(self.hosts)

    def host(self, node_rank: int) -> str:
        return f"node{node_rank}"

    def placed(self) -> list[tuple[int, int]]:
        """The node rank and the local rank of each rank."""
        placed = [(node, local) for node, count in enumerate(self.hosts) for local in range(count)]
        return placed if self.placement == "block" else sorted(placed, key=lambda place: (place[1], place[0]))

    def environment(self, node_rank: int) -> dict[str, str]:
        """The variables that a rank on this host gets beside those that every launcher sets."""
        # torch's store asks the name server for the name of 127.0.0.1. Hundreds of ranks ask at once, and a rank whose
        # question is dropped would wait 5 s before it asks again.
        patience = {} if "RES_OPTIONS" in os.environ else {"RES_OPTIONS": "timeout:1 attempts:5"}
        return {
            **patience,
            settings.HOST: self.host(node_rank),
            settings.REHEARSAL: self.given,
            settings.DEVICE: "cpu",
            # For scripts that ask torch themselves: CUDA and ROCm show no device then.
            "CUDA_VISIBLE_DEVICES": "",
        }

    def note(self) -> str:
        """The differences from the cluster, in one line."""
        between = ", groups that span hosts use shared memory in place of the network" if len(self.hosts) > 1 else ""
        return f"a rehearsal: ranks compute on the CPU{between}, and all share this machine's cores and memory"


def parse_rehearsal(text: str, placement: Placement = "block") -> Rehearsal:
    """Read ``NODESxRANKS``, or the ranks of each host separated by commas."""
    how = "Write --rehearse 2x4 for two hosts with four ranks each, or --rehearse 1,3,2 for unequal hosts"
    if match := re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text):
        numbers = (int(match[2]),) * int(match[1])
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", text):
        numbers = tuple(int(part) for part in text.split(","))
    else:
        raise LaunchError(f"--rehearse {text}: is neither NODESxRANKS nor a list of ranks for each host. {how}")
    if not numbers or min(numbers) < 1:
        raise LaunchError(f"--rehearse {text}: there is at least one host, and each has at least one rank. {how}")
    return Rehearsal(numbers, placement, text.replace(" ", ""))
