"""The hosts that a batch system has allotted to the job in which ``phalanx run`` was called without naming any.

Inside a Slurm allocation ranks are started on all of its nodes by ``srun``, which reaches a node without any
login; in a PBS job, whose node file lists them, by ssh. A process that a launcher has started is a rank, or starts
ranks for itself alone, so nothing is looked for there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError, LaunchError
from phalanx.launch.job.host_slots import HostSlots, read_hostfile
from phalanx.place.node_lists import expand_node_list, expand_task_counts
from phalanx.system.interfaces import is_own_name

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
# Slurm numbers steps from 0; those of a batch script and of an interactive shell have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


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
    found = _slurm(environment) or _pbs(environment)
    if found is None or (len(found.hosts) == 1 and is_own_name(found.hosts[0].name)):
        return None
    return found


def _slurm(environment: Mapping[str, str]) -> Allocation | None:
    nodes, job = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_JOB_ID")
    if not nodes or not job:
        return None
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < _FIRST_SPECIAL_STEP:
        return None  # a task of srun
    try:
        names = expand_node_list("SLURM_JOB_NODELIST", nodes)
        given = environment.get("SLURM_TASKS_PER_NODE")
        counts = expand_task_counts("SLURM_TASKS_PER_NODE", given) if given else [1] * len(names)
    except LauncherEnvironmentError as error:
        raise LaunchError(f"the nodes of Slurm's job {job} cannot be read: {error}; name them: -H h1:4,h2:4") from None
    if len(counts) != len(names):
        raise LaunchError(
            f"Slurm's job {job} has {len(names)} nodes (SLURM_JOB_NODELIST={nodes}) and tasks for {len(counts)} "
            f"(SLURM_TASKS_PER_NODE={given}); name the nodes: -H h1:4,h2:4"
        )
    hosts = tuple(HostSlots(name, count) for name, count in zip(names, counts, strict=True))
    return Allocation(f"Slurm's job {job}", hosts, _SRUN)


def _pbs(environment: Mapping[str, str]) -> Allocation | None:
    path, job = environment.get("PBS_NODEFILE"), environment.get("PBS_JOBID")
    # A task of mpiexec has variables of its own beside them.
    if not path or not job or any(name in environment for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        return None
    return Allocation(f"PBS job {job}", tuple(read_hostfile(path)), ())
