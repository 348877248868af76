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
Call = Callable[[dist.ProcessGroup, int, int], object]  # of the group, this rank, and the number of elements


def parts(count: int, size: int = 0) -> list[torch.Tensor]:
    return [torch.ones(count) for _ in range(size or dist.get_world_size())]


def reduce_all(shape: Callable[[int], Any], dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda group, rank, count: dist.all_reduce(torch.ones(shape(count), dtype=dtype), op, group=group)


def reduce_to(dst: int, more: int = 0, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda group, rank, count: dist.reduce(torch.ones(count + more), dst, op, group=group)


def broadcast(src: int, more: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group, rank, count: dist.broadcast(torch.ones(count + more, dtype=dtype), src, group=group)


def gather_all(more: int = 0) -> Call:
    return lambda group, rank, count: dist.all_gather(parts(count + more), torch.ones(count + more), group=group)


def scatter_sums(more: int = 0, op: Any = dist.ReduceOp.SUM) -> Call:
    def call(group: dist.ProcessGroup, rank: int, count: int) -> object:
        return dist.reduce_scatter(torch.ones(count + more), parts(count + more), op, group=group)

    return call


def gather_to(dst: int, more: int = 0) -> Call:
    def call(group: dist.ProcessGroup, rank: int, count: int) -> object:
        outputs = parts(count + more) if rank == dst else None
        return dist.gather(torch.ones(count + more), outputs, dst, group=group)

    return call


def scatter_from(src: int, more: int = 0) -> Call:
    def call(group: dist.ProcessGroup, rank: int, count: int) -> object:
        inputs = parts(count + more) if rank == src else None
        return dist.scatter(torch.ones(count + more), inputs, src, group=group)

    return call


def exchange(more: int = 0) -> Call:
    """More to the next rank than that expects."""

    def call(group: dist.ProcessGroup, rank: int, count: int) -> object:
        inputs = parts(count)
        inputs[(rank + 1) % len(inputs)] = torch.ones(count + more)
        return dist.all_to_all(parts(count), inputs, group=group)

    return call


def barrier(group: dist.ProcessGroup, rank: int, count: int) -> object:
    return dist.barrier(group=group)


usual = reduce_all(lambda count: count)
# What the others call, what one rank calls, and what the error of every rank has of the two.
MISTAKES: dict[str, tuple[Call, Call, str, str]] = {
    "all_reduce size": (usual, reduce_all(lambda n: n + 1), "all_reduce(float32[{n}]", "all_reduce(float32[{more}]"),
    "all_reduce shape": (
        reduce_all(lambda n: (n // 2, 2)),
        reduce_all(lambda n: (2, n // 2)),
        "float32[{half}, 2]",
        "float32[2, {half}]",
    ),
    "all_reduce dtype": (usual, reduce_all(lambda n: n, torch.int32), "float32[{n}]", "int32[{n}]"),
    "all_reduce op": (usual, reduce_all(lambda n: n, op=dist.ReduceOp.MAX), "sum)", "max)"),
    "order": (usual, gather_all(), "all_reduce(", "all_gather("),
    "barrier": (usual, barrier, "all_reduce(", "barrier("),
    "broadcast size": (broadcast(0), broadcast(0, 1), "float32[{n}], src=0", "float32[{more}], src=0"),
    "broadcast dtype": (broadcast(1), broadcast(1, dtype=torch.int64), "float32[{n}], src=1", "int64[{n}], src=1"),
    "broadcast root": (broadcast(0), broadcast(1), "src=0", "src=1"),
    "reduce size": (reduce_to(1), reduce_to(1, 1), "float32[{n}]", "float32[{more}]"),
    "reduce root": (reduce_to(0), reduce_to(1), "dst=0", "dst=1"),
    "reduce op": (reduce_to(0), reduce_to(0, op=dist.ReduceOp.PRODUCT), "sum", "product"),
    "all_gather size": (gather_all(), gather_all(1), "float32[{n}]", "float32[{more}]"),
    "reduce_scatter size": (scatter_sums(), scatter_sums(1), "float32[{n}]", "float32[{more}]"),
    "reduce_scatter op": (scatter_sums(), scatter_sums(op=dist.ReduceOp.MIN), "sum", "min"),
    "gather size": (gather_to(0), gather_to(0, 1), "float32[{n}], dst=0", "float32[{more}], dst=0"),
    "gather root": (gather_to(0), gather_to(1), "dst=0", "dst=1"),
    "scatter size": (scatter_from(1), scatter_from(1, 1), "float32[{n}], src=1", "float32[{more}], src=1"),
    "scatter root": (scatter_from(0), scatter_from(1), "src=0", "src=1"),
    "root against sender": (broadcast(1), gather_to(1), "broadcast(", "gather("),
    "all_to_all size": (exchange(), exchange(1), "all_to_all(float32, sends", "{more}"),
}

PLACES = ("000", "0011", "011")  # the host of each rank
QUICK = [("000", 1, SMALL), ("0011", 1, SMALL), ("0011", 2, MIDDLE), ("011", 0, LARGE)]
MORE = [(p, odd, count) for p in PLACES for odd in range(len(p)) for count in (SMALL, MIDDLE, LARGE)]


@pytest.mark.parametrize(
    ("place", "odd", "count"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE if one not in QUICK)],
)
def test_a_call_that_differs_is_told_by_every_rank(place: str, odd: int, count: int) -> None:
    def body(member: Member) -> list[str]:
        if len(set(place)) > 1:
            pretend_host(int(place[member.rank]))
        member.join()
        wrong = []
        for name, (theirs, mine, *words) in MISTAKES.items():
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


def test_all_to_all_that_only_the_receiver_can_compare_is_told_by_all() -> None:
    """Rank 0 sends rank 1 more than that expects, gets what it expects itself, and learns of it at its next call."""

    def body(member: Member) -> str:
        member.join()
        inputs, outputs = ([torch.ones(2) for _ in range(3)] for _ in range(2))
        if member.rank == 0:
            inputs[1] = torch.ones(3)
        dist.broadcast(torch.ones(1), src=0)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_to_all(outputs, inputs)
            dist.barrier()
        return str(caught.value)

    for text in on_ranks(body, 3):
        assert "rank 0: all_to_all(float32, sends [2, 3, 2], expects [2, 2, 2] elements) at" in text
        assert "ranks 1-2: all_to_all(float32, sends [2, 2, 2], expects [2, 2, 2] elements) at" in text
        assert "barrier" not in text


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
