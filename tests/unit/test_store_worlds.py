"""Worlds over the store that rank 0 serves: Gloo, one port that is used again, and forked children."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

from phalanx.place.place import Place
from phalanx.rendezvous.meet import leave, meet
from phalanx.store.client import JobStore


def by_hand(place: Member, port: int) -> Place:
    at = {"master_addr": "127.0.0.1", "master_port": port}
    return Place("env", place.rank, place.size, None, None, None, None, **at)  # type: ignore[arg-type]


def test_gloo_works_over_it_and_the_last_to_leave_may_be_anybody() -> None:
    size = 3

    def body(place: Member) -> list[float]:
        store = meet(by_hand(place, port), 60.0, 1)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
        sums = []
        for ranks in (range(place.size), range(place.size - 1)):
            group = dist.new_group(list(ranks))
            if place.rank in ranks:
                tensor = torch.tensor([float(place.rank)])
                dist.all_reduce(tensor, group=group)
                sums.append(tensor.item())
        objects: list[Any] = [None] * place.size
        dist.all_gather_object(objects, place.rank)
        assert objects == list(range(place.size))
        dist.destroy_process_group()
        leave(store)
        return sums

    everybody, fewer = sum(range(size)), sum(range(size - 1))
    with held_port() as port:
        assert on_ranks(body, size) == [[everybody, fewer]] * (size - 1) + [[everybody]]


def test_a_forked_child_has_connections_of_its_own_or_none() -> None:
    """A worker of a data loader inherits the parent's descriptors; neither may read the other's answers."""

    def body(place: Member) -> bool:
        store = meet(by_hand(place, port), 60.0, 1)
        assert isinstance(store, JobStore)
        store.set(f"rank {place.rank}", "before")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if place.rank == 0:
                    with pytest.raises(dist.DistStoreError, match="belongs to the process that this one was forked"):
                        store.get("rank 0")
                else:
                    for number in range(200):
                        store.set("child", str(number))
                        assert store.get("child") == str(number).encode()
                code = 0
            finally:
                os._exit(code)
        for number in range(200):
            store.set(f"parent {place.rank}", str(number))
            assert store.get(f"parent {place.rank}") == str(number).encode()
        assert os.waitpid(pid, 0)[1] == 0
        store.set(f"done {place.rank}", "")
        store.wait(["done 0", "done 1"])
        leave(store)
        if place.rank == 0:
            store._peer._thread.join(20)  # type: ignore[union-attr] # this process ends without its exit handlers
        return True

    with held_port() as port:
        assert on_ranks(body, 2) == [True, True]
