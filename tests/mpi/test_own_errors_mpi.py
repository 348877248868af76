"""DDP and functional collectives raise Phalanx's own errors over MPI too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveMismatch, UnusedParameters

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # mpiexec's ranks know no such module


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other_head = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.body(x)
        return (self.head(x) + self.other_head(x)).sum() if both else self.head(x).sum()


def unused(group: Any, odd: bool) -> None:
    model = DistributedDataParallel(TwoHeads(), process_group=group)
    model(torch.ones(2, 4), True).backward()
    model(torch.ones(2, 4), False).backward()
    model(torch.ones(2, 4), False)


def in_ddp(group: Any, odd: bool) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if odd:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        model(torch.ones(2, 4)).sum().backward()


def in_backward(group: Any, odd: bool) -> None:
    leaf = torch.ones(4, requires_grad=True)
    whole = functional.all_gather_tensor_autograd(leaf, 0, group).sum()
    if odd:
        functional.all_reduce(leaf.detach(), "sum", group) + 1
    else:
        whole.backward()


def part(odd: bool, parts: int = 1) -> torch.Tensor:
    return torch.ones((8 if odd else 4) * parts)


MISTAKES: list[Callable[[Any, bool], Any]] = [
    in_ddp,
    in_backward,
    lambda group, odd: functional.all_reduce(part(odd), "sum", group) + 1,
    lambda group, odd: functional.all_gather_tensor(part(odd), 0, group) + 1,
    lambda group, odd: functional.reduce_scatter_tensor(part(odd, 3), "sum", 0, group) + 1,
    lambda group, odd: functional.all_to_all_single(part(odd, 3), None, None, group) + 1,
]


@every_rank(3, backend="mpi", leaves=False)
def test_they_are_phalanxs_errors_with_lines_of_the_script(member: Member) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(member.folder / "cache")  # which torch makes with DDP
    errors = []
    for mistake in (unused, *MISTAKES):
        group = dist.new_group()
        try:
            mistake(group, member.rank == 1)
        except Exception as error:
            errors.append(error)
        dist.barrier()
    of_unused, *of_others = errors
    assert isinstance(of_unused, UnusedParameters), of_unused
    assert "other_head.weight, other_head.bias" in str(of_unused)
    assert [type(error) for error in of_others] == [CollectiveMismatch] * len(MISTAKES), of_others
    for text in map(str, of_others):
        assert "running the callback" not in text
        calls = text.splitlines()[1:-1]
        assert len(calls) == 2, text
        assert all(f" at {__file__}:" in call for call in calls), text
    assert "rank 1: all_reduce(float32[3], sum)" in str(of_others[0])
