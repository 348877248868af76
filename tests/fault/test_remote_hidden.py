"""What ends or is cut off on another host while those who have to say so cannot: the job ends and says of what."""

from __future__ import annotations

import os
import signal

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, impatient, remote
from tests.support.waiting import stop

__all__ = ["hosts", "remote"]  # fixtures

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

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


def waiting(remote: RemoteLauncher, **environment: str) -> tuple[RemoteJob, int]:
    """A job whose ranks run, and the process of the last one, which is alone on the second host."""
    job = remote.start(
        "-q", "--grace", "250", "-H", "h0:2,h1", "sh", "-c", "echo up; exec sleep 300", environment=environment
    )
    job.wait_for_lines(3, "up")
    return job, remote.wait_for_process(1, "sleep")


@needs_hosts
def test_stopped_agent_does_not_hide_that_a_rank_was_killed(remote: RemoteLauncher) -> None:
    job, rank = waiting(remote)
    stop(remote.wait_for_process(1, "phalanx-agent"))
    os.kill(rank, signal.SIGKILL)
    assert job.finish() == 128 + signal.SIGKILL, job.said()
    assert "phalanx: rank 2 of 3 failed\n  host h1, pid " in job.err, job.said()
    assert "ended by signal 9 (SIGKILL)" in job.err, job.said()


@pytest.mark.long
@needs_hosts
def test_stopped_agent_is_waited_for_and_continued_or_cut_off(remote: RemoteLauncher) -> None:
    silence = impatient(remote.folder / "impatient")
    go_on = remote.folder / "go-on"

    def stopped() -> tuple[RemoteJob, int]:
        job = remote.start(*PLAIN, "-H", "h0,h1", remote.script(SCRIPT), str(go_on), environment=silence)
        job.wait_for_lines(2, "ready")
        agent = remote.wait_for_process(1, "phalanx-agent")
        stop(agent)
        return job, agent

    def words(*own: str) -> list[str]:
        return sorted(f"[rank {rank}] {word}" for rank in range(2) for word in own)

    job, _ = stopped()  # the launcher continues it to end its rank in order, as those of other hosts
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    assert sorted(job.out.splitlines()) == words("asked", "ready")
    job, _ = stopped()
    remote.hosts.cut(1)
    assert job.finish() == 1
    assert "phalanx: rank 1 of 2 failed: host h1 is lost" in job.err, job.said()
    remote.check()
    remote.hosts.mend(1)
    job, _ = stopped()
    go_on.touch()
    assert job.finish() == 0, job.said()
    assert sorted(job.out.splitlines()) == words("more", "ready")


KILLED_BY_KERNEL = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        with open(sys.argv[1], "w") as file:
            file.write("oom 4\\noom_kill 4\\n")
        os.kill(os.getpid(), 9)
    time.sleep(600)
"""


@needs_hosts
def test_kernel_that_kills_a_rank_and_a_host_that_loses_all_of_phalanx(remote: RemoteLauncher) -> None:
    """A rank without memory is said to be; what ranks have started ends though nobody is left to end it."""
    # The file in which the kernel counts, as far as that host can see; the rank does what the kernel would do.
    counter = remote.folder / "memory.events"
    counter.write_text("oom 3\noom_kill 3\n")
    with remote.hosts.mounted(1, remote.folder, "/sys/fs/cgroup"):
        job = remote.run(*PLAIN, "-H", "h0,h1", remote.script(KILLED_BY_KERNEL), str(counter))
    assert job.process.returncode == 137, job.said()
    assert job.err.startswith("phalanx: rank 1 of 2 failed\n  host h1, pid "), job.said()
    assert "the kernel ran out of memory and killed it; use less memory per rank, or fewer ranks" in job.err
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
    os.kill(remote.wait_for_process(1, "phalanx-agent"), signal.SIGKILL)  # the kernel kills the ranks with it
    assert job.finish() == 1, job.said()
    assert "failed: host h1 is lost" in job.err
    remote.check()
