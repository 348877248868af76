"""Equal calls that do not belong together: a rank swaps two of them, or leaves one out. And programs that are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch_support import Launcher, launcher
from tests.support import call_programs
from tests.support.call_programs import (
    MISTAKES,
    RIGHT,
    Program,
    first,
    is_an_error,
    is_warned_of,
    name_of,
    passes_in_silence,
    said,
    second,
    swapped_beside_rank_0,
    swapped_functions,
)
from tests.support.ranks import Member, on_ranks

from phalanx.transports.shm.crossing import judge

__all__ = ["launcher"]  # a fixture


SIZES = pytest.mark.parametrize("size", [2, 3])


@SIZES
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_warned_of_once(program: Program, size: int) -> None:
    is_warned_of(program, size, most=1)


@SIZES
@pytest.mark.parametrize("program", RIGHT, ids=name_of)
def test_a_program_that_is_right_is_not_warned_of(program: Program, size: int) -> None:
    passes_in_silence(program, size)


@SIZES
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_an_error_if_the_user_wants_that(program: Program, size: int) -> None:
    is_an_error(program, size)


@pytest.mark.parametrize("size", [3, 5])
def test_a_mistake_of_two_ranks_at_lines_that_rank_0_never_calls_is_noticed(size: int) -> None:
    is_warned_of(swapped_beside_rank_0, size, most=1)
    is_an_error(swapped_beside_rank_0, size)


@pytest.mark.parametrize(("mistake", "most"), [(False, 64), (True, 1)])
def test_a_program_with_many_lines_in_turns_is_not_judged_without_end(mistake: bool, most: int) -> None:
    """There is room for 16 pairs of lines, and a line makes a pair of its own for each dtype and operation."""
    dtypes, operations = (
        (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8),
        ("SUM", "MAX", "MIN", "PRODUCT"),
    )
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
                for dtype, name in itertools.product(dtypes, operations):
                    operation = getattr(dist.ReduceOp, name)
                    for turn in range(2):
                        if mistake:
                            for call in (first, second) if turn else (second, first):
                                call(torch.ones(2, dtype=dtype))
                        elif (step + turn) % 2 == member.rank:
                            dist.all_reduce(torch.ones(2, dtype=dtype), operation)
                        else:
                            dist.all_reduce(torch.zeros(2, dtype=dtype), operation)
                if mistake and step == 0:
                    swapped_functions(member)
        return judged, text.getvalue().count("warning")

    outcomes = on_ranks(body, 2)
    assert all(0 < judgements <= most for judgements, _ in outcomes), outcomes
    assert sum(warnings for _, warnings in outcomes) == mistake


def test_nothing_is_said_if_the_user_wants_that() -> None:
    passes_in_silence(swapped_functions, 2, "ignore")


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
        where = f"dist.all_reduce({argument}) at {call_programs.__file__}:{lines[function]}"
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
