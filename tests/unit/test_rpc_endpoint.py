"""One end of a TCP connection in the core: what it sends and receives is what Python's own digests say."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.rpc.links.endpoint import BLOCK_BYTES, UNCHECKED, WHOLE, Endpoint
from phalanx.rpc.links.wire_format import SMALL
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

PATIENCE_MS = 60_000
# Around the blocks of the digest, which has the number of the message before its bytes: 120, 248, ...
SIZES = [0, 1, 2, 50, 107, 114, 115, 116, 120, 128, 235, 243, 244, 371, 1000, 8000]


@pytest.fixture(params=[32, 48, 64])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Endpoint, Session, Session]]:
    """A plain socket, the endpoint of its peer, and the sessions of both."""
    key = bytes(range(request.param))
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        mine, other = Session(key, is_listener=True), Session(key, is_listener=False)
        endpoint = Endpoint()
        endpoint.use(far.fileno(), mine)
        yield near, endpoint, mine, other


def frame(nbytes: int) -> bytes:
    body = bytes(n * 7 % 256 for n in range(nbytes))
    return (1 + nbytes).to_bytes(4, "big") + bytes([SMALL]) + body


def test_what_the_core_sends_has_the_digest_of_its_number(
    ends: tuple[socket.socket, Endpoint, Session, Session],
) -> None:
    near, endpoint, mine, other = ends
    for size in SIZES:
        sent = frame(size)
        assert endpoint.send(mine.sent, sent, len(sent)) == len(sent) + TAG_BYTES
        mine.sent += 1
        came = near.recv(1 << 16)
        other.check_parts(came[-TAG_BYTES:], came[:-TAG_BYTES])
        assert came[:-TAG_BYTES] == sent
    endpoint.send(mine.sent + 1, b"another number", 14)
    came = near.recv(1 << 16)
    with pytest.raises(Malformed):
        other.check_parts(came[-TAG_BYTES:], came[:-TAG_BYTES])


def test_a_small_frame_that_comes_alone_is_found_whole(
    ends: tuple[socket.socket, Endpoint, Session, Session],
) -> None:
    near, endpoint, mine, other = ends
    for size in SIZES:
        near.send(other.seal(frame(size)))
        came = endpoint.wait(PATIENCE_MS, mine.received)
        assert came == WHOLE + len(frame(size)) + TAG_BYTES
        assert endpoint.take(came - WHOLE - TAG_BYTES) == frame(size)
        mine.received += 1


def test_what_is_no_small_frame_alone_or_has_another_digest_is_not_whole(
    ends: tuple[socket.socket, Endpoint, Session, Session],
) -> None:
    near, endpoint, mine, other = ends
    sealed = other.seal(frame(100))
    wrong = bytearray(sealed)
    wrong[50] ^= 1
    others = [
        bytes(wrong),
        sealed[:-1],
        sealed + b"x",
        sealed[:3],
        b"\xff" * 5,
        b"\xff" * 200,
        sealed[:4] + b"\x02" + sealed[5:],
        bytes(TAG_BYTES + 4),
    ]
    for data in others:
        near.send(data)
        assert endpoint.wait(PATIENCE_MS, mine.received) == len(data)
        assert endpoint.take(len(data)) == data
    for number in (mine.received + 1, UNCHECKED):
        near.send(sealed)
        assert endpoint.wait(PATIENCE_MS, number) == len(sealed)
        endpoint.take(len(sealed))


def test_what_has_come_and_was_not_taken_comes_again(ends: tuple[socket.socket, Endpoint, Session, Session]) -> None:
    near, endpoint, mine, other = ends
    near.send(other.seal(frame(10)))
    came = endpoint.wait(PATIENCE_MS, UNCHECKED)
    assert endpoint.has_come()
    assert endpoint.look(0, mine.received) == WHOLE + came
    endpoint.take(came)
    assert not endpoint.has_come()
    assert endpoint.look(0, mine.received) == -errno.EAGAIN


def test_more_than_there_is_room_for_comes_in_parts_and_the_end_is_told(
    ends: tuple[socket.socket, Endpoint, Session, Session],
) -> None:
    near, endpoint, mine, _ = ends
    near.send(bytes(BLOCK_BYTES + 5))
    assert endpoint.look(0, mine.received) == BLOCK_BYTES
    endpoint.take(BLOCK_BYTES)
    assert endpoint.look(0, mine.received) == 5
    endpoint.take(5)
    near.close()
    assert endpoint.wait(PATIENCE_MS, mine.received) == 0


def test_a_sender_is_told_how_much_the_kernel_takes_and_why_it_takes_nothing(
    ends: tuple[socket.socket, Endpoint, Session, Session],
) -> None:
    near, endpoint, mine, _ = ends
    sent, large, took = 0, frame(7000), 1
    while took > 0:
        sent += max(0, took := endpoint.send(mine.sent, large, len(large)))
    assert took == -errno.EAGAIN
    near.close()
    assert endpoint.send(mine.sent, large, len(large)) == -errno.EPIPE


def test_a_thread_that_sleeps_is_woken_by_what_comes(ends: tuple[socket.socket, Endpoint, Session, Session]) -> None:
    near, endpoint, mine, other = ends
    timer = threading.Timer(0.2, near.send, [other.seal(frame(3))])
    timer.start()
    began = time.monotonic()
    assert endpoint.wait(PATIENCE_MS, mine.received) > WHOLE
    assert time.monotonic() - began < PATIENCE_MS / 2000
    timer.join()
    assert endpoint.wait(0, mine.received) > WHOLE  # it was not taken
