"""Without ``phalanx run`` a rank that waits for others to make a group says for whom, long before the timeout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.waiting import soon

SCRIPT = """
    import sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank, size, how, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    last = rank == size - 1
    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)

    if how == "last" and last or how == "first" and rank == 0 or how == "half" and rank <= size // 2:
        wait_for("go")
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    if how == "group":
        if last:
            wait_for("go")
        dist.new_group([0, size - 1])
    dist.barrier()
    dist.destroy_process_group()
"""

PATIENCE_S = 240.0  # a busy machine takes long to import torch five times


class Job:
    """Ranks that no launcher has started."""

    def __init__(self, folder: Path, size: int, how: str, warn_after: str = "0.3") -> None:
        self.folder, script = folder, folder / "script.py"
        script.write_text(dedent(SCRIPT))
        environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], "PHALANX_WARN_AFTER": warn_after}
        self.ranks = []
        for rank in range(size):
            with open(folder / f"err-{rank}", "wb") as err:
                command = [sys.executable, str(script), str(rank), str(size), how, str(folder)]
                self.ranks.append(subprocess.Popen(command, env=environment, stderr=err))

    def lines(self) -> list[tuple[int, str]]:
        """What the ranks have said of their waits: the rank, and its line."""
        said = [(rank, (self.folder / f"err-{rank}").read_text()) for rank in range(len(self.ranks))]
        return [(rank, line) for rank, text in said for line in text.splitlines() if "waits for" in line]

    def everything(self) -> str:
        return "\n".join((self.folder / f"err-{rank}").read_text() for rank in range(len(self.ranks)))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


def text(missing: int, group: str) -> str:
    return (
        rf"phalanx: rank {missing} has not come as far as rank (\d+), which waits for it to make a group of {group}, "
        r"for \d+ s now"
    )


@pytest.mark.parametrize(("how", "size"), [("last", 3), ("first", 3), ("group", 3), ("half", 5)])
def test_one_of_the_ranks_that_wait_says_for_whom(jobs: list[Job], tmp_path: Path, how: str, size: int) -> None:
    jobs.append(job := Job(tmp_path, size, how))
    # Of the first half only rank 0 is waited for, by ranks that do not know whether the others of it have come.
    missing, come = {
        "first": (0, {*range(1, size)}),
        "half": (0, {*range(size // 2 + 1, size)}),
        "group": (size - 1, {0}),
    }.get(how, (size - 1, {*range(size - 1)}))
    members = f"ranks 0, {size - 1}" if how == "group" else f"ranks 0-{size - 1}"
    line = re.compile(text(missing, members))

    def said_by() -> list[tuple[int, int]]:
        """The ranks that have said it, each with the rank that it names as waiting."""
        return [(rank, int(found[1])) for rank, said in job.lines() if (found := line.fullmatch(said))]

    has_ended = lambda: any(job.ranks[rank].poll() is not None for rank in come)  # noqa: E731
    assert soon(lambda: bool(said_by()) or has_ended(), PATIENCE_S), job.everything()
    rank, named = said_by()[0]
    assert rank == named, job.everything()
    assert rank in come, job.everything()
    (tmp_path / "go").touch()
    assert [rank.wait(200) for rank in job.ranks] == [0] * size, job.everything()


def test_nothing_is_said_if_the_user_wants_that(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path, 2, "last", warn_after="0"))
    assert not soon(lambda: job.lines() != [], 4.0)
    (tmp_path / "go").touch()
    assert [rank.wait(200) for rank in job.ranks] == [0, 0], job.everything()
