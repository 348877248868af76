"""Strangers at the ports of ``phalanx run --mpi``: the store's, and those where the ranks of its hosts report."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fault.test_strangers import (
    HAS_EVERYTHING,
    LENGTHS,
    Attack,
    await_steps,
    listening,
    needs_hosts,
    sockets_of,
    start_everything,
)
from tests.launch_support import Launcher
from tests.mpi.over_hosts import hosts, remote
from tests.support.inventory import children_of
from tests.support.remote import RemoteLauncher
from tests.support.strangers import NOBODY, needs_another_user

__all__ = ["hosts", "remote"]  # fixtures


def doors_of(pid: int) -> list[tuple[str, int]]:
    """Where the launcher listens; what listens in the processes of MPI itself is MPI's own."""
    return listening(pid, set().union(*map(sockets_of, [pid, *children_of(pid)])))


@needs_another_user
@LENGTHS
def test_another_user_at_the_doors_of_a_job_does_not_hold_it_up(
    launcher: Launcher, seconds: float, limit_s: float
) -> None:
    """A rank that has to wait for the attacker waits for as long as he wants."""
    job = start_everything(launcher)
    doors = doors_of(job.pid)
    assert len(doors) >= 2  # the store's, and that of the agents, which are the ranks' parents
    attack = Attack((), NOBODY, doors)
    attack.attack_all(seconds, lambda: job.process.poll() is None)
    (launcher.directory / "over").touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    attack.check_delays(launcher.directory, limit_s)


@needs_hosts
@pytest.mark.long
@LENGTHS
def test_somebody_on_another_host_at_the_doors_does_not_hold_a_job_up(
    remote: RemoteLauncher, tmp_path: Path, seconds: float, limit_s: float
) -> None:
    job = remote.start("-H", "h0:2,h1:1", remote.script(HAS_EVERYTHING), str(tmp_path))
    await_steps(tmp_path, lambda: job.process.poll() is not None, job.said)
    doors = doors_of(job.process.pid)
    assert doors, "the launcher does not listen"
    attack = Attack(remote.hosts.entry(1), NOBODY, doors)  # from the other host, as nobody
    attack.attack_all(seconds, lambda: job.process.poll() is None)
    (tmp_path / "over").touch()
    assert job.finish() == 0, job.said()
    attack.check_delays(tmp_path, limit_s)
