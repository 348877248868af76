"""Where the ranks meet: the address of rank 0's host, and the ports to try there.

A launcher may give an address and a port, or only a list of nodes, or nothing. Where it gives no port, ports are
derived from a text that only this job has. So all ranks try the same ports in the same order, and need not communicate
to know them; rank 0 takes the first that is free. If the launcher does not name the job and all ranks are on one host,
the job is named after the process that started them. If there is no meeting point and MPI can be used, rank 0 listens
on any free port and announces it by a broadcast (``meet_by_broadcast`` in ``meet.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass

from phalanx.system.interfaces import LOOPBACK
from phalanx.topology.launchers import STARTERS
from phalanx.topology.place import Place

__all__ = ["MeetingPoint", "meeting_point"]

# How many ports are derived, and their range: below those that systems give to outgoing connections (32768 and up).
PORTS = 16
LOWEST, HIGHEST = 20000, 32767
_STAT_NAME_LENGTH = 15  # the kernel cuts names of processes to this


@dataclass(frozen=True)
class MeetingPoint:
    """Where rank 0 listens.

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
    """Where the ranks of this job can meet, by the launcher's variables; None if they do not say."""
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
    """The ports that every rank of ``job`` tries, in order."""
    ports: list[int] = []
    count = 0
    while len(ports) < PORTS:
        number = int.from_bytes(hashlib.sha256(os.fsencode(f"{job}/{count}")).digest()[:8], "big")
        port = LOWEST + number % (HIGHEST - LOWEST + 1)
        if port not in ports:
            ports.append(port)
        count += 1
    return tuple(ports)


def _starter() -> str | None:
    """The nearest ancestor that starts ranks, as a text that fits no later process; None if there is none.

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
