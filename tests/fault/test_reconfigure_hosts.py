"""All ranks of one of two hosts are killed: the other host's ranks go on in the same processes, and a newcomer joins.

The hosts have networks and /dev/shm of their own. The store is in a process of its own, which outlives every rank.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.support.constellations import WAYS
from tests.support.hosts import PATIENCE_S, TestHosts, running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

RANKS = 4  # at first, two on each host
NEWCOMER = 4  # its number; the first ranks have 0 to 3
SERVE = """
    import os, time
    from pathlib import Path
    from torch._C._distributed_c10d import TCPStore

    folder = Path(os.environ["FOLDER"])
    store = TCPStore("h0", 0, is_master=True, wait_for_workers=False)
    (folder / "port.part").write_text(str(store.port))
    (folder / "port.part").rename(folder / "port")
    while not (folder / "over").exists():
        time.sleep(0.01)
"""
TAKE_PART = """
    import json, os
    from pathlib import Path
    import torch
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from phalanx.errors import PeerLost
    from tests.support import constellations
    from tests.support.constellations import summed
    from tests.support.ranks import Member

    COUNT = 1_000_000

    class Remote(Member):
        def store(self, name="store"):
            port = int((self.folder / "port").read_text())
            return PrefixStore(name, TCPStore("h0", port, is_master=False, wait_for_workers=False))

    member = Remote(int(os.environ["NUMBER"]), 4, Path(os.environ["FOLDER"]))
    others, newcomer = json.loads(os.environ["OTHERS"]), int(os.environ["NEWCOMER"])

    def come_together(name, ranks):
        member.say(f"{name}-{member.rank}")
        member.await_said(*(f"{name}-{rank}" for rank in ranks))

    def used(members):
        # Every rank's part in a small sum and in a large one, and what comes round the ring, in both directions.
        group, own = mine.group, float(10**member.rank)
        rank, size = group.rank(), group.size()
        small, large = summed(group, own), summed(group, own, COUNT)
        from_left, from_right = torch.empty(COUNT), torch.empty(1)
        works = [
            group.send([torch.full((COUNT,), own)], (rank + 1) % size, 1),
            group.send([torch.full((1,), own)], (rank - 1) % size, 2),
            group.recv([from_left], (rank - 1) % size, 1),
            group.recv([from_right], (rank + 1) % size, 2),
        ]
        for work in works:
            work.wait()
        come_together(f"used-{len(members)}", members)  # torchft's way ends what a rank that is behind still does
        return [rank, size, sorted(set(small)), sorted(set(large)), sorted(set(from_left.tolist())), from_right.item()]

    found = {}
    mine = getattr(constellations, os.environ["WAY"])(member)
    if member.rank != newcomer:
        mine.change(1, range(4))
        found["all"] = used(range(4))
        (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))
        member.say(f"ready-{member.rank}")
        try:
            while True:
                summed(mine.group, 1.0, COUNT)
        except PeerLost as error:
            found["lost"] = [error.group_rank, error.host, str(error)]
        come_together("lost", others)
        mine.change(2, others)
        found["fewer"] = used(others)
        come_together("fewer", others)
    come_together("there", [*others, newcomer])
    mine.change(3, [*others, newcomer])
    found["more"] = used([*others, newcomer])
    mine.end()
    (member.folder / f"found-{member.rank}").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(2, tmp_path_factory.mktemp("hosts")) as two:
        for zygote in two.zygotes:
            zygote.wait_until_ready()  # now, and not in a test: what a test starts may not outlive it
        yield two


class Job:
    """Processes that the hosts' zygotes have started, and the folder in which they leave word."""

    def __init__(self, hosts: TestHosts, folder: Path, way: str) -> None:
        self._hosts, self._folder, self._way = hosts, folder, way
        self._started: list[tuple[int, int, Path]] = []

    def start(self, host: int, name: str, script: str, **environment: str) -> int:
        """Start a process; what ``code`` knows it by."""
        path, err = self._folder / f"{name}.py", self._folder / f"err-{name}"
        path.write_text(dedent(script))
        own = {"FOLDER": str(self._folder), "WAY": self._way, **environment}
        number = self._hosts.zygotes[host].fork(path, own, self._folder / f"out-{name}", err)
        self._started.append((host, number, err))
        return len(self._started) - 1

    def code(self, process: int) -> int | None:
        host, number, _ = self._started[process]
        return self._hosts.zygotes[host].code(number)

    def kill(self, host: int, ranks: Sequence[int]) -> None:
        """Kill ranks of a host, by one command there."""
        pids = [(self._folder / f"pid-{rank}").read_text() for rank in ranks]
        assert self._hosts.start(host, ["kill", "-KILL", *pids], {}).wait(60) == 0

    def until(self, happens: Callable[[], bool], what: str) -> None:
        """Wait for what the processes do; fails with all that they have said if one fails, or hangs."""
        limit = time.monotonic() + PATIENCE_S
        while not happens():
            failed = any(self.code(process) not in (None, 0, -signal.SIGKILL) for process in range(len(self._started)))
            if failed or time.monotonic() > limit:
                for zygote in self._hosts.zygotes:
                    zygote.show_stacks()
                time.sleep(2)
                pytest.fail("\n".join([f"no {what}:", *(err.read_text() for *_, err in self._started)]))
            time.sleep(0.01)

    def until_said(self, *names: str) -> None:
        self.until(lambda: all((self._folder / name).exists() for name in names), f"{names}")


@contextlib.contextmanager
def job_with_store(hosts: TestHosts, folder: Path, way: str) -> Iterator[Job]:
    job = Job(hosts, folder, way)
    try:
        job.start(0, "store", SERVE)
        job.until_said("port")
        yield job
        (folder / "over").touch()
        job.until(lambda: job.code(0) == 0, "end of the store")
    finally:
        hosts.end_processes()


def shared_memory(hosts: TestHosts, host: int) -> set[str]:
    listing = hosts.start(host, ["ls", "/dev/shm"], {}, stdout=subprocess.PIPE)
    out, _ = listing.communicate(timeout=60)
    assert listing.returncode == 0
    return set(out.decode().split())


def expected(members: Sequence[int], member: int) -> list[Any]:
    """What a member finds when these use their group."""
    place, size = members.index(member), len(members)
    total = float(sum(10**other for other in members))
    left, right = members[(place - 1) % size], members[(place + 1) % size]
    return [place, size, [total], [total], [float(10**left)], float(10**right)]


@pytest.mark.parametrize("lost_host", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_a_host_is_lost_and_a_newcomer_comes_there(hosts: TestHosts, tmp_path: Path, way: type, lost_host: int) -> None:
    lost = [rank for rank in range(RANKS) if rank // 2 == lost_host]
    others = [rank for rank in range(RANKS) if rank not in lost]
    before = [shared_memory(hosts, host) for host in range(2)]
    with job_with_store(hosts, tmp_path, way.__name__) as job:
        known = {"OTHERS": json.dumps(others), "NEWCOMER": str(NEWCOMER)}
        ranks = [job.start(rank // 2, f"rank-{rank}", TAKE_PART, NUMBER=str(rank), **known) for rank in range(RANKS)]
        job.until_said(*(f"ready-{rank}" for rank in range(RANKS)))
        job.kill(lost_host, lost)
        job.until_said(*(f"fewer-{rank}" for rank in others))
        newcomer = job.start(lost_host, "newcomer", TAKE_PART, NUMBER=str(NEWCOMER), **known)
        ending = [*(ranks[rank] for rank in others), newcomer]
        job.until(lambda: all(job.code(process) == 0 for process in ending), "end of those that are there at last")
        assert [job.code(ranks[rank]) for rank in lost] == [-signal.SIGKILL] * 2
        assert [shared_memory(hosts, host) for host in range(2)] == before
    found = {rank: json.loads((tmp_path / f"found-{rank}").read_text()) for rank in [*others, NEWCOMER]}
    together = [*others, NEWCOMER]
    assert found[NEWCOMER] == {"more": expected(together, NEWCOMER)}
    for rank in others:
        group_rank, host, text = found[rank].pop("lost")
        assert group_rank in lost, text
        assert host == f"h{lost_host}", text
        assert f"rank {group_rank} of the group" in text
        assert found[rank] == {
            "all": expected(range(RANKS), rank),
            "fewer": expected(others, rank),
            "more": expected(together, rank),
        }
