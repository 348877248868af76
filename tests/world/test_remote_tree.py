"""``phalanx run`` on more hosts than it logs in to itself: agents start others, and the head those that they cannot."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, launching, reachable_hosts
from tests.support.sshd import client, running_sshd, why_no_sshd

from phalanx.launch.remote.tree import FAN

WHY_NOT = why_no_hosts() or why_no_sshd()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are hosts"), pytest.mark.long]

HOSTS = ",".join(f"h{host}" for host in range(FAN + 3))
SCRIPT = """
    import os, sys, time
    print(os.environ["SSH_CONNECTION"].split()[0], flush=True)
    time.sleep(0 if "ends" in sys.argv else 600)
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestHosts, Path]]:
    folder = tmp_path_factory.mktemp("servers")
    with reachable_hosts(FAN + 3, tmp_path_factory.mktemp("hosts")) as hosts, running_sshd(hosts, folder):
        # The first two can log in to the others; the third one cannot.
        for host in range(2):
            mount = ["mount", "--bind", str(client(folder)), "/etc/ssh/ssh_config"]
            assert hosts.start(host, mount, {}).wait() == 0
        yield hosts, folder


@pytest.fixture
def remote(servers: tuple[TestHosts, Path], tmp_path: Path) -> Iterator[RemoteLauncher]:
    launcher = RemoteLauncher(servers[0], tmp_path)
    launcher.starter = []
    launcher.files = {"/etc/ssh/ssh_config": client(servers[1])}
    with launching(launcher):
        yield launcher


def test_agents_start_others_and_the_head_those_that_they_cannot(remote: RemoteLauncher) -> None:
    job = remote.run("-q", "--no-preload", "-H", HOSTS, remote.script(SCRIPT), "ends")
    assert job.process.returncode == 0, job.said()
    assert job.err == ""
    login = remote.hosts.address(253)
    callers = [login] * FAN + [remote.hosts.address(0), remote.hosts.address(1), login]
    assert sorted(job.out.splitlines()) == sorted(f"[rank {rank:2}] {caller}" for rank, caller in enumerate(callers))


def test_a_host_whose_ranks_have_ended_keeps_what_it_has_started(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, subprocess, time
        rank = int(os.environ["RANK"])
        print("began", flush=True)
        if rank != 16:
            os._exit(0)
        time.sleep(3)  # all others have ended
        # The login of this rank's agent is still there.
        os._exit(0 if subprocess.run(["pgrep", "-f", "sshd(-session)?: root"]).returncode == 0 else 9)
    """)
    job = remote.run("-q", "--no-preload", "--no-prefix", "-H", HOSTS, script)
    assert job.process.returncode == 0, job.said()


@pytest.mark.parametrize("who", ["the head", "an agent that has started another one"])
def test_nothing_is_left_on_any_host(remote: RemoteLauncher, who: str) -> None:
    job = remote.start("-q", "--no-preload", "-H", HOSTS, remote.script(SCRIPT))
    job.wait_for_lines(FAN + 3)
    if who == "the head":
        job.process.send_signal(signal.SIGKILL)
        assert job.finish() == -signal.SIGKILL
        return
    os.kill(remote.wait_for_process(0, "phalanx-agent"), signal.SIGKILL)
    assert job.finish() == 1
    assert "rank 0 of 19 failed: host h0 is lost" in job.err, job.said()
