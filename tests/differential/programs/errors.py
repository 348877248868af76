"""Calls that raise: on which ranks, and what catches the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import Raised, program, raised
from tests.support.ranks import Member


def ones(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


# Each rank makes the same wrong call, and nothing is sent. What torch itself refuses is not here.
REFUSED: dict[str, Callable[[int, int], Any]] = {
    "all_gather of too few outputs": lambda r, n: dist.all_gather([ones()] * (n - 1), ones()),
    "all_gather of another dtype": lambda r, n: dist.all_gather([ones(3, torch.int64)] * n, ones()),
    "all_gather of smaller outputs": lambda r, n: dist.all_gather([ones(2) for _ in range(n)], ones()),
    "all_gather_into_tensor too small": lambda r, n: dist.all_gather_into_tensor(ones(3 * n - 1), ones()),
    "all_gather_into_tensor of another dtype": lambda r, n: dist.all_gather_into_tensor(
        ones(3 * n, torch.int32), ones()
    ),
    "reduce_scatter of too few inputs": lambda r, n: dist.reduce_scatter(ones(), [ones()] * (n - 1)),
    "reduce_scatter_tensor too large": lambda r, n: dist.reduce_scatter_tensor(ones(), ones(3 * n + 1)),
    "all_to_all of too few outputs": lambda r, n: dist.all_to_all([ones()] * (n - 1), [ones()] * n),
    "all_to_all_single of another dtype": lambda r, n: dist.all_to_all_single(ones(n, torch.int32), ones(n)),
    "gather without outputs on the root": lambda r, n: dist.gather(ones(), None if r == 0 else [ones()] * n, dst=0),
    "gather with outputs elsewhere": lambda r, n: dist.gather(ones(), [ones()] * n if r else None, dst=0),
    "scatter without inputs on the root": lambda r, n: dist.scatter(ones(), [ones()] * n if r else None, src=0),
    "all_gather of mixed dtypes": lambda r, n: dist.all_gather([ones(), *([ones(3, torch.int32)] * (n - 1))], ones()),
    "bitwise and of floats": lambda r, n: dist.all_reduce(ones(), op=dist.ReduceOp.BAND),
    "maximum of complex numbers": lambda r, n: dist.all_reduce(ones(3, torch.complex64), op=dist.ReduceOp.MAX),
    "coalesced of mixed dtypes": lambda r, n: dist.all_reduce_coalesced([ones(), ones(3, torch.int32)]),
}


def error_of(call: Callable[[], Any]) -> Any:
    answer = raised(call)
    return answer if isinstance(answer, Raised) else None


def exchange_of_uneven_sizes(member: Member) -> Any:
    count = 3 * member.size + 1
    return error_of(lambda: dist.all_to_all_single(ones(count), ones(count)))


@program(sizes=(2,), differs="all_to_all_single of sizes that do not divide", equal_from="2.15")
def uneven_sizes_of_bytes_that_divide(member: Member) -> Any:
    return exchange_of_uneven_sizes(member)


@program(sizes=(3, 5))
def uneven_sizes(member: Member) -> Any:
    return exchange_of_uneven_sizes(member)


@program(cases=REFUSED)
def refused(member: Member, call: Callable[[int, int], Any]) -> Any:
    return error_of(lambda: call(member.rank, member.size))


@program(alone=True)
def after_the_end(member: Member) -> Any:
    dist.destroy_process_group()
    again = raised(dist.destroy_process_group)
    return again, raised(lambda: dist.all_reduce(ones())), raised(dist.get_rank), dist.is_initialized()
