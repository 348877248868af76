"""Groups made and destroyed in numbers, one after another and all at once."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import TIMEOUT_S, Member
from tests.support.waiting import soon
from tests.support.worlds import every_rank

# The whole ten thousand, two minutes: PHALANX_GROUPS=10000 pytest -s tests/world/test_many_groups.py
GROUPS = int(os.environ.get("PHALANX_GROUPS", "0"))
# torch counts the groups it has made.
KIB_PER_GROUP = 3.0
KIB_BESIDE = 1024


def held() -> Counter[str]:
    """What this process holds."""
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:phalanx (" in line for line in maps)
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return Counter(segments=segments, threads=threads, descriptors=descriptors)


def rss_kib() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def grown(before: Counter[str]) -> Counter[str]:
    """What it holds more by now; the kernel lists a thread for a moment after it has been joined."""
    soon(lambda: not held() - before, 30.0)
    return held() - before


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


@pytest.mark.parametrize("count", [GROUPS or 100, pytest.param(400, marks=pytest.mark.long)])
@every_rank(2, timeout_s=max(TIMEOUT_S, GROUPS / 5))
def test_groups_made_used_and_destroyed_leave_nothing(member: Member, count: int) -> None:
    """Keys in the store are counted by test_keys_in_store.py."""

    def make_and_destroy(number: int) -> None:
        for _ in range(number):
            group = dist.new_group()
            use(group, member)
            dist.destroy_process_group(group)

    make_and_destroy(50)  # what is loaded, cached and pooled once
    dist.barrier()
    before, kib = held(), rss_kib()
    dist.barrier()  # the other rank has counted as well
    make_and_destroy(count)
    dist.barrier()
    assert grown(before) == Counter()
    assert rss_kib() - kib < count * KIB_PER_GROUP + KIB_BESIDE


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.long)])
@every_rank()
def test_many_groups_alive_at_once(member: Member, count: int) -> None:
    """Each with operations under way at the same time, and a thread of its own."""
    first = dist.new_group()
    use(first, member)
    dist.destroy_process_group(first)
    before = held()
    groups = [dist.new_group() for _ in range(count)]
    for _ in range(2):
        tensors = [torch.full((500,), float(member.rank + number)) for number in range(count)]
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work is not None
            work.wait()
            assert tensor.tolist() == [3.0 + 3 * number] * 500
    for group in reversed(groups):
        use(group, member)
    assert held()["segments"] == count + 1
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    groups.clear()  # the attached Gloo groups give their threads back with the last reference to the group
    del group
    assert grown(before) == Counter()
