"""What a training script sees when a rank goes, or does something else, while DDP averages gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # before the ranks are forked: a DDP module's first one takes each of them seconds
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.parallel.data_parallel import COMM_HOOKS


def own_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def keeping_hook(kept, bucket):  # type: ignore[no-untyped-def]
    """A hook that waits, keeps the error for its program, and lets the backward pass end."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    try:
        work.wait()
    except PhalanxError as error:
        kept.append(error)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


HOOKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "bf16": COMM_HOOKS["bf16"],
    "a script's own": own_hook,
}


def replica(hook: Callable[..., Any] | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01, **options)
    if hook is not None:
        model.register_comm_hook(dist.group.WORLD, hook)
    return model


def step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("none", "one host"),
        ("a script's own", "one host"),
        ("none", "halves"),
        *(pytest.param(hook, "cyclic", marks=pytest.mark.long) for hook in HOOKS),
    ],
)
def test_backward_raises_that_a_rank_was_lost(hook: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place != "one host":
        divide_by(monkeypatch, ISLANDS[place])

    def body(member: Member) -> int:
        member.join()
        model = replica(HOOKS[hook])
        step(model)
        member.meet("stepped")  # one that is still in the step would raise there
        if member.rank == 2:
            os._exit(0)
        with pytest.raises(PeerLost, match="has ended") as caught:
            step(model)
        return caught.value.group_rank

    for outcome in run_ranks(body, 3)[:-1]:
        assert outcome.value == 2, outcome.traceback


def test_backward_ends_where_the_hook_keeps_the_error() -> None:
    """As torchft's does: the program then gives up the step, and goes on with the ranks that are left."""

    def body(member: Member) -> list[int]:
        member.join()
        model, kept = replica(), list[PeerLost]()
        model.register_comm_hook(kept, keeping_hook)
        step(model)
        assert not kept
        if member.rank == 2:
            os._exit(0)
        step(model)
        return [error.group_rank for error in kept]

    for outcome in run_ranks(body, 3)[:-1]:
        assert outcome.value == [2, 2, 2, 2], outcome.traceback


def test_backward_raises_that_the_calls_differ_or_a_rank_is_late() -> None:
    def body(member: Member) -> tuple[str, str]:
        member.join()
        model = replica()
        with pytest.raises(CollectiveMismatch) as mismatch:
            if member.rank:
                dist.all_reduce(torch.ones(3))
            else:
                step(model)
        dist.destroy_process_group()
        member.join(name="again")
        model = replica()
        dist.barrier()  # all have made it, for which the short timeout is not meant
        _set_pg_timeout(timedelta(seconds=0.5))
        if member.rank:
            member.await_said("raised")
            return str(mismatch.value), ""
        with pytest.raises(CollectiveTimeout) as late:
            step(model)
        member.say("raised")
        return str(mismatch.value), str(late.value)

    (first, late), (second, _) = on_ranks(body, 2)
    assert "all_reduce(float32[3], sum)" in first
    assert "all_reduce(float32[3], sum)" in second
    assert "rank 1 of the group" in late


def test_operation_that_the_script_queued_is_left_under_way() -> None:
    """Rank 1 joins it only when rank 0's backward has ended."""

    def body(member: Member) -> float:
        member.join()
        works: list[dist.Work | None] = []
        weight = torch.ones(1, requires_grad=True)
        total = torch.ones(1)
        weight.register_hook(lambda gradient: works.append(dist.all_reduce(total, async_op=True)))
        if member.rank == 1:
            member.await_said("ended")
        (weight * 2).backward()
        member.say("ended")
        assert works[0] is not None
        works[0].wait()
        return total.item()

    assert on_ranks(body, 2) == [2.0, 2.0]
