"""Groups whose ranks change while their processes live on, by torch from 2.15 on, and by torchft."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from tests.support.inventory import held_by, more_than
from tests.support.ranks import Member
from tests.support.waiting import soon

_torch: Any = distributed_c10d  # whose _reconfigure 2.13's stubs lack

TIMEOUT = timedelta(seconds=120)
can_reconfigure = pytest.mark.skipif(
    not hasattr(c10d, "ReconfigureOptions"), reason="torch has torch.distributed._reconfigure from 2.15 on"
)


def join(member: Member, store: Store, size: int) -> None:
    """``init_process_group`` for a group that has no ranks yet; ``size`` is how many it may have at first."""
    options: Any = {"enable_reconfigure": True}  # which torch 2.13's signature lacks
    dist.init_process_group(
        "phalanx", store=store, rank=member.rank, world_size=size, timeout=TIMEOUT, device_id=None, **options
    )


class Reconfigured:
    """A process's side of such a group; its members are known by who they were at first."""

    def __init__(self, member: Member) -> None:
        self._store = member.store()
        join(member, self._store, member.size)
        self.group: Any = dist.group.WORLD
        self._store.set(f"handle-{member.rank}", _torch._get_reconfigure_handle())

    def change(self, number: int, members: Sequence[int]) -> None:
        handles = [self._store.get(f"handle-{member}").decode() for member in members]
        _torch._reconfigure(number, handles).wait()

    def end(self) -> None:
        dist.destroy_process_group()


class Configured:
    """torchft's way: a group is aborted, never shut down, and the next one made past ``init_process_group``."""

    def __init__(self, member: Member) -> None:
        self._store, self._own = member.store(), member.rank
        self.group: Any = None

    def change(self, number: int, members: Sequence[int]) -> None:
        self.end()
        options = c10d._DistributedBackendOptions()
        options.store = PrefixStore(f"torchft/{number}", self._store)
        options.group_rank, options.group_size = list(members).index(self._own), len(members)
        options.timeout, options.group_id, options.global_ranks_in_group = TIMEOUT, f"torchft-{number}", []
        self.group = dist.Backend._plugins["PHALANX"].creator_fn(options, None)

    def end(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None


WAYS = [pytest.param(Reconfigured, marks=can_reconfigure, id="reconfigured"), pytest.param(Configured, id="configured")]


def accumulated(before: Counter[str], pid: int, changes: int, hosts: int) -> dict[str, int]:
    """What a process holds more of after so many changes; between hosts, what has come with every change."""
    found: dict[str, int] = {}

    def nothing() -> bool:
        gc.collect()  # a group over several hosts is a circle of references
        more = more_than(before, held_by(pid))
        found.clear()
        found.update({kind: count for kind, count in more.items() if hosts == 1 or count >= changes})
        return not found

    soon(nothing, 20.0)
    return found


def summed(group: Any, own: float, count: int = 4) -> list[float]:
    """What an all_reduce of this process's number gives."""
    tensor = torch.full((count,), own)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()  # torch's options are those of an asynchronous call
    return tensor.tolist()
