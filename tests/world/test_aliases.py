"""Outputs that share memory with inputs: the result is the one of separate tensors, wherever the two overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks import Member
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


@every_rank()
def test_gathering_from_a_part_of_the_output(member: Member) -> None:
    root, is_root = 2, member.rank == 2
    group: Any = dist.group.WORLD
    options: Any = GatherOptions()
    options.rootRank, options.asyncOp = root, False
    operations: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
        "single": lambda output, part, count: dist.all_gather_single(output, part),
        "later": lambda output, part, count: dist.all_gather_single(output, part, async_op=True).wait(),
        "list": lambda output, part, count: dist.all_gather(list(output.split(count)), part),
        "gather": lambda output, part, count: dist.gather(part, list(output.split(count)) if is_root else None, root),
        "gather single": lambda output, part, count: group.gather_single(output, part, options),
    }
    for count in COUNTS:
        wholes = [given(rank, count * member.size) for rank in range(member.size)]
        for name in starts(0, member.size, count):
            begins = [starts(rank, member.size, count)[name] for rank in range(member.size)]
            expected = torch.cat([w[b : b + count] for w, b in zip(wholes, begins, strict=True)])
            for kind, operation in operations.items():
                output = wholes[member.rank].clone()
                operation(output, output[begins[member.rank] : begins[member.rank] + count], count)
                assert ("gather" in kind and not is_root) or torch.equal(output, expected), f"{kind} {name} x {count}"


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


@every_rank()
def test_a_tensor_gathered_late_is_read_late(member: Member) -> None:
    """What an operation before it has queued to be written is what a copy of a view must see."""
    table = torch.zeros(4, 2)
    column = table[:, 0]
    work = dist.all_reduce(table.add_(1), async_op=True)
    outputs = [torch.zeros(4) for _ in range(3)]
    dist.gather(column, outputs if member.rank == 0 else None, 0)
    work.wait()
    assert [output.sum().item() for output in outputs] == [0.0 if member.rank else 12.0] * 3
