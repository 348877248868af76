"""A rank of another host ends while a process that has to say so is stopped or hangs: the job ends and says of what."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.support.stuck_zygote import STUCK
from tests.support.waiting import stop

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PLAIN = ("-q", "--grace", "250")
WAITS = ("sh", "-c", "echo up; exec sleep 300")


def start(remote: RemoteLauncher, **environment: str) -> tuple[RemoteJob, int]:
    """A job whose ranks run, and the process of the last one, which is alone on the second host."""
    job = remote.start(*PLAIN, "-H", "h0:2,h1", *WAITS, environment=environment)
    job.wait_for_lines(3, "up")
    return job, remote.wait_for_process(1, "sleep")


@pytest.mark.parametrize("victim", ["phalanx-zygote", "phalanx-agent", "phalanx-relay"])
def test_stopped_process_does_not_hide_that_a_rank_was_killed(remote: RemoteLauncher, victim: str) -> None:
    job, rank = start(remote)
    stop(relay_of(job) if victim == "phalanx-relay" else remote.wait_for_process(1, victim))
    os.kill(rank, signal.SIGKILL)
    assert job.finish() == 128 + signal.SIGKILL, job.said()
    assert "phalanx: rank 2 of 3 failed\n  host h1, pid " in job.err, job.said()
    assert "ended by signal 9 (SIGKILL)" in job.err, job.said()


def relay_of(job: RemoteJob) -> int:
    """The child of the launcher's that the agents are connected to."""
    children = [job.process.pid]
    while children:
        named: dict[str, int] = {}
        below: list[int] = []
        for pid in children:
            with contextlib.suppress(OSError):  # it has ended
                named[Path(f"/proc/{pid}/comm").read_text()] = pid
                below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        if "phalanx-relay\n" in named:
            return named["phalanx-relay\n"]
        children = below
    raise AssertionError("no process of the job is its relay")


def test_a_zygote_that_never_answers_is_given_up(remote: RemoteLauncher) -> None:
    changed = remote.folder / "changed"
    changed.mkdir()
    (changed / "sitecustomize.py").write_text(STUCK)
    job, rank = start(remote, PYTHONPATH=str(changed))
    os.kill(rank, signal.SIGKILL)
    assert job.finish() == 1, job.said()
    how = "does not answer (state S); the job ended with it"
    assert job.err.startswith(
        f"phalanx: the process that starts and watches the ranks of a host {how}\n"
        "  rank 2 has ended, and for 1 s it has not said how, which nobody else can know\n  host h1, pid "
    ), job.said()
