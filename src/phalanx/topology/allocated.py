"""What a batch system says of the nodes that it has allotted to the job of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError
from phalanx.topology.readers import expand_node_list, expand_task_counts, read_host_slots
from phalanx.words import format_count

__all__ = ["Allocated", "is_allocated", "note_ignored", "read_allocated"]

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
    """The nodes that a batch system has allotted; None outside of a job, and in a process that a launcher has started.

    Args:
        environment: the variables to read.

    Raises:
        LauncherEnvironmentError: the variables cannot be read, or contradict each other; the message has them.
    """
    return _slurm(environment) or _pbs(environment) or _lsf(environment)


def is_allocated(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job of a batch system that gives each node devices of its own."""
    return any(name in environment for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))


def note_ignored(environment: Mapping[str, str], ranks: int | None) -> str:
    """A note on variables that ask for processes which ``phalanx run`` does not start, given -n; else empty."""
    names = _OF_JOB if ranks is not None else (*_OF_JOB, *_OF_HOST)
    asked = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name, "") not in _ALONE)
    return asked and (
        f"{asked}: phalanx run ignores that, and starts {format_count(ranks or 1, 'rank')} on this host. Say how many "
        "with -n 2, and where with -H h1:2,h2:2; or start the script by torchrun, srun or mpiexec, which read it"
    )


def _slurm(environment: Mapping[str, str]) -> Allocated | None:
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
        raise LauncherEnvironmentError(f"the nodes of Slurm's job {job} cannot be read: {error}") from None
    if len(counts) != len(names):
        raise LauncherEnvironmentError(
            f"Slurm's job {job} has {len(names)} nodes (SLURM_JOB_NODELIST={nodes}) and tasks for {len(counts)} "
            f"(SLURM_TASKS_PER_NODE={given})"
        )
    return Allocated(f"Slurm's job {job}", tuple(zip(names, counts, strict=True)), program="srun")


def _pbs(environment: Mapping[str, str]) -> Allocated | None:
    path, job = environment.get("PBS_NODEFILE"), environment.get("PBS_JOBID")
    if not path or not job or _is_task(environment):
        return None
    return Allocated(f"PBS job {job}", file=path)


def _lsf(environment: Mapping[str, str]) -> Allocated | None:
    job, slots, path = (environment.get(name) for name in ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE"))
    if not job or not (slots or path) or _is_task(environment):
        return None
    title = f"LSF's job {job}"
    if not slots:
        return Allocated(title, file=path or "", program="blaunch")
    try:
        nodes = read_host_slots("LSB_MCPU_HOSTS", slots)
    except LauncherEnvironmentError as error:
        raise LauncherEnvironmentError(f"the hosts of {title} cannot be read: {error}") from None
    return Allocated(title, tuple(nodes), program="blaunch")


def _is_task(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in _OF_TASKS)
