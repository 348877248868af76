"""The handshake that every connection of Phalanx begins with, and the sessions, plain or encrypted, that follow it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.waiting import soon

from phalanx.launch.link import ROLE as LAUNCHER
from phalanx.membership.store_protocol import ROLE as STORE
from phalanx.wire import encryption
from phalanx.wire.dial import Line, dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.encryption import EncryptedSession, Exchange
from phalanx.wire.framing import LONGEST_UNPROVEN, PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, LONGEST_PROOF, Challenge, NoProof, PassedOn, Response, WrongKey
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import KeepAlive, listen

KEY, OTHER, NONE = Key(b"the key of the tests", "a test"), Key(b"another key than it", "another test"), Key()
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=3, unacknowledged_s=4)
HERE = ("192.0.2.1", 29500)
CLAIM, VERDICT = b'{"who": "I"}', b"welcome"


class Entrance:
    """A door, served by a thread, with what came of each connection."""

    def __init__(self, key: Key = KEY, most: int = 512) -> None:
        self.admitted: list[Arrival] = []
        self.refused: list[Exception] = []
        self.selector = selectors.DefaultSelector()
        listener = listen("127.0.0.1", 0)
        self.where: tuple[str, int] = listener.getsockname()[:2]
        refuse = lambda peer, why: self.refused.append(why)  # noqa: E731
        self.door = Door(listener, key, STORE, KEEP_ALIVE, self.selector, self._admit, refuse, most)
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Entrance:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(20)
        self.door.close()
        for arrival in self.admitted:
            arrival.sock.close()
        self.selector.close()

    def _serve(self) -> None:
        while not self._over:
            for key, _ in self.selector.select(0.01):
                key.data()
            self.door.tend(time.monotonic())

    def _admit(self, arrival: Arrival) -> None:
        self.admitted.append(arrival)
        arrival.answer(VERDICT)

    def has_refused(self, *why: type[Exception]) -> bool:
        return soon(lambda: [type(each) for each in self.refused] == list(why))

    def dial(self, key: Key = KEY, role: str = STORE, claim: bytes = CLAIM) -> tuple[Line, bytes]:
        return dial(self.where, key, role, claim, patience_s=20.0, keep_alive=KEEP_ALIVE)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.where, timeout=20)


def hear_all(sock: socket.socket) -> bytes:
    """Everything that the door sends until it closes the connection."""
    heard = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            heard += data
    return heard


def shake(role: str = STORE, key: Key = KEY) -> tuple[Challenge, Response]:
    challenge = Challenge(key, role)
    return challenge, Response(key, role, challenge.greeting, HERE, CLAIM)


# -- over a connection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, NONE], ids=["with a key", "without a key"])
def test_both_sides_learn_what_the_other_says_if_they_know_one_key(key: Key) -> None:
    for claim in (b"", CLAIM, b"\xff" * (LONGEST_UNPROVEN - 64)):
        with Entrance(key) as entrance:
            line, verdict = entrance.dial(key, claim=claim)
            sock = line.sock
            assert verdict == VERDICT
            (arrival,) = entrance.admitted
            assert (arrival.proven.claim, bytes(arrival.rest), arrival.peer) == (claim, b"", "127.0.0.1")
            sock.settimeout(20)
            sock.sendall(b"to the door")
            assert soon(lambda at=arrival.sock: bool(at.recv(100, socket.MSG_PEEK)))  # type: ignore[misc]
            arrival.sock.sendall(b"from the door")
            assert (arrival.sock.recv(100), sock.recv(100)) == (b"to the door", b"from the door")
            sock.close()


def test_proof_may_come_byte_by_byte_and_what_follows_is_handed_on() -> None:
    with Entrance() as entrance, entrance.stranger() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        response = Response(KEY, STORE, sock.recv(GREETING_BYTES, socket.MSG_WAITALL), entrance.where, CLAIM)
        for number in response.message[:-1]:
            sock.sendall(bytes([number]))
        sock.sendall(response.message[-1:] + b"first request")
        answer = b""
        while missing := response.missing(answer):
            answer += sock.recv(missing)
        assert response.check(answer) == VERDICT
        assert entrance.admitted[0].rest == b"first request"


def test_door_that_has_run_out_of_files_accepts_again() -> None:
    with Entrance() as entrance:
        listener, failures = entrance.door._acceptor._listener, [OSError(24, os.strerror(24))]

        def accept() -> Any:
            if failures:
                raise failures.pop()
            return listener.accept()

        entrance.door._acceptor._listener = Mock(wraps=listener, accept=accept)
        entrance.dial()[0].close()
        assert failures == []


def echo(sock: socket.socket) -> None:
    """Repeats what it hears, as if that proved the key to the caller."""
    sock.sendall(GREETING + b"x" * 32)
    said = sock.recv(LONGEST_PROOF)
    sock.sendall(said[GREETING_BYTES:])
    sock.recv(1)


def saying(*said: bytes, closes: bool = False) -> Callable[[socket.socket], None]:
    def serve(sock: socket.socket) -> None:
        for words in said:
            sock.sendall(words)
        while not closes and sock.recv(1 << 16):  # until the caller goes
            pass

    return serve


@pytest.mark.parametrize(
    ("serve", "error"),
    [
        (saying(b"SSH-2.0-OpenSSH_9.2\r\n" + b"x" * 100), NoProof),
        (saying(b"phalanx 1\n" + b"x" * 32), NoProof),
        (saying(closes=True), ConnectionResetError),
        (saying(GREETING, closes=True), ConnectionResetError),
        (saying(GREETING + b"x" * 32, b"x" * 32 + struct.pack("!I", LONGEST_UNPROVEN + 1)), NoProof),
        (saying(GREETING + b"x" * 32, b"x" * 32 + frame(b"welcome")), WrongKey),
        (echo, WrongKey),
        (saying(), TimeoutError),
    ],
    ids=["ssh", "another version", "nothing", "half a greeting", "oversized", "guessed", "an echo", "silent"],
)
def test_caller_is_not_taken_in_by_what_listens_there(
    serve: Callable[[socket.socket], None], error: type[Exception]
) -> None:
    with listen("127.0.0.1", 0) as listener:

        def run() -> None:
            with listener.accept()[0] as sock, contextlib.suppress(ConnectionResetError):
                serve(sock)

        thread = threading.Thread(target=run)
        thread.start()
        patience_s = 0.2 if error is TimeoutError else 20.0
        with pytest.raises(error):
            dial(listener.getsockname(), KEY, STORE, CLAIM, patience_s=patience_s, keep_alive=KEEP_ALIVE)
        thread.join(20)


# -- without one -------------------------------------------------------------------------------------------------------


def test_proof_is_worth_nothing_to_another_connection_or_role(monkeypatch: pytest.MonkeyPatch) -> None:
    for same in (False, True):
        if same:  # even if the challenges were the same, a role's proof would not be another's
            monkeypatch.setattr(os, "urandom", lambda count: b"c" * count)
        challenge, response = shake()
        proven = challenge.check(response.message, [HERE])
        assert proven is not None
        challenge_of_other, response_of_other = shake(LAUNCHER if same else STORE)
        with pytest.raises(WrongKey):
            challenge_of_other.check(response.message, [HERE])
        with pytest.raises(WrongKey):
            response_of_other.check(proven.answer(VERDICT))


def test_proof_covers_the_address_and_port_that_were_dialled() -> None:
    challenge, response = shake()
    for here in ([], [("192.0.2.1", 29501)], [("192.0.2.2", 29500), ("::1", 29500)]):
        with pytest.raises(PassedOn, match=r"192\.0\.2\.1 port 29500"):
            challenge.check(response.message, here)
    for here in ([("192.0.2.7", 1), HERE], [("::ffff:192.0.2.1", 29500)]):
        assert challenge.check(response.message, here) is not None


def test_neither_claim_nor_address_nor_verdict_can_be_changed() -> None:
    challenge, response = shake()
    for old, new in ((b"29500", b"29501"), (b'"I"', b'"X"')):
        with pytest.raises(WrongKey):
            challenge.check(response.message.replace(old, new), [("192.0.2.1", 29501), HERE])
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    with pytest.raises(WrongKey):
        response.check(proven.answer(VERDICT).replace(b"welcome", b"refused"))
    with pytest.raises(ValueError, match="at most 4096"):
        Response(KEY, STORE, challenge.greeting, HERE, b"x" * (LONGEST_UNPROVEN + 1))


def test_frames_come_out_as_they_went_in_wherever_the_stream_is_cut() -> None:
    messages = [b"", b"a", b"abcdef", b"x" * 40]
    stream = b"".join(frame(message[:3], message[3:]) for message in messages)
    ends = list(itertools.accumulate(PREFIX_BYTES + len(message) for message in messages))
    for cut in range(len(stream) + 1):
        whole, at = [], 0
        while (end := end_of_frame(stream[:cut], at)) is not None and end <= cut:
            whole.append(stream[at + PREFIX_BYTES : end])
            at = end
        assert whole == messages[: sum(end <= cut for end in ends)]
    assert end_of_frame(frame(b"abc"), longest=3) == 7
    for limits in ({"longest": 2}, {"shortest": 4}):
        with pytest.raises(Malformed, match="a message of 3 bytes"):
            end_of_frame(frame(b"abc"), **limits)
    with pytest.raises(ValueError, match="a message of 3 bytes is too long; at most 2 bytes are taken"):
        frame(b"ab", b"c", longest=2)


# -- sessions ----------------------------------------------------------------------------------------------------------

CLEAR = 5  # bytes at the beginning of a message that are not encrypted


@dataclass
class Kind:
    """How two ends of a session are made, the caller's first; how a message is sent; what comes of what is received."""

    make: Callable[[], tuple[Any, Any]]
    send: Callable[[Any, bytes], bytes]
    take: Callable[[Any, bytes], bytes]


def plain() -> tuple[Session, Session]:
    challenge, response = shake()
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    return response.session(), proven.session()


def checked(session: Session, data: bytes) -> bytes:
    session.check(bytearray(data + b"the next"), len(data) - TAG_BYTES)
    return data[:-TAG_BYTES]


def encrypted(key: bytes = b"k" * 32) -> tuple[EncryptedSession, EncryptedSession]:
    caller, listener = Exchange(), Exchange()
    return (
        caller.session(Session(key, is_listener=False), listener.public, is_listener=False),
        listener.session(Session(key, is_listener=True), caller.public, is_listener=True),
    )


def sealed(session: EncryptedSession, message: bytes) -> bytes:
    return b"".join(session.sealed([message], CLEAR))


def opened(session: EncryptedSession, data: bytes) -> bytes:
    return session.opened(data[:-TAG_BYTES], data[-TAG_BYTES:], CLEAR)


@pytest.fixture(params=["plain", "encrypted", "with keys that change"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    if request.param == "with keys that change":
        monkeypatch.setattr(encryption, "MESSAGES_PER_KEY", 3)
    return Kind(plain, Session.seal, checked) if request.param == "plain" else Kind(encrypted, sealed, opened)


def test_session_passes_every_message_once_and_in_order(kind: Kind) -> None:
    chance = random.Random(1)
    caller, listener = kind.make()
    for number in range(40):
        message = b"12345" + chance.randbytes(chance.randrange(300) if number else 0)
        sender, receiver = (caller, listener) if chance.random() < 0.6 else (listener, caller)
        data = kind.send(sender, message)
        assert (len(data), data[:CLEAR]) == (len(message) + TAG_BYTES, message[:CLEAR])
        assert kind.take(receiver, data) == message
        with pytest.raises(Malformed):
            kind.take(receiver, data)


def test_session_takes_no_message_that_was_changed(kind: Kind) -> None:
    caller, listener = kind.make()
    data = kind.send(caller, b"12345 and more")
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(Malformed):
            kind.take(listener, bytes(changed))
    assert kind.take(listener, data) == b"12345 and more"


def test_session_takes_neither_its_own_messages_nor_anothers_nor_a_gap(kind: Kind) -> None:
    caller, listener = kind.make()
    first, second = (kind.send(caller, message) for message in (b"12345 first", b"12345 second"))
    for receiver, data in ((caller, first), (kind.make()[1], first), (listener, second)):
        with pytest.raises(Malformed):
            kind.take(receiver, data)
    assert kind.take(listener, first) == b"12345 first"
    assert kind.take(listener, second) == b"12345 second"


def test_encrypted_message_in_several_places_is_the_same_message() -> None:
    caller, listener = encrypted()
    head, tail = b"12345", bytearray(b"the rest of it")
    for first in (head, head + b"more"):
        data = b"".join(caller.sealed([first, memoryview(tail)], CLEAR))
        assert opened(listener, data) == first + tail
    data = b"".join(caller.sealed([head, memoryview(tail)], CLEAR))
    place = bytearray(data[CLEAR:-TAG_BYTES])
    listener.open_in_place(data[-TAG_BYTES:], head, memoryview(place))
    assert place == tail


def test_same_message_never_looks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "MESSAGES_PER_KEY", 3)
    seen = [sealed(side, b"12345" + bytes(40))[CLEAR:] for side in [*encrypted(), *encrypted()] for _ in range(10)]
    assert len({data[:40] for data in seen}) == len({data[40:] for data in seen}) == 40


def test_encrypted_ends_need_the_same_key_and_each_others_public_keys() -> None:
    caller, listener, stranger = Exchange(), Exchange(), Exchange()
    right, other = b"k" * 32, b"l" * 32
    for of_caller, of_listener, key, agree in (
        (caller.public, listener.public, right, True),
        (caller.public, listener.public, other, False),
        (caller.public, stranger.public, right, False),
        (stranger.public, listener.public, right, False),
    ):
        one = caller.session(Session(right, is_listener=False), of_listener, is_listener=False)
        two = listener.session(Session(key, is_listener=True), of_caller, is_listener=True)
        with contextlib.nullcontext() if agree else pytest.raises(Malformed):
            assert opened(two, sealed(one, b"12345 secret")) == b"12345 secret"
    for theirs in (None, 5, "", "xyz", "00" * 31, "00" * 32, "01" + "00" * 31):
        with pytest.raises(Malformed):
            Exchange().session(Session(right, is_listener=True), theirs, is_listener=True)
