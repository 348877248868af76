"""A rank that is stopped is named long before ``--warn-after``, with the launcher's other options at their defaults."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.waiting import stop

__all__ = ["hosts", "launcher", "remote"]

SCRIPT = """\
import os, pathlib, sys, time
import torch
import torch.distributed as dist
import phalanx

if sys.argv[1] == "gloo":
    dist.init_process_group("gloo")
    all_reduce, rank = dist.all_reduce, dist.get_rank()
else:
    world = phalanx.init()
    all_reduce, rank = world.all_reduce, world.rank
x = torch.zeros(4)
all_reduce(x)
(pathlib.Path(__file__).parent / f"part-{rank}").write_text(str(os.getpid()))
(pathlib.Path(__file__).parent / f"part-{rank}").rename(pathlib.Path(__file__).parent / f"pid-{rank}")
end = pathlib.Path(__file__).parent / "end"
while not x[0]:
    x[0] = end.exists()
    all_reduce(x)
"""
# No other line comes within the test.
LATE = ("--warn-after", "600", "--report-after", "600")
NAMED = r"phalanx: rank 1{} is stopped \(state T\), (in|after) all_reduce #\d+ at \S*script\.py:\d+; "
# A rank of another host may be in the next one, if the stopped one has done its part for that host and not for its own.
WAITING = (
    r"ranks 0, 2 wait for it in all_reduce #\d+ at \S*script\.py:\d+( and all_reduce #\d+ at \S*script\.py:\d+)?, "
)
WAITING += r"for \d+ s now\n"
SUSPENDED_S = 6.0


def pids(folder: Path) -> list[int]:
    files = [folder / f"pid-{rank}" for rank in range(3)]
    wait_for(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_it_is_named_and_the_job_goes_on_with_it(launcher: Launcher, tmp_path: Path, backend: str) -> None:
    errors = tmp_path / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *LATE, launcher.script(SCRIPT), backend, stderr=file)
    victim = pids(launcher.directory)[1]
    stop(victim)
    line = re.compile(NAMED.format("") + WAITING)
    wait_for(lambda: line.search(errors.read_text()) is not None, complaint=errors.read_text)
    (launcher.directory / "end").touch()
    os.kill(victim, signal.SIGCONT)
    assert job.finish().code == 0
    assert errors.read_text().count(" wait for it in ") == 1, errors.read_text()


def test_nobody_is_named_in_a_job_that_is_suspended(launcher: Launcher, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *LATE, launcher.script(SCRIPT), "phalanx", stderr=file)
    ranks = pids(launcher.directory)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)  # for nothing to be said
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    (launcher.directory / "end").touch()
    assert job.finish().code == 0
    assert " wait for it in " not in errors.read_text(), errors.read_text()


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_it_is_named_with_its_host(remote: RemoteLauncher) -> None:
    job = remote.start("-H", "h0:1,h1:2", *LATE, remote.script(SCRIPT), "phalanx")
    pids(remote.folder)  # each host counts its own
    victim = remote.wait_for_process(1, "rank-1")
    stop(victim)
    line = re.compile(NAMED.format(" on h1") + WAITING)
    wait_for(lambda: line.search(job.err) is not None, complaint=job.said)
    (remote.folder / "end").touch()
    os.kill(victim, signal.SIGCONT)
    assert job.finish() == 0, job.said()
    assert job.err.count(" wait for it in ") == 1, job.said()
