"""What groups that are gone leave in the job's store: nothing, on one host and over several."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import OWN_KEYS, pretend_host
from tests.support.ranks import Member, on_ranks
from tests.support.stores import tcp_store
from tests.support.waiting import soon
from torch._C._distributed_c10d import Store

GROUPS = 3
TIMEOUT = timedelta(seconds=120)
STORES: dict[str, Callable[[Member], Store]] = {"tcp": tcp_store, "file": Member.store}


def use(group: Any, member: Member) -> None:
    """A small and a large collective, and a message to the next rank."""
    for count in (4, 200_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(member.size)] * count
    sent: Any = dist.isend(torch.tensor([member.rank]), (member.rank + 1) % member.size, group=group)
    received = torch.empty(1, dtype=torch.int64)
    dist.recv(received, (member.rank - 1) % member.size, group=group)
    sent.wait()
    assert received.item() == (member.rank - 1) % member.size


def with_gloo(group: Any, member: Member) -> None:
    """Through the Gloo group that serves calls which reach no method of Phalanx's."""
    group.attach()
    tensor = torch.full((2,), float(member.rank + 1))
    group._gloo.get().allreduce([tensor]).wait()
    assert tensor.tolist() == [float(sum(range(1, member.size + 1)))] * 2


def never(group: Any, member: Member) -> None:
    pass


@pytest.mark.parametrize(("hosts", "kind"), [(1, "tcp"), (2, "tcp"), pytest.param(2, "file", marks=pytest.mark.long)])
def test_groups_leave_no_keys(hosts: int, kind: str) -> None:
    """Those that were used, those that used Gloo, and those that were never used."""

    def body(member: Member) -> dict[str, int]:
        store = STORES[kind](member)
        if hosts > 1:
            pretend_host(member.rank % hosts)
        dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT)
        found = {}
        for way in (use, with_gloo, never):
            member.meet(f"before {way.__name__}")
            before = store.num_keys() + (GROUPS * member.size * OWN_KEYS if hosts > 1 else 0)
            member.meet(f"counted before {way.__name__}")
            for _ in range(GROUPS):
                group: Any = dist.new_group()
                way(group, member)
                dist.destroy_process_group(group)
                del group
            member.meet(f"after {way.__name__}")
            soon(lambda: store.num_keys() <= before, 20)  # noqa: B023 - it is called now
            found[way.__name__] = store.num_keys() - before
        member.meet("done")
        dist.destroy_process_group()
        return found

    assert on_ranks(body, 3) == [{"use": 0, "with_gloo": 0, "never": 0}] * 3
