"""``phalanx run --restarts K`` with ranks on other hosts: every attempt starts them as the first one did."""

from __future__ import annotations

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def test_ranks_of_two_hosts_are_started_again_after_one_was_killed(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, signal, torch, phalanx
        world = phalanx.init()
        total = torch.tensor([1.0 + world.rank])
        world.all_reduce(total)
        print(world.attempt, world.rank, world.node_rank, total.item(), flush=True)
        world.barrier()  # all have printed, before the launcher ends them
        if (world.attempt, world.rank) == (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    """)
    job = remote.run("-H", "h0:1,h1:2", "--no-prefix", "--restarts", "1", script)
    assert job.process.returncode == 0, job.said()
    first, again = job.out.splitlines()[:3], job.out.splitlines()[3:]
    assert sorted(first) == ["0 0 0 6.0", "0 1 1 6.0", "0 2 1 6.0"], job.said()
    assert sorted(again) == ["1 0 0 6.0", "1 1 1 6.0", "1 2 1 6.0"], job.said()
    said = [line for line in job.err.splitlines() if line.startswith("phalanx:")]
    assert said == ["phalanx: rank 1 of 3 failed", "phalanx: attempt 1 of 2 failed; attempt 2 of 2 starts now"]
    assert job.err.count("phalanx run: 3 ranks") == 1  # the table is shown once
