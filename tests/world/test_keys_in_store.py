"""What groups that are gone leave in the job's store: nothing, on one host and over several."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.hosts import why_no_hosts
from tests.support.islands import OWN_KEYS, pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.waiting import soon
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

import phalanx
from phalanx import settings

__all__ = ["hosts", "remote"]  # fixtures

GROUPS = 20
TIMEOUT = timedelta(seconds=120)
sizes = pytest.mark.parametrize("size", [2, 3, 5])


def tcp_store(member: Member) -> Store:
    """The kind that torchrun gives its ranks."""
    port = member.folder / "port"
    if member.rank == 0:
        store = TCPStore("127.0.0.1", 0, member.size, True, TIMEOUT, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
        return store
    assert soon(port.exists)
    return TCPStore("127.0.0.1", int(port.read_text()), member.size, False, TIMEOUT)


STORES: dict[str, Callable[[Member], Store]] = {"tcp": tcp_store, "file": Member.store}


def use(group: dist.ProcessGroup, member: Member) -> None:
    """A small and a large collective, and a message to the next rank."""
    for count in (4, 200_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(member.size)] * count
    sent = dist.isend(torch.tensor([member.rank]), (member.rank + 1) % member.size, group=group)
    received = torch.empty(1, dtype=torch.int64)
    dist.recv(received, (member.rank - 1) % member.size, group=group)
    assert sent is not None
    sent.wait()
    assert received.item() == (member.rank - 1) % member.size


def with_gloo(group: Any, member: Member) -> None:
    """Through the Gloo group that serves calls which reach no method of Phalanx's."""
    group.attach()
    tensor = torch.full((2,), float(member.rank + 1))
    group._gloo.get().allreduce([tensor]).wait()
    assert tensor.tolist() == [float(sum(range(1, member.size + 1)))] * 2


def keys_after_groups(
    member: Member, store: Store, hosts: int, use: Callable[[Any, Member], None], close: Callable[[Any], None]
) -> int:
    """How many more keys there are after many groups than with the world alone."""
    if hosts > 1:
        pretend_host(member.rank % hosts)
    dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT)
    member.meet("joined")
    before = store.num_keys()
    member.meet("counted")
    for _ in range(GROUPS):
        group: Any = dist.new_group()
        use(group, member)
        close(group)
        del group
    member.meet("used")
    own = GROUPS * member.size * OWN_KEYS if hosts > 1 else 0

    def more() -> int:
        return store.num_keys() - before - own

    soon(lambda: more() <= 0)
    found = more()
    member.meet("counted again")
    dist.destroy_process_group()
    return found


@sizes
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("hosts", [1, 2])
def test_groups_that_were_used_leave_no_keys(hosts: int, kind: str, size: int) -> None:
    def body(member: Member) -> int:
        return keys_after_groups(member, STORES[kind](member), hosts, use, dist.destroy_process_group)

    assert on_ranks(body, size) == [0] * size


@sizes
@pytest.mark.parametrize("hosts", [1, 2])
def test_groups_that_used_gloo_leave_no_keys(hosts: int, size: int) -> None:
    def body(member: Member) -> int:
        return keys_after_groups(member, tcp_store(member), hosts, with_gloo, dist.destroy_process_group)

    assert on_ranks(body, size) == [0] * size


@sizes
def test_groups_that_were_never_used_leave_no_keys(size: int) -> None:
    def body(member: Member) -> int:
        return keys_after_groups(member, tcp_store(member), 2, lambda group, member: None, dist.destroy_process_group)

    assert on_ranks(body, size) == [0] * size


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 2), (5, 3)])
def test_a_wait_about_which_other_hosts_were_asked_leaves_no_keys(
    size: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.WARN_AFTER, "0.5")

    def body(member: Member) -> tuple[set[str], set[str]]:
        store = tcp_store(member)
        pretend_host(member.rank % hosts)
        dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=size, timeout=TIMEOUT)

        def asked_and_answered() -> set[str]:
            return {key for key in store.list_keys() if key.endswith("/asked") or "/seen/" in key}

        if member.rank == size - 1:
            assert soon(lambda: len(asked_and_answered()) >= 2)
        dist.all_reduce(torch.ones(2))
        between = asked_and_answered()
        dist.destroy_process_group()
        member.meet("left")
        soon(lambda: not asked_and_answered())
        after = asked_and_answered()
        member.meet("looked")  # the store goes with rank 0
        return between, after

    for between, after in on_ranks(body, size):
        assert len(between) >= 2
        assert after == set()


@sizes
@pytest.mark.parametrize("islands", [1, 2])
def test_groups_leave_no_keys_in_the_store_of_phalanx(islands: int, size: int) -> None:
    """That which phalanx.init() makes: as many keys after many groups as after a few."""

    def body(member: Member, port: int) -> tuple[int, int]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(member.rank), WORLD_SIZE=str(size), LOCAL_RANK=str(member.rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(size))
        if islands > 1:
            pretend_host(member.rank % islands)
        own = OWN_KEYS * size if islands > 1 else 0
        phalanx.init(timeout_s=TIMEOUT.total_seconds())
        store = _get_default_store()
        member.meet("joined")
        before = store.num_keys()
        found = []
        for groups in (3, GROUPS):
            member.meet(f"before {groups}")
            for _ in range(groups):
                group: Any = dist.new_group()
                use(group, member)
                dist.destroy_process_group(group)
                del group
            member.meet(f"after {groups}")
            before += groups * own
            soon(lambda: store.num_keys() <= before)  # noqa: B023 - it is called now
            found.append(store.num_keys() - before)
        member.meet("counted")
        phalanx.close()
        return found[0], found[1]

    with held_port() as port:
        assert on_ranks(lambda member: body(member, port), size) == [(0, 0)] * size


SCRIPT = """
    import time, torch, torch.distributed as dist, phalanx
    from torch.distributed.distributed_c10d import _get_default_store

    world = phalanx.init(timeout_s=300)
    store = _get_default_store()

    def keys_after(groups):
        for _ in range(groups):
            group = dist.new_group()
            for count in (4, 200_000):
                tensor = torch.ones(count)
                dist.all_reduce(tensor, group=group)
                assert tensor.sum() == count * world.world_size
            assert type(group._communicator).__name__ == "HostsCommunicator"
            dist.destroy_process_group(group)
            del group
        world.barrier()
        until = time.monotonic() + 60
        while store.num_keys() > before and time.monotonic() < until:  # the last to leave deletes them in a moment
            time.sleep(0.01)
        found = store.num_keys() - before
        world.barrier()
        return found

    world.barrier()
    before = store.num_keys()
    world.barrier()
    print("more keys:", keys_after(3), keys_after(20))
    phalanx.close()
"""


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_groups_leave_no_keys_on_two_hosts(remote: RemoteLauncher) -> None:
    job = remote.run("-q", "--no-prefix", "-H", "h0:2,h1:1", remote.script(SCRIPT))
    assert job.process.returncode == 0, job.said()
    assert job.out.splitlines() == ["more keys: 0 0"] * 3, job.said()
