"""Messages between two ranks: blocking and not, with tags, from any source, in batches, in groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import program, raised, wait_for
from tests.support.ranks import Member

DTYPES = {
    str(dtype)[6:]: dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool, torch.complex64)
}


def around(member: Member) -> tuple[int, int]:
    return (member.rank + 1) % member.size, (member.rank - 1) % member.size


def mine(member: Member, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(member.rank))


@program(cases=DTYPES)
def ring(member: Member, dtype: torch.dtype) -> Any:
    after, before = around(member)
    sent, received = torch.arange(5).add(member.rank).to(dtype), torch.zeros(5, dtype=dtype)
    if member.rank == 0:
        dist.send(sent, after)
        source = dist.recv(received, before)
    else:
        source = dist.recv(received, before)
        dist.send(sent, after)
    return source, received


@program()
def tags_out_of_order(member: Member) -> Any:
    """And two messages of one tag in theirs."""
    after, before = around(member)
    sent = [dist.isend(torch.full((3,), float(number)), after, tag=number // 2) for number in range(8)]
    received = [torch.zeros(3) for _ in range(8)]
    for tag in reversed(range(4)):
        dist.recv(received[2 * tag], before, tag=tag)
        dist.recv(received[2 * tag + 1], before, tag=tag)
    wait_for(*sent)
    return received


@program()
def from_any_source_by_tag(member: Member) -> Any:
    if member.rank:
        wait_for(*(dist.isend(torch.full((2,), 10.0 * member.rank + tag), 0, tag=tag) for tag in (5, 6)))
        return None
    seen = []
    for tag in (6, 5):
        received = [torch.zeros(2) for _ in range(member.size - 1)]
        sources = [dist.recv(tensor, tag=tag) for tensor in received]
        seen.append(dict(sorted(zip(sources, received, strict=True))))
    return seen


@program()
def from_any_source_without_waiting(member: Member) -> Any:
    if member.rank:
        dist.send(mine(member), 0)
        return None
    received = [torch.zeros(3) for _ in range(member.size - 1)]
    works = [dist.irecv(tensor) for tensor in received]
    wait_for(*works)
    return sorted(work._source_rank() for work in works), torch.stack(received).sum(0)


@program()
def batch_to_everybody(member: Member) -> Any:
    received = [torch.zeros(2) for _ in range(member.size)]
    operations = []
    for other in range(member.size):
        if other != member.rank:
            sent = torch.tensor([float(member.rank), float(other)])
            operations.append(dist.P2POp(dist.irecv, received[other], other, tag=member.rank))
            operations.append(dist.P2POp(dist.isend, sent, other, tag=other))
    wait_for(*dist.batch_isend_irecv(operations))
    return received


@program()
def in_a_group_with_group_ranks(member: Member) -> Any:
    group = dist.new_group(list(reversed(range(member.size))))
    rank = dist.get_rank(group)
    after, before = (rank + 1) % member.size, (rank - 1) % member.size
    received, batched = torch.zeros(2), torch.zeros(2)
    work = dist.isend(torch.full((2,), float(rank)), group=group, group_dst=after)
    source = dist.recv(received, group=group, group_src=before)
    wait_for(work)
    operations = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), group=group, group_peer=after),
        dist.P2POp(dist.irecv, batched, group=group, group_peer=before),
    ]
    wait_for(*dist.batch_isend_irecv(operations))
    return source, received, batched


@program()
def to_itself(member: Member) -> Any:
    return raised(lambda: dist.send(torch.ones(1), member.rank))


@program(differs="Messages to oneself", alone=True)
def to_itself_without_waiting(member: Member) -> Any:
    received = torch.zeros(2)
    send = [lambda: dist.isend(torch.ones(2), member.rank), lambda: dist.irecv(received, member.rank)]
    return raised(lambda: wait_for(*[start() for start in send]), gives=received)


@program()
def while_collectives_run(member: Member) -> Any:
    after, before = around(member)
    received, summed = torch.zeros(3), torch.ones(1000)
    receiving = dist.irecv(received, before)
    work = dist.all_reduce(summed, async_op=True)
    dist.send(mine(member), after)
    wait_for(work, receiving)
    return received, summed[:3]


OTHERS = {"a larger tensor": torch.zeros(4), "another dtype": torch.zeros(2, dtype=torch.int32)}


@program(cases=OTHERS, differs="A message into a larger tensor or of another dtype", alone=True, sizes=(2,))
def a_message_that_does_not_fit(member: Member, received: torch.Tensor) -> Any:
    """In a group whose messages may take two seconds.

    Joining it may take longer, but not with Gloo, whose connections keep the timeout with which they were made.
    """
    after, before = around(member)
    seconds = timedelta(seconds=2)
    dist.barrier()
    group: Any = dist.new_group([0, 1], timeout=seconds if dist.get_backend() == "gloo" else 30 * seconds)
    dist.barrier(group)
    group.set_timeout(seconds)
    works = [dist.isend(torch.ones(2), after, group=group)]
    result = raised(lambda: dist.recv(received, before, group=group))
    return len(works), result, received
