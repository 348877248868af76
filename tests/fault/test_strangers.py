"""Another user of this machine reaches the ports of a job: he is refused, and the job goes on."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.strangers import as_another_user, needs_another_user

__all__ = ["launcher"]

GREETING = b"\0" + struct.pack("=I", 0x3C85F7CE)
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
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(600)]
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
    assert as_another_user(read_the_store, port) == [b"", b""]
    as_another_user(write_and_go, port)
    assert as_another_user(stay, port) == [b""] * 600
    assert as_another_user(claim_the_port, port) == ["Address already in use"] * 2
    done.touch()
    outcome = job.finish()
    assert (outcome.code, outcome.out_lines) == (0, ["['of rank 0', 'of rank 1'] False False"])
    assert "refused a connection from 127.0.0.1 to the job's store: it is not this user's" in outcome.err_text
    assert outcome.err_text.count("refused a connection") == 4
