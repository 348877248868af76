"""``phalanx run`` started on every node: one job, as if one call had started it, and each node says how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import PHALANX, RemoteJob, RemoteLauncher, launching, reachable_hosts

from phalanx.system.limits import usable_cores

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

# Each rank says where it is; the last argument may be a rank that fails, and there -1 is none.
PLACE = """
    import os, socket, sys
    print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")), socket.gethostname())
    sys.exit(7 if os.environ["RANK"] == sys.argv[1] else 0)
"""
# Ranks of the first attempt wait to be ended; those of the second end.
STANDING = """
    import os, signal, socket, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print("attempt", attempt, "rank", rank, "of", os.environ["WORLD_SIZE"], socket.gethostname(), flush=True)
    time.sleep(600 if attempt == "0" and len(sys.argv) == 1 else 0)
"""


class Nodes(RemoteLauncher):
    """Starts ``phalanx run`` on nodes."""

    def start_on(
        self,
        host: int,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        numbered: bool = True,
        words: Sequence[str] = ("-n", "1"),
    ) -> RemoteJob:
        """Start the command on a host; if it is numbered, the number of the host is the node's."""
        folder = self.folder / f"job-{len(self.jobs)}"
        folder.mkdir()
        which = ["--node-rank", str(host)] if numbered and words else []
        command = [self.python, *PHALANX, "run", "--no-preload", *words, *which, *arguments]
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = self.hosts.start(
                host, command, environment or {}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.jobs.append(RemoteJob(process, folder))
        return self.jobs[-1]

    def launcher_on(self, host: int) -> int:
        """The process of the command on a host, by its number on this machine."""
        found = [pid for pid in self.hosts.processes(host) if b"run\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return min(found)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def nodes(hosts: TestHosts, tmp_path: Path) -> Iterator[Nodes]:
    with launching(Nodes(hosts, tmp_path)) as launcher:
        assert isinstance(launcher, Nodes)
        yield launcher


def wait_for(job: RemoteJob, text: str) -> None:
    until = time.monotonic() + 120
    while text not in job.out + job.err:
        assert time.monotonic() < until, job.said()
        assert job.process.poll() is None or text in job.out + job.err, job.said()
        time.sleep(0.01)


TWO = ("--nnodes", "2", "--master-addr", "h0")
THREE = ("--nnodes", "3", "--master-addr", "h0")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_in_any_order_are_one_job(nodes: Nodes, order: Sequence[int]) -> None:
    script = nodes.script(PLACE)
    jobs = {}
    for host in order:
        jobs[host] = nodes.start_on(host, *THREE, "--no-prefix", script, "-1")
        if host == order[0]:
            wait_for(jobs[host], "after 4 s nodes 1-2 have not" if host == 0 else "node 0 does not answer at h0:29500")
    assert [jobs[host].finish() for host in range(3)] == [0, 0, 0], "".join(job.said() for job in jobs.values())
    places = [f"{rank} 3 0 {rank} h{rank}" for rank in range(3)]
    assert sorted(jobs[0].out.splitlines()) == places
    assert [jobs[host].out.splitlines() for host in (1, 2)] == [places[1:2], places[2:]]
    rows = [line.split()[:4] for line in jobs[0].err.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert rows == [[str(rank), str(rank), f"h{rank}", "0"] for rank in range(3)], jobs[0].err


def test_every_node_ends_with_the_exit_code_of_the_rank_that_failed(nodes: Nodes) -> None:
    script = nodes.script(PLACE)
    jobs = [nodes.start_on(host, *TWO, script, "1") for host in range(2)]
    assert [job.finish() for job in jobs] == [7, 7]
    assert "phalanx: rank 1 of 2 failed\n  host h1" in jobs[0].err, jobs[0].said()
    assert jobs[1].err == "phalanx: rank 1 on h1 failed: exit code 7\n"


def test_a_node_that_does_not_come_is_named_on_all_others(nodes: Nodes) -> None:
    script = nodes.script(PLACE)
    jobs = [nodes.start_on(host, *THREE, "--join-within", "6", script) for host in (0, 1)]
    for job in jobs:
        wait_for(job, "after 4 s node 2 has not come to h0:29500\n")
    assert [job.finish() for job in jobs] == [1, 1]
    for job in jobs:
        assert job.err.endswith("phalanx: node 2 has not come to h0:29500 within 6 s\n"), job.said()
    alone = nodes.start_on(1, *TWO, "--join-within", "1", script)
    assert alone.finish() == 1
    assert "node 0 did not answer at h0:29500 within 1 s (--join-within): Connection refused" in alone.err


def test_a_lost_node_is_replaced_by_another_of_its_number(nodes: Nodes) -> None:
    script = nodes.script(STANDING)
    first, second = (nodes.start_on(host, *TWO, "--restarts", "1", script) for host in (0, 1))
    first.wait_for_lines(2, "attempt 0")
    os.kill(nodes.launcher_on(1), signal.SIGKILL)
    wait_for(first, "node 1 has not come")
    other = nodes.start_on(2, *TWO, "--node-rank", "1", "--restarts", "1", script, numbered=False)
    assert (first.finish(), other.finish()) == (0, 0), first.said()
    assert "rank 1 of 2 failed: node 1 (h1) is lost" in first.err
    assert "attempt 1 rank 1 of 2 h2" in other.out
    assert second.finish() != 0


def test_nodes_wait_for_node_0_to_come_back(nodes: Nodes) -> None:
    script = nodes.script(STANDING)
    first, second = (nodes.start_on(host, *TWO, "--restarts", "1", script) for host in (0, 1))
    first.wait_for_lines(2, "attempt 0")
    os.kill(nodes.launcher_on(0), signal.SIGKILL)
    wait_for(second, "node 0 at h0:29500 is lost; this node ends its ranks, and waits for it to come back")
    again = nodes.start_on(0, *TWO, "--restarts", "1", script, "at once")
    assert (again.finish(), second.finish()) == (0, 0), second.said()
    first.finish()


def test_a_node_that_is_taken_away_has_the_job_begin_again_without_it(nodes: Nodes) -> None:
    """With a range, nodes that stay are enough; ranks are numbered anew."""
    script = nodes.script(STANDING)
    words = ("--nnodes", "2:3", "--master-addr", "h0", "--restarts", "1", "--join-within", "3", script)
    jobs = [nodes.start_on(host, *words, numbered=False) for host in range(3)]
    jobs[0].wait_for_lines(3, "attempt 0")
    os.kill(nodes.launcher_on(1), signal.SIGTERM)
    assert [job.finish() for job in jobs] == [0, 143, 0], jobs[0].said()
    assert sorted(line for line in jobs[0].out.splitlines() if "attempt 1" in line) == [
        "[rank 0] attempt 1 rank 0 of 2 h0",
        "[rank 1] attempt 1 rank 1 of 2 h2",
    ]
    assert "saved" in jobs[1].out


def test_ranks_stop_in_step_before_a_node_is_taken_away(nodes: Nodes) -> None:
    script = nodes.script("""
        import time, phalanx
        with phalanx.init(quiet=True) as world:
            calls = 1
            world.should_stop()
            world.barrier()
            print("attempt", world.attempt, flush=True)
            while world.attempt == 0 and not world.should_stop():
                time.sleep(0.001)
                calls += 1
            print("left", world.size, calls, flush=True)
    """)
    jobs = [nodes.start_on(host, *TWO, "--restarts", "1", script) for host in range(2)]
    jobs[0].wait_for_lines(2, "attempt 0")
    os.kill(nodes.launcher_on(1), signal.SIGTERM)
    wait_for(jobs[0], "node 1 has not come")
    jobs.append(nodes.start_on(2, *TWO, "--node-rank", "1", "--restarts", "1", script, numbered=False))
    assert [job.finish() for job in jobs] == [0, 143, 0], jobs[0].said()
    left = [line.partition(" left ")[2] for line in jobs[0].out.splitlines() if " left " in line]
    assert left[0] == left[1] != left[2] == left[3] == "2 1", jobs[0].said()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_on_any_node_ends_the_job_on_all(nodes: Nodes, asked: int) -> None:
    script = nodes.script(STANDING)
    jobs = [nodes.start_on(host, *TWO, script) for host in range(2)]
    jobs[0].wait_for_lines(2, "attempt 0")
    os.kill(nodes.launcher_on(asked), signal.SIGTERM)
    assert [job.finish() for job in jobs] == [143, 143], jobs[0].said()
    assert jobs[0].out.count("saved") == 2


TRAINING = """
    import time, phalanx
    with phalanx.init() as world:
        print("up", flush=True)
        while not world.should_stop():
            time.sleep(0.02)
        print("saved", flush=True)
"""


def test_signals_to_all_nodes_stop_their_ranks_in_step(nodes: Nodes) -> None:
    """As a scheduler sends them; and while torch is imported on them, the job ends with the signal's exit code."""
    script = nodes.script(TRAINING)
    jobs = [nodes.start_on(host, *THREE, script, words=["-n", "1", "--node-rank", str(host)]) for host in range(3)]
    jobs[0].wait_for_lines(3, "up")
    for host in range(3):
        os.kill(nodes.launcher_on(host), signal.SIGTERM)
    assert [job.finish() for job in jobs] == [0, 0, 0], jobs[0].said()
    assert jobs[0].out.count("saved") == 3
    assert "on request (SIGTERM" in jobs[0].err
    slow = nodes.script("import time; time.sleep(600)", "torch.py")
    words = [["-n", "1", "--node-rank", str(host)] for host in range(2)]
    jobs = [
        nodes.start_on(host, *TWO, "-x", f"PYTHONPATH={nodes.folder}", slow, words=words[host]) for host in range(2)
    ]
    wait_for(jobs[0], "phalanx run: 2 ranks")
    os.kill(nodes.launcher_on(0), signal.SIGINT)
    assert [job.finish() for job in jobs] == [130, 130], "\n".join(job.said() for job in jobs)


def test_a_key_file_keeps_nodes_without_it_out(nodes: Nodes) -> None:
    script, key = nodes.script(PLACE), nodes.folder / "key"
    key.touch(0o600)
    key.write_text("a secret of more than sixteen bytes")
    proven = {"PHALANX_KEY_FILE": str(key)}
    jobs = [nodes.start_on(host, *TWO, script, "-1", environment=proven) for host in range(2)]
    assert [job.finish() for job in jobs] == [0, 0]
    assert "can join this job" not in jobs[0].err
    stranger = nodes.start_on(1, *TWO, "--join-within", "3", script, "-1")
    first = nodes.start_on(0, *TWO, "--join-within", "3", script, "-1", environment=proven)
    assert (stranger.finish(), first.finish()) == (1, 1)
    assert "node 0 at h0:29500 has another key (this node has none); set PHALANX_KEY_FILE" in stranger.err
    assert "wants to join with another key" in first.err


RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "platforms").glob("*.json"))


def on_these_hosts(recording: dict[str, Any], hosts: TestHosts) -> list[dict[str, str]]:
    """Return the variables of a platform's nodes, as if they were these hosts: names resolve, addresses are theirs."""
    answers = [node["answer"] for node in recording["nodes"]]
    names = dict(enumerate(answers[0]["names"]))
    first = next(host for host, answer in enumerate(answers) if answer["node_rank"] in (0, None))
    if not names:
        names = {first: max(answer["master_addr"] for answer in answers)}  # AWS Batch does not tell node 0
    for host in range(hosts.count):
        hosts.set_names(host, {name: hosts.address(other) for other, name in names.items()})
    environments = []
    for node in recording["nodes"]:
        environment = {**recording["common"], **node["environment"]}
        for host, name in names.items():
            if name[0].isdigit():
                environment = {key: value.replace(name, hosts.address(host)) for key, value in environment.items()}
        environments.append(environment)
    return environments


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_nodes_of_a_platform_are_one_job(nodes: Nodes, path: Path) -> None:
    recording = json.loads(path.read_text())
    answers = [node["answer"] for node in recording["nodes"]]
    words = ["--no-prefix", *(["--join-within", "3"] if ":" in answers[0]["nodes"] else []), "printenv", "RANK"]
    try:
        jobs = [
            nodes.start_on(host, *words, words=[], environment=environment)
            for host, environment in enumerate(on_these_hosts(recording, nodes.hosts))
        ]
        assert [job.finish() for job in jobs] == [0] * len(jobs), "".join(job.said() for job in jobs)
    finally:
        nodes.hosts.reset_names()
    ranks = [sorted(map(int, job.out.split())) for job in jobs]
    each = usable_cores() if answers[0]["ranks"] == "auto" else int(answers[0]["ranks"] or 1)
    every = list(range(len(jobs) * each))
    assert max(ranks, key=len) == every  # on node 0
    assert sorted(rank for own in ranks for rank in own if own != every) == every[each:]
