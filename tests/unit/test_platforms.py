"""``phalanx run`` learns from a platform's variables how many nodes there are, and which one this is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.platforms import PlatformNodes, find_platform

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "platforms").glob("*.json"))}
NODES = [
    pytest.param({**recording["common"], **node["environment"]}, node["answer"], id=f"{name}-{index}")
    for name, recording in RECORDINGS.items()
    for index, node in enumerate(recording["nodes"])
]


def recorded(name: str, **changes: str) -> dict[str, str]:
    """The variables of the first node of a recording, with some of them changed."""
    return {**RECORDINGS[name]["common"], **RECORDINGS[name]["nodes"][0]["environment"], **changes}


@pytest.mark.parametrize(("environment", "answer"), NODES)
def test_variables_of_a_platform_say_which_node_this_is(environment: dict[str, str], answer: dict[str, Any]) -> None:
    found = find_platform(environment)
    assert found is not None
    assert found.variables
    assert set(found.variables) <= environment.keys()
    assert found == PlatformNodes(**{**answer, "names": tuple(answer["names"])}, variables=found.variables)


def test_tasks_of_pbsdsh_read_a_copy_of_the_node_file(tmp_path: Path) -> None:
    # OpenPBS 23.06, src/resmom/start_exec.c: the tasks of a job with select=2:mpiprocs=2, and PBS_NODEFILE passed on.
    (tmp_path / "nodes").write_text("h0\nh0\nh1\nh1\n")
    task = {"PBS_JOBID": "1234.server", "PBS_TASKNUM": "20000002", "PBS_NODENUM": "1", "PBS_ENVIRONMENT": "PBS_BATCH"}
    found = find_platform({**task, "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert found == PlatformNodes("PBS (pbsdsh)", "2", 1, "h0", 21234, None, ("h0", "h1"), ("PBS_NODENUM", "PBS_JOBID"))
    script = {**task, "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_TASKNUM": "1", "PBS_NODENUM": "0"}
    for environment in (task, {**task, "PBS_NODEFILE": str(tmp_path / "none")}, script):
        assert find_platform(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no platform"),
        pytest.param(recorded("kubeflow-trainer", TORCHELASTIC_RUN_ID="job"), id="rank of torchrun"),
        pytest.param(recorded("jobset", NNODES=""), id="JobSet whose manifest does not count the pods"),
        pytest.param(
            {"VC_MPIMASTER_HOSTS": "j-mpimaster-0.j", "VC_MPIWORKER_HOSTS": "j-w-0.j,j-w-1.j", "VC_TASK_INDEX": "0"},
            id="Volcano's tasks of two kinds, without a rank",
        ),
        pytest.param(recorded("slurm", SLURM_STEP_ID="4294967291"), id="Slurm's batch script"),
        pytest.param(
            recorded("slurm", SLURM_STEP_TASKS_PER_NODE="4(x2)", SLURM_STEP_NUM_TASKS="8"), id="ranks of srun"
        ),
    ],
)
def test_command_that_runs_once_is_not_of_a_platform(environment: dict[str, str]) -> None:
    assert find_platform(environment) is None


def test_one_node_says_how_many_ranks_it_takes() -> None:
    pod = find_platform({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0"})
    machine = find_platform(recorded("skypilot", SKYPILOT_NUM_NODES="1", SKYPILOT_NODE_IPS="10.0.0.4"))
    assert pod is not None
    assert machine is not None
    assert [(found.nodes, found.ranks) for found in (pod, machine)] == [("1", "4"), ("1", "8")]


def test_ranks_that_a_launcher_has_started_are_not_of_a_platform() -> None:
    for path in sorted((DATA / "launchers").glob("*.json")):
        recording = json.loads(path.read_text())
        # Nothing tells one rank in each pod from one command there.
        for rank in recording["ranks"] if recording["launcher"] != "kubeflow" else []:
            assert find_platform({**recording["common"], **rank["environment"]}) is None, path


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("kubeflow-trainer", {"PET_NNODES": "two"}, "PET_NNODES=two is no number of nodes, such as 2 or 2:4"),
        ("kubeflow-trainer", {"PET_NNODES": "4:2"}, "PET_NNODES=4:2 is no number of nodes"),
        ("kubeflow-trainer", {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is no rank of 2 nodes, which count from 0"),
        ("kubeflow-trainer", {"PET_NPROC_PER_NODE": "some"}, "PET_NPROC_PER_NODE='some' is not a whole number"),
        ("kubeflow-trainer", {"PET_MASTER_PORT": "0"}, "PET_MASTER_PORT=0 is not a port"),
        ("kubeflow-pytorchjob-elastic", {"PET_RDZV_ENDPOINT": "h:99999"}, "PET_RDZV_ENDPOINT=99999 is not a port"),
        ("skypilot", {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3, but 2 nodes are listed"),
        ("dstack", {"DSTACK_NODE_RANK": "-1"}, "DSTACK_NODE_RANK=-1 is no rank of 2 nodes"),
        ("volcano", {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but 2 nodes are listed"),
        ("aws-batch", {"AWS_BATCH_JOB_NODE_INDEX": "3"}, "AWS_BATCH_JOB_NODE_INDEX=3 is no rank of 3 nodes"),
        ("slurm", {"SLURM_STEP_NODELIST": "h[1-"}, "is not a list of nodes"),
    ],
)
def test_variables_that_make_no_sense_are_an_error(name: str, changes: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as error:
        find_platform(recorded(name, **changes))
    assert said in str(error.value)
    assert str(error.value).endswith("say --nnodes, --node-rank and --master-addr (--nnodes 1: this node alone)")


def test_intel_accelerators_are_counted_as_such() -> None:
    found = find_platform(recorded("kubeflow-trainer", PET_NPROC_PER_NODE="xpu"))
    assert found is not None
    assert found.ranks == "gpu"


def test_address_and_port_of_a_script_count_more() -> None:
    found = find_platform(recorded("slurm", MASTER_ADDR="h1-ib", MASTER_PORT="29500"))
    assert found is not None
    assert (found.master_addr, found.master_port) == ("h1-ib", 29500)
