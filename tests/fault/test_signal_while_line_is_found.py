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
Call = Callable[[int, torch.Tensor], object]


class Alarm(Exception):
    pass


def sum_in_place(rank: int, value: torch.Tensor) -> None:
    group: Any = dist.group.WORLD
    assert group.sum_in_place(value)


# Each call, and what a tensor of 10 on rank 0 and of 11 on rank 1 holds after it.
CALLS: dict[str, tuple[Call, tuple[float, float]]] = {
    "all_reduce": (lambda rank, value: dist.all_reduce(value), (21, 21)),
    "maximum": (lambda rank, value: dist.all_reduce(value, dist.ReduceOp.MAX), (11, 11)),
    "in place": (sum_in_place, (21, 21)),
    # None of the quick calls, so it is recorded on its way to the communicator.
    "transposed": (lambda rank, value: dist.all_reduce(value.view(2, 2).t()), (21, 21)),
    "broadcast": (lambda rank, value: dist.broadcast(value, 0), (10, 10)),
    "reduce": (lambda rank, value: dist.reduce(value, 0), (21, 11)),
    "barrier": (lambda rank, value: dist.barrier(), (10, 11)),
    "gather": (lambda rank, value: dist.all_gather_into_tensor(torch.empty(8), value), (10, 11)),
    "scatter": (lambda rank, value: dist.reduce_scatter_tensor(torch.empty(2), value), (10, 11)),
    "send": (lambda rank, value: dist.recv(value, 0) if rank else dist.send(value, 1), (10, 10)),
    "receive": (lambda rank, value: dist.send(value, 0) if rank else dist.recv(value, 1), (11, 11)),
}


def interrupted_once(patch: pytest.MonkeyPatch) -> None:
    """Have a signal's handler raise the next time the line of a call is looked up, and then no more."""
    found = call_site.text_of

    def look_up(site: Any) -> str:
        patch.setattr(call_site, "text_of", found)
        signal.raise_signal(signal.SIGALRM)
        return found(site)

    patch.setattr(call_site, "text_of", look_up)


def test_a_call_that_a_handler_interrupts_before_it_begins_is_not_made() -> None:
    """Made again it meets the other rank's first one; a call that was made in spite of it would be one too many."""

    def raises(*_: object) -> None:
        raise Alarm

    def body(member: Member) -> dict[str, list[float]]:
        signal.signal(signal.SIGALRM, raises)
        found = {}
        for name, (call, _) in CALLS.items():
            member.join(timeout_s=WAIT_S, name=f"store-{name}")
            dist.barrier()
            if member.rank == 0:
                with pytest.MonkeyPatch.context() as patch:
                    interrupted_once(patch)
                    with pytest.raises(Alarm):
                        call(0, torch.full((4,), 100.0))
            value = torch.full((4,), 10.0 + member.rank)
            call(member.rank, value)
            total = torch.full((4,), float(member.rank))
            dist.all_reduce(total)
            assert total.tolist() == [1.0] * 4, name
            dist.destroy_process_group()
            found[name] = value.tolist()
        return found

    expected = [{name: [float(values[rank])] * 4 for name, (_, values) in CALLS.items()} for rank in range(2)]
    assert on_ranks(body, 2, timeout_s=120) == expected
