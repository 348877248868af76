"""A host that is cut off, stopped or dead, while ranks of two hosts wait for each other: every survivor names it.

One job goes through most of it: each test makes a group of all ranks, breaks it, and the next one makes another.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PORT = 29547
PATIENCE_S = 200.0
SOON_S = 30.0  # five seconds on a quiet machine; the timeout of the groups is far from it
MENDED_S = 2.0  # after a cut that was longer, TCP may send again only when the host counts as silent
SMALL, LARGE = 8, 8_000_000
EXCHANGE = ("all_to_all", 200_000)  # whose parts go by way of the memory that the ranks of a host share
SCRIPT = """
    import ctypes, json, os, time
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

    def go_on_until_it_breaks(group, order):
        if order["wait"] and rank == order["wait"]:
            wait_for(order["until"])
        while True:
            OPERATIONS[order["operation"]](group, order["count"])

    def sum_up(group, order):
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

    for number in range(1000):
        wait_for(f"order-{number}")
        order = json.loads((folder / f"order-{number}").read_text())
        group = dist.new_group(range(size), timeout=timedelta(seconds=300))
        dist.barrier(group=group)
        group.set_timeout(timedelta(seconds=order["timeout_s"]))
        (folder / f"ready-{number}-{rank}").write_text(str(os.getpid()))
        try:
            outcome = {"value": globals()[order["body"]](group, order)}
        except Exception as error:
            outcome = {"error": type(error).__name__, "text": str(error), "at": time.time(),
                       "group_rank": getattr(error, "group_rank", None), "pid": getattr(error, "pid", None),
                       "known": [getattr(error, name, None) for name in ("rank", "host", "elapsed_s")]}
            try:
                OPERATIONS["barrier"](group, 0)
            except Exception as again:
                outcome["again"] = type(again).__name__
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
        for rank in range(4):
            own = {"MASTER_ADDR": "h0", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": "4"}
            files = folder / f"out-{rank}", folder / f"err-{rank}"
            hosts.zygotes[rank // 2].fork(script, {**own, "FOLDER": str(folder)}, *files)

    def begin(self, body: str, timeout_s: float = 300.0, **order: Any) -> None:
        """Have the ranks do something, and wait until they do."""
        self.number += 1
        partial = self.folder / "order"
        partial.write_text(json.dumps({"body": body, "timeout_s": timeout_s, "wait": 0, "hold": [], **order}))
        partial.rename(self.folder / f"order-{self.number}")
        self._await(f"ready-{self.number}", range(4), PATIENCE_S)
        time.sleep(0.3)

    def outcomes(self, ranks: range) -> list[dict[str, Any]]:
        """What came of it."""
        self._await(f"outcome-{self.number}", ranks, PATIENCE_S)
        return [json.loads((self.folder / f"outcome-{self.number}-{rank}").read_text()) for rank in ranks]

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


@contextlib.contextmanager
def running_job(folder: Path) -> Iterator[Job]:
    with running_hosts(2, folder) as hosts:
        yield Job(hosts, folder)
        hosts.mend()


@pytest.fixture(scope="module")
def lasting_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    """Hosts on which each test starts a job of its own."""
    with running_hosts(2, tmp_path_factory.mktemp("lost-hosts")) as hosts:
        for zygote in hosts.zygotes:
            zygote.wait_until_ready()  # now, and not in a test: what a test starts may not outlive it
        yield hosts


@pytest.fixture(scope="module")
def lasting_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running_job(tmp_path_factory.mktemp("lost")) as job:
        job.begin("sum_up", until="order-0")  # now, and not in a test: what a test starts may not outlive it
        job.outcomes(range(4))
        yield job


def check(outcomes: list[dict[str, Any]], since: float, lost: tuple[int, ...], host: str) -> None:
    """Every one of these ranks has raised the same, which names the host and the ranks there."""
    for outcome in outcomes:
        assert outcome["error"] == "PeerLost", outcome
        assert outcome["again"] == "PeerLost"  # it stays broken
        assert outcome["group_rank"] in lost, outcome
        assert outcome["pid"] > 0
        rank, host_name, elapsed_s = outcome["known"]
        assert (rank, host_name) == (outcome["group_rank"], host)
        assert 0 < elapsed_s < SOON_S
        assert outcome["at"] - since < SOON_S
        text = outcome["text"]
        assert host in text
        assert any(f"rank {rank} of the group" in text for rank in lost)
        assert "gloo" not in text.lower()
        assert ".cc:" not in text


SAMPLE = [("all_reduce", LARGE), ("messages", SMALL), ("barrier", SMALL)]
COPIES = ["broadcast", "all_gather", "all_to_all", "gather", "scatter"]
OTHERS = [
    pytest.param(operation, count, marks=pytest.mark.long)
    for operation in ["all_reduce", "reduce_scatter", "reduce", "messages", *COPIES]
    for count in (SMALL, LARGE)
    if (operation, count) not in SAMPLE
]
STOPPED = [*SAMPLE[:2], EXCHANGE, pytest.param("barrier", SMALL, marks=pytest.mark.long), *OTHERS]
# A job ends with each: all are drawn once in a while (make fault), and always the same few.
EVERY_KILL = [
    (operation, count, host)
    for operation in ["all_reduce", "reduce_scatter", "reduce", "barrier", "messages", *COPIES]
    for count in (SMALL, LARGE)
    for host in (0, 1)
    if (operation, count) != ("barrier", LARGE)
]
DRAWN = random.Random(12).sample(EVERY_KILL, 3)
KILLED = [kill if kill in DRAWN else pytest.param(*kill, marks=pytest.mark.fault) for kill in EVERY_KILL]
KILLED += [(*EXCHANGE, 1), pytest.param(*EXCHANGE, 0, marks=pytest.mark.fault)]


@pytest.mark.parametrize(("operation", "count"), [*SAMPLE, EXCHANGE, *OTHERS])
def test_both_sides_of_a_cut_name_the_other_host(lasting_job: Job, operation: str, count: int) -> None:
    lasting_job.begin("go_on_until_it_breaks", operation=operation, count=count)
    since = time.time()
    lasting_job.hosts.cut(0)  # the host with the job's store
    outcomes = lasting_job.outcomes(range(4))
    lasting_job.hosts.mend()
    check(outcomes[:2], since, (2, 3), "h1")
    check(outcomes[2:], since, (0, 1), "h0")
    assert all("is cut" in outcome["text"] for outcome in outcomes), outcomes


@pytest.mark.parametrize(("operation", "count"), STOPPED)
def test_a_host_whose_ranks_are_all_stopped_is_told_from_one_that_is_cut_off(
    lasting_job: Job, operation: str, count: int
) -> None:
    lasting_job.begin("go_on_until_it_breaks", operation=operation, count=count)
    since = time.time()
    lasting_job.signal("STOP", range(2, 4))
    outcomes = lasting_job.outcomes(range(2))
    lasting_job.signal("CONT", range(2, 4))
    check(outcomes, since, (2, 3), "h1")
    assert all("stopped" in outcome["text"] for outcome in outcomes)
    lasting_job.outcomes(range(4))


@pytest.mark.parametrize("wait", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_host_that_is_cut_off_while_ranks_wait_for_one_that_computes_is_named(lasting_job: Job, wait: int) -> None:
    until = f"computed-{lasting_job.number}"
    lasting_job.begin("go_on_until_it_breaks", operation="all_reduce", count=SMALL, wait=wait, until=until)
    since = time.time()
    lasting_job.hosts.cut(1)
    others = [rank for rank in range(4) if rank != wait]
    for rank in others:
        outcome = lasting_job.outcomes(range(rank, rank + 1))
        check(outcome, since, (2, 3) if rank < 2 else (0, 1), "h1" if rank < 2 else "h0")
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


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_rank_that_does_not_come_is_named_with_its_host_and_place(lasting_job: Job, late: int) -> None:
    until = f"came-{lasting_job.number}"
    order = {"operation": "all_reduce", "count": SMALL, "wait": late, "until": until}
    lasting_job.begin("go_on_until_it_breaks", timeout_s=2.0, **order)
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


@pytest.mark.parametrize(("operation", "count", "host"), KILLED)
def test_a_host_whose_ranks_are_all_killed_is_named(
    lasting_hosts: TestHosts, tmp_path: Path, operation: str, count: int, host: int
) -> None:
    try:
        job = Job(lasting_hosts, tmp_path)
        job.begin("go_on_until_it_breaks", operation=operation, count=count)
        since = time.time()
        lost = range(2 * host, 2 * host + 2)
        job.signal("KILL", lost)
        outcomes = job.outcomes(range(2 - 2 * host, 4 - 2 * host))
    finally:
        lasting_hosts.end_processes()
    check(outcomes, since, tuple(lost), f"h{host}")


@pytest.mark.long
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_vanishes_is_named(tmp_path: Path, host: int) -> None:
    with running_job(tmp_path) as job:
        job.begin("go_on_until_it_breaks", operation="all_reduce", count=LARGE)
        since = time.time()
        job.hosts.end_host(host)
        check(job.outcomes(range(2 - 2 * host, 4 - 2 * host)), since, (2 * host, 2 * host + 1), f"h{host}")


@pytest.mark.parametrize("lost", [2, 3, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_in_an_exchange_is_named(lasting_hosts: TestHosts, tmp_path: Path, lost: int) -> None:
    """Whether it carries what its host sends, or has only put its parts where another rank finds them."""
    try:
        job = Job(lasting_hosts, tmp_path)
        job.begin("go_on_until_it_breaks", operation=EXCHANGE[0], count=EXCHANGE[1])
        since = time.time()
        job.signal("KILL", range(lost, lost + 1))
        outcomes = [job.outcomes(range(rank, rank + 1))[0] for rank in range(4) if rank != lost]
    finally:
        lasting_hosts.end_processes()
    check(outcomes, since, (lost,), f"h{lost // 2}")
