"""``phalanx top`` and ``phalanx stop`` for a job on several hosts, called where its launcher runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from tests.launch_support import wait_for
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx.launch.running.jobs import running_jobs

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def test_the_ranks_of_all_hosts_are_shown_or_those_of_this_one_and_stop_ends_them_all(
    remote: RemoteLauncher,
) -> None:
    script = remote.script("""
        import time, torch, phalanx
        world = phalanx.init()
        x = torch.ones(4)
        world.all_reduce(x)
        print("ready", flush=True)
        if world.rank == 2:
            time.sleep(300)
        world.barrier()
    """)
    job = remote.start("-q", "-H", "localhost:2,h1:1", script)
    job.wait_for_lines(3, "ready")
    described = next(one for one in running_jobs() if one.target == script)
    assert described.hosts == ("localhost", "h1")

    def kinds(*options: str) -> list[str | None]:
        ranks = json.loads(phalanx("top", described.id, "--once", "--json", *options))["ranks"]
        assert [rank["rank"] for rank in ranks] == [*range(len(ranks))]
        return [rank["operation"] and rank["operation"]["kind"] for rank in ranks]

    # What they have printed comes before their last call.
    wait_for(lambda: kinds() == ["barrier", "barrier", None])
    assert kinds("--here") == ["barrier", "barrier"]
    shown = json.loads(phalanx("top", described.id, "--once", "--json", "--here"))
    assert shown["elsewhere"] == {"h1": [2]}
    assert "note: rank 2 on h1: not shown" in phalanx("top", described.id, "--once", "--here")
    assert "3 ranks) has ended" in phalanx("stop", described.id)
    assert job.finish() == 128 + signal.SIGTERM
    remote.check()


def phalanx(*words: str) -> str:
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
