"""The rows of platforms, which start one process on each node and describe it by variables of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.topology.by_hand import BY_HAND
from phalanx.topology.launcher import MASTER_ADDR, MASTER_PORT, Kind, Launcher
from phalanx.topology.place import Traits
from phalanx.topology.readers import (
    Environment,
    Finding,
    Reader,
    comma_list,
    constant,
    first,
    first_host,
    host_of,
    index_of,
    json_list,
    length_of,
    number,
    number_unless,
    port,
    text,
    together,
)

__all__ = [
    "AZUREML_BY_HAND",
    "AZURE_JOB",
    "AZURE_MASTER",
    "KUBEFLOW",
    "KUBEFLOW_BY_HAND",
    "KUBEFLOW_LOCAL",
    "PAI",
    "SAGEMAKER",
    "SAGEMAKER_BY_HAND",
    "TPU",
]

_AROUND = (Kind.PLATFORM, Kind.ALLOCATION)
_LATE = Traits(late_names=True)

_FIRST = constant(0, "one process on each node")
_ONLY = constant(1, "one process on each node")


def _more_wanted(name: str, remedy: str) -> Callable[[Environment], str]:
    """A note for the user if variable ``name`` wants more processes on each node than the one that was started."""

    def note(environment: Environment) -> str:
        value = environment.get(name, "")
        if not value.isdigit() or int(value) < 2 or "LOCAL_RANK" in environment:
            return ""
        return f"{name}={value}, but this is the only process on its node; start {value} on each with {remedy}"

    return note


# These two need not be numbers: an elastic job has a range of nodes, and torchrun can count a node's processors.
_PET_NODES = number_unless("PET_NNODES", r"\d+:\d+")
_PET_RANKS = number_unless("PET_NPROC_PER_NODE", "auto|cpu|gpu|xpu")


def _of_a_pod(whole: Reader) -> Reader:
    """``whole`` for the one process that a pod starts; unknown while PET_NNODES is a range."""
    return Reader(
        whole.names,
        lambda environment: None if _PET_NODES(environment) is None else whole(environment),
        (*_PET_NODES.variables, *whole.variables),
    )


def _ranks_of_pods(environment: Environment) -> Finding | None:
    """The world size that the job asks for: pods times processes per pod.

    A pod by itself starts one process; torchrun in it would start the others.
    """
    nodes, each = _PET_NODES(environment), _PET_RANKS(environment)
    if "PET_NPROC_PER_NODE" not in environment:
        return None  # Kubeflow always sets it, so without it the environment was passed on only in part
    if nodes is None or each is None or each.value == 1:
        return nodes
    return Finding(int(nodes.value) * int(each.value), f"{nodes.source} times {each.source}")


def _in_pod(name: str, of_the_pod: Reader) -> Reader:
    """Variable ``name`` if RANK, WORLD_SIZE or LOCAL_RANK is set, and ``of_the_pod`` if none of them is.

    So RANK alone, or WORLD_SIZE alone, is an error, and is not completed from the pod's variables.
    """

    def read(environment: Environment) -> Finding | None:
        by_hand = any(variable in environment for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return number(name)(environment) if by_hand else of_the_pod(environment)

    return Reader(name, read, (name, *of_the_pod.variables))


KUBEFLOW = Launcher(
    "kubeflow",
    "PyTorchJob of Kubeflow",
    Kind.PLATFORM,
    _AROUND,
    all_of=("KUBERNETES_SERVICE_HOST",),
    any_of=("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    rank=_in_pod("RANK", number("PET_NODE_RANK")),
    world_size=_in_pod("WORLD_SIZE", Reader("PET_NNODES", _ranks_of_pods, ("PET_NNODES", "PET_NPROC_PER_NODE"))),
    node_rank=number("PET_NODE_RANK"),
    num_nodes=_PET_NODES,
    master_addr=host_of("PET_MASTER_ADDR", "MASTER_ADDR"),
    master_port=first(port("PET_MASTER_PORT"), MASTER_PORT),
    note=_more_wanted("PET_NPROC_PER_NODE", "torchrun, which reads PET_NPROC_PER_NODE by itself"),
    local_rank=_of_a_pod(_FIRST),
    local_world_size=_of_a_pod(_ONLY),
    one_process_per_node=True,
    rank_counts_nodes=True,
    traits=_LATE,
)
# One of several processes that a program in the pod has started: then RANK is no longer the pod's number.
KUBEFLOW_LOCAL = replace(
    KUBEFLOW,
    all_of=("KUBERNETES_SERVICE_HOST", "RANK"),
    when=lambda environment: (
        "LOCAL_RANK" in environment or environment["RANK"] != environment.get("PET_NODE_RANK", environment["RANK"])
    ),
    condition="LOCAL_RANK is set, or RANK is not PET_NODE_RANK",
    one_process_per_node=False,
    rank=number("RANK"),
    world_size=number("WORLD_SIZE"),
    local_rank=number("LOCAL_RANK"),
    local_world_size=first(number("LOCAL_WORLD_SIZE"), _PET_RANKS),
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
    _AROUND,
    all_of=("RANK", "WORLD_SIZE", "NPROC_PER_NODE"),
    none_of=("LOCAL_RANK",),
    rank=number("RANK"),
    world_size=number("WORLD_SIZE"),
    node_rank=number("RANK"),
    num_nodes=number("WORLD_SIZE"),
    note=_more_wanted(
        "NPROC_PER_NODE",
        "torchrun --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node $NPROC_PER_NODE "
        "--master-addr $MASTER_ADDR --master-port $MASTER_PORT",
    ),
    local_rank=_FIRST,
    local_world_size=_ONLY,
    one_process_per_node=True,
    rank_counts_nodes=True,
    traits=_LATE,
)

AZURE_MASTER = host_of("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
AZURE_JOB = first(together("AZUREML_RUN_ID"), text("AZUREML_EXPERIMENT_ID"))
AZUREML_BY_HAND = replace(
    BY_HAND,
    name="azureml",
    title="Azure Machine Learning",
    all_of=("AZUREML_EXPERIMENT_ID",),
    node_rank=number("NODE_RANK"),
    master_addr=AZURE_MASTER,
    job=AZURE_JOB,
    traits=_LATE,
)

_SM_HOSTS = json_list("SM_HOSTS")
SAGEMAKER = Launcher(
    "sagemaker",
    "Amazon SageMaker",
    Kind.PLATFORM,
    _AROUND,
    any_of=("SM_TRAINING_ENV", "SM_HOSTS", "SM_CURRENT_HOST"),
    none_of=("RANK", "WORLD_SIZE"),
    rank=index_of("SM_CURRENT_HOST", _SM_HOSTS),
    world_size=length_of(_SM_HOSTS),
    node_rank=index_of("SM_CURRENT_HOST", _SM_HOSTS),
    num_nodes=length_of(_SM_HOSTS),
    master_addr=first(MASTER_ADDR, first_host(_SM_HOSTS)),
    job=together("SM_HOSTS", "TRAINING_JOB_NAME"),
    hosts=_SM_HOSTS,
    note=_more_wanted("SM_NUM_GPUS", "distribution={'torch_distributed': {'enabled': True}} of the estimator"),
    local_rank=_FIRST,
    local_world_size=_ONLY,
    one_process_per_node=True,
    traits=_LATE,
)
SAGEMAKER_BY_HAND = replace(
    BY_HAND,
    name="sagemaker",
    title="Amazon SageMaker",
    all_of=("SM_TRAINING_ENV",),
    node_rank=SAGEMAKER.node_rank,
    num_nodes=SAGEMAKER.num_nodes,
    master_addr=SAGEMAKER.master_addr,
    job=SAGEMAKER.job,
    traits=_LATE,
)

_TPU_HOSTS = (comma_list("TPU_PROCESS_ADDRESSES"), comma_list("TPU_WORKER_HOSTNAMES"))
TPU = Launcher(
    "tpu",
    "Cloud TPU",
    Kind.PLATFORM,
    _AROUND,
    any_of=("TPU_WORKER_ID", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"),
    # A list of one host without TPU_WORKER_ID means a machine with a TPU on which no launcher has started anything.
    when=lambda environment: (
        "TPU_WORKER_ID" in environment or any(len(one.hosts(environment)) > 1 for one in _TPU_HOSTS)
    ),
    condition="TPU_WORKER_ID is set, or a list names several hosts",
    rank=number("TPU_WORKER_ID"),
    world_size=length_of(*_TPU_HOSTS),
    node_rank=number("TPU_WORKER_ID"),
    num_nodes=length_of(*_TPU_HOSTS),
    master_addr=first(MASTER_ADDR, first_host(*_TPU_HOSTS)),
    job=first(*(text(one.name) for one in _TPU_HOSTS)),
    local_rank=_FIRST,
    local_world_size=_ONLY,
    one_process_per_node=True,
    traits=_LATE,
)
