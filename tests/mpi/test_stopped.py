"""A process of the launcher's is stopped (SIGSTOP): the job can be ended, and no rank's end is hidden."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob
from tests.mpi.test_launch import MEET, find, nothing_left, wait_for_ranks
from tests.support.waiting import stop

SOON_S = 100.0  # far below the time for which the ranks wait if nobody ends them
WAIT = MEET + "while True: time.sleep(300)\n"
victims = pytest.mark.parametrize("victim", ["mpiexec", "phalanx-shim", "phalanx-agent"])


def stat(pid: int) -> list[str]:
    """The state of a process, its parent, and what else there is."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def of_rank(job: RunningJob, victim: str, rank: int) -> int:
    """The process of that name above a rank."""
    agent = int(stat(rank)[1])
    return {"phalanx-agent": agent, "phalanx-shim": int(stat(agent)[1])}.get(victim) or find(job, victim)


@victims
def test_signal_ends_the_job(launcher: Launcher, victim: str) -> None:
    job = launcher.start("-n", "3", "-q", "--grace", "250", launcher.script(WAIT))
    with nothing_left(wait_for_ranks(job, 3)):
        stop(find(job, victim))
        job.process.send_signal(signal.SIGTERM)
        assert job.finish(SOON_S).code == 128 + signal.SIGTERM
        job.wait_until_gone(SOON_S)


@victims
def test_end_of_a_rank_is_not_hidden(launcher: Launcher, victim: str) -> None:
    job = launcher.start("-n", "3", "-q", "--grace", "250", launcher.script(WAIT))
    with nothing_left(wait_for_ranks(job, 3)):
        rank = job.ranks()[1]
        stop(of_rank(job, victim, rank))
        os.kill(rank, signal.SIGKILL)
        outcome = job.finish(SOON_S)
    assert outcome.code == 128 + signal.SIGKILL, outcome.err_text
    assert "phalanx: rank 1 of 3 failed\n" in outcome.err_text
    assert f"pid {rank}, " in outcome.err_text
    job.wait_until_gone(SOON_S)
