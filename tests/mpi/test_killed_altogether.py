"""Every process of a job gets SIGKILL, so that nobody is left to remove what its MPI library has in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher

HOLDS = """
import signal
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.barrier()
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if " /dev/shm/" in line and "deleted" not in line}), flush=True)
signal.pause()
"""
WORKS = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_the_next_launch_removes_what_it_has_left(launcher: Launcher, size: int) -> None:
    other = launcher.start("-n", "2", "-q", launcher.script(HOLDS, "other.py"))
    others = {Path(word) for line in other.read_lines(2) for word in line.split()[2:]}
    assert others
    job = launcher.start("-n", str(size), "-q", launcher.script(HOLDS, "killed.py"))
    files = {Path(word) for line in job.read_lines(size) for word in line.split()[2:]}
    assert files
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees the end of another one
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    job.process.wait()
    job.wait_until_gone(20.0)
    for left in job.temporary.iterdir():
        shutil.rmtree(left)
    assert any(file.exists() for file in files)
    done = launcher.run("-n", "2", "-q", launcher.script(WORKS, "works.py"))
    assert done.code == 0, done.err_text
    assert [file for file in files if file.exists()] == []
    assert all(file.exists() for file in others)  # of a job that is alive
    other.process.send_signal(signal.SIGINT)
    other.finish()
    assert [file for file in others if file.exists()] == []
