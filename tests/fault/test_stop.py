"""``phalanx stop``: a job ends in order, or however its launcher allows, and nothing of it is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.launch_support import Launcher, RunningJob, launcher
from tests.support.waiting import stop as suspend

from phalanx.launch.running.jobs import running_jobs

__all__ = ["launcher"]

SLEEPS = """
    import signal, subprocess, sys, time
    if sys.argv[1:] == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif sys.argv[1:] == ["checkpoint"]:
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


def start(launcher: Launcher, *words: str, options: tuple[str, ...] = ()) -> RunningJob:
    job = launcher.start("-q", "-n", "3", *options, launcher.script(SLEEPS), *words)
    assert job.read_lines(3) == [f"[rank {rank}] ready" for rank in range(3)]
    return job


def stop(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "stop", *words], capture_output=True, text=True, timeout=300, check=False
    )


def id_of(job: RunningJob) -> str:
    return next(one.id for one in running_jobs() if one.pid == job.pid)


@contextmanager
def ignoring(*signums: int) -> Iterator[None]:
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def assert_gone(job: RunningJob) -> None:
    """Nothing of the job runs when stop has returned; its launcher may be a zombie of this process."""
    left = job.processes()
    assert left in ([], [job.pid])


def test_a_job_is_asked_to_end_and_has_ended(launcher: Launcher) -> None:
    job = start(launcher, "checkpoint")
    name = id_of(job)
    done = stop(name[:10])
    assert done.returncode == 0, done.stderr
    assert f"job {name} (" in done.stdout
    assert "3 ranks) has ended" in done.stdout
    assert_gone(job)
    outcome = job.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert sorted(outcome.out_lines) == [f"[rank {rank}] saved" for rank in range(3)]
    again = stop(name)
    assert again.returncode == 2
    assert f"no job {name}" in again.stderr


def test_kill_gives_ranks_no_time(launcher: Launcher) -> None:
    job = start(launcher, "stubborn", options=("--grace", "200"))
    begun = time.monotonic()
    done = stop("--kill", str(job.pid))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 100
    assert_gone(job)
    assert job.finish().code == 128 + signal.SIGTERM


def test_a_stopped_launcher_is_continued(launcher: Launcher) -> None:
    job = start(launcher)
    suspend(job.pid)
    done = stop(str(job.pid))
    assert done.returncode == 0, done.stderr
    assert f"its launcher (pid {job.pid}) is stopped (state T)" in done.stderr
    assert_gone(job)
    assert job.finish().code == 128 + signal.SIGTERM


def test_a_launcher_that_cannot_be_asked_is_killed_with_its_job(launcher: Launcher) -> None:
    with ignoring(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a process inherits what is ignored
        job = launcher.start("-q", "-n", "3", launcher.script(SLEEPS), "stubborn")
    job.read_lines(3)
    done = stop(str(job.pid))
    assert done.returncode == 0, done.stderr
    assert "it is killed, and its helpers kill the ranks" in done.stderr
    assert_gone(job)
    assert job.finish().code == -signal.SIGKILL


def test_a_wrong_name_says_which_jobs_there_are(launcher: Launcher) -> None:
    job = start(launcher)
    for wrong, words in (
        ("no-such-job", "no job no-such-job of yours runs on this host; these do:"),
        ("", "The name given is empty; these run on this host:"),
    ):
        done = stop(wrong)
        assert done.returncode == 2
        assert words in done.stderr
        assert f"{id_of(job)}  pid {job.pid}" in done.stderr
    assert job.process.poll() is None
    assert stop(str(job.pid)).returncode == 0
    job.finish()
