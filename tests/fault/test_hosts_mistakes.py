"""One rank of a world over several hosts makes another call than the others: every rank says which, by both.

Each world goes through many mistakes, with a group of its own for each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveMismatch
from phalanx.transports.hosts import communicator
from phalanx.transports.hosts.messages import HostsMessages

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
    "all_to_all size": (exchange(), exchange(1), "all_to_all(float32, sends", "{more}"),
}

WORLDS = {"2+2": (4, lambda rank, size: rank // 2), "1+2": (3, lambda rank, size: min(rank, 1))}


@pytest.mark.parametrize(
    ("world", "odd", "count"),
    [
        ("2+2", 1, SMALL),
        ("2+2", 2, MIDDLE),
        ("1+2", 0, LARGE),
        *(
            pytest.param(world, odd, count, marks=pytest.mark.long)
            for world, (size, _) in WORLDS.items()
            for odd in range(size)
            for count in (SMALL, MIDDLE, LARGE)
            if (world, odd, count) not in [("2+2", 1, SMALL), ("2+2", 2, MIDDLE), ("1+2", 0, LARGE)]
        ),
    ],
)
def test_a_call_that_differs_is_told_by_every_rank(
    world: str, odd: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, host_of = WORLDS[world]
    divide_by(monkeypatch, host_of)

    def body(member: Member) -> list[str]:
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
                if f"rank {odd}: " not in str(error):
                    wrong.append(f"{name}: not of rank {odd}: {error}")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            dist.barrier()
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, size) == [[]] * size


def test_groups_that_break_while_a_rank_still_makes_them_break_for_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ranks of the second host differ before the first host's rank has all that it needs of the group."""
    divide_by(monkeypatch, WORLDS["1+2"][1])

    def body(member: Member) -> list[str]:
        member.join()
        if member.rank == 0:

            def make_late(*arguments: Any) -> HostsMessages:
                time.sleep(1.0)
                return HostsMessages(*arguments)

            monkeypatch.setattr(communicator, "HostsMessages", make_late)
        said: list[str] = []
        monkeypatch.setattr(threading, "excepthook", lambda arguments: said.append(repr(arguments.exc_value)))
        for _ in range(2):
            group = dist.new_group()
            try:
                dist.all_reduce(torch.ones(SMALL + (member.rank == 1)), group=group)
            except CollectiveMismatch as error:
                said.append(str(error))
            dist.barrier()
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return said

    for of_rank in on_ranks(body, 3):
        assert len(of_rank) == 2, of_rank
        for said in of_rank:
            assert f"float32[{SMALL}]" in said
            assert f"rank 1: all_reduce(float32[{SMALL + 1}]" in said


@pytest.mark.parametrize(
    "pair",
    [(0, 2), (1, 2), pytest.param((2, 0), marks=pytest.mark.long), pytest.param((2, 1), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("sent", [7, pytest.param(70_000, marks=pytest.mark.long)])
def test_a_message_of_another_size_or_dtype_is_told_by_both(
    pair: tuple[int, int], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two hosts, and inside the second one of the two."""
    divide_by(monkeypatch, WORLDS["1+2"][1])
    source, to = pair

    def body(member: Member) -> list[str]:
        member.join()
        wrong = []
        boxes = {"size": torch.ones(sent + 1), "dtype": torch.ones(sent, dtype=torch.int32)}
        for name, box in boxes.items():
            group = dist.new_group()
            try:
                if member.rank == source:
                    dist.send(torch.ones(sent), to, group=group)
                elif member.rank == to:
                    dist.recv(box, source, group=group)
                dist.barrier(group=group)
                wrong.append(f"{name}: no error")
            except CollectiveMismatch as error:
                received = f"recv from rank {source}, {str(box.dtype).removeprefix('torch.')}[{box.numel()}] at "
                if member.rank == to and received not in str(error):
                    wrong.append(f"{name}: no {received!r} in {error}")
            dist.barrier()
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, 3) == [[]] * 3
