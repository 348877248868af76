"""Functional collectives and torch.distributed.nn, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from tests.differential.program import program
from tests.support.ranks import Member

Call = Callable[[torch.Tensor, Any, int], Any]

FUNCTIONAL: dict[str, Call] = {
    "all_reduce": lambda x, group, size: functional.all_reduce(x, "sum", group),
    "all_reduce_max": lambda x, group, size: functional.all_reduce(x, "max", group),
    "all_reduce_avg": lambda x, group, size: functional.all_reduce(x, "avg", group),
    "broadcast": lambda x, group, size: functional.broadcast(x, 0, group),
    "all_gather_tensor": lambda x, group, size: functional.all_gather_tensor(x, 0, group),
    "all_gather_tensor_dim_1": lambda x, group, size: functional.all_gather_tensor(x.view(2, 2), 1, group),
    "all_gather_tensor_autograd": lambda x, group, size: functional.all_gather_tensor_autograd(x, 0, group),
    "reduce_scatter_tensor": lambda x, group, size: functional.reduce_scatter_tensor(x.repeat(size), "sum", 0, group),
    "reduce_scatter_autograd": lambda x, group, size: functional.reduce_scatter_tensor_autograd(
        x.repeat(size), "sum", 0, group
    ),
    "all_to_all_single": lambda x, group, size: functional.all_to_all_single(x.repeat(size), None, None, group),
    "all_to_all_autograd": lambda x, group, size: functional.all_to_all_single_autograd(
        x.repeat(size), [4] * size, [4] * size, group
    ),
    "all_reduce_coalesced": lambda x, group, size: functional.all_reduce_coalesced([x, x * 2], "sum", group),
    "all_gather_coalesced": lambda x, group, size: functional.all_gather_into_tensor_coalesced([x, x * 2], group),
    "reduce_scatter_coalesced": lambda x, group, size: functional.reduce_scatter_tensor_coalesced(
        [x.repeat(size)], "sum", [0], group
    ),
    "permute_tensor": lambda x, group, size: functional.permute_tensor(x, [*range(1, size), 0], group),
}


def awaited(value: Any) -> Any:
    return [one * 1 for one in value] if isinstance(value, (list, tuple)) else value * 1


@program(cases=FUNCTIONAL)
def call(member: Member, case: Call) -> Any:
    return awaited(case(torch.arange(4.0) + member.rank, dist.group.WORLD, member.size))


@program(cases=FUNCTIONAL)
def in_a_group_of_some(member: Member, case: Call) -> Any:
    group: Any = dist.new_group([0, member.size - 1])
    if member.rank not in (0, member.size - 1):
        return None
    return awaited(case(torch.arange(4.0) + member.rank, group, 2))


DIFFERENTIABLE: dict[str, Call] = {
    "all_reduce": lambda x, group, size: differentiable.all_reduce(x),
    "broadcast": lambda x, group, size: differentiable.broadcast(x, 0),
    "reduce": lambda x, group, size: differentiable.reduce(x, 0),
    "all_gather": lambda x, group, size: torch.stack(differentiable.all_gather(x)),
    "gather": lambda x, group, size: torch.stack(differentiable.gather(x, 0)),
    "scatter": lambda x, group, size: differentiable.scatter([x + i for i in range(size)], 0),
    "reduce_scatter": lambda x, group, size: differentiable.reduce_scatter(
        torch.empty(4), list(x.repeat(size).chunk(size))
    ),
    "all_to_all": lambda x, group, size: torch.stack(
        differentiable.all_to_all([torch.empty(4) for _ in range(size)], list(x.repeat(size).chunk(size)))
    ),
    "all_to_all_single": lambda x, group, size: differentiable.all_to_all_single(torch.empty(4 * size), x.repeat(size)),
}


@program(cases=DIFFERENTIABLE)
def with_gradients(member: Member, case: Call) -> Any:
    x = (torch.arange(4.0) + member.rank).requires_grad_()
    output = case(x, dist.group.WORLD, member.size)
    (output * (torch.arange(float(output.numel())).view(output.shape) + 1)).sum().backward()
    return output if member.rank == 0 else None, x.grad


@program(cases=["all_gather_tensor_autograd", "reduce_scatter_autograd", "all_to_all_autograd"])
def functional_with_gradients(member: Member, name: str) -> Any:
    x = (torch.arange(4.0) + member.rank).requires_grad_()
    output = FUNCTIONAL[name](x, dist.group.WORLD, member.size) * 1
    (output * (torch.arange(float(output.numel())) + 1)).sum().backward()
    return output, x.grad
