"""Every launcher Phalanx knows: one row each, saying how it is recognised and where it writes what.

The rows stand in the order in which they are tried, the most specific first, so that the launcher that started this
very process is found and not one around it: ``mpiexec`` in a Slurm allocation is MPI's, torchrun in either is
torchrun's. ``environment.py`` reads a row, checks it, and compares it with the others that are recognised too.

Three variables look like a node's index and are none: Open MPI's ``OMPI_COMM_WORLD_NODE_RANK`` (the local rank over
all its jobs), ``RANK`` on Alibaba's PAI (which is the node's), and Horovod's ``HOROVOD_CROSS_RANK`` where hosts have
different numbers of ranks (it counts only those that have this local rank).
"""

from __future__ import annotations

from dataclasses import replace

from phalanx import settings
from phalanx.place.by_hand import BY_HAND
from phalanx.place.launcher import FIELDS, MASTER_ADDR, Launcher
from phalanx.place.platforms import (
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
from phalanx.place.readers import (
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

__all__ = ["FIELDS", "LAUNCHERS", "Launcher"]

# -- started by an agent on each node ------------------------------------------------------------------

TORCHRUN = Launcher(
    "torchrun",
    "torchrun (torch.distributed.run)",
    "agent",
    all_of=("TORCHELASTIC_RUN_ID",),
    rank=number("RANK"),
    world_size=number("WORLD_SIZE"),
    local_rank=number("LOCAL_RANK"),
    local_world_size=number("LOCAL_WORLD_SIZE"),
    node_rank=number("GROUP_RANK"),
    num_nodes=number("GROUP_WORLD_SIZE"),
    job=text("TORCHELASTIC_RUN_ID"),
    attempt=number("TORCHELASTIC_RESTART_COUNT"),
    always=FIELDS[:6],
)


def _of_one_run(environment: Environment) -> bool:
    # `phalanx run` sets both to the same id. They differ when another launcher was started from one of its ranks and
    # handed on the outer variable; then the inner launcher is the one to believe.
    run_id = environment.get(settings.RUN_ID)
    return bool(run_id) and run_id == environment.get("TORCHELASTIC_RUN_ID")


PHALANX = replace(TORCHRUN, name="phalanx", title="phalanx run", all_of=(settings.RUN_ID,), when=_of_one_run)

# -- MPI, and what starts one process for each rank ----------------------------------------------------

# An mpiexec says nowhere where rank 0 is. In an allocation it is on the first node, unless the user orders otherwise,
# which rank 0 then says.
_ALLOCATION = (
    node_list("SLURM_JOB_NODELIST"),
    lines_of("PBS_NODEFILE"),
    host_slots("LSB_MCPU_HOSTS"),
    lines_of("PE_HOSTFILE"),
)
_MPI_MASTER = first(MASTER_ADDR, first_host(*_ALLOCATION))
_MPI_JOB = (together("SLURM_JOB_ID"), together("PBS_JOBID"), together("LSB_JOBID"))


def _horovod_node(environment: Environment) -> Finding | None:
    """HOROVOD_CROSS_RANK, where it is the node's index."""
    local, cross = number("HOROVOD_LOCAL_RANK")(environment), number("HOROVOD_CROSS_RANK")(environment)
    return cross if (local is not None and local.value == 0) or _horovod_is_even(environment) else None


def _horovod_nodes(environment: Environment) -> Finding | None:
    local, cross = number("HOROVOD_LOCAL_RANK")(environment), number("HOROVOD_CROSS_SIZE")(environment)
    return cross if (local is not None and local.value == 0) or _horovod_is_even(environment) else None


def _horovod_is_even(environment: Environment) -> bool:
    names = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE")
    found = [number(name)(environment) for name in names]
    size, local, cross = (int(one.value) if one else 0 for one in found)
    # Some uneven placements pass too (1, 2 and 3 ranks); the joined world does not go by this.
    return size == local * cross


HOROVOD = Launcher(
    "horovod",
    "horovodrun",
    "mpi",
    any_of=("HOROVOD_RANK", "HOROVOD_SIZE"),
    rank=number("HOROVOD_RANK"),
    world_size=number("HOROVOD_SIZE"),
    local_rank=number("HOROVOD_LOCAL_RANK"),
    local_world_size=number("HOROVOD_LOCAL_SIZE"),
    node_rank=Reader("HOROVOD_CROSS_RANK", _horovod_node),
    num_nodes=Reader("HOROVOD_CROSS_SIZE", _horovod_nodes),
    master_addr=_MPI_MASTER,
    job=first(together("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), *_MPI_JOB),
)

OPENMPI = Launcher(
    "openmpi",
    "mpiexec of Open MPI",
    "mpi",
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
)

AZUREML = replace(
    OPENMPI,
    name="azureml",
    title="Azure Machine Learning (MPI)",
    all_of=("AZUREML_EXPERIMENT_ID",),
    master_addr=AZURE_MASTER,
    job=AZURE_JOB,
)

LSF = Launcher(
    "lsf",
    "jsrun of LSF",
    "mpi",
    any_of=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    rank=number("JSM_NAMESPACE_RANK"),
    world_size=number("JSM_NAMESPACE_SIZE"),
    local_rank=number("JSM_NAMESPACE_LOCAL_RANK"),
    local_world_size=number("JSM_NAMESPACE_LOCAL_SIZE"),
    node_rank=this_host_in(lines_of("LSB_DJOB_RANKFILE", skip=1)),
    # No num_nodes: a step may use fewer nodes than the job has.
    master_addr=first(MASTER_ADDR, first_host(lines_of("LSB_DJOB_RANKFILE", skip=1), host_slots("LSB_MCPU_HOSTS"))),
    job=together("LSB_JOBID", "JSM_NAMESPACE"),
)

PALS = Launcher(
    "pals",
    "mpiexec or aprun of Cray PALS",
    "mpi",
    all_of=("PALS_APID",),
    rank=number("PMIX_RANK", "PMI_RANK"),
    world_size=number("PMI_SIZE"),
    local_rank=number("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_world_size=number("PMI_LOCAL_SIZE"),
    master_addr=_MPI_MASTER,
    job=together("PALS_APID"),
    unknown_world="With PMIx, PALS tells the world size only to MPI itself; start with mpiexec --pmi=cray",
)

MVAPICH = Launcher(
    "mvapich",
    "mpiexec or mpirun_rsh of MVAPICH",
    "mpi",
    any_of=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    rank=number("MV2_COMM_WORLD_RANK"),
    world_size=number("MV2_COMM_WORLD_SIZE"),
    local_rank=number("MV2_COMM_WORLD_LOCAL_RANK"),
    local_world_size=number("MV2_COMM_WORLD_LOCAL_SIZE"),
    master_addr=_MPI_MASTER,
    job=first(together("MPIRUN_ID", "MPIRUN_HOST"), *_MPI_JOB),
)

MPICH = Launcher(
    "mpich",
    "mpiexec of MPICH (Hydra)",
    "mpi",
    any_of=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_HOSTNAME"),
    rank=number("PMI_RANK"),
    world_size=number("PMI_SIZE"),
    local_rank=number("MPI_LOCALRANKID"),
    local_world_size=number("MPI_LOCALNRANKS"),
    master_addr=_MPI_MASTER,
    job=first(*_MPI_JOB),
)

INTELMPI = replace(
    MPICH,
    name="intelmpi",
    title="mpiexec of Intel MPI",
    all_of=("I_MPI_HYDRA_UUID",),
    any_of=(),
    job=together("I_MPI_HYDRA_UUID"),
)

# Here the process manager tells rank and size only over a connection, to MPI itself.
MPICH_BY_PORT = replace(
    MPICH,
    title="mpiexec -pmi-port of MPICH (Hydra)",
    all_of=("PMI_PORT",),
    any_of=("PMI_ID", "MPI_LOCALRANKID"),
    none_of=("PMI_RANK", "PMI_SIZE"),
    rank=number("PMI_ID"),
    world_size=None,
    always=(),
    unknown_world="With -pmi-port mpiexec tells the world size only to MPI itself; start it without -pmi-port",
)

# -- schedulers ----------------------------------------------------------------------------------------

# Steps that are a shell (interactive, batch) or keep the job's processes (extern), not ranks.
_NO_RANKS = {"4294967290", "4294967291", "4294967292", "interactive", "batch", "extern"}

SLURM = Launcher(
    "slurm",
    "srun of Slurm",
    "allocation",
    any_of=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    when=lambda environment: environment.get("SLURM_STEP_ID") not in _NO_RANKS,
    rank=number("SLURM_PROCID"),
    world_size=number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=number("SLURM_LOCALID"),
    local_world_size=tasks_on_node("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    node_rank=number("SLURM_NODEID"),
    num_nodes=first(number("SLURM_STEP_NUM_NODES"), length_of(node_list("SLURM_STEP_NODELIST"))),
    master_addr=first(MASTER_ADDR, first_host(node_list("SLURM_STEP_NODELIST"), node_list("SLURM_JOB_NODELIST"))),
    job=together("SLURM_JOB_ID", "SLURM_STEP_ID"),
    hosts=node_list("SLURM_STEP_NODELIST"),
)


def _pmi_of_slurm(environment: Environment) -> bool:
    """`srun --mpi=pmi2` sets PMI_RANK too. Hydra, started in the allocation, sets more, or other numbers."""
    if "MPI_LOCALRANKID" in environment or "PMI_HOSTNAME" in environment:
        return False
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    return environment["PMI_RANK"] == environment["SLURM_PROCID"] and environment.get("PMI_SIZE") == tasks


SLURM_WITH_PMI = replace(SLURM, all_of=("SLURM_STEP_ID", "SLURM_PROCID", "PMI_RANK"), any_of=(), when=_pmi_of_slurm)

LAUNCHERS = (
    PHALANX,
    TORCHRUN,
    HOROVOD,
    AZUREML,
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
