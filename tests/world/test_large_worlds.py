"""Far more ranks than cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.c10d.torch_versions import function

MOST_BYTES_PER_RANK = 4 << 20


def segment_bytes() -> int:
    """How large this process's shared segment is. Memory stands only behind the pages that were written."""
    (mapping,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:phalanx (" in line]
    first, last = mapping.split()[0].split("-")
    return int(last, 16) - int(first, 16)


@pytest.mark.parametrize("size", [12, pytest.param(64, marks=pytest.mark.long)])
def test_every_operation_in_a_world_of(size: int) -> None:
    def body(member: Member) -> int:
        member.join(timeout_s=280)
        n, me = member.size, member.rank
        for count in (1, 5_000, 70_000):  # one synchronisation, one chunk, two chunks
            tensor = torch.full((count,), float(me + 1))
            dist.all_reduce(tensor)
            assert bool((tensor == n * (n + 1) / 2).all())
        gathered = torch.empty(n, 300)
        function("all_gather_single")(gathered, torch.full((300,), float(me)))
        assert torch.equal(gathered, torch.arange(n).float()[:, None].expand(n, 300))
        for count in (3, 2_000):  # what fits beside the row of sizes, and what needs more chunks
            received = torch.empty(n * count)
            dist.all_to_all_single(received, (torch.arange(n) * n + me).float().repeat_interleave(count))
            assert torch.equal(received, (torch.arange(n) + me * n).float().repeat_interleave(count))
        tensor = torch.arange(1000) + me
        dist.broadcast(tensor, n - 1)
        assert torch.equal(tensor, torch.arange(1000) + n - 1)
        own = torch.empty(10)
        function("reduce_scatter_single")(own, torch.arange(n).float().repeat_interleave(10) + me)
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

    assert max(on_ranks(body, size)) <= size * MOST_BYTES_PER_RANK
