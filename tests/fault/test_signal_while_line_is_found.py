"""A signal handler that raises while a call's line is looked up: the call is not made, and its exception arrives."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.watch import call_site

WAIT_S = 30.0

Call = Callable[[int, torch.Tensor], None]


class Alarm(Exception):
    pass


def all_reduce(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value)


def maximum(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value, dist.ReduceOp.MAX)


def in_place(rank: int, value: torch.Tensor) -> None:
    group: Any = dist.group.WORLD
    assert group.sum_in_place(value)


def transposed(rank: int, value: torch.Tensor) -> None:
    """Not one of the quick calls, so it is recorded on its way to the communicator."""
    dist.all_reduce(value.view(2, 2).t())


def broadcast(rank: int, value: torch.Tensor) -> None:
    dist.broadcast(value, 0)


def reduce(rank: int, value: torch.Tensor) -> None:
    dist.reduce(value, 0)


def barrier(rank: int, value: torch.Tensor) -> None:
    dist.barrier()


def gather(rank: int, value: torch.Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(8), value)


def scatter_sums(rank: int, value: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty(2), value)


def send(rank: int, value: torch.Tensor) -> None:
    dist.send(value, 1) if rank == 0 else dist.recv(value, 0)


def receive(rank: int, value: torch.Tensor) -> None:
    dist.recv(value, 1) if rank == 0 else dist.send(value, 0)


CALLS: tuple[Call, ...] = (
    all_reduce,
    maximum,
    in_place,
    transposed,
    broadcast,
    reduce,
    barrier,
    gather,
    scatter_sums,
    send,
    receive,
)


def interrupted_once(patch: pytest.MonkeyPatch) -> None:
    """Have a signal's handler raise the next time the line of a call is looked up, and then no more."""
    found = call_site.text_of

    def look_up(site: Any) -> str:
        patch.setattr(call_site, "text_of", found)
        signal.raise_signal(signal.SIGALRM)
        return found(site)

    patch.setattr(call_site, "text_of", look_up)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_that_a_handler_interrupts_before_it_begins_is_not_made(call: Call) -> None:
    """Made again it meets the other rank's first one; a call that was made in spite of it would be one too many."""

    def raises(*_: object) -> None:
        raise Alarm

    def body(member: Member) -> list[list[float]]:
        member.join(timeout_s=WAIT_S)
        dist.barrier()
        if member.rank == 0:
            signal.signal(signal.SIGALRM, raises)
            with pytest.MonkeyPatch.context() as patch:
                interrupted_once(patch)
                with pytest.raises(Alarm):
                    call(0, torch.full((4,), 100.0))
        values = []
        for step in range(2):
            value = torch.full((4,), 10.0 * (step + 1) + member.rank)
            call(member.rank, value)
            values.append(value.tolist())
        total = torch.full((4,), float(member.rank))
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 4
        dist.destroy_process_group()
        return values

    plain: dict[Call, tuple[list[float], list[float]]] = {
        all_reduce: ([21.0, 41.0], [21.0, 41.0]),
        maximum: ([11.0, 21.0], [11.0, 21.0]),
        in_place: ([21.0, 41.0], [21.0, 41.0]),
        transposed: ([21.0, 41.0], [21.0, 41.0]),
        broadcast: ([10.0, 20.0], [10.0, 20.0]),
        reduce: ([21.0, 41.0], [11.0, 21.0]),
        send: ([10.0, 20.0], [10.0, 20.0]),
        receive: ([11.0, 21.0], [11.0, 21.0]),
    }
    unchanged = ([10.0, 20.0], [11.0, 21.0])
    expected = [[[number] * 4 for number in numbers] for numbers in plain.get(call, unchanged)]
    assert on_ranks(body, 2, timeout_s=60) == expected
