"""All of Phalanx on a host is killed at once: nobody is left there to end what the ranks have started, and it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx import settings
from phalanx.launch.remote import sweep_host

__all__ = ["hosts", "remote"]

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


@needs_hosts
def test_what_ranks_have_started_ends_with_all_of_phalanx_on_their_host(remote: RemoteLauncher) -> None:
    script = remote.script(
        """
        import os, subprocess, sys, time
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            sys.exit()
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    job = remote.start("-q", "--no-preload", "-H", "h0:2,h1:2", script)
    job.wait_for_lines(4, "ready")
    # Stopped, neither can do anything about the end of the other; the kernel kills the ranks with the zygote.
    doomed = [remote.wait_for_process(1, name) for name in ("phalanx-zygote", "phalanx-agent")]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in doomed:
            os.kill(pid, signum)
    assert job.finish() == 1, job.said()
    assert "failed: host h1 is lost" in job.err
    remote.check()


def test_sweep_ends_what_one_agent_of_one_attempt_has_left() -> None:
    environments = [{settings.AGENT: name} for name in ("job/1/1", "job/0/1", "job/1/10", "job/1")]
    sleepers = [subprocess.Popen(["/bin/sleep", "600"], env=own) for own in (*environments, {})]
    try:
        program = [sys.executable, "-I", "-S", str(Path(sweep_host.__file__))]
        subprocess.run([*program, f"{settings.AGENT}=job/1/1"], check=True, timeout=60)
        assert sleepers[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in sleepers[1:]] == [None] * 4
    finally:
        for process in sleepers:
            process.kill()
            process.wait()
