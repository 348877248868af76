"""One rank makes another call than the others, on one host and over several: every rank says which, by both.

Each world goes through many mistakes, with a group of its own for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveMismatch

SMALL, MIDDLE, LARGE = 6, 60_000, 600_000  # float32: in the leaders' frames, a few times as much, and in chunks
SUM, MAX, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
Call = Callable[[Any, int, int], object]  # of the group, this rank, and the number of elements


def parts(count: int) -> list[torch.Tensor]:
    return [torch.ones(count) for _ in range(dist.get_world_size())]


def all_reduce(dtype: torch.dtype = torch.float32, op: Any = SUM, more: int = 0) -> Call:
    return lambda group, rank, n: dist.all_reduce(torch.ones(n + more, dtype=dtype), op, group=group)


def of_shape(*shape: int) -> Call:
    return lambda group, rank, n: dist.all_reduce(torch.ones(n).reshape(shape), group=group)


def reduce(root: int, more: int = 0, op: Any = SUM) -> Call:
    return lambda group, rank, n: dist.reduce(torch.ones(n + more), root, op, group=group)


def broadcast(root: int, more: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group, rank, n: dist.broadcast(torch.ones(n + more, dtype=dtype), root, group=group)


def all_gather(more: int = 0) -> Call:
    return lambda group, rank, n: dist.all_gather(parts(n + more), torch.ones(n + more), group=group)


def reduce_scatter(more: int = 0, op: Any = SUM) -> Call:
    return lambda group, rank, n: dist.reduce_scatter(torch.ones(n + more), parts(n + more), op, group=group)


def gather(root: int, more: int = 0) -> Call:
    return lambda group, rank, n: dist.gather(
        torch.ones(n + more), parts(n + more) if rank == root else None, root, group=group
    )


def scatter(root: int, more: int = 0) -> Call:
    return lambda group, rank, n: dist.scatter(
        torch.ones(n + more), parts(n + more) if rank == root else None, root, group=group
    )


def all_to_all(more: int = 0) -> Call:
    """More to the next rank than that expects."""

    def call(group: Any, rank: int, n: int) -> object:
        inputs = parts(n)
        inputs[(rank + 1) % len(inputs)] = torch.ones(n + more)
        return dist.all_to_all(parts(n), inputs, group=group)

    return call


def barrier(group: Any, rank: int, n: int) -> object:
    return dist.barrier(group=group)


# What the others call, what one rank calls, and what the error of every rank has of the two.
SIZES = ("float32[{n}]", "float32[{more}]")
MISTAKES: list[tuple[Call, Call, str, str]] = [
    (all_reduce(), all_reduce(more=1), *SIZES),
    (of_shape(-1, 2), of_shape(2, -1), "float32[{half}, 2]", "float32[2, {half}]"),
    (all_reduce(), all_reduce(torch.int32), "float32[{n}]", "int32[{n}]"),
    (all_reduce(), all_reduce(op=MAX), "sum)", "max)"),
    (all_reduce(), all_gather(), "all_reduce(", "all_gather("),
    (all_reduce(), barrier, "all_reduce(", "barrier("),
    (broadcast(0), broadcast(0, 1), "float32[{n}], src=0", "float32[{more}], src=0"),
    (broadcast(1), broadcast(1, dtype=torch.int64), "float32[{n}], src=1", "int64[{n}], src=1"),
    (broadcast(0), broadcast(1), "src=0", "src=1"),
    (reduce(1), reduce(1, 1), *SIZES),
    (reduce(0), reduce(1), "dst=0", "dst=1"),
    (reduce(0), reduce(0, op=PRODUCT), "sum", "product"),
    (all_gather(), all_gather(1), *SIZES),
    (reduce_scatter(), reduce_scatter(1), *SIZES),
    (reduce_scatter(), reduce_scatter(op=MAX), "sum", "max"),
    (gather(0), gather(0, 1), "float32[{n}], dst=0", "float32[{more}], dst=0"),
    (gather(0), gather(1), "dst=0", "dst=1"),
    (scatter(1), scatter(1, 1), "float32[{n}], src=1", "float32[{more}], src=1"),
    (scatter(0), scatter(1), "src=0", "src=1"),
    (broadcast(1), gather(1), "broadcast(", "gather("),
    (all_to_all(), all_to_all(1), "all_to_all(float32, sends", "{more}"),
]

# The host of each rank, the rank that differs, and the number of elements.
WORLDS = [("000", 1, SMALL), ("0011", 1, SMALL), ("0011", 2, MIDDLE), ("011", 0, LARGE)]
MORE = [
    ("000", 0, MIDDLE),
    ("000", 2, LARGE),
    ("0011", 0, LARGE),
    ("0011", 3, SMALL),
    ("011", 1, SMALL),
    ("011", 2, MIDDLE),
]


@pytest.mark.parametrize(
    ("place", "odd", "count"), [*WORLDS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)]
)
def test_a_call_that_differs_is_told_by_every_rank(place: str, odd: int, count: int) -> None:
    def body(member: Member) -> list[str]:
        if len(set(place)) > 1:
            pretend_host(int(place[member.rank]))
        member.join()
        wrong = []
        for name, (theirs, mine, *words) in enumerate(MISTAKES):
            group = dist.new_group()
            assert group is not None
            try:
                (mine if member.rank == odd else theirs)(group, member.rank, count)
                dist.barrier(group=group)  # some calls return on ranks that wait for nobody
                wrong.append(f"{name}: no error")
            except CollectiveMismatch as error:
                expected = [word.format(n=count, more=count + 1, half=count // 2) for word in words]
                wrong += [f"{name}: no {word!r} in {error}" for word in expected if word not in str(error)]
                if not re.search(rf"^  rank {odd}: .* at {re.escape(__file__)}:\d+$", str(error), re.MULTILINE):
                    wrong.append(f"{name}: not of rank {odd} with its line: {error}")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            dist.barrier()
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, len(place)) == [[]] * len(place)


def test_rank_that_comes_back_to_a_broken_group_tells_the_odd_call() -> None:
    """Ranks 1 and 2 made one broadcast, rank 0 another; ranks 0 and 2 notice before rank 1 calls anything more."""

    def body(member: Member) -> str:
        member.join()
        dist.broadcast(torch.ones(4), 0 if member.rank == 0 else 1)
        if member.rank == 1:
            member.await_said("noticed")
        with pytest.raises(CollectiveMismatch) as caught:
            dist.barrier()
        if member.rank == 2:
            member.say("noticed")
        return str(caught.value)

    late = on_ranks(body, 3)[1]
    assert "rank 0: broadcast(float32[4], src=0) at" in late
    assert "ranks 1-2: broadcast(float32[4], src=1) at" in late


def test_rank_that_is_behind_finishes_what_the_others_have_finished() -> None:
    def body(member: Member) -> tuple[float, str]:
        member.join()
        tensor = torch.full((1000,), float(member.rank == 0))
        if member.rank == 2:
            member.await_said("done-0", "done-1")
        dist.broadcast(tensor, src=0)
        member.say(f"done-{member.rank}")
        with pytest.raises(CollectiveMismatch) as caught:
            if member.rank == 0:
                dist.broadcast(torch.ones(3), src=0)
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(3))
        return float(tensor.sum()), str(caught.value)

    results = on_ranks(body, 3)
    assert [total for total, _ in results] == [1000] * 3
    assert "  ranks 1-2: all_reduce(float32[3], sum) at" in results[-1][1]  # the others do not wait to hear of it
