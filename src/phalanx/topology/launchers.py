"""Every launcher Phalanx knows: one row each, saying how it is recognised and in which variables it writes each fact.

The rows are tried in the order of ``LAUNCHERS``, the most specific first, so that the launcher that started this very
process is found and not one around it: a process of ``mpiexec`` in a Slurm allocation belongs to MPI, and one of
torchrun in either to torchrun. A new launcher is a row here and a recording of its variables in
``tests/data/launchers``. Help texts follow from the rows, and so does the table of ``docs/launchers.md``, which
``python -m phalanx.topology.launchers`` prints.

Two variables are not what their names say. Open MPI's ``OMPI_COMM_WORLD_NODE_RANK`` is a local rank that counts the
ranks of all jobs on the node, not the node's index. ``RANK`` on Alibaba's PAI is the node's index, not the rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from phalanx import settings
from phalanx.topology.place import Traits
from phalanx.topology.readers import (
    Environment,
    Fact,
    HostList,
    Reader,
    comma_names,
    constant,
    expand_node_list,
    first,
    first_host,
    host_of,
    index_of,
    json_names,
    length_of,
    lines_of,
    number,
    number_unless,
    port,
    slot_names,
    tasks_on_node,
    text,
    together,
)

# -- columns -------------------------------------------------------------------------------------------


class Kind(Enum):
    """The kinds of launchers, by what they start."""

    AGENT = auto()  # an agent on each node, which starts the ranks there
    MPI = auto()  # one process for each rank of an MPI job
    ALLOCATION = auto()  # one process for each task, on hosts that a scheduler has allotted
    PLATFORM = auto()  # one process on each machine that a cloud has rented out
    HAND = auto()  # whatever a user's own script starts


# Launchers nest: torchrun inside srun inherits Slurm's variables. Variables of these kinds may come from a launcher
# around this one; they may disagree and are ignored. Variables of any other kind must agree, or it is an error.
_AROUND = {
    Kind.AGENT: (Kind.ALLOCATION, Kind.PLATFORM, Kind.HAND),
    Kind.MPI: (Kind.ALLOCATION, Kind.PLATFORM),
    Kind.ALLOCATION: (Kind.PLATFORM,),
    Kind.PLATFORM: (Kind.PLATFORM, Kind.ALLOCATION),
    Kind.HAND: (Kind.PLATFORM, Kind.HAND, Kind.ALLOCATION),
}
_NO_TRAITS = Traits()
_MASTER_ADDR = host_of("MASTER_ADDR")
# Facts that are read alike under every launcher whose row does not say otherwise.
_COMMON = {"master_addr": _MASTER_ADDR, "master_port": port("MASTER_PORT"), "attempt": number("SLURM_RESTART_COUNT")}


@dataclass(frozen=True, eq=False)
class Launcher:
    """One row of the table. Everything in which launchers differ is a column here; no other code asks for their names.

    Attributes:
        name: the value of ``world.launcher``.
        title: the launcher, for people.
        kind: which kind of launcher it is.
        readers: how each fact that it gives is read, by the names of the attributes of ``Place``.
        all_of, none_of: variables that must all be set, or must not be set.
        any_of: variables of which one is enough, so that a launcher whose variables are set only in part is recognised
            and an error can name those that are missing; empty if none is needed.
        when: a further condition on the environment.
        also_around: kinds that may be around this launcher, beside those that may be around its kind.
        hosts: the list of exactly the hosts of this world, by node rank.
        unknown_world: the user's remedy where the variables do not give the world size; empty where they do.
        note: a note for the user, given the environment; empty for none.
        one_process_per_node: whether it starts one process on each node, which must start the node's other ranks.
        rank_counts_nodes: whether its RANK and WORLD_SIZE may count nodes, so that they are not compared with ranks.
        traits: its differences from other launchers that matter when its ranks meet.
        example: how a command is started by it, for help texts; empty where it is not started from a shell.
    """

    name: str
    title: str
    kind: Kind
    readers: Mapping[str, Reader]
    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    when: Callable[[Environment], bool] = lambda _: True
    also_around: tuple[Kind, ...] = ()
    hosts: HostList | None = None
    unknown_world: str = ""
    note: Callable[[Environment], str] = lambda _: ""
    one_process_per_node: bool = False
    rank_counts_nodes: bool = False
    traits: Traits = _NO_TRAITS
    example: str = ""

    @property
    def around(self) -> tuple[Kind, ...]:
        """The kinds of launchers that may be around this one."""
        return (*_AROUND[self.kind], *self.also_around)

    def recognises(self, environment: Environment) -> bool:
        """Return whether ``environment`` has what only this launcher sets."""
        return (
            all(name in environment for name in self.all_of)
            and (not self.any_of or any(name in environment for name in self.any_of))
            and not any(name in environment for name in self.none_of)
            and self.when(environment)
        )

    def signs(self, environment: Environment) -> str:
        """Return the variables that it is recognised by, for people."""
        return ", ".join(name for name in (*self.all_of, *self.any_of) if name in environment)

    def read(self, environment: Environment) -> dict[str, Fact]:
        """Read the facts that it gives."""
        given = {fact: reader(environment) for fact, reader in {**_COMMON, **self.readers}.items()}
        return {fact: found for fact, found in given.items() if found is not None}


def _numbers(**variables: str) -> dict[str, Reader]:
    """Make readers of facts that are numbers, each from the first of some variables that is set."""
    return {fact: number(*names.split()) for fact, names in variables.items()}


def _prefixed(prefix: str) -> dict[str, Reader]:
    names = {"rank": "RANK", "world_size": "SIZE", "local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_SIZE"}
    return {fact: number(prefix + name) for fact, name in names.items()}


def _variables(readers: Iterable[Reader]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for reader in readers for name in reader.variables))


# -- started by an agent on each node ------------------------------------------------------------------

_PLAIN = _numbers(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE")
_RESTARTS = number("TORCHELASTIC_RESTART_COUNT")
TORCHRUN = Launcher(
    "torchrun",
    "torchrun (torch.distributed.run)",
    Kind.AGENT,
    _PLAIN
    | _numbers(node_rank="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE")
    | {"job": text("TORCHELASTIC_RUN_ID"), "attempt": _RESTARTS},
    all_of=("TORCHELASTIC_RUN_ID",),
    example="torchrun --nproc-per-node 2 --no-python",
)
PHALANX = replace(
    TORCHRUN,
    name="phalanx",
    title="phalanx run",
    readers={**TORCHRUN.readers, "attempt": first(number(settings.ATTEMPT), _RESTARTS)},
    all_of=(settings.RUN_ID,),
    # `phalanx run` sets both to the same id. They differ if another launcher, started from one of its ranks, has
    # replaced one of them; then the inner launcher is the one to believe.
    when=lambda environment: (
        bool(run_id := environment[settings.RUN_ID]) and run_id == environment.get("TORCHELASTIC_RUN_ID")
    ),
    example="phalanx run -n 2",
)

# -- MPI, and what starts one process for each rank ----------------------------------------------------

# mpiexec does not say where rank 0 is. In an allocation it is on the first node, unless the user reorders the hosts;
# then rank 0 finds that the address is not its own, and says so.
_ALLOTTED = first_host(
    HostList("SLURM_JOB_NODELIST", expand_node_list),
    lines_of("PBS_NODEFILE"),
    HostList("LSB_MCPU_HOSTS", slot_names),
    lines_of("PE_HOSTFILE"),
)
_OF_ALLOCATION = {
    "master_addr": first(_MASTER_ADDR, _ALLOTTED),
    "job": first(together("SLURM_JOB_ID"), together("PBS_JOBID"), together("LSB_JOBID")),
}


def _mpi_job(*own: Reader) -> dict[str, Reader]:
    return {**_OF_ALLOCATION, "job": first(*own, _OF_ALLOCATION["job"])}


HOROVOD = Launcher(
    "horovod",
    "horovodrun",
    Kind.MPI,
    # HOROVOD_CROSS_RANK counts only the nodes that have this local rank, so it is not the node's index.
    _prefixed("HOROVOD_") | _mpi_job(together("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")),
    any_of=("HOROVOD_RANK", "HOROVOD_SIZE"),
    example="horovodrun -np 2",
)

_OPENMPI = _prefixed("OMPI_COMM_WORLD_")
OPENMPI = Launcher(
    "openmpi",
    "mpiexec of Open MPI",
    Kind.MPI,
    _OPENMPI | _mpi_job(together("PMIX_NAMESPACE"), together("OMPI_MCA_ess_base_jobid")),
    any_of=_variables(_OPENMPI.values()),
    traits=Traits(starts_mpi=True, pass_on="mpiexec -x MASTER_ADDR=h1 -x MASTER_PORT=29500"),
    example="mpiexec -n 2",
)

_AZURE = {
    "master_addr": host_of("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    "job": first(together("AZUREML_RUN_ID"), text("AZUREML_EXPERIMENT_ID")),
}
AZUREML = replace(
    OPENMPI,
    name="azureml",
    title="Azure Machine Learning (MPI)",
    readers=_OPENMPI | _AZURE,
    all_of=("AZUREML_EXPERIMENT_ID",),
    traits=Traits(starts_mpi=True, late_names=True),
    example="",
)

LSF = Launcher(
    "lsf",
    "jsrun of LSF",
    Kind.MPI,
    # No num_nodes: a step may use fewer nodes than the job has.
    _prefixed("JSM_NAMESPACE_")
    | {
        "master_addr": first(
            _MASTER_ADDR, first_host(lines_of("LSB_DJOB_RANKFILE", skip=1), HostList("LSB_MCPU_HOSTS", slot_names))
        ),
        "job": together("LSB_JOBID", "JSM_NAMESPACE"),
    },
    any_of=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    traits=Traits(starts_mpi=True),
    example="jsrun -n 2",
)

PALS = Launcher(
    "pals",
    "mpiexec or aprun of Cray PALS",
    Kind.MPI,
    _numbers(rank="PMIX_RANK PMI_RANK", world_size="PMI_SIZE")
    | _numbers(local_rank="PALS_LOCAL_RANKID PMI_LOCAL_RANK", local_world_size="PMI_LOCAL_SIZE")
    | _OF_ALLOCATION
    | {"job": together("PALS_APID")},
    all_of=("PALS_APID",),
    traits=Traits(starts_mpi=True),
    example="mpiexec -n 2",
    unknown_world="With PMIx, PALS gives the world size only to MPI itself; start with mpiexec --pmi=cray",
)

_MVAPICH = _prefixed("MV2_COMM_WORLD_")
MVAPICH = Launcher(
    "mvapich",
    "mpiexec or mpirun_rsh of MVAPICH",
    Kind.MPI,
    _MVAPICH | _mpi_job(together("MPIRUN_ID", "MPIRUN_HOST")),
    any_of=_variables(_MVAPICH.values()),
    traits=Traits(starts_mpi=True),
    example="mpiexec -n 2",
)

_HYDRA_LOCAL = _numbers(local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS")
_MPICH = _numbers(rank="PMI_RANK", world_size="PMI_SIZE") | _HYDRA_LOCAL
MPICH = Launcher(
    "mpich",
    "mpiexec of MPICH (Hydra)",
    Kind.MPI,
    _MPICH | _OF_ALLOCATION,
    any_of=(*_variables(_MPICH.values()), "PMI_HOSTNAME"),
    traits=Traits(starts_mpi=True, shared_job=True, pass_on="mpiexec -genv MASTER_ADDR h1 -genv MASTER_PORT 29500"),
    example="mpiexec -n 2",
)
INTELMPI = replace(
    MPICH,
    name="intelmpi",
    title="mpiexec of Intel MPI",
    readers={**MPICH.readers, "job": together("I_MPI_HYDRA_UUID")},
    all_of=("I_MPI_HYDRA_UUID",),
    any_of=(),
    traits=replace(MPICH.traits, shared_job=False),
)
# With -pmi-port Hydra gives the world size only over a connection, to MPI itself.
MPICH_BY_PORT = replace(
    MPICH,
    title="mpiexec -pmi-port of MPICH (Hydra)",
    readers=_numbers(rank="PMI_ID") | _HYDRA_LOCAL | _OF_ALLOCATION,
    all_of=("PMI_PORT",),
    any_of=("PMI_ID", "MPI_LOCALRANKID"),
    none_of=("PMI_RANK", "PMI_SIZE"),
    unknown_world="With -pmi-port mpiexec gives the world size only to MPI itself; start it without -pmi-port",
)

# -- schedulers ----------------------------------------------------------------------------------------

# Steps whose processes are not ranks: a shell (interactive, batch), or Slurm's own process on each node (extern).
_NO_RANKS = {"4294967290", "4294967291", "4294967292", "interactive", "batch", "extern"}
_STEP_NODES = HostList("SLURM_STEP_NODELIST", expand_node_list)

SLURM = Launcher(
    "slurm",
    "srun of Slurm",
    Kind.ALLOCATION,
    _numbers(rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS SLURM_NTASKS")
    | _numbers(local_rank="SLURM_LOCALID", node_rank="SLURM_NODEID")
    | {
        "local_world_size": tasks_on_node("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
        "num_nodes": first(number("SLURM_STEP_NUM_NODES"), length_of(_STEP_NODES)),
        "master_addr": first(_MASTER_ADDR, first_host(_STEP_NODES, HostList("SLURM_JOB_NODELIST", expand_node_list))),
        "job": together("SLURM_JOB_ID", "SLURM_STEP_ID"),
    },
    any_of=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    when=lambda environment: environment.get("SLURM_STEP_ID") not in _NO_RANKS,
    hosts=_STEP_NODES,
    example="srun -n 2",
)


def _pmi_of_slurm(environment: Environment) -> bool:
    """Return whether PMI_RANK is srun's (`--mpi=pmi2`): a Hydra inside sets more variables, or others."""
    if "MPI_LOCALRANKID" in environment or "PMI_HOSTNAME" in environment:
        return False
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    return environment["PMI_RANK"] == environment["SLURM_PROCID"] and environment.get("PMI_SIZE") == tasks


SLURM_WITH_PMI = replace(SLURM, all_of=("SLURM_STEP_ID", "SLURM_PROCID", "PMI_RANK"), any_of=(), when=_pmi_of_slurm)


def _all_on_one_node(environment: Environment) -> Fact | None:
    return number("FLUX_JOB_SIZE")(environment) if environment.get("FLUX_JOB_NNODES") == "1" else None


# Flux may itself be started by an MPI launcher, whose variables its jobs inherit. An MPI launcher that is started as a
# task of Flux sets variables of its own (none_of), or another PMI_RANK; the ranks are then that launcher's.
FLUX = Launcher(
    "flux",
    "flux run",
    Kind.ALLOCATION,
    _numbers(rank="FLUX_TASK_RANK", world_size="FLUX_JOB_SIZE")
    | _numbers(local_rank="FLUX_TASK_LOCAL_ID", num_nodes="FLUX_JOB_NNODES")
    | {
        "local_world_size": Reader("FLUX_JOB_NNODES", _all_on_one_node),
        # A job's id is its own only within its instance of Flux, and instances nest; the path names all of them.
        "job": first(together("FLUX_JOB_ID_PATH"), together("FLUX_JOB_ID", "FLUX_KVS_NAMESPACE")),
    },
    any_of=("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    none_of=("MPI_LOCALRANKID", "PMI_HOSTNAME", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    when=lambda environment: environment.get("PMI_RANK", rank := environment.get("FLUX_TASK_RANK", "")) == rank,
    also_around=(Kind.MPI, Kind.ALLOCATION),
    traits=Traits(starts_mpi=True, pass_on="flux run --env=MASTER_ADDR=h1 --env=MASTER_PORT=29500"),
    example="flux run -n 2",
)

# -- RANK and WORLD_SIZE themselves, and platforms, which start one process on each node ----------------

BY_HAND = Launcher(
    "env",
    "RANK and WORLD_SIZE, set by hand or by another launcher",
    Kind.HAND,
    _PLAIN | _numbers(node_rank="GROUP_RANK NODE_RANK", num_nodes="GROUP_WORLD_SIZE NNODES"),
    any_of=("RANK", "WORLD_SIZE"),
)
_LATE = Traits(late_names=True)
_ALONE = {
    "local_rank": constant(0, "one process on each node"),
    "local_world_size": constant(1, "one process on each node"),
}


def _more_wanted(name: str, remedy: str) -> Callable[[Environment], str]:
    """Make a note for the user if variable ``name`` wants more processes on each node than the one that was started."""

    def note(environment: Environment) -> str:
        value = environment.get(name, "")
        if not value.isdigit() or int(value) < 2 or "LOCAL_RANK" in environment:
            return ""
        return f"{name}={value}, but this is the only process on its node; start {value} on each with {remedy}"

    return note


# These two need not be numbers: an elastic job has a range of nodes, and torchrun can count a node's processors.
_PET_NODES = number_unless("PET_NNODES", r"\d+:\d+")
_PET_RANKS = number_unless("PET_NPROC_PER_NODE", "auto|cpu|gpu|xpu")


def _ranks_of_pods(environment: Environment) -> Fact | None:
    """Multiply pods by processes per pod. A pod by itself starts one process; torchrun in it would start the others."""
    nodes, each = _PET_NODES(environment), _PET_RANKS(environment)
    if "PET_NPROC_PER_NODE" not in environment:
        return None  # Kubeflow always sets it, so without it the environment was passed on only in part
    if nodes is None or each is None or each.value == 1:
        return nodes
    return Fact(int(nodes.value) * int(each.value), f"{nodes.source} times {each.source}")


def _in_pod(name: str, of_the_pod: Reader) -> Reader:
    """Read ``name`` if RANK, WORLD_SIZE or LOCAL_RANK is set, and ``of_the_pod`` if none of them is.

    So RANK alone, or WORLD_SIZE alone, is an error, and is not completed from the pod's variables.
    """

    def read(environment: Environment) -> Fact | None:
        by_hand = any(variable in environment for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return number(name)(environment) if by_hand else of_the_pod(environment)

    return Reader(name, read)


KUBEFLOW = Launcher(
    "kubeflow",
    "PyTorchJob of Kubeflow",
    Kind.PLATFORM,
    {
        "rank": _in_pod("RANK", number("PET_NODE_RANK")),
        "world_size": _in_pod("WORLD_SIZE", Reader("PET_NNODES", _ranks_of_pods)),
        "node_rank": number("PET_NODE_RANK"),
        "num_nodes": _PET_NODES,
        "master_addr": host_of("PET_MASTER_ADDR", "MASTER_ADDR"),
        "master_port": first(port("PET_MASTER_PORT"), _COMMON["master_port"]),
        **_ALONE,
    },
    all_of=("KUBERNETES_SERVICE_HOST",),
    any_of=("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    note=_more_wanted("PET_NPROC_PER_NODE", "torchrun, which reads PET_NPROC_PER_NODE by itself"),
    one_process_per_node=True,
    rank_counts_nodes=True,
    traits=_LATE,
)
# One of several processes that a program in the pod has started: then RANK is no longer the pod's number.
KUBEFLOW_LOCAL = replace(
    KUBEFLOW,
    readers={
        **KUBEFLOW.readers,
        **_numbers(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK"),
        "local_world_size": first(number("LOCAL_WORLD_SIZE"), _PET_RANKS),
    },
    all_of=("KUBERNETES_SERVICE_HOST", "RANK"),
    when=lambda environment: (
        "LOCAL_RANK" in environment or environment["RANK"] != environment.get("PET_NODE_RANK", environment["RANK"])
    ),
    one_process_per_node=False,
)
KUBEFLOW_BY_HAND = replace(
    BY_HAND,
    name="kubeflow",
    title="PyTorchJob of Kubeflow",
    all_of=("KUBERNETES_SERVICE_HOST",),
    rank_counts_nodes=True,
    traits=_LATE,
)

PAI = Launcher(
    "pai",
    "Alibaba PAI",
    Kind.PLATFORM,
    _numbers(rank="RANK", world_size="WORLD_SIZE", node_rank="RANK", num_nodes="WORLD_SIZE") | _ALONE,
    all_of=("RANK", "WORLD_SIZE", "NPROC_PER_NODE"),
    none_of=("LOCAL_RANK",),
    note=_more_wanted(
        "NPROC_PER_NODE",
        "torchrun --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node $NPROC_PER_NODE "
        "--master-addr $MASTER_ADDR --master-port $MASTER_PORT",
    ),
    one_process_per_node=True,
    rank_counts_nodes=True,
    traits=_LATE,
)

AZUREML_BY_HAND = replace(
    BY_HAND,
    name="azureml",
    title="Azure Machine Learning",
    readers={**BY_HAND.readers, **_AZURE, "node_rank": number("NODE_RANK")},
    all_of=("AZUREML_EXPERIMENT_ID",),
    traits=_LATE,
)

_SM_HOSTS = HostList("SM_HOSTS", json_names)
_SAGEMAKER = {
    "node_rank": index_of("SM_CURRENT_HOST", _SM_HOSTS),
    "num_nodes": length_of(_SM_HOSTS),
    "master_addr": first(_MASTER_ADDR, first_host(_SM_HOSTS)),
    "job": together("SM_HOSTS", "TRAINING_JOB_NAME"),
}
SAGEMAKER = Launcher(
    "sagemaker",
    "Amazon SageMaker",
    Kind.PLATFORM,
    {**_SAGEMAKER, **_ALONE, "rank": _SAGEMAKER["node_rank"], "world_size": _SAGEMAKER["num_nodes"]},
    any_of=("SM_TRAINING_ENV", "SM_HOSTS", "SM_CURRENT_HOST"),
    none_of=("RANK", "WORLD_SIZE"),
    hosts=_SM_HOSTS,
    note=_more_wanted("SM_NUM_GPUS", "distribution={'torch_distributed': {'enabled': True}} of the estimator"),
    one_process_per_node=True,
    traits=_LATE,
)
SAGEMAKER_BY_HAND = replace(
    BY_HAND,
    name="sagemaker",
    title="Amazon SageMaker",
    readers={**BY_HAND.readers, **_SAGEMAKER},
    all_of=("SM_TRAINING_ENV",),
    traits=_LATE,
)

_TPU_HOSTS = (HostList("TPU_PROCESS_ADDRESSES", comma_names), HostList("TPU_WORKER_HOSTNAMES", comma_names))
TPU = Launcher(
    "tpu",
    "Cloud TPU",
    Kind.PLATFORM,
    {
        **_numbers(rank="TPU_WORKER_ID", node_rank="TPU_WORKER_ID"),
        **_ALONE,
        "world_size": length_of(*_TPU_HOSTS),
        "num_nodes": length_of(*_TPU_HOSTS),
        "master_addr": first(_MASTER_ADDR, first_host(*_TPU_HOSTS)),
        "job": first(*(text(one.name) for one in _TPU_HOSTS)),
    },
    any_of=("TPU_WORKER_ID", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"),
    # A list of one host without TPU_WORKER_ID means a machine with a TPU on which no launcher has started anything.
    when=lambda environment: (
        "TPU_WORKER_ID" in environment or any(len(one.hosts(environment)) > 1 for one in _TPU_HOSTS)
    ),
    one_process_per_node=True,
    traits=_LATE,
)

# -- the table -----------------------------------------------------------------------------------------

LAUNCHERS = (
    *(PHALANX, TORCHRUN),
    *(HOROVOD, AZUREML, FLUX, LSF, PALS, MVAPICH, SLURM_WITH_PMI, INTELMPI, OPENMPI, MPICH_BY_PORT, MPICH, SLURM),
    *(KUBEFLOW_LOCAL, KUBEFLOW, PAI, KUBEFLOW_BY_HAND, AZUREML_BY_HAND, SAGEMAKER_BY_HAND, SAGEMAKER, TPU, BY_HAND),
)

# The variables by which an MPI launcher gives a process its rank, and those that give it the world size.
MPI_RANKS, MPI_SIZES = (
    frozenset(_variables(row.readers[fact] for row in LAUNCHERS if row.traits.starts_mpi and fact in row.readers))
    for fact in ("rank", "world_size")
)
# The processes with which launchers start the ranks of one host.
STARTERS = {"flux-shell", "slurmstepd", "mpiexec", "mpirun", "mpispawn", "hydra_pmi_proxy", "pmi_proxy"}
STARTERS |= {"orted", "prted", "prterun"}  # of Open MPI
# If one of these is set, each rank sees only its own devices, numbered from 0.
OWN_DEVICES = ("SLURM_GPUS_PER_TASK",)


def launcher_names() -> list[str]:
    """List every value of ``world.launcher``, in the order in which launchers are tried; ``none`` comes last."""
    return [*dict.fromkeys(row.name for row in LAUNCHERS), "none"]


def commands_started(command: str) -> list[str]:
    """Return the command lines by which launchers start ``command``, each once."""
    return list(dict.fromkeys(f"{row.example} {command}" for row in LAUNCHERS if row.example))


def launcher_table() -> str:
    """Format a table of all launchers in Markdown, for users: one line for each name."""
    lines = [("`world.launcher`", "started by", "rank; world size"), ("---",) * 3]
    for name in launcher_names()[:-1]:
        rows = [row for row in LAUNCHERS if row.name == name and "world_size" in row.readers]
        titles = dict.fromkeys(row.title for row in rows)
        variables = dict.fromkeys(f"{row.readers['rank'].names}; {row.readers['world_size'].names}" for row in rows)
        lines.append((f"`{name}`", " **or** ".join(titles), " **or** ".join(variables)))
    lines.append(("`none`", "`python train.py`", "a world of one"))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(launcher_table())
