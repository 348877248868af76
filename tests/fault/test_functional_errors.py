"""What functional collectives raise, eagerly, in a backward pass and in compiled functions: Phalanx's own errors.

torch waits for them in C++, in its autograd engine, or in code that its compiler has made. The error must be the class
that a script catches, and name a line of the script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the ranks are forked: it takes each of them seconds
import torch._functorch.aot_autograd
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks
from torch.distributed import _functional_collectives as functional

from phalanx.errors import CollectiveMismatch, PeerLost

Mistake = Callable[[Any, bool, int], object]
SIZE = 3


def elements(odd: bool, size: int = 1) -> torch.Tensor:
    return torch.ones((8 if odd else 4) * size)


def all_reduce(group: Any, odd: bool, size: int) -> object:
    return functional.all_reduce(elements(odd), "sum", group) + 1


def all_reduce_waited_for(group: Any, odd: bool, size: int) -> object:
    return functional.wait_tensor(functional.all_reduce(elements(odd), "sum", group))


def all_gather(group: Any, odd: bool, size: int) -> object:
    return functional.all_gather_tensor(elements(odd), 0, group) + 1


def reduce_scatter(group: Any, odd: bool, size: int) -> object:
    return functional.reduce_scatter_tensor(elements(odd, size), "sum", 0, group) + 1


def all_to_all(group: Any, odd: bool, size: int) -> object:
    return functional.all_to_all_single(elements(odd, size), None, None, group) + 1


def coalesced(group: Any, odd: bool, size: int) -> object:
    return functional.all_reduce_coalesced([torch.ones(2), elements(odd)], "sum", group)[1] + 1


def in_backward(group: Any, odd: bool, size: int) -> object:
    x = torch.ones(4, requires_grad=True)
    whole = functional.all_gather_tensor_autograd(x, 0, group).sum()
    if odd:
        return functional.all_reduce(x.detach(), "sum", group) + 1
    return whole.backward()


def compiled(group: Any, odd: bool, size: int) -> object:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = functional.all_reduce(x * 2, "sum", group)
        return summed + 1

    program(torch.ones(4))
    return program(elements(odd))


def compiled_in_place(group: Any, odd: bool, size: int) -> object:
    @torch.compile(backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    program(torch.ones(4))
    return program(elements(odd))


MISTAKES: list[Mistake] = [
    *(all_reduce, all_reduce_waited_for, all_gather, reduce_scatter, all_to_all, coalesced),
    *(in_backward, compiled, compiled_in_place),
]


@pytest.mark.parametrize("place", ["one host", "halves"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_calls_that_differ_are_phalanxs_error_with_lines(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place != "one host":
        divide_by(monkeypatch, ISLANDS[place])

    def body(member: Member) -> dict[str, BaseException]:
        member.join()
        errors: dict[str, BaseException] = {}
        for mistake in MISTAKES:
            group = dist.new_group()
            with pytest.raises(RuntimeError) as caught:
                mistake(group, member.rank == 1, SIZE)
            errors[mistake.__name__] = caught.value
            dist.barrier()
        member.meet("done")  # a rank that ends is lost to those that are still in the barrier
        return errors

    for errors in on_ranks(body, SIZE):
        assert len(errors) == len(MISTAKES)
        for name, error in errors.items():
            assert type(error) is CollectiveMismatch, (name, error)
            assert "running the callback" not in str(error)
            calls = str(error).splitlines()[1:-1]
            assert all(f" at {Path(__file__)}:" in call for call in calls), (name, str(error))


@pytest.mark.parametrize("waits", [all_gather, compiled, pytest.param(all_reduce, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_is_phalanxs_error(waits: Mistake) -> None:
    def body(member: Member) -> None:
        member.join()
        if waits is compiled:
            torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(4))
        dist.barrier()
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        waits(dist.group.WORLD, False, SIZE)

    for outcome in run_ranks(body, SIZE):
        if outcome.rank != 1:
            assert type(outcome.error) is PeerLost, outcome.traceback
            assert outcome.error.rank == 1
            assert f"in all_{'gather' if waits is all_gather else 'reduce'}(" in str(outcome.error)
            assert f" at {Path(__file__)}:" in str(outcome.error)
