"""The nodes that a batch system has allotted to the job of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError
from phalanx.topology.readers import expand_node_list, expand_task_counts, read_host_slots
from phalanx.words import format_count

# The variables of a task of mpiexec, or of LSF's jsrun, which it has beside those of the batch system.
_OF_TASKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
# Slurm numbers steps from 0; those of a batch script and of an interactive shell have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Variables that say how many processes a job has, those that count a host's alone, and values that ask for no others.
_OF_JOB = ("PET_NNODES", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_OF_HOST = ("PET_NPROC_PER_NODE", "SLURM_NTASKS")
_ALONE = ("", "0", "1", "1:1", "-1")


@dataclass(frozen=True)
class Allocated:
    """The nodes of a job.

    Attributes:
        title: the job, for people.
        nodes: each node, with the number of tasks that the user asked for there; empty if a file lists them.
        file: the path of that file.
        program: the batch system's own one that starts processes there, without any login; empty if it has none.
    """

    title: str
    nodes: tuple[tuple[str, int], ...] = ()
    file: str = ""
    program: str = ""


def read_allocated(environment: Mapping[str, str]) -> Allocated | None:
    """Read which nodes are allotted; None outside of a job, and in a process that a launcher has started.

    Raises:
        LauncherEnvironmentError: the variables cannot be read, or contradict each other; the message has them.
    """
    slurm, pbs, lsf = (environment.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))
    nodes, step = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_STEP_ID", "")
    if slurm and nodes and not (step.isdigit() and int(step) < _FIRST_SPECIAL_STEP):
        return _slurm(slurm, nodes, environment.get("SLURM_TASKS_PER_NODE", ""))
    if any(name in environment for name in _OF_TASKS):
        return None
    if pbs and (path := environment.get("PBS_NODEFILE")):
        return Allocated(f"PBS job {pbs}", file=path)
    slots, path = environment.get("LSB_MCPU_HOSTS"), environment.get("LSB_DJOB_HOSTFILE", "")
    if not lsf or not (slots or path):
        return None
    title = f"LSF's job {lsf}"
    try:
        hosts = read_host_slots("LSB_MCPU_HOSTS", slots) if slots else []
    except LauncherEnvironmentError as error:
        raise LauncherEnvironmentError(f"the hosts of {title} cannot be read: {error}") from None
    return Allocated(title, tuple(hosts), "" if slots else path, program="blaunch")


def _slurm(job: str, nodes: str, tasks: str) -> Allocated:
    try:
        names = expand_node_list("SLURM_JOB_NODELIST", nodes)
        counts = expand_task_counts("SLURM_TASKS_PER_NODE", tasks) if tasks else [1] * len(names)
    except LauncherEnvironmentError as error:
        raise LauncherEnvironmentError(f"the nodes of Slurm's job {job} cannot be read: {error}") from None
    if len(counts) != len(names):
        raise LauncherEnvironmentError(
            f"Slurm's job {job} has {len(names)} nodes (SLURM_JOB_NODELIST={nodes}) and tasks for {len(counts)} "
            f"(SLURM_TASKS_PER_NODE={tasks})"
        )
    return Allocated(f"Slurm's job {job}", tuple(zip(names, counts, strict=True)), program="srun")


def is_allocated(environment: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a job of a batch system that gives each node devices of its own."""
    return any(name in environment for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))


def note_ignored(environment: Mapping[str, str], ranks: int | None) -> str:
    """Make a note on variables that ask for processes which ``phalanx run`` does not start, given -n; else empty."""
    names = _OF_JOB if ranks is not None else (*_OF_JOB, *_OF_HOST)
    asked = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name, "") not in _ALONE)
    return asked and (
        f"{asked}: phalanx run ignores that, and starts {format_count(ranks or 1, 'rank')} on this host. Say how many "
        "with -n 2, and where with -H h1:2,h2:2; or start the script by torchrun, srun or mpiexec, which read it"
    )
