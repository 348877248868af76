"""Programs whose calls are equal and do not belong together, and programs that are right and look similar."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.ranks import Member

__all__ = [
    "MISTAKES",
    "RIGHT",
    "Program",
    "compiled_on_one_rank",
    "first",
    "second",
    "swapped_functions",
]

Program = Callable[[Member], None]


def one() -> torch.Tensor:
    return torch.ones(3)


def first(a: torch.Tensor) -> None:
    dist.all_reduce(a)


def second(b: torch.Tensor) -> None:
    dist.all_reduce(b)


def swapped_functions(member: Member) -> None:
    tasks = [first, second]
    for task in reversed(tasks) if member.rank == member.size - 1 else tasks:
        task(one())


def swapped_asynchronous(member: Member) -> None:
    works = []
    for which in "ba" if member.rank else "ab":
        if which == "a":
            works.append(dist.all_reduce(one(), async_op=True))
        if which == "b":  # the other arm of one `if` would be the same line
            works.append(dist.all_reduce(one(), async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def skips_one_in_a_loop(member: Member) -> None:
    for step in range(4):
        if step != 2 or member.rank != 1:
            dist.all_reduce(one())
        dist.all_reduce(one() * 2)
        dist.all_reduce(one() * 3)


def swapped_with_sizes_that_change(member: Member) -> None:
    for step in range(6):
        tasks = [first, second]
        for turn, task in enumerate(reversed(tasks) if member.rank == member.size - 1 else tasks):
            task(torch.ones(2 * step + turn + 1))


MISTAKES: list[Program] = [
    swapped_functions,
    swapped_with_sizes_that_change,
    swapped_asynchronous,
    skips_one_in_a_loop,
]


def a_branch_by_rank(member: Member) -> None:
    for _ in range(20):
        if member.rank == 0:
            dist.broadcast(one(), 0)
            dist.all_reduce(one())
        else:
            buffer = torch.empty(3)
            dist.broadcast(buffer, 0)
            dist.all_reduce(buffer)


def sizes_that_change(member: Member) -> None:
    for step in range(20):
        if step % member.size == member.rank:
            dist.all_reduce(torch.ones(step + 1))
        else:
            dist.all_reduce(torch.zeros(step + 1))
        first(torch.ones(step % 5 + 1))
        if member.rank == 0:
            dist.all_reduce(torch.ones(step % 7 + 1))
        else:
            second(torch.ones(step % 7 + 1))
        for length in range(step % 4):
            dist.broadcast(torch.ones(length + 1), length % member.size)


def rank_0_first(member: Member) -> None:
    for _ in range(10):
        if member.rank != 0:
            dist.barrier()
        if member.rank == 0:
            dist.barrier()
        dist.barrier()


def summed(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value * 2


def compiled_on_one_rank(member: Member) -> None:
    step = torch.compile(summed, backend="eager") if member.rank == 0 else summed
    for length in (3, 3, 4, 5, 3):
        step(torch.ones(length))
        dist.all_reduce(torch.ones(length))


RIGHT: list[Program] = [
    a_branch_by_rank,
    sizes_that_change,
    rank_0_first,
]
