"""Messages between processes through shared memory: whole, in order, once, and never more than there is room for."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Sequence

import pytest
from tests.support.ranks import Member, run_ranks, values
from tests.support.shared_links import Peer, finish, mappings, read, write

from phalanx.rpc.links.contract import Link, LinkEnded
from phalanx.rpc.links.image import LARGEST_SMALL
from phalanx.rpc.links.shared import SharedLink
from phalanx.rpc.message import Kind, Message

SLAB = 1 << 20
SMALL = SharedLink.SMALL_BYTES
AROUND = [
    edge + by for edge in (SMALL, LARGEST_SMALL, 131072, 262144, SLAB, 3 * SLAB) for by in (-4096, -65, -1, 0, 1, 64)
]


def pattern(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def shapes(nbytes: int) -> list[tuple[bytes, list[memoryview]]]:
    """Messages of so many bytes: all in the head, all in one buffer, and in several of uneven sizes."""
    data = pattern(nbytes, nbytes)
    cuts = [0, nbytes // 3, nbytes // 3, nbytes // 3 + min(7, nbytes - nbytes // 3), nbytes]
    return [
        (data, []),
        (b"", [memoryview(data)]),
        (data[: cuts[1]], [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts[1:])]),
    ]


def test_messages_of_every_size_arrive_whole() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            for nbytes in (0, 1, 15, 16, 17, 4095, *AROUND):
                for head, buffers in shapes(nbytes):
                    answer = peer.call(peer.links[1], head, buffers)
                    assert bytes(answer.head) == head
                    assert [bytes(buffer) for buffer in answer.buffers] == [bytes(buffer) for buffer in buffers]
                    assert not any(buffer.readonly for buffer in answer.buffers)
        finish(member, peer)

    values(run_ranks(rank, 2))


def test_many_small_buffers_and_a_long_name() -> None:
    def rank(member: Member) -> None:
        name = "ä" * 1000
        peer = Peer(SLAB)
        peer.handlers[name] = lambda link, message: (message.service.encode(), message.buffers)
        peer.meet(member)
        if member.rank == 0:
            buffers = [memoryview(pattern(n % 9, n)) for n in range(6000)]
            answer = peer.call(peer.links[1], b"", buffers, name)
            assert bytes(answer.head).decode() == name
            assert [bytes(buffer) for buffer in answer.buffers] == [bytes(buffer) for buffer in buffers]
        finish(member, peer)

    values(run_ranks(rank, 2))


@pytest.mark.parametrize("size", [2, 3])
def test_small_ones_keep_their_order_and_large_ones_theirs(size: int) -> None:
    def rank(member: Member) -> None:
        got: list[tuple[int, bool, int]] = []  # from whom, whether it was large, its number

        def notice(message: Message) -> None:
            number, sender = divmod(int.from_bytes(message.head[:8], "little"), 10)
            got.append((sender, message.nbytes > SMALL, number))

        peer = Peer(SLAB, notice)
        peer.meet(member)
        chance = random.Random(member.rank)
        sent: dict[bool, int] = {False: 0, True: 0}
        for _ in range(3000):
            nbytes = chance.choice([8, 40, 400, 4000, 40000, 8, 40, 400, chance.randrange(8, 3 * SLAB)])
            head = (sent[nbytes > SMALL] * 10 + member.rank).to_bytes(8, "little")
            for link in peer.links.values():
                link.send(Message(Kind.NOTICE, 0, "", head, [memoryview(bytes(nbytes - 8))]), 60.0)
            sent[nbytes > SMALL] += 1
        for link in peer.links.values():  # behind all the notices of its lane
            peer.call(link)
            peer.call(link, bytes(2 * SMALL))
        write(member.folder / f"sent-{member.rank}", f"{sent[False]} {sent[True]}".encode())
        finish(member, peer)
        for other in set(range(member.size)) - {member.rank}:
            small, large = map(int, read(member.folder / f"sent-{other}").split())
            assert [n for sender, big, n in got if sender == other and not big] == list(range(small))
            assert [n for sender, big, n in got if sender == other and big] == list(range(large))

    values(run_ranks(rank, size))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_many_threads_of_every_process_call_every_other(size: int) -> None:
    threads, calls = 4, 1000 // size

    def digest(link: Link, message: Message) -> tuple[bytes, Sequence[memoryview]]:
        return hashlib.sha256(b"".join((message.head, *message.buffers))).digest(), message.buffers

    def rank(member: Member) -> None:
        def deeper(link: Link, message: Message) -> tuple[bytes, Sequence[memoryview]]:
            """Ask the caller in turn, as often as the message says."""
            depth = int(message.head)
            if depth:
                assert bytes(peer.call(link, b"%d" % (depth - 1), service="deeper").head) == b"%d" % (depth - 1)
            return bytes(message.head), []

        peer = Peer(SLAB, digest=digest, deeper=deeper)
        peer.meet(member)
        wrong: list[str] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for turn in range(calls):
                    link = chance.choice(list(peer.links.values()))
                    if turn % 50 == 7:
                        assert bytes(peer.call(link, b"20", service="deeper").head) == b"20"
                    data = pattern(chance.choice([3, 300, 30000, chance.randrange(300000)]), seed + turn)
                    cut = chance.randrange(len(data))
                    answer = peer.call(link, data[:cut], [memoryview(data)[cut:]], "digest")
                    assert bytes(answer.head) == hashlib.sha256(data).digest()
                    assert bytes(answer.buffers[0]) == data[cut:]
            except BaseException as error:
                wrong.append(repr(error))

        crew = [threading.Thread(target=work, args=(100 * member.rank + number,)) for number in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        finish(member, peer)
        assert not wrong

    values(run_ranks(rank, size))


def test_a_small_call_is_answered_while_a_large_message_is_on_its_way() -> None:
    def rank(member: Member) -> int:
        peer = Peer(SLAB)
        peer.meet(member)
        meanwhile = 0
        if member.rank == 0:
            data = memoryview(bytes(200 << 20))
            large = threading.Thread(target=lambda: peer.call(peer.links[1], b"", [data]))
            large.start()
            while large.is_alive():
                peer.call(peer.links[1], b"small")
                meanwhile += large.is_alive()
        finish(member, peer)
        return meanwhile

    assert values(run_ranks(rank, 2))[0] > 1


@pytest.mark.parametrize("nbytes", [1000, 100_000, 900_000, 5 << 20])
def test_who_takes_nothing_is_sent_no_more_than_there_is_room_for(nbytes: int) -> None:
    def rank(member: Member) -> None:
        go_on = threading.Event()
        got: list[int] = []

        def notice(message: Message) -> None:
            go_on.wait(60.0)
            got.append(int.from_bytes(message.head, "little"))

        peer = Peer(SLAB, notice)
        peer.meet(member)
        if member.rank == 0:
            buffer, sent = memoryview(bytes(nbytes)), 0
            with pytest.raises(TimeoutError):
                while True:
                    peer.links[1].send(Message(Kind.NOTICE, 0, "", sent.to_bytes(8, "little"), [buffer]), 0.3)
                    sent += 1
                    assert sent * nbytes < 12 << 20, "it is sent without end"
            write(member.folder / "sent", b"%d" % sent)
            if nbytes < SMALL:
                assert bytes(peer.call(peer.links[1], b"large" * SMALL).head)[:5] == b"large"  # a lane of its own
            else:
                assert bytes(peer.call(peer.links[1], b"small").head) == b"small"
            write(member.folder / "go", b"")
            peer.links[1].send(Message(Kind.NOTICE, 0, "", sent.to_bytes(8, "little"), [buffer]), 60.0)
            peer.call(peer.links[1], bytes(nbytes))
        else:
            sent = int(read(member.folder / "sent"))
            read(member.folder / "go")
            go_on.set()
        finish(member, peer)
        assert member.rank == 0 or got == list(range(sent + 1))

    values(run_ranks(rank, 2))


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_call_does_not_begin_before_a_small_notice_that_another_thread_has_taken(size: int) -> None:
    """That notice may be the call's cancellation."""

    def rank(member: Member) -> None:
        begun = threading.Event()
        early: list[bool] = []

        def notice(message: Message) -> None:
            early.append(begun.wait(0.4))

        def large(link: Link, message: Message) -> tuple[bytes, Sequence[memoryview]]:
            begun.set()
            return b"", []

        peer = Peer(SLAB, notice, large=large)
        peer.meet(member)
        if member.rank == 0:
            for link in peer.links.values():
                link.send(Message(Kind.NOTICE, 0, "", b"", ()), 60.0)
                peer.call(link, bytes(2 * SMALL), service="large")
        finish(member, peer)
        assert member.rank == 0 or early == [False]

    values(run_ranks(rank, size))


def test_what_was_received_stays_until_nobody_has_it_and_its_room_is_used_again() -> None:
    def rank(member: Member) -> None:
        peer = Peer(SLAB)
        peer.meet(member)
        if member.rank == 0:
            kept = [
                peer.call(peer.links[1], b"", [memoryview(pattern(SLAB // 5, n))]).buffers[0][10:] for n in range(9)
            ]
            for n in range(50):
                assert (
                    bytes(peer.call(peer.links[1], b"", [memoryview(pattern(SLAB // 3, n))]).buffers[0][:5])
                    == (pattern(SLAB // 3, n)[:5])
                )
            write(member.folder / "close", b"")
            assert peer.wait_for_end() == "it has left"
            with pytest.raises(LinkEnded, match="it has left"):
                peer.call(peer.links[1])
        else:
            read(member.folder / "close")
            peer.links[0].close()
            assert peer.ends == ["this process has closed it"]
            with pytest.raises(LinkEnded, match="this process has closed it"):
                peer.call(peer.links[0])
        finish(member, peer)
        if member.rank == 0:
            assert [bytes(part) for part in kept] == [pattern(SLAB // 5, n)[10:] for n in range(9)]
            assert peer.ends == ["it has left"]
            assert mappings()
            del kept
            peer.links.clear()
            peer.answers.clear()
            assert mappings() == 1  # the hub's own page

    values(run_ranks(rank, 2))


def test_what_was_sent_before_the_end_arrives() -> None:
    def rank(member: Member) -> None:
        got: list[bytes] = []
        peer = Peer(SLAB, lambda message: got.append(bytes(message.head)))
        peer.meet(member)
        if member.rank == 0:
            for n in range(100):
                peer.links[1].send(Message(Kind.NOTICE, 0, "", b"%d" % n), 60.0)
            peer.links[1].close()
        else:
            assert peer.wait_for_end() == "it has left"
            assert got == [b"%d" % n for n in range(100)]
        finish(member, peer)

    values(run_ranks(rank, 2))
