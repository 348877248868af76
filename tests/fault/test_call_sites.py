"""Equal calls that do not belong together: a rank swaps two of them, or leaves one out. And programs that are right."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch_support import Launcher, launcher
from tests.support.ranks import Member, on_ranks, run_ranks
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveMismatch
from phalanx.transports.shm.crossing import judge

__all__ = ["launcher"]  # a fixture

Program = Callable[[Member], None]


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


MISTAKES: list[Program] = [
    swapped_functions,
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


RIGHT: list[Program] = [
    compiled_on_one_rank,
    a_branch_by_rank,
    rank_0_logs_in_a_function_of_its_own,
    roots_in_turns,
    arms_in_turns,
    matches_in_turns,
    one_rank_after_the_other,
    rank_0_first,
    different_loop_bodies,
    through_a_wrapper,
    ddp_with_accumulation,
    uneven_batches_in_join,
]


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield text


def name_of(program: Program) -> str:
    return program.__name__


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_warned_of_once(program: Program, size: int) -> None:
    def body(member: Member) -> str:
        member.join()
        with said() as text, contextlib.suppress(RuntimeError):  # the numbers of calls may differ in the end
            program(member)
        return text.getvalue()

    told = [text for text in on_ranks(body, size) if text]
    assert len(told) == 1, told
    (warning,) = told
    assert warning.startswith("phalanx: warning: ranks ")
    assert "one has left out a call" in warning
    assert warning.count("test_call_sites.py:") == 2
    assert warning.count("\n") <= 12


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", RIGHT, ids=name_of)
def test_a_program_that_is_right_is_not_warned_of(program: Program, size: int) -> None:
    def body(member: Member) -> str:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join()
        with said() as text:
            program(member)
            dist.barrier()
            dist.destroy_process_group()
        return text.getvalue()

    assert on_ranks(body, size) == [""] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_an_error_if_the_user_wants_that(program: Program, size: int) -> None:
    def body(member: Member) -> None:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join(timeout_s=30)
        program(member)
        dist.barrier()  # a rank that has no other call to come to

    for outcome in run_ranks(body, size):
        assert isinstance(outcome.error, CollectiveMismatch), outcome.traceback
        text = str(outcome.error)
        assert "the ranks of a group called different operations" in text
        assert re.search(r"test_call_sites\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d", text), text
        assert text.count("\n") <= 12


@pytest.mark.parametrize(("mistake", "most"), [(False, 64), (True, 1)])
def test_a_program_with_many_lines_in_turns_is_not_judged_without_end(mistake: bool, most: int) -> None:
    """There is room for 16 pairs of lines, and each shape makes a pair of its own."""
    judged = 0

    def counted(*arguments: Any) -> str:
        nonlocal judged
        judged += 1
        return judge(*arguments)

    def body(member: Member) -> tuple[int, int]:
        member.join()
        with pytest.MonkeyPatch.context() as patch, said() as text:
            patch.setattr("phalanx.transports.shm.communicator.judge", counted)
            for step in range(40):
                for count in range(1, 20):
                    for turn in range(2):
                        if mistake:
                            for call in (first, second) if turn else (second, first):
                                call(torch.ones(count))
                        elif (step + turn) % 2 == member.rank:
                            dist.all_reduce(torch.ones(count))
                        else:
                            dist.all_reduce(torch.zeros(count))
                if mistake and step == 0:
                    swapped_functions(member)
        return judged, text.getvalue().count("warning")

    outcomes = on_ranks(body, 2)
    assert all(0 < judgements <= most for judgements, _ in outcomes), outcomes
    assert sum(warnings for _, warnings in outcomes) == mistake


def test_nothing_is_said_if_the_user_wants_that() -> None:
    def body(member: Member) -> str:
        os.environ["PHALANX_CALL_SITES"] = "ignore"
        member.join()
        with said() as text:
            swapped_functions(member)
        return text.getvalue()

    assert on_ranks(body, 2) == ["", ""]


def test_the_warning_says_which_call_was_which() -> None:
    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        with said() as text:
            swapped_functions(member)
        return text.getvalue()

    text = "".join(on_ranks(body, 2))
    lines = {function: function.__code__.co_firstlineno + 1 for function in (first, second)}
    for function, argument, of_rank_0, of_rank_1 in ((first, "a", 2, 3), (second, "b", 3, 2)):
        where = f"dist.all_reduce({argument}) at {__file__}:{lines[function]}"
        assert f"{where} was call #{of_rank_0} of rank 0 and #{of_rank_1} of rank 1" in text, text


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
def first(x):
    dist.all_reduce(x)
def second(x):
    dist.all_reduce(x)
for task in (first, second) if dist.get_rank() else (second, first):
    task(torch.ones(2))
dist.barrier()
"""


@pytest.mark.parametrize("strict", [False, True])
def test_phalanx_run_strict_makes_it_an_error(launcher: Launcher, strict: bool) -> None:
    done = launcher.run(*(["--strict"] if strict else []), "-n", "2", launcher.script(SCRIPT))
    assert ("CollectiveMismatch: the ranks of a group called different operations" in done.err_text) is strict
    assert ("phalanx: warning: ranks 0 and 1 of a group" in done.err_text) is not strict
    assert (done.code != 0) is strict, done.err_text
