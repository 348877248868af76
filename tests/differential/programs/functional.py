"""Functional collectives and torch.distributed.nn, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from tests.differential.program import program
from tests.support.ranks import Member

# Texts, in which ``x`` is this rank's tensor, and ``many`` is it as many times as there are ranks.
FUNCTIONAL = {
    "all_reduce": "f.all_reduce(x, 'sum', group)",
    "all_reduce_max": "f.all_reduce(x, 'max', group)",
    "all_reduce_avg": "f.all_reduce(x, 'avg', group)",
    "broadcast": "f.broadcast(x, 0, group)",
    "all_gather_tensor": "f.all_gather_tensor(x, 0, group)",
    "all_gather_tensor_dim_1": "f.all_gather_tensor(x.view(2, 2), 1, group)",
    "all_gather_tensor_autograd": "f.all_gather_tensor_autograd(x, 0, group)",
    "reduce_scatter_tensor": "f.reduce_scatter_tensor(many, 'sum', 0, group)",
    "reduce_scatter_autograd": "f.reduce_scatter_tensor_autograd(many, 'sum', 0, group)",
    "all_to_all_single": "f.all_to_all_single(many, None, None, group)",
    "all_to_all_autograd": "f.all_to_all_single_autograd(many, [4] * size, [4] * size, group)",
    "all_reduce_coalesced": "f.all_reduce_coalesced([x, x * 2], 'sum', group)",
    "all_gather_coalesced": "f.all_gather_into_tensor_coalesced([x, x * 2], group)",
    "reduce_scatter_coalesced": "f.reduce_scatter_tensor_coalesced([many], 'sum', [0], group)",
    "permute_tensor": "f.permute_tensor(x, [*range(1, size), 0], group)",
}
WITH_GRADIENTS = {
    "all_reduce": "d.all_reduce(x)",
    "broadcast": "d.broadcast(x, 0)",
    "reduce": "d.reduce(x, 0)",
    "all_gather": "torch.stack(d.all_gather(x))",
    "gather": "torch.stack(d.gather(x, 0))",
    "scatter": "d.scatter([x + i for i in range(size)], 0)",
    "reduce_scatter": "d.reduce_scatter(torch.empty(4), list(many.chunk(size)))",
    "all_to_all": "torch.stack(d.all_to_all([torch.empty(4) for _ in range(size)], list(many.chunk(size))))",
    "all_to_all_single": "d.all_to_all_single(torch.empty(4 * size), many)",
} | {name: call for name, call in FUNCTIONAL.items() if name.endswith("autograd")}


def called(call: str, x: torch.Tensor, group: Any, size: int) -> Any:
    names = {"f": functional, "d": differentiable, "torch": torch, "group": group, "size": size}
    return eval(call, {**names, "x": x, "many": x.repeat(size)})


def awaited(value: Any) -> Any:
    return [one * 1 for one in value] if isinstance(value, (list, tuple)) else value * 1


@program(cases=FUNCTIONAL)
def functional_call(member: Member, call: str) -> Any:
    x = torch.arange(4.0) + member.rank
    ends = [0, member.size - 1]
    group = dist.new_group(ends)
    of_some = awaited(called(call, x, group, 2)) if member.rank in ends else None
    return awaited(called(call, x, dist.group.WORLD, member.size)), of_some


@program(cases=WITH_GRADIENTS)
def with_gradients(member: Member, call: str) -> Any:
    x = (torch.arange(4.0) + member.rank).requires_grad_()
    output = called(call, x, dist.group.WORLD, member.size) * 1
    (output * (torch.arange(float(output.numel())).view(output.shape) + 1)).sum().backward()
    return output if member.rank == 0 else None, x.grad
