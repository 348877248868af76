"""Outputs that share memory with inputs: the result is the one of separate tensors, wherever the two overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch._C._distributed_c10d import GatherOptions

from phalanx.c10d.torch_versions import function

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
        "single": lambda output, part, count: function("all_gather_single")(output, part),
        "later": lambda output, part, count: function("all_gather_single")(output, part, async_op=True).wait(),
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
def test_results_go_into_a_part_of_the_input(member: Member) -> None:
    """Of reduce_scatter, scatter and all_to_all."""
    rank, size, is_root = member.rank, member.size, member.rank == 1
    for count in COUNTS:
        wholes = [given(each, count * size) for each in range(size)]
        own = slice(rank * count, (rank + 1) * count)
        total = sum(wholes[1:], wholes[0])[own]
        for name, start in starts(rank, size, count).items():
            for kind, call, expected in (
                ("single", lambda part, whole: function("reduce_scatter_single")(part, whole), total),
                ("list", lambda part, whole, n=count: dist.reduce_scatter(part, list(whole.split(n))), total),
                (
                    "scatter",
                    lambda part, whole, n=count: dist.scatter(part, list(whole.split(n)) if is_root else None, 1),
                    wholes[1][own],
                ),
            ):
                whole = wholes[1 if kind == "scatter" else rank].clone()
                part = whole[start : start + count]
                call(part, whole)
                assert torch.equal(part, expected), f"{kind} {name} x {count}"
        expected = torch.cat([whole[own] for whole in wholes])
        whole = torch.cat([wholes[rank], torch.zeros(count, dtype=torch.int64)])
        shifted = whole[count // 2 : count // 2 + count * size]
        dist.all_to_all_single(shifted, whole[: count * size])
        assert torch.equal(shifted, expected), f"shifted x {count}"
        whole = wholes[rank].clone()
        dist.all_to_all(list(whole.split(count)), list(whole.split(count)))
        assert torch.equal(whole, expected), f"in place x {count}"
        # Each output lies behind the input of the same rank: interleaved, but apart.
        woven = torch.zeros(size, 2, count, dtype=torch.int64)
        woven[:, 0] = wholes[rank].view(size, count)
        dist.all_to_all([row[1] for row in woven], [row[0] for row in woven])
        assert torch.equal(woven[:, 1].reshape(-1), expected), f"woven x {count}"


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
