"""What the launcher says of a rank that ends, is late or is stopped over MPI, on one host and on two.

The launcher is on neither host, and knows both by the connections of the ranks' agents.
"""

from __future__ import annotations

import os
import platform
import signal
import time

import pytest
from tests.launch_support import Launcher, wait_for
from tests.mpi.over_hosts import hosts, remote
from tests.support.faults import BEGIN, ENDS, HANGS_LATE
from tests.support.golden import Job, block_of, check_facts, check_told
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher

__all__ = ["hosts", "remote"]  # fixtures

ON_HOSTS = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def test_a_rank_that_was_killed_is_named_with_its_last_operation(launcher: Launcher) -> None:
    job = Job(launcher, ENDS, "mpi", "killed")
    job.go()
    assert job.end() == 128 + signal.SIGKILL, job.said()
    check_told("killed.mpi.launcher", block_of(job.said()), job.known(platform.node()))


def test_a_rank_that_is_late_or_stopped_is_named_while_the_others_wait(launcher: Launcher) -> None:
    job = Job(launcher, HANGS_LATE, "mpi", options="-q --warn-after 0.5")
    job.await_said(r"^phalanx: rank 2 is at script\.py:\d+ .*, in no operation yet; ranks 0-1 wait for it in init at ")
    job.go("join")
    waits = "ranks 0-1 wait for it in all_reduce #"
    job.await_said(rf"^phalanx: rank 2 is at script\.py:\d+ .*, in no operation; {waits}2 at {job.at('call')}")
    job.go()
    job.await_said(
        rf"^phalanx: rank 2 is stopped \(state T\), after all_reduce #2 .*; {waits}3 at {job.at('last call')}"
    )
    os.kill(job.pid(2), signal.SIGCONT)
    assert job.end() == 0, job.said()


@ON_HOSTS
def test_a_rank_that_raised_is_named_with_its_host(remote: RemoteLauncher) -> None:
    """Open MPI itself ends a rank whose connection to another breaks, so of the others nothing is asked here."""
    job = Job(remote, ENDS, "mpi", "raises", options="-H h0:1,h1:2")
    assert job.end() == 1, job.said()
    host = rf"^  host h1, pid {job.pid(1)}, [\d.]+ s after the start, exit code 1$"
    check_facts(block_of(job.said()), "^phalanx: rank 1 of 3 failed: ValueError: no item 12", host)


CALLS = (
    BEGIN
    + """
dist.init_process_group(backend)
dist.barrier()
(folder / f"ready-{rank}").touch()
while True:
    dist.all_reduce(torch.ones(4))
"""
)


@ON_HOSTS
def test_a_link_that_is_cut_is_said_with_the_host_behind_it(remote: RemoteLauncher) -> None:
    """Of all ranks there, although the launcher hears of the ranks' agents one by one."""
    job = Job(remote, CALLS, "mpi", options="-H h0:1,h1:2")
    ready = [job.folder / f"ready-{rank}" for rank in range(3)]
    wait_for(lambda: all(path.exists() for path in ready) or job.process.poll() is not None, complaint=job.said)
    remote.hosts.cut(1)
    began = time.monotonic()
    assert job.end() == 1, job.said()
    print(f"{time.monotonic() - began:.2f} s after the cut the job had ended")
    remote.hosts.mend(1)
    check_facts(
        block_of(job.said()),
        "^phalanx: rank 1 of 3 failed: host h1 is lost: it has failed, or its network has$",
        rf"^  host h1, pid {job.pid(1)}, [\d.]+ s after the start, ",
        "^  rank 2 then failed with the same error\n  rank 0 ended by the launcher$",
    )
    assert "ended (signal" not in job.said(), job.said()  # nobody can know that
