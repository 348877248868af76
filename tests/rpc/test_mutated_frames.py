"""Bytes that are not what a worker sends: refused with a reason, without unpickling, and without memory for them.

``PHALANX_STRESS_SCALE`` makes these tests longer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.contract import Link
from phalanx.rpc.links.image import Box, Damaged, pack, received
from phalanx.rpc.links.socket import SocketLink
from phalanx.rpc.links.wire_format import Layout, layout_of
from phalanx.rpc.message import Kind, Message
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import Challenge, NoProof, PassedOn, Response, WrongKey
from phalanx.wire.session import Session
from tests.support.ranks import Member, on_ranks

SCALE = int(os.environ.get("PHALANX_STRESS_SCALE", "1"))
KEY = b"k" * 32
TERABYTE = 1 << 40


class Receiver:
    """What the agent sees of a link."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.why: list[str] = []

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        self.messages.append(message)

    def ended(self, link: Link, why: str) -> None:
        self.why.append(why)


class Pair:
    """A link, and the bare socket at its other end."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair()
        self.receiver = Receiver()
        self.session = Session(KEY, is_listener=False)
        self.link = _link(ours, self.receiver)

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 15):  # as much as the socket holds
            if self.receiver.why:
                return
            self.other.sendall(data[start : start + (1 << 15)])
            while not self.receiver.why and _readable(self.link.sock):
                self.link.read()

    def frame(self, kind: int, body: bytes) -> bytes:
        frame = struct.pack("!IB", len(body) + 1, kind) + body
        return frame + self.session.digest(frame, sha=kind == wire_format.HASHED)

    def close(self) -> None:
        self.other.close()
        self.link.close()


def _link(ours: socket.socket, receiver: Receiver) -> SocketLink:
    """A link over a socket that is no TCP socket, which knows nothing of TCP's options."""

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(ours, name)

        def setsockopt(self, *args: Any) -> None:
            pass

    return SocketLink(Plain(), Session(KEY, is_listener=True), receiver)  # type: ignore[arg-type]


def _readable(sock: Any) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return False


def small(number: int, head: bytes = b"head", buffers: tuple[bytes, ...] = (b"abc", b"")) -> tuple[int, bytes]:
    message = Message(Kind.REQUEST, number, "call", head, [memoryview(part) for part in buffers])
    return wire_format.SMALL, layout_of(message).encode() + head + b"".join(buffers)


def frames(random_: random.Random) -> list[tuple[int, bytes]]:
    """Frames of a few messages, small and large."""
    made = [small(1), small(2, b"", ())]
    sizes = [random_.choice([0, 1, 100, 70_000, 300_000]) for _ in range(random_.randrange(1, 4))]
    made.append((wire_format.LARGE, Layout(Kind.ANSWER, 3, "", 5, sizes).encode() + b"large"))
    for size in sizes:
        data = random_.randbytes(size)
        kind = random_.choice([wire_format.PIECE, wire_format.HASHED])
        made += [(kind, bytes(piece)) for piece in wire_format.pieces_of([memoryview(data)])]
    made += [small(4), (wire_format.DROP, b""), (wire_format.END, b"")]
    return made


def mutated(random_: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changes: bits, numbers, cuts and repetitions."""
    changed = bytearray(data)
    for _ in range(random_.randrange(1, 4)):
        at = random_.randrange(len(changed)) if changed else 0
        how = random_.randrange(5)
        if how == 0 and changed:
            changed[at] ^= 1 << random_.randrange(8)
        elif how == 1 and changed:
            width = random_.choice([1, 2, 4, 8])
            changed[at : at + width] = random_.choice([b"\0", b"\xff", b"\x7f"]) * width
        elif how == 2:
            del changed[at : at + random_.randrange(1, 9)]
        elif how == 3:
            changed[at:at] = random_.randbytes(random_.randrange(1, 9))
        else:
            changed[at:at] = changed[at : at + random_.randrange(1, 17)]
    return bytes(changed)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("seed", range(4))
def test_frames_that_were_changed_on_the_way_end_the_link_and_deliver_nothing_more(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(60 * SCALE):
        pair = Pair()
        whole = [pair.frame(*frame) for frame in frames(random_)]
        chosen = random_.randrange(len(whole))
        broken = mutated(random_, whole[chosen])
        if broken.startswith(whole[chosen]):  # nothing of it was changed
            pair.close()
            continue
        before = Pair()
        for part in whole[:chosen]:
            before.send(part)
            pair.send(part)
        pair.send(broken)
        pair.send(b"".join(whole[chosen + 1 :]))
        pair.other.close()
        if not pair.receiver.why:
            pair.link.read()
        assert len(pair.receiver.messages) == len(before.receiver.messages)
        assert len(pair.receiver.why) <= 1
        pair.close()
        before.close()
        assert len(pair.receiver.why) == 1


@pytest.mark.parametrize("seed", range(4))
def test_nonsense_with_a_right_digest_ends_the_link_with_a_reason_or_is_a_message(seed: int) -> None:
    random_ = random.Random(seed)
    before = peak_bytes()
    for _ in range(100 * SCALE):
        pair = Pair()
        for kind, body in frames(random_):
            if random_.random() < 0.5:
                kind, body = random_.choice([kind, random_.randrange(256)]), mutated(random_, body)
            pair.send(pair.frame(kind, body))
        pair.close()
        assert len(pair.receiver.why) == 1
        for message in pair.receiver.messages:
            assert len(message.head) + sum(part.nbytes for part in message.buffers) < 2_000_000
    assert peak_bytes() - before < 200 << 20


@pytest.mark.parametrize("seed", range(4))
def test_a_layout_is_read_or_malformed(seed: int) -> None:
    random_ = random.Random(seed)
    good = Layout(Kind.REQUEST, 7, "a service", 4, [1, 2, 3]).encode() + b"head"
    assert Layout.decode(memoryview(good))[0].sizes == (1, 2, 3)
    for _ in range(2000 * SCALE):
        data = mutated(random_, good)
        with contextlib.suppress(Malformed):
            layout, end = Layout.decode(memoryview(data))
            assert end + layout.head_nbytes <= len(data)


@pytest.mark.parametrize("sizes", [[1 << 63], [TERABYTE] * 1000, [100, TERABYTE * 64], [(1 << 64) - 1] * 3])
def test_a_size_that_no_machine_has_is_refused_with_its_number(sizes: list[int]) -> None:
    pair = Pair()
    before = peak_bytes()
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, sizes).encode()))
    assert str(sum(sizes)) in pair.receiver.why[0]
    assert peak_bytes() - before < 100 << 20
    pair.close()


def test_memory_for_a_large_message_is_taken_when_its_bytes_arrive() -> None:
    pair = Pair()
    before = peak_bytes()
    sizes = [3 << 30] + [200_000] * 10_000  # as much as many machines have; nothing of it arrives
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(sizes) > memory:
        sizes = [memory // 2]
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, sizes).encode()))
    assert pair.receiver.why == []
    assert peak_bytes() - before < 100 << 20
    pair.send(pair.frame(wire_format.DROP, b""))
    pair.send(pair.frame(*small(5)))
    assert [message.call for message in pair.receiver.messages] == [5]
    pair.close()


@pytest.mark.parametrize("kind", [wire_format.PIECE, wire_format.HASHED])
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 5, 0], [300_000, 0, 1], [1 << 18, (1 << 18) - 1]])
def test_a_large_message_arrives_as_it_was_sent(sizes: list[int], kind: int) -> None:
    pair = Pair()
    parts = [random.Random(size).randbytes(size) for size in sizes]
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 4, sizes).encode() + b"head"))
    for piece in wire_format.pieces_of([memoryview(part) for part in parts]):
        pair.send(pair.frame(kind, bytes(piece)))
    (message,) = pair.receiver.messages
    assert (message.head, [bytes(part) for part in message.buffers]) == (b"head", parts)
    for part in message.buffers:
        assert not part.readonly
    pair.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_lies_in_shared_memory_is_a_message_or_damaged(seed: int) -> None:
    random_ = random.Random(seed)
    buffers = [memoryview(b"abc"), memoryview(b"")]
    image = pack(Message(Kind.REQUEST, 1, "call", b"head", buffers), Link.SMALL_BYTES)
    assert image is not None
    for _ in range(1000 * SCALE):
        box = Box()
        changed = mutated(random_, image)
        box.view[64 : 64 + len(changed)] = changed
        values = list(box.open())
        values[2], values[3], values[-1] = len(changed), 0xFFFFFFFE, len(changed)
        with contextlib.suppress(Damaged):
            message = received(box, tuple(values), lambda *args: None)
            assert message.nbytes <= len(changed)


class Bomb:
    """What must not be unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def changed_proof(random_: random.Random) -> None:
    """What a caller sends before it has proven anything."""
    here = ("127.0.0.1", 29500)
    challenge = Challenge(Key(KEY, "a test"), "rpc")
    whole = Response(Key(KEY, "a test"), "rpc", challenge.greeting, here, pickle.dumps(Bomb())).message
    for _ in range(20):
        data = mutated(random_, whole)
        with contextlib.suppress(NoProof, WrongKey, PassedOn):
            proven = challenge.check(data, [here])
            assert proven is None or data.startswith(whole)


def changed_verdict(random_: random.Random) -> None:
    """What a listener answers before it has proven anything."""
    here = ("127.0.0.1", 29500)
    key = Key(KEY, "a test")
    challenge = Challenge(key, "rpc")
    response = Response(key, "rpc", challenge.greeting, here, b"claim")
    proven = challenge.check(response.message, [here])
    assert proven is not None
    whole = proven.answer(pickle.dumps(Bomb()))
    for _ in range(20):
        data = mutated(random_, whole)
        with contextlib.suppress(NoProof, WrongKey):
            if response.missing(data) == 0:
                assert response.check(data) == pickle.dumps(Bomb())


def changed_layout(random_: random.Random) -> None:
    """What a frame whose digest is right says of itself."""
    good = Layout(Kind.REQUEST, 7, "a service", 4, [1, 2, 3]).encode() + b"head"
    for _ in range(20):
        with contextlib.suppress(Malformed):
            Layout.decode(memoryview(mutated(random_, good)))


def changed_image(random_: random.Random) -> None:
    """What lies in shared memory."""
    image = pack(Message(Kind.REQUEST, 1, "call", pickle.dumps(Bomb()), [memoryview(b"abc")]), Link.SMALL_BYTES)
    assert image is not None
    box = Box()
    for _ in range(20):
        changed = mutated(random_, image)
        box.view[64 : 64 + len(changed)] = changed
        values = list(box.open())
        values[2], values[3], values[-1] = len(changed), 0xFFFFFFFE, len(changed)
        with contextlib.suppress(Damaged):
            received(box, tuple(values), lambda *args: None)


def changed_frame(random_: random.Random) -> None:
    """What arrives at a link, without and with a digest that is right."""
    pair = Pair()
    for number in range(10):
        kind, body = small(number, pickle.dumps(Bomb()))
        pair.send(pair.frame(kind, body))
    frame = pair.frame(*small(10, pickle.dumps(Bomb())))
    pair.send(mutated(random_, frame) if random_.random() < 0.5 else pair.frame(kind, mutated(random_, body)))
    pair.close()
    assert 10 <= len(pair.receiver.messages) <= 11


# Each of them, and how many changed messages of a hundred are of its kind.
_CHANGES: list[tuple[Callable[[random.Random], None], int, int]] = [
    (changed_proof, 20, 40),
    (changed_verdict, 20, 19),
    (changed_layout, 20, 20),
    (changed_image, 20, 20),
    (changed_frame, 1, 1),
]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_changed_messages_before_and_after_the_proof_crash_nothing_and_take_no_memory(count: int) -> None:
    """In a process of its own, in which nothing is unpickled meanwhile."""

    def run(member: Member) -> tuple[int, list[str]]:
        random_ = random.Random(count)
        unpickled: list[str] = []

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                unpickled.append(str(arguments))

        sys.addaudithook(hear)
        done = grown = 0
        for part in range(10):
            for change, at_once, share in _CHANGES:
                for _ in range(-(-count * share // 1000 // at_once)):
                    change(random_)
                    done += at_once
            if part == 0:
                grown = -resident_bytes()
        grown += resident_bytes()
        assert grown < 32 << 20, grown
        return done, unpickled

    ((done, unpickled),) = on_ranks(run, 1)
    assert done >= count
    assert unpickled == []


@pytest.mark.parametrize("nbytes", [100, 70_000])
@pytest.mark.parametrize("kinds", [(wire_format.PIECE, wire_format.HASHED), (wire_format.HASHED, wire_format.PIECE)])
def test_a_piece_that_says_that_it_has_the_other_digest_is_refused(kinds: tuple[int, int], nbytes: int) -> None:
    pair = Pair()
    pair.send(pair.frame(wire_format.LARGE, Layout(Kind.REQUEST, 1, "call", 0, [nbytes]).encode()))
    frame = bytearray(pair.frame(kinds[0], bytes(nbytes)))
    frame[4] = kinds[1]
    pair.send(bytes(frame))
    assert pair.receiver.messages == []
    assert len(pair.receiver.why) == 1
    pair.close()
