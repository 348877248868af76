"""Gather, scatter and all-to-all: every byte at its place, for every dtype that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from tests.world.contract import bits
from torch._C._distributed_c10d import GatherOptions

from phalanx.c10d.torch_versions import function
from phalanx.errors import ArgumentError


@every_rank(2)
def test_every_dtype_of_torch_is_copied(member: Member) -> None:
    everything = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes = [d for d in sorted(everything, key=str) if not any(part in str(d) for part in ("bits", "x2", ".q"))]

    wrong = []
    for dtype in dtypes:
        try:
            zeros = torch.zeros(64, dtype=torch.uint8)
            mine = (zeros + member.rank + 1).view(dtype)
        except RuntimeError:
            continue  # types below a byte have no plain storage
        if mine.dtype.is_complex or dtype == torch.bool:
            mine = torch.zeros(4, dtype=dtype)
        dist.broadcast(mine, src=1)
        outputs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(outputs, mine)
        if any(bits(output) != bits(mine) for output in outputs):
            wrong.append(str(dtype))
    assert not wrong, wrong


@every_rank(2)
def test_lists_that_cannot_be_right_are_refused(member: Member) -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="list has 1 tensors, but the group has 2 ranks"):
        dist.all_gather([x], x)
    with pytest.raises(ValueError, match="entry 1 of the list"):
        dist.all_gather([x.clone(), torch.ones(3)], x)
    with pytest.raises(ValueError, match="is not 2 times"):
        function("all_gather_single")(torch.ones(7), x)
    with pytest.raises(ValueError, match="is not 2 times"):
        function("reduce_scatter_single")(torch.ones(4), torch.ones(9))


def to(root: int, later: bool = False) -> GatherOptions:
    options = GatherOptions()
    options.rootRank, options.asyncOp = root, later
    return options


@every_rank()
def test_gather_into_one_tensor(member: Member) -> None:
    group: Any = dist.group.WORLD
    z = torch.full((2,), complex(member.rank, 1))
    output = torch.zeros(2 * member.size, dtype=torch.complex64)
    group.gather_single(output, z, to(0))
    if member.rank == 0:
        assert output.tolist() == [complex(rank, 1) for rank in range(member.size) for _ in range(2)]
        for wrong in (torch.zeros(2 * member.size + 1), torch.zeros(2 * member.size, dtype=torch.int32)):
            with pytest.raises(ArgumentError, match=f"is not {member.size} times"):
                group.gather_single(wrong, torch.zeros(2), to(0))
        with pytest.raises(ArgumentError, match="must give a tensor to gather into"):
            group.gather_single(None, torch.zeros(2), to(0))
