"""Messages between two ranks: blocking and not, with tags, from any source, in batches, in groups."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.program import program, raised
from tests.support.ranks import Member

DTYPES = {
    str(dtype)[6:]: dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool, torch.complex64)
}


ANOTHER_SIZE = "A message into a larger tensor or of another dtype"


def around(member: Member) -> tuple[int, int]:
    return (member.rank + 1) % member.size, (member.rank - 1) % member.size


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
def both_ways_at_once(member: Member) -> Any:
    after, before = around(member)
    received = torch.zeros(4)
    works = [dist.isend(torch.full((4,), float(member.rank)), after), dist.irecv(received, before)]
    return [work.wait() for work in works if work is not None], received


@program()
def tags_out_of_order(member: Member) -> Any:
    after, before = around(member)
    sent = [dist.isend(torch.full((3,), float(tag)), after, tag=tag) for tag in range(4)]
    received = [torch.zeros(3) for _ in range(4)]
    for tag in reversed(range(4)):
        dist.recv(received[tag], before, tag=tag)
    for work in sent:
        assert work is not None
        work.wait()
    return received


@program()
def one_tag_keeps_its_order(member: Member) -> Any:
    after, before = around(member)
    sent = [dist.isend(torch.full((3,), float(i)), after) for i in range(30)]
    received = [torch.zeros(3) for _ in range(30)]
    for tensor in received:
        dist.recv(tensor, before)
    for work in sent:
        assert work is not None
        work.wait()
    return received


@program()
def from_any_source(member: Member) -> Any:
    if member.rank:
        dist.send(torch.full((2,), float(member.rank)), 0)
        return None
    seen = {}
    for _ in range(member.size - 1):
        received = torch.zeros(2)
        source = dist.recv(received)
        seen[source] = received
    return dict(sorted(seen.items()))


@program()
def from_any_source_by_tag(member: Member) -> Any:
    if member.rank:
        sent = [dist.isend(torch.full((2,), float(10 * member.rank + tag)), 0, tag=tag) for tag in (5, 6)]
        for work in sent:
            assert work is not None
            work.wait()
        return None
    sums = []
    for tag in (6, 5):
        received = [torch.zeros(2) for _ in range(member.size - 1)]
        for tensor in received:
            dist.recv(tensor, tag=tag)
        sums.append(torch.stack(received).sum(0))
    return sums


@program()
def from_any_source_without_waiting(member: Member) -> Any:
    if member.rank:
        dist.send(torch.full((2,), float(member.rank)), 0)
        return None
    received = [torch.zeros(2) for _ in range(member.size - 1)]
    works = [dist.irecv(tensor) for tensor in received]
    sources = []
    for work in works:
        assert work is not None
        work.wait()
        sources.append(work._source_rank())
    return sorted(sources), torch.stack(received).sum(0)


@program(alone=True)
def a_master_outlives_its_workers(member: Member) -> Any:
    """Rank 1 sends and ends; the others send later, to a master that receives from any source."""
    if member.rank:
        time.sleep(0.5 * (member.rank - 1))
        dist.send(torch.full((2,), float(member.rank)), 0)
        dist.destroy_process_group()
        return None
    total = torch.zeros(2)
    for _ in range(member.size - 1):
        received = torch.zeros(2)
        dist.recv(received)
        total += received
    return total


@program()
def batch_around_the_ring(member: Member) -> Any:
    after, before = around(member)
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(member.rank)), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    return len(works), received


@program()
def batch_to_everybody(member: Member) -> Any:
    received = [torch.zeros(2) for _ in range(member.size)]
    operations = []
    for other in range(member.size):
        if other != member.rank:
            sent = torch.tensor([float(member.rank), float(other)])
            operations.append(dist.P2POp(dist.irecv, received[other], other, tag=member.rank))
            operations.append(dist.P2POp(dist.isend, sent, other, tag=other))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@program()
def in_a_group_with_group_ranks(member: Member) -> Any:
    group = dist.new_group(list(reversed(range(member.size))))
    rank = dist.get_rank(group)
    received = torch.zeros(2)
    work = dist.isend(torch.full((2,), float(rank)), group=group, group_dst=(rank + 1) % member.size)
    source = dist.recv(received, group=group, group_src=(rank - 1) % member.size)
    assert work is not None
    work.wait()
    return source, received


@program()
def batch_in_a_group(member: Member) -> Any:
    group = dist.new_group(list(reversed(range(member.size))))
    rank = dist.get_rank(group)
    received = torch.zeros(2)
    operations = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), group=group, group_peer=(rank + 1) % member.size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % member.size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@program()
def to_itself(member: Member) -> Any:
    return raised(lambda: dist.send(torch.ones(1), member.rank))


@program(differs="Messages to oneself", alone=True, short=2)
def to_itself_without_waiting(member: Member) -> Any:
    received = torch.zeros(2)

    def send() -> None:
        works = [dist.isend(torch.ones(2), member.rank), dist.irecv(received, member.rank)]
        for work in works:
            assert work is not None
            work.wait()

    return raised(send, gives=received)


@program()
def while_collectives_run(member: Member) -> Any:
    after, before = around(member)
    received = torch.zeros(3)
    summed = torch.ones(1000)
    receiving = dist.irecv(received, before)
    work = dist.all_reduce(summed, async_op=True)
    dist.send(torch.full((3,), float(member.rank)), after)
    assert receiving is not None
    assert work is not None
    work.wait()
    receiving.wait()
    return received, summed[:3]


@program()
def large_and_small(member: Member) -> Any:
    after, before = around(member)
    large, small = torch.zeros(500_000), torch.zeros(1)
    works = [
        dist.isend(torch.arange(500_000.0) + member.rank, after, tag=1),
        dist.isend(torch.full((1,), float(member.rank)), after, tag=2),
        dist.irecv(small, before, tag=2),
        dist.irecv(large, before, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return large[::50_000], small


@program()
def empty_messages(member: Member) -> Any:
    after, before = around(member)
    work = dist.isend(torch.zeros(0), after)
    received = torch.zeros(0)
    source = dist.recv(received, before)
    assert work is not None
    work.wait()
    return source, received


@program()
def from_another_thread(member: Member) -> Any:
    after, before = around(member)
    received = torch.zeros(3)
    thread = threading.Thread(target=lambda: dist.recv(received, before))
    thread.start()
    dist.send(torch.full((3,), float(member.rank)), after)
    thread.join()
    return received


def impatient_pair() -> Any:
    """A group whose messages may take two seconds. Joining it may take longer, but not with Gloo, whose connections
    keep the timeout with which they were made.
    """
    seconds = timedelta(seconds=2)
    dist.barrier()
    group: Any = dist.new_group([0, 1], timeout=seconds if dist.get_backend() == "gloo" else 30 * seconds)
    dist.barrier(group)
    group.set_timeout(seconds)
    return group


@program(differs=ANOTHER_SIZE, alone=True, sizes=(2,))
def a_message_into_a_larger_tensor(member: Member) -> Any:
    after, before = around(member)
    group = impatient_pair()
    works = [dist.isend(torch.ones(2), after, group=group)]
    received = torch.zeros(4)
    result = raised(lambda: dist.recv(received, before, group=group))
    return len(works), result, received


@program(differs=ANOTHER_SIZE, alone=True, sizes=(2,))
def a_message_into_another_dtype(member: Member) -> Any:
    after, before = around(member)
    group = impatient_pair()
    works = [dist.isend(torch.ones(2), after, group=group)]
    received = torch.zeros(2, dtype=torch.int32)
    result = raised(lambda: dist.recv(received, before, group=group))
    return len(works), result, received
