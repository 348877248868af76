"""The process that starts and watches the ranks is stopped (SIGSTOP) while all is well or a rank ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.launch_support import Launcher, RunningJob, launcher, wait_for
from tests.support.waiting import stop

__all__ = ["launcher"]

SOON_S = 100.0  # far below the time for which the ranks wait if nobody ends them
RANKS = ("sh", "-c", "echo $RANK $$; while :; do echo on; sleep 0.05; done")


def start(launcher: Launcher) -> tuple[RunningJob, list[int]]:
    """A job of three ranks, and their process ids."""
    job = launcher.start("-n", "3", "-q", "--grace", "250", *RANKS)
    assert job.process.stdout is not None
    pids: dict[str, int] = {}
    while len(pids) < 3:
        words = job.process.stdout.readline().decode().split()
        if words[-1] != "on":
            pids[words[-2]] = int(words[-1])
    return job, [pids[str(rank)] for rank in range(3)]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_stopped_process_is_continued_unless_the_whole_job_is_suspended(launcher: Launcher) -> None:
    """It may be stopped when a rank ends, as well (test_falls.py)."""
    job, pids = start(launcher)
    agent = job.named("phalanx-agent")
    stop(agent)
    wait_for(lambda: state(agent) != "T")
    job.read_lines(60)
    suspended = [job.pid, agent, *(pid for pid in pids if pid != pids[1])]
    for pid in suspended:
        stop(pid)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: state(pids[1]) == "Z")
    assert {state(pid) for pid in suspended} == {"T"}
    for pid in suspended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    outcome = job.finish(SOON_S)
    assert outcome.code == 128 + signal.SIGKILL, outcome.err_text
    assert "phalanx: rank 1 of 3 failed\n" in outcome.err_text
    assert f"pid {pids[1]}, " in outcome.err_text
