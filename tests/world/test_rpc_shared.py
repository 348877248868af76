"""Messages between workers of one host: whole whatever their size, and one copy of what goes to several."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
from functools import partial

import pytest
import torch
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon

from phalanx import rpc
from phalanx.errors import EncodingError
from phalanx.rpc import connections
from phalanx.rpc.links.shared import SharedHub

SLAB = 8 << 20  # so that half of it is soon in use, and no message may have more
EDGES = [
    edge + by
    for edge in (4096, 16384, 65536, 131072, 262144, SLAB // 8, 3 * SLAB // 8)
    for by in (-4096, -300, -65, -1, 0, 1, 64)
]


def small_slab(_: Member) -> None:
    vars(connections)["SharedHub"] = partial(SharedHub, slab_bytes=SLAB)


def inverted(head: bytes, tensors: list[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    return head[::-1], [255 - tensor for tensor in tensors]


def exchange(to: int, nbytes: int, chance: random.Random) -> None:
    """Send so many bytes: all in the head, all in one tensor, and in several of uneven sizes."""
    data = chance.randbytes(nbytes)
    cut = nbytes // 3
    for head, parts in ((data, []), (b"", [data]), (data[:cut], [data[cut : cut + 7], b"", data[cut + 7 :]])):
        tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0) for part in parts]
        got, others = rpc.call(to, inverted, head, tensors)
        assert got == head[::-1]
        assert all(torch.equal(one, 255 - other) for one, other in zip(others, tensors, strict=True))
        for each in others:
            each.fill_(1)  # it may be written to


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.long)])
def test_messages_of_every_size_arrive_whole_beside_each_other(tcp: bool) -> None:
    """From several threads of every worker to every other, which also call back in turn."""

    def body(member: Member) -> None:
        others = [rank for rank in range(3) if rank != member.rank]
        names = [f"worker{rank}" for rank in range(3)]
        sizes = [0, 1, 15, 16, 17, *EDGES]

        def work(number: int) -> None:
            chance = random.Random(3 * member.rank + number)
            for turn, nbytes in enumerate(sizes[number::3]):
                exchange(chance.choice(others), nbytes, chance)
                if turn % 10 == 7:
                    assert rpc.call(chance.choice(others), workers.descend, names, 10) == 10

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))

    with_workers(body, 3, before=small_slab, tcp=tcp)


@pytest.mark.parametrize("tcp", [False, True])
def test_small_call_is_answered_while_a_large_message_is_on_its_way(tcp: bool) -> None:
    def body(member: Member) -> None:
        if member.rank:
            return
        large = threading.Thread(target=rpc.call, args=(1, torch.numel, torch.zeros(32 << 20)))
        large.start()
        meanwhile = 0
        while large.is_alive():
            rpc.call(1, workers.add, 1, 2)
            meanwhile += large.is_alive()
        assert meanwhile > 1

    with_workers(body, 2, tcp=tcp)


def test_receiver_may_keep_more_than_a_slab_has_room_for() -> None:
    def body(member: Member) -> None:
        kept = [rpc.call(workers.next_of(member), torch.full, (20_000,), number) for number in range(150)]
        assert all(tensor.eq(number).all() for number, tensor in enumerate(kept))
        member.meet("kept")

    with_workers(body, 2, before=small_slab)


def test_message_of_more_than_half_of_the_memory_is_refused_both_ways() -> None:
    def body(member: Member) -> None:
        to, refusal = workers.next_of(member), "at most 0.0 GiB are possible. Send the value in several calls"
        with pytest.raises(EncodingError, match=refusal):
            rpc.call(to, torch.numel, torch.ones(SLAB // 8))
        with pytest.raises(EncodingError, match=refusal):
            rpc.call(to, torch.ones, SLAB // 8)
        assert rpc.call(to, torch.ones, SLAB // 9).sum() == SLAB // 9

    with_workers(body, 2, before=small_slab)


def changed(tensor: torch.Tensor, number: int) -> tuple[float, float]:
    before = float(tensor.sum())
    tensor += number
    workers.keep(tensor)
    return before, float(tensor.sum())


def test_each_has_a_tensor_of_its_own_that_outlives_its_sender() -> None:
    def run(member: Member) -> None:
        small_slab(member)
        workers.begin(member)
        if member.rank == 0:
            for number in range(20):
                count = random.Random(number).choice([200_000, 300_000, 900_000, 3 * SLAB // 8]) // 8
                tensor = torch.full((count,), float(number), dtype=torch.float64)
                answers = [future.wait() for future in rpc.each(range(3), changed, tensor, number)]
                assert answers == [(number * count, 2 * number * count)] * 3
                assert tensor.eq(number).all()
            member.await_said("kept-1", "kept-2")
            os.kill(os.getpid(), signal.SIGKILL)
        assert soon(lambda: len(workers.kept) == 20)
        kept = [rpc.call(0, torch.ones, SLAB // 20) for _ in range(9)]
        member.say(f"kept-{member.rank}")
        assert soon(lambda: [worker.rank for worker in rpc.workers()] == [1, 2])
        assert all(tensor.eq(2 * number).all() for number, tensor in enumerate(workers.kept))
        assert all(tensor.eq(1).all() for tensor in kept)
        rpc.shutdown()
        assert workers.mappings()
        del kept
        workers.kept.clear()
        assert soon(lambda: workers.mappings() == 0)

    values(run_ranks(run, 3)[1:])
