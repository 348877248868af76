"""Processes of this machine that take themselves for processes of several hosts, of which each shares memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from phalanx.c10d import create
from phalanx.membership.rendezvous_store import part_of
from phalanx.settings import BACKEND
from phalanx.system.host import Host
from phalanx.transports.hierarchical import layout
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost
from tests.support.ranks import Member

# The keys in the store that a rank's pretending leaves for each group that it makes.
OWN_KEYS = 1

HostOf = Callable[[int, int], int]

# The host of a rank, given the world's size.
ISLANDS: dict[str, HostOf] = {
    "halves": lambda rank, size: rank * 2 // size,
    "cyclic": lambda rank, size: rank % 2,
}


def pretend_host(number: int) -> None:
    """Let this process be on the host of this number, for all groups that it makes from now on."""
    name = f"h{number}"

    def connect(store: Store, rank: int, size: int, timeout: timedelta, *more: Any) -> SharedMemoryCommunicator:
        meeting = _meeting(store, rank, size, timeout, name)
        if meeting:
            raise NotOneHost("its ranks pretend to be on several hosts", meeting)
        return SharedMemoryCommunicator(store, rank, size, timeout, *more)

    vars(create)["SharedMemoryCommunicator"] = connect
    vars(layout)["this_host"] = lambda: Host(name)


def _meeting(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> str:
    """The name of a meeting of ranks of several hosts; empty for ranks of one."""
    number = store.add(f"pretended/{rank}", 1)
    own, ranks = part_of(store, f"pretended/{number}"), [str(other) for other in range(size)]
    own.set(str(rank), name)
    own.wait(ranks, timeout)
    return f"pretended {number}" if len({own.get(other) for other in ranks}) > 1 else ""


def divide_by(monkeypatch: pytest.MonkeyPatch, host_of: HostOf) -> None:
    """Have the ranks of the tests join as if on several hosts."""
    join = Member.join

    def joined(member: Member, backend: str = BACKEND, timeout_s: float = 60.0, name: str = "store") -> None:
        pretend_host(host_of(member.rank, member.size))
        join(member, backend, timeout_s, name)

    monkeypatch.setattr(Member, "join", joined)
