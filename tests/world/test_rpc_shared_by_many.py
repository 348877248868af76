"""Messages to several processes of one host, which all read one copy of it, each as if it were its own."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import closing
from ctypes import c_uint64

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import Peer, finish, mappings, read, write
from tests.support.waiting import soon

from phalanx import rpc
from phalanx.rpc.message import Kind, Message, SentToMany

SLAB = 1 << 20


def send(peer: Peer, number: int, buffers: list[memoryview]) -> None:
    """One notice to all others."""
    with closing(SentToMany(buffers)) as shared:
        for link in peer.links.values():
            link.send(Message(Kind.NOTICE, 0, "", number.to_bytes(8, "little"), shared), 60.0)


def has_room(peer: Peer, message: Message) -> bool:
    """Whether this message fits beside what others have."""
    lent = c_uint64()
    peer.hub._share(message, lent)
    fits = bool(lent.value)
    peer.hub._unshare(lent)
    return fits


def holding(member: Member) -> tuple[list[Message], threading.Event, Peer]:
    """One of the workers, what it receives and holds, and whether something has come."""
    held: list[Message] = []
    came = threading.Event()

    def notice(message: Message) -> None:
        held.append(message)
        came.set()

    peer = Peer(SLAB, notice)
    peer.meet(member)
    return held, came, peer


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_receiver_has_a_message_of_its_own(size: int) -> None:
    rounds = 60

    def content(number: int) -> list[memoryview]:
        chance = random.Random(number)
        nbytes = chance.choice([200_000, 300_000, chance.randrange(150_000, SLAB - 8192), 3 * SLAB])
        data = memoryview(bytearray(chance.randbytes(nbytes)))
        return [data[: nbytes // 3], data[nbytes // 3 :]]

    def rank(member: Member) -> None:
        wrong: list[str] = []
        kept: list[tuple[list[bytes], list[memoryview]]] = []
        all_came = threading.Event()

        def notice(message: Message) -> None:
            number = int.from_bytes(message.head[:8], "little")
            if [bytes(each) for each in message.buffers] != [bytes(each) for each in content(number)]:
                wrong.append(f"message {number} has other bytes")
            chance = random.Random(100 * number + member.rank)
            for each in message.buffers:  # what others see if it is not this receiver's own
                for _ in range(chance.randrange(4)):
                    each[chance.randrange(len(each))] ^= 0xFF
            if number % 7 == member.rank:
                kept.append(([bytes(each) for each in message.buffers], list(message.buffers)))
            if number == rounds - 1:
                all_came.set()

        peer = Peer(SLAB, notice)
        peer.meet(member)
        if member.rank == 0:
            for number in range(rounds):
                send(peer, number, content(number))
        else:
            assert all_came.wait(60.0)
            assert not wrong
            for then, now in kept:
                assert [bytes(each) for each in now] == then
        finish(member, peer)
        kept.clear()

    values(run_ranks(rank, size))


@pytest.mark.parametrize("end", ["killed", "closed", "done"])
def test_room_comes_back_when_the_last_receiver_has_released_or_died(end: str) -> None:
    def rank(member: Member) -> None:
        held, came, peer = holding(member)
        if member.rank == 0:
            assert has_room(peer, Message(Kind.NOTICE, 0, "", b"", [memoryview(bytes(SLAB - 8192))]))
            send(peer, 1, [memoryview(b"x" * (SLAB - 8192))])
            for other in (1, 2):
                read(member.folder / f"has-{other}")
            assert not has_room(peer, Message(Kind.NOTICE, 0, "", b"", [memoryview(bytes(SLAB // 2))]))
            write(member.folder / "go-1", b"")
            assert peer.wait_for_end()
            if end == "closed":  # its process still reads what it has received
                assert not has_room(peer, Message(Kind.NOTICE, 0, "", b"", [memoryview(bytes(SLAB // 2))]))
            write(member.folder / "go-2", b"")
            for other in (1, 2):
                if end != "killed" or other == 2:
                    read(member.folder / f"released-{other}")
            # The thread that brought it to a receiver has it until it returns.
            large = Message(Kind.NOTICE, 0, "", b"", [memoryview(bytes(SLAB - 8192))])
            assert soon(lambda: has_room(peer, large))
        else:
            assert came.wait(60.0)
            write(member.folder / f"has-{member.rank}", b"")
            read(member.folder / f"go-{member.rank}")
            if member.rank == 1 and end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if member.rank == 1 and end == "closed":
                peer.links[0].close()
                read(member.folder / "go-2")
                assert bytes(held[0].buffers[0]) == b"x" * (SLAB - 8192)
            held.clear()
            write(member.folder / f"released-{member.rank}", b"")
            if member.rank == 1 and end == "done":
                peer.links[0].close()
        if end == "killed":
            write(member.folder / "done-1", b"")
        finish(member, peer)
        peer.links.clear()
        assert soon(lambda: mappings() == 1)  # the hub's own

    outcomes = run_ranks(rank, 3)
    values([outcome for outcome in outcomes if outcome.rank != 1 or end != "killed"])


def test_what_was_lent_outlives_the_lender() -> None:
    def rank(member: Member) -> None:
        held, came, peer = holding(member)
        if member.rank == 0:
            send(peer, 1, [memoryview(b"y" * 300_000)])
            for other in (1, 2):
                read(member.folder / f"has-{other}")
            os.kill(os.getpid(), signal.SIGKILL)
        assert came.wait(60.0)
        write(member.folder / f"has-{member.rank}", b"")
        assert peer.wait_for_end() == "its process has ended"
        held[0].buffers[0][member.rank] = 0
        expected = bytearray(b"y" * 300_000)
        expected[member.rank] = 0
        assert held[0].buffers[0] == expected
        write(member.folder / "done-0", b"")
        finish(member, peer)

    values(run_ranks(rank, 3)[1:])


def changed(tensor: torch.Tensor, by: int) -> tuple[float, float]:
    before = float(tensor.sum())
    tensor += by + dist.get_rank()
    return before, float(tensor.sum())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_gives_every_worker_a_tensor_that_it_may_change(size: int) -> None:
    def rank(member: Member) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{member.folder}/world", rank=member.rank, world_size=member.size
        )
        rpc.init()
        for turn in range(5):
            tensor = torch.full((50_000,), float(turn))
            answers = [future.wait() for future in rpc.each(range(size), changed, tensor, turn)]
            assert answers == [(turn * 5e4, (turn + turn + other) * 5e4) for other in range(size)]
            assert float(tensor.sum()) == turn * 5e4
        dist.barrier()
        rpc.shutdown()

    values(run_ranks(rank, size))
