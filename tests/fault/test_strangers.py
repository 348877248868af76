"""Another user of this machine reaches for the ports, the memory and the files of a job: he gets nothing of it."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import struct
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.attackers import NOBODY, Attack, attack_all, delays, listening, sockets_of, start_everything
from tests.support.golden import check_told
from tests.support.strangers import as_another_user, needs_another_user

__all__ = ["launcher"]

GREETING = b"\0" + struct.pack("=I", 0x3C85F7CE)
CONNECTIONS, OPEN_FILES = 1_200, 1_024  # more of the stranger's than any process of the job may open files
SET, GETNUMKEYS, LIST = b"\1", b"\7", b"\21"

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
                sock.sendall(GREETING + request)
            answers.append(heard(sock))
    return answers


def write_and_go(port: int) -> None:
    """Write a key and close at once: the kernel then lists the connection as root's, who started the job."""
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, contextlib.suppress(OSError):
            sock.sendall(GREETING + SET + text(b"stranger") + text(b"false"))


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
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
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


@needs_another_user
@pytest.mark.parametrize(("seconds", "limit_s"), [(0.5, 7.0), pytest.param(5.0, 1.0, marks=pytest.mark.fault)])
def test_another_user_at_every_port_of_a_job_does_not_hold_it_up(
    launcher: Launcher, seconds: float, limit_s: float
) -> None:
    """Its store's, and Gloo's on loopback."""
    job = start_everything(launcher)
    inodes = set().union(*(sockets_of(pid) for pid in job.processes()))
    ports = listening(os.getpid(), inodes)
    assert len(ports) >= 4  # one of the store, and one of each rank
    attack = Attack((), NOBODY, ports)
    attack_all(attack, seconds, lambda: job.process.poll() is None)
    (launcher.directory / "over").touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text
    assert max(delays(launcher.directory, attack).values()) < limit_s


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
def test_another_user_can_open_nothing_of_a_jobs_memory_and_files(launcher: Launcher, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    job = start_everything(launcher)
    pids = job.processes()
    assert len(pids) >= 5  # the launcher, the zygote, and the ranks
    own = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "maps", "fd/1")]
    assert set(own) <= set(filter(os.path.exists, own))
    assert as_another_user(what_opens, pids) == []
    # Sockets between its processes have no name, in the file system or beside it, by which anybody could connect.
    inodes = set().union(*(sockets_of(pid) for pid in pids))
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    of_job = [words for words in local if words[6] in inodes]
    assert of_job
    assert [words[7] for words in of_job if len(words) > 7] == []
    assert {name for name in os.listdir("/dev/shm") if "phalanx" in name} <= before
    readable = [path for path in job.temporary.rglob("*") if as_another_user(os.access, str(path), os.R_OK)]
    assert readable == []
    (launcher.directory / "over").touch()
    assert job.finish().code == 0
