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
from phalanx.topology.readers import expand_node_list, expand_task_counts, read_host_slots
from phalanx.words import format_count

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

Placement = Literal["block", "cyclic"]
# One task on one node, beside whatever runs there, with all that the job has there. Its standard input is handed on.
# Ranks must not take the variables of its process manager for theirs.
_SRUN = (
    "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --cpu-bind=none --kill-on-bad-exit=0 --export=ALL "
    "--mpi=none --quiet -w"
)
# The variables of a task of mpiexec, or of LSF's jsrun, which it has beside those of the batch system.
_OF_TASKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
# Slurm numbers steps from 0; those of a batch script and of an interactive shell have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Variables that say how many processes a job has, those that count a host's alone, and values that ask for no others.
_OF_JOB = (
    *("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM", "AWS_BATCH_JOB_NUM_NODES", "NNODES"),
    *("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
)
_OF_HOST = ("PET_NPROC_PER_NODE", "SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE", "SLURM_NTASKS", "PBS_TASKNUM")
_NAME_THEM = "name the nodes: -H h1:4,h2:4"
_ASK_FOR_NONE = ("", "0", "1", "1:1", "-1")


@dataclass(frozen=True)
class HostSlots:
    """A host, by name or address, and how many ranks it takes; None if the user did not say."""

    name: str
    slots: int | None = None


def chosen_hosts(hosts: str | None, hostfile: str | None) -> tuple[HostSlots, ...]:
    """Read ``--hosts`` or ``--hostfile``, whichever is given; nothing if neither is."""
    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile both say where the ranks run; give one of them")
    if hosts is not None:
        return tuple(parse_hosts(hosts))
    return tuple(read_hostfile(hostfile)) if hostfile is not None else ()


def parse_hosts(text: str) -> list[HostSlots]:
    """Read ``--hosts``: names separated by commas, each with the number of its ranks after a colon."""
    where = f"--hosts {text}"
    return _add_up((_entry(part.strip(), where) for part in text.split(",")), where)


def read_hostfile(path: str) -> list[HostSlots]:
    """Read ``--hostfile``, as of MPICH, Intel MPI, Open MPI, DeepSpeed and PBS: ``h1``, ``h1:4`` or ``h1 slots=4``."""
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
            how = "list each host once, with the number of its ranks"
            raise LaunchError(f"{where}: {host.name} is listed twice; {how}")
        hosts.append(host)
    return hosts


def fill_hosts(hosts: Sequence[HostSlots], ranks: int | None, ppn: int | None = None) -> list[HostSlots]:
    """Fill each host before the next one; return those that get a rank, each with the number it gets.

    ``ranks``: None for as many as there are slots. ``ppn``: the most of a host, and its number if nobody gave one.
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


# -- hosts that a batch system has allotted ------------------------------------------------------------


@dataclass(frozen=True)
class Allocation:
    """Hosts that a batch system has allotted, its title for people, and its program that starts processes there.

    ``starter`` is empty if it has no such program: then processes are started by ssh.
    """

    title: str
    hosts: tuple[HostSlots, ...]
    starter: tuple[str, ...]


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Find the allocation that this process may use as a whole; None if there is none, or it is this host alone.

    A process that a launcher has started is a rank, or starts ranks for itself alone, so it has none.
    """
    slurm, pbs, lsf = (environment.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))
    step, file = environment.get("SLURM_STEP_ID", ""), environment.get("PBS_NODEFILE", "")
    listed, slots = environment.get("LSB_DJOB_HOSTFILE", ""), environment.get("LSB_MCPU_HOSTS", "")
    if slurm and "SLURM_JOB_NODELIST" in environment and not (step.isdigit() and int(step) < _FIRST_SPECIAL_STEP):
        found = Allocation(f"Slurm's job {slurm}", _slurm_hosts(slurm, environment), tuple(_SRUN.split()))
    elif any(name in environment for name in _OF_TASKS):
        return None
    elif pbs and file:
        found = Allocation(f"PBS job {pbs}", tuple(read_hostfile(file)), ())
    elif lsf and (slots or listed):
        try:
            named = [HostSlots(*host) for host in read_host_slots("LSB_MCPU_HOSTS", slots)] if slots else None
        except LauncherEnvironmentError as error:
            raise LaunchError(f"the hosts of LSF's job {lsf} cannot be read: {error}; {_NAME_THEM}") from None
        found = Allocation(f"LSF's job {lsf}", tuple(named or read_hostfile(listed)), ("blaunch",))
    else:
        return None
    return None if len(found.hosts) == 1 and interfaces.is_own_name(found.hosts[0].name) else found


def _slurm_hosts(job: str, environment: Mapping[str, str]) -> tuple[HostSlots, ...]:
    nodes, tasks = environment["SLURM_JOB_NODELIST"], environment.get("SLURM_TASKS_PER_NODE", "")
    try:
        names = expand_node_list("SLURM_JOB_NODELIST", nodes)
        counts = expand_task_counts("SLURM_TASKS_PER_NODE", tasks) if tasks else [1] * len(names)
    except LauncherEnvironmentError as error:
        raise LaunchError(f"the nodes of Slurm's job {job} cannot be read: {error}; {_NAME_THEM}") from None
    if len(counts) != len(names):
        raise LaunchError(
            f"Slurm's job {job} has {len(names)} nodes (SLURM_JOB_NODELIST={nodes}) and tasks for {len(counts)} "
            f"(SLURM_TASKS_PER_NODE={tasks}); {_NAME_THEM}"
        )
    return tuple(map(HostSlots, names, counts))


def share_allocation(hosts: Sequence[HostSlots], ranks: int | None, ppn: int | None) -> tuple[HostSlots, ...]:
    """Say how many ranks each host of a batch system takes: it was asked for hosts, and phalanx run for ranks there."""
    if ppn is not None:
        return tuple(HostSlots(host.name) for host in hosts)
    if ranks is not None and ranks > sum(host.slots or 1 for host in hosts):
        return tuple(HostSlots(host.name, -(-ranks // len(hosts))) for host in hosts)
    return tuple(hosts)


def is_allocated(environment: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a job of a batch system that gives each node devices of its own."""
    return any(name in environment for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))


def note_ignored(environment: Mapping[str, str], ranks: int | None) -> str:
    """Make a note on variables that ask for processes which ``phalanx run`` does not start, given -n; else empty."""
    of_tasks = [name for name in environment if re.fullmatch(r"VC_\w+_NUM", name)]  # pods of each task of Volcano
    names = (*_OF_JOB, *of_tasks, *(_OF_HOST if ranks is None else ()))
    asked = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name, "") not in _ASK_FOR_NONE)
    return asked and (
        f"{asked}: phalanx run ignores that, and starts {format_count(ranks or 1, 'rank')} on this host. Say how many "
        "with -n 2, and where with -H h1:2,h2:2; or, if it is called on every node, with --nnodes and --node-rank"
    )


# -- where hosts are, and the way back -----------------------------------------------------------------


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
        how = f"name the way there by --interface, or --address: {there}"
        raise LaunchError(f"other hosts cannot reach this one; {how}")
    return addresses


# -- hosts that do not exist ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsal:
    """Hosts that do not exist: all ranks run here, with the variables that a launcher sets on such hosts.

    Groups that span hosts share memory, because connections among hundreds of ranks on a few cores would measure it
    and not the program. ``hosts`` are the counts of ranks, by node rank, and ``given`` is what the user wrote.
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
