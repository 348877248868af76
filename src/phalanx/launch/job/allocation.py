"""The hosts that a batch system has allotted to the job in which ``phalanx run`` was called without naming any.

Inside a Slurm allocation ranks are started on all of its nodes by ``srun``, and in an LSF job by ``blaunch``, which
reach a node without any login; in a PBS job, whose node file lists them, by ssh. A process that a launcher has started
is a rank, or starts ranks for itself alone, so nothing is looked for there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError, LaunchError
from phalanx.launch.job.host_slots import HostSlots, read_hostfile
from phalanx.system.interfaces import is_own_name
from phalanx.topology.environment import read_allocated

__all__ = ["Allocation", "find_allocation"]

# One task on one node of the job, beside whatever runs there, with all that the job has there. ``srun`` passes its
# standard input on. Ranks must not take the variables of its process manager for theirs.
_SRUN = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--overlap",
    "--cpu-bind=none",
    "--kill-on-bad-exit=0",
    "--export=ALL",
    "--mpi=none",
    "--quiet",
    "-w",
)
# Called as ``blaunch HOST COMMAND...``, in place of rsh. It passes its standard input on, and ends with the command.
_STARTERS = {"": (), "srun": _SRUN, "blaunch": ("blaunch",)}


@dataclass(frozen=True)
class Allocation:
    """What a batch system has allotted.

    Attributes:
        title: the allocation, for people.
        hosts: its hosts, each with the number of ranks that the user asked the batch system for.
        starter: how processes are started there; empty for ssh.
    """

    title: str
    hosts: tuple[HostSlots, ...]
    starter: tuple[str, ...]


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process may use as a whole; None if there is none, or it is this host alone.

    Args:
        environment: the environment of ``phalanx run``.

    Raises:
        LaunchError: the batch system's description of it cannot be read.
    """
    try:
        read = read_allocated(environment)
    except LauncherEnvironmentError as error:
        raise LaunchError(f"{error}; name the nodes: -H h1:4,h2:4") from None
    if read is None:
        return None
    hosts = tuple(HostSlots(name, count) for name, count in read.nodes) or tuple(read_hostfile(read.file))
    if len(hosts) == 1 and is_own_name(hosts[0].name):
        return None
    return Allocation(read.title, hosts, _STARTERS[read.program])
