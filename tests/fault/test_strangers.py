"""Strangers attack every port of a job while it works: they get nothing, and it is not held up.

One stranger is another user of a host of the job, the other one is on a third host of the same network. The ports are
those that the kernel lists, so none is forgotten: the job's store, the launcher's port for its agents, signs of life,
RPC, and Gloo's and UCX's, which ask for no key and are only given what does them no harm (docs/security.md). Each
listener is given more kinds of wrong proofs in ``tests/unit/test_listeners.py``.
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
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support import attacks
from tests.support.attackers import (
    HAS_EVERYTHING,
    LENGTHS,
    MOST_ANSWERED,
    NOBODY,
    PATIENCE_S,
    Attack,
    attack_all,
    check_delays,
    listening,
    sockets_of,
    start_everything,
)
from tests.support.connecting import needs_ucx
from tests.support.golden import check_told
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts
from tests.support.strangers import as_another_user, needs_another_user
from tests.support.waiting import soon

from phalanx.wire.proof import GREETING

__all__ = ["launcher"]

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

TORCH = b"\0" + struct.pack("=I", 0x3C85F7CE)  # with which torch's client greets its store
SET, GETNUMKEYS, LIST = b"\1", b"\7", b"\21"
CONNECTIONS, OPEN_FILES = 1_200, 1_024  # more of the stranger's than any process of the job may open files
STRANGER = 2  # the number of the host that is none of the job's
USER, HOST = "another user", "another host"

WORKS_ON = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group(sys.argv[1])
    if dist.get_rank() == 0:
        print(os.environ["MASTER_PORT"], flush=True)
    done = pathlib.Path(sys.argv[2])
    over = torch.zeros(1)
    while not over.item():
        over.fill_(float(done.exists()))
        dist.all_reduce(over)
        time.sleep(0.01)
    dist.new_group([0, 1])  # the store still answers
    seen = [None, None]
    dist.all_gather_object(seen, f"of rank {dist.get_rank()}")
    if dist.get_rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        print(seen, store.check(["stranger"]), "stranger" in str(store.underlying_store.list_keys()))
    dist.destroy_process_group()
"""


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def heard(sock: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(4096)
    return b""


def read_the_store(port: int) -> list[bytes]:
    """What the store answers to a request for its keys, and to one for their number."""
    answers = []
    for request in (LIST, GETNUMKEYS):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(TORCH + request)
            answers.append(heard(sock))
    return answers


def write_and_go(port: int) -> None:
    """Write a key and close at once: the kernel then lists the connection as root's, who started the job."""
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, contextlib.suppress(OSError):
            sock.sendall(TORCH + SET + text(b"stranger") + text(b"false"))


def stay(port: int) -> list[bytes]:
    """Open many connections and say nothing."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        connect = functools.partial(socket.create_connection, ("127.0.0.1", port), timeout=20)
        socks = [stack.enter_context(connect()) for _ in range(CONNECTIONS)]
        return [heard(sock) for sock in socks]


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


@needs_another_user
@pytest.mark.parametrize("backend", ["phalanx", pytest.param("gloo", marks=pytest.mark.long)])
def test_the_store_of_phalanx_run_answers_no_other_user(launcher: Launcher, tmp_path: Path, backend: str) -> None:
    done = tmp_path / "done"
    job = launcher.start("-n", "2", "--no-prefix", launcher.script(WORKS_ON), backend, str(done))
    port = int(job.read_lines(1)[0])
    for pid in job.processes():
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    assert as_another_user(read_the_store, port) == [b"", b""]
    as_another_user(write_and_go, port)
    assert as_another_user(stay, port) == [b""] * CONNECTIONS
    assert as_another_user(claim_the_port, port) == ["Address already in use"] * 2
    done.touch()
    outcome = job.finish()
    assert (outcome.code, outcome.out_lines) == (0, ["['of rank 0', 'of rank 1'] False False"])
    refused = [line for line in outcome.err_text.splitlines() if "refused a connection" in line]
    check_told("stranger.user", "\n".join(refused), {})


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
def test_another_user_opens_nothing_of_a_job_and_does_not_hold_it_up(
    launcher: Launcher, seconds: float, limit_s: float
) -> None:
    """Its ports are the store's, RPC's and Gloo's on loopback."""
    before = set(os.listdir("/dev/shm"))
    job = start_everything(launcher)
    pids = job.processes()
    assert len(pids) >= 5  # the launcher, the zygote, and the ranks
    own = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "maps", "fd/1")]
    assert all(map(os.path.exists, own))
    assert as_another_user(what_opens, pids) == []
    # Sockets between its processes have no name, in the file system or beside it, by which anybody could connect.
    inodes = set().union(*map(sockets_of, pids))
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    of_job = [words for words in local if words[6] in inodes]
    assert of_job
    assert [words[7] for words in of_job if len(words) > 7] == []
    assert {name for name in os.listdir("/dev/shm") if "phalanx" in name} <= before
    readable = [path for path in job.temporary.rglob("*") if as_another_user(os.access, str(path), os.R_OK)]
    assert readable == []
    ports = listening(os.getpid(), inodes)
    assert len(ports) >= 4  # one of the store, and one of each rank
    attack = Attack((), NOBODY, ports)
    attack_all(attack, seconds, lambda: job.process.poll() is None)
    (launcher.directory / "over").touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    check_delays(launcher.directory, attack, limit_s)


# -- over hosts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(3, tmp_path_factory.mktemp("forking")) as made:
        yield made


@pytest.fixture(scope="module")
def reachable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("reachable")) as made:
        yield made


def who_attacks(hosts: TestHosts, stranger: str, host: int = 0) -> Attack:
    """The stranger, and the ports of a host of the job that he can reach."""
    ports = listening(hosts.inside[host])
    if stranger == USER:
        return Attack(hosts.entry(host), NOBODY, ports)
    return Attack(hosts.entry(STRANGER), 0, [at for at in ports if not at[0].startswith(("127.", "::1"))])


class ByHand:
    """Ranks 0 and 1 on the first host and rank 2 on the second, without a launcher but with a key."""

    def __init__(self, hosts: TestHosts, folder: Path, port: int) -> None:
        self.hosts, self.folder, self.port = hosts, folder, port
        self.script = folder / "script.py"
        self.script.write_text(dedent(HAS_EVERYTHING))
        key = folder / "key"
        key.touch(0o600)
        key.write_text("of this test, and of nobody else")
        self.runs: dict[int, int] = {}

    def start(self, rank: int) -> None:
        at = {"MASTER_ADDR": "h0", "MASTER_PORT": str(self.port), "RANK": str(rank), "WORLD_SIZE": "3"}
        own = {"FOLDER": str(self.folder), "PHALANX_KEY_FILE": str(self.folder / "key")}
        out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
        self.runs[rank] = self.hosts.zygotes[rank // 2].fork(self.script, {**at, **own}, out, err)

    def code(self, rank: int) -> int | None:
        return self.hosts.zygotes[rank // 2].code(self.runs[rank])

    def said(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(self.folder.glob("err-*")))

    def works(self) -> bool:
        return all((self.folder / f"works-{rank}").exists() for rank in self.runs)

    def finish(self) -> None:
        (self.folder / "over").touch()
        assert soon(lambda: all(self.code(rank) is not None for rank in self.runs), PATIENCE_S), self.said()
        assert [self.code(rank) for rank in self.runs] == [0] * len(self.runs), self.said()


@needs_hosts
@LENGTHS
@pytest.mark.parametrize("stranger", [HOST, pytest.param(USER, marks=pytest.mark.long)])
def test_a_job_with_a_key_is_not_held_up_by_strangers(
    forking: TestHosts, tmp_path: Path, stranger: str, seconds: float, limit_s: float
) -> None:
    job = ByHand(forking, tmp_path, 29517)
    try:
        for rank in range(3):
            job.start(rank)
        assert soon(job.works, PATIENCE_S), job.said()
        attack = who_attacks(forking, stranger)
        assert 29517 in [port for _, port in attack.ports]
        assert len(attack.ports) >= 5  # the store, and of each rank the signs of life and RPC
        attack_all(attack, seconds, lambda: all(job.code(rank) is None for rank in range(3)))
        job.finish()
        check_delays(tmp_path, attack, limit_s)
        assert "refused a connection from" in job.said()
    finally:
        forking.end_processes()


def over_hosts(target: int | None, stranger: str, engine: str = "") -> Any:
    """The ports of the launcher, or of a host, and who attacks them."""
    marks = [pytest.mark.long] if target is not None or stranger == HOST else []
    where = "the launcher" if target is None else f"h{target}"
    return pytest.param(target, stranger, engine, marks=[*marks, *([needs_ucx] if engine else [])],
                        id=f"{where}, {stranger} {engine}".strip())  # fmt: skip


@needs_hosts
@LENGTHS
@pytest.mark.parametrize(
    ("target", "stranger", "engine"),
    [over_hosts(target, stranger) for target in (None, 0) for stranger in (USER, HOST)]
    + [over_hosts(target, HOST, "ucx") for target in (0, 1)],
)
def test_a_job_of_phalanx_run_is_not_held_up_by_strangers(
    reachable: TestHosts, tmp_path: Path, target: int | None, stranger: str, engine: str, seconds: float, limit_s: float
) -> None:
    launcher = RemoteLauncher(reachable, tmp_path, own=[0, 1])
    try:
        arguments = ("-H", "h0:2,h1:1", "-q", launcher.script(HAS_EVERYTHING), str(tmp_path))
        job = launcher.start(*arguments, environment={"PHALANX_ENGINE": engine} if engine else None)
        works = [tmp_path / f"works-{rank}" for rank in range(3)]
        assert soon(lambda: all(file.exists() for file in works) or job.process.poll() is not None, PATIENCE_S)
        assert job.process.poll() is None, job.said()
        attack = who_attacks(reachable, stranger, target or 0)
        if target is None:
            ports = listening(job.process.pid)
            words = reachable.outside() if attack.user else attack.words
            assert len(ports) == 2  # that for the agents, and the store's
            attack = Attack(words, attack.user, ports)
        else:
            assert len([at for at in attack.ports if at[0] == reachable.address(target)]) >= 2 + bool(engine)
        attack_all(attack, seconds, lambda: job.process.poll() is None)
        (tmp_path / "over").touch()
        assert job.finish() == 0, job.said()
        check_delays(tmp_path, attack, limit_s)
        launcher.check()
    finally:
        launcher.clear()


@needs_hosts
def test_a_proof_that_somebody_passes_on_or_repeats_lets_nobody_in(forking: TestHosts, tmp_path: Path) -> None:
    """Rank 2 is made to dial a stranger's host, who passes all on to the store, and then says the same himself."""
    assert attacks.GREETING == GREETING
    job = ByHand(forking, tmp_path, 29518)
    way = [(forking.address(STRANGER), 29518), (forking.address(0), 29518)]
    command = Attack(forking.entry(STRANGER), 0, way).command("relay", 60.0)
    try:
        job.start(0)
        job.start(1)
        assert soon(lambda: ("10.213.77.1", 29518) in listening(forking.inside[0]), PATIENCE_S), job.said()
        forking.set_names(1, {"h0": forking.address(STRANGER)})
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout is not None
            assert relay.stdout.readline() == "listens\n"
            job.start(2)
            recorded, told = (json.loads(line) for line in relay.stdout)
        assert recorded["recorded"] > 100
        assert told["most_heard"] <= MOST_ANSWERED
        words = f"was meant for {forking.address(STRANGER)} port 29518, not for {forking.address(0)} port 29518"
        assert words in job.said()
        assert not job.works()
        forking.reset_names()
        if soon(lambda: job.code(2) is not None, 5.0):
            job.start(2)
        assert soon(job.works, PATIENCE_S), job.said()
        job.finish()
    finally:
        forking.reset_names()
        forking.end_processes()
