"""Outputs that share memory with inputs: the result is the one of separate tensors, wherever the two overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import every_rank
from torch._C._distributed_c10d import GatherOptions

COUNTS = (1, 16, 700, 300_000)


def given(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 10_000_000 * rank


def starts(rank: int, size: int, count: int) -> dict[str, int]:
    """Where in a tensor of ``size`` parts another may begin: at its own part, at another's, across two."""
    return {
        "own": rank * count,
        "other": (rank + 1) % size * count,
        "two": min(count * size - count, count // 2),
    }


def from_one_part(place: Member, operation: Callable[[torch.Tensor, torch.Tensor, int], bool]) -> list[str]:
    """Which cases went wrong of an operation whose input is a part of its output."""
    wrong = []
    for count in COUNTS:
        wholes = [given(rank, count * place.size) for rank in range(place.size)]
        for name in starts(0, place.size, count):
            begins = [starts(rank, place.size, count)[name] for rank in range(place.size)]
            expected = torch.cat([w[b : b + count] for w, b in zip(wholes, begins, strict=True)])
            output = wholes[place.rank].clone()
            part = output[begins[place.rank] : begins[place.rank] + count]
            if operation(output, part, count) and not torch.equal(output, expected):
                wrong.append(f"{name} x {count}")
    return wrong


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gathering_from_a_part_of_the_output(size: int) -> None:
    def single(output: torch.Tensor, part: torch.Tensor, count: int) -> bool:
        dist.all_gather_single(output, part)
        return True

    def listed(output: torch.Tensor, part: torch.Tensor, count: int) -> bool:
        dist.all_gather(list(output.split(count)), part)
        return True

    def to_one(output: torch.Tensor, part: torch.Tensor, count: int) -> bool:
        root = size - 1
        dist.gather(part, list(output.split(count)) if dist.get_rank() == root else None, root)
        return dist.get_rank() == root

    def to_one_tensor(output: torch.Tensor, part: torch.Tensor, count: int) -> bool:
        options = GatherOptions()
        options.rootRank, options.asyncOp = size - 1, False
        group: Any = dist.group.WORLD
        group.gather_single(output, part, options)
        return dist.get_rank() == size - 1

    def later(output: torch.Tensor, part: torch.Tensor, count: int) -> bool:
        dist.all_gather_single(output, part, async_op=True).wait()
        return True

    def body(place: Member) -> list[list[str]]:
        place.join()
        return [from_one_part(place, operation) for operation in (single, listed, to_one, to_one_tensor, later)]

    assert on_ranks(body, size) == [[[]] * 5] * size


@every_rank(leaves=False)
def test_scattering_and_reducing_into_a_part_of_the_input(member: Member) -> None:
    wrong = []
    for count in COUNTS:
        wholes = [given(rank, count * member.size) for rank in range(member.size)]
        own = slice(member.rank * count, (member.rank + 1) * count)
        total = sum(wholes[1:], wholes[0])[own]
        for name, start in starts(member.rank, member.size, count).items():
            whole = wholes[member.rank].clone()
            output = whole[start : start + count]
            dist.reduce_scatter_single(output, whole)
            if not torch.equal(output, total):
                wrong.append(f"reduce_scatter_single {name} x {count}")
            whole = wholes[member.rank].clone()
            output = whole[start : start + count]
            dist.reduce_scatter(output, list(whole.split(count)))
            if not torch.equal(output, total):
                wrong.append(f"reduce_scatter {name} x {count}")
            whole = wholes[1].clone()
            output = whole[start : start + count]
            dist.scatter(output, list(whole.split(count)) if member.rank == 1 else None, src=1)
            if not torch.equal(output, wholes[1][own]):
                wrong.append(f"scatter {name} x {count}")
    assert not wrong, wrong


@every_rank(leaves=False)
def test_all_to_all_in_place_and_shifted(member: Member) -> None:
    wrong = []
    for count in COUNTS:
        wholes = [given(rank, count * member.size) for rank in range(member.size)]
        expected = torch.cat([whole[member.rank * count : (member.rank + 1) * count] for whole in wholes])
        whole = wholes[member.rank].clone()
        dist.all_to_all_single(whole, whole)
        if not torch.equal(whole, expected):
            wrong.append(f"single, in member, x {count}")
        whole = wholes[member.rank].clone()
        dist.all_to_all(list(whole.split(count)), list(whole.split(count)))
        if not torch.equal(whole, expected):
            wrong.append(f"in member, x {count}")
        whole = torch.cat([wholes[member.rank], torch.zeros(count, dtype=torch.int64)])
        output = whole[count // 2 : count // 2 + count * member.size]
        dist.all_to_all_single(output, whole[: count * member.size])
        if not torch.equal(output, expected):
            wrong.append(f"single, shifted, x {count}")
        # Each output lies behind the input of the same rank: interleaved, but apart.
        woven = torch.zeros(member.size, 2, count, dtype=torch.int64)
        woven[:, 0] = wholes[member.rank].view(member.size, count)
        dist.all_to_all([row[1] for row in woven], [row[0] for row in woven])
        if not torch.equal(woven[:, 1].reshape(-1), expected):
            wrong.append(f"woven, x {count}")
    assert not wrong, wrong


def test_a_tensor_gathered_late_is_read_late() -> None:
    """What an operation before it has queued to be written is what a copy of a view must see."""

    def body(place: Member) -> list[float]:
        place.join()
        table = torch.zeros(4, 2)
        column = table[:, 0]
        work = dist.all_reduce(table.add_(1), async_op=True)
        outputs = [torch.zeros(4) for _ in range(3)]
        dist.gather(column, outputs if place.rank == 0 else None, 0)
        work.wait()
        return [float(output.sum()) for output in outputs]

    assert on_ranks(body, 3) == [[12.0] * 3, [0.0] * 3, [0.0] * 3]
