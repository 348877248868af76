"""Strangers attack every port of a job while it works: they get nothing, and it is not held up.

One stranger is another user of a host of the job, the other one is on a third host of the same network. The ports are
those that the kernel lists, so none is forgotten. Each listener is given more kinds of wrong proofs in
``tests/unit/test_listeners.py``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.fault import attacks
from tests.launch_support import Launcher, RunningJob, launcher
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts
from tests.support.strangers import NOBODY, as_another_user, needs_another_user
from tests.support.waiting import soon

from phalanx.wire.proof import GREETING, GREETING_BYTES

__all__ = ["launcher"]

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PATIENCE_S = 200.0  # no busy machine needs as long
# A listener greets, and tells a caller that proves another key so, with a digest and an empty verdict.
MOST_ANSWERED = GREETING_BYTES + 32 + 4
# How long each attack takes, and what a step may take longer meanwhile, both in seconds. A stranger for whom somebody
# waited would hold up a step for the ten seconds that he has to prove himself. On a quiet machine it is far below 1 s.
QUICK = pytest.param(0.1, 7.0, id="quick")
SLOW = pytest.param(5.0, 1.0, marks=pytest.mark.fault, id="slow")
LENGTHS = pytest.mark.parametrize(("seconds", "limit_s"), [QUICK, SLOW])

# It uses all that listens, in a job over hosts and on one.
HAS_EVERYTHING = """
    import json, operator, os, pathlib, sys, time
    import torch, torch.distributed as dist
    import phalanx
    from phalanx import rpc
    folder = pathlib.Path(sys.argv[1])
    world = phalanx.init(timeout_s=100, quiet=True)
    rpc.init()
    if world.num_nodes == 1:
        dist.all_reduce(torch.ones(4).to_sparse())  # only Gloo has it, which listens from now on
    (folder / "port").write_text(os.environ["MASTER_PORT"])
    steps, large, works = [], torch.ones(100_000), True
    while works:
        began = time.monotonic()
        over = torch.tensor([float((folder / "over").exists())])
        world.all_reduce(over)
        world.all_reduce(large.fill_(1))
        assert large.eq(world.size).all()
        assert rpc.call((world.rank + 1) % world.size, operator.add, world.rank, 1) == world.rank + 1
        works = not over.item()
        print("step", len(steps))  # which goes over the connection to the launcher, if there is one
        steps.append((began, time.monotonic()))
        (folder / f"works-{world.rank}").touch()
        time.sleep(0.003)
    dist.barrier(dist.new_group())  # the store still answers
    store = dist.distributed_c10d._get_default_store()
    assert not store.check(["stranger"])
    rpc.shutdown(timeout_s=60)
    (folder / f"steps-{world.rank}").write_text(json.dumps(steps))
    phalanx.close()
"""


def listening(pid: int, inodes: Collection[str] | None = None) -> list[tuple[str, int]]:
    """The addresses and ports at which the host of this process listens, or only these sockets.

    What listens everywhere is given at loopback.
    """
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and (inodes is None or words[9] in inodes):
                address, _, port = words[1].partition(":")
                numbers = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                text = socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))
                found.append(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(text, text), int(port, 16)))
    return sorted(set(found))


def sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets of a process."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                found.add(link[8:-1])
    return found


def await_steps(folder: Path, ended: Callable[[], bool], said: Callable[[], str]) -> None:
    """Return when each of three ranks has done a step."""
    assert soon(lambda: ended() or all((folder / f"works-{rank}").exists() for rank in range(3)), PATIENCE_S), said()
    assert not ended(), said()


def start_everything(launcher: Launcher, *options: str) -> RunningJob:
    folder = launcher.directory
    job = launcher.start("-n", "3", "-q", *options, launcher.script(HAS_EVERYTHING), str(folder))
    await_steps(folder, lambda: job.process.poll() is not None, lambda: job.finish().err_text)
    return job


@dataclass
class Attack:
    """Somebody who attacks, and from where: the words before his commands, his user, and what he can reach."""

    words: Sequence[str]
    user: int
    ports: list[tuple[str, int]]
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def attack_all(self, seconds: float, runs: Callable[[], bool]) -> None:
        """Every attack after the other, with a pause of the same length before each."""
        assert attacks.GREETING == GREETING
        targets = [f"{address}:{port}" for address, port in self.ports]
        for name in attacks.ATTACKS:
            time.sleep(seconds)
            began = time.monotonic()
            command = [*self.words, sys.executable, attacks.__file__, name, str(seconds), str(self.user), *targets]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            self.times[name] = began, time.monotonic()
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)
            assert told["made"] > 0
            assert told["most_heard"] <= MOST_ANSWERED, name
            assert runs(), name

    def check_delays(self, folder: Path, limit_s: float) -> None:
        """The longest step during each attack took at most so much longer than the longest one of the pauses."""
        longest: dict[str, float] = {}
        for file in folder.glob("steps-*"):
            for began, ended in json.loads(file.read_text())[1:]:
                names = [name for name, (begin, end) in self.times.items() if began < end and ended > begin]
                for name in names or ["pause"]:
                    longest[name] = max(longest.get(name, 0.0), ended - began)
        assert set(self.times) <= set(longest)  # there were steps during each
        assert max(longest[name] - longest.get("pause", 0.0) for name in self.times) < limit_s, longest


# -- another user of the host ------------------------------------------------------------------------------------------


def heard(sock: socket.socket, said: bytes = b"") -> bytes:
    with contextlib.suppress(OSError):  # it may be closed before all has been said
        sock.sendall(said)
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(4096)
    return b""


def ask_the_store(port: int) -> list[bytes]:
    """What torch's store would answer: its keys, their number; and what it says to very many who say nothing.

    Before that a key is written often on connections that are closed at once, which the kernel then lists as root's.
    """
    greeting, (set_, count, keys) = attacks.TORCH, (b"\1", b"\7", b"\21")
    connect = functools.partial(socket.create_connection, ("127.0.0.1", port), timeout=20)
    for _ in range(300):
        with connect() as sock, contextlib.suppress(OSError):
            sock.sendall(greeting + set_ + b"".join(struct.pack("=Q", 8) + text for text in (b"stranger", b"is there")))
    with contextlib.ExitStack() as stack:
        answers = [heard(stack.enter_context(connect()), greeting + request) for request in (keys, count)]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        crowd = [stack.enter_context(connect()) for _ in range(1_200)]  # more than a process of the job may open files
        return answers + [heard(sock) for sock in crowd]


def claim_the_port(port: int) -> list[str]:
    """Try to listen where the ranks look for the store."""
    refused = []
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                sock.bind((address, port))
                sock.listen()
            except OSError as error:
                refused.append(str(error.strerror))
    return refused


def what_opens(pids: list[int]) -> list[str]:
    """What another user can open of the processes' own: memory, environment, files that are open, and their places."""
    opened = []
    for pid in pids:
        names = [f"/proc/{pid}/{name}" for name in ("mem", "environ", "maps", "auxv", "syscall", "stack", "io")]
        names += [f"/proc/{pid}/{folder}/{number}" for folder in ("fd", "map_files") for number in range(200)]
        with contextlib.suppress(PermissionError):
            opened += os.listdir(f"/proc/{pid}/fd")
        for name in names:
            for flags in (os.O_RDONLY, os.O_RDWR):
                with contextlib.suppress(OSError):
                    descriptor = os.open(name, flags)
                    # Some files can be opened by everybody, and only what is read of them is refused.
                    if os.read(descriptor, 1):
                        opened.append(name)
                    os.close(descriptor)
    return opened


@needs_another_user
@LENGTHS
def test_another_user_gets_nothing_of_a_job_and_does_not_hold_it_up(
    launcher: Launcher, seconds: float, limit_s: float
) -> None:
    """Its ports are the store's, RPC's and Gloo's on loopback."""
    before = set(os.listdir("/dev/shm"))
    job = start_everything(launcher)
    pids = job.processes()
    assert len(pids) >= 5  # the launcher, the agent, and the ranks
    assert all(os.path.exists(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "maps", "fd/1"))
    assert as_another_user(what_opens, pids) == []
    # Of the sockets between its processes only the launcher's has a name, by which anybody could connect; it sends
    # other users away (test_running_jobs.py).
    inodes = set().union(*map(sockets_of, pids))
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    of_job = [words for words in local if words[6] in inodes]
    assert of_job
    assert {words[7].rpartition("-")[2] for words in of_job if len(words) > 7} == {"look"}
    assert {name for name in os.listdir("/dev/shm") if "phalanx" in name} <= before
    assert [path for path in job.temporary.rglob("*") if as_another_user(os.access, str(path), os.R_OK)] == []
    ports = listening(os.getpid(), inodes)
    assert len(ports) >= 4  # one of the store, and one of each rank
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1_024, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    store = int((launcher.directory / "port").read_text())
    assert set(as_another_user(ask_the_store, store)) == {b""}
    assert as_another_user(claim_the_port, store) == ["Address already in use"] * 2
    attack = Attack((), NOBODY, ports)
    attack.attack_all(seconds, lambda: job.process.poll() is None)
    (launcher.directory / "over").touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert "refused a connection from 127.0.0.1 to the job's store: it is not this user's" in outcome.err_text
    attack.check_delays(launcher.directory, limit_s)


# -- over hosts --------------------------------------------------------------------------------------------------------

STRANGER = 2  # the number of the host that is none of the job's


@pytest.fixture(scope="module")
def reachable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("reachable")) as made:
        yield made


@needs_hosts
@pytest.mark.long
@LENGTHS
@pytest.mark.parametrize("target", ["the launcher", "h0"])
def test_job_over_hosts_is_not_held_up_by_strangers(
    reachable: TestHosts, tmp_path: Path, target: str, seconds: float, limit_s: float
) -> None:
    """Another user attacks the launcher, and another host the hosts."""
    launcher = RemoteLauncher(reachable, tmp_path, own=[0, 1])
    try:
        arguments = ("-H", "h0:2,h1:1", "-q", launcher.script(HAS_EVERYTHING), str(tmp_path))
        job = launcher.start(*arguments)
        await_steps(tmp_path, lambda: job.process.poll() is not None, job.said)
        if target == "the launcher":
            attack = Attack(reachable.outside(), NOBODY, listening(job.process.pid))
            assert len(attack.ports) == 2  # that for the agents, and the store's
        else:
            host = int(target[1:])
            ports = [at for at in listening(reachable.inside[host]) if not at[0].startswith(("127.", "::1"))]
            attack = Attack(reachable.entry(STRANGER), 0, ports)
            assert len([at for at in attack.ports if at[0] == reachable.address(host)]) >= 2
        attack.attack_all(seconds, lambda: job.process.poll() is None)
        (tmp_path / "over").touch()
        assert job.finish() == 0, job.said()
        attack.check_delays(tmp_path, limit_s)
        launcher.check()
    finally:
        launcher.clear()
