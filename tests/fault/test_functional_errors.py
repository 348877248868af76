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

Call = Callable[[Any, int], object]  # in a group, with so many elements, which a compiled program has not seen if odd
USUAL, ODD = 4, 8


def in_backward(group: Any, count: int) -> object:
    x = torch.ones(4, requires_grad=True)
    whole = functional.all_gather_tensor_autograd(x, 0, group).sum()
    if count == ODD:
        return functional.all_reduce(x.detach(), "sum", group) + 1
    return whole.backward()


def compiled(group: Any, count: int) -> object:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = functional.all_reduce(x * 2, "sum", group)
        return summed + 1

    program(torch.ones(USUAL))
    return program(torch.ones(count))


def compiled_in_place(group: Any, count: int) -> object:
    @torch.compile(backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    program(torch.ones(USUAL))
    return program(torch.ones(count))


CALLS: dict[str, Call] = {
    "all_reduce": lambda group, n: functional.wait_tensor(functional.all_reduce(torch.ones(n), "sum", group)),
    "all_gather": lambda group, n: functional.all_gather_tensor(torch.ones(n), 0, group) + 1,
    "reduce_scatter": lambda group, n: functional.reduce_scatter_tensor(torch.ones(3 * n), "sum", 0, group) + 1,
    "all_to_all": lambda group, n: functional.all_to_all_single(torch.ones(3 * n), None, None, group) + 1,
    "coalesced": lambda group, n: functional.all_reduce_coalesced([torch.ones(2), torch.ones(n)], "sum", group)[1] + 1,
    "in backward": in_backward,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
}


@pytest.mark.parametrize("place", ["one host", pytest.param("halves", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_calls_that_differ_are_phalanxs_error_with_lines(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place != "one host":
        divide_by(monkeypatch, ISLANDS[place])

    def body(member: Member) -> None:
        member.join()
        for name, call in CALLS.items():
            group = dist.new_group()
            with pytest.raises(RuntimeError) as caught:
                call(group, ODD if member.rank == 1 else USUAL)
            assert type(caught.value) is CollectiveMismatch, (name, caught.value)
            assert "running the callback" not in str(caught.value)
            calls = str(caught.value).splitlines()[1:-1]
            assert all(f" at {Path(__file__)}:" in call for call in calls), (name, str(caught.value))
            dist.barrier()
        member.meet("done")  # a rank that ends is lost to those that are still in the barrier

    on_ranks(body, 3)


@pytest.mark.parametrize("name", ["all_gather", "compiled", pytest.param("all_reduce", marks=pytest.mark.long)])
def test_rank_that_is_killed_is_phalanxs_error(name: str) -> None:
    def body(member: Member) -> None:
        member.join()
        if name == "compiled":
            torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(4))
        dist.barrier()
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        CALLS[name](dist.group.WORLD, USUAL)

    for outcome in run_ranks(body, 3):
        if outcome.rank != 1:
            assert type(outcome.error) is PeerLost, outcome.traceback
            assert outcome.error.rank == 1
            assert f"in all_{'gather' if name == 'all_gather' else 'reduce'}(" in str(outcome.error)
            assert f" at {Path(__file__)}:" in str(outcome.error)
