"""Read which nodes a job has from the variables of platforms that start one command on every node.

``phalanx run`` on each of the nodes asks ``find_platform``, so that no option repeats what the variables say. Rows are
tried in their order: SkyPilot may run inside Slurm, and Kubeflow makes a JobSet. For a batch script see ``hosts.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError, LaunchError
from phalanx.topology.launchers import LAUNCHERS, SLURM, Kind
from phalanx.topology.readers import (
    Environment,
    Fact,
    HostList,
    Reader,
    constant,
    expand_node_list,
    first,
    host_of,
    lines_of,
    number,
    port,
    whole_number,
)


@dataclass(frozen=True)
class PlatformNodes:
    """The nodes on which a platform starts this command, as its variables say."""

    title: str  # for people
    nodes: str  # as --nnodes takes it: 2 or 2:4
    node_rank: int | None  # None: not said
    master_addr: str  # the name or address of node 0; empty: not said
    master_port: int | None
    ranks: str | None  # of this node, as -n takes it: a number, auto, gpu or cpu; None: not said
    names: tuple[str, ...] = ()  # all nodes' names or addresses in the order of node ranks, if the platform lists them
    variables: tuple[str, ...] = ()  # that said so, for messages


_MASTER_ADDR, _MASTER_PORT, _NOT_SAID = host_of("MASTER_ADDR"), port("MASTER_PORT"), constant(0, "not said")


@dataclass(frozen=True)
class _Platform:
    """One row of the table.

    Attributes:
        nodes: the variable that counts the nodes; if it is not set, they are counted by their names.
        node_rank, ranks, master_addr, master_port: readers of these facts. The master is the first of the names if
            nothing else is said.
        names: lists the nodes.
        when: says whether it is this platform; without it ``nodes`` does.
    """

    title: str
    nodes: str
    node_rank: Reader
    ranks: Reader = _NOT_SAID
    names: Callable[[Environment], Sequence[str]] = lambda _: ()
    master_addr: Reader = _MASTER_ADDR
    master_port: Reader = _MASTER_PORT
    when: Callable[[Environment], bool] | None = None

    def recognises(self, environment: Environment) -> bool:
        return self.when(environment) if self.when else bool(environment.get(self.nodes))

    def read(self, environment: Environment) -> PlatformNodes:
        """Read all facts and compare them."""
        names = tuple(self.names(environment))
        nodes = environment.get(self.nodes, str(len(names) or 1)).strip()
        most = _most_nodes(self.nodes, nodes)
        if names and len(names) != most:
            raise LauncherEnvironmentError(f"{self.nodes}={nodes}, but {len(names)} nodes are listed: {names}")
        readers = (self.node_rank, self.ranks, self.master_addr, self.master_port)
        rank, ranks, address, at = (reader(environment) for reader in readers)
        if rank is not None and not 0 <= int(rank.value) < most:
            raise LauncherEnvironmentError(f"{rank.source} is no rank of {most} nodes, which count from 0")
        variables = (self.nodes, *(name for reader in readers for name in reader.variables))
        return PlatformNodes(
            self.title,
            nodes,
            int(rank.value) if rank else None,
            str(address.value) if address else names[0] if names else "",
            int(at.value) if at else None,
            str(ranks.value) if ranks and ranks.value else None,
            names,
            tuple(name for name in dict.fromkeys(variables) if name in environment),
        )


def find_platform(environment: Mapping[str, str]) -> PlatformNodes | None:
    """Find the platform that starts this command on every node, be it one; None if there is none.

    Raises:
        LaunchError: its variables contradict each other, or are no numbers.
    """
    launcher = next((row for row in LAUNCHERS if row.recognises(environment)), None)
    if launcher and launcher.kind in (Kind.AGENT, Kind.MPI):
        return None  # a rank starts ranks for itself alone
    try:
        row = next((row for row in _PLATFORMS if row.recognises(environment)), None)
        return row.read(environment) if row else None
    except LauncherEnvironmentError as error:
        remedy = "correct it, or say --nnodes, --node-rank and --master-addr (--nnodes 1: this node alone)"
        raise LaunchError(f"{error}; {remedy}") from None


def _most_nodes(name: str, nodes: str) -> int:
    """Return the most nodes that ``2`` or ``2:4`` allows."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", nodes)
    if not found or not 1 <= int(found[1] or found[2]) <= int(found[2]):
        raise LauncherEnvironmentError(f"{name}={nodes} is no number of nodes, such as 2 or 2:4")
    return int(found[2])


# -- readers -------------------------------------------------------------------------------------------


def _ranks_in(name: str) -> Reader:
    """Read how many ranks or accelerators a node has; 0 says nothing of ranks. ``xpu`` is a word of torchrun."""

    def read(environment: Environment) -> Fact | None:
        value = environment.get(name, "0").strip().replace("xpu", "gpu")
        return Fact(value if value in ("auto", "gpu", "cpu") else whole_number(name, value), f"{name}={value}")

    return Reader(name, read, (name,))


def _port_by_job(name: str) -> Reader:
    """Read MASTER_PORT, or make a port of the job's number: all its nodes find the same, other jobs another one."""

    def read(environment: Environment) -> Fact | None:
        job = re.match("[0-9]+", environment.get(name, ""))
        return Fact(20000 + int(job[0]) % 10000, f"{name}={environment[name]}") if job else None

    return first(_MASTER_PORT, Reader(name, read, (name,)))


def _rendezvous_port(environment: Environment) -> Fact | None:
    found = re.search(":([0-9]+)$", environment.get("PET_RDZV_ENDPOINT", ""))
    return port("PET_RDZV_ENDPOINT")({"PET_RDZV_ENDPOINT": found[1]}) if found else None


def _batch_rank(environment: Environment) -> Fact | None:
    """Count AWS Batch's nodes with the main node first: it need not have index 0, and only its address is known."""
    own, main = (number(f"AWS_BATCH_JOB_{which}_INDEX")(environment) for which in ("NODE", "MAIN_NODE"))
    if own is None or main is None:
        return own
    index, of_main = int(own.value), int(main.value)
    return Fact(0 if index == of_main else index + (index < of_main), own.source)


def _volcano_lists(environment: Environment) -> list[list[str]]:
    """Read the pods of each of Volcano's tasks; the one that begins with the master first."""
    lists = [value.split(",") for name, value in environment.items() if re.fullmatch(r"VC_\w+_HOSTS", name) and value]
    return sorted(lists, key=lambda hosts: hosts[0] != environment.get("MASTER_ADDR"))


def _volcano_names(environment: Environment) -> list[str]:
    """List all pods; nobody if there are tasks beside master and workers, which WORLD_SIZE does not count."""
    lists = _volcano_lists(environment)
    names = [host for hosts in lists for host in hosts]
    return names if len(lists) == 1 or str(len(names)) == environment["WORLD_SIZE"] else []


def _volcano_says_rank(environment: Environment) -> bool:
    """Return whether the pod's rank is known: there is one kind of task, or the plugin pytorch says it."""
    lists = _volcano_lists(environment)
    return len(lists) == 1 or (len(lists) > 1 and {"RANK", "WORLD_SIZE"} <= environment.keys())


def _jobset_names(environment: Environment) -> list[str]:
    """List the pods of a JobSet's first job by the rule for their names; its service has the name of the JobSet."""
    name, job, nodes = (environment[each] for each in ("JOBSET_NAME", "REPLICATED_JOB_NAME", "NNODES"))
    return [f"{name}-{job}-0-{index}.{name}" for index in range(_most_nodes("NNODES", nodes))]


def _one_task_a_node(environment: Environment) -> bool:
    """Return whether this is a task of srun, neither a batch script nor a shell, and each node has one."""
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    return SLURM.recognises(environment) and bool(re.fullmatch(r"1\(x[0-9]+\)", counts))


_PLATFORMS = (
    # The variables of torchrun's options. PyTorchJob sets RANK and WORLD_SIZE too, which count nodes or ranks there; in
    # an elastic job of workers PET_RDZV_ENDPOINT is the only address, and no variable says which node this is.
    _Platform(
        "Kubeflow",
        "PET_NNODES",
        number("PET_NODE_RANK"),
        _ranks_in("PET_NPROC_PER_NODE"),
        master_addr=host_of("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"),
        master_port=first(port("PET_MASTER_PORT"), Reader("PET_RDZV_ENDPOINT", _rendezvous_port)),
    ),
    _Platform(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        number("SKYPILOT_NODE_RANK"),
        _ranks_in("SKYPILOT_NUM_GPUS_PER_NODE"),
        lambda environment: environment.get("SKYPILOT_NODE_IPS", "").split(),
    ),
    _Platform(
        "dstack",
        "DSTACK_NODES_NUM",
        number("DSTACK_NODE_RANK"),
        _ranks_in("DSTACK_GPUS_PER_NODE"),
        lambda environment: environment.get("DSTACK_NODES_IPS", "").split(),
        host_of("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
    ),
    _Platform(
        "AWS Batch",
        "AWS_BATCH_JOB_NUM_NODES",
        Reader("AWS_BATCH_JOB_NODE_INDEX", _batch_rank, ("AWS_BATCH_JOB_NODE_INDEX",)),
        master_addr=host_of("MASTER_ADDR", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),  # not set on the main node
    ),
    _Platform("Volcano", "WORLD_SIZE", number("RANK", "VC_TASK_INDEX"), names=_volcano_names, when=_volcano_says_rank),
    # Kubernetes sets the index. JobSet sets no variable, so its manifest gives the others.
    _Platform(
        "JobSet",
        "NNODES",
        number("JOB_COMPLETION_INDEX"),
        names=_jobset_names,
        when=lambda environment: all(map(environment.get, ("JOBSET_NAME", "REPLICATED_JOB_NAME", "NNODES"))),
    ),
    _Platform(
        "Slurm (srun)",
        "SLURM_STEP_NUM_NODES",
        number("SLURM_NODEID"),
        _ranks_in("SLURM_GPUS_ON_NODE"),
        HostList("SLURM_STEP_NODELIST", expand_node_list).hosts,
        master_port=_port_by_job("SLURM_JOB_ID"),
        when=_one_task_a_node,
    ),
    # The job's script is its first task. PBS sets PBS_NODEFILE for it alone, and the file lies on its host, so tasks of
    # pbsdsh have the list only if the script passes a copy on.
    _Platform(
        "PBS (pbsdsh)",
        "PBS_NUM_NODES",
        number("PBS_NODENUM"),
        names=lines_of("PBS_NODEFILE").hosts,
        master_port=_port_by_job("PBS_JOBID"),
        when=lambda environment: (
            environment.get("PBS_TASKNUM", "1") != "1" and len(lines_of("PBS_NODEFILE").hosts(environment)) > 1
        ),
    ),
)
