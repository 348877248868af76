"""Processes of a job get SIGKILL, so that few or none are left to remove what its MPI has in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.launch_support import Launcher
from tests.mpi.environments import MpiEnvironment
from tests.mpi.test_launch import SOON_S, find

HOLDS = """
import signal
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.barrier()
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[5] for line in maps if " /dev/shm/" in line}), flush=True)
signal.pause()
"""
WORKS = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


def named(files: set[Path]) -> set[Path]:
    """Those of the files that still have their name."""
    return {file for file in files if file.exists()}


def kill(pids: list[int]) -> None:
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees the end of another one
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def test_next_launch_removes_what_a_killed_one_has_left(launcher: Launcher, mpi: MpiEnvironment) -> None:
    other = launcher.start("-n", "2", "-q", launcher.script(HOLDS, "other.py"))
    others = {Path(word) for line in other.read_lines(2) for word in line.split()[2:]}
    assert others
    others = named(others)
    job = launcher.start("-n", "3", "-q", launcher.script(HOLDS, "killed.py"))
    files = {Path(word) for line in job.read_lines(3) for word in line.split()[2:]}
    assert files
    files = named(files)
    assert files or not (mpi.is_mpich or mpi.is_openmpi)  # Intel MPI has removed the names by then
    kill(job.processes())
    job.process.wait()
    job.wait_until_gone(20.0)
    assert named(files) == files
    done = launcher.run("-n", "2", "-q", launcher.script(WORKS, "works.py"))
    assert done.code == 0, done.err_text
    assert named(files) == set()
    assert named(others) == others  # of a job that is alive
    other.process.send_signal(signal.SIGINT)
    other.finish()
    assert named(others) == set()


def test_the_agents_remove_it_if_all_processes_above_them_are_killed(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", launcher.script(HOLDS, "killed.py"))
    files = {Path(word) for line in job.read_lines(2) for word in line.split()[2:]}
    kill([find(job, name) for name in ("launcher", "mpiexec")])
    job.process.wait()
    job.wait_until_gone(SOON_S)
    assert files
    assert named(files) == set()
