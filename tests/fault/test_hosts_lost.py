"""A host that is cut off, stopped or dead, while ranks of two hosts wait for each other: every survivor names it.

One job goes through most of it: each test makes groups of all ranks, one for each operation, which all are under way
at once on threads of their own; it breaks them, and the next one makes others.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PORTS = itertools.count(29547)
PATIENCE_S = 200.0
SOON_S = 30.0  # five seconds on a quiet machine; the timeout of the groups is far from it
MENDED_S = 2.0  # after a cut that was longer, TCP may send again only when the host counts as silent
SMALL, LARGE = 8, 2_000_000
EXCHANGE = ("all_to_all", 200_000)  # whose parts go by way of the memory that the ranks of a host share
SAMPLE = [("all_reduce", LARGE), ("messages", SMALL), ("barrier", SMALL), ("broadcast", SMALL), EXCHANGE]
ALL = [
    (operation, count)
    for operation in (
        "all_reduce",
        "reduce_scatter",
        "reduce",
        "messages",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
    )
    for count in (SMALL, LARGE)
]
operations = pytest.mark.parametrize(
    "operations", [SAMPLE, pytest.param(ALL, marks=pytest.mark.long)], ids=["few", "all"]
)
NONE = ("", 0)
SCRIPT = """
    import ctypes, json, os, time
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta
    from pathlib import Path
    import torch, torch.distributed as dist, phalanx

    folder = Path(os.environ["FOLDER"])
    world = phalanx.init(timeout_s=300)
    rank, size = world.rank, world.world_size

    def parts(count):
        return [torch.empty(count // size) for _ in range(size)]

    OPERATIONS = {
        "all_reduce": lambda g, n: dist.all_reduce(torch.ones(n), group=g),
        "broadcast": lambda g, n: dist.broadcast(torch.ones(n), 0, group=g),
        "all_gather": lambda g, n: dist.all_gather(parts(n), torch.ones(n // size), group=g),
        "reduce_scatter": lambda g, n: dist.reduce_scatter(torch.empty(n // size), parts(n), group=g),
        "all_to_all": lambda g, n: dist.all_to_all(parts(n), parts(n), group=g),
        "gather": lambda g, n: dist.gather(torch.ones(n // size), parts(n) if rank == 1 else None, 1, group=g),
        "scatter": lambda g, n: dist.scatter(torch.empty(n // size), parts(n) if rank == 2 else None, 2, group=g),
        "reduce": lambda g, n: dist.reduce(torch.ones(n), 3, group=g),
        "barrier": lambda g, n: dist.barrier(group=g),
        "messages": lambda g, n: exchange(g, n, (rank + 2) % size),
    }

    def exchange(group, count, peer):
        works = [dist.isend(torch.ones(count), peer, group=group), dist.irecv(torch.empty(count), peer, group=group)]
        for work in works:
            work.wait()

    def wait_for(name):
        until = time.monotonic() + 200
        while not (folder / name).exists():
            assert time.monotonic() < until, name
            time.sleep(0.01)

    def go_on_until_it_breaks(group, order, operation, count):
        if order["wait"] and rank == order["wait"]:
            wait_for(order["until"])
        while True:
            OPERATIONS[operation](group, count)

    def sum_up(group, order, operation, count):
        if rank in order["hold"]:  # the interpreter is held by something in C, and no thread of Python runs
            ctypes.PyDLL(None).usleep(int(order["hold_s"] * 1e6))
        sums = set()
        while "more" not in sums:
            x = torch.arange(16_000_000, dtype=torch.float32).fmod_(1000) + rank
            dist.all_reduce(x, group=group)
            expected = torch.arange(16_000_000, dtype=torch.float32).fmod_(1000) * size + sum(range(size))
            sums.add(bool((x == expected).all()))
            over = torch.tensor([int((folder / order["until"]).exists())])
            dist.broadcast(over, 0, group=group)
            if over.item():
                return sorted(sums)

    def outcome_of(group, order, operation, count):
        try:
            return {"value": globals()[order["body"]](group, order, operation, count)}
        except Exception as error:
            outcome = {"error": type(error).__name__, "text": str(error), "at": time.time(),
                       "group_rank": getattr(error, "group_rank", None), "pid": getattr(error, "pid", None),
                       "known": [getattr(error, name, None) for name in ("rank", "host", "elapsed_s")]}
        try:
            OPERATIONS["barrier"](group, 0)
        except Exception as again:
            outcome["again"] = type(again).__name__
        return outcome

    for number in range(1000):
        wait_for(f"order-{number}")
        order = json.loads((folder / f"order-{number}").read_text())
        operations = order["operations"]
        groups = [dist.new_group(range(size), timeout=timedelta(seconds=300)) for _ in operations]
        for group in groups:
            dist.barrier(group=group)
            group.set_timeout(timedelta(seconds=order["timeout_s"]))
        (folder / f"ready-{number}-{rank}").write_text(str(os.getpid()))
        with ThreadPoolExecutor(len(groups)) as threads:
            first, *others = zip(groups, operations)
            begun = [threads.submit(outcome_of, group, order, *each) for group, each in others]
            outcome = [outcome_of(first[0], order, *first[1]), *[each.result() for each in begun]]
        for group in groups:
            dist.destroy_process_group(group)
        whole = folder / f"outcome-{number}-{rank}"
        whole.with_suffix(".part").write_text(json.dumps(outcome))
        whole.with_suffix(".part").rename(whole)
"""


class Job:
    """Four ranks on two hosts, which do what they are told."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.number = -1
        script = folder / "script.py"
        script.write_text(dedent(SCRIPT))
        port = next(PORTS)
        for rank in range(4):
            own = {"MASTER_ADDR": "h0", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
            files = folder / f"out-{rank}", folder / f"err-{rank}"
            hosts.zygotes[rank // 2].fork(script, {**own, "FOLDER": str(folder)}, *files)

    def begin(self, body: str, timeout_s: float = 300.0, **order: Any) -> None:
        """Have the ranks do something, and wait until they do."""
        self.number += 1
        partial = self.folder / "order"
        partial.write_text(
            json.dumps({"body": body, "timeout_s": timeout_s, "wait": 0, "hold": [], "operations": [NONE], **order})
        )
        partial.rename(self.folder / f"order-{self.number}")
        self._await(f"ready-{self.number}", range(4), PATIENCE_S)
        time.sleep(0.3)

    def outcomes(self, ranks: range) -> list[dict[str, Any]]:
        """What came of it, for each rank and operation."""
        self._await(f"outcome-{self.number}", ranks, PATIENCE_S)
        files = [self.folder / f"outcome-{self.number}-{rank}" for rank in ranks]
        return [outcome for file in files for outcome in json.loads(file.read_text())]

    def signal(self, name: str, ranks: range) -> None:
        for rank in ranks:
            pid = self.pid(rank)
            assert self.hosts.start(rank // 2, ["kill", f"-{name}", str(pid)], {}).wait(60) == 0

    def pid(self, rank: int) -> int:
        return int((self.folder / f"ready-{self.number}-{rank}").read_text())

    def _await(self, name: str, ranks: range, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while not all((self.folder / f"{name}-{rank}").exists() for rank in ranks):
            if time.monotonic() > until:
                for zygote in self.hosts.zygotes:
                    zygote.show_stacks()
                time.sleep(2)
                errors = "\n".join((self.folder / f"err-{rank}").read_text() for rank in range(4))
                pytest.fail(f"no {name} of all of ranks {list(ranks)}:\n{errors}")
            time.sleep(0.01)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(2, tmp_path_factory.mktemp("lost-hosts")) as made:
        for zygote in made.zygotes:
            zygote.wait_until_ready()  # now, and not in a test: what a test starts may not outlive it
        yield made


@pytest.fixture(scope="module")
def lasting_job(hosts: TestHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(hosts, tmp_path_factory.mktemp("lost"))
    job.begin("sum_up", until="order-0")  # now, too
    job.outcomes(range(4))
    yield job
    hosts.mend()
    hosts.end_processes()


def check(
    outcomes: list[dict[str, Any]], since: float, lost: tuple[int, ...], host: str, *, alone: bool = False
) -> None:
    """Every one of these ranks has raised the same, which names the host and the ranks there.

    If no other operation was under way, the error says which rank of the world it was, and after how long.
    """
    for outcome in outcomes:
        assert outcome["error"] == "PeerLost", outcome
        assert outcome["again"] == "PeerLost"  # it stays broken
        assert outcome["group_rank"] in lost, outcome
        assert outcome["pid"] > 0
        rank, host_name, elapsed_s = outcome["known"]
        assert host_name == host
        assert rank == outcome["group_rank"] or not alone
        assert 0 < elapsed_s < SOON_S or not alone
        assert outcome["at"] - since < SOON_S
        text = outcome["text"]
        assert host in text
        assert any(f"rank {rank} of the group" in text for rank in lost)
        assert "gloo" not in text.lower()
        assert ".cc:" not in text


@operations
def test_both_sides_of_a_cut_name_the_other_host(lasting_job: Job, operations: list[tuple[str, int]]) -> None:
    lasting_job.begin("go_on_until_it_breaks", operations=operations)
    since = time.time()
    lasting_job.hosts.cut(0)  # the host with the job's store
    sides = lasting_job.outcomes(range(2)), lasting_job.outcomes(range(2, 4))
    lasting_job.hosts.mend()
    check(sides[0], since, (2, 3), "h1")
    check(sides[1], since, (0, 1), "h0")
    assert all("is cut" in outcome["text"] for side in sides for outcome in side), sides


@operations
def test_host_whose_ranks_are_stopped_is_told_from_one_that_is_cut_off(
    lasting_job: Job, operations: list[tuple[str, int]]
) -> None:
    lasting_job.begin("go_on_until_it_breaks", operations=operations)
    since = time.time()
    lasting_job.signal("STOP", range(2, 4))
    outcomes = lasting_job.outcomes(range(2))
    lasting_job.signal("CONT", range(2, 4))
    check(outcomes, since, (2, 3), "h1")
    assert all("stopped" in outcome["text"] for outcome in outcomes)
    lasting_job.outcomes(range(4))


@pytest.mark.parametrize("wait", [1, pytest.param(2, marks=pytest.mark.long)])
def test_host_that_is_cut_off_while_ranks_wait_for_another_is_named(lasting_job: Job, wait: int) -> None:
    until = f"computed-{lasting_job.number}"
    operations = [("all_reduce", SMALL)]
    lasting_job.begin("go_on_until_it_breaks", operations=operations, wait=wait, until=until)
    since = time.time()
    lasting_job.hosts.cut(1)
    others = [rank for rank in range(4) if rank != wait]
    for rank in others:
        outcome = lasting_job.outcomes(range(rank, rank + 1))
        check(outcome, since, (2, 3) if rank < 2 else (0, 1), "h1" if rank < 2 else "h0", alone=True)
    lasting_job.hosts.mend()
    (lasting_job.folder / until).touch()
    assert lasting_job.outcomes(range(wait, wait + 1))[0]["error"] == "PeerLost"


def test_a_cable_that_is_out_for_a_second_ends_nothing(lasting_job: Job) -> None:
    for _ in range(5):
        until = f"over-{lasting_job.number}"
        lasting_job.begin("sum_up", until=until)
        since = time.monotonic()
        lasting_job.hosts.cut(1)
        time.sleep(1.0)
        lasting_job.hosts.mend()
        out_s = time.monotonic() - since
        time.sleep(1.0)
        (lasting_job.folder / until).touch()
        outcomes = lasting_job.outcomes(range(4))
        if out_s < MENDED_S:  # else a busy machine has mended it so late that this is a cut
            break
    assert outcomes == [{"value": [True]}] * 4


def test_ranks_whose_interpreters_are_held_for_long_are_waited_for(lasting_job: Job) -> None:
    until = f"over-{lasting_job.number}"
    (lasting_job.folder / until).touch()
    lasting_job.begin("sum_up", until=until, hold=[2, 3], hold_s=6.0)
    assert lasting_job.outcomes(range(4)) == [{"value": [True]}] * 4


@pytest.mark.long
def test_a_job_that_is_suspended_on_one_host_after_the_other_goes_on(lasting_job: Job) -> None:
    until = f"over-{lasting_job.number}"
    lasting_job.begin("sum_up", until=until)
    lasting_job.signal("STOP", range(2))
    time.sleep(1.0)
    lasting_job.signal("STOP", range(2, 4))
    time.sleep(6.0)
    lasting_job.signal("CONT", range(2))
    time.sleep(1.0)
    lasting_job.signal("CONT", range(2, 4))
    (lasting_job.folder / until).touch()
    assert lasting_job.outcomes(range(4)) == [{"value": [True]}] * 4


@pytest.mark.parametrize("late", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_does_not_come_is_named_with_its_host_and_place(lasting_job: Job, late: int) -> None:
    until = f"came-{lasting_job.number}"
    order = {"operations": [("all_reduce", SMALL)], "wait": late, "until": until}
    lasting_job.begin("go_on_until_it_breaks", timeout_s=1.0, **order)
    for rank in range(4):
        if rank != late:
            (outcome,) = lasting_job.outcomes(range(rank, rank + 1))
            assert outcome["error"] == "CollectiveTimeout"
            assert outcome["group_rank"] == late
            process = f"rank {late} of the group (pid {lasting_job.pid(late)} on h{late // 2})"
            assert process in outcome["text"]
            assert "at wait_for (" in outcome["text"]
            assert f"rank {rank} was in all_reduce(float32[8], sum)" in outcome["text"]
    (lasting_job.folder / until).touch()
    assert lasting_job.outcomes(range(late, late + 1))[0]["error"] == "CollectiveTimeout"


@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (3,), pytest.param((1,), marks=pytest.mark.long)])
@operations
def test_ranks_that_are_killed_are_named(
    hosts: TestHosts, tmp_path: Path, lost: tuple[int, ...], operations: list[tuple[str, int]]
) -> None:
    """All of a host, or one of two, whether it carries what its host sends or leaves that to the other."""
    left = [rank for rank in range(4) if rank not in lost]
    try:
        job = Job(hosts, tmp_path)
        job.begin("go_on_until_it_breaks", operations=operations)
        since = time.time()
        job.signal("KILL", range(lost[0], lost[-1] + 1))
        outcomes = [outcome for rank in left for outcome in job.outcomes(range(rank, rank + 1))]
    finally:
        hosts.end_processes()
    check(outcomes, since, lost, f"h{lost[0] // 2}")


@pytest.mark.long
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_vanishes_is_named(tmp_path: Path, host: int) -> None:
    with running_hosts(2, tmp_path) as hosts:
        job = Job(hosts, tmp_path)
        job.begin("go_on_until_it_breaks", operations=SAMPLE)
        since = time.time()
        hosts.end_host(host)
        check(job.outcomes(range(2 - 2 * host, 4 - 2 * host)), since, (2 * host, 2 * host + 1), f"h{host}")
