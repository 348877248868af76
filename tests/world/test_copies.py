"""Gather, scatter and all-to-all: every byte at its place, for every dtype that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.contract import bits
from tests.support.ranks import Member, on_ranks
from torch._C._distributed_c10d import GatherOptions

from phalanx.errors import ArgumentError, CollectiveMismatch
from phalanx.group import Group, Session


@pytest.mark.parametrize("size", [1, 2, 3])
def test_single_tensor_forms_with_even_and_uneven_splits(size: int) -> None:
    def body(place: Member) -> bool:
        place.join()
        rank, n = place.rank, place.size
        source = torch.arange(n * 2 * 3).view(n * 2, 3) + 1000 * rank
        output = torch.zeros_like(source)
        dist.all_to_all_single(output, source)
        assert torch.equal(
            output,
            torch.cat([(torch.arange(n * 6).view(n * 2, 3) + 1000 * r)[2 * rank : 2 * rank + 2] for r in range(n)]),
        )
        # Rank s sends s + t + 1 rows to rank t.
        send, receive = [rank + t + 1 for t in range(n)], [s + rank + 1 for s in range(n)]
        source = torch.full((sum(send), 2), float(rank))
        output = torch.zeros(sum(receive), 2)
        dist.all_to_all_single(output, source, receive, send)
        assert output[:, 0].tolist() == [float(s) for s in range(n) for _ in range(s + rank + 1)]
        with pytest.raises(ValueError, match="do not add up"):
            dist.all_to_all_single(output, source, receive, [*send[:-1], send[-1] + 1])
        part = torch.zeros(2)
        dist.reduce_scatter_single(part, torch.arange(2.0 * n))
        assert part.tolist() == [n * (2.0 * rank), n * (2.0 * rank + 1)]
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_every_dtype_of_torch_is_copied() -> None:
    everything = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes = [d for d in sorted(everything, key=str) if not any(part in str(d) for part in ("bits", "x2", ".q"))]

    def body(place: Member) -> list[str]:
        place.join()
        wrong = []
        for dtype in dtypes:
            try:
                zeros = torch.zeros(64, dtype=torch.uint8)
                mine = (zeros + place.rank + 1).view(dtype)
            except RuntimeError:
                continue  # types below a byte have no plain storage
            if mine.dtype.is_complex or dtype == torch.bool:
                mine = torch.zeros(4, dtype=dtype)
            dist.broadcast(mine, src=1)
            outputs = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(outputs, mine)
            if any(bits(output) != bits(mine) for output in outputs):
                wrong.append(str(dtype))
        dist.destroy_process_group()
        return wrong

    assert on_ranks(body, 2) == [[], []]


def test_lists_that_cannot_be_right_are_refused_before_anything_moves() -> None:
    def body(place: Member) -> bool:
        place.join()
        x = torch.ones(4)
        with pytest.raises(ValueError, match="list has 1 tensors, but the group has 2 ranks"):
            dist.all_gather([x], x)
        with pytest.raises(ValueError, match="entry 1 of the list"):
            dist.all_gather([x.clone(), torch.ones(3)], x)
        with pytest.raises(ValueError, match="is not 2 times"):
            dist.all_gather_single(torch.ones(7), x)
        with pytest.raises(ValueError, match="is not 2 times"):
            dist.reduce_scatter_single(torch.ones(4), torch.ones(9))
        dist.barrier()  # the group is whole
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]


def to(root: int, *, later: bool = False) -> GatherOptions:
    options = GatherOptions()
    options.rootRank, options.asyncOp = root, later
    return options


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gather_into_one_tensor(size: int) -> None:
    """Synchronous or not, with gaps in what is gathered or in what it is gathered into; the others give anything."""

    def body(place: Member) -> bool:
        place.join()
        group: Any = dist.group.WORLD
        root = size - 1
        mine = torch.arange(6.0).view(2, 3) + 10 * place.rank
        expected = torch.cat([torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(size)])
        for given in (mine, mine.t().contiguous().t()):
            for output in (torch.zeros(2 * size, 3), torch.zeros(2 * size, 6)[:, ::2], torch.zeros(size, 2, 3)):
                for later in (False, True):
                    output.zero_()
                    ours = output if place.rank == root else (None, torch.empty(0), output)[int(later)]
                    work = group.gather_single(ours, given, to(root, later=later))
                    if later:
                        work.wait()
                    assert torch.equal(
                        output.reshape(-1, 3), expected if place.rank == root else torch.zeros_like(expected)
                    )
        z = torch.full((2,), complex(place.rank, 1))
        output = torch.zeros(2 * size, dtype=torch.complex64)
        group.gather_single(output, z, to(0))
        if place.rank == 0:
            assert output.tolist() == [complex(rank, 1) for rank in range(size) for _ in range(2)]
            for wrong in (torch.zeros(2 * size + 1), torch.zeros(2 * size, dtype=torch.int32)):
                with pytest.raises(ArgumentError, match=f"is not {size} times"):
                    group.gather_single(wrong, torch.zeros(2), to(0))
            with pytest.raises(ArgumentError, match="must give a tensor to gather into"):
                group.gather_single(None, torch.zeros(2), to(0))
        dist.barrier()  # the group is whole
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_group_gathers_into_one_tensor_also_over_a_backend_that_cannot(backend: str) -> None:
    def body(place: Member) -> bool:
        place.join(backend)
        assert dist.group.WORLD is not None
        group = Group(dist.group.WORLD, range(3), Session(frozenset({"cpu"})))
        for later in (False, True):
            output = torch.zeros(3, 2) if group.rank == 1 else None
            work = group.gather_single(output, torch.full((2,), float(group.rank)), dst=1, async_op=later)
            assert (work is not None) == later
            if work is not None:
                work.wait()
            assert output is None or output.tolist() == [[0, 0], [1, 1], [2, 2]]
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 3) == [True] * 3


def test_a_gather_into_one_tensor_counts_as_a_gather_and_must_match() -> None:
    def body(place: Member) -> str:
        place.join()
        group: Any = dist.group.WORLD
        x = torch.full((2,), float(place.rank))
        boxes = [torch.zeros(2) for _ in range(2)]
        if place.rank == 0:
            dist.gather(x, boxes, 0)
        else:
            group.gather_single(None, x, to(0))
        assert place.rank or torch.stack(boxes).tolist() == [[0, 0], [1, 1]]
        with pytest.raises(CollectiveMismatch) as caught:
            group.gather_single(torch.zeros(4) if place.rank == 0 else None, x if place.rank == 0 else x[:1], to(0))
            dist.barrier()
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert "rank 0: gather(float32[2], dst=0) at" in text
        assert "rank 1: gather(float32[1], dst=0) at" in text
