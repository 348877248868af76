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

WHY_NOT = why_no_hosts() or why_no_sshd()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are hosts"), pytest.mark.long]

PLAIN = ("--no-preload", "-q")
HELLO = "import os, socket; print(os.environ['RANK'], socket.gethostname(), os.getcwd())"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestHosts, Path]]:
    """Two hosts with an ssh server each."""
    folder = tmp_path_factory.mktemp("servers")
    with reachable_hosts(2, tmp_path_factory.mktemp("hosts")) as hosts, running_sshd(hosts, folder):
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


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_nothing_is_left_on_any_host(remote: RemoteLauncher, victim: str) -> None:
    script = remote.script("import time; print('ready', flush=True); time.sleep(600)")
    job = remote.start("-q", "--no-preload", "-H", "h0,h1", script)
    job.wait_for_lines(2)
    agent = remote.wait_for_process(0, "phalanx-agent")
    if victim == "launcher":
        os.kill(agent, signal.SIGSTOP)
        job.process.send_signal(signal.SIGKILL)
        assert job.finish() == -signal.SIGKILL
    else:
        os.kill(agent, signal.SIGKILL)
        assert job.finish() == 1
        assert "rank 0 of 2 failed: host h0 is lost" in job.err, job.said()


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
