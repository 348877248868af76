"""Far more ranks than cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

MOST_BYTES_PER_RANK = 4 << 20
# By hand: PHALANX_RANKS=256 pytest -s tests/world/test_large_worlds.py
BY_HAND = [pytest.param(int(size)) for size in os.environ.get("PHALANX_RANKS", "").split(",") if size]
SIZES = BY_HAND or [pytest.param(24), pytest.param(64, marks=pytest.mark.long)]


def segment_bytes() -> int:
    """How large this process's shared segment is. Memory stands only behind the pages that were written."""
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:phalanx (" in mapping:
            first, last = mapping.split()[0].split("-")
            return int(last, 16) - int(first, 16)
    raise AssertionError("no shared segment is mapped")


@pytest.mark.parametrize("size", SIZES)
def test_every_operation_in_a_world_of(size: int) -> None:
    def body(member: Member) -> int:
        member.join(timeout_s=280)
        n, me = member.size, member.rank
        total = n * (n + 1) / 2
        for count in (1, 5_000, 70_000):  # one synchronisation, one chunk, two chunks
            tensor = torch.full((count,), float(me + 1))
            dist.all_reduce(tensor)
            assert bool((tensor == total).all())
        dist.barrier()
        gathered = torch.empty(n, 300)
        dist.all_gather_single(gathered, torch.full((300,), float(me)))
        assert torch.equal(gathered, torch.arange(n).float()[:, None].expand(n, 300))
        for count in (3, 2_000):  # what fits beside the row of sizes, and what needs more chunks
            received = torch.empty(n * count)
            dist.all_to_all_single(received, (torch.arange(n) * n + me).float().repeat_interleave(count))
            assert torch.equal(received, (torch.arange(n) + me * n).float().repeat_interleave(count))
        for root in (0, n - 1):
            tensor = torch.arange(1000) + me
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, torch.arange(1000) + root)
        own = torch.empty(10)
        dist.reduce_scatter_single(own, torch.arange(n).float().repeat_interleave(10) + me)
        assert own.tolist() == [float(n * me + n * (n - 1) // 2)] * 10
        work = dist.isend(torch.tensor([me]), (me + 1) % n)
        before = torch.empty(1, dtype=torch.int64)
        dist.recv(before, (me - 1) % n)
        assert work is not None
        work.wait()
        assert before.item() == (me - 1) % n
        dist.barrier()
        held = segment_bytes()
        dist.barrier()
        dist.destroy_process_group()
        return held

    started = time.monotonic()
    segments = on_ranks(body, size)
    assert max(segments) <= size * MOST_BYTES_PER_RANK
    print(f"{size} ranks: {time.monotonic() - started:.1f} s, {max(segments) / size / 2**20:.2f} MiB per rank")
