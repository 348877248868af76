"""What is stopped or runs out of memory on another host: its agent goes on when it is needed, and the cause is said."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote
from tests.support.waiting import stop

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PLAIN = ("--no-preload", "-q", "--grace", "60")
SCRIPT = """
    import os, signal, sys, time
    def asked(*_):
        print("asked", flush=True)
        os._exit(0)
    signal.signal(signal.SIGINT, asked)
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("more", flush=True)
"""


def stopped(remote: RemoteLauncher) -> tuple[RemoteJob, int]:
    """A job whose ranks run, and the agent of its second host, which has been stopped."""
    job = remote.start(*PLAIN, "-H", "h0,h1", remote.script(SCRIPT), str(remote.folder / "go-on"))
    job.wait_for_lines(2, "ready")
    agent = remote.wait_for_process(1, "phalanx-agent")
    stop(agent)
    return job, agent


def test_what_a_host_says_waits_while_its_agent_is_stopped(remote: RemoteLauncher) -> None:
    job, agent = stopped(remote)
    (remote.folder / "go-on").touch()
    job.wait_for_lines(1, "[rank 0] more")
    # For longer than a silent connection lasts: the kernel answers for a stopped process.
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(6.0)
    assert "[rank 1] more" not in job.out
    os.kill(agent, signal.SIGCONT)
    assert job.finish() == 0, job.said()
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] {word}" for rank in range(2) for word in ("more", "ready")]


def test_stopped_agent_is_continued_to_end_the_job_or_when_cut_off(remote: RemoteLauncher) -> None:
    job, _ = stopped(remote)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    # In order, as those of other hosts.
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] {word}" for rank in range(2) for word in ("asked", "ready")]
    job, _ = stopped(remote)
    remote.hosts.cut(1)
    assert job.finish() == 1
    assert "phalanx: rank 1 of 2 failed: host h1 is lost" in job.err, job.said()
    remote.check()
    remote.hosts.mend(1)


def test_rank_that_the_kernel_of_its_host_killed(remote: RemoteLauncher) -> None:
    # The file in which the kernel counts, as far as that host can see; the rank does what the kernel would do.
    counter = remote.folder / "memory.events"
    counter.write_text("oom 3\noom_kill 3\n")
    mount = ["mount", "--bind", str(remote.folder), "/sys/fs/cgroup"]
    assert remote.hosts.start(1, mount, {}).wait() == 0
    try:
        script = remote.script("""
            import os, sys, time
            if os.environ["RANK"] == "1":
                with open(sys.argv[1], "w") as file:
                    file.write("oom 4\\noom_kill 4\\n")
                os.kill(os.getpid(), 9)
            time.sleep(600)
        """)
        job = remote.run(*PLAIN, "-H", "h0,h1", script, str(counter))
    finally:
        assert remote.hosts.start(1, ["umount", "/sys/fs/cgroup"], {}).wait() == 0
    assert job.process.returncode == 137, job.said()
    assert job.err.startswith("phalanx: rank 1 of 2 failed\n  host h1, pid "), job.said()
    assert "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks" in job.err
