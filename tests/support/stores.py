"""Rank 0's store and the ranks that join it, in one process; the launcher's; and torch's."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from phalanx.membership.client import Connections, JobStore, connect
from phalanx.membership.launcher_store import TorchStoreServer
from phalanx.membership.store_protocol import Claim, Verdict
from phalanx.membership.store_server import Seats, StoreServer
from phalanx.wire.key import Key
from phalanx.wire.sockets import listen
from tests.support.ranks import Member
from tests.support.waiting import soon

__all__ = ["KEY", "Job", "Served", "claim", "tcp_store"]

KEY = Key(b"the key of the tests", "a test")


def tcp_store(member: Member) -> TCPStore:
    """The kind that torchrun gives its ranks; it goes with rank 0."""
    port, timeout = member.folder / "port", timedelta(seconds=120)
    if member.rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
        return store
    assert soon(port.exists)
    return TCPStore("127.0.0.1", int(port.read_text()), None, False, timeout)


def claim(rank: int, world_size: int, **more: Any) -> Claim:
    return Claim(
        **{
            "rank": rank,
            "world_size": world_size,
            "pid": 1000 + rank,
            "start": 0,
            "sight": "",
            "host": f"h{rank}",
            **more,
        }
    )


class Job:
    """A store for ``size`` ranks; ``ranks`` has those that have joined, by rank, rank 0's own first."""

    def __init__(self, size: int, key: Key = KEY, address: str = "127.0.0.1", say: Any = None, **more: Any) -> None:
        self.said: list[str] = []
        self.key = key
        self.size = size
        listener = listen(address, 0)
        self.where: tuple[str, int] = listener.getsockname()[:2]
        own = claim(0, size, **{"token": "secret of rank 0", **more})
        self.server = StoreServer(listener, key, Seats(own), say or self.said.append)
        self.ranks = {0: self._connected(own)}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for store in reversed(list(self.ranks.values())):
            store.end()
        self.server.stop()
        self.server.loop.thread.join(20)

    def knock(self, who: Claim, key: Key | None = None) -> Verdict:
        """The verdict of rank 0 on ``who``, whose connection is closed then."""
        sock, verdict = connect(self.where, key or self.key, who, 20.0)
        sock.close()
        return verdict

    def join(self, rank: int, **more: Any) -> JobStore:
        """Let ``rank`` join."""
        self.ranks[rank] = self._connected(claim(rank, self.size, **{"token": f"secret of rank {rank}", **more}))
        return self.ranks[rank]

    def _connected(self, who: Claim) -> JobStore:
        line, verdict = connect(self.where, self.key, who, 20.0)
        assert verdict.kind == "welcome", verdict.reason
        connections = Connections(line, verdict, self.where, self.key, who)
        return JobStore(connections, timedelta(seconds=20), None if who.rank else self.server)

    def all_have_joined(self) -> bool:
        """Return whether every rank joins, within a time."""
        return soon(lambda: not self.ranks[0].describe_missing())

    def everybody(self) -> list[JobStore]:
        """Let all ranks join."""
        return [self.ranks[rank] if rank in self.ranks else self.join(rank) for rank in range(self.size)]

    def stranger(self) -> socket.socket:
        """A connection on which nothing has been sent."""
        return socket.create_connection(self.where, timeout=20)

    def heard(self, words: str, timeout_s: float = 60.0) -> bool:
        """Whether rank 0 prints a line with these words in it within ``timeout_s``."""
        return soon(lambda: any(words in line for line in self.said), timeout_s)


class Served:
    """A store that a child process serves: some calls of torch's client keep the interpreter's lock while they wait."""

    def __init__(self, **options: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                TorchStoreServer(listener, **options).serve()
            finally:
                os._exit(1)
        listener.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def client(self, timeout_s: float = 20.0) -> TCPStore:
        host, port = self.where
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
