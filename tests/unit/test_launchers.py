"""Every launcher's row, held against environments recorded from the launcher, or written after its documentation.

A file in ``tests/data/launchers`` is one job: for every rank the host it ran on, its variables (``common`` to all and
its own) and the answer, with null where this launcher does not say. ``origin`` tells how it was made.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import InitializationError, LauncherEnvironmentError
from phalanx.system.host import Host
from phalanx.topology.environment import Reading, place_with, read_environment
from phalanx.topology.launchers import LAUNCHERS, Kind, launcher_table
from phalanx.topology.readers import expand_node_list, expand_task_counts
from phalanx.topology.topology import RankInfo, arrange

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "launchers"
FACTS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


@dataclass(frozen=True)
class Job:
    """One recorded job."""

    name: str
    launcher: str
    hosts: list[str]
    environments: list[dict[str, str]]
    answers: list[dict[str, Any]]


def load(path: Path) -> Job:
    data = json.loads(path.read_text())
    return Job(
        path.stem,
        data["launcher"],
        [rank["host"] for rank in data["ranks"]],
        [{**data["common"], **rank["environment"]} for rank in data["ranks"]],
        [rank["answer"] for rank in data["ranks"]],
    )


def read(environment: dict[str, str]) -> Reading:
    return read_environment(environment, [])


JOBS = [load(path) for path in sorted(FOLDER.glob("*.json"))]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_rank_finds_its_place_and_all_the_same_world(job: Job) -> None:
    reports = []
    for rank, (host, environment, answer) in enumerate(zip(job.hosts, job.environments, job.answers, strict=True)):
        reading = read(environment)
        assert reading.name == job.launcher
        assert {name: reading.number(name) for name in FACTS} == {name: answer[name] for name in FACTS}
        assert reading.text("master_addr") == answer["master_addr"]
        said = [reading.number(name) for name in ("local_rank", "local_world_size", "node_rank")]
        reports.append(RankInfo(rank, Host(host), 0, reading.name, *said))
    topology = arrange(reports)
    firsts = list(dict.fromkeys(job.hosts))
    expected = [tuple(rank for rank, host in enumerate(job.hosts) if host == first) for first in firsts]
    assert [node.ranks for node in topology.nodes] == expected
    assert topology.notes == ()


def test_every_row_and_name_has_a_job() -> None:
    assert {job.launcher for job in JOBS} == {row.name for row in LAUNCHERS} | {"none"}
    found = {reading.launcher for job in JOBS for reading in map(read, job.environments)}
    assert found == {*LAUNCHERS, None}


def test_the_table_of_the_documentation_is_that_of_the_rows() -> None:
    page = (ROOT / "docs/launchers.md").read_text()
    assert launcher_table() in page, "copy the output of `python -m phalanx.topology.launchers` into docs/launchers.md"
    for row in LAUNCHERS:
        assert row.traits.pass_on in page


def test_a_job_inside_an_allocation_is_that_of_its_own_launcher() -> None:
    kubernetes = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2", "PET_NODE_RANK": "0"}
    step = next(job for job in JOBS if job.name == "slurm-block").environments[1]
    for job in JOBS:
        row = read(job.environments[0]).launcher
        if row is not None and row.kind not in (Kind.PLATFORM, Kind.HAND) and Kind.ALLOCATION in row.around:
            for around in (step, kubernetes, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}):
                for environment in job.environments:
                    assert read_environment({**around, **environment}, []).name == job.launcher


def test_two_launchers_that_contradict_each_other_are_both_shown() -> None:
    for job, stale in (
        ("mpich-block", {"RANK": "0", "WORLD_SIZE": "1"}),
        ("openmpi5-block", {"PMI_RANK": "0", "PMI_SIZE": "2"}),
    ):
        environment = next(one for one in JOBS if one.name == job).environments[2]
        own = read(environment)
        with pytest.raises(
            LauncherEnvironmentError, match=f"{own.name} says rank 2 of {own.number('world_size')}"
        ) as caught:
            read({**environment, **stale})
        assert all(f"{name}={value}" in str(caught.value) for name, value in stale.items())


def test_conventions_for_a_world_of_one() -> None:
    cases: list[tuple[dict[str, str], list[str], str]] = [
        ({}, [], "none"),
        ({}, ["--local_rank=0", "--lr", "1"], "none"),
        ({"RANK": "-1", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"}, [], "none"),
        ({"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}, ["--local_rank=-1"], "none"),
        ({"WORLD_SIZE": "1"}, [], "env"),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, [], "none"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, [], "none"),
    ]
    for environment, arguments, launcher in cases:
        place = read_environment(environment, arguments).place()
        assert (place.launcher, place.rank, place.world_size) == (launcher, 0, 1)
        assert (place.local_rank, place.local_world_size, place.node_rank, place.num_nodes) == (0, 1, 0, 1)


def test_the_older_argument_gives_the_local_rank() -> None:
    by_hand = {"RANK": "3", "WORLD_SIZE": "4"}
    assert read_environment(by_hand, []).place().local_rank is None
    assert read_environment(by_hand, ["--epochs", "2", "--local_rank=1"]).place().local_rank == 1
    assert read_environment(by_hand, ["--local-rank", "1"]).place().local_rank == 1
    assert read_environment({**by_hand, "LOCAL_RANK": "1"}, ["--local-rank", "1"]).place().local_rank == 1
    assert read_environment({**by_hand, "LOCAL_RANK": "1"}, ["--local-rank", "-1"]).place().local_rank == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"RANK": "0"}, [], ["RANK=0", "WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, [], ["WORLD_SIZE=2", "RANK is not set"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, [], ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, [], ["RANK=-1", "WORLD_SIZE=2"]),
        ({"RANK": "1", "WORLD_SIZE": "1_0"}, [], ["WORLD_SIZE='1_0'"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, [], ["MASTER_PORT=99999"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["--local_rank=1"], ["--local_rank=1", "LOCAL_RANK=0"]),
        ({}, ["--local_rank", "x"], ["--local_rank='x'"]),
        ({"LOCAL_RANK": "2"}, [], ["LOCAL_RANK=2"]),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, [], ["LOCAL_WORLD_SIZE=2"]),
        ({"PMI_SIZE": "2"}, [], ["PMI_SIZE=2", "PMI_RANK is not set"]),
        ({"PMI_PORT": "h:1", "PMI_ID": "0"}, [], ["start it without -pmi-port"]),
        ({"SM_TRAINING_ENV": "{}", "SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, [], ["SM_HOSTS='algo-1'"]),
        ({"SM_TRAINING_ENV": "{}", "SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, [], ["SM_CURRENT_HOST='b'"]),
        ({"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b"}, [], ["TPU_WORKER_ID=3"]),
    ],
)
def test_a_half_set_environment_is_named(environment: dict[str, str], arguments: list[str], words: list[str]) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        read_environment(environment, arguments).place()
    for word in words:
        assert word in str(caught.value)


def test_platforms_one_process_on_a_node_is_told_how_to_start_the_others() -> None:
    pai = {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8"}
    assert "start 8 on each with torchrun --nnodes $WORLD_SIZE" in read_environment(pai, []).place().notes[0]
    pod = {"KUBERNETES_SERVICE_HOST": "k", "RANK": "1", "PET_NODE_RANK": "1", "PET_NNODES": "2"}
    # Here the platform counts on processes that nobody has started, so the ranks would wait for them for ever.
    with pytest.raises(LauncherEnvironmentError, match=r"WORLD_SIZE=8 ranks on PET_NNODES=2 nodes.*torchrun"):
        read_environment({**pod, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"}, []).place()


def test_environment_that_lost_one_variable_is_never_a_world_of_one() -> None:
    """The rest of what a launcher sets still says that there are other ranks."""
    for job in JOBS:
        for environment, answer in zip(job.environments, job.answers, strict=True):
            for lost in environment if answer["world_size"] not in (None, 1) else ():
                with contextlib.suppress(LauncherEnvironmentError):
                    place = read({name: value for name, value in environment.items() if name != lost}).place()
                    assert (place.launcher != "none", place.world_size) == (True, answer["world_size"]), (job, lost)


# -- which attempt it is, what phalanx.init() is given, lists of nodes -----------------------------------


def test_launcher_says_which_attempt_it_is() -> None:
    torchrun = next(job for job in JOBS if job.name == "torchrun-block").environments[0]
    torchrun = {**torchrun, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    ours = {**torchrun, "PHALANX_RUN_ID": "job", "PHALANX_ATTEMPT": "3"}
    below = {**ours, "PHALANX_RUN_ID": "another"}  # torchrun, started by a rank of phalanx run
    for environment, launcher, attempt in (
        (torchrun, "torchrun", 2), (ours, "phalanx", 3), (below, "torchrun", 2), ({}, "none", 0),
    ):  # fmt: skip
        place = read(environment).place()
        assert (place.launcher, place.attempt) == (launcher, attempt)


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def place(environment: dict[str, str], *given: Any) -> Any:
    return place_with(read(environment), *given)


def test_a_script_gives_its_place_itself() -> None:
    found = place({}, "tcp://h1:29500", 1, 4)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("env", 1, 4, None)
    assert (found.master_addr, found.master_port) == ("h1", 29500)
    found = place({}, "tcp://[fd00::1]:29500?rank=2&world_size=3", None, None)
    assert (found.rank, found.world_size, found.master_addr) == (2, 3, "fd00::1")
    assert place({}, "env://", None, None) == place({}, None, None, None)
    assert place({}, None, 0, 1).local_rank == 0
    for given in ((None, None, -1), ("env://", -1, -1), (None, -1, 1)):  # -1 is not given
        found = place({}, *given)
        assert (found.rank, found.world_size, found.local_rank) == (0, 1, 0)


def test_under_a_launcher_it_completes_what_is_missing() -> None:
    assert place(HYDRA, None, -1, -1) == place(HYDRA, None, None, None)
    assert place(HYDRA, "tcp://h1:29500", 1, 4).launcher == "mpich"
    assert place(HYDRA, "tcp://h1:29500", None, None).master_addr == "h1"
    assert place({"PMI_PORT": "h:1", "PMI_ID": "1"}, None, None, 4).world_size == 4


def test_mistakes_in_what_a_script_gives_are_named() -> None:
    cases: list[tuple[dict[str, str], Any, type[Exception], str]] = [
        (HYDRA, (None, 2, 4), LauncherEnvironmentError, r"rank=2 in phalanx.init\(\), but mpich says PMI_RANK=1"),
        ({}, (None, 2, None), InitializationError, "pass both rank and world_size"),
        ({}, (None, -1, 4), InitializationError, "pass both rank and world_size"),
        ({}, (None, 4, 4), LauncherEnvironmentError, "4 is not a rank of a world of 4"),
        ({}, ("file:///tmp/x", 0, 2), InitializationError, "neither tcp://host:port nor env://"),
        ({}, ("tcp://h1:29500?rank=x", None, 2), LauncherEnvironmentError, "rank in init_method='x'"),
    ]
    for environment, given, error, words in cases:
        with pytest.raises(error, match=words):
            place(environment, *given)


def test_lists_of_nodes() -> None:
    lists = {
        "node1": "node1",
        "a,b": "a b",
        "node[01-03,7]": "node01 node02 node03 node7",
        "node[08-11]": "node08 node09 node10 node11",
        "gpu[1-2]-ib,login": "gpu1-ib gpu2-ib login",
        "r[1-2]n[1-2]": "r1n1 r1n2 r2n1 r2n2",
        "rack-3[5]": "rack-35",
    }
    assert {text: " ".join(expand_node_list("N", text)) for text in lists} == lists
    for text in ("", "a,", "n[1-", "n]", "n[]", "n[3-1]", "n[a-b]", "n[1-99999999999]", "n[0-999999]x[0-9]"):
        with pytest.raises(LauncherEnvironmentError, match=r"SLURM_STEP_NODELIST=.* is not a list of nodes"):
            expand_node_list("SLURM_STEP_NODELIST", text)


def test_counts_of_tasks() -> None:
    assert expand_task_counts("N", "4(x2),3") == [4, 4, 3]
    assert expand_task_counts("N", "1") == [1]
    assert expand_task_counts("N", "2,1(x3)") == [2, 1, 1, 1]
    for text in ("", "4(x", "four", "4(2)", "4,,3"):
        with pytest.raises(LauncherEnvironmentError, match=r"N=.* is not a list of tasks per node"):
            expand_task_counts("N", text)


def placed(hosts: str, local: Sequence[int | None] | None = None, sizes: bool = False) -> list[RankInfo]:
    """Reports of ranks on the hosts with these letters, with the local ranks that a launcher gave."""
    given_ranks = [None] * len(hosts) if local is None else local
    return [
        RankInfo(
            rank,
            Host(host),
            launcher="mpich",
            local_rank=given_ranks[rank],
            local_world_size=hosts.count(host) if sizes else None,
        )
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("a", [(0,)]),
        ("aabb", [(0, 1), (2, 3)]),  # block
        ("abab", [(0, 2), (1, 3)]),  # cyclic, as mpiexec -ppn 1 places them
        ("abbb", [(0,), (1, 2, 3)]),  # unequal
        ("baab", [(0, 3), (1, 2)]),  # by first appearance, not by name
        ("abcacb", [(0, 3), (1, 5), (2, 4)]),
    ],
)
def test_hosts_are_numbered_by_first_appearance(hosts: str, nodes: list[tuple[int, ...]]) -> None:
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    topology = arrange(placed(hosts, local, sizes=True))
    assert topology.nodes == arrange(placed(hosts)).nodes
    assert [node.ranks for node in topology.nodes] == nodes
    assert [node.node_rank for node in topology.nodes] == list(range(len(nodes)))
    assert [node.host for node in topology.nodes] == list(dict.fromkeys(hosts))


def test_contradiction_between_launcher_and_hosts_is_named() -> None:
    for reports, words in (
        (placed("aabb", [0, 1, 2, 3]), "on b there are the ranks 2-3, and by the launcher rank 2 has local rank 2"),
        (placed("aab", [0, None, 0]), r"rank 1 has local rank \?"),
        # The trap of rank % devices: cyclic placement, and local ranks by arithmetic.
        (placed("abab", [0, 1, 0, 1]), "on a there are the ranks 0, 2"),
    ):
        with pytest.raises(LauncherEnvironmentError, match=f"mpich contradicts what the ranks see: .*{words}"):
            arrange(reports)
    containers = [
        RankInfo(rank, Host("h", "boot", f"pid:[{rank}]"), launcher="slurm", local_rank=rank, local_world_size=2)
        for rank in range(2)
    ]
    with pytest.raises(LauncherEnvironmentError, match=r"is rank 0 alone, and by the launcher .* set PHALANX_HOST"):
        arrange(containers)


def test_two_agents_on_one_host_are_one_node_and_that_is_said() -> None:
    reports = [
        RankInfo(rank, Host("h"), launcher="torchrun", local_rank=rank % 2, local_world_size=2, node_rank=rank // 2)
        for rank in range(4)
    ]
    topology = arrange(reports)
    assert [node.ranks for node in topology.nodes] == [(0, 1, 2, 3)]
    assert topology.notes == ("nodes 0-1 of torchrun are one host, h; its ranks get the local ranks 0-3",)
