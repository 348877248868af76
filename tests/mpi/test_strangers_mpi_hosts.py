"""A stranger on the network at the ports of ``phalanx run --mpi``, where the ranks of two hosts report."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mpi.over_hosts import hosts, remote
from tests.support.attackers import NOBODY, Attack, attack_all, delays, listening, sockets_of
from tests.support.hosts import why_no_hosts
from tests.support.inventory import children_of
from tests.support.remote import RemoteLauncher
from tests.support.waiting import soon

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PATIENCE_S = 200.0  # no busy machine needs as long

SCRIPT = """
    import json, pathlib, sys, time
    import torch
    import phalanx
    folder = pathlib.Path(sys.argv[1])
    world = phalanx.init(timeout_s=100, quiet=True)
    steps, works = [], True
    while works:
        began = time.monotonic()
        over = torch.tensor([float((folder / "over").exists())])
        world.all_reduce(over)
        works = not over.item()
        print(f"step {len(steps)}")  # which goes over the connection to the launcher
        steps.append((began, time.monotonic()))
        (folder / f"works-{world.rank}").touch()
        time.sleep(0.003)
    (folder / f"steps-{world.rank}").write_text(json.dumps(steps))
    phalanx.close()
"""


# How long each attack takes, and what a step may take longer meanwhile, both in seconds.
@pytest.mark.parametrize(("seconds", "limit_s"), [(0.5, 7.0), pytest.param(5.0, 1.0, marks=pytest.mark.fault)])
def test_somebody_on_another_host_at_the_doors_of_a_job_does_not_hold_it_up(
    remote: RemoteLauncher, tmp_path: Path, seconds: float, limit_s: float
) -> None:
    job = remote.start("-H", "h0:2,h1:1", remote.script(SCRIPT), str(tmp_path))
    works = [tmp_path / f"works-{rank}" for rank in range(3)]
    assert soon(lambda: all(file.exists() for file in works) or job.process.poll() is not None, PATIENCE_S)
    assert job.process.poll() is None, job.said()
    # What listens in the processes of MPI itself is MPI's own.
    own = [job.process.pid, *children_of(job.process.pid)]
    doors = listening(job.process.pid, set().union(*map(sockets_of, own)))
    assert doors, "the launcher does not listen"
    attack = Attack(remote.hosts.entry(1), NOBODY, doors)  # from the other host, as nobody
    attack_all(attack, seconds, lambda: job.process.poll() is None)
    (tmp_path / "over").touch()
    assert job.finish() == 0, job.said()
    assert max(delays(tmp_path, attack).values()) < limit_s
