"""``phalanx run -H`` by OpenSSH itself: it works where a login does, and says in one line why it does not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, launching, reachable_hosts
from tests.support.sshd import client, running_sshd, why_no_sshd

from phalanx.launch.starters.tree import FAN

WHY_NOT = why_no_hosts() or why_no_sshd()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are hosts"), pytest.mark.long]

PLAIN = ("--no-preload", "-q")
HELLO = "import os, socket; print(os.environ['RANK'], socket.gethostname(), os.getcwd())"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestHosts, Path]]:
    """More hosts than a launcher logs in to itself; the first two can log in to the others."""
    folder = tmp_path_factory.mktemp("servers")
    with reachable_hosts(FAN + 3, tmp_path_factory.mktemp("hosts")) as hosts, running_sshd(hosts, folder):
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


def test_ranks_are_started_by_ssh(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, socket, sys, torch, phalanx
        world = phalanx.init()
        total = world.all_reduce(torch.tensor([1.0 + world.rank]))
        print(world.rank, socket.gethostname(), os.getcwd(), os.environ["OWN"], sys.argv[1:], file=sys.stderr)
        if world.rank == 0:
            print(sys.stdin.read(), end="")
        world.barrier()
        os._exit(3 * world.rank)
    """)
    job = remote.run("-q", "-H", "h0,root@h1", script, "a b", "'\"$(c)", stdin=b"input\n", environment={"OWN": "x y"})
    assert job.process.returncode == 3, job.said()
    own = f"{remote.folder} x y ['a b', '\\'\"$(c)']"
    assert [line for line in sorted(job.err.splitlines()) if own in line] == [
        f"[rank 0] 0 h0 {own}",
        f"[rank 1] 1 h1 {own}",
    ], job.said()
    assert job.out == "[rank 0] input\n"


ALL = ",".join(f"h{host}" for host in range(FAN + 3))
CALLER = """
    import os, subprocess, sys, time
    if "ends" not in sys.argv:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(os.environ["SSH_CONNECTION"].split()[0], flush=True)
    time.sleep(0 if "ends" in sys.argv else 600)
"""


def test_agents_start_others_and_the_supervisor_those_that_they_cannot(remote: RemoteLauncher) -> None:
    job = remote.run("-q", "--no-preload", "-H", ALL, remote.script(CALLER), "ends")
    assert job.process.returncode == 0, job.said()
    assert job.err == ""
    login = remote.hosts.address(253)
    callers = [login] * FAN + [remote.hosts.address(0), remote.hosts.address(1), login]
    assert sorted(job.out.splitlines()) == sorted(f"[rank {rank:2}] {caller}" for rank, caller in enumerate(callers))


@pytest.mark.parametrize("victim", ["launcher", "agent that has started another one", "agent that another one started"])
def test_nothing_is_left_on_any_host(remote: RemoteLauncher, victim: str) -> None:
    job = remote.start("-q", "--no-preload", "-H", ALL, remote.script(CALLER))
    job.wait_for_lines(FAN + 3)
    host = FAN if "that another" in victim else 0
    agent = remote.wait_for_process(host, "phalanx-agent")
    if victim == "launcher":
        os.kill(agent, signal.SIGSTOP)
        job.process.send_signal(signal.SIGKILL)
        assert job.finish() == -signal.SIGKILL
    else:
        os.kill(agent, signal.SIGKILL)
        assert job.finish() == 1
        assert f"rank {host} of {FAN + 3} failed: host h{host} is lost" in job.err, job.said()


@pytest.mark.parametrize(
    ("key", "known", "said"),
    [
        # Without a key ssh would ask for a password.
        (False, True, "h1: ssh could not log in there: root@h1: Permission denied (publickey,password"),
        (True, False, "h1: ssh could not log in there: Host key verification failed.; it must work without a question"),
    ],
)
def test_a_login_that_asks_something(
    remote: RemoteLauncher, servers: tuple[TestHosts, Path], key: bool, known: bool, said: str
) -> None:
    remote.files = {"/etc/ssh/ssh_config": client(servers[1], key=key, known=known)}
    job = remote.run(*PLAIN, "-H", "localhost,h1", remote.script(HELLO))
    assert (job.process.returncode, job.out, len(job.err.splitlines())) == (1, "", 1), job.said()
    assert said in job.err, job.said()
    assert "ssh -o BatchMode=yes h1 true" in job.err


def test_no_python_there(remote: RemoteLauncher, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    folder = os.path.dirname(sys.executable)
    with remote.hosts.mounted(1, empty, folder):
        job = remote.run(*PLAIN, "-H", "h0,h1", remote.script(HELLO))
    assert (job.process.returncode, job.out, len(job.err.splitlines())) == (1, "", 1), job.said()
    assert f"phalanx: h1: {sys.executable} cannot be run there" in job.err, job.said()
