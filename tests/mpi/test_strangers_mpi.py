"""Another user at the ports of a job that an MPI launcher has started: the launcher's door, where its ranks report."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch_support import Launcher
from tests.support.attackers import NOBODY, Attack, attack_all, delays, listening, sockets_of, start_everything
from tests.support.strangers import needs_another_user


@needs_another_user
@pytest.mark.parametrize(("seconds", "limit_s"), [(0.5, 7.0), pytest.param(5.0, 1.0, marks=pytest.mark.fault)])
def test_another_user_at_the_doors_of_a_job_does_not_hold_it_up(
    launcher: Launcher, seconds: float, limit_s: float
) -> None:
    """A rank that has to wait for the attacker waits for as long as he wants."""
    job = start_everything(launcher)
    # What listens in the processes of MPI itself is MPI's own.
    own = [job.pid, *map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())]
    doors = listening(job.pid, set().union(*map(sockets_of, own)))
    assert len(doors) >= 2  # the store's, and that of the keepers, which stand beside the ranks
    attack = Attack((), NOBODY, doors)
    attack_all(attack, seconds, lambda: job.process.poll() is None)
    (launcher.directory / "over").touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert max(delays(launcher.directory, attack).values()) < limit_s
