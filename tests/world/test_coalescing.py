"""Several collectives of torch's coalescing manager, which Gloo refuses, so that nothing can be compared with it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch.distributed.distributed_c10d import _coalescing_manager


def test_coalesced_collectives_are_all_done() -> None:
    def body(member: Member) -> None:
        member.join()
        tensors = [torch.full((k,), 1.0) for k in (1, 5, 3000)]
        with _coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        outputs, parts = [torch.empty(6), torch.empty(12)], [torch.ones(2) * member.rank, torch.ones(4) * member.rank]
        with _coalescing_manager():
            for output, part in zip(outputs, parts, strict=True):
                dist.all_gather_single(output, part)
        assert all(bool((tensor == 3).all()) for tensor in tensors)
        assert outputs[0].tolist() == [0, 0, 1, 1, 2, 2]
        assert outputs[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        dist.destroy_process_group()

    on_ranks(body, 3)
