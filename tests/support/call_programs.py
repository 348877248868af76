"""Programs whose calls are equal and do not belong together, and programs that are right and look similar.

And what is expected of each on every rank, wherever the ranks are.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveMismatch
from tests.support.ranks import Member, on_ranks, run_ranks

__all__ = [
    "MISTAKES",
    "RIGHT",
    "Program",
    "first",
    "is_an_error",
    "is_warned_of",
    "name_of",
    "passes_in_silence",
    "said",
    "second",
    "swapped_beside_rank_0",
    "swapped_functions",
]

Program = Callable[[Member], None]


def name_of(program: Program) -> str:
    """What tests call it."""
    return program.__name__


def one() -> torch.Tensor:
    return torch.ones(3)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def first(a: torch.Tensor) -> None:
    dist.all_reduce(a)


def second(b: torch.Tensor) -> None:
    dist.all_reduce(b)


def swapped_functions(member: Member) -> None:
    tasks = [first, second]
    for task in reversed(tasks) if member.rank == member.size - 1 else tasks:
        task(one())


def swapped_in_two_arms(member: Member) -> None:
    a, b = one(), one()
    if member.rank == 0:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(b)
        dist.all_reduce(a)


def swapped_asynchronous(member: Member) -> None:
    a, b = one(), one()
    works = []
    for tensor in (b, a) if member.rank else (a, b):
        if tensor is a:
            works.append(dist.all_reduce(a, async_op=True))
        if tensor is b:
            works.append(dist.all_reduce(b, async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def swapped_broadcasts(member: Member) -> None:
    for _ in range(3):
        for task in ("a", "b") if member.rank else ("b", "a"):
            if task == "a":
                dist.broadcast(one(), 0)
            if task == "b":
                dist.broadcast(one() * 2, 0)


def skips_one_in_a_loop(member: Member) -> None:
    for step in range(4):
        if step != 2 or member.rank != 1:
            dist.all_reduce(one())
        dist.all_reduce(one() * 2)
        dist.all_reduce(one() * 3)


def skips_in_straight_code(member: Member) -> None:
    if member.rank != 0:
        dist.all_reduce(one())
    dist.all_reduce(one() * 2)
    dist.all_reduce(one() * 3)
    dist.all_reduce(one() * 4)
    dist.all_reduce(one() * 5)


def loops_of_different_lengths(member: Member) -> None:
    for _ in range(3):
        for _ in range(5 if member.rank else 4):
            dist.all_reduce(one())
        dist.all_reduce(one() * 2)


def swapped_with_sizes_that_change(member: Member) -> None:
    for step in range(6):
        tasks = [first, second]
        for turn, task in enumerate(reversed(tasks) if member.rank == member.size - 1 else tasks):
            task(torch.ones(2 * step + turn + 1))


def swapped_beside_rank_0(member: Member) -> None:
    """By rank 1 and the last rank, while all others, rank 0 among them, are at a line that these two never call."""
    if member.rank not in (1, member.size - 1):
        for _ in range(2):
            dist.all_reduce(one())
    else:
        tasks = [first, second]
        for task in tasks if member.rank == 1 else reversed(tasks):
            task(one())


MISTAKES: list[Program] = [
    swapped_functions,
    swapped_with_sizes_that_change,
    swapped_in_two_arms,
    swapped_asynchronous,
    swapped_broadcasts,
    skips_one_in_a_loop,
    skips_in_straight_code,
    loops_of_different_lengths,
]


# -- programs that are right -------------------------------------------------------------------------------------------


def a_branch_by_rank(member: Member) -> None:
    for _ in range(20):
        if member.rank == 0:
            dist.broadcast(one(), 0)
            dist.all_reduce(one())
        else:
            buffer = torch.empty(3)
            dist.broadcast(buffer, 0)
            dist.all_reduce(buffer)


def logs(value: torch.Tensor) -> None:
    dist.broadcast(value, 0)


def rank_0_logs_in_a_function_of_its_own(member: Member) -> None:
    for step in range(20):
        dist.all_reduce(one())
        if member.rank == 0:
            logs(one())
        else:
            dist.broadcast(torch.empty(3), 0)
        if step % 3 == 0:
            logs(one())


def roots_in_turns(member: Member) -> None:
    for step in range(20):
        if step % member.size == member.rank:
            dist.broadcast(one(), member.rank)
        else:
            dist.broadcast(torch.empty(3), step % member.size)


def arms_in_turns(member: Member) -> None:
    for step in range(20):
        if step % member.size == member.rank:
            dist.all_reduce(one())
            continue
        dist.all_reduce(torch.zeros(3))


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


def matches_in_turns(member: Member) -> None:
    for step in range(20):
        match (step + member.rank) % 3:
            case 0:
                dist.all_reduce(one())
            case 1:
                dist.all_reduce(one() * 2)
            case _:
                dist.all_reduce(one() * 3)


def one_rank_after_the_other(member: Member) -> None:
    for _ in range(5):
        for _ in range(member.rank):
            dist.barrier()
        for _ in range(member.size - member.rank):
            dist.barrier()


def rank_0_first(member: Member) -> None:
    for _ in range(10):
        if member.rank != 0:
            dist.barrier()
        if member.rank == 0:
            dist.barrier()
        dist.barrier()


def different_loop_bodies(member: Member) -> None:
    if member.rank == 0:
        for _ in range(10):
            dist.all_reduce(one())
            dist.all_reduce(one() * 2)
    else:
        for step in range(20):
            if step % 3 == 0:
                dist.all_reduce(one() * 4)
            else:
                dist.all_reduce(one() * 5)


def wrapped(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value


def through_a_wrapper(member: Member) -> None:
    for step in range(20):
        if (step + member.rank) % 2:
            wrapped(one())
        else:
            wrapped(torch.zeros(3))


def ddp_with_accumulation(member: Member) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        x = torch.randn(3, 4)
        if step % 3 == 2:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                model(x).sum().backward()
        if member.rank == 0 and step % 4 == 0:
            model.module(x)  # rank 0 computes more
        dist.all_reduce(torch.ones(1))


def uneven_batches_in_join(member: Member) -> None:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for epoch in range(3):
        with Join([model]):
            for _ in range(10 + 2 * member.rank * (1 if epoch != 1 else -1)):
                model(torch.randn(3, 4)).sum().backward()


def summed(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value * 2


def compiled_on_one_rank(member: Member) -> None:
    step = torch.compile(summed, backend="eager") if member.rank == 0 else summed
    for length in (3, 3, 4, 5, 3):
        step(torch.ones(length))
        dist.all_reduce(torch.ones(length))


def in_step_in_between(member: Member) -> None:
    """Ranks 1 and 2 call two lines in both orders, but between that they are at one line nine times."""
    for step in range(11):
        if member.rank == 0:
            dist.all_reduce(one())
        elif 0 < step < 10:
            dist.all_reduce(one() * 2)
        elif (step == 0) == (member.rank == 1):
            first(one())
        else:
            second(one())


RIGHT: list[Program] = [
    compiled_on_one_rank,
    a_branch_by_rank,
    rank_0_logs_in_a_function_of_its_own,
    roots_in_turns,
    arms_in_turns,
    sizes_that_change,
    matches_in_turns,
    one_rank_after_the_other,
    rank_0_first,
    different_loop_bodies,
    through_a_wrapper,
    ddp_with_accumulation,
    uneven_batches_in_join,
    in_step_in_between,
]


# -- what is expected of them ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
    """What this process prints as warnings."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield text


def is_warned_of(program: Program, size: int, most: int) -> None:
    """Check that between one rank and ``most`` of them warn of a mistake."""

    def body(member: Member) -> str:
        member.join()
        with said() as text, contextlib.suppress(RuntimeError):  # the numbers of calls may differ in the end
            program(member)
        return text.getvalue()

    told = [text for text in on_ranks(body, size) if text]
    assert 1 <= len(told) <= most, told
    for warning in told:
        assert warning.startswith("phalanx: warning: ranks ")
        assert "one has left out a call" in warning
        assert warning.count("call_programs.py:") == 2
        assert warning.count("\n") <= 12


def passes_in_silence(program: Program, size: int, call_sites: str = "error") -> None:
    """Check that nothing is said of a program with this ``PHALANX_CALL_SITES``."""

    def body(member: Member) -> str:
        os.environ["PHALANX_CALL_SITES"] = call_sites
        member.join()
        with said() as text:
            program(member)
            dist.barrier()
            dist.destroy_process_group()
        return text.getvalue()

    assert on_ranks(body, size) == [""] * size


def is_an_error(program: Program, size: int) -> None:
    """Check that a mistake is an error on every rank, if the user wants that."""

    def body(member: Member) -> None:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join()
        program(member)
        dist.barrier()  # a rank that has no other call to come to

    for outcome in run_ranks(body, size):
        assert isinstance(outcome.error, CollectiveMismatch), outcome.traceback
        text = str(outcome.error)
        assert "the ranks of a group called different operations" in text
        assert re.search(r"call_programs\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d", text), text
        assert text.count("\n") <= 12
