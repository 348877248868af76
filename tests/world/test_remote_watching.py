"""``phalanx top`` and ``phalanx stop`` for a job on several hosts, called where its launcher runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.launch_support import wait_for
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx.launch.running.jobs import running_jobs

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def test_the_ranks_of_this_host_are_shown_and_those_of_others_named_and_stop_ends_them_all(
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

    def operations() -> list[Any]:
        shown = json.loads(phalanx("top", described.id, "--once", "--json"))
        return [rank["operation"] for rank in shown["ranks"]]

    wait_for(lambda: all(operations()))  # what they have printed comes before their last call
    shown = json.loads(phalanx("top", described.id, "--once", "--json"))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert [rank["operation"]["kind"] for rank in shown["ranks"]] == ["barrier", "barrier"]
    assert shown["elsewhere"] == {"h1": [2]}
    assert "note: rank 2 on h1: not shown" in phalanx("top", described.id, "--once")
    assert "3 ranks) has ended" in phalanx("stop", described.id)
    assert job.finish() == 128 + signal.SIGTERM
    remote.check()


def phalanx(*words: str) -> str:
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
