"""``phalanx list``, ``top`` and ``stop`` for ranks that an MPI launcher has started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.launch_support import Launcher


def phalanx(*words: str) -> str:
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_ranks_of_mpi_are_watched_and_stopped_like_others(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import time, torch, phalanx
        world = phalanx.init()
        x = torch.ones(4)
        world.all_reduce(x)
        print("ready", flush=True)
        if world.rank == 1:
            time.sleep(300)
        world.barrier()
        """
    )
    job = launcher.start("-q", "-n", "2", script)
    job.read_lines(2)
    listed = next(one for one in json.loads(phalanx("list", "--json")) if one["pid"] == job.pid)
    assert listed["mpi"]
    assert listed["ranks"] == 2
    first, second = json.loads(phalanx("top", str(job.pid), "--once", "--json"))["ranks"]
    assert first["state"] == "waits"
    assert first["operation"]["kind"] == "barrier"
    assert second["state"] == "sleeps"
    assert second["last"]["kind"] == "all_reduce"
    assert second["lag"] == 1
    assert "2 ranks) has ended" in phalanx("stop", str(job.pid))
    assert job.finish().code == 128 + signal.SIGTERM
