"""Groups made and destroyed in numbers, one after another and all at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import TIMEOUT_S, Member, on_ranks
from torch._C._distributed_c10d import TCPStore

# The whole ten thousand, two minutes: PHALANX_GROUPS=10000 pytest -s tests/world/test_many_groups.py
GROUPS = int(os.environ.get("PHALANX_GROUPS", "0"))
# torch counts the groups it has made.
KIB_PER_GROUP = 3.0
KIB_BESIDE = 1024


@dataclass
class Held:
    """What a process holds."""

    rss_kib: int
    threads: int
    descriptors: int
    segments: int

    @staticmethod
    def now() -> Held:
        with open("/proc/self/statm") as sizes, open("/proc/self/maps") as maps:
            return Held(
                int(sizes.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
                len(os.listdir("/proc/self/task")),
                len(os.listdir("/proc/self/fd")),
                sum("memfd:phalanx (" in line for line in maps),
            )

    def growth(self, later: Held) -> dict[str, int]:
        return {field.name: getattr(later, field.name) - getattr(self, field.name) for field in fields(self)}

    def growth_until_now(self) -> dict[str, int]:
        """The kernel lists a thread for a moment after it has been joined."""
        until = time.monotonic() + 30.0
        grown = self.growth(Held.now())
        while grown["threads"] > 0 and time.monotonic() < until:
            time.sleep(0.01)
            grown = self.growth(Held.now())
        return grown


def use(group: dist.ProcessGroup, member: Member) -> None:
    """One operation of each way of running: here, on the group's thread, and as messages."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    sent = dist.isend(torch.tensor([member.rank]), (member.rank + 1) % member.size, group=group)
    assert work is not None
    assert sent is not None
    work.wait()
    received = torch.empty(1, dtype=torch.int64)
    dist.recv(received, (member.rank - 1) % member.size, group=group)
    sent.wait()
    assert tensor.tolist() == [float(member.size**2)] * 4
    assert received.item() == (member.rank - 1) % member.size


@pytest.mark.parametrize("count", [GROUPS or 150, pytest.param(400, marks=pytest.mark.long)])
def test_groups_made_used_and_destroyed_leave_nothing(count: int) -> None:
    def body(member: Member) -> tuple[dict[str, int], int]:
        timeout = timedelta(seconds=60)
        port = member.folder / "port"
        if member.rank == 0:
            store = TCPStore("127.0.0.1", 0, member.size, True, timeout, wait_for_workers=False)
            port.with_suffix(".part").write_text(str(store.port))
            port.with_suffix(".part").rename(port)
        else:
            while not port.exists():
                time.sleep(0.005)
            store = TCPStore("127.0.0.1", int(port.read_text()), member.size, False, timeout)
        dist.init_process_group("phalanx", store=store, rank=member.rank, world_size=member.size)

        def make_and_destroy(number: int) -> None:
            for _ in range(number):
                group = dist.new_group()
                use(group, member)
                dist.destroy_process_group(group)

        make_and_destroy(50)  # what is loaded, cached and pooled once
        dist.barrier()
        before, keys = Held.now(), store.num_keys()
        dist.barrier()  # the other rank has counted as well
        make_and_destroy(count)
        dist.barrier()
        grown, more_keys = before.growth_until_now(), store.num_keys() - keys
        dist.barrier()
        dist.destroy_process_group()
        return grown, more_keys

    for grown, more_keys in on_ranks(body, 2, timeout_s=max(TIMEOUT_S, count / 5)):
        print(f"{count} groups: {grown}, {more_keys / count:.1f} keys a group")
        assert grown["descriptors"] <= 0
        assert grown["segments"] <= 0
        assert grown["threads"] <= 0
        assert grown["rss_kib"] < count * KIB_PER_GROUP + KIB_BESIDE
        assert more_keys == 0


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [3])
def test_many_groups_alive_at_once(size: int, count: int) -> None:
    """Each with operations under way at the same time, and a thread of its own."""

    def body(member: Member) -> tuple[dict[str, int], int]:
        member.join()
        first = dist.new_group()
        use(first, member)
        dist.destroy_process_group(first)
        before = Held.now()
        groups = [dist.new_group() for _ in range(count)]
        for _ in range(2):
            tensors = [torch.full((500,), float(member.rank + number)) for number in range(len(groups))]
            works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
            for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
                assert work is not None
                work.wait()
                assert tensor.tolist() == [float(sum(rank + number for rank in range(size)))] * 500
        for group in reversed(groups):
            use(group, member)
        segments = Held.now().segments
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        groups.clear()  # the attached Gloo groups give their threads back with the last reference to the group
        del group
        left = before.growth_until_now()
        dist.destroy_process_group()
        return left, segments

    for left, segments in on_ranks(body, size):
        assert segments == count + 1
        assert left["segments"] == 0
        assert left["descriptors"] <= 0
        assert left["threads"] <= 0
