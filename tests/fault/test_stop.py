"""``phalanx stop``: a job ends in order, or however its launcher allows, and nothing of it is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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


def phalanx_stop(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "stop", *words], capture_output=True, text=True, timeout=300, check=False
    )


def test_job_ends_however_its_launcher_allows(launcher: Launcher) -> None:
    """Asked in order, killed at once, continued if stopped, and killed with its helpers if it hears no signal."""
    script = launcher.script(SLEEPS)

    def start(*words: str, options: tuple[str, ...] = ()) -> RunningJob:
        return launcher.start("-q", "--no-preload", "-n", "3", *options, script, *words)

    asked, killed, stopped = start("checkpoint"), start("stubborn", options=("--grace", "200")), start()
    ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a process inherits what is ignored
    before = [signal.signal(signum, signal.SIG_IGN) for signum in ignored]
    try:
        deaf = start("stubborn")
    finally:
        for signum, handler in zip(ignored, before, strict=True):
            signal.signal(signum, handler)
    for job in (asked, killed, stopped, deaf):
        assert job.read_lines(3) == [f"[rank {rank}] ready" for rank in range(3)]
    name = next(one.id for one in running_jobs() if one.pid == asked.pid)

    for wrong, words in (
        ("no-such-job", "no job no-such-job of yours runs on this host; these do:"),
        ("", "The name given is empty; these run on this host:"),
    ):
        refused = phalanx_stop(wrong)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert f"{name}  pid {asked.pid}" in refused.stderr
    assert asked.process.poll() is None

    suspend(stopped.pid)
    begun = time.monotonic()
    for job, how, code, words in (
        (asked, [name[:10]], 128 + signal.SIGTERM, "3 ranks) has ended"),
        (killed, ["--kill", str(killed.pid)], 128 + signal.SIGTERM, "has ended"),
        (stopped, [str(stopped.pid)], 128 + signal.SIGTERM, f"its launcher (pid {stopped.pid}) is stopped (state T)"),
        (deaf, [str(deaf.pid)], -signal.SIGKILL, "it is killed, and its helpers kill the ranks"),
    ):
        done = phalanx_stop(*how)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout + done.stderr
        assert job.processes() in ([], [job.pid])  # its launcher may be a zombie of this process
        outcome = job.finish()
        assert outcome.code == code
        if job is asked:
            assert f"job {name} (" in done.stdout
            assert sorted(outcome.out_lines) == [f"[rank {rank}] saved" for rank in range(3)]
    assert time.monotonic() - begun < 100  # ranks that are killed are given no time
    again = phalanx_stop(name)
    assert (again.returncode, f"no job {name}" in again.stderr) == (2, True)
