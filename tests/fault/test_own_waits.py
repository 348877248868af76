"""Without ``phalanx run`` a rank that waits says for whom, and where that one is, long before the group's timeout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.golden import await_facts
from tests.support.waiting import soon, stop

SCRIPT = """
    import ctypes, os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host

    rank, size, hosts, holds_lock = map(int, sys.argv[1:5])
    is_absent, folder = str(rank) in sys.argv[5].split(","), Path(sys.argv[6])
    if hosts > 1:
        pretend_host(rank * hosts // size)
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    dist.barrier()  # before

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)  # sleeps

    if is_absent and holds_lock:
        ctypes.PyDLL(None).system(f"until test -e {folder}/go; do sleep 0.05; done".encode())
    elif is_absent:
        wait_for("go")
    dist.all_reduce(torch.ones(4))  # call
    dist.destroy_process_group()
"""


class Job:
    """Ranks that no launcher has started."""

    def __init__(
        self,
        folder: Path,
        size: int,
        hosts: int = 1,
        *,
        warn_after: str = "0.5",
        absent: str = "1",
        holds_lock: bool = False,
    ) -> None:
        self.folder, self.script = folder, folder / "script.py"
        self.script.write_text(dedent(SCRIPT))
        environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], "PHALANX_WARN_AFTER": warn_after}
        self.ranks = []
        for rank in range(size):
            with open(folder / f"err-{rank}", "wb") as err:
                command = [sys.executable, *map(str, (self.script, rank, size, hosts, int(holds_lock), absent, folder))]
                self.ranks.append(subprocess.Popen(command, env=environment, stderr=err))

    def said(self, rank: int) -> str:
        return (self.folder / f"err-{rank}").read_text()

    def has_ended(self) -> bool:
        return any(rank.poll() is not None for rank in self.ranks)

    def waits(self, who: str, others: str) -> str:
        """The line that names these ranks and says that the others wait for them in the call."""
        call = f"all_reduce #2 at {self.script}:{self.line('call')}"
        return rf"^phalanx: {who}; {others} for it in {call}, for [\d.]+ s now$"

    def line(self, mark: str) -> int:
        return 1 + next(at for at, line in enumerate(dedent(SCRIPT).splitlines()) if line.endswith(f"  # {mark}"))

    def at_wait_for(self) -> str:
        sleeps = self.line("sleeps")
        return rf"is at wait_for \({self.script}:({sleeps}|{sleeps - 1})\), in no operation"

    def await_said(self, rank: int, line: str) -> None:
        await_facts(lambda: self.said(rank), self.has_ended, lambda: line)

    def finish(self) -> None:
        (self.folder / "go").touch()
        assert [rank.wait(300) for rank in self.ranks] == [0] * len(self.ranks), [
            *map(self.said, range(len(self.ranks)))
        ]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


@pytest.mark.parametrize(
    ("size", "hosts", "others"),
    [
        (3, 1, "ranks 0, 2 wait"),
        (4, 2, "rank 0 waits"),
        pytest.param(2, 1, "rank 0 waits", marks=pytest.mark.long),
        pytest.param(5, 1, "ranks 0, 2-4 wait", marks=pytest.mark.long),
    ],
)
def test_first_rank_that_waits_says_for_whom_and_that_it_is_stopped(
    jobs: list[Job], tmp_path: Path, size: int, hosts: int, others: str
) -> None:
    jobs.append(job := Job(tmp_path, size, hosts))
    job.await_said(0, job.waits(f"rank 1 {job.at_wait_for()}", others))
    stop(job.ranks[1].pid)
    before = rf"after barrier #1 at {job.script}:{job.line('before')}"
    job.await_said(0, job.waits(rf"rank 1 is stopped \(state T\), {before}", others))
    os.kill(job.ranks[1].pid, signal.SIGCONT)
    job.finish()
    for rank in range(size):
        for line in job.said(rank).splitlines():
            # On a busy machine another one is the first, as long as rank 0 has not come.
            waiting = re.search(r"ranks? (\d)[\d, -]*( wait|, which wait)s? for ", line)
            assert waiting is not None, line
            assert int(waiting[1]) == rank, line


def test_it_is_said_ever_more_seldom(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path, 2, warn_after="1"))

    def of_one_wait() -> list[str]:
        """On a busy machine there may have been others before it."""
        return [line for line in job.said(0).splitlines() if " for it in all_reduce #2 at " in line]

    assert soon(lambda: len(of_one_wait()) >= 2, 300) or job.has_ended()
    job.finish()
    times = [float(line.rpartition(", for ")[2].split()[0]) for line in of_one_wait()]
    assert len(times) >= 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(times)), times


# Ranks 0 and 1 are on the first host if there are more than two; of five, 2 and 3 are on the second one.
@pytest.mark.parametrize(
    ("size", "hosts", "absent", "others"),
    [
        (2, 2, 0, "rank 1 waits"),
        (3, 2, 2, "ranks 0-1 wait"),
        pytest.param(5, 3, 4, "ranks 0-3 wait", marks=pytest.mark.long),
    ],
)
def test_a_rank_of_another_host_is_named_too(
    jobs: list[Job], tmp_path: Path, size: int, hosts: int, absent: int, others: str
) -> None:
    jobs.append(job := Job(tmp_path, size, hosts, absent=str(absent)))
    first = 0 if absent else 1
    job.await_said(first, job.waits(f"rank {absent} on h{absent * hosts // size} {job.at_wait_for()}", others))
    job.finish()
    for rank in range(size):
        # A busy machine may have kept it from the group before, and any rank may be the first to have noticed that.
        said = [line for line in job.said(rank).splitlines() if " to make a group of " not in line]
        assert rank == first or not said, said


def test_the_next_rank_answers_for_a_host_whose_first_is_stopped(jobs: list[Job], tmp_path: Path) -> None:
    """Ranks 2 and 3 are on the other host, and both stay away."""
    jobs.append(job := Job(tmp_path, 4, 2, absent="2,3"))
    assert soon(lambda: "ranks 2-3 on h1 are at wait_for" in job.said(0), 60), [*map(job.said, range(4))]
    stop(job.ranks[2].pid)
    assert soon(lambda: "rank 2 on h1 is stopped (state T)" in job.said(0), 60), [*map(job.said, range(4))]
    assert "rank 3 on h1 is at wait_for" in job.said(0)
    os.kill(job.ranks[2].pid, signal.SIGCONT)
    job.finish()


def test_a_host_of_which_nobody_answers_is_named(jobs: list[Job], tmp_path: Path) -> None:
    """Its only rank holds the interpreter's lock in C code."""
    jobs.append(job := Job(tmp_path, 2, 2, absent="1", holds_lock=True))
    said = "rank 1 on h1 is out of sight: the host does not answer; rank 0 waits for it in all_reduce #2 at "
    assert soon(lambda: said in job.said(0), 60), [*map(job.said, range(2))]
    job.finish()


@pytest.mark.parametrize("hosts", [1, 2])
def test_nothing_is_said_if_the_user_wants_that(jobs: list[Job], tmp_path: Path, hosts: int) -> None:
    jobs.append(job := Job(tmp_path, 2, hosts, warn_after="0"))
    soon(job.has_ended, 1.5)  # for nothing to be said
    job.finish()
    assert [job.said(rank) for rank in range(2)] == ["", ""]
