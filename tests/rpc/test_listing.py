"""Who the workers are."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from phalanx import rpc
from phalanx.errors import ClosedError
from phalanx.rpc import session
from phalanx.system.interfaces import LOOPBACK
from tests.support.ranks import Member, on_ranks


def test_workers_are_listed_with_those_that_are_no_rank_until_they_leave() -> None:
    size, last = 3, 2

    def body(member: Member) -> Any:
        member.join()
        store = PrefixStore("listed", member.store("workers"))
        name, rank = ("server", -1) if member.rank == last else (f"worker{member.rank}", member.rank)
        session.begin(store, name, rank, LOOPBACK, 60.0)
        pids: list[Any] = [None] * size
        dist.all_gather_object(pids, os.getpid())
        seen = [(one.name, one.rank, one.pid) for one in rpc.workers()]
        table = rpc.describe().splitlines()
        dist.barrier()
        if member.rank == last:
            rpc.shutdown()
        dist.barrier()
        after = [one.name for one in rpc.workers()] if member.rank != last else []
        dist.barrier()
        rpc.shutdown(wait=False)
        return pids, seen, table, after

    ranks = [(f"worker{rank}", rank) for rank in range(last)]
    for own, (pids, seen, table, after) in enumerate(on_ranks(body, size)):
        assert seen == [(*pair, pid) for pair, pid in zip([*ranks, ("server", -1)], pids, strict=True)]
        assert table[0] == f"{size} workers"
        assert table[1].split() == ["worker", "rank", "host", "pid", "address"]
        for line, (name, rank), pid in zip(table[2:], [*ranks, ("server", "none")], pids, strict=True):
            cells = line.replace(" (this one)", "").split()
            assert cells[:4] == [name, str(rank), socket.gethostname(), str(pid)]
            assert cells[4].startswith(f"{LOOPBACK}:")
        assert [("(this one)" in line) for line in table[2:]] == [rank == own for rank in range(size)]
        assert after == ([f"worker{rank}" for rank in range(last)] if own != last else [])


@pytest.mark.parametrize("ask", [rpc.workers, rpc.describe])
def test_who_is_no_worker_is_told_so(ask: Any) -> None:
    with pytest.raises(ClosedError, match=r"rpc\.init"):
        ask()
