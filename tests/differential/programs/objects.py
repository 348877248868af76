"""Collectives and messages of Python objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import program, raised
from tests.support.ranks import Member


def thing(member: Member) -> dict[str, Any]:
    return {"rank": member.rank, "text": "x" * (10 + 1000 * member.rank), "tensor": torch.full((2,), member.rank)}


@program()
def all_gather_object(member: Member) -> Any:
    things: list[Any] = [None] * member.size
    dist.all_gather_object(things, thing(member))
    return things


@program()
def gather_object(member: Member) -> Any:
    things: list[Any] | None = [None] * member.size if member.rank == member.size - 1 else None
    dist.gather_object(thing(member), things, dst=member.size - 1)
    return things


@program()
def broadcast_object_list(member: Member) -> Any:
    things: list[Any] = [thing(member), member.rank, None]
    dist.broadcast_object_list(things, src=member.size - 1)
    return things


@program()
def scatter_object_list(member: Member) -> Any:
    received: list[Any] = [None]
    things: list[Any] | None = [{"for": rank} for rank in range(member.size)] if member.rank == 0 else None
    dist.scatter_object_list(received, things, src=0)
    return received


@program()
def send_object_list(member: Member) -> Any:
    received: list[Any] = [None, None]
    if member.rank == 0:
        for other in range(1, member.size):
            dist.send_object_list([thing(member), other], other)
        return None
    return dist.recv_object_list(received, 0), received


@program()
def objects_in_a_group(member: Member) -> Any:
    group = dist.new_group([0, member.size - 1])
    if member.rank not in (0, member.size - 1):
        return None
    things: list[Any] = [None, None]
    dist.all_gather_object(things, member.rank, group=group)
    one: list[Any] = [member.rank]
    dist.broadcast_object_list(one, group=group, group_src=1)
    return things, one


@program()
def an_object_that_cannot_be_pickled(member: Member) -> Any:
    things: list[Any] = [None] * member.size
    return raised(lambda: dist.all_gather_object(things, lambda: 0))
