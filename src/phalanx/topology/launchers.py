"""Every launcher Phalanx knows: one row each, saying how it is recognised and in which variables it writes each fact.

The rows are tried in their order here, the most specific first, so that the launcher that started this very process is
found and not one around it: a process of ``mpiexec`` in a Slurm allocation belongs to MPI, one of torchrun in either to
torchrun. ``environment.py`` reads a row, checks it, and compares it with the others that are recognised too.

A new launcher is a row here, in its place in ``LAUNCHERS``, and a recording of its variables in
``tests/data/launchers``; the help of ``phalanx env`` follows from the row, and so do the tables in
``docs/launchers.md`` and ``docs/design/launching.md`` (``python -m phalanx.topology.listing`` prints them).

Three variables are not what their names say. Open MPI's ``OMPI_COMM_WORLD_NODE_RANK`` is a local rank that counts the
ranks of all jobs on the node, not the node's index. ``RANK`` on Alibaba's PAI is the node's index, not the rank.
Horovod's ``HOROVOD_CROSS_RANK`` counts only the nodes that have this local rank, so it is the node's index only if all
nodes have the same number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx import settings
from phalanx.topology.by_hand import BY_HAND
from phalanx.topology.launcher import FIELDS, MASTER_ADDR, Kind, Launcher
from phalanx.topology.place import Traits
from phalanx.topology.platforms import (
    AZURE_JOB,
    AZURE_MASTER,
    AZUREML_BY_HAND,
    KUBEFLOW,
    KUBEFLOW_BY_HAND,
    KUBEFLOW_LOCAL,
    PAI,
    SAGEMAKER,
    SAGEMAKER_BY_HAND,
    TPU,
)
from phalanx.topology.readers import (
    Environment,
    Finding,
    Reader,
    first,
    first_host,
    host_slots,
    length_of,
    lines_of,
    node_list,
    number,
    tasks_on_node,
    text,
    this_host_in,
    together,
)

__all__ = ["LAUNCHERS", "MPICH", "MPI_RANKS", "MPI_SIZES", "OPENMPI", "OWN_DEVICES", "SLURM", "STARTERS"]

# -- started by an agent on each node ------------------------------------------------------------------


def _agent_store(environment: Environment) -> bool:
    """Whether the agent's own store is at MASTER_PORT; otherwise rank 0 is to open one there.

    A script under ``phalanx run`` may have set a MASTER_PORT of its own.
    """
    own = environment.get(settings.STORE_PORT, environment.get("MASTER_PORT"))
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and own == environment.get("MASTER_PORT")


_RESTARTS = number("TORCHELASTIC_RESTART_COUNT")

TORCHRUN = Launcher(
    "torchrun",
    "torchrun (torch.distributed.run)",
    Kind.AGENT,
    (Kind.ALLOCATION, Kind.PLATFORM, Kind.HAND),
    all_of=("TORCHELASTIC_RUN_ID",),
    rank=number("RANK"),
    world_size=number("WORLD_SIZE"),
    local_rank=number("LOCAL_RANK"),
    local_world_size=number("LOCAL_WORLD_SIZE"),
    node_rank=number("GROUP_RANK"),
    num_nodes=number("GROUP_WORLD_SIZE"),
    job=text("TORCHELASTIC_RUN_ID"),
    attempt=_RESTARTS,
    always=FIELDS[:6],
    keeps_store=_agent_store,
    traits=Traits(in_blocks=True),
    example="torchrun --nproc-per-node 2 --no-python",
)


def _of_one_run(environment: Environment) -> bool:
    # `phalanx run` sets both to the same id. They differ if another launcher, started from one of its ranks, has
    # replaced one of them; then the inner launcher is the one to believe.
    run_id = environment.get(settings.RUN_ID)
    return bool(run_id) and run_id == environment.get("TORCHELASTIC_RUN_ID")


PHALANX = replace(
    TORCHRUN,
    name="phalanx",
    title="phalanx run",
    all_of=(settings.RUN_ID,),
    when=_of_one_run,
    condition="it equals TORCHELASTIC_RUN_ID",
    attempt=first(number(settings.ATTEMPT), _RESTARTS),
    traits=Traits(),  # by way of mpiexec the ranks of a host need not follow one another
    example="phalanx run -n 2",
)

# -- MPI, and what starts one process for each rank ----------------------------------------------------

# mpiexec does not say where rank 0 is. In an allocation it is on the first node, unless the user reorders the hosts;
# then rank 0 finds that the address is not its own, and says so.
_ALLOCATION = (
    node_list("SLURM_JOB_NODELIST"),
    lines_of("PBS_NODEFILE"),
    host_slots("LSB_MCPU_HOSTS"),
    lines_of("PE_HOSTFILE"),
)
_MPI_MASTER = first(MASTER_ADDR, first_host(*_ALLOCATION))
_MPI_JOB = (together("SLURM_JOB_ID"), together("PBS_JOBID"), together("LSB_JOBID"))
_OF_MPI = Traits(starts_mpi=True)
_OF_HYDRA = Traits(starts_mpi=True, shared_job=True, pass_on="mpiexec -genv MASTER_ADDR h1 -genv MASTER_PORT 29500")
_HYDRA_STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")


def _horovod_node(environment: Environment) -> Finding | None:
    """HOROVOD_CROSS_RANK, if it is the node's index here: on local rank 0, or if all nodes have as many ranks."""
    local, cross = number("HOROVOD_LOCAL_RANK")(environment), number("HOROVOD_CROSS_RANK")(environment)
    return cross if (local is not None and local.value == 0) or _horovod_is_even(environment) else None


def _horovod_nodes(environment: Environment) -> Finding | None:
    local, cross = number("HOROVOD_LOCAL_RANK")(environment), number("HOROVOD_CROSS_SIZE")(environment)
    return cross if (local is not None and local.value == 0) or _horovod_is_even(environment) else None


def _horovod_is_even(environment: Environment) -> bool:
    names = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE")
    found = [number(name)(environment) for name in names]
    size, local, cross = (int(one.value) if one else 0 for one in found)
    # Some uneven placements pass too (1, 2 and 3 ranks); in the joined world the ranks count the nodes themselves.
    return size == local * cross


HOROVOD = Launcher(
    "horovod",
    "horovodrun",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    any_of=("HOROVOD_RANK", "HOROVOD_SIZE"),
    rank=number("HOROVOD_RANK"),
    world_size=number("HOROVOD_SIZE"),
    local_rank=number("HOROVOD_LOCAL_RANK"),
    local_world_size=number("HOROVOD_LOCAL_SIZE"),
    node_rank=Reader("HOROVOD_CROSS_RANK", _horovod_node, ("HOROVOD_CROSS_RANK",)),
    num_nodes=Reader("HOROVOD_CROSS_SIZE", _horovod_nodes, ("HOROVOD_CROSS_SIZE",)),
    master_addr=_MPI_MASTER,
    job=first(together("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), *_MPI_JOB),
    example="horovodrun -np 2",
)

OPENMPI = Launcher(
    "openmpi",
    "mpiexec of Open MPI",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    any_of=(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    rank=number("OMPI_COMM_WORLD_RANK"),
    world_size=number("OMPI_COMM_WORLD_SIZE"),
    local_rank=number("OMPI_COMM_WORLD_LOCAL_RANK"),
    local_world_size=number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    master_addr=_MPI_MASTER,
    job=first(together("PMIX_NAMESPACE"), together("OMPI_MCA_ess_base_jobid"), *_MPI_JOB),
    traits=Traits(starts_mpi=True, pass_on="mpiexec -x MASTER_ADDR=h1 -x MASTER_PORT=29500"),
    starters=("prted", "prterun", "orted", "mpiexec", "mpirun"),
    example="mpiexec -n 2",
)

AZUREML = replace(
    OPENMPI,
    name="azureml",
    title="Azure Machine Learning (MPI)",
    all_of=("AZUREML_EXPERIMENT_ID",),
    master_addr=AZURE_MASTER,
    job=AZURE_JOB,
    traits=Traits(starts_mpi=True, late_names=True),
    example="",
)

LSF = Launcher(
    "lsf",
    "jsrun of LSF",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    any_of=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    rank=number("JSM_NAMESPACE_RANK"),
    world_size=number("JSM_NAMESPACE_SIZE"),
    local_rank=number("JSM_NAMESPACE_LOCAL_RANK"),
    local_world_size=number("JSM_NAMESPACE_LOCAL_SIZE"),
    node_rank=this_host_in(lines_of("LSB_DJOB_RANKFILE", skip=1)),
    # No num_nodes: a step may use fewer nodes than the job has.
    master_addr=first(MASTER_ADDR, first_host(lines_of("LSB_DJOB_RANKFILE", skip=1), host_slots("LSB_MCPU_HOSTS"))),
    job=together("LSB_JOBID", "JSM_NAMESPACE"),
    traits=_OF_MPI,
    example="jsrun -n 2",
)

PALS = Launcher(
    "pals",
    "mpiexec or aprun of Cray PALS",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    all_of=("PALS_APID",),
    rank=number("PMIX_RANK", "PMI_RANK"),
    world_size=number("PMI_SIZE"),
    local_rank=number("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_world_size=number("PMI_LOCAL_SIZE"),
    master_addr=_MPI_MASTER,
    job=together("PALS_APID"),
    traits=_OF_MPI,
    starters=("mpiexec",),
    example="mpiexec -n 2",
    unknown_world="With PMIx, PALS gives the world size only to MPI itself; start with mpiexec --pmi=cray",
)

MVAPICH = Launcher(
    "mvapich",
    "mpiexec or mpirun_rsh of MVAPICH",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    any_of=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    rank=number("MV2_COMM_WORLD_RANK"),
    world_size=number("MV2_COMM_WORLD_SIZE"),
    local_rank=number("MV2_COMM_WORLD_LOCAL_RANK"),
    local_world_size=number("MV2_COMM_WORLD_LOCAL_SIZE"),
    master_addr=_MPI_MASTER,
    job=first(together("MPIRUN_ID", "MPIRUN_HOST"), *_MPI_JOB),
    traits=_OF_MPI,
    starters=("mpispawn", *_HYDRA_STARTERS),
    example="mpiexec -n 2",
)

MPICH = Launcher(
    "mpich",
    "mpiexec of MPICH (Hydra)",
    Kind.MPI,
    (Kind.ALLOCATION, Kind.PLATFORM),
    any_of=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_HOSTNAME"),
    rank=number("PMI_RANK"),
    world_size=number("PMI_SIZE"),
    local_rank=number("MPI_LOCALRANKID"),
    local_world_size=number("MPI_LOCALNRANKS"),
    master_addr=_MPI_MASTER,
    job=first(*_MPI_JOB),
    traits=_OF_HYDRA,
    starters=_HYDRA_STARTERS,
    example="mpiexec -n 2",
)

INTELMPI = replace(
    MPICH,
    name="intelmpi",
    title="mpiexec of Intel MPI",
    all_of=("I_MPI_HYDRA_UUID",),
    any_of=(),
    job=together("I_MPI_HYDRA_UUID"),
    traits=replace(_OF_HYDRA, shared_job=False),
)

# With -pmi-port Hydra gives the world size only over a connection, to MPI itself.
MPICH_BY_PORT = replace(
    MPICH,
    title="mpiexec -pmi-port of MPICH (Hydra)",
    all_of=("PMI_PORT",),
    any_of=("PMI_ID", "MPI_LOCALRANKID"),
    none_of=("PMI_RANK", "PMI_SIZE"),
    rank=number("PMI_ID"),
    world_size=None,
    always=(),
    unknown_world="With -pmi-port mpiexec gives the world size only to MPI itself; start it without -pmi-port",
)

# -- schedulers ----------------------------------------------------------------------------------------

# Steps whose processes are not ranks: a shell (interactive, batch), or Slurm's own process on each node (extern).
_NO_RANKS = {"4294967290", "4294967291", "4294967292", "interactive", "batch", "extern"}

SLURM = Launcher(
    "slurm",
    "srun of Slurm",
    Kind.ALLOCATION,
    (Kind.PLATFORM,),
    any_of=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    when=lambda environment: environment.get("SLURM_STEP_ID") not in _NO_RANKS,
    condition="the step is not a batch script or a shell",
    rank=number("SLURM_PROCID"),
    world_size=number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=number("SLURM_LOCALID"),
    local_world_size=tasks_on_node("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    node_rank=number("SLURM_NODEID"),
    num_nodes=first(number("SLURM_STEP_NUM_NODES"), length_of(node_list("SLURM_STEP_NODELIST"))),
    master_addr=first(MASTER_ADDR, first_host(node_list("SLURM_STEP_NODELIST"), node_list("SLURM_JOB_NODELIST"))),
    job=together("SLURM_JOB_ID", "SLURM_STEP_ID"),
    hosts=node_list("SLURM_STEP_NODELIST"),
    exact_hosts=True,
    starters=("slurmstepd",),
    own_devices=("SLURM_GPUS_PER_TASK",),
    example="srun -n 2",
)


def _pmi_of_slurm(environment: Environment) -> bool:
    """Whether PMI_RANK is srun's (`--mpi=pmi2`): a Hydra that runs in the allocation sets more variables, or others."""
    if "MPI_LOCALRANKID" in environment or "PMI_HOSTNAME" in environment:
        return False
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    return environment["PMI_RANK"] == environment["SLURM_PROCID"] and environment.get("PMI_SIZE") == tasks


SLURM_WITH_PMI = replace(
    SLURM,
    all_of=("SLURM_STEP_ID", "SLURM_PROCID", "PMI_RANK"),
    any_of=(),
    when=_pmi_of_slurm,
    condition="PMI_RANK and PMI_SIZE say the same",
)


def _all_on_one_node(environment: Environment) -> Finding | None:
    nodes, tasks = number("FLUX_JOB_NNODES")(environment), number("FLUX_JOB_SIZE")(environment)
    alone = nodes is not None and nodes.value == 1
    return Finding(tasks.value, f"{tasks.source} on {nodes.source}") if alone and nodes and tasks else None


def _task_of_flux(environment: Environment) -> bool:
    """Whether PMI_RANK, which Flux sets too, is the task's; a Hydra that was started as a task sets another."""
    rank = environment.get("FLUX_TASK_RANK", "")
    return environment.get("PMI_RANK", rank) == rank


# Flux may itself be started by an MPI launcher, whose variables its jobs inherit. An MPI launcher that is started as a
# task of Flux sets variables of its own (none_of); the ranks are then that launcher's.
FLUX = Launcher(
    "flux",
    "flux run",
    Kind.ALLOCATION,
    (Kind.MPI, Kind.ALLOCATION, Kind.PLATFORM),
    any_of=("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    none_of=("MPI_LOCALRANKID", "PMI_HOSTNAME", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    when=_task_of_flux,
    condition="PMI_RANK, if it is set, says the same",
    rank=number("FLUX_TASK_RANK"),
    world_size=number("FLUX_JOB_SIZE"),
    local_rank=number("FLUX_TASK_LOCAL_ID"),
    local_world_size=Reader("FLUX_JOB_NNODES", _all_on_one_node, ("FLUX_JOB_NNODES", "FLUX_JOB_SIZE")),
    num_nodes=number("FLUX_JOB_NNODES"),
    # A job's id is its own only within its instance of Flux, and instances nest; the path names all of them.
    job=first(together("FLUX_JOB_ID_PATH"), together("FLUX_JOB_ID", "FLUX_KVS_NAMESPACE")),
    traits=Traits(starts_mpi=True, pass_on="flux run --env=MASTER_ADDR=h1 --env=MASTER_PORT=29500"),
    starters=("flux-shell",),
    example="flux run -n 2",
)

LAUNCHERS = (
    PHALANX,
    TORCHRUN,
    HOROVOD,
    AZUREML,
    FLUX,
    LSF,
    PALS,
    MVAPICH,
    SLURM_WITH_PMI,
    INTELMPI,
    OPENMPI,
    MPICH_BY_PORT,
    MPICH,
    SLURM,
    KUBEFLOW_LOCAL,
    KUBEFLOW,
    PAI,
    KUBEFLOW_BY_HAND,
    AZUREML_BY_HAND,
    SAGEMAKER_BY_HAND,
    SAGEMAKER,
    TPU,
    BY_HAND,
)

# The variables by which an MPI launcher gives a process its rank, and those that give it the world size.
MPI_RANKS = frozenset(name for row in LAUNCHERS if row.traits.starts_mpi for name in row.variables("rank"))
MPI_SIZES = frozenset(name for row in LAUNCHERS if row.traits.starts_mpi for name in row.variables("world_size"))
STARTERS = frozenset(name for row in LAUNCHERS for name in row.starters)
OWN_DEVICES = frozenset(name for row in LAUNCHERS for name in row.own_devices)
