"""What is said of equal calls that do not belong together, held word for word against golden texts."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.golden import check_told
from tests.support.ranks import Member, on_ranks, run_ranks

Program = Callable[[Member], None]


def first(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)  # first


def second(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)  # second


def swapped(member: Member) -> None:
    for task in (second, first) if member.rank == 1 else (first, second):
        task(torch.ones(3))


def skipped(member: Member) -> None:
    for step in range(4):
        if step != 2 or member.rank != 1:
            dist.all_reduce(torch.ones(3))  # often
        dist.all_reduce(torch.ones(3))  # always
    if member.rank == 1:
        dist.all_reduce(torch.ones(3))  # once


def known() -> dict[str, object]:
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    marks = {f"line {line.rpartition('# ')[2]}": number for number, line in lines if "  # " in line}
    return {"file": __file__, "name": Path(__file__).name, **marks}


@pytest.mark.parametrize("program", [swapped, skipped])
def test_the_warning_names_both_calls_and_their_numbers(program: Program) -> None:
    def body(member: Member) -> str:
        member.join()
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            program(member)
            dist.barrier()
        return printed.getvalue()

    check_told(f"{program.__name__}.warning", "".join(on_ranks(body, 2)), known())


@pytest.mark.parametrize("program", [swapped, skipped])
def test_the_error_that_a_user_can_have_instead_names_them_too(program: Program) -> None:
    def body(member: Member) -> None:
        os.environ["PHALANX_CALL_SITES"] = "error"
        member.join()
        program(member)
        dist.barrier()

    for outcome in run_ranks(body, 2):
        error = outcome.error
        check_told(f"{program.__name__}.error", f"{type(error).__module__}.{type(error).__name__}: {error}", known())
