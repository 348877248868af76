"""The handshake that every connection of Phalanx begins with, for each role that speaks it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.waiting import soon

from phalanx.launch.relay.channel import ROLE as LAUNCHER
from phalanx.store.claim import ROLE as STORE
from phalanx.wire import door as doors
from phalanx.wire.dial import Line, dial
from phalanx.wire.door import Arrival, Displaced, Door, Silent
from phalanx.wire.framing import LONGEST_UNPROVEN, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import (
    GREETING,
    GREETING_BYTES,
    LONGEST_PROOF,
    Challenge,
    NoProof,
    PassedOn,
    Proven,
    Response,
    WrongKey,
)
from phalanx.wire.sockets import KeepAlive, listen

KEY = Key(b"the key of the tests", "a test")
OTHER = Key(b"another key than it", "another test")
NONE = Key()
KEEP_ALIVE = KeepAlive(idle_s=1, interval_s=1, probes=3, unacknowledged_s=4)
HERE = ("192.0.2.1", 29500)
CLAIM, VERDICT = b'{"who": "I"}', b"welcome"

roles = pytest.mark.parametrize("role", [STORE, LAUNCHER])


def other(role: str) -> str:
    return STORE if role == LAUNCHER else LAUNCHER


class Entrance:
    """A door, served by a thread, with what came of each connection."""

    def __init__(self, role: str, key: Key = KEY, most: int = 512) -> None:
        self.admitted: list[Arrival] = []
        self.refused: list[Exception] = []
        self.selector = selectors.DefaultSelector()
        listener = listen("127.0.0.1", 0)
        self.where: tuple[str, int] = listener.getsockname()[:2]
        self.door = Door(
            listener,
            key,
            role,
            KEEP_ALIVE,
            self.selector,
            self._admit,
            lambda peer, why: self.refused.append(why),
            most,
        )
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

    def dial(self, role: str, key: Key, claim: bytes = CLAIM) -> tuple[Line, bytes]:
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


def shake(role: str, key: Key = KEY) -> tuple[Challenge, Response]:
    challenge = Challenge(key, role)
    return challenge, Response(key, role, challenge.greeting, HERE, CLAIM)


# -- over a connection ---------------------------------------------------------------------------------


@roles
@pytest.mark.parametrize("key", [KEY, NONE], ids=["with a key", "without a key"])
@pytest.mark.parametrize("claim", [b"", CLAIM, b"\xff" * (LONGEST_UNPROVEN - 64)], ids=["empty", "short", "longest"])
def test_both_sides_learn_what_the_other_says_if_they_know_one_key(role: str, key: Key, claim: bytes) -> None:
    with Entrance(role, key) as entrance:
        line, verdict = entrance.dial(role, key, claim)
        sock = line.sock
        assert verdict == VERDICT
        (arrival,) = entrance.admitted
        assert (arrival.proven.claim, bytes(arrival.rest), arrival.peer) == (claim, b"", "127.0.0.1")
        sock.settimeout(20)
        sock.sendall(b"to the door")
        assert soon(lambda: bool(arrival.sock.recv(100, socket.MSG_PEEK)))
        arrival.sock.sendall(b"from the door")
        assert (arrival.sock.recv(100), sock.recv(100)) == (b"to the door", b"from the door")
        sock.close()


@roles
@pytest.mark.parametrize(("theirs", "ours"), [(KEY, OTHER), (KEY, NONE), (NONE, KEY)], ids=["other", "none", "one"])
def test_a_wrong_key_is_known_as_such_on_both_sides(role: str, theirs: Key, ours: Key) -> None:
    with Entrance(role, theirs) as entrance:
        with pytest.raises(WrongKey):
            entrance.dial(role, ours)
        assert soon(lambda: [type(why) for why in entrance.refused] == [WrongKey])
        assert entrance.admitted == []


@roles
def test_what_proves_the_key_for_one_role_is_not_let_in_as_another(role: str) -> None:
    with Entrance(role) as entrance:
        with pytest.raises(WrongKey):
            entrance.dial(other(role), KEY)
        assert soon(lambda: [type(why) for why in entrance.refused] == [WrongKey])
        assert entrance.admitted == []


@roles
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 200,
        b"phalanx 1\n" + b"x" * 200,
        GREETING + b"x" * 64 + struct.pack("!I", LONGEST_UNPROVEN + 1),
        GREETING + b"x" * 64 + b"\xff" * 4 + b"x" * (1 << 20),
    ],
    ids=["http", "zeros", "another version", "a byte too long", "oversized"],
)
def test_what_is_no_proof_is_sent_away_unread(role: str, said: bytes) -> None:
    with Entrance(role) as entrance:
        sock = entrance.stranger()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be sent away before it has said all
            sock.sendall(said)
        assert len(hear_all(sock)) <= GREETING_BYTES
        assert soon(lambda: [type(why) for why in entrance.refused] == [NoProof])


@roles
def test_a_proof_that_is_cut_off_admits_nobody(role: str) -> None:
    with Entrance(role) as entrance:
        for kept in (0, 1, len(GREETING), GREETING_BYTES, GREETING_BYTES + 32, -1):
            with entrance.stranger() as sock:
                greeting = sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
                sock.sendall(Response(KEY, role, greeting, entrance.where, CLAIM).message[:kept])
        entrance.dial(role, KEY)[0].close()
        assert len(entrance.admitted) == 1
        assert entrance.refused == []  # they have gone by themselves


@roles
def test_a_proof_that_comes_byte_by_byte_is_as_good(role: str) -> None:
    with Entrance(role) as entrance, entrance.stranger() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        response = Response(KEY, role, sock.recv(GREETING_BYTES, socket.MSG_WAITALL), entrance.where, CLAIM)
        for number in response.message:
            sock.sendall(bytes([number]))
        answer = b""
        while missing := response.missing(answer):
            answer += sock.recv(missing)
        assert response.check(answer) == VERDICT


@roles
def test_what_follows_the_proof_at_once_is_handed_on(role: str) -> None:
    with Entrance(role) as entrance, entrance.stranger() as sock:
        response = Response(KEY, role, sock.recv(GREETING_BYTES, socket.MSG_WAITALL), entrance.where, CLAIM)
        sock.sendall(response.message + b"first request")
        assert soon(lambda: bool(entrance.admitted))
        assert entrance.admitted[0].rest == b"first request"


@roles
def test_a_silent_caller_is_sent_away_and_holds_up_nobody(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "PATIENCE_S", 0.5)
    with Entrance(role) as entrance:
        silent = [entrance.stranger() for _ in range(3)]
        silent[1].sendall(GREETING)
        greeted = [sock.recv(len(GREETING), socket.MSG_WAITALL) for sock in silent]
        monkeypatch.setattr(doors, "PATIENCE_S", 60.0)  # for those that come now, which a busy machine may hold up
        for _ in range(3):
            entrance.dial(role, KEY)[0].close()
        assert greeted == [GREETING] * 3
        for sock in silent:
            hear_all(sock)
        assert soon(lambda: [type(why) for why in entrance.refused] == [Silent] * 3)
        assert len(entrance.admitted) == 3


@roles
def test_of_too_many_strangers_the_oldest_makes_room_and_a_proven_connection_never_does(role: str) -> None:
    with Entrance(role, most=2) as entrance:
        proven, _ = entrance.dial(role, KEY)
        strangers = [entrance.stranger() for _ in range(5)]
        heard = [hear_all(sock) for sock in strangers[:3]]
        assert [data[: len(GREETING)] for data in heard] == [GREETING] * 3
        assert soon(lambda: [type(why) for why in entrance.refused] == [Displaced] * 3)
        for _ in range(3):
            entrance.dial(role, KEY)[0].close()  # whoever knows the key comes in at once
        entrance.admitted[0].sock.sendall(b"still here")
        assert proven.sock.recv(20) == b"still here"
        for sock in strangers[3:]:
            sock.close()
        proven.close()


@roles
def test_a_door_that_has_run_out_of_files_accepts_again(role: str) -> None:
    class Exhausted:
        """A listener that cannot accept once."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener
            self.failures = 1

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if self.failures:
                self.failures -= 1
                raise OSError(24, os.strerror(24))
            return self.listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.listener, name)

    with Entrance(role) as entrance:
        entrance.door._listener = Exhausted(entrance.door._listener)  # type: ignore[assignment]
        entrance.dial(role, KEY)[0].close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as made:
        yield made


def answering(listener: socket.socket, *said: bytes, hold_s: float = 0.0) -> threading.Thread:
    """Something else that listens there, says this, and closes the connection after a while."""

    def serve() -> None:
        with listener.accept()[0] as sock:
            for words in said:
                sock.sendall(words)
                time.sleep(0.01)
            time.sleep(hold_s)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@roles
@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], NoProof),
        ([b"phalanx 1\n" + b"x" * 32], NoProof),
        ([], ConnectionResetError),
        ([GREETING], ConnectionResetError),
        ([GREETING + b"x" * 32, b"x" * 32 + struct.pack("!I", LONGEST_UNPROVEN + 1)], NoProof),
        ([GREETING + b"x" * 32, b"x" * 32 + frame(b"welcome")], WrongKey),
    ],
    ids=["ssh", "another version", "nothing", "half a greeting", "oversized", "guessed"],
)
def test_a_caller_is_not_taken_in_by_what_listens_there(
    role: str, listener: socket.socket, said: list[bytes], error: type[Exception]
) -> None:
    thread = answering(listener, *said, hold_s=0.0 if error is ConnectionResetError else 0.5)
    with pytest.raises(error):
        dial(listener.getsockname(), KEY, role, CLAIM, patience_s=20.0, keep_alive=KEEP_ALIVE)
    thread.join(20)


@roles
def test_a_caller_does_not_wait_for_a_silent_listener(role: str, listener: socket.socket) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        dial(listener.getsockname(), KEY, role, CLAIM, patience_s=0.2, keep_alive=KEEP_ALIVE)
    assert time.monotonic() - started >= 0.2


@roles
def test_a_listener_that_repeats_what_it_hears_proves_nothing(role: str, listener: socket.socket) -> None:
    def echo() -> None:
        with listener.accept()[0] as sock:
            sock.sendall(GREETING + b"x" * 32)
            said = sock.recv(LONGEST_PROOF)
            sock.sendall(said[GREETING_BYTES:])
            sock.recv(1)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(WrongKey):
        dial(listener.getsockname(), KEY, role, CLAIM, patience_s=20.0, keep_alive=KEEP_ALIVE)
    thread.join(20)


# -- without one ---------------------------------------------------------------------------------------


@roles
def test_a_recorded_proof_is_worth_nothing_to_another_connection(role: str) -> None:
    challenge, response = shake(role)
    proven = challenge.check(response.message, [HERE])
    assert isinstance(proven, Proven)
    with pytest.raises(WrongKey):
        Challenge(KEY, role).check(response.message, [HERE])
    with pytest.raises(WrongKey):
        shake(role)[1].check(proven.answer(VERDICT))


@roles
def test_a_proof_for_one_role_is_worth_nothing_to_the_other_with_the_same_challenges(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"c" * count)
    challenge, response = shake(role)
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    challenge_of_other, response_of_other = shake(other(role))
    with pytest.raises(WrongKey):
        challenge_of_other.check(response.message, [HERE])
    with pytest.raises(WrongKey):
        response_of_other.check(proven.answer(VERDICT))


@roles
def test_a_proof_covers_the_address_and_port_that_were_dialled(role: str) -> None:
    challenge, response = shake(role)
    for here in ([], [("192.0.2.1", 29501)], [("192.0.2.2", 29500), ("::1", 29500)]):
        with pytest.raises(PassedOn, match=r"192\.0\.2\.1 port 29500"):
            challenge.check(response.message, here)
    with pytest.raises(WrongKey):  # nor can it be changed on the way
        challenge.check(response.message.replace(b"29500", b"29501"), [("192.0.2.1", 29501)])
    for here in ([("192.0.2.7", 1), HERE], [("::ffff:192.0.2.1", 29500)]):
        assert challenge.check(response.message, here) is not None


@roles
def test_neither_claim_nor_verdict_can_be_changed(role: str) -> None:
    challenge, response = shake(role)
    message = response.message
    with pytest.raises(WrongKey):
        challenge.check(message.replace(b'"I"', b'"X"'), [HERE])
    proven = challenge.check(message, [HERE])
    assert proven is not None
    with pytest.raises(WrongKey):
        response.check(proven.answer(VERDICT).replace(b"welcome", b"refused"))


@roles
def test_the_answer_to_a_wrong_key_shows_the_caller_that_the_keys_differ(role: str) -> None:
    challenge = Challenge(KEY, role)
    response = Response(OTHER, role, challenge.greeting, HERE, CLAIM)
    with pytest.raises(WrongKey) as caught:
        challenge.check(response.message, [HERE])
    assert response.missing(caught.value.answer) == 0
    with pytest.raises(WrongKey):
        response.check(caught.value.answer)


@roles
@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_no_bytes_but_the_proof_itself_are_one(role: str, data: bytes, cut: int) -> None:
    challenge, response = shake(role)
    message = response.message[:cut] + data
    try:
        proven = challenge.check(message, [HERE])
    except (NoProof, WrongKey):
        return  # changed, it is never taken for one that was passed on
    assert proven is None or message.startswith(response.message)


def test_a_claim_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most 4096"):
        Response(KEY, STORE, Challenge(KEY, STORE).greeting, HERE, b"x" * (LONGEST_UNPROVEN + 1))
