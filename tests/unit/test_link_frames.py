"""The frames of a link between workers: what was changed, or is nonsense, ends the link and delivers nothing more."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
from typing import Any, cast

import pytest
from tests.support.mutations import changed

from phalanx.rpc.links import frames as wire_format
from phalanx.rpc.links.contract import Kind, Link, Message
from phalanx.rpc.links.socket import SocketLink
from phalanx.wire.session import Session

SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))


class Receiver:
    """Keep what a worker sees of a link."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.why: list[str] = []

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        self.messages.append(message)

    def ended(self, link: Link, why: str, *, left: bool = False) -> None:
        self.why.append(why)


class Plain:
    """A socket that is no TCP socket, and knows nothing of TCP's options."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def setsockopt(self, *args: Any) -> None:
        pass


class NoReaders:
    """In the place of the threads that read: the test reads itself."""

    def remove(self, link: Link) -> None:
        pass

    def leave(self) -> bool:
        return False


def layout(kind: Kind, call: int, service: bytes, head: bytes, sizes: list[int]) -> bytes:
    fixed = struct.pack("!BQHII", kind, call, len(service), len(sizes), len(head))
    return fixed + service + struct.pack(f"!{len(sizes)}Q", *sizes) + head


class Pair:
    """A link between workers, and the bare socket at its other end."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair()
        self.receiver = Receiver()
        self.session = Session(b"k" * 32, is_listener=False)
        sock, session, readers = cast(Any, Plain(ours)), Session(b"k" * 32, is_listener=True), cast(Any, NoReaders())
        self.link = SocketLink(sock, session, self.receiver, readers)

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 15):  # as much as the socket holds
            if self.receiver.why:
                return
            self.other.sendall(data[start : start + (1 << 15)])
            while not self.receiver.why and self._readable():
                self.link.ready()

    def _readable(self) -> bool:
        try:
            return bool(self.link.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def frame(self, kind: int, body: bytes) -> bytes:
        made = struct.pack("!IB", len(body) + 1, kind) + body
        return made + self.session.digest(made, sha=kind == wire_format.HASHED)

    def announce(self, sizes: list[int]) -> None:
        """Begin a large message with a head and buffers of these sizes."""
        self.send(self.frame(wire_format.LARGE, layout(Kind.REQUEST, 1, b"call", b"", sizes)))

    def close(self) -> None:
        self.other.close()
        self.link.close()


def small(number: int, head: bytes = b"head", buffers: tuple[bytes, ...] = (b"abc", b"")) -> tuple[int, bytes]:
    sizes = [len(part) for part in buffers]
    return wire_format.SMALL, layout(Kind.REQUEST, number, b"call", head, sizes) + b"".join(buffers)


def frames(chance: random.Random) -> list[tuple[int, bytes]]:
    """Frames of a few messages, small and large."""
    made = [small(1), small(2, b"", ())]
    sizes = [chance.choice([0, 1, 100, 70_000, 300_000]) for _ in range(chance.randrange(1, 4))]
    sizes.insert(0, chance.choice([0, 5, 100_000]))
    made.append((wire_format.LARGE, layout(Kind.ANSWER, 3, b"", b"", sizes)))
    for size in sizes:
        kind = chance.choice([wire_format.PIECE, wire_format.HASHED])
        made += [(kind, bytes(piece)) for piece in wire_format.pieces_of([memoryview(chance.randbytes(size))])]
    return [*made, small(4), (wire_format.DROP, b""), (wire_format.END, b"")]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_changed_frames_end_the_link_and_deliver_nothing_more() -> None:
    chance = random.Random(1)
    for _ in range(60 * SCALE):
        pair, before = Pair(), Pair()
        whole = [pair.frame(*frame) for frame in frames(chance)]
        chosen = chance.randrange(len(whole))
        broken = changed(chance, whole[chosen])
        if not broken.startswith(whole[chosen]):
            for part in whole[:chosen]:
                before.send(part)
                pair.send(part)
            pair.send(broken + b"".join(whole[chosen + 1 :]))
            pair.other.close()
            if not pair.receiver.why:
                pair.link.ready()
            assert len(pair.receiver.messages) == len(before.receiver.messages)
        before.close()
        pair.close()
        assert len(pair.receiver.why) == 1


def test_nonsense_with_a_right_digest_ends_the_link_or_is_a_message() -> None:
    chance = random.Random(1)
    before = peak_bytes()
    for _ in range(60 * SCALE):
        pair = Pair()
        for kind, body in frames(chance):
            if chance.random() < 0.5:
                kind, body = chance.choice([kind, chance.randrange(256)]), changed(chance, body)
            pair.send(pair.frame(kind, body))
        pair.close()
        assert len(pair.receiver.why) == 1
        for message in pair.receiver.messages:
            assert len(message.head) + sum(part.nbytes for part in message.buffers) < 2_000_000
    assert peak_bytes() - before < 200 << 20


def test_memory_for_a_large_message_is_taken_when_its_bytes_arrive() -> None:
    """And a size that no machine has is refused with its number."""
    before = peak_bytes()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for sizes in ([1 << 63], [1 << 40] * 1000, [min(3 << 30, memory // 2)]):
        pair = Pair()
        pair.announce(sizes)
        if sum(sizes) > memory:
            assert str(sum(sizes)) in pair.receiver.why[0]
        else:
            pair.send(pair.frame(wire_format.DROP, b""))
            pair.send(pair.frame(*small(5)))
            assert [message.call for message in pair.receiver.messages] == [5]
            assert pair.receiver.why == []
        pair.close()
    assert peak_bytes() - before < 100 << 20


@pytest.mark.parametrize("kinds", [(wire_format.PIECE, wire_format.HASHED), (wire_format.HASHED, wire_format.PIECE)])
def test_piece_that_names_the_other_digest_is_refused(kinds: tuple[int, int]) -> None:
    pair = Pair()
    pair.announce([70_000])
    frame = bytearray(pair.frame(kinds[0], bytes(70_000)))
    frame[4] = kinds[1]
    pair.send(bytes(frame))
    assert pair.receiver.messages == []
    assert len(pair.receiver.why) == 1
    pair.close()
