"""Where the ranks meet: an address and a port, when the launcher gives one, or only a list of nodes, or nothing.

Where no port is given, one is derived from what only this job has, so every rank comes to the same without a word
having passed; if it is taken, the next one is, and each rank tries them in the same order. Ranks on one host of a
launcher that names no job go by the process that started them all. Over MPI none of this is needed: rank 0 binds any
port and tells it by a broadcast (``meet.meet_by_broadcast``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass

from phalanx.place.place import Place

__all__ = ["MeetingPoint", "meeting_point"]

LOOPBACK = "127.0.0.1"
# How many ports are tried, and where: below those that systems hand out to outgoing connections (32768 and up).
PORTS = 16
LOWEST, HIGHEST = 20000, 32767

# The processes with which launchers start the ranks of one host.
_STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "mpispawn", "mpiexec", "mpirun", "slurmstepd")


@dataclass(frozen=True)
class MeetingPoint:
    """Where rank 0 listens.

    Attributes:
        address: rank 0's host, by name or number.
        ports: the ports to be tried in turn; one where it is fixed.
        job: what no other job has; empty where the port is fixed.
        fixed: whether the launcher or the user gave the port, so that what answers there is believed.
        source: where the address and the port come from, for people.
    """

    address: str
    ports: tuple[int, ...]
    job: str
    fixed: bool
    source: str


def meeting_point(place: Place) -> MeetingPoint | None:
    """Where the ranks of this job can meet, as far as the launcher's variables say; None if they do not."""
    address, source = place.master_addr, place.sources.get("master_addr", "")
    # A job of MPI on one host of an allocation is not on the first one always. srun's list is of its own step.
    listed = source.startswith("the first of ") and place.launcher != "slurm"
    if (address is None or listed) and place.local_world_size == place.world_size:
        address, source = LOOPBACK, "all ranks are on this host"
    if address is None:
        return None
    if place.master_port is not None:
        said = place.sources.get("master_port", "")
        return MeetingPoint(address, (place.master_port,), "", True, f"{source}, {said}")
    job = place.job
    if place.local_world_size == place.world_size and (job is None or place.launcher == "mpich"):
        # Several mpiexecs of one allocation would come to the same port, and two jobs to one store.
        job = _starter() or job
    if job is None:
        return None
    return MeetingPoint(address, derived_ports(job), job, False, f"{source}; port derived from {job}")


def derived_ports(job: str) -> tuple[int, ...]:
    """The ports that every rank of ``job`` tries, in order."""
    ports: list[int] = []
    count = 0
    while len(ports) < PORTS:
        number = int.from_bytes(hashlib.sha256(f"{job}/{count}".encode()).digest()[:8], "big")
        port = LOWEST + number % (HIGHEST - LOWEST + 1)
        if port not in ports:
            ports.append(port)
        count += 1
    return tuple(ports)


def _starter() -> str | None:
    """The nearest ancestor that starts ranks, by a name that no later process can have; None if there is none.

    A rank may stand under a shell or numactl, so the parent alone will not do.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                text = file.read()
            name = text[text.index("(") + 1 : text.rindex(")")]
            fields = text[text.rindex(")") + 2 :].split()
            # The kernel cuts names to 15 characters.
            if any(name == starter[:15] for starter in _STARTERS):
                return f"{name} with pid {pid} of {fields[19]}"
            pid = int(fields[1])
    return None
